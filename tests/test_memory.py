"""The arithmetic of notes/memory.py against what torch holds, and against what whole processes held."""

import memory
import pytest
import torch
from helpers import ROOT, each_script, load_script, make_model
from memory import GIB, SHAPES, Shape, budget
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}


@pytest.mark.parametrize("head_dim", [16, 24])
@pytest.mark.parametrize("bf16, fused", [(False, True), (True, True), (False, False)])
def test_a_block_saves_the_activations_of_the_formula(bf16, fused, head_dim):
    """Exactly, and under autocast the copies of its weights besides; not fused: as on a GPU in float32."""
    shape = Shape(300, 64, 200, 2, 4, 2, True, head_dim)

    def saved_bytes(num_layers):
        config = Qwen2Config(num_hidden_layers=num_layers, intermediate_size=200, head_dim=head_dim, **SIZES)
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


QWEN3 = {"vocab_size": 151_936, "head_dim": 128}
QWEN3_32B = QWEN3 | {"hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64}
QWEN3_32B |= {"num_attention_heads": 64, "num_key_value_heads": 8}
QWEN3_30B_A3B = QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_experts": 128}
QWEN3_30B_A3B |= {"moe_intermediate_size": 768, "num_experts_per_tok": 8}
QWEN3_30B_A3B |= {"num_attention_heads": 32, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    "config, parameters, cache",
    [
        (Qwen3Config(**QWEN3_32B), 32_762_123_264, 64 * 2 * 8 * 128),
        (Qwen3MoeConfig(**QWEN3_30B_A3B), 30_532_122_624, 48 * 2 * 4 * 128),
        (AutoConfig.for_model("gpt2"), 124_439_808, None),  # two matrices in an MLP instead of three
        (Qwen2MoeConfig(), 14_315_784_192, None),  # an expert that every token has
    ],
)
def test_a_forecast_counts_heads_and_experts_or_gives_no_number(config, parameters, cache):
    """parameters: the model's own count. cache: numbers that a token has in it."""
    with torch.device("meta"):
        assert AutoModelForCausalLM.from_config(config).num_parameters() == parameters
    shape, args = memory.shape_of(config), load_script(ROOT / "grpo_llm.py").Args(model="")
    found = memory.of_run(args, config, parameters, 512)
    if cache is None:
        assert found is None
        return
    assert abs(memory.count(shape) / parameters - 1) < 1e-4
    assert memory.kv_cache(shape, 1, 1) == 4 * cache
    assert found * GIB > 20 * parameters  # in float32: weights, reference, gradients, two moments
    assert abs(memory.of_run(args, config, parameters, 512, 8) - found) < 0.1 * found  # it shards nothing
    args = load_script(ROOT / "ppo_llm_fsdp.py").Args(model="")
    assert 36 / 8 * parameters < memory.of_run(args, config, parameters, 512, 8) * GIB < 36 / 2 * parameters
