"""What was interrupted goes on as if it had not been: to the bit, on two processes."""

import os
import pickle
import shutil
import signal
import time

import psutil
import pytest
import torch
from conftest import SCRIPTS, compose, each_script, forked, launch, read_metrics, start, untimed
from ranks import free_port, load_script, run_ranks, train
from torch.optim.optimizer import register_optimizer_step_pre_hook

# ----------------------------------------------------------------------------------------- ranks without a launcher

RUN = {"track": "none", "total_iterations": 6, "max_response_length": 8, "microbatch_tokens": 128, "lr": 1e-2}
RUN |= {"eval_every": 2, "eval_rows": 3, "kl_reward_coef": 0.1, "warmup_iterations": 4, "keep_checkpoints": 9}
PPO = {"batch_size": 4, "minibatch_size": 4, "critic_lr": 1e-2, "critic_warmup_iterations": 4}
GRPO = {"batch_size": 2, "minibatch_size": 4, "group_size": 2}
LORA = PPO | {"lora_rank": 4, "critic_warmup_iterations": 1}
CASES = [("ppo_llm", PPO, False), ("grpo_llm", GRPO, False), ("ppo_llm_fsdp", PPO, False), ("ppo_llm", LORA, False)]
CASES += [pytest.param("ppo_llm_fsdp", LORA, False, marks=pytest.mark.slow)]
CASES += [pytest.param("grpo_llm", GRPO, True, marks=pytest.mark.slow)]


def weights_in(run_dir, folder):
    """{file: its bytes}"""
    return {path.relative_to(run_dir): path.read_bytes() for path in run_dir.glob(f"{folder}/**/*.safetensors")}


def assert_same(run_dir, other):
    """Metrics and weights, to the bit."""
    assert untimed(read_metrics(run_dir)) == untimed(read_metrics(other)) and len(read_metrics(other)) == 7
    assert weights_in(run_dir, "final") == weights_in(other, "final") != {}
    assert weights_in(run_dir, "best*") == weights_in(other, "best*") and sorted(run_dir.glob(".*")) == []


def checkpoints_of(run_dir):
    return sorted(path.name for path in run_dir.glob("checkpoints/*"))


@pytest.mark.parametrize("script, own, composed", CASES, indirect=["script"], scope="module")
def test_six_iterations_are_four_and_the_rest(script, tiny_model, toy_data, toy_reward, tmp_path, own, composed):
    """Broken off in iteration 5, gone on with from 3, where with PPO only the critic has been trained."""
    script = compose(tmp_path) if composed else script
    flags = RUN | own | {"model": tiny_model, "dataset": toy_data, "reward": toy_reward, "output_dir": str(tmp_path)}
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    runs = [(flags | {"run_name": unbroken.name, "save_every": 0}, {})]  # saving changes nothing
    runs += [(flags | {"run_name": broken.name, "save_every": 3}, {"dies": 5})]
    runs += [(flags | {"run_name": broken.name, "save_every": 3, "resume": "auto"}, {})]
    results = run_ranks(2, train, str(script), runs)
    assert all(len(died["metrics"]) == 5 and not died["weights"] for _, died, _ in results)  # it did end there
    assert checkpoints_of(broken) == ["step_000003", "step_000006"]
    assert_same(broken, unbroken)
    assert read_metrics(broken)[-1]["kl/mean"] != 0 and weights_in(broken, "best*")  # the policy has moved


def listing(folder):
    """{every path in it: what a file holds}"""
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def assert_refused(toy_run, folder, capsys, **flags):
    """In one sentence, before anything is touched."""
    before = listing(folder)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        toy_run(**flags)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 1 and line.startswith("error: --resume takes the newest checkpoint of a run")
    assert line.endswith("and no other --run-name") and listing(folder) == before


def test_a_named_checkpoint_and_a_finished_run(toy_run, tmp_path, capsys):
    """By its path, with the name of its run or none; a finished run stays as it is."""
    run_dir, before = toy_run(total_iterations=4, save_every=2, run_name="named")
    older, newest = run_dir / "checkpoints" / "step_000002", run_dir / "checkpoints" / "step_000004"
    weights = weights_in(run_dir, "final")
    assert_refused(toy_run, tmp_path, capsys, total_iterations=6, resume=str(newest), run_name="another")
    assert untimed(toy_run(total_iterations=4, resume=str(newest), run_name="named")[1]) == untimed(before)
    newest.rename(tmp_path / "elsewhere")
    flags = {"total_iterations": 4, "save_every": 2, "run_name": None}
    assert untimed(toy_run(resume=f"{os.path.relpath(older)}/", **flags)[1]) == untimed(before)
    assert weights_in(run_dir, "final") == weights


NO_CHECKPOINTS = "runs/A", "runs/A/checkpoints/step_000011", "runs/A/checkpoints/step_000005"
NO_CHECKPOINTS += "theirs/checkpoints/step_000005", "runs/A/best_000010", ""


@pytest.mark.parametrize("path", NO_CHECKPOINTS)
def test_a_path_that_is_no_checkpoint(toy_run, tmp_path, monkeypatch, capsys, path):
    folders = "runs/A/checkpoints/step_000005", "runs/A/checkpoints/step_000010", "theirs/checkpoints/step_000005"
    for folder in (*folders, "runs/A/best_000010", "runs/A/.best_000005.old"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "runs" / "A" / "args.json").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert_refused(toy_run, tmp_path, capsys, resume=path, run_name=None)


class Code:
    """What loading by pickle would run."""

    def __reduce__(self):
        return print, ("code of a checkpoint ran",)


@each_script()
def test_code_in_a_checkpoint_is_not_run(toy_run, capsys):
    run_dir, _ = toy_run(total_iterations=1, save_every=1, run_name="run")
    (file,) = run_dir.glob("checkpoints/step_000001/*.pt")
    torch.save(torch.load(file, weights_only=True) | {"more": Code()}, file)
    with pytest.raises(pickle.UnpicklingError):
        toy_run(total_iterations=2, run_name="run", resume="auto")
    assert "code of a checkpoint ran" not in capsys.readouterr().out


def test_without_a_name_a_run_has_that_of_the_script(algo, tmp_path):
    args, name = algo.Args(model="any", output_dir=str(tmp_path)), f"{algo.__name__}-1"
    assert algo.find_run(args)[0].name.startswith(f"{name}-20")  # and the time
    args.resume = "auto"
    assert algo.find_run(args) == (tmp_path / name, None)


@each_script()
def test_another_batch_size_goes_on_where_the_data_stood(algo, toy_run, tmp_path, monkeypatch):
    """A checkpoint of version 0.2, which did not count prompts, is taken to have had the batch size of now."""
    starts, real = [], algo.draw_prompts
    monkeypatch.setattr(algo, "draw_prompts", lambda *args: starts.append(args[1:3]) or real(*args))
    small = 2 if "grpo" in algo.__name__ else 4
    smaller = {"batch_size": small, "minibatch_size": 4}
    flags = {"save_every": 1, "resume": "auto"}
    run_dir, _ = toy_run(total_iterations=1, run_name="run", **flags)  # there is no checkpoint yet: it begins
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


@each_script()
def test_hyperparameters_are_those_of_the_flags_of_now(toy_run):
    found = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: found.append(optimizer.param_groups[0]))
    toy_run(total_iterations=1, save_every=1, run_name="run", weight_decay=0.1)
    decays = {group["weight_decay"] for group in found}
    found.clear()
    toy_run(total_iterations=2, run_name="run", resume="auto", weight_decay=0.5)
    hook.remove()
    assert decays == {0.1} and {group["weight_decay"] for group in found} == {0.5}


# ---------------------------------------------------------------------------------------- signals, and a lost launcher

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
    while Path({gate!r}).exists():
        time.sleep(0.05)
    return [sum(c < "m" for c in r) / max(1, len(r)) + 0.01 * len(r) for r in responses]
"""
THREE = {"total_iterations": 3, "save_every": 1, "run_name": "run"}


def interrupted(folder, signals=(), call=2):
    """A reward that at this call gets these signals, on rank 1 or the only one; and waits while `gate` is there."""
    name = "_".join(["reward_of", folder.name, *signals])
    (folder / f"{name}.py").write_text(REWARD.format(call=call, signals=signals, gate=str(folder / "gate")))
    return f"{folder}/{name}.py:early"


@each_script()
@pytest.mark.parametrize("first", ["SIGINT", "SIGTERM"])
def test_one_signal_finishes_the_iteration_and_saves(toy_run, tmp_path, capsys, first):
    run_dir, metrics = toy_run(reward=interrupted(tmp_path, [first]), **THREE)
    assert [m["step"] for m in metrics] == [0, 1, 2] and checkpoints_of(run_dir) == ["step_000001", "step_000002"]
    assert "stopped after iteration 2; --resume auto --run-name run goes on" in capsys.readouterr().out
    assert not (run_dir / "final").exists()


@each_script()
@pytest.mark.parametrize(
    "signals, call, steps", [(["SIGINT"], 1, []), (["SIGINT"] * 2, 4, [0, 1]), (["SIGINT", "SIGTERM"], 4, [0, 1])]
)
def test_ctrl_c_before_the_loop_and_a_second_one_get_through(toy_run, tmp_path, signals, call, steps):
    """At once, with what was complete before, and nothing else. A launcher passes it on as SIGTERM."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell tests are deaf to it
    with pytest.raises(KeyboardInterrupt):
        toy_run(reward=interrupted(tmp_path, signals, call), eval_rows=2, **THREE)  # evaluates at calls 1 and 2
    run_dir = tmp_path / "runs" / "run"
    assert [m["step"] for m in read_metrics(run_dir)] == steps
    assert checkpoints_of(run_dir) == [f"step_{step:06d}" for step in steps[1:]]


@pytest.mark.once
@each_script()
def test_a_signal_that_one_rank_gets_stops_all(script, toy_flags, tmp_path):
    flags = {"reward": interrupted(tmp_path, ["SIGTERM"]), "output_dir": tmp_path}
    code, console = forked(script, toy_flags | THREE | flags)
    assert code == 0 and console.count("stopped after iteration 2") == 1, console
    assert checkpoints_of(tmp_path / "run") == ["step_000001", "step_000002"]


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"])
def test_without_its_launcher_a_rank_ends_before_it_writes(algo, toy_run, tmp_path, monkeypatch, variable):
    """But after Ctrl-C, which ends the launcher of a single process at once, it saves."""
    monkeypatch.setenv(variable, "no")
    launched = load_script(shutil.copy(algo.__file__, tmp_path / f"with_{variable}.py"))
    assert launched.LAUNCHED and not algo.LAUNCHED
    monkeypatch.setattr(algo, "LAUNCHED", True)
    assert len(toy_run(total_iterations=1)[1]) == 2
    monkeypatch.setattr(algo, "PARENT", 0)
    with pytest.raises(SystemExit, match="the launcher has gone"):
        toy_run(total_iterations=1, run_name="lost")
    assert len(read_metrics(tmp_path / "runs" / "lost")) == 1
    run_dir, _ = toy_run(reward=interrupted(tmp_path, ["SIGINT"], 1), **THREE)
    assert checkpoints_of(run_dir) == ["step_000001"]


# ----------------------------------------------------------------------------------------------- under the launcher


def wait_for(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


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


@pytest.fixture
def run(flags, tmp_path):
    """(fields of a run, the gate before its reward, its folder)"""
    flags = flags | {"run_name": tmp_path.name, "reward": interrupted(tmp_path)}
    return flags, tmp_path / "gate", flags["output_dir"] / tmp_path.name


def begin(script, flags, victim):
    """A launcher of two workers. Or two, of one each, that meet at a port of this machine: as on two machines."""
    if victim != "machine":
        return [start(script, flags)]
    words = ["--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    return [start(script, flags, machine=[*words, "--machine_rank", str(rank)]) for rank in range(2)]


VICTIMS = [(script, "worker") for script in SCRIPTS] + [("ppo_llm_fsdp", "launcher")]
VICTIMS += [("ppo_llm", "machine"), ("ppo_llm_fsdp", "machine")]


@pytest.mark.slow
@pytest.mark.parametrize("script, victim", VICTIMS, indirect=["script"], scope="module")
def test_a_killed_run_goes_on_to_the_bit(script, run, unbroken, victim):
    flags, gate, run_dir = run
    launchers = begin(script, flags, victim)
    wait_for(lambda: (run_dir / "checkpoints" / "step_000003").exists())
    gate.touch()  # the ranks wait here, in iteration 4 or later
    children = [child for process in launchers for child in psutil.Process(process.pid).children(recursive=True)]
    ranks = [child for child in children if "--run-name" in child.cmdline()]
    assert len(ranks) == 2
    os.kill(launchers[0].pid if victim == "launcher" else ranks[1].pid, signal.SIGKILL)
    gate.unlink()
    assert all(process.communicate(timeout=200) and process.returncode != 0 for process in launchers)
    psutil.wait_procs(ranks, timeout=200)
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks)
    assert len(read_metrics(run_dir)) < 7 and not (run_dir / "final").exists()
    for process in begin(script, flags | {"resume": "auto"}, victim):
        console, _ = process.communicate(timeout=400)
        # Six are three and three. Each machine shows its own.
        assert "2 process(es) on cpu" in console and f"run folder {run_dir}, from iteration 4\n" in console, console
    assert_same(run_dir, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("script, processes", [("ppo_llm_fsdp", 2), ("ppo_llm", 1)], indirect=["script"])
def test_what_the_launcher_makes_of_a_signal_leaves_a_checkpoint(script, run, processes):
    """Of Ctrl-C, too, at which the launcher of one process ends at once."""
    flags, gate, run_dir = run
    process = start(script, flags | {"save_every": 0}, processes)
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(read_metrics(run_dir)) >= 2)
    gate.touch()
    if processes == 2:
        process.send_signal(signal.SIGTERM)
    else:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the launcher and to what it started
        wait_for(lambda: process.poll() is not None)
    gate.unlink()
    console, _ = process.communicate(timeout=200)  # which ends when the script does
    (saved,) = (run_dir / "checkpoints").iterdir()
    assert f"stopped after iteration {int(saved.name[5:])}; --resume auto" in console, console
    assert len(read_metrics(run_dir)) == int(saved.name[5:]) + 1 < 7
