"""Short forms of the campaigns of benchmarks/faults.py: kills at random moments, a late rank, a long run, bad input."""

import os
import random
import shutil
import sys

import psutil
import pytest
import torch
from conftest import ROOT, SCRIPTS, each_script, forked, read_metrics, untimed

sys.path.insert(0, str(ROOT / "benchmarks"))
import faults

pytestmark = pytest.mark.slow
RUN = {
    "track": "none",
    "total_iterations": 6,
    "eval_every": 3,
    "eval_rows": 3,
    "save_every": 1,
    "warmup_iterations": 4,
}
OWN = {"ppo_llm": {}, "grpo_llm": {"estimator": "rloo"}, "ppo_llm_fsdp": {"lora_rank": 4}}


@pytest.fixture
def flags(script, toy_flags, tmp_path):
    return toy_flags | RUN | OWN[script.stem] | {"output_dir": str(tmp_path)}


@each_script()
def test_a_rank_killed_at_any_moment(script, flags, tmp_path):
    """Two kills, perhaps while a checkpoint is being written: gone on with, the run ends as the undisturbed one."""
    code, console = forked(script, flags | {"run_name": "whole"})
    assert code == 0, console
    whole, rng = faults.outcome(tmp_path / "whole"), random.Random(0)
    for number in range(2):
        lines, victim, run_dir = rng.randrange(1, 7), rng.randrange(2), tmp_path / f"kill{number}"

        def kill(processes, run_dir=run_dir, lines=lines, victim=victim):
            metrics = run_dir / "metrics.jsonl"
            if metrics.exists() and len(metrics.read_text().splitlines()) >= lines:
                processes[victim].kill()

        code, console = forked(script, flags | {"run_name": run_dir.name}, meanwhile=kill)
        assert code != 0, console
        code, console = forked(script, flags | {"run_name": run_dir.name, "resume": "auto"})
        assert code == 0 and faults.outcome(run_dir) == whole, console


LATE = """
import os, random, time
rng = random.Random(1)


def early(prompts, responses, answers):
    if os.environ["RANK"] == "1" and rng.random() < 0.4:
        time.sleep({seconds})
    return [sum(c < "m" for c in r) / max(1, len(r)) + 0.01 * len(r) for r in responses]
"""


@each_script("ppo_llm_fsdp")  # in which the ranks wait for each other most often
def test_a_late_rank_changes_nothing(script, flags, tmp_path):
    found = []
    for seconds in (0, 3):
        (tmp_path / f"late{seconds}.py").write_text(LATE.format(seconds=seconds))
        code, console = forked(
            script, flags | {"reward": f"{tmp_path}/late{seconds}.py:early", "run_name": f"{seconds}"}
        )
        assert code == 0, console
        found.append(untimed(read_metrics(tmp_path / f"{seconds}")))
    assert found[0] == found[1] and len(found[0]) == 7


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


CASES = [name for name in faults.INPUTS if name not in faults.UNNAMED][1::8]


@pytest.mark.parametrize("name", CASES)
def test_what_users_get_wrong_is_named(name, tmp_path):
    """All of them: python benchmarks/faults.py inputs 73."""
    for script in SCRIPTS:
        shutil.copy(ROOT / f"{script}.py", tmp_path)
    case = tmp_path / "cases" / "case"
    case.mkdir(parents=True)
    verdict, said = faults.one_input(name, tmp_path / f"{SCRIPTS[CASES.index(name) % 3]}.py", case)
    assert verdict == ("ran" if faults.INPUTS[name][1] is None else "named"), said
