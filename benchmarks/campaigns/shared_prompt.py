"""When does notes/variants/shared_prompt.patch pay? Forward and backward of one group, joined or row by row.

    python benchmarks/campaigns/shared_prompt.py [--rounds 5] [--group-size 8]

This uses the embedded model's shape, random tokens and one thread, and compares processor times: medians of the rounds'
ratios. Below 1, the joined rows win: the prompt is read once instead of group-size times, but attention runs under a
dense mask over the whole row. The table goes to benchmarks/results/speed/shared_prompt.md.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "notes")]
import variants  # noqa: E402

import grpo_llm  # noqa: E402

LENGTHS = [(32, 32), (128, 32), (512, 32), (32, 128), (128, 128), (512, 128), (128, 512), (512, 512)]


def load_variant():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "shared_prompt_llm.py")
        path.write_text(variants.patched("shared_prompt"))
        sys.path.insert(0, folder)
        import shared_prompt_llm
    return shared_prompt_llm


def seconds(policy, tokens, mask):
    start = time.process_time()
    logprobs, _ = policy(tokens, mask)
    logprobs.sum().backward()
    return time.process_time() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--group-size", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(ROOT / "benchmarks" / "tiny" / "model", max_position_embeddings=2048)
    model = AutoModelForCausalLM.from_config(config)
    plain, joined = (algo.Policy(model, 1.0) for algo in (grpo_llm, load_variant()))
    lines = [
        f"`python benchmarks/campaigns/shared_prompt.py --rounds {args.rounds} --group-size {args.group_size}`",
        "",
    ]
    lines += ["| prompt | response | tokens read | time |", "|---|---|---|---|"]
    for prompt, response in LENGTHS:
        size = args.group_size
        tokens = torch.randint(3, config.vocab_size, (size, prompt + response))
        tokens[:, :prompt] = tokens[0, :prompt]
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        mask[:, prompt - 1 : -1] = True
        seconds(plain, tokens, mask), seconds(joined, tokens, mask)
        ratios = [seconds(joined, tokens, mask) / seconds(plain, tokens, mask) for _ in range(args.rounds)]
        read = (prompt + size * response) / (size * (prompt + response))
        lines.append(f"| {prompt} | {response} | {read:.2f}x | {statistics.median(ratios):.2f}x |")
        print(lines[-1], flush=True)
    (ROOT / "benchmarks" / "results" / "speed" / "shared_prompt.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
