"""What does a run survive? Kills, a slow process, long runs. tests/test_faults.py does some of it at small size.

    python benchmarks/campaigns/faults.py kills 50     kill -9 at random moments, then --resume: the same weights?
    python benchmarks/campaigns/faults.py signals 8    SIGTERM at random moments on a busy machine, then --resume
    python benchmarks/campaigns/faults.py grace 60     SIGTERM in an iteration of 60 s: how many iterations are lost?
    python benchmarks/campaigns/faults.py delays 8     one process 20 seconds late at random points: the same weights?
    python benchmarks/campaigns/faults.py disk 12      the disk is full, then larger; or it is read-only (as root)
    python benchmarks/campaigns/faults.py soak 2000    2,000 iterations with everything on: memory, speed, file handles
    python benchmarks/campaigns/faults.py inputs 81    what users get wrong in data, models, rewards, flags, checkpoints

Each run has two processes on a CPU (`inputs`: one), the embedded model and small batches. The scripts take turns,
together with the fourth one that they compose and, in `kills`, a variant that saves additional state; --scripts selects
fewer. They are copied first, so you can edit them meanwhile. Results go to benchmarks/results/faults/. `kills` appends
to its kills.jsonl, and `kills 0` only writes its table again.

All of `inputs` are rows of INPUTS: what is wrong, and what the run has to say or to do. What the tests try in the same
way is not among them. Of the extras, `test` brings psutil.
"""

import argparse
import contextlib
import functools
import hashlib
import http.server
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import datasets
import pandas
import psutil
import transformers
from safetensors.torch import load_file

sys.path.append(str(Path(__file__).resolve().parents[1]))
import common
import variants
from common import ROOT

RESULTS = common.RESULTS / "faults"
SCRIPTS = "ppo_llm", "grpo_llm", "ppo_llm_fsdp", "grpo_llm_fsdp"
VARIANT = "adaptive_kl"
FLAGS = "--batch-size 8 --minibatch-size 4 --max-response-length 24 --total-iterations 12 --eval-every 3 --save-every 1"
FLAGS += " --kl-reward-coef 0.02 --warmup-iterations 8"
OWN = {"ppo_llm": "", "grpo_llm": "--group-size 2 --batch-size 4 --estimator rloo", "ppo_llm_fsdp": "--lora-rank 4"}
OWN |= {"grpo_llm_fsdp": "--group-size 2 --batch-size 4 --rollout-params sharded"}
OWN |= {VARIANT: "--kl-target 0.001 --kl-horizon 40"}
FIRST = 0.3  # share of a run before which it is not killed: libraries are being loaded
HANGS = 90  # seconds after which what is left of a killed run is killed as well

# A reward that sleeps at random: a seed, a rank and how often are in the environment.
SLOW = """
import os, random, time
from ppo_llm import gsm8k

rng = random.Random(int(os.environ["SEED"]))

def late(responses, answers):
    if os.environ["RANK"] == os.environ["LATE"] and rng.random() < 0.3:
        time.sleep(20)
    return gsm8k(responses, answers)
"""

# Iteration TENTH of a run takes `SECONDS`, half of them in the reward: what each phase sleeps at its first step, or in
# the update at each of its steps. A file `NAME-PHASE` says that rank 0 has begun a phase.
MINUTE = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {folder!r})
import {script} as algo

unit = float(os.environ["SECONDS"]) / 60
name = sys.argv[sys.argv.index("--run-name") + 1]
now = 0


def slow(owner, function, phase, seconds):
    real = getattr(owner, function)

    def wrapped(*args, **kwargs):
        if now == {tenth}:
            if os.environ["RANK"] == "0":
                Path({folder!r}, f"{{name}}-{{phase}}").touch()
            time.sleep(seconds * unit)
        return real(*args, **kwargs)

    setattr(owner, function, wrapped)


def draw_prompts(rows, start, count, seed, real=algo.draw_prompts):
    global now
    now = start // count + 1
    return real(rows, start, count, seed)


algo.draw_prompts = draw_prompts
slow(algo, "generate", "rollout", 12)
slow(algo, "compute_scores", "reward", 30)
slow(algo, "aggregate", "update", 3)  # two optimizer steps of the actor and two of the critic
slow(algo.torch, "save", "checkpoint", 6)
algo.main(algo.parse_args())
"""
TENTH = 10  # --save-every is 10 by default: here the most is at stake
QUICK = "--max-response-length 4 --eval-rows 0 --track none"
MOMENTS = {"rollout": 2, "reward": 10, "update": 4, "checkpoint": 2}  # seconds after a phase has begun, of 60


def copy_scripts(folder, scripts):
    """The three scripts, the fourth that git composes of them, the variant if it is among `scripts`, the model."""
    for name in SCRIPTS[:3]:
        shutil.copy(ROOT / f"{name}.py", folder)
    merge = ["git", "merge-file", "-p", "grpo_llm.py", "ppo_llm.py", "ppo_llm_fsdp.py"]
    (folder / "grpo_llm_fsdp.py").write_bytes(subprocess.check_output(merge, cwd=folder))
    if VARIANT in scripts:
        (folder / f"{VARIANT}.py").write_text(variants.patched(VARIANT))
    (folder / "slow.py").write_text(SLOW)
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
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

    def __init__(self, folder, script, name, *flags, place=None):
        self.folder, self.script, self.name = folder, script, name
        self.path = (place or folder) / name
        self.flags = [*flags, "--output-dir", str(self.path.parent), "--run-name", name]
        self.seconds = None  # that an undisturbed one takes

    def start(self, *more, program=None, **environment):
        words = [program or self.folder / f"{self.script}.py", *FLAGS.split(), *OWN.get(self.script, "").split()]
        words += ["--eval-dataset", self.folder / "test.jsonl", *self.flags, *more]
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment
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

    def until(self, condition):
        """Waits until this function returns true, as it must while the run goes on."""
        while not condition():
            assert self.launcher.poll() is None, self.said()[-3000:]
            time.sleep(0.02)

    def until_gone(self, limit=math.inf):
        """Waits until no process is left, `limit` seconds at most, and returns how many."""
        begin = time.monotonic()
        while (self.launcher.poll() is None or self.processes()) and time.monotonic() - begin < limit:
            time.sleep(0.05)
        return time.monotonic() - begin

    def processes(self):
        """All but the launcher."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []  # a process that has just ended has none
            if {self.name, str(self.path.parent)} <= {*words} and "launch" not in words:
                found.append(process)
        return found

    def kill(self):
        """kill -9 for all processes, the launcher too."""
        for process in (*self.processes(), self.launcher):
            kill(process)
        self.launcher.wait()

    def lines(self):
        """How many lines of metrics there are; the first is from before training."""
        metrics = self.path / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def checkpoints(self):
        return sorted(path.name for path in (self.path / "checkpoints").glob("step_*"))

    def said(self):
        return (self.folder / f"{self.name}.txt").read_text()


def kill(process):
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
        process.kill()


def undisturbed(folder, scripts, *flags):
    """{script: (outcome, seconds)} of runs that nobody touches."""
    result = {}
    for script in scripts:
        run, begin = Run(folder, script, f"{script}-whole", *flags), time.monotonic()
        run.start()
        assert run.wait(3600) == 0, run.said()[-3000:]
        result[script] = outcome(run.path), time.monotonic() - begin
    return result


# How a run is disturbed. Each starts it, and yields a row of the table when it has ended; then it is resumed. What the
# docstring says is above the table, but for `killed`, which `count_kills` counts.


@contextlib.contextmanager
def killed(run, rng, turn):
    """At a moment from FIRST to the end of an undisturbed run: one of the workers, or the launcher."""
    victim, moment = ("worker", "launcher")[turn % 2], rng.uniform(FIRST, 1) * run.seconds
    run.start()
    time.sleep(moment)
    workers = run.processes()
    kill(rng.choice(workers) if victim == "worker" and workers else run.launcher)
    gone = run.until_gone(HANGS)
    run.kill()
    row = {"victim": victim, "moment": moment, "lines": run.lines(), "saving": bool([*run.path.rglob("unfinished")])}
    yield row | {"finished": (run.path / "final").exists(), "gone": gone}


@contextlib.contextmanager
def stopped(run, rng, turn):
    """SIGTERM to the launcher of two processes, while two others keep the machine busy; `--save-every 0`, so the only
    checkpoint is the one that the signal asks for; then `--resume`."""
    spin = f"import os\nwhile os.getppid() == {os.getpid()}: pass"  # until this process has gone
    busy = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    after = rng.randint(1, 8)
    run.start("--save-every", "0")
    run.until(lambda: run.lines() > after)
    time.sleep(rng.uniform(0, 2))
    run.launcher.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    row = {"exit code": run.wait(300), "seconds to the end": f"{time.monotonic() - begin:.1f}"}
    yield row | {"iterations done": run.lines() - 1, "checkpoint": ", ".join(run.checkpoints())}
    for process in busy:
        process.kill()


@contextlib.contextmanager
def late(run, rng, turn):
    """runs in which one process sleeps 20 seconds at random points."""
    rank, begin = str(turn % 2), time.monotonic()
    run.start("--reward", f"{run.folder}/slow.py:late", SEED=str(rng.randrange(1000)), LATE=rank)
    code = run.wait(3600)
    seconds = time.monotonic() - begin - run.seconds
    yield {"late process": rank, "seconds longer": round(seconds), "code": code}


@contextlib.contextmanager
def full(run, rng, turn):
    """two processes, a checkpoint every iteration, two kept; the disk is full, the run ends; on a larger disk
    `--resume` continues it. 'Disk': its size, of what the undisturbed run leaves; while it saves there is a third
    checkpoint."""
    files = (run.folder / f"{run.script}-whole").rglob("*")
    needed = sum(file.stat().st_size for file in files if file.is_file()) / 2**20
    size = rng.uniform(0.1, 1.2) * needed
    with mounted(run.path.parent, f"size={size * 1024:.0f}k"):  # whole numbers only
        run.start()
        code = run.wait(300)
        row = {"disk": f"{size:.0f} of {needed:.0f} MiB", "run": "ended" if code else "was done"}
        row |= {"it said": cause(run) if code else "", "iterations done": run.lines() - 1}
        row["checkpoints"] = ", ".join(run.checkpoints())
        subprocess.run(["mount", "-o", "remount,size=2g", str(run.path.parent)], check=True)
        yield row


@contextlib.contextmanager
def mounted(place, options):
    """A file system in memory. To mount it needs root."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def cause(run):
    """The last line that says what is wrong with the disk."""
    found = re.findall(r"(?m)^.*(?:No space left|Read-only file system|enforce fail|file write).*$", run.said())
    return found[-1].split("]: ")[-1][:80] if found else run.said()[-200:]


CAMPAIGNS = {"kills": killed, "signals": stopped, "delays": late, "disk": full}


def disturbed(what, count, folder, scripts):
    """Each script in turn is disturbed and resumed to its end, which should be that of the undisturbed run."""
    log, place = RESULTS / "kills.jsonl", folder / "disturbed"
    earlier = len(common.read_lines(log)) if what == "kills" and log.exists() else 0
    whole, rng, rows = undisturbed(folder, scripts if count else ()), random.Random(f"{what} {earlier}"), []
    for number in range(earlier, earlier + count):
        script = scripts[number % len(scripts)]
        run = Run(folder, script, f"{what}-{number}", place=place)
        run.seconds = whole[script][1]
        with CAMPAIGNS[what](run, rng, number // len(scripts)) as row:
            if what != "delays":
                run.start("--resume")
                row["code"] = run.wait()
            row["same"] = row["code"] == 0 and outcome(run.path) == whole[script][0]
            if what == "kills":
                row["left"] = [str(path.relative_to(run.path)) for path in run.path.rglob("unfinished")]  # half written
        rows.append({"script": script} | row)
        print(rows[-1], flush=True)
        if not row["same"]:
            print(run.said()[-3000:], flush=True)
        elif run.path.exists():
            shutil.rmtree(run.path)
        if what == "kills":
            with open(log, "a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    if what == "kills":
        return report(what, count_kills(common.read_lines(log)))
    about = " ".join(CAMPAIGNS[what].__doc__.split())
    text = f"`python benchmarks/campaigns/faults.py {what} {count}`: {about} 'Same': weights and metrics of the "
    text += "undisturbed run, bit for bit; 'code': the exit code in the end.\n\n"
    table = [["yes" if x is True else "NO" if x is False else x for x in row.values()] for row in rows]
    text += common.markdown([*rows[0]], table) + "\n"
    if what == "disk":
        text += "\nOn a disk that is read-only:\n\n"
        for script in scripts:
            with mounted(place, "size=1g,ro"):
                run = Run(folder, script, f"read-only-{script}", place=place)
                run.start()
                text += f"- {script}: {'ended' if run.wait(300) else 'RAN'}, {cause(run)}\n"
    report(what, text)


def report(what, text):
    (RESULTS / f"{what}.md").write_text(text)
    print(text)


def count_kills(rows):
    late, rows = [r for r in rows if r["finished"]], [r for r in rows if not r["finished"]]
    text = f"{sum(r['same'] for r in rows)} of {len(rows)} runs ended with the weights and metrics of the undisturbed "
    text += "run, bit for bit, after one kill -9 at a random moment and `--resume`.\n\n"
    lines = []
    for script in dict.fromkeys(r["script"] for r in rows):
        mine = [r for r in rows if r["script"] == script]
        counts = Counter(r["victim"] for r in mine)
        same = f"{sum(r['same'] for r in mine)} of {len(mine)}"
        lines.append([f"{script}.py", counts["worker"], counts["launcher"], same])
    text += common.markdown(["script", "worker killed", "launcher killed", "same at the end"], lines) + "\n"
    when = Counter("start" if r["lines"] == 0 else "saving" if r["saving"] else "iterations" for r in rows)
    gone = [r["gone"] for r in rows] or [0.0]
    text += f"\nKilled before the first line of metrics: {when['start']}; within the iterations: {when['iterations']}; "
    text += f"while a checkpoint or a model was being written: {when['saving']}. The last process of a killed run was "
    text += f"gone after {statistics.median(gone):.1f} s in the median, {max(gone):.1f} s at most; after {HANGS} s, "
    text += f"in {sum(x >= HANGS for x in gone)} runs, what was left was killed before the resume. {len(late)} more "
    text += "moments came when final/ was already there and are not counted "
    return text + f"({sum(r['same'] for r in late)} of them the same).\n"


def one_grace(run, seconds, moment, **environment):
    """SIGTERM to the launcher in iteration TENTH of `seconds`: (iterations lost, seconds until no process is left)."""
    program = run.folder / f"long_{run.script}.py"
    program.write_text(MINUTE.format(folder=str(run.folder), script=run.script, tenth=TENTH))
    run.start(program=program, SECONDS=str(seconds), **environment)
    run.until((run.folder / f"{run.name}-{moment}").exists)
    time.sleep(MOMENTS[moment] * seconds / 60)
    run.launcher.send_signal(signal.SIGTERM)
    gone = run.until_gone()
    saved = [int(name[5:11]) for name in run.checkpoints()]
    return max(0, TENTH - max(saved, default=0)), gone  # it may have begun the next


def grace(seconds, folder, scripts):
    """The launcher waits 30 s, its default, or 600 s. Four runs at a time, which sleep most of the time."""
    whole = undisturbed(folder, scripts, *QUICK.split(), "--save-every", "10")
    settings = [(10, 30), (10, 600), (1, 30)]
    cases = [(script, *setting, moment) for script in scripts for setting in settings for moment in MOMENTS]

    def cells(number, case):
        script, every, waits, moment = case
        run = Run(folder, script, f"grace-{number}", *QUICK.split(), "--save-every", str(every))
        lost, gone = one_grace(run, seconds, moment, TORCH_ELASTIC_SHUTDOWN_TIMEOUT=str(waits))
        run.start("--resume")
        same = run.wait(900) == 0 and outcome(run.path) == whole[script][0]
        return [f"{script}.py", every, f"{waits} s", moment, lost, f"{gone:.0f} s", "yes" if same else "NO"]

    with ThreadPoolExecutor(4) as pool:
        lines = list(pool.map(cells, *zip(*enumerate(cases))))
    text = f"""`python benchmarks/campaigns/faults.py grace {seconds}`: SIGTERM to the launcher of two processes in an
iteration of {seconds} s (rollout 12, reward 30, update 12, checkpoint 6 sixtieths of it). It is the {TENTH}th, so with
`--save-every 10` there is no checkpoint yet. One run a line. 'Same': after `--resume`, weights and metrics of the
undisturbed run, bit for bit.

"""
    head = ["script", "--save-every", "the launcher waits", "SIGTERM in", "iterations lost", "gone after", "same"]
    report("grace", text + common.markdown(head, lines) + "\n")


def soak(count, folder, _):
    """Only ppo_llm.py. Resident memory and open files of both ranks are read twice a second."""
    flags = ["--total-iterations", str(count), "--eval-every", "20", "--save-every", "10", "--entropy-coef", "0.001"]
    flags += ["--kl-loss-coef", "0.01", "--gradient-checkpointing", "--lr", "1e-5", "--critic-lr", "1e-4"]
    run, samples = Run(folder, "ppo_llm", "soak", *flags), []
    run.start()
    while run.launcher.poll() is None:
        time.sleep(0.5)
        for process in run.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                samples.append((run.lines(), process.memory_info().rss / 2**20, process.num_fds()))
    assert run.launcher.returncode == 0, run.said()[-3000:]
    metrics, lines = common.read_lines(run.path / "metrics.jsonl")[1:], []
    for quarter in range(4):
        low, high = quarter * count // 4, (quarter + 1) * count // 4
        seconds = statistics.median(m["time/iteration"] for m in metrics if low < m["step"] <= high)
        inside = [s for s in samples if low < s[0] - 1 <= high]
        memory, files = statistics.mean(s[1] for s in inside), max(s[2] for s in inside)
        lines.append([quarter + 1, f"{seconds:.3f}", f"{memory:.1f}", files])
    text = f"{count:,} iterations of ppo_llm.py on two processes: 8 prompts each, evaluation every 20 iterations, a "
    text += "checkpoint every 10, KL in the reward and in the loss, entropy bonus, gradient checkpointing, "
    text += "TensorBoard. Memory and files are of one process.\n\n"
    head = ["quarter", "seconds per iteration, median", "memory, MiB, mean", "open files, max"]
    report("soak", text + common.markdown(head, lines) + "\n")


# ------------------------------------------------------------------------------------------------------ malformed input


class Case(NamedTuple):
    """A run with something wrong, in a folder `c` of its own with the embedded model and 40 rows of its data."""

    pattern: str | None  # is in what the run says in the end; with None it should run to its end and train
    flags: str = ""  # with {c} for the folder
    data: list | str | None = None  # rows, or the text of a file, in place of the data
    name: str = "train.jsonl"  # of this file
    reward: str | None = None  # the text of a reward file with a function `score`
    template: str | None = None  # the text of a file for --chat-template
    earlier: str | None = None  # flags of a run that comes first
    change: Callable | None = None  # a function of the folder, which then changes it
    edit: tuple = ()  # a line of the script, and what it becomes
    says: str = ""  # is somewhere in what the run prints
    prompt: str | None = None  # of every completion
    only: tuple = SCRIPTS  # those that have what the case is about
    steps: int = 0  # iterations that may come before the run is refused
    online: bool = False  # there is a hub, which has no repository


RESUMED = "--resume --total-iterations 4"
fails, runs = Case, functools.partial(Case, None)


def resumes(pattern, flags=RESUMED, **more):
    """After a run with a checkpoint."""
    return Case(pattern, flags, earlier="--save-every 2", **more)


def row(question, answer):
    return {"question": question, "answer": answer}


# For `change`: functions of the folder.
def saved(*names):
    """A folder saved by `datasets` with splits of these names."""
    table = datasets.Dataset.from_list([row("1+1?", "2")] * 4)
    return lambda c: datasets.DatasetDict(dict.fromkeys(names, table)).save_to_disk(str(c / "saved"))


def renamed(old, new):
    return lambda c: (c / old).rename(c / new)


def cut(files):
    """The largest of these files loses its second half."""

    def change(c):
        file = max(c.glob(files), key=lambda path: path.stat().st_size)
        os.truncate(file, file.stat().st_size // 2)

    return change


def fields(**files):
    """JSON files of the model get these fields."""

    def change(c):
        for name, values in files.items():
            file = c / "model" / f"{name}.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def another(kind, auto_class="AutoModelForCausalLM", folder="model", **sizes):
    """A random model of another kind, with the same tokenizer."""

    def change(c):
        config = transformers.AutoConfig.for_model(kind, **{"vocab_size": 512} | sizes)
        shutil.copytree(common.TINY / "model", c / folder, dirs_exist_ok=True)
        getattr(transformers, auto_class).from_config(config).save_pretrained(c / folder)

    return change


PPO = "ppo_llm", "ppo_llm_fsdp"
VARIED = "def score(responses): return [len(set(x)) + 0.1 * len(x) for x in responses]"  # most differ
QUESTION = row("What is 1+1?", "#### 2")
EMOJI = "Wie viel sind 1+1? \u65e5\u672c\u8a9e, \U0001f642\u200d\U0001f525, \u0639\u0631\u0628\u064a, e\u0301"
PARTS = [{"role": "user", "content": [{"type": "text", "text": "1?"}]}]
SHOWS_PARTS = "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
EXACT = f"--reward {ROOT}/benchmarks/rewards.py:exact"
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}

INPUTS = {
    # files of data
    "a file of white space": fails('"train" corresponds to no data', data=" \n" * 20, says="read_splits(args.dataset)"),
    "an empty CSV": fails("No columns to parse from file", data="", name="train.csv", says="read_splits(args.dataset)"),
    "Parquet without rows": fails(
        "BatchSize must be greater than 0, got 0",
        "--dataset {c}/train.parquet",
        change=lambda c: pandas.DataFrame(row([], [])).to_parquet(c / "train.parquet"),
        says="read_splits(args.dataset)",
    ),
    "a file name with a typing error": fails(r"FileNotFoundError.*train\.josnl", "--dataset {c}/train.josnl"),
    "a file that may not be read": fails("PermissionError.*train", change=lambda c: (c / "train.jsonl").chmod(0)),
    "a line that is no JSON": fails("JSON parse error.* row", data='{"question": "1?", "answer": "1",}\n'),
    "JSON with a key twice": fails("question.* twice", data='{"question": "1?", "question": "2?", "answer": "1"}\n'),
    "other keys in every line": runs(
        data=[{"id": 1} | QUESTION, QUESTION | {"level": "easy"}, {"answer": "2", "question": "1?", "seen": None}]
    ),
    "Windows line ends, blank lines": runs(data=f"{json.dumps(QUESTION)}\r\n\n" * 2, prompt=QUESTION["question"]),
    "a byte order mark": runs(data="\ufeff" + json.dumps(QUESTION), prompt=QUESTION["question"]),
    "Latin-1 in place of UTF-8": fails(
        "UnicodeDecodeError: 'utf-8'",
        change=lambda c: (c / "train.jsonl").write_text(json.dumps(row("\u00e4", "2"), ensure_ascii=False), "latin-1"),
    ),
    "a CSV with semicolons": fails("no column .*question;answer", data="question;answer\n1+1?;2\n", name="train.csv"),
    "a CSV with a broken quote": fails("EOF inside string", data='question,answer\n"1+1?,2\n', name="train.csv"),
    "JSON that is one object": fails("no column question; .*'data'", data=[{"data": [QUESTION]}], name="train.json"),
    "a folder of files, not saved by datasets": runs("--dataset {c}"),
    "a saved dataset without a train split": fails("'train'", "--dataset {c}/saved", change=saved("validation")),
    "a hub id with a typing error": fails("openai/gsm8kk.* doesn't exist", "--dataset openai/gsm8kk", online=True),
    # rows and columns
    "messages with parts, and a chat template": fails(
        "row 1: a prompt is a text or a chat", data=[row(PARTS, "1")], template=SHOWS_PARTS
    ),
    "a question that is a list of lists": fails(
        "row 1: a prompt is a text or a chat", data=[row([["1+1?", "2"]], "2")]
    ),
    "an answer that is a time": fails("row 2: .* needs one number .*'12:30'", data=[QUESTION, row("2?", "12:30")]),
    "answers that are whole numbers": runs("--reward gsm8k", data=[row("1?", 5)]),
    "verl's column without ground_truth": fails(
        "needs one number .*'style': 'rule'", data=[row("?", {"style": "rule"})]
    ),
    "exact, and a CSV's 5 became 5.0": fails(
        r"TypeError: exact .*(5\.0|None)", EXACT, data="question,answer\n1?,5\n2?,\n", name="train.csv"
    ),
    "exact, and a date": fails("row 1: `datasets` made datetime", EXACT, data=[row("when?", "2024-05-01")]),
    "a question in many scripts": runs(data=[row(EMOJI, "2")], prompt=EMOJI),
    "fewer rows than a batch": runs(data=[QUESTION]),
    "test data without a split": fails("IndexError", "--eval-dataset {c}/saved", change=saved(), says="named.values()"),
    # models
    "no such model": fails("OSError.*modle", "--model {c}/modle"),
    "a hub id of a model with a typing error": fails("is not a local folder", "--model Qwen/Qwen-0.5BB", online=True),
    "a hub id of a model without a network": fails("find them in the cached files", "--model Qwen/Qwen2.5-0.5B"),
    "a model without tokenizer": fails(
        "every prompt is empty|tokenizer", change=lambda c: [path.unlink() for path in c.glob("model/tokenizer*")]
    ),
    "weights as a pickle": fails(
        r"no file named model\.safe", change=renamed("model/model.safetensors", "model/pytorch_model.bin")
    ),
    "an incomplete download": fails("SafetensorError.*incomplete", change=cut("model/model.safetensors")),
    "a pointer of git-lfs": fails(
        "SafetensorError.*header",
        change=lambda c: (c / "model/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n" * 3),
    ),
    "a config that is no JSON": fails(r"config\.json.* not a valid JSON", change=cut("model/config.json")),
    "what a LoRA run saved, as --critic-model": fails(
        "ValueError: Unrecognized model in .*critic",
        "--critic-model {c}/runs/run/final/critic --run-name second",
        earlier="--lora-rank 2",
        only=PPO,
    ),
    "an encoder": fails(
        r"sampler and training pass differ|model\.bert\.|cannot be loaded as BertModel",
        change=another("bert", "AutoModelForMaskedLM", **SMALL, initializer_range=0.5),
    ),
    "an encoder-decoder": fails(
        "T5Config", change=another("t5", "AutoModelForSeq2SeqLM", d_model=32, d_ff=32, num_layers=1, num_heads=2)
    ),
    "a tokenizer larger than the model": fails(
        "index out of range in self", change=another("gpt2", vocab_size=60, n_embd=32, n_head=2), says="embedding("
    ),
    "a config of other sizes than the weights": fails("mismatched_sizes", change=fields(config={"hidden_size": 64})),
    "a model with code of its own": fails(
        "model contains custom code",
        change=fields(config={"model_type": "m", "auto_map": {"AutoConfig": "m.C", "AutoModelForCausalLM": "m.M"}}),
    ),
    "a quantised model": fails(
        "GPTQ.* optimum", change=fields(config={"quantization_config": {"quant_method": "gptq", "bits": 4}})
    ),
    "a model without an EOS": runs(
        change=fields(
            tokenizer_config={"eos_token": None},
            config={"eos_token_id": None},
            generation_config={"eos_token_id": None},
        ),
        says="EOS ids []",
    ),
    "no such critic": fails("OSError.*critc", "--critic-model {c}/critc", only=PPO),
    "a critic from a model with a tied head": runs(
        "--critic-model {c}/critic", change=another("gpt2", folder="critic", n_embd=32, n_layer=1, n_head=2), only=PPO
    ),
    # templates
    "no such template": fails(r"FileNotFoundError.*no\.jinja", "--chat-template {c}/no.jinja"),
    "an empty template": runs(data=[QUESTION], template="", prompt=QUESTION["question"]),
    "a template that is JSON": runs(template='{"role": "user", "content": "..."}', says="1 distinct"),
    "a template with an open loop": fails("TemplateSyntaxError.*'for'", template="{% for m in messages %}"),
    "a template that reads what is not there": fails("UndefinedError.*parts", template="{{ messages[0].parts.text }}"),
    "a template that refuses": fails("TemplateError: not so", template="{{ raise_exception('not so') }}"),
    # reward files
    "a file without the function": fails("has no attribute 'score'", reward="def other(responses): ..."),
    "a reward without a function's name": fails(r"varied\.py is neither gsm8k nor path", "--reward {c}/varied.py"),
    "a reward file called datasets.py": fails(
        "another module is called datasets$",
        "--reward {c}/datasets.py:score",
        change=renamed("varied.py", "datasets.py"),
    ),
    "a reward file with a dot": fails(
        "No module named 'my'", "--reward {c}/my.reward.py:score", change=renamed("varied.py", "my.reward.py")
    ),
    "a reward with a typing error": fails("SyntaxError: expected ':'", reward="def score(responses) return 1"),
    "a reward that raises": fails("IndexError", reward="def score(responses): [][0]", says="[][0]"),
    "a reward that asks for what the data lack": fails(
        "missing 1 .*: 'level'", reward="def score(level): return level"
    ),
    "a reward that returns nothing": fails("'NoneType' object is not iterable", reward="def score(responses): pass"),
    "a reward of words": fails(
        r"finite numbers, not \('good',\)", reward="def score(responses): return ['good'] * len(responses)"
    ),
    "a reward that is infinite, later": fails(
        r"must be finite numbers, not \(inf,\)",
        reward="calls = []\ndef score(prompts): calls.append(0); return [1e999 if calls[1:] else 1] * len(prompts)",
        steps=1,
    ),
    "a reward that is a coroutine": fails("'coroutine' object is not", reward="async def score(responses): return [1]"),
    "a reward of many types": runs(
        reward="import decimal, numpy, torch\nkinds = bool, int, decimal.Decimal, numpy.float32, torch.tensor\n"
        "def score(responses): return [kind(len(x) % 2) for kind, x in zip(kinds * 9, responses)]"
    ),
    "a reward that prints and sleeps": runs(
        reward="import time\ndef score(prompts): print('hm'); time.sleep(1); return range(len(prompts))"
    ),
    # flags
    "a flag with a typing error": fails("Unrecognized options: --learning-rate", "--learning-rate 1"),
    "a value of another type": fails("--batch-size: invalid literal.*'four'", "--batch-size four"),
    "a choice that there is not": fails("invalid choice 'fp16' for argument '--dtype'", "--dtype fp16"),
    "--temperature 0": fails("ZeroDivisionError", "--temperature 0", says="1 / temperature"),
    "--lr nan": fails("--lr must be at least 0, but is nan$", "--lr nan"),
    "--lr inf": fails("iteration [12]: .* gradient norm .* nan", "--lr inf", steps=1),
    "a seed of 20 digits": fails(r"Seed must be between 0 and 2\*\*32", "--seed 12345678901234567890"),
    "a response far longer than the model's": fails("exceed the 512 positions", "--max-response-length 1000000"),
    # folders and checkpoints
    "a run that exists": fails("run folder .*model exists", "--output-dir {c} --run-name model"),
    "an --output-dir that is a file": fails(r"Error.*train\.jsonl", "--output-dir {c}/train.jsonl"),
    "an --output-dir that may not be written to": fails(
        "PermissionError.*runs", change=lambda c: (c / "runs").mkdir(0o555)
    ),
    "a run name with a slash": runs("--run-name july/first"),
    "a checkpoint cut short": resumes(
        "(?i)zip archive|incomplete|SafetensorError", change=cut("runs/run/checkpoints/**/*")
    ),
    "a checkpoint of another program": resumes(
        "files saved with `torch.save|another script",
        change=lambda c: (c / "runs/run/checkpoints/step_000005.pt").write_text("mine"),
    ),
    "a checkpoint of another --lora-rank": resumes("step_000002.* another .*--lora-rank", f"{RESUMED} --lora-rank 2"),
    "a checkpoint of a wider model": resumes(
        "loading state_dict|with another model",
        change=another("qwen2", hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4),
    ),
    # a changed line
    "a sampler whose logits are NaN": fails(
        "iteration 1: sampler and training pass differ by nan",
        edit=("logits = output.logits[:, -1]", "logits = output.logits[:, -1] * math.nan"),
    ),
}


class NoSuchRepository(http.server.BaseHTTPRequestHandler):
    """What the hub answers when it is asked for a repository that it does not have."""

    def do_GET(self):
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    do_HEAD = do_GET


def hub():
    """The address of such a hub."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), NoSuchRepository)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def run_alone(script, c, flags, **environment):
    """One process with a limit on memory and time, and with these flags behind those of every case."""
    words = f"--model {c}/model --dataset {c}/train.jsonl --batch-size 4 --minibatch-size 4 --eval-every 0"
    words = f"{words} --max-response-length 4 --total-iterations 2 --output-dir {c}/runs --run-name run".split()
    words += ["--group-size", "2"] * script.stem.startswith("grpo")
    command = [sys.executable, str(script), *words, *flags]
    if os.getuid() == 0:  # modes of files must hold for root, too
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_DATASETS_CACHE": f"{c}/.cache"}
    env |= {"HF_HUB_OFFLINE": "1"} | environment
    limits = {"timeout": 300, "preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))}
    return subprocess.run(command, cwd=c, env=env, capture_output=True, text=True, errors="replace", **limits)


def prepare(case, script, c):
    """Makes the folder of a case; returns the script that it runs, perhaps a changed copy, and the flags."""
    shutil.copytree(common.TINY / "model", c / "model")
    common.write_lines(c / "train.jsonl", common.read_lines(common.TINY / "train.jsonl")[:40])
    (c / "varied.py").write_text(VARIED)
    (c / "unfinished").write_text("mine")  # a name that the scripts use inside a run folder
    varied = ["--reward", f"{c}/varied.py:score"]
    flags = [*varied] if case.pattern is None else []
    if case.data is not None:
        if isinstance(case.data, list):
            common.write_lines(c / case.name, case.data)
        else:
            (c / case.name).write_text(case.data)
        flags += ["--dataset", f"{c}/{case.name}"]
    if case.reward is not None:
        (c / "reward.py").write_text(case.reward)
        flags += ["--reward", f"{c}/reward.py:score"]
    if case.template is not None:
        (c / "chat.jinja").write_text(case.template)
        flags += ["--chat-template", f"{c}/chat.jinja"]
    if case.earlier is not None:
        done = run_alone(script, c, [*varied, *shlex.split(case.earlier)])
        assert done.returncode == 0, last_words(done.stderr)
    if case.change:
        case.change(c)
    if case.edit:
        text = script.read_text()
        assert text.count(case.edit[0]) == 1, f"{case.edit[0]!r} is not in {script.name}, or twice"
        script = c / script.name
        script.write_text(text.replace(*case.edit))
    return script, flags + shlex.split(case.flags.replace("{c}", str(c)))


def last_words(text):
    """What a run ends with: our own sentence; or the messages of the exceptions, the causes before what they caused; or
    what tyro puts in a box."""
    text = re.sub(r"(?m)^\[rank\d\]: ?", "", text)
    for pattern in r"^error: .*", r"^[\w.]*(?:Error|Exception|Invalid|StopIteration)\b.*", r"^\u2502.*":
        found = re.findall(pattern, text, re.M)
        if found:
            return "\n".join(line.strip("\u2502\u2500 ") for line in found).strip()
    return ""


def contents(c):
    """{file: when it was written} of all that lies in the folder of a case."""
    files = [path for path in c.rglob("*") if path.is_file() and ".cache" not in path.parts]
    return {str(path.relative_to(c)): path.stat().st_mtime_ns for path in files}


def rows_in(c, pattern):
    """Lines of the .jsonl files of the run folder that match, in order."""
    return [row for file in sorted(c.glob(f"runs/**/{pattern}")) for row in common.read_lines(file)]


def last_step(c):
    """The last iteration in metrics.jsonl."""
    return max([row["step"] for row in rows_in(c, "metrics.jsonl")], default=0)


def fault_of(case, c):
    """What is wrong with a run that should train: nothing, if there is a line for every iteration, every number and
    weight that it left is finite, the prompts are right, and the weights moved if a gradient was there to move them."""
    lines = rows_in(c, "metrics.jsonl")
    if [row["step"] for row in lines] != [0, 1, 2]:
        return f"iterations {[row['step'] for row in lines]}"
    if not all(math.isfinite(number) for row in lines for number in row.values()):
        return "a metric that is not finite"
    for file in c.glob("runs/**/*.safetensors"):
        if not all(weight.isfinite().all() for weight in load_file(file).values()):
            return f"weights in {file.name} that are not finite"
    prompts = {row["prompt"] for row in rows_in(c, "completions/step_*.jsonl")}
    if case.prompt is not None and prompts != {case.prompt}:
        return f"prompts {prompts}"
    pushed = any(row["actor/grad_norm"] > 0 for row in lines[1:])
    before = load_file(c / "model/model.safetensors")
    after = load_file(next(c.glob("runs/**/final/model.safetensors")))
    moved = any(not after[key].equal(before[key]) for key in after)
    return "" if pushed == moved else f"a gradient: {pushed}, but weights that moved: {moved}"


def one_input(name, script, folder):
    """Runs a case in `folder`: (verdict, what it said). Verdicts: "named" (it ended before it trained, named the cause
    and left the user's files alone), "ran" (as it should), or what is wrong."""
    case = INPUTS[name]
    try:
        script, flags = prepare(case, script, folder)
    except AssertionError as error:
        return "NOT PREPARED", str(error)
    before, step = contents(folder), last_step(folder)
    environment = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub()} if case.online else {}
    try:
        done = run_alone(script, folder, flags, **environment)
    except subprocess.TimeoutExpired:
        return "HANGS", ""
    said, after = last_words(done.stderr), contents(folder)
    touched = [name for name, when in before.items() if after.get(name) != when]
    is_said = case.says in done.stdout + done.stderr
    if touched:
        return "TOUCHED", f"{', '.join(touched)}; {said}"
    if case.pattern is None:
        if done.returncode != 0:
            return "DID NOT RUN", said
        fault = fault_of(case, folder) if is_said else f"without {case.says}"
        return ("RAN WRONGLY", fault) if fault else ("ran", "")
    if done.returncode == 0 or last_step(folder) > step + case.steps:
        return "TRAINED", said
    if done.returncode < 0:
        return "CRASHED", said
    match = re.search(case.pattern, said, re.S | re.M)
    if match and is_said:
        return "named", said[said.rfind("\n", 0, match.start() + 1) + 1 :]  # from the line on that names the cause
    return "NOT NAMED", said


def inputs(count, folder, scripts):
    """Each case in a process of its own, with one of the scripts in turn; two cases at a time."""
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()

    def run(number, name):
        only = INPUTS[name].only
        able = [script for script in scripts if script in only] or only
        script, place = able[number % len(able)], folder / "cases" / str(number)
        place.mkdir(parents=True)
        verdict, said = one_input(name, folder / f"{script}.py", place)
        for path in place, folder, sys.prefix, sys.base_prefix:
            said = said.replace(str(path), "..")
        cells = name, script, verdict, said.replace("\n", " ")[:160].replace("|", "/")
        print(number, *cells, sep=" | ", flush=True)
        shutil.rmtree(place)
        return cells

    with ThreadPoolExecutor(2) as pool:
        lines = list(pool.map(run, *zip(*enumerate(list(INPUTS)[:count]))))
    found = Counter(verdict for _, _, verdict, _ in lines)
    others = "".join(f"; **{found[bad]} {bad}**" for bad in found if bad not in ("named", "ran"))
    text = (
        f"`python benchmarks/campaigns/faults.py inputs {count}`: what users get wrong, and how a run of one process "
    )
    text += (
        f"says so (the line that names it). {found['named']} of {len(lines)} ended before they trained on it, named "
    )
    text += f"the cause and left the user's files as they were; {found['ran']} ran, as they should"
    text += f"{others or '; none hung or trained on what it should not'}.\n\n"
    report("inputs", text + common.markdown(["input", "script", "verdict", "what it said"], lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*CAMPAIGNS, "grace", "soak", "inputs"])
    parser.add_argument("count", type=int)
    parser.add_argument("--scripts", nargs="+", choices=[*SCRIPTS, VARIANT])
    options = parser.parse_args()
    scripts = options.scripts or (*SCRIPTS, *([VARIANT] if options.what == "kills" else []))
    RESULTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        copy_scripts(place, scripts)
        if options.what in CAMPAIGNS:
            disturbed(options.what, options.count, place, scripts)
        else:
            {"grace": grace, "soak": soak, "inputs": inputs}[options.what](options.count, place, scripts)
