"""Variants: every patch applies as it stands, is linted, trains, and does what its head says."""

import dataclasses
import itertools
import json
import math
import re
import statistics
import sys
from pathlib import Path

import pytest
import ranks
import torch
from conftest import (
    ROOT,
    TOY_REWARD,
    compose,
    forked,
    make_model,
    read_metrics,
    read_rows,
    refusal,
    ruff,
    run_main,
    untimed,
    write_rows,
)
from ranks import load_script, run_ranks
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForSequenceClassification,
)

sys.path.insert(0, str(ROOT / "notes" / "variants"))
import variants

grpo = load_script(ROOT / "grpo_llm.py")
NAMES = variants.names()
ON_PPO = [name for name in NAMES if variants.read_patch(name)[1] == "ppo_llm.py"]
# Those that may have more than 60 changed lines in 10 places.
LONG = {"shared_critic": (130, 19), "environment": (90, 10)}
SOME_END = {"temperature": 5.0, "max_response_length": 32}  # about half of the responses: EOS is one of 46 tokens
# A reward that a random model gets signal from, others, and an environment.
TOY = (
    "import zlib\n"
    + TOY_REWARD
    + """

def binary(prompts, responses, answers):
    return [float(bool(r) and r[0] < "5") for r in responses]


def constant(prompts, responses, answers):
    return [1.0] * len(prompts)


def pieces(prompts, responses, answers):
    return [[(i + 1, 0.1) for i, c in enumerate(r) if c < "m"] for r in responses]


def credited(prompts, responses, answers, truncated):
    return {"pieces": pieces(prompts, responses, answers), "cut": [-0.5 * cut for cut in truncated]}


def letters(prompts, responses, answers):
    return {"early": [sum(c < "m" for c in r) / 9 for r in responses], "size": [len(r) / 99 for r in responses]}


# Of four groups of four. The first differs in one score alone, the second in the other alone, the third in both alike,
# the fourth in none.
def tabled(prompts, responses, answers):
    wide = [5.0, 5.0, 5.0, 5.0, 0.0, 90.0, 30.0, 0.0, 0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    narrow = [0.0, 0.0, 1.0, 1.0, 0.1, 0.1, 0.1, 0.1, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    return {"wide": wide, "narrow": narrow}


def digest(prompts, responses, answers):
    return [zlib.crc32(repr(pair).encode()) % 97 / 97 for pair in zip(prompts, responses)]


class Echo:
    def reset(self, **row):
        self.heard = []

    def step(self, text):
        self.heard.append(text)
        return f"{len(self.heard)}-" if len(self.heard) < 4 else None

    def get_reward(self):
        return sum(c < "m" for text in self.heard for c in text) / 10
"""
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, toy_data):
    """Every variant as a whole file, and a small model."""
    folder = tmp_path_factory.mktemp("variants")
    for name in NAMES:
        (folder / f"{name}_llm.py").write_text(variants.patched(name))
    make_model(folder / "model", initializer_range=0.1)
    (folder / "data").symlink_to(toy_data)
    (folder / "toy.py").write_text(TOY)
    sys.modules.pop("toy", None)  # that of another file's folder
    return folder


@pytest.fixture(scope="module")
def variant(folder):
    """variant(name): the patched script as a module."""
    return lambda name: load_script(folder / f"{name}_llm.py")


@pytest.fixture
def train(folder, variant, tmp_path):
    """train(name, **flags): metrics of a run on one process; its folder is tmp_path/NUMBER.

    on: a script to run in place of the variant, with those of the flags that it knows.
    """

    def run(name, on=None, **changes):
        algo = load_script(on) if on else variant(name)
        place = {"output_dir": str(tmp_path), "run_name": str(len(list(tmp_path.iterdir())))}
        flags = flags_of(name, folder, **place | changes)
        known = {field.name for field in dataclasses.fields(algo.Args)}
        run_dir = run_main(algo, {flag: value for flag, value in flags.items() if flag in known or not on})
        return read_metrics(run_dir)

    return run


def train_by_two(script, flags):
    """Metrics of a run of the script on two processes."""
    code, console = forked(script, flags)
    assert code == 0 and "2 process(es)" in console, console
    return read_metrics(Path(flags["output_dir"], flags["run_name"]))


def resumed(train, name, at, **flags):
    """Metrics of a run, after a check that one which ends after the iteration `at` and is resumed has the same."""
    whole = train(name, **flags, run_name="whole")
    train(name, **flags | {"total_iterations": at}, run_name="part")
    assert untimed(train(name, **flags, run_name="part", resume=True)) == untimed(whole)
    return whole


def script_of(name):
    """The script that a variant is made of."""
    return ROOT / variants.read_patch(name)[1]


def flags_of(name, folder, **changes):
    """Flags of a short run of a variant. reward: one of those in TOY, by its name, or what --reward says."""
    flags = {"model": str(folder / "model"), "dataset": str(folder / "data"), "track": "none", "lr": 1e-3}
    flags |= {"reward": "early", "microbatch_tokens": 128, "max_response_length": 12, "minibatch_size": 8}
    flags |= {"total_iterations": 3, "eval_every": 0, "eval_rows": 0, "save_every": 0}
    flags |= {"batch_size": 8, "critic_lr": 1e-3} if name in ON_PPO else {"batch_size": 4, "group_size": 4}
    own = {
        "vc_ppo": {"critic_warmup_iterations": 1},
        "target_kl": {"ppo_epochs": 3, "target_kl": 1e-9},  # after the first step
        "lora_bf16": {"lora_rank": 2, "dtype": "bfloat16"},
        "mask_truncated": SOME_END,  # or no response ends, and nothing trains
        "fp16": {"dtype": "float16"},
        "environment": {"environment": f"{folder}/toy.py:Echo", "reward": "environment", "max_response_length": 24},
    }
    flags |= own.get(name, {}) | changes
    if f"def {flags['reward']}(" in TOY:
        flags["reward"] = f"{folder}/toy.py:{flags['reward']}"
    return flags


# ------------------------------------------------------------------------------------------------- patches as patches


@pytest.mark.parametrize("name", NAMES)
def test_a_patch_is_of_todays_script(name):
    """Made of the very file that is there: whoever edits a script rebases."""
    head, script, blob, _ = variants.read_patch(name)
    assert blob == variants.git("hash-object", ROOT / script).stdout.strip(), "python notes/variants.py rebase"
    assert re.match(r"What: .+\nIdea: .+\nRun:  .+\nMeasured: ", re.sub(r"\n +", " ", head)), head
    assert "(the change" not in head and "(numbers" not in head
    removed, added, hunks = variants.changes(name)
    most_lines, most_hunks = LONG.get(name, (60, 10))
    assert 5 <= removed + added <= most_lines and hunks <= most_hunks


def test_patches_are_small():
    sizes = [variants.changes(name) for name in NAMES]
    assert statistics.median(removed + added for removed, added, _ in sizes) <= 27
    assert statistics.median(hunks for *_, hunks in sizes) <= 5


def test_variants_are_linted_and_formatted(folder):
    files = [folder / f"{name}_llm.py" for name in NAMES]
    ruff("check", *files)
    ruff("format", "--check", *files)


def test_a_changed_script_is_merged_three_ways(monkeypatch, tmp_path):
    """`rebase` and `make` in a small repository: a change elsewhere passes, one of the same place is a person's."""
    monkeypatch.setattr(variants, "ROOT", tmp_path)
    monkeypatch.setattr(variants, "FOLDER", tmp_path)
    monkeypatch.chdir(tmp_path)
    variants.git("init", "-q")

    def commit(text):
        (tmp_path / "grpo_llm.py").write_text(text)
        variants.git("add", "grpo_llm.py")
        variants.git("-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "x")

    text = "".join(f"line_{i} = {i}\n" for i in range(20))
    commit(text)
    variants.make("mine", text.replace("line_10 = 10", "line_10 = -10"), "grpo_llm.py", "What: mine\n\n")
    assert variants.changes("mine") == (1, 1, 1)
    text = text.replace("line_0 = 0", "line_0 = 'first'")
    commit(text.replace("line_9 = 9", "line_9 = 'other'"))
    with pytest.raises(SystemExit, match=r"(?s)mine\.patch does not fit grpo_llm.py.*patch failed: grpo_llm.py:\d+"):
        variants.patched("mine")
    with pytest.raises(SystemExit, match=r"mine_llm\.py has 1 conflict"):  # neighbouring lines are a conflict, too
        variants.rebase()
    assert "<<<<<<<" in (tmp_path / "mine_llm.py").read_text()
    commit(text)
    with pytest.raises(SystemExit) as done:
        variants.rebase()
    assert done.value.code is None
    assert variants.patched("mine") == text.replace("line_10 = 10", "line_10 = -10")
    assert variants.read_patch("mine")[0] == "What: mine\n\n"


# ------------------------------------------------------------------------------------------------------ they train


def trains(path, flags):
    """Two processes: every metric is a number, and the sampler agrees with the training pass."""
    metrics = train_by_two(path, flags | {"run_name": path.stem, "eval_rows": 3})
    assert len(metrics) == 4 and all(torch.tensor(list(m.values())).isfinite().all() for m in metrics)
    trained = [m for m in metrics if "rollout/logprob_diff" in m]
    limit = {"bfloat16": 0.1, "float16": 1e-2}.get(flags.get("dtype"), 1e-5)
    assert len(trained) >= 2 and all(m["rollout/logprob_diff"] < limit for m in trained)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "vllm"])  # that one in test_vllm.py
def test_two_processes_train(name, folder, tmp_path):
    trains(folder / f"{name}_llm.py", flags_of(name, folder, output_dir=tmp_path))


# ------------------------------------------------------------------------------------------ they stack, and are sharded


@pytest.fixture(scope="module")
def stacked():
    return variants.stacked()


def test_which_variants_stack(stacked):
    """All pairs, as chapter 13 has them. Otherwise `python notes/variants.py pairs` prints what belongs there."""
    assert {frozenset(pair) for pair in stacked} >= {
        frozenset((a, b)) for a in NAMES for b in NAMES if a < b and (a in ON_PPO) == (b in ON_PPO)
    }
    table = variants.table_of_pairs(stacked)
    assert (ROOT / "notes" / "13-change-it.md").read_text().count(table) == 1, table


def test_what_stacks_is_a_script(stacked, tmp_path):
    """No name is used that the other change has taken away."""
    for (file, change), (text, conflicts) in stacked.items():
        if not conflicts:
            (tmp_path / f"{file.removesuffix('.py')}_{change}.py").write_text(text)
    assert len(list(tmp_path.iterdir())) > len(NAMES)
    ruff("check", "--select", "F", tmp_path)


# The second change in the file of the first.
RUN_PAIRS = ["cispo replay", "cispo icepop", "dapo shared_prompt", "gspo tool_call", "distill pass_at_k", "sapo cov"]
RUN_PAIRS += ["bypass adaptive_kl", "target_kl anneal", "maxrl mask_truncated", "optimal_baseline environment"]
RUN_PAIRS += ["vc_ppo two_turns", "vc_ppo fp16"]  # of two scripts


@pytest.mark.slow
@pytest.mark.parametrize("pair", RUN_PAIRS)
def test_pairs_train(pair, folder, stacked, tmp_path):
    pair = tuple(pair.split())
    text, conflicts = stacked[pair] if pair in stacked else stacked[pair[::-1]]
    assert conflicts == 0
    path = tmp_path / f"{'_'.join(pair)}.py"
    path.write_text(text)
    known = {field.name for field in dataclasses.fields(load_script(path).Args)}
    flags = flags_of(pair[1], folder) | flags_of(pair[0], folder) | {"output_dir": tmp_path}
    trains(path, {name: value for name, value in flags.items() if name in known})


@pytest.fixture(scope="module")
def sharded(folder):
    """sharded(name): (text of the variant sharded, number of conflicts)"""
    ons = {"ppo_llm.py": ROOT / "ppo_llm_fsdp.py", "grpo_llm.py": compose(folder)}

    def shard(name):
        _, script, _, _ = variants.read_patch(name)
        return variants.merged(ons[script].read_text(), (ROOT / script).read_text(), variants.patched(name))

    return shard


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_can_be_sharded(name, sharded):
    """By a merge, without a conflict; but for one that casts frozen layers, which are sharded there."""
    text, conflicts = sharded(name)
    assert (conflicts > 0) == (name == "lora_bf16")
    if not conflicts:
        compile(text, name, "exec")


# ------------------------------------------------------------------------------------------------- by two as by one


def assert_close(ones, twos, rel, abs=1e-5):
    for one, two in zip(untimed(ones), untimed(twos), strict=True):
        assert two == pytest.approx(one, rel=rel, abs=abs)


@pytest.fixture
def agree(train, folder, tmp_path):
    """agree(script, name, rel, **flags): two processes of the script have the metrics and the completions of one.

    one: the script of the one process (unset: the variant). Returns the metrics.
    """

    def check(script, name, rel, one=None, **flags):
        twos = train_by_two(script, flags_of(name, folder, **flags, output_dir=tmp_path / "two", run_name="run"))
        ones = train(name, on=one, **flags, run_name="one")
        assert_close(ones, twos, rel, max(1e-5, rel / 100))
        for kind in "eval_*", "step_000001.jsonl":
            for path in (tmp_path / "one" / "completions").glob(kind):
                other = tmp_path / "two" / "run" / "completions" / path.name
                for row, same in zip(read_rows(path), read_rows(other), strict=True):
                    batch, batches = row.pop("batch", {}), same.pop("batch", {})  # of the training pass, which rounds
                    assert row == same and batch.keys() == batches.keys()
                    assert all(batches[name] == pytest.approx(batch[name], rel, 1e-4) for name in batch)
        return ones

    return check


# Variant, how far its metrics may be apart, flags.
BY_TWO = [
    ("dapo", 2e-3, {"reward": "binary", "max_draws": 8}),
    ("environment", 2e-3, {"eval_rows": 5, "total_iterations": 2}),
    ("multi_reward", 2e-3, {"reward": "letters", "eval_rows": 1, "eval_every": 1}),
    ("shared_critic", 2e-3, {}),
    ("shared_critic", 2e-3, {"lora_rank": 4}),
    ("bypass", 1e-4, {"old_logprobs": "corrected", "is_level": "sequence", "is_cap": 1.05}),
    ("adaptive_kl", 2e-3, {"kl_reward_coef": 0.5, "kl_target": 1e-4, "kl_horizon": 20.0, "lr": 1e-2}),
    ("top_p", 1e-4, {"top_p": 0.7, "top_k": 9}),
    ("anneal", 1e-4, {"lr_schedule": "cosine"}),
    ("kl_gradient", 1e-4, {"kl_reward_kind": "abs", "kl_loss_coef": 0.1, "kl_loss_kind": "k3+"}),
    # Of one test row the second process has none, and (multi_reward) knows no name of a score from it.
    ("pass_at_k", 1e-5, {"eval_rows": 1, "eval_every": 2, "eval_samples": 3, "total_iterations": 2}),
    ("pass_at_k", 1e-5, {"eval_rows": 5, "eval_every": 2, "eval_samples": 3, "total_iterations": 2}),
]
SHARDED = [(name, 2e-3, {}) for name in ("cispo", "gspo", "dapo", "vc_ppo", "target_kl")]
SHARDED += [("process_reward", 2e-3, {"reward": "pieces"})]
EVALUATED = {"eval_rows": 5, "eval_every": 2}
LONGER = EVALUATED | {"total_iterations": 4}
ENDING = EVALUATED | SOME_END | {"batch_size": 8, "minibatch_size": 16}
BOTH = [(name, 1e-5, LONGER) for name in ("entropy_tokens", "pass_at_k", "one_step_off")]
BOTH += [(name, 1e-5, LONGER) for name in ("sapo", "dppo", "icepop", "cov")]
BOTH += [(name, 1e-5, ENDING | {"reward": "binary"}) for name in ("maxrl", "optimal_baseline")]
BOTH += [
    ("mask_truncated", 1e-5, ENDING | {"entropy_coef": 0.05}),
    ("self_distill", 1e-5, ENDING | {"reward": "binary", "distill_weight": 0.7}),
]
# A sampler that claims other log-probs, of each token by itself: whatever rows are beside it.
OTHERWISE = """
real = generate


def generate(*args):
    return [r._replace(logprobs=[x - 0.002 * (i % 5) for x, i in zip(r.logprobs, r.ids)]) for r in real(*args)]


if __name__ == "__main__":
"""


@pytest.mark.slow
@pytest.mark.parametrize("name, rel, flags", BY_TWO + BOTH)
def test_by_two_as_by_one(name, rel, flags, agree, folder):
    script = folder / f"{name}_llm.py"
    if name == "bypass":
        script = folder / "otherwise.py"
        script.write_text(variants.patched(name).replace('\nif __name__ == "__main__":\n', OTHERWISE))
    _, *metrics = agree(script, name, rel, one=script, **flags)
    if name == "bypass":
        assert all(1.02 < m["rollout/weight_mean"] < 1.05 and m["rollout/ess"] < 0.99999 for m in metrics)
    if flags.items() >= ENDING.items():
        assert all(m["actor/grad_norm"] > 1e-3 and 0 < m["response/truncated_frac"] < 1 for m in metrics)


@pytest.mark.slow
@pytest.mark.parametrize("name, rel, flags", SHARDED + BOTH)
def test_sharded_by_two_as_by_one(name, rel, flags, agree, sharded, folder):
    script = folder / f"{name}_fsdp.py"
    script.write_text(sharded(name)[0])
    agree(script, name, rel, **flags)


# --------------------------------------------------------------------------------------------- switched off, refused

SHORT = {"batch_size": 8, "minibatch_size": 4, "ppo_epochs": 2, "total_iterations": 1}
PAIRS = {"batch_size": 8, "group_size": 2, "max_response_length": 1}  # some of which score alike
NAMED = "part/score eval_part/score eval_part_sampled/score group/zero_std_frac"
# Variant, flags with which it does what its script does, what it logs besides.
SWITCHED_OFF = [
    ("dual_clip", SHORT | {"dual_clip": 1e9}, ""),
    ("value_clip", SHORT | {"value_clip": 1e9}, ""),
    ("target_kl", SHORT | {"target_kl": 1e9}, "actor/steps"),
    ("process_reward", {}, ""),  # a number is a number
    ("anneal", {"lr_schedule": "constant", "warmup_iterations": 2}, ""),
    ("entropy_tokens", {"entropy_share": 1.0}, "actor/entropy_threshold"),
    ("multi_reward", PAIRS | {"scale_advantages": False, "eval_rows": 7}, NAMED),  # of a plain list
    ("self_distill", {"reward": "binary", "distill_weight": 0.0}, "teacher/taught_frac teacher/kl"),
]


@pytest.mark.parametrize("name, off, more", SWITCHED_OFF)
def test_switched_off_it_is_its_script(name, off, more, train):
    """To the bit."""
    plain = untimed(train(name, on=script_of(name), **off))
    for ours, theirs in zip(untimed(train(name, **off)), plain, strict=True):
        assert {metric: ours[metric] for metric in theirs} == theirs
        own = ours.keys() - theirs.keys()
        assert own <= {*more.split()} and all(ours[metric] != 0 for metric in own)


# Variant, flags, how the sentence begins.
REFUSED = [
    ("bypass", {"is_cap": 0.5}, "--is_cap must be at least 1, but is 0.5"),
    ("dual_clip", {"dual_clip": 0.9}, "--dual_clip must be at least 1, but is 0.9"),
    ("one_step_off", {"is_cap": 0.5}, "--is-cap must be at least 1, but is 0.5"),
    ("pass_at_k", {"eval_samples": 0}, "--eval_samples must be at least 1, but is 0"),
    ("entropy_tokens", {"entropy_share": 0.0}, "--entropy_share must be above 0 and at most 1, but is 0.0"),
    ("entropy_tokens", {"entropy_share": 1.5}, "--entropy_share must be above 0 and at most 1, but is 1.5"),
    ("top_p", {"top_p": 0.0}, "--top-p must be above 0 and at most 1, but is 0.0"),
    ("top_p", {"top_p": 90.0}, "--top-p must be above 0 and at most 1, but is 90.0"),
    ("environment", {"environment": "file.py:Class"}, "file.py:Class is neither gsm8k nor path/to/file.py:name"),
]
OF_NOTHING = "--kl-reward-coef, --kl-target and --kl-horizon must be above 0: a coefficient of 0 would stay 0"
REFUSED += [("adaptive_kl", {flag: 0.0}, OF_NOTHING) for flag in ("kl_reward_coef", "kl_target", "kl_horizon")]
UNFIT = "--reward-weights must be a finite number for each of ['early', 'size']"
for weights in (1.0,), (math.nan, 1.0), (0.0, 0.0):
    REFUSED.append(("multi_reward", {"reward": "letters", "reward_weights": weights}, UNFIT))


@pytest.mark.parametrize("name, flags, sentence", REFUSED)
def test_a_flag_out_of_its_range_is_refused(name, flags, sentence, train):
    assert refusal(lambda: train(name, **flags)).startswith(f"error: {sentence}")


# ---------------------------------------------------------------------------------------- what each one says it does


def example(seed=0):
    stream = torch.Generator().manual_seed(seed)
    old = -torch.rand(4, 6, generator=stream, dtype=torch.float64)
    new = (old + 0.5 * torch.randn(4, 6, generator=stream, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(4, 1, generator=stream, dtype=torch.float64).expand(4, 6)
    mask = torch.arange(6) < torch.tensor([6, 3, 5, 1])[:, None]
    return new, old, advantages, mask


def losses_of(algo, new, old, advantages, **flags):
    """(losses, clipped) by the policy_loss of a script or variant, over all tokens."""
    return algo.policy_loss(new, old, advantages, torch.ones_like(new, dtype=torch.bool), algo.Args(model="m", **flags))


def test_gspo_has_the_papers_gradient(variant):
    """2507.18071, eq. 5 and 7, written out response by response."""
    algo, (new, old, advantages, mask) = variant("gspo"), example(seed=2)
    args = algo.Args(model="m", clip_low=0.02, clip_high=0.03)
    losses, clipped = algo.policy_loss(new, old, advantages, mask, args)
    loss = algo.aggregate(losses, mask, "seq-mean-token-mean", int(mask.sum()), 4, 6)
    (found,) = torch.autograd.grad(loss, new)
    objective, outside = 0, []
    for b in range(4):
        ratio = ((new - old)[b][mask[b]].sum() / mask[b].sum()).exp()
        a = advantages[b, 0]
        bounded = ratio.clamp(0.98, 1.03) * a
        objective = objective + torch.minimum(ratio * a, bounded) / 4
        outside.append(bool(ratio * a > bounded))
    (expected,) = torch.autograd.grad(-objective, new)
    assert torch.allclose(found, expected, atol=1e-12) and expected.abs().max() > 0.01
    assert clipped.any(1).tolist() == outside and 0 < sum(outside) < 4


def test_plain_pg_is_the_policy_gradient(variant):
    new, old, advantages, _ = example()
    losses, clipped = losses_of(variant("plain_pg"), new, old, advantages)
    (found,) = torch.autograd.grad(losses.sum(), new)
    assert torch.equal(found, -advantages) and not clipped.any()


def test_vc_ppo_has_two_lambdas(train, variant, spy):
    calls = spy(variant("vc_ppo"), "gae")
    metrics = train("vc_ppo", total_iterations=2, kl_reward_coef=0.0)
    assert [args[4] for args, _ in calls] == [0.95, 1.0] * 2
    assert "actor/loss" not in metrics[1] and "actor/loss" in metrics[2]  # pretraining of the values, then both
    (rewards, _, mask, *_), (_, returns) = calls[1]
    totals = torch.where(mask, rewards, 0).sum(1, keepdim=True)
    assert torch.allclose(returns[mask], totals.expand_as(mask)[mask], atol=1e-5)  # Monte Carlo: the score everywhere


def test_credit_goes_to_the_token_that_ends_the_piece(variant):
    credit = variant("process_reward").credit
    texts = ["ab", "abc", "abc", "abcde", "abcde"]  # the third token is half a character or nothing, the last the EOS
    assert credit(texts, [(2, 1.0), (3, 2.0), (4, 0.5), (5, 0.25)]) == [1.0, 2.0, 0.0, 0.75, 0.0]
    assert credit(texts, [(1, 1.0), (0, 2.0)]) == [3.0, 0, 0, 0, 0] and credit(texts, []) == [0.0] * 5
    assert credit(["a\ufffd", "a\ufffd", "aé"], [(2, 1.0)]) == [0, 0, 1.0]  # a character of three tokens
    assert credit(texts, 3) == [0, 0, 0, 0, 3.0]  # a number is the last token's, as ever
    assert "a piece that ends at 6, but the text has 5 characters" in refusal(lambda: credit(texts, [(6, 1.0)]))


def test_process_rewards_stand_at_their_tokens(variant, train, folder, spy):
    algo = variant("process_reward")
    calls, batches = spy(algo, "gae"), spy(algo, "to_batch")
    metrics = train("process_reward", reward="credited", total_iterations=1, kl_reward_coef=0.0)
    (((rewards, _, mask, *_), _),) = calls
    (((_, responses, _), _),) = batches
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for row, valid, response in zip(rewards, mask, responses):
        expected = [0.1 * (i > 2 and tokenizer.decode([i]) < "m") for i in response.ids]
        expected[-1] -= 0.5 * response.truncated
        assert torch.allclose(row[valid], torch.tensor(expected), atol=1e-6)
    m = metrics[1]
    assert m["reward/total_mean"] == pytest.approx(m["reward/mean"], abs=1e-6)
    assert m["part/pieces"] + m["part/cut"] == pytest.approx(m["reward/mean"], abs=1e-6)
    assert m["part/cut"] == -0.5 * m["response/truncated_frac"] < 0 < m["part/pieces"]


def test_dapo_trains_on_mixed_groups_only(variant, train, spy):
    batches = spy(variant("dapo"), "group_advantages", lambda scores, *_: scores.clone())
    trained = spy(variant("dapo"), "to_batch", lambda rows, responses, _: [len(r.ids) for r in responses])
    metrics = train("dapo", reward="binary", max_draws=8, overlong_buffer=32, **SOME_END)
    for scores, lengths, m in zip(batches, trained, metrics[1:], strict=True):
        assert len(scores) == 16 == 4 * m["group/trained"] and 0 < m["reward/sampled_mean"] < 1
        # Filtered before the punishment for length: without it every group has both scores.
        plain = (scores + torch.tensor(lengths) / 32).view(4, 4)
        assert torch.allclose(plain, plain.round()) and plain.round().unique().tolist() == [0, 1]
        assert (plain.amin(1) < 0.5).all() and (plain.amax(1) > 0.5).all() and len({*lengths}) > 1
    assert max(m["group/generated"] for m in metrics[1:]) > 4 and max(m["group/zero_std_frac"] for m in metrics[1:]) > 0


def test_dapo_without_a_group_takes_no_step(train, spy):
    steps = spy(torch.optim.AdamW, "step")
    # With a punishment that differs, which the filter does not see, and a KL loss that would train.
    flags = {"overlong_buffer": 12, "kl_loss_coef": 0.1, "max_draws": 2}
    metrics = train("dapo", reward="constant", **flags)
    assert not steps and [m["step"] for m in metrics] == [0, 1, 2, 3]
    for m in metrics[1:]:
        assert m["group/trained"] == 0 and m["group/generated"] == 8 and m["group/zero_std_frac"] == 1
        assert "actor/loss" not in m and "actor/grad_norm" not in m and m["reward/sampled_mean"] == 1


def test_dapos_length_punishment(variant, train, spy):
    groups = spy(variant("dapo"), "group_advantages", lambda scores, *_: scores.clone())
    batches = spy(variant("dapo"), "to_batch")
    for overlong_buffer in 0, 25:
        train("dapo", overlong_buffer=overlong_buffer, max_response_length=40, total_iterations=1)
    off, on = groups
    lengths, same = (torch.tensor([len(x.ids) for x in responses]) for (_, responses, _), _ in batches)
    assert torch.equal(lengths, same) and lengths.max() == 40 and len(lengths.unique()) >= 3
    assert torch.allclose(off - on, ((lengths - 15) / 25).clamp(0, 1), atol=1e-6)  # eq. 13
    assert off.min() >= 0  # nothing is subtracted where it is off


def test_two_turns_train_on_what_was_sampled(variant, train, folder, spy):
    algo = variant("two_turns")
    batches = spy(algo, "to_batch")
    metrics = train("two_turns", reward="binary", max_response_length=16, total_iterations=2)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    turn = tokenizer("\nThat is wrong, try again.\n", add_special_tokens=False)["input_ids"]
    (rows, responses, _), (_, mask, *_) = batches[0]
    two = 0
    for row, response, valid in zip(rows, responses, mask):
        inserted = [i for i, x in enumerate(response.logprobs) if x == algo.NOT_SAMPLED]
        before = len(row["input_ids"]) - 1
        trained = [i for i in range(len(response.ids)) if i not in inserted]
        assert valid.nonzero().flatten().tolist() == [before + i for i in trained]
        if inserted:
            two += 1
            assert [response.ids[i] for i in inserted] == turn + row["input_ids"] and 1 <= inserted[0] <= 8
        first = tokenizer.decode(response.ids[: inserted[0] if inserted else None], skip_special_tokens=True)
        assert bool(inserted) == (not first or first[0] >= "5")  # asked again if wrong
    assert 0 < two < len(rows) and metrics[1]["response/two_turns_frac"] == two / len(rows)
    assert all(m["rollout/logprob_diff"] < 1e-5 for m in metrics[1:])


def test_replay_asks_again_and_resumes(train, variant, spy):
    """Prompts that no response of their group answered, and at most half a batch of them."""
    scored = spy(variant("replay"), "compute_scores")
    flags = {"reward": "binary", "total_iterations": 6, "save_every": 3, "batch_size": 8, "group_size": 2}
    whole = resumed(train, "replay", 3, **flags)
    failed = set()
    for ((_, _, rows, _), results), m in zip(scored, whole[1:]):
        asked = [row["prompts"] for row in rows[::2]]
        scores = [result["score"] for result in results]
        again = min(4, len(failed))
        assert m["group/replayed"] == again and failed.issuperset(asked[:again])
        failed = {prompt for prompt, *pair in zip(asked, scores[::2], scores[1::2]) if max(pair) == 0}
        assert m["group/failed"] == len(failed)
    assert max(m["group/failed"] for m in whole[1:-1]) > 4


def test_distillation_rewards_each_token_with_the_teachers_surprise(variant, train, folder, spy):
    algo = variant("distill")
    calls, used = spy(algo, "kl_penalty"), spy(algo, "policy_loss")
    teacher = make_model(folder / "teacher", seed=7, hidden_size=48, num_attention_heads=4, head_dim=12)
    metrics = train("distill", ref_model=teacher, total_iterations=12, lr=1e-2)
    (student, other, kind), kl = calls[0]
    assert kind == "k1" and torch.equal(kl, student - other) and kl.abs().max() > 0.1
    (_, _, advantages, *_), _ = used[0]
    assert set(advantages.flatten().tolist()) <= set((-kl).flatten().tolist())
    assert metrics[-1]["kl/mean"] < 0.8 * metrics[1]["kl/mean"]  # it learns from its own samples
    make_model(folder / "stranger", pad=None)
    path = folder / "stranger" / "tokenizer.json"
    path.write_text(path.read_text().replace('"q"', '"Q"'))
    said = refusal(lambda: train("distill", ref_model=str(folder / "stranger")))
    assert "stranger has another tokenizer than --model" in said


def test_calculate(variant):
    calculate = variant("tool_call").calculate
    right = {"12*7": "84", "1/3": "0.333333", "+5": "5", "-(3+4)*2": "-14", " 3 + 4 ": "7", "1.5*2": "3", "6/-3": "-2"}
    assert {text: calculate(text) for text in right} == right
    wrong = "2**3", "9**9**9", "1//2", "2(3)", "...", "5..", "()", "", "1e9", "9" * 65, "2/0", "007", "1_0", "abs(1)"
    wrong += "__import__('os')", "1 if 1 else 2", "[1]", "1,2", "1<2", "~1", "٣+٤", "(" * 40 + "1"
    assert [calculate(text) for text in wrong] == ["error"] * len(wrong)
    assert calculate("*".join(["999999999"] * 6)).startswith("9999")


@pytest.fixture
def scripted(variant, folder, monkeypatch):
    """scripted(name, policy): turns of the variant are policy(all text so far) from now on, up to a stop id."""

    def use(name, policy, model="model"):
        algo, tokenizer = variant(name), AutoTokenizer.from_pretrained(folder / model)

        def generate(model, prompts, uniforms, eos_ids, temperature):
            responses = []
            for prompt in prompts:
                ids = tokenizer(policy(tokenizer.decode(prompt)), add_special_tokens=False)["input_ids"]
                ids = [*ids, tokenizer.eos_token_id][: uniforms.shape[1]]
                stop = next((i for i, token in enumerate(ids) if token in eos_ids), len(ids) - 1)
                responses.append(algo.Response(ids[: stop + 1], [0.0] * (stop + 1), ids[stop] not in eos_ids))
            return responses

        monkeypatch.setattr(algo, "generate", generate)
        monkeypatch.setattr(algo, "fail", lambda sentence: None)  # the model would not sample what is scripted

    return use


def test_a_tools_results_are_inserted(variant, train, folder, scripted, tmp_path, spy):
    model = make_model(folder / "tool_model")
    path = folder / "tool_model" / "tokenizer.json"
    content = json.loads(path.read_text())
    for old, new in (("q", "<"), ("w", ">"), ("v", "*"), ("z", "/")):  # characters that calls need
        content["model"]["vocab"][new] = content["model"]["vocab"].pop(old)
    path.write_text(json.dumps(content))
    tokenizer, algo = AutoTokenizer.from_pretrained(model), variant("tool_call")
    call, question = "<calc>12*7</calc>", "the sum of 3 and 4?"
    answers = [
        f"a{call}84b",
        f"{call}84{call}84{call}84{call}99",  # the fourth gets no answer
        "no <b> call",
        "x<calc>7**7</calc>error.",
    ]
    data = write_rows(tmp_path / "one.jsonl", [{"question": question, "answer": "#### 1"}])
    batches = spy(algo, "to_batch")

    def answered(answer, max_response_length):
        scripted("tool_call", lambda text: f"{question}{answer}".removeprefix(text), "tool_model")
        flags = {"model": model, "dataset": data, "total_iterations": 1, "batch_size": 2}
        metrics = train("tool_call", **flags, max_response_length=max_response_length)
        (_, (response, *_), _), _ = batches[-1]
        return metrics[1], response, [x == algo.NOT_SAMPLED for x in response.logprobs]

    for answer in answers:
        m, response, inserted = answered(answer, 80)
        assert tokenizer.decode(response.ids[:-1]) == answer and not response.truncated
        parts = re.split(r"(?<=</calc>)(84|error)", answer) if "</calc>" in answer else [answer]
        assert inserted == [*(i % 2 == 1 for i, part in enumerate(parts) for _ in part), False]
        assert m["response/calls_mean"] == len(parts) // 2
    _, response, inserted = answered(answers[1], 30)
    assert response.truncated and inserted.count(False) == 30  # sampled tokens count, inserted ones do not


def test_shared_prompts_want_full_attention(variant, tmp_path):
    """In a hybrid, or within a window, siblings would read each other without a word."""
    families = load_script(ROOT / "benchmarks" / "campaigns" / "families.py")
    for name in "lfm2", "mistral":
        families.make_model(name, tmp_path / name)
        model = variant("shared_prompt").load_model(str(tmp_path / name), AutoModelForCausalLM)
        assert "needs full attention in every layer" in refusal(lambda: variant("shared_prompt").Policy(model, 1.0))


def test_shared_prompts_give_the_same_gradients(variant, train, folder):
    stream = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 40, (n,), generator=stream).tolist() for n in (7, 7, 1, 12)]
    prompts[1][:6] = prompts[0][:6]  # equal but for the last token
    rows, responses = [], []
    for prompt in prompts:
        for length in (1, 5, 9, 3):
            rows.append({"input_ids": prompt})
            ids = torch.randint(3, 40, (length,), generator=stream).tolist()
            responses.append(grpo.Response(ids, [0.0] * length, False))
    tokens, mask, _, _ = grpo.to_batch(rows, responses, "cpu")
    found = []
    for algo in (grpo, variant("shared_prompt")):
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        policy = algo.Policy(model, 0.9)
        widths = []
        model.base_model.register_forward_pre_hook(lambda _, args, w=widths: w.extend(x.shape for x in args))
        logprobs, entropy = policy(tokens, mask)
        weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(1))
        ((logprobs * weights).sum() + entropy.sum()).backward()
        found.append((logprobs.detach(), entropy.detach(), *(p.grad for p in model.parameters()), widths[0]))
    *ours, narrow = found[1]
    *theirs, wide = found[0]
    assert wide == (16, 21) and narrow == (4, 12 + 14)  # the last token of a response is no state
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-6 * max(1, b.abs().max())
    for m in train("shared_prompt", lr=0.0)[1:]:
        assert m["rollout/logprob_diff"] < 1e-5 and m["actor/ratio_max"] == m["actor/ratio_mean"] == 1


def test_a_judge_reads_the_rubric(folder, monkeypatch):
    import judge

    monkeypatch.setenv("JUDGE_MODEL", str(folder / "model"))
    monkeypatch.setenv("JUDGE_RUBRIC", "q {prompt} r {response} a {answer} {} {0}?")  # braces are braces
    monkeypatch.setenv("JUDGE_BATCH", "2")
    judge.load.cache_clear()
    found = judge.judge(["what", "is", "x"], ["one", "two {answer}", "y"], ["1", "2", 3])
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    yes = tokenizer(" Yes", add_special_tokens=False)["input_ids"]
    for score, text in zip(found, ("q what r one a 1", "q is r two {answer} a 2", "q x r y a 3"), strict=True):
        asked = tokenizer(f"{text} {{}} {{0}}?")["input_ids"]
        logprobs = model(torch.tensor([asked + yes])).logits[0, len(asked) - 1 : -1].log_softmax(-1)
        assert score == pytest.approx(logprobs[range(len(yes)), yes].sum().item(), abs=1e-4)
    monkeypatch.setenv("JUDGE_RUBRIC", "the same whatever was said")
    scores = torch.tensor(judge.judge(["a"] * 8, list("bcdefghi"), ["1"] * 8))
    assert grpo.group_advantages(scores, 4, "grpo").tolist() == [0] * 8
    judge.load.cache_clear()


def test_length_control(monkeypatch):
    import length_control

    monkeypatch.setenv("LENGTH_TARGET", "10")
    responses = ["#### 5" + " " * 4, "#### 5", "#### 4" + " " * 4, "#### 5" + " " * 94]
    assert length_control.length_control(responses, ["5"] * 4) == pytest.approx([1, 0.8, 0, 0.5])
    monkeypatch.setenv("LENGTH_TARGET", "0")
    with pytest.raises(ValueError, match="LENGTH_TARGET must be at least 1"):
        length_control.length_control(responses, ["5"] * 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["judge", "length_control", "cispo"])
def test_files_of_their_own_run_on_two_processes(name, folder, tmp_path):
    """With their defaults: the embedded model is the judge."""
    place = ROOT / "notes" / "variants" / f"{name}.py"
    script = place if name == "cispo" else ROOT / "grpo_llm.py"
    reward = {} if name == "cispo" else {"reward": f"{place}:{name}"}
    metrics = train_by_two(script, flags_of("replay", folder, output_dir=tmp_path, run_name="run", **reward))
    assert len(metrics) == 4 and metrics[1]["reward/std"] > 0
    assert (tmp_path / "run" / script.name).exists()


def test_the_list_of_variants_is_complete():
    """Chapter 13 has each patch with its changed lines, by groups as `list` has them, and names each file."""
    chapter = (ROOT / "notes" / "13-change-it.md").read_text()
    rows = re.findall(r"(?m)^\| `(\w+)` \| (\d+) \|", chapter)
    assert {name: int(lines) for name, lines in rows} == {name: sum(variants.changes(name)[:2]) for name in NAMES}
    groups = [group for group, names in variants.GROUPS.items() if not {*NAMES}.isdisjoint(names.split())]
    assert re.findall(r"(?m)^\| \*\*(.+)\*\* \| \| \| \|$", chapter) == groups
    for path in sorted((ROOT / "notes" / "variants").iterdir()):
        assert path.suffix in (".patch", ".py") or path.name == "__pycache__"
        assert path.name == "__pycache__" or f"`{path.stem}`" in chapter, path


def told_otherwise(algo, monkeypatch, *gaps):
    """From now on the sampler claims log-probs that are lower by so much: a number a token, of responses in turn."""
    real = algo.generate

    def generate(*args):
        turns = itertools.cycle(gaps)
        return [r._replace(logprobs=[x - g for x, g in zip(r.logprobs, next(turns))]) for r in real(*args)]

    monkeypatch.setattr(algo, "generate", generate)


def test_bypass_weights(variant):
    weigh = variant("bypass").rollout_weights
    old = torch.tensor([[0.5, -0.5, 1.5, torch.nan], [-3.0, 0.1, 0.0, 50.0]], requires_grad=True)
    mask = torch.tensor([[True, True, True, False], [True] * 4])
    token = weigh(old, torch.zeros(2, 4), mask, "token", 2.0)
    assert torch.allclose(token, torch.tensor([[0.5, -0.5, 0.6931472, -torch.inf], [-3, 0.1, 0, 0.6931472]]).exp())
    assert not token.requires_grad
    sequence = weigh(old, torch.zeros(2, 4), mask, "sequence", 1e30)
    assert torch.allclose(sequence, torch.tensor([[1.5, 1.5, 1.5, -torch.inf], [20.0] * 4]).exp())  # clamped at 20


def test_bypass_corrects_for_the_sampler(variant, train, monkeypatch, spy):
    flags = {"total_iterations": 1, "temperature": 0.9, "kl_reward_coef": 0.0}
    plain = untimed(train("bypass", on=script_of("bypass"), **flags))[1]
    algo = variant("bypass")
    told_otherwise(algo, monkeypatch, [0.008] * 12, [0] * 12)
    passes = spy(algo, "forward_all", lambda module, *_: type(module))
    rollout = train("bypass", **flags)[1]
    assert algo.Policy not in passes  # a pass less
    token = train("bypass", old_logprobs="corrected", **flags)[1]
    assert passes.count(algo.Policy) == 1
    sequence = train("bypass", old_logprobs="corrected", is_level="sequence", **flags)[1]
    capped = train("bypass", old_logprobs="corrected", is_cap=1.0, **flags)[1]
    assert rollout["response/length_mean"] == 12  # of all, so that half of the tokens have the weight
    for metrics, weight in (rollout, 1), (token, math.exp(0.008)), (sequence, math.exp(0.096)), (capped, 1):
        average, square = (1 + weight) / 2, (1 + weight**2) / 2
        assert metrics["rollout/weight_mean"] == pytest.approx(average, rel=1e-5)
        assert metrics["rollout/ess"] == pytest.approx(average**2 / square, rel=1e-5)
        # Of the training pass, whatever the old log-probs are.
        assert metrics["rollout/logprob_diff"] == pytest.approx(0.004, rel=1e-3)
    assert rollout["actor/ratio_mean"] == pytest.approx((1 + math.exp(0.008)) / 2) and token["actor/ratio_mean"] == 1
    # Where nothing is clipped or capped they have the same gradient, and not that of ppo_llm.py.
    assert token["actor/grad_norm"] == pytest.approx(rollout["actor/grad_norm"], rel=1e-5)
    assert token["actor/grad_norm"] != pytest.approx(plain["actor/grad_norm"], rel=1e-4)
    same = plain.keys() - {"rollout/logprob_diff"}
    # Every weight is 1, up to the rounding between sampler and training pass.
    assert {name: capped[name] for name in same} == pytest.approx({name: plain[name] for name in same}, 1e-5, 1e-6)


def test_the_kl_controller(variant):
    controller = variant("adaptive_kl").AdaptiveKL(0.02, 0.05, 1000)
    found = []
    for kl in (0.0, 0.05, 0.055, 0.5, -1.0):  # far below, on target, 10% above, far above, far below
        controller.update(kl, 256)
        found.append(round(controller.coef, 5))
    assert found == [0.01898, 0.01898, 0.01946, 0.02046, 0.01941]
    controller.update(0.0, 10**6)  # many more responses than the horizon has: not below 0
    assert controller.coef == pytest.approx(0.01941 * 0.8, rel=1e-3)


def test_the_kl_coefficient_follows_and_resumes(train):
    flags = {"kl_reward_coef": 0.5, "kl_target": 1e-4, "kl_horizon": 20.0, "critic_warmup_iterations": 1}
    whole = resumed(train, "adaptive_kl", 4, **flags, total_iterations=5, save_every=4, lr=1e-2)
    coefs = [m["kl/coef"] for m in whole[1:]]
    assert coefs[:2] == [0.5] * 2 and "actor/loss" not in whole[1]  # not steered while the actor does not move
    for before, after, m in zip(coefs[1:], coefs[2:], whole[2:]):
        error = max(-0.2, min(0.2, m["kl/mean"] / 1e-4 - 1))
        assert after == before * (1 + error * 8 / 20) != before
    for m in whole[3:]:  # it is this coefficient that the rewards have
        kl = m["kl/mean"] * m["response/length_mean"]
        assert (m["reward/mean"] - m["reward/total_mean"]) / kl == pytest.approx(m["kl/coef"], rel=1e-3)


def test_top_p_and_top_k_cut_the_tail(variant):
    sample = variant("top_p").sample_tokens
    probs = torch.tensor([0.15, 0.4, 0.05, 0.3, 0.1])
    uniforms = (torch.arange(1000) + 0.5) / 1000

    def shares(logits, top_p, top_k, temperature=1.0):
        tokens, logprobs = sample(logits.expand(1000, 5), uniforms.double(), temperature, top_p, top_k)
        found = torch.bincount(tokens, minlength=5) / 1000
        assert torch.allclose(logprobs.exp(), found[tokens], atol=2e-3)  # those of what is sampled from
        return found

    def scaled(*kept):
        left = torch.where(torch.isin(torch.arange(5), torch.tensor(kept)), probs, 0)
        return pytest.approx((left / left.sum()).tolist(), abs=2e-3)

    logits = probs.log()
    assert shares(logits, 1.0, 0).tolist() == scaled(0, 1, 2, 3, 4)
    assert shares(logits, 0.69, 0).tolist() == scaled(1, 3) and shares(logits, 0.71, 0).tolist() == scaled(0, 1, 3)
    assert shares(logits, 0.01, 0).tolist() == scaled(1)
    assert shares(logits, 1.0, 2).tolist() == scaled(1, 3) and shares(logits, 1.0, 1).tolist() == scaled(1)
    assert shares(logits, 0.5, 3).tolist() == scaled(1, 3)  # of the three that are left 0.47 is not enough
    assert shares(logits, 0.45, 3).tolist() == scaled(1)
    assert shares(logits, 1.0, 99).tolist() == scaled(0, 1, 2, 3, 4)  # more than there are
    assert (shares(torch.zeros(5), 1.0, 2) > 0).sum() == 2  # of equal ones
    assert (shares(logits, 0.69, 0, temperature=3.0) > 0).sum() == 3  # after the temperature: 0.63 for the two
    tokens, logprobs = sample(logits[None], uniforms[:1], 0, 0.5, 2)
    assert (tokens.item(), logprobs.item()) == (1, 0)


def test_top_p_cuts_in_training_alone_and_is_guarded(variant, train, monkeypatch):
    algo = variant("top_p")
    flags = {"eval_rows": 5, "total_iterations": 2, "max_response_length": 16}
    whole = train("top_p", **flags)
    cut = train("top_p", **flags, top_p=0.6, top_k=20)
    assert untimed(whole)[0] == untimed(cut)[0] and "eval/score_sampled" in cut[0]  # evaluation cuts nothing
    for m in cut[1:]:  # of the probability 0.6 or more is kept, and scaled up
        assert 0.05 < m["rollout/logprob_diff"] < 1 and whole[1]["rollout/logprob_diff"] < 1e-5

    real = algo.sample_tokens
    for change in (lambda x: x * 1.5, lambda x: x / 1.5, lambda x: x + torch.nan):  # a sampler of other probabilities
        monkeypatch.setattr(algo, "sample_tokens", lambda logits, *args, c=change: real(c(logits), *args))
        assert "sampler and training pass differ by" in refusal(lambda: train("top_p", top_p=0.9))


def test_schedules(variant):
    schedule = variant("anneal").schedule
    linear = [schedule("linear", i, 6, 2) for i in range(1, 7)]
    assert linear == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]  # the last iteration still trains
    cosine = [schedule("cosine", i, 4, 0) for i in range(1, 5)]
    assert cosine == pytest.approx([1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2])
    assert [schedule("constant", i, 4, 3) for i in range(1, 5)] == [1 / 3, 2 / 3, 1, 1]
    assert schedule("linear", 2, 2, 2) == schedule("cosine", 1, 1, 0) == 1


def test_both_learning_rates_fall(train, spy):
    rates = spy(torch.optim.AdamW, "step", lambda optimizer, *_: optimizer.param_groups[0]["lr"])
    metrics = train("anneal", total_iterations=5, warmup_iterations=1, lr=1e-3, critic_lr=2e-3)
    factors = [1, 1, 0.75, 0.5, 0.25]
    assert rates[::2] == pytest.approx([1e-3 * x for x in factors]) == [m["actor/lr"] for m in metrics[1:]]
    assert rates[1::2] == pytest.approx([2e-3 * x for x in factors])


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_a_plus_has_the_value_of_one_and_the_gradient_of_the_kl(variant, kind):
    algo, plain = variant("kl_gradient"), load_script(ROOT / "ppo_llm.py")
    stream = torch.Generator().manual_seed(0)
    logits, ref = torch.randn(2, 6, generator=stream, dtype=torch.float64)
    logits.requires_grad_()
    logprobs, ref = logits.log_softmax(-1), ref.log_softmax(-1)
    (kl_gradient,) = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True)

    def expected(kind):
        """The mean under the policy of a token's gradient."""
        losses = logprobs.exp().detach() * algo.kl_penalty(logprobs, ref, kind)
        return torch.autograd.grad(losses.sum(), logits, retain_graph=True)[0]

    assert torch.allclose(expected(f"{kind}+"), kl_gradient)
    assert not torch.allclose(expected(kind), kl_gradient, rtol=0.1)
    assert torch.equal(algo.kl_penalty(logprobs, ref, f"{kind}+"), plain.kl_penalty(logprobs, ref, kind))
    assert torch.equal(algo.kl_penalty(logprobs, ref, kind), plain.kl_penalty(logprobs, ref, kind))
    assert torch.equal(algo.kl_penalty(logprobs, ref, "abs"), (logprobs - ref).abs())


def test_dual_clip_in_a_run(train):
    flags = {"batch_size": 8, "minibatch_size": 4, "ppo_epochs": 3, "lr": 0.03, "total_iterations": 1}
    cut, free = train("dual_clip", **flags, dual_clip=1.01)[1], train("dual_clip", **flags, dual_clip=1e9)[1]
    assert cut["actor/clipfrac"] > 0.01 + free["actor/clipfrac"] and cut["actor/loss"] < free["actor/loss"]


def test_value_clip_pushes_no_value_far(variant):
    """Old value 0, clip 0.2: beyond it a value is still pulled back, but pushed no further, neither up nor down."""
    returns = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.1, -1.0])
    new = torch.tensor([0.1, 0.5, -0.5, 1.5, 0.3, -0.5]).requires_grad_()
    losses = variant("value_clip").value_loss(new, torch.zeros(6), returns, 0.2)
    assert torch.allclose(losses, torch.tensor([0.81, 0.64, 2.25, 0.64, 0.04, 0.64]) / 2)
    (slopes,) = torch.autograd.grad(losses.sum(), new)
    assert torch.allclose(slopes, torch.tensor([-0.9, 0, -1.5, 0, 0.2, 0]))


def test_value_clip_in_a_run(variant, train, spy):
    losses, advantages = spy(variant("value_clip"), "value_loss"), spy(variant("value_clip"), "gae")
    train("value_clip", ppo_epochs=2, microbatch_tokens=10_000, total_iterations=1, value_clip=0.01)
    (_, values, *_), _ = advantages[0]
    first, second = [args for args, _ in losses]
    assert first[3] == second[3] == 0.01
    assert torch.equal(first[1], second[1]) and values[values != 0].sum() == first[1].sum()  # phase 4's in both epochs
    assert torch.equal(first[0], first[1]) and (second[0] - second[1]).abs().max() > 0.01  # from there they moved


def test_target_kl_leaves_out_steps_and_their_loss(variant, train, monkeypatch, spy):
    shares, weights, trained, real_step = spy(variant("target_kl"), "aggregate"), [], [], torch.optim.AdamW.step

    def step(optimizer, *args):
        real_step(optimizer, *args)
        trained.append(optimizer.param_groups[0]["params"])
        weights.append([p.detach().clone() for p in trained[-1]])

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    flags = {"batch_size": 16, "minibatch_size": 4, "microbatch_tokens": 10_000, "ppo_epochs": 2, "total_iterations": 1}
    free = train("target_kl", **flags, target_kl=1e9)[1]
    assert free["actor/steps"] == 8 and len(shares) == len(weights) == 16  # of actor and critic
    losses, policies = [share.item() for _, share in shares[:8]], weights[:8]
    # The first step changes nothing before it is taken: its KL is 0. Every later minibatch has one.
    stopped = train("target_kl", **flags, target_kl=1e-9)[1]
    assert stopped["actor/steps"] == 1 and len(weights) == 16 + 1 + 8 and len(shares) == 16 + 2 + 8
    assert stopped["actor/loss"] == losses[0] != pytest.approx(losses[0] + losses[1])
    assert all(torch.equal(a, b) for a, b in zip(weights[16], policies[0], strict=True))
    assert all(p.grad is None for p in trained[16])  # of the minibatch that was left out nothing goes on
    assert stopped["actor/approx_kl"] > 0 and stopped["actor/entropy"] > 0.5 * free["actor/entropy"]  # of what was read
    assert {m: stopped[m] for m in stopped if m.startswith("critic/")} == {m: free[m] for m in free if "critic/" in m}


def test_target_kl_stops_two_processes_together(train, folder, tmp_path):
    """At a minibatch in the middle, whose KL differs on the two."""
    flags = {"batch_size": 16, "minibatch_size": 4, "ppo_epochs": 3, "target_kl": 3e-3, "lr": 3e-4}
    one = train("target_kl", **flags)
    assert {m["actor/steps"] for m in one[1:]} - {1, 12}
    flags = flags_of("target_kl", folder, **flags, output_dir=str(tmp_path), run_name="two")
    two, _ = run_ranks(2, ranks.train, str(folder / "target_kl_llm.py"), [(flags, {})], timeout=60)
    assert_close(one, two[0]["metrics"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("rank, tied", [(2, False), (2, True), (0, False)])
def test_lora_bf16_is_the_same_to_the_bit(folder, train, spy, rank, tied):
    """Log-probs, values and gradients of two iterations; without LoRA the reference is what is frozen."""
    model = make_model(folder / f"tied_{tied}", tie_word_embeddings=tied)
    found = []
    for script in script_of("lora_bf16"), folder / "lora_bf16_llm.py":
        algo = load_script(script)
        passes = spy(algo, "forward_all")
        modules = spy(algo.Policy, "__init__", lambda policy, model, *_: model)
        gradients = spy(algo, "sum_gradients", lambda parameters: [p.grad.clone() for p in parameters])
        metrics = train("lora_bf16", on=script, model=model, lora_rank=rank, total_iterations=2)
        outputs = [*(output for _, output in passes), *itertools.chain(*gradients)]
        found.append((outputs, untimed(metrics), modules[-1]))  # the reference comes last
    (theirs, plain, before), (ours, changed, after) = found
    assert len(ours) > 10 and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)) and plain == changed
    assert {p.dtype for p in before.parameters()} == {torch.float32}
    head = after.get_output_embeddings().weight
    for name, p in after.named_parameters():
        cast = not p.requires_grad and p.ndim == 2 and p is not after.get_input_embeddings().weight
        assert p.dtype == (torch.bfloat16 if cast else torch.float32), name
    assert head.dtype == (torch.float32 if tied else torch.bfloat16)


REWARD_TEXTS = ["", "a", "ab c", "one two three four", "what is it?", "x" * 33, "12345", "a"]


def make_classifier(folder, arch="llama", **config):
    config = {"auto_class": AutoModelForSequenceClassification, "num_labels": 1, "seed": 3} | config
    return make_model(folder, arch, **config)


@pytest.fixture
def classify(monkeypatch):
    """classify(folder, texts, batch): (scores by the reward file, by the classifier one row at a time)."""
    monkeypatch.setenv("REWARD_MODEL", "set below")
    import reward_model

    def run(folder, texts, batch, wanted=None):
        monkeypatch.setattr(reward_model, "NAME", folder)
        monkeypatch.setenv("REWARD_BATCH", str(batch))
        reward_model.load.cache_clear()
        columns = {"prompts": ["ask"] * len(texts), "responses": texts, "answers": [None] * len(texts)}
        columns["messages"] = [[{"role": "user", "content": "ask"}] for _ in texts]
        found = reward_model.reward_model(**columns)  # by these names a script calls it
        model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        wanted = wanted or [f"ask{text}" for text in texts]
        with torch.no_grad():
            rows = [torch.tensor([tokenizer(text)["input_ids"]]) for text in wanted]
            return found, [model(row).logits.item() for row in rows]

    yield run
    reward_model.load.cache_clear()


# Architecture, padding token of the model, and how its tokenizer was saved.
CLASSIFIERS = [("llama", "<pad>", {}), ("llama", "<eos>", {}), ("llama", None, {}), ("gpt2", "<pad>", {})]
CLASSIFIERS += [("llama", "<pad>", {"padding_side": side, "pad_token": "<eos2>"}) for side in ("left", "right")]


@pytest.mark.parametrize("arch, pad, saved", CLASSIFIERS)
def test_a_reward_model_scores_as_row_by_row(classify, tmp_path, arch, pad, saved):
    """Rows of unequal lengths, one of them twice; one by one to the bit. Some texts end in the padding token."""
    folder = make_classifier(tmp_path / "rm", arch, pad=pad)
    if saved:
        AutoTokenizer.from_pretrained(folder, **saved).save_pretrained(folder)
    texts = [*REWARD_TEXTS, "then<pad>", "then<eos>"]
    found, expected = classify(folder, texts, 1)
    assert found == expected and max(found) - min(found) > 0.1
    for batch in (3, 16):
        found, expected = classify(folder, texts, batch)
        assert found == pytest.approx(expected, abs=1e-5)
        assert found[1] == found[7]  # equal responses, equal scores: a group of them has no advantage
    assert classify(folder, [], 3) == ([], [])


def test_a_reward_model_reads_chats_by_its_own_template(classify, tmp_path):
    template = "{% for m in messages %}{{ m.role[0] }}#{{ m.content }}\n{% endfor %}"
    folder = make_classifier(tmp_path / "rm")
    AutoTokenizer.from_pretrained(folder, chat_template=template).save_pretrained(folder)
    found, expected = classify(folder, REWARD_TEXTS, 4, [f"u#ask\na#{text}\n" for text in REWARD_TEXTS])
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_reward_models_rows_are_sorted_and_few_passes(classify, tmp_path, spy):
    shapes = spy(LlamaForSequenceClassification, "forward", lambda model, tokens, **_: tuple(tokens.shape))
    classify(make_classifier(tmp_path / "rm"), REWARD_TEXTS, 4)
    assert shapes[:2] == [(4, 8), (3, 36)]  # seven distinct texts after "ask": "", a, ab c, 12345 | the others


def test_a_reward_model_in_bfloat16_has_a_head_in_float32(classify, tmp_path):
    """As on a GPU: near the score in float32, and not rounded to bfloat16."""
    import reward_model

    folder = make_classifier(tmp_path / "rm")
    _, expected = classify(folder, REWARD_TEXTS, 4)
    model, *_ = reward_model.load()
    reward_model.use_bfloat16(model, "cpu")
    scores = reward_model.reward_model(["ask"] * 8, REWARD_TEXTS, [None] * 8, messages=[None] * 8)
    assert scores != pytest.approx(expected, abs=1e-5) and scores == pytest.approx(expected, abs=0.1)
    assert torch.tensor(scores).bfloat16().tolist() != scores


NO_REWARD_MODEL = [
    (make_model, {}, ["a"], r"one label .*score\.weight"),
    (make_classifier, {"num_labels": 2}, ["a"], r"one label \(labels: 2"),
    (make_classifier, {"arch": "gpt2"}, ["short", "abc" * 2000], r"reads \d+ tokens, a prompt with .* has \d{4,}"),
]


@pytest.mark.parametrize("make, config, texts, said", NO_REWARD_MODEL)
def test_what_is_no_reward_model_or_cannot_read_a_text_is_refused(classify, tmp_path, make, config, texts, said):
    with pytest.raises(ValueError, match=said):
        classify(make(tmp_path / "rm", **config), texts, 4)


# --- entropy_tokens


def token_gradients(algo, monkeypatch):
    """What every micro-batch of the update has, as a list of [mask, new, old, advantages, gradient] that grows."""
    calls = []
    real_forward, real_loss = algo.Policy.forward, algo.policy_loss

    def forward(policy, tokens, mask):
        results = real_forward(policy, tokens, mask)
        if results[0].requires_grad:
            calls.append([mask])
        return results

    def policy_loss(new, old, advantages, *limits):
        if new.requires_grad:
            calls[-1].extend([new.detach(), old, advantages])
            new.register_hook(calls[-1].append)
        return real_loss(new, old, advantages, *limits)

    monkeypatch.setattr(algo.Policy, "forward", forward)
    monkeypatch.setattr(algo, "policy_loss", policy_loss)
    return calls


def test_only_the_tokens_of_highest_entropy_have_a_gradient(variant, train, monkeypatch, spy):
    """Those above one threshold for the batch; a token that is left counts in the denominators all the same."""
    algo = variant("entropy_tokens")
    passes, calls = spy(algo.Policy, "forward"), token_gradients(algo, monkeypatch)
    flags = {"lr": 0.0, "kl_loss_coef": 0.0, "total_iterations": 1, "entropy_share": 0.3}
    metrics = train("entropy_tokens", **flags)[1]
    entropies = [entropy.detach() for _, (logprobs, entropy) in passes if logprobs.requires_grad]
    trained, left = [], []
    for (mask, _, _, advantages, gradient), entropy in zip(calls, entropies, strict=True):
        expected = -advantages / mask.sum(1, keepdim=True) / 8  # a minibatch of 8 responses: seq-mean-token-mean
        assert torch.allclose(gradient, expected, atol=1e-8)
        trained.append(entropy[mask & (gradient != 0)])
        left.append(entropy[mask & (gradient == 0)])
    trained, left = torch.cat(trained), torch.cat(left)
    count = len(trained) + len(left)
    assert trained.min() > left.max() and trained.min() >= metrics["actor/entropy_threshold"] > left.max()
    assert int(0.3 * (count - 1)) + 1 <= len(trained) < 0.4 * count  # equal prefixes are in together


def test_equal_entropies_are_chosen_together(variant):
    threshold = variant("entropy_tokens").entropy_threshold
    entropies = torch.tensor([0.1, 0.9, 0.5, 0.5 + 1e-6, 0.5 - 1e-6, 0.3, 0.2, 0.0, 0.0, 0.0])
    chosen = [int((entropies >= threshold(entropies, share)).sum()) for share in (0.0, 0.12, 0.3, 0.5, 1.0)]
    assert chosen == [1, 4, 4, 5, 10]
    certain = torch.tensor([5e-6] * 2 + [1e-9] * 8)
    assert (certain >= threshold(certain, 0.2)).sum() == 2


# --- pass_at_k


def test_the_best_of_k_is_pass_at_k(variant):
    """Against all choices of k samples, and for scores of 0 and 1 the formula of 2107.03374."""
    best_of = variant("pass_at_k").best_of
    scores = torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    right = (scores > 0.3).double()
    for k in range(1, 7):
        choices = [scores[:, list(choice)].amax(1) for choice in itertools.combinations(range(6), k)]
        assert torch.allclose(best_of(scores, k), torch.stack(choices).mean(0))
        formula = [1 - math.comb(6 - int(c), k) / math.comb(6, k) for c in right.sum(1)]
        assert torch.allclose(best_of(right, k), torch.tensor(formula).double())
    assert best_of(scores[:0], 2).shape == (0,)


def test_the_majority_votes_on_answers(variant):
    def vote(texts, scores):
        results = [{"response": text, "score": score} for text, score in zip(texts, scores)]
        return variant("pass_at_k").majority_score(results)

    assert vote(["so #### 1,234", "#### 7", "well #### 1234.0", "#### $1234"], [1.0, 0.0, 1.0, 1.0]) == 1
    assert vote(["#### 7", "#### 7", "#### 8"], [0.0, 0.0, 1.0]) == 0
    assert vote(["#### 8", "#### 7", "#### 7", "#### 8"], [1.0, 0.0, 0.0, 1.0]) == 1  # of two the first
    assert vote(["b", "a", "a", "#### 7"], [0.0, 0.5, 0.5, 1.0]) == 0.5  # no numbers: texts


def test_a_line_of_completions_has_its_own_samples(train, folder, tmp_path):
    digest = load_script(folder / "toy.py").digest
    metrics = train("pass_at_k", reward="digest", eval_rows=5, eval_samples=6, total_iterations=1, run_name="run")
    for step in (0, 1):
        greedy = read_rows(tmp_path / "run" / "completions" / f"eval_{step:06d}.jsonl")
        rows = read_rows(tmp_path / "run" / "completions" / f"eval_sampled_{step:06d}.jsonl")
        prompts = sorted({row["prompt"] for row in rows})
        assert [row["prompt"] for row in greedy] == prompts and len(prompts) == 5 and len(rows) == 30
        for row in greedy + rows:
            assert [row["score"]] == digest([row["prompt"]], [row["response"]], None)
        assert all(len({row["response"] for row in rows if row["prompt"] == prompt}) > 3 for prompt in prompts)
        scores = torch.tensor([[row["score"] for row in rows if row["prompt"] == prompt] for prompt in prompts])
        assert metrics[step]["eval/score_sampled"] == pytest.approx(scores.mean().item(), abs=1e-6)
        best = torch.stack([scores[:, pair].amax(1) for pair in itertools.combinations(range(6), 2)])
        assert metrics[step]["eval/pass@2"] == pytest.approx(best.mean().item(), abs=1e-6)
        assert {"eval/pass@4", "eval/majority"} < metrics[step].keys() and "eval/pass@8" not in metrics[step]


# --- one_step_off


def test_the_weights_of_one_iteration_ago_sample(variant, train, spy):
    """And those of now are evaluated; a model's weights are told apart by their sum."""

    def weights(model, *_):
        return sum(p.double().sum().item() for p in model.parameters())

    algo = variant("one_step_off")
    sampling, passes = spy(algo, "generate", weights), spy(algo, "forward_all", weights)
    train("one_step_off", total_iterations=4, kl_loss_coef=0.0, eval_rows=2, eval_every=1)
    assert len(sampling) == 2 + 4 * 3 and len(passes) == 4 * 2  # two evaluations come first
    before = now = sampling[0]  # what the policy was at the start of the last iteration, and is at that of this one
    for i in range(4):
        sampled, *evaluated = sampling[2 + 3 * i : 5 + 3 * i]
        policy, sampler = passes[2 * i : 2 * i + 2]
        assert sampled == sampler == before and policy == now
        assert evaluated[0] == evaluated[1] != policy
        before, now = now, evaluated[0]
    assert len({*sampling[2::3]}) == 3


def test_importance_weights_are_cut(variant, train, spy):
    algo = variant("one_step_off")
    passes, plain = spy(algo, "forward_all"), spy(algo, "group_advantages")
    losses = spy(algo, "policy_loss", lambda new, old, advantages, *_: (new, advantages))
    metrics = train("one_step_off", total_iterations=3, kl_loss_coef=0.0, lr=5e-3, is_cap=1.1)
    used = [advantages for new, advantages in losses if new.dim() == 3]  # the calls for the log, with the whole batch
    for i in range(3):
        ((*_, mask), old), (_, sampled) = passes[2 * i : 2 * i + 2]
        ratio = (old - sampled).exp()
        expected = plain[i][1][:, None] * ratio.clamp(max=1.1)
        assert torch.allclose(used[i], torch.where(mask, expected, 0), atol=1e-6)
        weights = ratio[mask].clamp(max=1.1)
        assert metrics[i + 1]["rollout/weight_mean"] == pytest.approx(weights.mean().item(), abs=1e-5)
        ess = weights.mean() ** 2 / weights.square().mean()
        assert metrics[i + 1]["rollout/ess"] == pytest.approx(ess.item(), abs=1e-5)
        assert (i == 0) == bool((ratio == 1).all()) and (i == 0) == bool((weights < 1.1).all())


def test_a_sampler_with_other_weights_is_refused(variant, train, monkeypatch):
    monkeypatch.setattr(variant("one_step_off"), "exchange", lambda *models: None)
    said = refusal(lambda: train("one_step_off", lr=5e-3))
    assert "iteration 2: sampler and training pass differ" in said


@pytest.mark.parametrize("lora_rank", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_the_older_weights_are_resumed(lora_rank, train):
    whole = resumed(train, "one_step_off", 2, total_iterations=4, save_every=2, lora_rank=lora_rank)
    assert whole[3]["rollout/weight_mean"] != 1


# --- multi_reward


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
@pytest.mark.parametrize("weights", [(), (2.0, 0.5), (1.0, -0.5)])
def test_each_reward_is_normalised_in_its_group_then_they_are_summed(weights, estimator, variant, train, folder, spy):
    losses = spy(variant("multi_reward"), "policy_loss")
    flags = {"reward": "tabled", "reward_weights": weights, "estimator": estimator, "total_iterations": 1}
    metrics = train("multi_reward", **flags)
    (_, _, advantages, *_), _ = losses[-1]  # of the whole batch, for the log: (B,L)
    used = advantages.sum(1) / (advantages != 0).sum(1).clamp(min=1)
    a, b = weights or (1.0, 1.0)
    tabled = load_script(folder / "toy.py").tabled(None, None, None)
    wide, narrow = (grpo.group_advantages(torch.tensor(scores), 4, estimator) for scores in tabled.values())
    summed = a * wide + b * narrow
    assert torch.allclose(used, summed / (summed.std() + 1e-6), atol=1e-6)
    assert used.std() == pytest.approx(1, abs=1e-5) and metrics[1]["advantage/mean"] == pytest.approx(0, abs=2)
    # A score that is the same in a whole group is not heard, a group that differs in both speaks of both.
    assert torch.equal(summed[:4], b * narrow[:4]) and torch.equal(summed[4:8], a * wide[4:8])
    assert torch.allclose(summed[8:12], (a + b) * narrow[:4]) and summed[12:].count_nonzero() == 0
    assert metrics[1]["group/zero_std_frac"] == 0.25


@pytest.mark.parametrize("weights", [(), (2.0, 0.5), (1.0, 0.0), (-1.0, 3.0)])
def test_every_curve_evaluation_and_completion_obeys_the_weights(weights, train, tmp_path):
    flags = {"reward_weights": weights, "eval_rows": 3, "kl_reward_coef": 0.1}
    metrics = train("multi_reward", reward="letters", run_name="run", **flags)
    first, second = weights or (1.0, 1.0)

    def parts(text):
        return {"early": first * (sum(c < "m" for c in text) / 9), "size": second * (len(text) / 99)}

    for m in metrics[1:]:
        of_kl = (abs(first) + abs(second)) * 0.1 * m["kl/mean"] * m["response/length_mean"]  # taken from each part
        assert m["reward/total_mean"] == pytest.approx(m["reward/mean"] - of_kl, abs=1e-5)
    (tmp_path / "run/completions/step_000001.jsonl").unlink()  # the metrics of the others are those of one step
    found = {}
    for path in (tmp_path / "run/completions").glob("*.jsonl"):
        kind, step = path.stem.rpartition("_")[::2]
        rows = read_rows(path)
        for row in rows:
            assert row["parts"] == parts(row["response"]) and row["score"] == sum(row["parts"].values())
        name = {"step": "reward/mean", "eval": "eval/score", "eval_sampled": "eval/score_sampled"}[kind]
        found[name, int(step)] = statistics.mean(row["score"] for row in rows)
        for part in ("early", "size"):
            prefix = kind.replace("eval", "eval_part").replace("step", "part")
            found[f"{prefix}/{part}", int(step)] = statistics.mean(row["parts"][part] for row in rows)
    assert len(found) == 15 and sum(value != 0 for value in found.values()) == 15 - 5 * (0 in weights)
    for (name, step), value in found.items():
        assert metrics[step][name] == pytest.approx(value, abs=1e-6)


# --- shared_critic


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_value_head_is_trained_saved_and_resumed_to_the_bit(lora_rank, train, tmp_path):
    """A head that no checkpoint holds begins at zero again; with LoRA peft switches it off, and transformers not on."""
    flags = {"lora_rank": lora_rank, "total_iterations": 4, "save_every": 2, "lr": 1e-2, "critic_lr": 1e-2}
    whole = resumed(train, "shared_critic", 2, **flags)
    heads = []
    for step in (2, 4):
        checkpoint = torch.load(tmp_path / f"whole/checkpoints/step_{step:06d}.pt", weights_only=True)
        weights, optimizer = checkpoint["policy"]
        heads.append(torch.cat([p.detach().flatten() for name, p in weights.items() if "score." in name]))
        assert len(optimizer["state"]) == len(weights)  # every trained tensor has its moments
    assert heads[0].count_nonzero() == 33 and heads[0].abs().max() > 1e-3 and (heads[0] != heads[1]).all()
    assert sum(m["critic/explained_variance"] != 0 for m in whole[2:]) == 3


def gradients_of(optimizer, *_):
    return [p.grad.clone() for group in optimizer.param_groups for p in group["params"]]


def test_the_value_head_is_clipped_with_the_rest(train, spy):
    steps = spy(torch.optim.AdamW, "step", gradients_of)
    metrics = train("shared_critic", max_grad_norm=0.01, value_coef=5.0)
    norms = [torch.cat([g.flatten() for g in gradients]).norm().item() for gradients in steps]
    heads = [sum(g.norm().item() for g in gradients if g.shape in ((1, 32), (1,))) for gradients in steps]
    assert norms == pytest.approx([0.01] * 3, rel=1e-3) and min(heads) > 1e-3
    assert all(m["actor/grad_norm"] > 0.1 for m in metrics[1:])


def test_the_loss_is_the_actors_and_a_share_of_the_critics(train, tmp_path, spy):
    """The gradient of one step is linear in --value-coef, in the backbone, too."""
    train("shared_critic", critic_lr=1e-1, run_name="start")  # at its start the head is zero and passes no gradient on
    gradients = spy(torch.optim.AdamW, "step", gradients_of)
    start = {"model": f"{tmp_path}/start/final", "max_grad_norm": 0.0, "total_iterations": 1}
    for value_coef in (0.0, 1.0, 3.0):
        metrics = train("shared_critic", value_coef=value_coef, **start)
        assert metrics[1]["critic/loss"] > 0
    for none, one, three in zip(*gradients, strict=True):
        assert torch.allclose(three - none, 3 * (one - none), rtol=1e-3, atol=1e-5)
    changed = [(one - none).abs().max().item() > 1e-6 for none, one, _ in zip(*gradients, strict=True)]
    assert sum(changed) > 15 and (gradients[0][-2] == 0).all()  # the backbone; and the head alone is not the actor's


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_final_is_a_language_model_with_a_value_head_beside_it(arch, variant, train, tmp_path):
    model = make_model(tmp_path / "model", arch)
    train("shared_critic", model=model, critic_lr=1e-2, run_name="run")
    final = tmp_path / "run" / "final"
    assert not (final / "critic").exists()
    algo = variant("shared_critic")
    policy = algo.Policy(algo.load_policy(str(final), 0), temperature=1.0)
    tokens = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, -1] = False
    with torch.no_grad():
        logprobs, _, values = policy(tokens, mask)
        model = AutoModelForCausalLM.from_pretrained(final).eval()
        plain = model(tokens).logits.log_softmax(-1)
        weights = load_file(final / "model.safetensors")
        hidden = model.base_model(tokens).last_hidden_state
        plain_values = hidden @ weights["score.weight"][0] + weights["score.bias"]
    assert torch.allclose(logprobs[:, :-1], plain[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1), atol=1e-5)
    assert torch.allclose(values[:, :-1], plain_values[:, :-1], atol=1e-5) and values[:, :-1].abs().min() > 1e-4


def test_each_head_has_its_learning_rate(train, variant, spy):
    """--critic-lr is the value head's, --lr all the others'; both are warmed up. Flags of a critic alone are gone."""
    groups = lambda optimizer, *_: [(len(group["params"]), group["lr"]) for group in optimizer.param_groups]  # noqa: E731
    rates = spy(torch.optim.AdamW, "step", groups)
    train("shared_critic", lr=1e-3, critic_lr=1e-2, warmup_iterations=2, total_iterations=2)
    (_, first), (count, head) = rates[0]
    assert (first, count, head) == (5e-4, 2, 5e-3) and [lr for _, lr in rates[1]] == [1e-3, 1e-2]
    flags = {field.name for field in dataclasses.fields(variant("shared_critic").Args)}
    assert "value_coef" in flags and not flags & {"critic_model", "critic_warmup_iterations"}


# -------------------------------------------------------------------------------------------------------------- fp16


@pytest.fixture
def train_fp16(train, tmp_path):
    """train_fp16(power, script, **flags): metrics of a run on one process, of the variant on a script.

    The first scale is 2**power: with a large one the first steps overflow, and the scale halves.
    """

    def run(power=16, script="grpo_llm", **flags):
        path = tmp_path / f"fp16_{script}_{power}.py"
        base = script_of("fp16").read_text()
        text, conflicts = variants.merged((ROOT / f"{script}.py").read_text(), base, variants.patched("fp16"))
        assert conflicts == 0 and text.count("enabled=fp16)") == 1
        path.write_text(text.replace("enabled=fp16)", f"enabled=fp16, init_scale=2.0**{power})"))
        name, dtype = ("plain_pg" if script == "ppo_llm" else "fp16"), {"dtype": "float16"}
        return train(name, on=path, **dtype | flags)

    return run


@pytest.mark.parametrize("script", ["grpo_llm", "ppo_llm"])
def test_float16_has_the_gradients_of_float32(train_fp16, script):
    """The scale has left them again, the critic's, too; the sampler is nearer than in bfloat16."""
    kinds = "float16", "float32", "bfloat16"
    half, whole, bfloat = (train_fp16(script=script, dtype=dtype, total_iterations=1)[1] for dtype in kinds)
    norms = [name for name in half if name.endswith("grad_norm")]
    assert len(norms) == (2 if script == "ppo_llm" else 1)
    for name in norms:
        assert half[name] == pytest.approx(whole[name], rel=0.05) and half[name] != whole[name] > 0, name
    assert half["loss_scale"] == 2.0**16 and whole["loss_scale"] == 1 and half["overflows"] == 0
    assert whole["rollout/logprob_diff"] < 1e-6 < half["rollout/logprob_diff"]
    assert half["rollout/logprob_diff"] < bfloat["rollout/logprob_diff"] / 2


def test_an_overflow_leaves_the_step_out(train_fp16, spy):
    """With a first scale of 2**40 the weights stay as they are until it has come down; what is left out is counted."""
    used = spy(torch.optim.AdamW, "step", lambda optimizer, *_: optimizer)
    metrics = train_fp16(40, total_iterations=14)[1:]
    overflows = [m["overflows"] for m in metrics]
    taken = {moments["step"].item() for moments in used[0].state.values()}  # as AdamW has counted them
    assert 2 < overflows[-1] < 28 and taken == {28 - overflows[-1]}
    assert [m["loss_scale"] for m in metrics] == [2.0 ** (40 - n) for n in overflows]
    for before, m in zip([0, *overflows], metrics):
        if m["overflows"] == before + 2:  # both of its steps
            assert m["actor/grad_norm"] == 0 and m["actor/approx_kl"] < 1e-6
        elif m["overflows"] == before:
            assert m["actor/grad_norm"] > 0
    assert overflows[0] == 2 and metrics[0]["kl/mean"] == 0 and overflows[-1] == overflows[-2]


def test_a_gradient_that_no_scale_mends_ends_the_run(train_fp16, monkeypatch):
    """In float16 once the scale is at 1, after two steps here; in float32 at once."""
    norms = []
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args: norms.append(1) or torch.tensor(float("nan")))
    real = torch.amp.GradScaler.update
    halved = lambda self: real(self, self.get_scale() / 2)  # noqa: E731
    monkeypatch.setattr(torch.amp.GradScaler, "update", halved)
    for dtype, steps in ("float16", 3), ("float32", 1):
        norms.clear()
        said = refusal(lambda dtype=dtype: train_fp16(2, dtype=dtype, total_iterations=3))
        assert len(norms) == steps and "the gradient norm of the policy is nan" in said


def test_float16_resumes_to_the_bit(train_fp16):
    """The scale has come down in the first part, and the count goes on."""
    whole = resumed(train_fp16, 36, 4, total_iterations=8, save_every=4)
    assert whole[4]["overflows"] > 0 and whole[4]["loss_scale"] < 2.0**36


# The first gradient of rank 1 has an infinite number, before the ranks' gradients are summed (sharded: in its shard).
INFINITE = """
        if rank == 1 and state["iteration"] == 1 and not actor_norms:
            gradient = next(iter(trained_parameters(trained_model).values())).grad
            getattr(gradient, "_local_tensor", gradient)[0] = math.inf
"""


@pytest.mark.parametrize("kind", ["replicated", pytest.param("sharded", marks=pytest.mark.slow)])
def test_an_overflow_on_one_rank_stops_the_step_on_both(kind, sharded, folder, tmp_path):
    text = variants.patched("fp16") if kind == "replicated" else sharded("fp16")[0]
    place = "        trained_model, optimizer = trainees[name]\n"
    assert text.count(place) == 1
    path = tmp_path / f"{kind}_llm.py"
    path.write_text(text.replace(place, place + INFINITE))
    flags = flags_of("fp16", folder) | {"output_dir": str(tmp_path), "run_name": "two", "total_iterations": 2}
    one, two = (results[0] for results in run_ranks(2, ranks.train, str(path), [(flags, {})], timeout=100))
    for results in one, two:  # of two iterations with two steps each; AdamW itself skips a step
        assert [gradient.isfinite().all().item() for gradient in results["gradients"]] == [False, True, True, True]
    assert all(map(torch.equal, one["gradients"][1:], two["gradients"][1:]))
    weights = [results["weights"]["policy"] for results in (one, two)]
    assert all(torch.equal(weight, weights[1][name]) and weight.isfinite().all() for name, weight in weights[0].items())
    assert [(m["overflows"], m["loss_scale"]) for m in one["metrics"][1:]] == [(1, 2.0**15)] * 2
