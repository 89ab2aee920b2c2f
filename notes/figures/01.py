"""Figures of chapter 1: python notes/figures/01.py draws loop, phases, credit, clip, noise, wall_steps, hacking, group.

It also prints the table of 1.10 as Markdown, and writes its numbers to notes/web/response.js for the sliders.
"""

import csv
import json

import torch
from style import RESULTS, ROOT, arrow, box, draw_seeds, gae, plt, save
from tiny_ppo import policy_losses

import ppo_llm

TINY = ROOT / "benchmarks" / "tiny"
RED, BLUE, BLACK = {"color": "#d62728"}, {"color": "#1f77b4", "ls": "--"}, {"color": "black", "ls": ":"}


def empty(width, height, size):
    """Axes without axes, for a diagram."""
    figure, axes = plt.subplots(figsize=size)
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def loop():
    """The chapter in one picture: what happens in an iteration, in plain words, and which section has it."""
    figure, axes = empty(100, 40, (9.4, 3.5))
    steps = {
        "1. Answer": ("The model writes\nanswers to a batch\nof questions.", "1.1"),
        "2. Score": ("A rule or another model\nscores each answer.\n", "1.1"),
        "3. Compare": ("Which tokens did better\nthan expected?\n", "1.3, 1.7, 1.8"),
        "4. Learn": ("Make those tokens more\nlikely, the others less,\nin small steps.", "1.2, 1.4, 1.5"),
    }
    for k, (title, (text, sections)) in enumerate(steps.items()):
        color = "#e3f2e1" if k == 3 else "#eef3fb"
        box(axes, 26 * k + 0.5, 16, 21, 15.5, f"$\\bf{{{title.replace(' ', '~')}}}$\n{text}\n({sections})", color)
        if k:
            arrow(axes, (26 * k - 4.5, 23.75), (26 * k + 0.5, 23.75))
    text = "The model before training (1.6)\nA copy that never changes:\ngoing far from it costs score."
    box(axes, 46, 0.5, 34, 11, text, "#fdf3dc", "--")
    arrow(axes, (63, 11.5), (63, 16))
    arrow(axes, (89, 31.5), (89, 36), (11, 36), (11, 31.5))
    back = "the improved model answers the next batch; the old answers are thrown away"
    axes.text(50, 38, back, style="italic", ha="center", va="center")
    save(figure, "loop")


def phases():
    """Boxes are phases, arrows carry the variables of `main`: models, phases that make numbers, phases that learn."""
    figure, axes = empty(100, 60, (9.4, 5.0))
    models, learn = "#fdf3dc", "#e3f2e1"
    for x, y, width, text, color, line in (
        (1, 48, 15, "actor\n(trained)", models, "-"),
        (1, 29, 15, "reference\n(never moves)", models, "--"),
        (1, 10, 15, "critic\n(trained)", models, "-"),
        (28, 48, 18, "1 rollout\n(sample tokens)", "#eef3fb", "-"),
        (63, 48, 17, "2 reward\n(one per response)", "#eef3fb", "-"),
        (28, 29, 18, "3 log-probs\n(actor, reference)", "#eef3fb", "-"),
        (28, 10, 18, "4 values\n(before each token)", "#eef3fb", "-"),
        (63, 29, 17, "5 advantages\n(KL, GAE, whiten)", "#eef3fb", "-"),
        (84, 29, 15, "6 actor update\n(clipped loss)", learn, "-"),
        (84, 10, 15, "7 critic update\n(squared error)", learn, "-"),
    ):
        box(axes, x, y, width, 8, text, color, line, fontsize=8.5)
    for points in (
        [(16, 52), (28, 52)],
        [(10, 48), (10, 42), (30, 42), (30, 37)],
        [(16, 33), (28, 33)],
        [(16, 14), (28, 14)],
        [(46, 52), (63, 52)],
        [(42, 48), (42, 37)],
        [(71.5, 48), (71.5, 37)],
        [(46, 33), (63, 33)],
        [(46, 14), (68, 14), (68, 29)],
        [(80, 35), (84, 35)],
        [(49, 52), (49, 22), (42, 22), (42, 18)],
        [(76, 29), (76, 14), (84, 14)],
        [(91.5, 37), (91.5, 59), (8.5, 59), (8.5, 56)],
        [(91.5, 10), (91.5, 4), (8.5, 4), (8.5, 10)],
    ):
        arrow(axes, *points)
    for x, y, text in (
        (50, 53.5, "responses"),
        (50.5, 43.3, "tokens,\nmask"),
        (72.5, 43, "scores"),
        (50.5, 36, "old_logprobs,\nref_logprobs"),
        (53, 15.5, "values"),
        (81, 40.5, "advantages,\nold_logprobs"),
        (77, 18.5, "returns"),
    ):
        axes.text(x, y, text, fontsize=7.5, family="monospace", va="center")
    for x, y, text in (
        (20, 44.3, "actor as it\nsampled"),
        (50, 57.6, "new weights: the actor that samples the next batch"),
        (50, 5.4, "new weights: the critic that judges the next batch"),
        (22, 22.5, "no gradients, weights stand still"),
        (91.5, 23.2, "weights move,\nnumbers stand still"),
    ):
        axes.text(x, y, text, fontsize=8, style="italic", ha="center", va="center")
    save(figure, "phases")


SHOWN = {5: "stops too early", 13: "right", 9: "a guess"}  # rows of the traced batch, for the sliders


def traced():
    """Four iterations of PPO on 32 prompts each, by the script's functions: the last one's {column: (B,L)}, and more.

    Four, so that the policy has left the reference and the critic forecasts something. Each takes four steps, the last
    one sixteen. Before these the policy answers the prompts of `SHOWN` fifteen more times: {row: (texts, scores)}.
    """
    folder = str(TINY / "model")
    tokenizer = ppo_llm.AutoTokenizer.from_pretrained(folder)
    policy, reference = (
        ppo_llm.Policy(ppo_llm.load_model(folder, ppo_llm.AutoModelForCausalLM), 1.0) for _ in range(2)
    )
    critic = ppo_llm.Critic(ppo_llm.load_critic(folder, lora_rank=0))
    eos_ids = ppo_llm.collect_eos_ids(policy.model, tokenizer)
    data = [json.loads(line) for line in (TINY / "train.jsonl").read_text().splitlines()]
    data = [row | {"input_ids": tokenizer(row["question"])["input_ids"]} for row in data]
    actor_step = torch.optim.AdamW(policy.parameters(), lr=ppo_llm.BUNDLED["lr"], weight_decay=0.0)
    critic_step = torch.optim.AdamW(critic.parameters(), lr=ppo_llm.BUNDLED["critic_lr"], weight_decay=0.0)
    for iteration in range(1, 5):
        rows = ppo_llm.draw_prompts(data, 32 * (iteration - 1), 32, seed=1)
        noise = torch.rand(32, 40, generator=ppo_llm.random_stream("rollout", 1, iteration), dtype=torch.float64)
        responses = ppo_llm.generate(policy.model, [row["input_ids"] for row in rows], noise, eos_ids, 1.0)
        tokens, mask, _, _ = ppo_llm.to_batch(rows, responses, "cpu")
        texts = tokenizer.batch_decode([response.ids for response in responses], skip_special_tokens=True)
        scores = torch.tensor(ppo_llm.gsm8k(texts, [row["answer"] for row in rows]))
        with torch.no_grad():
            old, ref, values = policy(tokens, mask)[0], reference(tokens, mask)[0], critic(tokens, mask)
        rewards = ppo_llm.place_scores(scores, mask) - 0.001 * ppo_llm.kl_penalty(old, ref, "k1")
        advantages = gae(rewards, values, lam=0.95)
        returns = advantages + values
        whitened, ratios, groups = ppo_llm.masked_whiten(advantages, mask), [], {}
        for i in SHOWN if iteration == 4 else ():
            noise = torch.rand(15, 40, generator=ppo_llm.random_stream("group", i), dtype=torch.float64)
            others = ppo_llm.generate(policy.model, [rows[i]["input_ids"]] * 15, noise, eos_ids, 1.0)
            texts = tokenizer.batch_decode([other.ids for other in others], skip_special_tokens=True)
            groups[i] = texts, ppo_llm.gsm8k(texts, [rows[i]["answer"]] * 15)
        for _ in range(16 if iteration == 4 else 4):
            actor_losses = policy_losses(policy(tokens, mask)[0], old, whitened)
            critic_losses = (critic(tokens, mask) - returns).square() / 2
            for model, step, losses in (policy, actor_step, actor_losses), (critic, critic_step, critic_losses):
                losses[mask].mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                step.step()
                step.zero_grad()
            ratios.append((policy(tokens, mask)[0] - old).exp().detach())
    deltas = gae(rewards, values, lam=0.0)
    columns = {"log-prob": old, "reference": ref, "reward": rewards, "$V$": values, r"$\delta$": deltas}
    columns |= {"$A$": advantages, "whitened": whitened}
    columns |= {f"ratio after step {k}": x for k, x in enumerate(ratios, 1)}
    return columns, mask, scores, rows, groups, tokens, tokenizer


def token_table(row=5):
    """The table of 1.10, and the numbers of the sliders. A ratio is bold where the clip takes the token's gradient."""
    everything, mask, scores, prompts, groups, tokens, tokenizer = traced()
    columns = dict([*everything.items()][:11])  # four of the steps
    states = mask[row].nonzero().flatten().tolist()
    words = [tokenizer.decode([tokens[row, i + 1]]) for i in states]
    numbers = {name: [round(x, 4) for x in values[row, states].tolist()] for name, values in columns.items()}
    ratios = [values for name, values in numbers.items() if "ratio" in name]
    shown = {name: numbers[name] for name in ("log-prob", "$V$", r"$\delta$", "$A$")}
    shown["ratio after four steps"] = ratios[-1]
    print("| token | " + " | ".join(shown) + " |\n|" + " --- |" * (len(shown) + 1))
    for t, word in enumerate(words):
        word = word.replace("\n", "\\n").replace(" ", "_").replace("<|endoftext|>", "EOS")
        cells = [f"`{word}`"]
        for name, values in shown.items():
            text = f"{values[t]:z.2f}"
            clipped = values[t] > 1.2 if numbers["whitened"][t] > 0 else values[t] < 0.8
            cells.append(f"**{text}**" if "ratio" in name and clipped else text.replace("-", "\N{MINUS SIGN}"))
        print(f"| {' | '.join(cells)} |")
    everything["kl"] = everything["log-prob"] - everything["reference"]

    def of(row, *names):  # with seven digits
        return [[float(f"{x:.7g}") for x in everything[name][row, mask[row]].tolist()] for name in names]

    batch = [
        dict(zip(("kl", "values"), of(i, "kl", "$V$"))) | {"score": score} for i, score in enumerate(scores.tolist())
    ]
    shown = []
    for i, name in SHOWN.items():
        logprobs, refs, *ratios = of(i, "log-prob", "reference", *(name for name in everything if "ratio" in name))
        shown.append({"row": i, "name": name, "question": prompts[i]["question"], "group": [*zip(*groups[i])]})
        words = [tokenizer.decode([token]) for token in tokens[i].roll(-1)[mask[i]]]
        shown[-1] |= {"words": words, "logprobs": logprobs, "refs": refs, "ratios": ratios}
    text = json.dumps({"shown": shown, "batch": batch}).replace("}, {", "},\n{").replace('"batch"', '\n"batch"')
    (ROOT / "notes" / "web" / "response.js").write_text(f"const response = {text}\n")


def credit():
    """True values of the bundled model, by 300 continuations from every beginning, and what follows from them."""
    tokenizer = ppo_llm.AutoTokenizer.from_pretrained(TINY / "model")
    model = ppo_llm.load_model(str(TINY / "model"), ppo_llm.AutoModelForCausalLM)
    eos_ids = ppo_llm.collect_eos_ids(model, tokenizer)
    row = json.loads((TINY / "train.jsonl").read_text().splitlines()[2])
    prompt = tokenizer(row["question"])["input_ids"]
    figure, panels = plt.subplots(2, 2, figsize=(9.4, 4.6), sharex="col", width_ratios=(28, 17))
    for column, text in enumerate((" First 2*35=70, then 70+19=89.\n#### 89", " First 2*35=70.\n#### 35")):
        response = tokenizer(text)["input_ids"] + eos_ids[:1]
        score, values, places = ppo_llm.gsm8k([text], [row["answer"]])[0], [], range(len(response))
        for t in places:
            noise = torch.rand(300, 40, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
            ends = ppo_llm.generate(model, [prompt + response[:t]] * 300, noise, eos_ids, 1.0)
            texts = [tokenizer.decode(response[:t] + end.ids, skip_special_tokens=True) for end in ends]
            values.append(sum(ppo_llm.gsm8k(texts, [row["answer"]] * 300)) / 300)
        values, rewards = torch.tensor([values]), torch.zeros(1, len(response))
        rewards[0, -1] = score
        smeared, steps = gae(rewards, values, lam=0.95), gae(rewards, values, lam=0.0)
        tokens = [x.replace("Ġ", "_").replace("Ċ", "\\n") for x in tokenizer.convert_ids_to_tokens(response[:-1])]
        above, below = panels[:, column]
        above.plot(places, values[0], "ko-", markersize=4)
        above.set(ylim=(-0.05, 1.05), title=f"score {score:.0f}: {text.strip()!r}")
        below.bar(places, smeared[0], color="#a9c6e8", edgecolor="black", linewidth=0.6, label="GAE, lambda 0.95")
        below.plot(places, steps[0], "kx", markersize=5, label="GAE, lambda 0")
        below.axhline(score - values[0, 0], color="black", ls="--", label="score - V of the prompt")
        below.axhline(0, color="black", linewidth=0.6)
        below.set_ylim(-1.05, 1.05)
        below.set_xticks(places, [*tokens, "EOS"], fontsize=7.5, family="monospace", rotation=60)
    panels[0, 0].set_ylabel("value before\nthe token")
    panels[1, 0].set_ylabel("advantage of\nthe token")
    panels[1, 0].legend(loc="lower right")
    save(figure, "credit")


def clip():
    """Loss of one token against its ratio, as in PPO's paper, figure 1, but with the sign of a loss."""
    figure, panels = plt.subplots(1, 2, figsize=(7.6, 2.7), sharex=True)
    ratio = torch.linspace(0.4, 1.8, 500)
    for axes, advantage, title in zip(panels, (1.0, -1.0), ("a good token (A = 1)", "a bad token (A = -1)")):
        losses = policy_losses(ratio.log(), torch.zeros(500), advantage)
        axes.plot(ratio, -advantage * ratio, color="#888888", linewidth=1, ls=":", label="without the clip")
        axes.plot(ratio, losses, "k-", label="with it")
        flat, height = ((1.2, 1.8), -0.72) if advantage > 0 else ((0.4, 0.8), 1.4)
        axes.axvspan(*flat, facecolor="#e6e6e6", linewidth=0)
        axes.text(sum(flat) / 2, height, "no gradient", ha="center", fontsize=8.5)
        axes.plot(1, -advantage, "ko", markersize=5)
        axes.set(xlim=(0.4, 1.8), xlabel="ratio", ylabel="loss of the token", title=title)
        axes.legend(loc="lower left" if advantage > 0 else "lower right")
    save(figure, "clip")


def noise():
    """Variance of a batch's gradient by baseline, over that with the batch's mean: benchmarks/results/walls."""
    with (RESULTS / "walls" / "noise.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))

    def variances(policy, baseline):
        return [float(row["variance"]) for row in rows if (row["policy"], row["baseline"]) == (policy, baseline)]

    labels = {
        "none, scores 10 and 11": "none, scores 10 and 11",
        "none": "none, scores 0 and 1",
        "batch mean": "mean of the batch",
        "group mean": "mean of the group",
        "token mean": "mean over tokens",
    }
    figure, axes = plt.subplots(figsize=(6.2, 2.5))
    ticks = []
    for policy, words in ("start", "at the start"), ("later", "later"):
        for color, (baseline, label) in enumerate(labels.items()):
            found = [x / y for x, y in zip(variances(policy, baseline), variances(policy, "batch mean"))]
            axes.plot(found, [len(ticks)] * len(found), "o", color=f"C{color}", markersize=6, alpha=0.8)
            ticks.append(f"{words}: {label}")
    axes.set_yticks(range(len(ticks)), ticks, fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="x", which="both", linewidth=0.3)
    axes.set(xscale="log", title="noise of the gradient, by baseline")
    axes.set_xlabel("variance, in units of that with the mean of the batch as baseline", fontsize=8.5)
    save(figure, "noise")


def wall_steps():
    figure, axes = plt.subplots(figsize=(6.2, 2.6))
    draw_seeds(axes, "variants/plain_pg-epochs4", "eval/score_sampled", "neither ratio nor clip", **RED)
    draw_seeds(axes, "variants/ppo-epochs4-ratio", "eval/score_sampled", "ratio only", **BLUE)
    draw_seeds(axes, "variants/ppo-epochs4", "eval/score_sampled", "ratio and clip", **BLACK)
    axes.set(xlabel="iteration", ylabel="sampled test score", title="sixteen steps per batch")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, "wall_steps")


def hacking():
    """PPO on sad stories at three prices of the KL: score, KL, and share of pairs of words that differ."""
    figure, panels = plt.subplots(1, 3, figsize=(8.4, 2.3))
    metrics = {"reward/mean": "score", "kl/mean": "KL, nats per token"}
    metrics["eval/distinct_bigrams"] = "distinct pairs of words"
    for axes, (metric, title) in zip(panels, metrics.items()):
        draw_seeds(axes, "stories/ppo-kl-off", metric, "no price", **RED)
        draw_seeds(axes, "stories/ppo-kl-0.01", metric, "0.01 a nat", **BLUE)
        draw_seeds(axes, "stories/ppo-kl-0.03", metric, "0.03 a nat", **BLACK)
        axes.set(title=title, xlabel="iteration")
    panels[0].legend()
    panels[2].yaxis.set_major_formatter("{x:.0%}")
    save(figure, "hacking")


def group():
    """PPO and GRPO, five seeds each; both sample 256 responses an iteration."""
    figure, axes = plt.subplots(figsize=(6.2, 2.6))
    draw_seeds(axes, "ppo", "eval/score_sampled", "PPO, a critic", color="black")
    draw_seeds(axes, "grpo", "eval/score_sampled", "GRPO, groups of 8", **BLUE)
    axes.set(xlabel="iteration (256 responses)", ylabel="sampled test score", ylim=(0, 1.03))
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.legend(loc="lower right")
    save(figure, "group")


if __name__ == "__main__":
    loop()
    phases()
    token_table()
    credit()
    clip()
    noise()
    wall_steps()
    hacking()
    group()
