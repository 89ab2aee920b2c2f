"""The mathematics of the script against slow per-token oracles written here, and against values worked out by hand.

Inputs of the oracles are float64 and carry junk (9.0, NaN) outside the mask. Functions that know the mask get the junk
as it is; per-token losses get what `main` gives them, zeros. In both cases gradients with respect to the junk must be
exactly 0.
"""

import bisect
import datetime
import math
import re
import statistics
import time
from decimal import Decimal
from itertools import product

import pytest
import torch
from conftest import ROOT, copies
from ranks import load_script
from torch.nn.functional import pad

B, T, MAX_LENGTH = 6, 7, 10
MODES = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"


class Case:
    """Tensors (B,T) with junk on the padding: a row of one token, a full one, ragged ones, one with a hole in it."""

    def __init__(self, seed, junk):
        self.junk, self.random = junk, torch.Generator().manual_seed(seed)
        lengths = [1, T] + torch.randint(2, T, (B - 2,), generator=self.random).tolist()
        self.mask = torch.arange(T) < torch.tensor(lengths)[:, None]
        self.mask[1, 2:4] = False
        self.valid = [(i, t) for i, t in product(range(B), range(T)) if self.mask[i, t]]

    def draw(self, scale=1.0, shift=0.0):
        x = shift + scale * torch.randn(B, T, generator=self.random, dtype=torch.float64)
        return torch.where(self.mask, x, self.junk)

    def rows(self, x):
        """The valid entries of every row, as Python numbers."""
        return [x[i, self.mask[i]].tolist() for i in range(B)]

    def matrix(self, f):
        """f(i, t) at every valid token, 0 elsewhere."""
        result = torch.zeros(B, T, dtype=torch.float64)
        for i, t in self.valid:
            result[i, t] = f(i, t)
        return result


@pytest.fixture(params=product(range(3), (9.0, math.nan)), ids=lambda p: f"seed{p[0]}-{p[1]}")
def case(request):
    return Case(*request.param)


def close(actual, expected, tolerance=1e-9):
    actual, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def double(x):
    return torch.tensor(x, dtype=torch.float64)


def slope(f, x, h=1e-6):
    return (f(x + h) - f(x - h)) / (2 * h)


def gradient(f, x):
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(f(x).sum(), x)[0]


def test_response_mask(algo, case):
    golden = torch.tensor([[5, 7, 2, 2, 0], [5, 6, 7, 8, 9], [3, 1, 1, 1, 1]])
    assert algo.make_response_mask(golden, [2, 3]).tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    responses = torch.randint(0, 6, (50, T), generator=case.random)
    for eos_ids in [], [0], [1, 4], [0, 2, 5]:
        mask = algo.make_response_mask(responses, eos_ids)
        assert mask.dtype == torch.bool
        for row, row_mask in zip(responses.tolist(), mask.tolist()):
            assert row_mask == [not any(token in eos_ids for token in row[:t]) for t in range(T)]


def test_masked_mean(algo, case):
    x = case.draw()
    close(algo.masked_mean(x, case.mask), statistics.fmean(x[case.mask].tolist()))
    close(algo.masked_mean(x, case.mask, 1), [statistics.fmean(row) for row in case.rows(x)])
    close(gradient(lambda x: algo.masked_mean(x, case.mask), x), case.matrix(lambda i, t: 1 / len(case.valid)))
    empty = torch.zeros_like(case.mask)
    assert algo.masked_mean(x, empty) == 0 and (algo.masked_mean(x, empty, 1) == 0).all()
    assert (gradient(lambda x: algo.masked_mean(x, empty), x) == 0).all()


def test_count_actions(algo, case):
    """Of rows without an action, as an environment's text alone would be, none is counted."""
    mask = torch.cat([case.mask, torch.zeros(2, T, dtype=torch.bool)])
    assert algo.count_actions(mask) == [len(case.valid), B]
    assert algo.count_actions(mask[-2:]) == [0, 0] == algo.count_actions(mask[:0])


@pytest.mark.parametrize("shift", [0.0, 1e7])  # one-pass moments lose all digits at 1e7
def test_masked_whiten(algo, case, shift):
    x = case.draw(3.0, shift)
    tokens = x[case.mask].tolist()
    mean, variance = statistics.mean(tokens), statistics.variance(tokens)
    whitened = algo.masked_whiten(x, case.mask)
    close(whitened, case.matrix(lambda i, t: (x[i, t].item() - mean) / math.sqrt(variance + 1e-8)), 1e-6)
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


@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_mean_and_std(algo, case, shift):
    """Numbers for the log: of the tokens under a mask, whatever the width, or of all entries, booleans too."""
    x = case.draw(2.0, shift).float()
    tokens = x[case.mask].tolist()
    for args in (x, case.mask), (pad(x, (0, 3), value=case.junk), pad(case.mask, (0, 3))), (x[case.mask],):
        close([algo.mean(*args), algo.std(*args)], [statistics.mean(tokens), statistics.stdev(tokens)], 1e-6)
    for few, value in (x[:0], 0), (x[case.mask][:1], tokens[0]):
        assert isinstance(algo.mean(few), float) and (algo.mean(few), algo.std(few)) == (value, 0)
    assert (algo.mean(x, torch.zeros_like(case.mask)), algo.std(x, torch.zeros_like(case.mask))) == (0, 0)
    truncated = torch.tensor([True, False, False, True, True])
    close([algo.mean(truncated), algo.std(truncated), algo.mean(torch.tensor([1, 2, 6]))], [0.6, 0.3**0.5, 3])


GAPS_IN_MASK = [[0, 1, 1, 1, 0, 0], [1, 1, 0, 1, 1, 0], [0, 0, 1, 0, 0, 1], [0, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]


def test_place_scores(algo):
    """On the last action and nowhere else, also where text of an environment stands between actions or behind them."""
    mask, scores = torch.tensor(GAPS_IN_MASK).bool(), torch.tensor([2.0, -1.0, 0.5, 0.0, 7.0])
    placed = algo.place_scores(scores, mask)
    expected = torch.zeros(5, 6)
    for row, (last, score) in enumerate(zip((3, 4, 5, 1, 5), scores)):
        expected[row, last] = score
    assert placed.dtype == torch.float32 and torch.equal(placed, expected)


@pytest.mark.parametrize("seed", range(3))
def test_place_scores_anywhere(algo, seed):
    random = torch.Generator().manual_seed(seed)
    mask = torch.rand(200, 9, generator=random) < 0.4
    mask[mask.sum(1) == 0, 0] = True
    placed = algo.place_scores(torch.arange(1.0, 201), mask)
    last = [max(t for t in range(9) if row[t]) for row in mask.tolist()]
    assert placed.nonzero().tolist() == [[row, t] for row, t in enumerate(last)]
    assert placed.sum(1).tolist() == list(range(1, 201))


@copies("ppo_llm", "ppo_llm_fsdp")
@pytest.mark.parametrize("gamma, lam", [(1, 0.95), (0.99, 0.95), (0.9, 1), (1, 1), (0.9, 0), (0.5, 0.5)])
def test_gae(algo, case, gamma, lam):
    """Against the sum over l of (gamma*lam)^l * delta, on the valid tokens alone: padding and holes are skipped."""
    rewards, values = case.draw(), case.draw()
    advantages, returns = algo.gae(rewards, values, case.mask, gamma, lam)
    assert (advantages[~case.mask] == 0).all() and (returns[~case.mask] == 0).all()
    for i, (r, v) in enumerate(zip(case.rows(rewards), case.rows(values))):
        n, a = len(r), advantages[i, case.mask[i]]
        v = v + [0]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(n)]
        close(a, [sum((gamma * lam) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)])
        close(returns[i, case.mask[i]], a + double(v[:n]))
        if lam == 0:  # one-step TD
            close(a, deltas)
        if lam == 1:  # Monte Carlo: the return owes nothing to the critic
            close(returns[i, case.mask[i]], [sum(gamma**k * r[t + k] for k in range(n - t)) for t in range(n)])


@copies("ppo_llm", "ppo_llm_fsdp")
@pytest.mark.parametrize("junk", [9.0, math.nan])
def test_gae_golden(algo, junk):
    mask = torch.tensor([[False, False, True, True, False]])
    rewards, values = torch.tensor([[0, 0, 0, 1, junk]]), torch.tensor([[0.2, 0.3, 0.4, 0.5, junk]])
    advantages, returns = algo.gae(rewards, values, mask, 0.99, 0.95)
    close(advantages, [[0, 0, 0.56525, 0.5, 0]], 1e-6)
    close(returns, [[0, 0, 0.96525, 1, 0]], 1e-6)


# --- KL


def k3(d):
    """exp(-d) - 1 + d, and its tangent where -d is beyond 5."""
    x = min(-d, 5)
    return math.exp(x) - x - 1 + (math.exp(5) - 1) * (-d - x)


# kind -> (value, gradient) as functions of d
KL = {
    "k1": (lambda d: d, lambda d: 1),
    "k2": (lambda d: d * d / 2, lambda d: d),
    "k3": (k3, lambda d: 1 - math.exp(min(-d, 5))),
}


@pytest.mark.parametrize("kind", KL)
def test_kl_far_apart(algo, kind):
    """A clamp at 5, 10 or 20 would flatten k3 (no pull back) or, of x alone, turn its gradient round; exp overflows."""
    value, grad = KL[kind]
    for dtype, size in product((torch.float32, torch.float64), (1, 4.9, 5.1, 9, 11, 21, 100)):
        d, tolerance = torch.tensor([size, -size], dtype=dtype), 1e-5 if dtype == torch.float32 else 1e-9
        close(algo.kl_penalty(d, torch.zeros_like(d), kind), [value(size), value(-size)], tolerance)
        grads = gradient(lambda x: algo.kl_penalty(x, torch.zeros_like(x), kind), d)
        close(grads, [grad(size), grad(-size)], tolerance)
        assert grads[0] > 0 and (kind == "k1" or grads[1] < 0)


def test_kl_golden(algo):
    logprobs, ref = torch.tensor([-1, -2, -0.5, -30]), torch.tensor([-1.5, -1, -0.5, -1])
    values = [0.106531, 0.718282, 0, math.exp(5) - 6 + 24 * (math.exp(5) - 1)]
    close(algo.kl_penalty(logprobs, ref, "k3"), values, 1e-5)
    grads = gradient(lambda x: algo.kl_penalty(x, ref, "k3"), logprobs)
    close(grads, [0.393469, -1.718282, 0, 1 - math.exp(5)], 1e-5)


@pytest.mark.parametrize("kind", KL)
@pytest.mark.parametrize("seed", range(3))
def test_kl_expectations(algo, kind, seed):
    """Over three tokens the expectation under pi is exact: of the value, and of the gradient that the loss follows."""
    logits, ref_logits = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    logits.requires_grad_()
    logprobs, ref = logits.log_softmax(0), ref_logits.log_softmax(0)
    p, q = logprobs.exp(), ref.exp()
    true_kl = (p * (logprobs - ref)).sum()
    estimate = (p.detach() * algo.kl_penalty(logprobs, ref, kind)).sum()
    if kind in ("k1", "k3"):
        close(estimate.detach(), true_kl.detach())
    grad, true_grad = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (estimate, true_kl))
    if kind == "k2":
        close(grad, true_grad)
    elif kind == "k1":  # noise without a pull
        close(grad, torch.zeros(3))
        assert true_grad.abs().max() > 0.01
    elif kind == "k3":  # pulls along the gradient of the other KL, KL(ref || pi)
        close(grad, p - q)


def surrogate(new, old, advantage, low, high):
    """The clipped loss by cases: a good token gains nothing above 1 + high, a bad one nothing below 1 - low."""
    ratio = math.exp(max(-20, min(20, new - old)))
    if advantage >= 0:
        return -advantage * min(ratio, 1 + high)
    return -advantage * max(ratio, 1 - low)


def half_square(value, target):
    return (value - target) ** 2 / 2


# Function, number of its tensors, its other arguments, oracle. The gradient is that of the first tensor.
CLIPS = (0.2, 0.2), (0.2, 0.6), (0.6, 0.1)
LOSSES = [("policy_loss", 3, clips, surrogate) for clips in CLIPS]
LOSSES += [("kl_penalty", 2, (kind,), lambda x, ref, kind: KL[kind][0](x - ref)) for kind in KL]


def weight(case, mode, i):
    """The weight of a token of row i in the loss of a step that is this batch."""
    tokens = case.mask.sum(1).tolist()
    per_row = {"seq-mean-token-mean": tokens[i], "seq-mean-token-sum": 1, "seq-mean-token-sum-norm": MAX_LENGTH}
    return 1 / sum(tokens) if mode == "token-mean" else 1 / (B * per_row[mode])


def check_loss(algo, case, name, num_tensors, args, oracle, mode):
    """Value and gradient of the aggregated loss: every token by the oracle, exactly nothing from the padding."""
    x, *others = (case.draw() for _ in range(num_tensors))

    def loss(x):
        losses = getattr(algo, name)(*(torch.where(case.mask, y, 0) for y in (x, *others)), *args)
        losses = losses[0] if name == "policy_loss" else losses
        losses = torch.where(case.mask, losses, case.junk)
        return algo.aggregate(losses, case.mask, mode, len(case.valid), B, MAX_LENGTH)

    def token(i, t):
        return lambda x: weight(case, mode, i) * oracle(x, *(y[i, t].item() for y in others), *args)

    close(loss(x), case.matrix(lambda i, t: token(i, t)(x[i, t].item())).sum())
    grads = gradient(loss, x)
    close(grads, case.matrix(lambda i, t: slope(token(i, t), x[i, t].item())), 1e-7)
    assert (grads[~case.mask] == 0).all()


@pytest.mark.parametrize("name, num_tensors, args, oracle", LOSSES)
@pytest.mark.parametrize("mode", MODES)
def test_losses(algo, case, name, num_tensors, args, oracle, mode):
    check_loss(algo, case, name, num_tensors, args, oracle, mode)


@copies("ppo_llm", "ppo_llm_fsdp")
def test_value_loss(algo, case):
    check_loss(algo, case, "value_loss", 2, (), half_square, "token-mean")


# Advantage, ratio; loss and slope in the log-prob.
QUADRANTS = [
    (0.5, math.exp(0.5), -0.6, 0),  # log-probs -2 and -1.5, ratio 1.65: the larger of -.825 and -.6
    (2, 1.1, -2.2, -2.2),
    (2, 1.5, -2.4, 0),
    (2, 0.5, -1, -1),
    (2, 5, -2.4, 0),
    (-2, 0.9, 1.8, 1.8),
    (-2, 1.5, 3, 3),
    (-2, 0.5, 1.6, 0),
    (-2, 5, 10, 10),
    (2, math.exp(100), -2.4, 0),
    (-2, math.exp(100), 2 * math.exp(20), 0),
    (2, math.exp(-100), -2 * math.exp(-20), 0),
    (-2, math.exp(-100), 1.6, 0),
]


@pytest.mark.parametrize("advantage, ratio, loss, grad", QUADRANTS)
def test_policy_loss_quadrants(algo, advantage, ratio, loss, grad):
    new, args = double(math.log(ratio) - 1), (double(-1), double(advantage), 0.2, 0.2)
    close([algo.policy_loss(new, *args)[0], gradient(lambda x: algo.policy_loss(x, *args)[0], new)], [loss, grad])


@pytest.mark.parametrize("clips", CLIPS)
@pytest.mark.parametrize("seed", range(3))
def test_clipped_is_where_the_gradient_is_gone(algo, seed, clips):
    """Everywhere the gradient is that of -A*ratio, or exactly zero, and then `clipped` says so."""
    random = torch.Generator().manual_seed(seed)
    new, old, advantages = (torch.randn(40, 50, generator=random, dtype=torch.float64) for _ in range(3))
    assert (advantages != 0).all() and (new - old).abs().max() < 20
    _, clipped = algo.policy_loss(new, old, advantages, *clips)
    grads = gradient(lambda x: algo.policy_loss(x, old, advantages, *clips)[0], new)
    assert clipped.dtype == torch.bool and torch.equal(clipped, grads == 0)
    close(grads[~clipped], (-advantages * (new - old).exp())[~clipped])
    good, bad = clipped[advantages > 0], clipped[advantages < 0]
    assert 0 < good.sum() < good.numel() and 0 < bad.sum() < bad.numel()


def test_an_unchanged_policy_is_not_clipped(algo):
    logprobs, advantages = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    losses, clipped = algo.policy_loss(logprobs, logprobs, advantages, 0.0, 0.0)
    assert torch.equal(losses, -advantages) and not clipped.any()


@pytest.mark.parametrize("mode", MODES)
def test_aggregate_shares_add_up(algo, case, mode):
    """However a step is cut, to micro-batches, ranks or widths, the shares and gradients add up to the whole."""
    losses, counts = case.draw(), (len(case.valid), B, MAX_LENGTH)
    whole = algo.aggregate(losses, case.mask, mode, *counts)
    close(whole, case.matrix(lambda i, t: weight(case, mode, i) * losses[i, t].item()).sum())

    def cut(x):
        total = 0
        for rows in [0], [1, 2], [3, 4, 5]:
            width = max(t + 1 for i, t in case.valid if i in rows)
            total = total + algo.aggregate(x[rows, :width], case.mask[rows, :width], mode, *counts)
        return total

    def wider(x):
        return algo.aggregate(pad(x, (0, 5), value=case.junk), pad(case.mask, (0, 5)), mode, *counts)

    for f in cut, wider:
        close(f(losses), whole)
        close(gradient(f, losses), case.matrix(lambda i, t: weight(case, mode, i)))
    empty = torch.zeros_like(case.mask)  # a rank whose rows are all masked, in a full step and in an empty one
    for counts in (len(case.valid), B, MAX_LENGTH), (0, 0, MAX_LENGTH):
        assert algo.aggregate(losses, empty, mode, *counts) == 0
        assert (gradient(lambda x: algo.aggregate(x, empty, mode, *counts), losses) == 0).all()


def test_aggregate_golden(algo):
    """Rows of 2 and 1 tokens: (1 + 2 + 6) / 3; ((1 + 2)/2 + 6) / 2; (3 + 6) / 2; the same over 10."""
    losses, mask = torch.tensor([[1.0, 2.0, 9.0], [6.0, 9.0, 9.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    close([algo.aggregate(losses, mask, mode, 3, 2, 10) for mode in MODES], [3, 3.75, 4.5, 0.45], 1e-6)


@pytest.mark.parametrize("temperature", [1, 0.5, 0.7, 2])
@pytest.mark.parametrize("seed", range(3))
def test_sample_tokens(algo, seed, temperature):
    """An even grid of uniforms gives every token its probability to within one grid step, in the order of the ids."""
    n, logits = 2000, 1.5 * torch.randn(12, generator=torch.Generator().manual_seed(seed))
    uniforms = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    tokens, logprobs = algo.sample_tokens(logits.expand(n, -1), uniforms, temperature)
    weights = [math.exp(x / temperature) for x in logits.tolist()]
    probs = [w / sum(weights) for w in weights]
    for token in range(12):
        assert abs((tokens == token).sum() - n * probs[token]) <= 1
    assert (tokens.diff() >= 0).all()
    close(logprobs, [math.log(probs[token]) for token in tokens.tolist()], 1e-5)


def test_sample_tokens_rows(algo):
    """Every row uses its own logits and uniform, and temperature 0 takes the likeliest token."""
    random = torch.Generator().manual_seed(0)
    logits, uniforms = 2 * torch.randn(64, 9, generator=random), torch.rand(64, generator=random, dtype=torch.float64)
    tokens, logprobs = algo.sample_tokens(logits, uniforms, 1.0)
    greedy, greedy_logprobs = algo.sample_tokens(logits, uniforms, 0)
    for i, row in enumerate(logits.double().softmax(-1).tolist()):
        assert tokens[i] == bisect.bisect_right([sum(row[: k + 1]) for k in range(9)], uniforms[i].item())
        assert greedy[i] == row.index(max(row))
        close([logprobs[i].exp(), greedy_logprobs[i].exp()], [row[tokens[i]], 1], 1e-5)


def test_greedy_needs_no_noise_where_tokens_are_equally_likely(algo):
    """Logits in bfloat16 often tie at the top: then, too, it is one token for every row, with log-prob 0."""
    logits = torch.tensor([0.0, 3.0, 3.0, 1.0, 3.0], dtype=torch.bfloat16).expand(50, -1)
    uniforms = (torch.arange(50, dtype=torch.float64) + 0.5) / 50
    tokens, logprobs = algo.sample_tokens(logits, uniforms, 0)
    assert len(tokens.unique()) == 1 and tokens[0] in (1, 2, 4)
    assert logprobs.dtype == torch.float32 and logprobs.tolist() == [0] * 50
    sampled, _ = algo.sample_tokens(logits, uniforms, 1.0)
    assert len(sampled.unique()) == 5


@pytest.mark.parametrize("temperature", [0, 0.1, 1.0])
def test_sample_tokens_with_large_logits(algo, temperature):
    """Whose exponentials are no numbers any more: the likeliest token is certain, and its log-prob 0."""
    logits = torch.tensor([[1e4, 0.0, -1e4], [-1e30, 1e30, 1.0], [-1e4, -3e4, -2e4], [-torch.inf, 0.0, 1e4]])
    for uniform in 0.0, 0.5, 1 - 1e-16:
        tokens, logprobs = algo.sample_tokens(logits, double([uniform] * 4), temperature)
        assert tokens.tolist() == [0, 1, 0, 2] and logprobs.tolist() == [0] * 4


def test_sample_tokens_extremes(algo):
    """The ends of [0,1) never pick an impossible token, wherever rounding puts the sum of the probabilities."""
    logits = torch.randn(1000, 40, generator=torch.Generator().manual_seed(0))
    logits[:, [0, 1, 7, 38, 39]] = -torch.inf
    for temperature, uniform in product((1.0, 0.5, 0), (0.0, 1 - 1e-16)):
        assert uniform < 1
        tokens, logprobs = algo.sample_tokens(logits, double([uniform] * 1000), temperature)
        assert logprobs.isfinite().all() and logits.gather(1, tokens[:, None]).isfinite().all()
    # Eight tokens share the last 1.6e-8 of the probability, less than fp32 resolves next to 1.
    logits = torch.tensor([0.0] + [-20.0] * 8)
    uniforms = 1 - math.exp(-20) * (7.5 - torch.arange(8, dtype=torch.float64))
    tokens, _ = algo.sample_tokens(logits.expand(8, -1), uniforms, 1.0)
    assert tokens.tolist() == list(range(1, 9))


NUMBERS = {
    5: "#### 5|####5|a\n####\n5\n|#### +5|#### 5.0|#### 5.|#### 5,|#### 5 apples|#### 5%|#### 005|5 #### 7 #### 5 9",
    -5: "#### -5|#### - 5|#### -5.|#### -$5|#### $-5|#### -5.00",
    7: "#### $7|#### €7|#### $ 7|#### £7.|#### 8, no, #### 7",
    1234: "#### 1,234|#### $1,234.00|#### +1,234.",
    1234567.5: "#### 1,234,567.50",
    0.5: "#### .5|#### 0.5|#### $.50",
    None: "|5|### 5|####|#### |#### five|#### .|#### -|#### $,|#### x 5|#### 7 ####",
}


@pytest.mark.parametrize("text, number", [(text, n) for n, texts in NUMBERS.items() for text in texts.split("|")])
def test_gsm8k_number(algo, text, number):
    found = algo.gsm8k_number(text)
    assert found == number and isinstance(found, Decimal | None)


def test_gsm8k_number_is_quick(algo):
    """A model that has gone wrong may write nothing but white space after the mark."""
    for filler in " ", "\n", "-", ",", "1", "1,", "$ ":
        start = time.process_time()
        algo.gsm8k_number("####" + filler * 500 + "x")
        assert time.process_time() - start < 0.2, repr(filler)


def test_gsm8k(algo):
    responses = ["so #### 5", "#### 5.0", "#### 6", "5", "", "#### 0.1 "]
    answers = ["2 + 3 = 5\n#### 5"] * 4 + ["no number", "#### .10"]
    scores = algo.gsm8k([""] * 6, responses, answers)
    assert scores == [1, 1, 0, 0, 0, 1] and all(isinstance(score, float) for score in scores)


def test_exact():
    """A reward file's, since no script has it."""
    exact = load_script(ROOT / "benchmarks" / "rewards.py").exact
    scores = exact([""] * 5, [" yes\n", "Yes", "", "5", "yes no"], ["yes", "yes", "yes", 5, "yes"])
    assert scores == [1, 0, 0, 1, 0] and all(isinstance(score, float) for score in scores)


@pytest.mark.parametrize("gold", [5.0, True, None, datetime.date(2024, 5, 1)])
def test_exact_refuses_what_is_no_text(gold):
    """What `datasets` made of a CSV's 5 or a date, no model writes."""
    exact = load_script(ROOT / "benchmarks" / "rewards.py").exact
    with pytest.raises(TypeError, match=re.escape(repr(gold))):
        exact(["", ""], ["5", "5"], ["5", gold])


def test_gsm8k_tells_large_numbers_apart(algo):
    assert algo.gsm8k([""], ["#### 9007199254740993"], ["#### 9007199254740992"]) == [0]
