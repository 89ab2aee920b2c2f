"""What does a run survive? Kills, a slow process, long runs. tests/test_faults.py does some of it at small size.

    python benchmarks/campaigns/faults.py kills 50     kill -9 at random moments, then --resume: the same weights?
    python benchmarks/campaigns/faults.py signals 8    SIGTERM at random moments on a busy machine, then --resume
    python benchmarks/campaigns/faults.py grace 60     SIGTERM in an iteration of 60 s: how many iterations are lost?
    python benchmarks/campaigns/faults.py delays 8     one process 20 seconds late at random points: the same weights?
    python benchmarks/campaigns/faults.py disk 12      the disk is full, then larger; or it is read-only (as root)
    python benchmarks/campaigns/faults.py soak 2000    2,000 iterations with everything on: memory, speed, file handles
    python benchmarks/campaigns/faults.py inputs 183   what users get wrong in data, models, rewards, flags, checkpoints

Each run has two processes on a CPU (`inputs`: one), the embedded model and small batches. The scripts take turns,
together with the fourth one that they compose and, in `kills`, a variant that saves additional state; --scripts selects
fewer. They are copied first, so you can edit them meanwhile. Results go to benchmarks/results/faults/. `kills` appends
to its kills.jsonl, and `kills 0` only writes its table again.

`kills`, `signals`, `delays` and `disk` are rows of CAMPAIGNS: how a run is disturbed, and what the table says. All of
`inputs` are rows of INPUTS: what is wrong, and what the run has to say or to do.
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
import os, random, sys, time
sys.path.insert(0, {folder!r})
import {script} as algo

real, rng = algo.compute_scores, random.Random(int(os.environ["SEED"]))

def compute_scores(*args):
    if os.environ["RANK"] == os.environ["LATE"] and rng.random() < 0.3:
        time.sleep(20)
    return real(*args)

algo.compute_scores = compute_scores
algo.main(algo.parse_args())
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

    def processes(self):
        """Their ids, without the launcher's."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if self.name.encode() in words and b"launch" not in words:
                found.append(int(path.parent.name))
        return sorted(found)

    def kill(self):
        """kill -9 for all processes, the launcher too."""
        for pid in (*self.processes(), self.launcher.pid):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(pid, signal.SIGKILL)
        self.launcher.wait()

    def lines(self):
        """How many lines of metrics there are; the first is from before training."""
        metrics = self.path / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def checkpoints(self):
        return ", ".join(sorted(path.name for path in (self.path / "checkpoints").glob("step_*")))

    def said(self):
        return (self.folder / f"{self.name}.txt").read_text()


def undisturbed(folder, scripts, *flags):
    """{script: (outcome, seconds)} of runs that nobody touches."""
    result = {}
    for script in scripts:
        run, begin = Run(folder, script, f"{script}-whole", *flags), time.monotonic()
        run.start()
        assert run.wait(3600) == 0, run.said()[-3000:]
        result[script] = outcome(run.path), time.monotonic() - begin
    return result


# How a run is disturbed. Each starts it, and yields a row of the table when it has ended; then it is resumed.


@contextlib.contextmanager
def killed(run, rng, turn):
    """At a moment from FIRST to the end of an undisturbed run: one of the workers, or the launcher."""
    victim, moment = ("worker", "launcher")[turn % 2], rng.uniform(FIRST, 1) * run.seconds
    run.start()
    time.sleep(moment)
    workers = run.processes()
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.kill(rng.choice(workers) if victim == "worker" and workers else run.launcher.pid, signal.SIGKILL)
    begin = time.monotonic()
    while (run.launcher.poll() is None or run.processes()) and time.monotonic() - begin < HANGS:
        time.sleep(0.05)
    gone = time.monotonic() - begin
    run.kill()
    row = {"victim": victim, "moment": moment, "lines": run.lines(), "saving": bool([*run.path.rglob("unfinished")])}
    yield row | {"finished": (run.path / "final").exists(), "gone": gone}


@contextlib.contextmanager
def stopped(run, rng, turn):
    """SIGTERM to the launcher, as a scheduler sends it, while two other processes keep the CPU busy."""
    spin = f"import os\nwhile os.getppid() == {os.getpid()}: pass"  # until this process has gone
    busy = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    after = rng.randint(1, 8)
    run.start("--save-every", "0")
    while run.lines() <= after:
        assert run.launcher.poll() is None, run.said()[-3000:]
        time.sleep(0.1)
    time.sleep(rng.uniform(0, 2))
    run.launcher.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    row = {"exit code": run.wait(300), "seconds to the end": f"{time.monotonic() - begin:.1f}"}
    yield row | {"iterations done": run.lines() - 1, "checkpoint": run.checkpoints()}
    for process in busy:
        process.kill()


@contextlib.contextmanager
def late(run, rng, turn):
    """One process sleeps 20 seconds at random points."""
    program = run.folder / f"late_{run.script}.py"
    program.write_text(SLOW.format(folder=str(run.folder), script=run.script))
    rank, begin = str(turn % 2), time.monotonic()
    run.start(program=program, SEED=str(rng.randrange(1000)), LATE=rank)
    code = run.wait(3600)
    seconds = time.monotonic() - begin - run.seconds
    yield {"late process": rank, "seconds longer": round(seconds), "code": code}


@contextlib.contextmanager
def full(run, rng, turn):
    """In a file system in memory (to mount it needs root) that is full before the run ends, and then larger."""
    files = (run.folder / f"{run.script}-whole").rglob("*")
    needed = sum(file.stat().st_size for file in files if file.is_file()) / 2**20
    size = rng.uniform(0.1, 1.2) * needed
    with mounted(run.path.parent, f"size={size * 1024:.0f}k"):  # whole numbers only
        run.start()
        code = run.wait(300)
        row = {"disk": f"{size:.0f} of {needed:.0f} MiB", "run": "ended" if code else "was done"}
        row |= {"it said": cause(run) if code else "", "iterations done": run.lines() - 1}
        row["checkpoints"] = run.checkpoints()
        subprocess.run(["mount", "-o", "remount,size=2g", str(run.path.parent)], check=True)
        yield row


@contextlib.contextmanager
def mounted(place, options):
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


class Campaign(NamedTuple):
    disturb: Callable
    about: str  # the table
    resumes: bool = True
    place: str = "."  # of the runs


CAMPAIGNS = {
    "kills": Campaign(killed, ""),  # counted by `count_kills`
    "signals": Campaign(
        stopped,
        "SIGTERM to the launcher of two processes, while two others keep the machine busy; `--save-every 0`, so the "
        "only checkpoint is the one that the signal asks for; then `--resume`.",
    ),
    "delays": Campaign(late, "runs in which one process sleeps 20 seconds at random points.", resumes=False),
    "disk": Campaign(
        full,
        "two processes, a checkpoint every iteration, two kept; the disk is full, the run ends; on a larger disk "
        "`--resume` continues it. 'Disk': its size, of what the undisturbed run leaves; while it saves there is a "
        "third checkpoint.",
        place="disk",
    ),
}


def disturbed(what, count, folder, scripts):
    """Each script in turn is disturbed and resumed to its end, which should be that of the undisturbed run."""
    campaign, log = CAMPAIGNS[what], RESULTS / "kills.jsonl"
    earlier = len(common.read_lines(log)) if what == "kills" and log.exists() else 0
    whole, rng, rows = undisturbed(folder, scripts if count else ()), random.Random(f"{what} {earlier}"), []
    for number in range(earlier, earlier + count):
        script = scripts[number % len(scripts)]
        run = Run(folder, script, f"{what}-{number}", place=folder / campaign.place)
        run.seconds = whole[script][1]
        with campaign.disturb(run, rng, number // len(scripts)) as row:
            if campaign.resumes:
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
    text = f"`python benchmarks/campaigns/faults.py {what} {count}`: {campaign.about} 'Same': weights and metrics of "
    text += "the undisturbed run, bit for bit; 'code': the exit code in the end.\n\n"
    table = [["yes" if x is True else "NO" if x is False else x for x in row.values()] for row in rows]
    text += common.markdown([*rows[0]], table) + "\n"
    if what == "disk":
        text += "\nOn a disk that is read-only:\n\n"
        for script in scripts:
            with mounted(folder / "disk", "size=1g,ro"):
                run = Run(folder, script, f"read-only-{script}", place=folder / "disk")
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
    begun = run.folder / f"{run.name}-{moment}"
    while not begun.exists():
        assert run.launcher.poll() is None, run.said()[-3000:]
        time.sleep(0.02)
    time.sleep(MOMENTS[moment] * seconds / 60)
    begin = time.time()
    run.launcher.send_signal(signal.SIGTERM)
    while run.launcher.poll() is None or run.processes():
        time.sleep(0.05)
    saved = [int(path.stem[5:]) for path in (run.path / "checkpoints").glob("step_*")]
    return max(0, TENTH - max(saved, default=0)), time.time() - begin  # it may have begun the next


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
        try:
            for pid in run.processes():
                status = Path(f"/proc/{pid}/status").read_text()
                memory = int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024
                samples.append((run.lines(), memory, len(os.listdir(f"/proc/{pid}/fd"))))
        except (OSError, TypeError):
            continue  # it has not begun or has just ended
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
# Of the kinds that users make. Each case prepares its folder `c`, in which a model, train.jsonl and a reward file lie,
# for a run of `script`, and adds flags. What the run says in the end must match the pattern, and `check` must hold for
# what it left (without a pattern it should run to its end and train).


class Case(NamedTuple):
    prepare: Callable | str  # (c, script) -> flags; or only flags
    pattern: str | None = None
    check: Callable | None = None  # (c, all that it said) -> whether it is right
    only: tuple = SCRIPTS  # those that have what the case is about
    steps: int = 0  # iterations it may do before it is refused
    online: bool = False  # there is a hub, which has no repository


fails = Case


def runs(prepare, check=None, **more):
    return Case(prepare, None, check, **more)


def preparation(function):
    """The table calls it with its own words; the case then with its folder and its script."""

    @functools.wraps(function)
    def with_words(*words, **options):
        return lambda c, script: function(c, script, *words, **options)

    return with_words


def prepared(prepare, c, script):
    """The flags, `{c}` in them being the folder."""
    if callable(prepare):
        return prepare(c, script)
    return [word.replace("{c}", str(c)) for word in shlex.split(prepare)]


PPO = "ppo_llm", "ppo_llm_fsdp"
GRPO = "grpo_llm", "grpo_llm_fsdp"
REPLICATED = "ppo_llm", "grpo_llm"
SHARDED = "ppo_llm_fsdp", "grpo_llm_fsdp"
VARIED = (
    "def score(responses): return [len(set(x)) + 0.1 * len(x) for x in responses]"  # most responses score differently
)


@preparation
def rows(c, script, *lines, name="train.jsonl", flags=""):
    """These rows in place of the data; strings as they are."""
    (c / name).write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return ["--dataset", f"{c}/{name}", *prepared(flags, c, script)]


def row(question, answer):
    return {"question": question, "answer": answer}


def prompts(*found):
    """Rows whose prompts are these, whatever they are."""
    lines = [{"prompt": prompt, "answer": str(number)} for number, prompt in enumerate(found, 1)]
    return rows(*lines, flags="--prompt-column prompt")


@preparation
def content(c, script, content, name="train.jsonl"):
    """These bytes in place of the data."""
    (c / name).write_bytes(content)
    return ["--dataset", f"{c}/{name}"]


@preparation
def parquet(c, script, columns):
    """A table of these columns in place of the data."""
    import pandas

    pandas.DataFrame(columns).to_parquet(c / "train.parquet")
    return ["--dataset", f"{c}/train.parquet"]


@preparation
def test_rows(c, script, *lines, flags=""):
    """Test data of these rows."""
    rows(*lines, name="test.jsonl")(c, script)
    return ["--eval-dataset", f"{c}/test.jsonl", *prepared(flags, c, script)]


@preparation
def splits(c, script, flag, *names):
    """A folder saved by `datasets` with splits of these names, each of which asks a question of its own."""
    import datasets

    datasets.disable_progress_bars()
    tables = {name: datasets.Dataset.from_list([row(f"{name}?", "2")] * 4) for name in names}
    datasets.DatasetDict(tables).save_to_disk(str(c / "saved"))
    return [flag, f"{c}/saved"]


@preparation
def reward(c, script, text, name="reward.py:score"):
    """A reward file."""
    file = c / name.split(":")[0]
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return ["--reward", f"{c}/{name}"]


def scores(body, name="reward.py:score"):
    """A reward file of one function with this body."""
    return reward(f"def score(responses): {body}", name)


@preparation
def relative(c, script, prepare):
    """The same with paths that begin in the folder in which the run starts."""
    return [word.removeprefix(f"{c}/") for word in prepare(c, script)]


@preparation
def template(c, script, text):
    """A file for --chat-template."""
    (c / "chat.jinja").write_text(text)
    return ["--chat-template", f"{c}/chat.jinja"]


@preparation
def together(c, script, *preparations):
    return [word for each in preparations for word in prepared(each, c, script)]


@preparation
def model(c, script, *changes, flags=""):
    """The model folder after these changes."""
    for change in changes:
        change(c / "model")
    return prepared(flags, c, script)


def fields(file, **values):
    """For `model`: a JSON file of it with these fields."""

    def change(folder):
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | values))

    return change


def eos(ids, text="<|endoftext|>"):
    """The model with these EOS ids in its config, others in its generation config, and this EOS of its tokenizer."""
    changes = [fields("tokenizer_config.json", eos_token=text), fields("config.json", eos_token_id=ids)]
    return model(*changes, fields("generation_config.json", eos_token_id=ids and ids[:1]), flags=LONGER)


@preparation
def another(c, script, kind, auto_class, folder="model", **sizes):
    """A random model of another kind, with the same tokenizer: in the model's place, or a critic."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.for_model(kind, **{"vocab_size": 512} | sizes)
    if folder == "critic":
        shutil.copytree(c / "model", c / folder)
    getattr(transformers, auto_class).from_config(config).save_pretrained(c / folder)
    return ["--critic-model", f"{c}/{folder}"] if folder == "critic" else []


def cut(place, share=0.5):
    """For `model`: a file that lost its end."""

    def change(folder):
        file = next(folder.glob(place))
        file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])

    return change


@preparation
def changed(c, script, *edits):
    """A copy of the script in which this text is replaced by that, for each pair. It lies beside the data."""
    text = script.read_text()
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} is not in {script.name}, or twice"
        text = text.replace(old, new)
    (c / script.name).write_text(text)
    return ["--reward", f"{c}/varied.py:score", "--total-iterations", "4", "--lr", "0.01"]


@preparation
def resumed(c, script, change=lambda path: None, flags="", first="", by=lambda script: script):
    """A run of two iterations whose newest checkpoint is changed, then --resume. The first may be `by` another."""
    run_well(by(script), c, "--save-every", "1", *shlex.split(first))
    change(next(c.glob("runs/run/checkpoints/step_000002*")))
    return ["--resume", "--total-iterations", "4", *prepared(flags, c, script)]


def sibling(old, new):
    """The script whose name differs in this."""
    return lambda script: script.with_stem(script.stem.replace(old, new))


@preparation
def adapter(c, script, place, flag):
    """What a LoRA run left in that place, given to this flag."""
    run_well(script, c, "--lora-rank", "2")
    (c / "runs/run").rename(c / "earlier")
    return [flag, f"{c}/earlier/{place}"]


# For `resumed`: what becomes of the newest checkpoint.


def remove(path):
    path.unlink() if path.is_file() else shutil.rmtree(path)


def shortened(share):
    """Its file, or the shards of the policy, lost their end."""

    def change(path):
        cut(path.name if path.is_file() else f"{path.name}/*.safetensors", share)(path.parent)

    return change


def half_written(path):
    """Next to it is the beginning of another, and of a model."""
    model = path.parents[1] / "unfinished"
    model.mkdir()
    (model / "model.safetensors").write_text("half")
    checkpoint = path.with_name("unfinished")
    if path.is_dir():
        checkpoint.mkdir()
        checkpoint = checkpoint / "model.safetensors"
    checkpoint.write_text("half")


def as_in_03(path):
    """A folder, in which a replicated script had one file."""
    remove(path)
    folder = path.with_name("step_000002")
    folder.mkdir()
    (folder / "checkpoint.pt").write_bytes(b"tensors")


def wider(path):
    """Meanwhile --model is another."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    another("qwen2", "AutoModelForCausalLM", **sizes, num_key_value_heads=4)(path.parents[3], None)


@preparation
def locked(c, script, name, mode):
    """A file or folder that may not be written to, or not be read. `run_alone` sees to it that root may not either."""
    if not (c / name).exists():
        (c / name).mkdir()
    (c / name).chmod(mode)
    return []


# For `check`: what a run left.


def rows_in(c, pattern):
    """Lines of the .jsonl files of the run folder that match, in order."""
    return [row for file in sorted(c.glob(f"runs/**/{pattern}")) for row in common.read_lines(file)]


def prompts_are(right, files="completions/step_*.jsonl"):
    """Every prompt of the completions is as it should be."""

    def check(c, said):
        prompts = [row["prompt"] for row in rows_in(c, files)]
        return len(prompts) > 0 and all(map(right, prompts))

    return check


def prompt_is(text):
    return prompts_are(lambda prompt: prompt == text)


def is_evaluated(c, said):
    return all("eval/score" in (rows_in(c, "metrics.jsonl") or [{}])[place] for place in (0, -1))


def evaluates(text):
    """It was evaluated on prompts that are this text."""
    right = prompts_are(lambda prompt: prompt == text, "completions/eval_*.jsonl")
    return lambda c, said: is_evaluated(c, said) and right(c, said)


def says(text):
    """In some place of all that it printed."""
    return lambda c, said: text in said


def truncates(right):
    """The share of responses without an EOS, in the last iteration."""
    return lambda c, said: right(rows_in(c, "metrics.jsonl")[-1]["response/truncated_frac"])


def goes_on(c, said):
    """16 prompts of 40 were drawn, in four steps: 4, 4 and, with another batch size, 8; none twice."""
    prompts = [row["prompt"] for row in rows_in(c, "completions/step_*.jsonl")]
    return len(set(prompts)) == 16


QUESTION = {"question": "What is 1+1?", "answer": "#### 2"}
CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}]
SHAREGPT = [{"from": "human", "value": "1?"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "1?"}]}]
SHOWS_PARTS = "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA = {"num_key_value_heads": 2} | SMALL
LONG = {"question": "many words " * 400, "answer": "#### 2"}
EMOJI = "Wie viel sind 1+1? \u65e5\u672c\u8a9e, \U0001f642\u200d\U0001f525, \u0639\u0631\u0628\u064a, e\u0301"
REQUEST = ' Let\'s think step by step and output the final answer after "####".'  # verl's
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}<bot>"
NO_PROMPT = "row 1: a prompt is a text or a chat"
NO_NUMBER = "needs one number as the reference answer, not"
LONGER = "--max-response-length 64"
EXACT = f"--reward {ROOT}/benchmarks/rewards.py:exact"

# Lines that the scripts share, for copies in which they are changed.
TRAIN = "read_splits(args.dataset)"
LOSS = "loss = aggregate(mb_losses, mask[mb], args.loss_agg"  # of the actor
LOGITS = "logits = output.logits[:, -1]"
ROLLOUT = "responses = rollout(rows, uniforms, args.temperature)"
ADDED = 'policy_model = load_model(args.model, AutoModelForCausalLM, args.lora_rank, task_type="CAUSAL_LM")'
SAMPLER = "responses += generate(policy_model,", "responses += generate(sampler,"


def gold(text):
    """A reference answer of which no part may be taken for the whole."""
    pattern = f"row 2: --reward gsm8k {NO_NUMBER} {re.escape(repr(text))}"
    return fails(rows(QUESTION, row("2?", text)), pattern)


def size(flag, value, least, only=SCRIPTS):
    """A flag below its least value."""
    name = flag.replace("-", "[-_]")
    pattern = rf"--{name} must be at least {re.escape(least)}, but is {re.escape(value)}$"
    return fails(f"--{flag} {value}", pattern, only=only)


def exact_gold(prepare, shown):
    """benchmarks/rewards.py:exact and an answer that is no text."""
    return fails(together(prepare, EXACT), f"TypeError: exact .*{shown}")


def suffix(prepare, right):
    """What a prompt of the training data, QUESTION, becomes."""
    return runs(together(rows(QUESTION), prepare), prompt_is(right))


INPUTS = {
    # files of data
    "an empty file": fails(rows(), "StopIteration", says(TRAIN)),
    "a file of white space": fails(content(b" \n" * 20), '"train" corresponds to no data', says(TRAIN)),
    "an empty CSV": fails(content(b"", "train.csv"), "No columns to parse from file", says(TRAIN)),
    "Parquet without rows": fails(parquet(row([], [])), "BatchSize must be greater than 0, got 0", says(TRAIN)),
    "empty test data": fails(test_rows(), "StopIteration", says("read_splits(args.eval_dataset)")),
    "no such file": fails("--dataset {c}/no.jsonl", r"FileNotFoundError.*no\.jsonl"),
    "a file name with a typing error": fails("--dataset {c}/train.josnl", r"FileNotFoundError.*train\.josnl"),
    "a file that may not be read": fails(locked("train.jsonl", 0), r"PermissionError.*train\.jsonl"),
    "a line that is no JSON": fails(rows(QUESTION, '{"question": "1?", "answer": "1",}'), "JSON parse error.* row 1"),
    "JSON with a key twice": fails(rows('{"question": "1?", "question": "2?", "answer": "1"}'), "question.* twice"),
    "other keys in every line": runs(
        rows({"id": 1} | QUESTION, QUESTION | {"level": "easy"}, {"answer": "2", "question": "1?", "seen": None})
    ),
    "Windows line ends, blank lines": runs(
        rows(json.dumps(QUESTION) + "\r", "", json.dumps(QUESTION) + "\r"), prompts_are(lambda p: "1+1" in p)
    ),
    "a byte order mark": runs(content(b"\xef\xbb\xbf" + json.dumps(QUESTION).encode()), prompt_is("What is 1+1?")),
    "Latin-1 in place of UTF-8": fails(
        content('{"question": "\u00e4pfel?", "answer": "2"}'.encode("latin-1")), "UnicodeDecodeError: 'utf-8' codec"
    ),
    "a CSV with semicolons": fails(
        rows("question;answer", "1+1?;2", name="train.csv"), "no column question; .*question;answer"
    ),
    "a CSV with a broken quote": fails(
        rows("question,answer", '"1+1?,2', name="train.csv"), "ParserError.*EOF inside string starting at row 1"
    ),
    "JSON that is one object": fails(rows({"data": [QUESTION]}, name="train.json"), "no column question; .*'data'"),
    "a folder of files, not saved by datasets": runs("--dataset {c}"),
    "a saved dataset without a train split": fails(splits("--dataset", "validation"), "'train'"),
    "a hub id with a typing error": fails(
        "--dataset openai/gsm8kk", "DatasetNotFoundError.*openai/gsm8kk.* doesn't exist", online=True
    ),
    # columns and answers
    "another column for the question": fails(
        rows({"query": "1+1?", "answer": "2"}), "no column question; .*--prompt-column.* .'query', 'answer'."
    ),
    "another column for the answer": fails(
        rows({"question": "1+1?", "solution": "2"}), "no column answer; .*--answer-column.* .'question', 'solution'."
    ),
    "a column with a typing error": fails(
        rows(QUESTION, flags="--prompt-column qestion"), "no column qestion; .*'question', 'answer'"
    ),
    "verl's columns, not named": fails(
        rows({"prompt": [{"role": "user", "content": "1?"}], "reward_model": {"ground_truth": "1"}}),
        "no column question; .*'prompt', 'reward_model'",
    ),
    "ShareGPT's columns": fails(
        rows({"conversations": [{"from": "human", "value": "1?"}]}), "no column question; .*'conversations'"
    ),
    "ShareGPT's messages": fails(prompts(SHAREGPT), NO_PROMPT),
    "ShareGPT's messages, and a chat template": fails(
        together(prompts(SHAREGPT, [{"from": "human", "value": "2?"}]), template(TEMPLATE)), NO_PROMPT
    ),
    "messages without content": fails(prompts([{"role": "user"}]), NO_PROMPT),
    "messages with parts": fails(prompts(PARTS), NO_PROMPT),
    "messages with parts, and a chat template": fails(together(prompts(PARTS), template(SHOWS_PARTS)), NO_PROMPT),
    "a question that is a list of lists": fails(
        rows({"question": [["1+1?", "2"]], "answer": "2"}), "AttributeError: 'list' object has no attribute 'get'"
    ),
    "chats for a model without a template": runs(
        rows({"prompt": CHAT, "answer": "2"}, flags="--prompt-column prompt"), prompt_is("Add.\n1+1?")
    ),
    "one answer is missing": fails(rows(QUESTION, row("2?", None)), f"row 2: .* {NO_NUMBER} None"),
    "an answer without a number": fails(rows(row("1?", "yes")), f"row 1: .* {NO_NUMBER} 'yes'"),
    "an answer that is a fraction": gold("3/4"),
    "an answer that is an equation": gold("2 + 3 = 5"),
    "an answer that is a time": gold("12:30"),
    "an answer with an exponent": gold("1e5"),
    "an answer that is a list": gold("1,2,3"),
    "answers that are numbers or have a unit": runs(
        rows(*(row("1?", text) for text in ("5", "#### $1,234.50", "so\n#### -7", "25%", "3.")))
    ),
    "answers that are whole numbers": runs(rows(row("1?", 5), flags="--reward gsm8k")),
    "answers with a decimal point": runs(rows(row("1?", 2.5), flags="--reward gsm8k")),
    "no column of answers": fails(rows({"question": "1?"}), "no column answer; .*'question'"),
    "no answers, and the reward compares with one": fails(
        rows({"question": "1?"}, flags="--answer-column None"), f"row 1: .* {NO_NUMBER} None"
    ),
    "verl's column without ground_truth": fails(
        rows(
            {"prompt": [{"role": "user", "content": "1?"}], "reward_model": {"style": "rule"}},
            flags="--prompt-column prompt --answer-column reward_model",
        ),
        f"{NO_NUMBER} .'style': 'rule'.",
    ),
    "exact, and a CSV's 5 became 5.0": exact_gold(
        rows("question,answer", "1?,5", *["2?,"] * 3, "3?,6", name="train.csv"), r"(5\.0|6\.0|None)"
    ),
    "exact, and a date": exact_gold(rows(row("when?", "2024-05-01")), "datetime"),
    "exact, and true": exact_gold(rows(row("1=1?", True)), "True"),
    "exact, and no answer": exact_gold(rows(row("1?", None)), "None"),
    # questions
    "a question that is a number": fails(rows(row(5, "5")), NO_PROMPT),
    "a question that is null": fails(rows(QUESTION, row(None, "5")), "row 2: a prompt is a text or a chat"),
    "empty questions": fails(rows(row("", "5"), flags="--prompt-suffix ''"), r"train\.jsonl: every prompt is empty"),
    "all questions too long": fails(rows(LONG), r"train\.jsonl: every prompt is .*more than 512 tokens"),
    "some questions too long": runs(rows(LONG, QUESTION, QUESTION), prompt_is(QUESTION["question"])),
    "a question in many scripts": runs(rows(row(EMOJI, "2")), prompt_is(EMOJI)),
    "fewer rows than a batch": runs(rows(QUESTION)),
    "the request for ####": suffix("--reward gsm8k", QUESTION["question"] + REQUEST),
    "a question with the request": runs(
        rows(row("1? Write ####.", "2"), flags="--reward gsm8k"), prompt_is("1? Write ####.")
    ),
    "no request, as the flag says": suffix("--reward gsm8k --prompt-suffix ''", QUESTION["question"]),
    "a request of one's own": suffix("--prompt-suffix ' Answer:'", QUESTION["question"] + " Answer:"),
    "a request of one's own, and a chat template": suffix(
        together("--prompt-suffix ' Answer:'", template(TEMPLATE)), "<user>What is 1+1? Answer:</><bot>"
    ),
    # test data
    "test data with other columns": fails(test_rows({"q": "1"}), r"test\.jsonl has no column question; .*'q'.$"),
    "test data without answers": fails(
        test_rows({"question": "1?"}), r"test\.jsonl has no column answer; .*'question'.$"
    ),
    "no such test data": fails("--eval-dataset {c}/no.jsonl", r"FileNotFoundError.*no\.jsonl"),
    "test data of a split for validation": runs(splits("--eval-dataset", "validation"), evaluates("validation?")),
    "test data of two splits": runs(splits("--eval-dataset", "validation", "test"), evaluates("test?")),
    "test data of a split for training and another": runs(splits("--eval-dataset", "dev", "train"), evaluates("dev?")),
    "test data without a split": fails(splits("--eval-dataset"), "ValueError: min", says("named[min(named")),
    "more --eval-rows than rows": runs(test_rows(QUESTION, flags="--eval-rows 1000"), evaluates("What is 1+1?")),
    # models
    "no such model": fails("--model {c}/modle", "OSError.*modle"),
    "a hub id of a model with a typing error": fails(
        "--model Qwen/Qwen2.5-0.5BB", r"Qwen/Qwen2\.5-0\.5BB is not a local folder and is not", online=True
    ),
    "a hub id of a model without a network": fails(
        "--model Qwen/Qwen2.5-0.5B", "couldn't find them in the cached files"
    ),
    "a model without tokenizer": fails(
        model(lambda f: [(f / n).unlink() for n in ("tokenizer.json", "tokenizer_config.json")]),
        "every prompt is empty|tokenizer",
    ),
    "a model without weights": fails(model(lambda f: (f / "model.safetensors").unlink()), r"no file named model\.safe"),
    "weights as a pickle": fails(
        model(lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin")), r"no file named model\.safe"
    ),
    "an incomplete download": fails(model(cut("model.safetensors")), "SafetensorError.*incomplete"),
    "a pointer of git-lfs": fails(
        model(lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n" * 3)),
        "SafetensorError.*header",
    ),
    "a config that is no JSON": fails(model(cut("config.json")), r"config\.json.* not a valid JSON"),
    "a folder of an adapter": fails(
        model(lambda f: [f.joinpath("config.json").unlink(), f.joinpath("adapter_config.json").write_text("{}")]),
        "model is an adapter: merge it",
    ),
    "what a LoRA run saved, as --model": fails(adapter("final", "--model"), "earlier/final is an adapter: merge it"),
    "what a LoRA run saved, as --critic-model": fails(
        adapter("final/critic", "--critic-model"), "ValueError: Unrecognized model in .*critic", only=PPO
    ),
    "an encoder": fails(
        another("bert", "AutoModelForMaskedLM", **SMALL, initializer_range=0.5),
        r"sampler and training pass differ|model\.bert\.",
    ),
    "an encoder-decoder": fails(
        another("t5", "AutoModelForSeq2SeqLM", d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2), "T5Config"
    ),
    "a classifier": fails(another("llama", "AutoModelForSequenceClassification", **LLAMA), "has no weights lm_head"),
    "a tokenizer larger than the model": fails(
        another("llama", "AutoModelForCausalLM", **LLAMA | {"vocab_size": 60}),
        "index out of range in self",
        says("embedding("),
    ),
    "more positions than the model has": fails(
        another("gpt2", "AutoModelForCausalLM", n_embd=32, n_layer=1, n_head=2, n_positions=8),
        "a prompt of [0-9]+ tokens and --max-response-length exceed the 8 positions",
    ),
    "a config of other sizes than the weights": fails(
        model(fields("config.json", hidden_size=64)), "ignore_mismatched_sizes"
    ),
    "a model with code of its own": fails(
        model(fields("config.json", model_type="m", auto_map={"AutoConfig": "m.C", "AutoModelForCausalLM": "m.M"})),
        "model contains custom code",
    ),
    "a quantised model": fails(
        model(fields("config.json", quantization_config={"quant_method": "gptq", "bits": 4})), "GPTQ.* optimum"
    ),
    "a model without an EOS": runs(eos(None, None), says("EOS ids []")),
    "a model with several EOS ids": runs(eos([3, 5, 7]), says("EOS ids [1, 3, 5, 7]")),
    "a model whose padding is its EOS": runs(
        model(
            fields("tokenizer_config.json", pad_token="<|endoftext|>"),
            fields("config.json", pad_token_id=1),
            flags=LONGER,
        ),
        truncates(lambda share: share < 1),
    ),
    # critics
    "no such critic": fails("--critic-model {c}/critc", "OSError.*critc", only=PPO),
    "a critic of a smaller vocabulary": fails(
        another("llama", "AutoModelForCausalLM", "critic", **LLAMA | {"vocab_size": 60}),
        "index out of range in self",
        says("forward_all(critic"),
        only=PPO,
    ),
    "a critic from a model with a tied head": runs(
        another("gpt2", "AutoModelForCausalLM", "critic", n_embd=32, n_layer=1, n_head=2), only=PPO
    ),
    # templates
    "no such template": fails("--chat-template {c}/no.jinja", r"FileNotFoundError.*no\.jinja"),
    "an empty template": runs(together(rows(QUESTION), template("")), prompt_is("What is 1+1?")),
    "a template that is JSON": runs(template('{"role": "user", "content": "..."}'), says("1 distinct")),
    "a template with an open loop": fails(template("{% for m in messages %}"), "TemplateSyntaxError.*'for'"),
    "a template that reads what is not there": fails(
        template("{{ messages[0].parts.text }}"), "UndefinedError.*'parts'"
    ),
    "a template that refuses": fails(
        template("{{ raise_exception('no system message') }}"), "TemplateError: no system message"
    ),
    # reward files
    "a reward that has left": fails("--reward exact", "--reward exact is neither gsm8k nor path/to/file.py:function"),
    "no such reward file": fails("--reward {c}/no.py:f", r"--reward .*no\.py:f is neither gsm8k nor path"),
    "a file without the function": fails(reward("def other(responses): ..."), "has no attribute 'score'"),
    "a reward without a function's name": fails(
        scores("...", "reward.py"), r"--reward .*reward\.py is neither gsm8k nor path/to/file.py:function"
    ),
    "a reward that is a method": fails(
        reward(f"class Scorer:\n {VARIED}", "reward.py:Scorer.score"), "has no attribute 'Scorer.score'"
    ),
    "a reward file called math.py": fails(
        reward(VARIED, "math.py:score"), r"math\.py.* another module is called math$"
    ),
    "a reward file called datasets.py": fails(
        reward(VARIED, "datasets.py:score"), r"datasets\.py.* another module is called datasets$"
    ),
    "a reward file with a dot": fails(reward(VARIED, "my.reward.py:score"), "No module named 'my'"),
    "a reward file in the current folder": runs(relative(reward(VARIED))),
    "a reward file in a folder beside": runs(relative(reward(VARIED, "rewards/mine.py:score"))),
    "a reward with a typing error": fails(reward("def score(responses) return 1"), "SyntaxError: expected ':'"),
    "a reward that raises": fails(
        scores("return [x[3] for x in [[]]]"), "IndexError", says("return [x[3] for x in [[]]]")
    ),
    "a reward of too few parameters": fails(reward("def score(r): return [1.0] * len(r)"), r"TypeError: score\(\)"),
    "a reward that asks for what the data lack": fails(
        reward("def score(responses, level): return [1]"), "missing 1 required positional argument: 'level'"
    ),
    "a reward that returns nothing": fails(scores("pass"), "'NoneType' object is not iterable"),
    "a reward of one number": fails(scores("return 1.0"), "'float' object is not iterable"),
    "a reward of too few numbers": fails(scores("return [1.0]"), r"must return \d finite numbers, not these 1"),
    "a reward of words": fails(scores("return ['good'] * len(responses)"), "to float: 'good'"),
    "a reward that is not a number": fails(
        scores("return [float('nan')] * len(responses)"), r"must return \d finite numbers, not .*nan"
    ),
    "a reward that is infinite, once and later": fails(
        reward(
            "calls = []\ndef score(answers): calls.append(0); return [1e999 if len(calls) > 1 else 1.0] * len(answers)"
        ),
        r"must return \d finite numbers, not .*inf",
        steps=1,
    ),
    "a reward that is a coroutine": fails(
        reward("async def score(responses): return [1.0] * len(responses)"), "'coroutine' object is not iterable"
    ),
    "a reward that is a generator": runs(reward("def score(responses):\n for x in responses: yield len(x)")),
    "a reward of many types": runs(
        reward(
            "import decimal, numpy, torch\nkinds = bool, int, decimal.Decimal, numpy.float32, torch.tensor\n"
            "def score(responses): return [kind(len(x) % 2) for kind, x in zip(kinds * 9, responses)]"
        )
    ),
    "a reward of a tensor": runs(
        reward("import torch\ndef score(responses): return torch.tensor([len(x) for x in responses])")
    ),
    "a reward that prints and sleeps": runs(
        reward("import time\ndef score(responses): print('hm'); time.sleep(1); return [len(x) for x in responses]")
    ),
    "a reward that forks": runs(
        reward(
            "import multiprocessing\ndef score(responses):\n"
            " with multiprocessing.get_context('fork').Pool(2) as pool: return pool.map(len, responses)"
        )
    ),
    "a reward that changes its lists": runs(
        reward(
            "def score(prompts, responses, answers):\n result = [len(x) for x in responses]\n"
            " responses[:] = ['gone'] * len(result)\n prompts.clear()\n answers.clear()\n return result"
        ),
        lambda c, said: all(row["response"] != "gone" for row in rows_in(c, "completions/step_*.jsonl")),
    ),
    # flags
    "a flag with a typing error": fails("--learning-rate 1", "Unrecognized options: --learning-rate"),
    "a value of another type": fails("--batch-size four", "--batch-size: invalid literal.*'four'"),
    "a choice that there is not": fails("--dtype fp16", "invalid choice 'fp16' for argument '--dtype'"),
    "a flag that has left": fails("--top-p 0", "Unrecognized options: --top-p"),
    "batch sizes that do not divide": fails("--minibatch-size 3", "must be a multiple of"),
    "groups of one": fails("--group-size 1", "--estimator grpo compares .* must be 2 or more", only=GRPO),
    "--batch-size 0": size("batch-size", "0", "1"),
    "--minibatch-size 0": size("minibatch-size", "0", "1"),
    "--rollout-batch-size 0": size("rollout-batch-size", "0", "1"),
    "--microbatch-tokens 0": size("microbatch-tokens", "0", "1"),
    "--max-response-length 0": size("max-response-length", "0", "1"),
    "--ppo-epochs 0": size("ppo-epochs", "0", "1"),
    "--group-size 0": size("group-size", "0", "1", GRPO),
    "--eval-rows -1": size("eval-rows", "-1", "0"),
    "--save-every -1": size("save-every", "-1", "0"),
    "--keep-checkpoints -1": size("keep-checkpoints", "-1", "0"),
    "--temperature 0": fails("--temperature 0", "ZeroDivisionError", says("1 / temperature")),
    "--temperature -1": size("temperature", "-1.0", "0"),
    "--lr -1e-3": size("lr", "-0.001", "0"),
    "--lr nan": size("lr", "nan", "0"),
    "--seed -1": size("seed", "-1", "0"),
    "a seed of 20 digits": fails("--seed 12345678901234567890", r"Seed must be between 0 and 2\*\*32"),
    "--lr inf": fails("--lr inf", "iteration [12]: .* gradient norm .* nan", steps=1),
    "--max-grad-norm 0": runs("--max-grad-norm 0"),
    "--total-iterations 0": runs(together(test_rows(QUESTION), "--total-iterations 0"), evaluates("What is 1+1?")),
    "lengths far beyond need": runs("--max-response-length 1000000 --max-prompt-length 1000000"),
    # folders
    "a run that exists": fails("--output-dir {c} --run-name model", "run folder .*model exists"),
    "an --output-dir that is a file": fails("--output-dir {c}/train.jsonl", r"Error.*train\.jsonl"),
    "an --output-dir that may not be written to": fails(locked("runs", 0o555), "PermissionError.*runs/run"),
    "a run name with a slash": runs("--run-name july/first"),
    # checkpoints
    "--resume without a name": fails("--resume --run-name None", "--resume needs --run-name"),
    "--resume auto, as in version 0.3": fails(resumed(flags="auto"), "Unrecognized options: auto"),
    "--resume of a run that does not exist": runs("--resume"),
    "--resume of a run without checkpoints": runs(resumed(remove, first="--save-every 2")),
    "--resume of a run that is done": runs(resumed(flags="--total-iterations 2")),
    "the newest checkpoint removed": runs(resumed(remove)),
    "what a kill left half written": runs(resumed(half_written)),
    "another batch size on resume": runs(
        together(
            rows(*(row(f"{n}?", "2") for n in range(16))),
            resumed(first="--eval-every 1", flags="--eval-every 1 --total-iterations 3 --batch-size 8"),
        ),
        goes_on,
    ),
    "a checkpoint cut short": fails(resumed(shortened(0.5)), "(?i)zip archive|incomplete|SafetensorError"),
    "an empty checkpoint": fails(resumed(shortened(0)), "files saved with `torch.save|incomplete|SafetensorError"),
    "a checkpoint of another program": fails(
        resumed(lambda path: path.with_name("step_000005.pt").write_text("mine")),
        "files saved with `torch.save|another script",
    ),
    "a run of version 0.3": fails(resumed(as_in_03), "step_000002 .* by another script"),
    "a checkpoint of another --lora-rank": fails(resumed(flags="--lora-rank 2"), "step_000002.* another .*--lora-rank"),
    "a checkpoint of a wider model": fails(resumed(wider), "size mismatch|with another model"),
    "a checkpoint of grpo_llm for ppo_llm": fails(
        resumed(by=sibling("ppo", "grpo")), "step_000002.* another script", only=PPO
    ),
    "a checkpoint of ppo_llm for grpo_llm": fails(
        resumed(by=sibling("grpo", "ppo")), "step_000002.* another script", only=GRPO
    ),
    "a replicated checkpoint for a sharded run": fails(
        resumed(by=sibling("_fsdp", "")), r"step_000002\.pt .*another script", only=SHARDED
    ),
    "a sharded checkpoint for a replicated run": fails(
        resumed(by=sibling("_llm", "_llm_fsdp")), "step_000002 .*another script", only=REPLICATED
    ),
    # changed lines
    "a changed line that raises": fails(
        changed(("args.kl_reward_coef * kl  #", "args.kl_reward_coef * k2  #")),
        "NameError: name 'k2' is not defined",
        says("args.kl_reward_coef * k2  #"),
    ),
    "a loss that is NaN": fails(
        changed((LOSS, LOSS.replace("=", "= math.nan *"))), "iteration 1: the gradient norm of the policy is nan"
    ),
    "a loss that is NaN, in iteration 3": fails(
        changed((LOSS, LOSS.replace("=", "= [1, math.nan][iteration > 2] *"))),
        "iteration 3: the gradient norm of the policy is nan",
        steps=2,
    ),
    "a sampler whose logits are NaN": fails(
        changed((LOGITS, f"{LOGITS} * math.nan")), "iteration 1: sampler and training pass differ by nan"
    ),
    "a sampler whose logits are NaN, in iteration 3": fails(
        changed((ROLLOUT, ROLLOUT.replace("e)", "e if iteration < 3 else math.nan)"))),
        "iteration 3: sampler and training pass differ by nan",
        steps=2,
    ),
    "a sampler at another temperature": fails(
        changed((ROLLOUT, "responses = rollout(rows, uniforms, 0.7)")),
        "iteration 1: sampler and training pass differ by",
    ),
    "a sampler with the weights of the start": fails(
        changed((ADDED, f"{ADDED}\n    sampler = __import__('copy').deepcopy(policy_model)"), SAMPLER),
        "iteration [23]: sampler and training pass differ by .* weights",
        steps=2,
    ),
}


class NoSuchRepository(http.server.BaseHTTPRequestHandler):
    """What the hub answers when it is asked for a repository that it does not have."""

    def do_GET(self):
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def hub():
    """The address of such a hub."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), NoSuchRepository) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def run_alone(script, folder, flags, **environment):
    """One process with a limit on memory and time. `folder` is where relative paths lead to."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_DATASETS_CACHE": f"{folder}/.cache"}
    env |= {"HF_HUB_OFFLINE": "1"} | environment
    limits = {"timeout": 300, "preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))}
    command = [sys.executable, str(script), *flags]
    if os.getuid() == 0:  # modes of files must hold for root, too
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, errors="replace", **limits)


def first_flags(script, c):
    """The flags of every case; its own come behind them."""
    flags = f"--model {c}/model --dataset {c}/train.jsonl --batch-size 4 --minibatch-size 4 --eval-every 0"
    flags = f"{flags} --max-response-length 4 --total-iterations 2 --output-dir {c}/runs --run-name run".split()
    return flags + ["--group-size", "2"] * script.stem.startswith("grpo")


def run_well(script, c, *flags):
    """A run that a case begins with."""
    done = run_alone(script, c, [*first_flags(script, c), "--reward", f"{c}/varied.py:score", *flags])
    assert done.returncode == 0, last_words(done.stderr)


def last_words(text):
    """What a run ends with: our own sentence; or the messages of the exceptions that nobody caught, the causes before
    what they caused; or what tyro puts in a box."""
    lines = [re.sub(r"^\[rank\d\]: ?", "", line) for line in text.splitlines()]
    own = [line for line in lines if line.startswith("error: ")]
    messages, inside = [], ""
    for line in lines:
        if line.startswith("Traceback (most recent call last)"):
            inside = "frames"
        elif line.startswith(("The above exception was", "During handling of", "[W")):  # [W: torch's, as it ends
            inside = ""
        elif inside == "frames" and line[:1] not in ("", " "):
            inside = "message"
        if inside == "message":
            messages.append(line)
    boxed = [line.strip("\u2502\u2500 ") for line in lines if line.startswith("\u2502")]
    return "\n".join(own or messages or boxed).strip()


def contents(c):
    """{file or folder: what tells whether it was touched} of all that lies in the folder of a case."""
    found = {}
    for path in c.rglob("*"):
        if ".cache" not in path.parts:
            stat = path.stat()
            found[path.relative_to(c)] = None if path.is_dir() else (stat.st_size, stat.st_mtime_ns)
    return found


def last_step(c):
    """The last iteration in metrics.jsonl."""
    return max([row["step"] for row in rows_in(c, "metrics.jsonl")], default=0)


def fault_of(c, flags):
    """What is wrong with a run that should train: nothing, if there is a line for every iteration, every number and
    weight that it left is finite, and the weights moved if a gradient was there to move them."""
    total = int(flags[len(flags) - flags[::-1].index("--total-iterations")])
    lines = rows_in(c, "metrics.jsonl")
    if [row["step"] for row in lines] != [*range(total + 1)]:
        return f"iterations {[row['step'] for row in lines]} of {total}"
    if not all(math.isfinite(number) for row in lines for number in row.values()):
        return "a metric that is not finite"
    for file in c.glob("runs/**/*.safetensors"):
        if "unfinished" in file.parts:  # what a kill left, which nothing reads
            continue
        if not all(weight.isfinite().all() for weight in load_file(file).values()):
            return f"weights in {file.name} that are not finite"
    if total == 0:
        return "a model, though nothing was trained" if any(c.glob("runs/**/final")) else ""
    pushed = any(row.get("actor/grad_norm", 0) > 0 for row in lines)
    before = load_file(c / "model" / "model.safetensors")
    after = load_file(next(c.glob("runs/**/final/model.safetensors")))
    moved = any(not after[key].equal(before[key]) for key in after)
    return (
        "" if pushed == moved else f"gradients {'' if pushed else 'all '}0, yet weights {'moved' if moved else 'not'}"
    )


def one_input(name, script, folder):
    """Runs a case in `folder`: (verdict, what it said). Verdicts: "named" (it ended before it trained, named the cause
    and left the user's files alone), "ran" (as it should), or what is wrong."""
    case, tiny = INPUTS[name], common.TINY
    shutil.copytree(tiny / "model", folder / "model")
    common.write_lines(folder / "train.jsonl", common.read_lines(tiny / "train.jsonl")[:40])
    (folder / "varied.py").write_text(VARIED)
    (folder / "unfinished").mkdir()  # a name that the scripts use inside a run folder
    (folder / "unfinished" / "notes.txt").write_text("mine")
    runs = case.pattern is None
    try:
        flags = [*first_flags(script, folder), *["--reward", f"{folder}/varied.py:score"] * runs]
        flags += prepared(case.prepare, folder, script)
    except AssertionError as error:
        return "NOT PREPARED", str(error)
    copy = folder / script.name  # of the script, which the case has changed
    before, step = contents(folder), last_step(folder)
    try:
        with hub() if case.online else contextlib.nullcontext() as address:
            place = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address} if case.online else {}
            done = run_alone(copy if copy.exists() else script, folder, flags, **place)
    except subprocess.TimeoutExpired:
        return "HANGS", ""
    said = last_words(done.stderr)
    after = contents(folder)
    touched = [str(path) for path in before if after.get(path, ()) != before[path]]
    if runs:
        if done.returncode != 0:
            return "DID NOT RUN", said
        touched = [path for path in touched if not path.startswith("runs/")]
        fault = fault_of(folder, flags)
        if fault:
            return "RAN WRONGLY", fault
    elif done.returncode <= 0:
        return ("TRAINED" if done.returncode == 0 else "CRASHED"), said
    elif last_step(folder) > step + case.steps:
        return "TRAINED", said
    elif not re.search(case.pattern, said, re.S | re.M):
        return "NOT NAMED", said
    if touched:
        return "TOUCHED", f"{', '.join(touched)}; {said}"
    if case.check and not case.check(folder, done.stdout + done.stderr):
        return "RAN WRONGLY" if runs else "NOT NAMED", said or "not as `check` wants it"
    return "ran" if runs else "named", said


def inputs(count, folder, scripts):
    """Each case in a process of its own, with one of the scripts in turn; two cases at a time."""
    found, lines = Counter(), []

    def run(number, name):
        case = INPUTS[name]
        able = [script for script in scripts if script in case.only]
        if not able:
            return
        script, place = able[number % len(able)], folder / "cases" / str(number)
        place.mkdir(parents=True)
        verdict, said = one_input(name, folder / f"{script}.py", place)
        if verdict == "named":  # from the line on that names the cause
            match = re.search(case.pattern, said, re.S | re.M)
            said = said[said.rfind("\n", 0, match.start() + 1) + 1 :]
        for path in place, folder, sys.prefix, sys.base_prefix:
            said = said.replace(str(path), "..")
        what = "" if verdict == "ran" else said.replace("\n", " ")[:160].replace("|", "/")
        found[verdict] += 1
        lines.append((number, name, script, verdict, what))
        print(*lines[-1], sep=" | ", flush=True)
        shutil.rmtree(place)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, *zip(*enumerate(list(INPUTS)[:count]))))
    text = (
        f"`python benchmarks/campaigns/faults.py inputs {count}`: what users get wrong, and how a run of one process "
    )
    text += (
        f"says so (the line that names it). {found['named']} of {len(lines)} ended before they trained on it, named "
    )
    text += f"the cause and left the user's files as they were; {found['ran']} ran, as "
    others = "".join(f"; **{found[bad]} {bad}**" for bad in found if bad not in ("named", "ran"))
    text += f"they should{others or '; none hung or trained on what it should not'}.\n\n"
    cells = [line for _, *line in sorted(lines)]
    report("inputs", text + common.markdown(["input", "script", "verdict", "what it said"], cells) + "\n")


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
