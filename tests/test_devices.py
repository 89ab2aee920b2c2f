"""What the scripts ask of GPUs and of process groups, as far as it shows without a GPU."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from conftest import each_script, path_of
from ranks import load_script, run_ranks


class Enough(Exception):
    """What was to be seen has been seen."""


def stop(*args):
    raise Enough(*args)


@pytest.fixture
def seen(algo, monkeypatch):
    """What a run asked of the group of processes and of accelerate."""
    found = {}
    real_group, real_accelerator = dist.init_process_group, algo.Accelerator

    def init_process_group(backend=None, **options):
        found["group"] = backend
        real_group("gloo", **options | {"store": dist.HashStore(), "rank": 0, "world_size": 1})

    def accelerator(**options):
        found["precision"] = options["mixed_precision"]
        return real_accelerator(**options | {"cpu": True})

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(algo, "Accelerator", accelerator)
    return found


@each_script()
@pytest.mark.parametrize(
    "gpus, native, dtype, used",  # GPUs, computing in bfloat16 themselves, --dtype; whether bfloat16 is used
    [
        (1, True, "auto", True),
        (1, False, "auto", False),  # a T4 or V100
        (1, False, "bfloat16", True),
        (1, True, "float32", False),
        (0, True, "auto", False),
    ],
)
def test_bfloat16_where_it_is_not_emulated(script, algo, toy_run, monkeypatch, seen, gpus, native, dtype, used):
    if gpus:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        # torch takes emulation for support, too.
        supported = lambda including_emulation=True: native or including_emulation  # noqa: E731
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    sharded = script.stem == "ppo_llm_fsdp"
    monkeypatch.setattr(algo, "shard" if sharded else "find_run", stop)
    with pytest.raises(Enough) as stopped:
        toy_run(dtype=dtype)
    assert seen["precision"] == ("bf16" if used else "no")
    if sharded:  # FSDP is told so; a sharded rollout and --offload exchange tensors of the CPU, too
        assert stopped.value.args[2] == used
        assert seen["group"] == ("cpu:gloo,cuda:nccl" if gpus else "gloo")


def timeout_of_the_group(script, model):
    """(processes of the group, how long they wait for each other), None where this torch does not say."""
    algo = load_script(script)
    algo.find_run = stop
    try:
        algo.main(algo.Args(model=model, track="none"))
    except Enough:
        dist.barrier()  # one that ends early would break off what the others still set up
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        return dist.get_world_size(), getattr(getattr(backend, "options", None), "_timeout", None)


@pytest.mark.parametrize("script", ["ppo_llm", "ppo_llm_fsdp"])
def test_processes_wait_an_hour_for_each_other(script, tiny_model):
    found = run_ranks(2, timeout_of_the_group, str(path_of(script)), tiny_model)
    if found[0][1] is None:
        pytest.skip("this torch does not tell the timeout of a group")
    assert found == [(2, timedelta(hours=1))] * 2
