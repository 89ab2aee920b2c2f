"""benchmarks/speed.py runs, and its contenders do the same work. Nothing here is about how long it takes."""

import json
import os

import pytest
from conftest import ROOT
from test_project import load_benchmark

SMALL = {"prompts": 4, "group_size": 2, "length": 6, "prompt_length": None, "steps": 2}


@pytest.fixture
def speed(monkeypatch, tmp_path):
    module = load_benchmark("speed")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setitem(module.SIZES, "tiny", SMALL)
    return module


@pytest.fixture
def task(speed, tmp_path):
    base = {"model": speed.make_model(tmp_path, "tiny"), "rows": speed.make_rows("tiny")[:64], "iterations": 3}
    return base | SMALL | {"processes": 2, "forced": True}


def assert_same_work(lines, count, response_tokens):
    assert len(lines) == count
    for line in lines:
        assert line["responses"] == 8 and line["optimizer_steps"] == 2
        assert line["tokens"] > response_tokens and 0 < line["rollout"] < line["seconds"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GRPO ours", "GRPO ours, shared_prompt", "PPO ours"])
def test_ours_does_the_work_it_is_asked_for(speed, task, tmp_path, name):
    lines, peak = speed.contenders(task, None, None, tmp_path)[name]()
    assert_same_work(lines, 2, 8 * 6)  # every response has the full length; the last iteration evaluates
    assert 100 < peak / 2**20 < 4000


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, variable", [("GRPO TRL", "TRL_PYTHON"), ("RLOO TRL", "TRL_PYTHON"), ("PPO TRL", "TRL_PPO_PYTHON")]
)
def test_peers_do_the_same_work(speed, task, tmp_path, name, variable):
    if variable not in os.environ:
        pytest.skip(f"{variable} does not name the python of an environment with TRL")
    python = os.environ[variable]
    lines, _ = speed.contenders(task, python, python, tmp_path)[name]()
    assert_same_work(lines, 3, 8 * 6)


def test_what_is_undone_is_there(speed):
    """A change of grpo_llm.py must not leave the ablation without effect."""
    source = (ROOT / "grpo_llm.py").read_text()
    for name, changes in speed.UNDONE.items():
        for old, new in changes.items():
            assert old in source, name
            compile(source.replace(old, new), name, "exec")


def test_peers_compile():
    compile((ROOT / "benchmarks" / "peers.py").read_text(), "peers.py", "exec")


def test_rows_and_prompts_are_those_of_the_scripts(speed, monkeypatch):
    assert speed.make_rows("tiny")[0]["prompt"] in (ROOT / "benchmarks" / "tiny" / "train.jsonl").read_text()
    lengths = {len(prompt) for prompt in (row["prompt"] for row in speed.make_rows("20m"))}
    assert min(lengths) > 128


def test_the_table_has_medians_of_ratios(speed, tmp_path, capsys):
    setting = {"size": "tiny", "processes": 2, "forced": False, "tokens": 100, "rollout": 0.5, "peak_bytes": 2**20}
    for number, (ours, peer) in enumerate([(1, 4), (2, 4), (3, 4)]):
        speed.record("iteration", name="GRPO ours", round=number, seconds=ours, **setting)
        speed.record("iteration", name="GRPO TRL", round=number, seconds=peer, **setting)
    for name, seconds in (("ours", 1), ("generate", 4)):
        speed.record("rollout", size="tiny", group_size=8, name=name, round=1, seconds=seconds, tokens=9)
    speed.record("rollout", size="tiny", group_size=8, name="generate_batch", failed="no GPU")
    speed.record("memory", ours=1, full=4, difference=1e-9, largest=1e-3)
    speed.record("start", name="ppo_llm", round=0, seconds=5.0)
    for processes, seconds in ((1, 8.0), (2, 5.0)):
        speed.record("processes", name="ppo_llm", processes=processes, round=0, seconds=seconds)
    speed.record("communication", name="ppo_llm", share=0.125)
    speed.record("batch", times=8, seconds=2.0, tokens=1_000_000, peak_bytes=2**30)
    for name, seconds in (("as it is", 1.0), ("finished rows stay", 1.5)):
        parts = {"time/rollout": 0.5, "time/logprobs": 0.25, "time/actor": 0.2}
        speed.record("ablation", name=name, round=0, seconds=seconds, **parts)
    speed.record("profile", name="grpo_llm", phases={"rollout": {"copies": 0.25, "attention": 0.5}})
    speed.record("floors", name="copy", per_second=3e9)
    speed.table(None)
    text = (tmp_path / "results" / "README.md").read_text()
    assert "| GRPO ours | 3 | 2.00 | 0.50 | 50 | 1 | 0.50x (0.25-0.75) |" in text
    assert "| ours | 1 | 1.00 | 9 | 0.25x |" in text and "no GPU" in text and "0.25x of the" in text
    assert "| ppo_llm | 1 | 8.00 | 5.00 | 1.60x | 12% |" in text and "| 512 | 2.00 | 2 | 1,024 |" in text
    assert "| finished rows stay | 1 | 1.50 | 0.50 | 0.25 | 0.20 | 1.50x |" in text
    assert "| rollout | 0.50 | 0.25 |" in text and (tmp_path / "results" / "profile-grpo_llm.png").exists()
    assert (tmp_path / "results" / "tiny-2-eos.png").stat().st_size > 1000
    machine = json.loads((tmp_path / "results" / "measured.jsonl").read_text().splitlines()[0])["machine"]
    assert f"| copy | {machine.split(',')[0]} | 3.0 |" in text
    rounds = [("one", "ours", 1), ("one", "peer", 4), ("another", "ours", 1), ("another", "peer", 2)]
    rows = [{"machine": where, "round": 0, "name": name, "seconds": seconds} for where, name, seconds in rounds]
    assert speed.ratios(rows, "ours", "peer") == [0.25, 0.5]  # a round of one machine is not one of another
