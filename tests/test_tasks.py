"""Reward files that score with math-verify and reasoning-gym: answers right, wrong and malformed."""

import json
import subprocess
import sys
import time

import pytest
from conftest import ROOT, forked, read_metrics, read_rows

pytest.importorskip("math_verify", reason="needs the extra `tasks`")
pytest.importorskip("reasoning_gym", reason="needs the extra `tasks`")
PLACE = ROOT / "notes" / "variants"
sys.path.append(str(PLACE))
import gym_tasks  # noqa: E402
import verify_math  # noqa: E402

RIGHT = [
    ("72", "40+32=72\n#### 72"),
    ("First 40+32=72.\n#### 72", "It is 72."),
    ("72", "\\boxed{72}. Or was it 5?"),
    ("72", "\\boxed{\\frac{144}{2}}"),
    ("72", "#### 72 eggs"),
    ("72", "It costs $72."),
    ("72", "so $x = 72$"),
    ("1,000", "#### $1000"),
    ("1000", "1,000"),
    ("\\frac{3}{4}", "0.75"),
    ("3/4", ".75"),
    ("3/4", "75%"),
    ("3/4", "$\\dfrac{3}{4}$"),
    ("0.75", "$\\frac34$"),
    ("3/4", "\\boxed{\\frac{6}{8}}"),
    ("50\\%", "0.5"),
    ("-3.5", "#### -7/2"),
    ("2^{10}", "1024"),
    ("$\\sqrt{2}$", "\\boxed{\\sqrt 2}"),
    ("x+1", "$1+x$"),
    ("(x+1)^2", "\\boxed{x^2+2x+1}"),
    ("\\{1,2\\}", "$\\{2,1\\}$"),
    ("So it is \\boxed{12}.", "$12\\text{ cm}$"),
]
WRONG = [
    ("72", "#### 71"),
    ("72", "#### 72.5"),
    ("72", "\\boxed{71}, not 72"),
    ("72", "\\boxed{71, 72}"),
    ("72", "72, then 73"),
    ("72", "-72"),
    ("3/4", "0.7"),
    ("3/4", "4/3"),
    ("1/3", "0.333"),
    ("50", "49%"),
    ("x+1", "$x-1$"),
    ("(x+1)^2", "\\boxed{x^2+1}"),
    ("\\{1,2\\}", "$\\{1,3\\}$"),
    ("\\sqrt{2}", "1.41"),
]
MALFORMED = [
    "",
    "####",
    "#### ",
    "seventy-two",
    "\\boxed{72",
    "\\boxed{}",
    "\\frac" * 50,
    "$" * 99,
    "1" * 6000,
    "\x00é☃",
]
MALFORMED += ["\\boxed{" * 99, "]})>", "\\begin{pmatrix}"]


def test_math_verify_on_fifty_answers():
    """One batch of right, wrong and malformed ones: each is scored for itself."""
    cases = [*RIGHT, *WRONG, *[("72", response) for response in MALFORMED]]
    assert len(cases) == 50
    answers, responses = map(list, zip(*cases))
    scores = verify_math.verify_math([""] * 50, responses, answers)
    assert scores == [1.0] * len(RIGHT) + [0.0] * (50 - len(RIGHT))
    assert verify_math.verify_math([], [], []) == []


@pytest.mark.parametrize("response", ["\\boxed{9^{9^{9^{9}}}}", "\\boxed{" + "(" * 500 + "1" + ")" * 500 + "}"])
def test_what_takes_too_long_scores_zero(response):
    begin = time.monotonic()
    assert verify_math.verify_math([""] * 2, [response, "72"], ["72"] * 2) == [0.0, 1.0]
    assert time.monotonic() - begin < 3 * verify_math.SECONDS


@pytest.mark.parametrize("answer", ["", "####", "$$", "\\boxed{}"])
def test_an_answer_of_the_data_that_cannot_be_read_is_named(answer):
    with pytest.raises(ValueError, match=r"cannot read the answer .* of the data"):
        verify_math.verify_math([""], ["72"], [answer])


def written(task, folder, train=20, test=5, **config):
    gym_tasks.write(task, folder, train, test, json.dumps(config))
    return [read_rows(folder / f"{name}.jsonl") for name in ("train", "test")]


def scores_of(rows, responses):
    return gym_tasks.gym_tasks([""] * len(rows), responses, [""] * len(rows), [row["entry"] for row in rows])


def test_reasoning_gym_on_fifty_answers(tmp_path):
    """Ten entries of five tasks, whose verifiers read a number, a fraction, a grid, Python, and a sum of numbers."""
    wrong = {"chain_sum": "123456", "fraction_simplification": "no", "arc_agi": "0 1\n1 0"}
    wrong |= {"spiral_matrix": "1 2", "countdown": "1 + 1"}
    malformed = "((", "[[1, 2", "9**9**9**9", "", "é ]})"
    counted = 0
    for task in wrong:
        rows, _ = written(task, tmp_path / task, 10, 1)
        right = [f"I think\n#### {row['answer']}" for row in rows[:4]]
        bad = [f"#### {wrong[task]}", rows[5]["answer"]]  # what has no mark has no answer
        broken = [f"#### {text}" for text in malformed[:4]]
        found = scores_of(rows[:10], right + bad + broken)
        assert found[:4] == [1.0] * 4, task
        assert all(0 <= score <= 0.1 for score in found[4:]), (task, found)  # .01 to .05 is for an answer's form
        assert found[5] == 0
        counted += len(found)
    assert counted == 50
    assert gym_tasks.gym_tasks([], [], [], []) == []


def test_a_verifier_that_raises_scores_zero(tmp_path):
    """That of prime_factorization does, where there is no number."""
    rows, _ = written("prime_factorization", tmp_path)
    entry = json.loads(rows[0]["entry"])
    with pytest.raises(ValueError):
        gym_tasks.dataset("prime_factorization", entry["options"]).score_answer("none", entry=entry)
    assert scores_of(rows[:2], ["#### none", f"#### {rows[1]['answer']}"]) == [0.0, 1.0]


def test_a_task_has_its_options_when_it_is_scored(tmp_path):
    """decimal_arithmetic compares as many places as it was told to ask for."""
    rows, _ = written("decimal_arithmetic", tmp_path, max_num_decimal_places=2, min_num_decimal_places=2)
    assert json.loads(json.loads(rows[0]["entry"])["options"])["max_num_decimal_places"] == 2
    verifier = gym_tasks.dataset("decimal_arithmetic", json.loads(rows[0]["entry"])["options"])
    assert verifier.config.max_num_decimal_places == 2


def test_the_command_writes_no_question_twice(tmp_path):
    """tower_of_hanoi has few questions: those that come twice are written once, so that no test question is trained."""
    command = [sys.executable, PLACE / "gym_tasks.py", "tower_of_hanoi", "--folder", tmp_path / "new" / "hanoi"]
    done = subprocess.run([*command, "--train", "60", "--test", "8"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    train, test = (read_rows(tmp_path / "new" / "hanoi" / f"{name}.jsonl") for name in ("train", "test"))
    questions = [row["question"] for row in train + test]
    assert len(test) == 8 and len(train) < 60 and len({*questions}) == len(questions)
    assert f"train.jsonl: {len(train)} rows" in done.stdout
    done = subprocess.run([*command[:2], "no_such", "--folder", tmp_path], capture_output=True, text=True)
    assert done.returncode != 0 and "no_such" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["verify_math", "gym_tasks"])
def test_a_run_with_the_embedded_model(name, tmp_path):
    """The whole way: data, reward file by its path, columns, two iterations on two processes."""
    flags = {"total_iterations": 2, "batch_size": 8, "minibatch_size": 32, "eval_rows": 8, "output_dir": str(tmp_path)}
    flags |= {"run_name": "run", "reward": f"{PLACE}/{name}.py:{name}", "max_response_length": 24, "track": "none"}
    if name == "gym_tasks":
        written("letter_counting", tmp_path / "data", 64, 16)
        paths = {"dataset": f"{tmp_path}/data/train.jsonl", "eval_dataset": f"{tmp_path}/data/test.jsonl"}
        flags |= paths | {"model": str(ROOT / "benchmarks" / "tiny" / "model"), "prompt_suffix": ""}
    code, console = forked(ROOT / "grpo_llm.py", flags)
    assert code == 0, console
    metrics = read_metrics(tmp_path / "run")
    assert [row["step"] for row in metrics] == [0, 1, 2] and metrics[1]["reward/mean"] > 0


@pytest.mark.slow
def test_every_task_scores_its_own_answers(tmp_path):
    """Through the files. Five have no answer to compare with, only a verifier; `composite` is made of others."""
    from reasoning_gym.factory import DATASETS

    open_ended = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
    for task in sorted(set(DATASETS) - {"composite"}):
        rows, _ = written(task, tmp_path / task, 6, 2)
        scores = scores_of(rows, [f"#### {row['answer']}" for row in rows])
        assert (scores == [1.0] * len(rows)) == (task not in open_ended), (task, scores)
