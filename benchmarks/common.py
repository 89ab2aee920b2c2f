"""What the other files share: where things are, how a program is launched, how results are read and written.

Files in campaigns/ put the folder of this one on the path; this one adds those of the scripts and of variants.py.
"""

import csv
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TINY = ROOT / "benchmarks" / "tiny"
LAUNCH = "--num_machines 1 --mixed_precision no --dynamo_backend no"
sys.path += str(ROOT), str(ROOT / "notes")
import variants  # noqa: E402


def launcher(processes, *command, python=sys.executable):
    """The words that start this command, a Python file and its flags, in so many processes."""
    words = [python, "-m", "accelerate.commands.launch"]
    words += ["--multi_gpu"] if processes > 1 else []
    words += ["--num_processes", processes, *LAUNCH.split(), "--main_process_port", "0", *command]
    return [str(word) for word in words]


def run(words, limit=math.inf, **environment):
    """Runs a command to its end, each process on one thread: (what it printed, bytes of its largest process).

    If it fails, this program ends with the last of what it printed. So it does if for `limit` seconds nothing is
    printed and its processes hardly compute, as when they wait for each other; or if nothing is for ten times as long.
    """
    ours = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "1"}
    with tempfile.TemporaryFile("w+") as console:
        options = {"stdout": console, "stderr": subprocess.STDOUT, "env": os.environ | ours | environment}
        process = subprocess.Popen([str(word) for word in words], **options)
        ended, looked, computed = 0, time.time(), 0.0
        while not ended:
            time.sleep(0.05)
            silent = time.time() - os.fstat(console.fileno()).st_mtime
            if time.time() - looked > limit:
                before, computed, looked = computed, processor_seconds(process.pid), time.time()
                if silent > limit and (computed - before < limit / 20 or silent > 10 * limit):
                    abort(process.pid)
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        process.returncode = os.waitstatus_to_exitcode(status)
        console.seek(0)
        said = console.read()
    if process.returncode:
        sys.exit(f"{' '.join(process.args)}: exit code {process.returncode}\n{said[-20000:]}")
    return said, 1024 * usage.ru_maxrss


def processor_seconds(pid):
    """Of a process and those that it has started."""
    found = 0.0
    with suppress(psutil.NoSuchProcess):  # they may end meanwhile
        for one in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            found += sum(one.cpu_times()[:2])
    return found


def abort(pid):
    """Ends a process and those that it has started, one by one: faulthandler prints where each of them stood."""
    process = psutil.Process(pid)
    for one in [*process.children(recursive=True), process]:
        if one.is_running():
            one.send_signal(signal.SIGABRT)
            time.sleep(0.5)


def find_script(name, folder, tree=ROOT):
    """The file of a script of the tree, or of what is made of it in the folder: grpo_llm_fsdp, or a variant, NAME_llm.

    Next to what lies in the folder is the bundled model.
    """
    path = folder / f"{name}.py"
    (folder / "benchmarks").mkdir(parents=True, exist_ok=True)
    if not (folder / "benchmarks" / "tiny").exists():
        (folder / "benchmarks" / "tiny").symlink_to(TINY)
    if path.name in variants.SCRIPTS:
        return tree / path.name
    path.unlink(missing_ok=True)
    if name == "grpo_llm_fsdp":
        text, conflicts = variants.sharded((tree / "grpo_llm.py").read_text(), "grpo_llm.py", tree)
        assert conflicts == 0, f"the three scripts do not merge: {conflicts} conflicts"
        path.write_text(text)
    else:
        run([sys.executable, tree / "notes" / "variants.py", "apply", name.removesuffix("_llm"), path])
    return path


def make_model(folder, shape):
    """Random weights, in bfloat16 on the disk, with the tokenizer of the bundled model: the number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

    tokenizer = AutoTokenizer.from_pretrained(TINY / "model")
    torch.manual_seed(0)
    config = Qwen2Config(**shape, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def read_lines(path):
    """The rows of a .jsonl file."""
    lines = Path(path).read_text().split("\n")  # splitlines() would also cut at U+2028, which a text may hold
    return [json.loads(line) for line in lines if line]


def read_starts(folder):
    """[(first iteration, flags)] of each start of a run, as its TensorBoard files say; other trackers write none."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    starts = []
    for file in sorted(folder.glob("events.out.tfevents.*")):  # the names begin with the time
        for event in EventFileLoader(str(file)).Load():
            texts = [value for value in event.summary.value if value.tag.startswith("args")]
            if texts:
                starts.append((event.step, json.loads(texts[0].tensor.string_val[0].decode().strip("`\n"))))
                break
    return starts


def write_lines(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_csv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def grouped(rows, *names):
    """{value of this column, or a tuple of several: the rows that have it}, in the order of the rows."""
    groups = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        groups.setdefault(key if len(names) > 1 else key[0], []).append(row)
    return groups


def markdown(head, lines):
    """A table; cells may be numbers."""
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in (head, ["---"] * len(head), *lines))


def spread(values, digits=3, middle=statistics.mean):
    """The mean, or another middle, with the lowest and the highest in brackets where they differ."""
    found = [f"{number(values):,.{digits}f}" for number in (middle, min, max)]
    return found[0] if len(set(found)) == 1 else f"{found[0]} ({found[1]}-{found[2]})"
