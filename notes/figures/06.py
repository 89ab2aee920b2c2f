"""Figures of note 6 (three policies): python notes/figures/06.py"""

import csv
import math
import sys
from pathlib import Path

import numpy as np
import torch

try:
    import matplotlib.pyplot as plt
except ImportError:
    sys.exit("notes/figures/06.py needs matplotlib: pip install -e '.[plots]'")
plt.switch_backend("Agg")

FIGURES = Path(__file__).resolve().parent

SPREAD = 0.05  # standard deviation of a token's log-ratio


def gaps(num_rows, length, seed=1):
    """log pi_old - log pi_rollout of sampled tokens: normal, with the mean that makes E[weight] = 1."""
    noise = torch.randn(num_rows, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return SPREAD * noise - SPREAD**2 / 2


def weights(found, level, cap):
    """What version 0.2 called rollout_weights: it left the scripts in 0.3 (variant bypass, not yet there)."""
    log_ratio = found.sum(1, keepdim=True).expand_as(found) if level == "sequence" else found
    return log_ratio.clamp(-20, 20).exp().clamp(max=cap)


def time_line():
    """How far reference, old and current policy are from the start, through two iterations of three steps each."""
    figure, axes = plt.subplots(figsize=(9.4, 4.6))
    axes.set(xlim=(-1.4, 18.9), ylim=(-1.2, 6.1))
    axes.axis("off")
    blue, orange, grey = "#1f6bc2", "#c25e00", "#555555"
    arrow = {"arrowstyle": "<|-|>", "shrinkA": 0, "shrinkB": 0, "color": "black"}
    phases = [("1\nrollout", 1.9, "#eef3fb"), ("2 to 5\nreward, log-probs,\nadvantages", 3.4, "#fdf3dc")]
    phases += [(f"6\nstep {k}", 1.2, "#e3f2e1") for k in (1, 2, 3)]
    for number, start, level in ("n", 0.0, 0.6), ("n+1", 8.9, 2.4):
        end = start
        for text, width, colour in phases:
            axes.add_patch(plt.Rectangle((end, -0.15), width, 5.5, facecolor=colour, edgecolor="white", lw=2))
            axes.text(end + width / 2, 5.25, text, fontsize=8.5, ha="center", va="top", linespacing=1.3)
            end += width
        axes.text((start + end) / 2, 5.65, f"iteration ${number}$", fontsize=10, ha="center")
        steps = [start + 5.3 + 1.2 * k for k in range(3)]
        moves = [x + 0.9 for x in steps]  # where a step ends, the current policy moves
        stairs = [level + 0.6 * k for k in range(4)]
        axes.plot([start, *np.repeat(moves, 2), end], np.repeat(stairs, 2), color=blue, lw=2.4)
        axes.plot(start + 0.95, level, "o", color=blue, ms=7)
        axes.text(start + 0.95, level + 0.25, "samples", color=blue, fontsize=8.5, ha="center")
        axes.plot([start + 2.5, end], [level - 0.08] * 2, color=orange, lw=2.4, ls=(0, (3, 1)))
        axes.plot(start + 2.5, level - 0.08, "s", color=orange, ms=7)
        axes.text(start + 2.5, level + 0.25, "log-probs taken", color=orange, fontsize=8.5)
        axes.annotate("", (start + 3.6, level - 0.08), (start + 3.6, 0), arrowprops=arrow)
        axes.text(start + 3.75, (level - 0.08) / 2, "KL", fontsize=8.5, va="center")
        for k in 1, 2:
            axes.annotate("", (steps[k] + 0.3, stairs[k]), (steps[k] + 0.3, level - 0.08), arrowprops=arrow)
            axes.text(steps[k] + 0.4, (stairs[k] + level) / 2, "ratio", fontsize=8.5, va="center")
    axes.plot([0, end], [0, 0], color=grey, lw=2.4, ls=":")
    for x, y, side, colour, name in (
        *((-0.2, 0.6, "right", blue, "current"), (-0.2, 0, "right", grey, "reference")),
        *((end + 0.2, 4.2, "left", blue, "current"), (end + 0.2, 2.32, "left", orange, "old")),
        (end + 0.2, 0, "left", grey, "reference"),
    ):
        axes.text(x, y, name, color=colour, fontsize=9.5, ha=side, va="center")
    axes.annotate("", (end, -0.5), (0, -0.5), arrowprops={"arrowstyle": "-|>", "color": "black"})
    axes.text(end, -0.85, "time", fontsize=8.5, ha="right", va="center")
    axes.text(0, -0.85, "height: how far the weights are from those of the start", fontsize=8.5, va="center")
    figure.savefig(FIGURES / "policies.png", dpi=110, facecolor="white", bbox_inches="tight")


def precision():
    """How far sampler and training pass are apart: benchmarks/results/engines, a dot for each seed."""
    with open(FIGURES.parent.parent / "benchmarks" / "results" / "engines" / "precision.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    kinds = ["float32", "bfloat16", "float16"]
    for sampler, shift, colour, marker in ("generate", -0.12, "#1f6bc2", "o"), ("vllm", 0.12, "#c25e00", "s"):
        mine = [row for row in rows if row["sampler"] == sampler]
        places = [kinds.index(row["precision"]) + shift for row in mine]
        look = {"color": colour, "marker": marker, "ls": "", "ms": 6, "alpha": 0.8, "label": sampler}
        axes[0].plot(places, [float(row["logprob_diff"]) for row in mine], **look)
        axes[1].plot(places, [1 - float(row["ess_response"]) for row in mine], **look)
    axes[0].set_title("mean difference of a token's log-prob", fontsize=10)
    axes[1].set_title("share of the batch lost to weights per response", fontsize=10)
    for one in axes:
        one.set(yscale="log", xticks=range(3), xticklabels=kinds, xlim=(-0.5, 2.5))
        one.grid(axis="y", alpha=0.3)
    axes[0].legend(frameon=False, loc="upper right")
    figure.tight_layout()
    figure.savefig(FIGURES / "precision.png", dpi=110, facecolor="white")


def main():
    time_line()
    precision()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    lengths = [10, 20, 50, 100, 200, 500, 1000, 2000]
    looks = {("token", 2.0): ("C0", "o"), ("sequence", 2.0): ("C1", "s"), ("sequence", 1e9): ("C2", "^")}
    for (level, cap), (color, marker) in looks.items():
        found = [weights(gaps(2000, length), level, cap) for length in lengths]
        ess = [(w.mean() ** 2 / w.square().mean()).item() for w in found]
        label = f"{level}, cap {cap:g}" if cap < 1e9 else f"{level}, no cap"
        left.plot(lengths, ess, color=color, marker=marker, linestyle="-" if cap < 1e9 else "none", label=label)
    left.plot(lengths, [math.exp(-length * SPREAD**2) for length in lengths], color="C2", linestyle=":")
    left.set(xscale="log", xlabel="tokens per response", ylabel="effective share of the batch", ylim=(0, 1.05))
    left.set_title("effective share, log-ratio of a token +-0.05")
    caps = [1, 1.25, 1.5, 2, 3, 5, 10, 20, 50]
    for length, color, marker in ((100, "C0", "o"), (1000, "C1", "s")):
        found = [weights(gaps(10000, length), "sequence", cap)[:, 0] for cap in caps]
        right.plot(caps, [w.mean().item() for w in found], color=color, marker=marker, label=f"mean, {length} tokens")
        label = f"std, {length} tokens"
        right.plot(caps, [w.std().item() for w in found], color=color, marker=marker, linestyle="--", label=label)
    right.axhline(1, color="grey", linewidth=0.8)
    right.set(xscale="log", xlabel="cap", title="sequence weights: bias and spread", ylim=(0, 3.5))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(FIGURES / "is_weights.png", dpi=110)


if __name__ == "__main__":
    main()
