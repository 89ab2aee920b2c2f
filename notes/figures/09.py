"""Figure of chapter 9: python notes/figures/09.py draws overoptimised."""

from style import RESULTS, plt, save
from common import grouped, read_csv

RUNS = {"ppo-rm": "reward model of all pairs", "ppo-few": "of 16 pairs", "ppo-rule": "the rule itself"}


def overoptimised():
    """What the reward model says and what the rule says of the same sampled answers, three seeds."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2))
    titles = "the reward model's score", "the rule: share of right answers", "right answer scored above a wrong one"
    rows = [row for row in read_csv(RESULTS / "pipeline" / "ppo.csv") if row["rule"]]
    for (name, _), run in grouped(rows, "run", "seed").items():
        if name not in RUNS:
            continue
        for axis, metric in zip(axes, ("score", "rule", "order")):
            if run[0][metric] and (metric, name) != ("score", "ppo-rule"):
                steps = [int(row["step"]) for row in run]
                values = [float(row[metric]) for row in run]
                axis.plot(steps, values, color=f"C{[*RUNS].index(name)}", marker="o", markersize=3)
    for axis, title in zip(axes, titles):
        axis.set(title=title, xlabel="iteration")
        axis.grid(alpha=0.3)
    for axis in axes[1:]:
        axis.yaxis.set_major_formatter("{x:.0%}")
    lines = [plt.Line2D([], [], color=f"C{i}", label=label) for i, label in enumerate(RUNS.values())]
    figure.legend(handles=lines, loc="outside lower center", ncols=3)
    save(figure, "overoptimised")


if __name__ == "__main__":
    overoptimised()
