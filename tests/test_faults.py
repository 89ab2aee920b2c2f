"""Short forms of the campaigns of benchmarks/campaigns/faults.py: kills at random moments, a long run, bad input."""

import os
import random
import sys

import psutil
import pytest
import torch
from conftest import ROOT, each_script, forked, untimed

sys.path.insert(0, str(ROOT / "benchmarks" / "campaigns"))
import faults

pytestmark = pytest.mark.slow
RUN = {"track": "none", "total_iterations": 6, "eval_every": 3, "eval_rows": 3, "save_every": 1}
OWN = {"ppo_llm": {}, "grpo_llm": {"estimator": "rloo"}, "ppo_llm_fsdp": {"lora_rank": 4}}


@each_script()
def test_a_rank_killed_at_any_moment(script, toy_flags, tmp_path):
    """Perhaps while a checkpoint is being written: gone on with, the run ends as the undisturbed one."""
    flags = toy_flags | RUN | OWN[script.stem] | {"output_dir": str(tmp_path)}
    code, console = forked(script, flags | {"run_name": "whole"})
    assert code == 0, console
    noise = random.Random(script.stem)
    lines, victim, run_dir = noise.randrange(1, 7), noise.randrange(2), tmp_path / "killed"

    def kill(processes):
        metrics = run_dir / "metrics.jsonl"
        if metrics.exists() and len(metrics.read_text().splitlines()) >= lines:
            processes[victim].kill()

    code, console = forked(script, flags | {"run_name": "killed"}, meanwhile=kill)
    assert code != 0, console
    code, console = forked(script, flags | {"run_name": "killed", "resume": True})
    assert code == 0 and faults.outcome(run_dir) == faults.outcome(tmp_path / "whole"), console


@pytest.mark.parametrize("every, moment", [(10, "reward"), (1, "reward"), (10, "update")])
def test_sigterm_in_a_long_iteration(every, moment, tmp_path):
    """The launcher waits half as long as the iteration takes: what is lost is what the guide says."""
    faults.copy_scripts(tmp_path, ["ppo_llm"])
    run = faults.Run(tmp_path, "ppo_llm", "run", *faults.QUICK.split(), "--save-every", str(every))
    lost, _ = faults.one_grace(run, 40, moment, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="20")
    assert lost == (0 if moment == "update" else every)


def test_a_long_run_grows_neither_memory_nor_open_files(algo, toy_run, monkeypatch):
    samples, real, own = [], algo.draw_prompts, psutil.Process()

    def draw_prompts(*args):
        samples.append((own.memory_info().rss, len(os.listdir("/proc/self/fd"))))
        return real(*args)

    monkeypatch.setattr(algo, "draw_prompts", draw_prompts)
    _, metrics = toy_run(total_iterations=200, eval_rows=3, eval_every=20, save_every=20, lr=1e-5, entropy_coef=1e-3)
    second, last = samples[50:100], samples[150:]
    assert sum(s[0] for s in last) < 1.05 * sum(s[0] for s in second)
    assert max(s[1] for s in last) <= max(s[1] for s in second)
    assert all(torch.tensor(list(m.values())).isfinite().all() for m in untimed(metrics))


@pytest.mark.parametrize(
    "name, stem, verdict",
    [("an answer that is a time", "ppo_llm_fsdp", "named"), ("a reward of many types", "grpo_llm", "ran")],
)
def test_what_users_get_wrong(name, stem, verdict, tmp_path, monkeypatch):
    """All of them, and all scripts: python benchmarks/campaigns/faults.py inputs 81. No verdict is an accident."""
    assert f"faults.py inputs {len(faults.INPUTS)} " in faults.__doc__
    found, said = faults.one_input(name, ROOT / f"{stem}.py", tmp_path / "case")
    assert found == verdict, said
    monkeypatch.setitem(faults.INPUTS, name, faults.INPUTS[name]._replace(pattern="something else"))
    found, said = faults.one_input(name, ROOT / f"{stem}.py", tmp_path / "other")
    assert found == {"named": "NOT NAMED", "ran": "TRAINED"}[verdict], said
