"""The mathematics of the script against slow per-token oracles written here, and against values worked out by hand.

What stands in the loop is tested there: run_lines runs its lines. Inputs are float64 with junk (9.0, NaN) outside the
mask, which must not matter. Whole iterations: test_oracle.py.
"""

import bisect
import math
import statistics
from decimal import Decimal
from itertools import product

import pytest
import torch
from helpers import each_script, refusal, run_lines

B, T, MAX_LENGTH = 6, 7, 10
MODES = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"


class Case:
    """Tensors (B,T) with junk on the padding: a row of one token, a full one, ragged ones, one with a hole in it."""

    def __init__(self, junk):
        self.junk, self.random = junk, torch.Generator().manual_seed(0)
        lengths = [1, T] + torch.randint(2, T, (B - 2,), generator=self.random).tolist()
        self.mask = torch.arange(T) < torch.tensor(lengths)[:, None]
        self.mask[1, 2:4] = False

    def draw(self, scale=1.0, shift=0.0):
        x = shift + scale * torch.randn(B, T, generator=self.random, dtype=torch.float64)
        return torch.where(self.mask, x, self.junk)


@pytest.fixture(params=[9.0, math.nan])
def case(request):
    return Case(request.param)


def close(actual, expected, tolerance=1e-9):
    actual, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def double(x):
    return torch.tensor(x, dtype=torch.float64)


def gradient(f, x):
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(f(x).sum(), x)[0]


@pytest.mark.parametrize("shift", [0.0, 1e7])  # one-pass moments lose all digits at 1e7
def test_masked_whiten(algo, case, shift):
    x = case.draw(3.0, shift)
    tokens = x[case.mask].tolist()
    mean, variance = statistics.mean(tokens), statistics.variance(tokens)
    whitened = algo.masked_whiten(x, case.mask)
    close(whitened[case.mask], [(token - mean) / math.sqrt(variance + 1e-8) for token in tokens], 1e-6)
    assert (whitened[~case.mask] == 0).all()
    assert algo.masked_whiten(x.float(), case.mask).dtype == torch.float32


def test_masked_whiten_edges(algo, case):
    x, mask = case.draw(), torch.zeros_like(case.mask)
    assert (algo.masked_whiten(x, mask) == 0).all()  # no token
    mask[2, 0] = True
    assert (algo.masked_whiten(x, mask) == 0).all()  # one token
    assert (algo.masked_whiten(torch.where(case.mask, 5.0, x), case.mask) == 0).all()  # constant
    # Mean 1e-4 and unbiased variance 2e-8: +-1e-4 / sqrt(2e-8 + eps) shows both the eps and where it stands.
    pair = algo.masked_whiten(torch.tensor([[0.0, 2e-4, case.junk]]), torch.tensor([[True, True, False]]))
    close(pair, [[-(3**-0.5), 3**-0.5, 0.0]], 1e-5)


def test_place_scores(algo):
    """On the last action and nowhere else, also where text of an environment stands between actions or behind them."""
    mask = torch.rand(200, 9, generator=torch.Generator().manual_seed(0)) < 0.4
    mask[mask.sum(1) == 0, 0] = True
    placed = algo.place_scores(torch.arange(1.0, 201), mask)
    last = [max(t for t in range(9) if row[t]) for row in mask.tolist()]
    assert placed.nonzero().tolist() == [[row, t] for row, t in enumerate(last)]
    assert placed.sum(1).tolist() == list(range(1, 201)) and placed.dtype == torch.float32


@each_script("ppo_llm", "ppo_llm_fsdp")
@pytest.mark.parametrize("gamma, lam", [(0.99, 0.95), (0.9, 1), (1, 0)])
def test_gae(algo, case, gamma, lam):
    """Against the sum over l of (gamma*lam)^l * delta, on the valid tokens alone: padding and holes are skipped.
    The critic gives 0 there."""
    rewards, values = case.draw(), torch.where(case.mask, case.draw(), 0)
    flags = {"gamma": gamma, "lam": lam}
    found = run_lines(algo, "raw_advantages", "returns", rewards=rewards, values=values, mask=case.mask, args=flags)
    advantages, returns = found.raw_advantages, found.returns
    assert (advantages[~case.mask] == 0).all() and (returns[~case.mask] == 0).all()
    for i, mask in enumerate(case.mask):
        r, v, a = rewards[i, mask].tolist(), [*values[i, mask].tolist(), 0], advantages[i, mask]
        n = len(r)
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(n)]
        close(a, [sum((gamma * lam) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)])
        close(returns[i, mask], a + double(v[:n]))


def kl(kind, d):
    """Value and slope of an estimate where d = log pi - log pi_ref; where -d is beyond 5, k3 is its tangent."""
    if kind == "k1":
        return d, 1
    if kind == "k2":
        return d * d / 2, d
    x = min(-d, 5)
    return math.exp(x) - x - 1 + (math.exp(5) - 1) * (-d - x), 1 - math.exp(x)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_far_apart(algo, kind):
    """A clamp at 5, 10 or 20 would flatten k3 (no pull back) or, of x alone, turn its gradient round; exp overflows."""
    for d in 1.0, 4.9, 5.1, 9.0, 11.0, 21.0, 100.0, -1.0, -4.9, -5.1, -9.0, -11.0, -21.0, -100.0:
        value, slope = kl(kind, d)
        close(algo.kl_penalty(double(d), double(0.0), kind), value)
        close(gradient(lambda x: algo.kl_penalty(x, double(0.0), kind), double(d)), slope)


def test_k3_near_zero(algo):
    """Of the 24 bits of exp(x) none is left of x^2/2 = 5e-9 once 1 has been subtracted."""
    x = torch.empty(10_000).uniform_(-1e-4, 1e-4, generator=torch.Generator().manual_seed(0))
    found, exact = (algo.kl_penalty(d, torch.zeros_like(d), "k3") for d in (x, x.double()))
    assert found.mean().item() == pytest.approx(exact.mean().item(), rel=1e-5) and found.min() >= 0
    assert exact.mean().item() == pytest.approx(x.double().square().mean().item() / 2, rel=1e-4)


@pytest.mark.parametrize("x", [1e-6, -1e-6, 1e-4, 1.0, 4.9, 6.0, 50.0])
def test_the_gradient_of_k3_in_float32(algo, x):
    """To rounding next to 1: what the tangent adds beyond 5 must not be added and taken away again below it."""
    slope = gradient(lambda logprobs: algo.kl_penalty(logprobs, torch.tensor(x), "k3"), torch.tensor(0.0))
    assert slope.item() == pytest.approx(-math.expm1(min(x, 5)), rel=1e-6, abs=6e-8)


def update(algo, logprobs, old_logprobs, advantages, mask=None, weights=None, **flags):
    """The lines of the actor's update from the ratio to the loss, with all rows in one micro-batch."""
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask
    given = {"mb": (torch.arange(len(mask)), slice(None)), "epoch": 0, "mask": mask, "mb_logprobs": logprobs}
    given |= {"old_logprobs": old_logprobs, "advantages": advantages, "clipped": torch.zeros(1, *mask.shape)}
    given["loss_weights"] = torch.ones_like(logprobs) if weights is None else weights
    return run_lines(algo, "mb_ratio", "loss", args={"kl_loss_coef": 0.0} | flags, **given)


@each_script()
@pytest.mark.parametrize("low, high", [(0.2, 0.2), (0.2, 0.6), (0.6, 0.1)])
def test_the_clipped_surrogate(algo, low, high):
    """A good token gains nothing above 1 + high, a bad one nothing below 1 - low: there the gradient is exactly 0."""
    random = torch.Generator().manual_seed(0)
    new, old, advantages = (torch.randn(40, 50, generator=random, dtype=torch.float64) for _ in range(3))
    flags = {"clip_low": low, "clip_high": high}
    clipped = update(algo, new, old, advantages, **flags).clipped[0].bool()
    ratio = (new - old).exp()
    assert torch.equal(clipped, torch.where(advantages > 0, ratio > 1 + high, ratio < 1 - low))
    grads = gradient(lambda x: update(algo, x, old, advantages, **flags).loss, new)
    close(grads, torch.where(clipped, 0, -advantages * ratio))
    found = update(algo, old, old, advantages, clip_low=0.0, clip_high=0.0)  # an unchanged policy
    assert torch.equal(found.mb_losses, -advantages) and not found.clipped.any()
    far = double([[100.0, 100, -100, -100]]), double([[0.0] * 4]), double([[2.0, -2, 2, -2]])
    found = update(algo, *far, **flags)
    close(found.mb_losses, [[-2 * (1 + high), 2 * math.exp(20), -2 * math.exp(-20), 2 * (1 - low)]])
    assert found.clipped.tolist() == [[[1, 0, 0, 1]]]
    assert gradient(lambda x: update(algo, x, *far[1:], **flags).loss, far[0]).tolist() == [[0] * 4]


@each_script("ppo_llm", "ppo_llm_fsdp")
def test_the_value_loss(algo, case):
    """Half of the squared error, weighed, of the tokens of the mask."""
    values, returns, weights = case.draw(), case.draw(), torch.where(case.mask, 2.0, 0.0)
    given = {"mb": (torch.arange(B), slice(None)), "mask": case.mask, "tokens": case.mask, "returns": returns}

    def loss(values):
        return run_lines(algo, "mb_values", "loss", critic=lambda *_: values, value_weights=weights, **given).loss

    close(loss(values), sum((values - returns)[case.mask].square().tolist()))
    assert torch.equal(gradient(loss, values)[case.mask], 2 * (values - returns)[case.mask])


def average(losses, mask, mode):
    """The mean that a mode names, row by row."""
    rows = [row[valid].tolist() for row, valid in zip(losses, mask) if valid.any()]
    if mode == "token-mean":
        return losses[mask].mean()
    divisors = {"seq-mean-token-mean": [len(row) for row in rows], "seq-mean-token-sum-norm": [MAX_LENGTH] * len(rows)}
    return statistics.fmean(sum(row) / n for row, n in zip(rows, divisors.get(mode, [1] * len(rows))))


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_tokens_make_the_mean(algo, case, mode):
    """Of rows without an action, as an environment's text alone would be, none is counted; without any, all is 0."""
    mask = torch.cat([case.mask, torch.zeros(2, T, dtype=torch.bool)])
    losses = torch.cat([case.draw(), torch.full((2, T), case.junk, dtype=torch.float64)])
    weights = algo.token_weights(mask, mode, MAX_LENGTH)
    assert torch.equal(weights != 0, mask) and weights.dtype == torch.float32
    expected = average(losses, mask, mode)
    close((weights.double() * torch.where(mask, losses, 0)).sum(), expected, 1e-6)
    # The loss's own lines: junk outside the mask, be it NaN, reaches neither the loss nor a gradient. Ratios are 1.
    zeros = torch.zeros_like(losses)
    close(update(algo, zeros, zeros, -losses, mask, weights.double()).loss, expected, 1e-6)
    slopes = gradient(lambda x: update(algo, x, zeros, -torch.where(mask, losses, 0), mask, weights).loss, zeros)
    assert torch.equal(slopes != 0, mask)
    for empty in mask[-2:], mask[:0]:
        assert not algo.token_weights(empty, mode, MAX_LENGTH).any()


def test_the_surprise_tells_who_sampled(algo):
    """Of 40,000 tokens of known distributions: about 0 standard errors, whatever the sampler says of itself, also of a
    nearly certain policy; far below 0 for a colder sampler and for one that cuts the tail, above for a warmer one. Then
    the run ends, unless the difference is small, or too few tokens were in doubt."""
    random = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(40_000, 20, generator=random)

    def check(logits, sampler, limit=math.inf):
        drawn = sampler.softmax(-1).multinomial(1, generator=random)
        logprobs = logits.log_softmax(-1)
        old = logprobs.gather(1, drawn).view(400, 100)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        variance = (logprobs.exp() * logprobs.square()).sum(-1) - entropy.square()
        shape = entropy.view(400, 100), variance.view(400, 100), torch.ones(400, 100, dtype=torch.bool)
        return algo.check_sampler(old, old, *shape, limit, 0)

    right = check(logits, logits)
    assert abs(right["rollout/surprise_z"]) < 3 and right["rollout/kl"] == 0 and abs(right["rollout/surprise"]) < 0.02
    cut = logits.masked_fill(logits < logits.topk(5, -1).values[:, -1:], -torch.inf)
    assert check(logits, cut)["rollout/surprise_z"] < -20 and check(logits, logits / 0.8)["rollout/surprise_z"] < -20
    assert check(logits, logits / 1.2)["rollout/surprise_z"] > 20
    certain = logits * 40
    assert abs(check(certain, certain)["rollout/surprise_z"]) < 3
    assert check(logits, logits, 1e-5).keys() == right.keys()
    assert "error: iteration 0: the policy would not have sampled" in refusal(lambda: check(logits, cut, 1e-2))
    assert "nats (limit 0.01)" in refusal(lambda: check(logits, logits / 1.2, 1e-2))
    assert check(logits, cut, 1)["rollout/surprise_z"] < -20
    assert check(2 * certain, certain, 1e-2)["rollout/surprise_z"] > 20


@pytest.mark.parametrize("temperature", [1, 0.5])
def test_sample_tokens(algo, temperature):
    """Every row uses its own logits and uniform, and temperature 0 takes the likeliest token."""
    random = torch.Generator().manual_seed(0)
    logits, uniforms = 2 * torch.randn(64, 9, generator=random), torch.rand(64, generator=random, dtype=torch.float64)
    tokens, logprobs = algo.sample_tokens(logits, uniforms, temperature)
    greedy, greedy_logprobs = algo.sample_tokens(logits, uniforms, 0)
    assert logprobs.dtype == greedy_logprobs.dtype == torch.float32
    for i, row in enumerate((logits.double() / temperature).softmax(-1).tolist()):
        assert tokens[i] == bisect.bisect_right([sum(row[: k + 1]) for k in range(9)], uniforms[i].item())
        assert greedy[i] == row.index(max(row))
        close([logprobs[i].exp(), greedy_logprobs[i].exp()], [row[tokens[i]], 1], 1e-5)


def test_sample_tokens_extremes(algo):
    """The ends of [0,1) never pick an impossible token, wherever rounding puts the sum of the probabilities."""
    logits = torch.randn(1000, 40, generator=torch.Generator().manual_seed(0))
    logits[:, [0, 1, 7, 38, 39]] = -torch.inf
    logits[500:] *= 1e4  # whose exponentials are no numbers
    for temperature, uniform in product((1.0, 0.5, 0), (0.0, 1 - 1e-16)):
        tokens, logprobs = algo.sample_tokens(logits, double([uniform] * 1000), temperature)
        assert logprobs.isfinite().all() and logits.gather(1, tokens[:, None]).isfinite().all()
    # Eight tokens share the last 1.6e-8 of the probability, less than fp32 resolves next to 1.
    logits = torch.tensor([0.0] + [-20.0] * 8)
    uniforms = 1 - math.exp(-20) * (7.5 - torch.arange(8, dtype=torch.float64))
    tokens, _ = algo.sample_tokens(logits.expand(8, -1), uniforms, 1.0)
    assert tokens.tolist() == list(range(1, 9))


NUMBERS = {
    "5": "#### 5|####5|a\n####\n5\n|#### +5|#### 5.0|#### 5.|#### 5,|#### 5 apples|#### 005|5 #### 7 #### 5\n9"
    "|#### 5\r\nand 6|#### 5\u00a0|#### 5 km \t\n\nSo 6, it's|#### x 5|#### 5-|#### - 5|#### $5/hour|#### 5 m²",
    "-5": "#### -5|#### -5.|#### -$5|#### $-5|#### -5.00|#### \u22125",
    "7": "#### $7|#### €7|#### $ 7|#### £7.|#### 8, no, #### 7",
    "1234": "#### 1,234|#### $1,234.00|#### +1,234.|#### 1,234°|#### 1{,}234|#### 1234",
    "-1234.5": "#### -1,234.50|#### -\\$1,234.50|#### $-1{,}234.5$",
    "1234567.5": "#### 1,234,567.50",
    "0.5": "#### .5|#### 0.5|#### $.50",
    "42": r"#### 42|#### **42**|#### \boxed{42}|#### $42$|#### \(42\)|#### Answer: 42|#### $\boxed{42}$ cm|#### 42\%",
    "36": r"#### \$36|#### **$36.00**|#### (36)",
    "3": "#### 3. Total cost|#### 3. Total cost\nTotal: 45",
    "44437114286093851207": "#### 44437114286093851207|#### 44,437,114,286,093,851,207",
    "nan": "|5|### 5|####|#### |#### five|#### .|#### -|#### $,|#### 7 ####|42 ####|#### 3 + 4 = 7|#### 5 9|#### 3/4"
    "|#### 1,2,3|#### 1234,567|#### 4.2e1|#### 12:30|#### 7.5.2|#### 10 or 12|#### 10 (or 12)|#### 10-12"
    r"|#### \frac{3}{4}",
}


@pytest.mark.parametrize("number", NUMBERS)
def test_gsm8k_number(algo, number):
    """A float would be equal to 44437114286093850430, too."""
    for text in NUMBERS[number].split("|"):
        found = algo.gsm8k_number(text)
        assert math.isnan(found) if number == "nan" else found == Decimal(number), text


def test_gsm8k(algo):
    responses = ["so #### 5", "#### 5.0", "#### 6", "5", "", "#### 0.1 "]
    answers = ["2 + 3 = 5\n#### 5"] * 4 + ["no number", "#### .10"]
    scores = algo.gsm8k(responses, answers)
    assert scores == [1, 1, 0, 0, 0, 1] and all(isinstance(score, float) for score in scores)
    assert algo.gsm8k(["#### 44437114286093851207"] * 2, ["44437114286093851207", "44437114286093850430"]) == [1, 0]
