"""Produce what note 9 explains: each symptom is one command on the embedded default, kept as a small csv.

    python benchmarks/symptoms.py                   all of them, about half an hour on two cores
    python benchmarks/symptoms.py ratio-one nan     only these

In benchmarks/results/symptoms/ it writes NAME.csv (the metrics, four significant digits) and NAME.txt (the last line
that the run printed when it stopped by itself). notes/figures_09.py draws them; a test checks that the commands of the
note are these.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import plot
from learning import write_compact

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "symptoms"
SYMPTOMS = {
    "reward-zero": "grpo_llm.py --reward exact --answer-column question --total-iterations 8",
    "reward-truncated": "ppo_llm.py --max-response-length 12 --total-iterations 12",
    "loss-zero": "grpo_llm.py --kl-loss-coef 0 --minibatch-size 256 --total-iterations 8",
    "ratio-one": "ppo_llm.py --minibatch-size 256 --total-iterations 12",
    "kl-negative": "grpo_llm.py --top-p 0.6 --entropy-coef 0.1 --reward exact --answer-column question"
    " --lr 3e-5 --total-iterations 12",
    "entropy-explodes": "ppo_llm.py --top-p 0.6 --entropy-coef 1 --total-iterations 12",
    "kl-explodes": "ppo_llm.py --lr 3e-3 --total-iterations 12",
    "nan": "ppo_llm.py --lr 1e18 --total-iterations 4",
    "critic-flat": "ppo_llm.py --critic-lr 1e-7 --total-iterations 12",
    "entropy-collapse": "grpo_llm.py --lr 1e-3 --kl-loss-coef 0 --total-iterations 20",
    "entropy-held": "grpo_llm.py --lr 1e-3 --kl-loss-coef 0 --entropy-coef 0.02 --total-iterations 20",
    "entropy-low": "grpo_llm.py --temperature 0.3 --total-iterations 20",
    "memory-rollout": "ppo_llm.py --batch-size 4096 --rollout-batch-size 4096 --total-iterations 1 --eval-every 0",
    "memory-held": "ppo_llm.py --batch-size 4096 --rollout-batch-size 128 --total-iterations 1 --eval-every 0",
    "rollout-slow": "ppo_llm.py --rollout-batch-size 4 --total-iterations 3",
    "rollout-long": "ppo_llm.py --temperature 5 --max-response-length 400 --total-iterations 2",
}


def produce(name, folder):
    """Run one symptom's command on one process; returns its exit code."""
    script, *flags = shlex.split(SYMPTOMS[name])
    command = [sys.executable, str(ROOT / script), *flags, "--output-dir", str(folder), "--run-name", "run"]
    command += ["--track", "none", "--save-every", "1000"]
    with open(folder / "errors.txt", "w") as errors:
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        run = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=errors)
        _, status, usage = os.wait4(run.pid, 0)
    run.returncode = code = os.waitstatus_to_exitcode(status)
    if (folder / "run" / "metrics.jsonl").is_file():
        rows = plot.read_run(folder / "run")
        if not rows[-1].get("memory/peak_gib"):  # the scripts measure that of a GPU only
            rows[-1]["memory/peak_gib"] = usage.ru_maxrss / 2**20
        write_compact(rows, RESULTS / f"{name}.csv")
    if code != 0:
        last = (folder / "errors.txt").read_text().strip().splitlines()[-1]
        (RESULTS / f"{name}.txt").write_text(last.replace(str(folder / "run"), f"runs/{name}") + "\n")
    return code


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(SYMPTOMS), help="of " + ", ".join(SYMPTOMS))
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in parser.parse_args().names:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}: exit code {produce(name, Path(folder))}", flush=True)


if __name__ == "__main__":
    main()
