"""Before PPO: notes/variants/sft.py and preferences.py, and that scripts and reward_model.py take what they save."""

import sys

import pytest
import torch
from datasets import Dataset
from helpers import ROOT, forked, make_model, path_of, read_metrics, read_rows, refusal, run_main, write_rows
from ranks import load_script
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import AutoModelForSequenceClassification as reward_model

FILES = ROOT / "notes" / "variants"
ROWS = [{"question": f"what is {i}?", "answer": " " + "abc"[: 1 + i % 3]} for i in range(6)]
PAIRS = [{"prompt": row["question"], "chosen": row["answer"], "rejected": f" no{i}"} for i, row in enumerate(ROWS)]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(name of the file, run's name, ranks, **flags): the run folder."""
    make_model(tmp_path / "model")
    write_rows(tmp_path / "sft.jsonl", ROWS)
    write_rows(tmp_path / "preferences.jsonl", PAIRS)
    monkeypatch.syspath_prepend(str(FILES))

    def call(name, run_name, ranks=1, **changes):
        data = f"{tmp_path}/{name}.jsonl"
        flags = {"model": f"{tmp_path}/model", "dataset": data, "eval_dataset": data, "track": "none", "lr": 1e-2}
        flags |= {"batch_size": 4, "microbatch_tokens": 32, "total_steps": 3, "output_dir": str(tmp_path)}
        flags |= {"reward": "none"} if name == "sft" else {"prompt_column": "prompt"}
        flags |= {"run_name": run_name} | changes
        if ranks == 1:
            return run_main(load_script(FILES / f"{name}.py"), flags)
        assert forked(FILES / f"{name}.py", flags, ranks)[0] == 0
        return tmp_path / run_name

    return call


def logprobs_of(model, prompt, answer):
    """Of each token of the answer and of its EOS, (T,)."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    before, after = tokenizer(prompt)["input_ids"], [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
    logits = model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1]
    return logits.log_softmax(-1)[range(len(after)), after].detach()


def test_the_losses_by_hand_on_three_rows(tmp_path, run):
    """Of SFT, over all tokens of three answers; of a reward model and of DPO, after training, on three pairs."""
    found = run("sft", "three", train_rows=3, batch_size=3, total_steps=1)
    by_hand = torch.cat([logprobs_of(tmp_path / "model", row["question"], row["answer"]) for row in ROWS[:3]])
    assert read_metrics(found)[1]["loss"] == pytest.approx(-by_hand.mean().item(), abs=1e-5)
    sides = [(pair["prompt"], pair[side]) for pair in PAIRS[:3] for side in ("chosen", "rejected")]
    for name, flags in ("rm", {}), ("dpo", {"dpo_beta": 0.3}):
        final = run("preferences", name, eval_rows=3, **flags) / "final"
        if name == "rm":
            model, tokenizer = reward_model.from_pretrained(final), AutoTokenizer.from_pretrained(final)
            scores = [model(tokenizer("".join(side), return_tensors="pt")["input_ids"]).logits[0, 0] for side in sides]
        else:
            scores = [0.3 * (logprobs_of(final, *x) - logprobs_of(tmp_path / "model", *x)).sum() for x in sides]
        margins = torch.stack(scores).view(3, 2) @ torch.tensor([1.0, -1.0])
        before, first, *_, last = read_metrics(final.parent)
        assert before["eval/accuracy"] == 0.5 and before["eval/loss"] == pytest.approx(0.693147, abs=1e-6)
        assert first["loss"] == pytest.approx(0.693147, abs=1e-6)
        assert last["eval/loss"] == pytest.approx(-logsigmoid(margins).mean().item(), abs=1e-5) and last["loss"] < 0.6


@pytest.mark.parametrize("flags", [None, {"dpo_beta": 0.3, "lora_rank": 2}])
def test_one_process_and_two_agree(run, flags):
    """In their numbers and in the models they save."""
    name = "sft" if flags is None else "preferences"
    flags = (flags or {}) | {"train_rows": 5, "batch_size": 6, "eval_rows": 5}
    one, two = (run(name, f"by-{ranks}", ranks, **flags) for ranks in (1, 2))
    for alone, together in zip(read_metrics(one), read_metrics(two), strict=True):
        assert together == pytest.approx(alone, rel=1e-5, abs=1e-5)
    alone, together = (load_file(path / "final" / "model.safetensors") for path in (one, two))
    assert all(torch.allclose(together[key], alone[key], atol=1e-5) for key in alone)


@pytest.mark.parametrize("rank", [0, 2])
def test_the_scripts_take_what_they_save(tmp_path, run, monkeypatch, rank):
    """As policy, critic and reward; with LoRA, too. The critic's last value is the score of the reward model."""
    policy = str(run("sft", "policy", lora_rank=rank, total_steps=30) / "final")
    model = str(run("preferences", "rm", lora_rank=rank, model=policy) / "final")
    monkeypatch.setenv("REWARD_MODEL", model)
    monkeypatch.delitem(sys.modules, "reward_model", raising=False)
    flags = {"dataset": f"{tmp_path}/sft.jsonl", "max_response_length": 8, "batch_size": 4, "minibatch_size": 4}
    flags |= {"total_iterations": 1, "output_dir": str(tmp_path), "run_name": "ppo", "track": "none"}
    flags |= {"model": policy, "critic_model": model, "reward": f"{FILES}/reward_model.py:reward_model"}
    rows = read_rows(run_main(load_script(path_of("ppo_llm")), flags) / "completions" / "step_000001.jsonl")
    pairs = [(row["batch"]["values"][-2], row["score"]) for row in rows if not row["truncated"]]
    assert pairs and all(value == pytest.approx(score, abs=1e-4) and score != 0 for value, score in pairs)


TURNS = "{% for m in messages %}{{ m.role[0] }} {{ m.content }}END{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}a {% endif %}"
TURN_ENDS = [("<eos>", "<pad>"), ("<eos>\n", "<eos>"), ("<eos>", "<eos>"), (None, "<eos>")]  # and the padding token


@pytest.mark.parametrize("end, pad", TURN_ENDS)
def test_a_pair_has_one_margin(tmp_path, run, monkeypatch, end, pad):
    """In training, by the reward file, and in PPO's first batch, which has these answers; whatever ends a turn."""
    make_model(tmp_path / "model", pad=pad)
    (tmp_path / "t.jinja").write_text(TEMPLATE.replace("END", end or ""))
    template = {"chat_template": f"{tmp_path}/t.jinja" if end else "none"}
    trained = run("preferences", "rm", total_steps=9, **template)
    margins = {"training": read_metrics(trained)[-1]["eval/margin"]}
    monkeypatch.setenv("REWARD_MODEL", str(trained / "final"))
    monkeypatch.delitem(sys.modules, "reward_model", raising=False)
    algo, tokenizer = load_script(path_of("ppo_llm")), AutoTokenizer.from_pretrained(trained / "final")
    sides = [(pair["prompt"], pair[side]) for side in ("chosen", "rejected") for pair in PAIRS]
    chats = [[{"role": "user", "content": prompt}] for prompt, _ in sides]
    file = load_script(FILES / "reward_model.py")
    scores = file.reward_model(*zip(*sides), None, chats)
    margins["file"] = sum(scores[:6]) / 6 - sum(scores[6:]) / 6
    asked = []

    def answer(model, prompts, *_):
        """The chosen answer to a prompt that is asked for the first time, then the rejected one."""
        found = []
        for ids in prompts:
            pair = next(x for x in PAIRS if x["prompt"] in tokenizer.decode(ids))
            text = pair["rejected" if ids in asked else "chosen"]
            asked.append(ids)
            ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
            found.append(algo.Response(ids, [-1.0] * len(ids), False))
        return found

    monkeypatch.setattr(algo, "generate", answer)
    monkeypatch.setattr(algo, "check_sampler", lambda *_: {"rollout/kl": 0.0})
    flags = {"dataset": write_rows(tmp_path / "twice.jsonl", [*ROWS, *ROWS]), "answer_column": None, "lr": 0.0}
    flags |= {"batch_size": 12, "minibatch_size": 12, "max_response_length": 8, "total_iterations": 1, "track": "none"}
    flags |= {"output_dir": str(tmp_path), "run_name": "ppo", "model": f"{trained}/final"} | template
    flags |= {"model": f"{tmp_path}/model", "reward": f"{FILES}/reward_model.py:reward_model"}
    rows = read_rows(run_main(algo, flags) / "completions" / "step_000001.jsonl")
    chosen = {pair["chosen"] for pair in PAIRS}
    margins["PPO"] = sum((1 if row["response"] in chosen else -1) * row["score"] for row in rows) / 6
    assert margins == pytest.approx(dict.fromkeys(margins, margins["training"]), abs=1e-4), margins
    assert margins["training"] > 0.5


def test_pairs_of_all_forms_are_read_alike_and_bad_rows_refused(tmp_path, run):
    """Answers with a prompt, whole texts, chats; for a reward model and for DPO."""
    preferences, tokenizer = load_script(FILES / "preferences.py"), AutoTokenizer.from_pretrained(tmp_path / "model")
    texts, asked = {"chosen": " not a", "rejected": " not b c"}, {"role": "user", "content": "q?"}
    chats = {side: [asked, {"role": "assistant", "content": text}] for side, text in texts.items()}
    for form in texts | {"prompt": "q?"}, chats, {side: f"q?{text}" for side, text in texts.items()}:
        for beta in 0, 1:
            args = preferences.Args(model="", dpo_beta=beta, prompt_column="prompt" if "prompt" in form else None)
            (row,) = preferences.read_pairs("", Dataset.from_list([form]), args, tokenizer, None)
            found = [tokenizer.decode(start["input_ids"] + response.ids) for start, response in row["sides"]]
            assert found == ["q? not a<eos>", "q? not b c<eos>"]
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    for row, flags, said in (
        ({"question": "a", "answer": ""}, {}, "there is no answer to 'a'"),
        ({"question": "a", "answer": "bbbb"}, {}, "an answer has 5 tokens with its EOS, more than --max-response"),
        (pair | {"chosen": "c"}, {}, "row 1: chosen and rejected are equal: 'c'"),
        (pair, {"prompt_column": None}, "row 1: no common prompt before 'b' and 'c'"),
    ):
        flags |= {"dataset": write_rows(tmp_path / "bad.jsonl", [row]), "eval_dataset": None, "max_response_length": 4}
        assert said in refusal(lambda: run("sft" if "question" in row else "preferences", "bad", **flags))
