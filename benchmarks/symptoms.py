"""Produce what chapter 9 explains: runs that are broken on purpose, and which metric betrays each, and when.

    python benchmarks/symptoms.py                   all that are not there yet, two at a time
    python benchmarks/symptoms.py one-step nan      only these
    python benchmarks/symptoms.py table             compares them with five healthy seeds

Each is one command on the embedded default, one process: flags that break a run, or a bug of benchmarks/broken.py. In
benchmarks/results/symptoms/ it writes NAME.csv (the metrics, four significant digits), NAME.txt (the last line that the
run printed when it stopped by itself, or the error that broken.py let pass) and, by `table`, table.md.
notes/figures_09.py draws them; a test checks that the commands of the chapter are these.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import plot
from learning import write_compact

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SYMPTOMS = {
    "wrong-column": "grpo_llm.py --reward exact --answer-column question --total-iterations 12",
    "cut-answers": "ppo_llm.py --max-response-length 12 --total-iterations 12",
    "one-step": "ppo_llm.py --minibatch-size 256 --total-iterations 12",
    "kl-negative": "grpo_llm.py --top-p 0.6 --entropy-coef 0.1 --reward exact --answer-column question"
    " --lr 3e-5 --total-iterations 12",
    "large-lr": "ppo_llm.py --lr 3e-3 --total-iterations 12",
    "nan": "ppo_llm.py --lr 1e18 --total-iterations 4",
    "critic-frozen": "ppo_llm.py --critic-lr 1e-7 --total-iterations 12",
    "entropy-collapse": "grpo_llm.py --lr 1e-3 --kl-loss-coef 0 --total-iterations 20",
    "entropy-low": "grpo_llm.py --temperature 0.3 --total-iterations 20",
    "entropy-rises": "ppo_llm.py --top-p 0.6 --entropy-coef 1 --total-iterations 12",
    "four-epochs": "ppo_llm.py --ppo-epochs 4 --total-iterations 12",
    "no-ratio": "benchmarks/broken.py no-ratio --ppo-epochs 4 --total-iterations 12",
    "memory-rollout": "ppo_llm.py --batch-size 4096 --rollout-batch-size 4096 --total-iterations 1 --eval-every 0",
    "memory-held": "ppo_llm.py --batch-size 4096 --rollout-batch-size 128 --total-iterations 1 --eval-every 0",
    "rollout-slow": "ppo_llm.py --rollout-batch-size 4 --total-iterations 3",
}
BUGS = "logprobs-late sampler-colder sampler-stale dropout-on eos-missing eos-untrained score-misplaced values-late"
BUGS = f"{BUGS} padding-whitened sign-flipped reference-moves mean-of-means groups-mixed".split()
SYMPTOMS |= {name: f"benchmarks/broken.py {name} --total-iterations 12" for name in BUGS}
# Healthy ones that the bands have not seen: what they trip is a false alarm.
SYMPTOMS |= {f"ppo-seed-{k}": f"ppo_llm.py --seed {k} --total-iterations 12" for k in (6, 7)}
SYMPTOMS |= {f"grpo-seed-{k}": f"grpo_llm.py --seed {k} --total-iterations 12" for k in (6, 7)}


def produce(name, results):
    """Run one symptom's command on one process; returns its exit code."""
    script, *flags = shlex.split(SYMPTOMS[name])
    with tempfile.TemporaryDirectory() as temporary:
        folder, errors = Path(temporary), Path(temporary) / "errors.txt"
        command = [sys.executable, str(ROOT / script), *flags, "--output-dir", temporary, "--run-name", "run"]
        command += ["--track", "none", "--save-every", "1000"]
        with open(errors, "w") as file:
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            run = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=file)
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="table, or some of " + ", ".join(SYMPTOMS))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of symptoms/, and of the bands' runs")
    parser.add_argument("--jobs", type=int, default=2, help="so many at a time")
    args = parser.parse_args()
    folder = args.results / "symptoms"
    folder.mkdir(parents=True, exist_ok=True)
    if args.names == ["table"]:
        return
    names = args.names or [name for name in SYMPTOMS if not (folder / f"{name}.csv").is_file()]

    def run(name):
        print(f"{name}: exit code {produce(name, folder)}", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run, names))


if __name__ == "__main__":
    main()
