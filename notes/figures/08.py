"""Figure of chapter 8, of the README and of the site: python notes/figures/08.py draws real."""

from style import RESULTS, draw_run, plt, save
from plot import read_table


def real():
    """The real model with a careless reward, and with an honest one."""
    figure, (hacked, honest) = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True)
    runs = read_table(RESULTS / "real" / "runs.csv")
    draw_run(hacked, runs["hacked"], "reward/mean", label="reward in training")
    draw_run(hacked, runs["hacked"], "eval/score", marker="s", label="test answers, by the reward")
    draw_run(hacked, runs["hacked"], "eval/last_number", marker="o", ls="--", label="test answers that are right")
    hacked.set(title="a careless reward: any formula worth 83 pays", ylabel="share of answers", ylim=(0, 1))
    for seed in 1, 2, 3:
        run, names = runs[f"additions-{seed}"], ("reward in training", "test answers that are right")
        names = names if seed == 1 else (None, None)
        draw_run(honest, run, "reward/mean", color=f"C{seed}", linewidth=0.6, label=names[0])
        draw_run(honest, run, "eval/score", color=f"C{seed}", marker="o", ls="--", label=names[1])
    honest.set(title="an honest one: the last number counts (3 seeds)")
    for axes in hacked, honest:
        axes.set_xlabel("iteration")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle("SmolLM2-135M-Instruct (4-bit weights) learns to add, GRPO on two CPU cores", fontsize=10)
    save(figure, "real")


if __name__ == "__main__":
    real()
