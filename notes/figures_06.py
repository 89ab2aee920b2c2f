"""Figure of note 6 (three policies): python notes/figures_06.py"""

import math
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

NOTES = Path(__file__).resolve().parent
sys.path.insert(0, str(NOTES.parent))

from ppo_llm import rollout_weights  # noqa: E402

SPREAD = 0.05  # standard deviation of a token's log-ratio


def gaps(num_rows, length, seed=1):
    """log pi_old - log pi_rollout of sampled tokens: normal, with the mean that makes E[weight] = 1."""
    noise = torch.randn(num_rows, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return SPREAD * noise - SPREAD**2 / 2


def weights(found, level, cap):
    return rollout_weights(found, torch.zeros_like(found), torch.ones_like(found, dtype=torch.bool), level, cap)


def main():
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
    left.set_title("rollout/ess, log-ratio of a token +-0.05")
    caps = [1, 1.25, 1.5, 2, 3, 5, 10, 20, 50]
    for length, color, marker in ((100, "C0", "o"), (1000, "C1", "s")):
        found = [weights(gaps(10000, length), "sequence", cap)[:, 0] for cap in caps]
        right.plot(caps, [w.mean().item() for w in found], color=color, marker=marker, label=f"mean, {length} tokens")
        label = f"std, {length} tokens"
        right.plot(caps, [w.std().item() for w in found], color=color, marker=marker, linestyle="--", label=label)
    right.axhline(1, color="grey", linewidth=0.8)
    right.set(xscale="log", xlabel="--is-cap", title="sequence weights: bias and spread", ylim=(0, 3.5))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(NOTES / "figures" / "is_weights.png", dpi=110)


if __name__ == "__main__":
    (NOTES / "figures").mkdir(exist_ok=True)
    main()
