"""Before PPO: notes/variants/sft.py and preferences.py, whose models the scripts and reward_model.py take."""

import math
import sys

import pytest
import torch
from conftest import ROOT, forked, make_model, path_of, read_metrics, read_rows, refusal, run_main, write_rows
from datasets import Dataset
from ranks import load_script
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

FILES = ROOT / "notes" / "variants"
ROWS = [{"question": f"what is {i}?", "answer": " " + "abc"[: 1 + i % 3]} for i in range(6)]
PAIRS = [{"prompt": f"what is {i}?", "chosen": " " + "abc"[: 1 + i % 3], "rejected": f" no{i}"} for i in range(6)]
CHAT = "{% for m in messages %}{{ m.role[0] }}#{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a#{% endif %}"
FLAGS = {"batch_size": 4, "microbatch_tokens": 64, "total_steps": 3, "lr": 1e-2, "track": "none"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, rows and pairs."""
    folder = tmp_path_factory.mktemp("pipeline")
    make_model(folder / "model")
    write_rows(folder / "rows.jsonl", ROWS)
    write_rows(folder / "pairs.jsonl", PAIRS)
    return folder


@pytest.fixture(scope="module")
def run(place):
    """run(name of the file, run's name, **flags): the run folder, by this process alone."""

    def call(name, run_name, **flags):
        return run_main(load_script(FILES / f"{name}.py"), every(place, name, run_name) | flags)

    sys.path.insert(0, str(FILES))
    yield call
    sys.path.remove(str(FILES))


def every(place, name, run_name):
    own = {"sft": {"dataset": f"{place}/rows.jsonl", "eval_dataset": f"{place}/rows.jsonl", "reward": "none"}}
    own["preferences"] = {"dataset": f"{place}/pairs.jsonl", "eval_dataset": f"{place}/pairs.jsonl"}
    own["preferences"] |= {"prompt_column": "prompt"}
    return FLAGS | own[name] | {"model": f"{place}/model", "output_dir": f"{place}/runs", "run_name": run_name}


def logprobs_of(folder, prompt, answer):
    """Of each token of the answer and of its EOS, (T,)."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    before, after = tokenizer(prompt)["input_ids"], [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
    logits = model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1]
    return logits.log_softmax(-1)[range(len(after)), after].detach()


def scores_of(folder, texts):
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return torch.tensor([model(torch.tensor([tokenizer(text)["input_ids"]])).logits.item() for text in texts])


def test_the_losses_by_hand_on_three_rows(place, run):
    """Of SFT over all tokens of three answers; of a reward model and of DPO, after a step, on three pairs held out."""
    folder = run("sft", "three", train_rows=3, batch_size=3, total_steps=1)
    by_hand = torch.cat([logprobs_of(place / "model", row["question"], row["answer"]) for row in ROWS[:3]])
    assert read_metrics(folder)[1]["loss"] == pytest.approx(-by_hand.mean().item(), abs=1e-5)

    folder = run("preferences", "rm", eval_rows=3)
    sides = [scores_of(folder / "final", [p["prompt"] + p[side] for p in PAIRS[:3]]) for side in ("chosen", "rejected")]
    check_pairs(read_metrics(folder), *sides)
    folder = run("preferences", "dpo", eval_rows=3, dpo_beta=0.3)
    sides = [[], []]
    for pair in PAIRS[:3]:
        for side, name in zip(sides, ("chosen", "rejected")):
            after, before = (
                logprobs_of(x, pair["prompt"], pair[name]).sum() for x in (folder / "final", place / "model")
            )
            side.append(0.3 * (after - before))
    check_pairs(read_metrics(folder), *map(torch.stack, sides))


def check_pairs(metrics, chosen, rejected):
    assert metrics[0]["eval/loss"] == pytest.approx(math.log(2)) and metrics[0]["eval/accuracy"] == 0.5
    assert metrics[-1]["eval/loss"] == pytest.approx(-logsigmoid(chosen - rejected).mean().item(), abs=1e-5)
    assert metrics[-1]["eval/accuracy"] == pytest.approx((chosen > rejected).float().mean().item())
    assert metrics[-1]["eval/margin"] == pytest.approx((chosen - rejected).mean().item(), abs=1e-5)
    assert metrics[-1]["eval/loss"] < 0.6


@pytest.mark.parametrize(
    "name, flags", [("sft", {}), ("preferences", {}), ("preferences", {"dpo_beta": 0.3, "lora_rank": 2})]
)
def test_one_process_and_two_agree(place, run, name, flags):
    """In their numbers and in the models they save."""
    flags |= {"train_rows": 5, "batch_size": 6, "eval_rows": 5}
    one = run(name, f"one-{name}{len(flags)}", **flags)
    two = every(place, name, f"two-{name}{len(flags)}") | flags
    code, console = forked(FILES / f"{name}.py", two)
    assert code == 0, console
    two = one.with_name(two["run_name"])
    for alone, together in zip(read_metrics(one), read_metrics(two), strict=True):
        assert together == pytest.approx(alone, rel=1e-5, abs=1e-5)
    alone, together = (load_file(folder / "final" / "model.safetensors") for folder in (one, two))
    assert all(torch.allclose(together[key], alone[key], atol=1e-5) for key in alone)


@pytest.mark.parametrize("rank, template", [(0, None), (2, CHAT)])
def test_the_scripts_take_what_they_save(place, run, monkeypatch, tmp_path, rank, template):
    """Policy, critic and reward, with LoRA, too: a critic's last value is the score of the reward model."""
    names = {}
    if template:
        (tmp_path / "chat.jinja").write_text(template)
        names["chat_template"] = f"{tmp_path}/chat.jinja"
    policy = run("sft", f"policy{rank}", lora_rank=rank, total_steps=30, **names) / "final"
    model = run("preferences", f"model{rank}", lora_rank=rank, model=str(policy)) / "final"
    monkeypatch.setenv("REWARD_MODEL", str(model))
    monkeypatch.delitem(sys.modules, "reward_model", raising=False)
    flags = {"model": str(policy), "critic_model": str(model), "reward": f"{FILES}/reward_model.py:reward_model"}
    flags |= {"dataset": f"{place}/rows.jsonl", "max_response_length": 8, "batch_size": 4, "minibatch_size": 4}
    flags |= {"total_iterations": 1, "output_dir": str(tmp_path), "run_name": "ppo", "track": "none", "save_every": 0}
    rows = read_rows(run_main(load_script(path_of("ppo_llm")), flags) / "completions" / "step_000001.jsonl")
    for row in rows if template is None else []:
        if not row["truncated"]:
            assert row["batch"]["values"][-2] == pytest.approx(row["score"], abs=1e-4)
    assert len({row["score"] for row in rows}) > 1


def test_bad_rows_are_refused_in_a_sentence(place, run):
    def refused(name, row, **flags):
        data = write_rows(place / "bad.jsonl", [row])
        return refusal(lambda: run(name, "bad", dataset=data, eval_dataset=None, **flags))

    assert "there is no answer to 'a'" in refused("sft", {"question": "a", "answer": ""})
    long = refused("sft", {"question": "a", "answer": "b" * 9}, max_response_length=9)
    assert "an answer has 10 tokens with its EOS, more than --max-response-length 9: 'bbb" in long
    pair = {"prompt": "a", "chosen": "b", "rejected": "b"}
    assert "row 1: chosen and rejected are equal: 'b'" in refused("preferences", pair)
    pair |= {"rejected": "c"}
    assert "row 1: no common prompt before 'b' and 'c'" in refused("preferences", pair, prompt_column=None)
    chats = [[{"role": "user", "content": x}, {"role": "assistant", "content": "c"}] for x in "ab"]
    said = refused("preferences", dict(zip(("chosen", "rejected"), chats)), prompt_column=None)
    assert "row 1: no common prompt before 'c' and 'c'" in said
    assert "more than --max-response-length 9: 'bbb" in refused(
        "preferences", pair | {"chosen": "b" * 9}, max_response_length=9
    )


def test_pairs_of_all_forms_are_the_same_pair(place, run):
    """Answers with a prompt, whole texts, chats: what one reads is what the others read."""
    preferences = load_script(FILES / "preferences.py")
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    chat = [{"role": "user", "content": "what is 1?"}]
    answers = {"chosen": " not a", "rejected": " not b c"}
    forms = [{"prompt": "what is 1?"} | answers, {side: "what is 1?" + text for side, text in answers.items()}]
    forms += [{side: [*chat, {"role": "assistant", "content": text}] for side, text in answers.items()}]
    found = []
    for beta in 0, 1:
        for form in forms:
            args = preferences.Args(model="", dpo_beta=beta, prompt_column="prompt" if "prompt" in form else None)
            (row,) = preferences.read_pairs("data", Dataset.from_list([form]), args, tokenizer)
            found.append([side["input_ids"] + response.ids for side, response in row["sides"]])
        assert found[-1] == found[-2] == found[-3]
    assert found[0] == found[-1]
