"""What the scripts ask of GPUs and of process groups, as far as it shows without a GPU."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import InitProcessGroupKwargs
from conftest import each_script, path_of
from ranks import load_script, run_ranks

REPLICATED = "ppo_llm", "grpo_llm"
HOUR = timedelta(hours=1)


class Enough(Exception):
    """What was to be seen has been seen."""


@pytest.fixture
def seen(algo, monkeypatch):
    """What was asked of the group of processes and of accelerate: names of fields, filled in by a run."""
    found = SimpleNamespace(group=None, precision=None, timeout=None)
    real_group, real_accelerator = dist.init_process_group, algo.Accelerator

    def init_process_group(backend=None, **options):
        found.group = backend, options
        real_group("gloo", **options | {"store": dist.HashStore(), "rank": 0, "world_size": 1})

    def accelerator(**options):
        found.precision = options["mixed_precision"]
        for handler in options.get("kwargs_handlers", []):
            if isinstance(handler, InitProcessGroupKwargs):
                found.timeout = handler.timeout
        return real_accelerator(**options | {"mixed_precision": "no", "cpu": True})

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(algo, "Accelerator", accelerator)
    if dist.is_initialized():  # a run that was refused leaves its group behind
        dist.destroy_process_group()
    return found


def with_gpus(monkeypatch, count, native):
    """As on a machine with GPUs, which compute in bfloat16 or emulate that; torch takes both for support."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)


PRECISIONS = [  # GPUs, computing in bfloat16 themselves, --dtype; whether bfloat16 is used
    (1, True, "auto", True),
    (1, False, "auto", False),  # a T4 or V100
    (1, False, "bfloat16", True),
    (1, True, "float32", False),
    (0, True, "auto", False),
]


@each_script(*REPLICATED)
@pytest.mark.parametrize("gpus, native, dtype, used", PRECISIONS)
def test_bfloat16_where_it_is_not_emulated(algo, toy_run, monkeypatch, seen, gpus, native, dtype, used):
    with_gpus(monkeypatch, gpus, native)
    monkeypatch.setattr(algo, "find_run", stop)
    with pytest.raises(Enough):
        toy_run(dtype=dtype)
    assert seen.precision == ("bf16" if used else "no")


@each_script("ppo_llm_fsdp")
@pytest.mark.parametrize("gpus, native, dtype, used", PRECISIONS)
def test_shards_in_bfloat16_where_it_is_not_emulated(algo, toy_run, monkeypatch, seen, gpus, native, dtype, used):
    with_gpus(monkeypatch, gpus, native)
    asked = []
    monkeypatch.setattr(algo, "shard", lambda module, mesh, bf16, offload: asked.append(bf16) or stop())
    with pytest.raises(Enough):
        toy_run(dtype=dtype)
    assert asked == [used] and seen.precision == "no"  # FSDP casts, not autocast


def stop(*_):
    raise Enough


@each_script("ppo_llm_fsdp")
@pytest.mark.parametrize("launched", [True, False])
@pytest.mark.parametrize("gpus, backend", [(1, "cpu:gloo,cuda:nccl"), (0, "gloo")])
def test_the_group_exchanges_tensors_of_the_cpu_too(algo, toy_run, monkeypatch, seen, gpus, backend, launched):
    """A sharded rollout and --offload do."""
    with_gpus(monkeypatch, gpus, True)
    monkeypatch.setattr(algo, "find_run", stop)
    if launched:
        monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(Enough):
        toy_run()
    found, options = seen.group
    assert found == backend and options.get("timeout") == (HOUR if launched else None)


@each_script(*REPLICATED)
def test_accelerate_is_asked_for_patience(algo, toy_run, monkeypatch, seen):
    monkeypatch.setattr(algo, "find_run", stop)
    with pytest.raises(Enough):
        toy_run()
    assert seen.timeout == HOUR


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
    assert found == [(2, HOUR)] * 2
