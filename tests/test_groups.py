"""What is grpo_llm.py's own: advantages from groups, one prefill for a group, its loop. What it shares is one text with
ppo_llm.py (test_project.py) and tested there; ranks: test_ranks.py."""

import itertools
import math
import statistics
from pathlib import Path

import pytest
import torch
from conftest import make_model, path_of, read_rows, untimed
from ranks import load_script
from transformers import AutoModelForCausalLM

SCRIPT = "grpo_llm"
grpo = load_script(path_of(SCRIPT))
ESTIMATORS = "grpo", "dr_grpo", "rloo", "reinforce_pp"


def advantages(scores, group_size, estimator):
    return grpo.group_advantages(torch.tensor(scores, dtype=torch.float64), group_size, estimator)


def close(found, expected, tolerance=1e-5):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------------------- estimators

ROOT_HALF, W = math.sqrt(0.5), math.sqrt(2.5 / 3)  # W: unbiased std of .5, -.5, 1, -1
GOLDEN = [  # worked out by hand
    ("grpo", 2, [1, 0, 3, 1], [ROOT_HALF, -ROOT_HALF, ROOT_HALF, -ROOT_HALF]),  # a pair is always +-0.7071
    ("dr_grpo", 2, [1, 0, 3, 1], [0.5, -0.5, 1, -1]),
    ("rloo", 2, [1, 0, 3, 1], [1, -1, 2, -2]),  # the other of a pair is the baseline
    ("reinforce_pp", 2, [1, 0, 3, 1], [0.5 / W, -0.5 / W, 1 / W, -1 / W]),
    ("grpo", 4, [1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),  # mean 1/4, unbiased std 1/2
    ("dr_grpo", 4, [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
    ("rloo", 4, [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
    ("reinforce_pp", 4, [1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
    ("reinforce_pp", 1, [1, 2, 3, 6], [x / math.sqrt(14 / 3) for x in (-2, -1, 0, 3)]),
]


@pytest.mark.parametrize("estimator, group_size, scores, expected", GOLDEN)
def test_golden_advantages(estimator, group_size, scores, expected):
    close(advantages([float(s) for s in scores], group_size, estimator), expected)


@pytest.mark.parametrize("estimator, group_size", itertools.product(ESTIMATORS, (2, 3, 8)))
@pytest.mark.parametrize("seed", range(3))
def test_advantages_against_their_definition(estimator, group_size, seed):
    stream = torch.Generator().manual_seed(seed)
    groups = (5 * torch.randn(6, group_size, generator=stream, dtype=torch.float64) - 20).tolist()
    expected = []
    for group in groups:
        for i, s in enumerate(group):
            others = [x for j, x in enumerate(group) if j != i]
            baseline = statistics.mean(others if estimator == "rloo" else group)
            expected.append((s - baseline) / (statistics.stdev(group) + 1e-6 if estimator == "grpo" else 1))
    if estimator == "reinforce_pp":
        mean, std = statistics.mean(expected), math.sqrt(statistics.variance(expected) + 1e-8)
        expected = [(x - mean) / std for x in expected]
    close(advantages(list(itertools.chain(*groups)), group_size, estimator), expected, 1e-9)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_permutation_of_rows_permutes_advantages(estimator):
    stream = torch.Generator().manual_seed(0)
    groups = torch.randn(5, 4, generator=stream, dtype=torch.float64)
    expected = grpo.group_advantages(groups.flatten(), 4, estimator).view(5, 4)
    order = torch.randperm(5, generator=stream)
    within = torch.stack([torch.randperm(4, generator=stream) for _ in range(5)])
    found = grpo.group_advantages(groups[order].gather(1, within).flatten(), 4, estimator)
    close(found.view(5, 4), expected[order].gather(1, within), 1e-12)
    mixed = grpo.group_advantages(groups.T.flatten(), 4, estimator).view(4, 5).T  # rows of different groups
    assert not torch.allclose(mixed, expected, atol=0.1)


CONSTANT = [[0.3, 0.1 + 0.2], [1e6, 1e6 + 0.5], [0.0, 0.0], [-7.0, -7.0], [0.1 + 0.7, 0.8], [1e-7, -1e-7]]
VARIED = [[0.3, 0.3001], [1e6, 1e6 + 2], [0.0, 1e-5], [-7.0, -7.0001]]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("pair", CONSTANT, ids=str)
def test_a_constant_group_gets_exactly_zero(estimator, pair):
    assert max(pair) != min(pair) or pair in ([0.0, 0.0], [-7.0, -7.0])
    found = advantages([2.0, 5.0, *pair, 1.0, 3.0], 2, estimator)
    assert found[2:4].tolist() == [0, 0] and found[[0, 1, 4, 5]].abs().min() > 0.1
    assert advantages(pair * 3, 2, estimator).tolist() == [0] * 6  # every group


def test_which_groups_are_constant():
    pairs = torch.tensor(CONSTANT + VARIED, dtype=torch.float64)
    assert grpo.constant_groups(pairs.flatten(), 2).tolist() == [True] * len(CONSTANT) + [False] * len(VARIED)
    assert grpo.constant_groups(torch.tensor([0.3, 0.1 + 0.2, 1.0, 0.0]), 2).tolist() == [True, False]  # fp32
    triples = torch.tensor([1.0, 1.0, 0.0, 2.0, 2.0, 2.0])
    assert grpo.constant_groups(triples, 3).tolist() == [False, True]


def test_equal_scores_whiten_to_zero():
    assert advantages([0.5] * 6, 1, "reinforce_pp").tolist() == [0] * 6
    assert advantages([0.5], 1, "reinforce_pp").tolist() == [0]


@pytest.mark.parametrize("estimator", ESTIMATORS[:3])
def test_other_groups_do_not_matter(estimator):
    alone = advantages([1.0, 4.0, 2.0], 3, estimator)
    assert torch.equal(advantages([9.0, 0.0, 3.0, 1.0, 4.0, 2.0], 3, estimator)[3:], alone)


# --------------------------------------------------------------------------------------------------------- sampling


@pytest.fixture(scope="module", params=["llama", "gpt2"])  # rotary and absolute positions
def model(request, tmp_path_factory):
    return AutoModelForCausalLM.from_pretrained(make_model(tmp_path_factory.mktemp("model"), arch=request.param))


def noise(rows, width, seed=0):
    return torch.rand(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16], [9, 10]]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 3, 3, 3), (1, 4, 2, 5)])
def test_responses_to_one_prompt_are_those_to_each_alone(model, sizes):
    """Whatever the sizes of the groups: one prompt after the other by the script that knows no groups."""
    ppo = load_script(path_of("ppo_llm"))
    prompts = [prompt for prompt, size in zip(PROMPTS, sizes) for _ in range(size)]
    uniforms, seen = noise(len(prompts), 12), []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(tuple(args[0].shape)), with_kwargs=True)
    found = grpo.generate(model, prompts, uniforms, [1, 20, 21], 1.0)
    hook.remove()
    assert (
        seen[0] == (4, 7) and max(rows for rows, _ in seen[1:]) >= len(prompts) * 0.7
    )  # read once, then a row for each
    expected = [ppo.generate(model, [p], u[None], [1, 20, 21], 1.0)[0] for p, u in zip(prompts, uniforms)]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.ids == theirs.ids and ours.truncated == theirs.truncated
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=2e-5)
    assert len({tuple(x.ids) for x in found}) > len(prompts) // 2  # every row has noise of its own
    assert len({len(x.ids) for x in found}) > 1 or len(prompts) < 5


def test_equal_prompts_of_different_rows_share_too(model):
    """Also where another prompt stands between them: then it is read twice."""
    prompts, uniforms, seen = [[5, 6], [5, 6], [7], [5, 6]], noise(4, 6), []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(tuple(args[0].shape)), with_kwargs=True)
    found = grpo.generate(model, prompts, uniforms, [1], 1.0)
    hook.remove()
    alone = [grpo.generate(model, [p], u[None], [1], 1.0)[0] for p, u in zip(prompts, uniforms)]
    assert seen[0] == (3, 2) and [x.ids for x in found] == [x.ids for x in alone]


MERGED = [  # prompts, the distinct ones, which of them each prompt is
    ([[5, 6]], [[5, 6]], [0]),
    ([[5, 6], [5, 6], [7], [7]], [[5, 6], [7]], [0, 0, 1, 1]),
    ([[5, 6], [7], [5, 6]], [[5, 6], [7], [5, 6]], [0, 1, 2]),  # equal, but no neighbours
    ([[5], [5, 6], [5, 6], [6, 5]], [[5], [5, 6], [6, 5]], [0, 1, 1, 2]),  # one begins like another
]


@pytest.mark.parametrize("prompts, distinct, owners", MERGED)
def test_merge_equal(prompts, distinct, owners):
    found, found_owners = grpo.merge_equal(prompts, "cpu")
    assert [ids.tolist() for ids in found] == distinct and found_owners.tolist() == owners
    assert [found[owner].tolist() for owner in found_owners] == prompts


# --------------------------------------------------------------------------------------------------------- the loop


def test_nothing_moves_without_a_learning_rate(toy_run):
    for flags in ({}, {"lora_rank": 4}, {"estimator": "rloo", "temperature": 0.5}):
        _, metrics = toy_run(lr=0.0, ppo_epochs=2, **flags)
        for m in metrics[1:]:
            assert m["actor/ratio_mean"] == m["actor/ratio_max"] == 1 and m["actor/clipfrac"] == 0
            assert m["actor/approx_kl"] == m["kl/mean"] == 0 and m["rollout/logprob_diff"] < 1e-5
            assert m["actor/grad_norm"] > 0


def test_a_group_shares_one_prefill_and_has_noise_of_its_own(toy_run, monkeypatch):
    calls, real = [], grpo.generate
    monkeypatch.setattr(grpo, "generate", lambda *args: calls.append(args) or real(*args))
    toy_run(batch_size=3, group_size=4, minibatch_size=12, rollout_batch_size=5)
    prompts, uniforms = [prompt for args in calls[:3] for prompt in args[1]], torch.cat([args[2] for args in calls[:3]])
    assert [len(args[1]) for args in calls] == [5, 5, 2] * 2  # a group may be cut: its prompt is read twice
    assert [prompts[i] == prompts[i - 1] for i in range(1, 12)] == ([True] * 3 + [False]) * 2 + [True] * 3
    stream = grpo.random_stream("rollout", 1, 1)
    assert torch.equal(uniforms, torch.rand(3, 4, 10, generator=stream, dtype=torch.float64).flatten(0, 1))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_advantages_are_those_of_the_groups(toy_run, monkeypatch, estimator):
    """From the completions on disk to the loss: who is in a group survives packing and minibatches."""
    calls, real = [], grpo.policy_loss
    monkeypatch.setattr(grpo, "policy_loss", lambda *args: calls.append(args) or real(*args))
    sizes = {"batch_size": 8, "group_size": 3, "minibatch_size": 12, "microbatch_tokens": 60}
    run_dir, (_, m) = toy_run(total_iterations=1, eval_rows=1, estimator=estimator, **sizes)
    rows = read_rows(run_dir / "completions" / "step_000001.jsonl")
    assert all(len({row["prompt"] for row in rows[i : i + 3]}) == 1 for i in range(0, 24, 3))
    expected, found = advantages([row["score"] for row in rows], 3, estimator).tolist(), []
    for _, _, mb_advantages, *_ in calls[:-1]:  # the last is that of the log
        largest = mb_advantages.gather(1, mb_advantages.abs().argmax(1, keepdim=True))
        assert ((mb_advantages == largest) | (mb_advantages == 0)).all()  # one number for all tokens of a response
        found += largest.flatten().tolist()
    assert sorted(found) == pytest.approx(sorted(expected), abs=1e-5) and len(found) == 24
    assert m["reward/mean"] == m["reward/total_mean"]


def test_a_kl_in_the_reward_enters_before_the_groups_are_compared(toy_run, monkeypatch):
    """The KL of a whole response, from the log-probs of all its tokens."""
    compared, scored, passes = [], [], []
    advantages_of, place, forward = grpo.group_advantages, grpo.place_scores, grpo.forward_all
    monkeypatch.setattr(grpo, "group_advantages", lambda *args: compared.append(args) or advantages_of(*args))
    monkeypatch.setattr(grpo, "place_scores", lambda *args: scored.append(args) or place(*args))
    monkeypatch.setattr(grpo, "forward_all", lambda *args: passes.append(forward(*args)) or passes[-1])
    _, metrics = toy_run(kl_reward_coef=0.3, missing_eos_penalty=0.7, estimator="rloo", total_iterations=3)
    assert len(compared) == len(scored) == len(passes) / 2 == 3
    for m, (total, *_), (scores, _), old, ref in zip(metrics[1:], compared, scored, passes[::2], passes[1::2]):
        kl = (old - ref).sum(1)
        torch.testing.assert_close(total, scores - 0.3 * kl, rtol=0, atol=1e-6)
        assert m["reward/mean"] == pytest.approx(scores.mean().item(), abs=1e-6)
        assert total.shape == (8,) and m["reward/total_mean"] == pytest.approx(total.mean().item(), abs=1e-6)
    assert kl.abs().min() > 1e-3 and kl.std() > 1e-3


CONSTANT_REWARD = """
def reward(prompts, responses, answers):
    return [float(prompt in sorted(set(prompts))[:2]) * i for i, prompt in enumerate(prompts)]
"""


def test_groups_that_score_alike_are_counted_and_teach_nothing(toy_run, tmp_path, monkeypatch):
    calls, real = [], grpo.group_advantages
    monkeypatch.setattr(grpo, "group_advantages", lambda *args: calls.append(real(*args)) or calls[-1])
    (tmp_path / "constant_reward.py").write_text(CONSTANT_REWARD)
    spec = f"{tmp_path}/constant_reward.py:reward"
    for flags in ({}, {"estimator": "rloo"}, {"estimator": "reinforce_pp"}):
        _, (_, m) = toy_run(reward=spec, total_iterations=1, **flags)
        assert m["group/zero_std_frac"] == 0.5  # two of four prompts
        assert sorted((calls[-1].view(4, 2) == 0).all(1).tolist()) == [False, False, True, True]
    (tmp_path / "no_reward.py").write_text(
        "def reward(prompts, responses, answers):\n    return [1.0] * len(prompts)\n"
    )
    _, (_, m) = toy_run(reward=f"{tmp_path}/no_reward.py:reward", total_iterations=1, kl_loss_coef=0.0)
    assert m["group/zero_std_frac"] == 1 and m["actor/grad_norm"] == m["advantage/std"] == 0


def test_groups_of_one(toy_run):
    _, metrics = toy_run(group_size=1, batch_size=8, estimator="reinforce_pp")
    assert "group/zero_std_frac" not in metrics[1] and metrics[1]["actor/grad_norm"] > 0
    assert metrics[1]["advantage/mean"] != 0  # whitened over responses, not tokens


def test_no_coefficient_no_reference(toy_run, capsys, monkeypatch):
    loaded, real = [], grpo.load_model
    monkeypatch.setattr(grpo, "load_model", lambda *args, **options: loaded.append(args) or real(*args, **options))
    _, metrics = toy_run(kl_loss_coef=0.0)
    assert len(loaded) == 1 and metrics[-1]["kl/mean"] == 0
    assert "KL         to the start: 0.0 in the reward, 0.0 in the loss" in capsys.readouterr().out
    _, metrics = toy_run(kl_loss_coef=0.1)
    assert len(loaded) == 3 and metrics[-1]["kl/mean"] != 0
    assert "KL         to the start: 0.0 in the reward, 0.1 in the loss" in capsys.readouterr().out


def test_dividing_by_the_std_of_a_group_makes_a_kl_in_the_reward_loud():
    tie, kl = torch.ones(4), torch.tensor([1e-4, -2e-4, 3e-4, 0.0])  # all are right, and hardly differ
    for estimator, loud in (("grpo", True), ("dr_grpo", False)):
        assert (grpo.group_advantages(tie - 0.05 * kl, 4, estimator).abs().max() > 0.5) == loud


def test_the_normaliser_of_dr_grpo_is_the_longest_response_allowed(toy_run, monkeypatch):
    calls, real = [], grpo.aggregate
    monkeypatch.setattr(grpo, "aggregate", lambda *args: calls.append(args) or real(*args))
    toy_run(estimator="dr_grpo", loss_agg="seq-mean-token-sum-norm", max_response_length=30, microbatch_tokens=1)
    assert calls and all(args[5] == 30 and args[4] == 4 for args in calls)
    assert any(args[1].sum(1).max() < 30 for args in calls)  # whatever the lengths


@pytest.mark.parametrize("loss_agg", ["token-mean", "seq-mean-token-sum"])
def test_gradients_do_not_depend_on_micro_batches(toy_run, loss_agg):
    flags = {"lr": 0.0, "loss_agg": loss_agg, "entropy_coef": 0.1, "kl_loss_coef": 0.1}
    first, *others = (untimed(toy_run(microbatch_tokens=n, **flags)[1]) for n in (1, 64, 10_000))
    for other in others:
        for a, b in zip(first, other):
            assert a == pytest.approx(b, rel=2e-6, abs=2e-6)


REFUSED = {
    "a minibatch that splits a group": ({"minibatch_size": 5}, "--minibatch-size must be a multiple of --group-size 2"),
    "responses that do not divide": ({"batch_size": 5}, "--batch-size x --group-size one of --minibatch-size"),
    **{
        f"{name} of one": (
            {"group_size": 1, "batch_size": 8, "estimator": name},
            f"--estimator {name} compares responses to one prompt: --group-size must be 2 or more",
        )
        for name in ESTIMATORS[:3]
    },
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(toy_run, capsys, what):
    flags, sentence = REFUSED[what]
    with pytest.raises(SystemExit) as leaving:
        toy_run(**flags)
    assert leaving.value.code == 1 and sentence in capsys.readouterr().err


def test_what_is_saved_is_the_policy_alone(toy_run):
    run_dir, _ = toy_run(save_every=2)
    assert {path.name for path in Path(run_dir).iterdir()} >= {"final", "checkpoints", "metrics.jsonl", "args.json"}
    assert not list(Path(run_dir).rglob("critic"))
    saved = torch.load(run_dir / "checkpoints" / "step_000002" / "checkpoint.pt", weights_only=True)
    assert saved.keys() == {"policy", "state"}
