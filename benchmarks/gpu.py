"""Have a GPU? Run this: do the scripts work on your card, how fast are they, and how much memory do they take?

    python benchmarks/gpu.py                     all that your machine can do
    python benchmarks/gpu.py --steps scripts     one part, or single steps; the results of all calls make one table
    python benchmarks/gpu.py --small             a tiny model, also without a GPU: does this command work?

You need one card of 24 GB or more and 20 GB of disk for temporary files (TMPDIR says where), but no network: the model
has the shape of Qwen2.5-0.5B and random weights, and its scores mean nothing. On an H200 `scripts` took five minutes.
We guess that all of it takes 25 on one card, and each part less than ten.

    scripts     ppo_llm, grpo_llm, lora, ppo_llm_fsdp, grpo_llm_fsdp: three iterations of each on one GPU, with the
                seconds of each phase, and the peak of memory next to what notes/memory.py forecasts
    sampling    generate, graphs, vllm: tokens per second of three ways to sample
    sizes       defaults, grpo_llm-fit, ppo_llm-fit: rows of 512 + 512 tokens, with the default batch sizes and with
                those that notes/memory.py recommends for your card
    trust       resume: a run that is killed with -9 and resumed, next to an undisturbed one; float32, bfloat16,
                float16: how far apart sampler and training pass are
    two         needs two GPUs: the scripts again (ppo_llm-two ...), and agreement of one process and two

If a step fails, the others still run, and the exit status is 1. vLLM needs its own environment (notes/run/speed.md):
call this with `--steps vllm` there.

The results are in benchmarks/results/gpu/NAME-OF-YOUR-CARD/: README.md is the table, rows.jsonl has every number.
"""

import argparse
import getpass
import importlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from dataclasses import astuple
from importlib.metadata import packages_distributions, version
from pathlib import Path

import common
import memory
import torch
import variants
from common import ROOT, TINY, read_lines

LIBRARIES = "torch", "transformers", "accelerate", "peft", "kernels", "flash_attn", "flash_attn_interface", "vllm"
# Responses of an iteration, of a prompt in GRPO, of an optimizer step; tokens of a prompt and of a response.
Work = namedtuple("Work", "responses group minibatch prompt response")
WORK = {"short": Work(64, 8, 32, 64, 256), "wide": Work(256, 8, 64, 64, 512), "long": Work(256, 8, 64, 512, 512)}
TINY_WORK = {"short": Work(16, 4, 8, 24, 8), "wide": Work(32, 4, 16, 24, 8), "long": Work(16, 4, 8, 48, 16)}
TINY_SHAPE = memory.Shape(vocab=1024, hidden=64, intermediate=128, layers=2, heads=2, kv_heads=1, tied=True)
SHAPE = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
SHAPE += " tie_word_embeddings"  # the fields of memory.Shape as a config calls them
# What the steps share: arguments, temporary folder, what describe_card finds, memory.Shape of the model, WORK.
Bench = namedtuple("Bench", "args folder card shape work")


# --- What runs in a process of its own: python gpu.py inside FUNCTION ARGUMENTS --------------------------------------


def load_with_graphs(path):
    """A script as a module, with the `generate` of notes/variants/cuda_graphs.py."""
    sys.path.insert(0, str(ROOT / "notes" / "variants"))
    graphs = importlib.import_module("cuda_graphs")
    graphs.script = graphs.load_script(path)
    return graphs.script


def run_script(path, *flags):
    """A script, and the seconds of its phases in metrics.jsonl. Before its flags, `graphs` may stand."""
    import phases

    sys.path.insert(0, str(Path(path).parent))
    sys.argv = [path, *[flag for flag in flags if flag != "graphs"]]
    script = load_with_graphs(path) if "graphs" in flags else importlib.import_module(Path(path).stem)
    phases.Clock(script)
    script.main(script.parse_args())


def alternate(prompts, responses, answers):
    """The reward: random weights answer nothing right, but unless scores differ there is no gradient."""
    return [float(i % 2) for i in range(len(responses))]


def describe_card(result):
    """What PyTorch says about the card, the dtype that the scripts choose for it, and the installed versions."""
    import grpo_llm

    accelerator = grpo_llm.start_processes(grpo_llm.Args(model="", track="none"))
    card = {"card": "no GPU", "GPUs": torch.cuda.device_count() if torch.cuda.is_available() else 0}
    if card["GPUs"]:
        found = torch.cuda.get_device_properties(0)
        card |= {"card": found.name, "GB": found.total_memory / 1e9, "CUDA": torch.version.cuda}
        card["compute capability"] = f"{found.major}.{found.minor}"
    card["dtype"] = "bfloat16" if accelerator.mixed_precision == "bf16" else "float32"
    installed = packages_distributions()  # vLLM's build for CPUs has another name than its module
    card |= {library: version(installed[library][0]) for library in LIBRARIES if library in installed}
    Path(result).write_text(json.dumps(card | {"Python": platform.python_version()}))


# --- Starting those processes ----------------------------------------------------------------------------------------


def start(args, processes, function, *words):
    """A process, or a launcher with several, that calls a function of this file."""
    call = [Path(__file__).resolve(), "inside", function, *words]
    command = common.launcher(processes, *call) if processes > 1 else [sys.executable, *map(str, call)]
    env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | os.environ
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    return subprocess.Popen(command, env=env, **pipes)


def finish(args, process):
    """Waits for it and returns its console; if it failed, that is in the RuntimeError."""
    try:
        console, _ = process.communicate(timeout=args.timeout)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        console, _ = process.communicate()
        raise RuntimeError(f"{console.strip()}\nstopped after {args.timeout:.0f} seconds") from None
    if process.returncode:
        said, *report = re.split(r"\n.*torch/distributed/elastic/", console, maxsplit=1)
        codes = re.findall(r"exitcode: -?\d+", "".join(report))  # all that we need of the launcher's long report
        killed = [f"killed by {signal.Signals(-process.returncode).name}"] if process.returncode < 0 else []
        raise RuntimeError("\n".join([said.strip(), *codes[:1], *killed]))
    return console


def ask(args, folder, function):
    """What a function of this file finds in a process of its own and writes as JSON."""
    result = folder / f"{function}.json"
    finish(args, start(args, 1, function, result))
    return json.loads(result.read_text())


def begin(bench, script, work, sizes, more, processes=1, iterations=3, name="run"):
    """The process that runs a script. sizes: --rollout-batch-size, --microbatch-tokens, --gradient-checkpointing."""
    rows, tokens, checkpointing = sizes
    group = 1 if script.startswith("ppo") else work.group
    data = bench.folder / f"{work.prompt}.jsonl"
    words = ["--model", bench.folder / "model", "--dataset", data, "--eval-dataset", data, "--chat-template", "none"]
    words += ["--reward", f"{Path(__file__).resolve()}:alternate", "--output-dir", bench.folder / "runs"]
    flags = f"--batch-size {work.responses // group} --minibatch-size {work.minibatch} --rollout-batch-size {rows}"
    flags += f" --group-size {group}" * (group > 1) + " --gradient-checkpointing" * checkpointing
    flags += f" --microbatch-tokens {tokens} --max-prompt-length {2 * work.prompt}"
    flags += f" --max-response-length {work.response} --total-iterations {iterations} --run-name {name}"
    flags += f" --eval-every 0 --eval-rows 0 --track none {more} {bench.args.flags}"
    path = common.find_script(script, bench.folder, ROOT)
    return start(bench.args, processes, "run_script", path, *words, *shlex.split(flags))


def read_metrics(bench, name):
    """The lines of metrics.jsonl without the first, which is from before training."""
    return read_lines(bench.folder / "runs" / name / "metrics.jsonl")[1:]


# --- The steps: functions that return rows of the table --------------------------------------------------------------


def kernels(bench, dtype):
    """What notes/memory.py wants to know about the dtype: its size, and whether attention has a fused kernel."""
    return {"bf16": dtype != "float32", "fused": dtype != "float32" or not bench.card["GPUs"]}


def recommend(bench, **options):
    """Sizes for `begin`, from notes/memory.py; None if nothing fits on this card."""
    if bench.args.small:
        return 8, 256, False
    return memory.settings(bench.shape, bench.card["GB"], **options)


def forecast(bench, work, sizes, options):
    """GiB that notes/memory.py computes for all rows at their full length."""
    length, step_rows = work.prompt + work.response, work.minibatch // options["processes"]
    pass_rows = min(step_rows, max(1, sizes[1] // length))
    rows = min(sizes[0], work.responses // options["processes"])
    batch = {"length": length, "response_length": work.response, "rows": rows, "checkpointing": sizes[2]}
    batch |= {"tokens": pass_rows * length, "microbatches": math.ceil(step_rows / pass_rows)}
    return memory.budget(bench.shape, **options, **batch)["peak"] / memory.GIB


def train(bench, script, size="short", sizes=None, processes=1, lora=0, dtype="auto", iterations=3, before=""):
    """A script for a few iterations: seconds of its phases, memory, and how far sampler and training pass differ."""
    work = bench.work[size]
    used = bench.card["dtype"] if dtype == "auto" else dtype
    options = {"processes": processes, "sharded": "fsdp" in script, "critic": script.startswith("ppo")}
    options |= {"lora_rank": lora, "graphs": before == "graphs"} | kernels(bench, used)
    sizes = sizes or recommend(bench, **options)
    if sizes is None:
        return [{"result": "needs a larger card"}]
    more, name = f"{before} --lora-rank {lora} --dtype {dtype} --save-every 0", f"run-{processes}"
    process = begin(bench, script, work, sizes, more, processes, iterations, name)
    console = finish(bench.args, process)
    metrics = read_metrics(bench, name)
    later = metrics[1:] or metrics  # the first iteration also warms up
    median = {key: statistics.median(line[key] for line in later) for key in later[0]}
    row = {"on": ", ".join(re.search(r"process\(es\) on (\w+), (\w+)", console).groups())}
    row["rows / tokens"] = f"{sizes[0]} / {sizes[1]}{' gc' * sizes[2]}"
    row |= {f"{phase}, s": median[f"time/{phase}"] for phase in ("rollout", "reward", "logprobs")}
    update = "values", "advantages", "actor", "critic", "log"
    row["update, s"] = sum(median.get(f"time/{phase}", 0) for phase in update)
    row["iteration, s"] = median["time/iteration"]
    row["sampled tokens/s"] = median["response/length_mean"] * work.responses / median["time/rollout"]
    row["peak, GiB"] = max(line["memory/peak_gib"] for line in metrics) if bench.card["GPUs"] else "needs a GPU"
    known = script.removesuffix("_fsdp") in ("ppo_llm", "grpo_llm")
    row["forecast, GiB"] = forecast(bench, work, sizes, options) if known else ""
    row["rollout/kl"] = max(line["rollout/kl"] for line in metrics)
    return [row | {"metrics": metrics}]


def compare(name, metrics, others):
    """A row: how far two runs are apart, in metrics that are not nearly 0."""
    alike = 0
    row = {"compared": name}
    for one, other in zip(metrics, others):
        alike += all(one[key] == other[key] for key in one if not key.startswith(("time/", "memory/")))
        for key in "actor/entropy", "actor/grad_norm":
            difference = abs(one[key] - other[key]) / max(abs(one[key]), abs(other[key]), 1e-9)
            label = f"{key}, largest relative difference"
            row[label] = max(difference, row.get(label, 0.0))
    return [row | {"equal iterations": f"{alike} of {len(metrics)}", "metrics": others}]


def resume(bench):
    """Three runs with one seed, the last of which is killed after its first checkpoint and resumed."""
    sizes = recommend(bench, critic=False, **kernels(bench, bench.card["dtype"]))
    if sizes is None:
        return [{"result": "needs a larger card"}]

    def begin_run(name, more):
        return begin(bench, "grpo_llm", bench.work["short"], sizes, more, iterations=4, name=name)

    for name in "first", "again":
        finish(bench.args, begin_run(name, "--save-every 0"))
    saving, checkpoints = "--save-every 1 --keep-checkpoints 1 --resume", "runs/killed/checkpoints/step_*"
    killed = begin_run("killed", saving)
    until = time.time() + bench.args.timeout
    try:
        while killed.poll() is None and time.time() < until and not list(bench.folder.glob(checkpoints)):
            time.sleep(0.02)
        if killed.poll() is not None:
            finish(bench.args, killed)  # says why, if it failed
            raise RuntimeError("the run ended before it could be killed")
    finally:
        if killed.poll() is None:
            os.killpg(killed.pid, signal.SIGKILL)
            killed.communicate()
    done = len(read_metrics(bench, "killed"))
    finish(bench.args, begin_run("killed", saving))
    first, again, last = (read_metrics(bench, name) for name in ("first", "again", "killed"))
    rows = compare("a run and the same run again", first, again)
    return rows + compare(f"a run and one that was killed after {done} iteration(s) and resumed", first, last)


def agreement(bench):
    one, two = (train(bench, "grpo_llm", processes=n, dtype="float32")[0]["metrics"] for n in (1, 2))
    return compare("one process and two, float32", one, two)


WIDE = {"size": "wide", "iterations": 2}
LONG = {"size": "long", "iterations": 2}
# part, step, what it needs besides a GPU, function, its arguments
STEPS = [
    ("scripts", "ppo_llm", None, train, {"script": "ppo_llm"}),
    ("scripts", "grpo_llm", None, train, {"script": "grpo_llm"}),
    ("scripts", "lora", "peft", train, {"script": "grpo_llm", "lora": 16}),
    ("scripts", "ppo_llm_fsdp", None, train, {"script": "ppo_llm_fsdp"}),
    ("scripts", "grpo_llm_fsdp", None, train, {"script": "grpo_llm_fsdp"}),
    ("sampling", "generate", None, train, WIDE | {"script": "grpo_llm"}),
    ("sampling", "graphs", None, train, WIDE | {"script": "grpo_llm", "before": "graphs"}),
    ("sampling", "vllm", "vllm", train, WIDE | {"script": "vllm_llm"}),
    ("sizes", "defaults", None, train, LONG | {"script": "grpo_llm", "sizes": (256, 4096, False)}),
    ("sizes", "grpo_llm-fit", None, train, LONG | {"script": "grpo_llm"}),
    ("sizes", "ppo_llm-fit", None, train, LONG | {"script": "ppo_llm"}),
    ("trust", "resume", None, resume, {}),
    ("trust", "float32", None, train, {"script": "grpo_llm", "dtype": "float32"}),
    ("trust", "bfloat16", None, train, {"script": "grpo_llm", "dtype": "bfloat16"}),
    ("trust", "float16", None, train, {"script": "fp16_llm", "dtype": "float16"}),
    ("two", "ppo_llm-two", "two GPUs", train, {"script": "ppo_llm", "processes": 2}),
    ("two", "grpo_llm-two", "two GPUs", train, {"script": "grpo_llm", "processes": 2}),
    ("two", "ppo_llm_fsdp-two", "two GPUs", train, {"script": "ppo_llm_fsdp", "processes": 2}),
    ("two", "grpo_llm_fsdp-two", "two GPUs", train, {"script": "grpo_llm_fsdp", "processes": 2}),
    ("two", "agreement", "two GPUs", agreement, {}),
]
ORDER = [step for _, step, *_ in STEPS]


def explain(said):
    """(the line that names the error, the last 25 lines) of what a failed process said.

    When CUDA fails, each of its threads says so, and C++ prints dozens of frames after Python's traceback.
    """
    alike = {re.sub(r"\d+", "0", line): line for line in said.splitlines() if not re.match(r"\s*frame #\d", line)}
    lines = list(alike.values())
    named = [line for line in lines if re.match(r"([\w.]*Error|error\b|stopped after)", line)]
    return (named or lines or ["it said nothing"])[-1], "\n".join(lines[-25:])


def run_step(bench, part, step, needs, function, options):
    """The rows of a step, or one that says why there is none."""
    started = time.time()
    shutil.rmtree(bench.folder / "runs", ignore_errors=True)
    lacks = bench.card["GPUs"] == 1 if needs == "two GPUs" else needs and needs not in bench.card
    try:
        rows = [{"result": f"needs {needs}"}] if lacks else function(bench, **options)
    except (Exception, SystemExit) as error:  # whatever it is, the other steps shall run
        reason, said = explain(clean(str(error)))
        rows = [{"result": f"failed: {reason[:150]}", "error": said}]
    versions = {name: bench.card.get(name) for name in (*LIBRARIES, "commit")}
    about = {"part": part, "step": step, "result": "ok", "took, s": round(time.time() - started)}
    return [about | row | {"versions": versions} for row in rows]


# --- Model, prompts and table ----------------------------------------------------------------------------------------

NOTES = """Seconds are medians over the iterations after the first. The update is all that follows the log-probs of
policy and reference. "rows / tokens" are `--rollout-batch-size` and `--microbatch-tokens`, which `notes/memory.py`
recommends for this card (with `--small` they are fixed); gc: with `--gradient-checkpointing`. The forecast is that of
`notes/memory.py`, too. The peak of memory and rollout/kl (sampler against training pass) are the largest of any
iteration, which has {} responses of {} tokens (`sampling`: {} of {}; `sizes`: {} of {} with the prompt). On a GPU, two
runs with one seed need not be equal."""


def write_prompts(folder, length):
    """64 different prompts of so many tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    questions, rows = [row["question"] for row in read_lines(TINY / "test.jsonl")], []
    for i in range(64):
        tokens = tokenizer(" ".join(questions[i : i + 30])).input_ids[:length]
        rows.append({"question": tokenizer.decode(tokens, skip_special_tokens=True), "answer": ""})
    common.write_lines(folder / f"{length}.jsonl", rows)


def clean(text):
    """Without paths, host and user, so that you can show it to others."""
    text = re.sub(r"(?<![\w.])/[^\s:'\"]*/", ".../", text)
    for name in platform.node(), getpass.getuser():
        if name not in ("", "root", "localhost"):
            text = re.sub(rf"\b{re.escape(name)}\b", "...", text)
    return text


def as_cell(value):
    if isinstance(value, float):
        value = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "/")


def make_table(card, rows, work):
    """Markdown: the card, then for each part the rows that have the same columns, then what these mean."""
    text = f"# {card['card']}\n\n" + ", ".join(f"{name} {as_cell(value)}" for name, value in card.items()) + "\n"
    tables = {}
    for row in rows:
        columns = tuple(name for name in row if name not in ("part", "metrics", "versions", "error"))
        tables.setdefault(row["part"], {}).setdefault(columns, []).append([as_cell(row[name]) for name in columns])
    for part, found in tables.items():
        text += f"\n## {part}\n"
        for columns, cells in found.items():
            text += f"\n{common.markdown(columns, cells)}\n"
    short, wide, long = work.values()
    lengths = short.responses, short.response, wide.responses, wide.response
    lengths += long.responses, f"{long.prompt} + {long.response}"
    return f"{text}\n{NOTES.format(*lengths)}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*dict.fromkeys(part for part, *_ in STEPS), *ORDER]
    parser.add_argument("--steps", nargs="+", choices=names, metavar="NAME", help="parts or steps (unset: all)")
    parser.add_argument("--small", action="store_true", help="a tiny model and a few short responses")
    parser.add_argument("--flags", default="", help="more flags for the scripts, in quotes")
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which a process is stopped (600)")
    parser.add_argument("--out", type=Path, help="folder for README.md and rows.jsonl")
    args = parser.parse_args()
    chosen = [line for line in STEPS if not args.steps or {line[0], line[1]} & {*args.steps}]
    with tempfile.TemporaryDirectory() as temporary:
        folder, started = Path(temporary), time.time()
        card = ask(args, folder, "describe_card")
        card["start-up, s"] = time.time() - started
        if not card["GPUs"] and not args.small:
            sys.exit("error: PyTorch sees no GPU here; with --small this command also runs without one")
        shape = TINY_SHAPE if args.small else memory.SHAPES["Qwen2.5-0.5B"]
        card["model"] = "a tiny one" if args.small else "Qwen2.5-0.5B's shape, random weights"
        common.make_model(folder / "model", dict(zip(SHAPE.split(), astuple(shape))))
        card["commit"] = variants.git("log", "-1", "--format=%h", cwd=ROOT, check=False).stdout.strip()
        bench = Bench(args, folder, card, shape, TINY_WORK if args.small else WORK)
        for length in {work.prompt for work in bench.work.values()}:
            write_prompts(folder, length)
        home = ROOT / "runs" / "gpu" if args.small else ROOT / "benchmarks" / "results" / "gpu"
        out = args.out or home / re.sub(r"\W+", "-", card["card"])
        out.mkdir(parents=True, exist_ok=True)
        table, raw = out / "README.md", out / "rows.jsonl"
        rows = read_lines(raw) if raw.exists() else []
        failed = False
        for number, line in enumerate(chosen, 1):
            print(f"{number} of {len(chosen)}, {line[1]} ...", flush=True)
            found = run_step(bench, *line)
            failed |= "error" in found[0]
            print(f"  {found[0].get('error', found[0]['result'])}", flush=True)
            rows = [row for row in rows if row["step"] != line[1]] + found
            rows.sort(key=lambda row: [*ORDER, row["step"]].index(row["step"]))  # an earlier version had more steps
            common.write_lines(raw, rows)
            table.write_text(make_table(card, rows, bench.work))
    print(f"\n{table.read_text()}\nThe table is {table}, and every number is in {raw}.")
    if card["GPUs"] and not args.small:
        print(
            "Please send us both, also if steps failed: open an issue in this project's repository, paste the table\n"
            "and attach rows.jsonl. They hold no paths and no names of hosts or users; do look through them first."
        )
    sys.exit(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["inside"]:
        globals()[sys.argv[2]](*sys.argv[3:])
    else:
        main()
