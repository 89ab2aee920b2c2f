"""benchmarks/speed.py runs, and its contenders do the same work. Nothing here is about how long it takes."""

import os
import shutil

import pytest
from conftest import ROOT, each_script, load_script, read_metrics
from test_project import load_benchmark

SMALL = {"prompts": 4, "group_size": 2, "length": 6, "prompt_length": None, "steps": 2}


@pytest.fixture
def speed(monkeypatch, tmp_path):
    module = load_benchmark("speed")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setitem(module.SIZES, "tiny", SMALL)
    return module


OURS = ("GRPO ours", ""), ("GRPO ours, shared_prompt", ""), ("PPO ours", ""), ("PPO ours, bypass", "")
TRLS = ("GRPO TRL", "TRL_PYTHON"), ("RLOO TRL", "TRL_PYTHON"), ("PPO TRL", "TRL_PPO_PYTHON")


@pytest.mark.slow
@pytest.mark.parametrize("name, variable", [*OURS, *TRLS])
def test_contenders_do_the_same_work(speed, tmp_path, name, variable):
    if variable and variable not in os.environ:
        pytest.skip(f"{variable} does not name the python of an environment with TRL")
    task = {"model": speed.make_model(tmp_path, "tiny"), "rows": speed.make_rows("tiny")[:64], "iterations": 3}
    python = os.environ.get(variable)
    runs = speed.contenders(task | SMALL | {"processes": 2, "forced": True}, python, python, tmp_path)
    lines, peak = runs[name]()
    assert len(lines) == (3 if variable else 2)  # our last iteration evaluates
    for line in lines:
        assert line["responses"] == 8 and line["optimizer_steps"] == 2
        assert line["tokens"] > 8 * 6 and 0 < line["rollout"] < line["seconds"]  # every response has the full length
    assert 100 < peak / 2**20 < 4000


def test_what_is_undone_is_there(speed):
    """A change of grpo_llm.py must not leave the ablation without effect."""
    source = (ROOT / "grpo_llm.py").read_text()
    for name, changes in speed.UNDONE.items():
        for old, new in changes.items():
            assert source.count(old) == 1, name
            compile(source.replace(old, new), name, "exec")
    compile((ROOT / "benchmarks" / "peers.py").read_text(), "peers.py", "exec")


@each_script()
def test_phases_fill_an_iteration(script, toy_flags, tmp_path, monkeypatch):
    phases = load_benchmark("phases")
    hooks, register = [], phases.register_optimizer_step_post_hook
    monkeypatch.setattr(phases, "register_optimizer_step_post_hook", lambda hook: hooks.append(register(hook)))
    algo = load_script(shutil.copy(script, tmp_path / f"clocked_{script.name}"))
    phases.Clock(algo)
    flags = toy_flags | {"eval_rows": 3, "total_iterations": 3, "output_dir": str(tmp_path), "run_name": "run"}
    before, *lines = read_metrics(algo.main(algo.Args(**flags)))
    hooks[0].remove()
    names = {f"time/{phase}" for phase in phases.PHASES if phase not in ("values", "critic") or "ppo" in script.name}
    assert {key for key in before if key.startswith("time/")} == {"time/eval", "time/clock"}
    for last, line in zip([before, *lines], lines):
        others = {"time/iteration", "time/clock"} | ({"time/eval"} if "eval/score" in line else set())
        assert {key for key in line if key.startswith("time/")} == names | others
        seconds = sum(line[name] for name in names)
        assert 0.9 * line["time/iteration"] < seconds <= line["time/clock"] - last["time/clock"]


def test_the_table_has_medians_of_ratios(speed, tmp_path):
    assert speed.make_rows("tiny")[0]["prompt"] in (ROOT / "benchmarks" / "tiny" / "train.jsonl").read_text()
    setting = {"size": "tiny", "processes": 2, "forced": False, "tokens": 100, "rollout": 0.5, "peak_bytes": 2**20}
    setting["steps"] = 4
    for number, (ours, peer) in enumerate([(1, 4), (2, 4), (9, 5), (3, 4)]):  # in the third something disturbed both
        speed.record("iteration", name="GRPO ours", round=number, seconds=ours, **setting)
        speed.record("iteration", name="GRPO TRL", round=number, seconds=peer, **setting)
    speed.table(None)
    text = (tmp_path / "results" / "README.md").read_text()
    assert "| GRPO ours | 3 | 2.00 | 0.50 | 50 | 1 | 0.50x (0.25-0.75) |" in text
    assert "did not count: 1." in text
    assert (tmp_path / "results" / "tiny-2-eos-4.png").stat().st_size > 1000
    rounds = [("one", "ours", 1), ("one", "peer", 4), ("another", "ours", 1), ("another", "peer", 2)]
    rows = [{"machine": where, "round": 0, "name": name, "seconds": seconds} for where, name, seconds in rounds]
    assert speed.ratios(rows, "ours", "peer") == [0.25, 0.5]  # a round of one machine is not one of another
