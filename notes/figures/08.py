"""Figures of note 8: python notes/figures/08.py, from the repository root."""

import csv
import sys
from pathlib import Path

try:
    import matplotlib.pyplot as plt
except ImportError:
    sys.exit("notes/figures/08.py needs matplotlib: pip install -e '.[plots]'")
plt.switch_backend("Agg")

FIGURES = Path(__file__).resolve().parent
ROOT = FIGURES.parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def read(name, column, seeds=("1", "2", "3")):
    """[[value of iteration 1, 2, ...] of every seed]"""
    rows = list(csv.DictReader((RESULTS / f"{name}.csv").open()))
    return [[float(row[column]) for row in rows if row["seed"] == seed and row[column]] for seed in seeds]


def mean_and_range(axes, name, column, style, label):
    columns = list(zip(*read(name, column)))
    steps = range(1, len(columns) + 1)
    axes.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], alpha=0.15)
    axes.plot(steps, [sum(c) / len(c) for c in columns], style, label=label)


def signal():
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for name, style, n in (("grpo-n2", "-", 2), ("grpo-n4", "--", 4), ("grpo", "-.", 8)):
        mean_and_range(axes, name, "group/zero_std_frac", style, f"groups of {n}")
    axes.set(xlabel="iteration", ylabel="share of groups without a signal", ylim=(0, 1.02))
    axes.set_title("256 responses per iteration", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(FIGURES / "signal.png", dpi=110)


def real():
    """The real model with a careless reward, and with an honest one."""
    figure, (hacked, honest) = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True, layout="constrained")
    with (RESULTS / "real" / "runs.csv").open() as file:
        kept = list(csv.DictReader(file))
    rows = [row for row in kept if row["run"] == "hacked"]
    for name, style, label in (
        ("reward/mean", "-", "reward in training"),
        ("eval/score", "s-", "test answers, by the reward"),
        ("eval/last_number", "o--", "test answers that are right"),
    ):
        points = [(int(row["step"]), float(row[name])) for row in rows if row[name]]
        hacked.plot(*zip(*points), style, label=label)
    hacked.set_title("a careless reward: any formula worth 83 pays", fontsize=9)
    for seed in 1, 2, 3:
        rows = [row for row in kept if row["run"] == f"additions-{seed}"]
        for name, style, width, label in (
            ("reward/mean", "-", 0.6, "reward in training"),
            ("eval/score", "o--", 1.8, "test answers that are right"),
        ):
            points = [(int(row["step"]), float(row[name])) for row in rows if row[name]]
            label = label if seed == 1 else None
            honest.plot(*zip(*points), style, color=f"C{seed - 1}", linewidth=width, label=label)
    honest.set_title("an honest one: the last number counts (3 seeds)", fontsize=9)
    hacked.set(ylabel="share of answers", ylim=(0, 1))
    for axes in hacked, honest:
        axes.set(xlabel="iteration")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle("SmolLM2-135M-Instruct (4-bit weights) learns to add, GRPO on two CPU cores", fontsize=10)
    figure.savefig(FIGURES / "real.png", dpi=110)


if __name__ == "__main__":
    signal()
    real()
