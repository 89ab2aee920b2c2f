"""Train with several seeds, one after the other, and keep the metrics in a compact form with a table of the results.

    python benchmarks/learning.py ppo --seeds 1 2 3 4 5
    python benchmarks/learning.py ppo-lam1 --script ppo_llm.py --flags="--lam 1.0"

Each seed is one launch on two processes, as in the README. In benchmarks/results/NAME/ it writes seed_K.csv (metrics,
one row per iteration, four significant digits), and table.md. Draw them with benchmarks/plot.py.
"""

import argparse
import csv
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = "--num_machines 1 --mixed_precision no --dynamo_backend no"


def write_compact(rows, path):
    """metrics.jsonl rows as a csv with four significant digits; empty where a metric was not measured."""
    names = ["step"] + sorted({name for row in rows for name in row} - {"step"})
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([f"{row[name]:.4g}" if name in row else "" for name in names] for row in rows)


def summarise(rows, seconds):
    """One line of the table: scores before and after, the critic, the wall time from launch to exit."""
    evals = [row for row in rows if "eval/score" in row]
    explained = [
        row["critic/explained_variance"] for row in rows if row["step"] > 5 and "critic/explained_variance" in row
    ]
    return {
        "sampled before": evals[0]["eval/score_sampled"],
        "sampled after (last two)": sum(row["eval/score_sampled"] for row in evals[-2:]) / 2,
        "greedy before": evals[0]["eval/score"],
        "greedy after": evals[-1]["eval/score"],
        "length before": evals[0]["eval/length_mean"],
        "length after": evals[-1]["eval/length_mean"],
        "explained variance": sum(explained) / len(explained) if explained else float("nan"),
        "seconds": seconds,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="folder under benchmarks/results/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--script", default="ppo_llm.py")
    parser.add_argument("--flags", default="", help="passed on to the script, as one string")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    folder = args.results / args.name
    folder.mkdir(parents=True, exist_ok=True)
    accelerate = Path(sys.executable).with_name("accelerate")
    parallel = f"--multi_gpu --num_processes {args.processes}" if args.processes > 1 else "--num_processes 1"
    lines = []
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as runs:
            command = [str(accelerate), "launch", *shlex.split(f"{parallel} {LAUNCH}"), str(ROOT / args.script)]
            command += ["--seed", str(seed), "--output-dir", runs, "--run-name", "run", *shlex.split(args.flags)]
            start = time.time()
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
            seconds = time.time() - start
            rows = [json.loads(line) for line in (Path(runs) / "run" / "metrics.jsonl").read_text().splitlines()]
        write_compact(rows, folder / f"seed_{seed}.csv")
        summary = summarise(rows, seconds)
        print(f"seed {seed}: " + ", ".join(f"{key} {value:.3f}" for key, value in summary.items()), flush=True)
        lines.append(
            [str(seed), *(f"{value:.3f}" if key != "seconds" else f"{value:.0f}" for key, value in summary.items())]
        )
    header = ["seed", *summary]
    table = [header, ["---"] * len(header), *lines]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in table)
    about = (
        f"`{args.script} {args.flags}`".replace(" `", "`") + f", {args.processes} processes on {os.cpu_count()} cores"
    )
    (folder / "table.md").write_text(f"{about}\n\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
