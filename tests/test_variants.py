"""Variants: every patch applies as it stands, is linted, trains, and does what its head says."""

import dataclasses
import json
import re
import statistics
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, compose, forked, make_model, read_metrics, toy_rows, untimed, write_rows
from ranks import load_script

sys.path.insert(0, str(ROOT / "notes"))
sys.path.insert(0, str(ROOT / "notes" / "variants"))
import variants

grpo = load_script(ROOT / "grpo_llm.py")
NAMES = variants.names()
ON_PPO = [name for name in NAMES if variants.read_patch(name)[1] == "ppo_llm.py"]
LONG = {"shared_prompt"}  # the one that may be longer than 60 lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every variant as a whole file, and a small model with data."""
    folder = tmp_path_factory.mktemp("variants")
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
        "    return [[(i + 1, 0.1) for i, c in enumerate(r) if c < 'm'] for r in responses]\n"
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
    return flags | ({"critic_warmup_iterations": 1} if name == "vc_ppo" else {})


# ------------------------------------------------------------------------------------------------- patches as patches


@pytest.mark.parametrize("name", NAMES)
def test_a_patch_is_of_todays_script(name):
    """Made of the very file that is there: whoever edits a script rebases."""
    head, script, blob, _ = variants.read_patch(name)
    assert blob == variants.git("hash-object", ROOT / script).stdout.strip(), "python notes/variants.py rebase"
    assert re.match(r"What: .+\nIdea: .+\nRun:  .+\nMeasured: ", re.sub(r"\n +", " ", head)), head
    assert "(the change" not in head and "(numbers" not in head
    removed, added, hunks = variants.changes(name)
    assert 5 <= removed + added <= (100 if name in LONG else 60) and hunks <= 10


def test_patches_are_small():
    sizes = [variants.changes(name) for name in NAMES]
    assert statistics.median(removed + added for removed, added, _ in sizes) <= 28
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
    assert len(trained) >= 2 and all(m["rollout/logprob_diff"] < 1e-5 for m in trained)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
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
    assert table in (ROOT / "notes" / "13-change-it.md").read_text(), table


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
    ("target_kl", "anneal"),
    ("vc_ppo", "value_clip"),
    ("plain_pg", "process_reward"),
    ("vc_ppo", "two_turns"),  # of two scripts
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
RUN_SHARDED = "cispo", "gspo", "dapo", "vc_ppo", "process_reward"


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
    with pytest.raises(SystemExit):
        credit(texts, [(6, 1.0)])


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
        assert m["actor/loss"] == m["actor/grad_norm"] == 0 and m["reward/sampled_mean"] == 1


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
        lambda f, t, rows, r: (asked.append([row["prompt"] for row in rows][::4]), real(f, t, rows, r))[1],
    )
    flags = {"reward": f"{folder}/toy.py:binary", "total_iterations": 6, "save_every": 3, "batch_size": 8}
    whole = train("replay", **flags, run_name="whole")
    assert any(m["group/replayed"] for m in whole[1:]) and any(m["group/failed"] for m in whole[1:])
    for before, after, m in zip(asked, asked[1:], whole[2:]):
        again = int(m["group/replayed"])
        assert again <= 4 and set(after[:again]) <= set(before)
    train("replay", **flags | {"total_iterations": 3}, run_name="part")
    resumed = train("replay", **flags, run_name="part", resume="auto")
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
    with pytest.raises(SystemExit):
        train("distill", ref_model=str(folder / "stranger"))


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
        model.base_model.register_forward_pre_hook(lambda _, args, w=widths: w.append(args[0].shape))
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
    assert length_control.length_control([""] * 4, responses, ["5"] * 4) == pytest.approx([1, 0.8, 0, 0.5])


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
    """The README names each patch and file."""
    readme = (ROOT / "README.md").read_text()
    for path in sorted((ROOT / "notes" / "variants").iterdir()):
        assert path.suffix in (".patch", ".py") or path.name == "__pycache__"
        assert path.name == "__pycache__" or f"`{path.stem}`" in readme, path
