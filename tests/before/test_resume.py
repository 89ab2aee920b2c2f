"""Interrupted runs: resuming to the bit, signals, locks, numbers that are not finite, disks that fail."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from .helpers_before import (
    ROOT,
    make_model,
    only_grpo,
    only_ppo,
    read_metrics,
    read_rows,
    toy_rows,
    untimed,
    write_rows,
)

# With 24 prompts and 8 per iteration an epoch of the toy data ends after every third iteration (GRPO: every sixth).
ALL_ON = {
    "kl_reward_coef": 0.1,
    "kl_controller": "adaptive",
    "kl_horizon": 100.0,
    "kl_target": 1e-3,
    "entropy_coef": 0.01,
}
ALL_ON |= {"lr_schedule": "cosine", "warmup_iterations": 2, "eval_every": 2, "save_every": 1, "keep_checkpoints": 9}


def weights(run_dir):
    """{place: tensor} of everything that final/ and best/ hold."""
    return {
        f"{file.relative_to(run_dir)}:{name}": tensor
        for folder in ("final", "best")
        for file in sorted((run_dir / folder).rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_same_run(a, b):
    assert untimed(read_metrics(a)) == untimed(read_metrics(b))
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys() and len(a) > 4 and all(torch.equal(a[name], b[name]) for name in a)


def cut_back(run_dir, copy, step):
    """A copy of a run as a kill after this step's checkpoint would have left it, and its newest checkpoint."""
    shutil.copytree(run_dir, copy)
    shutil.rmtree(copy / "final")
    for later in (copy / "checkpoints").iterdir():
        if int(later.name[5:]) > step:
            shutil.rmtree(later)
    return copy / "checkpoints" / f"step_{step:06d}"


@pytest.fixture
def main(algo, toy_args):
    """Runs `main` with toy_args(**changes), in this process: the run folder."""

    def run(stop=None, **changes):
        AcceleratorState._reset_state(True)
        return algo.main(toy_args(**ALL_ON | {"total_iterations": 5} | changes), stop)

    return run


@pytest.fixture
def message(main, capsys):
    """Runs `main`, which must refuse: what it says."""

    def run(**changes):
        capsys.readouterr()
        with pytest.raises(SystemExit) as info:
            main(**changes)
        assert str(info.value.code).startswith("error: ") and "\n" not in info.value.code
        return info.value.code

    return run


# --- resuming --------------------------------------------------------------------------------------------------------


NOISY_REWARD = """
import random
import numpy, torch

def noisy(prompts, responses, answers):
    luck = random.random() + numpy.random.rand() + torch.rand(1).item()
    return [luck + sum(c < "m" for c in r) / max(1, len(r)) + random.random() for r in responses]
"""


def test_a_resumed_run_is_the_unbroken_one(main, tmp_path):
    """In every metric and weight, bit by bit, from inside an epoch and its end; with a reward that draws numbers."""
    (tmp_path / "noisy.py").write_text(NOISY_REWARD)
    flags = {"reward": f"{tmp_path}/noisy.py:noisy"}
    whole = main(run_name="whole", **flags)
    for step in (1, 2, 3, 5):
        checkpoint = cut_back(whole, tmp_path / "runs" / f"from{step}", step)
        assert main(resume=str(checkpoint), **flags) == checkpoint.parents[1]
        assert_same_run(whole, checkpoint.parents[1])


@only_grpo
def test_auto_takes_the_newest_and_cuts_what_came_after(main, tmp_path, capsys):
    whole = main(run_name="whole")
    copy = cut_back(whole, tmp_path / "runs" / "auto", 2).parents[1]
    (copy / "checkpoints" / ".step_000004.tmp").mkdir()  # killed while saving
    (copy / "best").rename(copy / ".best.old")  # killed between two renames: it is there again, whatever comes
    with open(copy / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "rew')  # and while writing a line
    capsys.readouterr()
    main(run_name="auto", resume="auto")
    assert f"resume     {copy}/checkpoints/step_000002; changed: no flag" in capsys.readouterr().out
    assert_same_run(whole, copy)
    assert [p.name for p in copy.rglob(".*")] == [".lock"]


@only_grpo
def test_auto_begins_where_nothing_is(main, tmp_path, capsys, message):
    whole = main(run_name="whole")
    again = main(run_name="again", resume="auto")
    assert "again has no checkpoint: from the beginning" in capsys.readouterr().out
    assert_same_run(whole, again)
    # Killed before the first checkpoint.
    shutil.rmtree(again / "checkpoints")
    shutil.rmtree(again / "final")
    assert_same_run(whole, main(run_name="again", resume="auto"))
    shutil.rmtree(again / "checkpoints")
    assert "is finished and without checkpoints" in message(run_name="again", resume="auto")


@only_ppo
def test_saving_before_the_first_step_changes_nothing(main, tmp_path):
    """The actor's optimizer has no state as long as the critic warms up; torch would make one by a step."""
    plain = main(run_name="plain", save_every=0, critic_warmup_iterations=3)
    whole = main(run_name="whole", critic_warmup_iterations=3)
    assert_same_run(plain, whole)
    checkpoint = cut_back(whole, tmp_path / "runs" / "cut", 2)
    assert_same_run(whole, main(resume=str(checkpoint), critic_warmup_iterations=3))


@only_grpo
def test_an_older_checkpoint_makes_a_new_branch(main):
    run_dir = main(run_name="run")
    main(resume=str(run_dir / "checkpoints" / "step_000002"), total_iterations=3)
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == [f"step_00000{i}" for i in (1, 2, 3)]
    assert [m["step"] for m in read_metrics(run_dir)] == [0, 1, 2, 3]


@only_grpo
def test_a_run_can_be_extended_and_says_what_changed(main, capsys):
    flags = {"lr_schedule": "constant", "warmup_iterations": 0}
    whole = main(run_name="whole", **flags)
    short = main(run_name="short", total_iterations=3, **flags)
    main(run_name="short", resume="auto", **flags, microbatch_tokens=4096)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  resume "))
    changes = set(line.split("; changed: ")[1].split(", "))
    assert changes == {"--microbatch-tokens 8192 -> 4096", "--total-iterations 3 -> 5"}
    a, b = (untimed(read_metrics(run)) for run in (whole, short))
    assert [m["step"] for m in b] == [0, 1, 2, 3, 4, 5] and a[:3] == b[:3]
    assert a[5]["reward/mean"] == pytest.approx(b[5]["reward/mean"])


@only_grpo
def test_the_curves_have_every_step_once(main, tmp_path):
    run_dir = main(run_name="run")
    main(resume=str(run_dir / "checkpoints" / "step_000002"))
    events = EventAccumulator(str(next(run_dir.glob("tensorboard")))).Reload()
    assert [e.step for e in events.Scalars("reward/mean")] == [1, 2, 3, 4, 5]


@only_grpo
@pytest.mark.parametrize(
    "flag, value", [("model", None), ("lora_rank", 4), ("seed", 2), ("reward", "exact"), ("dataset", None)]
)
def test_flags_that_make_another_run_are_refused(main, message, tmp_path, flag, value):
    run_dir = main(run_name="run", total_iterations=1)
    before = (run_dir / "metrics.jsonl").read_text()
    if flag == "model":
        value = make_model(tmp_path / "model", seed=3)
    if flag == "dataset":
        value = write_rows(tmp_path / "rows.jsonl", toy_rows(23))
    said = message(run_name="run", resume="auto", **{flag: value})
    if flag == "dataset":
        assert "prompts and answers are not those the run was trained and tested on" in said
    else:
        assert said.startswith(f"error: --{flag.replace('_', '-')}: it was ") and f"cannot become {value} in" in said
    assert (run_dir / "metrics.jsonl").read_text() == before


@only_grpo
def test_a_changed_data_file_is_seen(main, message, tmp_path, toy_data):
    data = tmp_path / "data.jsonl"
    shutil.copy(toy_data, data)
    main(run_name="run", total_iterations=1, dataset=str(data))
    rows = read_rows(data)
    rows[5]["answer"] = "#### 7"
    write_rows(data, rows)
    assert "prompts and answers" in message(run_name="run", resume="auto", dataset=str(data))


@only_grpo
def test_bad_ways_to_resume(main, message):
    run_dir = main(run_name="run", total_iterations=3)
    assert "needs --run-name" in message(resume="auto")
    assert "--total-iterations 2" in message(run_name="run", resume="auto", total_iterations=2)
    assert "choose another --run-name, or --resume auto" in message(run_name="run")
    (run_dir / "metrics.jsonl").write_text((run_dir / "metrics.jsonl").read_text().splitlines(True)[0])
    assert "metrics.jsonl has 1 lines, the checkpoint is after 4" in message(run_name="run", resume="auto")
    (run_dir / "metrics.jsonl").unlink()
    assert "metrics.jsonl" in message(run_name="run", resume="auto")
    assert (run_dir / "checkpoints" / "step_000003" / "progress.json").exists()


@only_grpo
@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "gone", "progress"])
def test_a_damaged_checkpoint_is_refused(main, message, damage):
    """A flipped bit, too: it would be a weight like any other."""
    run_dir = main(run_name="run", total_iterations=2)
    (shard,) = (run_dir / "checkpoints" / "step_000002").glob("shard-*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1000] ^= 4
    if damage == "gone":
        shard.unlink()
    elif damage == "progress":  # another coefficient, or data position, is as bad as another weight
        file = shard.with_name("progress.json")
        file.write_text(file.read_text().replace('"num_drawn": ', '"num_drawn": 1'))
    else:
        shard.write_bytes({"flipped": data, "cut": data[:-1000], "empty": b""}[damage])
    before = sorted((p, p.stat().st_mtime_ns) for p in run_dir.rglob("[!.]*"))
    words = "its progress.json is damaged" if damage == "progress" else f"its file {shard.name} is missing or damaged"
    assert words in message(run_name="run", resume="auto")
    assert sorted((p, p.stat().st_mtime_ns) for p in run_dir.rglob("[!.]*")) == before


@only_grpo
def test_a_checkpoint_is_safetensors_and_json(main):
    run_dir = main(run_name="run", total_iterations=2, keep_checkpoints=1)
    (path,) = (run_dir / "checkpoints").iterdir()
    assert path.name == "step_000002" and {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    progress = json.loads((path / "progress.json").read_text())
    assert progress["reached"]["next_iteration"] == 3 and progress["record"]["num_processes"] == 1


# --- stopping --------------------------------------------------------------------------------------------------------


@only_grpo
@pytest.mark.parametrize("when", ["rollout", "update", "evaluation", "start"])
def test_a_stopped_run_saves_and_goes_on(algo, main, monkeypatch, capsys, when):
    """Asked in the rollout of iteration 3 it abandons it, asked in the update or the evaluation it finishes it."""
    whole, stop, calls = main(run_name="whole", save_every=0, eval_every=1), threading.Event(), []
    name = {"rollout": "generate", "update": "policy_loss", "evaluation": "evaluate", "start": "draw_prompts"}[when]
    real, number = getattr(algo, name), {"rollout": 2 * 3 + 3, "update": 5, "evaluation": 4, "start": 1}[when]

    def counted(*args, **kwargs):
        calls.append(1)
        if len(calls) == number:
            stop.set()
        return real(*args, **kwargs)

    draw = algo.draw_prompts

    def drawn(*args):
        assert not stop.is_set(), "a rollout that nothing will come of"
        return draw(*args)

    with monkeypatch.context() as patch:
        patch.setattr(algo, "draw_prompts", drawn)
        patch.setattr(algo, name, counted)
        run_dir = main(stop, run_name="run", save_every=0, eval_every=1)
    reached = {"rollout": 2, "update": 3, "evaluation": 3, "start": 0}[when]
    assert f"stopped after iteration {reached}; --resume auto --run-name run goes on" in capsys.readouterr().out
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == [f"step_{reached:06d}"]
    assert not (run_dir / "final").exists() and len(read_metrics(run_dir)) == reached + 1
    assert_same_run(whole, main(run_name="run", resume="auto", save_every=0, eval_every=1))


@only_grpo
def test_a_second_writer_is_refused(main, message):
    run_dir = main(run_name="run", total_iterations=2)
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True);"
    other = subprocess.Popen(
        [sys.executable, "-c", code + "time.sleep(60)", run_dir / ".lock"], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "1\n"
    before = (run_dir / "metrics.jsonl").read_bytes()
    said = message(run_name="run", resume="auto")
    assert f"{run_dir} is being written by process {os.getpid()} on " in said and "wait for it or stop it" in said
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    other.kill()
    other.wait()
    main(run_name="run", resume="auto", total_iterations=2)


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def steps(monkeypatch):
    """Grows with every optimizer step."""
    real, steps = torch.optim.AdamW.step, []
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *args: (steps.append(1), real(self, *args))[1])
    return steps


def poison(monkeypatch, algo, name, number, spoil):
    """From its call `number` on, what algo.name returns goes through `spoil`."""
    real, calls = getattr(algo, name), []

    def poisoned(*args, **kwargs):
        calls.append(1)
        result = real(*args, **kwargs)
        return spoil(result) if len(calls) >= number else result

    monkeypatch.setattr(algo, name, poisoned)


class NoGradient(torch.autograd.Function):
    """The identity, whose gradient is NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.nan


@pytest.mark.parametrize(
    "name, spoil, said, done",
    [
        ("policy_loss", lambda x: x * torch.inf, "actor loss", 0),
        ("policy_loss", lambda x: x + torch.nan, "actor loss, actor gradient", 0),
        ("policy_loss", NoGradient.apply, "actor gradient", 0),
        ("value_loss", lambda x: x + torch.nan, "critic loss, critic gradient", 2),
        ("forward_all", lambda x: x + torch.nan, "old logprobs, ref logprobs", 0),
        ("gae", lambda x: (x[0] + torch.inf, x[1]), "advantages", 0),
        ("group_advantages", lambda x: x * torch.nan, "advantages", 0),
        ("compute_scores", lambda x: [float("nan")] * len(x), "advantages", 0),
    ],
)
def test_numbers_that_are_not_finite_stop_before_the_step(
    algo, message, monkeypatch, steps, tmp_path, name, spoil, said, done
):
    """And before a checkpoint of them is written; the batch is kept."""
    if not hasattr(algo, name):
        pytest.skip("another algorithm's")
    number = {"compute_scores": 3}.get(name, 1)  # a trial and the two of no evaluation come before
    poison(monkeypatch, algo, name, number, spoil)
    flags = {"eval_every": 0, "eval_dataset": None, "whiten_advantages": False, "kl_controller": "fixed"}
    text = message(run_name="run", **flags, total_iterations=1)
    assert "not finite: " in text and said.split(",")[0] in text and "--lr" in text
    assert len(steps) == done
    path = tmp_path / "runs" / "run" / "debug" / "step_000001_rank_0.jsonl"
    assert text.endswith(f"the batch is in {path}")
    rows = read_rows(path)
    assert len(rows) == 8 and all(set(row) == {"query", "response", "score"} for row in rows)
    assert not (path.parents[1] / "checkpoints").exists() and not (path.parents[1] / "final").exists()


@only_grpo
def test_a_reward_that_is_not_finite_leaves_its_batch(main, message, tmp_path):
    """As a reward file: what a user would do."""
    (tmp_path / "r.py").write_text(
        "calls = []\ndef bad(prompts, responses, answers):\n    calls.append(1)\n"
        "    return [0.5] * (len(prompts) - 1) + [float('inf') if len(prompts) == 8 and len(calls) > 4 else 0.5]\n"
    )
    text = message(reward=f"{tmp_path}/r.py:bad", run_name="run", total_iterations=9)
    assert "the reward returned inf for 'what is" in text
    (path,) = (tmp_path / "runs" / "run" / "debug").iterdir()
    assert text.endswith(f"the batch is in {path}")
    assert len(read_rows(path)) == 8 and {row["score"] for row in read_rows(path)} == {None}


# --- disks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def at_iteration(algo, monkeypatch):
    """at_iteration(n, do): do() is called at the end of the rollout of iteration n."""

    def install(number, do):
        real, calls = algo.pack, []

        def pack(*args):
            calls.append(1)
            if len(calls) == 2 * (number - 1) + 1:  # two minibatches in an iteration
                do()
            return real(*args)

        monkeypatch.setattr(algo, "pack", pack)

    return install


@only_grpo
def test_a_full_disk_leaves_the_last_checkpoint(main, message, at_iteration, tmp_path):
    """Files cannot become larger than some limit: the third checkpoint does not fit, the first two are untouched."""
    run_dir, soft = tmp_path / "runs" / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    whole = main(run_name="whole")
    at_iteration(3, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, soft[1])))
    try:
        said = message(run_name="run", eval_every=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft)
    assert "step_000003 cannot be written, mend it and go on with --resume" in said
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["step_000001", "step_000002"]
    at_iteration(99, lambda: None)
    main(run_name="run", resume="auto", eval_every=0)
    last = [untimed(read_metrics(run))[-1] for run in (run_dir, whole)]
    assert last[0] == last[1]


@only_grpo
@pytest.mark.parametrize("what", ["metrics.jsonl", "tensorboard"])
def test_files_that_vanish_are_missed(message, at_iteration, tmp_path, what):
    run_dir = tmp_path / "runs" / "run"
    target = run_dir / what
    at_iteration(3, lambda: target.unlink() if target.is_file() else shutil.rmtree(target))
    assert f"{target} is gone: something other than this run has removed it" in message(run_name="run")
    assert (run_dir / "checkpoints" / "step_000002" / "progress.json").exists()


@only_grpo
def test_a_folder_in_the_way_is_named(message, at_iteration, tmp_path):
    run_dir = tmp_path / "runs" / "run"

    def spoil():
        (run_dir / "metrics.jsonl").unlink()
        (run_dir / "metrics.jsonl").mkdir()

    at_iteration(2, spoil)
    assert f"{run_dir}/metrics.jsonl cannot be written" in message(run_name="run")


@only_grpo
def test_what_has_the_name_is_whole(algo, tmp_path):
    for make in (lambda p: p.write_text("new"), lambda p: (p.mkdir(), (p / "a").write_text("new"))):
        path = tmp_path / f"thing{len(list(tmp_path.iterdir()))}"
        with algo.written_whole(path) as temporary:
            make(temporary)
            assert not path.exists()
        with pytest.raises(KeyboardInterrupt), algo.written_whole(path) as temporary:
            make(temporary)
            raise KeyboardInterrupt
        assert (path if path.is_file() else path / "a").read_text() == "new"
    assert not list(tmp_path.glob(".*"))


@only_grpo
def test_tidy_puts_back_what_was_being_replaced(algo, tmp_path):
    for name in (".best.old", ".best.tmp", ".final.tmp", "checkpoints", "checkpoints/.step_000002.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(name)
    (tmp_path / ".eval.jsonl.tmp").write_text("half")
    algo.tidy(tmp_path)
    assert (tmp_path / "best" / "a").read_text() == ".best.old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "checkpoints"]
    (tmp_path / ".best.old").mkdir()  # killed after the second rename
    algo.tidy(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "checkpoints"]
    assert (tmp_path / "best" / "a").read_text() == ".best.old"


# --- real processes --------------------------------------------------------------------------------------------------


def command(script, processes, flags):
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    several = ["--multi_gpu"] if processes > 1 else []
    launch = ["launch", *several, "--num_processes", processes, "--num_machines", 1, "--mixed_precision", "no"]
    return [accelerate, *map(str, [*launch, "--dynamo_backend", "no", "--main_process_port", 0, script, *flags])]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Model, data and a reward that takes a tenth of a second."""
    folder = tmp_path_factory.mktemp("launched")
    make_model(folder / "model")
    write_rows(folder / "train.jsonl", toy_rows(24))
    write_rows(folder / "test.jsonl", toy_rows(6, 100))
    (folder / "reward.py").write_text(
        "import time\n"
        "def slow(prompts, responses, answers):\n    time.sleep(0.1)\n"
        "    return [sum(c < 'm' for c in r) / max(1, len(r)) for r in responses]\n"
    )
    return folder


def flags_of(place, name, algo, **changes):
    flags = {"model": place / "model", "dataset": place / "train.jsonl", "reward": f"{place}/reward.py:slow"}
    flags |= {"batch_size": 8, "group_size": 2, "minibatch_size": 8, "max_response_length": 10, "lr": 1e-3}
    flags |= {"total_iterations": 8, "eval_every": 3, "save_every": 0, "output_dir": place / "runs", "run_name": name}
    flags |= {"kl_reward_coef": 0.1, "kl_controller": "adaptive", "lr_schedule": "linear", "lora_rank": 4}
    return [x for k, v in (flags | changes).items() for x in (f"--{k.replace('_', '-')}", v)]


def start(args, log):
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(args, stdout=open(log, "w"), stderr=subprocess.STDOUT, env=env, start_new_session=True)


def ranks(marker):
    """Processes of a run that are not the launcher: their command lines have the marker."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if marker.encode() in words and b"launch" not in words:
            found.append(int(path.parent.name))
    return found


def wait_until(holds, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.1)
    return False


def num_lines(path):
    return len(path.read_text().splitlines()) if path.exists() else 0


@only_grpo
@pytest.mark.slow
def test_sigterm_on_two_processes_saves_and_the_run_goes_on_to_the_bit(algo, place):
    script, name = ROOT / f"{algo.__name__}.py", f"{algo.__name__}-stopped"
    assert start(command(script, 2, flags_of(place, f"{name}-whole", algo)), place / "whole.txt").wait(120) == 0
    run_dir, log = place / "runs" / name, place / "stopped.txt"
    launcher = start(command(script, 2, flags_of(place, name, algo)), log)
    assert wait_until(lambda: num_lines(run_dir / "metrics.jsonl") > 4, 90), log.read_text()
    begin = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(30) == 1 and time.monotonic() - begin < 20
    assert wait_until(lambda: not ranks(name), 5)
    assert "stopped after iteration" in log.read_text(), log.read_text()
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    again = start(command(script, 2, [*flags_of(place, name, algo), "--resume", "auto"]), place / "again.txt")
    assert again.wait(120) == 0, (place / "again.txt").read_text()
    assert f"resume     {checkpoint}; changed: no flag" in (place / "again.txt").read_text()
    assert_same_run(place / "runs" / f"{name}-whole", run_dir)


@only_grpo
def test_run_names_stay_in_the_output_folder(message, tmp_path):
    for name in ("../x", "a/b", "..", ".", ""):
        assert "plain folder name" in message(run_name=name)
    assert not (tmp_path / "x").exists()
