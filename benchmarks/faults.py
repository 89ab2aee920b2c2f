"""What a run survives, at length: kills, a slow process, long runs. tests/test_resume.py has each at small size.

    python benchmarks/faults.py kills 50         kill -9 at random moments, then --resume auto: the same weights?
    python benchmarks/faults.py delays 8         one process 20 seconds late at random points: the same weights?
    python benchmarks/faults.py soak 2000        2,000 iterations with everything on: memory, speed, file handles
    python benchmarks/faults.py inputs 300       malformed data, models, tokenizers, flags, checkpoints: does it end?

Two processes on CPU (`inputs`: one), the embedded model and small batches. The scripts take turns, with the fourth that
they compose; --scripts names fewer. They are copied first, so that they can be worked on meanwhile. Results go to
benchmarks/results/faults/; `kills` adds to what is in its kills.jsonl.
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
FLAGS += " --kl-controller adaptive --kl-reward-coef 0.02 --lr-schedule cosine --warmup-iterations 2"
OWN = {"ppo_llm": "", "grpo_llm": "--group-size 2 --batch-size 4 --estimator rloo", "ppo_llm_fsdp": "--lora-rank 4"}
OWN |= {"grpo_llm_fsdp": "--group-size 2 --batch-size 4 --rollout-params sharded"}
FIRST = 0.3  # share of a run before which it is not killed: libraries are being loaded
HANGS = 90  # seconds after which what is left of a killed run is killed as well
KINDS = "dataset", "model", "tokenizer", "flags", "checkpoint"

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
    """Hash of every weight of final/ and best/ and of all metrics that do not depend on the clock."""
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
    whole, rng = undisturbed(folder, scripts), random.Random(earlier)
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
    flags += ["--kl-loss-coef", "0.01", "--old-logprobs", "corrected", "--gradient-checkpointing"]
    flags += ["--lr", "1e-5", "--critic-lr", "1e-4", "--target-kl", "1", "--dual-clip", "3", "--value-clip", "0.2"]
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
    text += "checkpoint every 10, adaptive KL, KL in the loss, entropy bonus, dual clip, value clip, corrected "
    text += "log-probs, gradient checkpointing, TensorBoard. Memory and files are of one process.\n\n" + table
    (RESULTS / "soak.md").write_text(text)
    print(text)


def spoil_value(value, rng):
    """JSON with something in it replaced by what is not expected there."""
    if isinstance(value, dict | list) and value and rng.random() < 0.9:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value[key] = spoil_value(value[key], rng)
        return value
    nested = []
    for _ in range(500):
        nested = [nested]
    return rng.choice(
        [None, -1, 0, 1e300, True, "", "x", "\0", "\u202e\U0001f9ea", "9" * 100_000, [], {}, [None], nested]
    )


def spoil(file, rng):
    """Damages a file in one of many ways; says which."""
    data = file.read_bytes()
    ways = ["cut", "bytes", "nul", "utf-16", "latin-1", "empty", "not json", "twice", "garbage"]
    ways += ["value"] * 8 * (file.suffix in (".json", ".jsonl"))
    way, place = rng.choice(ways), rng.randrange(len(data))
    if way == "value":
        lines = data.decode().splitlines() if file.suffix == ".jsonl" else [data.decode()]
        index = rng.randrange(len(lines))
        lines[index] = json.dumps(spoil_value(json.loads(lines[index]), rng))
        file.write_text("\n".join(lines) + "\n")
    else:
        flipped = bytearray(data)
        for _ in range(20):
            flipped[rng.randrange(len(data))] = rng.randrange(256)
        if way in ("utf-16", "latin-1"):
            data = (data.decode("utf-8", "replace") + "\u00e9").encode(way, "replace")
        changed = {"cut": data[:place], "bytes": bytes(flipped), "nul": data[:place] + b"\0" * 9 + data[place:]}
        changed |= {"empty": b"", "not json": b"hello " * 999, "twice": data + data, "garbage": rng.randbytes(5000)}
        file.write_bytes(changed.get(way, data))
    return f"{file.name} {way}"


BAD_FLAGS = """--lr nan|--lr x|--lr 1e30|--batch-size 0|--batch-size 7|--batch-size 1e3|--minibatch-size 3|--seed x
--gamma x|--reward nowhere.py:f|--reward x|--chat-template nowhere|--run-name a/b|--model ''|--group-size 0
--model /dev/null|--model \U0001f9ea|--dataset ''|--dataset /|--dataset /dev/zero.jsonl|--eval-dataset no.csv
--max-prompt-length 1|--max-response-length 0|--kl-controller adaptive --kl-target 0|--temperature 0|--estimator x
--resume nowhere|--resume auto|--resume ''|--resume /|--reward-model nowhere|--lora-rank -2|--shard-group-size 2
--answer-column no|--track x|--output-dir /dev/null|--keep-checkpoints 0|--resume \u202e|--dtype float8|--unknown 3
--prompt-column no|--top-p 0|--clip-low inf|--minibatch-size 0|--group-size 1|--rollout-batch-size 0|--ppo-epochs 0"""
BAD_FLAGS = re.split(r"[|\n]", BAD_FLAGS)
SENTENCE = "error: |.*(Error parsing|Unrecognized|invalid choice|[Rr]equired)"  # of ours, or of tyro
VERDICTS = "sentence", "traceback", "ran", "CRASH", "HANG", "NOT FINITE"


def one_input(number, folder, script):
    """Prepares case `number`: (what is wrong, flags). Every case has a folder of its own."""
    rng, tiny = random.Random(number), ROOT / "benchmarks" / "tiny"
    shutil.copytree(tiny / "model", folder / "model")
    lines = (tiny / "train.jsonl").read_text().splitlines(keepends=True)[:40]
    (folder / "train.jsonl").write_text("".join(lines))
    flags = f"--model {folder}/model --dataset {folder}/train.jsonl --batch-size 4 --minibatch-size 4"
    flags += f" --max-response-length 4 --total-iterations 2 --eval-every 0 --output-dir {folder}/runs --run-name run"
    flags, kind = flags.split() + ["--group-size", "2"] * script.startswith("grpo"), KINDS[number % len(KINDS)]
    if kind == "dataset":
        what = spoil(folder / "train.jsonl", rng)
        if rng.random() < 0.3:
            other = folder / f"train{rng.choice(['.parquet', '.csv', '.json'])}"
            (folder / "train.jsonl").rename(other)
            flags[3], what = str(other), f"{what}, named {other.name}"
    elif kind == "model":
        what = spoil(folder / "model" / rng.choice(["config.json"] * 3 + ["model.safetensors"]), rng)
    elif kind == "tokenizer":
        what = spoil(folder / "model" / rng.choice(["tokenizer.json", "tokenizer_config.json"]), rng)
    elif kind == "flags":
        what = rng.choice(BAD_FLAGS)
        flags += ["" if word == "''" else word for word in what.split()]
    else:
        run_alone(folder.parent.parent / f"{script}.py", folder, [*flags, "--save-every", "1"]).check_returncode()
        place = folder / "runs" / "run" / "checkpoints" / "step_000002"
        what = spoil(rng.choice(sorted(place.iterdir())), rng)
        flags += ["--resume", str(place), "--total-iterations", "4"]
    return what, flags


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


def inputs(count, folder, scripts):
    """Each case in a process of its own. What it said is printed, to be read: does it name the cause?"""
    found = Counter()
    for number in range(count):
        script, case = scripts[number // len(KINDS) % len(scripts)], folder / "cases" / str(number)
        case.mkdir(parents=True)
        what, flags = one_input(number, case, script)
        try:
            run = run_alone(folder / f"{script}.py", case, flags)
            said = run.stderr.strip().splitlines() or [""]
            sentences = [line for line in said if re.match(SENTENCE, line)]
            said = (sentences or said[-1:])[0]
            if run.returncode <= 0:
                verdict = "CRASH" if run.returncode else "ran" if is_finite(case) else "NOT FINITE"
            else:
                verdict = "traceback" if "Traceback" in run.stderr or not sentences else "sentence"
        except subprocess.TimeoutExpired:
            verdict, said = "HANG", ""
        found[KINDS[number % len(KINDS)], verdict] += 1
        print(number, script, verdict, repr(what), "|", said[:200], flush=True)
        shutil.rmtree(case)
    text = (
        "How runs with something damaged ended: with a sentence of ours, with the traceback of what could not use it,\n"
    )
    text += "or after all iterations; by a signal, not within two minutes, or with weights or metrics not finite.\n\n"
    text += f"| damaged | {' | '.join(VERDICTS)} |\n{'| --- ' * (len(VERDICTS) + 1)}|\n"
    for kind in KINDS:
        text += f"| {kind} | {' | '.join(str(found[kind, verdict]) for verdict in VERDICTS)} |\n"
    (RESULTS / "inputs.md").write_text(text)
    print(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "delays", "soak", "inputs"])
    parser.add_argument("count", type=int)
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=SCRIPTS)
    options = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        copy_scripts(place)
        test = (ROOT / "benchmarks" / "tiny" / "test.jsonl").read_text().splitlines(keepends=True)[:16]
        (place / "test.jsonl").write_text("".join(test))
        campaigns = {"kills": kills, "delays": delays, "soak": soak, "inputs": inputs}
        campaigns[options.what](options.count, place, options.scripts)
