"""What was interrupted goes on as if it had not been: to the bit, on two processes."""

import os
import shutil
import signal
import socket
import subprocess
import time
from unittest import mock

import psutil
import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import SCRIPTS, compose, copies, each_script, forked, launch, path_of, read_metrics, start, untimed
from ranks import load_script, run_ranks, train
from safetensors.torch import load_file

# ----------------------------------------------------------------------------------------- ranks without a launcher

RUN = {"track": "none", "total_iterations": 6, "max_response_length": 8, "microbatch_tokens": 128, "lr": 1e-2}
RUN |= {"eval_every": 2, "eval_rows": 3, "kl_reward_coef": 0.1, "warmup_iterations": 4, "keep_checkpoints": 9}
PPO = {"batch_size": 4, "minibatch_size": 4, "critic_lr": 1e-2, "critic_warmup_iterations": 4}
GRPO = {"batch_size": 2, "minibatch_size": 4, "group_size": 2}
LORA = PPO | {"lora_rank": 4, "critic_warmup_iterations": 1}
CASES = {"ppo_llm": PPO, "grpo_llm": GRPO, "ppo_llm_fsdp": PPO, "grpo_llm_fsdp": GRPO}
CASES |= {"ppo_llm with LoRA": LORA, "ppo_llm_fsdp with LoRA": LORA}
SLOW = "ppo_llm_fsdp with LoRA"  # which the slow tests below kill as well


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_model, toy_data, toy_reward):
    """Folder of runs, and the fields that all have."""
    folder = tmp_path_factory.mktemp("resumed")
    return folder, RUN | {"model": tiny_model, "dataset": toy_data, "reward": toy_reward, "output_dir": str(folder)}


def same(one, other):
    """Metrics and weights, to the bit, on both ranks."""
    for a, b in zip(one, other):
        assert untimed(a["metrics"]) == untimed(b["metrics"]) and len(a["metrics"]) == 7
        assert len(a["weights"]) > 0
        for model, weights in a["weights"].items():
            assert all(torch.equal(x, b["weights"][model][name]) for name, x in weights.items())


def best(run_dir):
    """{file: its bytes} of the best model."""
    return {path.relative_to(run_dir): path.read_bytes() for path in run_dir.glob("best*/**/*.safetensors")}


def place_of(name, folder):
    return compose(folder) if name == "grpo_llm_fsdp" else path_of(name)


def marks(name):
    return [copies("grpo_llm" if "grpo" in name else name.split()[0])] + [pytest.mark.slow] * (name == SLOW)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in CASES])
def test_six_iterations_are_four_and_the_rest(place, name):
    """Broken off in iteration 5, gone on with from 3, where with PPO only the critic has been trained, but for LoRA.
    The unbroken run saves nothing, so that saving is seen to change nothing."""
    folder, flags = place
    flags = flags | CASES[name]
    runs = [(flags | {"run_name": f"{name}-unbroken", "save_every": 0}, {})]
    runs += [(flags | {"run_name": f"{name}-broken", "save_every": 3}, {"dies": 5})]
    runs += [(flags | {"run_name": f"{name}-broken", "save_every": 3, "resume": "auto"}, {})]
    results = run_ranks(2, train, str(place_of(name.split()[0], folder)), runs)
    assert all(len(broken["metrics"]) == 5 and not broken["weights"] for _, broken, _ in results)  # it did end there
    assert [x.name for x in sorted((folder / f"{name}-broken" / "checkpoints").iterdir())] == [
        "step_000003",
        "step_000006",
    ]
    same([unbroken for unbroken, _, _ in results], [resumed for _, _, resumed in results])
    assert results[0][0]["metrics"][-1]["kl/mean"] != 0  # the policy has moved
    found = best(folder / f"{name}-broken")
    assert found == best(folder / f"{name}-unbroken") and len(found) > 0


def test_a_named_checkpoint_and_a_finished_run(toy_run, tmp_path):
    """By its path, with the name of its run or none; a finished run stays as it is."""
    run_dir, before = toy_run(total_iterations=4, save_every=2, run_name="named")
    older, newest = run_dir / "checkpoints" / "step_000002", run_dir / "checkpoints" / "step_000004"
    weights = load_file(run_dir / "final" / "model.safetensors")
    assert untimed(toy_run(total_iterations=4, resume=str(newest), run_name="named")[1]) == untimed(before)
    newest.rename(tmp_path / "elsewhere")
    flags = {"total_iterations": 4, "save_every": 2, "run_name": None}
    assert untimed(toy_run(resume=f"{os.path.relpath(older)}/", **flags)[1]) == untimed(before)
    again = load_file(run_dir / "final" / "model.safetensors")
    assert all(torch.equal(x, again[name]) for name, x in weights.items())


def listing(folder):
    """{every path in it: what a file holds}"""
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


NO_CHECKPOINTS = {  # what --resume names, below the working folder
    "a run": "runs/A",
    "its folder of checkpoints": "runs/A/checkpoints",
    "a file": "runs/A/args.json",
    "a file in a checkpoint": "runs/A/checkpoints/step_000010/checkpoint.pt",
    "what is not there": "runs/A/checkpoints/step_000011",
    "a run that is not there": "runs/B/checkpoints/step_000010",
    "one that is not the newest": "runs/A/checkpoints/step_000005",
    "somebody else's": "theirs/checkpoints/step_000005",
    "one outside `checkpoints`": "runs/A/best_000010",
    "the working folder": ".",
    "an empty word": "",
}


@each_script()
@pytest.mark.parametrize("what", NO_CHECKPOINTS)
def test_a_path_that_is_no_checkpoint(toy_run, tmp_path, monkeypatch, capsys, what):
    """It is refused before anything is touched; so are a checkpoint and the name of another run together."""
    for folder in ("A/checkpoints/step_000005", "A/checkpoints/step_000010", "A/best_000010", "A/.best_000005.old"):
        (tmp_path / "runs" / folder).mkdir(parents=True)
    (tmp_path / "theirs" / "checkpoints" / "step_000005").mkdir(parents=True)
    for file in ("runs/A/args.json", "runs/A/.a.old", ".b.old", "runs/A/checkpoints/step_000010/checkpoint.pt"):
        (tmp_path / file).write_text("mine")
    before = listing(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        toy_run(resume=NO_CHECKPOINTS[what], run_name=None)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 1 and line.startswith("error: --resume takes the newest checkpoint of a run")
    assert listing(tmp_path) == before


@each_script()
def test_a_checkpoint_and_the_name_of_another_run(toy_run, tmp_path, capsys):
    run_dir, _ = toy_run(total_iterations=1, save_every=1, run_name="A")
    before = listing(tmp_path)
    with pytest.raises(SystemExit) as stop:
        toy_run(total_iterations=2, resume=str(run_dir / "checkpoints" / "step_000001"), run_name="B")
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 1 and line.startswith("error: --resume ") and "--run-name" in line
    assert listing(tmp_path) == before


@each_script()
def test_another_batch_size_goes_on_where_the_data_stood(algo, toy_run, tmp_path, monkeypatch):
    """A checkpoint of version 0.2, which did not count prompts, is taken to have had the batch size of now."""
    starts, real = [], algo.draw_prompts
    monkeypatch.setattr(algo, "draw_prompts", lambda *args: starts.append(args[1:3]) or real(*args))
    small = 2 if "grpo" in algo.__name__ else 4
    smaller = {"batch_size": small, "minibatch_size": 4}
    flags = {"save_every": 1, "resume": "auto"}
    run_dir, _ = toy_run(total_iterations=1, save_every=1, run_name="run")
    uncounted = shutil.copytree(run_dir, run_dir.with_name("uncounted")) / "checkpoints" / "step_000001"
    file = next(path for path in (uncounted / "state.pt", uncounted / "checkpoint.pt") if path.exists())
    saved = torch.load(file, weights_only=True)
    assert saved.get("state", saved).pop("prompts") == 2 * small
    torch.save(saved, file)
    toy_run(total_iterations=2, run_name="run", **flags | smaller)
    toy_run(total_iterations=3, run_name="run", **flags)
    assert starts == [(0, 2 * small), (2 * small, small), (3 * small, 2 * small)]
    toy_run(total_iterations=2, run_name="uncounted", **flags | smaller)
    assert starts[3:] == [(small, small)]


@pytest.mark.parametrize("first, second", [("ppo_llm_fsdp", "grpo_llm_fsdp"), ("grpo_llm_fsdp", "ppo_llm_fsdp")])
def test_a_sharded_checkpoint_of_the_other_algorithm(place, first, second, capsys):
    """It has a critic more, or less; tests/test_loop.py has the replicated scripts."""
    folder, flags = place
    flags = flags | {"run_name": f"{first} first", "total_iterations": 1, "eval_rows": 0, "save_every": 1}

    def run(name, **more):
        AcceleratorState._reset_state(True)
        algo = load_script(place_of(name, folder))
        with mock.patch.object(time, "sleep"):  # the pause at the end is for gloo's threads
            algo.main(algo.Args(**flags | (GRPO if "grpo" in name else PPO) | more))

    run(first)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run(second, resume="auto", total_iterations=2)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert stop.value.code == 1 and len(lines) == 1 and lines[0].startswith("error: the checkpoint "), lines
    assert "step_000001 is incomplete, or of another model" in lines[0]


def test_auto_without_a_checkpoint_begins(toy_run):
    _, metrics = toy_run(total_iterations=1, run_name="fresh", resume="auto")
    assert [m["step"] for m in metrics] == [0, 1]


# --------------------------------------------------------------------------------------------------------- Ctrl-C

# A reward that is interrupted in iteration 2, or waits to be.
INTERRUPTED = """
import signal
import time
from pathlib import Path

calls = []


def early(prompts, responses, answers):
    calls.append(prompts)
    if len(calls) == 2:
        for name in {signals}:
            signal.raise_signal(signal.Signals[name])
        Path({gate!r}).touch()
        for _ in range({waits} * 100):
            time.sleep(0.1)
    return [sum(c < "m" for c in r) / max(1, len(r)) + 0.01 * len(r) for r in responses]
"""


def interrupted(folder, signals, waits=0):
    name = "_".join(["reward_of", folder.name, *signals])
    text = INTERRUPTED.format(signals=signals, waits=waits, gate=str(folder / "gate"))
    (folder / f"{name}.py").write_text(text)
    return {"reward": f"{folder}/{name}.py:early", "total_iterations": 3, "save_every": 1, "run_name": "run"}


def checkpoints_of(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@each_script()
@pytest.mark.parametrize("first", ["SIGINT", "SIGTERM"])
def test_one_signal_finishes_the_iteration_and_saves(toy_run, tmp_path, capsys, first):
    run_dir, metrics = toy_run(**interrupted(tmp_path, [first]))
    assert [m["step"] for m in metrics] == [0, 1, 2] and checkpoints_of(run_dir) == ["step_000001", "step_000002"]
    assert "stopped after iteration 2; --resume auto --run-name run goes on" in capsys.readouterr().out
    assert not (run_dir / "final").exists()


@each_script()
@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM"])
def test_a_second_ctrl_c_gets_through(toy_run, tmp_path, second):
    """At once, with what was complete before, and nothing else. A launcher passes it on as SIGTERM."""
    with pytest.raises(KeyboardInterrupt):
        toy_run(**interrupted(tmp_path, ["SIGINT", second]))
    run_dir = tmp_path / "runs" / "run"
    assert [m["step"] for m in read_metrics(run_dir)] == [0, 1] and checkpoints_of(run_dir) == ["step_000001"]


def test_a_process_is_interrupted_from_outside(script, toy_flags, tmp_path):
    """While the reward takes its time: as from a terminal, where one signal leaves it waiting."""
    flags = toy_flags | interrupted(tmp_path, [], waits=1) | {"output_dir": tmp_path}
    sent = []

    def meanwhile(processes):
        if (tmp_path / "gate").exists() and len(sent) < 2:
            time.sleep(0.3 * len(sent))  # two that come together would be one
            os.kill(processes[0].pid, signal.SIGINT)
            sent.append(time.monotonic())

    code, console = forked(script, flags, 1, meanwhile=meanwhile, timeout=60)
    assert code == 1 and console.rstrip().endswith("KeyboardInterrupt") and time.monotonic() - sent[1] < 5, console
    assert checkpoints_of(tmp_path / "run") == ["step_000001"]


# ----------------------------------------------------------------------------------------------- under the launcher


def wait_for(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def workers_of(process):
    return [p for p in psutil.Process(process.pid).children(recursive=True) if "--run-name" in p.cmdline()]


def has_torch(process):
    """It has come as far as importing torch."""
    return any("libtorch" in part.path for part in process.memory_maps())


@pytest.fixture(scope="module")
def flags(toy_flags, tmp_path_factory):
    flags = toy_flags | {"total_iterations": 6, "save_every": 3, "eval_every": 2, "eval_rows": 3, "lora_rank": 4}
    flags |= {"kl_reward_coef": 0.1, "warmup_iterations": 4, "ppo_epochs": 2}
    return flags | {"output_dir": tmp_path_factory.mktemp("runs"), "track": "tensorboard"}


@pytest.fixture(scope="module")
def unbroken(script, flags):
    code, console = launch(script, flags | {"run_name": "unbroken"})
    assert code == 0, console
    return flags["output_dir"] / "unbroken"


def same_end(run_dir, other):
    assert untimed(read_metrics(run_dir)) == untimed(read_metrics(other)) and len(read_metrics(other)) == 7
    files = sorted(path.relative_to(other) for path in other.glob("final/**/*.safetensors"))
    assert files and files == sorted(path.relative_to(run_dir) for path in run_dir.glob("final/**/*.safetensors"))
    for file in files:
        ours, theirs = load_file(run_dir / file), load_file(other / file)
        assert ours.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in ours.items())
    assert best(run_dir) == best(other) and sorted(run_dir.glob(".*")) == []


# A reward that takes its time once the first checkpoint is there, so that a kill finds the run between two of them.
WAITS = """
import time
from pathlib import Path


def early(prompts, responses, answers):
    while Path({gate!r}).exists():
        time.sleep(0.05)
    return [sum(c < "m" for c in r) / max(1, len(r)) + 0.01 * len(r) for r in responses]
"""


VICTIMS = [(script, "worker") for script in SCRIPTS] + [("ppo_llm_fsdp", "launcher")]


@pytest.mark.slow
@pytest.mark.parametrize("script, victim", VICTIMS, indirect=["script"], scope="module")
def test_a_killed_run_goes_on_to_the_bit(script, flags, unbroken, tmp_path, victim):
    run_dir = flags["output_dir"] / victim
    (tmp_path / f"{victim}_reward.py").write_text(WAITS.format(gate=str(tmp_path / "gate")))
    flags = flags | {"run_name": victim, "reward": f"{tmp_path}/{victim}_reward.py:early"}
    process = start(script, flags)
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(read_metrics(run_dir)) >= 3)
    wait_for(lambda: (run_dir / "checkpoints" / "step_000003").exists())
    (tmp_path / "gate").touch()  # the ranks wait here, in iteration 4 or later
    ranks = workers_of(process)
    assert len(ranks) == 2
    os.kill(ranks[1].pid if victim == "worker" else process.pid, signal.SIGKILL)
    if victim == "launcher":
        process.wait(timeout=100)
        (tmp_path / "gate").unlink()
        lines = len(read_metrics(run_dir))
        psutil.wait_procs(ranks, timeout=200)
        assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks)  # orphans end ...
        assert len(read_metrics(run_dir)) == lines  # ... before they write
    else:
        (tmp_path / "gate").unlink()
        console, _ = process.communicate(timeout=200)
        assert process.returncode != 0, console
    assert len(read_metrics(run_dir)) < 7 and not (run_dir / "final").exists()
    code, console = launch(script, flags | {"resume": "auto"})
    assert code == 0 and f"run folder {run_dir}, from iteration 4\n" in console, console  # six are three and three
    same_end(run_dir, unbroken)


@pytest.mark.slow
@each_script("ppo_llm_fsdp")
def test_a_signal_finishes_the_iteration_and_saves(script, flags, unbroken):
    run_dir = flags["output_dir"] / "signalled"
    flags = flags | {"run_name": "signalled", "save_every": 0}
    process = start(script, flags)
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(read_metrics(run_dir)) >= 2)
    process.send_signal(signal.SIGTERM)
    console, _ = process.communicate(timeout=200)
    (saved,) = (run_dir / "checkpoints").iterdir()
    assert f"stopped after iteration {int(saved.name[5:])}; --resume auto" in console, console
    assert len(read_metrics(run_dir)) == int(saved.name[5:]) + 1 < 7
    code, console = launch(script, flags | {"resume": "auto", "save_every": 3})
    assert code == 0, console
    same_end(run_dir, unbroken)


@pytest.mark.slow
def test_before_the_loop_a_signal_ends_the_run_at_once(script, flags):
    process = subprocess.Popen(["sleep", "60"])  # how long a process takes to go that does nothing about it
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=5)
    process = start(script, flags | {"run_name": "early"})
    # Not before the workers run Python: a launcher that is signalled while it starts them leaves them behind.
    wait_for(lambda: [has_torch(worker) for worker in workers_of(process)] == [True, True])
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=200)
    assert process.returncode != 0 and not (flags["output_dir"] / "early" / "checkpoints").exists()


@pytest.mark.slow
@each_script("ppo_llm")
def test_ctrl_c_saves_although_the_launcher_of_one_process_ends_at_once(script, flags, tmp_path):
    run_dir = flags["output_dir"] / "interrupted"
    (tmp_path / "interrupted_reward.py").write_text(WAITS.format(gate=str(tmp_path / "gate")))
    flags = flags | {"run_name": "interrupted", "reward": f"{tmp_path}/interrupted_reward.py:early", "save_every": 0}
    process = start(script, flags, processes=1)
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(read_metrics(run_dir)) >= 2)
    (tmp_path / "gate").touch()
    (worker,) = workers_of(process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the launcher and to what it started
    wait_for(lambda: process.poll() is not None)
    (tmp_path / "gate").unlink()
    psutil.wait_procs([worker], timeout=200)
    console = process.communicate()[0]
    (saved,) = (run_dir / "checkpoints").iterdir()
    assert f"stopped after iteration {int(saved.name[5:])}; --resume auto" in console, console


def start_machines(script, flags):
    """Two launchers, of one worker each, that meet at a port of this machine: as on two machines with one GPU each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    return [start(script, flags, machine=[*words, "--machine_rank", str(rank)]) for rank in range(2)]


@pytest.mark.slow
@each_script("ppo_llm", "ppo_llm_fsdp")
def test_two_machines_killed_and_resumed_are_two_processes_of_one(script, flags, unbroken, tmp_path):
    run_dir = flags["output_dir"] / "machines"
    (tmp_path / "machines_reward.py").write_text(WAITS.format(gate=str(tmp_path / "gate")))
    flags = flags | {"run_name": "machines", "reward": f"{tmp_path}/machines_reward.py:early"}
    machines = start_machines(script, flags)
    wait_for(lambda: (run_dir / "checkpoints" / "step_000003").exists())
    (tmp_path / "gate").touch()  # the ranks wait here, in iteration 4 or later
    workers = [workers_of(process) for process in machines]
    assert [len(own) for own in workers] == [1, 1]
    os.kill(workers[1][0].pid, signal.SIGKILL)
    (tmp_path / "gate").unlink()
    assert all(process.communicate(timeout=200) and process.returncode != 0 for process in machines)
    assert len(read_metrics(run_dir)) < 7 and not (run_dir / "final").exists()
    consoles = [process.communicate(timeout=400)[0] for process in start_machines(script, flags | {"resume": "auto"})]
    for console in consoles:  # each machine shows its own
        assert "2 process(es) on cpu" in console and f"run folder {run_dir}, from iteration 4\n" in console, console
    same_end(run_dir, unbroken)
