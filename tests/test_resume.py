"""What was interrupted goes on as if it had not been: to the bit, on two processes."""

import os
import signal
import subprocess
import time

import psutil
import pytest
import torch
from conftest import launch, read_metrics, start, untimed


def wait_for(condition, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def workers_of(process):
    return [p for p in psutil.Process(process.pid).children(recursive=True) if "--run-name" in p.cmdline()]


def has_torch(process):
    """It has come as far as importing torch."""
    return any("libtorch" in part.path for part in process.memory_maps())


def weights_of(run_dir):
    saved = torch.load(run_dir / "checkpoints" / "step_000006" / "checkpoint.pt", weights_only=True)
    tensors = []

    def collect(x):
        if torch.is_tensor(x):
            tensors.append(x)
        elif isinstance(x, dict | tuple | list):
            for part in x.values() if isinstance(x, dict) else x:
                collect(part)

    collect(saved)
    return tensors, saved["state"]


def same_end(run_dir, other):
    assert untimed(read_metrics(run_dir)) == untimed(read_metrics(other))
    (ours, state), (theirs, other_state) = weights_of(run_dir), weights_of(other)
    assert state == other_state and len(ours) == len(theirs) > 20
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


@pytest.fixture(scope="module")
def flags(toy_flags, tmp_path_factory):
    flags = toy_flags | {"total_iterations": 6, "save_every": 3, "eval_every": 2, "eval_rows": 3, "lora_rank": 4}
    flags |= {"kl_controller": "adaptive", "kl_horizon": 50.0, "warmup_iterations": 2, "ppo_epochs": 2}
    return flags | {"output_dir": tmp_path_factory.mktemp("runs"), "track": "tensorboard"}


@pytest.fixture(scope="module")
def unbroken(script, flags):
    code, console = launch(script, flags | {"run_name": "unbroken"})
    assert code == 0, console
    return flags["output_dir"] / "unbroken"


# A reward that takes its time once the first checkpoint is there, so that a kill finds the run between two of them.
SLOW = """
import time
from pathlib import Path


def early(prompts, responses, answers):
    while Path({gate!r}).exists():
        time.sleep(0.05)
    return [sum(c < "m" for c in r) / max(1, len(r)) + 0.01 * len(r) for r in responses]
"""


@pytest.mark.parametrize("victim", ["worker", "launcher"])
def test_a_killed_run_goes_on_to_the_bit(script, flags, unbroken, tmp_path, victim):
    run_dir = flags["output_dir"] / victim
    (tmp_path / f"{victim}_reward.py").write_text(SLOW.format(gate=str(tmp_path / "gate")))
    flags = flags | {"run_name": victim, "reward": f"{tmp_path}/{victim}_reward.py:early"}
    process = start(script, flags)
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(read_metrics(run_dir)) >= 3)
    wait_for(lambda: (run_dir / "checkpoints" / "step_000003").exists())
    (tmp_path / "gate").touch()  # the ranks wait here, in iteration 4 or later
    ranks = workers_of(process)
    assert len(ranks) == 2
    os.kill(ranks[1].pid if victim == "worker" else process.pid, signal.SIGKILL)
    if victim == "launcher":
        process.wait(timeout=30)
        (tmp_path / "gate").unlink()
        lines = len(read_metrics(run_dir))
        psutil.wait_procs(ranks, timeout=60)
        assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks)  # orphans end ...
        assert len(read_metrics(run_dir)) == lines  # ... before they write
    else:
        (tmp_path / "gate").unlink()
        console, _ = process.communicate(timeout=60)
        assert process.returncode != 0, console
    assert len(read_metrics(run_dir)) < 7 and not (run_dir / "final").exists()
    code, console = launch(script, flags | {"resume": "auto"})
    assert code == 0 and "from step_00000" in console, console
    same_end(run_dir, unbroken)


def test_a_named_checkpoint_and_a_finished_run(algo, script, flags, unbroken, tmp_path, capsys):
    """By its path; not an older one, whose run would be mixed with what came after; a finished run stays as it is."""
    older, newest = unbroken / "checkpoints" / "step_000003", unbroken / "checkpoints" / "step_000006"
    args = algo.Args(model="x", resume=str(older))
    with pytest.raises(SystemExit):
        algo.find_run(args, algo.Accelerator(cpu=True))
    assert f"error: {older} is not the newest" in capsys.readouterr().err
    before, weights = untimed(read_metrics(unbroken)), weights_of(unbroken)
    code, console = launch(script, flags | {"resume": newest})
    assert code == 0 and "from step_000006" in console, console
    assert untimed(read_metrics(unbroken)) == before
    newest.rename(tmp_path / "elsewhere")
    code, console = launch(script, flags | {"resume": older})
    assert code == 0 and "from step_000003" in console, console
    assert untimed(read_metrics(unbroken)) == before
    assert all(torch.equal(a, b) for a, b in zip(weights_of(unbroken)[0], weights[0]))


def test_a_signal_finishes_the_iteration_and_saves(script, flags, unbroken):
    run_dir = flags["output_dir"] / "signalled"
    flags = flags | {"run_name": "signalled", "save_every": 0}
    process = start(script, flags)
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(read_metrics(run_dir)) >= 2)
    process.send_signal(signal.SIGTERM)
    console, _ = process.communicate(timeout=60)
    (saved,) = (run_dir / "checkpoints").iterdir()
    assert f"stopped after iteration {int(saved.name[5:])}; --resume auto" in console, console
    assert len(read_metrics(run_dir)) == int(saved.name[5:]) + 1 < 7
    code, console = launch(script, flags | {"resume": "auto", "save_every": 3})
    assert code == 0, console
    same_end(run_dir, unbroken)


def test_before_the_loop_a_signal_ends_the_run_at_once(script, flags):
    process = subprocess.Popen(["sleep", "60"])  # how long a process takes to go that does nothing about it
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=5)
    process = start(script, flags | {"run_name": "early"})
    # Not before the workers run Python: a launcher that is signalled while it starts them leaves them behind.
    wait_for(lambda: [has_torch(worker) for worker in workers_of(process)] == [True, True])
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=90)
    assert process.returncode != 0 and not (flags["output_dir"] / "early" / "checkpoints").exists()


def test_auto_without_a_checkpoint_begins(script, flags):
    few = flags | {"total_iterations": 1, "run_name": "fresh", "resume": "auto"}
    code, console = launch(script, few)
    assert code == 0 and [m["step"] for m in read_metrics(flags["output_dir"] / "fresh")] == [0, 1], console
