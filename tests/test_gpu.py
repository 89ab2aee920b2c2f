"""benchmarks/gpu.py runs to its end, here without a GPU; its numbers mean nothing there."""

import sys
from types import SimpleNamespace

import pytest
from helpers import SCRIPTS, read_rows
from test_project import check_flags, load_benchmark

gpu = load_benchmark("gpu")
CARD = {"card": "Card 24", "GPUs": 1, "GB": 25.4, "dtype": "bfloat16", "peft": "1", "torch": "2"}


def test_the_scripts_take_the_flags_of_the_large_model(monkeypatch, tmp_path):
    """Every step that trains, on a card of 24 GB; and the forecasts fit it."""
    started = []
    monkeypatch.setattr(gpu, "start", lambda *call: started.append(call))
    monkeypatch.setattr(gpu, "finish", lambda *_: sys.exit())
    shape = gpu.memory.SHAPES["Qwen2.5-0.5B"]
    bench = gpu.Bench(SimpleNamespace(small=False, flags=""), tmp_path, CARD, shape, gpu.WORK)
    for options in [options for *_, function, options in gpu.STEPS if function is gpu.train]:
        with pytest.raises(SystemExit):
            gpu.train(bench, **options)
    assert {call[3].stem for call in started} == {*SCRIPTS, "grpo_llm_fsdp", "vllm_llm", "fp16_llm"}
    for _, processes, _, path, *words in started:
        if path.stem in SCRIPTS:
            check_flags(path.stem, " ".join(str(word) for word in words if word != "graphs"), processes)


@pytest.mark.slow
def test_what_can_be_trusted_runs_in_a_tiny_shape(tmp_path):
    words = f"--small --out {tmp_path} --steps grpo_llm_fsdp graphs trust agreement".split()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as leaving:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setattr(sys, "argv", ["gpu.py", *words])
        gpu.main()
    rows = read_rows(tmp_path / "rows.jsonl")
    found = {row["step"]: row for row in rows}
    assert leaving.value.code is False and {row["result"] for row in rows} == {"ok"}, rows
    assert list(found) == ["grpo_llm_fsdp", "graphs", "resume", "float32", "bfloat16", "float16", "agreement"]
    assert found["resume"]["equal iterations"] == "4 of 4"
    assert found["agreement"]["actor/grad_norm, largest relative difference"] < 1e-4
    assert found["float32"]["rollout/kl"] < 1e-10 < found["float16"]["rollout/kl"]
