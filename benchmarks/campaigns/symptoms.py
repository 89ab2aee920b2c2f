"""Produce what chapter 9 explains: runs that are broken on purpose, and which metric gives each away, and when.

    python benchmarks/campaigns/symptoms.py                   all that don't exist yet, two at a time
    python benchmarks/campaigns/symptoms.py one-step nan      only these
    python benchmarks/campaigns/symptoms.py table             compares them with five healthy seeds

Each run is one command on the embedded default with one process: flags that break a run, or a bug from broken.py.
benchmarks/results/symptoms/ gets NAME.csv (the metrics, four significant digits), NAME.txt (the last line that the run
printed when it stopped by itself, or the error that broken.py let pass) and, with `table`, table.md.
notes/figures/09.py draws them; a test checks that the chapter has these commands.

kl-negative and entropy-rises were made with version 0.2 (commit c9bdd21), whose scripts had --top-p. It is a variant
now, so their files stay as they are, and you cannot run them here.
"""

import argparse
import csv
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import broken
import plot
from common import RESULTS, ROOT
from learning import write_compact

SYMPTOMS = {
    "wrong-column": "grpo_llm.py --reward benchmarks/rewards.py:exact --answer-column question --total-iterations 8",
    "cut-answers": "ppo_llm.py --max-response-length 12 --total-iterations 8",
    "one-step": "ppo_llm.py --minibatch-size 256 --total-iterations 8",
    "kl-negative": "grpo_llm.py --top-p 0.6 --entropy-coef 0.1 --reward exact --answer-column question"
    " --lr 3e-5 --total-iterations 8",
    "kl-explodes": "ppo_llm.py --lr 3e-3 --total-iterations 8",
    "nan": "ppo_llm.py --lr 1e18 --total-iterations 4",
    "critic-frozen": "ppo_llm.py --critic-lr 1e-7 --total-iterations 8",
    "entropy-collapse": "grpo_llm.py --lr 1e-3 --kl-loss-coef 0 --total-iterations 20",
    "entropy-low": "grpo_llm.py --temperature 0.3 --total-iterations 20",
    "entropy-rises": "ppo_llm.py --top-p 0.6 --entropy-coef 1 --total-iterations 8",
    "four-epochs": "ppo_llm.py --ppo-epochs 4 --total-iterations 8",
    "no-ratio": "benchmarks/campaigns/broken.py no-ratio --ppo-epochs 4 --total-iterations 8",
    "memory-rollout": "ppo_llm.py --batch-size 4096 --rollout-batch-size 4096 --total-iterations 1 --eval-every 0",
    "memory-held": "ppo_llm.py --batch-size 4096 --rollout-batch-size 128 --total-iterations 1 --eval-every 0",
    "rollout-slow": "ppo_llm.py --rollout-batch-size 4 --total-iterations 3",
}
BUGS = "logprobs-late sampler-colder sampler-stale dropout-on eos-missing eos-untrained score-misplaced values-late"
BUGS = f"{BUGS} padding-whitened sign-flipped reference-moves groups-mixed".split()
SYMPTOMS |= {name: f"benchmarks/campaigns/broken.py {name} --total-iterations 8" for name in BUGS}
# A healthy one that the bands have not seen: what it trips is a false alarm.
SYMPTOMS["ppo-seed-6"] = "ppo_llm.py --seed 6 --total-iterations 8"
OLD = "kl-negative", "entropy-rises"  # as they were run with version 0.2


def produce(name, results):
    """Run one symptom's command on one process; returns its exit code."""
    script, *flags = shlex.split(SYMPTOMS[name])
    with tempfile.TemporaryDirectory() as temporary:
        folder, errors = Path(temporary), Path(temporary) / "errors.txt"
        command = [sys.executable, str(ROOT / script), *flags, "--output-dir", temporary, "--run-name", "run"]
        command += ["--track", "none", "--save-every", "1000"]
        with open(errors, "w") as file:
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            run = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=file)
            _, status, usage = os.wait4(run.pid, 0)
        run.returncode = code = os.waitstatus_to_exitcode(status)
        said = errors.read_text().strip().splitlines()
        last = said[-1:] if code else [line for line in said if line.startswith("error: ")][:1]
        if last:
            (results / f"{name}.txt").write_text(last[0].replace(str(folder / "run"), f"runs/{name}") + "\n")
        if (folder / "run" / "metrics.jsonl").is_file():
            rows = plot.read_run(folder / "run")
            if not rows[-1].get("memory/peak_gib"):  # the scripts measure that of a GPU only
                rows[-1]["memory/peak_gib"] = usage.ru_maxrss / 2**20
            write_compact(rows, results / f"{name}.csv")
    return code


# The band of a metric in iteration t: the range of five healthy seeds over t-2 ... t+2, half as wide again on either
# side. A run has left it when it is outside, on the same side, in two iterations one after the other, or exactly 0 in
# both where no healthy run is. The first of the two counts.
AROUND, WIDER, REPEATED = 2, 0.5, 2
COLUMNS = "reward/mean reward/total_mean advantage/std rollout/logprob_diff actor/ratio_max actor/ratio_mean"
COLUMNS += " actor/approx_kl actor/clipfrac actor/loss actor/grad_norm actor/entropy kl/mean response/length_mean"
COLUMNS = [*COLUMNS.split(), "critic/explained_variance"]
NOT_COMPARED = {"nan", "memory-rollout", "memory-held", "rollout-slow"}  # too few iterations


def read_metrics(path):
    """{metric: {iteration: value}} of a csv; no evaluations, times and constants."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    names = [x for x in rows[0] if "/" in x and not re.match("time|throughput|memory|eval|.*/(lr|coef)$", x)]
    return {x: {int(row["step"]): float(row[x]) for row in rows if row[x] and row["step"] != "0"} for x in names}


def outside(run, seeds, metric, t):
    """1 above the band of these healthy seeds, -1 below it, 0 inside."""
    around = range(t - AROUND, t + AROUND + 1)
    found = [seed[metric][k] for seed in seeds for k in around if k in seed[metric]]
    value, low, high = run[metric][t], min(found), max(found)
    margin = WIDER * (high - low)
    if value == 0 and not low <= 0 <= high:  # a margin may reach beyond 0, where most metrics never are
        return -1 if low > 0 else 1
    return (value > high + margin) - (value < low - margin)


def leaves(run, seeds, metric, last=math.inf):
    """(first iteration outside the band, 1 above or -1 below), None if it stays inside up to iteration `last`."""
    sides = {t: outside(run, seeds, metric, t) for t in run.get(metric, {}) if t <= last}
    for t, side in sides.items():
        if side and all(sides.get(t + k) == side for k in range(REPEATED)):
            return t, side
    return None


def script_and_flags(name):
    """(script, bug or None, flags without the number of iterations) of a symptom."""
    script, *flags = shlex.split(SYMPTOMS[name])
    bug = flags.pop(0) if "broken" in script else None
    return broken.BUGS[bug][0] if bug else Path(script).stem, bug, flags[: flags.index("--total-iterations")]


def compare(results):
    """{symptom: {metric: (iteration, side)}}; false alarms of healthy seeds against the other four, of how many."""
    healthy = {f"{x}_llm": [read_metrics(f) for f in sorted((results / x).glob("seed_*.csv"))] for x in ("ppo", "grpo")}
    found, alarms, tried = {}, [], 0
    for name in (name for name in SYMPTOMS if name not in NOT_COMPARED):
        run, seeds = read_metrics(results / "symptoms" / f"{name}.csv"), healthy[script_and_flags(name)[0]]
        found[name] = {metric: out for metric in seeds[0] if (out := leaves(run, seeds, metric))}
    for script, seeds in healthy.items():
        for k, run in enumerate(seeds):
            for metric in run:
                tried += 1
                if leaves(run, seeds[:k] + seeds[k + 1 :], metric, 12):
                    alarms.append((f"{script.partition('_')[0].upper()}'s seed", k + 1, metric))
    return found, alarms, tried


def make_table(results):
    """Markdown: a sentence on false alarms, and a row for each broken run: first iterations outside a band."""
    found, alarms, tried = compare(results)
    said = ", ".join(f"`{metric}` of {script} {seed}" for script, seed, metric in alarms)
    unseen = len(found.pop("ppo-seed-6"))
    about = f"We compared each healthy seed with the other four: {len(alarms)} of {tried} metrics left its band within "
    about += f"12 iterations{' (' * bool(said)}{said}{')' * bool(said)}, and of a sixth seed of PPO {unseen or 'none'}."
    heads = [name if name.endswith(("/mean", "/std")) else name.split("/")[1] for name in COLUMNS]
    lines = [["broken run", *(f"`{head}`" for head in heads)], ["---"] * (1 + len(heads))]
    for name, outs in found.items():
        _, bug, flags = script_and_flags(name)
        words = [re.split(r"[:,]|\.(?!\d)", broken.BUGS[bug][1].__doc__)[0]] if bug else []
        cells = {metric: "↓↑"[side > 0] + str(first) for metric, (first, side) in outs.items()}
        label = f"**{name}** " + ", ".join(words + [f"`{shlex.join(flags)}`"] * bool(flags))
        lines.append([label, *(cells.get(metric, "") for metric in COLUMNS)])
    return "\n".join([about, "", *("|" + "|".join(line) + "|" for line in lines), ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="table, or some of " + ", ".join(SYMPTOMS))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of symptoms/, and of the bands' runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    folder = args.results / "symptoms"
    folder.mkdir(parents=True, exist_ok=True)
    if args.names == ["table"]:
        (folder / "table.md").write_text(make_table(args.results))
        return
    refused = [name for name in args.names if name in OLD]
    if refused:
        parser.error(f"{', '.join(refused)}: made with version 0.2, see above")
    missing = [name for name in SYMPTOMS if name not in OLD and not (folder / f"{name}.csv").is_file()]
    names = args.names or missing

    def run(name):
        print(f"{name}: exit code {produce(name, folder)}", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run, names))


if __name__ == "__main__":
    main()
