"""What was interrupted goes on as if it had not been, to the bit: checkpoints, locks, signals, kills."""

import os
import pickle
import shutil
import signal
import sys
import time
from collections import deque
from dataclasses import fields
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from helpers import compose, each_script, forked, launch, make_model, read_metrics, refusal, start, untimed
from ranks import BrokenOff, fork_ranks, free_port, load_script, run_ranks, train
from transformers import PreTrainedTokenizerBase

by_kind = each_script("ppo_llm", "ppo_llm_fsdp")  # checkpoints are files, or folders of shards

# ----------------------------------------------------------------------------------------- ranks without a launcher

RUN = {"track": "none", "total_iterations": 6, "max_response_length": 8, "microbatch_tokens": 128, "lr": 1e-2}
RUN |= {"eval_every": 2, "eval_rows": 3, "kl_reward_coef": 0.1, "warmup_iterations": 4, "keep_checkpoints": 9}
PPO = {"batch_size": 4, "minibatch_size": 4, "critic_lr": 1e-2, "critic_warmup_iterations": 4}  # only a critic yet
GRPO = {"batch_size": 2, "minibatch_size": 4, "group_size": 2}
LORA = PPO | {"lora_rank": 4, "critic_warmup_iterations": 1}
CASES = [("ppo_llm", PPO, False), ("ppo_llm_fsdp", PPO, False)]
SLOW = [("grpo_llm", GRPO | {"lora_rank": 4}, False), ("ppo_llm_fsdp", LORA, False), ("grpo_llm", GRPO, True)]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]


def weights_in(run_dir, folder):
    """{file: its bytes}"""
    return {path.relative_to(run_dir): path.read_bytes() for path in run_dir.glob(f"{folder}/**/*.safetensors")}


def assert_same(run_dir, other):
    """Metrics and weights, to the bit."""
    assert untimed(read_metrics(run_dir)) == untimed(read_metrics(other)) and len(read_metrics(other)) == 7
    assert weights_in(run_dir, "final") == weights_in(other, "final") != {}
    assert weights_in(run_dir, "best") == weights_in(other, "best") and not list(run_dir.rglob("unfinished"))


def checkpoints_of(run_dir):
    return sorted(path.name for path in run_dir.glob("checkpoints/*"))


def checkpoint(script, iteration):
    """The name of a checkpoint of a script (its path, or the module): a file, or a folder of shards."""
    name = getattr(script, "__name__", None) or script.stem
    return f"step_{iteration:06d}" + ("" if "fsdp" in name else ".pt")


def remove(path):
    path.unlink() if path.is_file() else shutil.rmtree(path)


@pytest.mark.parametrize("script, own, composed", CASES, indirect=["script"], scope="module")
def test_six_iterations_are_four_and_the_rest(script, tiny_model, toy_data, toy_reward, tmp_path, own, composed):
    """Broken off in iteration 5, gone on with from 3; to go on with a finished run changes nothing."""
    script = compose(tmp_path) if composed else script
    flags = RUN | own | {"model": tiny_model, "dataset": toy_data, "reward": toy_reward, "output_dir": str(tmp_path)}
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    runs = [(flags | {"run_name": unbroken.name, "save_every": 0}, {})]  # saving changes nothing
    runs += [(flags | {"run_name": broken.name, "save_every": 3}, {"dies": 5})]
    runs += [(flags | {"run_name": broken.name, "save_every": 3, "resume": True}, {})] * 2
    results = run_ranks(2, train, str(script), runs)
    for _, died, resumed, again in results:
        assert len(died["metrics"]) == 5 and not died["weights"]  # it did end there
        assert resumed["gradients"] and not again["gradients"]
    assert checkpoints_of(broken) == [checkpoint(script, 3), checkpoint(script, 6)]
    assert_same(broken, unbroken)
    assert read_metrics(broken)[-1]["kl/mean"] != 0 and weights_in(broken, "best")  # the policy has moved


def listing(folder):
    """{every path in it: what a file holds}"""
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@by_kind
def test_which_folder_and_which_checkpoint(algo, tmp_path):
    """The newest is none that somebody has set aside. Without a name a run has that of its script."""

    def find(**flags):
        return algo.find_run(algo.Args(model="any", output_dir=str(tmp_path), **flags))

    newest, older = (checkpoint(algo, iteration) for iteration in (4, 2))
    later = ["step_000009 (copy).pt", "step_000009.part", "step_000009.pt.bak", "step_000009~", "step_9.tmp"]
    later += ["unfinished"]
    for name in newest, older, *later, f"old_{newest}":
        (tmp_path / "run" / "checkpoints" / name).mkdir(parents=True)
    assert find(run_name="run", resume=True) == (tmp_path / "run", tmp_path / "run" / "checkpoints" / newest)
    run_dir, found = find()
    assert run_dir.parent == tmp_path and run_dir.name.startswith(f"{algo.__name__}-1-20")  # and the time
    assert found is None and not run_dir.exists()
    assert "--resume needs --run-name" in refusal(lambda: find(resume=True))
    assert "run exists" in refusal(lambda: find(run_name="run"))


def found_by(script, folder, own):
    """What this rank, whose disk is a folder of its own, takes for the newest checkpoint."""
    algo = load_script(script)
    dist.init_process_group("gloo")
    PartialState(cpu=True)
    place = f"{folder}/{own[dist.get_rank()]}"
    _, path = algo.find_run(algo.Args(model="any", output_dir=place, run_name="run", resume=True))
    dist.barrier()
    return path


@pytest.mark.parametrize("own", [("here", "there"), ("there", "here")])
def test_the_checkpoint_is_that_of_rank_0_on_every_rank(script, algo, tmp_path, own):
    """Or none. A rank that doesn't see it ends, and the run with it, rather than begin another."""
    path = tmp_path / "here" / "run" / "checkpoints" / checkpoint(script, 4)
    path.mkdir(parents=True)
    expected = path if own[0] == "here" else None
    assert run_ranks(2, found_by, str(script), str(tmp_path), own) == [expected] * 2
    path.rmdir()
    with pytest.raises(FileNotFoundError, match=str(path)):
        algo.load_checkpoint(path, {})


@pytest.mark.parametrize("script, writer", [("ppo_llm", "grpo_llm"), ("ppo_llm_fsdp", "ppo_llm")], indirect=["script"])
def test_what_another_script_wrote_is_refused_and_left_alone(script, toy_run, toy_flags, tmp_path, writer):
    other = load_script(script.with_name(f"{writer}.py"))
    known = {field.name for field in fields(other.Args)}
    flags = {name: value for name, value in (toy_flags | {"group_size": 2}).items() if name in known}
    flags |= {"total_iterations": 1, "save_every": 1, "output_dir": str(tmp_path / "runs"), "run_name": "run"}
    run_dir = other.main(other.Args(**flags))
    AcceleratorState._reset_state(True)
    (path,) = run_dir.glob("checkpoints/*")
    before = listing(tmp_path)
    sentence = refusal(lambda: toy_run(run_name="run", resume=True))
    assert sentence.startswith(f"error: {path} ") and "written by another script or " in sentence
    assert listing(tmp_path) == before


def test_a_checkpoint_of_another_model(toy_run, tmp_path):
    run_dir, before = toy_run(total_iterations=1, save_every=1, run_name="mine")
    deeper = make_model(tmp_path / "deeper", num_hidden_layers=3)
    flags = {"run_name": "mine", "resume": True}
    assert "step_000001.pt was written with another model" in refusal(lambda: toy_run(model=deeper, **flags))
    assert "another --lora-rank than policy has now" in refusal(lambda: toy_run(lora_rank=2, **flags))
    assert read_metrics(run_dir) == before


def killed_after(real):
    def save(*args, **kwargs):
        real(*args, **kwargs)
        raise BrokenOff

    return save


@by_kind
def test_what_has_a_name_is_complete_and_what_has_none_does_not_disturb(algo, toy_run, monkeypatch):
    """A run is killed while it writes a checkpoint, then again while it writes a model."""
    unbroken, expected = toy_run(total_iterations=2, run_name="unbroken", save_every=1)
    flags = {"run_name": "run", "save_every": 1, "resume": True}
    run_dir, _ = toy_run(total_iterations=1, **flags)
    final = listing(run_dir / "final")
    for owner, name in (torch, "save"), (PreTrainedTokenizerBase, "save_pretrained"):
        with pytest.raises(BrokenOff), monkeypatch.context() as patch:
            patch.setattr(owner, name, killed_after(getattr(owner, name)))
            toy_run(total_iterations=2, **flags)
        left = run_dir / ("checkpoints" if owner is torch else "") / "unfinished"
        assert left.exists() and listing(run_dir / "final") == final
        assert (checkpoint(algo, 2) in checkpoints_of(run_dir)) == (owner is not torch)
    remove(run_dir / "checkpoints" / checkpoint(algo, 2))  # the iteration is computed once more
    assert untimed(toy_run(total_iterations=2, **flags)[1]) == untimed(expected)
    assert weights_in(run_dir, "final") == weights_in(unbroken, "final") and listing(run_dir / "final") != final
    assert checkpoints_of(run_dir) == checkpoints_of(unbroken) == [checkpoint(algo, 1), checkpoint(algo, 2)]
    assert {path.name for path in run_dir.iterdir()} == {path.name for path in unbroken.iterdir()}


@by_kind
def test_old_checkpoints_go(algo, toy_run):
    """All but the newest, or none. A run that has no checkpoint yet begins again: no step stands twice."""
    flags = {"run_name": "run", "resume": True}
    for _ in range(2):
        run_dir, metrics = toy_run(total_iterations=1, save_every=0, **flags)
        assert [m["step"] for m in metrics] == [0, 1] and not checkpoints_of(run_dir)
    toy_run(total_iterations=3, save_every=1, keep_checkpoints=2, **flags)
    assert checkpoints_of(run_dir) == [checkpoint(algo, 2), checkpoint(algo, 3)]
    toy_run(total_iterations=4, save_every=1, keep_checkpoints=0, **flags)
    assert checkpoints_of(run_dir) == [checkpoint(algo, iteration) for iteration in (2, 3, 4)]


# What is left of the four lines, and the steps that stand there in the end.
LEFT = [
    (lambda lines: lines, [0, 1, 2, 3, 4]),
    (lambda lines: lines[:2], [0, 1, 3, 4]),
    (lambda lines: [*lines[:3], lines[3][:20]], [0, 1, 2, 3, 4]),
    (lambda lines: [*lines[:2], lines[2][:20]], [0, 1, 3, 4]),  # half a line beside a complete checkpoint
    (lambda lines: [*lines[:2], "\n", *lines[2:]], [0, 1, 2, 3, 4]),
    (lambda lines: [lines[0], *lines[2:]], [0, 2, 3, 4]),
]


def test_lines_after_the_checkpoint_go_and_lines_that_are_missing_stay_missing(toy_run):
    """The checkpoint is of iteration 2."""
    run_dir, _ = toy_run(total_iterations=3, save_every=2)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    for i, (left, steps) in enumerate(LEFT):
        copy = shutil.copytree(run_dir, run_dir.with_name(f"copy{i}"))
        (copy / "metrics.jsonl").write_text("".join(left(lines)))
        _, metrics = toy_run(total_iterations=4, run_name=copy.name, resume=True)
        assert [m["step"] for m in metrics] == steps, i


@by_kind
def test_what_is_added_to_the_state_survives(algo, toy_run, monkeypatch):
    """What could not be loaded stops the first save rather than the restart: the error names the type."""
    save, load, loaded = algo.save_checkpoint, algo.load_checkpoint, []

    def adding(value):
        changed = lambda path, trainees, state, *rest: save(path, trainees, state | {"mine": value}, *rest)  # noqa: E731
        monkeypatch.setattr(algo, "save_checkpoint", changed)

    monkeypatch.setattr(algo, "load_checkpoint", lambda *args: loaded.append(load(*args)) or loaded[-1])
    flags = {"run_name": "run", "save_every": 1, "resume": True}
    adding({"seen": 7})
    toy_run(total_iterations=1, **flags)
    toy_run(total_iterations=2, **flags)
    assert loaded[0]["mine"] == {"seen": 7} and loaded[0]["iteration"] == 1
    adding(deque())
    with pytest.raises(pickle.UnpicklingError, match=r"collections\.deque"):
        toy_run(total_iterations=3, **flags)


def test_another_batch_size_goes_on_where_the_data_stood(algo, toy_run, toy_flags, spy):
    starts = spy(algo, "draw_prompts", lambda rows, start, count, seed: (start, count))
    large = toy_flags["batch_size"]
    flags = {"save_every": 1, "resume": True, "run_name": "run"}
    toy_run(total_iterations=1, **flags)  # there is no run yet: it begins
    toy_run(total_iterations=2, **flags | {"batch_size": large // 2})
    toy_run(total_iterations=3, **flags)
    assert starts == [(0, large), (large, large // 2), (large * 3 // 2, large)]


@by_kind
def test_hyperparameters_are_those_of_now(toy_run, algo, monkeypatch, spy):
    """Of the flags, and of a `make_optimizer` that has been changed in between."""
    found = spy(torch.optim.AdamW, "step", lambda optimizer: optimizer.param_groups[0].copy())
    toy_run(total_iterations=1, save_every=1, run_name="run")
    assert {group["betas"] for group in found} == {(0.9, 0.999)}
    found.clear()

    def changed(model):
        return torch.optim.AdamW(algo.trained_parameters(model).values(), betas=(0.8, 0.9), fused=True)

    monkeypatch.setattr(algo, "make_optimizer", changed)
    toy_run(total_iterations=2, run_name="run", resume=True, lr=0.125)
    assert {group["betas"] for group in found} == {(0.8, 0.9)} and 0.125 in [group["lr"] for group in found]


def test_a_resume_says_what_it_changes_and_keeps_the_reward(toy_run, capsys, tmp_path):
    """On the console: the flags that differ, which checkpoint, and in each iteration the parts of the score."""
    text = "SETTINGS = {'judge': 'small'}\ndef parts(responses):\n    return {'size': [0.25] * len(responses)}\n"
    (tmp_path / "my_reward.py").write_text(text)
    flags = {"run_name": "run", "resume": True, "save_every": 1, "reward": f"{tmp_path}/my_reward.py:parts"}
    run_dir, _ = toy_run(total_iterations=1, **flags)
    first = capsys.readouterr().out
    assert "changed" not in first and "continuing" not in first and ": reward 0.250, part/size 0.250, KL " in first
    assert (run_dir / "my_reward.py").read_text() == (tmp_path / "my_reward.py").read_text()
    sys.modules["my_reward"].SETTINGS["judge"] = "large"
    toy_run(total_iterations=2, lr=0.5, **flags)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("  changed", "continuing"))]
    expected = [f"continuing from {run_dir}/checkpoints/step_000001{'.pt' * (said[0][-3:] == '.pt')}"]
    expected += ["  changed    total_iterations: it was 1 and is 2", "  changed    lr: it was 0.001 and is 0.5"]
    expected += ["  changed    reward_settings: it was {'judge': 'small'} and is {'judge': 'large'}"]
    assert sorted(said) == sorted(expected)


# ------------------------------------------------------------------------------------------------------------- lock


def lock(script, run_dir):
    """Locks the folder and leaves a child behind, as a reward's pool is left by a run that was killed: its number."""
    load_script(script).lock_run(Path(run_dir))
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    return child


def test_a_folder_in_use_is_refused(algo, script, tmp_path):
    """When that has ended, what it has forked does not hold it."""
    _, _, (child,) = fork_ranks(1, lock, str(script), str(tmp_path))
    algo.lock_run(tmp_path)
    os.kill(child, signal.SIGKILL)  # which also shows that it was there
    codes, (console,), _ = fork_ranks(1, lock, str(script), str(tmp_path))
    assert codes == [1]
    assert console.rstrip() == f"error: {tmp_path} is in use by another process"


def test_a_folder_that_a_rival_has_made_meanwhile(algo, toy_run, tmp_path, monkeypatch):
    monkeypatch.setattr(algo, "find_run", lambda args: (tmp_path, None))
    with pytest.raises(FileExistsError):
        toy_run(total_iterations=0)
    toy_run(total_iterations=0, resume=True)  # its own: to be locked
    assert (tmp_path / "lock").exists()


# ------------------------------------------------------------------------------------------------------------- signals

REWARD = """
import os
import signal
import time
from pathlib import Path

calls = []


def early(prompts, responses, answers):
    calls.append(prompts)
    if len(calls) == {call} and os.environ.get("RANK", "1") == "1":
        for name in {signals}:
            signal.raise_signal(signal.Signals[name])
    while len(calls) >= {call} and Path({gate!r}).exists():
        Path({gate!r} + os.environ.get("RANK", "0")).touch()
        time.sleep(0.05)
    return [sum(c < "m" for c in r) / max(1, len(r)) + 0.01 * len(r) for r in responses]
"""
STOPPED = "stopped early: the same command with --run-name {} --resume continues"
THREE = {"total_iterations": 3, "save_every": 1, "run_name": "run"}


def interrupted(folder, signals=(), call=2):
    """A reward that at this call gets these signals, on rank 1 or the only one. From this call on each rank waits while
    `gate` is there, and makes gate0 or gate1 to say so."""
    name = "_".join(["reward_of", folder.name, *signals])
    (folder / f"{name}.py").write_text(REWARD.format(call=call, signals=signals, gate=str(folder / "gate")))
    return f"{folder}/{name}.py:early"


@pytest.mark.parametrize("signals", [["SIGTERM", "SIGINT"] * 2, ["SIGHUP"]])
def test_a_signal_finishes_the_iteration_and_saves(algo, toy_run, tmp_path, capsys, signals):
    """However often it comes."""
    signal.signal(signal.SIGHUP, lambda *_: pytest.fail("it would have ended the run"))
    run_dir, metrics = toy_run(**THREE | {"run_name": "study/run", "reward": interrupted(tmp_path, signals)})
    assert [m["step"] for m in metrics] == [0, 1, 2]
    assert checkpoints_of(run_dir) == [checkpoint(algo, 1), checkpoint(algo, 2)]
    assert f"\n{STOPPED.format('study/run')}\n" in capsys.readouterr().out
    assert not (run_dir / "final").exists()


def test_after_nohup_a_lost_terminal_is_nothing(toy_run, tmp_path):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run_dir, metrics = toy_run(**THREE | {"reward": interrupted(tmp_path, ["SIGHUP"])})
    assert len(metrics) == 4 and (run_dir / "final").exists()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_signal_that_one_rank_gets_stops_all(script, toy_flags, tmp_path):
    """While the reward takes its time: the iteration, the second, is finished and saved."""
    gate = tmp_path / "gate"
    gate.touch()

    def send(ranks):
        if gate.exists() and len(list(tmp_path.glob("gate?"))) == 2:
            os.kill(ranks[1].pid, signal.SIGTERM)
            gate.unlink()

    flags = toy_flags | THREE | {"save_every": 0, "reward": interrupted(tmp_path), "output_dir": tmp_path}
    code, console = forked(script, flags, meanwhile=send)
    assert code == 0 and console.count(STOPPED.format("run")) == 1, console
    assert checkpoints_of(tmp_path / "run") == [checkpoint(script, 2)] and len(read_metrics(tmp_path / "run")) == 3


# ----------------------------------------------------------------------------------------------- under the launcher


def wait_for(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def run(toy_flags, tmp_path):
    """(fields of a run, the gate before its reward, its folder)"""
    flags = toy_flags | {"total_iterations": 6, "save_every": 3, "eval_every": 2, "eval_rows": 3, "lora_rank": 4}
    flags |= {"kl_reward_coef": 0.1, "warmup_iterations": 4, "ppo_epochs": 2, "track": "tensorboard"}
    flags |= {"output_dir": tmp_path, "run_name": "run", "reward": interrupted(tmp_path)}
    return flags, tmp_path / "gate", tmp_path / "run"


def begin(script, flags, victim):
    """A launcher of two workers. Or two, of one each, that meet at a port of this machine: as on two machines."""
    if victim != "machine":
        return [start(script, flags)]
    words = ["--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    return [start(script, flags, machine=[*words, "--machine_rank", str(rank)]) for rank in range(2)]


def ranks_of(launchers):
    """Their two processes that train."""
    children = [child for process in launchers for child in psutil.Process(process.pid).children(recursive=True)]
    ranks = [child for child in children if "--run-name" in child.cmdline()]
    assert len(ranks) == 2
    return ranks


VICTIMS = [("ppo_llm_fsdp", "worker"), ("grpo_llm", "machine")]


@pytest.mark.slow
@pytest.mark.parametrize("script, victim", VICTIMS, indirect=["script"], scope="module")
def test_a_killed_run_goes_on_to_the_bit(script, run, victim):
    flags, gate, run_dir = run
    code, console = launch(script, flags | {"run_name": "unbroken"})
    assert code == 0, console
    launchers = begin(script, flags, victim)
    wait_for(lambda: (run_dir / "checkpoints" / checkpoint(script, 3)).exists())
    gate.touch()  # the ranks wait here, in iteration 4 or later
    ranks = ranks_of(launchers)
    ranks[1].kill()
    gate.unlink()
    assert all(process.communicate(timeout=200) and process.returncode != 0 for process in launchers)
    psutil.wait_procs(ranks, timeout=200)
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks)
    assert len(read_metrics(run_dir)) < 7 and not (run_dir / "final").exists()
    for process in begin(script, flags | {"resume": True}, victim):
        console, _ = process.communicate(timeout=400)  # six are three and three; each machine shows its own
        assert "2 process(es) on cpu" in console and f"run folder {run_dir}, iterations 4 to 6\n" in console, console
    assert_same(run_dir, run_dir.with_name("unbroken"))


@pytest.mark.slow
def test_without_its_launcher_a_run_goes_on_and_keeps_others_out(script, run):
    flags, gate, run_dir = run
    gate.touch()
    process = start(script, flags)
    wait_for(lambda: len(list(gate.parent.glob("gate?"))) == 2)
    process.kill()
    code, console = forked(script, flags | {"resume": True}, 1)
    assert code == 1 and f"{run_dir} is in use by another process" in console, console
    gate.unlink()
    process.communicate(timeout=200)  # until the ranks have closed the pipe
    assert len(read_metrics(run_dir)) == 7 and (run_dir / "final").exists()


@pytest.mark.slow
@each_script("ppo_llm_fsdp")
def test_what_the_launcher_makes_of_a_signal_leaves_a_checkpoint(script, run):
    flags, gate, run_dir = run
    process = start(script, flags | {"save_every": 0})
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(read_metrics(run_dir)) >= 2)
    gate.touch()
    process.send_signal(signal.SIGTERM)
    gate.unlink()
    console, _ = process.communicate(timeout=200)
    (saved,) = (run_dir / "checkpoints").iterdir()
    assert STOPPED.format(run_dir.name) in console, console
    assert len(read_metrics(run_dir)) == int(saved.stem[5:]) + 1 < 7
