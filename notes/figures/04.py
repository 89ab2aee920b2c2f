"""Figures of note 4 (KL): python notes/figures/04.py"""

import csv
import math
import sys
from pathlib import Path

import torch

try:
    import matplotlib.pyplot as plt
except ImportError:
    sys.exit("notes/figures/04.py needs matplotlib: pip install -e '.[plots]'")
plt.switch_backend("Agg")

FIGURES = Path(__file__).resolve().parent
ROOT = FIGURES.parents[1]
sys.path.insert(0, str(ROOT))

from ppo_llm import kl_penalty  # noqa: E402


def estimate(logprobs, ref_logprobs, kind):
    """kl_penalty, and the kind `abs`, which left the scripts in 0.3 (variant kl_gradient, not yet there)."""
    if kind == "abs":
        return (logprobs - ref_logprobs).abs()
    return kl_penalty(logprobs, ref_logprobs, kind)


class AdaptiveKL:
    """Proportional controller of the KL coefficient; it left the scripts in 0.3."""

    def __init__(self, coef, target, horizon):
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl, n):
        self.coef *= 1 + max(-0.2, min(0.2, kl / self.target - 1)) * n / self.horizon


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
    looks = {"k1": ("C0", "-", "o"), "k2": ("C1", "--", "s"), "k3": ("C2", "-.", "^"), "abs": ("C3", ":", "x")}
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    for kind, (color, line, marker) in looks.items():
        biases, stds = [], []
        for kl in points:
            found = estimate(kl + math.sqrt(2 * kl) * noise, torch.zeros(1, dtype=torch.float64), kind)
            biases.append(found.mean().item() / kl - 1)
            stds.append(found.std().item() / kl)
        left.plot(points, biases, color=color, linestyle="none", marker=marker, label=kind)
        right.plot(points, stds, color=color, linestyle="none", marker=marker, label=kind)
        if kind in exact_std:
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
    figure.tight_layout()
    figure.savefig(FIGURES / "kl_estimators.png", dpi=110)


class Unclipped(AdaptiveKL):
    def update(self, kl, n):
        self.coef *= 1 + (kl / self.target - 1) * n / self.horizon


def simulate(controller, iterations, n=256):
    """A policy over 50 tokens climbs score - coef*KL by exact gradients; the KL is read off n*20 sampled tokens."""
    stream = torch.Generator().manual_seed(3)
    scores = 0.1 * torch.randn(50, generator=stream, dtype=torch.float64)
    logits, reference = torch.zeros(50, dtype=torch.float64), torch.full((50,), -math.log(50), dtype=torch.float64)
    kls, coefs = [], []
    for _ in range(iterations):
        tokens = torch.multinomial(logits.softmax(0), n * 20, replacement=True, generator=stream)
        kl = kl_penalty(logits.log_softmax(0)[tokens], reference[tokens], "k1").mean().item()
        kls.append(kl)
        coefs.append(controller.coef)
        for _ in range(4):
            logprobs = logits.log_softmax(0)
            p, gain = logprobs.exp(), scores - controller.coef * (logprobs - reference)
            logits = logits + 10.0 * p * (gain - (p * gain).sum())
        controller.update(kl, n)
    return kls, coefs


def adaptive_kl():
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.5))
    cases = {
        "fixed": (None, "C7", ":"),
        "horizon 1000": (AdaptiveKL(0.02, 0.05, 1000.0), "C0", "-"),
        "horizon 4000": (AdaptiveKL(0.02, 0.05, 4000.0), "C1", "--"),
        "horizon 1000, no clip": (Unclipped(0.02, 0.05, 1000.0), "C3", "-."),
    }
    for name, (controller, color, line) in cases.items():
        fixed = controller is None
        kls, coefs = simulate(AdaptiveKL(0.02, 0.05, 1e12) if fixed else controller, 240)
        axes[0].plot(kls, color=color, linestyle=line, label=name)
        axes[1].plot(coefs, color=color, linestyle=line, label=name)
    axes[0].axhline(0.05, color="black", linewidth=0.8)
    axes[0].set(xlabel="iteration of 256 responses", yscale="log", ylim=(0.005, 4), title="simulated: KL, target 0.05")
    axes[1].set(xlabel="iteration of 256 responses", yscale="log", ylim=(1e-3, 2), title="simulated: coefficient")
    axes[1].legend(fontsize=7, loc="lower right")
    right = axes[2].twinx()
    for seed, line in zip((1, 2, 3), ("-", "--", "-.")):
        with open(ROOT / "benchmarks" / "results" / "stories" / "ppo.csv") as file:
            rows = [row for row in csv.DictReader(file) if row["seed"] == str(seed)][1:]
        steps = [int(row["step"]) for row in rows]
        axes[2].plot(steps, [float(row["kl/mean"]) for row in rows], color="C0", linestyle=line)
        right.plot(steps, [float(row["kl/coef"]) for row in rows], color="C1", linestyle=line)
    axes[2].axhline(0.1, color="black", linewidth=0.8)
    axes[2].set(xlabel="iteration of 128 responses", title="measured: story model, PPO, three seeds")
    axes[2].title.set_fontsize(10)
    axes[2].text(22, 0.102, "target 0.1", fontsize=8)
    axes[2].set_ylabel("KL per token (rising)", color="C0")
    right.set_ylabel("coefficient (falling)", color="C1")
    right.set_ylim(0, 0.045)
    axes[2].set_ylim(0, 0.13)
    for part in axes:
        part.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(FIGURES / "adaptive_kl.png", dpi=110)


if __name__ == "__main__":
    kl_estimators()
    adaptive_kl()
