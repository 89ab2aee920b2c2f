"""Rewards: the user's file with its neighbours and process pools, what it is given, and what it may do wrong."""

import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, copies, forked, make_tokenizer, read_metrics, write_rows


@pytest.fixture
def load(algo, tmp_path, monkeypatch):
    """load("stem", text) -> the function f of a reward file; the import path is put back after the test."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def loader(stem, text):
        path = tmp_path / f"{stem}.py"
        path.write_text(text)
        return algo.load_reward(f"{path}:f")

    return loader


def user(text):
    return [{"role": "user", "content": text}]


def score(algo, reward_function, texts):
    """Scores of `texts` as responses, as `main` asks for them."""
    tokenizer = make_tokenizer()
    columns = [{"level": i, "unused": None, "messages": user(f"ask {i}")} for i in range(len(texts))]
    rows = [{"prompt": f"p{i}", "answer": str(i), "columns": c} for i, c in enumerate(columns)]
    responses = [algo.Response(tokenizer(text)["input_ids"] + [1], [], False) for text in texts]
    found, scores = algo.compute_scores(reward_function, tokenizer, rows, responses)
    assert found == texts  # without the EOS
    return scores


# --- the user's file -------------------------------------------------------------------------------------------------


def test_a_reward_file_imports_its_neighbour(load, algo, tmp_path):
    (tmp_path / "neighbour_of_reward.py").write_text("BONUS = 3\n")
    f = load("reward_with_neighbour", "from neighbour_of_reward import BONUS\ndef f(p, r, a): return [BONUS] * len(r)")
    assert score(algo, f, ["a", "b"]) == [3.0, 3.0]


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


@pytest.mark.parametrize("context", ["spawn", "fork", "forkserver"])
def test_a_process_pool_runs_a_function_of_the_reward_file(load, algo, tmp_path, context):
    stem = f"reward_in_a_{context}_pool"
    (tmp_path / f"{stem}_helper.py").write_text("BONUS = 3\n")
    f = load(stem, POOL.format(stem=stem, context=context))
    assert score(algo, f, ["a", "bcd"]) == [4.0, 6.0]


def test_a_relative_path_is_taken_from_the_working_folder(algo, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards").mkdir()
    for place in ("reward_right_here", "rewards/reward_further_down"):
        (tmp_path / f"{place}.py").write_text("def early(p, r, a): return [1]\n")
        assert algo.load_reward(f"{place}.py:early")(["p"], ["r"], [None]) == [1]


def test_a_reward_file_in_a_linked_folder_or_linked_itself(algo, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "reward_that_is_linked.py").write_text("def early(p, r, a): return [1]\n")
    (tmp_path / "here").symlink_to(tmp_path / "there")
    assert algo.load_reward(f"{tmp_path}/here/reward_that_is_linked.py:early")(["p"], ["r"], [None]) == [1]
    (tmp_path / "reward_link.py").symlink_to(tmp_path / "there" / "reward_that_is_linked.py")
    assert algo.load_reward(f"{tmp_path}/reward_link.py:early")(["p"], ["r"], [None]) == [1]


def test_a_reward_by_name_and_one_by_its_file(algo, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert algo.load_reward("gsm8k") is algo.gsm8k
    assert algo.load_reward(f"{ROOT}/benchmarks/rewards.py:exact") is sys.modules["rewards"].exact


# --- what it is given ------------------------------------------------------------------------------------------------


def test_columns_are_passed_when_they_are_named(algo):
    given = []

    def plain(prompts, responses, answers):
        given.append((prompts, responses, answers))
        return [1, 2]

    def level(prompts, responses, answers, level):
        return level

    def messages(prompts, responses, answers, *, messages):
        return [len(m[0]["content"]) for m in messages]

    def hungry(prompts, responses, answers, absent=5, **columns):
        assert not columns
        return [absent] * len(prompts)

    assert score(algo, plain, ["a", "b"]) == [1.0, 2.0]
    assert given == [(["p0", "p1"], ["a", "b"], ["0", "1"])]
    assert score(algo, level, ["a", "b"]) == [0.0, 1.0]
    assert score(algo, messages, ["a", "b"]) == [5.0, 5.0]
    assert score(algo, hungry, ["a", "b"]) == [5.0, 5.0]


@pytest.mark.parametrize("name", ["prompts", "responses", "answers"])
def test_a_column_named_like_an_argument_does_not_replace_it(algo, name):
    row = {"prompt": "p", "answer": "x", "columns": {name: "from the data", "messages": user("p")}}
    response = algo.Response([*make_tokenizer()("r")["input_ids"], 1], [], False)

    def f(prompts, responses, answers):
        assert (prompts, responses, answers) == (["p"], ["r"], ["x"])
        return [1]

    assert algo.compute_scores(f, make_tokenizer(), [row], [response]) == (["r"], [1.0])


def test_a_reward_may_change_the_texts_it_is_given(algo):
    def emptying(prompts, responses, answers):
        scores = [float(len(responses.pop())) for _ in prompts]
        return scores[::-1]

    assert score(algo, emptying, ["a", "bcd"]) == [1.0, 3.0]  # `score` sees that the texts are what they were


def test_a_rank_without_rows_asks_for_no_scores(algo, tmp_path):
    """The second of two processes in an evaluation of one row: it has no part in the means, and writes nothing."""
    reward = lambda *args: pytest.fail("it was called")  # noqa: E731
    assert algo.compute_scores(reward, make_tokenizer(), [], []) == ([], [])
    args, rows = algo.Args(model="none"), [{"prompt": "p", "answer": None, "columns": {}}]
    rank = {"process_index": 1, "num_processes": 2, "is_main_process": False, "device": "cpu", "print": print}
    rest = reward, make_tokenizer(), tmp_path, args, SimpleNamespace(**rank)
    metrics = algo.evaluate(4, rows, lambda rows, *_: [] if not rows else pytest.fail("it sampled"), *rest)
    assert metrics == {"eval/score": 0, "eval/score_sampled": 0, "eval/length_mean": 0}
    assert not any(tmp_path.iterdir())


def test_scores_may_be_anything_that_is_a_number(algo):
    assert score(algo, lambda p, r, a: torch.tensor([1.5, 2.0]), ["a", "b"]) == [1.5, 2.0]
    assert score(algo, lambda p, r, a: [True, "3"], ["a", "b"]) == [1.0, 3.0]
    assert score(algo, lambda p, r, a: (len(x) for x in r), ["a", "bb"]) == [1.0, 2.0]


@copies("ppo_llm", "ppo_llm_fsdp")
def test_columns_reach_the_reward_of_a_run(toy_run, tmp_path):
    rows = [{"prompt": f"p {i}", "level": i} for i in range(8)]
    (tmp_path / "reward_of_levels.py").write_text("def f(prompts, responses, answers, level):\n    return level\n")
    flags = {"dataset": write_rows(tmp_path / "rows.jsonl", rows), "reward": f"{tmp_path}/reward_of_levels.py:f"}
    flags |= {"prompt_column": "prompt", "answer_column": None}
    _, metrics = toy_run(**flags, total_iterations=1)
    assert metrics[1]["reward/mean"] == 3.5  # one epoch: the levels 0 to 7


# --- what it may do wrong --------------------------------------------------------------------------------------------


BAD_SCORES = {
    "a NaN": ([1.0, float("nan"), 0.0], "got 3: [1.0, nan, 0.0]"),
    "infinity": ([1.0, 0.0, float("-inf")], "got 3: [1.0, 0.0, -inf]"),
    "too many": ([1.0] * 4, "got 4: [1.0, 1.0, 1.0, 1.0]"),
    "too few": ([1.0] * 2, "got 2: [1.0, 1.0]"),
    "none": ([], "got 0: []"),
}


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("what", BAD_SCORES)
def test_scores_that_are_refused_by_the_rank_that_got_them(algo, capsys, monkeypatch, what, rank):
    monkeypatch.setenv("RANK", rank)
    scores, shown = BAD_SCORES[what]
    with pytest.raises(SystemExit) as end:
        score(algo, lambda *args: scores, ["a", "b", "c"])
    expected = f"error: the reward should give 3 finite numbers, {shown}"
    assert end.value.code == 1 and capsys.readouterr().err.strip() == expected


def test_a_refused_score_is_shown_shortened(algo, capsys):
    with pytest.raises(SystemExit):
        score(algo, lambda *args: [0.123456789] * 1000, ["a"])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ") and len(line) < 400


@pytest.mark.parametrize("eval_rows", [0, 2])
def test_a_nan_ends_the_run_before_anything_is_trained(toy_run, tmp_path, capsys, eval_rows):
    (tmp_path / "reward_of_nan.py").write_text(
        "def f(prompts, responses, answers): return [float('nan')] * len(prompts)"
    )
    with pytest.raises(SystemExit) as end:
        toy_run(reward=f"{tmp_path}/reward_of_nan.py:f", eval_rows=eval_rows)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert end.value.code == 1 and len(lines) == 1 and "nan" in lines[0]
    assert not [*tmp_path.glob("runs/*/final"), *tmp_path.glob("runs/*/best*")]


def test_an_exception_of_the_users_code_is_shown_as_it_is(toy_run, tmp_path):
    """Type, file and line; through the whole of `main`."""
    path = tmp_path / "reward_with_a_bug.py"
    path.write_text("def f(prompts, responses, answers):\n    table = {}\n    return [table[r] for r in responses]\n")
    with pytest.raises(KeyError) as error:
        toy_run(reward=f"{path}:f", total_iterations=1)
    assert {(str(entry.path), entry.lineno + 1) for entry in error.traceback if entry.path == path} == {(str(path), 3)}
    assert error.value.__cause__ is None and not error.value.__suppress_context__


@pytest.mark.parametrize("stem", ["math", "datasets", "random", "time", "sys", "torch"])
def test_a_reward_file_named_like_a_module(load, capsys, stem):
    """Python would import that one: a library's function of this name might even be there."""
    known = sys.modules[stem]
    with pytest.raises(SystemExit) as end:
        load(stem, "def f(prompts, responses, answers): return [1.0] * len(prompts)\n")
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 1 and line.startswith("error: --reward ") and line.endswith("rename the file")
    assert f"Python has another module {stem}, " in line and sys.modules[stem] is known


@pytest.mark.parametrize("stem", ["my.reward", "reward.v2.final"])
def test_a_reward_file_with_a_dot_in_its_name(load, capsys, stem):
    with pytest.raises(SystemExit) as end:
        load(stem, "def f(prompts, responses, answers): return [1.0] * len(prompts)\n")
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 1 and line.startswith("error: --reward ") and "no other dot in the file's name" in line


@pytest.mark.parametrize(
    "text, error",
    [("x = 1", AttributeError), ("import no_such_module", ModuleNotFoundError), ("1 / 0", ZeroDivisionError)],
)
def test_a_reward_file_that_cannot_be_imported(load, text, error):
    with pytest.raises(error):
        load(f"reward_{error.__name__}", text)


RUN_POOL = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor


def grade(response):
    return float(len(response))


def reward(prompts, responses, answers):
    with multiprocessing.get_context("fork").Pool(2) as pool, ProcessPoolExecutor(2) as executor:
        return [a + b for a, b in zip(pool.map(grade, responses), executor.map(grade, responses))]
"""


@pytest.mark.slow
def test_a_reward_file_may_use_process_pools(script, toy_flags, tmp_path):
    """Pools are ended by SIGTERM, which the run itself answers by finishing its iteration."""
    (tmp_path / "pool_reward.py").write_text(RUN_POOL)
    flags = toy_flags | {"reward": f"{tmp_path}/pool_reward.py:reward", "output_dir": tmp_path, "run_name": "run"}
    flags |= {"total_iterations": 1}
    code, console = forked(script, flags)
    assert code == 0, console
    m = read_metrics(tmp_path / "run")[1]
    assert m["reward/mean"] > 0 and m["reward/mean"] <= 2 * m["response/length_mean"]


def test_a_table_whose_columns_differ_in_length_is_not_written(algo, tmp_path):
    """Cut to the shortest, one row's text would stand in another's."""
    with pytest.raises(ValueError, match="shorter"):
        algo.write_rows(tmp_path / "rows.jsonl", {"prompt": ["a", "b"], "score": [1.0]}, None)
    assert not (tmp_path / "rows.jsonl").exists()
