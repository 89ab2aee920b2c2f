"""The real model of benchmarks/real.py, its tasks and rewards. What needs its weights is skipped where they are not."""

import pytest
from helpers import ROOT, launch, read_metrics, read_rows, untimed
from test_project import load_benchmark

real = load_benchmark("real")
MODEL = ROOT / "models" / "smollm2"
needs_model = pytest.mark.skipif(not MODEL.exists(), reason="no models/smollm2: python benchmarks/real.py get smollm2")


def test_what_a_response_states_in_the_end():
    """A formula of the question is no answer, whatever its value."""
    assert real.numbers("so 1,027 - 3 = 007, 2.5, 3,4 and 12,345, 0") == ["1027", "3", "7", "12345", "0"]
    right = ["11 + 72 = 83", "11 + 72 = 83.", "84 or 83"]
    wrong = ["83 = 11 + 72", "83 or 84", "11 + 72", "", "11 + 72 = 8 3"]
    assert real.last_number([*right, *wrong], ["83"] * 8) == [1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("task", ["additions", "shopping"])
def test_a_task_is_right_and_has_no_question_twice(task, tmp_path):
    real.write_task(task, tmp_path)
    questions = []
    for split, size in real.SIZES.items():
        rows = read_rows(tmp_path / f"{split}.jsonl")
        assert len(rows) == size
        for row in rows:
            a, b = map(int, real.numbers(row["question"]))
            answer = a - b if "gives away" in row["question"] else a * b if "boxes" in row["question"] else a + b
            assert row["answer"] == str(answer) and answer > 0
        questions += [row["question"] for row in rows]
    assert len(set(questions)) == len(questions)


@pytest.mark.slow
@needs_model
def test_it_is_the_model_we_know_and_one_process_and_two_agree(tmp_path, capsys):
    """On additions; the sampler agrees with the training pass, too."""
    real.check(MODEL)
    assert real.ANSWER in capsys.readouterr().out
    real.write_task("additions", tmp_path / "data")
    flags = {"model": MODEL, "dataset": tmp_path / "data" / "train.jsonl", "eval_rows": 0, "temperature": 0.5}
    flags |= {"reward": f"{ROOT}/benchmarks/real.py:last_number", "max_response_length": 8, "batch_size": 4}
    flags |= {"group_size": 2, "minibatch_size": 4, "total_iterations": 2, "output_dir": tmp_path, "track": "none"}
    flags |= {"lr": 1e-5, "save_every": 0}
    runs = []
    for processes in 1, 2:
        code, console = launch(ROOT / "grpo_llm.py", flags | {"run_name": str(processes)}, processes)
        assert code == 0 and f"{processes} process(es)" in console, console
        runs.append(untimed(read_metrics(tmp_path / str(processes))))
    assert all(line["rollout/kl"] < 1e-10 for run in runs for line in run[1:])
    for line, other in zip(*runs, strict=True):
        assert line == pytest.approx(other, abs=2e-4, rel=2e-3)
