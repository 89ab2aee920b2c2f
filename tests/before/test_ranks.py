"""One process and two do the same: rows, noise, denominators, gradients, weights, metrics, decisions.

ranks_worker.py runs all scenarios once alone and once as two gloo ranks; the tests compare what they saved.
"""

import json
import math
import os
import socket
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from .helpers_before import (
    LOSS_AGGS,
    MICROBATCH_TOKENS,
    TOY_REWARD,
    has_critic,
    load_script,
    make_model,
    read_metrics,
    toy_rows,
    write_rows,
)

REWARDS = (
    TOY_REWARD
    + """
def nan_on_rank_1(prompts, responses, answers):
    import os
    return [float("nan") if os.environ.get("RANK") == "1" else 0.0 for _ in prompts]
"""
)
UNLIKE = "time/", "throughput/", "memory/"  # what differs from run to run


@pytest.fixture(scope="module", params=["grpo_llm"])
def algo(request):
    """One script: what ppo_llm_fsdp.py does on two processes is in test_sharding.py."""
    return load_script(request.param)


def start_worker(script, folder, world_size, rank, port):
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # gloo ranks need no GPU of their own
    if world_size > 1:
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    command = [sys.executable, str(Path(__file__).with_name("ranks_worker.py")), script, str(folder)]
    with open(folder / f"{world_size}-{rank}.txt", "w") as output:
        return subprocess.Popen(command, env=env, cwd=folder, stdout=output, stderr=subprocess.STDOUT)


class Results:
    def __init__(self, algo, folder, exit_codes):
        self.folder, self.exit_codes = folder, exit_codes
        self.parts = ("actor", "critic") if has_critic(algo) else ("actor",)

    def output(self, world_size, rank):
        return (self.folder / f"{world_size}-{rank}.txt").read_text()

    def __call__(self, world_size, rank, name):
        path = self.folder / f"{world_size}-{rank}" / f"{name}.pt"
        if not path.is_file():
            pytest.fail(
                f"rank {rank} of {world_size} never finished {name!r}:\n{self.output(world_size, rank)[-3000:]}"
            )
        return torch.load(path)

    def metrics(self, world_size, name):
        return read_metrics(self.folder / f"runs-{world_size}" / name)


@pytest.fixture(scope="module")
def ranks(algo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    make_model(folder / "model", initializer_range=0.05)  # milder: less is lost by cancellation, 1e-6 is within reach
    write_rows(folder / "train.jsonl", toy_rows(24))
    write_rows(folder / "same.jsonl", toy_rows(1) * 8)
    for n in (5, 1):
        write_rows(folder / f"eval{n}.jsonl", toy_rows(n, 100))
    (folder / "reward.py").write_text(REWARDS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = [start_worker(algo.__name__, folder, *of, port) for of in ((1, 0), (2, 0), (2, 1))]
    deadline, exit_codes = time.time() + 300, []
    for worker in workers:
        try:
            exit_codes.append(worker.wait(max(1, deadline - time.time())))
        except subprocess.TimeoutExpired:
            worker.kill()
            exit_codes.append("hung")
    return Results(algo, folder, exit_codes)


def largest_difference(a, b):
    """Relative to the largest entry, when that is above 1."""
    return float((a - b).abs().max() / max(1.0, float(b.abs().max())))


def assert_close(found, expected, tolerance, where=""):
    assert found.keys() == expected.keys(), where
    for key, value in expected.items():
        assert math.isclose(found[key], value, rel_tol=tolerance, abs_tol=tolerance), (where, key, found[key], value)


for_each_run = pytest.mark.parametrize("name", ["fixed", "sampled", "own", "lora"])

# Data and noise


def rows_of(results, world_size, name):
    """Rows of every minibatch, all ranks together."""
    parts = [results(world_size, rank, name)["minibatches"] for rank in range(world_size)]
    return [sorted(chain(*minibatch)) for minibatch in zip(*parts)]


@for_each_run
def test_minibatches_hold_the_same_prompts_and_responses(ranks, name):
    one, two = rows_of(ranks, 1, name), rows_of(ranks, 2, name)
    assert len(one) == len(two) == {"fixed": 3 * 4, "sampled": 4 * 2, "own": 2 * 2, "lora": 3 * 2}[name]
    assert one == two
    assert all(len(minibatch) == {"fixed": 4, "sampled": 8, "own": 8, "lora": 8}[name] for minibatch in one)


@for_each_run
def test_no_minibatch_splits_a_group(ranks, name):
    for rank in (0, 1):
        for minibatch in ranks(2, rank, name)["minibatches"]:
            prompts = [prompt for prompt, _ in minibatch]
            assert prompts and prompts[::2] == prompts[1::2] and len(set(map(str, prompts))) == len(prompts) / 2


def test_ranks_share_out_the_prompts(ranks):
    first, second = ({str(p) for p, _ in chain(*ranks(2, r, "sampled")["minibatches"][:6])} for r in (0, 1))
    assert len(first) == len(second) == 12 and not first & second  # 3 iterations of 8 are the 24 rows, once each


def test_no_row_shares_its_noise(ranks):
    rows = list(chain(*rows_of(ranks, 2, "same prompt")))
    assert len({str(prompt) for prompt, _ in rows}) == 1
    assert len({str(response) for _, response in rows}) == len(rows) == 16


def test_evaluation_scores_every_row_once(ranks):
    for n in (5, 1):  # both leave a rank without a row in the last batch, 1 without any
        seen = []
        for world_size in (1, 2):
            ranks(world_size, 0, f"eval {n}")
            path = ranks.folder / f"runs-{world_size}" / f"eval {n}" / "completions" / "eval_000000.jsonl"
            seen.append(sorted(map(json.loads, path.read_text().splitlines()), key=lambda row: row["prompt"]))
        assert [row["prompt"] for row in seen[1]] == sorted(row["question"] for row in toy_rows(n, 100))
        assert seen[0] == seen[1]
        (found,), (expected,) = ranks.metrics(2, f"eval {n}"), ranks.metrics(1, f"eval {n}")
        for key in ("score", "score_sampled"):
            assert found[f"eval/{key}"] == pytest.approx(sum(row[key] for row in seen[1]) / n, abs=1e-6)
        assert found["eval/length_mean"] == expected["eval/length_mean"]


# Mathematics


def test_whitening_spans_the_ranks(ranks):
    one, parts = ranks(1, 0, "moments"), [ranks(2, rank, "moments") for rank in (0, 1)]
    assert len(one) == 6
    for name, (whitened, moments) in one.items():
        found = torch.cat([part[name][0] for part in parts])
        assert torch.isfinite(whitened).all() and torch.allclose(found, whitened, atol=1e-6), name
        for part in parts:
            for a, b in zip(part[name][1], moments):
                assert torch.allclose(a, b, rtol=1e-12, atol=1e-12), name
    # Against the definition, not only against each other.
    values = torch.tensor([1.0, 2, 4, -3])
    expected = (values - values.mean()) / values.std()
    assert torch.allclose(one["unequal"][0][[0, 0, 0, 1], [0, 1, 2, 0]], expected, atol=1e-6)
    assert one["one each"][0][:, 0].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-6)
    assert not one["one token"][0].any() and not one["no token"][0].any()


@pytest.mark.parametrize("mode", LOSS_AGGS)
def test_gradients_do_not_depend_on_microbatches_or_processes(ranks, mode):
    """2 actor steps per epoch, then as many of the critic; SGD, all loss terms, rank 1's responses much the shorter."""
    expected = ranks(1, 0, f"gradients {mode} {MICROBATCH_TOKENS[-1]}")
    assert len(expected["steps"]) == 4 * len(ranks.parts) and all(len(sizes) == 1 for sizes in expected["sizes"])
    assert all(step["gradient"].abs().max() > 1e-3 for step in expected["steps"])
    # Sums over tokens have entries of about 2, and rounding errors to match: 1.02e-6 on one CPU, below 1e-6 on another.
    bound = 2e-6 if mode == "seq-mean-token-sum" else 1e-6
    for tokens in MICROBATCH_TOKENS:
        for world_size, rank in ((1, 0), (2, 0), (2, 1)):
            found, where = ranks(world_size, rank, f"gradients {mode} {tokens}"), (tokens, world_size, rank)
            widest = max(size for sizes in found["sizes"] for size in sizes)
            assert widest in {1: (1,), 40: (2, 4), 10_000: (8 // world_size,)}[tokens], (
                where
            )  # rows; two share a prompt
            for i, (step, reference) in enumerate(zip(found["steps"], expected["steps"])):
                difference = largest_difference(step["gradient"], reference["gradient"])
                assert difference < bound, (where, "actor" if i < 4 else "critic", i, difference)


@for_each_run
def test_weights_are_those_of_one_process(ranks, name):
    """SGD after fixed rollouts is exact; AdamW divides by the gradient's size and enlarges the rounding errors."""
    tolerance = 1e-4 if name == "sampled" else 1e-6
    expected, ours, theirs = ranks(1, 0, name), ranks(2, 0, name), ranks(2, 1, name)
    start = load_file(ranks.folder / "model" / "model.safetensors")
    actor = ours["weights"]["actor"]
    moved = largest_difference(actor["model.lm_head.weight"], start["lm_head.weight"])
    if name == "lora":  # one of its two matrices began as 0, the head stays
        assert moved == 0
        moved = max(weight.abs().max() for n, weight in actor.items() if "lora_B" in n)
    assert moved > 100 * tolerance
    for key in ranks.parts:
        for n, weight in expected["weights"][key].items():
            assert torch.equal(ours["weights"][key][n], theirs["weights"][key][n]), (key, n)
            assert largest_difference(ours["weights"][key][n], weight) < tolerance, (key, n)


@pytest.mark.parametrize("name", ["fixed", "sampled", "own"])  # lora: its rounding errors depend on the CPU
def test_metrics_are_those_of_one_process(ranks, name):
    ranks(2, 1, name)
    one, two = ranks.metrics(1, name), ranks.metrics(2, name)
    assert len(one) == len(two) == {"fixed": 4, "sampled": 5, "own": 3}[name]
    for found, expected in zip(two, one):
        found, expected = ({k: v for k, v in m.items() if not k.startswith(UNLIKE)} for m in (found, expected))
        assert_close(found, expected, 1e-5, f"step {found['step']}")
    own = "critic/explained_variance" if "critic" in ranks.parts else "group/zero_std_frac"
    assert {"kl/mean", "kl/coef", own, "advantage/std", "actor/clipfrac_dual"} <= found.keys()
    assert two[-1]["throughput/tokens_per_second"] > 0


def test_the_learning_rate_counts_iterations(ranks):
    for world_size, rank in ((1, 0), (2, 0), (2, 1)):
        rates = [step["lr"] for step in ranks(world_size, rank, "sampled")["steps"]]
        assert rates == pytest.approx([lr for lr in (0.5e-3, 1e-3, 1e-3, 0.5e-3) for _ in range(4 * len(ranks.parts))])


# Decisions


def num_actor_steps(found, num_critic_steps):
    sizes = [len(step["gradient"]) for step in found["steps"]]
    assert num_critic_steps == 0 or sizes.count(sizes[-1]) == num_critic_steps  # the critic goes on
    return len(sizes) - num_critic_steps


@pytest.mark.parametrize("name", ["drift of one rank", "drift of all"])
def test_all_ranks_stop_at_the_target_kl(ranks, name):
    num_critic_steps = 8 if "critic" in ranks.parts else 0
    one, *two = [num_actor_steps(ranks(*of, name), num_critic_steps) for of in ((1, 0), (2, 0), (2, 1))]
    assert two == [one, one]
    assert one == 0 if name == "drift of all" else 0 < one < 8


def test_an_error_on_one_rank_ends_all(ranks):
    assert ranks.exit_codes == [0, 1, 1], "\n".join(ranks.output(2, rank)[-2000:] for rank in (0, 1))
    assert "error: the reward returned nan for" in ranks.output(2, 0)
    assert "Traceback" not in ranks.output(2, 0) + ranks.output(2, 1)
    assert all((ranks.folder / f"2-{rank}" / "done").is_file() for rank in (0, 1))


def test_the_run_folder_names_the_processes(ranks):
    for world_size in (1, 2):
        ranks(world_size, 0, "fixed")
        args = json.loads((ranks.folder / f"runs-{world_size}" / "fixed" / "args.json").read_text())
        assert args["num_processes"] == world_size
