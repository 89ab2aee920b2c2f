"""Figure of chapter 12: python notes/figures/12.py draws policies."""

import numpy as np
from style import plt, save


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
    save(figure, "policies")


if __name__ == "__main__":
    time_line()
