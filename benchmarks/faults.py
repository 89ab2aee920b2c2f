"""What a run survives, at length: kills, a slow process, long runs. tests/test_resume.py has each at small size.

    python benchmarks/faults.py kills 100        kill -9 at random moments, then --resume auto: the same weights?
    python benchmarks/faults.py delays 6         one process 20 seconds late at random points: the same weights?
    python benchmarks/faults.py soak 2000        2,000 iterations with everything on: memory, speed, file handles
    python benchmarks/faults.py inputs 300       malformed data, models, tokenizers, flags, checkpoints: one sentence?
                                                 (of grpo_llm.py and ppo_llm_fsdp.py)

Two processes on CPU, the embedded model and small batches; the scripts take turns. Results go to
benchmarks/results/faults/.
"""

import argparse
import contextlib
import hashlib
import json
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

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "faults"
SCRIPTS = "ppo_llm", "grpo_llm", "ppo_llm_fsdp"
FLAGS = "--batch-size 8 --minibatch-size 4 --max-response-length 24 --total-iterations 8 --eval-every 3 --save-every 1"
FLAGS += " --kl-controller adaptive --kl-reward-coef 0.02 --lr-schedule cosine --warmup-iterations 2"
OWN = {"ppo_llm": "", "grpo_llm": "--group-size 2 --batch-size 4 --estimator rloo", "ppo_llm_fsdp": "--lora-rank 4"}

# A reward that sleeps at random: a seed, a rank and how often are in the environment.
SLOW = """
import os, random, sys, time
sys.path.insert(0, {root!r})
import {script} as algo

real, rng = algo.compute_scores, random.Random(int(os.environ["SEED"]))

def compute_scores(*args):
    if os.environ["RANK"] == os.environ["LATE"] and rng.random() < 0.3:
        time.sleep(20)
    return real(*args)

algo.compute_scores = compute_scores
algo.main(algo.parse_args())
"""


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
    """Process ids of a run, without its launcher."""
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
        digest.update(repr([m for m in metrics.items() if not re.match("time/|throughput/|memory/", m[0])]).encode())
    return digest.hexdigest()


def undisturbed(folder):
    """{script: (outcome, seconds)} of runs that nobody touches."""
    result = {}
    for script in SCRIPTS:
        begin = time.monotonic()
        assert start(ROOT / f"{script}.py", folder, f"{script}-whole", *OWN[script].split()).wait() == 0, script
        result[script] = outcome(folder / f"{script}-whole"), time.monotonic() - begin
    return result


def kills(count, folder):
    """Moments are drawn from launch to end of an undisturbed run; results are added to those of earlier calls."""
    log = RESULTS / "kills.jsonl"
    earlier = len(log.read_text().splitlines()) if log.exists() else 0
    whole, rng = undisturbed(folder), random.Random(earlier)
    for number in range(earlier, earlier + count):
        script, victim = SCRIPTS[number % 3], ("worker", "launcher")[number % 2]
        name, own = f"kill-{number}", OWN[script].split()
        moment = rng.uniform(4, whole[script][1])
        launcher = start(ROOT / f"{script}.py", folder, name, *own)
        time.sleep(moment)
        workers = ranks(name)
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(rng.choice(workers) if victim == "worker" and workers else launcher.pid, signal.SIGKILL)
        begin = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a hang is seen below
            launcher.wait(60)
        while ranks(name) and time.monotonic() - begin < 90:
            time.sleep(0.05)
        gone = time.monotonic() - begin
        run_dir = folder / name
        saving = bool([*run_dir.rglob(".*.tmp"), *run_dir.rglob(".*.old")])
        lines = len((run_dir / "metrics.jsonl").read_text().splitlines()) if (run_dir / "metrics.jsonl").exists() else 0
        finished = (run_dir / "final").exists()
        code = start(ROOT / f"{script}.py", folder, name, "--resume", "auto", *own).wait(300)
        same = code == 0 and outcome(run_dir) == whole[script][0]
        left = [p.name for p in run_dir.rglob(".*") if p.name != ".lock"]
        row = {"script": script, "victim": victim, "moment": moment, "lines": lines, "saving": saving}
        row |= {"finished": finished, "gone": gone, "code": code, "same": same and not left}
        print(row, flush=True)
        with open(log, "a") as file:
            file.write(json.dumps(row) + "\n")
        if row["same"]:
            shutil.rmtree(run_dir)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    late, rows = [r for r in rows if r["finished"]], [r for r in rows if not r["finished"]]
    text = f"{sum(r['same'] for r in rows)} of {len(rows)} runs ended with the weights and metrics of the undisturbed "
    text += "run, to the bit, after one kill -9 at a random moment and `--resume auto`.\n\n"
    table = ["| script | worker killed | launcher killed | same at the end |", "| --- | --- | --- | --- |"]
    for script in SCRIPTS:
        mine = [r for r in rows if r["script"] == script]
        killed = [sum(r["victim"] == victim for r in mine) for victim in ("worker", "launcher")]
        table.append(f"| {script}.py | {killed[0]} | {killed[1]} | {sum(r['same'] for r in mine)} of {len(mine)} |")
    when = Counter("start" if r["lines"] == 0 else "saving" if r["saving"] else "iterations" for r in rows)
    text += "\n".join(table)
    text += (
        f"\n\nKilled before the first line of metrics: {when['start']}; within the iterations: {when['iterations']}; "
    )
    text += f"while a checkpoint or a model was being written: {when['saving']}. The last process of a killed run was "
    text += (
        f"gone after {max(r['gone'] for r in rows):.1f} s at most, {statistics.median(r['gone'] for r in rows):.1f} s "
    )
    text += f"in the median. {len(late)} more moments came when final/ was already there and are not counted "
    text += f"({sum(r['same'] for r in late)} of them the same).\n"
    (RESULTS / "kills.md").write_text(text)
    print(text)


def delays(count, folder):
    whole, results = undisturbed(folder), []
    for number in range(count):
        script = SCRIPTS[number % 3]
        (folder / f"late_{script}.py").write_text(SLOW.format(root=str(ROOT), script=script))
        own, environment = OWN[script].split(), {"SEED": str(number), "LATE": str(number // 3 % 2)}
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


def soak(count, folder):
    """Resident memory and open files of both ranks are looked at twice a second."""
    flags = ["--total-iterations", str(count), "--eval-every", "20", "--save-every", "10", "--entropy-coef", "0.001"]
    flags += ["--kl-loss-coef", "0.01", "--old-logprobs", "corrected", "--gradient-checkpointing"]
    flags += ["--lr", "1e-5", "--critic-lr", "1e-4", "--target-kl", "1", "--dual-clip", "3", "--value-clip", "0.2"]
    launcher, samples = start(ROOT / "ppo_llm.py", folder, "soak", *flags), []
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


BAD_FLAGS = """--lr nan|--lr x|--lr -1|--batch-size 0|--batch-size 7|--batch-size 1e3|--minibatch-size 3|--seed -1
--gamma 2|--reward nowhere.py:f|--reward x|--prompt-template none|--run-name ../../x|--run-name a/b|--model ''
--model /dev/null|--model \U0001f9ea|--dataset ''|--dataset /|--dataset /dev/zero.jsonl|--eval-dataset no.csv
--max-prompt-length 1|--max-response-length 99999|--kl-controller adaptive --kl-reward-coef 0|--temperature 0
--resume nowhere|--resume auto|--resume ''|--resume /|--chat-template nowhere|--reward-model nowhere|--lora-rank -2
--answer-column no|--track x|--output-dir /dev/null|--keep-checkpoints 0|--resume \u202e|--dtype float8|--unknown 3
--prompt-column no|--top-p 0|--clip-low inf"""
# Of ours, or of tyro.
SENTENCE = "error: |.*(Error parsing|Unrecognized|invalid choice|[Rr]equired)"
BAD_FLAGS = re.split(r"[|\n]", BAD_FLAGS)


def one_input(number, folder):
    """Prepares case `number`: (what is wrong, script, flags). Every case has a folder of its own."""
    rng = random.Random(number)
    script, tiny = SCRIPTS[1:][number % 2], ROOT / "benchmarks" / "tiny"
    shutil.copytree(tiny / "model", folder / "model")
    lines = (tiny / "train.jsonl").read_text().splitlines(keepends=True)[:40]
    (folder / "train.jsonl").write_text("".join(lines))
    flags = f"--model {folder}/model --dataset {folder}/train.jsonl --batch-size 4 --minibatch-size 4 --group-size 2"
    flags += f" --max-response-length 4 --total-iterations 1 --eval-every 0 --output-dir {folder}/runs --run-name run"
    flags, kind = flags.split(), ("dataset", "model", "tokenizer", "flags", "checkpoint")[number % 5]
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
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {script} as a; a.main(a.parse_args())"
        command = [sys.executable, "-c", code, *flags, "--save-every", "1"]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        place = folder / "runs" / "run" / "checkpoints" / "step_000001"
        what = spoil(rng.choice(sorted(place.iterdir())), rng)
        flags += ["--resume", str(place), "--total-iterations", "2"]
    return what, script, flags


def inputs(count, folder):
    """Each case in a process of its own, with a limit on memory and time."""
    results, limits = [], lambda: resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    for number in range(count):
        case = folder / str(number)
        case.mkdir()
        what, script, flags = one_input(number, case)
        before = sorted(path.name for path in (case / "runs" / "run").glob("*"))
        command = [sys.executable, str(ROOT / f"{script}.py"), *flags]
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        options = {"capture_output": True, "text": True, "errors": "replace", "env": env, "preexec_fn": limits}
        try:
            run = subprocess.run(command, timeout=120, **options)
            said = run.stderr.strip().splitlines() or [""]
            sentence = [line for line in said if re.match(SENTENCE, line)]
            left = sorted(path.name for path in (case / "runs" / "run").glob("*")) if run.returncode else before
            verdict = "still valid" if run.returncode == 0 else "refused" if sentence else "TRACEBACK"
            if "Traceback" in run.stderr:
                verdict = "TRACEBACK"
            if verdict == "refused" and left != before:
                verdict = "HALF-WRITTEN"
        except subprocess.TimeoutExpired:
            verdict, said, sentence = "HANG", [""], []
        results.append((number % 5, verdict))
        print(number, script, verdict, repr(what), "|", (sentence or said[-1:])[0][:200], flush=True)
        shutil.rmtree(case)
    text = "| damaged | cases | refused in one sentence | still valid, run | traceback, hang or half a folder |\n"
    text += "| --- | --- | --- | --- | --- |\n"
    for kind, name in enumerate(("dataset", "model", "tokenizer", "flags", "checkpoint")):
        mine = [verdict for k, verdict in results if k == kind]
        refused, valid = mine.count("refused"), mine.count("still valid")
        text += f"| {name} | {len(mine)} | {refused} | {valid} | {len(mine) - refused - valid} |\n"
    (RESULTS / "inputs.md").write_text(text)
    print(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "delays", "soak", "inputs"])
    parser.add_argument("count", type=int)
    options = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        test = (ROOT / "benchmarks" / "tiny" / "test.jsonl").read_text().splitlines(keepends=True)[:16]
        (place / "test.jsonl").write_text("".join(test))
        {"kills": kills, "delays": delays, "soak": soak, "inputs": inputs}[options.what](options.count, place)
