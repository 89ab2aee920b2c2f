"""The whole of `main`: what must hold in every run, observed from its metrics, its files and the calls it makes."""

import csv
import json
import math
import sys
import time
from collections import Counter

import datasets
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from .helpers_before import (
    has_critic,
    make_model,
    make_tokenizer,
    only_grpo,
    only_ppo,
    read_rows,
    toy_rows,
    untimed,
    write_rows,
)

EOS, FIRST_CHAR = 1, 3
BY_PROMPT = "def by_prompt(prompts, responses, answers):\n    return [float(len(p) % 5) for p in prompts]\n"


@pytest.fixture
def train_only(tmp_path):
    """Training data without test data beside it: no evaluation, so that every score is one of the rollout."""
    return write_rows(tmp_path / "rows.jsonl", toy_rows(24))


@pytest.fixture
def reward_by_prompt(tmp_path):
    """A reward that does not depend on the response."""
    (tmp_path / "by_prompt.py").write_text(BY_PROMPT)
    return f"{tmp_path / 'by_prompt.py'}:by_prompt"


def fix_lengths(monkeypatch, algo, lengths, extra_columns=0):
    """Replaces the sampling: row i has an EOS as token number lengths[i] (None: it has none), whatever the model."""

    def generate(model, queries, query_mask, uniforms, eos_ids, pad_id, *sampling):
        responses = FIRST_CHAR + (uniforms * 40).long()
        for row, length in zip(responses, lengths * len(responses)):
            if length is not None:
                row[length - 1], row[length:] = eos_ids[-1], pad_id
        padding = responses.new_full((len(responses), extra_columns), pad_id)
        return torch.cat([responses, padding], 1), torch.zeros(len(responses), responses.shape[1] + extra_columns)

    monkeypatch.setattr(algo, "generate", generate)


def count_steps(monkeypatch):
    """Optimizer steps so far by learning rate: give actor and critic different ones."""
    steps, real = Counter(), torch.optim.AdamW.step

    def step(self, *args, **kwargs):
        steps[self.param_groups[0]["lr"]] += 1
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    return steps


def weights(folder):
    return load_file(f"{folder}/model.safetensors")


def same_weights(a, b):
    a, b = weights(a), weights(b)
    return all(torch.equal(a[key], b[key]) for key in a)


# --- the ratio -------------------------------------------------------------------------------------------------------


@only_grpo
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.5, "kl_reward_coef": 0.1},
        {"kl_reward_coef": 0.1},
        {"microbatch_tokens": 60},
        {"gradient_checkpointing": True},
    ]
    + [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "kl_reward_coef": 0.1}, {"rollout_batch_size": 2}]
    + [{"group_size": 2, "minibatch_size": 8}, {"entropy_coef": 0.1, "kl_loss_coef": 0.1}],
    ids=str,
)
def test_without_learning_the_ratio_is_exactly_1(toy_run, changes):
    check_ratio_without_learning(toy_run, changes)


@only_grpo
@pytest.mark.parametrize("changes", [{"importance_level": "sequence"}, {"estimator": "reinforce_pp"}], ids=str)
def test_without_learning_the_ratio_is_exactly_1_in_the_whole_family(toy_run, changes):
    check_ratio_without_learning(toy_run, changes)


@only_ppo
@pytest.mark.parametrize(
    "changes", [{"temperature": 0.5, "kl_reward_coef": 0.1}, {"dtype": "bfloat16", "kl_reward_coef": 0.1}], ids=str
)
def test_without_learning_the_ratio_is_exactly_1_where_models_are_sharded(toy_run, changes):
    check_ratio_without_learning(toy_run, changes)


def check_ratio_without_learning(toy_run, changes):
    _, metrics = toy_run(**{"lr": 0.0, "critic_lr": 0.0, "minibatch_size": 2, "ppo_epochs": 2} | changes)
    for m in metrics[1:]:
        assert m["actor/ratio_mean"] == m["actor/ratio_max"] == 1
        assert m["actor/clipfrac"] == m["actor/approx_kl"] == 0
        assert m.get("kl/mean", 0) == m.get("kl/sequence", 0) == 0
        assert "kl/mean" in m or not {"kl_reward_coef", "kl_loss_coef"} & set(changes)
        if changes.get("dtype") != "bfloat16":
            assert m["rollout/logprob_diff"] < 1e-5  # sampling and training see the same distribution


@only_ppo
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_with_dropout_in_the_checkpoint_the_ratio_is_exactly_1(toy_run, tmp_path, arch):
    model = make_model(tmp_path / "dropout", arch, dropout=0.5)
    _, metrics = toy_run(model=model, lr=0.0, critic_lr=0.0, ppo_epochs=2, kl_reward_coef=0.1)
    for m in metrics[1:]:
        assert m["actor/ratio_mean"] == m["actor/ratio_max"] == 1 and m["kl/mean"] == 0


@only_grpo
@pytest.mark.parametrize("tie", [False, True])
def test_in_bfloat16_the_reference_takes_half_the_memory(algo, toy_run, spy, capsys, tmp_path, tie):
    """What autocast computes in bfloat16 is kept in it: the KL of an unchanged policy stays exactly 0 (see above)."""
    passes = spy(algo, "forward_all")
    model = make_model(tmp_path / "model", tie_word_embeddings=tie)
    toy_run(model=model, dtype="bfloat16", kl_reward_coef=0.1, total_iterations=1)
    policy, reference = (args[0].model for args, _ in passes[:2])
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    linear = {module.weight.dtype for module in reference.model.modules() if isinstance(module, torch.nn.Linear)}
    assert linear == {torch.bfloat16} and reference.get_input_embeddings().weight.dtype == torch.float32
    assert reference.lm_head.weight.dtype == (torch.float32 if tie else torch.bfloat16)
    assert "2 or 4 for a frozen one" in capsys.readouterr().out


@only_grpo
def test_learning_moves_the_ratio(toy_run):
    _, metrics = toy_run(lr=1e-2, ppo_epochs=2)
    assert metrics[1]["actor/ratio_max"] > 1.01 and metrics[1]["actor/clipfrac"] > 0


# --- EOS, rewards, truncation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", ["pad is eos", "no pad", "two eos"])
def test_eos_is_trained_whatever_the_special_tokens(
    algo, toy_run, spy, monkeypatch, tmp_path, train_only, reward_by_prompt, tokens
):
    """Every response is one EOS: if it were masked there would be no token at all to learn from."""
    # In a group such responses would cancel out.
    alone = {} if has_critic(algo) else {"estimator": "reinforce_pp", "batch_size": 8, "group_size": 1}
    model = make_model(tmp_path / "m", pad={"pad is eos": "<eos>", "no pad": None, "two eos": "<pad>"}[tokens])
    if tokens == "two eos":
        GenerationConfig(eos_token_id=[2], pad_token_id=0).save_pretrained(model)  # the one that is used here
    fix_lengths(monkeypatch, algo, [1])
    calls = spy(algo, "aggregate")
    run_dir, metrics = toy_run(model=model, dataset=train_only, reward=reward_by_prompt, **alone)
    assert calls and all(mask.shape == (4, 1) and mask.all() for (_, mask, *_), _ in calls)
    assert metrics[1]["actor/grad_norm"] > 1e-3 and metrics[1]["response/truncated_frac"] == 0
    assert not same_weights(model, run_dir / "final")


@only_grpo
@pytest.mark.parametrize("pad", ["<pad>", "<eos>", None])
def test_real_sampling_with_any_pad_token(toy_run, tmp_path, pad):
    model = make_model(tmp_path / "m", pad=pad)
    GenerationConfig(eos_token_id=[1, 2, 5, 6]).save_pretrained(model)  # some responses end early
    run_dir, metrics = toy_run(model=model)
    assert 0 < metrics[-1]["response/truncated_frac"] < 1
    for row in read_rows(run_dir / "completions" / "step_000002.jsonl"):
        assert "<" not in row["response"]


@only_grpo
def test_text_after_the_eos_is_not_scored_when_there_is_no_pad_token(algo, toy_run, monkeypatch, tmp_path):
    """Without a pad token the filler is some token of the vocabulary; the reward must not see it as text."""
    model = make_model(tmp_path / "m", pad=None)
    text = (tmp_path / "m" / "tokenizer.json").read_text()
    tokens = json.loads(text)
    vocab = tokens["model"]["vocab"]
    vocab["<pad>"], vocab["a"] = vocab["a"], vocab["<pad>"]  # id 0 is an ordinary letter, as in GPT-2
    for token in tokens["added_tokens"]:
        token["id"] = vocab[token["content"]]
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(tokens))
    assert AutoTokenizer.from_pretrained(model).decode([0]) == "a"
    fix_lengths(monkeypatch, algo, [3])
    run_dir, _ = toy_run(model=model)
    files = "step_000002.jsonl", "eval_000002.jsonl"
    for row in (row for name in files for row in read_rows(run_dir / "completions" / name)):
        assert len(row["response"]) <= 2, row


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_token_rewards_add_up_to_score_minus_kl(algo, toy_run, spy, monkeypatch, tmp_path, toy_reward, kind):
    lengths = [1, 2, 3, 5, 9, 10, 10, None]  # 10 is the limit: the last row alone is truncated
    rows = [{"prompt": f"say {i}<eos> again<eos>"} for i in range(24)]  # an EOS in the prompt says nothing
    fix_lengths(monkeypatch, algo, lengths)
    forward_calls, score_calls, kl_calls = (
        spy(algo, "forward_all"),
        spy(algo, "compute_scores"),
        spy(algo, "kl_penalty"),
    )
    advantage_calls = spy(algo, "gae" if has_critic(algo) else "group_advantages")
    run_dir, metrics = toy_run(
        **{"dataset": write_rows(tmp_path / "rows.jsonl", rows), "lr": 1e-2, "missing_eos_penalty": 0.5},
        **{"kl_reward_coef": 0.3, "kl_reward_kind": kind, "kl_loss_coef": 0.0},
    )
    del score_calls[0]  # the trial on empty responses
    truncated = torch.tensor([length is None for length in lengths])
    last = torch.tensor([(length or 10) - 1 for length in lengths])
    mask = torch.arange(10) <= last[:, None]
    assert all(torch.equal(found, mask) for (_, _, found, *_), _ in forward_calls)
    assert len(advantage_calls) == len(score_calls) == len(kl_calls) == 2 <= len(forward_calls)
    for ((rewards, *_), _), (_, scores), (_, kl) in zip(advantage_calls, score_calls, kl_calls, strict=True):
        scores = torch.tensor(scores) - 0.5 * truncated
        total = scores - 0.3 * (kl * mask).sum(1)
        if has_critic(algo):  # token rewards; otherwise their sums
            terminal = rewards + 0.3 * kl  # what is left is the score, on the last valid token
            assert torch.allclose(terminal[range(8), last], scores, atol=1e-5)
            assert terminal.abs().sum() == pytest.approx(scores.abs().sum().item(), abs=1e-4)
            rewards = (rewards * mask).sum(1)
        assert torch.allclose(rewards, total, atol=1e-5)
    assert kl.abs().sum() > 1e-3  # in the second iteration the policy is no longer the reference
    done = read_rows(run_dir / "completions" / "step_000002.jsonl")
    assert [row["truncated"] for row in done] == truncated.tolist()
    assert [row["score"] for row in done] == pytest.approx(scores.tolist())
    assert metrics[2]["reward/mean"] == pytest.approx(scores.mean().item())
    assert metrics[2]["reward/std"] == pytest.approx(scores.std().item())
    assert metrics[2]["reward/total_mean"] == pytest.approx(total.mean().item(), abs=1e-5)
    assert metrics[2]["response/length_mean"] == 6.25 and metrics[2]["response/truncated_frac"] == 0.125
    if kind == "k1":
        assert [row["kl"] for row in done] == pytest.approx(kl.sum(1).tolist(), abs=1e-5)
        assert metrics[2]["kl/sequence"] == pytest.approx(kl.sum(1).mean().item(), abs=1e-5)
        assert metrics[2]["kl/mean"] == pytest.approx((kl.sum() / mask.sum()).item(), abs=1e-6)


@only_ppo
def test_padding_changes_no_metric(algo, toy_run, monkeypatch):
    """Neither columns that are padding in every row, nor the padding that a row of its own does not have."""
    results = []
    for extra_columns, microbatch_tokens in ((0, 4096), (7, 4096), (0, 1)):
        fix_lengths(monkeypatch, algo, [2, 7, 4, 10], extra_columns)
        options = {"kl_reward_coef": 0.1, "entropy_coef": 0.01, "value_clip": 0.1, "dual_clip": 3.0, "lr": 1e-4}
        results.append(untimed(toy_run(**options, ppo_epochs=2, microbatch_tokens=microbatch_tokens)[1]))
    for one, wider, alone in zip(*results, strict=True):
        assert one == pytest.approx(wider, rel=1e-6, abs=1e-9)
        assert one == pytest.approx(alone, rel=1e-3, abs=1e-5)


# --- determinism, data order, counts ---------------------------------------------------------------------------------


@only_grpo
def test_same_seed_same_metrics_bit_by_bit(toy_run):
    (first, a), (second, b), (_, c) = toy_run(), toy_run(), toy_run(seed=2)
    assert untimed(a) == untimed(b) and same_weights(first / "final", second / "final")
    assert untimed(a)[1]["reward/mean"] != untimed(c)[1]["reward/mean"]


@only_grpo
def test_sampling_does_not_depend_on_the_global_random_state(toy_run, tmp_path):
    """Noise is drawn by seed and iteration: a reward that uses random numbers of its own changes no rollout."""
    code = (
        "import torch\n\n\ndef f(prompts, responses, answers):\n    {}\n    return [len(set(r)) for r in responses]\n"
    )
    results = []
    for name, line in (("quiet", "pass"), ("noisy", "torch.rand(7)")):
        (tmp_path / f"{name}.py").write_text(code.format(line))
        results.append(untimed(toy_run(reward=f"{tmp_path / name}.py:f")[1]))
    assert results[0] == results[1]


@only_grpo
def test_every_prompt_comes_once_per_epoch(algo, toy_run, spy, train_only):
    calls = spy(algo, "compute_scores")
    sizes = {"batch_size": 10, "group_size": 2, "minibatch_size": 10, "max_response_length": 2}
    toy_run(dataset=train_only, total_iterations=12, **sizes)
    prompts = [row["prompt"] for (_, rows, _), _ in calls[1:] for row in rows[::2]]  # the first tries the reward
    epochs = [prompts[i : i + 24] for i in range(0, 120, 24)]  # 24 rows, which 10 does not divide
    assert len(prompts) == 120 and all(sorted(e) == sorted(epochs[0]) and len(set(e)) == 24 for e in epochs)
    assert len({tuple(e) for e in epochs}) == 5  # each in an order of its own


@only_grpo
def test_groups_are_contiguous_and_sampled_apart(toy_run):
    run_dir, _ = toy_run(batch_size=8, group_size=4, minibatch_size=8, max_response_length=10)
    rows = read_rows(run_dir / "completions" / "step_000002.jsonl")
    assert len(rows) == 32
    for group in (rows[i : i + 4] for i in range(0, 32, 4)):
        assert len({row["query"] for row in group}) == 1 and len({row["response"] for row in group}) == 4


@only_grpo
def test_minibatches_keep_their_rows_between_epochs(algo, toy_run, spy, train_only):
    calls = spy(algo, "policy_loss")
    toy_run(dataset=train_only, ppo_epochs=6, minibatch_size=2, total_iterations=1)
    old = [args[1] for args, _ in calls]  # the old log-probs name the rows
    keys = [tuple(x.flatten().tolist()) for x in old]
    assert len(keys) == 24 and set(Counter(keys).values()) == {6}  # 4 minibatches, the same in all 6 epochs
    visits = [tuple(keys[i : i + 4]) for i in range(0, 24, 4)]
    assert all(len(set(visit)) == 4 for visit in visits) and len(set(visits)) > 1  # in shuffled order


@only_ppo
@pytest.mark.parametrize("ppo_epochs, minibatch_size, per_iteration", [(1, 8, 1), (1, 2, 4), (3, 4, 6)])
def test_optimizer_steps(algo, toy_run, monkeypatch, ppo_epochs, minibatch_size, per_iteration):
    steps = count_steps(monkeypatch)
    toy_run(ppo_epochs=ppo_epochs, minibatch_size=minibatch_size, lr=1e-3, critic_lr=2e-3, microbatch_tokens=40)
    assert steps == {1e-3: 2 * per_iteration} | ({2e-3: 2 * per_iteration} if has_critic(algo) else {})


@only_ppo
def test_target_kl_stops_the_actor_and_not_the_critic(algo, toy_run, spy, monkeypatch):
    steps, losses = count_steps(monkeypatch), spy(algo, "policy_loss")
    toy_run(target_kl=1e-9, minibatch_size=2, ppo_epochs=2, lr=1e-2, critic_lr=2e-3)
    # The first step of an iteration always runs: before it the policy is the one that sampled.
    assert steps == {1e-2: 2 * 1} | ({2e-3: 2 * 8} if has_critic(algo) else {})
    assert len(losses) == 2 * 2  # the second minibatch tells that the KL is too large; no other is looked at


@only_ppo
def test_critic_warmup_leaves_the_actor_as_it_is(toy_run, tiny_model):
    run_dir, metrics = toy_run(critic_warmup_iterations=2)
    assert same_weights(tiny_model, run_dir / "final") and "actor/loss" not in metrics[2]
    head = weights(run_dir / "final" / "critic")["score.weight"]
    assert head.abs().sum() > 0 and metrics[2]["critic/value_mean"] != 0
    run_dir, metrics = toy_run(critic_warmup_iterations=1)
    assert not same_weights(tiny_model, run_dir / "final") and "actor/loss" in metrics[2]


@only_ppo
@pytest.mark.parametrize(
    "changes, factors",
    [
        ({}, [1, 1, 1, 1]),
        ({"warmup_iterations": 2}, [0.5, 1, 1, 1]),
        ({"lr_schedule": "linear"}, [1, 0.75, 0.5, 0.25]),
        ({"lr_schedule": "linear", "warmup_iterations": 2}, [0.5, 1, 1, 0.5]),
        ({"lr_schedule": "cosine"}, [1, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_learning_rates(algo, toy_run, monkeypatch, changes, factors):
    steps = count_steps(monkeypatch)
    _, metrics = toy_run(**changes, total_iterations=4, minibatch_size=8, lr=1e-3, critic_lr=4e-3, eval_every=0)
    for name, lr in (("actor/lr", 1e-3), ("critic/lr", 4e-3))[: 1 + has_critic(algo)]:
        assert [m[name] for m in metrics[1:]] == pytest.approx([lr * f for f in factors])
        assert set(steps) >= {m[name] for m in metrics[1:]}  # those the optimizers used


@only_grpo
def test_adaptive_kl_coefficient(algo, toy_run, spy):
    calls = spy(algo.AdaptiveKL, "update")
    options = {"kl_controller": "adaptive", "kl_target": 1e-3, "kl_horizon": 40.0}
    _, metrics = toy_run(**options, kl_reward_coef=0.1, lr=1e-2, total_iterations=4)
    coefs, kls = ([m[name] for m in metrics[1:]] for name in ("kl/coef", "kl/mean"))
    assert coefs[0] == 0.1 and len(set(coefs)) == 4
    assert [args[1:] for args, _ in calls] == [(kl, 8) for kl in kls]  # the token mean, and the responses
    for now, kl, following in zip(coefs, kls, coefs[1:]):  # 8 responses: at most 0.2*8/40 = 4% an iteration
        assert following == pytest.approx(now * (1 + max(-0.2, min(0.2, kl / 1e-3 - 1)) * 8 / 40))


# --- evaluation, files, names ----------------------------------------------------------------------------------------


@only_grpo
@pytest.mark.parametrize("batch_size", [2, 4])  # 6 test rows: in two parts, and in one
def test_evaluation_scores_every_row_once(algo, toy_run, spy, batch_size):
    calls = spy(algo, "compute_scores")
    run_dir, metrics = toy_run(total_iterations=0, batch_size=batch_size, group_size=2)
    prompts = Counter(row["prompt"] for (_, rows, _), _ in calls[1:] for row in rows)  # the first tries the reward
    assert prompts == {row["question"]: 2 for row in toy_rows(6, 100)}  # greedily and sampled
    rows = read_rows(run_dir / "completions" / "eval_000000.jsonl")
    assert sorted(row["prompt"] for row in rows) == sorted(prompts)
    for name in ("score", "score_sampled"):
        assert metrics[0][f"eval/{name}"] == pytest.approx(sum(row[name] for row in rows) / 6)
    assert metrics[0]["eval/score"] != metrics[0]["eval/score_sampled"]


@only_grpo
def test_zero_iterations_only_evaluate(toy_run):
    run_dir, metrics = toy_run(total_iterations=0)
    assert [m["step"] for m in metrics] == [0] and "eval/score" in metrics[0] and "reward/mean" not in metrics[0]
    assert not (run_dir / "final").exists() and not (run_dir / "best").exists()


@only_grpo
def test_final_model_reloads_plainly_and_scores_as_printed(algo, toy_run, toy_reward, capsys):
    run_dir, metrics = toy_run(total_iterations=3, lr=5e-3)
    model = AutoModelForCausalLM.from_pretrained(run_dir / "final")
    tokenizer, responses = AutoTokenizer.from_pretrained(run_dir / "final"), []
    for row in toy_rows(6, 100):
        inputs = tokenizer(row["question"], return_tensors="pt")
        ids = model.generate(input_ids=inputs["input_ids"], max_new_tokens=10, do_sample=False, pad_token_id=0)
        responses.append(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    scores = algo.load_reward(toy_reward)(None, responses, None)
    assert metrics[-1]["eval/score"] == pytest.approx(sum(scores) / 6, abs=1e-6) != metrics[0]["eval/score"]
    assert f"eval {sum(scores) / 6:.3f} greedy" in capsys.readouterr().out


@only_grpo
def test_best_is_the_model_of_the_best_evaluation(algo, toy_run, tiny_model):
    run_dir, metrics = toy_run(total_iterations=3, lr=5e-3, eval_every=1)
    scores = [m["eval/score"] for m in metrics]
    best = run_dir / "best"
    assert same_weights(best, run_dir / "final") == (scores[3] > max(scores[:3]))
    assert same_weights(best, tiny_model) == (scores[0] == max(scores))
    assert (best / "critic" / "config.json").is_file() == has_critic(algo) and (best / "tokenizer.json").is_file()


@only_grpo
def test_run_folder(algo, toy_run):
    run_dir, _ = toy_run(eval_every=1, batch_size=8, group_size=2, kl_reward_coef=0.1)
    record = json.loads((run_dir / "args.json").read_text())
    assert record["num_processes"] == 1 and record["group_size"] == 2
    assert set(record["versions"]) >= {"torch", "transformers", "accelerate", "datasets"}
    assert set(record) == {*algo.Args.__dataclass_fields__, "num_processes", "versions"}
    assert (run_dir / f"{algo.__name__}.py").is_file() and list(run_dir.rglob("events.out.tfevents*"))
    names = {path.name for path in (run_dir / "completions").iterdir()}
    assert names == {f"eval_{i:06d}.jsonl" for i in (0, 1, 2)} | {f"step_{i:06d}.jsonl" for i in (1, 2)}
    rows = read_rows(run_dir / "completions" / "step_000001.jsonl")
    assert len(rows) == 16 and all(set(r) == {"query", "response", "score", "kl", "truncated"} for r in rows)
    assert [p.name for p in run_dir.rglob(".*")] == [".lock"]  # nothing half written is left


def test_metric_names(algo, toy_run):
    options = {"value_clip": 0.2, "dual_clip": 3.0, "kl_reward_coef": 0.1, "ppo_epochs": 2}
    _, metrics = toy_run(**options)
    expected = "reward/mean reward/std reward/total_mean eval/score eval/score_sampled eval/length_mean advantage/mean"
    expected += " advantage/std actor/loss actor/clipfrac actor/clipfrac_dual actor/approx_kl actor/ratio_mean"
    expected += " actor/ratio_max actor/entropy actor/grad_norm actor/lr kl/mean kl/sequence kl/coef"
    expected += " response/length_mean response/truncated_frac time/rollout time/reward time/logprobs"
    expected += " time/advantages time/actor time/eval time/iteration throughput/tokens_per_second memory/peak_gib"
    if has_critic(algo):
        expected += " critic/loss critic/value_mean critic/explained_variance critic/clipfrac critic/grad_norm"
        expected += " critic/lr time/values time/critic"
    else:
        expected += " group/zero_std_frac group/generated group/used group/surplus"
    assert set(metrics[-1]) == {*expected.split(), "step", "time/elapsed", "rollout/logprob_diff"}
    for m in metrics:
        assert all(isinstance(v, int | float) and v == v for v in m.values())
        assert all(v >= 0 for k, v in m.items() if k.endswith(("frac", "entropy", "approx_kl", "std", "grad_norm")))


# --- data and reward -------------------------------------------------------------------------------------------------


@only_grpo
def test_reward_gets_a_column_only_when_it_names_it(algo):
    rows = [{"prompt": f"p{i}", "answer": None, "columns": {"prompt": "raw", "level": i, "x": 0}} for i in range(3)]
    seen = {}

    def plain(prompts, responses, answers):
        seen["plain"] = prompts, responses, answers
        return [1, 2, 3]

    def named(prompts, responses, answers, level):
        return level

    def hungry(prompts, responses, answers, **columns):
        assert not columns
        return [0.0] * len(prompts)

    texts = ["a", "b", "c"]
    assert algo.compute_scores(plain, rows, texts) == [1.0, 2.0, 3.0]
    assert seen["plain"] == (["p0", "p1", "p2"], texts, [None] * 3)
    assert algo.compute_scores(named, rows, texts) == [0.0, 1.0, 2.0]
    assert algo.compute_scores(hungry, rows, texts) == [0.0] * 3


@only_grpo
def test_column_reaches_the_reward_in_a_run(toy_run, tmp_path):
    rows = [{"prompt": f"p {i}", "level": i} for i in range(8)]
    (tmp_path / "r.py").write_text("def f(prompts, responses, answers, level):\n    return level\n")
    data = {"dataset": write_rows(tmp_path / "rows.jsonl", rows), "batch_size": 8}
    _, metrics = toy_run(**data, reward=f"{tmp_path / 'r.py'}:f")
    assert metrics[1]["reward/mean"] == 3.5  # one epoch: the levels 0 to 7


@only_grpo
def test_prompt_template_and_its_line_breaks(toy_run):
    run_dir, _ = toy_run(prompt_template="Q: {prompt}\\nA:")
    for name, column in (("step_000002", "query"), ("eval_000002", "prompt")):
        for row in read_rows(run_dir / "completions" / f"{name}.jsonl"):
            assert row[column].startswith("Q: what is ") and row[column].endswith("\nA:") and "\\" not in row[column]


def save_as(kind, folder):
    """Train (24) and test (6) rows in one of the forms --dataset takes; returns its value."""
    rows = {"train": toy_rows(24), "test": toy_rows(6, 100)}
    if kind == "folder":
        tables = {split: datasets.Dataset.from_list(part) for split, part in rows.items()}
        datasets.DatasetDict(tables).save_to_disk(folder / "saved")
        return str(folder / "saved")
    for split, part in rows.items():
        path = folder / f"{split}.{kind}"
        if kind == "csv":
            with open(path, "w", newline="") as file:
                writer = csv.DictWriter(file, ["question", "answer"])
                writer.writeheader()
                writer.writerows(part)
        elif kind == "parquet":
            datasets.Dataset.from_list(part).to_parquet(path)
        else:
            path.write_text(json.dumps(part))
    return str(folder / f"train.{kind}")


@only_grpo
@pytest.mark.parametrize("kind", ["csv", "parquet", "json", "folder"])
def test_forms_of_data(toy_run, tmp_path, kind, capsys):
    run_dir, _ = toy_run(dataset=save_as(kind, tmp_path))
    assert "24 rows, 0 too long" in (out := capsys.readouterr().out) and "6 rows, 0 too long" in out
    rows = read_rows(run_dir / "completions" / "eval_000000.jsonl")
    assert sorted(row["prompt"] for row in rows) == sorted(row["question"] for row in toy_rows(6, 100))
    assert sorted(row["answer"] for row in rows) == sorted(row["answer"] for row in toy_rows(6, 100))


@only_grpo
def test_eval_dataset_may_be_a_folder_without_splits(toy_run, tmp_path):
    """Data given by name is evaluated on, or the run says why not: silence would look like an evaluation."""
    datasets.Dataset.from_list(toy_rows(4, 200)).save_to_disk(tmp_path / "single")
    try:
        run_dir, _ = toy_run(eval_dataset=str(tmp_path / "single"), total_iterations=0)
    except SystemExit as error:
        assert "split" in str(error)
    else:
        assert len(read_rows(run_dir / "completions" / "eval_000000.jsonl")) == 4


@only_grpo
@pytest.mark.parametrize("spec, expected", [("team/name:config", ("team/name", "config")), ("name", ("name", None))])
def test_hub_names(algo, toy_run, monkeypatch, spec, expected):
    rows = {"train": toy_rows(24), "test": toy_rows(6, 100)}
    tables = datasets.DatasetDict({k: datasets.Dataset.from_list(v) for k, v in rows.items()})
    seen = []
    monkeypatch.setattr(algo.datasets, "load_dataset", lambda *args, **kwargs: seen.append((args, kwargs)) or tables)
    for iterations, times in ((0, 1), (1, 2)):  # evaluation alone reads no training data
        _, metrics = toy_run(dataset=spec, total_iterations=iterations)
        assert seen == [(expected, {})] * times and "eval/score" in metrics[0]
        seen.clear()


@only_grpo
def test_no_test_data_no_evaluation(toy_run, train_only, capsys):
    _, metrics = toy_run(dataset=train_only)
    assert not any("eval/score" in m for m in metrics) and "--eval-dataset" in capsys.readouterr().out


@only_grpo
def test_long_prompts_are_left_out_and_counted(algo, toy_run, spy, tmp_path, capsys):
    rows = [{"prompt": "a" * n} for n in (5, 6, 7, 8, 9, 10, 11, 12)]
    calls = spy(algo, "compute_scores")
    toy_run(dataset=write_rows(tmp_path / "rows.jsonl", rows), max_prompt_length=9)
    assert "5 rows, 3 too long left out" in capsys.readouterr().out
    assert {len(row["prompt"]) for (_, rows, _), _ in calls for row in rows} == {5, 6, 7, 8, 9}


def test_ids_go_unchanged_from_sampling_to_training(algo, toy_run, spy, monkeypatch, train_only):
    """Nothing is decoded and encoded again: the ids that were sampled are the ids that are trained on."""
    fix_lengths(monkeypatch, algo, [3, None, 10, 1])
    packed = spy(algo, "pack")
    sampled = spy(algo, "generate")
    toy_run(dataset=train_only, total_iterations=1, minibatch_size=8)
    (queries, query_mask, responses, mask, *_), (microbatches) = packed[0]
    assert torch.equal(responses, sampled[0][1][0]) and len(make_tokenizer()) > responses.max()
    seen = {}
    for mb in microbatches:
        ids, attention, _ = mb.inputs
        seen |= {int(i): ids[j][attention[j].bool()].tolist() for j, i in enumerate(mb.at[0])}
    expected = [queries[i][query_mask[i]].tolist() + responses[i][mask[i]].tolist() for i in range(8)]
    assert [seen[i] for i in range(8)] == expected


# --- trackers --------------------------------------------------------------------------------------------------------


@only_grpo
def test_wandb_offline_gets_the_metrics(algo, toy_run, monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run_dir, _ = toy_run(track="wandb", run_name="mine")
    (folder,) = (run_dir / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    deadline = time.time() + 20  # wandb's own process writes it
    while b"minibatch_size" not in (content := file.read_bytes()) and time.time() < deadline:
        time.sleep(0.1)
    assert b"reward/mean" in content and b"clean-llm-rl" not in content and algo.__name__.encode() in content
    assert b"minibatch_size" in content and b"mine" in content  # the flags, the name
    assert not any(run_dir.rglob("*tfevents*"))


@only_grpo
def test_wandb_is_not_imported_unless_asked_for(algo, toy_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would fail
    run_dir, _ = toy_run()
    assert any(run_dir.rglob("*tfevents*"))


# --- old log-probs ---------------------------------------------------------------------------------------------------

GAP = 0.3  # the sampler says that every token was this much less likely than the forward pass does


@pytest.fixture
def biased_sampler(algo, monkeypatch):
    real = algo.generate

    def generate(*args, **kwargs):
        responses, logprobs = real(*args, **kwargs)
        return responses, logprobs - GAP

    monkeypatch.setattr(algo, "generate", generate)


@only_ppo
@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("mode", ["recompute", "rollout", "corrected"])
def test_what_the_ratio_is_to(algo, toy_run, spy, biased_sampler, mode, num_steps):
    """An unchanged policy (lr 0): its ratio is 1, or e^.3 when the sampler is the anchor; e^.3 weighs it."""
    passes = spy(algo, "forward_all")
    rates = {"lr": 0.0, "critic_lr": 0.0} if has_critic(algo) else {"lr": 0.0}
    flags = rates | {"kl_reward_coef": 0.0, "kl_loss_coef": 0.0, "clip_high": 10.0, "total_iterations": 1}
    _, (_, metrics) = toy_run(old_logprobs=mode, minibatch_size=8 // num_steps, **flags)
    assert metrics["rollout/logprob_diff"] == pytest.approx(GAP, abs=1e-5) or (mode, num_steps) == ("recompute", 1)
    expected = math.exp(GAP) if mode == "rollout" else 1.0
    assert metrics["actor/ratio_mean"] == pytest.approx(expected, abs=1e-5)
    if mode != "rollout":
        assert metrics["actor/ratio_max"] == 1 and metrics["actor/clipfrac"] == 0
    of_policy = [args for args, _ in passes if len(args) == 4]
    assert len(of_policy) == {"recompute": num_steps > 1, "rollout": 0, "corrected": 1}[mode]
    if mode == "corrected":
        assert metrics["rollout/weight_mean"] == pytest.approx(math.exp(GAP), rel=1e-5)
        assert metrics["rollout/ess"] == pytest.approx(1.0, abs=1e-6)  # equal weights lose nothing
    else:
        assert not {"rollout/weight_mean", "rollout/ess"} & metrics.keys()


@only_grpo
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_multiply_the_loss(algo, toy_run, biased_sampler, level):
    """Every token's loss by e^.3, or by e^(.3 * length) up to the cap: gradients of the whole batch follow."""
    rates = {"lr": 0.0, "critic_lr": 0.0} if has_critic(algo) else {"lr": 0.0}
    flags = rates | {"kl_reward_coef": 0.0, "kl_loss_coef": 0.0, "total_iterations": 1, "max_grad_norm": 1e9}
    _, (_, plain) = toy_run(**flags)
    _, (_, metrics) = toy_run(old_logprobs="corrected", is_level=level, is_cap=1.3, **flags)
    weight = min(1.3, math.exp(GAP))  # responses have a token at least, and e^.3 is above the cap
    assert metrics["actor/grad_norm"] == pytest.approx(weight * plain["actor/grad_norm"], rel=1e-4)
    assert metrics["rollout/weight_mean"] == pytest.approx(weight)


@only_grpo
def test_the_effective_sample_size_falls_with_unequal_weights(algo, toy_run):
    """(sum w)^2 / (n * sum w^2) over the tokens, from the weights themselves."""
    found = []
    real = algo.rollout_weights

    def record(*args):
        found.append((real(*args), args[2]))
        return found[-1][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(algo, "rollout_weights", record)
        one = {"total_iterations": 1}
        _, metrics = toy_run(old_logprobs="corrected", is_level="sequence", is_cap=9.0, top_p=0.3, **one)
    weights = found[0][0][found[0][1]].double()
    expected = weights.sum() ** 2 / (len(weights) * weights.square().sum())
    assert metrics[1]["rollout/ess"] == pytest.approx(expected.item(), abs=1e-6) and expected < 0.99
