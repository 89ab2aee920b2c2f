"""Prompts from every format people have, chat templates, lengths, test data, awkward numbers, and what is refused."""

import json
from decimal import Decimal

import datasets
import pytest
from conftest import ROOT, TINY, each_script, make_tokenizer, read_metrics, read_rows, toy_rows, write_rows
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

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


def load(algo, source, tokenizer=None, split="train", **flags):
    """The rows of a split of --dataset, and the sentence about them."""
    args = algo.Args(model="none", dataset=str(source), **flags)
    tables = dict(zip(("train", "test"), algo.read_data(args)))
    return algo.load_prompts(str(source), tables[split], args, tokenizer or make_tokenizer())


# --- formats ---------------------------------------------------------------------------------------------------------

VERL = {"data_source": "x", "ability": "math", "extra_info": {"split": "train", "index": 0}}
VERLS = {"prompt_column": "prompt", "answer_column": "reward_model"}  # flags
FORMATS = {  # name: (row, flags, prompt, answer, messages)
    "GSM8K raw": ({"question": "1+1?", "answer": "so #### 2"}, {}, "1+1?", "so #### 2", chat("1+1?")),
    "verl": (
        VERL | {"prompt": chat("1+1?"), "reward_model": {"style": "rule", "ground_truth": "2"}},
        VERLS,
        "1+1?",
        "2",
        chat("1+1?"),
    ),
    "TRL text": (
        {"prompt": "1+1?", "solution": "2"},
        {"prompt_column": "prompt", "answer_column": "solution"},
        "1+1?",
        "2",
        chat("1+1?"),
    ),
    "TRL chat": (
        {"prompt": chat("hi", "yes?", "1+1?"), "answer": 2},
        {"prompt_column": "prompt"},
        "hi\nyes?\n1+1?",
        2,
        chat("hi", "yes?", "1+1?"),
    ),
    "no answers": ({"question": "one"}, {"reward": "r.py:f", "answer_column": None}, "one", None, chat("one")),
    "answers that are not to be read": (
        {"question": "one", "answer": "2"},
        {"reward": "r.py:f", "answer_column": None},
        "one",
        None,
        chat("one"),
    ),
    "named columns": (
        {"question": "no", "answer": "no", "ask": "1+1?", "gold": 2},
        {"prompt_column": "ask", "answer_column": "gold"},
        "1+1?",
        2,
        chat("1+1?"),
    ),
}
ENDINGS = "jsonl", "json", "parquet", "csv", "folder", "folder of splits"
CASES = [(name, "jsonl") for name in FORMATS]
CASES += [
    (name, ending) for name in ("GSM8K raw", "verl") for ending in ENDINGS[1:] if (name, ending) != ("verl", "csv")
]


def save(folder, row, ending):
    """Two rows of training data; path."""
    path, table = folder / f"train.{ending}", datasets.Dataset.from_list([row, row])
    if ending.startswith("folder"):
        path = folder / "saved"
        test = datasets.Dataset.from_list([row])
        (table if ending == "folder" else datasets.DatasetDict(train=table, test=test)).save_to_disk(path)
    elif ending == "json":
        path.write_text(json.dumps([row, row]))
    elif ending == "jsonl":
        write_rows(path, [row, row])
    else:
        getattr(table, f"to_{ending}")(path)
    return path


@pytest.mark.parametrize("name, ending", CASES)
def test_formats(algo, tmp_path, name, ending):
    row, flags, prompt, answer, messages = FORMATS[name]
    path = save(tmp_path, row, ending)
    rows, summary = load(algo, path, prompt_suffix="", **flags)
    assert summary == f"{path} (text): 2 rows, 0 left out" and len(rows) == 2
    for found in rows:
        assert (found["prompt"], found["answer"]) == (prompt, answer)
        assert found["columns"] == row | {"messages": messages}
        assert found["input_ids"] == make_tokenizer()(prompt)["input_ids"]


def test_a_saved_folder_of_splits_is_read_by_split(algo, tmp_path):
    path = str(save(tmp_path, FORMATS["GSM8K raw"][0], "folder of splits"))
    assert [len(load(algo, path, split=split)[0]) for split in ("train", "test")] == [2, 1]
    path = str(save(tmp_path / "more", FORMATS["GSM8K raw"][0], "folder"))
    assert load(algo, path, split="test") == ([], "no test data: --eval-dataset can name some")


@pytest.mark.parametrize("source, asked", [("a/b", ("a/b",)), ("a/b:main", ("a/b", "main"))])
def test_hub_ids_with_and_without_configuration(algo, monkeypatch, source, asked):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        tables = {s: datasets.Dataset.from_list([{"question": f"{s}?", "answer": "#### 1"}]) for s in ("train", "test")}
        return datasets.DatasetDict(tables)

    monkeypatch.setattr(algo.datasets, "load_dataset", load_dataset)
    for split in ("train", "test"):
        rows, summary = load(algo, source, split=split, prompt_suffix="")
        assert [row["prompt"] for row in rows] == [f"{split}?"] and summary.startswith(f"{source} (text): 1 rows")
    assert calls == [(asked, {})] * 2


# --- test data -------------------------------------------------------------------------------------------------------


def of(split, n=2):
    """n rows that say which split they are of."""
    return datasets.Dataset.from_list([{"question": f"{split} {i}?", "answer": str(i)} for i in range(n)])


def saved(folder, *splits):
    datasets.DatasetDict({split: of(split) for split in splits}).save_to_disk(folder)
    return str(folder)


def evaluated(algo, **flags):
    """The first test prompt; None without test data."""
    _, table = algo.read_data(algo.Args(model="none", **flags))
    return table and table[0]["question"]


@pytest.mark.parametrize(
    "splits, found",
    [
        (("train", "test"), "test 0?"),
        (("validation", "train", "test"), "test 0?"),
        (("train", "validation"), None),  # only what is called so, or what is named, is evaluated
        (("train",), None),
    ],
)
def test_the_test_split_of_the_training_data_is_evaluated(algo, tmp_path, splits, found):
    assert evaluated(algo, dataset=saved(tmp_path / "saved", *splits)) == found


@pytest.mark.parametrize("name", ["train.jsonl", "my_train_v2.jsonl", "test.jsonl", "questions.jsonl"])
def test_a_file_has_no_test_data_beside_it(algo, tmp_path, name):
    for file in ("train.jsonl", "test.jsonl", "my_test_v2.jsonl", name):
        write_rows(tmp_path / file, toy_rows(2))
    assert evaluated(algo, dataset=f"{tmp_path}/{name}") is None


@pytest.mark.parametrize(
    "splits, found",
    [
        (("validation",), "validation 0?"),
        (("train",), "train 0?"),
        (("validation", "test"), "test 0?"),
        (("test", "validation"), "test 0?"),
        (("train", "validation"), "validation 0?"),
        (("validation", "train"), "validation 0?"),
        (("dev", "validation"), "dev 0?"),
    ],
)
def test_named_test_data_are_read_whatever_their_split_is_called(algo, tmp_path, splits, found):
    """Before the test split of the training data."""
    named = saved(tmp_path / "named", *splits)
    assert evaluated(algo, dataset=saved(tmp_path / "saved", "train", "test"), eval_dataset=named) == found
    file = write_rows(tmp_path / "train.jsonl", toy_rows(2))
    assert evaluated(algo, dataset=file, eval_dataset=named) == found


def test_a_named_file_is_test_data_as_a_whole(algo, tmp_path):
    train, test = (write_rows(tmp_path / f"{i}.jsonl", toy_rows(2, i)) for i in (0, 100))
    assert evaluated(algo, dataset=train, eval_dataset=test) == "what is 100 + 2?"


def test_a_folder_whose_only_split_is_validation_is_evaluated(toy_run, tmp_path, capsys):
    train = write_rows(tmp_path / "train.jsonl", toy_rows(8))
    test = saved(tmp_path / "saved", "validation")
    run_dir, metrics = toy_run(dataset=train, eval_dataset=test, eval_rows=512, total_iterations=1)
    rows = read_rows(run_dir / "completions" / "eval_000001.jsonl")
    assert sorted(row["prompt"] for row in rows) == ["validation 0?", "validation 1?"]
    assert f"eval       {test} (text): 2 rows, 0 left out; the first 2 are evaluated" in capsys.readouterr().out
    assert ["eval/score" in m for m in metrics] == [True, True]


def test_evaluation_only_scores_every_row_of_the_test_data(algo, toy_run, tmp_path):
    path = write_rows(tmp_path / "questions.jsonl", toy_rows(5))
    run_dir, (metrics,) = toy_run(total_iterations=0, eval_dataset=path, eval_rows=512)
    rows = read_rows(run_dir / "completions" / "eval_000000.jsonl")
    assert sorted(row["prompt"] for row in rows) == sorted(row["question"] for row in toy_rows(5))
    for name in ("score", "score_sampled"):
        assert metrics[f"eval/{name}"] == pytest.approx(sum(row[name] for row in rows) / 5, abs=1e-6)
    assert not (run_dir / "final").exists() and not list(run_dir.glob("best*"))


def test_without_test_data_a_run_says_so_and_trains(toy_run, tmp_path, capsys):
    write_rows(tmp_path / "test.jsonl", toy_rows(8))
    path = write_rows(tmp_path / "train.jsonl", toy_rows(8))
    _, metrics = toy_run(dataset=path, eval_dataset=None, eval_rows=512, total_iterations=1)
    line = "eval       no test data: --eval-dataset can name some; the first 0 are evaluated"
    assert capsys.readouterr().out.count(line) == 1
    assert [m["step"] for m in metrics] == [0, 1] and not any("eval/score" in m for m in metrics)


# --- chat templates --------------------------------------------------------------------------------------------------


def test_chats_go_through_the_template_with_one_bos_and_a_generation_prompt(algo, tmp_path):
    path = write_rows(tmp_path / "train.jsonl", [{"prompt": chat("hi", "yes?", "1+1?"), "answer": "2"}])
    (row,), summary = load(algo, path, tokenizer_with_bos(), prompt_column="prompt")
    assert summary == f"{path} (chat): 1 rows, 0 left out"
    assert row["prompt"] == "<eos2>u#hi\na#yes?\nu#1+1?\na#"
    assert row["input_ids"] == [2, *make_tokenizer()("u#hi\na#yes?\nu#1+1?\na#")["input_ids"]]
    assert row["columns"]["messages"] == chat("hi", "yes?", "1+1?")


def test_a_text_is_one_user_turn(algo, tmp_path):
    path = write_rows(tmp_path / "train.jsonl", toy_rows(2))
    rows, _ = load(algo, path, tokenizer_with_bos(), reward="file.py:f")
    assert [row["prompt"] for row in rows] == [f"<eos2>u#{row['question']}\na#" for row in toy_rows(2)]
    assert [row["input_ids"].count(2) for row in rows] == [1, 1]
    assert rows[1]["columns"] == toy_rows(2)[1] | {"messages": chat("what is 1 + 1??")}


REQUEST = """ Let's think step by step and output the final answer after "####"."""
ASKED = "Say #### and the sum of 1 and 1."
SUFFIXES = [  # flags; what becomes of "1+1?" and of what asks for #### itself
    ({}, ("1+1?" + REQUEST, ASKED)),
    ({"prompt_suffix": ""}, ("1+1?", ASKED)),
    ({"prompt_suffix": " quick!"}, ("1+1? quick!", ASKED + " quick!")),
    ({"reward": "file.py:f"}, ("1+1?", ASKED)),
    ({"reward": "file.py:f", "prompt_suffix": "\n#"}, ("1+1?\n#", ASKED + "\n#")),
]


@pytest.mark.parametrize("template", [TEMPLATE, None])
@pytest.mark.parametrize("flags, texts", SUFFIXES)
def test_a_question_asks_for_what_the_reward_looks_for(algo, tmp_path, flags, texts, template):
    """With a template or without; a chat is the caller's own."""
    questions = "1+1?", ASKED, chat("1+1?")
    path = write_rows(tmp_path / "train.jsonl", [{"prompt": p, "answer": "2"} for p in questions])
    tokenizer = tokenizer_with_bos(template)
    rows, _ = load(algo, path, tokenizer, prompt_column="prompt", **flags)
    texts = *texts, "1+1?"
    prompts = [f"<eos2>u#{text}\na#" for text in texts] if template else list(texts)
    assert [row["prompt"] for row in rows] == prompts
    assert [row["input_ids"] for row in rows] == [
        tokenizer(prompt, add_special_tokens=not template)["input_ids"] for prompt in prompts
    ]
    assert [row["columns"]["messages"] for row in rows] == [chat(text) for text in texts]


@each_script()
def test_the_embedded_prompts_are_the_questions(algo, monkeypatch):
    """As they have always been: asked for "####" the model would score 0.004 in place of 0.308."""
    monkeypatch.setattr("sys.argv", ["script.py"])
    args, tokenizer = algo.parse_args(), AutoTokenizer.from_pretrained(TINY / "model")
    for source, table in zip((args.dataset, args.eval_dataset), algo.read_data(args)):
        rows, _ = algo.load_prompts(source, table.select(range(100)), args, tokenizer)
        questions = [row["question"] for row in read_rows(source)[:100]]
        assert [row["prompt"] for row in rows] == questions
        assert [row["input_ids"] for row in rows] == tokenizer(questions)["input_ids"]


@pytest.mark.parametrize("template, flag", [(TEMPLATE, "none"), (None, None), (None, "none")])
@pytest.mark.parametrize("prompt, text", [("1+1?", "1+1?"), (chat("hi", "yes?", "why"), "hi\nyes?\nwhy")])
def test_without_a_template_prompts_stay_text_with_one_bos(algo, tmp_path, template, flag, prompt, text):
    path = write_rows(tmp_path / "train.jsonl", [{"prompt": prompt, "answer": "2"}])
    flags = {"chat_template": flag, "prompt_column": "prompt", "prompt_suffix": ""}
    (row,), summary = load(algo, path, tokenizer_with_bos(template), **flags)
    assert "(text)" in summary and row["prompt"] == text
    assert row["input_ids"] == [2, *make_tokenizer()(text)["input_ids"]]


def test_a_run_on_verls_parquet_with_a_template_file(toy_run, tmp_path):
    """The file's template makes the prompts, stands before a reward that asks for columns, and is saved."""
    rows = [VERL | {"prompt": chat(f"say {i}"), "reward_model": {"ground_truth": str(i)}} for i in range(8)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    datasets.Dataset.from_list(rows[:3]).to_parquet(tmp_path / "test.parquet")
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    (tmp_path / "reward_on_chats.py").write_text(
        "def f(prompts, responses, answers, messages, data_source, extra_info):\n"
        "    assert all(p == 'u#' + m[0]['content'] + '\\na#' for p, m in zip(prompts, messages))\n"
        "    assert all(m[0]['content'] == f'say {a}' for m, a in zip(messages, answers))\n"
        "    assert set(data_source) == {'x'} and extra_info[0]['split'] == 'train'\n"
        "    return [float(len(r)) for r in responses]\n"
    )
    flags = VERLS | {"dataset": f"{tmp_path}/train.parquet", "eval_dataset": f"{tmp_path}/test.parquet"}
    flags |= {"reward": f"{tmp_path}/reward_on_chats.py:f", "eval_rows": 512, "total_iterations": 1}
    run_dir, _ = toy_run(chat_template=f"{tmp_path}/chat.jinja", **flags)
    completions = read_rows(run_dir / "completions" / "eval_000001.jsonl")
    assert sorted(row["prompt"] for row in completions) == [f"u#say {i}\na#" for i in range(3)]
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "final")
    assert tokenizer.apply_chat_template(chat("hi"), tokenize=False, add_generation_prompt=True) == "u#hi\na#"


def test_a_prompt_that_lacks_its_question_is_left_out(algo, tmp_path):
    """Of a template that writes the system's turns alone, or one for messages with other keys."""
    table = [{"prompt": chat("1+1?"), "answer": "2"}, {"prompt": [{"role": "system", "content": "x"}], "answer": "2"}]
    path = write_rows(tmp_path / "train.jsonl", table)
    template = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}a#"
    rows, summary = load(algo, path, tokenizer_with_bos(template), prompt_column="prompt")
    assert [row["prompt"] for row in rows] == ["xa#"] and summary == f"{path} (chat): 1 rows, 1 left out"


# --- lengths and order -----------------------------------------------------------------------------------------------


def test_too_long_and_empty_prompts_are_left_out_and_counted(algo, tmp_path):
    texts = ["a" * 7, "b" * 8, "", "c" * 30, "d"]
    path = write_rows(tmp_path / "train.jsonl", [{"prompt": text, "answer": str(i)} for i, text in enumerate(texts)])
    flags = {"max_prompt_length": 7, "prompt_column": "prompt", "prompt_suffix": ""}
    rows, summary = load(algo, path, **flags)
    assert summary == f"{path} (text): 2 rows, 3 left out"
    assert [(row["prompt"], row["answer"]) for row in rows] == [("a" * 7, "0"), ("d", "4")]
    # The BOS counts.
    rows, summary = load(algo, path, tokenizer_with_bos(None), **flags)
    assert [row["prompt"] for row in rows] == ["", "d"] and "3 left out" in summary


@pytest.mark.parametrize("n", [1, 7, 8])
def test_every_epoch_is_a_permutation_of_its_own(algo, n):
    rows = [{"prompt": i} for i in range(n)]
    stream = [row["prompt"] for row in algo.draw_prompts(rows, 0, 6 * n, seed=1)]
    epochs = [tuple(stream[i : i + n]) for i in range(0, 6 * n, n)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert n == 1 or len(set(epochs)) > 1
    others = {tuple(row["prompt"] for row in algo.draw_prompts(rows, 0, n, seed)) for seed in range(6)}
    assert n == 1 or len(others) > 1


@pytest.mark.parametrize("size", [1, 3, 7, 10, 23])
def test_the_stream_of_prompts_does_not_depend_on_how_it_is_cut(algo, size):
    rows = list(range(7))
    stream = algo.draw_prompts(rows, 0, 70, seed=3)
    cut = [row for start in range(0, 70, size) for row in algo.draw_prompts(rows, start, size, seed=3)]
    assert cut[:70] == stream and len(stream) == 70


# --- numbers ---------------------------------------------------------------------------------------------------------

NUMBERS = [
    ("#### 18", 18),
    ("####18", 18),
    ("####\n12", 12),
    ("#### -5", -5),
    ("#### +5", 5),
    ("#### - 5", -5),
    ("#### 1,234", 1234),
    ("#### 1,234,567.", 1234567),
    ("#### 5.", 5),
    ("#### 5, or so", 5),
    ("#### .5", 0.5),
    ("#### -.5", -0.5),
    ("#### 42.50", 42.5),
    ("#### $42", 42),
    ("#### -$42", -42),
    ("#### $-1,234.", -1234),
    ("#### €3.50", 3.5),
    ("#### £ 7", 7),
    ("#### 42 dollars", 42),
    ("#### 42%", 42),
    ("#### 7 or rather #### 8", 8),
    ("#### 0", 0),
    ("", None),
    ("8", None),
    ("### 8", None),
    ("####", None),
    ("#### eight", None),
    ("#### the answer is 8", None),
    ("#### .", None),
    ("#### -", None),
    ("#### $", None),
    ("#### 8 #### ", None),
    ("#### None", None),
]


@pytest.mark.parametrize("text, number", NUMBERS)
def test_the_number_after_the_last_hashes(algo, text, number):
    assert algo.gsm8k_number(text) == number


GOLDS = [
    ("#### 18", 18),
    ("1,234", 1234),
    ("1,234,567.8", Decimal("1234567.8")),
    ("$-5", -5),
    ("-$5", -5),
    ("5%", 5),
    ("5 %.", 5),
    ("5.", 5),
    ("7.50", Decimal("7.5")),
    (".5", Decimal("0.5")),
    (5, 5),
    (5.0, 5),
    ("x #### 3 #### 4", 4),
    ("5°", 5),
    ("5 €", 5),
    ("so 5\n#### 5\n", 5),
    ("  5 ", 5),
    ("3/4 #### 0.75", Decimal("0.75")),
]
NO_GOLDS = "3/4", "2 + 3 = 5", "12:30", "1e5", "1,2,3", "5 apples", "", None, float("nan"), "12,34", "1234,567"
NO_GOLDS += "#### ", "5 6", "5\n6", "5-", "7.5.2", "1,234,5", True, 1e-7, "####5####", "x = 5", "$", "."


def load_gold(algo, gold):
    """The answer of the only row, as `gsm8k` gets it."""
    table = datasets.Dataset.from_list([{"question": "1+1?", "answer": gold}])
    ((row,), _) = algo.load_prompts("rows", table, algo.Args(model="none"), make_tokenizer())
    return row["answer"]


@pytest.mark.parametrize("gold, number", GOLDS)
def test_a_reference_answer_is_one_number(algo, gold, number):
    responses = [f"#### {number}", f"#### {number + 1}"]
    assert algo.gsm8k(["p"] * 2, responses, [load_gold(algo, gold)] * 2) == [1, 0]


@pytest.mark.parametrize("gold", NO_GOLDS, ids=repr)
def test_what_is_more_than_a_number_is_no_reference_answer(algo, capsys, gold):
    """Half of it would be read, 3 of 3/4: right answers would score 0, and wrong ones 1."""
    with pytest.raises(SystemExit):
        load_gold(algo, gold)
    line = f"error: rows, row 1: --reward gsm8k needs one number as reference answer, this is {gold!r}"
    assert capsys.readouterr().err.strip() == line


def test_responses_may_say_more_than_a_number(algo):
    said = "#### 3/4", "#### 5 apples", "#### 12:30", "#### 1e5", "#### $5 or so", "5 #### 1,2,3"
    assert [algo.gsm8k_number(text) for text in said] == [3, 5, 12, 1, 5, 123]


@pytest.mark.parametrize(
    "response, gold, score",
    [
        ("#### 5", "-5", 0),
        ("#### 1234", "1,234", 1),
        ("#### 42.0", "42", 1),
        ("#### 42.1", "42", 0),
        ("3 x 4 #### 12", "so 3 x 4\n#### 12", 1),
        ("#### 12", 12, 1),
        ("#### 0", "-0", 1),
        ("#### 7 or rather #### 8", "7", 0),
        ("12", "12", 0),
        ("", "0", 0),
        ("", "no number", 0),  # two that have none are not equal
    ],
)
def test_gsm8k_compares_numbers(algo, response, gold, score):
    assert algo.gsm8k(["p"], [response], [gold]) == [score]
    assert algo.gsm8k(["p"] * 3, [response, "#### 3", "#### 4"], [gold, "3", "3"]) == [score, 1, 0]


def test_exact_compares_texts_without_the_space_around(algo):
    exact = algo.load_reward(f"{ROOT}/benchmarks/rewards.py:exact")
    responses, answers = ["yes", " yes\n", "Yes", "", "12", "y es"], ["yes", "yes ", "yes", "yes", 12, "yes"]
    assert exact(["p"] * 6, responses, answers) == [1, 1, 0, 0, 1, 0]


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def refused(algo, toy_run, tmp_path, monkeypatch, capsys):
    """refused(**changes) -> the sentence on stderr of a run that ends before a model is loaded or a folder made."""
    monkeypatch.setattr(algo, "load_model", lambda *args, **kwargs: pytest.fail("a model was loaded"))

    def run(**changes):
        with pytest.raises(SystemExit) as end:
            toy_run(**changes)
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert end.value.code == 1 and line.startswith("error: ") and len(line) < 500
        assert not (tmp_path / "runs").exists()
        return line

    return run


@pytest.mark.parametrize("changes", [{"prompt_column": "text"}, {"answer_column": "text"}])
def test_a_column_that_is_missing(refused, toy_data, changes):
    line = refused(**changes)
    flags = "--prompt-column and --answer-column can name question, answer"
    assert line == f"error: {toy_data}: no column text; {flags}"


@pytest.mark.parametrize(
    "row, missing", [({"text": "a", "label": "1"}, "question"), ({"question": "a", "label": "1"}, "answer")]
)
def test_a_default_column_that_is_missing_names_those_there_are(refused, tmp_path, row, missing):
    path = write_rows(tmp_path / "rows.jsonl", [row])
    flags = f"--prompt-column and --answer-column can name {', '.join(row)}"
    assert refused(dataset=path, reward="gsm8k") == f"error: {path}: no column {missing}; {flags}"


@pytest.mark.parametrize(
    "answer, shown",
    [
        ("so there are #### many", "'so there are #### many'"),
        (None, "None"),
        ("3 of 4 are #### 3/4", "'3 of 4 are #### 3/4'"),
    ],
)
def test_a_row_without_the_answer_that_the_reward_needs(refused, tmp_path, answer, shown):
    rows = [*toy_rows(5), {"question": "how many?", "answer": answer}, *toy_rows(3)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    line = refused(dataset=path, reward="gsm8k")
    assert line == f"error: {path}, row 6: --reward gsm8k needs one number as reference answer, this is {shown}"


def test_an_answer_of_test_data_that_is_no_number(refused, tmp_path):
    train = write_rows(tmp_path / "train.jsonl", toy_rows(3))
    test = write_rows(tmp_path / "test.jsonl", [*toy_rows(1), {"question": "when?", "answer": "12:30"}])
    line = refused(dataset=train, eval_dataset=test, reward="gsm8k")
    assert line == f"error: {test}, row 2: --reward gsm8k needs one number as reference answer, this is '12:30'"


EMPTY = ("jsonl", ""), ("jsonl", "\n\n\n\n\n"), ("json", ""), ("json", "[]\n"), ("parquet", "")
EMPTY += ("csv", ""), ("csv", "question,answer\n")


@pytest.mark.parametrize("flag", ["dataset", "eval_dataset"])
@pytest.mark.parametrize("ending, content", EMPTY)
def test_an_empty_file_is_named(algo, toy_run, tmp_path, monkeypatch, ending, content, flag):
    """Beside what the library says, which may be nothing at all."""
    monkeypatch.setattr(algo, "load_model", lambda *args, **kwargs: pytest.fail("a model was loaded"))
    path = tmp_path / f"nothing.{ending}"
    path.write_text(content)
    with pytest.raises(Exception) as error:
        toy_run(**{flag: str(path)})
    assert error.value.__notes__ == [f"{path} cannot be read, or is empty"] and not (tmp_path / "runs").exists()


def test_gsm8k_without_answers(refused, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"question": "a"}])
    line = refused(dataset=path, reward="gsm8k", answer_column=None)
    assert line == f"error: {path}, row 1: --reward gsm8k needs one number as reference answer, this is None"


def test_a_run_without_answers_says_so_in_a_flag(algo, toy_run, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["script.py", "--model", "m", "--answer-column", "None"])
    answer_column = algo.parse_args().answer_column
    (tmp_path / "reward_without_answers.py").write_text(
        "def f(prompts, responses, answers):\n    return [float(answer is None) for answer in answers]\n"
    )
    path = write_rows(tmp_path / "rows.jsonl", [{"question": row["question"]} for row in toy_rows(8)])
    flags = {"dataset": path, "eval_dataset": path, "reward": f"{tmp_path}/reward_without_answers.py:f"}
    run_dir, metrics = toy_run(answer_column=answer_column, total_iterations=1, eval_rows=3, **flags)
    assert metrics[1]["reward/mean"] == metrics[1]["eval/score"] == 1
    assert {row["answer"] for row in read_rows(run_dir / "completions" / "eval_000001.jsonl")} == {None}


def test_test_data_are_looked_at_before_the_run(refused, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a"}])
    assert f"{path}: no column" in refused(eval_dataset=path)


def test_named_test_data_that_are_not_there(algo, toy_run, tmp_path, monkeypatch):
    monkeypatch.setattr(algo, "load_model", lambda *args, **kwargs: pytest.fail("a model was loaded"))
    with pytest.raises(FileNotFoundError, match=r"no\.jsonl"):
        toy_run(eval_dataset=f"{tmp_path}/no.jsonl")
    assert not (tmp_path / "runs").exists()


def test_no_prompt_within_the_limit(refused, toy_data):
    sentence = "no row makes a whole prompt of 1 to 5 tokens (--max-prompt-length)"
    assert refused(max_prompt_length=5) == f"error: {toy_data}: {sentence}"


@pytest.mark.parametrize("reward", ["gsm9k", "exact", "reward.py", "rewards:f", ""])
def test_a_reward_that_is_unknown(refused, reward):
    known = f"error: --reward {reward}: it should be gsm8k or path/to/file.py:function"
    assert refused(reward=reward).startswith(known)


# --- real data -------------------------------------------------------------------------------------------------------


def word_tokenizer():
    """One unknown token per word: fast enough for thousands of rows."""
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)


@pytest.mark.parametrize("split, size", [("train", 7473), ("test", 1319)])
def test_gsm8k_raw_and_in_verls_form_are_the_same_rows(algo, data_dir, split, size):
    """No gold is refused; the request is verl's, word for word; all gold solutions score 1, a neighbour's hardly
    ever."""
    tokenizer, file = word_tokenizer(), data_dir / "gsm8k" / f"{split}.jsonl"
    raw, summary = load(algo, file, tokenizer, prompt_suffix="")
    assert len(raw) == size and summary.endswith(f"(text): {size} rows, 0 left out")
    texts, _ = load(algo, file, tokenizer)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    verl, summary = load(algo, data_dir / "gsm8k_verl" / f"{split}.parquet", tokenizer, **VERLS)
    assert len(verl) == size and f"(chat): {size} rows, 0 left out" in summary
    instruction = """ Let's think step by step and output the final answer after "####"."""
    assert [row["prompt"] for row in texts] == [row["prompt"] + instruction for row in raw]
    assert [row["prompt"] for row in verl] == [f"<user>{row['prompt']}{instruction}<assistant>" for row in raw]
    chats, _ = load(algo, file, tokenizer)
    assert [(row["prompt"], row["input_ids"]) for row in chats] == [(x["prompt"], x["input_ids"]) for x in verl]
    solutions, answers = [row["answer"] for row in raw], [row["answer"] for row in verl]
    assert [row["columns"]["extra_info"]["answer"] for row in verl] == solutions
    assert [algo.gsm8k_number(text) for text in solutions] == [float(answer.replace(",", "")) for answer in answers]
    for gold in (solutions, answers):
        assert algo.gsm8k(solutions, solutions, gold) == [1.0] * size
        assert sum(algo.gsm8k(solutions, solutions[1:] + solutions[:1], gold)) < 0.05 * size


def test_a_pretrained_model_on_real_prompts(toy_run, data_dir):
    """Another tokenizer, with a BOS; named columns; the sampler agrees with the training pass."""
    stories, model = data_dir / "story_prompts", str(data_dir / "stories260K")
    flags = {"dataset": f"{stories}/story_train.parquet", "eval_dataset": f"{stories}/story_test.parquet"}
    flags |= {"prompt_column": "prompt_text", "answer_column": None, "eval_rows": 5, "total_iterations": 1}
    run_dir, metrics = toy_run(model=model, **flags)
    assert metrics[1]["kl/mean"] == 0 and metrics[1]["rollout/logprob_diff"] < 1e-5
    rows = read_rows(run_dir / "completions" / "eval_000000.jsonl")
    assert len(rows) == 5 and all("<s>" not in row["prompt"] + row["response"] for row in rows)
    assert read_metrics(run_dir) == metrics
