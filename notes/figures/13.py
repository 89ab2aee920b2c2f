"""Figure of chapter 13: python notes/figures/13.py draws the attention mask of the variant shared_prompt."""

import sys
import tempfile
from pathlib import Path

import torch
from style import plt, save
from variants import patched

PROMPT, *RESPONSES = (x.split() for x in ("2 + 3 = ?", "It is 5 EOS", "5 . EOS", "I think 6 EOS"))
COLOURS = {"the prompt": "#bdbdbd", "response 1": "#2171b5", "response 2": "#e6860f", "response 3": "#238b57"}


def join(tokens, mask):
    """`join` of the variant's whole file."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "shared_prompt_llm.py").write_text(patched("shared_prompt"))
        sys.path.insert(0, folder)
        from shared_prompt_llm import join

    return join(tokens, mask)


def main():
    rows = [PROMPT + response for response in RESPONSES]
    vocabulary = sorted({word for row in rows for word in row})
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for b, row in enumerate(rows):
        tokens[b, : len(row)] = torch.tensor([vocabulary.index(word) for word in row])
        mask[b, len(PROMPT) - 1 : len(row) - 1] = True  # the states before each action, as `to_batch` has it
    joined, positions, seen, _ = join(tokens, mask)
    words, size = [vocabulary[i] for i in joined[0]], joined.shape[1]
    owners = [0] * len(PROMPT) + [b for b, response in enumerate(RESPONSES, 1) for _ in response[:-1]]
    picture = torch.where(seen[0, 0].bool(), torch.tensor(owners) + 1, 0)

    figure, axes = plt.subplots(figsize=(6, 5))
    axes.imshow(picture, cmap=plt.matplotlib.colors.ListedColormap(["white", *COLOURS.values()]))
    axes.set_yticks(range(size), words, family="monospace")
    axes.set_xticks(range(size), positions[0].tolist())
    axes.set_xticks([x - 0.5 for x in range(size)], minor=True)
    axes.set_yticks([x - 0.5 for x in range(size)], minor=True)
    axes.grid(which="minor", color="#cccccc", linewidth=0.6)
    axes.tick_params(which="both", length=0)
    axes.set(xlabel="position", title=f"{sum(map(len, rows))} tokens of three rows, as {size} tokens in one row")
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=colour, label=name) for name, colour in COLOURS.items()]
    axes.legend(handles=handles, title="the token of the line\nsees the token of\nthe column, which is of")
    save(figure, "shared_prompt")


if __name__ == "__main__":
    main()
