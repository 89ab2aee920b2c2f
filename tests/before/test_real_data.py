"""Real data through the real code; every test skips with the reason when LLM_RL_DATA is unset."""

import json

import pytest

from .helpers_before import ROOT, has_critic, load_script, make_tokenizer, read_metrics


@pytest.fixture(scope="module", params=["grpo_llm"])
def algo(request):
    """One script: both have this in the same words."""
    return load_script(request.param)


@pytest.mark.parametrize("split, size", [("train", 7473), ("test", 1319)])
def test_every_gold_solution_of_gsm8k_scores_one(algo, data_dir, split, size):
    """Raw GSM8K, loaded as `main` loads it: the gold solutions, given as responses, all score 1.0."""
    args = algo.Args(max_prompt_length=10_000, prompt_template="{prompt}\\nAnswer:")
    rows, summary = algo.load_prompts(str(data_dir / "gsm8k" / f"{split}.jsonl"), split, args, make_tokenizer())
    assert len(rows) == size and f"GSM8K raw, text): {size} rows, 0 too long" in summary
    assert rows[0]["prompt"].endswith("\nAnswer:")
    scores = algo.compute_scores(algo.gsm8k, rows, [row["answer"] for row in rows])
    assert scores == [1.0] * size
    # A neighbour's solution is right only when its number happens to be the same.
    shifted = algo.compute_scores(algo.gsm8k, rows, [row["answer"] for row in rows[1:] + rows[:1]])
    assert sum(shifted) < 0.05 * size


@pytest.mark.parametrize("split, size", [("train", 7473), ("test", 1319)])
def test_every_gold_solution_scores_one_in_the_form_of_verl(algo, data_dir, split, size):
    """Chat prompts through a chat template; the gold solution stands in extra_info, the number in reward_model."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    args = algo.Args(max_prompt_length=10_000)
    rows, summary = algo.load_prompts(str(data_dir / "gsm8k_verl" / f"{split}.parquet"), split, args, tokenizer)
    assert len(rows) == size and f"(verl, chat, chat template): {size} rows, 0 too long" in summary
    raw = [json.loads(line) for line in (data_dir / "gsm8k" / f"{split}.jsonl").read_text().splitlines()]
    assert all(row["prompt"].startswith("<user>" + line["question"]) for row, line in zip(rows, raw))
    assert all(row["prompt"].endswith("<assistant>") for row in rows)
    gold = [row["columns"]["extra_info"]["answer"] for row in rows]
    assert gold == [line["answer"] for line in raw]
    assert algo.compute_scores(algo.gsm8k, rows, gold) == [1.0] * size
    shifted = algo.compute_scores(algo.gsm8k, rows, gold[1:] + gold[:1])
    assert sum(shifted) < 0.05 * size


def test_sad_reward_on_the_real_lexicon(algo, data_dir, monkeypatch):
    monkeypatch.setenv("VADER_LEXICON", str(data_dir / "vader" / "vader_lexicon.txt"))
    sad = algo.load_reward(f"{ROOT}/benchmarks/rewards.py:sad")
    # happy 2.7, sad -2.1, cried -1.6 in the lexicon
    scores = sad(["p"] * 4, ["A happy dog.", "Sad, she cried!", "the dog", ""], [None] * 4)
    assert scores == pytest.approx([-2.7 / 3, (2.1 + 1.6) / 3, 0.0, 0.0])


def test_sad_reward_without_a_lexicon_says_what_to_install(algo, monkeypatch):
    monkeypatch.delenv("VADER_LEXICON", raising=False)
    monkeypatch.setitem(__import__("sys").modules, "vaderSentiment", None)  # as if it were not installed
    sad = algo.load_reward(f"{ROOT}/benchmarks/rewards.py:sad")
    with pytest.raises(algo.UserError, match="pip install vaderSentiment"):
        algo.compute_scores(sad, [{"prompt": "p", "answer": None, "columns": {}}], ["x"])


@pytest.mark.slow
def test_a_real_pretrained_model_trains_on_real_prompts(algo, data_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("VADER_LEXICON", str(data_dir / "vader" / "vader_lexicon.txt"))
    stories = data_dir / "story_prompts"
    sizes = {"batch_size": 16, "group_size": 1} if has_critic(algo) else {"batch_size": 8, "group_size": 2}
    run_dir = algo.main(
        algo.Args(
            **sizes,
            model=str(data_dir / "stories260K"),
            dataset=str(stories / "story_train.parquet"),
            eval_dataset=str(stories / "story_test.parquet"),
            prompt_column="prompt_text",
            reward=f"{ROOT}/benchmarks/rewards.py:sad",
            max_response_length=16,
            minibatch_size=8,
            total_iterations=2,
            eval_every=0,
            kl_reward_coef=0.02,
            output_dir=str(tmp_path),
            run_name="story",
        )
    )
    metrics = read_metrics(run_dir)
    assert metrics[1]["kl/mean"] == 0 and metrics[1]["rollout/logprob_diff"] < 1e-5
    assert metrics[1]["actor/ratio_max"] != 1 and -1 < metrics[0]["eval/score_sampled"] < 1
    lines = (run_dir / "completions" / "step_000002.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 16 and all("<s>" not in row["response"] for row in rows)
