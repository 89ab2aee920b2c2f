"""Figure of chapter 4: python notes/figures/04.py draws lambda."""

import torch
from style import gae, plt, save


def one_episode(axes):
    """Advantages of the 16 tokens of one response with score 1, by lambda; the forecasts are made up."""
    values = torch.tensor([[0.3] * 6 + [0.8] * 5 + [0.6] * 5])  # a good token 5, a bad token 10
    rewards = torch.zeros(1, 16)
    rewards[0, -1] = 1.0
    axes.step(range(16), values[0], "k-", where="mid", lw=1, label="forecast before the token")
    looks = {0.0: ("C3", "x", ":"), 0.5: ("C1", "^", ":"), 0.95: ("C0", "o", "-"), 1.0: ("C2", "s", "--")}
    for lam, (color, marker, line) in looks.items():
        advantages = gae(rewards, values, lam)
        label = f"advantage, lambda {lam:g}"
        axes.plot(range(16), advantages[0], color=color, marker=marker, ls=line, ms=4, lw=1, label=label)
    axes.axhline(0, color="black", lw=0.6)
    axes.set(xlabel="token", ylim=(-0.3, 1.35))
    axes.set_xticks(range(0, 16, 5))
    axes.legend(fontsize=7.5, loc="upper left", ncols=2, frameon=False)
    axes.set_title("one response, score 1 after its last token", fontsize=10)


def first_token(lams, knows=0.5, num_tokens=8, episodes=10_000, seed=0):
    """Mean and standard deviation, by lambda, of the first token's advantage where its true advantage is 1.

    Each token adds 1 or -1 at random to a score that is paid at the end. So the value is the sum up to now, and the
    critic forecasts `knows` times that. The first token adds 1.
    """
    steps = torch.randint(2, (episodes, num_tokens), generator=torch.Generator().manual_seed(seed)).double() * 2 - 1
    steps = torch.cat([steps, -steps])  # so that luck is 0 on average
    steps[:, 0] = 1
    values = knows * (steps.cumsum(1) - steps)
    rewards = torch.zeros_like(steps)
    rewards[:, -1] = steps.sum(1)
    found = [gae(rewards, values, lam)[:, 0] for lam in lams]
    return torch.stack([x.mean() for x in found]), torch.stack([x.std() for x in found])


def error(axes):
    """Error of the mean advantage of n responses, bias and noise together, by lambda and what the critic knows."""
    lams = [i / 40 for i in range(41)]
    looks = {(0.0, 100): ("C3", ":"), (0.5, 100): ("C0", "-"), (0.8, 100): ("C2", "--"), (0.9, 100): ("C1", "-.")}
    looks[0.5, 10] = ("0.5", "-")
    for (knows, n), (color, line) in looks.items():
        mean, std = first_token(lams, knows)
        found = ((mean - 1).square() + std.square() / n).sqrt()
        best = int(found.argmin())
        axes.plot(lams, found, color=color, ls=line, lw=1.6, label=f"critic knows {knows:g}, {n} responses")
        axes.plot(lams[best], found[best], color=color, marker="o", ms=6, clip_on=False)
    axes.set(xlabel="lambda", ylim=(0, 1.05))
    axes.legend(fontsize=7.5, loc=(0.02, 0.58), frameon=False)
    axes.set_title("error of the first token's advantage", fontsize=10)


if __name__ == "__main__":
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.6))
    one_episode(left)
    error(right)
    save(figure, "lambda")
