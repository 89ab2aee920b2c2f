"""Rewards: the user's file with its neighbours and process pools, what it is given, and what it may do wrong."""

import datetime
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, forked, make_tokenizer, read_metrics, refusal


@pytest.fixture
def load(algo, tmp_path, monkeypatch):
    """load("stem", text) -> the function f of a reward file; the import path is put back after the test."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def loader(stem, text):
        path = tmp_path / f"{stem}.py"
        path.write_text(text)
        return algo.load_reward(f"{path}:f")

    return loader


def results(algo, reward_function, texts, is_chat=False):
    """Of `texts` as responses, as `main` asks for them; the second response was cut off."""
    tokenizer = make_tokenizer()
    rows = []
    for i in range(len(texts)):
        messages = [{"role": "user", "content": f"ask {i}"}]
        record = {"level": i, "unused": None}
        row = record | {"prompts": f"p{i}", "answers": str(i), "messages": messages, "record": record}
        rows.append(row | {"is_chat": is_chat, "input_ids": [5]})
    responses = [algo.Response(tokenizer(text)["input_ids"] + [1], [], i == 1) for i, text in enumerate(texts)]
    found = algo.compute_scores(reward_function, tokenizer, rows, responses)
    assert [result["response"] for result in found] == texts  # without the EOS
    assert [result["length"] for result in found] == [len(response.ids) for response in responses]
    assert [result["truncated"] for result in found] == [response.truncated for response in responses]
    return found


def score(*args, **options):
    found = results(*args, **options)
    assert all(result["parts"] == {} for result in found)
    return [result["score"] for result in found]


FORKS = """
import os
import signal
import time


def f(prompts, responses, answers):
    found = []
    for _ in range(10):
        child = os.fork()
        if child == 0:
            time.sleep(3)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return [sum(found) / len(found)] * len(responses)
"""


def test_what_a_reward_forks_dies_of_sigterm(script, toy_flags, tmp_path):
    """At once, as the workers of a pool must, before they have run a line. The run itself would go on."""
    (tmp_path / "reward_that_forks.py").write_text(FORKS)
    flags = toy_flags | {"reward": f"{tmp_path}/reward_that_forks.py:f", "output_dir": tmp_path, "run_name": "run"}
    code, console = forked(script, flags | {"total_iterations": 1}, 1)
    assert code == 0 and read_metrics(tmp_path / "run")[1]["reward/mean"] == 1, console


def test_a_path_may_be_relative_or_linked(algo, tmp_path, monkeypatch):
    """And is found before another file of this name. It imports its neighbour."""
    for place, text in ("there", "from reward_neighbour import early\n"), ("other", "raise ImportError"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "reward_right_here.py").write_text(text)
    (tmp_path / "there" / "reward_neighbour.py").write_text("def early(): return [1]\n")
    (tmp_path / "here").symlink_to(tmp_path / "there")
    (tmp_path / "reward_link.py").symlink_to(tmp_path / "there" / "reward_right_here.py")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "other"), *sys.path])
    monkeypatch.chdir(tmp_path)
    for place in "there/reward_right_here", "here/reward_right_here", "reward_link":
        assert algo.load_reward(f"{place}.py:early")() == [1]
        assert sys.path[0] == str(tmp_path.resolve() / "there")  # where the workers of a pool look, too


def test_a_reward_by_name_and_one_by_its_file(algo, monkeypatch):
    """`exact` compares texts and whole numbers. It refuses what no model would write, such as 5.0."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert algo.load_reward("gsm8k") is algo.gsm8k
    exact = algo.load_reward(f"{ROOT}/benchmarks/rewards.py:exact")
    assert exact([""] * 5, [" yes\n", "Yes", "", "5", "yes no"], ["yes", "yes", "yes", 5, "yes"]) == [1, 0, 0, 1, 0]
    for gold in 5.0, True, None:
        with pytest.raises(TypeError, match=f"answer {gold}"):
            exact(["", ""], ["5", "5"], ["5", gold])


# Rewards as people paste them: ours, then TRL's. Of the responses "a" and "bcd", the second was cut off.
def plain(prompts, responses, answers):
    assert (prompts, responses, answers) == (["p0", "p1"], ["a", "bcd"], ["0", "1"])
    return [1, 2]


def columns(answers, level, absent=5, *, messages):
    return [len(m[0]["content"]) + n + absent for m, n in zip(messages, level)]


def hungry(answers, absent=5, **others):
    assert others["level"] == [0, 1] and others["tokens"][0][-1] == 1 and others["unused"] == [None, None]
    return [absent] * len(answers)


def ids(tokens, *, responses):
    return [len(row) - len(text) for row, text in zip(tokens, responses)]  # 1: the EOS


def cut_off(truncated, record):
    assert record == [{"level": 0, "unused": None}, {"level": 1, "unused": None}]
    return [1 - cut for cut in truncated]


def trl_texts(completions, prompts, completion_ids, **kwargs):
    assert completion_ids[0][-1] == 1 and kwargs["level"] == [0, 1] and "answers" in kwargs
    return [float(prompt == f"p{i}") + len(text) for i, (prompt, text) in enumerate(zip(prompts, completions))]


def trl_chats(prompts, completions, level):
    assert [prompt[-1]["content"] for prompt in prompts] == ["ask 0", "ask 1"]
    assert all(completion[0]["role"] == "assistant" for completion in completions)
    return [len(completion[0]["content"]) + n for completion, n in zip(completions, level)]


PASTED = [(plain, [1, 2]), (columns, [10, 11]), (hungry, [5, 5]), (ids, [1, 1]), (cut_off, [1, 0]), (trl_texts, [2, 4])]


def test_columns_are_passed_when_they_are_named(algo):
    for function, scores in PASTED:
        assert score(algo, function, ["a", "bcd"]) == scores
    assert score(algo, trl_chats, ["a", "bcd"], is_chat=True) == [1, 4]
    assert algo.compute_scores(plain, make_tokenizer(), [], []) == []  # on a rank without rows
    assert score(algo, lambda: [9e14, -9e14], ["a", "b"]) == [9e14, -9e14]  # anything below 1e15 is a score


def test_a_reward_may_have_parts(algo):
    """Of which the score is the sum, and which are equally long."""
    found = results(algo, lambda: {"format": [1, 0], "correct": torch.tensor([0.5, -2.0])}, ["a", "b"])
    assert [result["parts"] for result in found] == [{"format": 1, "correct": 0.5}, {"format": 0, "correct": -2}]
    assert [result["score"] for result in found] == [1.5, -2]
    assert {type(number) for result in found for number in (*result["parts"].values(), result["score"])} == {float}


@pytest.mark.parametrize("later", [{"format": 1.0}, {"format": 1.0, "corect": 0.0}, {}])
def test_the_parts_are_the_same_on_every_rank(algo, monkeypatch, later):
    """But may be others in the next call."""
    rows = [{"parts": {"format": 1.0, "correct": score}} for score in (0.0, 1.0)]
    assert algo.mean_parts("part", rows) == {"part/format": 1, "part/correct": 0.5}
    assert algo.mean_parts("eval_part", [{"parts": later}]) == {f"eval_part/{name}": later[name] for name in later}
    monkeypatch.setattr(algo, "gather_object", lambda parts: [*parts, later])
    sentence = refusal(lambda: algo.mean_parts("part", rows))
    assert sentence.startswith("error: the reward must return the same parts on every rank, not [")
    assert all(str(sorted(names)) in sentence for names in (later, ["correct", "format"]))


COUNT = "error: the reward must return numbers for 3 responses, not {}"
NUMBER = "error: the reward must be numbers below 1e15, not {}, of 'b' after 'p1'"


@pytest.mark.parametrize(
    "returned, sentence",
    [
        ([0.123456789] * 1000, COUNT.format(str([0.123456789] * 1000)[:300])),  # shortened
        (None, COUNT.format(None)),  # it has no `return`
        (1.0, COUNT.format(1.0)),
        ({}, COUNT.format("{}")),
        ({1.0, 2.0, 3.0}, COUNT.format("{1.0, 2.0, 3.0}")),  # a set has an order of its own
        ({"format": [1, 2, 3], "correct": [1, 2]}, COUNT.format("{'format': [1, 2, 3], 'correct': [1, 2]}")),
        ([1.0, math.nan, 0.0], NUMBER.format("[nan]")),
        ([1.0, -math.inf, 0.0], NUMBER.format("[-inf]")),
        ([1.0, 1e300, 0.0], NUMBER.format("[1e+300]")),  # infinite in float32
        ([1.0, -1e15, 0.0], NUMBER.format("[-1000000000000000.0]")),
        ([1.0, "3", 0.0], NUMBER.format("['3']")),
        ([1.0, {"format": 1.0}, 0.0], NUMBER.format("[{'format': 1.0}]")),  # a dictionary for each response
        ({"format": [1, 2, 3], "correct": [1, math.nan, 3]}, NUMBER.format("[2, nan]")),
    ],
)
def test_what_a_reward_returns_may_be_refused(algo, returned, sentence):
    """By the response that has no number. One that ends the program would end the run as if all were well."""
    assert refusal(lambda: results(algo, lambda: returned, ["a", "b", "c"])) == sentence
    sentence = "error: the reward function has ended the program: exit(0)"
    assert refusal(lambda: results(algo, lambda: sys.exit(0), ["a", "b", "c"])) == sentence


@pytest.mark.parametrize("stem", ["math", "torch"])
def test_a_reward_file_named_like_a_module(load, stem):
    """Python would import that one: a library's function of this name might even be there."""
    known = sys.modules[stem]
    sentence = refusal(lambda: load(stem, "def f(prompts, responses, answers): return [1.0] * len(prompts)\n"))
    assert sentence.startswith("error: --reward ") and sentence.endswith(f"or another module is called {stem}")
    assert sys.modules[stem] is known


def test_completions_are_sorted_and_written_by_the_main_process_alone(algo, tmp_path):
    """`datasets` makes dates of texts that all look like one; here they are texts again."""
    rows = [{"prompts": "é", "answers": None, "record": {"q": "é"}}]
    rows += [{"prompts": "a", "answers": "1", "record": {"when": datetime.date(2021, 1, 2)}}]
    results = [{"response": "x", "score": 0.0}, {"response": "y", "score": 1.0}]
    (tmp_path / "completions").mkdir()
    for main in False, True:
        assert not [*tmp_path.glob("completions/*")]
        algo.write_completions(tmp_path, "eval", rows, results, SimpleNamespace(is_main_process=main))
    lines = '{"prompt": "a", "answer": "1", "response": "y", "score": 1.0, "row": {"when": "2021-01-02"}}'
    lines += '\n{"prompt": "é", "answer": null, "response": "x", "score": 0.0, "row": {"q": "é"}}'
    assert (tmp_path / "completions" / "eval.jsonl").read_text() == lines


def test_a_reward_that_changes_its_arguments_changes_no_data(algo):
    """As a judge's may that rewrites the chat: every response has a copy of its own. What is not asked for has none."""
    large = type("Large", (), {"__deepcopy__": lambda *_: pytest.fail("it was copied")})()
    chat = [{"role": "user", "content": "hi"}]
    row = {"prompts": "hi", "answers": None, "messages": chat, "input_ids": [5], "is_chat": True, "tests": large}

    def judge(messages, responses, tokens):
        for message, ids in zip(messages, tokens):
            message[0]["content"] += "!"
            ids.clear()
        responses.clear()
        return [len(message[0]["content"]) for message in messages]

    answers = [algo.Response(make_tokenizer()(text)["input_ids"], [], False) for text in ("yes", "no")]
    found = algo.compute_scores(judge, make_tokenizer(), [row, row], answers)
    assert [(r["response"], r["score"], r["length"]) for r in found] == [("yes", 3, 3), ("no", 3, 2)]
    assert chat[0]["content"] == "hi"
