"""The variant `vllm` with the real engine, on CPUs, in its own environment (notes/run/speed.md says how to make one):

pytest tests/test_vllm.py -n 0
"""

from importlib.util import find_spec

import pytest
from helpers import ROOT, launch, read_metrics, read_rows, variants

FLAGS = {"batch_size": 8, "minibatch_size": 32, "eval_rows": 33, "max_response_length": 16, "lr": 2e-3, "track": "none"}
FLAGS |= {"total_iterations": 2, "eval_every": 0, "save_every": 0}


@pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed: see notes/run/speed.md")
def test_the_engine_samples_with_the_weights_of_the_moment(tmp_path):
    """Log-probs agree after a large step, and greedy answers are those of `generate`."""
    (tmp_path / "vllm_llm.py").write_text(variants.patched("vllm"))
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")  # a script looks for the bundled model beside it
    answers = []
    for script, more in (tmp_path / "vllm_llm.py", {"cache_gib": 0.25}), (ROOT / "grpo_llm.py", {}):
        flags = FLAGS | more | {"output_dir": tmp_path, "run_name": script.stem}
        code, console = launch(script, flags, 1, cwd=tmp_path)
        assert code == 0, console
        kls = [row["rollout/kl"] for row in read_metrics(tmp_path / script.stem)[1:]]
        assert len(kls) == 2 and max(kls) < 5e-11, kls
        rows = read_rows(tmp_path / script.stem / "completions" / "eval_000000.jsonl")
        answers.append([row["response"] for row in rows])
    assert answers[0] == answers[1] and len(answers[0]) == 33
