"""Variants of the advantage, and of which prompts and responses count: each does what its head says."""

import itertools
import statistics

import pytest
import torch
from conftest import make_model, read_rows, refusal
from ranks import load_script
from test_variants import ROOT, SOME_END, folder, resumed, train, variant  # noqa: F401
from transformers import AutoTokenizer

# ruff: noqa: F811 (fixtures)

grpo = load_script(ROOT / "grpo_llm.py")


# --- the advantage


@pytest.mark.parametrize("size", [2, 3, 4])
def test_maxrl_climbs_the_logarithm_of_the_chance(size, variant):
    """2602.02710, eq. 6: over all groups, the mean gradient is that of -sum (1-p)^k/k, k < G; REINFORCE's is p's."""
    group_advantages, p = variant("maxrl").group_advantages, 0.3
    groups = torch.tensor(list(itertools.product([0.0, 1.0], repeat=size)), dtype=torch.float64)
    chances = (p * groups + (1 - p) * (1 - groups)).prod(1)

    def gradient(estimator):
        advantages = group_advantages(groups.flatten(), size, estimator).view(groups.shape)
        return (chances @ (advantages * (groups - p)).mean(1)).item()  # by the logit of p

    assert gradient("maxrl") == pytest.approx(sum((1 - p) ** (k - 1) for k in range(1, size)) * p * (1 - p))
    assert gradient("dr_grpo") == pytest.approx((size - 1) / size * p * (1 - p))
    scores = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0])  # the rarer a success, the more it counts
    third = 1 / 3
    assert group_advantages(scores, 4, "maxrl").tolist() == pytest.approx([3, -1, -1, -1, third, third, third, -1])


def test_optimal_baseline_weighs_scores_by_lengths(variant, train, spy):
    algo = variant("optimal_baseline")
    scores, lengths = torch.tensor([1.0, 0, 0, 1, 1, 0]), torch.tensor([1, 3, 2, 2, 5, 5])
    assert algo.group_advantages(scores, 2, "opo", lengths).tolist() == [0.75, -0.25, -0.5, 0.5, 0.5, -0.5]
    calls = spy(algo, "group_advantages")
    (m,) = train("optimal_baseline", minibatch_size=16, total_iterations=1, **SOME_END)[1:]
    (((_, _, estimator, lengths), advantages),) = calls
    assert estimator == "opo" and lengths.float().mean().item() == m["response/length_mean"] < 32
    tokens = (lengths * advantages).view(4, 4).sum(1)  # over the tokens of a group, they are 0 in the mean
    assert tokens.abs().max() < 1e-5 < advantages.abs().max()


# Of four groups of four. The first differs in one score only, the second in the other, the third in both, the last in
# none.
TABLED = """
def tabled(prompts, responses, answers):
    wide = [5.0, 5.0, 5.0, 5.0, 0.0, 90.0, 30.0, 0.0, 0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    narrow = [0.0, 0.0, 1.0, 1.0, 0.1, 0.1, 0.1, 0.1, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    return {"wide": wide, "narrow": narrow}
"""


@pytest.mark.parametrize("weights", [(), (2.0, 0.5)])
def test_multi_reward_compares_each_part_then_sums(weights, variant, train, folder, spy):
    """No range hides another: the third group, which differs in both, has the sum of what each alone would give."""
    (folder / "tabled.py").write_text(TABLED)
    losses = spy(variant("multi_reward"), "policy_loss")
    flags = {"reward": f"{folder}/tabled.py:tabled", "reward_weights": weights, "total_iterations": 1}
    metrics = train("multi_reward", **flags)
    (_, _, advantages, *_), _ = losses[-1]  # of the whole batch, for the log: (B,L)
    used = advantages.sum(1) / (advantages != 0).sum(1).clamp(min=1)
    a, b = weights or (1.0, 1.0)
    step, wide = 0.75**0.5, torch.tensor([-30.0, 60.0, 0.0, -30.0]) / 1800**0.5  # (score - mean) / std, by hand
    narrow = torch.tensor([-step, -step, step, step])
    expected = torch.cat([b * narrow, a * wide, (a + b) * narrow, torch.zeros(4)])
    assert torch.allclose(used, expected / expected.std(), atol=1e-4)
    assert metrics[1]["group/zero_std_frac"] == 0.25


def test_multi_reward_weighs_every_curve_and_completion(train, tmp_path):
    metrics = train("multi_reward", reward="letters", reward_weights=(2.0, -0.5), eval_rows=3, run_name="run")
    for step, kind in (3, "eval"), (3, "eval_sampled"):
        rows = read_rows(tmp_path / f"run/completions/{kind}_{step:06d}.jsonl")
        for row in rows:
            text = row["response"]
            assert row["parts"] == {"early": 2 * (sum(c < "m" for c in text) / 9), "size": -0.5 * (len(text) / 99)}
            assert row["score"] == sum(row["parts"].values())
        found = metrics[step][kind.replace("eval", "eval/score", 1)]
        assert found == pytest.approx(statistics.mean(row["score"] for row in rows), abs=1e-6)
    assert all(m["reward/mean"] == pytest.approx(m["part/early"] + m["part/size"], abs=1e-6) for m in metrics[1:])


def test_process_reward_credits_the_token_that_ends_a_piece(variant, train, folder, spy):
    algo = variant("process_reward")
    texts = ["ab", "abc", "abc", "abcde", "abcde"]  # the third token is half a character or nothing, the last the EOS
    assert algo.credit(texts, [(2, 1.0), (3, 2.0), (4, 0.5), (5, 0.25)]) == [1.0, 2.0, 0.0, 0.75, 0.0]
    assert algo.credit(["a\ufffd", "a\ufffd", "aé"], [(2, 1.0)]) == [0, 0, 1.0]  # a character of three tokens
    assert algo.credit(texts, 3) == [0, 0, 0, 0, 3.0]  # a number is the last token's, as ever
    assert "a piece that ends at 6, but the text has 5 characters" in refusal(lambda: algo.credit(texts, [(6, 1.0)]))
    calls, batches = spy(algo, "gae"), spy(algo, "to_batch")
    (m,) = train("process_reward", total_iterations=1, kl_reward_coef=0.0)[1:]
    (((rewards, _, mask, *_), _),), (((_, responses, _), _),) = calls, batches
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for row, valid, response in zip(rewards, mask, responses):
        expected = [0.1 * (i > 2 and tokenizer.decode([i]) < "m") for i in response.ids]
        expected[-1] -= 0.5 * response.truncated
        assert torch.allclose(row[valid], torch.tensor(expected), atol=1e-6)
    assert m["part/pieces"] + m["part/cut"] == pytest.approx(m["reward/mean"], abs=1e-6)


def test_vc_ppo_has_two_lambdas(train, variant, spy):
    calls = spy(variant("vc_ppo"), "gae")
    metrics = train("vc_ppo", total_iterations=2, kl_reward_coef=0.0, critic_warmup_iterations=1)
    assert [args[4] for args, _ in calls] == [0.95, 1.0] * 2
    assert "actor/loss" not in metrics[1] and "actor/loss" in metrics[2]  # pretraining of the values, then both
    (rewards, _, mask, *_), (_, returns) = calls[1]
    totals = torch.where(mask, rewards, 0).sum(1, keepdim=True)
    assert torch.allclose(returns[mask], totals.expand_as(mask)[mask], atol=1e-5)  # Monte Carlo: the score everywhere


def test_shared_critic_trains_one_model_by_both_losses(train, tmp_path, spy):
    """The gradient is linear in --value-coef, in the backbone, too; the head has its own learning rate."""
    train("shared_critic", critic_lr=1e-1, run_name="start")  # at its start the head is zero and passes no gradient on
    seen = spy(torch.optim.AdamW, "step", lambda optimizer, *_: optimizer.param_groups)
    gradients = spy(torch.nn.utils, "clip_grad_norm_", lambda weights, _: [p.grad.clone() for p in weights])
    flags = {"model": f"{tmp_path}/start/final", "total_iterations": 1, "warmup_iterations": 2, "batch_size": 8}
    for value_coef in (0.0, 1.0, 3.0):
        train("shared_critic", **flags, value_coef=value_coef, lr=1e-3, critic_lr=1e-2)
    for none, one, three in zip(*gradients, strict=True):
        assert torch.allclose(three - none, 3 * (one - none), rtol=1e-3, atol=1e-5)
    changed = [(one - none).abs().max() > 1e-6 for none, one, _ in zip(*gradients, strict=True)]
    assert sum(changed) > 15 and [group["lr"] for group in seen[0]] == [5e-4, 5e-3]
    assert [p.shape for p in seen[0][1]["params"]] == [(1, 32), (1,)]


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_shared_critic_saves_and_resumes_its_head(lora_rank, train, tmp_path):
    """With LoRA, peft switches it off and transformers not on. `final` is a language model with a head beside it."""
    flags = {"lora_rank": lora_rank, "total_iterations": 3, "save_every": 1, "lr": 1e-2, "critic_lr": 1e-2}
    resumed(train, "shared_critic", 2, **flags)
    heads = []
    for step in (2, 3):
        weights, moments = torch.load(tmp_path / f"whole/checkpoints/step_{step:06d}.pt", weights_only=True)["policy"]
        heads.append(torch.cat([p.flatten() for name, p in weights.items() if "score." in name]))
        assert len(moments["state"]) == len(weights)
    assert heads[0].numel() == 33 and heads[0].abs().max() > 1e-3 and (heads[0] != heads[1]).all()


def test_distill_rewards_each_token_with_the_teachers_surprise(variant, train, folder, spy):
    calls, used = spy(variant("distill"), "kl_penalty"), spy(variant("distill"), "policy_loss")
    teacher = make_model(folder / "teacher", seed=7, hidden_size=48, num_attention_heads=4, head_dim=12)
    metrics = train("distill", ref_model=teacher, total_iterations=12, lr=1e-2)
    (student, other, kind), kl = calls[0]
    assert kind == "k1" and torch.equal(kl, student - other) and kl.abs().max() > 0.1
    (_, _, advantages, *_), _ = used[0]
    assert {*advantages.flatten().tolist()} <= {*(-kl).flatten().tolist()}
    assert metrics[-1]["kl/mean"] < 0.8 * metrics[1]["kl/mean"]  # it learns from its own samples
    path = folder / "teacher" / "tokenizer.json"
    path.write_text(path.read_text().replace('"q"', '"Q"'))
    assert "has another tokenizer than --model" in refusal(lambda: train("distill", ref_model=teacher))


def test_self_distill_rates_tokens_after_another_right_answer(variant, train, folder, spy):
    """Against a pass of its own for each row, whose prompt is written out here; 0 where there is no solution."""
    algo = variant("self_distill")
    scores = [1.0, 0, 0.5, 0, 0, 0, 0, 1, 0]  # a group without a success has none, the only success none for itself
    results = [{"score": score, "response": text} for score, text in zip(scores, "abcdefghi")]
    assert algo.find_solutions(results, 3, 0.5) == ["c", "a", "a", None, None, None, "h", None, "h"]
    batches, used, policies = spy(algo, "to_batch"), spy(algo, "policy_loss"), spy(algo, "Policy")
    (m,) = train("self_distill", reward="binary", total_iterations=1, lr=0.0, max_response_length=8)[1:]
    ((rows, responses, _), (_, mask, *_)), _ = batches
    (_, policy), ((_, _, advantages, *_), _) = policies[0], used[-1]  # the last call is for the log: the whole batch
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    texts = tokenizer.batch_decode([r.ids for r in responses], skip_special_tokens=True)
    right = [bool(text) and text[0] < "5" for text in texts]

    def rate(prompt, ids):
        tokens = torch.tensor([prompt + ids])
        actions = torch.arange(tokens.shape[1])[None] >= len(prompt) - 1
        actions[0, -1] = False
        return policy(tokens, actions)[0][actions].detach()

    taught = 0
    for b, (row, response) in enumerate(zip(rows, responses)):
        others = [j for j in range(b - b % 4, b - b % 4 + 4) if j != b and right[j]]
        taught += bool(others)
        expected = torch.zeros(len(response.ids))
        if others:
            hint = f"\nCorrect solution:\n\n{texts[others[0]]}\n\nCorrectly solve the original question."
            asked = row["input_ids"] + tokenizer(hint, add_special_tokens=False)["input_ids"]
            expected = rate(asked, response.ids) - rate(row["input_ids"], response.ids)
        assert torch.allclose(advantages[b][mask[b]], expected, atol=1e-4)
    assert 0 < taught < 16 and m["teacher/taught_frac"] == taught / 16


# --- which prompts and responses count


def test_dapo_trains_on_mixed_groups_and_punishes_length(variant, train, spy):
    """Filtered before the punishment: without it every group has both scores. 2503.14476, eq. 13."""
    batches = spy(variant("dapo"), "group_advantages", lambda scores, *_: scores.clone())
    trained = spy(variant("dapo"), "to_batch", lambda rows, responses, _: [len(r.ids) for r in responses])
    metrics = train("dapo", reward="binary", max_draws=8, overlong_buffer=25, **SOME_END)
    for scores, lengths, m in zip(batches, trained, metrics[1:], strict=True):
        assert len(scores) == 16 == 4 * m["group/trained"] and 0 < m["reward/sampled_mean"] < 1
        plain = (scores + ((torch.tensor(lengths) - 7) / 25).clamp(0, 1)).view(4, 4)
        assert torch.allclose(plain, plain.round(), atol=1e-6) and len({*lengths}) > 2
        assert (plain.amin(1) < 0.5).all() and (plain.amax(1) > 0.5).all()
    assert max(m["group/generated"] for m in metrics[1:]) > 4


def test_dapo_without_a_group_takes_no_step(train, spy):
    """With a punishment that differs, which the filter does not see, and a KL loss that would train."""
    steps = spy(torch.optim.AdamW, "step")
    (m,) = train("dapo", reward="constant", overlong_buffer=12, kl_loss_coef=0.1, max_draws=2, total_iterations=1)[1:]
    assert not steps and m["group/trained"] == 0 and m["group/generated"] == 8 and "actor/loss" not in m


def test_replay_asks_again_what_nobody_answered(train, variant, spy):
    """At most half a batch of it, after a restart, too."""
    scored = spy(variant("replay"), "compute_scores")
    flags = {"reward": "binary", "total_iterations": 6, "save_every": 3, "batch_size": 8, "group_size": 2}
    whole = resumed(train, "replay", 3, **flags)
    failed = set()
    for ((_, _, rows, _), results), m in zip(scored, whole[1:]):
        asked, scores = [row["prompts"] for row in rows[::2]], [result["score"] for result in results]
        again = min(4, len(failed))
        assert m["group/replayed"] == again and failed.issuperset(asked[:again])
        failed = {prompt for prompt, *pair in zip(asked, scores[::2], scores[1::2]) if max(pair) == 0}
        assert m["group/failed"] == len(failed)
    assert max(m["group/failed"] for m in whole[1:-1]) > 4


def test_mask_truncated_trains_on_finished_responses_only(variant, train, spy):
    """The others are in no denominator; the scores of all are in the mean and std of a group."""
    algo = variant("mask_truncated")
    batches, plain = spy(algo, "to_batch"), spy(algo, "group_advantages")
    used, shares = spy(algo, "policy_loss"), spy(algo, "aggregate")
    train("mask_truncated", total_iterations=1, minibatch_size=16, microbatch_tokens=10**6)
    ((_, responses, _), (_, mask, *_)), ((scores, *_), advantages) = batches[0], plain[0]
    finished = torch.tensor([not response.truncated for response in responses])
    assert 4 < finished.sum() < 12 and torch.allclose(advantages, grpo.group_advantages(scores, 4, "grpo"))
    (_, _, given, *_), _ = used[-1]
    assert torch.equal(given, torch.where(mask & finished[:, None], advantages[:, None], 0))
    (_, trained, _, num_tokens, num_rows, _), _ = shares[0]
    assert trained.sum() == num_tokens == mask[finished].sum()
    assert trained.any(1).sum() == num_rows == finished.sum()
