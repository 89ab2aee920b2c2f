"""What does a run survive? kill -9 at random moments, and signals. tests/test_resume.py does some of it at small size.

    python benchmarks/campaigns/faults.py kills 50     kill -9 at random moments, then --resume: the same weights?
    python benchmarks/campaigns/faults.py signals 8    SIGTERM, SIGHUP in turn on a busy machine, then --resume

Each run has two processes on a CPU, the bundled model and small batches. The scripts take turns, together with the
fourth one that they compose and, in `kills`, a variant that saves additional state; --scripts selects fewer. They are
copied first, so you can edit them meanwhile. Every run is a line that is added to benchmarks/results/faults/kills.jsonl
or signals.jsonl; the pages there say what they mean. At the end all lines of the file are counted.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.append(str(Path(__file__).resolve().parents[1]))
import common

RESULTS = common.RESULTS / "faults"
SCRIPTS = "ppo_llm", "grpo_llm", "ppo_llm_fsdp", "grpo_llm_fsdp"
VARIANT = "adaptive_kl_llm"
FLAGS = "--batch-size 8 --minibatch-size 4 --max-response-length 24 --total-iterations 12 --eval-every 3 --save-every 1"
FLAGS += " --kl-reward-coef 0.02 --warmup-iterations 8"
OWN = {"ppo_llm": "", "grpo_llm": "--group-size 2 --batch-size 4 --estimator rloo", "ppo_llm_fsdp": "--lora-rank 4"}
OWN |= {"grpo_llm_fsdp": "--group-size 2 --batch-size 4 --rollout-params sharded"}
OWN |= {VARIANT: "--kl-target 0.001 --kl-horizon 40"}
FIRST = 0.3  # share of a run before which it is not killed: libraries are being loaded
HANGS = 90  # seconds after which what is left of a killed run is killed as well


def copy_scripts(folder, scripts):
    """The scripts, the fourth that git composes of them, the variant if it is among `scripts`, the model."""
    for name in scripts:
        path = common.find_script(name, folder)
        if path.parent != folder:
            shutil.copy(path, folder)
    common.write_lines(folder / "test.jsonl", common.read_lines(common.TINY / "test.jsonl")[:16])


def outcome(run_dir):
    """Hash of every weight of final/ and of the best model, and of all metrics that do not depend on the clock."""
    digest = hashlib.sha256()
    for file in sorted(run_dir.glob("final/**/*.safetensors")) + sorted(run_dir.glob("best/**/*.safetensors")):
        digest.update(str(file.relative_to(run_dir)).encode() + file.read_bytes())
    for metrics in common.read_lines(run_dir / "metrics.jsonl"):
        digest.update(repr([m for m in metrics.items() if not re.match("time/|memory/", m[0])]).encode())
    return digest.hexdigest()


class Run:
    """A run of two processes. It can be started more than once; what it prints is in one file."""

    def __init__(self, folder, script, name):
        self.folder, self.script, self.name = folder, script, name
        self.path = folder / "runs" / name

    def start(self, *more):
        words = [self.folder / f"{self.script}.py", *FLAGS.split(), *OWN[self.script].split()]
        words += ["--eval-dataset", self.folder / "test.jsonl", "--output-dir", self.path.parent]
        words += ["--run-name", self.name, *more]
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with open(self.folder / f"{self.name}.txt", "a") as log:
            options = {"stdout": log, "stderr": subprocess.STDOUT, "env": env, "start_new_session": True}
            self.launcher = subprocess.Popen(common.launcher(2, *words), **options)

    def wait(self, limit=600):
        """The exit code, or "hangs"."""
        try:
            return self.launcher.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            return "hangs"

    def until_gone(self, limit):
        """Waits until no process is left, `limit` seconds at most, and returns how many."""
        begin = time.monotonic()
        while (self.launcher.poll() is None or self.processes()) and time.monotonic() - begin < limit:
            time.sleep(0.05)
        return time.monotonic() - begin

    def processes(self):
        """All but the launcher."""
        mine = {self.name, str(self.path.parent)}
        lines = [(p, p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]  # or it has just ended
        return [process for process, words in lines if mine <= {*words} and process.pid != self.launcher.pid]

    def kill(self):
        """kill -9 for all processes, the launcher too."""
        for process in (*self.processes(), self.launcher):
            kill(process)
        self.launcher.wait()

    def lines(self):
        """How many lines of metrics there are; the first is from before training."""
        metrics = self.path / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def said(self):
        return (self.folder / f"{self.name}.txt").read_text()


def kill(process):
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
        process.kill()


# How a run is disturbed: starts it, and returns a row of the table when it has ended.


def killed(run, rng, turn, seconds):
    """At a moment from FIRST to the end of an undisturbed run: one of the workers, or all, as by a power failure."""
    victim, moment = ("worker", "all")[turn % 2], rng.uniform(FIRST, 1) * seconds
    run.start()
    time.sleep(moment)
    workers = run.processes() if victim == "worker" else []
    if workers:
        kill(rng.choice(workers))
    gone = run.until_gone(HANGS if workers else 0)
    run.kill()
    row = {"victim": victim, "moment": moment, "lines": run.lines(), "saving": bool([*run.path.rglob("unfinished")])}
    return row | {"finished": (run.path / "final").exists(), "gone": gone}


def stopped(run, rng, turn, seconds):
    """SIGTERM, then SIGHUP, to the launcher, while two other processes keep the machine busy."""
    sent = (signal.SIGTERM, signal.SIGHUP)[turn % 2]
    spin = f"import os\nwhile os.getppid() == {os.getpid()}: pass"  # until this process has gone
    busy = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    after = rng.randint(1, 8)
    run.start("--save-every", "0")
    while run.lines() <= after:
        assert run.launcher.poll() is None, run.said()[-3000:]
        time.sleep(0.02)
    time.sleep(rng.uniform(0, 2))
    run.launcher.send_signal(sent)
    begin = time.monotonic()
    row = {"signal": sent.name, "exit code": run.wait(300), "seconds to the end": f"{time.monotonic() - begin:.1f}"}
    for process in busy:
        process.kill()
    checkpoints = sorted(path.name for path in (run.path / "checkpoints").glob("step_*"))
    return row | {"iterations done": run.lines() - 1, "checkpoint": ", ".join(checkpoints)}


def disturb(what, count, folder, scripts):
    """Each script in turn is disturbed and resumed to its end, which should be that of a run that nobody touches."""
    log = RESULTS / f"{what}.jsonl"
    earlier = len(common.read_lines(log)) if log.exists() else 0
    rng, whole = random.Random(f"{what} {earlier}"), {}
    for script in scripts:
        run, begin = Run(folder, script, f"{script}-whole"), time.monotonic()
        run.start()
        assert run.wait(3600) == 0, run.said()[-3000:]
        whole[script] = outcome(run.path), time.monotonic() - begin
    for number in range(earlier, earlier + count):
        script = scripts[number % len(scripts)]
        expected, seconds = whole[script]
        run = Run(folder, script, f"{what}-{number}")
        row = {"kills": killed, "signals": stopped}[what](run, rng, number // len(scripts), seconds)
        run.start("--resume")
        row["code"] = run.wait()
        row["same"] = row["code"] == 0 and outcome(run.path) == expected
        if what == "kills":
            row["left"] = [str(path.relative_to(run.path)) for path in run.path.rglob("unfinished")]  # half written
        row = {"script": script} | row
        print(row, flush=True)
        if not row["same"]:
            print(run.said()[-3000:], flush=True)
        else:
            shutil.rmtree(run.path)
        with open(log, "a") as file:
            file.write(json.dumps(row) + "\n")
    disturbed = [row for row in common.read_lines(log) if not row.get("finished")]  # before they had ended
    for script, mine in common.grouped(disturbed, "script").items():
        print(f"{script}: {sum(row['same'] for row in mine)} of {len(mine)} the same in the end")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "signals"])
    parser.add_argument("count", type=int)
    parser.add_argument("--scripts", nargs="+", choices=[*SCRIPTS, VARIANT], help="(default: all)")
    args = parser.parse_args()
    scripts = args.scripts or [*SCRIPTS, *([VARIANT] if args.what == "kills" else [])]
    with tempfile.TemporaryDirectory() as folder:
        copy_scripts(Path(folder), scripts)
        disturb(args.what, args.count, Path(folder), scripts)


if __name__ == "__main__":
    main()
