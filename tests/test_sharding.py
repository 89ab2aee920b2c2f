"""ppo_llm_fsdp.py on several ranks: rollouts, folders, checkpoints, memory. What it computes: test_ranks.py."""

import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from helpers import make_model, path_of, read_metrics, refusal, untimed
from ranks import load_script, run_ranks, train, whole
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPT = "ppo_llm_fsdp"
PATH = str(path_of(SCRIPT))


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@contextmanager
def joined():
    """The script, an accelerator, and what `shard` wants besides a module, for all ranks."""
    algo = load_script(PATH)
    dist.init_process_group("gloo")
    yield algo, Accelerator(cpu=True), (init_device_mesh("cpu", (dist.get_world_size(),)), False, False)
    dist.barrier()


def load_policy(algo, name, sharding):
    model = algo.load_model(name, AutoModelForCausalLM)
    assert all(p.is_meta == (dist.get_rank() > 0) for p in model.parameters())  # no rank but the first has it whole
    return algo.shard(algo.Policy(model, 1.0).train(), *sharding)


# --------------------------------------------------------------------------------------------------------- rollouts


def prompts_of(algo, rank):
    """Prompts of this rank, of its own number and lengths, and their noise."""
    lengths = [2 + 3 * rank, 5][: 1 + rank]
    shape, stream = (len(lengths), 12), algo.random_stream("noise", rank)
    return [[5 + rank + i] * n for i, n in enumerate(lengths)], torch.rand(shape, generator=stream, dtype=torch.float64)


def sample(folder):
    """Both ways, each rank with prompts of its own; and with a rank that samples twice, the other not at all."""
    with joined() as (algo, _, sharding):
        policy, rank, found = load_policy(algo, folder, sharding), dist.get_rank(), {}
        prompts, noise = prompts_of(algo, rank)
        for gathered in (True, False):
            for temperature in (0, 1.0):
                with algo.generating(policy, gathered):
                    found[gathered, temperature] = algo.generate(policy.model, prompts, noise, [1], temperature)
            with algo.generating(policy, gathered):
                for _ in range((2, 0)[rank]):
                    again = algo.generate(policy.model, prompts, noise, [1], 0)
                    assert [response.ids for response in again] == [response.ids for response in found[gathered, 0]]
            policy(torch.ones(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.bool))
            assert all(isinstance(p, DTensor) for p in policy.parameters())  # sharded again, after each pass
    return found


def test_gathered_and_sharded_rollouts_give_the_tokens_of_the_whole_model(algo, tied):
    model, lengths = AutoModelForCausalLM.from_pretrained(tied), set()
    for rank, found in enumerate(run_ranks(2, sample, tied)):
        prompts, noise = prompts_of(algo, rank)
        for temperature in (0, 1.0):
            expected = algo.generate(model, prompts, noise, [1], temperature)
            lengths |= {len(response.ids) for response in expected}
            for gathered in (True, False):
                for ours, theirs in zip(found[gathered, temperature], expected, strict=True):
                    assert ours.ids == theirs.ids and ours.truncated == theirs.truncated
                    assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    assert len(lengths) > 1  # ranks do end at different times


# ---------------------------------------------------------------------------------------------------------- folders


def step_and_save(folder, place):
    """Trains a tied model for a step and saves it."""
    with joined() as (algo, accelerator, sharding):
        policy = load_policy(algo, folder, sharding)
        policy.model.model.register_buffer("bias", torch.arange(3.0))  # as some routers have one: saved, not trained
        tokens = torch.arange(3, 15).view(2, 6)
        policy(tokens, tokens < 20)[0].sum().backward()
        torch.optim.SGD(policy.parameters(), lr=0.1).step()
        trainees = {"policy": (policy.model, None)}
        algo.save_models(Path(place), trainees, AutoTokenizer.from_pretrained(folder), accelerator)
    return {name: whole(p) for name, p in policy.model.named_parameters()}


def test_tied_models_learn_as_whole_ones_and_reload_with_plain_transformers(algo, tied, tmp_path):
    """The shared weight gets the gradients of both its uses, once. Both ranks have the same rows, which add up."""
    found = run_ranks(2, step_and_save, tied, str(tmp_path / "saved"))
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"] and {*info["unexpected_keys"]} == {"model.bias"}
    weights = load_file(tmp_path / "saved" / "model.safetensors")
    assert weights["model.bias"].tolist() == [0, 1, 2] and "lm_head.weight" not in weights  # tied: once
    tokens, alone = torch.arange(3, 15).view(2, 6), algo.Policy(AutoModelForCausalLM.from_pretrained(tied), 1.0)
    (2 * alone(tokens, tokens < 20)[0].sum()).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    for trained in found:
        assert trained.keys() == dict(model.named_parameters()).keys()
        for (name, saved), expected in zip(model.named_parameters(), alone.model.parameters()):
            assert torch.equal(saved, trained[name]) and torch.allclose(saved, expected, atol=1e-6), name


# ------------------------------------------------------------------------------------------------------ checkpoints


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory, toy_flags):
    """(fields of Args, run folder) of two iterations on two ranks, with a checkpoint at each."""
    folder = tmp_path_factory.mktemp("two")
    flags = toy_flags | {"save_every": 1, "eval_every": 2, "eval_rows": 1}
    flags |= {"output_dir": str(folder), "run_name": "two"}
    run_ranks(2, train, PATH, [(flags, {})])
    return flags, folder / "two"


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_checkpoint_of_two_goes_on_with_any_number(run_of_two, tmp_path, world):
    flags, run_dir = run_of_two
    copy = shutil.copytree(run_dir, tmp_path / "two")
    shutil.rmtree(copy / "checkpoints" / "step_000002")
    results = run_ranks(world, train, PATH, [(flags | {"output_dir": str(tmp_path), "resume": True}, {})])
    expected, found = untimed(read_metrics(run_dir)), untimed(results[0][0]["metrics"])
    assert found[:2] == expected[:2] and len(found) == 3
    for a, b in zip(found, expected):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-4)
    weights = load_file(run_dir / "final" / "model.safetensors")
    for rank in results:
        for name, x in rank[0]["weights"]["policy"].items():
            assert (x - weights[name]).abs().max() < 1e-3, name


def test_a_hole_in_a_checkpoint_is_seen(run_of_two, tmp_path, toy_run):
    """Without its first shard the sizes of all tensors still look right: the reader would leave their first rows."""
    flags, run_dir = run_of_two
    copy = shutil.copytree(run_dir, tmp_path / "two")
    min((copy / "checkpoints" / "step_000002").glob("*.safetensors")).unlink()
    sentence = refusal(lambda: toy_run(**flags | {"output_dir": str(tmp_path), "resume": True}))
    assert f"{copy}/checkpoints/step_000002 is incomplete, or was written by another script" in sentence


# --------------------------------------------------------------------------------------------- memory and precision


def test_shards_compute_in_bfloat16_add_up_in_float32_and_may_stay_on_the_host(algo, toy_run, monkeypatch):
    """But for the critic's head, which stays in float32. (On a CPU, nothing shows --offload but the option.)"""
    given, real = {}, algo.fully_shard

    def fully_shard(unit, **options):
        given[type(unit).__name__] = options
        return real(unit, **options)

    monkeypatch.setattr(algo, "fully_shard", fully_shard)
    toy_run(dtype="bfloat16", total_iterations=0)
    assert not any("offload_policy" in options for options in given.values())
    policies = {name: options.get("mp_policy") for name, options in given.items()}
    assert policies.pop("Linear") is None and policies.keys() == {"LlamaDecoderLayer", "Policy", "Critic"}
    assert {(p.param_dtype, p.reduce_dtype) for p in policies.values()} == {(torch.bfloat16, torch.float32)}
    toy_run(offload=True, total_iterations=0)
    assert all("offload_policy" in options for options in given.values())
