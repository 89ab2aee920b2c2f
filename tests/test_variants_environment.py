"""The variant `environment`: games of several turns, tools, and what is trained of them."""

import json
import re

import pytest
import torch
from conftest import ROOT, read_rows, write_rows
from ranks import load_script
from test_variants import folder, resumed, scripted, train, variant  # noqa: F401
from transformers import AutoTokenizer

# ruff: noqa: F811

guess = load_script(ROOT / "notes" / "variants" / "guess.py")
GUESS = {"environment": f"{ROOT}/notes/variants/guess.py:GuessInText", "max_response_length": 60, "total_iterations": 1}


@pytest.fixture
def batches(variant, spy):
    """What main makes batches of: a list of ((rows, Responses, device), (tokens, mask, rollout_logprobs, lengths))."""
    return spy(variant("environment"), "to_batch")


@pytest.fixture
def numbers(tmp_path):
    """Flags for a game for each number from 1 to 7, and another for 7, with two responses each."""
    rows = [{"question": "which?", "answer": str(number)} for number in [1, 2, 3, 4, 5, 6, 7, 7]]
    data = write_rows(tmp_path / "numbers.jsonl", rows)
    return GUESS | {"dataset": data, "eval_dataset": data, "batch_size": 8, "group_size": 2}


def pieces(algo, response):
    """[(whether sampled, ids)] of a Response, in runs."""
    runs = []
    for token, logprob in zip(response.ids, response.logprobs):
        if not runs or runs[-1][0] != (logprob != algo.NOT_SAMPLED):
            runs.append((logprob != algo.NOT_SAMPLED, []))
        runs[-1][1].append(token)
    return runs


def bisect(text):
    """Halves what is left. `text` is the question, and of each turn the number and what was said to it."""
    low, high = 1, 7
    for number, said in re.findall(r"(\d)<eos>\n(\w+)\n", text):
        low, high = (int(number) + 1, high) if said == "higher" else (low, int(number) - 1)
    return str((low + high) // 2)


def test_what_was_sampled_is_trained_and_nothing_else(variant, train, folder, batches, monkeypatch, spy):
    algo = variant("environment")
    noises = spy(algo, "generate", lambda model, prompts, noise, *_: (prompts, noise))
    ends = [1, *range(3, 9)]
    monkeypatch.setattr(algo, "collect_eos_ids", lambda *args: ends)  # more of them, for more turns
    metrics = train("environment", total_iterations=2)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    (rows, responses, _), (_, mask, _, _) = batches[0]
    turns = []
    for row, response, trained in zip(rows, responses, mask):
        runs = pieces(algo, response)
        sampled, inserted = [ids for was, ids in runs if was], [ids for was, ids in runs if not was]
        turns.append(len(sampled))
        # The environment heard what was sampled, and what it said is between the turns.
        heard = [tokenizer.decode(ids[:-1]) for ids in sampled if ids[-1] in ends]
        assert heard == response.environment.heard
        assert [tokenizer.decode(ids) for ids in inserted] == [f"{i + 1}-" for i in range(len(inserted))]
        prompt = len(row["input_ids"])
        expected = [logprob != algo.NOT_SAMPLED for logprob in response.logprobs]
        assert trained[prompt - 1 : prompt - 1 + len(expected)].tolist() == expected
        assert trained.sum() == sum(map(len, sampled)) and len(response.ids) <= 24
    assert set(turns) >= {2, 3, 4} and metrics[1]["response/turns_mean"] == sum(turns) / len(turns)
    # Up to rounding, the training pass finds the log-probs of the sampler: nothing was tokenized a second time.
    assert all(m["rollout/logprob_diff"] < 1e-5 for m in metrics[1:])
    # A token of a response has its own column of the noise, in whatever turn it is sampled.
    (first, noise), (longer, rest) = noises[:2]
    starts = {tuple(row["input_ids"] + response.ids): i for i, (row, response) in enumerate(zip(rows, responses))}
    for ids, row in zip(longer, rest):
        i = next(i for whole, i in starts.items() if list(whole[: len(ids)]) == ids)
        width = 24 - (len(ids) - len(first[i]))
        assert torch.equal(row[:width], noise[i, 24 - width :]) and not row[width:].any()


def test_a_resumed_run_plays_the_games_of_the_unbroken_one(train):
    resumed(train, "environment", 2, total_iterations=4, save_every=2)


# policy, flags: rewards of the numbers 1 to 7 and 7 again, and how many of these games are cut off
PLAYED = [
    (bisect, {}, [1] * 8, 0),
    (lambda text: "5", {}, [0, 0, 0, 0, 1, 0, 0, 0], 0),  # the game is lost, not cut off
    (lambda text: "no", {}, [0] * 8, 0),
    (bisect, {"max_turns": 2}, [0, 1, 0, 1, 0, 1, 0, 0], 5),
    (bisect, {"max_response_length": 11}, [0, 1, 0, 1, 0, 0, 0, 0], 6),  # 4<eos>, "higher" in two lines, 6
    (bisect, {"max_response_length": 10}, [0, 0, 0, 1, 0, 0, 0, 0], 7),  # no room for a token after "higher"
    (lambda text: "5" * 99, {}, [0] * 8, 8),  # a turn that does not end is not played
]


@pytest.mark.parametrize("policy, flags, rewards, cut", PLAYED)
def test_a_scripted_game(train, scripted, numbers, batches, variant, policy, flags, rewards, cut):
    scripted("environment", policy)
    flags = numbers | flags
    metrics = train("environment", **flags, eval_rows=8)
    (rows, responses, _), _ = batches[0]
    for row, response in zip(rows, responses):
        assert response.environment.get_reward() == rewards[int(row["answer"]) - 1]
    assert all(len(response.ids) <= flags["max_response_length"] for response in responses)
    ends = [response.logprobs[-1] != variant("environment").NOT_SAMPLED for response in responses]
    assert all(ends) or "max_turns" in flags  # nothing is said where there is no room for a turn
    assert metrics[1]["reward/mean"] == sum(rewards) / 8 and metrics[1]["response/truncated_frac"] == cut / 8
    assert [m["eval/score"] for m in metrics] == [sum(rewards) / 8] * 2  # evaluation plays, too


def test_a_question_of_reasoning_gym_is_tried_twice(variant, tmp_path):
    pytest.importorskip("reasoning_gym", reason="needs the extra `tasks`")
    easy = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    load_script(ROOT / "notes" / "variants" / "gym_tasks.py").write("chain_sum", tmp_path, 8, 0, json.dumps(easy))
    (row, *_) = read_rows(tmp_path / "train.jsonl")
    algo = variant("environment")
    right, wrong, again = f"That is\n#### {row['answer']}", "#### none", ["\nThat is wrong, try again.\n"]
    games = [([right], [[]], 1), ([wrong, right], [again, []], 0.5), ([wrong, wrong], [again, []], 0)]
    for turns, heard, reward in [*games, ([], [], 0)]:  # the last: its first turn had no end
        game = algo.load_reward(f"{ROOT}/notes/variants/retry.py:Retry")()
        game.reset(**row)
        for turn, said in zip(turns, heard, strict=True):
            assert [message["content"] for message in algo.answer(game, turn)] == said
        assert game.get_reward() == reward


def test_completions_show_the_whole_game(train, scripted, numbers, tmp_path):
    scripted("environment", bisect)
    train("environment", **numbers, eval_rows=8, run_name="run")
    games = {row["answer"]: row["response"] for row in read_rows(tmp_path / "run/completions/eval_000001.jsonl")}
    assert games["7"] == "4\nhigher\n6\nhigher\n7" and games["4"] == "4"


GAMES = """
class Broken:
    def reset(self, place, **row):
        self.place = place
        self.row = row.pop("numbers")
        self.row.pop()  # as a game may
        if place == "reset":
            raise ZeroDivisionError
        return f" of {len(self.row)}?"

    def step(self, text):
        if self.place == "step":
            raise ZeroDivisionError

    def get_reward(self):
        if self.place == "get_reward":
            raise ZeroDivisionError
        return len(self.row)


def lengths(environments, **columns):
    return [len(environment.row) for environment in environments]
"""


def test_what_an_environment_raises_is_shown(train, scripted, tmp_path):
    """And reset's text is part of the prompt; a game that changes its row changes no other; a reward sees games."""
    scripted("environment", lambda text: "a")
    (tmp_path / "games.py").write_text(GAMES)

    def play(place, **flags):
        row = {"question": "which", "answer": "", "place": place, "numbers": [1, 2, 3]}
        flags |= {"dataset": write_rows(tmp_path / "games.jsonl", [row] * 4), "total_iterations": 1}
        return train("environment", **flags, environment=f"{tmp_path}/games.py:Broken")

    for place in "reset", "step", "get_reward":
        with pytest.raises(ZeroDivisionError):
            play(place)
    assert play("nowhere", run_name="run")[1]["reward/mean"] == 2
    (completion, *_) = read_rows(tmp_path / "run/completions/step_000001.jsonl")
    assert completion["prompt"] == "which of 2?"
    assert play("nowhere", reward=f"{tmp_path}/games.py:lengths", kl_loss_coef=0.0)[1]["reward/mean"] == 2


class Shop:
    def __init__(self):
        self.sold = []

    def reset(self, **row):
        pass

    def buy(self, item: str, count: int = 1) -> str:
        """Buys something.

        Args:
            item: what
            count: how many
        """
        if count < 1:
            raise ValueError("nothing to buy")
        self.sold += [item] * count
        return f"{count} {item}"

    def fall(self) -> str:
        """Raises what no argument can be the cause of."""
        raise ConnectionError("the shop is gone")

    def _rob(self):
        self.sold.append("all")

    def get_reward(self):
        return len(self.sold)


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ANSWERS = [  # a turn of the model, what it is told, what was sold
    ("I need nothing.", [], 0),
    (call("buy", item="egg"), ["1 egg"], 1),
    (f"Two: {call('buy', item='egg', count=2)}\n{call('buy', item='}{')}.", ["2 egg", "1 }{"], 3),
    (f"<think>{call('buy', item='egg')}</think>No.", [], 0),
    (call("buy", item="egg", count=0), ["error: ValueError('nothing to buy')"], 0),
    (call("buy", item="egg", count="2"), ["error: TypeError"], 0),
    (call("buy", count=2), ["error: TypeError(\"Shop.buy() missing 1 required positional argument: 'item'\")"], 0),
    (call("buy", item="egg", shop="x"), ["error: TypeError"], 0),
    (call("steal"), ["error: KeyError('steal')"], 0),
    *[(call(name), ["error: KeyError"], 0) for name in ("_rob", "reset", "get_reward", "__init__", "sold")],
    ("<tool_call>buy egg</tool_call>", ["error: JSONDecodeError"], 0),
    ("<tool_call></tool_call>", ["error: JSONDecodeError"], 0),
    ('<tool_call>{"name": "buy"}</tool_call>', ["error: KeyError('arguments')"], 0),
    ('<tool_call>{"name": ["buy"], "arguments": {}}</tool_call>', ["error: TypeError"], 0),
    ('<tool_call>{"name": "buy", "arguments": "egg"}</tool_call>', ["error: TypeError"], 0),
    ("<tool_call>[]</tool_call>", ["error: TypeError"], 0),
    (f"<tool_call>{'[' * 100_000}</tool_call>", ["error: RecursionError"], 0),
    (f"<tool_call>{'9' * 100_000}</tool_call>", ["error: ValueError"], 0),
    ("<tool_call>{", [], 0),
]


@pytest.mark.parametrize("text, said, sold", ANSWERS, ids=range(len(ANSWERS)))
def test_calls_of_tools(variant, text, said, sold):
    """A fault of the model is told to it."""
    shop = Shop()
    messages = variant("environment").answer(shop, text)
    assert len(messages) == len(said) and {message["role"] for message in messages} <= {"tool"}
    assert all(message["content"].startswith(start) for message, start in zip(messages, said)), messages
    assert len(shop.sold) == sold


def test_a_fault_that_is_not_the_models_ends_the_run(variant):
    with pytest.raises(ConnectionError, match="the shop is gone"):
        variant("environment").answer(Shop(), call("fall"))


TEMPLATE = (
    "{% if tools %}tools: {{ tools | map(attribute='function') | map(attribute='name') | join(' ') }}. {% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if quick %}quick: {% endif %}{% endif %}"
)


@pytest.mark.parametrize("switches", ["{}", '{"quick": true}'])
@pytest.mark.parametrize("environment, role", [("Guess", "tool"), ("GuessInText", "user")])
def test_a_chat_is_what_the_template_makes_of_it(variant, tmp_path, environment, role, switches):
    """Prompt, turns and what is said in between are the chat as a whole; sampled ids stay as they are."""
    algo = variant("environment")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "benchmarks/tiny/model")
    tokenizer.chat_template = TEMPLATE
    data = write_rows(tmp_path / "one.jsonl", [{"question": "Which number?", "answer": "7"}])
    args = algo.Args(
        **algo.EMBEDDED
        | {"dataset": data, "eval_dataset": data, "chat_template_args": switches, "max_prompt_length": 500}
    )
    args.environment = f"{ROOT}/notes/variants/guess.py:{environment}"
    (row,), _ = algo.load_prompts(data, algo.read_data(args)[0], args, tokenizer)
    tools = "tools: guess. " if role == "tool" else ""
    quick = "quick: " if "quick" in switches else ""
    assert row["prompts"] == f"{tools}<user>Which number?|<assistant>{quick}"
    game = algo.load_reward(args.environment)()
    game.reset(**row)
    turns = [call("guess", number=4) * 2, call("guess", number=6)] if role == "tool" else ["4", "6"]
    said = [["higher"] * 2, ["higher"]] if role == "tool" else [["\nhigher\n"]] * 2
    games, text = [algo.Response([], [], True, game)], row["prompts"]
    for turn, answers in zip(turns, said):
        ids = [i for c in turn for i in tokenizer(c)["input_ids"]] + [tokenizer.eos_token_id]  # letter by letter
        assert ids[:-1] != tokenizer(turn)["input_ids"] or len(turn) == 1
        start = len(games[0].ids)
        assert algo.play(games, [0], [algo.Response(ids, [-1.0] * len(ids), False)], 900, tokenizer, args) == [0]
        assert games[0].ids[start : start + len(ids)] == ids
        text += f"{turn}{tokenizer.eos_token}|" + "".join(f"<{role}>{x}|" for x in answers) + f"<assistant>{quick}"
        assert tokenizer.decode(row["input_ids"] + games[0].ids) == text
    assert [was for was, _ in pieces(algo, games[0])] == [True, False] * 2
