"""What the scripts of the figures share: where results are, how runs are read and drawn, how a picture is saved."""

import sys
from itertools import pairwise
from pathlib import Path

try:
    import matplotlib.pyplot as plt
except ImportError:
    sys.exit("the figures need matplotlib: pip install -e '.[plots]'")

FIGURES = Path(__file__).resolve().parent
ROOT = FIGURES.parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path[:0] = str(ROOT), str(FIGURES.parent), str(ROOT / "benchmarks")
plt.switch_backend("Agg")
plt.rcParams |= {"legend.fontsize": 8, "axes.titlesize": 10, "figure.constrained_layout.use": True}
plt.rcParams["svg.hashsalt"] = "notes"  # the same picture makes the same file


def save(figure, name):
    figure.savefig(FIGURES / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def draw_run(axes, run, metric, last=None, **look):
    """A metric of a run, [{"step": .., metric: ..}, ...], over its iterations, up to the iteration `last`."""
    rows = [row for row in run if metric in row and (last is None or row["step"] <= last)]
    axes.plot([row["step"] for row in rows], [row[metric] for row in rows], **look)


def draw_seeds(axes, name, metric, label, **look):
    """A thin line for each seed of an experiment in benchmarks/results."""
    from plot import read_runs

    for run in read_runs(RESULTS / f"{name}.csv"):
        draw_run(axes, run, metric, label=label, linewidth=1.3, marker="o", markersize=2, **look)
        label = None


def gae(rewards, values, lam):
    """Advantages (B,T) with gamma = 1, where rewards and values are 0 behind the last action."""
    advantages, advantage = rewards.clone(), 0
    for t in reversed(range(rewards.shape[1])):
        after = values[:, t + 1] if t + 1 < rewards.shape[1] else 0
        advantages[:, t] = advantage = rewards[:, t] + after - values[:, t] + lam * advantage
    return advantages


def box(axes, x, y, width, height, text, color="#eef3fb", line="-", **font):
    """A box of a diagram, with text in its middle."""
    axes.add_patch(plt.Rectangle((x, y), width, height, facecolor=color, edgecolor="#222222", ls=line))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", linespacing=1.35, **font)


def arrow(axes, *points):
    """An arrow through the points."""
    for start, end in pairwise(points[:-1]):
        axes.plot(*zip(start, end), color="#222222", linewidth=1)
    look = {"arrowstyle": "-|>", "color": "#222222", "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=points[-1], xytext=points[-2], arrowprops=look)
