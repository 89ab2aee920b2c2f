"""Train with several seeds, two runs at a time, and keep the metrics in a compact form.

    python benchmarks/learning.py ppo --flags="--total-iterations 40" --seeds 1 2 3 4 5
    python benchmarks/learning.py rloo --script grpo_llm.py --seeds 1 2 3 \\
        --flags="--total-iterations 40 --estimator rloo --kl-loss-coef 0"
    python benchmarks/learning.py mine --script cispo --seeds 1 2 3          a variant, by its name, 20 iterations

Each seed is one launch of one process with one thread; except for rounding, the results do not depend on the number of
processes. The sharded scripts need two: --processes 2 --jobs 1. The metrics go to benchmarks/results/NAME.csv, a row
for each seed and iteration, with four significant digits; seeds that are there are not run again. At the end
benchmarks/compare.py prints their means. Draw the csv with benchmarks/plot.py. Interrupted, and started again with the
same script and flags, it continues from the checkpoints.
"""

import argparse
import hashlib
import shlex
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import compare
import plot
from common import RESULTS, ROOT, find_script, launcher, read_csv, run, write_csv

RUNS = ROOT / "runs" / "learning"
WRITING = threading.Lock()  # two runs at a time


def keep_run(path, rows, column, name):
    """Adds the metrics of a run to a csv, or replaces them: its seed, or its name, is in this column.

    Numbers have four significant digits, and a cell is empty where a metric was not measured.
    """
    with WRITING:
        kept = [row for row in (read_csv(path) if path.exists() else []) if row[column] != str(name)]
        kept += [{column: str(name)} | {metric: f"{x:.4g}" for metric, x in row.items()} for row in rows]
        names = [column, "step", *sorted({name for row in kept for name in row} - {column, "step"})]
        if column == "seed":
            kept.sort(key=lambda row: int(row["seed"]))
        write_csv(path, [{name: row.get(name, "") for name in names} for row in kept])


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
    parser.add_argument("name", help="of the csv in benchmarks/results/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--script", default="ppo_llm.py", help="a file, or the name of a variant")
    parser.add_argument("--flags", default="", help="passed on to the script, as one string")
    parser.add_argument("--processes", type=int, default=1, help="processes of each run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    path = RESULTS / f"{args.name}.csv"
    there = plot.read_table(path) if path.exists() else {}
    script = ROOT / args.script
    if not script.exists():
        script = find_script(f"{args.script}_llm", RUNS)

    def train_seed(seed):
        if str(seed) in there:
            return
        version = hashlib.sha256(script.read_bytes() + args.flags.encode()).hexdigest()[:8]
        run_dir = RUNS / f"{args.name.replace('/', '-')}-{version}-{seed}"
        words = ["--seed", seed, "--resume", "--save-every", "5", *shlex.split(args.flags)]
        rows = train(script, words, run_dir, args.processes)
        shutil.rmtree(run_dir)
        keep_run(path, rows, "seed", seed)
        last = [row for row in rows if "eval/score" in row][-1]
        seconds = rows[-1]["time/launch_to_exit"]
        scores = f"{last['eval/score']} greedy, {last['eval/score_sampled']} sampled"
        print(f"seed {seed}: {scores}, {seconds:.0f} s", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(train_seed, args.seeds))
    print(compare.make_table(RESULTS, [args.name]))


if __name__ == "__main__":
    main()
