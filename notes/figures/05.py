"""Figures of note 5: python notes/figures/05.py, from the repository root."""

import sys
from math import comb
from pathlib import Path

import torch

try:
    import matplotlib.pyplot as plt
except ImportError:
    sys.exit("notes/figures/05.py needs matplotlib: pip install -e '.[plots]'")
plt.switch_backend("Agg")

FIGURES = Path(__file__).resolve().parent
ROOT = FIGURES.parents[1]
sys.path.insert(0, str(ROOT))
from grpo_llm import aggregate, group_advantages  # noqa: E402


def push(estimator, p, n):
    """Expected update over the gradient of the question's score p, summed over all groups of n scores 0 or 1."""
    total = 0.0
    for k in range(1, n):
        scores = torch.tensor([1.0] * k + [0.0] * (n - k), dtype=torch.float64)
        chance = comb(n, k) * p**k * (1 - p) ** (n - k)
        total += chance * (group_advantages(scores, n, estimator) * (scores - p)).mean().item()
    return total / (p * (1 - p))


def difficulty():
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    grid = [0.005 * i for i in range(1, 200)]
    left.plot(grid, [(p * (1 - p)) ** -0.5 for p in grid], "k-", label="1/std of the policy: n without end")
    for n, style in ((64, "-."), (16, "--"), (8, "-"), (4, ":")):
        left.plot(grid, [push("grpo", p, n) for p in grid], style, label=f"grpo, n = {n}")
    left.plot(grid, [push("rloo", p, 8) for p in grid], color="0.5", linewidth=3, alpha=0.6, label="rloo, any n")
    left.set(xlabel="share of right answers to the question", ylabel="expected push / true gradient", ylim=(0, 8))
    left.legend(fontsize=7, ncols=2, loc="upper center")
    right.set_title("relative to a question with p = 1/2", fontsize=9)
    left.set_title("weight of a question", fontsize=9)
    for n, style in ((64, "-."), (16, "--"), (8, "-"), (4, ":"), (2, "-")):
        values = [push("grpo", p, n) / push("grpo", 0.5, n) for p in grid]
        right.plot(grid, values, style, label=f"grpo, n = {n}", linewidth=3 if n == 2 else 1.5, alpha=0.9)
    right.set(xlabel="share of right answers to the question", ylim=(0.8, 4.2))
    right.legend(fontsize=7)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(FIGURES / "difficulty.png", dpi=110)


def aggregation():
    """Seven responses of 32 tokens, and one whose length varies; at most 64 tokens."""
    modes = {
        "token-mean": ("-", "o"),
        "seq-mean-token-mean": ("--", "s"),
        "seq-mean-token-sum": ("-.", "^"),
        "seq-mean-token-sum-norm": (":", "v"),
    }
    lengths = list(range(2, 65, 2))
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for mode, (line, marker) in modes.items():
        token, whole = [], []
        for n in lengths:
            mask = torch.arange(64) < torch.tensor([32] * 7 + [n])[:, None]
            losses = torch.ones(8, 64, requires_grad=True)
            aggregate(losses, mask, mode, int(mask.sum()), 8, 64).backward()
            token.append(losses.grad[7, 0].item())
            whole.append(losses.grad[7].sum().item())
        for axes, values in zip(panels, (token, whole)):
            axes.plot(lengths, values, line, marker=marker, markevery=5, markersize=5, label=mode)
    for axes, what in zip(panels, ("one token", "all its tokens together")):
        axes.set(xlabel="length of the response", ylabel="weight in the loss", yscale="log", title=what)
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=7, loc=(0.42, 0.45))
    figure.savefig(FIGURES / "aggregation.png", dpi=110)


def group_noise():
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    sizes = [2, 3, 4, 6, 8, 12, 16, 32, 64]
    left.plot(sizes, [n / (n - 1) for n in sizes], "k-", label="n / (n - 1)")
    stream, found = torch.Generator().manual_seed(0), []
    for n in sizes:  # rewards and score functions drawn independently: one response moves the policy little
        groups = 1_000_000 // n
        scores = (torch.rand(groups, n, generator=stream) < 0.34).double()
        directions = torch.randn(groups, n, generator=stream, dtype=torch.float64)
        advantages = group_advantages(scores.flatten(), n, "rloo").view(groups, n)
        found.append(n * (advantages * directions).mean(1).var().item() / scores.var().item())
    left.plot(sizes, found, "o", markerfacecolor="none", label="simulated, rloo")
    left.axhline(1, color="0.5", linestyle=":", label="baseline known exactly")
    left.set(xscale="log", xlabel="responses per group", ylabel="variance of the update", ylim=(0.9, 2.15))
    left.set_xticks([2, 4, 8, 16, 32, 64], [2, 4, 8, 16, 32, 64])
    left.set_xticks([], minor=True)
    left.set_title("same number of responses in all", fontsize=9)
    grid = [0.01 * i for i in range(101)]
    for n, style in ((2, "-"), (4, "--"), (8, "-."), (16, ":")):
        right.plot(grid, [p**n + (1 - p) ** n for p in grid], style, label=f"n = {n}")
    right.set(xlabel="share of right answers to the question", ylabel="chance that all score alike")
    right.set_title("groups that teach nothing", fontsize=9)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(FIGURES / "group_noise.png", dpi=110)


if __name__ == "__main__":
    difficulty()
    aggregation()
    group_noise()
