"""benchmarks/gpu.py runs to its end, here without a GPU; its numbers mean nothing there."""

import sys

import pytest
from helpers import read_rows
from test_project import load_benchmark

gpu = load_benchmark("gpu")
CARD = {"card": "Card 24", "GPUs": 1, "GB": 25.4, "dtype": "bfloat16", "peft": "1", "torch": "2"}


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
