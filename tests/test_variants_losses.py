"""Variants of the loss and of the KL: each does what its head says."""

import itertools
import math

import pytest
import torch
from test_variants import folder, losses_of, resumed, told_otherwise, train, variant  # noqa: F401

# ruff: noqa: F811 (fixtures)

F = torch.float64
ONE_PASS = {"minibatch_size": 16, "microbatch_tokens": 10**6, "total_iterations": 1, "kl_loss_coef": 0.0}

RATIOS = [0.05, 0.75, 1.0, 1.3, 3.1]
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
    losses, clipped = losses_of(variant(name), new, torch.zeros_like(new), advantages, **flags)
    (slopes,) = torch.autograd.grad(losses.sum(), new)
    weights = torch.tensor([up, down], dtype=F)
    assert torch.allclose(slopes, -advantages * weights)
    if name != "plain_pg":  # which logs that nothing is clipped
        assert torch.equal(clipped > 1e-9, (weights - new.exp()).abs() > 1e-9)


def test_gspo_clips_whole_responses(variant):
    """2507.18071, eq. 5 and 7. The geometric means of the ratios are e^.02 and e^.04; the clip is at 1.03."""
    new = torch.tensor([[0.05, -0.01, 9.0], [0.0, 0.08, 0.04]], dtype=F).requires_grad_()
    mask = torch.tensor([[True, True, False], [True, True, True]])
    algo = variant("gspo")
    args = algo.Args(model="m", clip_low=0.02, clip_high=0.03)
    losses, clipped = algo.policy_loss(new, torch.zeros_like(new), torch.full_like(new, 2.0), mask, args)
    loss = algo.aggregate(losses, mask, args.loss_agg, 5, 2, 3)
    (slopes,) = torch.autograd.grad(loss, new)
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
    old, new, advantages = torch.tensor([move[:3] for move in MOVES], dtype=F).T
    logprobs, blocks = new.log().requires_grad_(), torch.tensor([move[column] for move in MOVES])
    flags = {"divergence": divergence, "delta": delta}
    losses, blocked = losses_of(variant("dppo"), logprobs, old.log(), advantages, **flags)
    (slopes,) = torch.autograd.grad(losses.sum(), logprobs)
    assert torch.equal(blocked, blocks)
    assert torch.allclose(slopes, torch.where(blocks, 0, -advantages * new / old))
    told_otherwise(variant("dppo"), monkeypatch, [0.008] * 12)  # the ratio of the first step has that in it
    assert train("dppo", total_iterations=1, lr=0.0)[1]["actor/ratio_mean"] == pytest.approx(math.exp(0.008))


def test_icepop_weighs_tokens_within_a_band(variant, train, monkeypatch, spy):
    """2510.18855, eq. 1. The sampler claims 4% too little and too much for a token each, 2% too little for one."""
    algo = variant("icepop")
    told_otherwise(algo, monkeypatch, [0.0, 0.04, -0.04, 0.02] + [0.0] * 8)
    plain, used = spy(algo, "group_advantages"), spy(algo, "policy_loss")
    metrics = train("icepop", **ONE_PASS, is_low=0.97, is_high=1.03)[1]
    (_, advantages), ((_, _, weighted, mask, _), _) = (
        plain[0],
        used[-1],
    )  # the last call is for the log: the whole batch
    weights = torch.tensor([1, 0, 0, math.exp(0.02)] + [1] * 8)
    assert torch.allclose(weighted[mask[0]].view(16, 12), advantages[:, None] * weights, rtol=1e-5)
    assert metrics["rollout/zero_weight_frac"] == pytest.approx(2 / 12)
    assert metrics["rollout/weight_mean"] == pytest.approx(weights.mean().item(), rel=1e-5)


def test_icepop_leaves_bad_responses_behind(variant, train, monkeypatch, spy):
    """2512.02556, eq. 9. By hand the log-prob has fallen by .6, .9, .9 and .3 per token of the mask."""
    algo = variant("icepop")
    logprobs = torch.tensor([[-1.9, -1.9, -1.0], [-1.9, -1.9, -1.9], [-1.9, -1.9, -1.9], [-1.9, -0.7, torch.nan]])
    mask = torch.tensor([[True] * 3] * 3 + [[True, True, False]])
    advantages = torch.tensor([[-1.0], [-1.0], [1.0], [-1.0]]).expand(4, 3)
    for delta, rows in (0.5, [0, 1]), (0.2, [0, 1, 3]), (1.0, []):
        found = algo.left_behind(logprobs, torch.full((4, 3), -1.0), advantages, mask, delta)
        assert found.all(1).nonzero().flatten().tolist() == rows and torch.equal(found.all(1), found.any(1))
    told_otherwise(algo, monkeypatch, [-0.008] * 12, [0.0] * 12)  # every other response was likelier, it says
    plain, shares = spy(algo, "group_advantages"), spy(algo, "aggregate")
    metrics = train("icepop", **ONE_PASS, lr=0.0, off_policy_delta=0.005)[1]
    (_, advantages), ((losses, *_), _) = plain[0], shares[0]
    left = (advantages[::2] < 0).sum().item()
    assert 0 < left == (losses == 0).all(1).sum() < 8 and metrics["actor/off_policy_frac"] == left / 16


@pytest.mark.parametrize("kind", ["kl", "clip"])
def test_cov_holds_back_the_highest_covariances(kind, variant, train, spy):
    """2505.22617, listing 1: there |log rho| is added to the loss, or the policy gradient is taken away."""
    algo = variant("cov")
    logprobs, signs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    everywhere = torch.ones(2, 2, dtype=torch.bool)
    covariance, threshold = algo.token_covariances(logprobs, signs, everywhere, 0.5)
    assert covariance.tolist() == [[1.5, 0.5], [0.5, 1.5]] and threshold == pytest.approx(1.5 - 1e-5)
    assert algo.token_covariances(logprobs, -signs, everywhere, 1.0)[1] == 0  # never one that raises the entropy
    plain, used, shares = spy(algo, "group_advantages"), spy(algo, "policy_loss"), spy(algo, "aggregate")
    train("cov", **ONE_PASS, ppo_epochs=2, lr=1e-2, cov=kind, cov_share=0.1, cov_kl_coef=0.7)
    ((new, old, _, mask, _), losses), ((total, *_), _) = used[1], shares[1]  # of the second epoch: rows by their length
    ((_, whole_old, advantages, actions, _), _), (_, of_rows) = used[-1], plain[0]
    whole = torch.where(actions[0], of_rows[:, None], 0)
    covariance, threshold = algo.token_covariances(whole_old, whole, actions[0], 0.1)
    high = covariance > threshold
    assert 0.09 < high.sum() / actions.sum() * 2 < 0.15  # of two epochs
    if kind == "clip":
        assert torch.equal(advantages, torch.where(high, 0, whole)) and torch.equal(total, losses[0])
    else:
        assert torch.equal(advantages, whole)
        extra, moved = (total - losses[0])[mask], 0.7 * (new - old).abs()[mask]
        felt = extra.abs() > 1e-6
        assert felt.sum() == high.sum() and torch.allclose(extra[felt], moved[felt], atol=1e-6)


def test_entropy_tokens_gives_the_others_no_advantage(variant, train, spy):
    """One threshold for the batch; a token that is left out counts in the denominators all the same."""
    algo = variant("entropy_tokens")
    by_hand = torch.tensor([0.1, 0.9, 0.5, 0.5 + 1e-6, 0.5 - 1e-6, 0.3, 0.2, 0.0, 0.0, 0.0])
    chosen = [int((by_hand >= algo.entropy_threshold(by_hand, share)).sum()) for share in (0.0, 0.12, 0.3, 0.5, 1.0)]
    assert chosen == [1, 4, 4, 5, 10]  # equal ones are chosen together
    passes, found = spy(algo.Policy, "forward"), spy(algo, "entropy_threshold")
    used, shares = spy(algo, "policy_loss"), spy(algo, "aggregate")
    train("entropy_tokens", **ONE_PASS, entropy_share=0.3)
    (((entropy, _), threshold),) = found
    (_, _, advantages, mask, _), _ = used[-1]
    assert torch.equal(advantages[mask[0]] != 0, entropy >= threshold)
    assert 0.3 <= (entropy >= threshold).float().mean() < 0.4
    ((_, _, first_mask), (_, first)), ((_, trained, _, num_tokens, *_), _) = passes[0], shares[0]
    assert torch.equal(entropy.sort().values, first[first_mask].sort().values)
    assert trained.sum() == num_tokens == len(entropy)


def test_value_clip_pushes_no_value_far(variant, train, spy):
    """Old value 0, clip 0.2: beyond it a value is still pulled back, but pushed no further, neither up nor down."""
    algo = variant("value_clip")
    returns = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.1, -1.0])
    new = torch.tensor([0.1, 0.5, -0.5, 1.5, 0.3, -0.5]).requires_grad_()
    losses = algo.value_loss(new, torch.zeros(6), returns, 0.2)
    (slopes,) = torch.autograd.grad(losses.sum(), new)
    assert torch.allclose(losses, torch.tensor([0.81, 0.64, 2.25, 0.64, 0.04, 0.64]) / 2)
    assert torch.allclose(slopes, torch.tensor([-0.9, 0, -1.5, 0, 0.2, 0]))
    calls = spy(algo, "value_loss")
    train("value_clip", ppo_epochs=2, microbatch_tokens=10_000, total_iterations=1)
    ((first, old, *_), _), ((second, same, *_), _) = calls
    assert torch.equal(old, same) and torch.equal(first, old) and not torch.equal(second, old)  # those of the rollout


def test_target_kl_leaves_out_a_step_and_all_later_ones(variant, train, spy):
    steps = spy(torch.optim.AdamW, "step", lambda optimizer, *_: optimizer.param_groups[0]["params"])
    shares = spy(variant("target_kl"), "aggregate")
    flags = {"batch_size": 16, "minibatch_size": 4, "microbatch_tokens": 10_000, "ppo_epochs": 2, "total_iterations": 1}
    assert train("target_kl", **flags, target_kl=1e9)[1]["actor/steps"] == 8 and len(steps) == 16
    # The first step changes nothing before it is taken, so its KL is 0. Every later minibatch has one.
    stopped = train("target_kl", **flags, target_kl=1e-9)[1]
    assert stopped["actor/steps"] == 1 and len(steps) == 16 + 1 + 8 and len(shares) == 16 + 2 + 8  # the critic goes on
    assert stopped["actor/loss"] == shares[16][1].item() and stopped["actor/approx_kl"] > 0
    assert all(p.grad is None for p in steps[16])  # of the minibatch that was left out nothing goes on


def test_anneal_lets_both_learning_rates_fall(variant, train, spy):
    schedule = variant("anneal").schedule
    cosine = [schedule("cosine", i, 4, 0) for i in range(1, 5)]
    assert cosine == pytest.approx([1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2])
    assert [schedule("constant", i, 4, 3) for i in range(1, 5)] == [1 / 3, 2 / 3, 1, 1]
    rates = spy(torch.optim.AdamW, "step", lambda optimizer, *_: optimizer.param_groups[0]["lr"])
    metrics = train("anneal", total_iterations=6, warmup_iterations=2, lr=1e-3, critic_lr=2e-3)
    factors = [0.5, 1, 1, 0.75, 0.5, 0.25]  # the last iteration still trains
    assert rates[::2] == pytest.approx([1e-3 * x for x in factors]) == [m["actor/lr"] for m in metrics[1:]]
    assert rates[1::2] == pytest.approx([2e-3 * x for x in factors])


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
    right, plus, plain = (
        torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (kl, mean(f"{kind}+"), mean(kind))
    )
    assert torch.allclose(plus, right) and not torch.allclose(plain, right, rtol=0.1)
    assert mean(f"{kind}+") == mean(kind) and torch.equal(kl_penalty(logprobs, ref, "abs"), (logprobs - ref).abs())
