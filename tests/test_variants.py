"""Variants: every patch applies as it stands, is linted, trains, and does what its head says."""

import dataclasses
import json
import math
import re
import shutil
import statistics
import subprocess
import sys

import pytest
import ranks
import torch
from conftest import (
    ROOT,
    compose,
    forked,
    make_model,
    make_tokenizer,
    read_metrics,
    read_rows,
    refusal,
    toy_rows,
    untimed,
    write_rows,
)
from ranks import load_script, run_ranks

sys.path.insert(0, str(ROOT / "notes"))
sys.path.insert(0, str(ROOT / "notes" / "variants"))
import variants

grpo = load_script(ROOT / "grpo_llm.py")
NAMES = variants.names()
ON_PPO = [name for name in NAMES if variants.read_patch(name)[1] == "ppo_llm.py"]
# Those that may have more than 60 changed lines in 10 places.
LONG = {"shared_critic": (130, 18), "multi_reward": (64, 12), "environment": (90, 11)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every variant as a whole file, and a small model with data."""
    folder = tmp_path_factory.mktemp("variants")
    sys.modules.pop("toy", None)  # the rewards of another file's folder
    for name in NAMES:
        (folder / f"{name}_llm.py").write_text(variants.patched(name))
    make_model(folder / "model", initializer_range=0.1)
    write_rows(folder / "train.jsonl", toy_rows(24))
    write_rows(folder / "test.jsonl", toy_rows(5, 100))
    (folder / "toy.py").write_text(
        "def early(prompts, responses, answers):\n"
        "    return [sum(c < 'm' for c in r) / max(1, len(r)) + 0.01 * len(r) for r in responses]\n\n\n"
        "def binary(prompts, responses, answers):\n"
        "    return [float(bool(r) and r[0] < '5') for r in responses]\n\n\n"
        "def pieces(prompts, responses, answers):\n"
        "    return [[(i + 1, 0.1) for i, c in enumerate(r) if c < 'm'] for r in responses]\n\n\n"
        "class Echo:\n"
        "    def reset(self, **row):\n"
        "        self.heard = []\n\n"
        "    def step(self, text):\n"
        "        self.heard.append(text)\n"
        "        return f'{len(self.heard)}-' if len(self.heard) < 4 else None\n\n"
        "    def get_reward(self):\n"
        "        return sum(c < 'm' for text in self.heard for c in text) / 10\n"
    )
    return folder


@pytest.fixture(scope="module")
def variant(folder):
    """variant(name): the patched script as a module."""
    return lambda name: load_script(folder / f"{name}_llm.py")


@pytest.fixture
def train(folder, variant, tmp_path):
    """train(name, **flags): metrics of a run on one process; its folder is tmp_path/NUMBER."""
    from accelerate.state import AcceleratorState

    def run(name, **changes):
        AcceleratorState._reset_state(True)
        flags = flags_of(name, folder) | {"output_dir": str(tmp_path), "run_name": str(len(list(tmp_path.iterdir())))}
        algo = variant(name)
        return read_metrics(algo.main(algo.Args(**flags | changes)))

    return run


def flags_of(name, folder):
    on_ppo = name in ON_PPO
    flags = {"model": str(folder / "model"), "dataset": str(folder / "train.jsonl"), "track": "none", "lr": 1e-3}
    flags |= {"reward": f"{folder}/toy.py:early", "microbatch_tokens": 128, "max_response_length": 12}
    flags |= {"total_iterations": 3, "eval_every": 0, "eval_rows": 0, "save_every": 0, "minibatch_size": 8}
    flags |= {"batch_size": 8, "critic_lr": 1e-3} if on_ppo else {"batch_size": 4, "group_size": 4}
    own = {
        "vc_ppo": {"critic_warmup_iterations": 1},
        "target_kl": {"ppo_epochs": 3, "target_kl": 1e-9},  # after the first step
        "lora_bf16": {"lora_rank": 2, "dtype": "bfloat16"},
        "mask_truncated": {"temperature": 5.0, "max_response_length": 32},  # or no response ends, and nothing trains
        "fp16": {"dtype": "float16"},
        "environment": {"environment": f"{folder}/toy.py:Echo", "reward": "environment", "max_response_length": 24},
    }
    return flags | own.get(name, {})


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
    files = [str(folder / f"{name}_llm.py") for name in NAMES]
    for words in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, "--config", str(ROOT / "pyproject.toml"), *files],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout


def test_a_stale_patch_names_its_hunk():
    script = variants.read_patch("cispo")[1]
    changed = (ROOT / script).read_text().replace("unclipped = -advantages", "unclipped  = -advantages")
    with pytest.raises(SystemExit, match=rf"(?s)cispo.patch does not fit {script}.*patch failed: {script}:\d+"):
        variants.patched("cispo", changed)


def test_a_changed_script_is_merged_three_ways(monkeypatch, tmp_path, capsys):
    """`rebase` and `make` in a small repository: a change elsewhere passes, one of the same place is a person's."""
    (tmp_path / "notes" / "variants").mkdir(parents=True)
    monkeypatch.setattr(variants, "ROOT", tmp_path)
    monkeypatch.setattr(variants, "FOLDER", tmp_path / "notes" / "variants")
    monkeypatch.chdir(tmp_path)
    lines = [f"line_{i} = {i}\n" for i in range(20)]
    script = tmp_path / "grpo_llm.py"

    def commit(**changed):
        for place, text in changed.items():
            lines[int(place[1:])] = text
        script.write_text("".join(lines))
        for words in (["init", "-q"], ["add", "grpo_llm.py"], ["-c", "user.name=a", "-c", "user.email=a", "commit"]):
            variants.git(*words, *(["-qm", "x"] if "commit" in words else []), cwd=tmp_path)

    commit()
    variants.make("mine", "".join(lines).replace("line_10 = 10", "line_10 = -10"), "grpo_llm.py", "What: mine\n\n")
    assert variants.changes("mine") == (1, 1, 1)
    commit(p9="line_9 = 'other'\n", p0="line_0 = 'first'\n")
    with pytest.raises(SystemExit, match=r"mine\.patch does not fit"):
        variants.patched("mine")
    with pytest.raises(SystemExit) as conflict:  # neighbouring lines are a conflict, too
        variants.rebase()
    assert "mine_llm.py has 1 conflict" in str(conflict.value) and "<<<<<<<" in (tmp_path / "mine_llm.py").read_text()
    commit(p9="line_9 = 9\n")
    with pytest.raises(SystemExit) as done:
        variants.rebase()
    assert done.value.code is None
    text = variants.patched("mine")
    assert "line_10 = -10" in text and "line_0 = 'first'" in text
    assert variants.read_patch("mine")[0] == "What: mine\n\n"


# ------------------------------------------------------------------------------------------------------ they train


def trains(path, flags):
    """Two processes: every metric is a number, and the sampler agrees with the training pass."""
    code, console = forked(path, flags | {"run_name": path.stem, "eval_rows": 3})
    assert code == 0 and "2 process(es)" in console, console
    metrics = read_metrics(flags["output_dir"] / path.stem)
    assert len(metrics) == 4 and all(torch.tensor(list(m.values())).isfinite().all() for m in metrics)
    trained = [m for m in metrics if "rollout/logprob_diff" in m]
    limit = {"bfloat16": 0.1, "float16": 1e-2}.get(flags.get("dtype"), 1e-5)
    assert len(trained) >= 2 and all(m["rollout/logprob_diff"] < limit for m in trained)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "vllm"])  # that one in test_vllm.py
def test_two_processes_train(name, folder, tmp_path):
    trains(folder / f"{name}_llm.py", flags_of(name, folder) | {"output_dir": tmp_path})


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
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and len(list(tmp_path.iterdir())) > len(NAMES), done.stdout


# The second change in the file of the first. To add a pair is to add a line.
RUN_PAIRS = [
    ("cispo", "replay"),
    ("cispo", "one_step_off"),
    ("dapo", "entropy_tokens"),
    ("dapo", "shared_prompt"),
    ("gspo", "tool_call"),
    ("distill", "pass_at_k"),
    ("bypass", "adaptive_kl"),
    ("bypass", "top_p"),
    ("target_kl", "anneal"),
    ("vc_ppo", "value_clip"),
    ("plain_pg", "process_reward"),
    ("vc_ppo", "two_turns"),  # of two scripts
    ("vc_ppo", "fp16"),  # of two scripts
    ("sapo", "cov"),
    ("gspo", "cov"),
    ("cispo", "icepop"),
    ("dapo", "icepop"),
    ("maxrl", "mask_truncated"),
    ("optimal_baseline", "environment"),
]


@pytest.mark.slow
@pytest.mark.parametrize("pair", RUN_PAIRS, ids=" ".join)
def test_pairs_train(pair, folder, stacked, tmp_path):
    if missing := set(pair).difference(NAMES):
        pytest.skip(f"no patch {' and '.join(missing)} yet")
    text, conflicts = stacked[pair] if pair in stacked else stacked[pair[::-1]]
    assert conflicts == 0
    path = tmp_path / f"{'_'.join(pair)}.py"
    path.write_text(text)
    known = {field.name for field in dataclasses.fields(load_script(path).Args)}
    flags = flags_of(pair[1], folder) | flags_of(pair[0], folder) | {"output_dir": tmp_path}
    trains(path, {name: value for name, value in flags.items() if name in known})


# Those that another place of the script is in the way of, and why.
NOT_SHARDED = {
    "lora_bf16": "it casts frozen layers, which are sharded there",
}
RUN_SHARDED = "cispo", "gspo", "dapo", "vc_ppo", "process_reward", "target_kl"


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
    """By a merge, without a conflict; but for those named above."""
    text, conflicts = sharded(name)
    assert (conflicts > 0) == (name in NOT_SHARDED)
    if not conflicts:
        compile(text, name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN_SHARDED)
def test_a_sharded_variant_gives_its_metrics(name, sharded, folder, train, tmp_path):
    path = folder / f"{name}_fsdp.py"
    path.write_text(sharded(name)[0])
    reward = {"reward": f"{folder}/toy.py:pieces"} if name == "process_reward" else {}
    flags = flags_of(name, folder) | {"output_dir": tmp_path, "run_name": "sharded"} | reward
    code, console = forked(path, flags)
    assert code == 0, console
    for a, b in zip(untimed(read_metrics(tmp_path / "sharded")), untimed(train(name, **reward)), strict=True):
        assert a.keys() == b.keys()
        for metric in a.keys() - {"rollout/logprob_diff"}:
            assert a[metric] == pytest.approx(b[metric], rel=2e-3, abs=2e-5), metric


# ---------------------------------------------------------------------------------------- what each one says it does


def example(seed=0, rows=4, width=6):
    stream = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=stream, dtype=torch.float64)
    new = (old + 0.5 * torch.randn(rows, width, generator=stream, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(rows, 1, generator=stream, dtype=torch.float64).expand(rows, width)
    mask = torch.arange(width) < torch.tensor([6, 3, 5, 1])[:, None]
    return new, old, advantages, mask


def test_cispo_has_the_papers_gradient(variant, monkeypatch):
    monkeypatch.setattr(grpo, "policy_loss", grpo.policy_loss)  # is put back: the file replaces it where it is imported
    monkeypatch.delitem(sys.modules, "cispo", raising=False)
    import cispo

    new, old, advantages, _ = example()
    for algo in (variant("cispo"), cispo):
        losses, cut = algo.policy_loss(new, old, advantages, 0.3, 0.4)
        (found,) = torch.autograd.grad(losses.sum(), new)
        ratio = (new - old).exp().detach()
        assert torch.allclose(found, -advantages * ratio.clamp(0.7, 1.4))  # cut, never gone
        assert torch.equal(cut, (ratio < 0.7) | (ratio > 1.4)) and 0 < cut.sum() < cut.numel()
    assert grpo.policy_loss is cispo.policy_loss


def test_gspo_has_the_papers_gradient(variant):
    """2507.18071, eq. 5 and 7, written out response by response."""
    algo, (new, old, advantages, mask) = variant("gspo"), example(seed=2)
    losses, clipped = algo.policy_loss(new, old, advantages, mask, 0.02, 0.03)
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
    new, _, advantages, _ = example()
    (found,) = torch.autograd.grad(variant("plain_pg").policy_loss(new, advantages).sum(), new)
    assert torch.equal(found, -advantages)


def test_vc_ppo_has_two_lambdas(train, variant, monkeypatch):
    algo, calls = variant("vc_ppo"), []
    real = algo.gae
    monkeypatch.setattr(algo, "gae", lambda *args: calls.append((args, real(*args))) or calls[-1][1])
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


def test_process_rewards_stand_at_their_tokens(variant, train, folder, monkeypatch):
    algo, calls = variant("process_reward"), []
    real, real_batch, batches = algo.gae, algo.to_batch, []
    monkeypatch.setattr(algo, "gae", lambda *args: calls.append(args) or real(*args))
    monkeypatch.setattr(algo, "to_batch", lambda *args: batches.append(args) or real_batch(*args))
    flags = {"total_iterations": 1, "kl_reward_coef": 0.0, "missing_eos_penalty": 0.5}
    metrics = train("process_reward", reward=f"{folder}/toy.py:pieces", **flags)
    rewards, _, mask, *_ = calls[0]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for row, valid, response in zip(rewards, mask, batches[0][1]):
        expected = [0.1 * (i > 2 and tokenizer.decode([i]) < "m") for i in response.ids]
        expected[-1] -= 0.5 * response.truncated
        assert torch.allclose(row[valid], torch.tensor(expected), atol=1e-6)
    assert metrics[1]["reward/total_mean"] == pytest.approx(metrics[1]["reward/mean"], abs=1e-6)


def test_a_number_is_a_number_with_process_reward(train, folder):
    plain, (name, changed) = load_script(ROOT / "ppo_llm.py"), ("process_reward", train("process_reward"))
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    flags = flags_of(name, folder) | {"output_dir": str(folder), "run_name": "plain"}
    assert untimed(changed) == untimed(read_metrics(plain.main(plain.Args(**flags))))


def test_dapo_trains_on_mixed_groups_only(variant, train, folder, monkeypatch):
    algo, batches = variant("dapo"), []
    real = algo.group_advantages
    monkeypatch.setattr(algo, "group_advantages", lambda *args: batches.append(args[0].clone()) or real(*args))
    metrics = train("dapo", reward=f"{folder}/toy.py:binary", max_draws=8, group_size=4, missing_eos_penalty=0.3)
    for scores, m in zip(batches, metrics[1:], strict=True):
        assert len(scores) == 16 == 4 * m["group/trained"] and 0 < m["reward/sampled_mean"] < 1
    assert max(m["group/generated"] for m in metrics[1:]) > 4 and max(m["group/zero_std_frac"] for m in metrics[1:]) > 0
    # Filtered before the penalties: without them every group has both scores.
    assert all({round(x, 1) % 1 for x in scores.tolist()} <= {0.0, 0.7} for scores in batches)


def test_dapo_without_a_group_takes_no_step(variant, train, folder, monkeypatch):
    steps, real = [], torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *args: steps.append(1) or real(self, *args))
    (folder / "constant.py").write_text("def reward(prompts, responses, answers):\n    return [1.0] * len(prompts)\n")
    # With a penalty that differs, which the filter does not see, and a KL loss that would train.
    flags = {"missing_eos_penalty": 0.5, "kl_loss_coef": 0.1, "max_draws": 2}
    metrics = train("dapo", reward=f"{folder}/constant.py:reward", **flags)
    assert not steps and [m["step"] for m in metrics] == [0, 1, 2, 3]
    for m in metrics[1:]:
        assert m["group/trained"] == 0 and m["group/generated"] == 8 and m["group/zero_std_frac"] == 1
        assert "actor/loss" not in m and "actor/grad_norm" not in m and m["reward/sampled_mean"] == 1


def test_dapos_length_punishment(variant, train, monkeypatch):
    algo = variant("dapo")

    def scores(buffer, limit):
        found, real = [], algo.group_advantages
        with monkeypatch.context() as patch:
            patch.setattr(algo, "group_advantages", lambda *args: found.append(args[0].clone()) or real(*args))
            real_batch, lengths = algo.to_batch, []
            patch.setattr(algo, "to_batch", lambda rows, r, d: lengths.append(r) or real_batch(rows, r, d))
            train("dapo", overlong_buffer=buffer, max_response_length=limit, total_iterations=1)
        return found[0], torch.tensor([len(x.ids) for x in lengths[0]])

    (off, lengths), (on, same) = scores(0, 40), scores(25, 40)
    assert torch.equal(lengths, same) and lengths.max() == 40 and len(lengths.unique()) >= 3
    assert torch.allclose(off - on, ((lengths - 15) / 25).clamp(0, 1), atol=1e-6)  # eq. 13
    assert off.min() >= 0  # nothing is subtracted where it is off


@pytest.mark.slow
def test_dapo_by_two_is_dapo_by_one(train, folder, tmp_path):
    flags = {"reward": f"{folder}/toy.py:binary", "max_draws": 8, "minibatch_size": 8}
    one = untimed(train("dapo", **flags))
    code, console = forked(
        folder / "dapo_llm.py", flags_of("dapo", folder) | flags | {"output_dir": tmp_path, "run_name": "two"}
    )
    assert code == 0, console
    for a, b in zip(one, untimed(read_metrics(tmp_path / "two")), strict=True):
        for metric in a.keys() - {"rollout/logprob_diff"}:
            assert a[metric] == pytest.approx(b[metric], rel=2e-3, abs=2e-5), metric


def test_two_turns_train_on_what_was_sampled(variant, train, folder, monkeypatch):
    algo, batches, passes = variant("two_turns"), [], []
    real, real_pass = algo.to_batch, algo.forward_all
    monkeypatch.setattr(
        algo, "to_batch", lambda *args: batches.append((args[0], args[1], real(*args))) or batches[-1][2]
    )
    monkeypatch.setattr(algo, "forward_all", lambda *args: passes.append(args) or real_pass(*args))
    metrics = train("two_turns", reward=f"{folder}/toy.py:binary", max_response_length=16, total_iterations=2)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    turn = tokenizer("\nThat is wrong, try again.\n", add_special_tokens=False)["input_ids"]
    rows, responses, (tokens, mask, _, _) = batches[0]
    two = 0
    for row, response, valid in zip(rows, responses, mask):
        inserted = [i for i, x in enumerate(response.logprobs) if x == algo.NOT_SAMPLED]
        prompt = len(row["input_ids"])
        assert [i for i in range(len(response.ids)) if not valid[prompt - 1 + i]] == inserted
        assert valid.sum() == len(response.ids) - len(inserted)
        if inserted:
            two += 1
            assert [response.ids[i] for i in inserted] == turn + row["input_ids"] and 1 <= inserted[0] <= 8
        first = tokenizer.decode(response.ids[: inserted[0] if inserted else None], skip_special_tokens=True)
        assert bool(inserted) == (not first or first[0] >= "5")  # asked again if wrong
    assert 0 < two < len(rows) and metrics[1]["response/two_turns_frac"] == two / len(rows)
    assert all(m["rollout/logprob_diff"] < 1e-5 for m in metrics[1:])
    # Inserted tokens get no gradient: their log-probs are no part of the loss.
    policy = passes[0][0]
    embeddings = []
    hook = policy.register_forward_hook(lambda _, args, output: embeddings.append(output[0]))
    logprobs, _ = policy(tokens, mask)
    hook.remove()
    assert (logprobs[~mask] == 0).all() and (logprobs[mask] != 0).all()


def test_replay_asks_again_and_resumes(train, folder, tmp_path, variant, monkeypatch):
    algo, asked = variant("replay"), []
    real = algo.compute_scores
    monkeypatch.setattr(
        algo,
        "compute_scores",
        lambda f, t, rows, r: (asked.append([row["prompts"] for row in rows][::4]), real(f, t, rows, r))[1],
    )
    flags = {"reward": f"{folder}/toy.py:binary", "total_iterations": 6, "save_every": 3, "batch_size": 8}
    whole = train("replay", **flags, run_name="whole")
    assert any(m["group/replayed"] for m in whole[1:]) and any(m["group/failed"] for m in whole[1:])
    for before, after, m in zip(asked, asked[1:], whole[2:]):
        again = int(m["group/replayed"])
        assert again <= 4 and set(after[:again]) <= set(before)
    train("replay", **flags | {"total_iterations": 3}, run_name="part")
    resumed = train("replay", **flags, run_name="part", resume=True)
    assert untimed(resumed) == untimed(whole)


def test_distillation_rewards_each_token_with_the_teachers_surprise(variant, train, folder, monkeypatch):
    algo, calls = variant("distill"), []
    real = algo.kl_penalty
    monkeypatch.setattr(algo, "kl_penalty", lambda *args: calls.append((args, real(*args))) or calls[-1][1])
    teacher = make_model(folder / "teacher", seed=7, hidden_size=48, num_attention_heads=4, head_dim=12)
    used, real_loss = [], algo.policy_loss
    monkeypatch.setattr(algo, "policy_loss", lambda *args: used.append(args) or real_loss(*args))
    metrics = train("distill", ref_model=teacher, total_iterations=12, lr=1e-2)
    (student, other, kind), kl = calls[0]
    assert kind == "k1" and torch.equal(kl, student - other) and kl.abs().max() > 0.1
    _, _, advantages, *_ = used[0]
    assert set(advantages.flatten().tolist()) <= set((-kl).flatten().tolist())
    assert metrics[-1]["kl/mean"] < 0.8 * metrics[1]["kl/mean"]  # it learns from its own samples
    make_model(folder / "stranger", pad=None)
    path = folder / "stranger" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), ensure_ascii=True).replace('"q"', '"Q"'))
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


def scripted(algo, tokenizer, legs):
    """In place of `generate`: row by row what `legs` says, cut off at a stop id, as sampled with log-prob 0."""

    def generate(model, prompts, uniforms, eos_ids, temperature):
        responses = []
        for ids in prompts:
            text = tokenizer.decode(ids)
            rest = next(full[len(text) :] for full in legs if full.startswith(text))
            new = tokenizer(rest, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
            new = new[: uniforms.shape[1]]
            stop = next((i for i, token in enumerate(new) if token in eos_ids), len(new) - 1)
            responses.append(algo.Response(new[: stop + 1], [0.0] * (stop + 1), new[stop] not in eos_ids))
        return responses

    return generate


def test_a_tools_results_are_inserted(variant, train, folder, monkeypatch, tmp_path):
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    make_model(folder / "tool_model")
    path = folder / "tool_model" / "tokenizer.json"
    content = json.loads(path.read_text())
    for old, new in (("q", "<"), ("w", ">"), ("v", "*"), ("z", "/")):  # characters that calls need
        content["model"]["vocab"][new] = content["model"]["vocab"].pop(old)
    path.write_text(json.dumps(content))
    assert Tokenizer.from_file(str(path))
    tokenizer, algo = AutoTokenizer.from_pretrained(folder / "tool_model"), variant("tool_call")
    call, question = "<calc>12*7</calc>", "the sum of 3 and 4?"
    answers = [
        f"a{call}84b",
        f"{call}84{call}84{call}84{call}99",  # the fourth gets no answer
        "no <b> call",
        "x<calc>7**7</calc>error.",
    ]
    data = write_rows(tmp_path / "one.jsonl", [{"question": question, "answer": "#### 1"}])
    batches = []
    real = algo.to_batch
    monkeypatch.setattr(algo, "to_batch", lambda *args: batches.append(args[1]) or real(*args))
    monkeypatch.setattr(algo, "fail", lambda sentence: None)  # what is scripted is not what the model would sample
    for answer in answers:
        monkeypatch.setattr(algo, "generate", scripted(algo, tokenizer, [question + answer]))
        flags = {"model": str(folder / "tool_model"), "dataset": data, "total_iterations": 1}
        metrics = train("tool_call", **flags, max_response_length=80, batch_size=2)
        response = batches[-1][0]
        inserted = [x == algo.NOT_SAMPLED for x in response.logprobs]
        assert tokenizer.decode(response.ids[:-1]) == answer and not response.truncated
        parts = re.split(r"(?<=</calc>)(84|error)", answer) if "</calc>" in answer else [answer]
        expected = [i % 2 == 1 for i, part in enumerate(parts) for _ in part]
        assert inserted == [*expected, False]
        assert metrics[1]["response/calls_mean"] == len(parts) // 2
    monkeypatch.setattr(algo, "generate", scripted(algo, tokenizer, [question + answers[1]]))
    train("tool_call", **flags, max_response_length=30, batch_size=2)  # sampled tokens count, inserted ones do not
    response = batches[-1][0]
    assert response.truncated and sum(x != algo.NOT_SAMPLED for x in response.logprobs) == 30


def test_shared_prompts_want_full_attention(variant, tmp_path):
    """In a hybrid, or within a window, siblings would read each other without a word."""
    from transformers import AutoModelForCausalLM

    families = load_script(ROOT / "benchmarks" / "campaigns" / "families.py")
    for name in "lfm2", "mistral":
        families.make_model(name, tmp_path / name)
        model = variant("shared_prompt").load_model(str(tmp_path / name), AutoModelForCausalLM)
        assert "needs full attention in every layer" in refusal(lambda: variant("shared_prompt").Policy(model, 1.0))


def test_shared_prompts_give_the_same_gradients(variant, train, folder):
    from transformers import AutoModelForCausalLM

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
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("JUDGE_MODEL", str(folder / "model"))
    monkeypatch.setenv("JUDGE_RUBRIC", "q {prompt} r {response} a {answer}?")
    monkeypatch.setenv("JUDGE_BATCH", "2")
    judge.load.cache_clear()
    found = judge.judge(["what", "is", "x"], ["one", "two two", "y"], ["1", "2", "3"])
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder / "model"),
        AutoModelForCausalLM.from_pretrained(folder / "model"),
    )
    for score, text in zip(found, ("q what r one a 1?", "q is r two two a 2?", "q x r y a 3?"), strict=True):
        asked = tokenizer(text)["input_ids"]
        yes = tokenizer(" Yes", add_special_tokens=False)["input_ids"]
        logprobs = model(torch.tensor([asked + yes])).logits[0].log_softmax(-1)
        expected = sum(logprobs[len(asked) - 1 + i, token].item() for i, token in enumerate(yes))
        assert score == pytest.approx(expected, abs=1e-4)
    monkeypatch.setenv("JUDGE_RUBRIC", "the same whatever was said")
    scores = torch.tensor(judge.judge(["a"] * 8, list("bcdefghi"), ["1"] * 8))
    assert grpo.group_advantages(scores, 4, "grpo").tolist() == [0] * 8
    judge.load.cache_clear()


def test_length_control(monkeypatch):
    import length_control

    monkeypatch.setenv("LENGTH_TARGET", "10")
    responses = ["#### 5" + " " * 4, "#### 5", "#### 4" + " " * 4, "#### 5" + " " * 94]
    assert length_control.length_control(responses, ["5"] * 4) == pytest.approx([1, 0.8, 0, 0.5])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["judge", "length_control", "cispo"])
def test_files_of_their_own_run_on_two_processes(name, folder, tmp_path):
    """With their defaults: the embedded model is the judge."""
    place = ROOT / "notes" / "variants" / f"{name}.py"
    flags = flags_of("replay", folder) | {"output_dir": tmp_path, "run_name": "run"}
    flags |= {} if name == "cispo" else {"reward": f"{place}:{name}"}
    code, console = forked(place if name == "cispo" else ROOT / "grpo_llm.py", flags)
    assert code == 0, console
    metrics = read_metrics(tmp_path / "run")
    assert len(metrics) == 4 and metrics[1]["reward/std"] > 0
    assert (tmp_path / "run" / (f"{name}.py" if name == "cispo" else "grpo_llm.py")).exists()


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


# --- bypass


def by_ppo(name, folder, tmp_path, **changes):
    """Metrics of ppo_llm.py itself, with the flags of a variant's tests."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    flags = flags_of(name, folder) | {"output_dir": str(tmp_path), "run_name": f"ppo{len(list(tmp_path.iterdir()))}"}
    plain = load_script(ROOT / "ppo_llm.py")
    return read_metrics(plain.main(plain.Args(**flags | changes)))


def told_otherwise(algo, monkeypatch, gap):
    """From now on the sampler claims log-probs that are lower by twice `gap` in every other response."""
    real = algo.generate

    def generate(*args):
        responses = real(*args)
        for i, response in enumerate(responses[::2]):
            responses[2 * i] = response._replace(logprobs=[x - 2 * gap for x in response.logprobs])
        return responses

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


def test_bypass_corrects_for_the_sampler(variant, train, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    flags = {"total_iterations": 1, "temperature": 0.9, "kl_reward_coef": 0.0}
    plain = untimed(by_ppo("bypass", folder, tmp_path, **flags))[1]
    told_otherwise(variant("bypass"), monkeypatch, 0.005)
    rollout = train("bypass", **flags)[1]
    token = train("bypass", old_logprobs="corrected", **flags)[1]
    sequence = train("bypass", old_logprobs="corrected", is_level="sequence", **flags)[1]
    capped = train("bypass", old_logprobs="corrected", is_cap=1.0, **flags)[1]
    for metrics in rollout, token, sequence, capped:  # of the training pass, whatever the old log-probs are
        assert metrics["rollout/logprob_diff"] == pytest.approx(0.005, rel=1e-3)
    assert rollout["response/length_mean"] == 12  # of all, so that half of the tokens have the weight
    for metrics, weight in (rollout, 1), (token, math.exp(0.01)), (sequence, math.exp(0.12)), (capped, 1):
        average, square = (1 + weight) / 2, (1 + weight**2) / 2
        assert metrics["rollout/weight_mean"] == pytest.approx(average, rel=1e-5)
        assert metrics["rollout/ess"] == pytest.approx(average**2 / square, rel=1e-5)
    assert rollout["actor/ratio_mean"] == pytest.approx((1 + math.exp(0.01)) / 2) and token["actor/ratio_mean"] == 1
    # Where nothing is clipped or capped they have the same gradient, and not that of ppo_llm.py.
    assert token["actor/grad_norm"] == pytest.approx(rollout["actor/grad_norm"], rel=1e-5)
    assert token["actor/grad_norm"] != pytest.approx(plain["actor/grad_norm"], rel=1e-4)
    same = plain.keys() - {"rollout/logprob_diff"}
    # Every weight is 1, up to the rounding between sampler and training pass.
    assert {name: capped[name] for name in same} == pytest.approx({name: plain[name] for name in same}, 1e-5, 1e-6)


def test_bypass_without_a_pass(variant, train, monkeypatch):
    algo, passes = variant("bypass"), []
    real = algo.forward_all
    monkeypatch.setattr(algo, "forward_all", lambda module, *args: passes.append(module) or real(module, *args))
    for old_logprobs, count in ("rollout", 0), ("corrected", 2):
        passes.clear()
        train("bypass", old_logprobs=old_logprobs, kl_reward_coef=0.0, total_iterations=2)
        assert sum(isinstance(module, algo.Policy) for module in passes) == count


@pytest.mark.parametrize("old_logprobs", ["rollout", "corrected"])
def test_bypass_refuses_another_sampler(variant, train, monkeypatch, old_logprobs):
    told_otherwise(variant("bypass"), monkeypatch, 0.02)
    said = refusal(lambda: train("bypass", old_logprobs=old_logprobs))
    assert "sampler and training pass differ by 0.02" in said
    assert refusal(lambda: train("bypass", is_cap=0.5)) == "error: --is_cap must be at least 1, but is 0.5"


# --- adaptive_kl


def coefficient(metrics):
    """The KL coefficient that the rewards of an iteration had: (score - total) / KL, both per response."""
    kl = metrics["kl/mean"] * metrics["response/length_mean"]
    return (metrics["reward/mean"] - metrics["reward/total_mean"]) / kl


def test_the_kl_controller(variant):
    controller = variant("adaptive_kl").AdaptiveKL(0.02, 0.05, 1000)
    found = []
    for kl in (0.0, 0.05, 0.055, 0.5, -1.0):  # far below, on target, 10% above, far above, far below
        controller.update(kl, 256)
        found.append(round(controller.coef, 5))
    assert found == [0.01898, 0.01898, 0.01946, 0.02046, 0.01941]
    controller.update(0.0, 10**6)  # many more responses than the horizon has: not below 0
    assert controller.coef == pytest.approx(0.01941 * 0.8, rel=1e-3)


def test_the_kl_coefficient_follows_and_resumes(train, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    flags = {"kl_reward_coef": 0.5, "kl_target": 1e-4, "kl_horizon": 20.0, "critic_warmup_iterations": 1}
    flags |= {"total_iterations": 5, "save_every": 4, "lr": 1e-2}
    whole = train("adaptive_kl", **flags, run_name="whole")
    coefs = [m["kl/coef"] for m in whole[1:]]
    assert coefs[:2] == [0.5] * 2 and "actor/loss" not in whole[1]  # not steered while the actor does not move
    for before, after, m in zip(coefs[1:], coefs[2:], whole[2:]):
        error = max(-0.2, min(0.2, m["kl/mean"] / 1e-4 - 1))
        assert after == before * (1 + error * 8 / 20) != before
    for m in whole[3:]:  # it is this coefficient that the rewards have
        assert coefficient(m) == pytest.approx(m["kl/coef"], rel=1e-3)
    train("adaptive_kl", **flags | {"total_iterations": 4}, run_name="part")
    shutil.copytree(tmp_path / "part", tmp_path / "mixed")
    assert untimed(train("adaptive_kl", **flags, run_name="part", resume=True)) == untimed(whole)

    # A run that is not adaptive has the coefficient of its flag, whatever the checkpoint says; and the reverse.
    own = {name: value for name, value in flags.items() if name not in ("kl_target", "kl_horizon")}
    plain = by_ppo("adaptive_kl", folder, tmp_path, **own, run_name="mixed", resume=True)
    assert coefs[4] != 0.5 and coefficient(plain[5]) == pytest.approx(0.5, rel=1e-3)
    by_ppo("adaptive_kl", folder, tmp_path, **own | {"total_iterations": 4}, run_name="plain")
    assert train("adaptive_kl", **flags, run_name="plain", resume=True)[5]["kl/coef"] == 0.5


@pytest.mark.parametrize("name", ["kl_reward_coef", "kl_target", "kl_horizon"])
def test_an_adaptive_kl_of_nothing_is_refused(train, name):
    said = refusal(lambda: train("adaptive_kl", **{name: 0.0}))
    assert "--kl-reward-coef, --kl-target and --kl-horizon must be above 0" in said


# --- top_p


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


def test_top_p_cuts_in_training_alone_and_is_guarded(variant, train, folder, monkeypatch):
    algo = variant("top_p")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    flags = {"eval_dataset": f"{folder}/test.jsonl", "eval_rows": 5, "total_iterations": 2, "max_response_length": 16}
    whole = train("top_p", **flags)
    cut = train("top_p", **flags, top_p=0.6, top_k=20)
    assert untimed(whole)[0] == untimed(cut)[0] and "eval/score_sampled" in cut[0]  # evaluation cuts nothing
    for m in cut[1:]:  # of the probability 0.6 or more is kept, and scaled up
        assert 0.05 < m["rollout/logprob_diff"] < 1 and whole[1]["rollout/logprob_diff"] < 1e-5
    for share in 0.0, 90.0:
        said = refusal(lambda share=share: train("top_p", top_p=share))
        assert said == f"error: --top-p must be above 0 and at most 1, but is {share}"

    real = algo.sample_tokens
    for change in (lambda x: x * 1.5, lambda x: x / 1.5, lambda x: x + torch.nan):  # a sampler of other probabilities
        monkeypatch.setattr(algo, "sample_tokens", lambda logits, *args, c=change: real(c(logits), *args))
        assert "sampler and training pass differ by" in refusal(lambda: train("top_p", top_p=0.9))


# --- anneal


def test_schedules(variant):
    schedule = variant("anneal").schedule
    linear = [schedule("linear", i, 6, 2) for i in range(1, 7)]
    assert linear == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]  # the last iteration still trains
    cosine = [schedule("cosine", i, 4, 0) for i in range(1, 5)]
    assert cosine == pytest.approx([1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2])
    assert [schedule("constant", i, 4, 3) for i in range(1, 5)] == [1 / 3, 2 / 3, 1, 1]
    assert schedule("linear", 2, 2, 2) == schedule("cosine", 1, 1, 0) == 1


def test_both_learning_rates_fall(train, folder, tmp_path, monkeypatch):
    rates, real = [], torch.optim.AdamW.step
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self, *args: rates.append(self.param_groups[0]["lr"]) or real(self, *args)
    )
    metrics = train("anneal", total_iterations=5, warmup_iterations=1, lr=1e-3, critic_lr=2e-3)
    factors = [1, 1, 0.75, 0.5, 0.25]
    assert rates[::2] == pytest.approx([1e-3 * x for x in factors]) == [m["actor/lr"] for m in metrics[1:]]
    assert rates[1::2] == pytest.approx([2e-3 * x for x in factors])
    constant = untimed(train("anneal", lr_schedule="constant", warmup_iterations=2))
    for mine, plain in zip(constant, untimed(by_ppo("anneal", folder, tmp_path, warmup_iterations=2)), strict=True):
        assert mine.pop("actor/lr", None) != 0 and mine == plain


# --- kl_gradient


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


def test_k1_plus_in_the_loss_trains_as_k2(train):
    flags = {"kl_loss_coef": 0.3, "kl_reward_coef": 0.0, "minibatch_size": 4}
    k2, plus, k1 = (untimed(train("kl_gradient", **flags, kl_loss_kind=kind)) for kind in ("k2", "k1+", "k1"))
    for a, b, c in zip(k2[1:], plus[1:], k1[1:], strict=True):
        assert a.pop("actor/loss") != b.pop("actor/loss") and a == b
        assert b["actor/grad_norm"] != c["actor/grad_norm"]


LEFT = {  # what left the scripts in 0.3
    "bypass": {"old_logprobs": "corrected", "is_level": "sequence", "is_cap": 1.05},
    "adaptive_kl": {"kl_reward_coef": 0.5, "kl_target": 1e-4, "kl_horizon": 20.0, "lr": 1e-2},
    "top_p": {"top_p": 0.7, "top_k": 9},
    "anneal": {"lr_schedule": "cosine"},
    "kl_gradient": {"kl_reward_kind": "abs", "kl_loss_coef": 0.1, "kl_loss_kind": "k3+"},
}
# A sampler that claims other log-probs, of each token by itself: whatever rows are beside it.
OTHERWISE = """
import bypass_llm

real = bypass_llm.generate


def generate(*args):
    return [r._replace(logprobs=[x - 0.002 * (i % 5) for x, i in zip(r.logprobs, r.ids)]) for r in real(*args)]


bypass_llm.generate = generate
if __name__ == "__main__":
    bypass_llm.main(bypass_llm.parse_args())
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", LEFT)
def test_by_two_as_by_one(name, folder, tmp_path):
    script = folder / f"{name}_llm.py"
    if name == "bypass":
        script = folder / "otherwise.py"
        script.write_text(OTHERWISE)
    found = []
    for processes in 1, 2:
        flags = flags_of(name, folder) | LEFT[name] | {"output_dir": tmp_path, "run_name": str(processes)}
        code, console = forked(script, flags, processes)
        assert code == 0 and f"{processes} process(es)" in console, console
        found.append(untimed(read_metrics(tmp_path / str(processes))))
    for one, two in zip(*found, strict=True):
        assert one.keys() == two.keys()
        for metric in one:
            assert one[metric] == pytest.approx(two[metric], rel=1e-4, abs=1e-5), metric
    if name == "bypass":
        assert all(1.02 < m["rollout/weight_mean"] < 1.05 and m["rollout/ess"] < 0.99999 for m in found[0][1:])


# --- dual_clip


def assert_is_ppo(name, train, folder, tmp_path, **off):
    """With these flags the variant has ppo_llm.py's metrics to the bit."""
    from accelerate.state import AcceleratorState

    flags = {"batch_size": 8, "minibatch_size": 4, "ppo_epochs": 2, "total_iterations": 1}
    changed = train(name, **flags, **off)
    AcceleratorState._reset_state(True)
    plain = load_script(ROOT / "ppo_llm.py")
    flags |= {"output_dir": str(tmp_path), "run_name": "plain"}
    metrics = read_metrics(plain.main(plain.Args(**flags_of("dual_clip", folder) | flags)))
    for ours, theirs in zip(untimed(changed), untimed(metrics), strict=True):
        assert {metric: ours[metric] for metric in theirs} == theirs


def test_dual_clip_cuts_the_loss_of_bad_tokens_alone(variant):
    """1912.09729, written out token by token: loss, gradient, and where it is clipped."""
    algo = variant("dual_clip")
    tokens = [(advantage, ratio) for advantage in (2.0, -2.0, 0.0) for ratio in (0.5, 1.0, 1.3, 2.9, 3.1, 50.0)]
    advantages, ratios = torch.tensor(tokens, dtype=torch.float64).T
    new = ratios.log().requires_grad_()
    losses, clipped = algo.policy_loss(new, torch.zeros_like(ratios), advantages, 0.2, 0.2, 3.0)
    (slopes,) = torch.autograd.grad(losses.sum(), new)
    for (a, ratio), loss, slope, cut in zip(tokens, losses.tolist(), slopes.tolist(), clipped.tolist(), strict=True):
        expected = max(-a * ratio, -a * min(max(ratio, 0.8), 1.2))
        gone = expected > -a * ratio
        if a < 0 and expected > 3 * -a:
            expected, gone = 3 * -a, True
        assert loss == pytest.approx(expected) and cut == gone
        assert slope == pytest.approx(0 if gone else -a * ratio)
    assert clipped[6:12].tolist() == [True, False, False, False, True, True]  # at 2.9 not yet, at 3.1 cut


def test_dual_clip_in_a_run(train, folder, tmp_path):
    assert_is_ppo("dual_clip", train, folder, tmp_path, dual_clip=1e9)
    flags = {"batch_size": 8, "minibatch_size": 4, "ppo_epochs": 3, "lr": 0.03, "total_iterations": 1}
    cut, free = train("dual_clip", **flags, dual_clip=1.01)[1], train("dual_clip", **flags, dual_clip=1e9)[1]
    assert cut["actor/clipfrac"] > 0.01 + free["actor/clipfrac"] and cut["actor/loss"] < free["actor/loss"]
    said = refusal(lambda: train("dual_clip", dual_clip=0.9))
    assert said == "error: --dual_clip must be at least 1, but is 0.9"


# --- value_clip


def test_value_clip_pushes_no_value_far(variant):
    """Old value 0, clip 0.2: beyond it a value is still pulled back, but pushed no further."""
    returns, new = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.1]), torch.tensor([0.1, 0.5, -0.5, 1.5, 0.3]).requires_grad_()
    losses = variant("value_clip").value_loss(new, torch.zeros(5), returns, 0.2)
    assert torch.allclose(losses, torch.tensor([0.81, 0.64, 2.25, 0.64, 0.04]) / 2)
    (slopes,) = torch.autograd.grad(losses.sum(), new)
    assert torch.allclose(slopes, torch.tensor([-0.9, 0, -1.5, 0, 0.2]))


def test_value_clip_in_a_run(variant, train, folder, tmp_path, monkeypatch):
    assert_is_ppo("value_clip", train, folder, tmp_path, value_clip=1e9)
    algo, calls, batches = variant("value_clip"), [], []
    real, real_gae = algo.value_loss, algo.gae
    monkeypatch.setattr(algo, "value_loss", lambda *args: calls.append(args) or real(*args))
    monkeypatch.setattr(algo, "gae", lambda *args: batches.append(args) or real_gae(*args))
    train("value_clip", ppo_epochs=2, microbatch_tokens=10_000, total_iterations=1, value_clip=0.01)
    assert [args[3] for args in calls] == [0.01] * 2
    (_, values, *_), (first, second) = batches[0], calls
    assert torch.equal(first[1], second[1]) and values[values != 0].sum() == first[1].sum()  # phase 4's in both epochs
    assert torch.equal(first[0], first[1]) and (second[0] - second[1]).abs().max() > 0.01  # from there they moved


# --- target_kl


def test_target_kl_leaves_out_steps_and_their_loss(variant, train, folder, tmp_path, monkeypatch):
    assert_is_ppo("target_kl", train, folder, tmp_path, target_kl=1e9)
    algo, shares, weights, trained = variant("target_kl"), [], [], []
    real, real_step = algo.aggregate, torch.optim.AdamW.step

    def step(optimizer, *args):
        real_step(optimizer, *args)
        trained.append(optimizer.param_groups[0]["params"])
        weights.append([p.detach().clone() for p in trained[-1]])

    monkeypatch.setattr(algo, "aggregate", lambda *args: shares.append(real(*args)) or shares[-1])
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    flags = {"batch_size": 16, "minibatch_size": 4, "microbatch_tokens": 10_000, "ppo_epochs": 2, "total_iterations": 1}
    free = train("target_kl", **flags, target_kl=1e9)[1]
    assert free["actor/steps"] == 8 and len(shares) == len(weights) == 16  # of actor and critic
    losses, policies = [share.item() for share in shares[:8]], weights[:8]
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
    one = untimed(train("target_kl", **flags))
    assert {m["actor/steps"] for m in one[1:]} - {1, 12}
    flags = flags_of("target_kl", folder) | flags | {"output_dir": str(tmp_path), "run_name": "two"}
    two, _ = run_ranks(2, ranks.train, str(folder / "target_kl_llm.py"), [(flags, {})], timeout=60)
    for a, b in zip(one, untimed(two[0]["metrics"]), strict=True):
        for metric in a.keys() - {"rollout/logprob_diff"}:
            assert a[metric] == pytest.approx(b[metric], rel=1e-4, abs=1e-6), metric


# --- lora_bf16


@pytest.mark.parametrize("rank, tied", [(2, False), (2, True), (0, False)])
def test_lora_bf16_is_the_same_to_the_bit(variant, folder, tmp_path, monkeypatch, rank, tied):
    """Log-probs, values and gradients of two iterations; without LoRA the reference is what is frozen."""
    from accelerate.state import AcceleratorState

    model = make_model(folder / f"tied_{tied}", tie_word_embeddings=tied)
    found = []
    for algo in (load_script(ROOT / "ppo_llm.py"), variant("lora_bf16")):
        AcceleratorState._reset_state(True)
        outputs, modules = [], []
        real, real_clip, real_wrapped = algo.forward_all, torch.nn.utils.clip_grad_norm_, algo.Policy.__init__

        def clip(parameters, norm, outputs=outputs, real=real_clip):
            parameters = [*parameters]
            outputs.extend(p.grad.clone() for p in parameters if p.grad is not None)
            return real(parameters, norm)

        def init(self, model, *args, modules=modules, real=real_wrapped):
            real(self, model, *args)
            modules.append(model)

        with monkeypatch.context() as patch:
            patch.setattr(algo, "forward_all", lambda *a, r=real, o=outputs: o.append(r(*a)) or o[-1])
            patch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
            patch.setattr(algo.Policy, "__init__", init)
            flags = flags_of("lora_bf16", folder) | {"model": model, "lora_rank": rank, "total_iterations": 2}
            run_dir = algo.main(algo.Args(**flags | {"output_dir": str(tmp_path), "run_name": f"{len(found)}"}))
        found.append((outputs, untimed(read_metrics(run_dir)), modules[-1]))  # the reference comes last
    (theirs, plain, before), (ours, changed, after) = found
    assert len(ours) > 10 and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)) and plain == changed
    assert {p.dtype for p in before.parameters()} == {torch.float32}
    head = after.get_output_embeddings().weight
    for name, p in after.named_parameters():
        cast = not p.requires_grad and p.ndim == 2 and p is not after.get_input_embeddings().weight
        assert p.dtype == (torch.bfloat16 if cast else torch.float32), name
    assert head.dtype == (torch.float32 if tied else torch.bfloat16)


# --- reward_model


REWARD_TEXTS = ["", "a", "ab c", "one two three four", "what is it?", "x" * 33, "12345", "a"]


def make_classifier(folder, arch="llama", pad="<pad>", template=None, **config):
    from transformers import AutoModelForSequenceClassification

    config = {"auto_class": AutoModelForSequenceClassification, "num_labels": 1, "seed": 3, "pad": pad} | config
    make_model(folder, arch, **config)
    tokenizer = make_tokenizer(pad)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def classify(monkeypatch):
    """classify(folder, texts, batch): (scores by the reward file, by the classifier one row at a time)."""
    monkeypatch.setenv("REWARD_MODEL", "set below")
    import reward_model
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    def run(folder, texts, batch, wanted=None):
        monkeypatch.setattr(reward_model, "NAME", folder)
        monkeypatch.setenv("REWARD_BATCH", str(batch))
        reward_model.load.cache_clear()
        chats = [[{"role": "user", "content": "ask"}] for _ in texts]
        found = reward_model.reward_model(["ask"] * len(texts), texts, [None] * len(texts), messages=chats)
        model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        wanted = wanted or [f"ask{text}" for text in texts]
        with torch.no_grad():
            rows = [torch.tensor([tokenizer(text)["input_ids"]]) for text in wanted]
            return found, [model(row).logits.item() for row in rows]

    yield run
    reward_model.load.cache_clear()


def test_what_a_reward_model_cannot_read_is_named(classify, tmp_path):
    folder = make_classifier(tmp_path / "rm", "gpt2", "<pad>")
    with pytest.raises(ValueError, match=r"reads \d+ tokens, a prompt with its response has \d{4,}"):
        classify(folder, ["short", "abc" * 2000], 4)


@pytest.mark.parametrize("arch, pad", [("llama", "<pad>"), ("llama", "<eos>"), ("llama", None), ("gpt2", "<pad>")])
def test_a_reward_model_scores_as_row_by_row(classify, tmp_path, arch, pad):
    """Rows of unequal lengths, one of them twice; one by one to the bit. Some texts end in the padding token."""
    folder = make_classifier(tmp_path / "rm", arch, pad)
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
    folder = make_classifier(tmp_path / "rm", template=template)
    found, expected = classify(folder, REWARD_TEXTS, 4, [f"u#ask\na#{text}\n" for text in REWARD_TEXTS])
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_how_a_reward_models_tokenizer_pads_is_all_one(classify, tmp_path, side):
    from transformers import AutoTokenizer

    folder = make_classifier(tmp_path / "rm")
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side, pad_token="<eos2>")
    tokenizer.save_pretrained(folder)
    found, expected = classify(folder, REWARD_TEXTS, 16)
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_reward_models_rows_are_sorted_and_few_passes(classify, tmp_path, monkeypatch):
    from transformers import LlamaForSequenceClassification

    shapes, real = [], LlamaForSequenceClassification.forward
    monkeypatch.setattr(
        LlamaForSequenceClassification,
        "forward",
        lambda self, tokens, **options: shapes.append(tuple(tokens.shape)) or real(self, tokens, **options),
    )
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


def test_what_is_no_reward_model_is_refused(classify, tmp_path):
    with pytest.raises(ValueError, match=r"one label .*score\.weight"):
        classify(make_model(tmp_path / "lm"), ["a"], 1)
    with pytest.raises(ValueError, match=r"one label \(labels: 2"):
        classify(make_classifier(tmp_path / "rm", num_labels=2), ["a"], 1)


def test_a_reward_model_in_a_run(classify, train, tmp_path, monkeypatch):
    """The scores of what was sampled; nothing of the classifier is trained."""
    import reward_model

    folder = make_classifier(tmp_path / "rm")
    monkeypatch.setattr(reward_model, "NAME", folder)
    reward_model.load.cache_clear()
    place = ROOT / "notes" / "variants" / "reward_model.py"
    metrics = train("replay", reward=f"{place}:reward_model", total_iterations=1)
    rows = read_rows(next(tmp_path.glob("*/completions/step_000001.jsonl")))
    _, expected = classify(folder, [""] * 16, 1, [row["prompt"] + row["response"] for row in rows])
    assert [row["score"] for row in rows] == pytest.approx(expected, abs=1e-5)
    assert metrics[1]["reward/mean"] == pytest.approx(sum(expected) / 16, abs=1e-5)


@pytest.mark.slow
def test_a_reward_model_on_two_processes(folder, tmp_path):
    """Each has its own copy, and half of the rows: the same scores."""
    model = make_classifier(tmp_path / "rm")
    (tmp_path / "scorer.py").write_text(
        f"import os, sys\n\nos.environ['REWARD_MODEL'] = {model!r}\n"
        f"sys.path.insert(0, {str(ROOT / 'notes' / 'variants')!r})\nfrom reward_model import reward_model\n"
    )
    flags = flags_of("replay", folder) | {"reward": f"{tmp_path}/scorer.py:reward_model", "total_iterations": 1}
    code, console = forked(ROOT / "grpo_llm.py", flags | {"output_dir": tmp_path, "run_name": "two"})
    assert code == 0, console
    code, console = forked(ROOT / "grpo_llm.py", flags | {"output_dir": tmp_path, "run_name": "one"}, 1)
    assert code == 0, console
    one, two = read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two")
    assert one[1]["reward/std"] > 0.1
    for metric in untimed(one)[1]:
        assert one[1][metric] == pytest.approx(two[1][metric], rel=1e-4, abs=1e-5), metric


# --- entropy_tokens


def test_only_the_tokens_of_highest_entropy_have_a_gradient(variant, train, monkeypatch):
    """Those above one threshold for the batch; a token that is left counts in the denominators all the same."""
    algo, calls = variant("entropy_tokens"), []
    real_forward, real_loss = algo.Policy.forward, algo.policy_loss

    def forward(policy, tokens, mask):
        logprobs, entropy = real_forward(policy, tokens, mask)
        if logprobs.requires_grad:
            calls.append([mask, entropy.detach()])
        return logprobs, entropy

    def policy_loss(new, old, advantages, *clips):
        if new.requires_grad:
            calls[-1].append(advantages)
            new.register_hook(calls[-1].append)
        return real_loss(new, old, advantages, *clips)

    monkeypatch.setattr(algo.Policy, "forward", forward)
    monkeypatch.setattr(algo, "policy_loss", policy_loss)
    flags = {"lr": 0.0, "kl_loss_coef": 0.0, "total_iterations": 1, "entropy_share": 0.3}
    metrics = train("entropy_tokens", **flags)[1]
    trained, left = [], []
    for mask, entropy, advantages, gradient in calls:
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


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_share_that_is_none_is_refused(share, train):
    said = refusal(lambda: train("entropy_tokens", entropy_share=share))
    assert said == f"error: --entropy_share must be above 0 and at most 1, but is {share}"


def test_with_all_tokens_entropy_tokens_is_grpo(train, folder):
    changed = train("entropy_tokens", entropy_share=1.0)
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    flags = flags_of("entropy_tokens", folder) | {"output_dir": str(folder), "run_name": "all_tokens"}
    for a, b in zip(untimed(read_metrics(grpo.main(grpo.Args(**flags)))), untimed(changed), strict=True):
        assert a == {name: b[name] for name in a}


def agreement(script, name, folder, train, tmp_path, **flags):
    """Two processes of the script against one of the variant: metrics to rounding, completions to the letter."""
    flags = {"eval_dataset": str(folder / "test.jsonl"), "eval_rows": 5, "eval_every": 2} | flags
    fields = flags_of(name, folder) | {"output_dir": tmp_path / "two", "run_name": "run"} | flags
    code, console = forked(script, fields)
    assert code == 0 and "2 process(es)" in console, console
    ones = train(name, **flags, run_name="one")
    twos = read_metrics(tmp_path / "two" / "run")
    for a, b in zip(untimed(ones), untimed(twos), strict=True):
        assert a.keys() == b.keys()
        for metric in a:
            assert b[metric] == pytest.approx(a[metric], rel=1e-5, abs=1e-5), (a["step"], metric)
    for path in (tmp_path / "one" / "completions").glob("eval_*"):
        assert path.read_text() == (tmp_path / "two" / "run" / "completions" / path.name).read_text()
    return ones


@pytest.mark.slow
@pytest.mark.parametrize("on", [None, "grpo_llm_fsdp"])
@pytest.mark.parametrize("name", ["entropy_tokens", "pass_at_k", "one_step_off"])
def test_one_and_two_processes_agree(name, on, sharded, folder, train, tmp_path):
    script = folder / f"{name}_llm.py"
    if on:
        script = folder / f"{name}_{on}.py"
        script.write_text(sharded(name)[0])
    agreement(script, name, folder, train, tmp_path, total_iterations=4)


# --- pass_at_k


def test_the_best_of_k_is_pass_at_k(variant):
    """Against all choices of k samples, and for scores of 0 and 1 the formula of 2107.03374."""
    from itertools import combinations
    from math import comb

    best_of = variant("pass_at_k").best_of
    scores = torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    right = (scores > 0.3).double()
    for k in range(1, 7):
        choices = [scores[:, list(choice)].amax(1) for choice in combinations(range(6), k)]
        assert torch.allclose(best_of(scores, k), torch.stack(choices).mean(0))
        formula = [1 - comb(6 - int(c), k) / comb(6, k) for c in right.sum(1)]
        assert torch.allclose(best_of(right, k), torch.tensor(formula).double())
    assert best_of(scores[:0], 2).shape == (0,)


def test_the_majority_votes_on_answers(variant):
    vote = variant("pass_at_k").majority_score
    assert vote(["so #### 1,234", "#### 7", "well #### 1234.0", "#### $1234"], [1.0, 0.0, 1.0, 1.0]) == 1
    assert vote(["#### 7", "#### 7", "#### 8"], [0.0, 0.0, 1.0]) == 0
    assert vote(["#### 8", "#### 7", "#### 7", "#### 8"], [1.0, 0.0, 0.0, 1.0]) == 1  # of two the first
    assert vote(["b", "a", "a", "#### 7"], [0.0, 0.5, 0.5, 1.0]) == 0.5  # no numbers: texts


def test_a_line_of_completions_has_its_own_samples(train, folder, tmp_path):
    (folder / "digest.py").write_text(
        "import zlib\n\n\ndef digest(prompts, responses, answers):\n"
        "    return [zlib.crc32(repr(pair).encode()) % 97 / 97 for pair in zip(prompts, responses)]\n"
    )
    flags = {"eval_dataset": str(folder / "test.jsonl"), "eval_rows": 5, "eval_samples": 6, "total_iterations": 1}
    metrics = train("pass_at_k", **flags, reward=f"{folder}/digest.py:digest", run_name="run")
    sys.path.insert(0, str(folder))
    from digest import digest

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
        pairs = [(a, b) for a in range(6) for b in range(a)]
        best = torch.stack([scores[:, pair].amax(1) for pair in pairs]).mean().item()
        assert metrics[step]["eval/pass@2"] == pytest.approx(best, abs=1e-6)
        assert {"eval/pass@4", "eval/majority"} < metrics[step].keys() and "eval/pass@8" not in metrics[step]
    said = refusal(lambda: train("pass_at_k", eval_samples=0))
    assert said == "error: --eval_samples must be at least 1, but is 0"


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 5])
def test_samples_do_not_depend_on_the_process_count(rows, train, folder, tmp_path):
    """Two processes with 3 and 2 rows, or with 1 and none."""
    flags = {"eval_rows": rows, "eval_samples": 3, "total_iterations": 2}
    metrics = agreement(folder / "pass_at_k_llm.py", "pass_at_k", folder, train, tmp_path, **flags)
    assert metrics[0]["eval/pass@2"] > metrics[0]["eval/score_sampled"]


# --- one_step_off


def test_the_weights_of_one_iteration_ago_sample(variant, train, folder, monkeypatch):
    """And those of now are evaluated; a model's weights are told apart by their sum."""
    algo, events = variant("one_step_off"), []
    real_generate, real_forward = algo.generate, algo.forward_all

    def add(kind, model):
        events.append((kind, sum(p.double().sum().item() for p in model.parameters())))

    monkeypatch.setattr(algo, "generate", lambda model, *args: add("sample", model) or real_generate(model, *args))
    monkeypatch.setattr(algo, "forward_all", lambda module, *args: add("pass", module) or real_forward(module, *args))
    evaluated = {"eval_dataset": str(folder / "test.jsonl"), "eval_rows": 2, "eval_every": 1}
    train("one_step_off", total_iterations=4, kl_loss_coef=0.0, **evaluated)
    assert [kind for kind, _ in events] == ["sample"] * 2 + ["sample", "pass", "pass", "sample", "sample"] * 4
    start, iterations = events[0][1], [[w for _, w in events[first : first + 5]] for first in range(2, 22, 5)]
    before, now = start, start  # what the policy was at the start of the last iteration, and is at that of this one
    for sampled, policy, sampler, *evaluated in iterations:
        assert sampled == sampler == before and policy == now
        assert evaluated[0] == evaluated[1] != policy
        before, now = now, evaluated[0]
    assert len({sampled for sampled, *_ in iterations}) == 3


def test_importance_weights_are_cut(variant, train, monkeypatch):
    algo, passes, plain, used = variant("one_step_off"), [], [], []
    real_forward, real_advantages, real_loss = algo.forward_all, algo.group_advantages, algo.policy_loss

    def forward_all(module, minibatches, tokens, mask):
        passes.append((mask, real_forward(module, minibatches, tokens, mask)))
        return passes[-1][1]

    monkeypatch.setattr(algo, "forward_all", forward_all)
    monkeypatch.setattr(algo, "group_advantages", lambda *args: plain.append(real_advantages(*args)) or plain[-1])

    def policy_loss(new, old, advantages, *clips):
        if new.dim() == 3:  # the call for the log, with the whole batch
            used.append(advantages)
        return real_loss(new, old, advantages, *clips)

    monkeypatch.setattr(algo, "policy_loss", policy_loss)
    metrics = train("one_step_off", total_iterations=3, kl_loss_coef=0.0, lr=5e-3, is_cap=1.1)
    for i in range(3):
        mask, old = passes[2 * i]
        _, sampled = passes[2 * i + 1]
        ratio = (old - sampled).exp()
        assert torch.allclose(used[i], torch.where(mask, plain[i][:, None] * ratio.clamp(max=1.1), 0), atol=1e-6)
        weights = ratio[mask].clamp(max=1.1)
        assert metrics[i + 1]["rollout/weight_mean"] == pytest.approx(weights.mean().item(), abs=1e-5)
        ess = weights.mean() ** 2 / weights.square().mean()
        assert metrics[i + 1]["rollout/ess"] == pytest.approx(ess.item(), abs=1e-5)
        assert (i == 0) == bool((ratio == 1).all()) and (i == 0) == bool((weights < 1.1).all())


def test_a_sampler_with_other_weights_is_refused(variant, train, monkeypatch):
    monkeypatch.setattr(variant("one_step_off"), "exchange", lambda *models: None)
    said = refusal(lambda: train("one_step_off", lr=5e-3))
    assert "iteration 2: sampler and training pass differ" in said
    said = refusal(lambda: train("one_step_off", is_cap=0.5))
    assert said == "error: --is-cap must be at least 1, but is 0.5"


@pytest.mark.parametrize("lora_rank", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_the_older_weights_are_resumed(lora_rank, train):
    flags = {"total_iterations": 4, "save_every": 2, "lora_rank": lora_rank}
    whole = train("one_step_off", **flags, run_name="whole")
    train("one_step_off", **flags | {"total_iterations": 2}, run_name="part")
    resumed = train("one_step_off", **flags, run_name="part", resume=True)
    assert untimed(resumed) == untimed(whole) and whole[3]["rollout/weight_mean"] != 1


@pytest.mark.slow
def test_the_older_weights_are_resumed_from_shards(sharded, folder, tmp_path):
    script = folder / "one_step_off_sharded.py"
    script.write_text(sharded("one_step_off")[0])
    flags = flags_of("one_step_off", folder) | {"output_dir": tmp_path, "save_every": 2}
    for changes in (
        {"run_name": "whole", "total_iterations": 4},
        {"run_name": "part", "total_iterations": 2},
        {"run_name": "part", "total_iterations": 4, "resume": True},
    ):
        code, console = forked(script, flags | changes)
        assert code == 0, console
    whole, part = (untimed(read_metrics(tmp_path / name)) for name in ("whole", "part"))
    assert whole == part


# --- multi_reward

# Of four groups of four: the scores named `wide` and `narrow`. The first group differs in one alone, the second in the
# other alone, the third in both alike, the fourth in none.
WIDE = [5.0, 5.0, 5.0, 5.0] + [0.0, 90.0, 30.0, 0.0] + [0.0, 0.0, 1.0, 1.0] + [2.0] * 4
NARROW = [0.0, 0.0, 1.0, 1.0] + [0.1] * 4 + [0.0, 0.0, 1.0, 1.0] + [0.0] * 4


@pytest.fixture
def named(folder):
    """named(body): `--reward` of a function with this body; WIDE and NARROW are there."""

    def write(name, body):
        lines = f"WIDE, NARROW = {WIDE}, {NARROW}\n\n\ndef reward(prompts, responses, answers):\n    return {body}\n"
        (folder / f"{name}.py").write_text(lines)
        return f"{folder}/{name}.py:reward"

    return write


LETTERS = '{"early": [sum(c < "m" for c in r) / 9 for r in responses], "size": [len(r) / 99 for r in responses]}'


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
@pytest.mark.parametrize("weights", [(), (2.0, 0.5)])
def test_each_reward_is_normalised_in_its_group_then_they_are_summed(
    weights, estimator, variant, train, named, monkeypatch
):
    algo, calls = variant("multi_reward"), []
    real = algo.policy_loss
    monkeypatch.setattr(algo, "policy_loss", lambda *args: calls.append(args[2]) or real(*args))
    reward = named("tabled", '{"wide": WIDE, "narrow": NARROW}')
    flags = {"reward": reward, "reward_weights": weights, "estimator": estimator, "total_iterations": 1}
    metrics = train("multi_reward", **flags)
    used = calls[-1].sum(1) / (calls[-1] != 0).sum(1).clamp(min=1)  # of the whole batch, for the log: (B,L) -> (B,)
    a, b = weights or (1.0, 1.0)
    wide, narrow = (grpo.group_advantages(torch.tensor(s), 4, estimator) for s in (WIDE, NARROW))
    summed = a * wide + b * narrow
    assert torch.allclose(used, summed / (summed.std() + 1e-6), atol=1e-6)
    assert used.std() == pytest.approx(1, abs=1e-5) and metrics[1]["advantage/mean"] == pytest.approx(0, abs=2)
    # A score that is the same in a whole group is not heard, a group that differs in both speaks of both.
    assert torch.equal(summed[:4], b * narrow[:4]) and torch.equal(summed[4:8], a * wide[4:8])
    assert torch.allclose(summed[8:12], (a + b) * narrow[:4]) and summed[12:].count_nonzero() == 0
    assert metrics[1]["group/zero_std_frac"] == 0.25


def test_scores_summed_first_would_lose_what_this_keeps(variant, train, named, monkeypatch):
    """A wide score hides a narrow one, and a group that differs in two counts as one that differs in one."""
    wide, narrow = torch.tensor([0.0, 100.0, 0.0, 100.0]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    first = grpo.group_advantages(wide + narrow, 4, "grpo")
    assert first[2] - first[0] < 0.02  # the narrow one is hardly heard
    algo, calls = variant("multi_reward"), []
    real = algo.policy_loss
    monkeypatch.setattr(algo, "policy_loss", lambda *args: calls.append(args[2]) or real(*args))
    body = '{"wide": [0.0, 100.0] * 8, "narrow": [0.0, 0.0, 1.0, 1.0] * 4}'
    train("multi_reward", reward=named("wide", body), total_iterations=1, scale_advantages=False)
    used = calls[-1].sum(1)[:4] / (calls[-1] != 0).sum(1)[:4].clamp(min=1)
    assert used.tolist() == pytest.approx([-1.732, 0, 0, 1.732], abs=1e-3)  # both count the same
    alone, both = [torch.tensor(s) for s in (NARROW[:4], [0.0, 0.0, 2.0, 2.0])]
    assert torch.allclose(*(grpo.group_advantages(s, 4, "grpo") for s in (alone, both)), atol=1e-5)


def test_a_plain_list_is_grpo(train, folder):
    """To the bit, but for the metrics of its name; with the scale of the sum it is not."""
    from accelerate.state import AcceleratorState

    flags = {"missing_eos_penalty": 0.3, "eval_rows": 3, "eval_dataset": f"{folder}/test.jsonl"}
    changed = untimed(train("multi_reward", scale_advantages=False, **flags))
    AcceleratorState._reset_state(True)
    plain = flags_of("multi_reward", folder) | flags | {"output_dir": str(folder), "run_name": "plain-grpo"}
    for ours, theirs in zip(changed, untimed(read_metrics(grpo.main(grpo.Args(**plain)))), strict=True):
        assert {name: ours[name] for name in theirs} == theirs
        assert ours.keys() - theirs.keys() <= {"score/score", "eval/score/score", "eval/score_sampled/score"}


def test_every_score_is_logged_evaluated_and_written(train, named, folder, tmp_path):
    flags = {"missing_eos_penalty": 0.25, "eval_rows": 3, "kl_reward_coef": 0.1}
    flags |= {"eval_dataset": f"{folder}/test.jsonl"}
    metrics = train("multi_reward", reward=named("letters", LETTERS), run_name="run", **flags)
    for m in metrics[1:]:
        of_kl = 2 * 0.1 * m["kl/mean"] * m["response/length_mean"]  # taken from each score
        assert m["reward/total_mean"] == pytest.approx(m["reward/mean"] - of_kl, abs=1e-5)
        assert m["score/early"] + m["score/size"] == pytest.approx(m["reward/mean"], abs=1e-6)
    for m in (metrics[0], metrics[3]):
        for kind in ("", "_sampled"):
            parts = [m[f"eval/score{kind}/{name}"] for name in ("early", "size")]
            assert sum(parts) == pytest.approx(m[f"eval/score{kind}"], abs=1e-6) and min(parts) > 0
    for kind in ("", "_sampled"):
        for row in read_rows(tmp_path / f"run/completions/eval{kind}_000003.jsonl"):
            text = row["response"]
            assert row["score"] == {"early": sum(c < "m" for c in text) / 9, "size": len(text) / 99}
    rows = read_rows(tmp_path / "run/completions/step_000003.jsonl")
    for name in ("early", "size"):
        scores = [row["score"][name] for row in rows]
        assert statistics.mean(scores) == pytest.approx(metrics[3][f"score/{name}"], abs=1e-6)
        penalty = [row["score"][name] - len(row["response"]) / 99 for row in rows]
        assert name == "early" or {round(p, 4) for p in penalty} == {0.0, -0.25}  # of a truncated one each loses it


@pytest.mark.parametrize("body", ["[0.5] * (len(prompts) - 1)", "[float('nan')] * len(prompts)", "[]"])
def test_a_bad_score_is_refused_by_its_name(body, train, named):
    reward = named("bad", f'{{"good": [1.0] * len(prompts), "bad": {body}}}')
    said = refusal(lambda: train("multi_reward", reward=reward))
    assert "the reward bad must return 16 finite numbers, not these" in said
    reward = named("good", '{"good": [1.0] * len(prompts)}')
    for weights in (1.0, 2.0), (math.nan,), (0.0,):
        said = refusal(lambda weights=weights: train("multi_reward", reward=reward, reward_weights=weights))
        assert "--reward-weights must be a finite number for each of ['good']" in said


@pytest.mark.slow
def test_multi_reward_by_two_is_multi_reward_by_one(folder, named, tmp_path):
    """One test row: the second process has none, and knows no name of a score from it."""
    flags = flags_of("multi_reward", folder) | {"reward": named("letters", LETTERS), "output_dir": tmp_path}
    flags |= {"eval_rows": 1, "eval_every": 1, "eval_dataset": f"{folder}/test.jsonl"}
    for processes in (1, 2):
        script = folder / "multi_reward_llm.py"
        code, console = forked(script, flags | {"run_name": f"by-{processes}"}, processes=processes)
        assert code == 0, console
    one, two = (untimed(read_metrics(tmp_path / f"by-{processes}")) for processes in (1, 2))
    for a, b in zip(one, two, strict=True):
        for metric in a.keys() - {"rollout/logprob_diff"}:
            assert a[metric] == pytest.approx(b[metric], rel=2e-3, abs=2e-5), metric
    for name in ("eval_000003", "step_000001"):
        files = [(tmp_path / f"by-{processes}/completions/{name}.jsonl").read_text() for processes in (1, 2)]
        assert files[0] == files[1]


# --- shared_critic


def head_of(weights):
    return torch.cat([p.detach().flatten() for name, p in weights.items() if "score." in name])


def checkpoint_of(path):
    (weights, optimizer) = torch.load(path, weights_only=True)["policy"]
    return weights, optimizer


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_value_head_is_trained_saved_and_resumed_to_the_bit(lora_rank, train, tmp_path):
    """A head that no checkpoint holds begins at zero again; with LoRA peft switches it off, and transformers not on."""
    flags = {"lora_rank": lora_rank, "total_iterations": 4, "save_every": 2, "lr": 1e-2, "critic_lr": 1e-2}
    whole = train("shared_critic", **flags, run_name="whole")
    heads = []
    for step in (2, 4):
        weights, optimizer = checkpoint_of(tmp_path / f"whole/checkpoints/step_{step:06d}.pt")
        heads.append(head_of(weights))
        assert len(optimizer["state"]) == len(weights)  # every trained tensor has its moments
    assert heads[0].count_nonzero() == 33 and heads[0].abs().max() > 1e-3 and (heads[0] != heads[1]).all()
    assert sum(m["critic/explained_variance"] != 0 for m in whole[2:]) == 3
    train("shared_critic", **flags | {"total_iterations": 2}, run_name="part")
    resumed = train("shared_critic", **flags, run_name="part", resume=True)
    assert untimed(resumed) == untimed(whole)
    ends = [checkpoint_of(tmp_path / name / "checkpoints/step_000004.pt")[0] for name in ("whole", "part")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_the_value_head_is_clipped_with_the_rest(train, monkeypatch):
    norms, heads = [], []
    real = torch.optim.AdamW.step

    def step(optimizer, *args):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(torch.cat([g.flatten() for g in gradients]).norm().item())
        heads.append(sum(g.norm().item() for g in gradients if g.shape in ((1, 32), (1,))))
        return real(optimizer, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    metrics = train("shared_critic", max_grad_norm=0.01, value_coef=5.0)
    assert norms == pytest.approx([0.01] * 3, rel=1e-3) and min(heads) > 1e-3
    assert all(m["actor/grad_norm"] > 0.1 for m in metrics[1:])


def test_the_loss_is_the_actors_and_a_share_of_the_critics(train, tmp_path, monkeypatch):
    """The gradient of one step is linear in --value-coef, in the backbone, too."""
    train("shared_critic", critic_lr=1e-1, run_name="start")  # at its start the head is zero and passes no gradient on
    gradients, real = [], torch.optim.AdamW.step

    def step(optimizer, *args):
        gradients.append([p.grad.clone() for group in optimizer.param_groups for p in group["params"]])
        return real(optimizer, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    start = {"model": f"{tmp_path}/start/final", "max_grad_norm": 0.0, "total_iterations": 1}
    for value_coef in (0.0, 1.0, 3.0):
        metrics = train("shared_critic", value_coef=value_coef, **start)
        assert metrics[1]["critic/loss"] > 0
    for none, one, three in zip(*gradients, strict=True):
        assert torch.allclose(three - none, 3 * (one - none), rtol=1e-3, atol=1e-5)
    changed = [(one - none).abs().max().item() > 1e-6 for none, one, _ in zip(*gradients, strict=True)]
    assert sum(changed) > 15 and (gradients[0][-2] == 0).all()  # the backbone; and the head alone is not the actor's


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_final_is_a_language_model_with_a_value_head_beside_it(arch, variant, train, tmp_path, folder):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

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


def test_each_head_has_its_learning_rate(train, variant, monkeypatch):
    """--critic-lr is the value head's, --lr all the others'; both are warmed up. Flags of a critic alone are gone."""
    rates, real = [], torch.optim.AdamW.step

    def step(optimizer, *args):
        rates.append([(len(group["params"]), group["lr"]) for group in optimizer.param_groups])
        return real(optimizer, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    train("shared_critic", lr=1e-3, critic_lr=1e-2, warmup_iterations=2, total_iterations=2)
    (_, first), (count, head) = rates[0]
    assert (first, count, head) == (5e-4, 2, 5e-3) and [lr for _, lr in rates[1]] == [1e-3, 1e-2]
    flags = vars(variant("shared_critic").Args)["__dataclass_fields__"].keys()
    assert "value_coef" in flags and not flags & {"critic_model", "critic_warmup_iterations"}


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_shared_critic_by_two_is_shared_critic_by_one(lora_rank, folder, tmp_path):
    flags = flags_of("shared_critic", folder) | {"output_dir": tmp_path, "lora_rank": lora_rank}
    for processes in (1, 2):
        run = {"run_name": f"by-{processes}"}
        code, console = forked(folder / "shared_critic_llm.py", flags | run, processes=processes)
        assert code == 0, console
    one, two = (untimed(read_metrics(tmp_path / f"by-{processes}")) for processes in (1, 2))
    for a, b in zip(one, two, strict=True):
        for metric in a.keys() - {"rollout/logprob_diff"}:
            assert a[metric] == pytest.approx(b[metric], rel=2e-3, abs=2e-5), metric


# -------------------------------------------------------------------------------------------------------------- fp16


def with_first_scale(text, power):
    """The variant with another first scale: a large one makes the first steps overflow, and the scale halve."""
    assert text.count("enabled=fp16)") == 1
    return text.replace("enabled=fp16)", f"enabled=fp16, init_scale=2.0**{power})")


@pytest.fixture
def train_fp16(folder, tmp_path):
    """train_fp16(first scale, on=, **flags): metrics of a run on one process, of the variant on a script."""
    from accelerate.state import AcceleratorState

    def run(power=16, on="grpo_llm", **changes):
        AcceleratorState._reset_state(True)
        path = tmp_path / f"fp16_{on}_{power}.py"
        base = (ROOT / "grpo_llm.py").read_text()
        text, conflicts = variants.merged((ROOT / f"{on}.py").read_text(), base, variants.patched("fp16"))
        assert conflicts == 0
        path.write_text(with_first_scale(text, power))
        name = "vc_ppo" if on == "ppo_llm" else "fp16"
        flags = flags_of(name, folder) | {"output_dir": str(tmp_path), "run_name": str(len(list(tmp_path.iterdir())))}
        flags |= {"critic_warmup_iterations": 0} if on == "ppo_llm" else {}
        algo = load_script(path)
        return read_metrics(algo.main(algo.Args(**flags | {"dtype": "float16"} | changes)))

    return run


@pytest.mark.parametrize("on", ["grpo_llm", "ppo_llm"])
def test_float16_has_the_gradients_of_float32(train_fp16, on):
    """The scale has left them again, the critic's, too; the sampler is nearer than in bfloat16."""
    kinds = "float16", "float32", "bfloat16"
    half, whole, bfloat = (train_fp16(on=on, dtype=dtype, total_iterations=1)[1] for dtype in kinds)
    norms = [name for name in half if name.endswith("grad_norm")]
    assert len(norms) == (2 if on == "ppo_llm" else 1)
    for name in norms:
        assert half[name] == pytest.approx(whole[name], rel=0.05) and half[name] != whole[name] > 0, name
    assert half["loss_scale"] == 2.0**16 and whole["loss_scale"] == 1 and half["overflows"] == 0
    assert whole["rollout/logprob_diff"] < 1e-6 < half["rollout/logprob_diff"]
    assert half["rollout/logprob_diff"] < bfloat["rollout/logprob_diff"] / 2


def test_an_overflow_leaves_the_step_out(train_fp16, monkeypatch):
    """With a first scale of 2**40 the weights stay as they are until it has come down; what is left out is counted."""
    used, real = [], torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *args: used.append(self) or real(self, *args))
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


def test_float16_resumes_to_the_bit(train_fp16, tmp_path):
    """The scale has come down in the first part, and the count goes on."""
    whole = train_fp16(36, total_iterations=8, save_every=4)
    half = {"run_name": "half", "output_dir": str(tmp_path), "save_every": 4}
    train_fp16(36, total_iterations=4, **half)
    resumed = train_fp16(36, total_iterations=8, resume=True, **half)
    assert untimed(whole) == untimed(resumed)
    assert resumed[4]["overflows"] > 0 and resumed[4]["loss_scale"] < 2.0**36


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_overflows_are_alike_on_all_ranks(kind, sharded, folder, train_fp16, tmp_path):
    text = variants.patched("fp16") if kind == "replicated" else sharded("fp16")[0]
    path = tmp_path / f"{kind}_llm.py"
    path.write_text(with_first_scale(text, 32))
    flags = flags_of("fp16", folder) | {"output_dir": tmp_path, "run_name": kind, "total_iterations": 6}
    code, console = forked(path, flags)
    assert code == 0 and "2 process(es)" in console and "float16" in console, console
    one, two = untimed(train_fp16(32, total_iterations=6)), untimed(read_metrics(tmp_path / kind))
    assert one[-1]["overflows"] > 0
    for a, b in zip(two, one, strict=True):
        for metric in "overflows", "loss_scale", "reward/mean", "actor/grad_norm":
            if metric in b:
                assert a[metric] == pytest.approx(b[metric], rel=0.02), metric


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
