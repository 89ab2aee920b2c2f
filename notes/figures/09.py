"""Figures of chapter 9 (debugging): python notes/figures/09.py

Drawn from benchmarks/results/symptoms.csv (benchmarks/campaigns/symptoms.py) and from seed 1 of the default runs.
"""

import csv
import sys
from pathlib import Path

try:
    import matplotlib.pyplot as plt
except ImportError:
    sys.exit("notes/figures/09.py needs matplotlib: pip install -e '.[plots]'")
plt.switch_backend("Agg")

FIGURES = Path(__file__).resolve().parent
ROOT = FIGURES.parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PPO, GRPO = "ppo", "grpo"
# A look for each line, so that none depends on its colour.
LOOKS = [("0.6", "-", None), ("C3", "-", "o"), ("C0", "--", "s"), ("C2", "-.", "^"), ("C1", ":", "D")]


def curve(name, metric):
    """(iterations, values) of one run."""
    healthy = name in (PPO, GRPO)
    with open(RESULTS / f"{name if healthy else 'symptoms'}.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get(metric)]
    rows = [row for row in rows if (row["seed"] == "1" if healthy else row["run"] == name)]
    return [int(row["step"]) for row in rows], [float(row[metric]) for row in rows]


def panel(axes, metric, runs, last):
    """One line per run, {label: name}, up to iteration `last`; the first is the healthy one, in grey."""
    for (label, name), (colour, line, marker) in zip(runs.items(), LOOKS):
        steps, values = curve(name, metric)
        count = sum(step <= last for step in steps)
        axes.plot(steps[:count], values[:count], line, color=colour, marker=marker, markersize=3.5, label=label)
    axes.set_title(metric, fontsize=10)
    axes.set_xlabel("iteration")
    axes.set_xlim(0, last)
    axes.grid(alpha=0.3)


def save(figure, name):
    figure.savefig(FIGURES / name, dpi=110)
    plt.close(figure)


def panels(file, metrics, runs, last, log=(), outside=False):
    """A row of panels in which the same runs are drawn; `log` names the metrics with a logarithmic scale."""
    figure, row = plt.subplots(1, len(metrics), figsize=(9.6, 3.6 if outside else 3.2), layout="constrained")
    for axes, metric in zip(row, metrics):
        panel(axes, metric, runs, last)
        if metric in log:
            axes.set_yscale("log")
    if outside:
        figure.legend(*row[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(runs), fontsize=8)
    else:
        row[0].legend(fontsize=8)
    save(figure, file)


def reward_zero():
    runs = {"GRPO's defaults": GRPO, "wrong answer column": "wrong-column", "12 tokens at most (PPO)": "cut-answers"}
    figure, row = plt.subplots(1, 3, figsize=(9.6, 3.2), layout="constrained")
    panel(row[0], "reward/mean", runs, 8)
    panel(row[1], "group/zero_std_frac", {label: runs[label] for label in list(runs)[:2]}, 8)
    panel(row[2], "response/truncated_frac", runs, 8)
    row[0].legend(fontsize=8)
    save(figure, "reward_zero.png")


def one_step():
    runs = {"PPO's defaults": PPO, "one step per iteration": "one-step", "all scores alike (GRPO)": "wrong-column"}
    panels("one_step.png", ["actor/loss", "actor/ratio_max", "actor/grad_norm", "reward/mean"], runs, 8, outside=True)


def kl_wrong():
    figure, row = plt.subplots(1, 3, figsize=(9.6, 3.2), layout="constrained")
    panel(row[0], "kl/mean", {"GRPO's defaults": GRPO, "top-p, entropy bonus, no reward": "kl-negative"}, 8)
    row[0].set_ylim(-0.008, 0.03)
    row[0].axhline(0, color="black", linewidth=0.8)
    row[0].legend(fontsize=8, loc="upper right")
    runs = {"PPO's defaults": PPO, "--lr 3e-3": "kl-explodes"}
    panel(row[1], "kl/mean", runs, 8)
    panel(row[2], "reward/mean", runs, 8)
    row[1].legend(fontsize=8)
    save(figure, "kl_wrong.png")


def exploding():
    runs = {"PPO's defaults": PPO, "--lr 3e-3": "kl-explodes"}
    metrics = ["actor/ratio_max", "actor/approx_kl", "actor/clipfrac", "actor/loss"]
    panels("exploding.png", metrics, runs, 8, metrics[:2], outside=True)


def critic_wrong():
    runs = {"PPO's defaults": PPO, "--critic-lr 1e-7": "critic-frozen", "values-late": "values-late"}
    panels("critic_wrong.png", ["critic/explained_variance", "critic/loss", "reward/mean"], runs, 8)


def entropy():
    runs = {
        "GRPO's defaults": GRPO,
        "--lr 1e-3": "entropy-collapse",
        "--temperature 0.3": "entropy-low",
        "--entropy-coef 1, top-p (PPO)": "entropy-rises",
    }
    panels(
        "entropy.png", ["actor/entropy", "eval/score_sampled", "reward/mean"], runs, 20, ["actor/entropy"], outside=True
    )


def rollout():
    """Seconds of an iteration by phase, and the peak of memory; one process."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.2), layout="constrained")
    runs = {"defaults": "ppo-seed-6", "--rollout-batch-size 4": "rollout-slow", "no EOS": "eos-missing"}
    phases = ["rollout", "logprobs", "values", "actor", "critic"]
    hatches, greys = ["//", "", "..", "xx", ""], ["C3", "0.85", "0.7", "0.55", "0.4"]
    for place, name in enumerate(runs.values()):
        start = 0
        for phase, hatch, colour in zip(phases, hatches, greys):
            seconds = curve(name, f"time/{phase}")[1][1]
            label = phase if place == 0 else None
            left.barh(place, seconds, left=start, color=colour, hatch=hatch, edgecolor="white", label=label)
            start += seconds
    left.set_yticks(range(len(runs)), runs)
    left.invert_yaxis()
    left.set_xlabel("seconds, second iteration")
    left.legend(fontsize=8, loc="upper right", bbox_to_anchor=(1, 1))
    left.set_xlim(0, 27)
    sizes = {"4096": "memory-rollout", "128": "memory-held"}
    peaks = [curve(name, "memory/peak_gib")[1][0] for name in sizes.values()]
    bars = right.barh(list(sizes), peaks, color=["C3", "0.6"], height=0.5)
    right.bar_label(bars, fmt="%.2f GiB", padding=3)
    right.set_xlim(0, 1.25 * max(peaks))
    right.set_ylabel("--rollout-batch-size")
    right.set_title("memory/peak_gib, 4096 prompts per iteration", fontsize=10)
    save(figure, "rollout.png")


if __name__ == "__main__":
    reward_zero()
    one_step()
    kl_wrong()
    exploding()
    critic_wrong()
    entropy()
    rollout()
