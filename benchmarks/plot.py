"""Draw the learning curves of one or many runs.

    python benchmarks/plot.py runs/NAME [runs/OTHER ...] [--output curves.png]
    python benchmarks/plot.py benchmarks/results/ppo.csv            # several seeds: mean and spread
    python benchmarks/plot.py benchmarks/results/{ppo,grpo}.csv --metrics reward/mean eval/score_sampled --x responses

Every argument is one line in each panel: a run folder (or its metrics.jsonl), a folder of run folders, or a csv of
several seeds as benchmarks/learning.py writes it; or FILE.csv:NAME, its rows that have this name in the column `row`.
Several runs are drawn as their mean, with a band from the lowest to the highest. If the reward has parts, each has a
panel. A dotted line marks where a run was resumed with other flags, which are printed (TensorBoard's files know them).
With --metrics there is one row of panels for each metric, and one column for each --x: iterations, sampled responses or
seconds.
"""

import argparse
import json
import sys
from pathlib import Path

from common import grouped, read_csv, read_lines, read_starts
from view import read_resumes

PANELS = [  # title, metrics drawn in it (the second dashed)
    ("test score, greedy (dashed: sampled)", ["eval/score", "eval/score_sampled"]),
    ("score of the training batch", ["reward/mean"]),
    ("length of a response (tokens)", ["response/length_mean"]),
    ("how undecided the policy is (entropy)", ["actor/entropy"]),
    ("distance from the start (KL per token)", ["kl/mean"]),
    ("change within an iteration (KL)", ["actor/approx_kl"]),
    ("spread of the advantages (std)", ["advantage/std"]),
    ("actor loss (no measure of success)", ["actor/loss"]),
    ("share of tokens that the clip stops", ["actor/clipfrac"]),
    ("critic loss (error of its forecasts)", ["critic/loss"]),
    ("returns that the critic explains (share)", ["critic/explained_variance"]),
    ("size of the gradient (dashed: critic)", ["actor/grad_norm", "critic/grad_norm"]),
]
GROUP_PANELS = [  # instead of the critic's, when no run has one
    ("share of groups that score alike", ["group/zero_std_frac"]),
    ("share of truncated responses", ["response/truncated_frac"]),
    ("size of the gradient", ["actor/grad_norm"]),
]
AXES = {"iteration": "step", "responses": "responses", "time": "time/elapsed"}
AXIS_LABELS = {"iteration": "iteration", "responses": "sampled responses", "time": "seconds"}


def read_run(folder):
    """Rows {"step": .., metric: ..} of a run folder, with the number of responses sampled so far in each."""
    rows = read_lines(folder / "metrics.jsonl")
    if (folder / "args.json").is_file():
        last, prompts = json.loads((folder / "args.json").read_text()), 0
        starts = read_starts(folder)
        for row in rows:
            args = next((flags for first, flags in reversed(starts) if first <= row["step"]), last)
            # A variant that samples again to replace groups without a signal logs how many responses it has sampled.
            prompts += row.get("group/generated", args["batch_size"]) if row["step"] > 0 else 0
            row["responses"] = prompts * args.get("group_size", 1)
    elapsed = 0.0
    for row in rows:
        elapsed += row.get("time/iteration", 0.0)
        row.setdefault("time/elapsed", elapsed)
    return rows


def read_table(path):
    """{seed: rows of its run} of a csv with a column `seed`; or its column `run`, which then names them."""
    path, _, wanted = str(path).partition(":")
    rows = [row for row in read_csv(path) if row.pop("row", "") == wanted]
    if not rows:
        sys.exit(f"error: {path} has no row {wanted!r}")
    name = "run" if "run" in rows[0] else "seed"
    runs = grouped(rows, name)
    return {
        key: [{metric: float(x) for metric, x in row.items() if x and metric != name} for row in run]
        for key, run in runs.items()
    }


def read_runs(path):
    """The runs behind one argument: a list of [{"step": .., metric: ..}, ...]. Exits when there are none."""
    file = Path(str(path).partition(":")[0])
    if file.suffix == ".csv" and file.is_file():
        return [*read_table(path).values()]
    path = Path(path)
    if path.name == "metrics.jsonl":
        path = path.parent
    folders = [file.parent for file in sorted([*path.glob("metrics.jsonl"), *path.glob("*/metrics.jsonl")])]
    if not folders:
        raise SystemExit(f"error: {path} is neither a run folder (metrics.jsonl), nor a folder of them, nor a csv")
    return [read_run(folder) for folder in folders]


def curve(runs, metric, x="step"):
    """(x, mean, lowest, highest) over the runs, at the steps that all of them have; x is a mean as well."""
    series = [{int(row["step"]): row for row in run if metric in row and x in row} for run in runs]
    steps = sorted(set.intersection(*(set(points) for points in series)))
    columns = [[points[step][metric] for points in series] for step in steps]
    places = [sum(points[step][x] for points in series) / len(series) for step in steps]
    return places, [sum(c) / len(c) for c in columns], [min(c) for c in columns], [max(c) for c in columns]


def draw(axis, groups, metrics, x="step"):
    """One line for each of groups [(label, runs)], the second of two metrics dashed."""
    for i, (_, runs) in enumerate(groups):
        for metric, style in zip(metrics, ("-", "--")):
            places, mean, low, high = curve(runs, metric, x)
            if places:
                axis.plot(places, mean, style, color=f"C{i}", linewidth=1.5)
                axis.fill_between(places, low, high, color=f"C{i}", alpha=0.15, linewidth=0)
    axis.grid(alpha=0.3)
    if not axis.lines:
        axis.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axis.transAxes, color="gray")


def mark_resumes(paths, axes):
    """A dotted line at each iteration at which a run went on with other flags, which are printed."""
    for i, path in enumerate(map(Path, paths)):
        for file in [*path.glob("metrics.jsonl"), *path.glob("*/metrics.jsonl")]:
            for step, changed in read_resumes(file.parent):
                if changed.keys() - {"total_iterations"}:
                    told = ", ".join(f"{name} {values}" for name, values in changed.items())
                    print(f"{file.parent} was resumed at iteration {step} with other flags: {told}")
                    for axis in axes:
                        axis.axvline(step, color=f"C{i}", linestyle=":", linewidth=1)


def name_runs(paths):
    """A name for each: the last part of its path, or the whole path where two would be called the same."""
    names = [Path(path).resolve().name.rpartition(".csv:")[2].removesuffix(".csv") for path in paths]
    return [path if names.count(name) > 1 else name for path, name in zip(paths, names)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--output", default="curves.png", help="file to write (default: curves.png)")
    parser.add_argument("--title", default="")
    parser.add_argument("--metrics", nargs="+", help="one row of panels each (default: an overview)")
    parser.add_argument("--x", nargs="+", choices=AXES, default=["iteration"], help="one column of panels each")
    args = parser.parse_args()
    try:  # here, so that tools which only read runs need no matplotlib
        import matplotlib.pyplot as plt
    except ImportError:
        sys.exit("plot.py needs matplotlib: pip install -e '.[plots]'")
    plt.switch_backend("Agg")
    groups = [(name, read_runs(run)) for name, run in zip(name_runs(args.runs), args.runs)]

    if args.metrics:
        options = {"figsize": (max(6, 5.5 * len(args.x)), 0.6 + 3.4 * len(args.metrics)), "squeeze": False}
        figure, axes = plt.subplots(len(args.metrics), len(args.x), constrained_layout=True, **options)
        for line, metric in zip(axes, args.metrics):
            for axis, x in zip(line, args.x):
                draw(axis, groups, [metric], AXES[x])
                axis.set_ylabel(metric)
        for axis, x in zip(axes[-1], args.x):
            axis.set_xlabel(AXIS_LABELS[x])
        mark_resumes(args.runs, [axis for line in axes for axis, x in zip(line, args.x) if x == "iteration"])
    else:
        known = {name: None for _, runs in groups for run in runs for row in run for name in row}
        panels = PANELS if "critic/loss" in known else PANELS[:-3] + GROUP_PANELS
        parts = [name.removeprefix("part/") for name in known if name.startswith("part/")]
        panels = panels + [(f"{part} (dashed: greedy test)", [f"part/{part}", f"eval_part/{part}"]) for part in parts]
        rows = -(-len(panels) // 4)
        figure, axes = plt.subplots(rows, 4, figsize=(15, 2.8 * rows), constrained_layout=True)
        for axis, (title, metrics) in zip(axes.flat, panels):
            draw(axis, groups, metrics)
            axis.set_title(title, fontsize=10)
            axis.set_xlabel("iteration")
        mark_resumes(args.runs, axes.flat[: len(panels)])
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
    labels = [f"{name} ({len(runs)} seeds)" if len(runs) > 1 else name for name, runs in groups]
    lines = [plt.Line2D([], [], color=f"C{i}", label=label) for i, label in enumerate(labels)]
    figure.legend(handles=lines, loc="outside lower center", ncols=min(4, int(figure.get_figwidth() / 2)), fontsize=9)
    figure.suptitle(args.title)
    figure.savefig(args.output, dpi=100)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
