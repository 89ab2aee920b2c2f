"""How much memory does a run need? LoRA against full fine-tuning, sharding, and the shapes of real models.

    python benchmarks/footprint.py lora          50M random parameters, two iterations of each script in both ways
    python benchmarks/footprint.py sharded       50M random parameters on 2 and 4 processes
    python benchmarks/footprint.py qwen          Qwen2.5-0.5B's shape, random weights: needs 24 GiB of memory
    python benchmarks/footprint.py real          SmolLM2 on additions (benchmarks/real.py), against notes/memory.py

No GPU is needed. Memory is the largest resident size of a process (VmHWM); the model state is all tensors that a
process holds right after an optimizer step (parameters, gradients, optimizer state of all models). Nothing is evaluated
or saved. The tables go to benchmarks/results/footprint/.
"""

import argparse
import tempfile
from itertools import zip_longest
from pathlib import Path

from common import RESULTS, ROOT, TINY, make_model, markdown
from memory import Shape, budget
from phases import Memory, measure

SCRIPTS = "ppo_llm", "grpo_llm", "ppo_llm_fsdp"
QWEN = {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
QWEN |= {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}
WIDE = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 11}
WIDE |= {"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": True}
DEEP = {"vocab_size": 420, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
DEEP |= {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 512}
PROMPT = 46  # tokens of an addition, with the template's system turn
SMOLLM2 = Shape(vocab=49_152, hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3, tied=True)


def weigh(script, model, flags, processes=1):
    """The lines of the log, and what each process took."""
    words = ["--model", model, "--dataset", f"{TINY}/train.jsonl", "--eval-dataset", f"{TINY}/test.jsonl"]
    words += ["--prompt-suffix", "", *flags.split()]  # leaves the embedded prompts as they are
    # Freed memory goes back to the system at once, so the peak is what was needed at one time.
    return measure(Memory, ROOT / f"{script}.py", words, processes, MALLOC_MMAP_THRESHOLD_="65536")


def lora(model):
    make_model(model, WIDE)
    flags = "--total-iterations 2 --batch-size 8 --minibatch-size 8 --max-response-length 16"
    lines = []
    for script in SCRIPTS:
        sizes = f"{flags} --microbatch-tokens 256 --kl-reward-coef 0.001" + " --group-size 8" * (script == "grpo_llm")
        _, (full,) = weigh(script, model, sizes)
        _, (small,) = weigh(script, model, f"{sizes} --lora-rank 8")
        cells = [f"{x / 2**20:,.0f} MiB" for x in (full["trained"], small["trained"], full["peak"], small["peak"])]
        ratios = f"{small['trained'] / full['trained']:.3f}", f"{small['peak'] / full['peak']:.2f}"
        lines.append([f"{script}.py", *cells[:2], ratios[0], *cells[2:], ratios[1]])
        print(lines[-1], flush=True)
    return markdown(["", "trained state, full", "LoRA", "ratio", "peak, full", "LoRA", "ratio"], lines)


def sharded(model):
    size = make_model(model, DEEP)
    flags = "--total-iterations 1 --batch-size 16 --minibatch-size 16 --max-response-length 16 --lr 1e-6"
    lines, replicated = [], None
    for way, script, processes in (
        ("replicated", SCRIPTS[0], 2),
        ("gathered", SCRIPTS[2], 2),
        ("gathered", SCRIPTS[2], 4),
    ):
        _, found = weigh(script, model, flags, processes)
        held, largest = (max(process[name] for process in found) / 2**20 for name in ("held", "peak"))
        replicated = replicated or held
        lines.append([way, processes, f"{held:.0f}", f"{held / replicated:.3f}", f"{largest:.0f}"])
        print(lines[-1], flush=True)
    table = markdown(["", "processes", "model state, MiB", "of replicated", "largest size, MiB"], lines)
    return f"Memory per process, {size:,} parameters per model.\n\n{table}"


def qwen(model):
    make_model(model, QWEN)
    flags = "--total-iterations 2 --max-response-length 32 --gradient-checkpointing"
    lines = []
    for script, processes, extra in [*((s, 1, "") for s in SCRIPTS), ("ppo_llm_fsdp", 2, "--rollout-params sharded")]:
        sizes = "--batch-size 1 --group-size 4" if script == "grpo_llm" else "--batch-size 4"
        log, found = weigh(
            script, model, f"{flags} {sizes} --minibatch-size 4 --kl-reward-coef 0.001 {extra}", processes
        )
        peaks = [x["peak"] / 2**30 for x in found]
        cells = [f"{script}.py {extra}", str(processes), " + ".join(f"{peak:.1f}" for peak in peaks)]
        lines.append([*cells, f"{sum(peaks):.1f}", f"{log[-1]['time/iteration']:.0f}"])
        print(lines[-1], flush=True)
    table = markdown(["", "processes", "peak of each, GiB", "sum, GiB", "seconds per iteration"], lines)
    return f"{table}\n\nOf each, Python and its libraries: {found[0]['libraries'] / 2**30:.2f} GiB."


def real(_):
    """GRPO with a real model, one process and two: what memory.py forecasts, and what the processes took."""
    sizes = "--batch-size 16 --group-size 8 --minibatch-size 64 --max-response-length 24"
    flags = f"{sizes} --dataset {ROOT}/models/additions/train.jsonl --total-iterations 2 --temperature 0.5"
    flags += f" --reward {ROOT}/benchmarks/real.py:last_number"
    lines = []
    for processes, extra in (1, ""), (2, ""), (2, "--lora-rank 16"):
        settings = {"bf16": False, "critic": False, "lora_rank": 16 if extra else 0, "processes": processes}
        settings |= {"length": PROMPT + 24, "response_length": 24, "rows": 128 // processes}
        for found in weigh("grpo_llm", ROOT / "models" / "smollm2", f"{flags} {extra}", processes)[1]:
            # The largest over the steps. A whole number of rows seldom fills a micro-batch; gradients stand beside all
            # but the first.
            tokens = [max(part) for part in zip_longest(*found["microbatches"], fillvalue=0)]
            parts = enumerate(tokens, start=1)
            forecast = max(budget(SMOLLM2, **settings, tokens=n, microbatches=part)["peak"] for part, n in parts)
            taken = found["peak"] - found["libraries"]
            gib = [f"{x / 2**30:.2f}" for x in (forecast, taken)]
            cells = [f"`{extra}`" if extra else "", str(processes), ", ".join(f"{n:,}" for n in tokens)]
            lines.append([*cells, *gib, f"{forecast / taken:.3f}"])
            print(lines[-1], flush=True)
    head = ["", "processes", "tokens of a step's micro-batches", "forecast, GiB", "taken, GiB", "ratio"]
    libraries = f"{found['libraries'] / 2**30:.2f} GiB that Python and its libraries had before the run began"
    text = f"SmolLM2-135M-Instruct, float32, on CPUs. Of each process, without the {libraries}.\n\n"
    return f"{text}`grpo_llm.py {sizes}`:\n\n{markdown(head, lines)}"


if __name__ == "__main__":
    commands = {command.__name__: command for command in (lora, sharded, qwen, real)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=commands)
    what = parser.parse_args().what
    with tempfile.TemporaryDirectory() as folder:
        result = commands[what](Path(folder) / "model") + "\n"
    (RESULTS / "footprint" / f"{what}.md").write_text(result)
    print(result)
