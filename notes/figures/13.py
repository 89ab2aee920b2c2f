"""Figure of note 13 (the attention mask of shared_prompt): python notes/figures/13.py"""

import importlib.util
import sys
import tempfile
from pathlib import Path

import torch

try:
    import matplotlib.pyplot as plt
except ImportError:
    sys.exit("notes/figures/13.py needs matplotlib: pip install -e '.[plots]'")
plt.switch_backend("Agg")

FIGURES = Path(__file__).resolve().parent
sys.path.insert(0, str(FIGURES.parent))

import variants  # noqa: E402

PROMPT, *RESPONSES = (x.split() for x in ("2 + 3 = ?", "It is 5 EOS", "5 . EOS", "I think 6 EOS"))
COLOURS = ["#bdbdbd", "#2171b5", "#e6860f", "#238b57"]


def load_variant(name):
    """A variant's whole file, as `python notes/variants.py apply NAME` writes it, imported."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}_llm.py")
        path.write_text(variants.patched(name))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def grid(axes, seen, owners, words, positions, margin=3.6):
    """Who sees whom: a row for each token that looks, a column for each that is looked at, coloured by the latter."""
    size = len(words)
    for i in range(size):
        for j in range(size):
            color = COLOURS[owners[j]] if seen[i, j] else "white"
            axes.add_patch(plt.Rectangle((j, i), 1, 1, facecolor=color, edgecolor="#cccccc", lw=0.6))
    for i, word in enumerate(words):
        axes.text(-0.25, i + 0.5, word, ha="right", va="center", fontsize=8.5, family="monospace")
        axes.text(i + 0.5, size + 0.45, positions[i], ha="center", va="center", fontsize=8.5)
    axes.text(-0.25, size + 0.45, "position", ha="right", va="center", fontsize=8.5)
    axes.set(xlim=(-margin, size + 0.1), ylim=(size + 1.1, -0.2), aspect="equal", anchor="NW")
    axes.axis("off")


def main():
    rows = [PROMPT + response for response in RESPONSES]
    vocabulary = sorted({word for row in rows for word in row})
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for b, row in enumerate(rows):
        tokens[b, : len(row)] = torch.tensor([vocabulary.index(word) for word in row])
        mask[b, len(PROMPT) - 1 : len(row) - 1] = True  # the states before each action, as `to_batch` has it
    joined, positions, seen, _ = load_variant("shared_prompt").join(tokens, mask)

    figure = plt.figure(figsize=(9.4, 5.9))
    places = figure.add_gridspec(
        3, 2, width_ratios=(1, 2), left=0, right=1, top=0.89, bottom=0, wspace=0.04, hspace=0.1
    )
    for b, row in enumerate(rows):
        owners = [0] * len(PROMPT) + [b + 1] * (len(row) - len(PROMPT))
        causal = torch.ones(len(row), len(row)).tril()
        grid(figure.add_subplot(places[b, 0]), causal, owners, row, range(len(row)), margin=5.6)
    words = [vocabulary[i] for i in joined[0]]
    owners = [0] * len(PROMPT) + [b for b, response in enumerate(RESPONSES, 1) for _ in response[:-1]]
    grid(figure.add_subplot(places[:, 1]), seen[0, 0], owners, words, positions[0].tolist())
    figure.text(0.02, 0.96, f"grpo_llm.py: {sum(map(len, rows))} tokens in three rows", fontsize=10)
    figure.text(0.36, 0.96, f"shared_prompt: {len(words)} tokens in one row", fontsize=10)
    figure.text(0.02, 0.92, "coloured: the token of the line sees the token of the column, which is of", fontsize=8.5)
    names = "the prompt", "response 1", "response 2", "response 3"
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=colour, label=name) for colour, name in zip(COLOURS, names)]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.47, 0.952),
        ncols=4,
        columnspacing=1,
        fontsize=8.5,
        frameon=False,
    )
    figure.savefig(FIGURES / "shared_prompt.png", dpi=110, facecolor="white", bbox_inches="tight")


if __name__ == "__main__":
    main()
