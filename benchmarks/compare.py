"""One table of several results of benchmarks/learning.py: means over the seeds, with the lowest and highest.

    python benchmarks/compare.py ppo grpo dr_grpo rloo reinforce_pp grpo-lora ppo-fsdp grpo-fsdp \\
        > benchmarks/results/comparison.md
"""

import argparse
import statistics
from pathlib import Path

import plot

RESULTS = Path(__file__).resolve().parent / "results"


def last(metric):
    return lambda run: [row[metric] for row in run if metric in row][-1]


def sampled_at(step):
    return lambda run: next(row["eval/score_sampled"] for row in run if row["step"] == step)


def make_table(results, names, at=(10,)):
    """Markdown; a cell is empty where a run did not measure it, or has only 0 (no reference model, no KL)."""
    columns = {"greedy after": (last("eval/score"), 3)}  # title: (number of a run, digits)
    columns |= {f"sampled at iteration {step}": (sampled_at(step), 3) for step in at}
    columns |= {"sampled after": (last("eval/score_sampled"), 3), "KL per token after": (last("kl/mean"), 3)}
    columns |= {"responses sampled": (last("responses"), 0)}
    lines = [["", "seeds", *columns], ["---"] * (len(columns) + 2)]
    for name in names:
        runs, cells = plot.read_runs(results / name), []
        for number, digits in columns.values():
            try:
                values = [number(run) for run in runs]
            except IndexError:
                values = []
            ends = [f"{f(values):,.{digits}f}" for f in (statistics.mean, min, max)] if any(values) else [""]
            cells.append(ends[0] if len(set(ends)) == 1 else f"{ends[0]} ({ends[1]}-{ends[2]})")
        lines.append([name, str(len(runs)), *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help="folders under benchmarks/results/")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--at", type=int, nargs="+", default=[10], help="iterations whose evaluation is shown, too")
    args = parser.parse_args()
    print(make_table(args.results, args.names, args.at))
