"""Datasets in every format people have, chat templates, overlong prompts, evaluation only, awkward numbers."""

import json

import datasets
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from .helpers_before import (
    has_critic,
    load_script,
    make_args,
    make_model,
    make_tokenizer,
    read_metrics,
    read_rows,
    toy_rows,
    write_rows,
)

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role[:1] }}#{{ m.content }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}a#{% endif %}"


@pytest.fixture(scope="module", params=["grpo_llm"])
def algo(request):
    """One script: both have this in the same words."""
    return load_script(request.param)


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


def load(algo, path, tokenizer=None, split="train", **flags):
    return algo.load_prompts(str(path), split, make_args(algo, **flags), tokenizer or make_tokenizer())


VERL = {"data_source": "x", "ability": "math", "extra_info": {"split": "train", "index": 0}}
FORMATS = {  # name: (row, flags, kind, prompt, answer, messages)
    "GSM8K raw": (
        {"question": "1+1?", "answer": "so #### 2"},
        {},
        "GSM8K raw, text",
        "1+1?",
        "so #### 2",
        chat("1+1?"),
    ),
    "verl": (
        VERL | {"prompt": chat("1+1?"), "reward_model": {"style": "rule", "ground_truth": "2"}},
        {"chat_template": "none"},
        "verl, chat",
        "1+1?",
        "2",
        chat("1+1?"),
    ),
    "text": ({"prompt": "1+1?", "solution": "2"}, {}, "TRL, text", "1+1?", "2", chat("1+1?")),
    "text alone": ({"prompt": "one"}, {"reward": "r.py:f"}, "TRL, text", "one", None, chat("one")),
    "chat": (
        {"prompt": chat("hi", "yes?", "1+1?"), "answer": 2},
        {"chat_template": "none"},
        "TRL, chat",
        "hi\nyes?\n1+1?",
        2,
        chat("hi", "yes?", "1+1?"),
    ),
    "pairs": (
        {"chosen": chat("hi", "yes?", "1+1?", "two"), "rejected": chat("hi", "yes?", "1+1?", "no")},
        {"reward": "r.py:f", "chat_template": "none"},
        "preference pairs, chat",
        "hi\nyes?\n1+1?",
        None,
        chat("hi", "yes?", "1+1?"),
    ),
    "pairs with a prompt": (
        {"prompt": "1+1?", "chosen": chat("1+1?", "two"), "rejected": chat("1+1?", "no")},
        {"reward": "r.py:f"},
        "TRL, text",
        "1+1?",
        None,
        chat("1+1?"),
    ),
    "own columns": (
        {"prompt": "no", "ask": "1+1?", "gold": 2},
        {"prompt_column": "ask", "answer_column": "gold"},
        "ask, text",
        "1+1?",
        2,
        chat("1+1?"),
    ),
}


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "json", "folder", "folder of splits"])
@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_recognised_from_the_columns(algo, tmp_path, name, ending):
    row, flags, kind, prompt, answer, messages = FORMATS[name]
    path, table = tmp_path / f"train.{ending}", datasets.Dataset.from_list([row, row])
    if ending.startswith("folder"):
        path = tmp_path / "saved"
        other = datasets.Dataset.from_list([row])
        (table if ending == "folder" else datasets.DatasetDict(train=table, test=other)).save_to_disk(path)
    elif ending == "parquet":
        table.to_parquet(path)
    elif ending == "json":
        path.write_text(json.dumps([row, row]))
    else:
        write_rows(path, [row, row])
    rows, summary = load(algo, path, **flags)
    assert summary == f"{path} ({kind}): 2 rows, 0 too long left out"
    for found in rows:
        assert (found["prompt"], found["answer"], found["columns"]["messages"]) == (prompt, answer, messages)
        assert found["input_ids"] == make_tokenizer()(prompt)["input_ids"]
    if ending == "folder of splits":
        assert algo.default_eval_source(str(path)) == str(path)
        assert len(load(algo, path, split="test", **flags)[0]) == len(load(algo, f"{path}::test", **flags)[0]) == 1
        with pytest.raises(algo.UserError, match=r"saved::other: it has the splits \['train', 'test'\]"):
            load(algo, f"{path}::other", **flags)


@pytest.mark.parametrize(
    "source, name, config, split, eval_source",
    [
        ("openai/gsm8k", "openai/gsm8k", None, "train", "openai/gsm8k"),
        ("openai/gsm8k:main", "openai/gsm8k", "main", "train", "openai/gsm8k:main"),
        ("openai/gsm8k:main:test", "openai/gsm8k", "main", "test", "openai/gsm8k:main"),
        ("trl-lib/tldr::validation", "trl-lib/tldr", None, "validation", "trl-lib/tldr:"),
    ],
)
def test_hub_ids_with_configuration_and_split(algo, monkeypatch, source, name, config, split, eval_source):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        rows = [{"question": f"{s}?", "answer": "#### 1"} for s in ("train", "test", "validation")]
        return datasets.DatasetDict({row["question"][:-1]: datasets.Dataset.from_list([row]) for row in rows})

    monkeypatch.setattr(algo.datasets, "load_dataset", load_dataset)
    rows, summary = load(algo, source)
    assert asked == [((name, config), {})] and rows[0]["prompt"] == f"{split}?" and source in summary
    assert algo.default_eval_source(source) == eval_source
    assert load(algo, eval_source, split="test")[0][0]["prompt"] == "test?"


# --- chat templates --------------------------------------------------------------------------------------------------


def test_chats_go_through_the_template_with_one_bos_and_a_generation_prompt(algo, tmp_path):
    path = write_rows(tmp_path / "train.jsonl", [{"prompt": chat("hi", "yes?", "1+1?"), "answer": "2"}])
    rows, summary = load(algo, path, tokenizer_with_bos())
    assert "(TRL, chat, chat template)" in summary
    assert rows[0]["prompt"] == "<eos2>u#hi\na#yes?\nu#1+1?\na#"
    assert rows[0]["input_ids"][0] == 2 and rows[0]["input_ids"].count(2) == 1
    assert rows[0]["input_ids"][1:] == make_tokenizer()("u#hi\na#yes?\nu#1+1?\na#")["input_ids"]


def test_a_text_prompt_becomes_one_user_turn(algo, tmp_path):
    path = write_rows(tmp_path / "train.jsonl", toy_rows(2))
    rows, summary = load(algo, path, tokenizer_with_bos(), prompt_template="Q: {prompt}\\nA:")
    assert "(GSM8K raw, text, chat template)" in summary
    assert rows[1]["prompt"] == "<eos2>u#Q: what is 1 + 1??\nA:\na#" and rows[1]["input_ids"].count(2) == 1
    assert rows[1]["columns"]["messages"] == chat("Q: what is 1 + 1??\nA:")
    # Turned off it stays text, and the tokenizer adds the BOS.
    rows, summary = load(algo, path, tokenizer_with_bos(), chat_template="none")
    assert rows[0]["prompt"] == "what is 0 + 0?" and rows[0]["input_ids"][0] == 2 == rows[0]["input_ids"][0]
    assert rows[0]["input_ids"].count(2) == 1 and "(GSM8K raw, text)" in summary


def test_a_chat_without_a_template_is_refused_or_joined(algo, tmp_path):
    path = write_rows(tmp_path / "train.jsonl", [{"prompt": chat("hi", "yes?", "why"), "answer": "2"}])
    with pytest.raises(
        algo.UserError, match=r"train.jsonl row 1: .*no chat template; give --chat-template FILE, or none"
    ):
        load(algo, path, tokenizer_with_bos(None))
    rows, _ = load(algo, path, tokenizer_with_bos(None), chat_template="none", prompt_template="[{prompt}]")
    assert rows[0]["prompt"] == "[hi\nyes?\nwhy]" and rows[0]["input_ids"].count(2) == 1


def test_a_template_that_refuses_a_chat_names_the_row(algo, tmp_path):
    tokenizer = tokenizer_with_bos("{{ raise_exception('no system please') }}")
    path = write_rows(tmp_path / "train.jsonl", [{"prompt": chat("hi"), "answer": "2"}])
    with pytest.raises(algo.UserError, match=r"train.jsonl row 1: the chat template refuses it .*no system please"):
        load(algo, path, tokenizer)


def test_what_is_saved_keeps_the_chat_template(algo, toy_run, tmp_path):
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    run_dir, _ = toy_run(chat_template=str(tmp_path / "chat.jinja"), total_iterations=1)
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "final")
    assert tokenizer.apply_chat_template(chat("hi"), tokenize=False, add_generation_prompt=True).endswith("u#hi\na#")
    assert all(row["query"].endswith("\na#") for row in read_rows(run_dir / "completions" / "step_000001.jsonl"))


# --- overlong prompts ------------------------------------------------------------------------------------------------


def test_overlong_prompts(algo, tmp_path):
    texts = ["a" * 5, "b" * 4 + "c" * 6, "d" * 8]
    path = write_rows(tmp_path / "train.jsonl", [{"prompt": text, "answer": "1"} for text in texts])
    tokenizer, flags = tokenizer_with_bos(None), {"max_prompt_length": 8}
    rows, summary = load(algo, path, tokenizer, **flags)
    assert [row["prompt"] for row in rows] == texts[:1] and summary.endswith(": 1 rows, 2 too long left out")
    rows, summary = load(algo, path, tokenizer, **flags, overlong_prompts="truncate")
    assert summary.endswith(": 3 rows, 2 too long truncated")
    assert [row["prompt"] for row in rows] == [texts[0], "b" + "c" * 6, "d" * 7]  # the end, behind the BOS
    assert [len(row["input_ids"]) for row in rows] == [6, 8, 8]
    assert all(row["input_ids"][0] == 2 and row["input_ids"].count(2) == 1 for row in rows)
    with pytest.raises(algo.UserError, match=r"train.jsonl row 2: 11 tokens, more than --max-prompt-length 8"):
        load(algo, path, tokenizer, **flags, overlong_prompts="error")
    rows, _ = load(algo, path, make_tokenizer(), max_prompt_length=7, overlong_prompts="truncate")
    assert [row["prompt"] for row in rows] == [texts[0], "b" + "c" * 6, "d" * 7]  # without a BOS


# --- evaluation only -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["dataset", "eval_dataset"])
def test_evaluation_only_scores_every_row_and_writes_the_completions(algo, toy_args, tmp_path, flag):
    path = write_rows(tmp_path / "questions.jsonl", toy_rows(7))
    run_dir = algo.main(toy_args(total_iterations=0, **{flag: path}))
    (metrics,) = read_metrics(run_dir)
    rows = read_rows(run_dir / "completions" / "eval_000000.jsonl")
    assert {row["prompt"] for row in rows} == {row["question"] for row in toy_rows(7)} and len(rows) == 7
    for name in ("score", "score_sampled"):
        assert metrics[f"eval/{name}"] == pytest.approx(sum(row[name] for row in rows) / 7, abs=1e-6)
    assert not (run_dir / "final").exists() and not (run_dir / "best").exists()


def test_evaluation_only_needs_rows(algo, toy_args, tmp_path):
    table = datasets.Dataset.from_list(toy_rows(3))
    datasets.DatasetDict(train=table).save_to_disk(tmp_path / "saved")
    with pytest.raises(SystemExit, match=r"error: --eval-dataset .*saved has no test split"):
        algo.main(toy_args(total_iterations=0, dataset=str(tmp_path / "saved")))


def test_the_printed_command_scores_what_was_saved(algo, toy_run, capsys, monkeypatch):
    """As a user would run it; here the flags of the run come from its Args instead of the command line."""
    monkeypatch.setattr(algo.sys, "argv", [f"{algo.__name__}.py", "--lr", "0.001", "--run-name", "first one"])
    run_dir, metrics = toy_run()
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  score "))
    command = f"python {algo.__name__}.py --lr 0.001 --run-name 'first one' --model {run_dir}/final"
    own = " --shard-group-size None" if algo.__name__ == "ppo_llm_fsdp" else ""
    assert line == f"  score {command} --total-iterations 0 --resume None --run-name {run_dir.name}-score{own}"
    _, again = toy_run(model=f"{run_dir}/final", total_iterations=0, run_name="score")
    for name in ("eval/score", "eval/score_sampled", "eval/length_mean"):
        assert again[0][name] == metrics[-1][name]


# --- a full run ------------------------------------------------------------------------------------------------------


def test_a_run_on_chats_with_a_chat_model(algo, toy_args, tmp_path):
    """verl's parquet, a model with a chat template, a reward that asks for columns and messages."""
    model, tokenizer = make_model(tmp_path / "model"), tokenizer_with_bos()
    tokenizer.save_pretrained(model)
    answers = [{"style": "rule", "ground_truth": str(i)} for i in range(8)]
    rows = [VERL | {"prompt": chat(f"say {i}"), "reward_model": answer} for i, answer in enumerate(answers)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    datasets.Dataset.from_list(rows[:3]).to_parquet(tmp_path / "test.parquet")
    (tmp_path / "r.py").write_text(
        "def f(prompts, responses, answers, messages, data_source, extra_info):\n"
        "    assert all(p == '<eos2>u#' + m[0]['content'] + '\\na#' for p, m in zip(prompts, messages))\n"
        "    assert all(m[0]['content'] == f'say {a}' for m, a in zip(messages, answers))\n"
        "    assert set(data_source) == {'x'} and extra_info[0]['split'] == 'train'\n"
        "    return [float(len(r)) for r in responses]\n"
    )
    run_dir = algo.main(toy_args(model=model, dataset=str(tmp_path / "train.parquet"), reward=f"{tmp_path}/r.py:f"))
    assert len(read_metrics(run_dir)) == 3
    AutoModelForCausalLM.from_pretrained(run_dir / "final")
    assert (run_dir / "final" / "critic").is_dir() == has_critic(algo)


# --- numbers ---------------------------------------------------------------------------------------------------------

AWKWARD = [  # response, gold, what a person would say
    ("#### 18", "18", 1),
    ("#### -5", "-5", 1),
    ("#### 5", "-5", 0),
    ("#### +5", "5", 1),
    ("#### - 5", "-5", 1),
    ("#### 1,234", "1234", 1),
    ("#### 1,234,567", "1,234,567", 1),
    ("#### 1234", "1,234", 1),
    ("#### $42", "42", 1),
    ("#### -$42", "-42", 1),
    ("#### $-42", "-42", 1),
    ("#### €3.50", "3.5", 1),
    ("#### £7", "7", 1),
    ("#### 42 dollars", "42", 1),
    ("#### 42%", "42", 1),
    ("#### 42.", "42", 1),
    ("#### 42.0", "42", 1),
    ("#### 42.50", "42.5", 1),
    ("#### .5", "0.5", 1),
    ("#### 42.1", "42", 0),
    ("#### 7 or rather #### 8", "8", 1),
    ("#### 7 or rather #### 8", "7", 0),
    ("7\n####8\n", "8", 1),
    ("The answer is 8", "8", 0),
    ("####", "0", 0),
    ("#### eight", "8", 0),
    ("", "8", 0),
    ("#### 8 #### ", "8", 0),
    ("#### the answer is 8", "8", 0),
    ("#### 0", "-0", 1),
    ("####\n12", "so 3 x 4\n#### 12", 1),
    ("#### 12", 12, 1),
]


@pytest.mark.parametrize("response, gold, score", AWKWARD)
def test_awkward_answers_score_as_a_person_would(algo, response, gold, score):
    assert algo.gsm8k(["p"], [response], [gold]) == [score]
