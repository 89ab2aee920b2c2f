"""Short forms of the campaigns of benchmarks/faults.py: kills at random moments, a late rank, a long run, bad input."""

import os
import random
import sys

import psutil
import pytest
import torch
from conftest import ROOT, each_script, forked, read_metrics, untimed

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


# ------------------------------------------------------------------------------------------------ what users get wrong


@pytest.mark.parametrize(
    "name, stem", [("an answer that is a time", "ppo_llm_fsdp"), ("a reward of many types", "grpo_llm")]
)
def test_what_users_get_wrong(name, stem, tmp_path):
    """All of them, and all scripts: python benchmarks/faults.py inputs 183."""
    verdict, said = faults.one_input(name, ROOT / f"{stem}.py", tmp_path)
    assert verdict == ("ran" if faults.INPUTS[name].pattern is None else "named"), said


def test_the_command_of_the_campaign_runs_all_inputs():
    assert f"faults.py inputs {len(faults.INPUTS)} " in faults.__doc__


# In place of a script: what it would do in its folder, and what its run folder would then hold.
STAND_IN = """
import json, os, pathlib, shutil, sys
c = pathlib.Path.cwd()
run = c / "runs" / "run"
run.mkdir(parents=True)

def iterations(*grad_norms):
    rows = [{{"step": step, "actor/grad_norm": norm}} for step, norm in enumerate(grad_norms)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))

{does}
"""
REFUSES = "sys.exit('error: it is too small')"


@pytest.mark.parametrize(
    "does, pattern, verdict",
    [
        (REFUSES, "too small", "named"),
        (REFUSES, "too large", "NOT NAMED"),
        ("too_small = 1\nraise ValueError('no')", "too_small", "NOT NAMED"),  # it is in the traceback, but not said
        ("raise ValueError('no,\\n  it is too small')", "too small", "named"),
        ("try: 1 / 0\nexcept ZeroDivisionError as e: raise ValueError('no') from e", "ZeroDivision.*no", "named"),
        ("pass", "too small", "TRAINED"),
        (f"iterations(0, 1)\n{REFUSES}", "too small", "TRAINED"),  # an iteration before it was refused
        ("os.abort()", "too small", "CRASHED"),
        (f"(c / 'train.jsonl').unlink()\n{REFUSES}", "too small", "TOUCHED"),
        (f"(c / '.mine.old').rename(c / 'mine')\n{REFUSES}", "too small", "TOUCHED"),
        (REFUSES, None, "DID NOT RUN"),
        ("pass", None, "RAN WRONGLY"),
        ("iterations(0, 0)", None, "RAN WRONGLY"),  # one of two
        ("iterations(0, 0, float('nan'))", None, "RAN WRONGLY"),
        ("iterations(0, 0, 0)\nshutil.copytree(c / 'model', run / 'final')", None, "ran"),
        ("iterations(0, 0, 1)\nshutil.copytree(c / 'model', run / 'final')", None, "RAN WRONGLY"),  # nothing moved
    ],
)
def test_a_verdict_is_not_reached_by_accident(does, pattern, verdict, tmp_path, monkeypatch):
    script, case = tmp_path / "ppo_llm.py", tmp_path / "case"
    script.write_text(STAND_IN.format(does=does))
    case.mkdir()
    monkeypatch.setitem(faults.INPUTS, "one", faults.Case(lambda c, script: [], pattern))
    found, said = faults.one_input("one", script, case)
    assert found == verdict, said


@pytest.mark.parametrize("check, verdict", [(True, "named"), (False, "NOT NAMED")])
def test_a_case_may_look_at_what_was_left(check, verdict, tmp_path, monkeypatch):
    (tmp_path / "ppo_llm.py").write_text(REFUSES.replace("sys.exit", "raise SystemExit"))
    case = tmp_path / "case"
    case.mkdir()
    monkeypatch.setitem(faults.INPUTS, "one", faults.Case(lambda c, s: [], "too small", lambda c, said: check))
    assert faults.one_input("one", tmp_path / "ppo_llm.py", case)[0] == verdict
