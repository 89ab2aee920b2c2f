"""Beside notes/variants/sft.py and preferences.py: pairs of a model's own answers, and where two scores part.

    python benchmarks/pipeline.py pairs runs/answers runs/pairs        of each prompt a right and a wrong answer
    python benchmarks/pipeline.py scores runs/NAME [NAME.csv]          a reward model's scores beside the rule's

`pairs` reads the first batch of a run of grpo_llm.py (`--lr 0 --total-iterations 1`: it only samples) with the rule as
its reward. Every fifth prompt goes into FOLDER/test.jsonl. With --noise 0.2 a fifth of the pairs are the wrong way
round, as those of a judge that errs.

`scores` reads the sampled answers of a run's evaluations. Of all pairs of a right and a wrong answer, `order` is the
share in which the right one has the higher score. The questions differ, so it is less than preferences.py's accuracy.
"""

import argparse
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
    """A row for each evaluation."""
    found = []
    steps = {line["step"]: line for line in read_lines(run / "metrics.jsonl")}
    for path in sorted((run / "completions").glob("eval_sampled_*.jsonl")):
        rows = read_lines(path)
        rule = gsm8k([row["response"] for row in rows], [row["answer"] for row in rows])
        right = [row["score"] for row, correct in zip(rows, rule) if correct]
        wrong = [row["score"] for row, correct in zip(rows, rule) if not correct]
        order = [(a > b) + 0.5 * (a == b) for a in right for b in wrong]
        step = steps[int(path.stem[-6:])]
        row = {"step": step["step"], "score": statistics.mean(row["score"] for row in rows)}
        row |= {"rule": statistics.mean(rule), "order": statistics.mean(order or [float("nan")])}
        row |= {"kl": step.get("kl/mean", 0), "length": statistics.mean(row["length"] for row in rows)}
        row["explained_variance"] = step.get("critic/explained_variance", float("nan"))
        found.append({name: f"{value:.4g}" for name, value in row.items()})
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("pairs", "scores"))
    parser.add_argument("run", type=Path)
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--noise", type=float, default=0.0)
    args = parser.parse_args()
    if args.command == "pairs":
        print(make_pairs(args.run, args.output, args.noise))
    else:
        rows = read_scores(args.run)
        if args.output:
            write_csv(args.output, rows)
        for cells in rows[0], *map(dict.values, rows):
            print("  ".join(f"{cell[:9]:>9}" for cell in cells))


if __name__ == "__main__":
    main()
