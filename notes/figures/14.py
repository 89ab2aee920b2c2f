"""Figure of chapter 14: python notes/figures/14.py draws memory."""

from style import plt, save
from memory import CARDS, GIB, SHAPES, WAYS, budget

PARTS = {
    "weights": (["weights"], "#4477aa", ""),
    "reference": (["reference"], "#88bbdd", "//"),
    "Adam": (["adam"], "#ee8866", ""),
    "gradients": (["gradients"], "#eecc66", "\\\\"),
    "the rest of the update": ([], "#44aa88", ".."),
}


def memory(model="Qwen2.5-1.5B"):
    """What a device holds at the peak of the update, stacked; the rollout's peak as a mark; cards as lines."""
    ways = [way for way in WAYS if "offload" not in way]
    figure, axes = plt.subplots(figsize=(8, 3.6))
    for y, way in enumerate(ways):
        terms, left = budget(SHAPES[model], checkpointing=True, **WAYS[way]), 0.0
        for label, (names, colour, hatch) in PARTS.items():
            width = sum(terms[name] for name in names) / GIB if names else terms["update"] / GIB - left
            style = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
            axes.barh(y, width, left=left, label=label if y == 0 else None, **style)
            left += width
        label = "peak of the rollout" if y == 0 else None
        axes.plot([terms["rollout"] / GIB], [y], "D", color="black", markersize=5, label=label)
    for card in CARDS[:-1]:  # the largest lies to the right of the picture
        axes.axvline(card * 1e9 / GIB, color="black", linestyle=":", linewidth=1)
        axes.text(card * 1e9 / GIB, -0.75, f" {card} GB", fontsize=8, va="center")
    axes.set_yticks(range(len(ways)), ways)
    axes.set_ylim(len(ways) - 0.5, -1.1)
    axes.set_xlim(0, 80)
    axes.set_xlabel(f"GiB per device, {model}, with gradient checkpointing")
    axes.legend(fontsize=8, loc="lower right")
    save(figure, "memory")


if __name__ == "__main__":
    memory()
