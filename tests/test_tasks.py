"""Reward files that score with math-verify and reasoning-gym: answers right, wrong and malformed."""

import json

import pytest
from helpers import ROOT, load_script, read_rows

pytest.importorskip("math_verify", reason="needs the extra `tasks`")
pytest.importorskip("reasoning_gym", reason="needs the extra `tasks`")
verify_math = load_script(ROOT / "notes" / "variants" / "verify_math.py")
gym_tasks = load_script(ROOT / "notes" / "variants" / "gym_tasks.py")

MALFORMED = "", "####", "\\boxed{72", "\\frac" * 50, "1" * 6000, "\x00é☃", "]})>", "\\boxed{9^{9^{9^{9}}}}"
# What a policy may write without having solved anything: the first was learned by a model within ten iterations.
FORMULAS = ["we need to follow a set of steps. First, we add 11 + 72", "$11 + 72$", "\\boxed{11+72}", "83 = 11 + 72"]
FORMULAS += ["9 \\times 9 + 2", "\\boxed{\\frac{166}{2}}", "\\boxed{83^1}", "\\boxed{81, 82, 83}", "83 or 84"]
FORMULAS += ["\\boxed{83!}", "It is not 83.", "84 or 83", "\\boxed{not 83}"]
CASES = {  # {(question, answer): (right responses, wrong ones)}
    ("", "72"): (["40+32=72\n#### 72", "\\boxed{72}. Or was it 5?"], ["#### 72.5", "\\boxed{71}, not 72", *MALFORMED]),
    ("", "1,000"): (["#### $1000", "1{,}000", "so \\textbf{1000}", "\\boxed{10^3}", "It is not 10 but 1000!"], []),
    ("What is 10^3?", "1000"): (["$1{,}000$"], ["\\boxed{10^{3}}"]),
    ("", "3/4"): (["75%", "\\boxed{75\\%}", "\\boxed{\\frac{6}{8}}"], ["\\boxed{7.5\\%}", "\u22123/4"]),
    ("", "\u22125"): (["-5", "\\boxed{\u22125}"], ["5"]),
    ("", "(x+1)^2"): (["\\boxed{x^2+2x+1}"], ["\\boxed{x^2+1}"]),
    ("", "So it is \\boxed{12}."): (["$12\\text{ cm}$"], []),
    ("What is 11 + 72?", "83"): (["11 + 72 = 83", "$11+72$ is 83.", "83.0", "x = 83", "83 apples"], FORMULAS),
    ("Reduce 3/4.", "3/4"): (["3/4", "0.75"], []),  # what the data's answer says itself is right in any case
    ("Factor $x^2 + 2x + 1$.", "(x+1)^2"): (["\\boxed{(1+x)^2}"], ["\\boxed{x^2+2x+1}"]),
}


def test_math_verify(capsys):
    """Each answer of a batch is scored for itself, and one of the data that cannot be read is named once."""
    cases = []
    for (question, answer), (right, wrong) in CASES.items():
        cases += [(question, response, answer, 1) for response in right]
        cases += [(question, response, answer, 0) for response in wrong]
    prompts, responses, answers, _ = map(list, zip(*cases))
    found = verify_math.verify_math(prompts, responses, answers)
    assert [case for case, score in zip(cases, found, strict=True) if score != case[-1]] == []
    assert "cannot read" not in capsys.readouterr().err
    for _ in range(2):
        assert verify_math.verify_math([""] * 2, ["72"] * 2, ["", "####"]) == [0, 0]
    assert capsys.readouterr().err.count("verify_math cannot read the answer") == 2
    answers = [27.0, 27, ["2"], "\\$36"]  # as in published data
    assert verify_math.verify_math([""] * 4, ["27", "27.0", "\\boxed{2}", "$36$"], answers) == [1] * 4


@pytest.mark.parametrize("task, options", [("chain_sum", {"max_terms": 3}), ("prime_factorization", {"max_value": 50})])
def test_reasoning_gym(tmp_path, task, options):
    """Rows of the task, each once, and their scores. Prime_factorization's verifier raises where there is no number."""
    gym_tasks.write(task, tmp_path, 6, 4, json.dumps(options))
    rows = [row for name in ("train", "test") for row in read_rows(tmp_path / f"{name}.jsonl")]
    assert len({row["question"] for row in rows}) == len(rows) >= 8  # of few questions, some come twice
    responses = [f"I think\n#### {rows[0]['answer']}", rows[0]["answer"], "#### 11111", "#### ((", "####"]
    first, second, *scores = gym_tasks.gym_tasks([""] * 5, responses, [""] * 5, [rows[0]["entry"]] * 5)
    assert first == 1 and second == 0 and all(0 <= score <= 0.1 for score in scores)  # .01 is for an answer's form
    assert vars(gym_tasks.dataset(task, json.loads(rows[0]["entry"])["options"]).config).items() >= options.items()
