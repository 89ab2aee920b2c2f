"""benchmarks/gpu.py runs to its end and reports what failed, here without a GPU; its numbers mean nothing there."""

import json
import shlex
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SCRIPTS
from test_project import check_flags, load_benchmark


@pytest.fixture
def gpu():
    return load_benchmark("gpu")


@pytest.fixture
def call(gpu, monkeypatch, tmp_path, capsys):
    """call(words): (exit status or sentence, console, table.md, rows of rows.json)."""

    def run(*words):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path / "out"), *words])
        with pytest.raises(SystemExit) as leaving:
            gpu.main()
        if not (tmp_path / "out").exists():
            return leaving.value.code, capsys.readouterr().out, None, None
        table, rows = (tmp_path / "out" / name for name in ("table.md", "rows.json"))
        return leaving.value.code, capsys.readouterr().out, table.read_text(), json.loads(rows.read_text())["rows"]

    return run


def test_a_script_that_fails_does_not_stop_the_others(gpu, call, monkeypatch, tmp_path):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "benchmarks").symlink_to(ROOT / "benchmarks")
    (scripts / "ppo_llm.py").symlink_to(ROOT / "ppo_llm.py")
    (scripts / "grpo_llm.py").write_text("print('it begins')\nraise RuntimeError('and it breaks')\n")
    monkeypatch.setattr(gpu, "ROOT", scripts)
    code, console, table, rows = call("--small", "--steps", "grpo_llm", "ppo_llm")
    assert code == 1
    assert (
        "grpo_llm failed:\nit begins\nTraceback" in console and "RuntimeError: and it breaks\nppo_llm ...\n" in console
    )
    assert rows["grpo_llm"]["error"].endswith("RuntimeError: and it breaks")
    assert str(tmp_path) not in json.dumps(rows)  # you can show them to others
    assert "\n| grpo_llm | failed |  |" in table and "\n| ppo_llm | cpu, float32 | 0." in table and table in console
    row = rows["ppo_llm"]
    assert [line["step"] for line in row["metrics"]] == [1, 2, 3]
    assert row["metrics"][-1]["response/length_mean"] > 7.5  # all of them, or nearly, have the full length
    assert row["metrics"][-1]["actor/grad_norm"] > 0 and row["logprob_diff"] < 1e-5
    assert 0 < row["rollout"] < row["iteration"] == pytest.approx(row["rollout"] + row["update"])


def test_without_a_gpu_it_ends_with_a_sentence(call):
    said, console, table, _ = call()
    assert said.startswith("error: PyTorch sees no GPU here") and "\n" not in said and console == "" and table is None


def test_what_never_ends_is_stopped(gpu, tmp_path):
    (tmp_path / "endless.py").write_text("print('it begins', flush=True)\nwhile True:\n    pass\n")
    args = SimpleNamespace(python=shlex.quote(sys.executable), timeout=1)
    with pytest.raises(RuntimeError, match=r"^it begins\nstopped after 1 seconds$"):
        gpu.launch(args, 1, tmp_path / "endless.py")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_scripts_take_the_flags_of_the_large_model(gpu, script):
    args = check_flags(script, f"--model x {gpu.flags_of(script, '0.5B', '--gradient-checkpointing')}")
    assert args.batch_size * getattr(args, "group_size", 1) == 64 and args.gradient_checkpointing


def test_the_exchange_is_set_against_the_update(gpu):
    about = {"card": "none", "model": "0.5B"}
    seconds = {"rollout": 1.0, "update": 2.0, "iteration": 3.0, "tokens/s": 4000.0}
    two = seconds | {"on": "cuda, bfloat16", "peak": 20.0, "logprob_diff": 1e-3}
    table = gpu.make_table(about, {"ppo_llm-two": two, "exchange": {"gib": 1.84, "times": [9.0, 0.1, 0.2, 0.1]}})
    assert "| ppo_llm-two | cuda, bfloat16 | 1.00 | 2.00 | 3.00 | 4,000 | 20.0 | 1.0e-03 |" in table
    assert "add up 1.84 GiB of gradients in 0.1 s. In an update of ppo_llm-two they do so 4 times: 20% of it." in table
    assert "add up" not in gpu.make_table(about, {"ppo_llm-two": two, "exchange": {"error": "it breaks"}})


@pytest.mark.slow
def test_two_processes_and_the_merged_script(call):
    steps = "grpo_llm_fsdp", "grpo_llm_fsdp-two", "ppo_llm-two", "exchange"
    code, console, table, rows = call("--small", "--steps", *steps)
    assert code == 0, console
    assert tuple(rows) == steps and "failed" not in table and "they do so 4 times" in table
    assert rows["grpo_llm_fsdp"]["metrics"][0]["reward/mean"] == 0.5
    code, console, _, rows = call("--small", "--steps", "ppo_llm-two", "--flags=--no-such-flag")
    assert code == 1 and "no-such-flag" in rows["ppo_llm-two"]["error"]
