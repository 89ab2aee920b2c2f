"""Beside notes/variants/sft.py and preferences.py: pairs of a model's own answers, and where two scores part.

    python benchmarks/pipeline.py pairs runs/answers --output runs/pairs     of each prompt a right and a wrong answer
    python benchmarks/pipeline.py scores runs/* --output scores.csv          a reward model's scores beside the rule's

`pairs` reads the first batch of a run of grpo_llm.py (`--lr 0 --total-iterations 1`: it only samples) with the rule as
its reward. Every fifth prompt goes into FOLDER/test.jsonl. With --noise 0.2 a fifth of the pairs are the wrong way
round, as those of a judge that errs.

`scores` reads the sampled answers of a run's evaluations. Of all pairs of a right and a wrong answer, `order` is the
share in which the right one has the higher score. The questions differ, so it is less than preferences.py's accuracy.
"""

import argparse
import json
import random
import statistics
from pathlib import Path

from common import grouped, read_lines, write_csv, write_lines

from ppo_llm import gsm8k


def make_pairs(run, folder, noise):
    """How many there are to train and to test."""
    rng = random.Random(1)
    parts = [], []
    groups = grouped(read_lines(run / "completions" / "step_000001.jsonl"), "prompt")
    for number, (prompt, rows) in enumerate(groups.items()):
        right = [row["response"] for row in rows if row["score"] == 1]
        wrong = [row["response"] for row in rows if row["score"] == 0]
        if right and wrong:
            sides = [rng.choice(right), rng.choice(wrong)]
            if rng.random() < noise:
                sides.reverse()
            parts[number % 5 == 0].append({"prompt": prompt, "chosen": sides[0], "rejected": sides[1]})
    folder.mkdir(parents=True)
    for name, part in zip(("train", "test"), parts):
        write_lines(folder / f"{name}.jsonl", part)
    return f"{len(parts[0])} pairs in {folder}/train.jsonl, {len(parts[1])} in test.jsonl, of {len(groups)} prompts"


def read_scores(run):
    """A row for each iteration; what takes the answers of an evaluation is empty in the others."""
    found = []
    for line in read_lines(run / "metrics.jsonl"):
        row = {"run": run.name, "seed": json.loads((run / "args.json").read_text())["seed"], "step": line["step"]}
        row |= {"kl": line.get("kl/mean", 0.0), "explained_variance": line.get("critic/explained_variance", "")}
        row |= dict.fromkeys(("score", "rule", "order", "length"), "")
        path = run / "completions" / f"eval_sampled_{line['step']:06d}.jsonl"
        if path.exists():
            rows = read_lines(path)
            rule = gsm8k([row["response"] for row in rows], [row["answer"] for row in rows])
            right = [row["score"] for row, correct in zip(rows, rule) if correct]
            wrong = [row["score"] for row, correct in zip(rows, rule) if not correct]
            order = [(a > b) + (a == b) / 2 for a in right for b in wrong]
            row |= {"score": line["eval/score_sampled"], "rule": statistics.mean(rule)}
            row |= {"order": statistics.mean(order) if order else "", "length": line["eval/length_mean"]}
        found.append({name: f"{x:.4g}" if isinstance(x, float) else x for name, x in row.items()})
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("pairs", "scores"))
    parser.add_argument("runs", type=Path, nargs="+", help="one to make pairs of")
    parser.add_argument("--output", type=Path, required=True, help="a folder of pairs, or the csv of scores")
    parser.add_argument("--noise", type=float, default=0.0)
    args = parser.parse_args()
    if args.command == "pairs":
        print(make_pairs(args.runs[0], args.output, args.noise))
    else:
        write_csv(args.output, [row for run in args.runs for row in read_scores(run)])


if __name__ == "__main__":
    main()
