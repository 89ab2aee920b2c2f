"""One result whatever the number of processes: every script on one, two and four ranks, sharded, and composed."""

import math
import re
from dataclasses import fields

import pytest
import torch
import torch.distributed as dist
from helpers import KL_LIMITS, compose, each_script, make_model, path_of, untimed
from ranks import fork_ranks, load_script, run_ranks, train
from torch import nn
from transformers import GenerationConfig

# Every term of both losses, several steps. With plain SGD: AdamW turns rounding into steps.
FLAGS = {"track": "none", "lr": 0.05, "critic_lr": 0.05, "batch_size": 8, "minibatch_size": 4, "microbatch_tokens": 40}
FLAGS |= {"entropy_coef": 0.01, "kl_loss_coef": 0.1, "kl_reward_coef": 0.05}
FLAGS |= {"max_response_length": 10, "total_iterations": 2, "save_every": 0, "eval_every": 2}
FIXED = {"eval_rows": 1}  # that not every rank has
ADAM = FIXED | {"lr": 1e-3, "critic_lr": 1e-3}
# The toy reward, in parts.
PARTS = """
def early(responses):
    shares = [sum(c < "m" for c in r) / max(1, len(r)) for r in responses]
    return {"early": shares, "length": [0.01 * len(r) for r in responses]}
"""
SCORES = {"part": "reward/mean", "eval_part": "eval/score", "eval_part_sampled": "eval/score_sampled"}  # their sums
# Of a run: (flags, options).
SGD_FIXED = (FIXED, {"sgd": True, "fixed": True})
SAMPLED = (ADAM, {})
LORA = (FIXED | {"lora_rank": 4, "lr": 0.5}, {"sgd": True, "fixed": True})


@pytest.fixture(scope="module")
def runs(tmp_path_factory, toy_data):
    """runs(name of the script, ranks, {name: (flags, options)}) -> {name: what `train` tells of it, for each rank}."""
    folder = tmp_path_factory.mktemp("ranks")
    model = make_model(folder / "model", initializer_range=0.05)  # mild: less is lost by cancellation
    (folder / "reward_in_parts.py").write_text(PARTS)
    GenerationConfig(eos_token_id=[5, 6, 7]).save_pretrained(model)  # sharded, rank 0 alone reads this file

    def run(script, world, wanted):
        path = compose(folder) if script == "grpo_llm_fsdp" else path_of(script)
        own = {"model": model, "dataset": toy_data, "output_dir": f"{folder}/{script}-{world}"}
        own["reward"] = f"{folder}/reward_in_parts.py:early"
        own |= {"group_size": 2, "minibatch_size": 8} if script.startswith("grpo") else {}
        known, todo = {field.name for field in fields(load_script(path).Args)}, []
        for name, (flags, options) in wanted.items():
            every = FLAGS | own | {"run_name": name} | flags
            todo.append(({flag: value for flag, value in every.items() if flag in known}, options))
        results = run_ranks(world, train, str(path), todo)
        for m in [found["metrics"][-1] for found in results[0]]:
            for kind, total in SCORES.items():
                assert m[f"{kind}/early"] + m[f"{kind}/length"] == pytest.approx(m[total], abs=1e-5)
        return {name: [rank[i] for rank in results] for i, name in enumerate(wanted)}

    return run


@pytest.fixture(scope="module")
def ppo(runs):
    return runs("ppo_llm", 1, {"sgd": SGD_FIXED, "sampled": SAMPLED, "lora": LORA})


@pytest.fixture(scope="module")
def grpo(runs):
    return runs("grpo_llm", 1, {"sgd": SGD_FIXED})


def compare(found, expected, tolerance, weights=None):
    """Metrics of the first rank, and parameters of every rank, against those of one process."""
    (expected,) = expected
    for a, b in zip(untimed(found[0]["metrics"]), untimed(expected["metrics"]), strict=True):
        assert a == pytest.approx(b, rel=tolerance, abs=tolerance)
    for rank in found:
        for model, parameters in expected["weights"].items():
            ours = rank["weights"][model]
            assert ours.keys() == parameters.keys()
            for name, x in parameters.items():
                assert (ours[name] - x).abs().max() <= (weights or tolerance), (model, name)


def compare_gradients(found, expected, tolerance):
    for rank in found:
        assert len(rank["gradients"]) == len(expected[0]["gradients"]) >= 4
        for a, b in zip(rank["gradients"], expected[0]["gradients"]):
            assert b.abs().max() > 1e-4 and (a - b).abs().max() <= tolerance


@each_script("ppo_llm", "grpo_llm")
def test_two_ranks_are_one(script, runs, request):
    """The scripts that have a whole model on each rank: these stay alike."""
    alone = request.getfixturevalue(script.stem.partition("_")[0])
    wanted = {"sgd": SGD_FIXED} | ({"lora": LORA} if script.stem == "ppo_llm" else {})
    for case, found in runs(script.stem, 2, wanted).items():
        compare(found, alone[case], 1e-5)
        compare_gradients(found, alone[case], 1e-5)
        first, second = found
        for model, weights in first["weights"].items():
            assert all(torch.equal(x, second["weights"][model][key]) for key, x in weights.items())
        start, *_, end = [g for g in alone[case][0]["gradients"] if g.shape == alone[case][0]["gradients"][0].shape]
        assert (start - end).abs().max() > 1e-3  # the policy's, of the first step and the last
        assert any(len(a) != len(b) for a, b in zip(first["sizes"], second["sizes"]))  # of micro-batches


def misled(script, flags):
    """A run in which the sampler of rank 1 claims other log-probs of its last response; counts optimizer steps."""
    algo = load_script(script)

    def to_batch(*args, real=algo.to_batch):
        tokens, mask, logprobs, lengths = real(*args)
        row = mask.sum(1).argmax()  # of ten tokens, whose KL is divided by 16
        logprobs[row, mask[row]] += math.sqrt(2 * 50 * KL_LIMITS["float32"] * 16 / 10) * dist.get_rank()
        return tokens, mask, logprobs, lengths

    algo.to_batch = to_batch
    algo.sum_gradients = lambda *args: print("a step")
    algo.main(algo.Args(**flags))


@each_script("ppo_llm")
def test_one_wrong_row_of_another_rank_ends_the_run(script, toy_flags, tmp_path):
    """Of 64, before a step: every rank says so. In the mean it would pass."""
    flags = toy_flags | {"output_dir": str(tmp_path), "batch_size": 64}
    codes, consoles, _ = fork_ranks(2, misled, str(script), flags)
    assert 1 in codes and "a step" not in "".join(consoles)
    for console in consoles:
        mean, worst = re.search(
            r"iteration 1: sampler and training pass have a KL of (\S+) .* response (\S+) ", console
        ).groups()
        assert float(mean) < KL_LIMITS["float32"] and float(worst) == pytest.approx(50 * KL_LIMITS["float32"], rel=0.05)


def weigh(script, mode):
    """The weights of this rank's half of the rows, of which rank 1 has none with an action."""
    dist.init_process_group("gloo")
    part = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    weights = load_script(script).token_weights(ROWS[part], mode, 10)
    dist.barrier()
    return weights


ROWS = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]], dtype=torch.bool)


@each_script("ppo_llm")
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_a_minibatch_may_be_empty_on_one_rank(script, algo, mode):
    """The ranks' weights are those of one process with all rows."""
    assert torch.equal(torch.cat(run_ranks(2, weigh, str(script), mode)), algo.token_weights(ROWS, mode, 10))


# ------------------------------------------------------------------------------------------------- sums of gradients

SHAPES = [(3,), (2, 500), *[(i, 3) for i in range(1, 32)], (), (7, 1)]  # more than two buckets of 16


def parameters_of(rank):
    """Their gradients are whole numbers, which add up without rounding. One is missing on all ranks, one on rank 1."""
    stream = torch.Generator().manual_seed(rank)
    parameters = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    for i, parameter in enumerate(parameters):
        gradient = torch.randint(-99, 99, parameter.shape, generator=stream).float()
        parameter.grad = None if i == 4 or (i == 6 and rank == 1) else gradient
    return parameters


def add_up(script):
    """The sums on this rank."""
    dist.init_process_group("gloo")
    parameters = parameters_of(dist.get_rank())
    load_script(script).sum_gradients(iter(parameters))
    dist.barrier()
    return [p.grad for p in parameters]


@each_script("ppo_llm")
def test_gradients_add_up(script, algo):
    """A missing one counts as zero, on one rank or on all, and on a process alone, whose others keep their values."""
    single, other = ([p.grad if p.grad is not None else 0 * p.data for p in parameters_of(rank)] for rank in range(2))
    for sums in run_ranks(2, add_up, str(script)):
        assert all(torch.equal(x, a + b) for x, a, b in zip(sums, single, other, strict=True))
    parameters = parameters_of(0)
    algo.sum_gradients(parameters)
    assert all(torch.equal(p.grad, a) for p, a in zip(parameters, single, strict=True))


# ---------------------------------------------------------------------------------------------------------- sharded

ALL = {"offload": True, "gradient_checkpointing": True}
SHARDED = {"sgd": SGD_FIXED, "lora": LORA, "copies": (FIXED | ALL | {"shard_group_size": 1}, SGD_FIXED[1])}
BY_FOUR = {"sampled": SAMPLED, "sharded rollout": (ADAM | {"rollout_params": "sharded"}, {})}
BY_FOUR |= {"pairs": (FIXED | ALL | {"shard_group_size": 2}, SGD_FIXED[1])}


@pytest.fixture(scope="module")
def sharded_by_two(runs):
    return runs("ppo_llm_fsdp", 2, SHARDED)


def check_sharded(name, found, ppo):
    if name in ("sampled", "sharded rollout"):
        return compare(found, ppo["sampled"], 1e-4, 1e-3)
    expected = ppo["lora" if name == "lora" else "sgd"]
    compare(found, expected, 1e-5, 1e-6)
    compare_gradients(found, expected, 1e-6 if name in ("copies", "pairs") else 1e-5)


@each_script("ppo_llm_fsdp")
@pytest.mark.parametrize("name", SHARDED)
def test_sharded_by_two(script, ppo, sharded_by_two, name):
    check_sharded(name, sharded_by_two[name], ppo)


@pytest.mark.slow
@each_script("ppo_llm_fsdp")
def test_sharded_by_four(script, ppo, runs):
    for name, found in runs("ppo_llm_fsdp", 4, BY_FOUR).items():
        check_sharded(name, found, ppo)


@each_script("ppo_llm_fsdp")
def test_ranks_cut_equally_many_micro_batches(script, sharded_by_two):
    """Every pass needs all ranks. Without this they would differ, as those of ppo_llm.py do."""
    for parts in zip(*(rank["sizes"] for rank in sharded_by_two["sgd"])):
        assert len({len(part) for part in parts}) == 1 and len({sum(part) for part in parts}) == 1


# --------------------------------------------------------------------------------------------------------- composed


@each_script("grpo_llm")
def test_composed_is_grpo(script, runs, grpo):
    """The merged script on two ranks: what grpo_llm.py computes."""
    found = runs("grpo_llm_fsdp", 2, {"sgd": SGD_FIXED})["sgd"]
    compare(found, grpo["sgd"], 1e-5)
    compare_gradients(found, grpo["sgd"], 1e-5)
