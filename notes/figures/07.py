"""Figure of chapter 7: python notes/figures/07.py draws kl_estimators."""

import math

import torch
from style import plt, save

from ppo_llm import kl_penalty


def kl_estimators(draws=1_000_000):
    """Bias and standard deviation of one token's estimate, in units of the KL; d is normal, which fixes all of them.

    With exp(-d) of mean 1, as it is for tokens that the policy samples, d ~ N(KL, 2*KL).
    """
    noise = torch.randn(draws, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    points = torch.logspace(-3, math.log10(4), 13).tolist()
    fine = torch.logspace(-3, math.log10(4), 200, dtype=torch.float64)
    s = (2 * fine).sqrt()  # standard deviation of d
    exact_std = {  # over the KL
        "k1": s / fine,
        "k2": (2 * s**4 + 4 * fine**2 * s**2).sqrt() / 2 / fine,
        "k3": (torch.exp(s**2) - 1 - s**2).sqrt() / fine,
    }
    exact_bias = {"k1": 0 * fine, "k2": fine / 2, "k3": 0 * fine}
    looks = {"k1": ("C0", "-", "o"), "k2": ("C1", "--", "s"), "k3": ("C2", "-.", "^")}
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    for kind, (color, line, marker) in looks.items():
        biases, stds = [], []
        for kl in points:
            found = kl_penalty(kl + math.sqrt(2 * kl) * noise, torch.zeros(1, dtype=torch.float64), kind)
            biases.append(found.mean().item() / kl - 1)
            stds.append(found.std().item() / kl)
        left.plot(points, biases, color=color, linestyle="none", marker=marker, label=kind)
        right.plot(points, stds, color=color, linestyle="none", marker=marker, label=kind)
        left.plot(fine, exact_bias[kind], color=color, linestyle=line, linewidth=1)
        right.plot(fine, exact_std[kind], color=color, linestyle=line, linewidth=1)
    left.set(xscale="log", ylim=(-1.1, 2.4), xlabel="true KL per token (nats)", ylabel="(mean - KL) / KL", title="bias")
    right.set(xscale="log", yscale="log", ylim=(0.4, 60), xlabel="true KL per token (nats)", ylabel="std / KL")
    right.set_title("standard deviation of one token's estimate")
    right.axvline(0.628, color="grey", linewidth=0.8)
    right.text(0.6, 25, "0.63", ha="right", color="grey")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    save(figure, "kl_estimators")


if __name__ == "__main__":
    kl_estimators()
