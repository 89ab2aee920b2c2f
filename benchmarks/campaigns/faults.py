"""What does a run survive? Kills, a slow process, long runs. tests/test_faults.py does some of it at small size.

    python benchmarks/campaigns/faults.py kills 50  kill -9 at random moments, then --resume: the same weights?
    python benchmarks/campaigns/faults.py signals 8  SIGTERM at random moments on a busy machine, then --resume
    python benchmarks/campaigns/faults.py delays 8  one process 20 seconds late at random points: the same weights?
    python benchmarks/campaigns/faults.py soak 2000  2,000 iterations with everything on: memory, speed, file handles
    python benchmarks/campaigns/faults.py disk 12  the disk is full at some moment, then larger; or read-only (as root)
    python benchmarks/campaigns/faults.py inputs 183  what users get wrong in data, models, rewards, flags, checkpoints

Each run has two processes on a CPU (`inputs`: one), the embedded model and small batches. The scripts take turns,
together with the fourth one that they compose and, in `kills`, a variant that saves additional state; --scripts selects
fewer. They are copied first, so you can edit them meanwhile. Results go to benchmarks/results/faults/. `kills` appends
to its kills.jsonl, and `kills 0` only writes its table again.
"""

import argparse
import contextlib
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


def copy_scripts(folder, scripts):
    """The three scripts, the fourth that git composes of them, the variant if it is among `scripts`, the model."""
    for name in SCRIPTS[:3]:
        shutil.copy(ROOT / f"{name}.py", folder)
    merge = ["git", "merge-file", "-p", "grpo_llm.py", "ppo_llm.py", "ppo_llm_fsdp.py"]
    (folder / "grpo_llm_fsdp.py").write_bytes(subprocess.check_output(merge, cwd=folder))
    if VARIANT in scripts:
        (folder / f"{VARIANT}.py").write_text(variants.patched(VARIANT))
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")


def start(script, folder, name, *flags, **environment):
    """The launcher of a run of two processes; its console goes to a file."""
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    command = [accelerate, "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision"]
    command += ["no", "--dynamo_backend", "no", "--main_process_port", "0", str(script), *FLAGS.split()]
    command += ["--eval-dataset", str(folder / "test.jsonl"), "--output-dir", str(folder), "--run-name", name, *flags]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment
    with open(folder / f"{name}.txt", "a") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)


def ranks(name):
    """Process ids of the run `name`, without its launcher."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if name.encode() in words and b"launch" not in words:
            found.append(int(path.parent.name))
    return sorted(found)


def outcome(run_dir):
    """Hash of every weight of final/ and of the best model, and of all metrics that do not depend on the clock."""
    digest = hashlib.sha256()
    for file in sorted(run_dir.glob("final/**/*.safetensors")) + sorted(run_dir.glob("best/**/*.safetensors")):
        digest.update(str(file.relative_to(run_dir)).encode() + file.read_bytes())
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        digest.update(repr([m for m in metrics.items() if not re.match("time/|memory/", m[0])]).encode())
    return digest.hexdigest()


def undisturbed(folder, scripts):
    """{script: (outcome, seconds)} of runs that nobody touches."""
    result = {}
    for script in scripts:
        begin = time.monotonic()
        code = start(folder / f"{script}.py", folder, f"{script}-whole", *OWN[script].split()).wait()
        assert code == 0, (folder / f"{script}-whole.txt").read_text()[-3000:]
        result[script] = outcome(folder / f"{script}-whole"), time.monotonic() - begin
    return result


def kill(name, *more):
    """kill -9 for all processes of a run."""
    for pid in (*ranks(name), *more):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(pid, signal.SIGKILL)


def kills(count, folder, scripts):
    """Moments are drawn from FIRST to the end of an undisturbed run; results are added to those of earlier calls."""
    log = RESULTS / "kills.jsonl"
    earlier = len(log.read_text().splitlines()) if log.exists() else 0
    whole, rng = undisturbed(folder, scripts if count else ()), random.Random(earlier)
    for number in range(earlier, earlier + count):
        script, victim = scripts[number % len(scripts)], ("worker", "launcher")[number // len(scripts) % 2]
        name, own = f"kill-{number}", OWN[script].split()
        run_dir, moment = folder / name, rng.uniform(FIRST, 1) * whole[script][1]
        launcher = start(folder / f"{script}.py", folder, name, *own)
        time.sleep(moment)
        workers = ranks(name)
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(rng.choice(workers) if victim == "worker" and workers else launcher.pid, signal.SIGKILL)
        begin = time.monotonic()
        while (launcher.poll() is None or ranks(name)) and time.monotonic() - begin < HANGS:
            time.sleep(0.05)
        gone = time.monotonic() - begin
        kill(name, launcher.pid)
        launcher.wait()
        saving = bool([*run_dir.rglob("unfinished")])
        lines = len((run_dir / "metrics.jsonl").read_text().splitlines()) if (run_dir / "metrics.jsonl").exists() else 0
        finished = (run_dir / "final").exists()
        launcher = start(folder / f"{script}.py", folder, name, "--resume", *own)
        try:
            code = launcher.wait(300)
        except subprocess.TimeoutExpired:
            code = "hangs"
            kill(name, launcher.pid)
        row = {"script": script, "victim": victim, "moment": moment, "lines": lines, "saving": saving}
        row |= {"finished": finished, "gone": gone, "code": code}
        row["same"] = code == 0 and outcome(run_dir) == whole[script][0]
        row["left"] = [str(path.relative_to(run_dir)) for path in run_dir.rglob("unfinished")]  # half written
        print(row, flush=True)
        with open(log, "a") as file:
            file.write(json.dumps(row) + "\n")
        if row["same"]:
            shutil.rmtree(run_dir)
        else:
            print((folder / f"{name}.txt").read_text()[-3000:], flush=True)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    late, rows = [r for r in rows if r["finished"]], [r for r in rows if not r["finished"]]
    text = f"{sum(r['same'] for r in rows)} of {len(rows)} runs ended with the weights and metrics of the undisturbed "
    text += "run, bit for bit, after one kill -9 at a random moment and `--resume`.\n\n"
    text += "| script | worker killed | launcher killed | same at the end |\n| --- | --- | --- | --- |\n"
    for script in dict.fromkeys(r["script"] for r in rows):
        mine = [r for r in rows if r["script"] == script]
        killed = [sum(r["victim"] == victim for r in mine) for victim in ("worker", "launcher")]
        text += f"| {script}.py | {killed[0]} | {killed[1]} | {sum(r['same'] for r in mine)} of {len(mine)} |\n"
    when = Counter("start" if r["lines"] == 0 else "saving" if r["saving"] else "iterations" for r in rows)
    gone = [r["gone"] for r in rows] or [0.0]
    text += f"\nKilled before the first line of metrics: {when['start']}; within the iterations: {when['iterations']}; "
    text += f"while a checkpoint or a model was being written: {when['saving']}. The last process of a killed run was "
    text += f"gone after {statistics.median(gone):.1f} s in the median, {max(gone):.1f} s at most; after {HANGS} s, "
    text += f"in {sum(x >= HANGS for x in gone)} runs, what was left was killed before the resume. {len(late)} more "
    text += "moments came when final/ was already there and are not counted "
    text += f"({sum(r['same'] for r in late)} of them the same).\n"
    (RESULTS / "kills.md").write_text(text)
    print(text)


def signals(count, folder, scripts):
    """SIGTERM to the launcher, as a scheduler sends it, while two other processes keep the CPU busy."""
    whole, rng, lines = undisturbed(folder, scripts), random.Random(1), []
    spin = f"import os\nwhile os.getppid() == {os.getpid()}: pass"  # until this process has gone
    busy = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    for number in range(count):
        script = scripts[number % len(scripts)]
        name, own = f"signal-{number}", [*OWN[script].split(), "--save-every", "0"]  # what is saved is saved for this
        run_dir, after = folder / name, rng.randint(1, 8)
        launcher = start(folder / f"{script}.py", folder, name, *own)
        while not (run_dir / "metrics.jsonl").exists() or len((run_dir / "metrics.jsonl").open().readlines()) <= after:
            assert launcher.poll() is None, (folder / f"{name}.txt").read_text()[-3000:]
            time.sleep(0.1)
        time.sleep(rng.uniform(0, 2))
        launcher.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        code = launcher.wait(300)
        seconds = time.monotonic() - begin
        kept = [path.name for path in (run_dir / "checkpoints").glob("step_*")]
        done = len((run_dir / "metrics.jsonl").read_text().splitlines()) - 1  # the first line is from before training
        resumed = start(folder / f"{script}.py", folder, name, "--resume", *own[:-2]).wait(600)
        same = resumed == 0 and outcome(run_dir) == whole[script][0]
        lines.append([f"{script}.py", str(code), f"{seconds:.1f}", str(done), ", ".join(kept), "yes" if same else "NO"])
        print(lines[-1], flush=True)
    for process in busy:
        process.kill()
    text = (
        f"`python benchmarks/campaigns/faults.py signals {count}`: SIGTERM to the launcher of two processes, while two "
    )
    text += "others "
    text += "keep the machine busy; `--save-every 0`, so the only checkpoint is the one that the signal asks for; then "
    text += "`--resume`. 'Same': weights and metrics of the undisturbed run, bit for bit.\n\n"
    text += "| script | exit code | seconds to the end | iterations done | checkpoint | same |\n"
    text += "| --- | --- | --- | --- | --- | --- |\n" + "".join(f"| {' | '.join(x)} |\n" for x in lines)
    (RESULTS / "signals.md").write_text(text)
    print(text)


def delays(count, folder, scripts):
    whole, results = undisturbed(folder, scripts), []
    for number in range(count):
        script = scripts[number % len(scripts)]
        (folder / f"late_{script}.py").write_text(SLOW.format(folder=str(folder), script=script))
        own, environment = OWN[script].split(), {"SEED": str(number), "LATE": str(number // len(scripts) % 2)}
        begin = time.monotonic()
        code = start(folder / f"late_{script}.py", folder, f"late-{number}", *own, **environment).wait()
        seconds = time.monotonic() - begin - whole[script][1]
        same = code == 0 and outcome(folder / f"late-{number}") == whole[script][0]
        results.append((script, environment["LATE"], round(seconds), same))
        print(*results[-1], flush=True)
    text = "Runs in which one process sleeps 20 seconds at random points, against the undisturbed run.\n\n"
    text += "| script | late process | seconds longer | same weights and metrics, to the bit |\n"
    text += "| --- | --- | --- | --- |\n"
    text += "".join(f"| {a}.py | {b} | {c} | {'yes' if d else 'NO'} |\n" for a, b, c, d in results)
    (RESULTS / "delays.md").write_text(text)
    print(text)


def soak(count, folder, _):
    """Only ppo_llm.py. Resident memory and open files of both ranks are read twice a second."""
    flags = ["--total-iterations", str(count), "--eval-every", "20", "--save-every", "10", "--entropy-coef", "0.001"]
    flags += ["--kl-loss-coef", "0.01", "--gradient-checkpointing", "--lr", "1e-5", "--critic-lr", "1e-4"]
    launcher, samples = start(folder / "ppo_llm.py", folder, "soak", *flags), []
    metrics = folder / "soak" / "metrics.jsonl"
    while launcher.poll() is None:
        time.sleep(0.5)
        try:
            step = len(metrics.read_text().splitlines())
            for pid in ranks("soak"):
                status = Path(f"/proc/{pid}/status").read_text()
                memory = int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024
                samples.append((step, memory, len(os.listdir(f"/proc/{pid}/fd"))))
        except (OSError, TypeError):
            continue  # it has not begun or has just ended
    assert launcher.returncode == 0
    lines = [json.loads(line) for line in metrics.read_text().splitlines()][1:]
    table = "| quarter | seconds per iteration, median | memory, MiB, mean | open files, max |\n"
    table += "| --- | --- | --- | --- |\n"
    for quarter in range(4):
        low, high = quarter * count // 4, (quarter + 1) * count // 4
        seconds = statistics.median(m["time/iteration"] for m in lines if low < m["step"] <= high)
        inside = [s for s in samples if low < s[0] - 1 <= high]
        memory, files = statistics.mean(s[1] for s in inside), max(s[2] for s in inside)
        table += f"| {quarter + 1} | {seconds:.3f} | {memory:.1f} | {files} |\n"
    text = f"{count:,} iterations of ppo_llm.py on two processes: 8 prompts each, evaluation every 20 iterations, a "
    text += "checkpoint every 10, KL in the reward and in the loss, entropy bonus, gradient checkpointing, "
    text += "TensorBoard. Memory and files are of one process.\n\n" + table
    (RESULTS / "soak.md").write_text(text)
    print(text)


def disk(count, folder, scripts):
    """Runs in a file system in memory (to mount it needs root) that is full before they end, and --resume when it is
    larger; then one that cannot be written to at all."""
    whole, rng, place, lines = undisturbed(folder, scripts), random.Random(0), folder / "disk", []
    place.mkdir()

    def mount(options):
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True)

    def run(script, name, *more):
        flags = ["--output-dir", str(place), *OWN[script].split(), *more]  # the last --output-dir counts
        launcher = start(folder / f"{script}.py", folder, name, *flags)
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(300)
        kill(name, launcher.pid)
        text = (folder / f"{name}.txt").read_text()
        causes = re.findall(r"(?m)^.*(?:No space left|Read-only file system|enforce fail|file write).*$", text)
        return launcher.wait(), causes[-1].split("]: ")[-1][:80] if causes else text[-200:]

    for number in range(count):
        script = scripts[number % len(scripts)]
        name, files = f"full-{number}", (folder / f"{script}-whole").rglob("*")
        needed = sum(file.stat().st_size for file in files if file.is_file())
        megabytes = rng.uniform(0.1, 1.2) * needed / 2**20
        mount(f"size={megabytes * 1024:.0f}k")  # whole numbers only
        code, cause = run(script, name)
        steps = len((place / name / "metrics.jsonl").read_text().splitlines()) - 1
        kept = sorted(path.name for path in (place / name / "checkpoints").glob("step_*"))
        subprocess.run(["mount", "-o", "remount,size=2g", str(place)], check=True)
        resumed, _ = run(script, name, "--resume")
        same = resumed == 0 and outcome(place / name) == whole[script][0]
        subprocess.run(["umount", str(place)], check=True)
        lines.append([script, f"{megabytes:.0f} of {needed / 2**20:.0f} MiB", "ended" if code else "was done"])
        lines[-1] += [cause if code else "", str(steps), ", ".join(kept), "yes" if same else "NO"]
        print(lines[-1], flush=True)
    text = (
        f"`python benchmarks/campaigns/faults.py disk {count}`: two processes, a checkpoint every iteration, two kept; "
    )
    text += "the "
    text += "disk is full, the run ends; on a larger disk `--resume` continues it. 'Disk': its size, of what the "
    text += "undisturbed run leaves; while it saves there is a third checkpoint. 'Same': weights and metrics of the "
    text += "undisturbed run, bit for bit.\n\n"
    text += "| script | disk | run | it said | lines of metrics | checkpoints | same |\n"
    text += "| --- | --- | --- | --- | --- | --- | --- |\n" + "".join(f"| {' | '.join(x)} |\n" for x in lines)
    mount("size=1g,ro")
    text += "\nOn a disk that is read-only:\n\n"
    for script in scripts:
        code, cause = run(script, f"read-only-{script}")
        text += f"- {script}: {'ended' if code else 'RAN'}, {cause}\n"
    subprocess.run(["umount", str(place)], check=True)
    (RESULTS / "disk.md").write_text(text)
    print(text)


# Malformed input of the kinds that users make. Each case prepares its folder `c`, in which a model, train.jsonl and a
# reward file lie, for a run of `script`, and returns flags. What the run says in the end must match the pattern, and
# `check` must hold for what it left (None: it should run to its end and train).


class Case(NamedTuple):
    prepare: Callable  # (c, script) -> flags
    pattern: str | None = None
    check: Callable | None = None  # (c, all that it said) -> whether it is right
    only: tuple = SCRIPTS  # those that have what the case is about
    steps: int = 0  # iterations it may do before it is refused
    online: bool = False  # there is a hub, which has no repository


PPO = "ppo_llm", "ppo_llm_fsdp"
GRPO = "grpo_llm", "grpo_llm_fsdp"
REPLICATED = "ppo_llm", "grpo_llm"
SHARDED = "ppo_llm_fsdp", "grpo_llm_fsdp"
VARIED = (
    "def score(responses): return [len(set(x)) + 0.1 * len(x) for x in responses]"  # most responses score differently
)


def rows_of(*rows, name="train.jsonl", flags=""):
    """Writes these rows in place of the data; strings as they are."""

    def prepare(c, script):
        (c / name).write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return ["--dataset", f"{c}/{name}", *flags_of(flags)(c, script)]

    return prepare


def bytes_of(content, name="train.jsonl"):
    """This content in place of the data."""

    def prepare(c, script):
        (c / name).write_bytes(content)
        return ["--dataset", f"{c}/{name}"]

    return prepare


def parquet_of(columns):
    """A table of these columns in place of the data."""

    def prepare(c, script):
        import pandas

        pandas.DataFrame(columns).to_parquet(c / "train.parquet")
        return ["--dataset", f"{c}/train.parquet"]

    return prepare


def eval_of(*rows, flags=""):
    """Test data of these rows."""

    def prepare(c, script):
        rows_of(*rows, name="test.jsonl")(c, script)
        return ["--eval-dataset", f"{c}/test.jsonl", *shlex.split(flags)]

    return prepare


def splits_of(flag, *names):
    """A folder saved by `datasets` with splits of these names, each of which asks a question of its own."""

    def prepare(c, script):
        import datasets

        datasets.disable_progress_bars()
        tables = {x: datasets.Dataset.from_list([{"question": f"{x}?", "answer": "2"}] * 4) for x in names}
        datasets.DatasetDict(tables).save_to_disk(str(c / "saved"))
        return [flag, f"{c}/saved"]

    return prepare


def reward_of(text, name="reward.py:score"):
    """A reward file of one function."""

    def prepare(c, script):
        file = c / name.split(":")[0]
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return ["--reward", f"{c}/{name}"]

    return prepare


def relative(prepare):
    """The same with paths that begin in the folder in which the run starts."""
    return lambda c, script: [word.removeprefix(f"{c}/") for word in prepare(c, script)]


def flags_of(text):
    return lambda c, script: [word.replace("{c}", str(c)) for word in shlex.split(text)]


def template_of(text):
    """A file for --chat-template."""

    def prepare(c, script):
        (c / "chat.jinja").write_text(text)
        return ["--chat-template", f"{c}/chat.jinja"]

    return prepare


def together(*preparations):
    def prepare(c, script):
        return [word for each in preparations for word in each(c, script)]

    return prepare


def model_of(change, flags=""):
    """The model folder after `change`."""

    def prepare(c, script):
        change(c / "model")
        return flags_of(flags)(c, script)

    return prepare


def json_of(file, **fields):
    """A JSON file of the model with other fields."""

    def change(folder):
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | fields))

    return change


def eos_of(ids, text="<|endoftext|>"):
    """The model with these EOS ids in its config, others in its generation config, and this EOS of its tokenizer."""

    def change(folder):
        json_of("tokenizer_config.json", eos_token=text)(folder)
        json_of("config.json", eos_token_id=ids)(folder)
        json_of("generation_config.json", eos_token_id=ids and ids[:1])(folder)

    return model_of(change, "--max-response-length 64")


def another(kind, auto_class, folder="model", **sizes):
    """A random model of another kind, with the same tokenizer: in the model's place, or a critic."""

    def prepare(c, script):
        import transformers

        transformers.utils.logging.disable_progress_bar()
        config = transformers.AutoConfig.for_model(kind, **{"vocab_size": 512} | sizes)
        if folder == "critic":
            shutil.copytree(c / "model", c / folder)
        getattr(transformers, auto_class).from_config(config).save_pretrained(c / folder)
        return ["--critic-model", f"{c}/{folder}"] if folder == "critic" else []

    return prepare


def cut(place, share=0.5):
    def change(folder):
        file = next(folder.glob(place))
        file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])

    return change


def changed(*edits):
    """A copy of the script in which this text is replaced by that, for each pair. It lies beside the data."""

    def prepare(c, script):
        text = script.read_text()
        for old, new in edits:
            assert text.count(old) == 1, f"{old!r} is not in {script.name}, or twice"
            text = text.replace(old, new)
        (c / script.name).write_text(text)
        return ["--reward", f"{c}/varied.py:score", "--total-iterations", "4", "--lr", "0.01"]

    return prepare


def resumed(change=lambda folder: None, flags="", first="", by=lambda script: script):
    """A run of two iterations whose newest checkpoint is changed, then --resume. The first may be `by` another."""

    def prepare(c, script):
        run_well(by(script), c, "--save-every", "1", *shlex.split(first))
        change(next(c.glob("runs/run/checkpoints/step_000002*")))
        return ["--resume", "--total-iterations", "4", *flags_of(flags)(c, script)]

    return prepare


def sibling(old, new):
    """The script whose name differs in this."""
    return lambda script: script.with_stem(script.stem.replace(old, new))


def adapter(place, flag):
    """What a LoRA run left in that place, given to this flag."""

    def prepare(c, script):
        run_well(script, c, "--lora-rank", "2")
        (c / "runs/run").rename(c / "earlier")
        return [flag, f"{c}/earlier/{place}"]

    return prepare


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


def locked(name, mode):
    """A file or folder that may not be written to, or not be read. `run_alone` sees to it that root may not either."""

    def prepare(c, script):
        if not (c / name).exists():
            (c / name).mkdir()
        (c / name).chmod(mode)
        return []

    return prepare


# For `check`: what a run left.


def rows_in(c, pattern):
    """Lines of the .jsonl files of the run folder that match, in order."""
    files = sorted(c.glob(f"runs/**/{pattern}"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def prompts_are(right, files="completions/step_*.jsonl"):
    """Every prompt of the completions is as it should be."""

    def check(c, said):
        prompts = [row["prompt"] for row in rows_in(c, files)]
        return len(prompts) > 0 and all(map(right, prompts))

    return check


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
CHAT = {"prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}], "answer": "2"}
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA = {"num_key_value_heads": 2} | SMALL
LONG = {"question": "many words " * 400, "answer": "#### 2"}
EMOJI = "Wie viel sind 1+1? \u65e5\u672c\u8a9e, \U0001f642\u200d\U0001f525, \u0639\u0631\u0628\u064a, e\u0301"
REQUEST = ' Let\'s think step by step and output the final answer after "####".'  # verl's
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}<bot>"
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
    row = {"question": "2?", "answer": text}
    return Case(
        rows_of(QUESTION, row),
        "row 2: --reward gsm8k needs one number as the reference answer, not " + re.escape(repr(text)),
    )


def size(flag, value, least, only=SCRIPTS):
    """A flag below its least value."""
    name = flag.replace("-", "[-_]")
    pattern = rf"--{name} must be at least {re.escape(least)}, but is {re.escape(value)}$"
    return Case(flags_of(f"--{flag} {value}"), pattern, only=only)


def exact_gold(prepare, shown):
    """benchmarks/rewards.py:exact and an answer that is no text."""
    return Case(together(prepare, flags_of(EXACT)), f"TypeError: exact .*{shown}")


def suffix(prepare, right):
    """What a prompt of the training data, QUESTION, becomes."""
    return Case(together(rows_of(QUESTION), prepare), None, prompts_are(lambda prompt: prompt == right))


INPUTS = {
    # files of data
    "an empty file": Case(rows_of(), "StopIteration", says(TRAIN)),
    "a file of white space": Case(bytes_of(b" \n" * 20), '"train" corresponds to no data', says(TRAIN)),
    "an empty CSV": Case(bytes_of(b"", "train.csv"), "No columns to parse from file", says(TRAIN)),
    "Parquet without rows": Case(
        parquet_of({"question": [], "answer": []}), "BatchSize must be greater than 0, got 0", says(TRAIN)
    ),
    "empty test data": Case(eval_of(), "StopIteration", says("read_splits(args.eval_dataset)")),
    "no such file": Case(flags_of("--dataset {c}/no.jsonl"), r"FileNotFoundError.*no\.jsonl"),
    "a file name with a typing error": Case(flags_of("--dataset {c}/train.josnl"), r"FileNotFoundError.*train\.josnl"),
    "a file that may not be read": Case(locked("train.jsonl", 0), r"PermissionError.*train\.jsonl"),
    "a line that is no JSON": Case(rows_of(QUESTION, '{"question": "1?", "answer": "1",}'), "JSON parse error.* row 1"),
    "JSON with a key twice": Case(rows_of('{"question": "1?", "question": "2?", "answer": "1"}'), "question.* twice"),
    "other keys in every line": Case(
        rows_of({"id": 1} | QUESTION, QUESTION | {"level": "easy"}, {"answer": "2", "question": "1?", "seen": None}),
    ),
    "Windows line ends, blank lines": Case(
        rows_of(json.dumps(QUESTION) + "\r", "", json.dumps(QUESTION) + "\r"), None, prompts_are(lambda p: "1+1" in p)
    ),
    "a byte order mark": Case(
        bytes_of(b"\xef\xbb\xbf" + json.dumps(QUESTION).encode()), None, prompts_are(lambda p: p == "What is 1+1?")
    ),
    "Latin-1 in place of UTF-8": Case(
        bytes_of('{"question": "\u00e4pfel?", "answer": "2"}'.encode("latin-1")), "UnicodeDecodeError: 'utf-8' codec"
    ),
    "a CSV with semicolons": Case(
        rows_of("question;answer", "1+1?;2", name="train.csv"), "no column question; .*question;answer"
    ),
    "a CSV with a broken quote": Case(
        rows_of("question,answer", '"1+1?,2', name="train.csv"), "ParserError.*EOF inside string starting at row 1"
    ),
    "JSON that is one object": Case(rows_of({"data": [QUESTION]}, name="train.json"), "no column question; .*'data'"),
    "a folder of files, not saved by datasets": Case(flags_of("--dataset {c}")),
    "a saved dataset without a train split": Case(splits_of("--dataset", "validation"), "'train'"),
    "a hub id with a typing error": Case(
        flags_of("--dataset openai/gsm8kk"), "DatasetNotFoundError.*openai/gsm8kk.* doesn't exist", online=True
    ),
    # columns and answers
    "another column for the question": Case(
        rows_of({"query": "1+1?", "answer": "2"}), "no column question; .*--prompt-column.* .'query', 'answer'."
    ),
    "another column for the answer": Case(
        rows_of({"question": "1+1?", "solution": "2"}), "no column answer; .*--answer-column.* .'question', 'solution'."
    ),
    "a column with a typing error": Case(
        rows_of(QUESTION, flags="--prompt-column qestion"), "no column qestion; .*'question', 'answer'"
    ),
    "verl's columns, not named": Case(
        rows_of({"prompt": [{"role": "user", "content": "1?"}], "reward_model": {"ground_truth": "1"}}),
        "no column question; .*'prompt', 'reward_model'",
    ),
    "ShareGPT's columns": Case(
        rows_of({"conversations": [{"from": "human", "value": "1?"}]}), "no column question; .*'conversations'"
    ),
    "ShareGPT's messages": Case(
        rows_of({"prompt": [{"from": "human", "value": "1?"}], "answer": "1"}, flags="--prompt-column prompt"),
        "row 1: a prompt is a text or a chat",
    ),
    "ShareGPT's messages, and a chat template": Case(
        together(
            rows_of(
                {"prompt": [{"from": "human", "value": "1?"}], "answer": "1"},
                {"prompt": [{"from": "human", "value": "2?"}], "answer": "2"},
                flags="--prompt-column prompt",
            ),
            template_of(TEMPLATE),
        ),
        "row 1: a prompt is a text or a chat",
    ),
    "messages without content": Case(
        rows_of({"prompt": [{"role": "user"}], "answer": "1"}, flags="--prompt-column prompt"),
        "row 1: a prompt is a text or a chat",
    ),
    "messages with parts": Case(
        rows_of(
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "1?"}]}], "answer": "1"},
            flags="--prompt-column prompt",
        ),
        "row 1: a prompt is a text or a chat",
    ),
    "messages with parts, and a chat template": Case(
        together(
            rows_of(
                {"prompt": [{"role": "user", "content": [{"type": "text", "text": "1?"}]}], "answer": "1"},
                flags="--prompt-column prompt",
            ),
            template_of("{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"),
        ),
        "row 1: a prompt is a text or a chat",
    ),
    "a question that is a list of lists": Case(
        rows_of({"question": [["1+1?", "2"]], "answer": "2"}), "AttributeError: 'list' object has no attribute 'get'"
    ),
    "chats for a model without a template": Case(
        rows_of(CHAT, flags="--prompt-column prompt"), None, prompts_are(lambda prompt: prompt == "Add.\n1+1?")
    ),
    "one answer is missing": Case(
        rows_of(QUESTION, {"question": "2?", "answer": None}),
        "row 2: .* needs one number as the reference answer, not None",
    ),
    "an answer without a number": Case(
        rows_of({"question": "1?", "answer": "yes"}), "row 1: .* needs one number as the reference answer, not 'yes'"
    ),
    "an answer that is a fraction": gold("3/4"),
    "an answer that is an equation": gold("2 + 3 = 5"),
    "an answer that is a time": gold("12:30"),
    "an answer with an exponent": gold("1e5"),
    "an answer that is a list": gold("1,2,3"),
    "answers that are numbers or have a unit": Case(
        rows_of(*({"question": "1?", "answer": text} for text in ("5", "#### $1,234.50", "so\n#### -7", "25%", "3."))),
    ),
    "answers that are whole numbers": Case(rows_of({"question": "1?", "answer": 5}, flags="--reward gsm8k")),
    "answers with a decimal point": Case(rows_of({"question": "1?", "answer": 2.5}, flags="--reward gsm8k")),
    "no column of answers": Case(rows_of({"question": "1?"}), "no column answer; .*'question'"),
    "no answers, and the reward compares with one": Case(
        rows_of({"question": "1?"}, flags="--answer-column None"),
        "row 1: .* needs one number as the reference answer, not None",
    ),
    "verl's column without ground_truth": Case(
        rows_of(
            {"prompt": [{"role": "user", "content": "1?"}], "reward_model": {"style": "rule"}},
            flags="--prompt-column prompt --answer-column reward_model",
        ),
        "needs one number as the reference answer, not .'style': 'rule'.",
    ),
    "exact, and a CSV's 5 became 5.0": exact_gold(
        rows_of("question,answer", "1?,5", *["2?,"] * 3, "3?,6", name="train.csv"), r"(5\.0|6\.0|None)"
    ),
    "exact, and a date": exact_gold(rows_of({"question": "when?", "answer": "2024-05-01"}), "datetime"),
    "exact, and true": exact_gold(rows_of({"question": "1=1?", "answer": True}), "True"),
    "exact, and no answer": exact_gold(rows_of({"question": "1?", "answer": None}), "None"),
    # questions
    "a question that is a number": Case(rows_of({"question": 5, "answer": "5"}), "row 1: a prompt is a text or a chat"),
    "a question that is null": Case(
        rows_of(QUESTION, {"question": None, "answer": "5"}), "row 2: a prompt is a text or a chat"
    ),
    "empty questions": Case(
        rows_of({"question": "", "answer": "5"}, flags="--prompt-suffix ''"), r"train\.jsonl: every prompt is empty"
    ),
    "all questions too long": Case(rows_of(LONG), r"train\.jsonl: every prompt is .*more than 512 tokens"),
    "some questions too long": Case(
        rows_of(LONG, QUESTION, QUESTION), None, prompts_are(lambda prompt: prompt == QUESTION["question"])
    ),
    "a question in many scripts": Case(
        rows_of({"question": EMOJI, "answer": "2"}), None, prompts_are(lambda prompt: prompt == EMOJI)
    ),
    "fewer rows than a batch": Case(rows_of(QUESTION)),
    "the request for ####": suffix(flags_of("--reward gsm8k"), QUESTION["question"] + REQUEST),
    "a question with the request": Case(
        rows_of({"question": "1? Write ####.", "answer": "2"}, flags="--reward gsm8k"),
        None,
        prompts_are(lambda prompt: prompt == "1? Write ####."),
    ),
    "no request, as the flag says": suffix(flags_of("--reward gsm8k --prompt-suffix ''"), QUESTION["question"]),
    "a request of one's own": suffix(flags_of("--prompt-suffix ' Answer:'"), QUESTION["question"] + " Answer:"),
    "a request of one's own, and a chat template": suffix(
        together(flags_of("--prompt-suffix ' Answer:'"), template_of(TEMPLATE)), "<user>What is 1+1? Answer:</><bot>"
    ),
    # test data
    "test data with other columns": Case(eval_of({"q": "1"}), r"test\.jsonl has no column question; .*'q'.$"),
    "test data without answers": Case(eval_of({"question": "1?"}), r"test\.jsonl has no column answer; .*'question'.$"),
    "no such test data": Case(flags_of("--eval-dataset {c}/no.jsonl"), r"FileNotFoundError.*no\.jsonl"),
    "test data of a split for validation": Case(
        splits_of("--eval-dataset", "validation"), None, evaluates("validation?")
    ),
    "test data of two splits": Case(splits_of("--eval-dataset", "validation", "test"), None, evaluates("test?")),
    "test data of a split for training and another": Case(
        splits_of("--eval-dataset", "dev", "train"), None, evaluates("dev?")
    ),
    "test data without a split": Case(splits_of("--eval-dataset"), "ValueError: min", says("named[min(named")),
    "more --eval-rows than rows": Case(eval_of(QUESTION, flags="--eval-rows 1000"), None, evaluates("What is 1+1?")),
    # models
    "no such model": Case(flags_of("--model {c}/modle"), "OSError.*modle"),
    "a hub id of a model with a typing error": Case(
        flags_of("--model Qwen/Qwen2.5-0.5BB"), r"Qwen/Qwen2\.5-0\.5BB is not a local folder and is not", online=True
    ),
    "a hub id of a model without a network": Case(
        flags_of("--model Qwen/Qwen2.5-0.5B"), "couldn't find them in the cached files"
    ),
    "a model without tokenizer": Case(
        model_of(lambda f: [(f / n).unlink() for n in ("tokenizer.json", "tokenizer_config.json")]),
        "every prompt is empty|tokenizer",
    ),
    "a model without weights": Case(
        model_of(lambda f: (f / "model.safetensors").unlink()), r"no file named model\.safe"
    ),
    "weights as a pickle": Case(
        model_of(lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin")), r"no file named model\.safe"
    ),
    "an incomplete download": Case(model_of(cut("model.safetensors")), "SafetensorError.*incomplete"),
    "a pointer of git-lfs": Case(
        model_of(lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n" * 3)),
        "SafetensorError.*header",
    ),
    "a config that is no JSON": Case(model_of(cut("config.json")), r"config\.json.* not a valid JSON"),
    "a folder of an adapter": Case(
        model_of(lambda f: [f.joinpath("config.json").unlink(), f.joinpath("adapter_config.json").write_text("{}")]),
        "model is an adapter: merge it",
    ),
    "what a LoRA run saved, as --model": Case(adapter("final", "--model"), "earlier/final is an adapter: merge it"),
    "what a LoRA run saved, as --critic-model": Case(
        adapter("final/critic", "--critic-model"), "ValueError: Unrecognized model in .*critic", only=PPO
    ),
    "an encoder": Case(
        another("bert", "AutoModelForMaskedLM", **SMALL, initializer_range=0.5),
        r"sampler and training pass differ|model\.bert\.",
    ),
    "an encoder-decoder": Case(
        another("t5", "AutoModelForSeq2SeqLM", d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2), "T5Config"
    ),
    "a classifier": Case(another("llama", "AutoModelForSequenceClassification", **LLAMA), "has no weights lm_head"),
    "a tokenizer larger than the model": Case(
        another("llama", "AutoModelForCausalLM", **LLAMA | {"vocab_size": 60}),
        "index out of range in self",
        says("embedding("),
    ),
    "more positions than the model has": Case(
        another("gpt2", "AutoModelForCausalLM", n_embd=32, n_layer=1, n_head=2, n_positions=8),
        "a prompt of [0-9]+ tokens and --max-response-length exceed the 8 positions",
    ),
    "a config of other sizes than the weights": Case(
        model_of(json_of("config.json", hidden_size=64)), "ignore_mismatched_sizes"
    ),
    "a model with code of its own": Case(
        model_of(json_of("config.json", model_type="m", auto_map={"AutoConfig": "m.C", "AutoModelForCausalLM": "m.M"})),
        "model contains custom code",
    ),
    "a quantised model": Case(
        model_of(json_of("config.json", quantization_config={"quant_method": "gptq", "bits": 4})), "GPTQ.* optimum"
    ),
    "a model without an EOS": Case(eos_of(None, None), None, says("EOS ids []")),
    "a model with several EOS ids": Case(eos_of([3, 5, 7]), None, says("EOS ids [1, 3, 5, 7]")),
    "a model whose padding is its EOS": Case(
        model_of(
            lambda f: [
                json_of("tokenizer_config.json", pad_token="<|endoftext|>")(f),
                json_of("config.json", pad_token_id=1)(f),
            ],
            "--max-response-length 64",
        ),
        None,
        truncates(lambda share: share < 1),
    ),
    # critics
    "no such critic": Case(flags_of("--critic-model {c}/critc"), "OSError.*critc", only=PPO),
    "a critic of a smaller vocabulary": Case(
        another("llama", "AutoModelForCausalLM", "critic", **LLAMA | {"vocab_size": 60}),
        "index out of range in self",
        says("forward_all(critic"),
        only=PPO,
    ),
    "a critic from a model with a tied head": Case(
        another("gpt2", "AutoModelForCausalLM", "critic", n_embd=32, n_layer=1, n_head=2), only=PPO
    ),
    # templates
    "no such template": Case(flags_of("--chat-template {c}/no.jinja"), r"FileNotFoundError.*no\.jinja"),
    "an empty template": Case(
        together(rows_of(QUESTION), template_of("")), None, prompts_are(lambda prompt: prompt == "What is 1+1?")
    ),
    "a template that is JSON": Case(template_of('{"role": "user", "content": "..."}'), None, says("1 distinct")),
    "a template with an open loop": Case(template_of("{% for m in messages %}"), "TemplateSyntaxError.*'for'"),
    "a template that reads what is not there": Case(
        template_of("{{ messages[0].parts.text }}"), "UndefinedError.*'parts'"
    ),
    "a template that refuses": Case(
        template_of("{{ raise_exception('no system message') }}"), "TemplateError: no system message"
    ),
    # reward files
    "a reward that has left": Case(
        flags_of("--reward exact"), "--reward exact is neither gsm8k nor path/to/file.py:function"
    ),
    "no such reward file": Case(flags_of("--reward {c}/no.py:f"), r"--reward .*no\.py:f is neither gsm8k nor path"),
    "a file without the function": Case(reward_of("def other(responses): ..."), "has no attribute 'score'"),
    "a reward without a function's name": Case(
        reward_of("def score(responses): ...", "reward.py"),
        r"--reward .*reward\.py is neither gsm8k nor path/to/file.py:function",
    ),
    "a reward that is a method": Case(
        reward_of(f"class Scorer:\n {VARIED}", "reward.py:Scorer.score"), "has no attribute 'Scorer.score'"
    ),
    "a reward file called math.py": Case(
        reward_of(VARIED, "math.py:score"), r"math\.py.* another module is called math$"
    ),
    "a reward file called datasets.py": Case(
        reward_of(VARIED, "datasets.py:score"), r"datasets\.py.* another module is called datasets$"
    ),
    "a reward file with a dot": Case(reward_of(VARIED, "my.reward.py:score"), "No module named 'my'"),
    "a reward file in the current folder": Case(relative(reward_of(VARIED))),
    "a reward file in a folder beside": Case(relative(reward_of(VARIED, "rewards/mine.py:score"))),
    "a reward with a typing error": Case(reward_of("def score(responses) return 1"), "SyntaxError: expected ':'"),
    "a reward that raises": Case(
        reward_of("def score(responses): return [x[3] for x in [[]]]"),
        "IndexError",
        says("return [x[3] for x in [[]]]"),
    ),
    "a reward of too few parameters": Case(reward_of("def score(r): return [1.0] * len(r)"), r"TypeError: score\(\)"),
    "a reward that asks for what the data lack": Case(
        reward_of("def score(responses, level): return [1]"), "missing 1 required positional argument: 'level'"
    ),
    "a reward that returns nothing": Case(reward_of("def score(responses): pass"), "'NoneType' object is not iterable"),
    "a reward of one number": Case(reward_of("def score(responses): return 1.0"), "'float' object is not iterable"),
    "a reward of too few numbers": Case(
        reward_of("def score(responses): return [1.0]"), r"must return \d finite numbers, not these 1"
    ),
    "a reward of words": Case(reward_of("def score(responses): return ['good'] * len(responses)"), "to float: 'good'"),
    "a reward that is not a number": Case(
        reward_of("def score(responses): return [float('nan')] * len(responses)"),
        r"must return \d finite numbers, not .*nan",
    ),
    "a reward that is infinite, once and later": Case(
        reward_of(
            "calls = []\ndef score(answers): calls.append(0); return [1e999 if len(calls) > 1 else 1.0] * len(answers)"
        ),
        r"must return \d finite numbers, not .*inf",
        steps=1,
    ),
    "a reward that is a coroutine": Case(
        reward_of("async def score(responses): return [1.0] * len(responses)"), "'coroutine' object is not iterable"
    ),
    "a reward that is a generator": Case(reward_of("def score(responses):\n for x in responses: yield len(x)")),
    "a reward of many types": Case(
        reward_of(
            "import decimal, numpy, torch\nkinds = bool, int, decimal.Decimal, numpy.float32, torch.tensor\n"
            "def score(responses): return [kind(len(x) % 2) for kind, x in zip(kinds * 9, responses)]"
        ),
    ),
    "a reward of a tensor": Case(
        reward_of("import torch\ndef score(responses): return torch.tensor([len(x) for x in responses])")
    ),
    "a reward that prints and sleeps": Case(
        reward_of("import time\ndef score(responses): print('hm'); time.sleep(1); return [len(x) for x in responses]")
    ),
    "a reward that forks": Case(
        reward_of(
            "import multiprocessing\ndef score(responses):\n"
            " with multiprocessing.get_context('fork').Pool(2) as pool: return pool.map(len, responses)"
        ),
    ),
    "a reward that changes its lists": Case(
        reward_of(
            "def score(prompts, responses, answers):\n result = [len(x) for x in responses]\n"
            " responses[:] = ['gone'] * len(result)\n prompts.clear()\n answers.clear()\n return result"
        ),
        None,
        lambda c, said: all(row["response"] != "gone" for row in rows_in(c, "completions/step_*.jsonl")),
    ),
    # flags
    "a flag with a typing error": Case(flags_of("--learning-rate 1"), "Unrecognized options: --learning-rate"),
    "a value of another type": Case(flags_of("--batch-size four"), "--batch-size: invalid literal.*'four'"),
    "a choice that there is not": Case(flags_of("--dtype fp16"), "invalid choice 'fp16' for argument '--dtype'"),
    "a flag that has left": Case(flags_of("--top-p 0"), "Unrecognized options: --top-p"),
    "batch sizes that do not divide": Case(flags_of("--minibatch-size 3"), "must be a multiple of"),
    "groups of one": Case(flags_of("--group-size 1"), "--estimator grpo compares .* must be 2 or more", only=GRPO),
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
    "--temperature 0": Case(flags_of("--temperature 0"), "ZeroDivisionError", says("1 / temperature")),
    "--temperature -1": size("temperature", "-1.0", "0"),
    "--lr -1e-3": size("lr", "-0.001", "0"),
    "--lr nan": size("lr", "nan", "0"),
    "--seed -1": size("seed", "-1", "0"),
    "a seed of 20 digits": Case(flags_of("--seed 12345678901234567890"), r"Seed must be between 0 and 2\*\*32"),
    "--lr inf": Case(flags_of("--lr inf"), "iteration [12]: .* gradient norm .* nan", steps=1),
    "--max-grad-norm 0": Case(flags_of("--max-grad-norm 0")),
    "--total-iterations 0": Case(
        together(eval_of(QUESTION), flags_of("--total-iterations 0")), None, evaluates("What is 1+1?")
    ),
    "lengths far beyond need": Case(flags_of("--max-response-length 1000000 --max-prompt-length 1000000")),
    # folders
    "a run that exists": Case(flags_of("--output-dir {c} --run-name model"), "run folder .*model exists"),
    "an --output-dir that is a file": Case(flags_of("--output-dir {c}/train.jsonl"), r"Error.*train\.jsonl"),
    "an --output-dir that may not be written to": Case(locked("runs", 0o555), "PermissionError.*runs/run"),
    "a run name with a slash": Case(flags_of("--run-name july/first")),
    # checkpoints
    "--resume without a name": Case(flags_of("--resume --run-name None"), "--resume needs --run-name"),
    "--resume auto, as in version 0.3": Case(resumed(flags="auto"), "Unrecognized options: auto"),
    "--resume of a run that does not exist": Case(flags_of("--resume")),
    "--resume of a run without checkpoints": Case(resumed(remove, first="--save-every 2")),
    "--resume of a run that is done": Case(resumed(flags="--total-iterations 2")),
    "the newest checkpoint removed": Case(resumed(remove)),
    "what a kill left half written": Case(resumed(half_written)),
    "another batch size on resume": Case(
        together(
            rows_of(*({"question": f"{n}?", "answer": "2"} for n in range(16))),
            resumed(first="--eval-every 1", flags="--eval-every 1 --total-iterations 3 --batch-size 8"),
        ),
        None,
        goes_on,
    ),
    "a checkpoint cut short": Case(resumed(shortened(0.5)), "(?i)zip archive|incomplete|SafetensorError"),
    "an empty checkpoint": Case(resumed(shortened(0)), "files saved with `torch.save|incomplete|SafetensorError"),
    "a checkpoint of another program": Case(
        resumed(lambda path: path.with_name("step_000005.pt").write_text("mine")),
        "files saved with `torch.save|another script",
    ),
    "a run of version 0.3": Case(resumed(as_in_03), "step_000002 .* by another script"),
    "a checkpoint of another --lora-rank": Case(resumed(flags="--lora-rank 2"), "step_000002.* another .*--lora-rank"),
    "a checkpoint of a wider model": Case(resumed(wider), "size mismatch|with another model"),
    "a checkpoint of grpo_llm for ppo_llm": Case(
        resumed(by=sibling("ppo", "grpo")), "step_000002.* another script", only=PPO
    ),
    "a checkpoint of ppo_llm for grpo_llm": Case(
        resumed(by=sibling("grpo", "ppo")), "step_000002.* another script", only=GRPO
    ),
    "a replicated checkpoint for a sharded run": Case(
        resumed(by=sibling("_fsdp", "")), r"step_000002\.pt .*another script", only=SHARDED
    ),
    "a sharded checkpoint for a replicated run": Case(
        resumed(by=sibling("_llm", "_llm_fsdp")), "step_000002 .*another script", only=REPLICATED
    ),
    # changed lines
    "a changed line that raises": Case(
        changed(("args.kl_reward_coef * kl  #", "args.kl_reward_coef * k2  #")),
        "NameError: name 'k2' is not defined",
        says("args.kl_reward_coef * k2  #"),
    ),
    "a loss that is NaN": Case(
        changed((LOSS, LOSS.replace("=", "= math.nan *"))),
        "iteration 1: the gradient norm of the policy is nan",
    ),
    "a loss that is NaN, in iteration 3": Case(
        changed((LOSS, LOSS.replace("=", "= [1, math.nan][iteration > 2] *"))),
        "iteration 3: the gradient norm of the policy is nan",
        steps=2,
    ),
    "a sampler whose logits are NaN": Case(
        changed((LOGITS, f"{LOGITS} * math.nan")), "iteration 1: sampler and training pass differ by nan"
    ),
    "a sampler whose logits are NaN, in iteration 3": Case(
        changed((ROLLOUT, ROLLOUT.replace("e)", "e if iteration < 3 else math.nan)"))),
        "iteration 3: sampler and training pass differ by nan",
        steps=2,
    ),
    "a sampler at another temperature": Case(
        changed((ROLLOUT, "responses = rollout(rows, uniforms, 0.7)")),
        "iteration 1: sampler and training pass differ by",
    ),
    "a sampler with the weights of the start": Case(
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
    case, tiny = INPUTS[name], ROOT / "benchmarks" / "tiny"
    shutil.copytree(tiny / "model", folder / "model")
    lines = (tiny / "train.jsonl").read_text().splitlines(keepends=True)[:40]
    (folder / "train.jsonl").write_text("".join(lines))
    (folder / "varied.py").write_text(VARIED)
    (folder / "unfinished").mkdir()  # a name that the scripts use inside a run folder
    (folder / "unfinished" / "notes.txt").write_text("mine")
    runs = case.pattern is None
    try:
        flags = [*first_flags(script, folder), *["--reward", f"{folder}/varied.py:score"] * runs]
        flags += case.prepare(folder, script)
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
        lines.append((number, f"| {name} | {script} | {verdict} | {what} |"))
        print(lines[-1][1], flush=True)
        shutil.rmtree(place)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, *zip(*enumerate(list(INPUTS)[:count]))))
    lines = [line for _, line in sorted(lines)]
    text = (
        f"`python benchmarks/campaigns/faults.py inputs {count}`: what users get wrong, and how a run of one process "
    )
    text += "says so "
    text += f"(the line that names it). {found['named']} of {len(lines)} ended before they trained on it, named the "
    text += f"cause and left the user's files as they were; {found['ran']} ran, as "
    others = "".join(f"; **{found[bad]} {bad}**" for bad in found if bad not in ("named", "ran"))
    text += f"they should{others or '; none hung or trained on what it should not'}.\n\n"
    text += "| input | script | verdict | what it said |\n| --- | --- | --- | --- |\n" + "\n".join(lines) + "\n"
    (RESULTS / "inputs.md").write_text(text)
    print(text[: text.index("| input")])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "signals", "delays", "soak", "disk", "inputs"])
    parser.add_argument("count", type=int)
    parser.add_argument("--scripts", nargs="+", choices=[*SCRIPTS, VARIANT])
    options = parser.parse_args()
    scripts = options.scripts or (*SCRIPTS, *([VARIANT] if options.what == "kills" else []))
    RESULTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        copy_scripts(place, scripts)
        test = (ROOT / "benchmarks" / "tiny" / "test.jsonl").read_text().splitlines(keepends=True)[:16]
        (place / "test.jsonl").write_text("".join(test))
        campaigns = {"kills": kills, "signals": signals, "delays": delays, "soak": soak, "disk": disk, "inputs": inputs}
        campaigns[options.what](options.count, place, scripts)
