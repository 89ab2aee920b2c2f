"""Figures of note 3: `python notes/figures/03.py` writes notes/figures/{quadrants,epochs}.png."""

import sys
from pathlib import Path

import torch

try:
    import matplotlib.pyplot as plt
except ImportError:
    sys.exit("notes/figures/03.py needs matplotlib: pip install -e '.[plots]'")
plt.switch_backend("Agg")

FIGURES = Path(__file__).resolve().parent
ROOT = FIGURES.parents[1]
sys.path.insert(0, str(ROOT))


def save(figure, name):
    figure.savefig(FIGURES / f"{name}.png", dpi=110, facecolor="white", bbox_inches="tight")
    plt.close(figure)


def quadrants():
    """policy_loss of one token against its ratio, advantage 1 and -1, with and without dual clip."""
    from ppo_llm import Args, policy_loss

    figure, panels = plt.subplots(1, 2, figsize=(9.2, 3.6))
    ratio, args = torch.linspace(0.01, 4, 800), Args(model="")
    for axes, advantage in zip(panels, (1.0, -1.0)):
        advantages = torch.full_like(ratio, advantage)
        old = torch.zeros_like(ratio)
        axes.plot(ratio, -advantages * ratio, color="#888888", lw=1, ls=":", label="without a clip: -A * ratio")
        axes.plot(ratio, policy_loss(ratio.log(), old, advantages, None, args)[0], "k-", lw=1.8, label="policy_loss")
        flat, words = ((1.2, 4), "no gradient") if advantage > 0 else ((0, 0.8), "no\ngradient")
        axes.axvspan(*flat, facecolor="#e6e6e6", hatch="//", edgecolor="#bbbbbb", lw=0)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.text(sum(flat) / 2, -3.3 if advantage > 0 else 3.0, words, ha="center", fontsize=9, bbox=box)
        if advantage < 0:
            dual_clip = 3.0  # left the scripts in 0.3
            dual = policy_loss(ratio.log(), old, advantages, None, args)[0].clamp(max=dual_clip)
            axes.plot(ratio, dual, color="#1f5fa8", lw=1.8, ls="--", label="with a dual clip of 3")
        axes.axvline(1, color="black", lw=0.6)
        axes.plot(1, -advantage, "ko", ms=6)
        axes.set(xlim=(0, 4), xlabel="ratio", ylabel="loss of the token")
        axes.set_xticks([0, 0.8, 1, 1.2, 2, 3, 4], ["0", ".8", "1", "1.2", "2", "3", "4"], fontsize=8)
        axes.legend(fontsize=8, loc="lower left" if advantage > 0 else "lower right")
        axes.set_title("A = 1: to be made likelier" if advantage > 0 else "A = -1: to be made less likely", fontsize=10)
    figure.tight_layout()
    save(figure, "quadrants")


def many_steps(clip_low, clip_high, steps=128, num_bandits=300, num_actions=50, num_samples=32, seed=0):
    """Gradient steps on one noisy batch: (gain promised by the batch, gain in truth) after each, mean over bandits."""
    from ppo_llm import Args, policy_loss

    args, stream = Args(model="", clip_low=clip_low, clip_high=clip_high), torch.Generator().manual_seed(seed)
    truth = torch.randn(num_bandits, num_actions, generator=stream)  # expected reward of every action
    begin = (2 * truth).softmax(1)  # a policy that is already good
    actions = torch.multinomial(begin, num_samples, replacement=True, generator=stream)
    noise = 3 * torch.randn(num_bandits, num_samples, generator=stream)
    advantages = truth.gather(1, actions) + noise
    advantages = (advantages - advantages.mean(1, keepdim=True)) / advantages.std(1, keepdim=True)
    old, logits = begin.log().gather(1, actions), (2 * truth).requires_grad_()
    promised, gained = [], []
    for _ in range(steps + 1):
        logprobs = logits.log_softmax(1).gather(1, actions)
        promised.append(((logprobs - old).exp() * advantages).mean().item())
        gained.append(((logits.softmax(1) - begin) * truth).sum(1).mean().item())
        loss = policy_loss(logprobs, old, advantages, None, args)[0].mean(1).sum()
        logits = (logits - torch.autograd.grad(loss, logits)[0]).detach().requires_grad_()
    return promised, gained


def epochs():
    """What many steps on one batch promise and what they bring, with and without the clip."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.5))
    looks = {"0.1": ("C1", ":"), "0.2": ("black", "-"), "0.3": ("C0", "-."), None: ("black", "--")}
    for clip, (color, line) in looks.items():
        promised, gained = many_steps(*((float(clip),) * 2 if clip else (1.0, 1e9)))
        label = f"clip {clip}" if clip else "no clip"
        left.plot(promised, color=color, ls=line, lw=1.6, label=label)
        right.plot(gained, color=color, ls=line, lw=1.6, label=label)
        places = 1, 4, 16, 32, 128
        print(label, *(f"{n}: {promised[n]:.3f} {gained[n]:.3f}" for n in places), f"max {max(gained):.3f}")
    right.axhline(0, color="black", lw=0.6)
    left.set_title("promised by the batch: mean of ratio * A", fontsize=10)
    right.set_title("gained in truth: change of expected reward", fontsize=10)
    for axes in (left, right):
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xticks([0, 1, 2, 4, 8, 16, 32, 64, 128], [0, 1, 2, 4, 8, 16, 32, 64, 128], fontsize=8)
        axes.set(xlabel="steps on the same batch", xlim=(0, 128))
        axes.legend(fontsize=9, loc="upper left" if axes is left else "lower left")
    figure.tight_layout()
    save(figure, "epochs")


if __name__ == "__main__":
    quadrants()
    epochs()
