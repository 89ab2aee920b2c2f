"""Decoding at a GPU's speed: a script, copy or variant (without shards), its decoding step as a CUDA graph.
Group: speed, memory, precision

    accelerate launch notes/variants/cuda_graphs.py grpo_llm.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset ...

To decode a token, a GPU's host launches a thousand small kernels, and that takes several times as long as they run. A
CUDA graph is a recording of such launches that one call plays back. Two conditions hold for what is recorded:

    It reads and writes the same memory every time. So the KV cache is as long as it will ever get from the start
    (transformers.StaticCache), and inputs and positions are written in place. A tensor that Python makes anew, even
    `positions = positions + 1`, would leave the graph with the old one.
    Nothing in it may wait for the GPU or copy from the host. A model that does so is decoded without a graph.

The script's `generate` is replaced, and nothing else; its comments are not repeated here. A graph lives for a call of
`generate` at most: weights stay where they are, but the copies that autocast makes of them are those of one rollout.
"""

import importlib.util
import inspect
import os
import re
import sys
from pathlib import Path

import torch
import transformers
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import StaticLayer

SCRIPTS = [Path(__file__).resolve().parents[2] / name for name in ("ppo_llm.py", "grpo_llm.py", "ppo_llm_fsdp.py")]
script = None  # the module that runs; its functions are looked up as they are called, so that a copy may change them
capturing = torch.cuda.is_available()


class CannotCapture(Exception):
    """What was recorded until then may have changed tensors in Python, so the rollout can't go on."""


def generate(model, prompts, uniforms, eos_ids, temperature):
    """As the script's, which takes over where a step cannot be captured, and begins anew."""
    if not model._can_compile_fullgraph:  # transformers knows that its step needs Python, or a cache of its own
        switch_off(model, "transformers marks it so")
        return script.own_generate(model, prompts, uniforms, eos_ids, temperature)
    model.eval()
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    # Autocast keeps its copies of weights only if they require gradients, so with LoRA it would cast a tied head in
    # every step (`cached_cast` in torch/csrc, autocast_mode.cpp). Nothing here computes a gradient.
    for parameter in frozen:
        parameter.requires_grad_(parameter.is_floating_point())
    try:
        return sample(model, prompts, uniforms, eos_ids, temperature)
    except CannotCapture as error:
        switch_off(model, error)
    finally:
        model.train()
        for parameter in frozen:
            parameter.requires_grad_(False)
    return script.own_generate(model, prompts, uniforms, eos_ids, temperature)


@torch.no_grad()
def sample(model, prompts, uniforms, eos_ids, temperature):
    """The script's `generate`. Rows leave when they are half of the batch, because a new batch needs a new graph."""
    prompts = [torch.tensor(ids, device=uniforms.device) for ids in prompts]
    inputs = pad_sequence(prompts, batch_first=True, padding_value=-1, padding_side="left")
    inputs, owners = torch.unique_consecutive(inputs, return_inverse=True, dim=0)  # (N,P), (B,)
    attention_mask = (inputs >= 0).long()  # (N,P)
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    tokens = torch.zeros_like(uniforms, dtype=torch.long)  # (B,T)
    logprobs = torch.zeros_like(uniforms, dtype=torch.float32)  # (B,T)
    slots = torch.arange(len(uniforms), device=uniforms.device)
    alive = torch.ones_like(slots, dtype=torch.bool)
    eos = slots.new_tensor(eos_ids)
    width = inputs.shape[1] + uniforms.shape[1]
    cache = RolloutCache(model.config, width)
    steps = decode(model, cache, inputs.clamp(min=0), attention_mask, positions)
    for t in script.tqdm(range(uniforms.shape[1]), "sampling", leave=False, disable=not sys.stderr.isatty()):
        logits = next(steps)
        if t == 0:
            logits = logits[owners]
        tokens[slots, t], logprobs[slots, t] = script.sample_tokens(logits, uniforms[slots, t], temperature)
        alive &= ~torch.isin(tokens[slots, t], eos)
        num_alive = int(alive.sum())
        if num_alive == 0:
            break
        if t == 0 or num_alive <= (0.5 if capturing else 0.9) * len(slots):
            kept = alive.nonzero().squeeze(1)
            rows = owners[kept] if t == 0 else kept  # from here on every response has a row of its own
            cache.reorder_cache(rows)
            slots = slots[kept]
            alive = alive[kept]
            # As wide as the cache: the mask of a step hides what lies beyond its position.
            attention_mask = nn.functional.pad(attention_mask[rows], (0, width - attention_mask.shape[1]), value=1)
            positions = positions[rows, -1:]
            inputs = torch.empty_like(positions)
            steps = decode(model, cache, inputs, attention_mask, positions)
        inputs.copy_(tokens[slots, t][:, None])
        positions += 1
    return script.cut_responses(tokens, logprobs, eos_ids)


def decode(model, cache, inputs, attention_mask, positions):
    """Yields the logits after `inputs`, again and again: the caller writes the next inputs and positions in place.

    The old graph is gone before the next is captured, and none outlives its rollout: a graph that dies clears the
    workspaces of others on its stream (pytorch 193402).
    """

    def forward():
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # before 5.24
        options = {name: cache, "use_cache": True, "logits_to_keep": 1}
        return model(inputs, attention_mask=attention_mask, position_ids=positions, **options).logits[:, -1]

    yield forward()  # not captured: with these shapes it may have to load kernels, which a capture forbids
    if capturing:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                logits = forward()  # records, and runs nothing
        except RuntimeError as error:
            # torch leaves its stream for captures only if the capture ends well (torch/cuda/graphs.py, __exit__).
            torch.cuda.set_stream(torch.cuda.default_stream())
            raise CannotCapture(error.__context__ or error) from None  # the error of leaving hides the one that counts
        while True:
            graph.replay()
            yield logits
    while True:
        yield forward()


def switch_off(model, reason):
    """For the rest of the run: a second attempt would fail as the first did."""
    global capturing
    if capturing and os.environ.get("RANK", "0") == "0":
        print(f"decoding without CUDA graphs: {model.config.model_type} cannot be captured ({str(reason)[:80]})")
    capturing = False


class RolloutCache(transformers.StaticCache):
    """Keys and values in memory that is allocated once. The prompts are read as with a cache that grows.

    Layers with a sliding window are of full length, too: transformers' own count in Python, which a graph does not
    repeat, and the mask hides what is outside the window.
    """

    def __init__(self, config, width):
        super().__init__(config, width)
        layers = zip(self.layers, self.is_sliding)
        self.layers = [StaticLayer(width) if sliding else layer for layer, sliding in layers]

    def update(self, keys, values, *args, **options):
        memory = super().update(keys.to(values.dtype), values, *args, **options)  # autocast: rotary keys are float32
        return memory if keys.shape[2] == 1 else (keys, values)

    def get_mask_sizes(self, query_length, layer):
        return super().get_mask_sizes(query_length, layer) if query_length == 1 else (query_length, 0)


def load_script(path):
    """The module, with this file's `generate`. Ends with one sentence where that would change what is sampled."""
    path = Path(path).resolve()
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    if not re.search(r"(?<![.\w])generate\(", inspect.getsource(module.main)):
        sys.exit(f"error: {path.name} does not sample with `generate`: run it as it is")
    if not any(inspect.getsource(module.generate) in text for text in map(Path.read_text, SCRIPTS)):
        sys.exit(f"error: {path.name} has a `generate` that differs from the scripts', which cuda_graphs.py would undo")
    if hasattr(module, "shard"):
        sys.exit(
            f"error: {path.name} shards its models, which gathers weights anew; cuda_graphs.py needs them in one place"
        )
    module.own_generate = module.generate
    module.generate = generate
    return module


if __name__ == "__main__":
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        sys.exit(__doc__)
    if not capturing and os.environ.get("RANK", "0") == "0":
        print("cuda_graphs.py: without a GPU there are no CUDA graphs, and nothing is gained")
    del sys.argv[0]
    script = load_script(sys.argv[0])
    script.main(script.parse_args())
