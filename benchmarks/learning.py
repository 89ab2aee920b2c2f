"""Train with several seeds, two runs at a time, and keep the metrics in a compact form with a table of the results.

    python benchmarks/learning.py ppo --seeds 1 2 3 4 5
    python benchmarks/learning.py rloo --script grpo_llm.py --flags="--estimator rloo --kl-loss-coef 0" --seeds 1 2 3

Each seed is one launch of one process with one thread; except for rounding, the results do not depend on the number of
processes. The sharded scripts need two: --processes 2 --jobs 1. In benchmarks/results/NAME/ you get seed_K.csv
(metrics, one row per iteration, four significant digits), unless it already exists, and table.md with a line for every
seed in the folder. Draw them with benchmarks/plot.py. Times are those of a machine that does other things, too. If you
interrupt it and start it again with the same script and flags, it continues from the checkpoints (and the seconds then
cover only the rest).
"""

import argparse
import csv
import hashlib
import os
import shlex
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import plot
from common import RESULTS, ROOT, launcher, markdown, run

RUNS = ROOT / "runs" / "learning"


def write_compact(rows, path):
    """metrics.jsonl rows as a csv with four significant digits; empty where a metric was not measured."""
    names = ["step"] + sorted({name for row in rows for name in row} - {"step"})
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([f"{row[name]:.4g}" if name in row else "" for name in names] for row in rows)


def summarise(rows):
    """One line of the table: scores before and after, the critic if there is one, times."""
    evals = [row for row in rows if "eval/score" in row]
    explained = [row["critic/explained_variance"] for row in rows if "critic/explained_variance" in row][5:]
    summary = {}
    for name, metric in ("sampled", "eval/score_sampled"), ("greedy", "eval/score"), ("length", "eval/length_mean"):
        summary |= {f"{name} before": evals[0][metric], f"{name} after": evals[-1][metric]}
    if explained:
        summary["explained variance from iteration 6"] = sum(explained) / len(explained)
    summary["seconds per iteration"] = statistics.median(row["time/iteration"] for row in rows[1:])
    return summary | {"seconds": rows[-1]["time/launch_to_exit"]}


def make_table(folder):
    """The table of all seeds whose metrics are in the folder, in markdown."""
    lines = []
    for path in sorted(folder.glob("seed_*.csv"), key=lambda path: int(path.stem[5:])):
        (rows,) = plot.read_runs(path)
        summary = summarise(rows)
        cells = [f"{value:.2f}" if "seconds" in key else f"{value:.3f}" for key, value in summary.items()]
        lines.append([path.stem[5:], *cells])
    return markdown(["seed", *summary], lines)


def train(script, words, run_dir, processes=1, **environment):
    """The metrics of a run, in the last row with the seconds from launch to exit."""
    start = time.time()
    words = ["--output-dir", run_dir.parent, "--run-name", run_dir.name, *words]
    run(launcher(processes, script, *words), **environment)
    rows = plot.read_run(run_dir)
    rows[-1]["time/launch_to_exit"] = time.time() - start
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="folder under benchmarks/results/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--script", default="ppo_llm.py")
    parser.add_argument("--flags", default="", help="passed on to the script, as one string")
    parser.add_argument("--processes", type=int, default=1, help="processes of each run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    folder = RESULTS / args.name
    folder.mkdir(parents=True, exist_ok=True)

    def train_seed(seed):
        target = folder / f"seed_{seed}.csv"
        if target.exists():
            return
        version = hashlib.sha256((ROOT / args.script).read_bytes() + args.flags.encode()).hexdigest()[:8]
        run_dir = RUNS / f"{args.name.replace('/', '-')}-{version}-{seed}"
        words = ["--seed", seed, "--resume", "--save-every", "5", *shlex.split(args.flags)]
        rows = train(ROOT / args.script, words, run_dir, args.processes)
        shutil.rmtree(run_dir)
        write_compact(rows, target)
        print(f"seed {seed}: " + ", ".join(f"{k} {v:.3f}" for k, v in summarise(rows).items()), flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(train_seed, args.seeds))
    about = f"`{args.script} {args.flags}`".replace(" `", "`")
    about += f", {args.processes} process(es) a run, {args.jobs} at a time on {os.cpu_count()} cores"
    (folder / "table.md").write_text(f"{about}\n\n{make_table(folder)}\n")
    print(make_table(folder))


if __name__ == "__main__":
    main()
