"""How much memory does a run need? LoRA against full fine-tuning, and each script with the shape of Qwen2.5-0.5B.

    python benchmarks/footprint.py lora          50M random parameters, two iterations of each script in both ways
    python benchmarks/footprint.py qwen          Qwen2.5-0.5B's shape, random weights: needs 24 GiB of memory
    python benchmarks/footprint.py first --gsm8k FOLDER      the README's command for that model, without its weights
    python benchmarks/footprint.py real          SmolLM2 on additions (benchmarks/real.py), against notes/memory.py

`first` uses the model's shape with random weights, a tokenizer with a chat template, trained on GSM8K's questions, and
GSM8K's two files in FOLDER (train.jsonl, test.jsonl). Every flag it does not name has its default, and the console is
kept.

No GPU is needed. Memory is the largest resident size of a process (VmHWM); nothing is saved. The tables go to
benchmarks/results/footprint/.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from common import RESULTS, ROOT, TINY, launcher, make_model, markdown, run

SCRIPTS = "ppo_llm", "grpo_llm", "ppo_llm_fsdp"
QWEN = {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
QWEN |= {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}
GIVE_BACK = "65536"  # freed memory goes back to the system at once, so the peak is what was needed at one time
WIDE = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 11}
WIDE |= {"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": True}

# One process of a run: like the script itself, but nothing is saved and the numbers are printed at the end.
WORKER = """
import json, os, sys
sys.path.insert(0, {root!r})
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
import {script} as algo
algo.save_models = lambda *args: None
state, sizes = {{}}, []
real_pack = algo.pack

def pack(*args):
    microbatches = real_pack(*args)
    sizes.append([len(rows) * columns.stop for rows, columns in microbatches])  # of an optimizer step, largest first
    return microbatches

algo.pack = pack

def measure(optimizer, *_):
    tensors = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    tensors += [p.grad for p in tensors] + [x for s in optimizer.state.values() for x in s.values() if x.dim()]
    tensors = [getattr(x, "_local_tensor", x) for x in tensors]
    state[id(optimizer)] = sum(x.nbytes for x in tensors)

def resident(what):
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(what))

register_optimizer_step_post_hook(measure)
libraries = resident("VmRSS")
run_dir = algo.main(algo.parse_args())
rank = os.environ.get("RANK", "0")
seconds = [json.loads(line).get("time/iteration") for line in open(run_dir / "metrics.jsonl")][-1]
result = {{"peak": resident("VmHWM"), "libraries": libraries, "trained": sum(state.values()), "seconds": seconds}}
result["tokens"] = [max(step[part] for step in sizes if len(step) > part) for part in range(max(map(len, sizes)))]
open({folder!r} + "/" + rank + ".json", "w").write(json.dumps(result))
"""


def measure(script, model, processes, flags):
    """[{peak, libraries, trained, seconds} of every process] of two iterations; libraries: before `main`."""
    with tempfile.TemporaryDirectory() as folder:
        worker = Path(folder) / "worker.py"
        worker.write_text(WORKER.format(root=str(ROOT), script=script, folder=folder))
        words = ["--model", model, "--output-dir", f"{folder}/runs", "--dataset", f"{TINY}/train.jsonl"]
        words += ["--eval-dataset", f"{folder}/eval.jsonl", *flags.split()]
        words += ["--prompt-suffix", ""]  # leaves the embedded prompts as they are
        first = (TINY / "test.jsonl").read_text().splitlines()[0]
        (Path(folder) / "eval.jsonl").write_text(first + "\n")
        run(launcher(processes, worker, *words), MALLOC_MMAP_THRESHOLD_=GIVE_BACK)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]


def table(header, lines):
    return markdown(header, lines) + "\n"


def compare_lora(model):
    make_model(model, WIDE)
    flags = "--total-iterations 2 --eval-every 0 --batch-size 8 --minibatch-size 8 --max-response-length 16"
    lines = []
    for script in SCRIPTS:
        sizes = f"{flags} --microbatch-tokens 256 --kl-reward-coef 0.001" + " --group-size 8" * (script == "grpo_llm")
        (full,), (lora,) = (measure(script, model, 1, f"{sizes} {extra}") for extra in ("", "--lora-rank 8"))
        cells = [f"{x / 2**20:,.0f} MiB" for x in (full["trained"], lora["trained"], full["peak"], lora["peak"])]
        ratios = f"{lora['trained'] / full['trained']:.3f}", f"{lora['peak'] / full['peak']:.2f}"
        lines.append([f"{script}.py", *cells[:2], ratios[0], *cells[2:], ratios[1]])
        print(lines[-1], flush=True)
    return table(["", "trained state, full", "LoRA", "ratio", "peak, full", "LoRA", "ratio"], lines)


def run_qwen(model):
    make_model(model, QWEN)
    flags = "--total-iterations 2 --eval-every 0 --max-response-length 32 --gradient-checkpointing"
    lines = []
    for script, processes, extra in [*((s, 1, "") for s in SCRIPTS), ("ppo_llm_fsdp", 2, "--rollout-params sharded")]:
        group = 4 if script == "grpo_llm" else 1
        sizes = f"--batch-size {4 // group} --minibatch-size 4 --kl-reward-coef 0.001"
        sizes += " --group-size 4" * (script == "grpo_llm")
        found = measure(script, model, processes, f"{flags} {sizes} {extra}")
        peaks = [x["peak"] / 2**30 for x in found]
        cells = [f"{script}.py {extra}", str(processes), " + ".join(f"{peak:.1f}" for peak in peaks)]
        lines.append([*cells, f"{sum(peaks):.1f}", f"{found[0]['seconds']:.0f}"])
        print(lines[-1], flush=True)
    text = table(["", "processes", "peak of each, GiB", "sum, GiB", "seconds per iteration"], lines)
    return f"{text}\nOf each, Python and its libraries: {found[0]['libraries'] / 2**30:.2f} GiB.\n"


def run_real(_):
    """GRPO with a real model, one process and two: what memory.py forecasts, and what the processes took."""
    from memory import Shape, budget

    smollm2 = Shape(vocab=49_152, hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3, tied=True)
    sizes = "--batch-size 16 --group-size 8 --minibatch-size 64 --max-response-length 24"
    flags = f"{sizes} --dataset {ROOT}/models/additions/train.jsonl --eval-rows 1 --total-iterations 2 --eval-every 0"
    flags += f" --reward {ROOT}/benchmarks/real.py:last_number --temperature 0.5 --save-every 0"
    lines = []
    for processes, extra in (1, ""), (2, ""), (2, "--lora-rank 16"):
        settings = {"bf16": False, "critic": False, "lora_rank": 16 if extra else 0, "processes": processes}
        settings |= {"length": PROMPT + 24, "response_length": 24, "rows": 128 // processes}
        for found in measure("grpo_llm", ROOT / "models" / "smollm2", processes, f"{flags} {extra}"):
            # A whole number of rows seldom fills a micro-batch; gradients stand beside all but the first.
            parts = enumerate(found["tokens"], start=1)
            forecast = max(budget(smollm2, **settings, tokens=n, microbatches=part)["peak"] for part, n in parts)
            taken = found["peak"] - found["libraries"]
            gib = [f"{x / 2**30:.2f}" for x in (forecast, taken)]
            cells = [f"`{extra}`" if extra else "", str(processes), ", ".join(f"{n:,}" for n in found["tokens"])]
            lines.append([*cells, *gib, f"{forecast / taken:.3f}"])
            print(lines[-1], flush=True)
    names = [
        "",
        "processes",
        "tokens of a step's micro-batches",
        "forecast, GiB",
        "taken, GiB",
    ]
    text = f"`grpo_llm.py {sizes}`:\n\n{table([*names, 'ratio'], lines)}"
    libraries = f"{found['libraries'] / 2**30:.2f} GiB that Python and its libraries had before the run began"
    return f"SmolLM2-135M-Instruct, float32, on CPUs. Of each process, without the {libraries}.\n\n{text}"


WHAT = {"lora": compare_lora, "qwen": run_qwen, "real": run_real}
PROMPT = 46  # tokens of an addition, with the template's system turn
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHAT += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def run_first(model, gsm8k):
    """Two iterations with the defaults, but for sizes that decide the time, and float32's micro-batch."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    make_model(model, QWEN)
    bpe = ByteLevelBPETokenizer()
    questions = [json.loads(line)["question"] for line in (gsm8k / "train.jsonl").read_text().splitlines()]
    bpe.train_from_iterator(questions, 16_000, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    words = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **words)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(model)
    text = ""
    for script, group in ("grpo_llm", 4), ("ppo_llm", 1):
        sizes = f"--batch-size {8 // group} --minibatch-size 4 --microbatch-tokens 512 --max-response-length 48"
        sizes += " --total-iterations 2 --eval-rows 2" + " --group-size 4" * (group > 1)
        with tempfile.TemporaryDirectory() as folder:
            worker = Path(folder) / "worker.py"
            worker.write_text(WORKER.format(root=str(ROOT), script=script, folder=folder))
            command = [sys.executable, str(worker), "--model", str(model), "--dataset", str(gsm8k / "train.jsonl")]
            command += ["--eval-dataset", str(gsm8k / "test.jsonl")]
            command += [*sizes.split(), "--output-dir", f"{folder}/runs", "--save-every", "0"]
            console, _ = run(command, MALLOC_MMAP_THRESHOLD_=GIVE_BACK)
            found = json.loads(Path(folder, "0.json").read_text())
            console = console.replace(folder, "FOLDER").replace(str(gsm8k), "gsm8k").replace(str(model), "MODEL")
        text += f"`{script}.py {sizes}`: peak {found['peak'] / 2**30:.1f} GiB, {found['seconds']:.0f} s for the second "
        text += f"iteration\n\n```\n{console}```\n\n"
        print(text, flush=True)
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["lora", "qwen", "first", "real"])
    parser.add_argument("--gsm8k", type=Path, help="for `first`: the folder with train.jsonl and test.jsonl")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        result = run_first(model, args.gsm8k) if args.what == "first" else WHAT[args.what](model)
    path = RESULTS / "footprint" / f"{args.what}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(result)
    print(result)


if __name__ == "__main__":
    main()
