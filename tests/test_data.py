"""Prompts from every format people have, chat templates, lengths, test data, awkward numbers, and what is refused."""

import datetime
import json
import re

import datasets
import pytest
from helpers import make_model, make_tokenizer, read_rows, refusal, toy_rows, write_rows
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role[:1] }}#{{ m.content }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}a#{% endif %}"


def chat(*turns):
    """chat("hi", "yes", "why") -> messages, user and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


def tokenizer_with_bos(template=TEMPLATE):
    """Puts its BOS, id 2, in front of every text."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<eos2>"})
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<eos2> $A", special_tokens=[("<eos2>", 2)])
    tokenizer.chat_template = template
    return tokenizer


def load(algo, source, tokenizer=None, **flags):
    """The training rows of --dataset, and the sentence about them."""
    args = algo.Args(model="none", dataset=str(source), **flags)
    table, _ = algo.read_data(args)
    return algo.load_prompts(str(source), table, args, tokenizer or make_tokenizer())


# --- Where rows come from --------------------------------------------------------------------------------------------

CHAT = chat("hi", "yes?", "1+1?")
VERL = {"data_source": "x", "ability": "math", "extra_info": {"split": "train", "index": 0}}
VERLS = {"prompt_column": "prompt", "answer_column": "reward_model"}  # flags
TRLS = {"prompt_column": "prompt", "answer_column": "solution"}
FORMATS = {  # name: (row, flags, prompt, answer)
    "GSM8K raw": ({"question": "1+1?", "answer": "so #### 2"}, {}, "1+1?", "so #### 2"),
    "verl": (VERL | {"prompt": chat("1+1?"), "reward_model": {"ground_truth": "2"}}, VERLS, "1+1?", "2"),
    "TRL text": ({"prompt": "1+1?", "solution": "2", "question": "no", "answer": "no"}, TRLS, "1+1?", "2"),
    "TRL chat": ({"prompt": CHAT, "solution": 2}, TRLS, "hi\nyes?\n1+1?", 2),
    "no answers": ({"question": "one", "answer": "2"}, {"reward": "r.py:f", "answer_column": None}, "one", None),
}
ENDINGS = "json", "jsonl.gz", "parquet", "csv", "folder", "folder of splits"
CASES = [(name, "jsonl") for name in FORMATS] + [("GSM8K raw", ending) for ending in ENDINGS] + [("verl", "parquet")]


def save(path, row, ending):
    """Two rows of training data."""
    table = datasets.Dataset.from_list([row, row])
    if ending == "folder of splits":
        datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(path)
    elif ending == "folder":
        table.save_to_disk(path)
    elif ending == "parquet":
        table.to_parquet(path)
    elif "json" in ending:
        table.to_json(path, lines=ending != "json")
    else:
        table.to_csv(path)


@pytest.mark.parametrize("name, ending", CASES)
def test_formats(algo, tmp_path, monkeypatch, name, ending):
    row, flags, prompt, answer = FORMATS[name]
    path = tmp_path / f"train.{ending}"
    save(path, row, ending)
    asked = row[flags.get("prompt_column", "question")]
    told = {"prompts": prompt, "messages": chat(asked) if isinstance(asked, str) else asked, "answers": answer}
    told |= {"input_ids": make_tokenizer()(prompt)["input_ids"], "is_chat": isinstance(asked, list), "record": row}
    monkeypatch.chdir(tmp_path)
    for source in path, path.name:
        rows, summary = load(algo, source, prompt_suffix="", **flags)
        assert summary == f"{source}: 2 rows, 1 distinct, 0 left out" and rows == [row | told] * 2


@pytest.mark.parametrize(
    "name, beside",
    [
        ("a[1].jsonl", "a1.jsonl"),  # as a pattern it would name the other
        ("x/data.jsonl", "x/x.py"),  # once taken for the loader of the folder
        ("DATA.JSONL", "data.jsonl"),
    ],
)
def test_the_file_named_is_read_whatever_stands_beside_it(algo, tmp_path, name, beside):
    for place, text in (name, "right"), (beside, "wrong"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(json.dumps({"question": text}))
    splits = algo.read_splits(f"{tmp_path}/{name}")
    assert {split: table["question"][:] for split, table in splits.items()} == {"train": ["right"]}


@pytest.mark.parametrize("source, asked", [("a/b", ("a/b",)), ("a/b:main", ("a/b", "main"))])
def test_hub_ids_with_and_without_configuration(algo, monkeypatch, source, asked):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return {split: datasets.Dataset.from_list([{"question": f"{split}?"}]) for split in ("train", "test")}

    monkeypatch.setattr(algo.datasets, "load_dataset", load_dataset)
    train, test = algo.read_data(algo.Args(model="none", dataset=source))
    assert (train["question"], test["question"]) == (["train?"], ["test?"]) and calls == [(asked, {})]


def saved(folder, splits):
    """A folder with these splits, each of a row that says which it is."""
    tables = {split: datasets.Dataset.from_list([{"question": split, "answer": "1"}]) for split in splits}
    datasets.DatasetDict(tables).save_to_disk(folder)
    return str(folder)


@pytest.mark.parametrize(
    "training, named, found",
    [
        (("validation", "train", "test"), None, "test"),
        (("train", "validation"), None, None),  # only what is called so, or what is named, is evaluated
        (("train", "test"), ("validation",), "validation"),
        (("train",), ("validation", "test", "dev"), "test"),
        (("train",), ("train", "dev", "validation"), "validation"),  # without `test`, the last one
    ],
)
def test_which_split_is_evaluated(algo, tmp_path, training, named, found):
    """What --eval-dataset names, whatever its split is called, or else the test split of the training data."""
    flags = {"dataset": saved(tmp_path / "training", training)}
    if named:
        flags["eval_dataset"] = saved(tmp_path / "named", named)
    train, test = algo.read_data(algo.Args(model="none", **flags))
    assert train["question"] == ["train"] and (test and test["question"][0]) == found


def test_without_test_data_a_run_says_so_and_trains(toy_run, tmp_path, capsys):
    write_rows(tmp_path / "test.jsonl", toy_rows(8))  # a file beside the training file is not guessed
    path = write_rows(tmp_path / "train.jsonl", toy_rows(8))
    run_dir, metrics = toy_run(dataset=path, eval_dataset=None, eval_rows=512, total_iterations=1)
    assert capsys.readouterr().out.count("eval       no test data (--eval-dataset); the first 0 are evaluated") == 1
    assert metrics[0] == {"step": 0} and not any(name.startswith("eval/") for name in metrics[1])
    assert [path.name for path in run_dir.glob("completions/*")] == ["step_000001.jsonl"]


# --- What becomes of a prompt ----------------------------------------------------------------------------------------


def test_a_chat_becomes_a_prompt_with_one_bos(algo, tmp_path):
    """And with a template that asks for the next turn."""
    path = write_rows(tmp_path / "train.jsonl", [{"prompt": CHAT, "answer": "2"}])
    plain = "hi\nyes?\n1+1?"
    cases = (TEMPLATE, None, "<eos2>u#hi\na#yes?\nu#1+1?\na#"), (TEMPLATE, "none", plain), (None, None, plain)
    for template, flag, prompt in cases:
        (row,), _ = load(algo, path, tokenizer_with_bos(template), chat_template=flag, prompt_column="prompt")
        assert row["prompts"] == prompt and row["messages"] == CHAT
        assert row["input_ids"] == [2, *make_tokenizer()(prompt.removeprefix("<eos2>"))["input_ids"]]


REQUEST = """ Let's think step by step and output the final answer after "####"."""
ASKED = "Say #### and the sum of 1 and 1."
SUFFIXES = [  # flags; what becomes of "1+1?" and of what asks for #### itself
    ({}, ("1+1?" + REQUEST, ASKED)),
    ({"prompt_suffix": ""}, ("1+1?", ASKED)),
    ({"prompt_suffix": " quick!"}, ("1+1? quick!", ASKED + " quick!")),
    ({"reward": "file.py:f"}, ("1+1?", ASKED)),
]


@pytest.mark.parametrize("template", [TEMPLATE, None])
@pytest.mark.parametrize("flags, texts", SUFFIXES)
def test_a_question_asks_for_what_the_reward_looks_for(algo, tmp_path, flags, texts, template):
    """With a template, where a text is one user turn, or without; a chat is the caller's own."""
    questions = "1+1?", ASKED, chat("1+1?")
    path = write_rows(tmp_path / "train.jsonl", [{"prompt": p, "answer": "2"} for p in questions])
    rows, _ = load(algo, path, tokenizer_with_bos(template), prompt_column="prompt", **flags)
    texts = *texts, "1+1?"
    assert [row["messages"] for row in rows] == [chat(text) for text in texts]
    for row, text in zip(rows, texts):
        around = f"u#{text}\na#" if template else text
        assert row["prompts"] == ("<eos2>" + around if template else around)
        assert row["input_ids"] == [2, *make_tokenizer()(around)["input_ids"]]


def test_the_template_of_a_file_makes_the_prompts_and_is_saved(toy_run, tmp_path):
    """By a tokenizer with a BOS, which is in no text. The sampler reads it as the training pass does."""
    model = make_model(tmp_path / "model")
    tokenizer_with_bos(None).save_pretrained(model)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    run_dir, metrics = toy_run(model=model, chat_template=f"{tmp_path}/chat.jinja", total_iterations=1)
    rows = read_rows(run_dir / "completions" / "step_000001.jsonl")
    for row in rows:
        assert re.fullmatch(r"<eos2>u#what is .*\na#", row["prompt"]) and "<eos2>" not in row["response"]
        assert row["batch"]["tokens"].index(2) == 0
    assert rows and metrics[1]["rollout/kl"] < 1e-11
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "final")
    assert tokenizer.apply_chat_template(chat("hi"), tokenize=False, add_generation_prompt=True) == "<eos2>u#hi\na#"


def test_a_template_gets_its_arguments(algo, tmp_path):
    path = write_rows(tmp_path / "train.jsonl", [{"question": "1+1?", "answer": "2"}])
    template = TEMPLATE + "{% if not enable_thinking %}<no>{% endif %}{{ style }}"
    flags = {"chat_template_args": '{"enable_thinking": true, "style": "terse"}', "reward": "r.py:f"}
    for more, end in (flags, "a#terse"), ({"reward": "r.py:f"}, "a#<no>"):
        (row,), _ = load(algo, path, tokenizer_with_bos(template), **more)
        assert row["prompts"] == "<eos2>u#1+1?\n" + end


def test_an_eos_that_the_tokenizer_appends_to_a_prompt_goes(algo, tmp_path):
    path = write_rows(tmp_path / "train.jsonl", [{"question": "1+1?", "answer": "2"}])
    tokenizer = make_tokenizer()
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    assert tokenizer("1")["input_ids"][-1] == tokenizer.eos_token_id == 1
    (row,), _ = load(algo, path, tokenizer, prompt_suffix="")
    assert row["input_ids"] == make_tokenizer()("1+1?")["input_ids"]


def test_too_long_and_empty_prompts_are_left_out_and_counted(algo, tmp_path):
    texts = ["a" * 7, "b" * 8, "", "c" * 30, "d"]
    path = write_rows(tmp_path / "train.jsonl", [{"prompt": text, "answer": str(i)} for i, text in enumerate(texts)])
    flags = {"max_prompt_length": 7, "prompt_column": "prompt", "prompt_suffix": ""}
    rows, summary = load(algo, path, **flags)
    assert summary == f"{path}: 2 rows, 2 distinct, 3 left out"
    assert [(row["prompts"], row["answers"]) for row in rows] == [("a" * 7, "0"), ("d", "4")]
    # The BOS counts, but does not make a prompt of an empty text; the request of the reward does not either.
    rows, summary = load(algo, path, tokenizer_with_bos(None), **flags)
    assert [row["prompts"] for row in rows] == ["d"] and "4 left out" in summary


# --- Refusals --------------------------------------------------------------------------------------------------------


def load_gold(algo, gold):
    """The answer of the only row, as `gsm8k` gets it. How numbers may be written: test_math.py."""
    table = datasets.Dataset.from_list([{"question": "1+1?", "answer": gold}])
    ((row,), _) = algo.load_prompts("rows", table, algo.Args(model="none"), make_tokenizer())
    return row["answers"]


def test_a_reference_answer_is_one_number(algo):
    """Of what is more, half would be read, 3 of 3/4: right answers would score 0, and wrong ones 1."""
    for gold, number in ("so #### 18", 18), ("x #### 3 #### 4", 4), ("  1,234 ", 1234), (5.0, 5), ("x = 5", 5):
        assert algo.gsm8k([f"#### {number}", f"#### {number + 1}"], [load_gold(algo, gold)] * 2) == [1, 0]
    for gold in "3/4", "x1 = 5", "####5####", "", None, float("nan"), True, 1e-7:
        sentence = f"error: rows, row 1: --reward gsm8k needs one number as the reference answer, not {gold!r}"
        assert refusal(lambda gold=gold: load_gold(algo, gold)) == sentence


@pytest.fixture
def refused(algo, toy_run, tmp_path, monkeypatch):
    """refused(**changes) -> the sentence of a run that ends before a model is loaded or a folder made."""
    monkeypatch.setattr(algo, "load_model", lambda *args, **kwargs: pytest.fail("a model was loaded"))

    def run(**changes):
        sentence = refusal(lambda: toy_run(**changes))
        assert "\n" not in sentence and len(sentence) < 500 and not (tmp_path / "runs").exists()
        return sentence

    return run


NO_COLUMN = " has no column {}; --prompt-column, --answer-column (or None): {}"
NO_PROMPT = ", row 1: a prompt is a text or a chat of texts that awaits an answer, not {!r}"
DAY = datetime.datetime(2021, 1, 2)  # what the loader of .jsonl makes of "2021-01-02"
IN_CSV = "in a .csv file it stays a text"
REFUSED = [  # a row, flags, what is said of it
    ({"text": "a", "answer": "1"}, {}, NO_COLUMN.format("prompt", ["text", "answer"])),
    ({"prompt": "a", "answer": "1"}, {"answer_column": "gold"}, NO_COLUMN.format("gold", ["prompt", "answer"])),
    ({"prompt": "when?", "answer": DAY}, {}, f", row 1: `datasets` made {DAY!r} of the answer; {IN_CSV}"),
]
NO_PROMPTS = [None, 5, [], ["a", "b"], [chat("1+1?")], [*chat("1+1?"), {"role": "user", "content": None}]]
NO_PROMPTS += [chat("1+1?", "2"), [{"role": "user", "content": [{"type": "text", "text": "1+1?"}]}]]
NO_PROMPTS += [[{"from": "human", "value": "1+1?"}]]  # ShareGPT
REFUSED += [({"prompt": prompt, "answer": "1"}, {}, NO_PROMPT.format(prompt)) for prompt in NO_PROMPTS]


@pytest.mark.parametrize("row, flags, said", REFUSED)
def test_rows_that_are_refused(refused, tmp_path, row, flags, said):
    """Also in the test data."""
    path = str(tmp_path / "rows.parquet")
    datasets.Dataset.from_list([row]).to_parquet(path)
    good = write_rows(tmp_path / "good.jsonl", [{"prompt": "1+1?", "answer": "2", "gold": "2"}])
    for flag in "dataset", "eval_dataset":
        files = {"dataset": good, "eval_dataset": good} | {flag: path}
        assert refused(prompt_column="prompt", **files, **flags) == f"error: {path}{said}"


REWARD = "is neither gsm8k nor path/to/file.py:function, or another module is called "


def test_flags_that_are_refused(algo, refused, toy_run, toy_data, tmp_path, monkeypatch):
    """The answer column None of the command line is none. Named test data that are not there are no test data."""
    sentence = "every prompt is empty or has more than 5 tokens (--max-prompt-length)"
    assert refused(max_prompt_length=5) == f"error: {toy_data}: {sentence}"
    for reward in "exact", "rewards:f", "nowhere/rewards.py:f":
        assert refused(reward=reward).startswith(f"error: --reward {reward} {REWARD}")
    other = write_rows(tmp_path / "rows.txt", toy_rows(2))
    assert refused(dataset=other) == f"error: {other} is not a .json, .jsonl, .csv or .parquet file"
    monkeypatch.setattr("sys.argv", ["script.py", "--model", "m", "--answer-column", "None"])
    sentence = refused(reward="gsm8k", answer_column=algo.parse_args().answer_column)
    assert sentence.endswith("row 1: --reward gsm8k needs one number as the reference answer, not None")
    with pytest.raises(FileNotFoundError, match=r"no\.jsonl"):
        toy_run(eval_dataset=f"{tmp_path}/no.jsonl")
