"""Figures of note 8: python notes/figures_08.py, from the repository root."""

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from grpo_llm import overlong_penalties  # noqa: E402

FIGURES, RESULTS = ROOT / "notes" / "figures", ROOT / "benchmarks" / "results"


def read(name, column, seeds=(1, 2, 3)):
    """[[value of iteration 1, 2, ...] of every seed]"""
    runs = [list(csv.DictReader((RESULTS / name / f"seed_{seed}.csv").open())) for seed in seeds]
    return [[float(row[column]) for row in rows if row[column]] for rows in runs]


def mean_and_range(axes, name, column, style, label):
    columns = list(zip(*read(name, column)))
    steps = range(1, len(columns) + 1)
    axes.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], alpha=0.15)
    axes.plot(steps, [sum(c) / len(c) for c in columns], style, label=label)


def signal():
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name, style, n in (("grpo-n2", "-", 2), ("grpo-n4", "--", 4), ("grpo", "-.", 8)):
        mean_and_range(left, name, "group/zero_std_frac", style, f"groups of {n}")
    left.set(xlabel="iteration", ylabel="share of groups without a signal", ylim=(0, 1.02))
    left.set_title("256 responses per iteration", fontsize=9)
    mean_and_range(right, "dapo", "group/generated", "-", "groups sampled")
    mean_and_range(right, "dapo", "group/used", "--", "groups trained on")
    right.set(xlabel="iteration", ylabel="groups of 8", ylim=(0, 136))
    right.set_title("with --dynamic-sampling, at most 4 rollouts of 32", fontsize=9)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(FIGURES / "signal.png", dpi=110)


def penalties():
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    lengths = torch.arange(30, 65)
    for penalty, style in ((1.0, "-"), (0.5, "--")):
        scores = 1 - overlong_penalties(lengths, 64, 16, penalty)
        axes.plot(lengths, scores, style, label=f"--overlong-buffer 16 --overlong-penalty {penalty}")
    eos = torch.where(lengths == 64, 0.0, 1.0)  # a response of full length has an EOS as its last token, or none
    axes.plot(lengths, eos, ":", label="--missing-eos-penalty 1, cut off at 64")
    axes.axhline(0, color="0.4", linewidth=1)
    axes.text(30.3, 0.03, "a wrong answer of up to 48 tokens", fontsize=8, color="0.3")
    axes.set(xlabel="tokens of a right answer (--max-response-length 64)", ylabel="score", ylim=(-0.1, 1.1))
    axes.legend(fontsize=8, loc=(0.03, 0.3))
    axes.grid(alpha=0.3)
    figure.savefig(FIGURES / "penalties.png", dpi=110)


if __name__ == "__main__":
    FIGURES.mkdir(exist_ok=True)
    signal()
    penalties()
