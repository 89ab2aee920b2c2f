"""Compare vLLM with `generate` on this machine: benchmarks/results/engines/. You need an environment with vLLM (guide).

    python benchmarks/campaigns/engines.py precision   how far sampler and training pass are apart, in three precisions
    python benchmarks/campaigns/engines.py cost        rollout, hand-over of the weights and memory, at three sizes
    python benchmarks/campaigns/engines.py table       README.md of both

For `precision`, the embedded model answers its test questions at temperature 1; then the training pass computes the
log-probs of what was sampled, in the same precision. `cost` runs iterations of grpo_llm.py and of the variant `vllm` in
turns, with random models of Qwen2's architecture; the time of the hand-over is from vLLM's own log.
"""

import argparse
import itertools
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).resolve().parents[1]))
import common
import plot

import grpo_llm as algo

RESULTS = common.RESULTS / "engines"
SEEDS = 1, 2, 3  # of the noise
PRECISIONS = "float32", "bfloat16", "float16"
FIVE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 8}
FIFTY = {"hidden_size": 640, "intermediate_size": 2560, "num_hidden_layers": 8, "num_attention_heads": 20}
FIVE |= {"num_key_value_heads": 8, "vocab_size": 420, "tie_word_embeddings": True}
FIFTY |= {"num_key_value_heads": 20, "vocab_size": 420, "tie_word_embeddings": True}
SIZES = {"0.86M": None, "5M": FIVE, "50M": FIFTY}  # None: the embedded model
COST = "--batch-size 8 --group-size 8 --minibatch-size 64 --max-response-length 48 --eval-rows 0 --eval-every 0"
COST += " --save-every 0 --total-iterations 4 --kl-loss-coef 0 --track none --dtype float32"

GAPS = """Made by `python benchmarks/campaigns/engines.py` on a CPU, one thread: vLLM 0.32.0 (`tests/vllm.txt`) beside
`generate`. Logs of that environment: [the tests](test_vllm.log), [a run on two processes](two_processes.log).

## Sampler against training pass

Answers of the embedded model to its 500 test questions at temperature 1; three seeds of the noise, lowest and highest.
`lost`: 1 minus the effective share of the tokens, or of the responses, if each was weighed by its probability ratio.

| sampler | precision | mean gap | of tokens below .99 | largest gap | lost, tokens | lost, responses |
| --- | --- | --- | --- | --- | --- | --- |
"""
SPENT = """
## Cost

64 responses of at most 48 tokens, float32; a rollout of `vllm` has the hand-over in it. Seconds by the clock, both
samplers in turns; medians, lowest and highest of the rounds, on a machine that had other work, too. Memory: the most
that the process held, with a training step and, for vLLM, a cache of 0.25 GiB.

| parameters | sampler | rollout, s | hand-over, s | resident, GiB |
| --- | --- | --- | --- | --- |
"""


def by_vllm(engine, prompts, uniforms, eos_ids):
    """As the variant asks for it."""
    from vllm import SamplingParams, TokensPrompt

    options = {"max_tokens": uniforms.shape[1], "logprobs": 0, "stop_token_ids": eos_ids, "ignore_eos": True}
    params = [SamplingParams(seed=int(row[0] * 2**31), detokenize=False, **options) for row in uniforms]
    responses = []
    for request in engine.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False):
        ids = list(request.outputs[0].token_ids)
        logprobs = [found[token].logprob for token, found in zip(ids, request.outputs[0].logprobs)]
        responses.append(algo.Response(ids, logprobs, ids[-1] not in eos_ids))
    return responses


def start_engine(folder, precision):
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm import LLM

    options = {"enforce_eager": True, "enable_chunked_prefill": False, "kv_cache_memory_bytes": 2**28}
    return LLM(folder, dtype=precision, logprobs_mode="processed_logprobs", max_model_len=256, **options)


def ess(weights):
    return (weights.mean() ** 2 / weights.square().mean()).item()


def precision():
    """A line for each sampler, precision and seed of the noise."""
    folder = str(common.TINY / "model")
    model = algo.load_model(folder, AutoModelForCausalLM)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    eos_ids = algo.collect_eos_ids(model, tokenizer)
    prompts = tokenizer([row["question"] for row in common.read_lines(common.TINY / "test.jsonl")])["input_ids"]
    rows = [{"input_ids": ids} for ids in prompts]
    lines = []
    for name in PRECISIONS:
        engine = start_engine(folder, name)
        for sampler, seed in itertools.product(("generate", "vllm"), SEEDS):
            stream = torch.Generator().manual_seed(seed)
            uniforms = torch.rand(len(rows), 96, generator=stream, dtype=torch.float64)
            if sampler == "vllm":
                responses = by_vllm(engine, prompts, uniforms, eos_ids)
            with torch.autocast("cpu", getattr(torch, name), enabled=name != "float32"):
                if sampler == "generate":
                    responses = algo.generate(model, prompts, uniforms, eos_ids, 1.0)
                tokens, mask, said, lengths = algo.to_batch(rows, responses, "cpu")
                microbatches = algo.pack(lengths, range(len(rows)), 8192, "cpu")
                trained = algo.forward_all(algo.Policy(model, 1.0), [microbatches], tokens, mask)
            gaps = torch.where(mask, trained - said, 0)
            unsure = mask & (said < -0.01)
            line = {"sampler": sampler, "precision": name, "seed": seed, "tokens": mask.sum().item()}
            line |= {"logprob_diff": gaps[mask].abs().mean().item(), "largest": gaps.abs().max().item()}
            line |= {"unsure_diff": gaps[unsure].abs().mean().item(), "ess_token": ess(gaps[mask].double().exp())}
            lines.append(line | {"ess_response": ess(gaps.double().sum(1).exp())})
            print(lines[-1], flush=True)
        engine.llm_engine.engine_core.shutdown()
    common.write_csv(RESULTS / "precision.csv", lines)


def measure(script, words, folder):
    """(seconds of a rollout, of a hand-over, GiB of resident memory) of a run; medians without its first."""
    command = [sys.executable, script, *words, "--output-dir", folder, "--run-name", "run"]
    said, peak = common.run(command, CUDA_VISIBLE_DEVICES="", VLLM_LOGGING_LEVEL="INFO")
    seconds = [float(x) for x in re.findall(r"processing weights took ([\d.]+) seconds", said)]
    rollouts = [row["time/rollout"] for row in plot.read_run(Path(folder, "run")) if "time/rollout" in row]
    return statistics.median(rollouts[1:]), statistics.median(seconds[1:] or [0]), peak / 2**30


def cost():
    lines = []
    with tempfile.TemporaryDirectory() as top:
        Path(top, "benchmarks").symlink_to(common.ROOT / "benchmarks")
        names = {"generate": "grpo_llm", "vllm": "vllm_llm"}
        scripts = {sampler: common.find_script(name, Path(top)) for sampler, name in names.items()}
        for size, shape in SIZES.items():
            words = COST.split()
            if shape:
                common.make_model(f"{top}/{size}", shape)
                words += ["--model", f"{top}/{size}", "--dataset", f"{common.TINY}/train.jsonl", "--prompt-suffix", ""]
                words += ["--eval-dataset", f"{common.TINY}/test.jsonl"]
            for number, (sampler, script) in itertools.product(range(1, 4), scripts.items()):
                flags = [*words, "--cache-gib", "0.25"] if sampler == "vllm" else words
                with tempfile.TemporaryDirectory() as folder:
                    rollout, hand_over, memory = measure(script, flags, folder)
                line = {"size": size, "sampler": sampler, "round": number, "rollout_s": round(rollout, 3)}
                lines.append(line | {"hand_over_s": hand_over, "resident_gib": round(memory, 3)})
                print(lines[-1], flush=True)
    common.write_csv(RESULTS / "cost.csv", lines)


def table():
    """Lowest and highest over the seeds; medians over the rounds."""
    text = GAPS
    metrics = "logprob_diff", "unsure_diff", "largest", "ess_token", "ess_response"
    for key, rows in common.grouped(common.read_csv(RESULTS / "precision.csv"), "sampler", "precision").items():
        cells = list(key)
        for metric in metrics:
            values = [1 - float(row[metric]) if "ess" in metric else float(row[metric]) for row in rows]
            cells.append(f"{min(values):.1e} to {max(values):.1e}")
        text += f"| {' | '.join(cells)} |\n"
    text += SPENT
    for key, rows in common.grouped(common.read_csv(RESULTS / "cost.csv"), "size", "sampler").items():
        cells = list(key)
        for metric in "rollout_s", "hand_over_s", "resident_gib":
            values = [float(row[metric]) for row in rows]
            cells.append(common.spread(values, 2, statistics.median))
        text += f"| {' | '.join(cells)} |\n"
    (RESULTS / "README.md").write_text(text)
    print(text)


if __name__ == "__main__":
    commands = {command.__name__: command for command in (precision, cost, table)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=commands)
    commands[parser.parse_args().command]()
