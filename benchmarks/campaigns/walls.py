"""Measurements behind single claims of the notes: results/walls/, results/speed/shared_prompt.md, and a script.

    python benchmarks/campaigns/walls.py tiny       three seeds of tiny_ppo.py, 40 iterations each
    python benchmarks/campaigns/walls.py noise      the noise of the gradient with a baseline and without
    python benchmarks/campaigns/walls.py best       which baseline would leave the least noise
    python benchmarks/campaigns/walls.py kinds      the estimates of the KL after 40 iterations: mean and spread
    python benchmarks/campaigns/walls.py tables     print the tables of results in chapter 1, which a test compares
    python benchmarks/campaigns/walls.py shared     when does notes/variants/shared_prompt.patch pay?

The learning curves of chapter 1 are experiments of variant_runs.py. One of its tables needs PPO with one advantage for
a whole response, its score minus one forecast, instead of GAE (section 1.7). For that, this file is a script:

    python benchmarks/learning.py one-advantage-first --script benchmarks/campaigns/walls.py --flags="--at first"
    python benchmarks/learning.py one-advantage-last --script benchmarks/campaigns/walls.py --flags="--at last"

`first` takes the value of the prompt, `last` the value before the last token, which has seen the answer. Only that
value has a target: the score, less the KL penalties. So critic/explained_variance, which covers all tokens, says
nothing here. Everything else, including the flags, is that of ppo_llm.py.
"""

import argparse
import contextlib
import io
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1]))
import common
import tiny_ppo
import variants

import grpo_llm
import ppo_llm

RESULTS = common.RESULTS / "walls"

BATCHES = 16  # of 256 responses each
GROUP_SIZE = 8
RESPONSES = 1024  # to as many prompts, for `best`
POLICIES = ("start", 0), ("later", 12)  # and iterations of training


def tiny(results, seeds):
    """What tiny_ppo.py prints, as a table for each seed."""
    for seed in seeds:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            tiny_ppo.main(seed)
        before, *lines, after = printed.getvalue().splitlines()
        numbers = [re.findall(r"[\d.]+", line) for line in lines]
        rows = [dict(zip(("iteration", "score", "kl", "length"), values)) for values in numbers]
        greedy = [re.search(r"[\d.]+", line)[0] for line in (before, after)]
        rows = [row | {"greedy": greedy[1] if row is rows[-1] else ""} for row in rows]
        common.write_csv(
            results / f"tiny_{seed}.csv",
            [{"iteration": 0, "score": "", "kl": "", "length": "", "greedy": greedy[0]}, *rows],
        )
        print(f"seed {seed}: greedy {greedy[0]} before, {greedy[1]} after", flush=True)


def trained_actor(seed, iterations):
    """The actor after some iterations of tiny_ppo.py."""
    kept = []
    with mock.patch.object(tiny_ppo, "evaluate", lambda model, rows: kept.append(model) or 0.0):
        tiny_ppo.main(seed, iterations)
    return kept[-1]


def gradient(actor, tokens, mask, advantages):
    """Of the mean over responses of -advantage * log-prob of the response, as one vector. advantages: (B,)."""
    actor.zero_grad()
    for part in torch.arange(len(tokens)).split(64):
        losses = -advantages[part, None] * tiny_ppo.log_probs(actor, tokens[part])
        (losses * mask[part]).sum().div(len(tokens)).backward()
    return torch.cat([p.grad.flatten() for p in actor.parameters() if p.grad is not None])


def noise(results, seeds):
    """Variance of the gradient of a batch, and the squared length of its mean, over BATCHES batches.

    The means are those of the other responses: with its own score in it a group's would make the gradient shorter, by
    1/8, and its noise with it. `token mean` has each response's score counted once for each of its tokens.
    """
    rows = tiny_ppo.read_rows("train.jsonl")
    found = []
    for seed in seeds:
        for name, iterations in POLICIES:
            actor = trained_actor(seed, iterations)
            torch.manual_seed(1000 + seed)
            names = "none", "none, scores 10 and 11", "batch mean", "group mean", "token mean"
            gradients = {baseline: [] for baseline in names}
            means = []
            for _ in range(BATCHES):
                chosen = torch.randperm(len(rows))[: tiny_ppo.BATCH_SIZE // GROUP_SIZE].repeat_interleave(GROUP_SIZE)
                batch = [rows[i] for i in chosen]
                tokens, mask = tiny_ppo.sample(actor, batch)
                scores = tiny_ppo.score(tokens, mask, batch)
                means.append(scores.mean().item())
                groups = scores.view(-1, GROUP_SIZE)
                centred = (groups - groups.mean(1, keepdim=True)).flatten() * GROUP_SIZE / (GROUP_SIZE - 1)
                token_mean = (scores * mask.sum(1)).sum() / mask.sum()
                by_score = gradient(actor, tokens, mask, scores)
                by_one = gradient(actor, tokens, mask, torch.ones(len(scores)))
                # A gradient is linear in the advantages.
                gradients["none"].append(by_score)
                gradients["none, scores 10 and 11"].append(by_score + 10 * by_one)
                gradients["batch mean"].append((by_score - scores.mean() * by_one) * len(scores) / (len(scores) - 1))
                gradients["group mean"].append(gradient(actor, tokens, mask, centred))
                gradients["token mean"].append(by_score - token_mean * by_one)
            for baseline, vectors in gradients.items():
                stacked = torch.stack(vectors)
                variance = stacked.var(0).sum().item()
                signal = stacked.mean(0).square().sum().item() - variance / BATCHES  # the mean has noise, too
                line = {"policy": name, "seed": seed, "score": round(sum(means) / BATCHES, 3), "baseline": baseline}
                line |= {"variance": variance, "signal": signal, "ratio": round(variance / signal, 2)}
                found.append(line)
                print(line, flush=True)
    common.write_csv(results / "noise.csv", found)


def best(results, seeds):
    """The baseline of least variance, E[R |g|^2] / E[|g|^2], g the gradient of a response's log-prob."""
    rows = tiny_ppo.read_rows("train.jsonl")
    found = []
    for seed in seeds:
        for name, iterations in POLICIES:
            actor = trained_actor(seed, iterations)
            torch.manual_seed(2000 + seed)
            batch = [rows[i] for i in torch.randperm(len(rows))[:RESPONSES]]
            tokens, mask = tiny_ppo.sample(actor, batch)
            scores = tiny_ppo.score(tokens, mask, batch)
            squares = []
            for row_tokens, row_mask in zip(tokens.split(1), mask.split(1)):
                squares.append(gradient(actor, row_tokens, row_mask, torch.ones(1)).square().sum())
            squares = torch.stack(squares)
            line = {"policy": name, "seed": seed, "score": scores.mean().item()}
            line |= {"right": squares[scores == 1].mean().item(), "wrong": squares[scores == 0].mean().item()}
            line |= {"best": ((scores * squares).sum() / squares.sum()).item()}
            found.append({key: round(value, 4) if key in ("score", "best") else value for key, value in line.items()})
            print(found[-1], flush=True)
    common.write_csv(results / "best.csv", found)


def kinds(results, seeds):
    """Of the tokens of 2,048 responses: each estimate's mean, its std, and how much of its square is in 1% of them."""
    rows = tiny_ppo.read_rows("train.jsonl")
    start = trained_actor(1, 0)
    found = []
    for seed in seeds:
        actor = trained_actor(seed, 40)
        torch.manual_seed(3000 + seed)
        batch = [rows[i] for i in torch.randperm(len(rows))[: 2 * RESPONSES]]
        tokens, mask = tiny_ppo.sample(actor, batch)
        logprobs = []
        with torch.no_grad():
            for model in actor, start:
                parts = [tiny_ppo.log_probs(model, part) for part in tokens.split(128)]
                logprobs.append(torch.cat(parts)[mask].double())
        for kind in "k1", "k3", "k2":
            values = ppo_llm.kl_penalty(*logprobs, kind)
            largest = values.square().sort(descending=True).values
            line = {"seed": seed, "kind": kind, "tokens": len(values), "mean": values.mean().item()}
            line |= {"std": values.std().item(), "of 1%": (largest[: len(values) // 100].sum() / largest.sum()).item()}
            found.append({key: round(x, 5) if isinstance(x, float) else x for key, x in line.items()})
            print(found[-1], flush=True)
    common.write_csv(results / "kinds.csv", found)


# ------------------------------------------------------------------------------------------------------ a shared prompt


LENGTHS = [(32, 32), (128, 32), (512, 32), (32, 128), (128, 128), (512, 128), (128, 512), (512, 512)]


def load_variant():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "shared_prompt_llm.py").write_text(variants.patched("shared_prompt"))
        sys.path.insert(0, folder)
        import shared_prompt_llm
    return shared_prompt_llm


def seconds(policy, tokens, mask):
    start = time.process_time()
    logprobs, _ = policy(tokens, mask)
    logprobs.sum().backward()
    return time.process_time() - start


def shared(rounds, size):
    """Forward and backward of one group of this size, joined or row by row.

    With the embedded model's shape, random tokens and one thread; processor times: medians of the rounds' ratios. Below
    1, the joined rows win: the prompt is read once instead of once for each response, but attention runs under a dense
    mask over the whole row.
    """
    config = AutoConfig.from_pretrained(common.TINY / "model", max_position_embeddings=2048)
    model = AutoModelForCausalLM.from_config(config)
    plain, joined = (algo.Policy(model, 1.0) for algo in (grpo_llm, load_variant()))
    lines = []
    for prompt, response in LENGTHS:
        tokens = torch.randint(3, config.vocab_size, (size, prompt + response))
        tokens[:, :prompt] = tokens[0, :prompt]
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        mask[:, prompt - 1 : -1] = True
        seconds(plain, tokens, mask), seconds(joined, tokens, mask)
        ratios = [seconds(joined, tokens, mask) / seconds(plain, tokens, mask) for _ in range(rounds)]
        read = (prompt + size * response) / (size * (prompt + response))
        lines.append([prompt, response, f"{read:.2f}x", f"{statistics.median(ratios):.2f}x"])
        print(*lines[-1], flush=True)
    command = f"`python benchmarks/campaigns/walls.py shared --rounds {rounds} --group-size {size}`"
    table = common.markdown(["prompt", "response", "tokens read", "time"], lines)
    (common.RESULTS / "speed" / "shared_prompt.md").write_text(f"{command}\n\n{table}\n")


# ------------------------------------------------------------------------------------------ one advantage per response


def one_per_response(rewards, values, mask, at):
    """In place of `gae`: (advantages, returns), (B,T), not whitened, 0 if masked; only one value per row is trained."""
    total = torch.where(mask, rewards, 0).sum(1, keepdim=True)  # (B,1)
    place = mask.cumsum(1).argmax(1, keepdim=True) if at == "last" else mask.int().argmax(1, keepdim=True)
    trained = torch.arange(mask.shape[1], device=mask.device) == place  # (B,T)
    returns = torch.where(trained, total, values)  # the others are to stay as they were
    return torch.where(mask, total - values.gather(1, place), 0), torch.where(mask, returns, 0)


def train_with_one(at, flags):
    ppo_llm.gae = lambda rewards, values, mask, gamma, lam: one_per_response(rewards, values, mask, at)
    sys.argv[1:] = flags
    ppo_llm.main(ppo_llm.parse_args())


# ---------------------------------------------------------------------------------------------- the tables of chapter 1


def score_rows(*experiments, steps=(10, 20, 40)):
    """Sampled test scores of the seeds of experiments [(words, name, ...)] of variant_runs.py, a cell for each step."""
    found = []
    for words, name, *columns in experiments:
        runs, zero = read("variants", name), 10 * ("ten" in name)
        for step in steps:
            scores = [float(run[step]["eval/score_sampled"]) - zero for run in runs]
            columns.append(", ".join(f"{score:.2f}" for score in scores))
        found.append([f"{words} (`{name}`)", *columns])
    return found


def read(*place):
    """The rows of a folder's seeds."""
    return [common.read_csv(path) for path in sorted(RESULTS.parent.joinpath(*place).glob("seed_*.csv"))]


def span(values, form=".1f"):
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"


def tables():
    """The tables of results in chapter 1, as Markdown."""
    iterations = ["after 10", "20", "40"]
    learns = [["sampled test score", "before", *iterations]]
    learns += score_rows(("policy gradient", "reinforce"), steps=(0, 10, 20, 40))

    rows = common.read_csv(RESULTS / "noise.csv")
    variances = {(row["policy"], row["baseline"]): [] for row in rows}
    for row in rows:
        variances[row["policy"], row["baseline"]].append(float(row["variance"]))
    noises = [["noise of the gradient, by baseline", "at the start", "later"]]
    for baseline, words in (
        ("none, scores 10 and 11", "none, scores 10 and 11"),
        ("none", "none, scores 0 and 1"),
        ("batch mean", "mean of the batch (the unit)"),
        ("group mean", "mean of the group"),
        ("token mean", "mean of the batch, over tokens"),
    ):
        cells = []
        for policy in "start", "later":
            found = [x / unit for x, unit in zip(variances[policy, baseline], variances[policy, "batch mean"])]
            cells.append(span(found, ".0f" if "10" in words or "unit" in words else ".1f"))
        noises.append([words, *cells])

    zeros = [["sampled test score", *iterations]]
    zeros += score_rows(
        ("10 and 11, no baseline", "reinforce-ten"),
        ("10 and 11, mean of the batch", "reinforce-ten-mean"),
        ("0 and 1, mean of the batch", "reinforce-mean"),
        ("0 and 1, no baseline", "reinforce"),
    )
    plain = [["sampled test score", *iterations]]
    plain += score_rows(("one step", "plain_pg-1step"), ("sixteen steps", "plain_pg-epochs4"))

    clip = [["sixteen steps", "largest ratio", "in the median iteration", *iterations]]
    for words, experiment in ("ratio only", "ppo-epochs4-ratio"), ("ratio and clip", "ppo-epochs4"):
        largest = [[float(row["actor/ratio_max"]) for row in run[1:]] for run in read("variants", experiment)]
        cells = [", ".join(f"{max(x):.0f}" for x in largest), ", ".join(f"{statistics.median(x):.1f}" for x in largest)]
        clip += score_rows((words, experiment, *cells))

    stories = [["price of a nat", "rise of the score", "KL at the end", "variety of words"]]
    lines = (RESULTS.parent / "stories" / "table.md").read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines]
    for price in "off", "0.003", "0.01", "0.03", "0.1", "0.3":
        runs = [row for row in cells if row[0] == f"ppo-kl-{price}"]
        columns = [", ".join(row[k].replace("-", "\N{MINUS SIGN}") for row in runs) for k in (5, 6, 9)]
        stories.append(["0" if price == "off" else price, *columns])

    whitened = [["sampled test score", *iterations], *score_rows(("whitened", "ppo"), ("not whitened", "ppo-raw"))]

    one = [["sampled test score", *iterations]]
    for name, words in (
        ("ppo", "GAE: one for each token"),
        ("one-advantage-first", "score minus the value of the prompt"),
        ("one-advantage-last", "score minus the value before the last token"),
    ):
        runs, columns = read(name)[:3], []
        for step in "10", "20", "40":
            found = [float(row["eval/score_sampled"]) for run in runs for row in run if row["step"] == step]
            columns.append(f"{sum(found) / 3:.3f} ({min(found):.3f}-{max(found):.3f})")
        one.append([f"{words} (`{name}`)", *columns])

    everything = learns, noises, zeros, plain, clip, stories, whitened, one
    texts = []
    for first, *others in everything:
        rule = "|---" * len(first) + "|\n"
        head, *lines = [f"| {' | '.join(row)} |\n".replace("|  |", "| |") for row in (first, *others)]
        texts.append("".join([head, rule, *lines]))
    return texts


def main():
    script = argparse.ArgumentParser(add_help=False)
    script.add_argument("--at", choices=["first", "last"])
    own, flags = script.parse_known_args()
    if own.at:
        return train_with_one(own.at, flags)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tiny", "noise", "best", "kinds", "tables", "shared"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=5, help="of `shared`")
    parser.add_argument("--group-size", type=int, default=8, help="of `shared`")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "tables":
        print("\n".join(tables()))
    elif args.what == "shared":
        shared(args.rounds, args.group_size)
    else:
        {"tiny": tiny, "noise": noise, "best": best, "kinds": kinds}[args.what](args.results, args.seeds)


if __name__ == "__main__":
    main()
