"""Figures of note 1: `python notes/figures_01.py` writes notes/figures/{phases,credit}.png."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def save(figure, name):
    folder = ROOT / "notes" / "figures"
    folder.mkdir(exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=110, facecolor="white", bbox_inches="tight")
    plt.close(figure)


def phases():
    """Boxes are phases, arrows carry the variables of `main`."""
    figure, axes = plt.subplots(figsize=(9.4, 5.0))
    axes.set(xlim=(0, 100), ylim=(0, 60))
    axes.axis("off")

    def box(x, y, width, height, text, color="#eef3fb", style="-"):
        patch = plt.Rectangle((x, y), width, height, facecolor=color, edgecolor="#222222", lw=1.2, ls=style)
        axes.add_patch(patch)
        axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8.5, linespacing=1.35)

    def arrow(*points, text="", at=(0, 0), ha="center", va="center", family="monospace"):
        for start, end in pairwise(points[:-1]):
            axes.plot(*zip(start, end), color="#222222", lw=1)
        options = {"arrowstyle": "-|>", "color": "#222222", "lw": 1, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", xy=points[-1], xytext=points[-2], arrowprops=options)
        axes.text(*at, text, fontsize=7.5, family=family, ha=ha, va=va, linespacing=1.3)

    # Models on the left, phases that make numbers in the middle, phases that move weights on the right.
    models = "#fdf3dc"
    box(1, 48, 15, 8, "actor\n(trained)", models)
    box(1, 29, 15, 8, "reference\n(never moves)", models, "--")
    box(1, 10, 15, 8, "critic\n(trained)", models)
    box(28, 48, 18, 8, "1 rollout\n(sample tokens)")
    box(63, 48, 17, 8, "2 reward\n(one per response)")
    box(28, 29, 18, 8, "3 log-probs\n(actor, reference)")
    box(28, 10, 18, 8, "4 values\n(before each token)")
    box(63, 29, 17, 8, "5 advantages\n(KL, GAE, whiten)")
    box(84, 29, 15, 8, "6 actor update\n(clipped loss)", "#e3f2e1")
    box(84, 10, 15, 8, "7 critic update\n(squared error)", "#e3f2e1")

    arrow((16, 52), (28, 52))
    arrow((10, 48), (10, 42), (30, 42), (30, 37), text="actor as it\nsampled", at=(20, 44.3), family=None)
    arrow((16, 33), (28, 33))
    arrow((16, 14), (28, 14))
    arrow((46, 52), (63, 52), text="responses", at=(55, 53.5))
    arrow((42, 48), (42, 37), text="tokens,\nmask", at=(50, 43.3), ha="left")
    arrow((71.5, 48), (71.5, 37), text="scores", at=(72.5, 43), ha="left")
    arrow((46, 33), (63, 33), text="old_logprobs,\nref_logprobs", at=(56, 35.6))
    arrow((46, 14), (68, 14), (68, 29), text="values", at=(55, 15.5))
    arrow((80, 35), (84, 35))
    arrow((49, 52), (49, 22), (42, 22), (42, 18))
    axes.text(80.5, 40, "advantages,\nold_logprobs", fontsize=7.5, family="monospace", ha="left", va="center")
    arrow((76, 29), (76, 14), (84, 14), text="returns,\nvalues", at=(77, 18.5), ha="left")
    back = "new weights: the {} the next batch"
    arrow(
        (91.5, 37), (91.5, 59), (8.5, 59), (8.5, 56), text=back.format("actor that samples"), at=(50, 57.6), family=None
    )
    arrow((91.5, 10), (91.5, 4), (8.5, 4), (8.5, 10), text=back.format("critic that judges"), at=(50, 5.4), family=None)
    axes.text(22, 22.5, "no gradients, weights stand still", fontsize=8, style="italic", ha="center")
    axes.text(91.5, 23.2, "weights move,\nnumbers stand still", fontsize=8, style="italic", ha="center", va="center")
    save(figure, "phases")


def credit():
    """True values of the embedded model, by 300 continuations from every beginning, and what follows from them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ppo_llm import collect_eos_ids, gae, generate, gsm8k, load_model

    folder = ROOT / "benchmarks" / "tiny"
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = load_model(str(folder / "model"), AutoModelForCausalLM)
    eos_ids = collect_eos_ids(model, tokenizer)
    row = json.loads((folder / "train.jsonl").read_text().splitlines()[2])
    prompt = tokenizer(row["question"])["input_ids"]
    figure, axes = plt.subplots(2, 2, figsize=(9.4, 4.6), sharex="col", width_ratios=(28, 17))
    for column, text in enumerate((" First 2*35=70, then 70+19=89.\n#### 89", " First 2*35=70.\n#### 35")):
        response = tokenizer(text)["input_ids"] + eos_ids[:1]
        score = gsm8k(None, [text], [row["answer"]])[0]
        values = []
        for t in range(len(response)):
            noise = torch.rand(300, 40, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
            ends = generate(model, [prompt + response[:t]] * 300, noise, eos_ids, 1.0, 1.0, 0)
            texts = [tokenizer.decode(response[:t] + end.ids, skip_special_tokens=True) for end in ends]
            values.append(sum(gsm8k(None, texts, [row["answer"]] * 300)) / 300)
        values = torch.tensor([values])
        rewards = torch.zeros_like(values)
        rewards[0, -1] = score
        everything = torch.ones_like(values).bool()
        smeared, _ = gae(rewards, values, everything, gamma=1.0, lam=0.95)
        steps, _ = gae(rewards, values, everything, gamma=1.0, lam=0.0)
        places = range(len(response))
        tokens = [x.replace("Ġ", "_").replace("Ċ", "\\n") for x in tokenizer.convert_ids_to_tokens(response[:-1])]
        axes[0, column].plot(places, values[0], "ko-", ms=4, lw=1.2)
        axes[0, column].set_ylim(-0.05, 1.05)
        axes[0, column].set_title(f"score {score:.0f}: {text.strip()!r}", fontsize=9)
        axes[1, column].bar(places, smeared[0], color="#a9c6e8", edgecolor="black", lw=0.6, label="GAE, lambda 0.95")
        axes[1, column].plot(places, steps[0], "kx", ms=5, label="GAE, lambda 0")
        axes[1, column].axhline(score - values[0, 0], color="black", ls="--", lw=1.2, label="R - V of the prompt")
        axes[1, column].axhline(0, color="black", lw=0.6)
        axes[1, column].set_ylim(-1.05, 1.05)
        axes[1, column].set_xticks(places, [*tokens, "EOS"], fontsize=7.5, family="monospace", rotation=60)
    axes[0, 0].set_ylabel("value before\nthe token", fontsize=9)
    axes[1, 0].set_ylabel("advantage of\nthe token", fontsize=9)
    axes[1, 0].legend(fontsize=8, loc="lower right", frameon=False)
    figure.tight_layout()
    save(figure, "credit")


if __name__ == "__main__":
    phases()
    credit()
