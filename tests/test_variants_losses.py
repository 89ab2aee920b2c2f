# ruff: noqa: F811 (fixtures)
"""Variants of the policy loss: dual_clip, sapo, cispo, dppo, icepop, cov."""

import importlib
import itertools
import math
import sys

import pytest
import torch
from conftest import refusal, untimed
from test_loop import mislead, no_numbers, shifted
from test_variants import (  # noqa: F401
    example,
    folder,
    grpo,
    losses_of,
    token_gradients,
    told_otherwise,
    train,
    variant,
)


def moved(olds, news, advantages):
    """Log-probs before and after (with a gradient), and advantages, of tokens with these probabilities."""
    old, new, advantages = (torch.tensor(x, dtype=torch.float64) for x in (olds, news, advantages))
    return old.log(), new.log().requires_grad_(), advantages


def bounded(a, ratio):
    """1912.09729: the clip of PPO, and at most 3 where A < 0. The loss is -A times this."""
    if a > 0:
        return min(ratio, 1.2)
    return min(max(ratio, 0.8), 3.0) if a < 0 else ratio


def dual_clipped(a, ratio):
    return ratio if bounded(a, ratio) == ratio else 0


def gated(a, ratio):
    """2511.20347: sech^2(tau/2 * (rho - 1)), 1 on policy, and smaller the further the ratio is from 1."""
    return ratio / math.cosh((1.0 if a > 0 else 1.05) / 2 * (ratio - 1)) ** 2


def cut(a, ratio):
    """2506.13585: never gone."""
    return min(max(ratio, 0.7), 1.4)


# Variant, flags of its loss, the gradient of a token by hand: a multiple of -A, by A and ratio.
BY_HAND = [
    ("dual_clip", {"dual_clip": 3.0}, dual_clipped),
    ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}, gated),
    ("cispo", {"clip_low": 0.3, "clip_high": 0.4}, cut),
]


@pytest.mark.parametrize("name, flags, weight", BY_HAND)
def test_gradients_by_hand(name, flags, weight, variant):
    """In each quadrant. Clipped is what has not the gradient of the ratio; of sapo, the share that is gone."""
    tokens = list(itertools.product([2.0, -2.0, 0.0], [0.05, 0.5, 0.75, 1.0, 1.3, 2.9, 3.1, 6.0]))
    advantages, ratios = torch.tensor(tokens, dtype=torch.float64).T
    new = ratios.log().requires_grad_()
    losses, clipped = losses_of(variant(name), new, torch.zeros_like(ratios), advantages, **flags)
    (slopes,) = torch.autograd.grad(losses.sum(), new)
    weights = torch.tensor([weight(a, ratio) for a, ratio in tokens], dtype=torch.float64)
    assert torch.allclose(slopes, -advantages * weights)
    gone = 1 - weights / ratios
    assert torch.allclose(clipped.double(), gone if name == "sapo" else (gone != 0).double())
    if name == "dual_clip":
        assert losses.tolist() == pytest.approx([-a * bounded(a, ratio) for a, ratio in tokens])


def test_the_file_cispo_has_the_loss_of_the_patch(variant, monkeypatch):
    monkeypatch.setattr(grpo, "policy_loss", grpo.policy_loss)  # is put back: the file replaces it where it is imported
    monkeypatch.delitem(sys.modules, "cispo", raising=False)
    cispo = importlib.import_module("cispo")
    assert grpo.policy_loss is cispo.policy_loss
    batch, args = example(), variant("cispo").Args(model="m", clip_low=0.3, clip_high=0.4)
    for ours, theirs in zip(*(algo.policy_loss(*batch, args) for algo in (cispo, variant("cispo")))):
        assert torch.equal(ours, theirs)


# --- dppo


def test_dppo_looks_at_probabilities_not_at_ratios(variant):
    """2602.04879, section 4: what PPO clips without need, and what it lets through."""
    algo = variant("dppo")
    cases = [  # before, after, advantage; whether PPO clips; whether DPPO blocks
        (1e-4, 1e-3, 1, True, False),  # rare: ten times as likely and still rare
        (1e-3, 1e-5, -1, True, False),
        (0.80, 0.955, 1, False, True),  # likely: a ratio of 1.19 moves a seventh of all the mass
        (0.955, 0.80, -1, False, True),
        (0.80, 0.955, -1, False, False),  # towards where it was
        (0.955, 0.80, 1, False, False),
        (0.30, 0.60, 1, True, True),
        (0.60, 0.30, -1, True, True),
        (0.60, 0.601, 1, False, False),
    ]
    olds, news, advantages, clips, blocks = zip(*cases)
    old, new, advantages = moved(olds, news, advantages)
    losses, blocked = losses_of(algo, new, old, advantages, divergence="tv", delta=0.15)
    (found,) = torch.autograd.grad(losses.sum(), new)
    expected = torch.where(torch.tensor(blocks), 0, -advantages * (new - old).exp())
    assert torch.allclose(found, expected) and blocked.tolist() == list(blocks)
    assert losses_of(grpo, new, old, advantages)[1].tolist() == list(clips)


def test_dppos_kl_is_that_of_two_outcomes(variant):
    algo = variant("dppo")
    stream = torch.Generator().manual_seed(0)
    olds, news = torch.rand(2, 400, generator=stream, dtype=torch.float64).pow(2)
    old, new, advantages = moved(olds.tolist(), news.tolist(), [1.0, -1.0] * 200)
    losses, blocked = losses_of(algo, new, old, advantages, divergence="kl", delta=0.05)
    kl = torch.distributions.kl_divergence(torch.distributions.Bernoulli(olds), torch.distributions.Bernoulli(news))
    away = (news > olds) == (advantages > 0)
    assert torch.equal(blocked, (kl > 0.05) & away) and 50 < blocked.sum() < 200
    assert torch.equal(torch.autograd.grad(losses.sum(), new)[0] == 0, blocked)
    # Probabilities of 0 or 1, of which one log-prob or the other is 0 in float32.
    old, new, advantages = moved([1.0, 1.0, 0.5, 0.5], [1.0, 0.5, 1.0, 1.0], [-1.0, -1.0, 1.0, -1.0])
    losses, blocked = losses_of(algo, new, old, advantages, divergence="kl", delta=0.05)
    assert blocked.tolist() == [False, True, True, False]
    assert torch.autograd.grad(losses.sum(), new)[0].isfinite().all()


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_dppos_region_is_around_the_sampler(kind, variant, train, monkeypatch, spy):
    """Half of the responses come with log-probs that are lower by 0.008: the ratio of the first step has that in it."""
    told_otherwise(variant("dppo"), monkeypatch, [0.008] * 12, [0] * 12)
    passes = spy(variant("dppo"), "forward_all")
    first = train("dppo", total_iterations=1, lr=0.0, kl_loss_coef=0.0, divergence=kind)[1]
    assert not passes  # a pass less
    assert first["actor/ratio_mean"] == pytest.approx((1 + math.exp(0.008)) / 2, abs=1e-6)
    assert first["rollout/logprob_diff"] == pytest.approx(0.004, rel=1e-3) and first["actor/clipfrac"] == 0
    metrics = train("dppo", total_iterations=3, lr=3e-2, divergence=kind, delta=0.02)
    assert any(0 < m["actor/clipfrac"] < 0.5 for m in metrics[1:])


@pytest.mark.parametrize("wrong", [shifted, no_numbers])
@pytest.mark.parametrize("name, flags", [("dppo", {}), ("bypass", {}), ("bypass", {"old_logprobs": "corrected"})])
def test_a_sampler_that_disagrees_ends_the_run_before_its_first_step(
    name, flags, wrong, variant, train, monkeypatch, spy
):
    """Also where the old log-probs are the sampler's own, which tell nothing of it."""
    steps = spy(torch.optim.AdamW, "step")
    mislead(variant(name), monkeypatch, wrong)
    said = refusal(lambda: train(name, **flags))
    assert "iteration 1: sampler and training pass differ by" in said and not steps


# --- icepop


def test_tokens_outside_the_band_have_no_gradient(variant, train, monkeypatch):
    """Exactly none; those inside have their importance weight. 2510.18855, eq. 1."""
    algo = variant("icepop")
    gaps = torch.zeros(12)
    gaps[1], gaps[2], gaps[3] = 0.04, -0.04, 0.02  # what the sampler claims too little, by token of the response
    expected = gaps.exp()
    expected[1:3] = 0
    told_otherwise(algo, monkeypatch, gaps.tolist())
    calls = token_gradients(algo, monkeypatch)
    flags = {"lr": 0.0, "kl_loss_coef": 0.0, "total_iterations": 1, "is_low": 0.97, "is_high": 1.03}
    metrics = train("icepop", **flags)[1]
    for mask, _, _, advantages, gradient in calls:
        assert (mask.sum(1) == 12).all()
        of_rows = advantages[mask].view(-1, 12)
        assert torch.allclose(of_rows, of_rows[:, :1] * expected, rtol=1e-5)
        assert torch.allclose(gradient, -advantages / 12 / 8, atol=1e-9)
        assert (gradient[mask].view(-1, 12)[:, 1:3] == 0).all()
    assert sum((gradient != 0).sum() for *_, gradient in calls) > 0
    assert metrics["rollout/zero_weight_frac"] == pytest.approx(2 / 12)
    assert metrics["rollout/weight_mean"] == pytest.approx(expected.mean().item(), rel=1e-5)
    ess = expected.mean() ** 2 / expected.square().mean()
    assert metrics["rollout/ess"] == pytest.approx(ess.item(), rel=1e-5)


def test_a_band_without_a_token_takes_no_step(train):
    metrics = train("icepop", is_low=2.0, is_high=3.0, kl_loss_coef=0.0, total_iterations=2)
    for m in metrics[1:]:
        assert m["rollout/ess"] == m["rollout/weight_mean"] == m["actor/grad_norm"] == 0
        assert m["rollout/zero_weight_frac"] == 1 and m["kl/mean"] == 0


def test_only_bad_responses_are_left_behind(variant):
    """2512.02556, eq. 9, over the tokens of the mask; a log-prob that rose counts against one that fell."""
    rollout = torch.full((4, 3), -1.0)
    logprobs = torch.tensor([[-1.9, -1.9, -1.0], [-1.9, -1.9, -1.9], [-1.9, -1.9, -1.9], [-1.9, -0.7, torch.nan]])
    mask = torch.tensor([[True] * 3] * 3 + [[True, True, False]])
    advantages = torch.tensor([[-1.0], [-1.0], [1.0], [-1.0]]).expand(4, 3)
    # The log-prob has fallen by 0.6, 0.9, 0.9 and 0.3 per token.
    for delta, rows in (0.5, [0, 1]), (0.7, [1]), (0.2, [0, 1, 3]), (1.0, []):
        found = variant("icepop").left_behind(logprobs, rollout, advantages, mask, delta)
        assert found.all(1).nonzero().flatten().tolist() == rows and torch.equal(found.all(1), found.any(1))


def test_what_is_left_behind_has_no_policy_gradient(variant, train, monkeypatch, spy):
    """Every other response is claimed to have been likelier by 0.008 per token: those of negative advantage go."""
    algo = variant("icepop")
    told_otherwise(algo, monkeypatch, [-0.008] * 12, [0] * 12)
    asked = spy(algo, "left_behind")
    calls = token_gradients(algo, monkeypatch)
    flags = {"lr": 0.0, "kl_loss_coef": 0.0, "total_iterations": 1, "microbatch_tokens": 10**6, "minibatch_size": 16}
    metrics = train("icepop", off_policy_delta=0.005, **flags)[1]
    ((mask, new, _, advantages, gradient),) = calls
    (_, rollout, *_), _ = asked[0]  # of the same rows
    fallen = torch.where(mask, rollout - new, 0).sum(1) / 12  # 0.008 or 0
    left = (fallen > 0.005) & (advantages < 0).any(1)
    assert 0 < left.sum() < (fallen > 0.005).sum() == 8
    expected = torch.where(left[:, None], 0, -advantages / 12 / 16)
    assert torch.allclose(gradient, expected, atol=1e-9) and (gradient[left] == 0).all()
    assert metrics["actor/off_policy_frac"] == left.sum().item() / 16
    kept = train("icepop", **flags)[1]  # by default, it takes more
    assert kept["actor/off_policy_frac"] == 0 and kept["actor/grad_norm"] > metrics["actor/grad_norm"]


# --- cov


def test_the_covariance_and_who_exceeds(variant):
    algo = variant("cov")
    stream = torch.Generator().manual_seed(3)
    logprobs = -torch.rand(20, 10, generator=stream, dtype=torch.float64)
    advantages = torch.randn(20, 1, generator=stream, dtype=torch.float64).expand(20, 10)
    mask = torch.rand(20, 10, generator=stream) < 0.8
    covariance, threshold = algo.token_covariances(logprobs, advantages, mask, 0.05)
    pair = torch.stack([logprobs[mask], advantages[mask]])
    assert covariance[mask].mean() == pytest.approx(torch.cov(pair, correction=0)[0, 1].item())
    count = int(0.05 * mask.sum())
    assert threshold > 0 and (covariance > threshold).sum() == count == (covariance[mask] > threshold).sum()
    assert algo.token_covariances(logprobs, advantages, mask, 1.0)[1] == 0  # never one that raises the entropy
    none, threshold = algo.token_covariances(logprobs, torch.zeros_like(logprobs), mask, 0.05)
    assert not (none > threshold).any()
    # Equal prefixes of equally good answers have equal values, up to rounding.
    logprobs, advantages = logprobs.repeat(2, 1), advantages.repeat(2, 1)
    covariance, threshold = algo.token_covariances(
        logprobs + 1e-8 * torch.rand(40, 1), advantages, mask.repeat(2, 1), 0.05
    )
    assert torch.equal((covariance > threshold)[:20], (covariance > threshold)[20:])


def test_high_covariances_are_penalised_or_detached(variant, train, monkeypatch):
    """2505.22617, listing 1: at exactly these tokens |log rho| is added, or the policy gradient is taken away."""
    calls = token_gradients(variant("cov"), monkeypatch)
    flags = {"minibatch_size": 16, "microbatch_tokens": 10**6, "ppo_epochs": 2, "total_iterations": 1, "lr": 1e-2}
    flags |= {"kl_loss_coef": 0.0, "clip_low": 1.0, "clip_high": 1e9, "cov_share": 0.1, "cov_kl_coef": 0.7}
    penalised = train("cov", cov="kl", **flags)[1]
    detached = train("cov", cov="clip", **flags)[1]
    (mask, new, old, advantages, first), (*_, second), clip_first, clip_second = calls
    centred = [torch.where(mask, x - x[mask].mean(), 0) for x in (old, advantages)]
    covariance = centred[0] * centred[1]
    least = covariance[mask].sort(descending=True).values[int(0.1 * mask.sum()) - 1]
    high = covariance >= least - 1e-5
    assert 0.09 < high.sum() / mask.sum() < 0.15 and torch.equal(new, old)
    assert penalised["actor/covariance"] == pytest.approx(covariance[mask].mean().item(), abs=1e-6)
    assert penalised["actor/covariance_threshold"] == pytest.approx(least.item(), abs=2e-5)
    share = mask.sum(1, keepdim=True) * 16
    assert torch.allclose(first, -advantages / share, atol=1e-8)  # nothing has moved yet: no penalty
    new = calls[1][1]
    force = 0.7 * torch.where(high, (new - old).sign(), 0)  # back to where the token was
    assert torch.allclose(second, (-advantages * (new - old).exp() + force) / share, atol=1e-8)
    assert (force[high] != 0).all()
    for _, new, old, left, gradient in clip_first, clip_second:
        assert torch.equal(left, torch.where(high, 0, advantages))
        assert torch.allclose(gradient, -left * (new - old).exp() / share, atol=1e-8) and (gradient[high] == 0).all()
    assert detached["actor/covariance"] == penalised["actor/covariance"]


def test_the_choice_does_not_depend_on_micro_batches(train):
    few, one = (untimed(train("cov", cov="clip", cov_share=0.1, microbatch_tokens=size)) for size in (128, 10**6))
    for a, b in zip(few, one, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
