"""Figures of note 1, `python notes/figures/01.py`: loop, phases, token_table, credit, clip, noise, wall_*, hacking,
group.

The numbers of token_table.png go to notes/web/response.js, too: the site has them with sliders.
"""

import csv
import json
import sys
from itertools import pairwise
from pathlib import Path

import torch

try:
    import matplotlib.pyplot as plt
except ImportError:
    sys.exit("notes/figures/01.py needs matplotlib: pip install -e '.[plots]'")
plt.switch_backend("Agg")

FIGURES = Path(__file__).resolve().parent
ROOT = FIGURES.parents[1]
sys.path.insert(0, str(ROOT))


def save(figure, name):
    figure.savefig(FIGURES / f"{name}.png", dpi=110, facecolor="white", bbox_inches="tight")
    plt.close(figure)


def loop():
    """The chapter in one picture: what happens in an iteration, in plain words, and which section has it."""
    figure, axes = plt.subplots(figsize=(9.4, 3.5))
    axes.set(xlim=(0, 100), ylim=(0, 40))
    axes.axis("off")

    def box(x, y, width, height, title, text, sections, color, style="-"):
        patch = plt.Rectangle((x, y), width, height, facecolor=color, edgecolor="#222222", lw=1.2, ls=style)
        axes.add_patch(patch)
        middle = x + width / 2
        axes.text(middle, y + height - 1.2, title, ha="center", va="top", fontsize=10, weight="bold")
        axes.text(middle, y + height - 4.8, text, ha="center", va="top", fontsize=8.2, linespacing=1.35)
        axes.text(middle, y + 0.8, sections, ha="center", va="bottom", fontsize=8, color="#555555")

    def arrow(*points, text="", at=(0, 0)):
        for start, end in pairwise(points[:-1]):
            axes.plot(*zip(start, end), color="#222222", lw=1)
        options = {"arrowstyle": "-|>", "color": "#222222", "lw": 1, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", xy=points[-1], xytext=points[-2], arrowprops=options)
        axes.text(*at, text, fontsize=8.5, style="italic", ha="center", va="center")

    blue, green, yellow = "#eef3fb", "#e3f2e1", "#fdf3dc"
    box(0.5, 16, 21, 15.5, "1. Answer", "The model writes\nanswers to a batch\nof questions.", "1.1", blue)
    box(26.5, 16, 21, 15.5, "2. Score", "A rule or another model\nscores each answer.", "1.1", blue)
    text = "Which tokens did better\nthan expected?"
    box(52.5, 16, 21, 15.5, "3. Compare", text, "1.3, 1.7, 1.8", blue)
    text = "Make those tokens more\nlikely, the others less,\nin small steps."
    box(78.5, 16, 21, 15.5, "4. Learn", text, "1.2, 1.4, 1.5", green)
    text = "A copy that never changes:\ngoing far from it costs score."
    box(46, 0.2, 34, 12.3, "The model before training", text, "1.6", yellow, "--")
    for x in 21.5, 47.5, 73.5:
        arrow((x, 23.75), (x + 5, 23.75))
    arrow((63, 12.5), (63, 16))
    back = "the improved model answers the next batch; the old answers are thrown away"
    arrow((89, 31.5), (89, 36), (11, 36), (11, 31.5), text=back, at=(50, 37.8))
    save(figure, "loop")


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
    arrow((76, 29), (76, 14), (84, 14), text="returns", at=(77, 18.5), ha="left")
    back = "new weights: the {} the next batch"
    arrow(
        (91.5, 37), (91.5, 59), (8.5, 59), (8.5, 56), text=back.format("actor that samples"), at=(50, 57.6), family=None
    )
    arrow((91.5, 10), (91.5, 4), (8.5, 4), (8.5, 10), text=back.format("critic that judges"), at=(50, 5.4), family=None)
    axes.text(22, 22.5, "no gradients, weights stand still", fontsize=8, style="italic", ha="center")
    axes.text(91.5, 23.2, "weights move,\nnumbers stand still", fontsize=8, style="italic", ha="center", va="center")
    save(figure, "phases")


def traced():
    """Four iterations of PPO on 32 prompts each, by the script's functions: {column: (B,L)} of the last, and its texts.

    Four, so that the policy has left the reference and the critic forecasts something; each takes four steps.
    """
    import ppo_llm as ppo

    folder = str(ROOT / "benchmarks" / "tiny" / "model")
    tokenizer = ppo.AutoTokenizer.from_pretrained(folder)
    policy, reference = (ppo.Policy(ppo.load_model(folder, ppo.AutoModelForCausalLM), 1.0) for _ in range(2))
    critic = ppo.Critic(ppo.load_critic(folder, lora_rank=0))
    eos_ids, args = ppo.collect_eos_ids(policy.model, tokenizer), ppo.Args(model="")
    data = [json.loads(line) for line in (ROOT / "benchmarks" / "tiny" / "train.jsonl").read_text().splitlines()]
    data = [row | {"input_ids": tokenizer(row["question"])["input_ids"]} for row in data]
    actor_step, critic_step = (
        torch.optim.AdamW(model.parameters(), lr=ppo.EMBEDDED[name], weight_decay=0.0)
        for model, name in ((policy, "lr"), (critic, "critic_lr"))
    )
    for iteration in range(1, 5):
        rows = ppo.draw_prompts(data, 32 * (iteration - 1), 32, seed=1)
        noise = torch.rand(32, 40, generator=ppo.random_stream("rollout", 1, iteration), dtype=torch.float64)
        responses = ppo.generate(policy.model, [row["input_ids"] for row in rows], noise, eos_ids, 1.0)
        tokens, mask, _, _ = ppo.to_batch(rows, responses, "cpu")
        texts = tokenizer.batch_decode([response.ids for response in responses], skip_special_tokens=True)
        scores = torch.tensor(ppo.gsm8k(texts, [row["answer"] for row in rows]))
        with torch.no_grad():
            old, ref, values = policy(tokens, mask)[0], reference(tokens, mask)[0], critic(tokens, mask)
        rewards = ppo.place_scores(scores, mask) - 0.001 * ppo.kl_penalty(old, ref, "k1")
        advantages, returns = ppo.gae(rewards, values, mask, gamma=1.0, lam=0.95)
        whitened, clips, ratios = ppo.masked_whiten(advantages, mask), [], []
        for _ in range(4):
            logprobs, _ = policy(tokens, mask)
            losses, clipped = ppo.policy_loss(logprobs, old, whitened, mask, args)
            ratios, clips = [*ratios, (logprobs - old).exp().detach()], [*clips, clipped]
            critic_losses = ppo.value_loss(critic(tokens, mask), returns)
            for model, step, x in (policy, actor_step, losses), (critic, critic_step, critic_losses):
                ppo.aggregate(x, mask, "token-mean", int(mask.sum()), len(rows), 40).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                step.step()
                step.zero_grad()
    ratios, clips = [*ratios[1:], (policy(tokens, mask)[0] - old).exp().detach()], clips[1:]
    clips.append(ppo.policy_loss(ratios[-1].log(), torch.zeros_like(old), whitened, mask, args)[1])
    columns = {"old\nlog-prob": old, "reference\nlog-prob": ref, "score\n$-$0.001 KL": rewards, "$V$": values}
    columns |= {"$\\delta$": ppo.gae(rewards, values, mask, gamma=1.0, lam=0.0)[0], "$A$": advantages}
    columns |= {"$A$\nwhitened": whitened} | {f"$\\rho$ after\nstep {k}": x for k, x in enumerate(ratios, 1)}
    return columns, clips, mask, tokens, texts, rows, tokenizer


def token_table():
    """One response of a small PPO run, token by token: every number that the update is made of."""
    columns, clips, mask, tokens, texts, rows, tokenizer = traced()
    row = 5
    names, blue, orange = ["$i$", "token $i+1$", "mask", *columns], (0.13, 0.42, 0.76), (0.90, 0.49, 0.05)
    widths = [3.4, 10.5, 6] + [9.5, 9.5, 11, 7, 7, 7.5, 9.5] + [8] * 4
    edges = [sum(widths[:k]) for k in range(len(widths) + 1)]
    states = mask[row].nonzero().flatten().tolist()
    words = [tokenizer.decode([tokens[row, i + 1]]) for i in states]
    numbers = [[round(x, 4) for x in values[row, states].tolist()] for values in columns.values()]
    named = {"words": words, "rewards": numbers[2], "values": numbers[3], "ratios": numbers[7:]}
    text = json.dumps(named).replace('], "', '],\n "')
    (ROOT / "notes" / "web" / "response.js").write_text(f"const response = {text}\n")
    figure, axes = plt.subplots(figsize=(9.4, 6.0))
    figure.subplots_adjust(0, 0, 1, 1)
    axes.set(xlim=(-0.3, edges[-1] + 0.3), ylim=(len(states) + 4.3, -3.6))
    axes.axis("off")

    def cell(line, column, text, color="white", **look):
        frame = {"edgecolor": "#bbbbbb", "lw": 0.5} | look
        axes.add_patch(plt.Rectangle((edges[column], line), widths[column], 1, facecolor=color, **frame))
        left = column == 1
        x = edges[column] + (0.5 if left else widths[column] / 2)
        font = {"family": "monospace"} if column < 3 else {}
        axes.text(x, line + 0.52, text, fontsize=8.5, ha="left" if left else "center", va="center", **font)

    def tint(x, color):
        """White for 0, the colour for 1."""
        x = 0.75 * max(0.0, min(1.0, x))
        return tuple(1 - x * (1 - c) for c in color)

    def signed(x, largest):
        return tint(abs(x) / largest, blue if x > 0 else orange)

    for column, name in enumerate(names):
        axes.text(edges[column] + widths[column] / 2, -0.15, name, fontsize=8.5, ha="center", va="bottom")
    # Two states of the prompt before the first action, and what stands behind the last one.
    for line, i in enumerate([states[0] - 2, states[0] - 1, *states, states[-1] + 1]):
        is_action = i in states
        grey = "white" if is_action else "#eeeeee"
        text = tokenizer.decode([tokens[row, i + 1]]).replace("\n", "\\n").replace(" ", "_")
        text = {"<|endoftext|>": "EOS"}.get(text, text) if i <= states[-1] else "padding"
        for column, what in enumerate((i, text, int(is_action))):
            cell(line, column, what, grey)
        for column, (name, values) in enumerate(columns.items(), 3):
            x = values[row, i].item()
            color = signed(x, {"$A$\nwhitened": 2.5, "score\n$-$0.001 KL": 1}.get(name, 0.7))
            form = "{:.2f}"
            if "log-prob" in name:
                color = tint(-x / 2.5, (0.35, 0.35, 0.35))
            elif "score" in name:
                form = "{:.4f}"
            elif "rho" in name:
                color = signed(x - 1, 0.2)
            look = {}
            if "rho" in name and clips[int(name[-1]) - 1][row, i]:
                look = {"edgecolor": "black", "lw": 2, "zorder": 3}
            shown = form.format(x).replace("-0.0000", "0.0000") if is_action else ""
            shown = "0.00" if shown == "-0.00" else shown
            cell(line, column, shown.replace("-", "\N{MINUS SIGN}"), color if is_action else grey, **look)
    question, answer = rows[row]["question"], texts[row].strip().replace("\n", "\\n")
    axes.text(0, -3.1, question, fontsize=9, va="center")
    axes.text(0, -2.2, f"score 0: {answer!r}".replace("\\\\", "\\"), fontsize=9, va="center")
    end = len(states) + 3.35
    axes.add_patch(plt.Rectangle((0, end), 3, 0.8, facecolor="white", edgecolor="black", lw=2, clip_on=False))
    note = "beyond the clip     blue: above 0 (ratio: above 1)     orange: below"
    axes.text(4, end + 0.42, note, fontsize=8.5, va="center")
    save(figure, "token_table")


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
        score = gsm8k([text], [row["answer"]])[0]
        values = []
        for t in range(len(response)):
            noise = torch.rand(300, 40, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
            ends = generate(model, [prompt + response[:t]] * 300, noise, eos_ids, 1.0)
            texts = [tokenizer.decode(response[:t] + end.ids, skip_special_tokens=True) for end in ends]
            values.append(sum(gsm8k(texts, [row["answer"]] * 300)) / 300)
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
        axes[1, column].axhline(score - values[0, 0], color="black", ls="--", lw=1.2, label="score - V of the prompt")
        axes[1, column].axhline(0, color="black", lw=0.6)
        axes[1, column].set_ylim(-1.05, 1.05)
        axes[1, column].set_xticks(places, [*tokens, "EOS"], fontsize=7.5, family="monospace", rotation=60)
    axes[0, 0].set_ylabel("value before\nthe token", fontsize=9)
    axes[1, 0].set_ylabel("advantage of\nthe token", fontsize=9)
    axes[1, 0].legend(fontsize=8, loc="lower right", frameon=False)
    figure.tight_layout()
    save(figure, "credit")


def clip():
    """Loss of one token against its ratio, as in PPO's paper, figure 1, but with the sign of a loss."""
    from ppo_llm import Args, policy_loss

    figure, panels = plt.subplots(1, 2, figsize=(7.6, 2.7), sharex=True)
    ratio = torch.linspace(0.4, 1.8, 500)
    for axes, advantage in zip(panels, (1.0, -1.0)):
        losses, _ = policy_loss(ratio.log(), torch.zeros(500), torch.full((500,), advantage), None, Args(model=""))
        axes.plot(ratio, -advantage * ratio, color="#888888", lw=1, ls=":", label="without the clip")
        axes.plot(ratio, losses, "k-", lw=1.8, label="with it")
        flat = (1.2, 1.8) if advantage > 0 else (0.4, 0.8)
        axes.axvspan(*flat, facecolor="#e6e6e6", lw=0)
        axes.text(sum(flat) / 2, -0.72 if advantage > 0 else 1.4, "no gradient", ha="center", fontsize=8.5)
        axes.plot(1, -advantage, "ko", ms=5)
        axes.set(xlim=(0.4, 1.8), xlabel="ratio", ylabel="loss of the token")
        axes.set_xticks([0.4, 0.6, 0.8, 1, 1.2, 1.4, 1.6, 1.8])
        axes.legend(fontsize=8, loc="lower left" if advantage > 0 else "lower right")
        axes.set_title("a good token (A = 1)" if advantage > 0 else "a bad token (A = -1)", fontsize=10)
    figure.tight_layout()
    save(figure, "clip")


def noise():
    """Variance of a batch's gradient by baseline, over that with the batch's mean: results/walls."""
    with open(ROOT / "benchmarks" / "results" / "walls" / "noise.csv", newline="") as file:
        rows = list(csv.DictReader(file))

    def variances(policy, baseline):
        return [float(row["variance"]) for row in rows if (row["policy"], row["baseline"]) == (policy, baseline)]

    figure, axes = plt.subplots(figsize=(6.2, 2.5))
    ticks = []
    looks = (
        ("none, scores 10 and 11", "#d62728", "none, scores 10 and 11"),
        ("none", "black", "none, scores 0 and 1"),
        ("batch mean", "#1f77b4", "mean of the batch"),
        ("group mean", "#2ca02c", "mean of the group"),
        ("token mean", "#9467bd", "mean over tokens"),
    )
    for policy, words in ("start", "at the start"), ("later", "later"):
        for baseline, color, label in looks:
            found = [x / y for x, y in zip(variances(policy, baseline), variances(policy, "batch mean"))]
            axes.plot(found, [len(ticks)] * len(found), "o", color=color, ms=6, alpha=0.8)
            ticks.append(f"{words}: {label}")
    axes.set_xscale("log")
    axes.set_yticks(range(len(ticks)), ticks, fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="x", which="both", lw=0.3)
    axes.set_title("noise of the gradient, by baseline", fontsize=10)
    axes.set_xlabel("variance from batch to batch (1: with the mean of the batch as the baseline)", fontsize=8.5)
    save(figure, "noise")


def wall(name, experiments, title):
    """Sampled test score against the iteration, a thin line for each seed: results/variants."""
    figure, axes = plt.subplots(figsize=(6.2, 2.6))
    for experiment, (label, color, line) in experiments.items():
        for steps, values in read_column(f"variants/{experiment}", "eval/score_sampled"):
            zero = 10 * ("ten" in experiment)
            scores = [value - zero for value in values]
            axes.plot(steps, scores, color=color, ls=line, lw=1.4, marker="o", ms=2.5, label=label)
            label = None
    axes.set(xlabel="iteration", ylabel="sampled test score", ylim=(-0.03, 1.03), xlim=(0, 40))
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set_title(title, fontsize=10)
    save(figure, name)


def read_column(name, metric):
    """[(steps, values) of each seed] of a csv of benchmarks/results."""
    found = {}
    with open(ROOT / "benchmarks" / "results" / f"{name}.csv", newline="") as file:
        for row in csv.DictReader(file):
            steps, values = found.setdefault(row["seed"], ([], []))
            if row.get(metric):
                steps.append(int(row["step"]))
                values.append(float(row[metric]))
    return list(found.values())


def hacking():
    """PPO on sad stories at three prices of the KL: score, KL, and share of pairs of words that differ."""
    metrics = {
        "reward/mean": "score",
        "kl/mean": "KL, nats per token",
        "eval/distinct_bigrams": "distinct pairs of words",
    }
    figure, panels = plt.subplots(1, 3, figsize=(8.4, 2.3))
    for axes, (metric, title) in zip(panels, metrics.items()):
        for folder, label, color, line in (
            ("ppo-kl-off", "no price", "#d62728", "-"),
            ("ppo-kl-0.01", "0.01 a nat", "#1f77b4", "--"),
            ("ppo-kl-0.03", "0.03 a nat", "black", ":"),
        ):
            for steps, values in read_column(f"stories/{folder}", metric):
                axes.plot(steps, values, color=color, ls=line, lw=1.2, label=label)
                label = None
        axes.set_title(title, fontsize=9.5)
        axes.set_xlabel("iteration", fontsize=8.5)
        axes.tick_params(labelsize=8)
    panels[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    save(figure, "hacking")


def group():
    """Sampled test score of PPO and GRPO against the responses that were sampled, five seeds each."""
    figure, axes = plt.subplots(figsize=(6.2, 2.6))
    for folder, label, color, line in (
        ("ppo", "PPO, a critic", "black", "-"),
        ("grpo", "GRPO, groups of 8", "#1f77b4", "--"),
    ):
        for steps, values in read_column(folder, "eval/score_sampled"):
            axes.plot(
                [256 * step for step in steps], values, color=color, ls=line, lw=1.2, marker="o", ms=2.5, label=label
            )
            label = None
    axes.set(xlabel="responses sampled", ylabel="sampled test score", ylim=(0, 1.03))
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    save(figure, "group")


if __name__ == "__main__":
    loop()
    phases()
    token_table()
    credit()
    clip()
    noise()
    plain = {"reinforce-ten": ("10 and 11, no baseline", "#d62728", "-")}
    plain["reinforce-ten-mean"] = ("10 and 11, mean of the batch", "#1f77b4", "--")
    plain["reinforce"] = ("0 and 1, no baseline", "black", ":")
    wall("wall_baseline", plain, "scores and baseline, one step per batch")
    steps = {"plain_pg-epochs4": ("neither ratio nor clip", "#d62728", "-")}
    steps["ppo-epochs4-ratio"] = ("ratio only", "#1f77b4", "--")
    steps["ppo-epochs4"] = ("ratio and clip", "black", "-")
    wall("wall_steps", steps, "sixteen steps per batch")
    hacking()
    group()
