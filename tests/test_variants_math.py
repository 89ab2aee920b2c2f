"""Variants of the loss, the KL, the advantage, and of what counts: each does what its head says."""

import itertools
import math

import pytest
import torch
from helpers import make_model, refusal, run_lines, write_rows
from test_variants import ROOT, SOME_END, batches_of, folder, losses_of, resumed, told_otherwise, train, variant  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer, GraniteConfig

# ruff: noqa: F811 (fixtures)

F = torch.float64
ONE_PASS = {"minibatch_size": 16, "microbatch_tokens": 10**6, "total_iterations": 1, "kl_loss_coef": 0.0}

RATIOS = [0.05, 0.75, 1.0, 1.3, 6.0]
# Variant, flags, the gradient of a token by its log-prob where A = 2 and where A = -2, by ratio: a multiple of -A.
BY_HAND = [
    ("cispo", {"clip_low": 0.3, "clip_high": 0.4}, [0.7, 0.75, 1, 1.3, 1.4], [0.7, 0.75, 1, 1.3, 1.4]),
    ("dual_clip", {"dual_clip": 3.0}, [0.05, 0.75, 1, 0, 0], [0, 0, 1, 1.3, 0]),
    ("plain_pg", {}, [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]),
    # 2511.20347: ratio * sech^2(tau/2 * (ratio - 1)), with a tau of 1 and of 1.05
    ("sapo", {}, *([r / math.cosh(tau / 2 * (r - 1)) ** 2 for r in RATIOS] for tau in (1.0, 1.05))),
]


@pytest.mark.parametrize("name, flags, up, down", BY_HAND)
def test_the_gradient_of_a_token(name, flags, up, down, variant):
    new = torch.tensor([RATIOS, RATIOS], dtype=F).log().requires_grad_()
    advantages = torch.tensor([[2.0], [-2.0]], dtype=F).expand(2, 5)
    losses, clipped = losses_of(variant(name), new, torch.zeros_like(new), advantages, flags)
    (slopes,) = torch.autograd.grad(losses.sum(), new)
    weights = torch.tensor([up, down], dtype=F)
    assert torch.allclose(slopes, -advantages * weights)
    if name != "plain_pg":  # which logs that nothing is clipped
        assert torch.equal(clipped > 1e-9, (weights - new.exp()).abs() > 1e-9)


def test_gspo_clips_whole_responses(variant):
    """2507.18071, eq. 5 and 7. The geometric means of the ratios are e^.02 and e^.04; the clip is at 1.03."""
    new = torch.tensor([[0.05, -0.01, 9.0], [0.0, 0.08, 0.04]], dtype=F).requires_grad_()
    mask = torch.tensor([[True, True, False], [True, True, True]])
    algo, given = variant("gspo"), (new, torch.zeros_like(new), torch.full_like(new, 2.0))
    losses, clipped = losses_of(algo, *given, {"clip_low": 0.02, "clip_high": 0.03}, mask=mask)
    (slopes,) = torch.autograd.grad((algo.token_weights(mask, algo.Args.loss_agg, 3) * losses).sum(), new)
    each = -2 * math.exp(0.02) / 2 / 2  # of two tokens in one of two responses
    assert torch.allclose(slopes, torch.tensor([[each, each, 0], [0, 0, 0]], dtype=F))
    assert clipped.tolist() == [[False] * 3, [True] * 3]


# Before, after, advantage; whether DPPO blocks by |p - p_old| > .15, and by the KL of two outcomes > .12.
MOVES = [
    (1e-4, 1e-3, 1, False, False),  # rare: ten times as likely and still rare, which PPO would clip
    (0.80, 0.96, 1, True, True),  # likely: PPO would let a ratio of 1.2 pass. .8*ln(.8/.96) + .2*ln(.2/.04) = .18
    (0.96, 0.80, -1, True, False),  # .96*ln(.96/.8) + .04*ln(.04/.2) = .11
    (0.80, 0.96, -1, False, False),  # towards where it was
    (0.60, 0.30, -1, True, True),
    (1.00, 0.50, -1, True, True),  # of a log-prob of 0 in float32
]


@pytest.mark.parametrize("divergence, delta, column", [("tv", 0.15, 3), ("kl", 0.12, 4)])
def test_dppo_blocks_by_probability_around_the_sampler(divergence, delta, column, variant, train, monkeypatch):
    """2602.04879, section 4."""
    old, new, advantages = torch.tensor([move[:3] for move in MOVES], dtype=F).T[:, None]
    logprobs, blocks = new.log().requires_grad_(), torch.tensor([[move[column] for move in MOVES]])
    flags = {"divergence": divergence, "delta": delta}
    losses, blocked = losses_of(variant("dppo"), logprobs, old.log(), advantages, flags)
    (slopes,) = torch.autograd.grad(losses.sum(), logprobs)
    assert torch.equal(blocked, blocks.float())
    assert torch.allclose(slopes, torch.where(blocks, 0, -advantages * new / old))
    losses, _ = losses_of(variant("dppo"), logprobs, old.log(), advantages, flags | {"log_ratio_coef": 0.5})
    (held,) = torch.autograd.grad(losses.sum(), logprobs)
    assert torch.allclose(held - slopes, (new / old).log())  # of half its square
    told_otherwise(variant("dppo"), monkeypatch, [0.003] * 12)  # the ratio of the first step has that in it
    assert train("dppo", total_iterations=1, lr=0.0)[1]["actor/ratio_mean"] == pytest.approx(math.exp(0.003))


def test_bypass_leaves_bad_responses_behind(variant, train, monkeypatch, spy):
    """2512.02556, eq. 9. By hand the log-prob has fallen by .6, .9, .9 and .3 per token of the mask."""
    algo = variant("bypass")
    logprobs = torch.tensor([[-1.9, -1.9, -1.0], [-1.9, -1.9, -1.9], [-1.9, -1.9, -1.9], [-1.9, -0.7, torch.nan]])
    mask = torch.tensor([[True] * 3] * 3 + [[True, True, False]])
    advantages = torch.tensor([[-1.0], [-1.0], [1.0], [-1.0]]).expand(4, 3)
    before = torch.full((4, 3), -1.0)
    for delta, rows in (0.5, [0, 1]), (0.2, [0, 1, 3]), (1.0, []):
        given = logprobs, before, advantages, {"off_policy_delta": delta}
        weights = torch.ones_like(before)
        left = losses_of(algo, *given, mask=mask, rollout_logprobs=before, weights=weights)[0] == 0
        assert left.all(1).nonzero().flatten().tolist() == rows and torch.equal(left.all(1), left.any(1))
    told_otherwise(algo, monkeypatch, [-0.004] * 12, [0.0] * 12)  # every other response was likelier, it says
    written = spy(algo, "write_completions")
    metrics = train("bypass", **ONE_PASS, lr=0.0, off_policy_delta=0.002)[1]
    left = (next(batches_of(written)).advantages[::2] < 0).any(1).sum().item()
    assert 0 < left < 8 and metrics["actor/off_policy_frac"] == left / 16


def test_value_clip_pushes_no_value_far(variant, train, spy):
    """Old value 0, clip 0.2: beyond it a value is still pulled back, but pushed no further, neither up nor down."""
    algo, returns = variant("value_clip"), torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.1, -1.0]])
    new = torch.tensor([[0.1, 0.5, -0.5, 1.5, 0.3, -0.5]]).requires_grad_()
    given = {"critic": lambda *_: new, "returns": returns, "values": torch.zeros(1, 6), "mb": ([0], slice(6))}
    given |= {"tokens": returns, "mask": returns != 0, "value_weights": torch.ones(1, 6), "args": {"value_clip": 0.2}}
    found = run_lines(algo, "mb_values", "loss", **given)
    (slopes,) = torch.autograd.grad(found.loss, new)
    assert torch.allclose(found.mb_losses, torch.tensor([0.81, 0.64, 2.25, 0.64, 0.04, 0.64]) / 2)
    assert torch.allclose(slopes, torch.tensor([-0.9, 0, -1.5, 0, 0.2, 0]))
    # In all epochs of the second iteration, the clip is around the values of the rollout. A return is the score.
    calls, scored, packed = spy(algo.Critic, "forward"), spy(algo, "compute_scores"), spy(algo, "pack")
    flags = {"ppo_epochs": 3, "microbatch_tokens": 10_000, "total_iterations": 2, "gamma": 1.0, "lam": 1.0}
    metrics = train("value_clip", **flags, kl_reward_coef=0.0, value_clip=1e-3)[2]
    (_, results), (_, [(rows, _)]) = scored[-1], packed[-1]
    scores = torch.tensor([results[row]["score"] for row in rows])[:, None]
    ((_, _, mask), old), *epochs = calls[-4:]
    each = torch.stack([values for _, values in epochs])
    plain, bounded = ((x - scores)[:, mask].square() / 2 for x in (each, each.clamp(old - 1e-3, old + 1e-3)))
    loss = torch.maximum(plain, bounded).mean().item()
    assert metrics["critic/loss"] == pytest.approx(loss, rel=1e-5) != pytest.approx(plain.mean().item(), rel=1e-4)
    assert torch.equal(old, each[0]) and old.abs().max() > 1e-3


def test_target_kl_leaves_out_a_step_and_all_later_ones(variant, train, spy):
    steps = spy(torch.optim.AdamW, "step", lambda optimizer, *_: optimizer.param_groups[0]["params"])
    shares = spy(torch.Tensor, "backward", lambda loss: loss.item())
    flags = {"batch_size": 16, "minibatch_size": 4, "microbatch_tokens": 10_000, "ppo_epochs": 2, "total_iterations": 1}
    assert train("target_kl", **flags, target_kl=1e9)[1]["actor/steps"] == 8 and len(steps) == 16
    # The first step changes nothing before it is taken, so its KL is 0. Every later minibatch has one.
    stopped = train("target_kl", **flags, target_kl=1e-9)[1]
    assert stopped["actor/steps"] == 1 and len(steps) == 16 + 1 + 8 and len(shares) == 16 + 2 + 8  # the critic goes on
    assert stopped["actor/loss"] == shares[16] and stopped["actor/approx_kl"] > 0
    assert all(p.grad is None for p in steps[16])  # of the minibatch that was left out nothing goes on


def test_adaptive_kl_follows_its_target_and_resumes(variant, train):
    controller, found = variant("adaptive_kl").AdaptiveKL(0.02, 0.05, 1000), []
    for kl in (0.0, 0.05, 0.055, 0.5, -1.0):  # far below, on target, 10% above, far above, far below
        controller.update(kl, 256)
        found.append(round(controller.coef, 5))
    assert found == [0.01898, 0.01898, 0.01946, 0.02046, 0.01941]
    flags = {"kl_reward_coef": 0.5, "kl_target": 1e-4, "kl_horizon": 20.0, "critic_warmup_iterations": 1}
    whole = resumed(train, "adaptive_kl", 3, **flags, total_iterations=4, save_every=3, lr=1e-2)
    assert whole[1]["kl/coef"] == whole[2]["kl/coef"] == 0.5  # not steered while the actor does not move
    for before, m in itertools.pairwise(whole[2:]):
        error = max(-0.2, min(0.2, before["kl/mean"] / 1e-4 - 1))
        assert m["kl/coef"] == before["kl/coef"] * (1 + error * 8 / 20) != before["kl/coef"]
        taken = m["reward/mean"] - m["reward/total_mean"]  # it is this coefficient that the rewards have
        assert taken / (m["kl/mean"] * m["response/length_mean"]) == pytest.approx(m["kl/coef"], rel=1e-3)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_gradient_has_the_value_of_one_kind_and_the_gradient_of_the_kl(variant, kind):
    """The mean under the policy of a token's gradient, against that of KL(pi || ref) itself."""
    kl_penalty = variant("kl_gradient").kl_penalty
    logits, ref = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=F)
    logits.requires_grad_()
    logprobs, ref = logits.log_softmax(-1), ref.log_softmax(-1)
    kl = (logprobs.exp() * (logprobs - ref)).sum()
    mean = lambda kind: (logprobs.exp().detach() * kl_penalty(logprobs, ref, kind)).sum()  # noqa: E731
    right, plus, plain = [
        torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (kl, mean(f"{kind}+"), mean(kind))
    ]
    assert torch.allclose(plus, right) and not torch.allclose(plain, right, rtol=0.1)
    assert mean(f"{kind}+") == mean(kind) and torch.equal(kl_penalty(logprobs, ref, "abs"), (logprobs - ref).abs())


@pytest.mark.parametrize("size", [2, 3, 4])
def test_maxrl_climbs_the_logarithm_of_the_chance(size, variant):
    """2602.02710, eq. 6: over all groups, the mean gradient is that of -sum (1-p)^k/k, k < G; REINFORCE's is p's."""
    groups, p = torch.tensor(list(itertools.product([0.0, 1.0], repeat=size)), dtype=torch.float64), 0.3
    given = {"scores": groups.flatten(), "kl": torch.zeros(1, 1), "mask": torch.tensor([[True]])}
    chances = (p * groups + (1 - p) * (1 - groups)).prod(1)

    def gradient(estimator):
        args = {"group_size": size, "estimator": estimator}
        advantages = run_lines(variant("maxrl"), "rewards", "advantages", **given, args=args).advantages
        return (chances @ (advantages.view(groups.shape) * (groups - p)).mean(1)).item()  # by the logit of p

    assert gradient("maxrl") == pytest.approx(sum((1 - p) ** (k - 1) for k in range(1, size)) * p * (1 - p))
    assert gradient("dr_grpo") == pytest.approx((size - 1) / size * p * (1 - p))


# Of four groups of four, the first differs in one score, the second in the other, the third in both, the last in none.
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
    written = spy(variant("multi_reward"), "write_completions")
    flags = {"reward": f"{folder}/tabled.py:tabled", "reward_weights": weights, "total_iterations": 1}
    metrics = train("multi_reward", **flags)
    (batch,) = batches_of(written)
    a, b = weights or (1.0, 1.0)
    step, wide = 0.75**0.5, torch.tensor([-30.0, 60.0, 0.0, -30.0]) / 1800**0.5  # (score - mean) / std, by hand
    narrow = torch.tensor([-step, -step, step, step])
    expected = torch.cat([b * narrow, a * wide, (a + b) * narrow, torch.zeros(4)])
    expected = torch.where(batch.mask, (expected / expected.std())[:, None], 0)
    assert torch.allclose(batch.advantages, expected, atol=1e-4)
    assert metrics[1]["group/zero_std_frac"] == 0.25


def test_process_reward_credits_the_token_that_ends_a_piece(variant, train, folder, spy):
    algo = variant("process_reward")
    texts = ["ab", "abc", "abc", "abcde", "abcde"]  # the third token is half a character or nothing, the last the EOS
    assert algo.credit(texts, [(2, 1.0), (3, 2.0), (4, 0.5), (5, 0.25)]) == [1.0, 2.0, 0.0, 0.75, 0.0]
    assert algo.credit(["a\ufffd", "a\ufffd", "aé"], [(2, 1.0)]) == [0, 0, 1.0]  # a character of three tokens
    assert algo.credit(texts, 3) == [0, 0, 0, 0, 3.0]  # a number is the last token's, as ever
    calls, batches = spy(algo, "masked_whiten"), spy(algo, "to_batch")
    train("process_reward", total_iterations=1, kl_reward_coef=0.0, lam=0.0)  # at first all values are 0, so A is r
    (((rewards, mask), _),), (((_, responses, _), _),) = calls, batches
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for row, valid, response in zip(rewards, mask, responses):
        expected = [0.1 * (i > 2 and tokenizer.decode([i]) < "m") for i in response.ids]
        expected[-1] -= 0.5 * response.truncated
        assert torch.allclose(row[valid], torch.tensor(expected), atol=1e-6)


def test_distill_rewards_each_token_with_the_teachers_surprise(variant, train, folder, spy):
    calls, written = spy(variant("distill"), "kl_penalty"), spy(variant("distill"), "write_completions")
    teacher = make_model(folder / "teacher", seed=7, hidden_size=48, num_attention_heads=4, head_dim=12)
    metrics = train("distill", ref_model=teacher, total_iterations=12, lr=1e-2)
    (student, other, kind), kl = calls[1]  # after that of the sampler and the training pass
    assert kind == "k1" and torch.equal(kl, student - other) and kl.abs().max() > 0.1
    assert torch.equal(next(batches_of(written)).advantages, -kl)
    assert metrics[-1]["kl/mean"] < 0.8 * metrics[1]["kl/mean"]  # it learns from its own samples


def test_distill_has_the_exact_gradient_of_the_kl_over_all_tokens(variant, folder):
    """In chunks of three actions, as whole logits have it; the teacher is wider and scales its logits."""
    models = [AutoModelForCausalLM.from_pretrained(folder / "model")]
    size = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    size |= {"vocab_size": models[0].config.vocab_size, "logits_scaling": 0.2}
    models.append(AutoModelForCausalLM.from_config(GraniteConfig(**size)))
    models[1].requires_grad_(False)
    student, teacher = (variant("distill").Policy(model, 0.7) for model in models)
    student.chunk_elements = 3 * size["vocab_size"]
    tokens, mask, weights = torch.randint(3, 40, (5, 9)), torch.rand(5, 9) < 0.6, torch.rand(5, 9)
    *_, kl = student(tokens, mask, False, teacher, teacher(tokens, mask, only_hidden=True))
    logp, logq = ((model(tokens).logits / 0.7).log_softmax(-1) for model in models)
    whole = torch.where(mask, (logp.exp() * (logp - logq)).sum(-1), 0)
    found = [torch.autograd.grad((weights * x).sum(), [*models[0].parameters()]) for x in (kl, whole)]
    assert torch.allclose(kl, whole, atol=1e-5) and kl.max() > 0.1
    assert all((a - b).abs().max() <= 1e-6 * max(1, b.abs().max()) for a, b in zip(*found, strict=True))


# --- which prompts and responses count


def test_dapo_trains_on_mixed_groups_and_punishes_length(variant, train, spy):
    """Filtered before the punishment: without it every group has both scores. 2503.14476, eq. 13."""
    written = spy(variant("dapo"), "write_completions")
    metrics = train("dapo", reward="binary", max_draws=8, overlong_buffer=25, eval_every=1, **SOME_END)
    for batch, m in zip(batches_of(written), metrics[1:], strict=True):
        assert len(batch.score) == 16 == 4 * m["group/trained"] and 0 < m["reward/sampled_mean"] < 1
        plain = (batch.score + ((batch.length - 7) / 25).clamp(0, 1)).view(4, 4)
        assert torch.allclose(plain, plain.round(), atol=1e-6) and len({*batch.length.tolist()}) > 2
        assert torch.allclose(batch.advantages, batch.plain, atol=1e-5)
        assert (plain.amin(1) < 0.5).all() and (plain.amax(1) > 0.5).all()
    assert max(m["group/generated"] for m in metrics[1:]) > 4


def test_replay_draws_from_its_pools(train, variant, spy, tmp_path, folder):
    """Half of a batch at most from the hard pool, an eighth from the easy one, the rest from neither, also after a
    restart; not with other data."""
    scored = spy(variant("replay"), "compute_scores")
    flags = {"reward": "binary", "total_iterations": 6, "save_every": 3, "batch_size": 8, "group_size": 2}
    whole = resumed(train, "replay", 3, **flags, easy_share=0.125)
    rates = {}
    for ((_, _, rows, _), results), m in zip(scored, whole[1:]):
        asked, scores = [row["prompts"] for row in rows[::2]], [result["score"] for result in results]
        hard, easy = ({prompt for prompt, rate in rates.items() if rate == end} for end in (0, 1))
        num_hard, num_easy = min(4, len(hard)), min(1, len(easy))
        assert hard.issuperset(asked[:num_hard]) and easy.issuperset(asked[num_hard : num_hard + num_easy])
        assert not (hard | easy).intersection(asked[num_hard + num_easy :]) and len({*asked}) == 8
        assert [m[f"pool/{name}"] for name in ("hard", "easy", "seen")] == [len(hard), len(easy), len(rates)]
        rates |= {prompt: (one + two) / 2 for prompt, one, two in zip(asked, scores[::2], scores[1::2])}
    assert whole[6]["pool/hard"] > 4 and whole[6]["pool/easy"] > 1
    other = write_rows(tmp_path / "other.jsonl", [{"question": "abc", "answer": "1"}])
    other = {"dataset": other, "run_name": "part", "resume": True}
    assert "are of other prompts than" in refusal(lambda: train("replay", **flags | other))


def test_dapo_with_one_draw_has_the_gradient_of_the_groups_that_differ(variant, train, spy):
    """Of four groups the second and the last agree; grpo_llm.py takes a step for each. At a rate of 0 nothing moves."""
    steps = spy(torch.nn.utils, "clip_grad_norm_", lambda weights, _: [p.grad.clone() for p in weights])
    flags = {"reward": "half", "lr": 0.0, "entropy_coef": 0.1, "total_iterations": 1, "max_draws": 1}
    flags |= {"kl_loss_coef": 0.01, "loss_agg": "seq-mean-token-mean"}
    train("dapo", on=ROOT / "grpo_llm.py", **flags, minibatch_size=4)
    train("dapo", **flags, minibatch_size=16)
    order = torch.rand(4, generator=variant("dapo").random_stream("minibatches", 1, 1)).argsort().tolist()
    for one, two, both in zip(*[steps[place] for place in range(4) if order[place] in (0, 2)], steps[4], strict=True):
        assert torch.allclose((one + two) / 2, both, atol=1e-6)
    assert "actor/loss" not in train("dapo", **flags | {"reward": "gsm8k"})[1] and len(steps) == 5  # all agree


def test_mask_truncated_trains_on_finished_responses_only(variant, train, spy):
    """The others are in no denominator; the scores of all are in the mean and std of a group."""
    written, passes = (spy(variant("mask_truncated"), name) for name in ("write_completions", "forward_all"))
    metrics = train("mask_truncated", **ONE_PASS, entropy_coef=0.1)[1]
    (batch,), (_, (_, entropy, _)) = batches_of(written), passes[0]
    assert 4 < batch.truncated.sum() < 12 and torch.allclose(batch.advantages, batch.plain, atol=1e-5)
    means = (batch.advantages + 0.1 * entropy).sum(1) / batch.length  # of a response
    assert metrics["actor/loss"] == pytest.approx(-means[~batch.truncated].mean().item(), rel=1e-5)
