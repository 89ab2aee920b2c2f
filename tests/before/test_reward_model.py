"""--reward-model: scores, chat templates, what is refused, and PPO against one that was trained here."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    pipeline,
)

from .helpers_before import (
    has_critic,
    load_script,
    make_model,
    make_tokenizer,
    read_metrics,
    read_rows,
    toy_rows,
    write_rows,
)

CHAT = "{% for m in messages %}{{ m.role[:1] }}#{{ m.content }}\n{% endfor %}"
TEXTS = ["a", "what is 3 + 4?", "b" * 40, "", "#### 7", "1234567890", "x y z"] * 3


@pytest.fixture(scope="module", params=["grpo_llm"])
def algo(request):
    """One script: both have this in the same words."""
    return load_script(request.param)


def make_classifier(folder, arch="llama", template=None, pad="<pad>", **config):
    if arch == "bert":
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        config = BertConfig(vocab_size=len(make_tokenizer()), **sizes | {"num_labels": 1} | config)
        torch.manual_seed(3)
        model = BertForSequenceClassification(config)
        torch.nn.init.normal_(model.classifier.weight)
        model.save_pretrained(folder)
    else:
        sizes = {"auto_class": AutoModelForSequenceClassification, "num_labels": 1, "seed": 3, "pad": pad}
        make_model(folder, arch, dropout=0.5 if arch == "gpt2" else 0.0, **sizes | config)
    tokenizer = make_tokenizer(pad)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def user(text):
    return [{"role": "user", "content": text}]


def score(algo, folder, prompts, responses):
    model = algo.RewardModel(folder, torch.device("cpu"))
    return model(prompts, responses, [None] * len(prompts), [user(prompt) for prompt in prompts])


@pytest.mark.parametrize("template", [None, CHAT])
@pytest.mark.parametrize("arch, pad", [("llama", "<pad>"), ("llama", None), ("gpt2", "<pad>"), ("bert", "<pad>")])
def test_scores_are_those_of_the_pipeline_and_of_the_bare_model(algo, tmp_path, arch, pad, template):
    """Rows of unequal lengths, batched or one by one; without dropout; also where there is no padding token."""
    folder = make_classifier(tmp_path / "rm", arch, template, pad)
    prompts, responses = ["ask"] * len(TEXTS), TEXTS
    found = score(algo, folder, prompts, responses)
    texts = [f"u#ask\na#{text}\n" if template else f"ask{text}" for text in TEXTS]
    classify = pipeline("text-classification", folder, device="cpu")
    expected = [classify(text, function_to_apply="none")[0]["score"] for text in texts]
    assert found == pytest.approx(expected, abs=1e-5) and max(found) - min(found) > 1e-3
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder).eval(), make_tokenizer(pad)
    with torch.no_grad():
        expected = [model(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]
    assert found == pytest.approx(expected, abs=1e-5)


def test_rows_are_not_mixed_up_with_their_padding(algo, tmp_path):
    """The tokenizer pads on the left by its own will, or with another token than the one the model looks for."""
    folder = make_classifier(tmp_path / "rm")
    expected = [score(algo, folder, ["ask"], [text])[0] for text in TEXTS]
    for change in ({"padding_side": "left"}, {"pad_token": "<eos2>"}):
        tokenizer = AutoTokenizer.from_pretrained(folder, **change)
        tokenizer.save_pretrained(folder)
        assert score(algo, folder, ["ask"] * len(TEXTS), TEXTS) == pytest.approx(expected, abs=1e-5)


def test_the_run_scores_with_it_and_leaves_it_alone(algo, toy_args, tmp_path, spy):
    folder = make_classifier(tmp_path / "rm", template=CHAT)
    made = spy(algo, "RewardModel")
    run_dir = algo.main(toy_args(reward_model=folder, missing_eos_penalty=0.0))
    ((args, reward_model),) = made
    model = reward_model.pipeline.model
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32} and model.device == args[1]
    rows = read_rows(run_dir / "completions" / "eval_000002.jsonl")
    found = score(algo, folder, [row["prompt"] for row in rows], [row["response_sampled"] for row in rows])
    assert [row["score_sampled"] for row in rows] == pytest.approx(found, abs=1e-5)
    metrics = read_metrics(run_dir)
    assert metrics[1]["time/reward"] > 0
    after = AutoModelForSequenceClassification.from_pretrained(folder).state_dict()
    assert all(torch.equal(value, after[name]) for name, value in model.state_dict().items())


def test_a_slow_reward_shows_in_the_timing(algo, toy_run, tmp_path):
    body = "import time\ndef f(prompts, responses, answers):\n    time.sleep(0.3)\n    return [0.0] * len(prompts)\n"
    (tmp_path / "slow.py").write_text(body)
    _, metrics = toy_run(reward=f"{tmp_path / 'slow.py'}:f")
    assert all(m["time/reward"] >= 0.3 and m["time/iteration"] >= m["time/reward"] for m in metrics[1:])


def test_answers_are_not_needed(algo, toy_args, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": row["question"]} for row in toy_rows(8)])
    folder = make_classifier(tmp_path / "rm")
    assert len(read_metrics(algo.main(toy_args(reward="gsm8k", reward_model=folder, dataset=data)))) == 3


def refused(algo, toy_args, folder, *parts):
    with pytest.raises(SystemExit) as error:
        algo.main(toy_args(reward_model=str(folder)))
    message = error.value.code
    assert message.startswith(f"error: --reward-model {folder}: ") and "\n" not in message
    assert [part for part in parts if part not in message] == [], message


def test_what_is_no_reward_model(algo, toy_args, tmp_path, tiny_model):
    refused(algo, toy_args, make_classifier(tmp_path / "two", num_labels=3), "3 classes", "one label")
    refused(algo, toy_args, tiny_model, "no sequence classifier", "score.weight")
    refused(algo, toy_args, tmp_path / "nowhere", "tokenizer")
    make_tokenizer().save_pretrained(tmp_path / "empty")
    refused(algo, toy_args, tmp_path / "empty", "AutoModelForSequenceClassification")
    assert not (tmp_path / "runs").exists()


def test_texts_longer_than_its_positions_are_refused(algo, tmp_path):
    folder = make_classifier(tmp_path / "rm", "gpt2", n_positions=12)
    assert len(score(algo, folder, ["ask"], ["b" * 9])) == 1
    with pytest.raises(algo.UserError, match="12 positions, prompt and response are 13 tokens"):
        score(algo, folder, ["ask", "ask"], ["b", "b" * 10])


def train_on_pairs(folder, model_folder, steps=60):
    """Bradley-Terry on pairs of texts of which the one with more letters before `m` was chosen."""
    model = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    letters = torch.Generator().manual_seed(0)
    for _ in range(steps):
        pairs = torch.randint(26, (16, 2, 10), generator=letters)
        early = (pairs < 12).sum(2)
        pairs, early = pairs[early[:, 0] != early[:, 1]], early[early[:, 0] != early[:, 1]]
        order = early.argsort(1, descending=True)  # chosen first
        texts = [["what is it?" + "".join(chr(97 + c) for c in text) for text in pair] for pair in pairs.tolist()]
        chosen, rejected = zip(*[(pair[i], pair[j]) for pair, (i, j) in zip(texts, order.tolist())])
        inputs = tokenizer([*chosen, *rejected], return_tensors="pt", padding=True, padding_side="right")
        scores = model(**inputs).logits[:, 0]
        loss = -torch.nn.functional.logsigmoid(scores[: len(chosen)] - scores[len(chosen) :]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return loss.item()


@pytest.mark.slow
def test_a_reward_model_trained_on_preferences_is_learned_from(algo, toy_args, tmp_path):
    base = make_model(tmp_path / "base", seed=4, initializer_range=0.05)
    assert train_on_pairs(tmp_path / "rm", base) < 0.4  # chance is 0.69
    sizes = {"batch_size": 32 if has_critic(algo) else 8, "group_size": 1 if has_critic(algo) else 4}
    run_dir = algo.main(
        toy_args(reward_model=str(tmp_path / "rm"), total_iterations=15, lr=3e-3, minibatch_size=16, **sizes)
    )
    metrics = read_metrics(run_dir)
    before, after = metrics[0]["eval/score_sampled"], metrics[-1]["eval/score_sampled"]
    assert after > before + 1.0, (before, after)
    AutoModelForCausalLM.from_pretrained(run_dir / "final")
