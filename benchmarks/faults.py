"""What a run survives, at length: kills, a slow process, long runs. tests/test_resume.py has each at small size.

    python benchmarks/faults.py kills 50         kill -9 at random moments, then --resume auto: the same weights?
    python benchmarks/faults.py signals 8        SIGTERM at random moments on a machine that is busy, then --resume auto
    python benchmarks/faults.py delays 8         one process 20 seconds late at random points: the same weights?
    python benchmarks/faults.py soak 2000        2,000 iterations with everything on: memory, speed, file handles
    python benchmarks/faults.py disk 12          the disk is full at some moment, then larger; or read-only (as root)
    python benchmarks/faults.py inputs 73        what users get wrong in data, models, rewards, flags, checkpoints

Two processes on CPU (`inputs`: one), the embedded model and small batches. The scripts take turns, with the fourth that
they compose; --scripts names fewer. They are copied first, so that they can be worked on meanwhile. Results go to
benchmarks/results/faults/; `kills` adds to what is in its kills.jsonl; `kills 0` writes its table again.
"""

import argparse
import contextlib
import hashlib
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
import time
from collections import Counter
from pathlib import Path

from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "faults"
SCRIPTS = "ppo_llm", "grpo_llm", "ppo_llm_fsdp", "grpo_llm_fsdp"
FLAGS = "--batch-size 8 --minibatch-size 4 --max-response-length 24 --total-iterations 12 --eval-every 3 --save-every 1"
FLAGS += " --kl-reward-coef 0.02 --warmup-iterations 8"
OWN = {"ppo_llm": "", "grpo_llm": "--group-size 2 --batch-size 4 --estimator rloo", "ppo_llm_fsdp": "--lora-rank 4"}
OWN |= {"grpo_llm_fsdp": "--group-size 2 --batch-size 4 --rollout-params sharded"}
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


def copy_scripts(folder):
    """The three scripts, the fourth that git composes of them, and beside them the embedded model."""
    for name in SCRIPTS[:3]:
        shutil.copy(ROOT / f"{name}.py", folder)
    merge = ["git", "merge-file", "-p", "grpo_llm.py", "ppo_llm.py", "ppo_llm_fsdp.py"]
    (folder / "grpo_llm_fsdp.py").write_bytes(subprocess.check_output(merge, cwd=folder))
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
    for file in sorted(run_dir.glob("final/**/*.safetensors")) + sorted(run_dir.glob("best_*/**/*.safetensors")):
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
        saving = bool([*run_dir.rglob(".*.tmp"), *run_dir.rglob(".*.old")])
        lines = len((run_dir / "metrics.jsonl").read_text().splitlines()) if (run_dir / "metrics.jsonl").exists() else 0
        finished = (run_dir / "final").exists()
        launcher = start(folder / f"{script}.py", folder, name, "--resume", "auto", *own)
        try:
            code = launcher.wait(300)
        except subprocess.TimeoutExpired:
            code = "hangs"
            kill(name, launcher.pid)
        row = {"script": script, "victim": victim, "moment": moment, "lines": lines, "saving": saving}
        row |= {"finished": finished, "gone": gone, "code": code}
        row["same"] = code == 0 and outcome(run_dir) == whole[script][0]
        row["left"] = [path.name for path in run_dir.rglob(".*")]  # what nothing reads: hidden folders half written
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
    text += "run, to the bit, after one kill -9 at a random moment and `--resume auto`.\n\n"
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
    """SIGTERM to the launcher, as a scheduler sends it, beside two processes that compute for nothing."""
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
        done = len((run_dir / "metrics.jsonl").read_text().splitlines()) - 1  # the first line is from before
        resumed = start(folder / f"{script}.py", folder, name, "--resume", "auto", *own[:-2]).wait(600)
        same = resumed == 0 and outcome(run_dir) == whole[script][0]
        lines.append([f"{script}.py", str(code), f"{seconds:.1f}", str(done), ", ".join(kept), "yes" if same else "NO"])
        print(lines[-1], flush=True)
    for process in busy:
        process.kill()
    text = f"`python benchmarks/faults.py signals {count}`: SIGTERM to the launcher of two processes, while two others "
    text += "keep the machine busy; `--save-every 0`, so that there is no checkpoint but the one that the signal asks "
    text += "for; then `--resume auto`. 'Same': weights and metrics of the undisturbed run, to the bit.\n\n"
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
    """ppo_llm.py alone. Resident memory and open files of both ranks are looked at twice a second."""
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
        resumed, _ = run(script, name, "--resume", "auto")
        same = resumed == 0 and outcome(place / name) == whole[script][0]
        subprocess.run(["umount", str(place)], check=True)
        lines.append([script, f"{megabytes:.0f} of {needed / 2**20:.0f} MiB", "ended" if code else "was done"])
        lines[-1] += [cause if code else "", str(steps), ", ".join(kept), "yes" if same else "NO"]
        print(lines[-1], flush=True)
    text = f"`python benchmarks/faults.py disk {count}`: two processes, a checkpoint every iteration, two kept; the "
    text += "disk is full, the run ends; on a larger disk `--resume auto` goes on. 'Disk': its size, of what the "
    text += "undisturbed run leaves; while it saves there is a third checkpoint. 'Same': weights and metrics of the "
    text += "undisturbed run, to the bit.\n\n"
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


# Malformed input of the kinds that users make. Each case prepares its folder `c`, in which a model and train.jsonl lie,
# and returns flags; what the run says must match the pattern (None: it should run).


def rows_of(*rows, name="train.jsonl", flags=""):
    """Writes these rows in place of the data; strings as they are."""

    def prepare(c):
        (c / name).write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return ["--dataset", f"{c}/{name}", *flags.split()]

    return prepare


def reward_of(text, name="reward.py:score"):
    """A reward file of one function."""

    def prepare(c):
        (c / "reward.py").write_text(text)
        return ["--reward", f"{c}/{name}"]

    return prepare


def flags_of(text):
    return lambda c: [word.format(c=c) for word in shlex.split(text)]


def model_of(change):
    """The model folder after `change`."""

    def prepare(c):
        change(c / "model")
        return []

    return prepare


def config_of(**fields):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return model_of(change)


def another(kind, auto_class, **sizes):
    """A random model of another kind in the model's place, with the same tokenizer."""

    def change(folder):
        import transformers

        config = transformers.AutoConfig.for_model(kind, **{"vocab_size": 512} | sizes)
        getattr(transformers, auto_class).from_config(config).save_pretrained(folder)

    return model_of(change)


def cut(place, share=0.5):
    def change(folder):
        file = next(folder.glob(place))
        file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])

    return change


def split_of(name):
    """A folder saved by `datasets` with one split of that name."""

    def prepare(c):
        import datasets

        table = datasets.Dataset.from_list([QUESTION] * 4)
        datasets.DatasetDict({name: table}).save_to_disk(str(c / "saved"))
        return ["--dataset", f"{c}/saved"]

    return prepare


def resumed(change, *flags):
    """A run of two iterations whose newest checkpoint is changed, then --resume."""

    def prepare(c, run):
        run("--save-every", "1")
        change(next(c.glob("runs/run/checkpoints/step_000002")))
        return ["--resume", "auto", "--total-iterations", "4", *flags]

    prepare.runs = True
    return prepare


QUESTION = {"question": "What is 1+1?", "answer": "#### 2"}
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
LONG = {"question": "many words " * 400, "answer": "#### 2"}
INPUTS = {
    # data
    "an empty file": (rows_of(), "json"),
    "no such file": (flags_of("--dataset {c}/no.jsonl"), r"no\.jsonl"),
    "a file name with a typing error": (flags_of("--dataset {c}/train.josnl"), "josnl"),
    "another column for the question": (
        rows_of({"query": "1+1?", "answer": "2"}),
        "no column question; --prompt-column .* query, answer",
    ),
    "another column for the answer": (
        rows_of({"question": "1+1?", "solution": "2"}),
        "no column answer; .*--answer-column .* question, solution",
    ),
    "a column with a typing error": (
        rows_of(QUESTION, flags="--prompt-column qestion"),
        "no column qestion; .*question",
    ),
    "verl's columns, not named": (
        rows_of({"prompt": [{"role": "user", "content": "1?"}], "reward_model": {"ground_truth": "1"}}),
        "no column question; .* prompt, reward_model",
    ),
    "ShareGPT's columns": (
        rows_of({"conversations": [{"from": "human", "value": "1?"}]}),
        "no column question; .* conversations",
    ),
    "ShareGPT's messages": (
        rows_of({"prompt": [{"from": "human", "value": "1?"}], "answer": "1"}, flags="--prompt-column prompt"),
        "content",
    ),
    "messages with parts": (
        rows_of(
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "1?"}]}], "answer": "1"},
            flags="--prompt-column prompt",
        ),
        "TypeError.*list",
    ),
    "one answer is missing": (rows_of(QUESTION, {"question": "2?", "answer": None}), "row 2.*reference answer"),
    "an answer without a number": (rows_of({"question": "1?", "answer": "yes"}), "row 1.*reference answer"),
    "no answers at all": (rows_of({"question": "1?"}), "no column answer; .* question"),
    "no answers, and the reward compares with one": (
        rows_of({"question": "1?"}, flags="--answer-column None"),
        "row 1.*reference answer",
    ),
    "verl's column without ground_truth": (
        rows_of(
            {"prompt": [{"role": "user", "content": "1?"}], "reward_model": {"style": "rule"}},
            flags="--prompt-column prompt --answer-column reward_model",
        ),
        "ground_truth",
    ),
    "a question that is a number": (rows_of({"question": 5, "answer": "5"}), "TypeError|int"),
    "a question that is null": (rows_of(QUESTION, {"question": None, "answer": "5"}), "NoneType"),
    "empty questions": (rows_of({"question": "", "answer": "5"}), "no prompt of 1 to"),
    "all questions too long": (rows_of(LONG), "no prompt of 1 to 512 tokens"),
    "some questions too long": (rows_of(LONG, QUESTION, QUESTION), None),
    "a line that is no JSON": (rows_of(QUESTION, '{"question": "1?", "answer": "1",}'), "JSON"),
    "Windows line ends, blank lines": (rows_of(json.dumps(QUESTION) + "\r", "", json.dumps(QUESTION) + "\r"), None),
    "a CSV with semicolons": (
        rows_of("question;answer", "1+1?;2", name="train.csv"),
        "no column .*question;answer",
    ),
    "a CSV with a broken quote": (rows_of("question,answer", '"1+1?,2', name="train.csv"), "(?i)pars|EOF|column"),
    "JSON that is one object": (rows_of({"data": [QUESTION]}, name="train.json"), "no column"),
    "a folder of files, not saved by datasets": (flags_of("--dataset {c}"), "neither|not found|Directory"),
    "a saved dataset without a train split": (split_of("validation"), "KeyError: 'train'"),
    "a hub id with a typing error": (flags_of("--dataset openai/gsm8kk"), "gsm8kk"),
    "test data with other columns": (
        lambda c: rows_of({"q": "1"}, name="other.jsonl")(c) and ["--eval-dataset", f"{c}/other.jsonl"],
        r"other\.jsonl: no column",
    ),
    "no such test data": (flags_of("--eval-dataset {c}/no.jsonl"), r"no\.jsonl"),
    "test data under another name": (
        lambda c: ["--eval-dataset", split_of("validation")(c)[1], "--eval-rows", "2"],
        None,
    ),
    "fewer rows than a batch": (rows_of(QUESTION), None),
    # models
    "no such model": (flags_of("--model {c}/modle"), "modle"),
    "a hub id of a model with a typing error": (flags_of("--model Qwen/Qwen2.5-0.5BB"), r"Qwen2\.5-0\.5BB"),
    "a model without tokenizer": (
        model_of(lambda f: [(f / n).unlink() for n in ("tokenizer.json", "tokenizer_config.json")]),
        "(?i)tokenizer",
    ),
    "a model without weights": (model_of(lambda f: (f / "model.safetensors").unlink()), r"model\.safetensors"),
    "weights as a pickle": (
        model_of(lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin")),
        r"model\.safetensors",
    ),
    "an incomplete download": (model_of(cut("model.safetensors")), "(?i)safetensor"),
    "a pointer of git-lfs": (
        model_of(lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n" * 3)),
        "(?i)safetensor|header",
    ),
    "a folder of an adapter": (
        model_of(lambda f: [f.joinpath("config.json").unlink(), f.joinpath("adapter_config.json").write_text("{}")]),
        "(?i)config|adapter|model_type",
    ),
    "an encoder": (another("bert", "AutoModelForMaskedLM", **SMALL), "sampler and training pass|BERT|bert"),
    "an encoder-decoder": (
        another("t5", "AutoModelForSeq2SeqLM", d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2),
        "T5Config",
    ),
    "a classifier": (
        another("llama", "AutoModelForSequenceClassification", num_key_value_heads=2, **SMALL),
        "lacks the weights lm_head",
    ),
    "a tokenizer larger than the model": (
        another("llama", "AutoModelForCausalLM", num_key_value_heads=2, **SMALL | {"vocab_size": 60}),
        "index out of range|embed",
    ),
    "more positions than the model has": (
        another("gpt2", "AutoModelForCausalLM", n_embd=32, n_layer=1, n_head=2, n_positions=8),
        "wpe|index out of range",
    ),
    "a config of other sizes than the weights": (config_of(hidden_size=64), "(?i)size mismatch|ignore_mismatched"),
    "a model with code of its own": (
        config_of(model_type="mine", auto_map={"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}),
        "trust_remote_code|custom code",
    ),
    "a quantised model": (config_of(quantization_config={"quant_method": "gptq", "bits": 4}), "(?i)gptq|optimum"),
    # rewards
    "a reward that has left": (flags_of("--reward exact"), "gsm8k or path/to/file.py:function"),
    "no such reward file": (flags_of("--reward {c}/no.py:f"), "No module named 'no'"),
    "a file without the function": (reward_of("def other(p, r, a): ..."), "has no attribute 'score'"),
    "a reward without a function's name": (reward_of("def score(p, r, a): ...", "reward.py"), "file.py:function"),
    "a reward with a typing error": (reward_of("def score(p, r, a) return 1"), "SyntaxError"),
    "a reward that raises": (reward_of("def score(p, r, a): return [x[3] for x in [[]]]"), "IndexError"),
    "a reward of too few parameters": (reward_of("def score(r): return [1.0] * len(r)"), "TypeError.*score"),
    "a reward that asks for what the data lack": (reward_of("def score(p, r, a, level): return [1]"), "'level'"),
    "a reward that returns nothing": (reward_of("def score(p, r, a): pass"), "NoneType"),
    "a reward of one number": (reward_of("def score(p, r, a): return 1.0"), "float"),
    "a reward of too few numbers": (reward_of("def score(p, r, a): return [1.0]"), r"should give \d+ finite numbers"),
    "a reward of words": (reward_of("def score(p, r, a): return ['good'] * len(r)"), "'good'"),
    "a reward that is not a number": (
        reward_of("def score(p, r, a): return [float('nan')] * len(r)"),
        r"should give \d+ finite numbers",
    ),
    # flags
    "a flag with a typing error": (flags_of("--learning-rate 1"), "(?i)unrecognized"),
    "a value of another type": (flags_of("--batch-size four"), "four"),
    "a choice that there is not": (flags_of("--dtype fp16"), "fp16"),
    "a flag that has left": (flags_of("--top-p 0.9"), "(?i)unrecognized.*--top-p"),
    "batch sizes that do not divide": (flags_of("--minibatch-size 3"), "multiple of"),
    "the temperature of greedy decoding": (flags_of("--temperature 0"), "ZeroDivision"),
    "a run that exists": (flags_of("--output-dir {c} --run-name model"), "exists"),
    "no such template": (flags_of("--chat-template {c}/no.jinja"), r"no\.jinja"),
    "no such checkpoint": (flags_of("--resume {c}/runs/x/checkpoints/step_000001"), "step_000001"),
    # checkpoints
    "a checkpoint cut short": (resumed(cut("*.*t*")), "(?i)zip|archive|incomplete|safetensors|header"),
    "a checkpoint without its file": (
        resumed(lambda f: [x.unlink() for x in f.iterdir()]),
        "(?i)no such file|incomplete|metadata",
    ),
    "a checkpoint of another model": (resumed(lambda f: None, "--lora-rank", "2"), "of another model"),
}
# What the libraries that meet it do not name, as the table says.
UNNAMED = "an empty file", "a hub id of a model with a typing error"


def run_alone(script, folder, flags):
    """One process with a limit on memory and time. `folder` is where relative paths lead to."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    limits = {"timeout": 120, "preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))}
    command = [sys.executable, str(script), *flags]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, errors="replace", **limits)


def is_finite(folder):
    """Whether all weights that runs have left, and all their metrics, are."""
    weights = [x for file in folder.glob("runs/**/final/**/*.safetensors") for x in load_file(file).values()]
    lines = [line for file in folder.glob("runs/**/metrics.jsonl") for line in file.read_text().splitlines()]
    numbers = [number for line in lines for number in json.loads(line).values()]
    return all(map(math.isfinite, numbers)) and all(x.isfinite().all() for x in weights)


def one_input(name, script, folder):
    """Runs a case in `folder`: (verdict, what it said). Verdicts: "named" (it ended and named the cause), "ran" (as it
    should), or what is wrong."""
    prepare, pattern = INPUTS[name]
    tiny = ROOT / "benchmarks" / "tiny"
    shutil.copytree(tiny / "model", folder / "model")
    lines = (tiny / "train.jsonl").read_text().splitlines(keepends=True)[:40]
    (folder / "train.jsonl").write_text("".join(lines))
    flags = f"--model {folder}/model --dataset {folder}/train.jsonl --batch-size 4 --minibatch-size 4 --eval-every 0"
    flags = f"{flags} --max-response-length 4 --total-iterations 2 --output-dir {folder}/runs --run-name run".split()
    flags += ["--group-size", "2"] * script.stem.startswith("grpo")

    def run(*more):
        return run_alone(script, folder, [*flags, *more])

    own = prepare(folder, run) if hasattr(prepare, "runs") else prepare(folder)
    try:
        done = run(*(own or []))
    except subprocess.TimeoutExpired:
        return "HANGS", ""
    words = r"(\[rank\d\]: )?(error: |[\w.]*(Error|Exception|Iteration|Invalid)\b|\u2502)"  # tyro's are in a box
    said = "\n".join(line for line in done.stderr.splitlines() if re.match(words, line))
    trained = (folder / "runs" / "run" / "final").exists() and not hasattr(prepare, "runs")
    if pattern is None:
        return ("ran" if done.returncode == 0 and trained and is_finite(folder) else "DID NOT RUN"), said
    if done.returncode <= 0 or trained:
        return ("TRAINED" if done.returncode == 0 else "CRASHED"), said
    return ("named" if re.search(pattern, said, re.S) else "NOT NAMED"), said


def inputs(count, folder, scripts):
    """Each case in a process of its own, with one of the scripts in turn."""
    found, lines = Counter(), []
    for number, name in enumerate(list(INPUTS)[:count]):
        script, case = scripts[number % len(scripts)], folder / "cases" / str(number)
        case.mkdir(parents=True)
        verdict, said = one_input(name, folder / f"{script}.py", case)
        own = [line.strip("\u2502 ") for line in said.splitlines() if re.search(INPUTS[name][1] or "^", line)]
        what = "" if INPUTS[name][1] is None else (own or said.splitlines() or [""])[-1]
        what = what.replace(str(case), "..")[:160].replace("|", "/")
        found[verdict] += 1
        lines.append(f"| {name} | {script} | {verdict} | {what} |")
        print(lines[-1], flush=True)
        shutil.rmtree(case)
    text = f"`python benchmarks/faults.py inputs {count}`: what users get wrong, and how a run of one process says so "
    text += f"(its last line). {found['named']} of {len(lines)} ended and named the cause; {found['ran']} ran, as "
    others = "".join(f"; **{found[bad]} {bad}**" for bad in found if bad not in ("named", "ran"))
    text += f"they should{others or '; none hung or trained on what it should not'}.\n\n"
    text += "| input | script | verdict | last line |\n| --- | --- | --- | --- |\n" + "\n".join(lines) + "\n"
    (RESULTS / "inputs.md").write_text(text)
    print(text[: text.index("| input")])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "signals", "delays", "soak", "disk", "inputs"])
    parser.add_argument("count", type=int)
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=SCRIPTS)
    options = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        copy_scripts(place)
        test = (ROOT / "benchmarks" / "tiny" / "test.jsonl").read_text().splitlines(keepends=True)[:16]
        (place / "test.jsonl").write_text("".join(test))
        campaigns = {"kills": kills, "signals": signals, "delays": delays, "soak": soak, "disk": disk, "inputs": inputs}
        campaigns[options.what](options.count, place, options.scripts)
