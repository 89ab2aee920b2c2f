"""Compare several results of benchmarks/learning.py in one table: means over the seeds, with the lowest and highest.

    python benchmarks/compare.py ppo grpo grpo-2026 dr_grpo rloo reinforce_pp grpo-lora ppo-fsdp grpo-fsdp \\
        > benchmarks/results/comparison.md
    python benchmarks/compare.py runs/one runs/two        # your own runs, or folders with a run for each seed

Parts of the score have columns, and so has the surprise that is furthest from 0. Below the table are the flags in which
run folders differ, with what their reward depended on (`reward_settings`) and a checksum of its file.

Or check whether two runs are the same, on one process and on two, or before and after a change:

    python benchmarks/compare.py --exact runs/one runs/two

It compares iteration by iteration: metrics up to rounding (--tolerance), except times, memory, throughput and
rollout/surprise, a sum that cancels; and completions character by character, without the numbers of their tokens. It
prints the first difference, and the exit code is then 1.
"""

import argparse
import json
import math
import sys
import zlib
from pathlib import Path

import plot
from common import RESULTS, markdown, read_lines, spread

ASIDE = "time/", "memory/", "throughput/", "rollout/logprob_diff", "rollout/surprise", "batch"


def make_table(results, names, at=(10,)):
    """Markdown; a cell is empty where a run did not measure it, and a KL that is only 0 (no reference model)."""
    # title, metric, iteration if not the last
    columns = [("iterations", "step", None), ("greedy after", "eval/score", None)]
    columns += [(f"sampled at iteration {step}", "eval/score_sampled", step) for step in at]
    columns += [("sampled after", "eval/score_sampled", None), ("KL per token after", "kl/mean", None)]
    columns += [("responses sampled", "responses", None)]
    places = [[Path(name), results / f"{name}.csv", results / name] for name in names]  # where you are comes first
    where = [next(filter(Path.exists, three), three[0]) for three in places]
    every = {name: plot.read_runs(place) for name, place in zip(names, where)}
    parts = dict.fromkeys(x for runs in every.values() for row in runs[0] for x in row if x.startswith("eval_part/"))
    columns += [(f"{metric.partition('/')[2]}, greedy after", metric, None) for metric in parts]
    sampled = [row for runs in every.values() for run in runs for row in run if "rollout/surprise_z" in row]
    columns += [("surprise z, furthest from 0", "rollout/surprise_z", None)] if sampled else []
    lines = []
    for name, runs in every.items():
        cells = [name, len(runs)]
        for _, metric, step in columns:
            values = []
            for run in runs:
                found = [row[metric] for row in run if metric in row and step in (None, row["step"])]
                values += sorted(found, key=abs)[-1:] if metric == "rollout/surprise_z" else found[-1:]
            measured = any(values) if metric == "kl/mean" else values
            cells.append(spread(values, 0 if metric in ("responses", "step") else 3) if measured else "")
        lines.append(cells)
    return markdown(["", "seeds", *[title for title, *_ in columns]], lines) + differing_flags(names, where)


def differing_flags(names, places):
    """Markdown of the flags that differ between these runs, "" if none do. Several seeds of one name share a cell."""
    columns = []
    for place in places:
        files = [*place.glob("args.json"), *place.glob("*/args.json")] if place.is_dir() else []
        runs = [json.loads(file.read_text()) for file in sorted(files)]
        for file, run in zip(sorted(files), runs):
            copy = file.with_name(Path(run.get("reward", "").rpartition(":")[0]).name or "none")
            run |= {"reward_file": f"{zlib.crc32(copy.read_bytes()):08x}"} if copy.is_file() else {}
        flags = dict.fromkeys(flag for run in runs for flag in run if flag not in ("run_name", "resume", "output_dir"))
        columns += [{flag: ", ".join(dict.fromkeys(str(run.get(flag)) for run in runs)) for flag in flags}]
    flags = dict.fromkeys(flag for column in columns for flag in column)
    flags = [flag for flag in flags if len({column.get(flag) for column in columns if column}) > 1]
    lines = [[flag, *[column.get(flag, "") for column in columns]] for flag in flags]
    scored = {"reward", "reward_settings", "reward_file"} & {*flags}
    warning = "\n\nTheir rewards differ, so their scores can't be compared." if scored else ""
    return "\n\n" + markdown(["flags that differ", *names], lines) + warning if lines else ""


# ------------------------------------------------------------------------------------------------------- two runs


def read_run(folder):
    """{(iteration, place in it, file, line): row}: sorted, the keys are in the order of the run."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        sys.exit(f"{folder} is no run folder: it has no metrics.jsonl")
    rows = {(row["step"], 1, metrics.name, line): row for line, row in enumerate(read_lines(metrics), 1)}
    for path in (folder / "completions").glob("*_*.jsonl"):
        kind, _, iteration = path.stem.rpartition("_")
        place = {"step": 0, "eval": 2}.get(kind, 3)  # trained on before the update, evaluated after it
        for line, row in enumerate(read_lines(path), 1):
            rows[int(iteration), place, f"completions/{path.name}", line] = row
    return rows


def same(one, other, tolerance):
    """Numbers to rounding: relatively, those near 0 to a hundredth of the tolerance. All else as it is."""
    if not (isinstance(one, int | float) and isinstance(other, int | float)):
        return one == other
    both_nan = math.isnan(one) and math.isnan(other)
    return both_nan or math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance / 100)


def differing(one, other, tolerance):
    """Of two rows: [(name, value in one, value in the other)] of what is not the same."""
    found = []
    for name in one | other:
        values = [repr(row[name]) if name in row else "not there" for row in (one, other)]
        if name.startswith(ASIDE) or (name in one and name in other and same(one[name], other[name], tolerance)):
            continue
        found.append((name, *values))
    return found


def first_difference(ours, theirs, tolerance):
    """Of the rows of two runs: (file, line, differing values, see above) of the first that is not the same, or None."""
    for key in sorted(ours.keys() | theirs.keys()):
        iteration, _, file, line = key
        if key in ours and key in theirs:
            found = differing(ours[key], theirs[key], tolerance)
        else:
            counts = [sum(other[:3] == key[:3] for other in rows) for rows in (ours, theirs)]
            found = [("number of rows", *counts)]
        if found:
            return f"{file} (iteration {iteration})", line, found
    return None


def compare_runs(one, other, tolerance):
    """Prints the first difference of two run folders, or what was compared: the exit code."""
    rows = read_run(one)
    found = first_difference(rows, read_run(other), tolerance)
    if found is None:
        files = [file for _, _, file, _ in rows if file != "metrics.jsonl"]
        print(f"the same: {len(rows) - len(files)} lines of metrics,", end=" ")
        print(f"{len(files)} rows of completions in {len(set(files))} files")
        if not files:
            print("completions are written at evaluations: --eval-every 1 --eval-rows 4")
        return 0
    where, line, ((name, *values), *more) = found
    print(f"{where}, row {line}, {name}:")
    for run, value in zip((one, other), values):
        print(f"    {value}  in {run}")
    if more:
        print(f"    of this row differ, too: {', '.join(name for name, *_ in more)}")
    return 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="folders of runs, or csv files in benchmarks/results/")
    parser.add_argument("--results", type=Path, default=RESULTS, help="another folder than benchmarks/results/")
    parser.add_argument("--at", type=int, nargs="+", default=[10], help="also show the evaluation of these iterations")
    parser.add_argument("--exact", type=Path, nargs=2, metavar="RUN", help="two run folders: are they the same?")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative tolerance of --exact")
    args = parser.parse_args()
    if bool(args.names) == bool(args.exact):
        parser.error("name results for a table, or two runs after --exact")
    if args.exact:
        sys.exit(compare_runs(*args.exact, args.tolerance))
    print(make_table(args.results, args.names, args.at))
