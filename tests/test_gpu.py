"""benchmarks/gpu.py runs to its end and reports what failed, here without a GPU; its numbers mean nothing there."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT, SCRIPTS, read_rows
from test_project import check_flags, load_benchmark

CARD = {"card": "Card 24", "GPUs": 1, "GB": 25.4, "dtype": "bfloat16", "peft": "1", "torch": "2"}


@pytest.fixture
def gpu():
    return load_benchmark("gpu")


@pytest.fixture
def call(gpu, monkeypatch, tmp_path, capsys):
    """call(words): (exit status or sentence, console, README.md, rows of rows.jsonl)."""

    def run(*words):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path / "out"), *words])
        with pytest.raises(SystemExit) as leaving:
            gpu.main()
        if not (tmp_path / "out").exists():
            return leaving.value.code, capsys.readouterr().out, None, None
        table = (tmp_path / "out" / "README.md").read_text()
        return leaving.value.code, capsys.readouterr().out, table, read_rows(tmp_path / "out" / "rows.jsonl")

    return run


def test_a_step_that_fails_does_not_stop_the_others_and_the_results_of_two_calls_add_up(gpu, call, monkeypatch):
    def breaks(bench):
        raise RuntimeError(f"it breaks in {bench.folder}/model")

    def leaves(bench):
        sys.exit("error: no patch")

    def speaks(bench, seconds):
        return [{"seconds": seconds, "metrics": [{"step": 1}]}]

    steps = [
        ("one", "breaks", None, breaks, {}),
        ("one", "speaks", None, speaks, {"seconds": 0.25}),
        ("one", "lacks", "vllm", speaks, {"seconds": 1}),
        ("two", "leaves", None, leaves, {}),
        ("two", "pair", "two GPUs", speaks, {"seconds": 1}),
    ]
    monkeypatch.setattr(gpu, "STEPS", steps)
    monkeypatch.setattr(gpu, "ORDER", [step for _, step, *_ in steps])
    monkeypatch.setattr(gpu, "ask", lambda *args: dict(CARD))
    code, console, table, rows = call("--small", "--steps", "two", "speaks")
    assert code is True and "2 of 3, leaves ...\n  error: no patch\n3 of 3, pair ...\n  needs two GPUs\n" in console
    assert [row["step"] for row in rows] == ["speaks", "leaves", "pair"] and table in console
    code, console, table, rows = call("--small", "--steps", "breaks", "lacks")
    assert code is True and "\n  it breaks in .../model\n" in console
    assert [row["step"] for row in rows] == ["breaks", "speaks", "lacks", "leaves", "pair"]
    assert "\n## one\n\n| step | result | took, s |\n" in table and "\n| lacks | needs vllm | 0 |\n" in table
    assert "\n| breaks | failed: it breaks in .../model | 0 |\n" in table
    assert "\n| leaves | failed: error: no patch | 0 |\n| pair | needs two GPUs | 0 |\n" in table
    assert "\n\n| step | result | took, s | seconds |\n| --- | --- | --- | --- |\n| speaks | ok | 0 | 0.25 |\n" in table
    assert rows[1]["metrics"] == [{"step": 1}] and rows[1]["versions"]["torch"] == "2"
    assert call("--small", "--steps", "speaks")[0] is False


def test_a_model_from_the_disk(gpu, call, monkeypatch):
    steps = [("one", "shape", None, lambda bench: [{"hidden": bench.shape.hidden}], {})]
    monkeypatch.setattr(gpu, "STEPS", steps)
    monkeypatch.setattr(gpu, "ORDER", ["shape"])
    monkeypatch.setattr(gpu, "ask", lambda *args: dict(CARD))
    _, _, table, rows = call("--small", "--model", str(gpu.TINY / "model"))
    assert rows[0]["hidden"] == 128 and "model qwen2-128" in table


def test_a_program_in_front_of_the_script_stays_there(gpu, monkeypatch):
    """--python "python imitation.py": with a launcher, too."""
    monkeypatch.setattr(gpu.subprocess, "Popen", lambda command, **options: command)
    for processes in 1, 2:
        command = gpu.start(SimpleNamespace(python="py imitation.py"), processes, "f", 3)
        assert command[0] == "py" and command[-5:] == ["imitation.py", gpu.__file__, "inside", "f", "3"]


def test_a_script_that_breaks_shows_its_last_lines(gpu, call, monkeypatch, tmp_path):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "benchmarks").symlink_to(ROOT / "benchmarks")
    (scripts / "ppo_llm.py").symlink_to(ROOT / "ppo_llm.py")
    (scripts / "grpo_llm.py").write_text("print('it begins')\nraise RuntimeError('and it breaks')\n")
    monkeypatch.setattr(gpu, "ROOT", scripts)
    code, console, table, rows = call("--small", "--steps", "ppo_llm", "grpo_llm")
    assert code is True and "2 of 2, grpo_llm ...\n  it begins\nTraceback" in console
    row, broken = rows
    assert broken["error"].endswith("RuntimeError: and it breaks")
    assert str(tmp_path) not in json.dumps(rows)  # you can show them to others
    assert "\n| grpo_llm | failed: RuntimeError: and it breaks |" in table and "| cpu, float32 | 8 / 256 | 0." in table
    assert [line["step"] for line in row["metrics"]] == [1, 2, 3]
    assert row["metrics"][-1]["response/length_mean"] > 7.5  # all of them, or nearly, have the full length
    assert row["metrics"][-1]["actor/grad_norm"] > 0 and row["logprob_diff"] < 1e-5
    parts = sum(row[f"{phase}, s"] for phase in ("rollout", "reward", "logprobs", "update"))
    assert 0 < row["rollout, s"] < row["iteration, s"] and parts == pytest.approx(row["iteration, s"], rel=0.2)
    assert row["peak, GiB"] == "needs a GPU" and 0 < row["forecast, GiB"] < 0.1


def test_what_failed_is_named_though_cuda_says_more(gpu):
    """As on an H200: every thread of a kernel complains, and C++ prints frames after Python's traceback."""
    said = ["it begins", *(f"kernel.cu:163: thread [{i},0,0] Assertion `index` failed." for i in range(64))]
    said += ["Traceback (most recent call last):", "torch.AcceleratorError: CUDA error: device-side assert triggered"]
    said += ["error: the engine stopped", "terminate called", *(f"frame #{i}: run + 0x{i} (0x1)" for i in range(40))]
    reason, lines = gpu.explain("\n".join(said + ["killed by SIGABRT"]))
    assert reason == "error: the engine stopped"
    assert lines.splitlines() == ["it begins", said[64], *said[65:69], "killed by SIGABRT"]
    assert gpu.explain("it begins\nkilled by SIGKILL")[0] == "killed by SIGKILL"
    assert gpu.explain("Error one\nstopped after 600 seconds")[0] == "stopped after 600 seconds"
    assert gpu.explain("")[0] == "it said nothing"


@pytest.mark.parametrize(
    "program, seconds, said",
    [
        ("import os; os.kill(os.getpid(), 9)", 60, "\nkilled by SIGKILL"),
        ("print('it begins', flush=True)\nwhile True: pass", 1, "it begins\nstopped after 1 seconds"),
    ],
)
def test_what_is_killed_or_never_ends_is_named_and_stopped(gpu, program, seconds, said):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    process = subprocess.Popen([sys.executable, "-c", program], **pipes)
    with pytest.raises(RuntimeError, match=f"^{said}$"):
        gpu.finish(SimpleNamespace(timeout=seconds), process)
    assert process.poll() is not None


def test_pages_quote_what_the_h200_said(gpu):
    home = ROOT / "benchmarks" / "results" / "gpu" / "NVIDIA-H200"
    rows = read_rows(home / "rows.jsonl")
    by_step = {row["step"]: row for row in rows if row["step"] != "paged"}
    speed, memory = ((ROOT / "notes" / page).read_text() for page in ("11-performance.md", "14-memory.md"))
    for step in "ppo_llm", "grpo_llm", "lora", "generate":
        seconds = [f"{by_step[step][f'{name}, s']:.1f}" for name in ("rollout", "logprobs", "update", "iteration")]
        assert f" tokens | {' | '.join(seconds)} |\n" in speed
    step = by_step.pop("decoding")
    assert f"launched {step['launches']:,.0f}\nkernels and waited twice" in speed and step["waits"] == 2
    assert f"{step['step, ms']:.1f} ms, {1000 * step['step, ms'] / step['launches']:.0f} microseconds" in speed
    assert f"during {step['GPU busy, ms']:.1f} ms" in speed
    for row in by_step.values():
        forecast, taken = row["forecast, GiB"], row["peak, GiB"]
        off = f"{100 * (forecast / taken - 1):+.0f}%".replace("+0%", "0%").replace("-0%", "0%")
        assert f" | {forecast:.1f} | {taken:.1f} | {off} |\n" in memory
        assert 0.96 < taken / forecast < 1.03
    plain, flash = (row for row in rows if row["step"] == "paged")
    seconds = [row["rollout, s"] for row in (plain, flash, by_step["generate"])]
    assert f"took {seconds[0]:.1f} seconds without flash attention, and {seconds[1]:.1f} with it" in speed
    ratios = [seconds[0] / seconds[2], seconds[1] / seconds[2]]
    assert [f"{ratio:.2g}" for ratio in ratios] == ["4.5", "0.58"] and "illegal memory access" in flash["result"]
    assert [f"{by_step[name]['sampled tokens/s']:,.0f}" for name in ("grpo_llm", "generate")] == ["3,253", "8,960"]
    page = (home.parent / "README.md").read_text().replace("\n", " ")
    for script in "ppo", "grpo":
        console = (home / f"{script}_llm.txt").read_text()
        assert "on cuda, bfloat16" in console
        sampled = re.findall(r"greedy, (\S+) sampled", console)
        runs = load_benchmark("plot").read_runs(ROOT / "benchmarks" / "results" / "variants" / script)
        cpu = [f"{row['eval/score_sampled']:.3f}" for row in runs[0] if "eval/score_sampled" in row]
        said = rf"{sampled[1]} and {sampled[2]} [^)]*\((?:on a CPU )?{cpu[1]} and {cpu[2]}\)"
        assert re.search(said, page), said


def test_without_a_gpu_it_ends_with_a_sentence(gpu, call, monkeypatch):
    monkeypatch.setattr(gpu, "ask", lambda *args: CARD | {"GPUs": 0})
    said, console, table, _ = call()
    assert said.startswith("error: PyTorch sees no GPU here") and "\n" not in said and console == "" and table is None


def test_the_scripts_take_the_flags_of_the_large_model_and_the_forecasts_fit_the_card(gpu, monkeypatch, tmp_path):
    """Every step that trains, on a card of 24 GB and on one of 80 GB."""
    started = []

    def note(args, processes, function, path, *words):
        started.append((path, " ".join(map(str, words)), processes))
        raise InterruptedError

    monkeypatch.setattr(gpu, "start", note)
    shape = gpu.memory.SHAPES["Qwen2.5-0.5B"]
    for size in 25.4, 85.0:
        bench = gpu.Bench(SimpleNamespace(small=False, flags=""), tmp_path, CARD | {"GB": size}, shape, gpu.WORK)
        for options in [options for *_, function, options in gpu.STEPS if function is gpu.train]:
            with pytest.raises(InterruptedError):
                gpu.train(bench, **options)
        sizes = gpu.recommend(bench, critic=False)
        options = {"processes": 1, "sharded": False, "critic": False, "lora_rank": 0, "bf16": True}
        forecasts = [gpu.forecast(bench, work, sizes, options) * gpu.memory.GIB for work in gpu.WORK.values()]
        assert max(forecasts) < 0.9 * size * 1e9
    assert {path.stem for path, *_ in started} == {*SCRIPTS, "grpo_llm_fsdp", "paged_llm", "vllm_llm", "fp16_llm"}
    for path, words, processes in started:
        if path.stem in SCRIPTS:
            args = check_flags(path.stem, words, processes)
            assert args.batch_size * getattr(args, "group_size", 1) in (64, 256)


def test_how_far_two_runs_are_apart(gpu):
    line = {"time/rollout": 1.0, "actor/entropy": 2.0, "actor/grad_norm": 4.0}
    other = {"time/rollout": 3.0, "actor/entropy": 2.0, "actor/grad_norm": 5.0}
    (row,) = gpu.compare("x", [line, line], [line | {"time/rollout": 2.0}, other])
    assert row["equal iterations"] == "1 of 2" and row["actor/entropy, largest relative difference"] == 0
    assert row["actor/grad_norm, largest relative difference"] == pytest.approx(0.2)


def test_the_exchange_is_set_against_the_update(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "ask", lambda *args, **kwargs: {"gradients, GB": 2.0, "exchange, s": 0.1})
    monkeypatch.setattr(gpu, "train", lambda *args, **kwargs: [{"update, s": 2.0}])
    bench = gpu.Bench(None, tmp_path, CARD | {"GPUs": 2}, None, gpu.WORK)
    (row,) = gpu.exchange(bench)
    assert row["share of the update"] == pytest.approx(0.1) and row["through"] == "NCCL"  # 64 / 32 steps of 0.1 s


def test_the_help_names_every_part_and_step(gpu):
    for part, step, *_ in gpu.STEPS:
        assert part in gpu.__doc__ and step.removesuffix("-two") in gpu.__doc__


@pytest.mark.slow
def test_all_of_it_runs_in_a_tiny_shape_without_a_gpu(gpu, call):
    code, console, table, rows = call("--small")
    assert code is False, console
    lacking = {row["step"]: row["result"] for row in rows if row["result"] != "ok"}
    assert list(dict.fromkeys(row["step"] for row in rows)) == gpu.ORDER and not lacking.keys() - {"vllm"}
    found = {row["step"]: row for row in rows}
    assert found["resume"]["equal iterations"] == "4 of 4"
    assert found["agreement"]["actor/grad_norm, largest relative difference"] < 1e-4
    assert found["float32"]["logprob_diff"] < 1e-5 < found["float16"]["logprob_diff"]
    assert found["decoding"]["launches"] == "needs a GPU" and "gloo (NCCL needs a GPU)" in table
    assert found["grpo_llm_fsdp"]["metrics"][0]["reward/mean"] == 0.5
    code, console, _, rows = call("--small", "--steps", "ppo_llm-two", "--flags=--no-such-flag")
    (row,) = [row for row in rows if row["step"] == "ppo_llm-two"]
    assert code is True and "no-such-flag" in row["error"]
