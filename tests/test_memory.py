"""The arithmetic of notes/memory.py against what torch holds, and against what whole processes held."""

from types import SimpleNamespace

import memory
import pytest
import torch
from helpers import ROOT, SCRIPTS, each_script, load_script, make_model
from memory import GIB, SHAPES, Shape, budget
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}


@pytest.mark.parametrize("bf16, fused", [(False, True), (True, True), (False, False)])
def test_a_block_saves_the_activations_of_the_formula(bf16, fused):
    """Exactly, and under autocast the copies of its weights besides; not fused: as on a GPU in float32."""
    shape = Shape(300, 64, 200, 2, 4, 2, True)

    def saved_bytes(num_layers):
        config = Qwen2Config(num_hidden_layers=num_layers, intermediate_size=200, **SIZES)
        model, found = AutoModelForCausalLM.from_config(config).model.train(), {}
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def keep(x):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        kernels = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION][: 1 + fused]
        autocast = torch.autocast("cpu", torch.bfloat16, bf16)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), autocast, sdpa_kernel(kernels):
            output = model(torch.ones(2, 80, dtype=torch.long), use_cache=False).last_hidden_state
        del output
        return sum(size for place, size in found.items() if place not in weights)

    copies = 2 * sum(a * b for a, b in memory.linear_sizes(shape)) * bf16
    activations = memory.activations(shape, 160, bf16, plain_length=0 if fused else 80)
    assert saved_bytes(2) - saved_bytes(1) == activations / 2 + copies


SMALL = {"bf16": False, "length": 56, "response_length": 16, "microbatches": 1}
QWEN = SMALL | {"checkpointing": True, "length": 72, "response_length": 32, "tokens": 288, "rows": 4}


@pytest.mark.parametrize(
    "model, options, held, tolerance",
    [
        ("0.5B", QWEN, 16.4, 0.03),
        ("0.5B", QWEN | {"tokens": 144, "rows": 2, "sharded": True, "processes": 2, "gathered": False}, 9.8, 0.03),
        ("small", SMALL | {"tokens": 448, "rows": 8, "processes": 2}, 2044 / 1024, 0.03),
        ("small", SMALL | {"tokens": 224, "rows": 4, "processes": 4, "sharded": True}, 1043 / 1024, 0.11),
    ],
)
def test_the_forecast_is_near_what_processes_held(model, options, held, tolerance):
    """GiB in benchmarks/results/footprint.md, of which Python and its libraries are 0.38."""
    shape = SHAPES["Qwen2.5-0.5B"] if model == "0.5B" else Shape(420, 512, 2048, 12, 8, 8, False)
    assert abs((budget(shape, **options)["peak"] / GIB + 0.38) / held - 1) < tolerance


@each_script("ppo_llm")
@pytest.mark.parametrize("lora_rank, tied", [(0, True), (0, False), (4, True), (4, False)])
def test_weights_take_the_bytes_of_the_formula(toy_run, spy, script, tmp_path, lora_rank, tied):
    """Of policy, critic and reference in bfloat16: frozen linear layers have 2 bytes, all else 4."""
    model = make_model(tmp_path / "model")
    shape = Shape(AutoConfig.from_pretrained(model).vocab_size, 64, 200, 2, 4, 2, tied)
    sizes = SIZES | {"vocab_size": shape.vocab, "intermediate_size": 200, "num_hidden_layers": 2, "eos_token_id": 1}
    AutoModelForCausalLM.from_config(Qwen2Config(tie_word_embeddings=tied, **sizes)).save_pretrained(model)
    loaded = spy(load_script(script), "load_model")
    toy_run(model=model, lora_rank=lora_rank, dtype="bfloat16", total_iterations=1)
    held = sum(weight.nbytes for _, module in loaded for weight in module.parameters())
    state = memory.state(shape, lora_rank, cast=True)
    assert held == state["weights"] + state["reference"]


# The smallest card on which Qwen2.5-0.5B trains with every flag at its default, with a tenth of it left.
SMALLEST = {"ppo_llm": 40, "grpo_llm": 24, "ppo_llm_fsdp": 40}


@pytest.mark.parametrize("name", SCRIPTS)
def test_which_card_the_defaults_need(name):
    """In bfloat16 on one GPU, and preflight's forecast of it."""
    shape, args = SHAPES["Qwen2.5-0.5B"], load_script(ROOT / f"{name}.py").Args(model="")
    names = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
    sizes = shape.hidden, shape.intermediate, shape.layers, shape.heads, shape.kv_heads
    config = SimpleNamespace(**dict(zip(names, sizes)), vocab_size=shape.vocab, tie_word_embeddings=True)
    forecast = memory.of_run(args, config, args.max_prompt_length)
    kind = {"critic": hasattr(args, "critic_lr"), "sharded": name.endswith("fsdp")}
    assert forecast == budget(shape, microbatches=16, **kind)["peak"] / GIB
    assert memory.card(forecast * GIB / memory.USABLE) == str(SMALLEST[name])
