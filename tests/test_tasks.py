"""Reward files that score with math-verify and reasoning-gym: answers right, wrong and malformed."""

import json
import subprocess
import sys
import time

import pytest
from conftest import ROOT, forked, load_script, read_metrics, read_rows

pytest.importorskip("math_verify", reason="needs the extra `tasks`")
pytest.importorskip("reasoning_gym", reason="needs the extra `tasks`")
PLACE = ROOT / "notes" / "variants"
verify_math = load_script(PLACE / "verify_math.py")
gym_tasks = load_script(PLACE / "gym_tasks.py")

MALFORMED = "", "####", "\\boxed{72", "\\frac" * 50, "1" * 6000, "\x00é☃", "]})>", "\\boxed{9^{9^{9^{9}}}}"
# What a policy may write without having solved anything, or without saying what it found. The first was learned by a
# model within ten iterations, and paid until version 0.4.
LEARNED = "To calculate 11 + 72, we need to follow a set of mathematical steps. First, we add the numbers"
FORMULAS = ["11 + 72", "$11 + 72$", "\\boxed{11+72}", "The answer is 11 + 72", "72 + 11", "83 = 11 + 72", "100-17"]
FORMULAS += ["9 \\times 9 + 2", "166/2", "\\boxed{\\frac{166}{2}}", "\\boxed{83^1}"]
SEVERAL = ["\\boxed{81, 82, 83}", "$83$ or $84$", "83 or 84", "\\boxed{80 \\le x \\le 90}"]
AN_ANSWER = ["11 + 72 = 83", "11 + 72 = 83.", "$11+72$ is 83.", "The answer is \\boxed{83}.", "83.0", "x = 83"]
CASES = {  # {(question, answer): (right responses, wrong ones)}
    ("", "72"): (["40+32=72\n#### 72", "\\boxed{72}. Or was it 5?"], ["#### 72.5", "\\boxed{71}, not 72", *MALFORMED]),
    ("", "First 40+32=72.\n#### 72"): (["It is 72."], []),
    ("", "1,000"): (["#### $1000"], []),
    ("", "3/4"): (["75%", "75\\%", "\\boxed{75\\%}", "\\boxed{\\frac{6}{8}}"], ["\\boxed{7.5\\%}", "\u22123/4"]),
    ("", "50\\%"): (["\\boxed{1/2}", "0.5", "50%", "\\boxed{50\\%}"], ["\\boxed{1/2+0}"]),
    ("", "-5"): (["\u22125", "It is \u22125.", "\\boxed{\u22125}", "-5"], ["5", "\\boxed{5}"]),
    ("", "\u22125"): (["-5", "\\boxed{\u22125}"], ["5"]),
    ("", "x-1"): (["$x\u22121$"], ["$x+1$"]),
    ("", "(x+1)^2"): (["\\boxed{x^2+2x+1}"], ["\\boxed{x^2+1}"]),
    ("", "\\{1,2\\}"): (["$\\{2,1\\}$"], []),  # a set
    ("", "So it is \\boxed{12}."): (["$12\\text{ cm}$"], []),
    ("What is 11 + 72?", "83"): ([*AN_ANSWER, "83 apples"], [LEARNED, *FORMULAS, *SEVERAL]),
    ("Compute 6/8.", "3/4"): (["3/4", "0.75"], ["6/8"]),
    ("Reduce 3/4.", "3/4"): (["3/4"], []),  # what the data's answer says itself is right in any case
    ("Factor $x^2 + 2x + 1$.", "(x+1)^2"): (["\\boxed{(1+x)^2}"], ["\\boxed{x^2+2x+1}"]),
}


def test_math_verify():
    """One batch of right, wrong and malformed answers: each is scored for itself. A formula of the question is none."""
    cases = []
    for (question, answer), (right, wrong) in CASES.items():
        cases += [(question, response, answer, 1) for response in right]
        cases += [(question, response, answer, 0) for response in wrong]
    prompts, responses, answers, _ = map(list, zip(*cases))
    began = time.monotonic()
    found = verify_math.verify_math(prompts, responses, answers)
    assert [case for case, score in zip(cases, found, strict=True) if score != case[-1]] == []
    assert time.monotonic() - began < 10 * verify_math.SECONDS


def test_an_answer_of_the_data_that_cannot_be_read_scores_0_and_is_named_once(capsys):
    """As in published data: an empty one, numbers, a list of one, a currency with its dollar escaped."""
    verify_math.gold.cache_clear()
    for _ in range(2):
        odd = ["", "####", "\\boxed{}"]
        assert verify_math.verify_math([""] * 3, ["72"] * 3, odd) == [0, 0, 0]
    assert capsys.readouterr().err.count("verify_math cannot read the answer") == 3
    answers = [27.0, 27, ["2"], "\\$36", "$\\$36$"]
    assert verify_math.verify_math([""] * 5, ["27", "27.0", "\\boxed{2}", "$36$", "It costs 36."], answers) == [1] * 5


def written(task, folder, **config):
    gym_tasks.write(task, folder, 6, 0, json.dumps(config))
    return read_rows(folder / "train.jsonl")


def scores_of(rows, responses):
    return gym_tasks.gym_tasks([""] * len(rows), responses, [""] * len(rows), [row["entry"] for row in rows])


@pytest.mark.parametrize("task, options", [("chain_sum", {"max_terms": 3}), ("prime_factorization", {"max_value": 50})])
def test_reasoning_gym(tmp_path, task, options):
    """The verifier of prime_factorization raises where there is no number."""
    rows = written(task, tmp_path, **options)
    right = f"I think\n#### {rows[0]['answer']}"
    others = [rows[1]["answer"], "#### 11111", "#### none", "#### ((", "#### 9**9**9**9"]  # an answer needs the mark
    others += ["####", "#### " + rows[0]["question"], "#### " + " ".join(map(str, range(100)))]
    first, *scores = scores_of(rows, [right, *others])
    assert first == 1 and scores[0] == 0 and all(0 <= score <= 0.1 for score in scores)  # .01 is for an answer's form
    verifier = gym_tasks.dataset(task, json.loads(rows[0]["entry"])["options"])
    assert vars(verifier.config).items() >= options.items()


def test_a_run_on_data_of_the_command(tmp_path):
    """Of few questions those that come twice are written once, so that no test question is trained."""
    easy = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    command = [sys.executable, PLACE / "gym_tasks.py", "chain_sum", "--folder", tmp_path / "new" / "sums"]
    subprocess.run([*command, "--train", "64", "--test", "16", "--config", json.dumps(easy)], check=True)
    train, test = (read_rows(tmp_path / "new" / "sums" / f"{name}.jsonl") for name in ("train", "test"))
    questions = [row["question"] for row in train + test]
    assert len(test) == 16 and 8 <= len(train) < 64 and len({*questions}) == len(questions)
    flags = {"dataset": f"{command[-1]}/train.jsonl", "eval_dataset": f"{command[-1]}/test.jsonl", "track": "none"}
    flags |= {"total_iterations": 1, "batch_size": 8, "minibatch_size": 32, "eval_rows": 8, "output_dir": str(tmp_path)}
    flags |= {"run_name": "run", "reward": f"{PLACE}/gym_tasks.py:gym_tasks", "max_response_length": 24}
    code, console = forked(ROOT / "grpo_llm.py", flags | {"model": f"{ROOT}/benchmarks/tiny/model"})
    assert code == 0, console
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1]


@pytest.mark.slow
def test_every_task_scores_its_own_answers(tmp_path):
    """Through the files. Five have no answer to compare with, only a verifier; `composite` is made of others."""
    from reasoning_gym.factory import DATASETS

    open_ended = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
    for task in sorted(set(DATASETS) - {"composite"}):
        rows = written(task, tmp_path / task)
        scores = scores_of(rows, [f"#### {row['answer']}" for row in rows])
        assert (scores == [1.0] * len(rows)) == (task not in open_ended), (task, scores)
