"""Figures of chapter 14: python notes/figures/14.py draws exploding, critic_wrong and entropy.

Drawn from benchmarks/results/symptoms.csv and from seed 1 of the default runs.
"""

from style import RESULTS, draw_run, plt, save
from plot import read_runs, read_table

# A look for each line, so that none depends on its colour; the first is the healthy run.
LOOKS = [("0.6", "-", None), ("C3", "-", "o"), ("C0", "--", "s"), ("C2", "-.", "^")]


def panels(name, metrics, runs, last, log=()):
    """A row of panels in which the same runs are drawn, {label: run}; `log`: metrics with a logarithmic scale."""
    symptoms = read_table(RESULTS / "symptoms.csv")
    healthy = {script: read_runs(RESULTS / f"{script}.csv")[0] for script in ("ppo", "grpo")}
    figure, row = plt.subplots(1, len(metrics), figsize=(9.6, 3.6))
    for axes, metric in zip(row, metrics):
        for (label, run), (color, line, marker) in zip(runs.items(), LOOKS):
            look = {"color": color, "ls": line, "marker": marker, "markersize": 3.5}
            draw_run(axes, (symptoms | healthy)[run], metric, last, label=label, **look)
        axes.set(title=metric, xlabel="iteration", xlim=(0, last), yscale="log" if metric in log else "linear")
        axes.grid(alpha=0.3)
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(runs))
    save(figure, name)


def exploding():
    runs = {"PPO's defaults": "ppo", "--lr 3e-3": "kl-explodes"}
    metrics = ["actor/ratio_max", "actor/approx_kl", "kl/mean", "reward/mean"]
    panels("exploding", metrics, runs, 8, metrics[:2])


def critic_wrong():
    runs = {"PPO's defaults": "ppo", "--critic-lr 1e-7": "critic-frozen", "values-late": "values-late"}
    panels("critic_wrong", ["critic/explained_variance", "critic/loss", "reward/mean"], runs, 8)


def entropy():
    runs = {"GRPO's defaults": "grpo", "--lr 1e-3": "entropy-collapse", "--temperature 0.3": "entropy-low"}
    runs["--entropy-coef 1, top-p (PPO)"] = "entropy-rises"
    panels("entropy", ["actor/entropy", "eval/score_sampled", "reward/mean"], runs, 20, ["actor/entropy"])


if __name__ == "__main__":
    exploding()
    critic_wrong()
    entropy()
