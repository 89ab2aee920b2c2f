"""Measurements behind single claims of the notes: results/walls/, results/speed/shared_prompt.md, and a script.

    python benchmarks/campaigns/walls.py tiny       three seeds of tiny_ppo.py, 40 iterations each
    python benchmarks/campaigns/walls.py noise      the noise of the gradient with a baseline and without
    python benchmarks/campaigns/walls.py best       which baseline would leave the least noise
    python benchmarks/campaigns/walls.py kinds      the estimates of the KL after 40 iterations: mean and spread
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
import itertools
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

import grpo_llm
import ppo_llm

RESULTS = common.RESULTS / "walls"
BATCHES = 16  # of 256 responses each
GROUP_SIZE = 8
RESPONSES = 1024  # to as many prompts, for `best`
POLICIES = ("start", 0), ("later", 12)  # and iterations of training


def tiny(seeds):
    """What tiny_ppo.py prints, as a table."""
    table = []
    for seed in seeds:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            tiny_ppo.main(seed)
        before, *lines, after = [re.findall(r"[\d.]+", line) for line in printed.getvalue().splitlines()]
        rows = [dict(zip(("iteration", "score", "kl", "length"), numbers)) | {"greedy": ""} for numbers in lines]
        rows.insert(0, {"iteration": 0, "score": "", "kl": "", "length": "", "greedy": before[0]})
        rows[-1]["greedy"] = after[0]
        table += [{"seed": seed} | row for row in rows]
        print(f"seed {seed}: greedy {before[0]} before, {after[0]} after", flush=True)
    common.write_csv(RESULTS / "tiny.csv", table)


def trained_actor(seed, iterations):
    """The actor after some iterations of tiny_ppo.py."""
    kept = []
    with mock.patch.object(tiny_ppo, "evaluate", lambda model, rows: kept.append(model) or 0.0):
        tiny_ppo.main(seed, iterations)
    return kept[-1]


def sample(actor, num_prompts, group_size=1):
    """Tokens, mask and scores of so many responses to each of some training questions."""
    rows = tiny_ppo.read_rows("train.jsonl")
    chosen = torch.randperm(len(rows))[:num_prompts].repeat_interleave(group_size)
    batch = [rows[i] for i in chosen]
    tokens, mask = tiny_ppo.sample(actor, batch)
    return tokens, mask, tiny_ppo.score(tokens, mask, batch)


def gradient(actor, tokens, mask, advantages):
    """Of the mean over responses of -advantage * log-prob of the response, as one vector. advantages: (B,)."""
    actor.zero_grad()
    for part in torch.arange(len(tokens)).split(64):
        losses = -advantages[part, None] * tiny_ppo.log_probs(actor, tokens[part])
        (losses * mask[part]).sum().div(len(tokens)).backward()
    return torch.cat([p.grad.flatten() for p in actor.parameters() if p.grad is not None])


def gradients_by_baseline(actor, tokens, mask, scores):
    """{baseline: gradient of this batch}.

    The means are those of the other responses: with its own score in it a group's would make the gradient shorter, by
    1/8, and its noise with it. `token mean` has each response's score counted once for each of its tokens.
    """
    size = len(scores)
    groups = scores.view(-1, GROUP_SIZE)
    centred = (groups - groups.mean(1, keepdim=True)).flatten() * GROUP_SIZE / (GROUP_SIZE - 1)
    token_mean = (scores * mask.sum(1)).sum() / mask.sum()
    by_score = gradient(actor, tokens, mask, scores)
    by_one = gradient(actor, tokens, mask, torch.ones(size))
    return {  # a gradient is linear in the advantages
        "none": by_score,
        "none, scores 10 and 11": by_score + 10 * by_one,
        "batch mean": (by_score - scores.mean() * by_one) * size / (size - 1),
        "group mean": gradient(actor, tokens, mask, centred),
        "token mean": by_score - token_mean * by_one,
    }


def noise(seeds):
    """Variance of the gradient of a batch, and the squared length of its mean, over BATCHES batches."""
    found = []
    for seed, (name, iterations) in itertools.product(seeds, POLICIES):
        actor = trained_actor(seed, iterations)
        torch.manual_seed(1000 + seed)
        gradients, means = [], []
        for _ in range(BATCHES):
            tokens, mask, scores = sample(actor, tiny_ppo.BATCH_SIZE // GROUP_SIZE, GROUP_SIZE)
            means.append(scores.mean().item())
            gradients.append(gradients_by_baseline(actor, tokens, mask, scores))
        for baseline in gradients[0]:
            vectors = torch.stack([batch[baseline] for batch in gradients])
            variance = vectors.var(0).sum().item()
            signal = vectors.mean(0).square().sum().item() - variance / BATCHES  # the mean has noise, too
            line = {"policy": name, "seed": seed, "score": round(statistics.mean(means), 3), "baseline": baseline}
            found.append(line | {"variance": variance, "signal": signal, "ratio": round(variance / signal, 2)})
            print(found[-1], flush=True)
    common.write_csv(RESULTS / "noise.csv", found)


def best(seeds):
    """The baseline of least variance, E[R |g|^2] / E[|g|^2], g the gradient of a response's log-prob."""
    found = []
    for seed, (name, iterations) in itertools.product(seeds, POLICIES):
        actor = trained_actor(seed, iterations)
        torch.manual_seed(2000 + seed)
        tokens, mask, scores = sample(actor, RESPONSES)
        pairs = zip(tokens.split(1), mask.split(1))
        squares = torch.stack([gradient(actor, *pair, torch.ones(1)).square().sum() for pair in pairs])
        line = {"policy": name, "seed": seed, "score": round(scores.mean().item(), 4)}
        line |= {"right": squares[scores == 1].mean().item(), "wrong": squares[scores == 0].mean().item()}
        found.append(line | {"best": round(((scores * squares).sum() / squares.sum()).item(), 4)})
        print(found[-1], flush=True)
    common.write_csv(RESULTS / "best.csv", found)


def kinds(seeds):
    """Of the tokens of 2,048 responses: each estimate's mean, its std, and how much of its square is in 1% of them."""
    start = trained_actor(1, 0)
    found = []
    for seed in seeds:
        actor = trained_actor(seed, 40)
        torch.manual_seed(3000 + seed)
        tokens, mask, _ = sample(actor, 2 * RESPONSES)
        logprobs = []
        with torch.no_grad():
            for model in actor, start:
                parts = [tiny_ppo.log_probs(model, part) for part in tokens.split(128)]
                logprobs.append(torch.cat(parts)[mask].double())
        for kind in "k1", "k3", "k2":
            values = ppo_llm.kl_penalty(*logprobs, kind)
            largest = values.square().sort(descending=True).values
            share = largest[: len(values) // 100].sum() / largest.sum()
            line = {"seed": seed, "kind": kind, "tokens": len(values), "mean": round(values.mean().item(), 5)}
            found.append(line | {"std": round(values.std().item(), 5), "of 1%": round(share.item(), 5)})
            print(found[-1], flush=True)
    common.write_csv(RESULTS / "kinds.csv", found)


# ------------------------------------------------------------------------------------------------------ a shared prompt


ROUNDS = 5
LENGTHS = [(32, 32), (128, 32), (512, 32), (32, 128), (128, 128), (512, 128), (128, 512), (512, 512)]


def seconds(policy, tokens, mask):
    start = time.process_time()
    logprobs, _ = policy(tokens, mask)
    logprobs.sum().backward()
    return time.process_time() - start


def shared(_):
    """Forward and backward of one group, joined or row by row.

    With the embedded model's shape, random tokens and one thread; processor times: medians of the rounds' ratios. Below
    1, the joined rows win: the prompt is read once instead of once for each response, but attention runs under a dense
    mask over the whole row.
    """
    with tempfile.TemporaryDirectory() as folder:
        common.find_script("shared_prompt_llm", Path(folder))
        sys.path.insert(0, folder)
        import shared_prompt_llm
    config = AutoConfig.from_pretrained(common.TINY / "model", max_position_embeddings=2048)
    model = AutoModelForCausalLM.from_config(config)
    plain, joined = (algo.Policy(model, 1.0) for algo in (grpo_llm, shared_prompt_llm))
    lines = []
    for prompt, response in LENGTHS:
        tokens = torch.randint(3, config.vocab_size, (GROUP_SIZE, prompt + response))
        tokens[:, :prompt] = tokens[0, :prompt]
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        mask[:, prompt - 1 : -1] = True
        pairs = [(seconds(joined, tokens, mask), seconds(plain, tokens, mask)) for _ in range(1 + ROUNDS)]
        ratio = statistics.median(one / other for one, other in pairs[1:])  # the first warms up
        read = (prompt + GROUP_SIZE * response) / (GROUP_SIZE * (prompt + response))
        lines.append([prompt, response, f"{read:.2f}x", f"{ratio:.2f}x"])
        print(*lines[-1], flush=True)
    table = common.markdown(["prompt", "response", "tokens read", "time"], lines)
    text = f"`python benchmarks/campaigns/walls.py shared`, groups of {GROUP_SIZE}, {ROUNDS} rounds\n\n{table}\n"
    (common.RESULTS / "speed" / "shared_prompt.md").write_text(text)


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


def main():
    script = argparse.ArgumentParser(add_help=False)
    script.add_argument("--at", choices=["first", "last"])
    own, flags = script.parse_known_args()
    if own.at:
        return train_with_one(own.at, flags)
    commands = {command.__name__: command for command in (tiny, noise, best, kinds, shared)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=commands)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    torch.set_num_threads(1)
    commands[args.what](args.seeds)


if __name__ == "__main__":
    main()
