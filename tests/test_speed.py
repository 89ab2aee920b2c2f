"""benchmarks/speed.py runs, and its contenders do the same work. Nothing here is about how long it takes."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SCRIPTS, read_rows
from test_project import load_benchmark, load_script

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
    phases = ["rollout", "reward", "logprobs", "advantages", "actor", "log"]
    if name.startswith("PPO"):
        phases += ["values", "critic"]
    times = [f"time/{phase}" for phase in phases]
    for line in lines:
        assert {key for key in line if key.startswith("time/")} == set(times)
        assert sum(line[key] for key in times) <= line["seconds"]
    (metrics,) = tmp_path.glob("*_llm-*/metrics.jsonl")
    for row in read_rows(metrics)[1:]:  # no part of an iteration is without a phase
        assert sum(row[key] for key in times) > 0.9 * row["time/iteration"]


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
            assert source.count(old) == 1, name
            compile(source.replace(old, new), name, "exec")


class StandIn:
    """In place of a script: a clock, by which everything takes one second."""

    def __init__(self):
        self.now = 0.0
        self.lines = []
        self.draw_prompts = self.to_batch = self.pack = self.place_scores = self.evaluate = self.spend
        self.Policy = type("Policy", (), {"__call__": self.spend})
        self.Critic = type("Critic", (), {"__call__": self.spend})
        self.log = lambda step, metrics, *rest: self.lines.append(metrics)

    def spend(self, *args):
        self.now += 1.0


@pytest.fixture
def phases(monkeypatch):
    """benchmarks/phases.py, whose hook on the steps of all optimizers is `phases.step`."""
    module = load_benchmark("phases")
    monkeypatch.setattr(module, "register_optimizer_step_post_hook", lambda hook: setattr(module, "step", hook))
    return module


def test_a_phase_lasts_until_another_begins(phases, monkeypatch):
    algo = StandIn()
    monkeypatch.setattr(phases, "time", SimpleNamespace(perf_counter=lambda: algo.now))
    phases.Clock(algo)
    policy, critic = algo.Policy(), algo.Critic()
    with torch.no_grad():
        policy()  # before training: no phase
    algo.evaluate()
    algo.spend()  # of the evaluation, too: a model is saved, say
    algo.log(0, {})
    for _ in range(2):
        algo.spend()  # between iterations
        algo.draw_prompts()
        algo.to_batch()
        algo.spend()  # the reward function
        algo.pack()
        with torch.no_grad():
            policy()
            policy()
            critic()
        algo.place_scores()
        for _ in range(3):
            policy()
            policy()
            phases.step()
        critic()
        phases.step()
        algo.spend()
        algo.log(1, {"reward/mean": 0.5})
    first, *iterations = algo.lines
    assert first == {"time/eval": 2.0, "time/clock": 3.0}
    seconds = {
        "rollout": 2,
        "reward": 1,
        "logprobs": 3,
        "values": 1,
        "advantages": 1,
        "actor": 6,
        "critic": 1,
        "log": 1,
    }
    assert seconds.keys() == set(phases.PHASES)
    for number, line in enumerate(iterations, 1):
        expected = {f"time/{phase}": float(s) for phase, s in seconds.items()} | {"reward/mean": 0.5}
        assert line == expected | {"time/clock": 3.0 + number * (1 + sum(seconds.values()))}


def test_what_a_phase_starts_on_a_gpu_counts_to_it(phases, monkeypatch):
    """Calls return at once there: the clock waits at the end of a phase, and only there."""
    algo = StandIn()
    monkeypatch.setattr(phases, "time", SimpleNamespace(perf_counter=lambda: algo.now))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", algo.spend)
    phases.Clock(algo)
    algo.draw_prompts()
    algo.to_batch()
    algo.pack()
    for _ in range(3):
        with torch.no_grad():
            algo.Policy()()
    algo.log(1, {})
    assert algo.lines == [{"time/rollout": 3.0, "time/reward": 1.0, "time/logprobs": 5.0, "time/clock": 10.0}]


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_the_clock_watches_is_in_every_script(phases, script):
    algo = load_script(script)
    plain = algo.pack
    phases.Clock(algo)
    assert algo.pack is not plain and algo.pack.__wrapped__ is plain


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
