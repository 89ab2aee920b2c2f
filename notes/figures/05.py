"""Figure of chapter 5: python notes/figures/05.py draws epochs."""

import torch
from style import plt, save


def many_steps(clip_low, clip_high, steps=128, num_bandits=300, num_actions=50, num_samples=32, seed=0):
    """Gradient steps on one noisy batch: (gain promised by the batch, gain in truth) after each, mean over bandits."""
    stream = torch.Generator().manual_seed(seed)
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
        ratio = (logprobs - old).exp()
        promised.append((ratio * advantages).mean().item())
        gained.append(((logits.softmax(1) - begin) * truth).sum(1).mean().item())
        bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
        loss = torch.maximum(-advantages * ratio, -advantages * bounded).mean(1).sum()
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
    right.axhline(0, color="black", lw=0.6)
    left.set_title("promised by the batch: mean of ratio * A", fontsize=10)
    right.set_title("gained in truth: change of expected reward", fontsize=10)
    for axes in (left, right):
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xticks([0, 1, 2, 4, 8, 16, 32, 64, 128], [0, 1, 2, 4, 8, 16, 32, 64, 128], fontsize=8)
        axes.set(xlabel="steps on the same batch", xlim=(0, 128))
        axes.legend(fontsize=9, loc="upper left" if axes is left else "lower left")
    save(figure, "epochs")


if __name__ == "__main__":
    epochs()
