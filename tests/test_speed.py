"""benchmarks/speed.py runs, and its contenders do the same work. Nothing here is about how long it takes."""

import os
import shutil

import pytest
from conftest import ROOT, each_script, load_script, read_metrics, write_rows
from test_project import load_benchmark

SMALL = {"prompts": 4, "group_size": 2, "length": 6, "steps": 2}


@pytest.fixture
def speed(monkeypatch, tmp_path):
    module = load_benchmark("speed")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setitem(module.SIZES, "tiny", SMALL)
    return module


OURS = ("GRPO ours", ""), ("GRPO ours, shared_prompt", ""), ("PPO ours", ""), ("PPO ours, bypass", "")
TRLS = ("GRPO TRL", "TRL_PYTHON"), ("PPO TRL", "TRL_PPO_PYTHON")


@pytest.mark.slow
@pytest.mark.parametrize("name, variable", [*OURS, *TRLS])
def test_contenders_do_the_same_work(speed, tmp_path, name, variable):
    """On one prompt, so that we know how many tokens that is: every response has the full length."""
    if variable and variable not in os.environ:
        pytest.skip(f"{variable} does not name the python of an environment with TRL")
    task = speed.make_task(tmp_path, "tiny", forced=True, iterations=3)
    task["rows"] = task["rows"][:1] * 64
    write_rows(tmp_path / "rows.jsonl", task["rows"])
    python = os.environ.get(variable)
    lines, peak = speed.contenders(task, python, python, tmp_path)[name]()
    assert len(lines) == 3
    prompt = len(speed.AutoTokenizer.from_pretrained(task["model"])(task["rows"][0]["prompt"])["input_ids"])
    for line in lines:
        assert (line.get("responses", 8), line.get("optimizer_steps", 2)) == (8, 2)  # only of TRL do we have to ask
        assert line["tokens"] == 8 * (prompt + 6) and 0 < line["rollout"] < line["seconds"]
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
    setting = {"size": "tiny", "forced": False, "steps": 4, "tokens": 100, "rollout": 0.5, "peak_bytes": 2**20}
    for number, (ours, peer) in enumerate([(1, 4), (2, 4), (4.5, 5)]):
        speed.record("iteration", name="GRPO ours", round=number, seconds=ours, **setting)
        speed.record("iteration", name="GRPO TRL", round=number, seconds=peer, **setting)
    speed.table(None, None)
    text = (tmp_path / "results" / "README.md").read_text()
    assert "| GRPO ours | 3 | 2.00 | 0.50 | 50 | 1 | 0.50 (0.25-0.90) |" in text
    rounds = [("one", "ours", 1), ("one", "peer", 4), ("another", "ours", 1), ("another", "peer", 2)]
    rows = [{"machine": where, "round": 0, "name": name, "seconds": seconds} for where, name, seconds in rounds]
    assert speed.ratios(rows, "ours", "peer") == "0.38 (0.25-0.50)"  # a round of one machine is not one of another
