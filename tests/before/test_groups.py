"""What is GRPO's own: advantages from groups, sequence-level ratios, overlong penalties, dynamic sampling."""

import itertools
import math
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .helpers_before import TOY_REWARD, load_script, make_model, read_metrics, read_rows, write_rows

grpo = load_script("grpo_llm")
ESTIMATORS = "grpo", "dr_grpo", "rloo", "reinforce_pp"


def advantages(scores, group_size, estimator):
    return grpo.group_advantages(torch.tensor(scores, dtype=torch.float64), group_size, estimator)


def close(found, expected, tolerance=1e-5):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


# --- estimators ------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("estimator", ESTIMATORS[:3])
def test_groups_of_one_are_refused_where_there_is_nothing_to_compare(estimator):
    with pytest.raises(ValueError, match="groups of two"):
        advantages([1.0, 2.0], 1, estimator)


def test_equal_scores_whiten_to_zero():
    assert advantages([0.5] * 6, 1, "reinforce_pp").tolist() == [0] * 6
    assert advantages([0.5], 1, "reinforce_pp").tolist() == [0]


def test_unknown_estimator():
    with pytest.raises(ValueError, match="unknown estimator 'gae'"):
        advantages([1.0, 2.0], 2, "gae")


@pytest.mark.parametrize("estimator", ESTIMATORS[:3])
def test_other_groups_do_not_matter(estimator):
    alone = advantages([1.0, 4.0, 2.0], 3, estimator)
    assert torch.equal(advantages([9.0, 0.0, 3.0, 1.0, 4.0, 2.0], 3, estimator)[3:], alone)


# --- overlong penalty, sequence-level ratio --------------------------------------------------------------------------


def test_overlong_penalties():
    lengths = torch.tensor([1, 16, 17, 18, 20])
    close(grpo.overlong_penalties(lengths, 20, 4, 1.0), [0, 0, 0.25, 0.5, 1])
    close(grpo.overlong_penalties(lengths, 20, 4, 3.0), [0, 0, 0.75, 1.5, 3])
    close(grpo.overlong_penalties(lengths, 20, 20, 1.0), [0.05, 0.8, 0.85, 0.9, 1])
    assert not grpo.overlong_penalties(lengths, 20, 0, 1.0).any()  # off


@pytest.mark.parametrize("junk", [9.0, math.nan])
def test_sequence_level_ratio_is_the_geometric_mean(junk):
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]).bool()
    stream = torch.Generator().manual_seed(1)
    new, old = (torch.randn(3, 4, generator=stream, dtype=torch.float64) for _ in range(2))
    new, old = (torch.where(mask, x, junk).requires_grad_(i == 0) for i, x in enumerate((new, old)))
    found = grpo.sequence_level(new, old, mask)
    ratio = torch.where(mask, (found - old).exp(), 0)
    for i, length in enumerate((3, 1, 4)):
        expected = math.prod((new[i, t] - old[i, t]).exp().item() for t in range(length)) ** (1 / length)
        assert ratio[i, :length].tolist() == pytest.approx([expected] * length)
    assert not found[~mask].any()
    # The gradient of GSPO's objective (eq. 5): mean over responses of min(s*A, clip(s)*A).
    signs = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)[:, None]
    losses = grpo.policy_loss(found, torch.where(mask, old, 0), signs.expand(3, 4), 0.2, 0.2)
    grpo.aggregate(losses, mask, "seq-mean-token-mean", 8, 3, 4).backward()
    gradient, new.grad = new.grad, None
    s = torch.stack([(new[i, :n] - old[i, :n]).mean().exp() for i, n in enumerate((3, 1, 4))])
    objective = torch.minimum(s * signs[:, 0], s.clamp(0.8, 1.2) * signs[:, 0]).mean()
    (-objective).backward()
    close(gradient, new.grad, 1e-12)
    assert not gradient[~mask].any() and gradient.abs().sum() > 0


# --- in a run --------------------------------------------------------------------------------------------------------

# Responses of a prompt whose `keep` is 0 all score alike; others by their text, so that a group nearly never ties.
KEEP_REWARD = """
def by_keep(prompts, responses, answers, keep):
    return [k * (sum(map(ord, r)) % 89 + 1) / 90 for r, k in zip(responses, keep)]
"""


@pytest.fixture
def grpo_run(tiny_model, toy_data, toy_reward, tmp_path):
    """Runs grpo_llm's `main` for about a second: (run folder, its metrics)."""
    counter = itertools.count()

    def run(**changes):
        base = {"model": tiny_model, "dataset": toy_data, "reward": toy_reward, "output_dir": str(tmp_path / "runs")}
        base |= {"batch_size": 4, "group_size": 2, "minibatch_size": 4, "max_response_length": 10, "eval_every": 0}
        base |= {"total_iterations": 2, "lr": 1e-3, "run_name": f"run{next(counter)}"}
        run_dir = grpo.main(grpo.Args(**base | changes))
        return run_dir, read_metrics(run_dir)

    return run


@pytest.fixture
def keep_data(tmp_path):
    """keep_data([1, 0, ...]) -> flags of data with these values of `keep` and the reward that heeds them."""

    def make(values):
        (tmp_path / "keep.py").write_text(KEEP_REWARD)
        rows = [{"prompt": f"question {i}", "keep": k} for i, k in enumerate(values)]
        return {"dataset": write_rows(tmp_path / "keep.jsonl", rows), "reward": f"{tmp_path / 'keep.py'}:by_keep"}

    return make


def rollouts(calls):
    """Calls of `generate` that were not evaluations, which sample each prompt once."""
    return [(args, result) for args, result in calls if len(args[3]) > len(args[1])]


def test_a_group_shares_one_prefill(grpo_run, spy):
    calls = spy(grpo, "generate")
    grpo_run(batch_size=2, group_size=4, minibatch_size=8)
    for (_, queries, _, uniforms, *_), (responses, _) in rollouts(calls):
        assert len(queries) == 2 and len(uniforms) == len(responses) == 8
    assert len(rollouts(calls)) == 2


def test_no_coefficient_no_reference(grpo_run, spy, capsys):
    made = spy(grpo.copy, "deepcopy")
    _, metrics = grpo_run(kl_loss_coef=0.0)
    assert not [result for _, result in made if isinstance(result, torch.nn.Module)]
    assert "kl/mean" not in metrics[-1] and "none, no KL is asked for" in capsys.readouterr().out
    _, metrics = grpo_run(kl_loss_coef=0.1)
    assert len([result for _, result in made if isinstance(result, torch.nn.Module)]) == 1
    assert "kl/mean" in metrics[-1] and "frozen copy" in capsys.readouterr().out


@pytest.mark.parametrize("estimator, warns", [("grpo", True), ("dr_grpo", False)])
def test_dividing_by_the_std_of_a_group_makes_a_kl_in_the_reward_loud(grpo_run, capsys, estimator, warns):
    tie, kl = torch.ones(4), torch.tensor([1e-4, -2e-4, 3e-4, 0.0])  # all are right, and hardly differ
    assert (grpo.group_advantages(tie - 0.05 * kl, 4, estimator).abs().max() > 0.5) == warns
    grpo_run(estimator=estimator, kl_reward_coef=0.05, total_iterations=1)
    assert ("the KL in the reward decides" in capsys.readouterr().out) == warns


def test_the_normaliser_of_dr_grpo_is_the_longest_response_allowed(grpo_run, spy):
    calls = spy(grpo, "aggregate")
    grpo_run(estimator="dr_grpo", loss_agg="seq-mean-token-sum-norm", max_response_length=30, microbatch_tokens=1)
    assert calls and all(args[5] == 30 and args[4] == 4 for args, _ in calls)
    assert any(args[0].shape[1] < 30 for args, _ in calls)  # whatever the width


def test_advantages_are_those_of_the_groups(grpo_run, spy, tmp_path):
    """From the completions on disk to the loss: group order survives packing, minibatches and ranks."""
    calls = spy(grpo, "policy_loss")
    run_dir, _ = grpo_run(total_iterations=1, batch_size=8, group_size=3, minibatch_size=12, microbatch_tokens=60)
    rows = read_rows(run_dir / "completions" / "step_000001.jsonl")
    assert all(len({row["query"] for row in rows[i : i + 3]}) == 1 for i in range(0, 24, 3))
    expected = advantages([row["score"] for row in rows], 3, "grpo").tolist()
    found = []
    for (_, _, mb_advantages, *_), _ in calls:
        first = mb_advantages[:, 0]  # the advantage of the response's first token, and of all others
        assert ((mb_advantages == first[:, None]) | (mb_advantages == 0)).all()
        found += first.tolist()
    assert sorted(found) == pytest.approx(sorted(expected), abs=1e-5) and len(found) == 24


def test_a_sequence_has_one_ratio(grpo_run, spy):
    calls = spy(grpo, "policy_loss")
    grpo_run(importance_level="sequence", ppo_epochs=2, lr=1e-2, total_iterations=1)
    changed = 0
    for (logprobs, old, mb_advantages, *_), _ in calls:
        ratio, valid = (logprobs - old).detach(), mb_advantages != 0
        changed += int((ratio[valid].abs() > 1e-4).sum())
        assert (((ratio - ratio[:, :1]).abs() < 1e-5) | ~valid).all()
    assert changed > 10


def test_overlong_penalty_in_the_scores(grpo_run, keep_data):
    _, metrics = grpo_run(**keep_data([0] * 24), overlong_buffer=30, overlong_penalty=5.0, max_response_length=30)
    for m in metrics[1:]:
        assert m["reward/mean"] == pytest.approx(-5 * m["response/length_mean"] / 30, abs=1e-5)
        assert m["advantage/std"] > 0 and m["group/zero_std_frac"] == 1  # the task gave no signal, the lengths did


# --- dynamic sampling ------------------------------------------------------------------------------------------------


def keep_at(places):
    """`keep` of 24 rows, 1 for those drawn at these places of the first epoch of seed 1."""
    order = grpo.draw_prompts(range(24), 0, 24, 1)
    return [int(order.index(i) in places) for i in range(24)]


def test_draw_prompts_is_one_stream():
    rows = list(range(10))
    stream = grpo.draw_prompts(rows, 0, 40, 3)
    assert all(sorted(stream[i : i + 10]) == rows for i in range(0, 40, 10))
    assert len({tuple(stream[i : i + 10]) for i in range(0, 40, 10)}) == 4
    assert [x for i in range(0, 40, 4) for x in grpo.draw_prompts(rows, i, 4, 3)] == stream
    assert grpo.draw_prompts(rows, 0, 40, 4) != stream and grpo.draw_prompts(rows, 7, 25, 3) == stream[7:32]


def test_dynamic_sampling_refills_with_new_prompts(grpo_run, keep_data, spy):
    drawn, generated = spy(grpo, "draw_prompts"), spy(grpo, "generate")
    run_dir, metrics = grpo_run(**keep_data([1, 0, 0] * 8), dynamic_sampling=True, max_resamples=9, eval_every=1)
    for step, m in enumerate(metrics[1:], 1):
        rows = read_rows(run_dir / "completions" / f"step_{step:06d}.jsonl")
        assert len(rows) == 8 and all(int(row["query"].split()[1]) % 3 == 0 for row in rows)
        assert all(a["query"] == b["query"] and a["score"] != b["score"] for a, b in zip(rows[::2], rows[1::2]))
        assert m["group/used"] == 4 < m["group/generated"] and m["group/zero_std_frac"] > 0.4
    assert len(drawn) == len(generated) == sum(m.get("group/generated", 0) for m in metrics) / 4
    assert [args[1] for args, _ in drawn] == list(range(0, 4 * len(drawn), 4))  # no prompt is skipped or drawn twice
    assert len({tuple(args[3].flatten().tolist()) for args, _ in generated}) == len(generated)  # new noise every time


def test_surplus_groups_are_dropped_and_counted(grpo_run, keep_data):
    flags = keep_data(keep_at({0, 1, 2, 5, 6, 7}))
    _, metrics = grpo_run(**flags, dynamic_sampling=True, total_iterations=1)
    names = "generated", "used", "surplus", "zero_std_frac"
    assert [metrics[1][f"group/{name}"] for name in names] == [8, 4, 2, 2 / 8]


def test_without_dynamic_sampling_everything_is_used(grpo_run, keep_data):
    _, metrics = grpo_run(**keep_data(keep_at({0})), total_iterations=1)
    names = "generated", "used", "surplus", "zero_std_frac"
    assert [metrics[1][f"group/{name}"] for name in names] == [4, 4, 0, 3 / 4]


def test_at_the_cap_what_there_is_is_trained_on(grpo_run, keep_data, spy):
    calls, updates = spy(grpo, "aggregate"), spy(grpo.AdaptiveKL, "update")
    flags = keep_data(keep_at({1, 5, 6})) | {"loss_agg": "seq-mean-token-sum"}
    flags |= {"kl_controller": "adaptive", "kl_reward_coef": 0.1, "kl_horizon": 100.0}
    _, metrics = grpo_run(**flags, dynamic_sampling=True, max_resamples=1, total_iterations=1)
    assert metrics[1]["group/generated"] == 8 and metrics[1]["group/used"] == 3
    assert sorted(args[4] for args, _ in calls) == [2, 4]  # two steps, each with the count of its own responses
    assert sum(int(args[1].any(1).sum()) for args, _ in calls) == 6
    assert [args[2] for args, _ in updates] == [6]


@pytest.mark.parametrize("changes", [{}, {"overlong_buffer": 10}, {"missing_eos_penalty": 1.0}], ids=str)
def test_every_group_constant_stops_at_the_cap(grpo_run, keep_data, spy, tmp_path, changes):
    """Penalties differ within the groups, and are no signal of the task."""
    calls = spy(grpo, "generate")
    with pytest.raises(SystemExit) as error:
        grpo_run(**keep_data([0] * 24), dynamic_sampling=True, max_resamples=2, run_name="constant", **changes)
    assert len(calls) == 3
    message = error.value.code
    assert message.startswith("error: iteration 1: ") and "\n" not in message and len(message) < 500
    assert all(
        part in message for part in ("--max-resamples", "--temperature", "3 rollouts of 4 prompts", "score differently")
    )
    assert (tmp_path / "runs" / "constant" / "final" / "model.safetensors").is_file()  # nothing learned is lost


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The scenarios of groups_worker.py on two ranks: (folder, exit codes, consoles)."""
    folder = tmp_path_factory.mktemp("two_ranks")
    make_model(folder / "model")
    (folder / "keep.py").write_text(KEEP_REWARD)
    (folder / "early.py").write_text(TOY_REWARD)
    for name, places in {"uneven": {0, 2, 4, 6, 5}, "none": set()}.items():
        rows = [{"prompt": f"question {i}", "keep": k} for i, k in enumerate(keep_at(places))]
        write_rows(folder / f"{name}.jsonl", rows)
    with socket.socket() as s:
        s.bind(("", 0))
        port = s.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("groups_worker.py")), str(folder)]
    env = os.environ | {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    workers = [subprocess.Popen(command, env=env, **pipes) for env in ranks]
    try:
        consoles = [worker.communicate(timeout=120)[0] for worker in workers]  # a hang is an error
    finally:
        for worker in workers:
            worker.kill()
    return folder, [worker.returncode for worker in workers], consoles


def test_ranks_train_on_the_smallest_common_number_of_groups(two_ranks):
    """Of two rounds with two prompts each, rank 0 keeps all four groups and rank 1 one of its own."""
    folder, _, consoles = two_ranks
    assert (folder / "uneven-0.pt").is_file(), consoles
    (m,) = read_metrics(folder / "runs" / "uneven")[1:]
    assert [m[f"group/{name}"] for name in ("generated", "used", "surplus", "zero_std_frac")] == [8, 2, 3, 3 / 8]
    weights = [torch.load(folder / f"uneven-{rank}.pt") for rank in (0, 1)]
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    start = torch.load(folder / "start-0.pt")
    assert any(not torch.equal(weights[0][k], start[k]) for k in start)


def test_a_rank_without_valid_tokens_keeps_in_step(two_ranks):
    """Every response of rank 1 is masked out: its micro-batches count for nothing, and take part."""
    folder, _, consoles = two_ranks
    assert (folder / "empty-1.pt").is_file(), consoles
    weights = [torch.load(folder / f"empty-{rank}.pt") for rank in (0, 1)]
    assert all(torch.equal(weights[0][k], weights[1][k]) and weights[0][k].isfinite().all() for k in weights[0])
    assert all(math.isfinite(value) for m in read_metrics(folder / "runs" / "empty") for value in m.values())


def test_no_rank_hangs_when_every_group_is_constant(two_ranks):
    _, exit_codes, consoles = two_ranks
    assert exit_codes == [1, 1], consoles
    assert consoles[0].count("error: iteration 1: ") == 1 and "Traceback" not in "".join(consoles)
