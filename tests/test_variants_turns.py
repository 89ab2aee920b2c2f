"""Variants with several turns: two_turns, tool_call, environment with guess.py and retry.py."""

import json
import re

import pytest
from conftest import ROOT, make_model, read_rows, write_rows
from ranks import load_script
from test_variants import FILES, folder, train, variant  # noqa: F401
from transformers import AutoTokenizer

# ruff: noqa: F811 (fixtures)


@pytest.fixture
def scripted(variant, folder, monkeypatch):
    """scripted(name, policy): turns of the variant are policy(all text so far) from now on, up to a stop id."""

    def use(name, policy, model="model"):
        algo, tokenizer = variant(name), AutoTokenizer.from_pretrained(folder / model)

        def generate(model, prompts, uniforms, eos_ids, temperature):
            responses = []
            for prompt in prompts:
                ids = tokenizer(policy(tokenizer.decode(prompt)), add_special_tokens=False)["input_ids"]
                ids = [*ids, tokenizer.eos_token_id][: uniforms.shape[1]]
                stop = next((i for i, token in enumerate(ids) if token in eos_ids), len(ids) - 1)
                responses.append(algo.Response(ids[: stop + 1], [0.0] * (stop + 1), ids[stop] not in eos_ids))
            return responses

        monkeypatch.setattr(algo, "generate", generate)
        monkeypatch.setattr(algo, "fail", lambda sentence: None)  # the model would not sample what is scripted

    return use


def turns_of(algo, response):
    """[(whether sampled, ids)] of a Response, in runs."""
    runs = []
    for token, logprob in zip(response.ids, response.logprobs):
        if not runs or runs[-1][0] != (logprob != algo.NOT_SAMPLED):
            runs.append((logprob != algo.NOT_SAMPLED, []))
        runs[-1][1].append(token)
    return runs


def check_mask(algo, row, response, mask):
    """What was sampled is trained, and nothing else."""
    prompt, expected = len(row["input_ids"]), [x != algo.NOT_SAMPLED for x in response.logprobs]
    assert mask[prompt - 1 : prompt - 1 + len(expected)].tolist() == expected and mask.sum() == sum(expected)


def test_two_turns_asks_again_if_the_first_answer_is_wrong(variant, train, folder, spy):
    algo = variant("two_turns")
    batches = spy(algo, "to_batch")
    (m,) = train("two_turns", reward="binary", max_response_length=16, total_iterations=1)[1:]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    turn = tokenizer("\nThat is wrong, try again.\n", add_special_tokens=False)["input_ids"]
    (rows, responses, _), (_, mask, *_) = batches[0]
    two = 0
    for row, response, valid in zip(rows, responses, mask):
        (_, first), *rest = turns_of(algo, response)
        check_mask(algo, row, response, valid)
        text = tokenizer.decode(first, skip_special_tokens=True)
        assert bool(rest) == (not text or text[0] >= "5")
        assert not rest or rest[0][1] == turn + row["input_ids"]
        two += bool(rest)
    assert 0 < two < len(rows) and m["response/two_turns_frac"] == two / len(rows) and m["rollout/logprob_diff"] < 1e-5


def test_tool_call_calculates(variant):
    calculate = variant("tool_call").calculate
    right = {"12*7": "84", "1/3": "0.333333", "-(3+4)*2": "-14", " 3 + 4 ": "7", "1.5*2": "3", "6/-3": "-2"}
    assert {text: calculate(text) for text in right} == right
    wrong = "2**3", "9**9**9", "1//2", "2(3)", "...", "()", "", "1e9", "9" * 65, "2/0", "abs(1)", "1,2", "٣+٤", "(" * 40
    assert [calculate(text) for text in wrong] == ["error"] * len(wrong)


def test_tool_call_inserts_results(variant, train, folder, scripted, tmp_path, spy):
    model = make_model(folder / "tool_model")
    text = (folder / "tool_model" / "tokenizer.json").read_text()
    for old, new in zip("qwvz", "<>*/"):  # characters that calls need
        text = text.replace(f'"{old}":', f'"{new}":')
    (folder / "tool_model" / "tokenizer.json").write_text(text)
    tokenizer, algo = AutoTokenizer.from_pretrained(model), variant("tool_call")
    call, question = "<calc>12*7</calc>", "the sum of 3 and 4?"
    data = write_rows(tmp_path / "one.jsonl", [{"question": question, "answer": "#### 1"}])
    batches = spy(algo, "to_batch")

    def answered(answer, max_response_length):
        scripted("tool_call", lambda text: f"{question}{answer}".removeprefix(text), "tool_model")
        flags = {"model": model, "dataset": data, "total_iterations": 1, "batch_size": 2}
        metrics = train("tool_call", **flags, max_response_length=max_response_length)
        (rows, (response, *_), _), (_, mask, *_) = batches[-1]
        check_mask(algo, rows[0], response, mask[0])
        return metrics[1]["response/calls_mean"], response

    last = f"{call}84{call}84{call}84{call}99"  # the fourth call gets no answer
    for answer, calls in ((f"a{call}84b", 1), (last, 3), ("no <b> call", 0), ("x<calc>7**7</calc>error.", 1)):
        count, response = answered(answer, 80)
        inserted = [tokenizer.decode(ids) for sampled, ids in turns_of(algo, response) if not sampled]
        assert tokenizer.decode(response.ids[:-1]) == answer and not response.truncated
        assert count == calls and inserted == re.findall(r"(?<=</calc>)(84|error)", answer)
    _, response = answered(last, 30)
    assert (
        response.truncated and sum(x != algo.NOT_SAMPLED for x in response.logprobs) == 30
    )  # inserted ones don't count


# --- environment


def test_environment_trains_what_was_sampled_and_nothing_else(variant, train, folder, monkeypatch, spy):
    algo = variant("environment")
    batches = spy(algo, "to_batch")
    noises = spy(algo, "generate", lambda model, prompts, noise, *_: (prompts, noise))
    ends = [1, *range(3, 9)]
    monkeypatch.setattr(algo, "collect_eos_ids", lambda *args: ends)  # more of them, for more turns
    (m,) = train("environment", total_iterations=1)[1:]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    (rows, responses, _), (_, mask, *_) = batches[0]
    counts = []
    for row, response, valid in zip(rows, responses, mask):
        check_mask(algo, row, response, valid)
        turns = turns_of(algo, response)
        sampled, inserted = ([tokenizer.decode(ids) for was, ids in turns if was == kind] for kind in (True, False))
        ended = [tokenizer.decode(ids[:-1]) for was, ids in turns if was and ids[-1] in ends]
        assert ended == response.environment.heard and inserted == [f"{i + 1}-" for i in range(len(inserted))]
        counts.append(len(sampled))
    assert {*counts} >= {2, 3, 4} and m["response/turns_mean"] == sum(counts) / len(counts)
    assert m["rollout/logprob_diff"] < 1e-5  # nothing was tokenized a second time
    # A token of a response has its own column of the noise, in whatever turn it is sampled.
    (first, noise), (longer, rest) = noises[:2]
    wholes = [row["input_ids"] + response.ids for row, response in zip(rows, responses)]
    for ids, columns in zip(longer, rest):
        i = next(i for i, whole in enumerate(wholes) if whole[: len(ids)] == ids)
        width = 24 - (len(ids) - len(first[i]))
        assert columns[:width].equal(noise[i, 24 - width :]) and not columns[width:].any()


def bisect(text):
    """Halves what is left. `text` is the question, and of each turn the number and what was said to it."""
    low, high = 1, 7
    for number, said in re.findall(r"(\d)<eos>\n(\w+)\n", text):
        low, high = (int(number) + 1, high) if said == "higher" else (low, int(number) - 1)
    return str((low + high) // 2)


PLAYED = [  # policy, flags, rewards of the numbers 1 to 7 and 7 again, how many of these games are cut off
    (bisect, {}, [1] * 8, 0),
    (lambda text: "5", {}, [0, 0, 0, 0, 1, 0, 0, 0], 0),  # the game is lost, not cut off
    (bisect, {"max_turns": 2}, [0, 1, 0, 1, 0, 1, 0, 0], 5),
    (bisect, {"max_response_length": 11}, [0, 1, 0, 1, 0, 0, 0, 0], 6),  # 4<eos>, "higher" in two lines, 6
    (bisect, {"max_response_length": 10}, [0, 0, 0, 1, 0, 0, 0, 0], 7),  # no room for a token after "higher"
    (lambda text: "5" * 99, {}, [0] * 8, 8),  # a turn that does not end is not played
]


@pytest.mark.parametrize("policy, flags, rewards, cut", PLAYED)
def test_environment_plays_guess(train, scripted, tmp_path, policy, flags, rewards, cut):
    """In training and in evaluation; completions show the whole game."""
    scripted("environment", policy)
    rows = [{"question": "which?", "answer": str(number)} for number in [1, 2, 3, 4, 5, 6, 7, 7]]
    data = write_rows(tmp_path / "numbers.jsonl", rows)
    place = {"environment": f"{FILES}/guess.py:GuessInText", "dataset": data, "eval_dataset": data, "run_name": "run"}
    sizes = {"batch_size": 8, "group_size": 2, "max_response_length": 60, "total_iterations": 1, "eval_rows": 8}
    metrics = train("environment", **place | sizes | flags)
    assert metrics[1]["reward/mean"] == sum(rewards) / 8 and metrics[1]["response/truncated_frac"] == cut / 8
    assert [m["eval/score"] for m in metrics] == [sum(rewards) / 8] * 2
    games = {row["answer"]: row["response"] for row in read_rows(tmp_path / "run/completions/eval_000001.jsonl")}
    assert cut or policy is not bisect or games["7"] == "4\nhigher\n6\nhigher\n7"


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CALLS = [  # a turn of the model, and what it is told
    ("I need nothing.", []),
    (f"Two: {call('guess', number=2)}\n{call('guess', number=6)}.", ["higher", "lower"]),
    (f"<think>{call('guess', number=5)}</think>No.", []),
    (call("guess", number="5"), ["error: TypeError"]),  # a fault of the model is told to it
    (call("guess", place=5), ["error: TypeError"]),
    *[(call(name), ["error: KeyError"]) for name in ("steal", "_number", "reset", "get_reward", "__init__")],
    ("<tool_call>guess 5</tool_call>", ["error: JSONDecodeError"]),
    ('<tool_call>{"name": "guess"}</tool_call>', ["error: KeyError('arguments')"]),
    ("<tool_call>[]</tool_call>", ["error: TypeError"]),
    (f"<tool_call>{'[' * 100_000}</tool_call>", ["error: RecursionError"]),
    ("<tool_call>{", []),
]


def test_environment_calls_tools(variant):
    for text, said in CALLS:
        game = load_script(FILES / "guess.py").Guess()
        game.reset(answer="5")
        messages = variant("environment").answer(game, text)
        assert len(messages) == len(said) and {message["role"] for message in messages} <= {"tool"}
        assert all(message["content"].startswith(start) for message, start in zip(messages, said)), (text, messages)


TEMPLATE = (
    "{% if tools %}tools: {{ tools | map(attribute='function') | map(attribute='name') | join(' ') }}. {% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if quick %}quick: {% endif %}{% endif %}"
)


def test_environment_keeps_the_chat_that_the_template_makes(variant, tmp_path):
    """Prompt, turns and what is said in between are the chat as a whole; sampled ids stay as they are."""
    algo, tokenizer = variant("environment"), AutoTokenizer.from_pretrained(ROOT / "benchmarks/tiny/model")
    tokenizer.chat_template = TEMPLATE
    data = write_rows(tmp_path / "one.jsonl", [{"question": "Which number?", "answer": "7"}])
    flags = {"dataset": data, "eval_dataset": data, "chat_template_args": '{"quick": true}', "max_prompt_length": 500}
    args = algo.Args(**algo.EMBEDDED | flags | {"environment": f"{FILES}/guess.py:Guess"})
    (row,), _ = algo.load_prompts(data, algo.read_data(args)[0], args, tokenizer)
    text = "tools: guess. <user>Which number?|<assistant>quick: "
    assert row["prompts"] == text
    game = algo.load_reward(args.environment)()
    game.reset(**row)
    games = [algo.Response([], [], True, game)]
    for turn, said in (call("guess", number=4) * 2, ["higher"] * 2), (call("guess", number=6), ["higher"]):
        ids = [i for c in turn for i in tokenizer(c)["input_ids"]] + [tokenizer.eos_token_id]  # letter by letter
        start = len(games[0].ids)
        assert algo.play(games, [0], [algo.Response(ids, [-1.0] * len(ids), False)], 900, tokenizer, args) == [0]
        assert games[0].ids[start : start + len(ids)] == ids
        text += f"{turn}{tokenizer.eos_token}|" + "".join(f"<tool>{x}|" for x in said) + "<assistant>quick: "
        assert tokenizer.decode(row["input_ids"] + games[0].ids) == text
    assert [was for was, _ in turns_of(algo, games[0])] == [True, False] * 2


def test_retry_asks_reasoning_gym_twice(variant, tmp_path):
    pytest.importorskip("reasoning_gym", reason="needs the extra `tasks`")
    easy = json.dumps({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    load_script(FILES / "gym_tasks.py").write("chain_sum", tmp_path, 8, 0, easy)
    (row, *_) = read_rows(tmp_path / "train.jsonl")
    right, wrong, again = f"That is\n#### {row['answer']}", "#### none", ["\nThat is wrong, try again.\n"]
    for turns, heard, reward in (
        ([right], [[]], 1),
        ([wrong, right], [again, []], 0.5),
        ([wrong, wrong], [again, []], 0),
    ):
        game = load_script(FILES / "retry.py").Retry()
        game.reset(**row)
        for turn, said in zip(turns, heard, strict=True):
            assert [message["content"] for message in variant("environment").answer(game, turn)] == said
        assert game.get_reward() == reward
