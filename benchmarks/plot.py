"""Draw the learning curves of one or many runs.

    python benchmarks/plot.py runs/NAME [runs/OTHER ...] [--output curves.png]
    python benchmarks/plot.py benchmarks/results/ppo            # several seeds: mean and spread

Every argument is one line in each panel: a run folder (or its metrics.jsonl), or a folder of seed_*.csv files as
benchmarks/learning.py writes them, drawn as their mean with a band from the lowest to the highest seed.
"""

import argparse
import csv
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = [  # title, metrics drawn in it (the second dashed)
    ("eval score (dashed: sampled)", ["eval/score", "eval/score_sampled"]),
    ("reward", ["reward/mean"]),
    ("response length (tokens)", ["response/length_mean"]),
    ("entropy (nats per token)", ["actor/entropy"]),
    ("KL to the reference (per token)", ["kl/mean"]),
    ("approximate KL to the old policy", ["actor/approx_kl"]),
    ("advantage std (before whitening)", ["advantage/std"]),
    ("actor loss", ["actor/loss"]),
    ("clip fraction", ["actor/clipfrac"]),
    ("critic loss", ["critic/loss"]),
    ("critic explained variance", ["critic/explained_variance"]),
    ("gradient norm (dashed: critic)", ["actor/grad_norm", "critic/grad_norm"]),
]


def read_runs(path):
    """The runs behind one argument: a list of [{"step": .., metric: ..}, ...]. Exits when there are none."""
    path = Path(path)
    if (path / "metrics.jsonl").is_file():
        path = path / "metrics.jsonl"
    if path.is_file() and path.suffix == ".jsonl":
        return [[json.loads(line) for line in path.read_text().splitlines()]]
    files = sorted(path.glob("seed_*.csv")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise SystemExit(f"error: {path} is neither a run folder (metrics.jsonl) nor a folder of seed_*.csv files")
    runs = []
    for file in files:
        with open(file, newline="") as lines:
            runs.append([{key: float(x) for key, x in row.items() if x} for row in csv.DictReader(lines)])
    return runs


def curve(runs, metric):
    """(steps, mean, lowest, highest) over the runs, at the steps that all of them have."""
    series = [{int(row["step"]): row[metric] for row in run if metric in row} for run in runs]
    steps = sorted(set.intersection(*(set(points) for points in series)))
    columns = [[points[step] for points in series] for step in steps]
    return steps, [sum(c) / len(c) for c in columns], [min(c) for c in columns], [max(c) for c in columns]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--output", default="curves.png", help="file to write (default: curves.png)")
    parser.add_argument("--labels", nargs="+", help="one label per argument (default: the folder names)")
    parser.add_argument("--title", default="")
    args = parser.parse_args()
    labels = args.labels or [Path(run).resolve().name for run in args.runs]
    if len(labels) != len(args.runs):
        parser.error(f"{len(labels)} labels for {len(args.runs)} arguments")
    groups = [(label, read_runs(run)) for label, run in zip(labels, args.runs)]

    figure, axes = plt.subplots(3, 4, figsize=(15, 8.5), constrained_layout=True)
    for axis, (title, metrics) in zip(axes.flat, PANELS):
        for i, (label, runs) in enumerate(groups):
            for metric, style in zip(metrics, ("-", "--")):
                steps, mean, low, high = curve(runs, metric)
                if steps:
                    name = f"{label} ({len(runs)} seeds)" if len(runs) > 1 else label
                    axis.plot(steps, mean, style, color=f"C{i}", linewidth=1.5, label=name if style == "-" else None)
                    axis.fill_between(steps, low, high, color=f"C{i}", alpha=0.15, linewidth=0)
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
        if not axis.lines:
            axis.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axis.transAxes, color="gray")
    for axis in axes[-1]:
        axis.set_xlabel("iteration")
    axes.flat[0].set_ylim(0, 1)
    axes.flat[0].legend(loc="lower right", fontsize=8)
    figure.suptitle(args.title)
    figure.savefig(args.output, dpi=100)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
