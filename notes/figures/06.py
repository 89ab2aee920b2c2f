"""Figures of chapter 6: python notes/figures/06.py draws difficulty and aggregation."""

from math import comb

import torch
from style import plt, save

from grpo_llm import token_weights


def push(estimator, p, n):
    """Expected update over the gradient of the question's score p, summed over all groups of n scores 0 or 1."""
    total = 0.0
    for k in range(1, n):
        scores = torch.tensor([1.0] * k + [0.0] * (n - k), dtype=torch.float64)
        chance = comb(n, k) * p**k * (1 - p) ** (n - k)
        advantages = scores - scores.mean()
        advantages = advantages / (scores.std() + 1e-6) if estimator == "grpo" else advantages * n / (n - 1)
        total += chance * (advantages * (scores - p)).mean().item()
    return total / (p * (1 - p))


def difficulty():
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
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
    save(figure, "difficulty")


def aggregation():
    """Seven responses of 32 tokens, and one whose length varies; at most 64 tokens."""
    modes = {
        "token-mean": ("-", "o"),
        "seq-mean-token-mean": ("--", "s"),
        "seq-mean-token-sum": ("-.", "^"),
        "seq-mean-token-sum-norm": (":", "v"),
    }
    lengths = list(range(2, 65, 2))
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6))
    for mode, (line, marker) in modes.items():
        token, whole = [], []
        for n in lengths:
            mask = torch.arange(64) < torch.tensor([32] * 7 + [n])[:, None]
            weights = token_weights(mask, mode, 64)
            token.append(weights[7, 0].item())
            whole.append(weights[7].sum().item())
        for axes, values in zip(panels, (token, whole)):
            axes.plot(lengths, values, line, marker=marker, markevery=5, markersize=5, label=mode)
    for axes, what in zip(panels, ("one token", "all its tokens together")):
        axes.set(xlabel="length of the response", ylabel="weight in the loss", yscale="log", title=what)
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=7, loc=(0.42, 0.45))
    save(figure, "aggregation")


if __name__ == "__main__":
    difficulty()
    aggregation()
