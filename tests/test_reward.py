"""Rewards: the user's file with its neighbours and process pools, what it is given, and what it may do wrong."""

import datetime
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, each_script, forked, make_tokenizer, read_metrics, refusal


@pytest.fixture
def load(algo, tmp_path, monkeypatch):
    """load("stem", text) -> the function f of a reward file; the import path is put back after the test."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def loader(stem, text):
        path = tmp_path / f"{stem}.py"
        path.write_text(text)
        return algo.load_reward(f"{path}:f")

    return loader


def score(algo, reward_function, texts, is_chat=False):
    """Scores of `texts` as responses, as `main` asks for them."""
    tokenizer = make_tokenizer()
    rows = []
    for i in range(len(texts)):
        messages = [{"role": "user", "content": f"ask {i}"}]
        row = {"level": i, "unused": None, "prompts": f"p{i}", "answers": str(i), "messages": messages}
        rows.append(row | {"is_chat": is_chat, "input_ids": [5]})
    responses = [algo.Response(tokenizer(text)["input_ids"] + [1], [], False) for text in texts]
    found, scores = algo.compute_scores(reward_function, tokenizer, rows, responses)
    assert found == texts  # without the EOS
    return scores


POOL = """
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

from {stem}_helper import BONUS


def one(text):
    return len(text) + BONUS, os.getpid()


def f(prompts, responses, answers):
    with ProcessPoolExecutor(1, multiprocessing.get_context("{context}")) as pool:
        scores, pids = zip(*pool.map(one, responses))
    assert os.getpid() not in pids
    return scores
"""


@pytest.mark.parametrize("context", ["spawn", "fork"])
def test_a_process_pool_runs_a_function_of_the_reward_file(load, algo, tmp_path, context):
    """Which imports its neighbour."""
    stem = f"reward_in_a_{context}_pool"
    (tmp_path / f"{stem}_helper.py").write_text("BONUS = 3\n")
    f = load(stem, POOL.format(stem=stem, context=context))
    assert score(algo, f, ["a", "bcd"]) == [4.0, 6.0]


FORKS = """
import multiprocessing
import os
import signal
import time


def died(child):
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM


def f(prompts, responses, answers):
    late = os.fork()
    if late == 0:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    found = [died(late)]
    for _ in range(10):
        early = os.fork()
        if early == 0:
            time.sleep(3)
            os._exit(0)
        os.kill(early, signal.SIGTERM)
        found.append(died(early))
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(len, responses)
    return [sum(found) / len(found)] * len(responses)
"""


@pytest.mark.once
@each_script()
def test_what_a_reward_forks_dies_of_sigterm(script, toy_flags, tmp_path):
    """As the workers of a pool must, at once: the run itself answers by finishing its iteration. A signal that comes
    before a worker has run a line would be lost, and a pool that ends wait for ever."""
    (tmp_path / "reward_that_forks.py").write_text(FORKS)
    flags = toy_flags | {"reward": f"{tmp_path}/reward_that_forks.py:f", "output_dir": tmp_path, "run_name": "run"}
    code, console = forked(script, flags | {"total_iterations": 1}, 1)
    assert code == 0 and read_metrics(tmp_path / "run")[1]["reward/mean"] == 1, console


def test_a_path_may_be_relative_or_linked(algo, tmp_path, monkeypatch):
    """And is found before another file of this name."""
    (tmp_path / "there").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "reward_right_here.py").write_text("raise ImportError")
    for place in "reward_right_here", "there/reward_further_down":
        (tmp_path / f"{place}.py").write_text("def early(): return [1]\n")
    (tmp_path / "here").symlink_to(tmp_path / "there")
    (tmp_path / "reward_link.py").symlink_to(tmp_path / "there" / "reward_further_down.py")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "other"), *sys.path])
    monkeypatch.chdir(tmp_path)
    for place in "reward_right_here", "here/reward_further_down", "reward_link":
        assert algo.load_reward(f"{place}.py:early")() == [1]


def test_a_reward_by_name_and_one_by_its_file(algo, monkeypatch):
    """`exact` compares texts and whole numbers. It refuses what no model would write, such as 5.0."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert algo.load_reward("gsm8k") is algo.gsm8k
    exact = algo.load_reward(f"{ROOT}/benchmarks/rewards.py:exact")
    assert exact([""] * 5, [" yes\n", "Yes", "", "5", "yes no"], ["yes", "yes", "yes", 5, "yes"]) == [1, 0, 0, 1, 0]
    for gold in 5.0, True, None:
        with pytest.raises(TypeError, match=f"answer {gold}"):
            exact(["", ""], ["5", "5"], ["5", gold])


def test_columns_are_passed_when_they_are_named(algo):
    def plain(prompts, responses, answers):
        assert (prompts, responses, answers) == (["p0", "p1"], ["a", "b"], ["0", "1"])
        return [1, 2]

    def level(prompts, responses, answers, level):
        return level

    def messages(prompts, responses, answers, *, messages):
        return [len(m[0]["content"]) for m in messages]

    def hungry(answers, absent=5, **others):
        assert others["level"] == [0, 1] and others["tokens"][0][-1] == 1 and others["unused"] == [None, None]
        return [absent] * len(answers)

    def ids(tokens, *, responses):
        return [len(row) - len(text) for row, text in zip(tokens, responses)]  # 1: the EOS

    for function, scores in (plain, [1, 2]), (level, [0, 1]), (messages, [5, 5]), (hungry, [5, 5]), (ids, [1, 1]):
        assert score(algo, function, ["a", "b"]) == scores
    assert algo.compute_scores(level, make_tokenizer(), [], []) == ([], [])  # on a rank without rows


def test_scores_may_be_anything_that_is_a_number(algo):
    assert score(algo, lambda: torch.tensor([1.5, 2.0]), ["a", "b"]) == [1.5, 2.0]
    assert score(algo, lambda prompts: [True, "3"], ["a", "b"]) == [1.0, 3.0]
    assert score(algo, lambda responses: (len(x) for x in responses), ["a", "bb"]) == [1.0, 2.0]


# As people paste them.
def trl_order(prompts, completions, completion_ids, **kwargs):
    assert completion_ids[0][-1] == 1 and kwargs["level"] == [0, 1] and "answers" in kwargs
    return [float(prompt == f"p{i}") + len(text) for i, (prompt, text) in enumerate(zip(prompts, completions))]


def trl_chats(prompts, completions, level, **kwargs):
    assert [prompt[-1]["content"] for prompt in prompts] == ["ask 0", "ask 1"]
    assert all(completion[0]["role"] == "assistant" for completion in completions)
    return [len(completion[0]["content"]) + n for completion, n in zip(completions, level)]


def trl_reversed(completions, prompts, level):
    return [len(text) + len(prompt) + n for text, prompt, n in zip(completions, prompts, level)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


def test_a_reward_as_trl_has_it_runs_as_it_is(algo):
    assert score(algo, trl_order, ["a", "bcd"]) == [2, 4]
    assert score(algo, trl_chats, ["a", "bcd"], is_chat=True) == [1, 4]
    assert score(algo, trl_reversed, ["a", "bcd"]) == [3, 6]


@pytest.mark.parametrize("function", [compute_score, lambda completions, answer: [1.0] * 2, lambda p, r, a: [1.0] * 2])
def test_what_a_reward_asks_for_must_be_there(algo, function):
    """By these names: nothing is passed by position, where it would be another list."""
    with pytest.raises(TypeError, match=r"missing [123] required positional argument"):
        score(algo, function, ["a", "b"])


@pytest.mark.parametrize("scores", [[1.0, float("nan"), 0.0], [1.0, 0.0, float("-inf")], [0.123456789] * 1000, []])
def test_scores_that_are_refused(algo, scores):
    """Shown shortened."""
    sentence = f"error: the reward must return 3 finite numbers, not these {len(scores)}: {str(scores)[:300]}"
    assert refusal(lambda: score(algo, lambda: scores, ["a", "b", "c"])) == sentence


@pytest.mark.parametrize("stem", ["math", "torch"])
def test_a_reward_file_named_like_a_module(load, stem):
    """Python would import that one: a library's function of this name might even be there."""
    known = sys.modules[stem]
    sentence = refusal(lambda: load(stem, "def f(prompts, responses, answers): return [1.0] * len(prompts)\n"))
    assert sentence.startswith("error: --reward ") and sentence.endswith(f"or another module is called {stem}")
    assert sys.modules[stem] is known


def test_completions_are_sorted_and_written_by_the_main_process_alone(algo, tmp_path):
    """`datasets` makes dates of answers that all look like one; here they are texts again."""
    rows = [{"prompts": "é", "answers": None}, {"prompts": "a", "answers": datetime.date(2021, 1, 2)}]
    path = tmp_path / "completions"
    path.mkdir()
    for main in False, True:
        assert not [*path.iterdir()]
        algo.write_completions(tmp_path, "eval", rows, ["x", "y"], [0.0, 1.0], SimpleNamespace(is_main_process=main))
    lines = '{"prompt": "a", "answer": "2021-01-02", "response": "y", "score": 1.0}'
    lines += '\n{"prompt": "é", "answer": null, "response": "x", "score": 0.0}'
    assert (path / "eval.jsonl").read_text() == lines


def test_a_reward_that_changes_its_arguments_changes_no_data(algo):
    """As a judge does that appends the answer to the chat: every response has a copy of its own."""
    chat = [{"role": "user", "content": "hi"}]
    row = {"prompts": "hi", "answers": None, "messages": chat, "input_ids": [5], "is_chat": True}

    def judge(messages, responses):
        for message, response in zip(messages, responses):
            message.append({"role": "assistant", "content": response})
        assert [len(message) for message in messages] == [2, 2]
        responses.clear()
        return [0.0, 1.0]

    answers = [algo.Response(make_tokenizer()(text)["input_ids"], [], False) for text in ("yes", "no")]
    assert algo.compute_scores(judge, make_tokenizer(), [row, row], answers) == (["yes", "no"], [0, 1])
    assert len(chat) == 1
