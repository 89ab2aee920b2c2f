"""Do the scripts run on your GPU, how long does an iteration take, and how much memory does it need?

    python benchmarks/gpu.py                                    everything your machine can run
    python benchmarks/gpu.py --steps grpo_llm grpo_llm-two      only these steps
    python benchmarks/gpu.py --flags="--lora-rank 16"           more flags for every script
    python benchmarks/gpu.py --small                            a tiny model, also without a GPU: does the command work?

Each step runs one script for three iterations, on a model with the shape of Qwen2.5-0.5B and random weights, so you
need neither a network nor a download. grpo_llm_fsdp.py is merged from the other three scripts. If you have two GPUs or
more, every script also runs on two of them (the steps that end in -two), and `exchange` measures how long they take to
add up the gradients of such a model. A step that fails shows its last lines, and the others still run; the exit status
is then 1. You will find the table and all numbers in benchmarks/results/gpu/NAME-OF-YOUR-CARD.
"""

import argparse
import json
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
from importlib.metadata import version
from pathlib import Path

import footprint
import learning
import torch

ROOT = learning.ROOT
sys.path.append(str(ROOT / "notes"))
import variants  # noqa: E402

SCRIPTS = "ppo_llm", "grpo_llm", "ppo_llm_fsdp", "grpo_llm_fsdp"
STEPS = *SCRIPTS, *(f"{script}-two" for script in SCRIPTS), "exchange"
FLAGS = "--total-iterations 3 --eval-every 0 --eval-rows 0 --save-every 0 --track none --run-name run"
SHAPES = {"small": {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}}
SHAPES["small"] |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
SHAPES["0.5B"] = footprint.QWEN
# Responses of an iteration, of an optimizer step and of a prompt in GRPO; longest response; tokens of a forward pass.
WORK = {
    "small": {"responses": 16, "minibatch": 8, "group": 4, "length": 8, "microbatch": 256},
    "0.5B": {"responses": 64, "minibatch": 32, "group": 8, "length": 256, "microbatch": 8192},
}
EXCHANGE = """
import sys
sys.path[:0] = [{root!r}, {benchmarks!r}]
import gpu
gpu.time_exchange({folder!r})
"""


def alternate(prompts, responses, answers):
    """The reward: random weights answer nothing right, but unless scores differ there is no gradient."""
    return [float(i % 2) for i in range(len(responses))]


def time_exchange(folder):
    """In each launched process: adds up the gradients of the model a few times; the first process writes how long."""
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    from ppo_llm import sum_gradients

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32).to(accelerator.device)
    parameters = list(model.parameters())
    times = []
    for _ in range(6):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        accelerator.wait_for_everyone()
        started = time.perf_counter()
        sum_gradients(parameters)
        found = parameters[0].grad.view(-1)[0].item()  # waits for the GPU
        times.append(time.perf_counter() - started)
        assert found == accelerator.num_processes
    if accelerator.is_main_process:
        result = {"gib": sum(4 * parameter.numel() for parameter in parameters) / 2**30, "times": times}
        Path(folder, "exchange.json").write_text(json.dumps(result))
    time.sleep(0.5)  # as at the end of the scripts
    accelerator.end_training()


def launch(args, processes, *command):
    """Runs a Python script and returns its console; if it fails, that is in the RuntimeError."""
    words = shlex.split(args.python)
    if processes > 1:
        launcher = f"-m accelerate.commands.launch --multi_gpu --num_processes {processes} --main_process_port 0"
        words[1:1] = [*launcher.split(), *learning.LAUNCH.split()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen([*words, *map(str, command)], env=env, **pipes)
    try:
        console, _ = process.communicate(timeout=args.timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        console, _ = process.communicate()
        raise RuntimeError(f"{console.strip()}\nstopped after {args.timeout:.0f} seconds") from None
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    if process.returncode:
        said, *report = re.split(r"\n.*torch/distributed/elastic/", console, maxsplit=1)
        codes = re.findall(r"exitcode: -?\d+", "".join(report))  # all that we need of the launcher's long report
        raise RuntimeError("\n".join([said.strip(), *codes[:1]]))
    return console


def flags_of(script, size, more=""):
    """How much the script has to do."""
    work = WORK[size]
    group = work["group"] if script.startswith("grpo") else 1
    flags = f"{FLAGS} --batch-size {work['responses'] // group}" + f" --group-size {group}" * (group > 1)
    flags += f" --minibatch-size {work['minibatch']} --microbatch-tokens {work['microbatch']}"
    return f"{flags} --max-response-length {work['length']} {more}".strip()


def run_script(name, size, args, folder):
    """One of the four scripts, in one process or two: its row of the results."""
    script, _, two = name.partition("-")
    path, flags = ROOT / f"{script}.py", flags_of(script, size, args.flags)
    if script == "grpo_llm_fsdp":
        parts = [(ROOT / f"{part}.py").read_text() for part in ("grpo_llm", "ppo_llm", "ppo_llm_fsdp")]
        text, conflicts = variants.merged(*parts)
        if conflicts:
            raise RuntimeError(f"the three scripts do not merge: {conflicts} conflicts")
        path = folder / path.name
        path.write_text(text)
    tiny = ROOT / "benchmarks" / "tiny"
    words = ["--model", folder / "model", "--dataset", tiny / "train.jsonl", "--eval-dataset", tiny / "test.jsonl"]
    words += ["--reward", f"{Path(__file__).resolve()}:alternate", "--output-dir", folder / "runs", *shlex.split(flags)]
    console = launch(args, 2 if two else 1, path, *words)
    lines = (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines[1:]]  # the first line is from before training
    later = metrics[1:] or metrics  # the first iteration also warms up
    rollout, iteration = (statistics.median(m[f"time/{part}"] for m in later) for part in ("rollout", "iteration"))
    tokens = statistics.median(m["response/length_mean"] for m in later) * WORK[size]["responses"]
    row = {"on": ", ".join(re.search(r"process\(es\) on (\w+), (\w+)", console).groups())}
    row |= {"rollout": rollout, "update": iteration - rollout, "iteration": iteration, "tokens/s": tokens / rollout}
    row["peak"] = max(m["memory/peak_gib"] for m in metrics)
    row["logprob_diff"] = max(m["rollout/logprob_diff"] for m in metrics)
    return row | {"flags": clean(flags, folder), "metrics": metrics}


def run_exchange(name, size, args, folder):
    """`time_exchange` in two processes: its result."""
    worker = folder / "exchange.py"
    worker.write_text(EXCHANGE.format(root=str(ROOT), benchmarks=str(ROOT / "benchmarks"), folder=str(folder)))
    launch(args, 2, worker)
    return json.loads((folder / "exchange.json").read_text())


def clean(text, folder):
    """Without the names of your folders and of your machine, so that you can show the results to others."""
    names = str(folder), str(ROOT), sys.prefix, str(Path.home()), platform.node()
    for private, public in zip(names, ("FOLDER", ".", "PYTHON", "~", "HOST")):
        if len(private) > 1:
            text = text.replace(private, public)
    return text


def make_table(about, rows):
    """Markdown: the machine, a line for each script, and how long the gradients travel."""
    lines = []
    for name, row in rows.items():
        if "error" in row:
            lines.append([name, "failed", *[""] * 6])
        elif name != "exchange":
            seconds = [f"{row[part]:.2f}" for part in ("rollout", "update", "iteration")]
            rest = f"{row['tokens/s']:,.0f}", f"{row['peak']:.1f}", f"{row['logprob_diff']:.1e}"
            lines.append([name, row["on"], *seconds, *rest])
    columns = "step", "on", "rollout, s", "update, s", "iteration, s", "sampled tokens/s", "peak, GiB", "logprob_diff"
    text = ", ".join(f"{key} {value}" for key, value in about.items()) + "\n\n" + footprint.table([*columns], lines)
    text += "\nSeconds are medians over the iterations after the first; the update is all that follows the rollout. "
    text += "Memory and logprob_diff are the largest of any iteration.\n"
    exchange, two = rows.get("exchange", {}), rows.get("ppo_llm-two", {})
    if "times" in exchange:
        seconds = statistics.median(exchange["times"][1:])
        text += f"\nTwo processes add up {exchange['gib']:.3g} GiB of gradients in {seconds:.3g} s."
        if "update" in two:
            work = WORK[about["model"]]
            steps = 2 * work["responses"] // work["minibatch"]  # of the actor and of the critic
            share = steps * seconds / two["update"]
            text += f" In an update of ppo_llm-two they do so {steps} times: {share:.0%} of it."
        text += "\n"
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", choices=STEPS, metavar="NAME", help=f"some of {', '.join(STEPS)}")
    parser.add_argument("--small", action="store_true", help="a tiny model and a few short responses")
    parser.add_argument("--flags", default="", help="more flags for the scripts, in quotes")
    parser.add_argument("--python", default=shlex.quote(sys.executable), help="command that runs a Python script")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds after which a step is stopped")
    parser.add_argument("--out", type=Path, help="folder for table.md and rows.json")
    args = parser.parse_args()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus and not args.small:
        sys.exit("error: PyTorch sees no GPU here; with --small this command also runs without one")
    about = {"card": torch.cuda.get_device_name(0) if gpus else "none", "GPUs": gpus}
    if gpus:
        about["GiB"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30)
        about["CUDA"] = torch.version.cuda
        if about["GiB"] < 36:  # without it ppo_llm.py needs about 30
            args.flags = f"--gradient-checkpointing {args.flags}"
    about |= {name: version(name) for name in ("torch", "transformers", "accelerate")}
    about |= {"Python": platform.python_version(), "model": "small" if args.small else "0.5B"}
    home = ROOT / "runs" / "gpu" if args.small else ROOT / "benchmarks" / "results" / "gpu"
    out = args.out or home / re.sub(r"\W+", "-", about["card"])
    out.mkdir(parents=True, exist_ok=True)
    rows = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        footprint.make_model(folder / "model", SHAPES[about["model"]])
        for name in args.steps or (STEPS if gpus > 1 else SCRIPTS):
            print(f"{name} ...", flush=True)
            try:
                rows[name] = (run_exchange if name == "exchange" else run_script)(name, about["model"], args, folder)
            except Exception as error:
                last_lines = "\n".join(str(error).splitlines()[-15:])
                print(f"{name} failed:\n{last_lines}", flush=True)
                rows[name] = {"error": clean(last_lines, folder)}
            shutil.rmtree(folder / "runs", ignore_errors=True)
            (out / "rows.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
            (out / "table.md").write_text(make_table(about, rows))
    print(f"\n{(out / 'table.md').read_text()}\nThe table and all numbers are in {out}")
    sys.exit(any("error" in row for row in rows.values()))


if __name__ == "__main__":
    main()
