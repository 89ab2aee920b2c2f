"""Bad input ends in one sentence that names the flag, file or row and how to mend it, and leaves no run folder."""

import json
import re
from pathlib import Path

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertModel,
)

from .helpers_before import (
    SCRIPTS,
    has_critic,
    load_script,
    make_model,
    make_tokenizer,
    only_grpo,
    only_ppo,
    toy_rows,
    write_rows,
)

SIZES = "max_prompt_length max_response_length batch_size group_size ppo_epochs minibatch_size microbatch_tokens"
SIZES += " rollout_batch_size"
POSITIVE = f"{SIZES} is_cap temperature max_grad_norm kl_target kl_horizon target_kl top_p"
NOT_NEGATIVE = "lora_rank total_iterations top_k lr warmup_iterations weight_decay clip_low"
NOT_NEGATIVE += " seed clip_high missing_eos_penalty entropy_coef kl_reward_coef kl_loss_coef eval_every"


def for_each_script(names, shared, ppo=(), grpo=(), fsdp=()):
    """Parametrises a test with the values that concern all scripts, on one, and those that concern one of them."""
    own = {"grpo_llm": [*shared, *grpo], "ppo_llm_fsdp": [*ppo, *fsdp]}
    cases = [(script, value) for script in SCRIPTS for value in own[script]]
    cases = [(script, *value) if isinstance(value, tuple) else (script, value) for script, value in cases]
    return pytest.mark.parametrize(f"algo, {names}", cases, indirect=["algo"])


@pytest.fixture(scope="module", params=["grpo_llm"])
def algo(request):
    """One script: both have this in the same words but where a test says otherwise."""
    return load_script(request.param)


@pytest.fixture
def refusal(algo, toy_args, tmp_path, monkeypatch):
    """refusal(**changes) -> the error message of a run that must not get as far as a rollout."""
    monkeypatch.setattr(algo, "generate", lambda *args, **kwargs: pytest.fail("the run began"))

    def run(**changes):
        with pytest.raises(SystemExit) as error:
            algo.main(toy_args(**changes))
        message = error.value.code  # a text: Python prints it and exits with 1
        assert isinstance(message, str) and message.startswith("error: ") and "\n" not in message
        assert "Traceback" not in message and len(message) < 500
        assert not any((tmp_path / "runs").glob("*"))
        return message

    return run


def says(message, *parts):
    assert [part for part in parts if str(part) not in message] == [], message


# --- flags -----------------------------------------------------------------------------------------------------------


@for_each_script("name", POSITIVE.split(), ppo=["value_clip"], fsdp=["shard_group_size"])
@pytest.mark.parametrize("value", [0, -2])
def test_what_must_be_positive(refusal, name, value):
    says(refusal(**{name: value}), f"--{name.replace('_', '-')} is {value}", "more than 0")


@for_each_script(
    "name",
    NOT_NEGATIVE.split(),
    ppo=["critic_lr", "critic_warmup_iterations", "gamma", "lam"],
    grpo=["max_resamples", "overlong_buffer", "overlong_penalty"],
    fsdp=["save_every"],
)
def test_what_must_not_be_negative(refusal, name):
    says(refusal(**{name: -1}), f"--{name.replace('_', '-')} is -1", "0 or more")


@for_each_script(
    "name, value", [("top_p", 1.5), ("dual_clip", 1.0), ("dual_clip", -3)], ppo=[("gamma", 1.1), ("lam", 2)]
)
def test_what_has_a_limit(refusal, name, value):
    says(
        refusal(**{name: value}),
        f"--{name.replace('_', '-')} is {value}",
        "more than 1" if name == "dual_clip" else "most 1",
    )


@for_each_script(
    "name",
    ["lr", "temperature", "max_grad_norm", "kl_reward_coef", "missing_eos_penalty"],
    ppo=["gamma"],
    grpo=["overlong_penalty"],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_must_be_finite(refusal, name, value):
    says(refusal(**{name: value}), f"--{name.replace('_', '-')} is {value}")


SHAPES = [
    (8, 1, 3),
    (8, 1, 16),
    (10, 1, 4),
    (8, 3, 4),
    (8, 4, 6),
    (6, 2, 10),
    (12, 2, 7),
    (2, 1, 8),
    (1, 1, 2),
    (9, 4, 24),
]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_indivisible_batches_name_legal_sizes(algo, toy_args, shape, world_size):
    names = "batch_size", "group_size", "minibatch_size"
    alone = {} if has_critic(algo) else {"estimator": "reinforce_pp"}  # the others need groups
    args = toy_args(**dict(zip(names, shape)), **alone)
    try:
        algo.check_args(args, world_size)
    except algo.UserError as error:
        message = str(error)
    else:
        batch, group, mini = shape
        assert batch * group % mini == 0 and mini % (group * world_size) == 0
        return
    says(message, *(f"--{name.replace('_', '-')} {size}" for name, size in zip(names, shape)))
    args.batch_size, args.minibatch_size = map(
        int, re.search(r"are: --batch-size (\d+) --mini\S+ (\d+)$", message).groups()
    )
    algo.check_args(args, world_size)  # what it proposes is accepted
    assert abs(args.batch_size - shape[0]) < world_size


@pytest.mark.parametrize(
    "changes, flag", [({"batch_size": 9, "group_size": 2}, "--batch-size 9"), ({"group_size": 3}, "--group-size 3")]
)
def test_indivisible_batches_stop_the_run(refusal, changes, flag):
    says(refusal(**changes), flag, "--minibatch-size 4", "not divisible", "the nearest sizes that are")


@pytest.mark.parametrize(
    "changes", [{"kl_reward_coef": 0.0}, {"kl_horizon": 1.6}, {"kl_horizon": 1.0}, {"kl_target": 0.0}]
)
def test_adaptive_kl_needs_a_coefficient_and_a_horizon(refusal, changes):
    message = refusal(**{"kl_controller": "adaptive", "kl_reward_coef": 0.1, "kl_horizon": 100.0} | changes)
    says(message, f"--{next(iter(changes)).replace('_', '-')}", next(iter(changes.values())))


@only_grpo
@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_groups_of_one_have_nothing_to_compare(refusal, estimator):
    changes = {"estimator": estimator, "group_size": 1}
    says(refusal(**changes), "--group-size 1", f"--estimator {estimator}", "2 or more")
    says(refusal(**changes, dynamic_sampling=True), "--group-size 1", "2 or more")


@only_grpo
def test_dynamic_sampling_needs_groups(algo, refusal, toy_args):
    changes = {"estimator": "reinforce_pp", "group_size": 1}
    says(refusal(**changes, dynamic_sampling=True), "--group-size 1", "--dynamic-sampling", "2 or more")
    algo.check_args(toy_args(**changes), 1)  # alone it does not


@only_grpo
def test_overlong_buffer_is_within_the_response(algo, refusal, toy_args):
    says(refusal(overlong_buffer=11), "--overlong-buffer 11", "--max-response-length 10", "cannot be longer")
    algo.check_args(toy_args(overlong_buffer=10), 1)


def test_prompt_template_without_prompt(refusal):
    says(refusal(prompt_template="Question: {question}"), "--prompt-template", "{prompt}")


@pytest.mark.parametrize("name", ["../out", "a/b", "..", ".", "", "/tmp/out"])
def test_run_name_stays_in_the_output_folder(refusal, tmp_path, name):
    says(refusal(run_name=name), "--run-name", "--output-dir")
    assert not (tmp_path / "out").exists()


def test_an_existing_run_is_never_overwritten(algo, toy_args, tmp_path):
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("precious")
    with pytest.raises(SystemExit, match=r"error: .*mine exists; choose another --run-name"):
        algo.main(toy_args(run_name="mine"))
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]
    assert (folder / "metrics.jsonl").read_text() == "precious"


def test_more_processes_than_gpus(refusal, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    says(refusal(), "4 processes", "2 GPUs", "--num_processes 2")


# --- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["dataset", "eval_dataset"])
def test_missing_data(refusal, tmp_path, flag):
    for name in ("nowhere.jsonl", "nowhere.parquet"):
        says(refusal(**{flag: str(tmp_path / name)}), tmp_path / name, "missing")


def test_unknown_dataset_name(algo, refusal, monkeypatch):
    def load_dataset(*args, **kwargs):
        raise FileNotFoundError("Dataset 'nobody/nothing' doesn't exist on the Hub")

    monkeypatch.setattr(algo.datasets, "load_dataset", load_dataset)
    says(refusal(dataset="nobody/nothing"), "dataset nobody/nothing", "hub id", "doesn't exist")


@pytest.mark.parametrize(
    "name, text",
    [("a.jsonl", ""), ("a.jsonl", "\n"), ("a.csv", "question,answer\n"), ("a.json", "[]"), ("a.jsonl", "{broken\n")],
)
def test_data_without_rows(refusal, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    says(refusal(dataset=str(tmp_path / name)), tmp_path / name)


def test_folder_that_is_no_dataset(refusal, tmp_path):
    (tmp_path / "folder").mkdir()
    says(refusal(dataset=str(tmp_path / "folder")), tmp_path / "folder", "saved folder")


@pytest.mark.parametrize("changes", [{"prompt_column": "text"}, {"answer_column": "gold"}])
def test_missing_column(refusal, toy_data, changes):
    (flag, column), *_ = changes.items()
    says(refusal(**changes), f"--{flag.replace('_', '-')}", column, toy_data, "question, answer")


def test_no_prompt_column(refusal, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a", "answer": "#### 1"}])
    says(refusal(dataset=path), "--prompt-column", path, "text, answer")


@pytest.mark.parametrize("value", [None, "", 7, ["a"]], ids=repr)
def test_prompt_that_is_no_text(refusal, tmp_path, value):
    rows = [{"prompt": value, "answer": "1"}] if value in (7, ["a"]) else [{"prompt": "a"}, {"prompt": value}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    says(refusal(dataset=path), f"{path} row {len(rows)}", "column prompt")


def test_answer_without_a_number(refusal, tmp_path):
    rows = toy_rows(5) + [{"question": "how many?", "answer": "so there are #### many"}] + toy_rows(3)
    path = write_rows(tmp_path / "rows.jsonl", rows)
    says(refusal(dataset=path, reward="gsm8k"), f"{path} row 6", "####", "many")


@pytest.mark.parametrize("reward", ["gsm8k", "exact"])
def test_reward_that_needs_answers(refusal, tmp_path, reward):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    says(refusal(dataset=path, reward=reward), f"{path} row 1", f"--reward {reward}", "--answer-column")


def test_every_prompt_too_long(refusal, toy_data):
    says(refusal(max_prompt_length=5), toy_data, "--max-prompt-length 5", "the shortest has 13 tokens")


def chat(*roles):
    return [{"role": role, "content": "what is it?"} for role in roles]


BAD_ROWS = {  # what is wrong: (the second of three rows, what the message says)
    "nothing": (None, ["row 2", "column prompt should hold text or a chat", "None"]),
    "number": ({"prompt": 7, "answer": "1"}, ["row 2", "should hold text or a chat", "7"]),
    "empty chat": ({"prompt": [], "answer": "1"}, ["row 2", "should hold text or a chat", "[]"]),
    "unknown role": ({"prompt": chat("wizard"), "answer": "1"}, ["row 2", "system", "user", "wizard"]),
    "no role": ({"prompt": [{"content": "x"}], "answer": "1"}, ["row 2", "has a role"]),
    "list of texts": ({"prompt": ["x"], "answer": "1"}, ["row 2", "has a role", "not x"]),
    "content in parts": (
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "answer": "1"},
        ["row 2", "text as its content"],
    ),
    "answered": (
        {"prompt": chat("user", "assistant"), "answer": "1"},
        ["row 2", "end with the message to be answered"],
    ),
    "no answer": ({"prompt": chat("user")}, ["row 2", "needs an answer", "--answer-column"]),
    "other type of answer": ({"prompt": chat("user"), "answer": ["1"]}, ["row 2", "list", "['1']", "str before it"]),
}


def test_preference_pairs_of_texts_need_a_prompt(refusal, tmp_path):
    """The chosen text holds the answer too: trained on, it would be part of the prompt."""
    path = write_rows(tmp_path / "rows.jsonl", [{"chosen": "why? because", "rejected": "why? no"}])
    says(refusal(dataset=path), "row 1: column chosen should hold a chat", "prompts should have a column", "why?")


@pytest.mark.parametrize("ending", ["jsonl", "json"])
@pytest.mark.parametrize("what", BAD_ROWS)
def test_bad_rows(refusal, tmp_path, what, ending):
    row, parts = BAD_ROWS[what]
    good, path = {"prompt": chat("user"), "answer": "x"}, tmp_path / f"rows.{ending}"
    lines = [json.dumps(x) for x in (good, row, good)]
    path.write_text("\n".join(lines) if ending == "jsonl" else f"[{','.join(lines)}]")
    says(refusal(dataset=str(path), reward="exact", chat_template="none"), path, *parts)


def test_bad_parquet_files(refusal, tmp_path):
    table = datasets.Dataset.from_list([{"text": "a", "label": 1}])
    table.to_parquet(tmp_path / "columns.parquet")
    says(refusal(dataset=str(tmp_path / "columns.parquet")), "columns.parquet has no column question, prompt or chosen")
    says(refusal(dataset=str(tmp_path / "columns.parquet")), "it has text, label")
    good = tmp_path / "columns.parquet"
    (tmp_path / "cut.parquet").write_bytes(good.read_bytes()[:-60])
    says(refusal(dataset=str(tmp_path / "cut.parquet")), tmp_path / "cut.parquet", "arquet")
    says(refusal(eval_dataset=str(tmp_path / "cut.parquet")), tmp_path / "cut.parquet")


def test_chat_template_that_is_no_file(refusal, tmp_path):
    says(refusal(chat_template=str(tmp_path / "no.jinja")), f"--chat-template {tmp_path / 'no.jinja'}", "none")


def test_a_prompt_too_long_is_named_when_asked_for(refusal, toy_data):
    says(refusal(max_prompt_length=15, overlong_prompts="error"), f"{toy_data} row ", "--max-prompt-length 15")


def test_a_tracker_that_does_not_start(algo, toy_args, monkeypatch):
    def fail(*args):
        raise OSError("no network")

    monkeypatch.setattr(algo.Accelerator, "init_trackers", fail)
    with pytest.raises(SystemExit, match=r"error: --track tensorboard cannot start .*no network"):
        algo.main(toy_args())


def test_wandb_that_is_not_installed(algo, refusal, monkeypatch):
    monkeypatch.setattr(algo, "find_spec", lambda name: None)
    says(refusal(track="wandb"), "--track wandb", "pip install wandb")


# --- reward ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", ["gsm9k", "nowhere.py:f", "reward.py", "rewards:f"])
def test_unknown_reward(refusal, reward):
    says(refusal(reward=reward), f"--reward {reward}")


def test_reward_name_lists_what_there_is(refusal):
    says(refusal(reward="gsm9k"), "gsm8k", "exact", "file.py:function")


@pytest.mark.parametrize(
    "text, why", [("x = 1", "no function f"), ("f = 1", "no function f"), ("1/0", "ZeroDivisionError")]
)
def test_reward_file_without_the_function(refusal, tmp_path, text, why):
    (tmp_path / "r.py").write_text(text + "\n")
    says(refusal(reward=f"{tmp_path / 'r.py'}:f"), f"--reward {tmp_path / 'r.py'}:f", why)


BAD_REWARDS = {
    "{}['key']": "KeyError",
    "[float('nan')] * len(prompts)": "nan",
    "[float('-inf')] * len(prompts)": "inf",
    "[1.0] * (len(prompts) + 1)": "scores for",
    "None": "TypeError",
    "['good'] * len(prompts)": "ValueError",
}


@pytest.mark.parametrize("result", BAD_REWARDS)
def test_reward_is_tried_before_the_model_is_loaded(refusal, algo, tmp_path, monkeypatch, result):
    monkeypatch.setattr(algo, "load_causal_lm", lambda name: pytest.fail("the model was loaded"))
    (tmp_path / "r.py").write_text(f"def f(prompts, responses, answers):\n    return {result}\n")
    says(refusal(reward=f"{tmp_path / 'r.py'}:f", run_name="mine"), "the reward", BAD_REWARDS[result])


@pytest.mark.parametrize("result", BAD_REWARDS)
@pytest.mark.parametrize("evaluates", [True, False])
def test_reward_that_fails_stops_the_run_with_the_row_shown(algo, toy_args, tmp_path, result, evaluates):
    # Fine with the empty responses that it is tried on before the run.
    body = f"return {result} if any(responses) else [0.0] * len(prompts)"
    (tmp_path / "r.py").write_text(f"def f(prompts, responses, answers):\n    {body}\n")
    data = {} if evaluates else {"dataset": write_rows(tmp_path / "rows.jsonl", toy_rows(8))}
    with pytest.raises(SystemExit) as error:
        algo.main(toy_args(reward=f"{tmp_path / 'r.py'}:f", run_name="r", **data))
    message = error.value.code
    says(message, "error: the reward", BAD_REWARDS[result])
    if "scores for" not in message:
        says(message, "what is")  # the prompt at fault
    assert "\n" not in message.replace("\\n", "")
    assert not (tmp_path / "runs" / "r" / "final").exists()


# --- models ----------------------------------------------------------------------------------------------------------


def test_missing_model(refusal, tmp_path):
    says(refusal(model=str(tmp_path / "nowhere")), f"--model {tmp_path / 'nowhere'}")


@only_ppo
def test_missing_critic(refusal, tmp_path):
    says(refusal(critic_model=str(tmp_path / "nowhere")), f"--critic-model {tmp_path / 'nowhere'}")


def test_a_tokenizer_with_more_tokens_than_the_model_knows(refusal, tmp_path):
    model = make_model(tmp_path / "model")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(model)
    says(refusal(model=model), "--model: it knows 47 tokens", "tokenizer", "has 48")


@only_ppo
def test_a_critic_that_knows_fewer_tokens(refusal, tmp_path):
    critic = make_model(tmp_path / "critic", vocab_size=40)
    says(refusal(critic_model=critic), "--critic-model: it knows 40 tokens", "tokenizer of --model has 47")


def save_bert(folder, cls):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    cls(BertConfig(vocab_size=len(make_tokenizer()), **sizes)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def save_classifier(folder, **config):
    make_model(folder, **config)
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(folder)


def save_pickle(folder):
    make_model(folder)
    (Path(folder) / "model.safetensors").unlink()
    torch.save(AutoModelForCausalLM.from_config, Path(folder) / "pytorch_model.bin")


@pytest.mark.parametrize(
    "save",
    [
        lambda f: save_bert(f, BertModel),
        lambda f: save_bert(f, BertForMaskedLM),
        save_classifier,
        lambda f: save_classifier(f, tie_word_embeddings=True),  # lacks no weight of a language model
        save_pickle,
    ],
    ids=["bert", "masked-lm", "classifier", "tied classifier", "no safetensors"],
)
def test_model_that_is_no_causal_language_model(refusal, tmp_path, save):
    save(tmp_path / "m")
    says(refusal(model=str(tmp_path / "m")), f"--model {tmp_path / 'm'}: ")


def test_model_without_tokenizer(refusal, tmp_path):
    make_model(tmp_path / "m")
    for path in (tmp_path / "m").glob("token*"):
        path.unlink()
    says(refusal(model=str(tmp_path / "m")), f"--model {tmp_path / 'm'}", "tokenizer")


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_more_tokens_than_positions(refusal, tmp_path, arch):
    folder = make_model(
        tmp_path / "m", arch, **{"llama": {"max_position_embeddings": 32}, "gpt2": {"n_positions": 32}}[arch]
    )
    says(
        refusal(model=folder, max_response_length=20), "--max-response-length 20", f"--model {folder} has 32 positions"
    )


def test_output_folder_that_is_a_file(algo, toy_args, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match=r"error: the run folder .*file/mine cannot be written"):
        algo.main(toy_args(output_dir=str(tmp_path / "file"), run_name="mine"))


# --- sharding and checkpoints ----------------------------------------------------------------------------------------

only_fsdp = pytest.mark.parametrize("algo", ["ppo_llm_fsdp"], indirect=True)


@only_fsdp
def test_shard_groups_of_equal_size(algo, toy_args, refusal):
    says(refusal(shard_group_size=2), "--shard-group-size 2", "1 processes")
    with pytest.raises(algo.UserError, match="--shard-group-size 3 does not divide the 4 processes"):
        algo.check_args(toy_args(shard_group_size=3), 4)
    algo.check_args(toy_args(shard_group_size=2), 4)


def test_resume_is_not_for_evaluation(refusal, tmp_path):
    says(refusal(resume=str(tmp_path), total_iterations=0), f"--resume {tmp_path}", "--total-iterations 0")


@pytest.mark.parametrize("place", ["nowhere", "empty", "empty/file", "/", ""])
def test_resume_needs_a_checkpoint(refusal, tmp_path, place):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "file").write_text("")
    place = str(tmp_path / place) if place.strip("/") else place
    says(refusal(resume=place), f"--resume {place}: no checkpoint", "checkpoints/step_")


@pytest.fixture
def checkpoint(algo, toy_args, tmp_path):
    run_dir = algo.main(toy_args(output_dir=str(tmp_path / "other"), run_name="run", save_every=1, total_iterations=1))
    AcceleratorState._reset_state(True)
    return run_dir / "checkpoints" / "step_000001"


@pytest.mark.parametrize("damage", ["missing", "cut off", "no progress", "other model"])
def test_a_damaged_checkpoint_is_refused_and_nothing_is_lost(checkpoint, refusal, tmp_path, damage):
    metrics = checkpoint.parents[1] / "metrics.jsonl"
    (file,) = checkpoint.glob("*.safetensors")
    before, changes = metrics.read_text(), {}
    if damage == "missing":
        file.unlink()
    elif damage == "cut off":
        file.write_bytes(file.read_bytes()[:-1000])
    elif damage == "no progress":
        (checkpoint / "progress.json").write_text("{")
    else:
        changes = {"model": make_model(tmp_path / "m", hidden_size=16)}
    message = refusal(resume=str(checkpoint), **changes)
    blamed = {"missing": file.name, "cut off": file.name, "no progress": f"--resume {checkpoint}: "}
    says(message, blamed.get(damage, "--model: it was "))
    assert metrics.read_text() == before and (checkpoint.parents[1] / "final").is_dir()
