"""ppo_llm_fsdp.py on several ranks: checkpoints, memory, precision. What it computes: test_ranks.py."""

import gc
import shutil

import pytest
import torch
import torch.distributed as dist
from conftest import make_model, path_of, read_metrics, refusal, untimed
from ranks import load_script, run_ranks, train
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM

SCRIPT = "ppo_llm_fsdp"
PATH = str(path_of(SCRIPT))


# ---------------------------------------------------------------------------------------------- loading and rollouts


def on_meta(folder):
    """Whether this rank has loaded no weights."""
    dist.init_process_group("gloo")
    model = load_script(PATH).load_model(folder, AutoModelForCausalLM)
    dist.barrier()
    return {p.is_meta for p in model.parameters()}


def test_the_first_rank_alone_loads_the_weights(tiny_model):
    assert run_ranks(2, on_meta, tiny_model) == [{False}, {True}]


def test_parameters_are_sharded_again_after_a_rollout_and_after_a_pass(algo, toy_run, spy):
    """What both ways of sampling give: test_ranks.py."""
    modules = []

    def sharded(module, *_):
        modules.append(module)
        return all(isinstance(p, DTensor) for seen in modules for p in seen.parameters())

    found = spy(algo, "forward_all", sharded)
    for rollout_params in "gathered", "sharded":
        toy_run(rollout_params=rollout_params, total_iterations=1)
    assert found == [True] * 6  # policy, reference and critic


# ------------------------------------------------------------------------------------------------------ checkpoints


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory, toy_flags):
    """(fields of Args, run folder) of four iterations on two ranks, with a checkpoint at every second."""
    folder = tmp_path_factory.mktemp("two")
    flags = toy_flags | {"total_iterations": 4, "save_every": 2, "eval_every": 4, "eval_rows": 1}
    flags |= {"output_dir": str(folder), "run_name": "two"}
    run_ranks(2, train, PATH, [(flags, {})])
    return flags, folder / "two"


@pytest.mark.parametrize("world", [1, 4])
def test_a_checkpoint_of_two_goes_on_with_any_number(run_of_two, tmp_path, world):
    flags, run_dir = run_of_two
    copy = shutil.copytree(run_dir, tmp_path / "two")
    shutil.rmtree(copy / "checkpoints" / "step_000004")
    results = run_ranks(world, train, PATH, [(flags | {"output_dir": str(tmp_path), "resume": True}, {})])
    expected, found = untimed(read_metrics(run_dir)), untimed(results[0][0]["metrics"])
    assert found[:3] == expected[:3] and len(found) == 5
    for a, b in zip(found, expected):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-4)
    weights = load_file(run_dir / "final" / "model.safetensors")
    for rank in results:
        for name, x in rank[0]["weights"]["policy"].items():
            assert (x - weights[name]).abs().max() < 1e-3, name


def test_a_checkpoint_is_safetensors_and_a_state(run_of_two):
    path = run_of_two[1] / "checkpoints" / "step_000004"
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) == 2 and {*path.iterdir()} == {*shards, path / "state.pt"}
    keys = set().union(*(load_file(shard).keys() for shard in shards))
    for end in ("", "/step", "/exp_avg", "/exp_avg_sq"):
        assert f"critic/score.weight{end}" in keys and f"policy/lm_head.weight{end}" in keys


def test_a_hole_in_a_checkpoint_is_seen(run_of_two, tmp_path, toy_run):
    """Without its first shard the sizes of all tensors still look right: the reader would leave their first rows."""
    flags, run_dir = run_of_two
    copy = shutil.copytree(run_dir, tmp_path / "two")
    min((copy / "checkpoints" / "step_000004").glob("*.safetensors")).unlink()
    sentence = refusal(lambda: toy_run(**flags | {"output_dir": str(tmp_path), "resume": True}))
    assert f"{copy}/checkpoints/step_000004 is incomplete, or was written by another script" in sentence


# --------------------------------------------------------------------------------------------- memory and precision


def bytes_after_a_step(script, flags):
    """Largest number right after an optimizer step, of all tensors that Python knows of: whole, and the shards."""
    found, algo = [], load_script(script)

    def count(*_):
        tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and not isinstance(x, DTensor)]
        storages = [x.untyped_storage() for x in tensors if x.device.type == "cpu"]
        found.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))

    register_optimizer_step_post_hook(count)
    algo.main(algo.Args(**flags))
    return max(found)


@pytest.mark.slow
def test_model_state_is_shared_out(tmp_path, toy_flags):
    """Everything alive after an optimizer step, against the script that replicates."""
    wide = {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 3, "initializer_range": 0.02}
    flags = toy_flags | {"model": make_model(tmp_path / "wide", **wide), "output_dir": str(tmp_path)}
    replicated = run_ranks(2, bytes_after_a_step, str(path_of("ppo_llm")), flags | {"run_name": "whole"})
    size = sum(weight.numel() for weight in load_file(tmp_path / "wide" / "model.safetensors").values())
    assert size > 1e6 and min(replicated) > 27.9 * size  # after a step of one: 16 and 12 bytes, and 4 for the reference
    sharded = run_ranks(4, bytes_after_a_step, PATH, flags | {"run_name": "sharded"})
    assert max(sharded) < 0.28 * replicated[0]


def test_shards_compute_in_bfloat16_and_add_up_in_float32(algo, toy_run, monkeypatch):
    """But for the critic's head, which stays in float32."""
    policies, real = {}, algo.fully_shard

    def fully_shard(unit, **options):
        policies[type(unit).__name__] = options.get("mp_policy")
        return real(unit, **options)

    monkeypatch.setattr(algo, "fully_shard", fully_shard)
    toy_run(dtype="bfloat16", total_iterations=0)
    assert policies.pop("Linear") is None and policies.keys() == {"LlamaDecoderLayer", "Policy", "Critic"}
    assert {(p.param_dtype, p.reduce_dtype) for p in policies.values()} == {(torch.bfloat16, torch.float32)}


def test_shard_groups_of_equal_size(toy_run):
    sentence = refusal(lambda: toy_run(shard_group_size=3))
    assert sentence == "error: --shard-group-size 3 must divide the 1 processes"
