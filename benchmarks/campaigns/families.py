"""Which families of language models work? A tiny random model of each goes through the scripts; the result is a table.

    python benchmarks/campaigns/families.py [NAME ...]       tries each of these, or all, and prints the table

Every model is as small as its configuration allows, with at least one layer of each kind, and with norms and biases
that are not 0 or 1. The columns, in float32 unless they say otherwise:

    pass        `Policy` on a batch of padded rows with the model's own logits of each row alone, by eager attention
    greedy      our `generate` with transformers' own on prompts of different lengths, token by token
    GRPO, PPO   two iterations each: the difference between sampler and training pass
    LoRA        the same two scripts with low-rank matrices
    reload      `final/` and its critic load again and say the same
    bfloat16    the difference between sampler and training pass with --dtype bfloat16, GRPO
    sharded     PPO by ppo_llm_fsdp.py on two processes

Words instead of a number say what stopped the family.
"""

import argparse
import contextlib
import importlib
import io
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from accelerate.state import AcceleratorState
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

sys.path.append(str(Path(__file__).resolve().parents[1]))
import common
from common import ROOT, TINY

import grpo_llm
import ppo_llm

VOCABULARY = 420  # of the embedded model's tokenizer
EOS = [1, *range(300, 350)]  # so many that random responses end

BASE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = BASE | {"num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2}
HEADS = GROUPED | {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "moe_intermediate_size": 16}
GROUP_ROUTED = ROUTED | {"n_shared_experts": 1, "num_experts_per_tok": 2, "topk_group": 1, "first_k_dense_replace": 1}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
SCALED = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1}
GEMMA3 = HEADS | SLIDING | {"query_pre_attn_scalar": 8}
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
GEMMA4 = HEADS | SLIDING | PER_LAYER
LONG_GEMMA4 = {"num_hidden_layers": 4, "layer_types": SLIDING["layer_types"] * 2, "num_kv_shared_layers": 2}
QWEN3_5 = HEADS | LINEAR | {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
QWEN3_5 |= {"rope_parameters": MROPE | {"partial_rotary_factor": 0.5}}
QWEN_EYES = {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "depth": 1, "out_hidden_size": 32}
QWEN_EYES |= {"patch_size": 4, "num_position_embeddings": 16}
GEMMA_EYES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
GEMMA_EYES |= {"image_size": 16, "patch_size": 4}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 32}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
KIMI = LATENT | {"q_lora_rank": None, "moe_intermediate_size": 16, "num_key_value_heads": 4}
KIMI |= {"linear_head_dim": 8, "linear_num_heads": 4}
FALCON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.2}
FALCON |= {"new_decoder_architecture": False, "multi_query": True}
OPT = {"hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 48, "num_attention_heads": 4, "init_std": 0.2}
OPT |= {"max_position_embeddings": 512, "word_embed_proj_dim": 32}
STATE = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "initializer_range": 0.2}
ZAMBA = BASE | {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "num_key_value_heads": 4}
ZAMBA |= {"max_position_embeddings": 512, "initializer_range": 0.2, "mamba_d_state": 8, "n_mamba_heads": 4}
NEMOTRON = HEADS | ROUTED | {"layers_block_type": ["mamba", "attention", "moe", "mlp"], "mamba_num_heads": 4}
NEMOTRON |= {"mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 16, "num_experts_per_tok": 2}
NEMOTRON = {k: v for k, v in NEMOTRON.items() if k != "num_hidden_layers"}
JAMBA = GROUPED | EXPERTS | {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
DEEPSEEK = BASE | GROUP_ROUTED | LATENT | {"num_key_value_heads": 4, "initializer_range": 0.2, "n_group": 2}
GRANITE_HYBRID = GROUPED | MAMBA | LOCAL_EXPERTS | SCALED
GRANITE_HYBRID |= {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 16}
LLAMA4 = {"num_hidden_layers": 4, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2}
LLAMA4 |= {"attention_chunk_size": 16, "no_rope_layer_interval": 2}
QWEN_IMAGES = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
QWEN3_NEXT = {"shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"]}
RECURRENT = {"num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"], "lru_width": 32}
RECURRENT |= {"attention_window_size": 8, "w_init_variance_scale": 1.0}

# {name: configuration}. What is before a comma is the model type: some types have a second configuration.
FAMILIES = dict.fromkeys(["apertus", "bitnet", "llama", "olmo2", "phi", "qwen2", "stablelm"], GROUPED)
FAMILIES |= dict.fromkeys(["ernie4_5", "glm4", "helium", "hunyuan_v1_dense", "qwen3", "seed_oss"], HEADS)
FAMILIES |= {
    "bamba": GROUPED | MAMBA | {"attn_layer_indices": [1]},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2},
    "cohere2": GROUPED | SLIDING | {"logit_scale": 0.0625},
    "cohere2, unscaled": GROUPED | SLIDING | {"logit_scale": 1.0},
    "deepseek_v3": DEEPSEEK,
    "exaone4": GROUPED | SLIDING | {"sliding_window_pattern": 2},
    "falcon": FALCON,
    "falcon, alibi": FALCON | {"alibi": True},
    "falcon_h1": GROUPED | MAMBA | {"mamba_d_ssm": 64, "lm_head_multiplier": 1.0},
    "falcon_h1, scaled": GROUPED | MAMBA | {"mamba_d_ssm": 64, "lm_head_multiplier": 0.04},
    "gemma2": HEADS | SLIDING | {"initializer_range": 1.0},
    "gemma3": {"text_config": GEMMA3, "vision_config": GEMMA_EYES, "mm_tokens_per_image": 4},
    "gemma3_text": GEMMA3,
    "gemma3n_text": GEMMA4 | {"num_kv_shared_layers": 0, "laurel_rank": 4, "activation_sparsity_pattern": [0.0, 0.0]},
    "gemma4_text": GEMMA4 | {"initializer_range": 1.0, "final_logit_softcapping": 30.0},
    "gemma4_text, no cap": GEMMA4 | {"final_logit_softcapping": None},
    "gemma4_text, shared": GEMMA4 | LONG_GEMMA4 | {"final_logit_softcapping": None},
    "glm4_moe": HEADS | GROUP_ROUTED | {"n_group": 1},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "initializer_range": 0.2},
    "gpt_neox": BASE | {"rotary_pct": 0.5, "max_position_embeddings": 512, "initializer_range": 0.2},
    "gpt_oss": HEADS | LOCAL_EXPERTS | SLIDING,
    "granite": GROUPED | SCALED | {"logits_scaling": 8.0},
    "granite, unscaled": GROUPED | SCALED | {"logits_scaling": 1.0},
    "granitemoehybrid": GRANITE_HYBRID,
    "granitemoehybrid, scaled": GRANITE_HYBRID | {"logits_scaling": 6.0},
    "jamba": JAMBA | {"mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "kimi_linear": HEADS | LOCAL_EXPERTS | KIMI | {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": GROUPED | {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": GROUPED | EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": HEADS | SLIDING | {"num_hidden_layers": 3, "layer_types": ["conv", *SLIDING["layer_types"]]},
    "llama4_text": HEADS | LOCAL_EXPERTS | LLAMA4,
    "mamba": STATE,
    "mamba2": STATE | {"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
    "minimax": HEADS | LOCAL_EXPERTS | {"layer_types": ["linear_attention", "full_attention"]},
    "ministral": HEADS | SLIDING,
    "ministral3": HEADS | {"sliding_window": None, "rope_parameters": YARN},
    "mistral": GROUPED | {"sliding_window": 8},
    "mixtral": GROUPED | LOCAL_EXPERTS,
    "nanochat": GROUPED | {"initializer_range": 1.0, "final_logit_softcapping": 15.0},
    "nanochat, no cap": GROUPED | {"final_logit_softcapping": None},
    "nemotron_h": NEMOTRON | {"moe_shared_expert_intermediate_size": 16},
    "olmo3": GROUPED | SLIDING,
    "opt": OPT,
    "opt, as 350m": OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "phi3": GROUPED | {"original_max_position_embeddings": 512, "sliding_window": 8},
    "qwen3_5": {"text_config": QWEN3_5, "vision_config": QWEN_EYES} | QWEN_IMAGES,
    "qwen3_5_text": QWEN3_5,
    "qwen3_moe": HEADS | EXPERTS,
    "qwen3_next": HEADS | EXPERTS | LINEAR | QWEN3_NEXT,
    "recurrent_gemma": HEADS | RECURRENT,
    "smollm3": GROUPED | {"num_hidden_layers": 4},
    "zamba2": ZAMBA | {"chunk_size": 16, "mamba_headdim": 16},
}
MODES = {  # column: (script, flags)
    "GRPO": ("grpo_llm", {}),
    "PPO": ("ppo_llm", {}),
    "checkpointing": ("ppo_llm", {"gradient_checkpointing": True}),
    "GRPO, LoRA": ("grpo_llm", {"lora_rank": 2}),
    "PPO, LoRA": ("ppo_llm", {"lora_rank": 2}),
    "bfloat16": ("grpo_llm", {"dtype": "bfloat16"}),
    "sharded": ("ppo_llm_fsdp", {}),
}


def length(responses):
    """The reward of these runs: it differs from response to response."""
    return [float(len(response) % 7) for response in responses]


def make_model(name, folder):
    """Saves a random model of the family with the embedded model's tokenizer."""
    kind, options = name.partition(",")[0], FAMILIES[name]
    ids = {"vocab_size": VOCABULARY, "eos_token_id": EOS, "pad_token_id": 0, "bos_token_id": None}
    if "text_config" in options:  # it also reads images
        options = options | {"text_config": options["text_config"] | ids, "eos_token_id": EOS, "pad_token_id": 0}
        if kind == "gemma3":
            options |= {"boi_token_index": 5, "eoi_token_index": 6, "image_token_index": 7}
    else:
        options = options | ids
    torch.manual_seed(1)
    # A checkpoint that has a vision tower, as it is published: loading it as a language model may leave the tower out.
    model_class = AutoModelForImageTextToText if "text_config" in options else AutoModelForCausalLM
    model = model_class.from_config(AutoConfig.for_model(kind, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY / "model").save_pretrained(folder)


@torch.no_grad()
def compare_pass(folder):
    """The largest difference of a log-prob in a padded batch from that of its row alone by eager attention."""
    model = grpo_llm.load_model(str(folder), AutoModelForCausalLM).eval()
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    stream = torch.Generator().manual_seed(2)
    lengths = [5, 30, 17, 9]
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.randint(9, 300, (length,), generator=stream)
        mask[row, 2 : length - 1] = True
    found, _ = grpo_llm.Policy(model, 1.0)(tokens, mask)
    worst = 0.0
    for row, length in enumerate(lengths):
        logits = plain(tokens[row : row + 1, :length], use_cache=False).logits[0].float()
        expected = logits.log_softmax(-1)[:-1].gather(1, tokens[row, 1:length, None]).squeeze(1)
        worst = max(worst, (found[row, 2 : length - 1] - expected[2:]).abs().max().item())
    return f"{worst:.0e}"


@torch.no_grad()
def compare_greedy(folder):
    """How many tokens our `generate` and transformers' own choose alike, of how many, each prompt of theirs alone."""
    model = grpo_llm.load_model(str(folder), AutoModelForCausalLM).eval()
    stream = torch.Generator().manual_seed(3)
    prompts = [torch.randint(9, 300, (length,), generator=stream).tolist() for length in (4, 23, 11)]
    responses = grpo_llm.generate(model, prompts, torch.zeros(len(prompts), 12, dtype=torch.float64), EOS, 0)
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": EOS, "pad_token_id": 0}
    alike = total = 0
    for prompt, response in zip(prompts, responses):
        ids = torch.tensor([prompt])
        output = model.eval().generate(ids, attention_mask=torch.ones_like(ids), **options)
        expected = output[0, len(prompt) :].tolist()
        total += len(expected)
        alike += sum(a == b for a, b in zip(response.ids, expected))
    return f"{alike}/{total}"


def train(folder, column, runs):
    """The largest difference between sampler and training pass in two iterations, whose run folder is runs/column."""
    script, flags = MODES[column]
    sizes = {"batch_size": 4, "group_size": 2} if script == "grpo_llm" else {"batch_size": 8}
    flags = sizes | {"minibatch_size": 4, "microbatch_tokens": 256, "max_response_length": 12} | flags
    flags |= {"dataset": f"{TINY}/test.jsonl", "prompt_suffix": "", "reward": f"{__file__}:length"}
    flags |= {"total_iterations": 2, "eval_rows": 0, "save_every": 0, "track": "none", "lr": 1e-4}
    flags |= {"model": str(folder), "output_dir": str(runs), "run_name": column}
    if column == "sharded":
        words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        common.run(common.launcher(2, ROOT / f"{script}.py", *words))
    else:
        said = io.StringIO()
        said.reconfigure = lambda **options: None
        AcceleratorState._reset_state(True)
        algo = importlib.import_module(script)
        with contextlib.redirect_stdout(said):
            algo.main(algo.Args(**flags))
    lines = common.read_lines(runs / column / "metrics.jsonl")
    return f"{max(line['rollout/logprob_diff'] for line in lines[1:]):.0e}"


@torch.no_grad()
def reload(run_dir):
    """Whether what a run of PPO has saved loads again, by the script and by the plain class, and says the same."""
    tokens = torch.arange(9, 19)[None]
    mask = tokens < 18
    plain = AutoModelForCausalLM.from_pretrained(run_dir / "final").eval()
    logits = plain(tokens, use_cache=False).logits[0, :-1].float()
    losses = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
    model = ppo_llm.load_model(f"{run_dir}/final", AutoModelForCausalLM).eval()
    logprobs, _ = ppo_llm.Policy(model, 1.0)(tokens, mask)
    values = ppo_llm.Critic(ppo_llm.load_critic(f"{run_dir}/final/critic", 0).eval())(tokens, mask)
    same = (logprobs[0, :-1] + losses).abs().max() < 1e-3
    return "yes" if same and values.abs().sum() > 0 else "other values"


def attempt(function, *args):
    """What the function returns, or in a few words what stopped it."""
    try:
        return function(*args)
    except (Exception, SystemExit) as error:
        lines = [line for line in str(error).splitlines() if "rror: " in line]  # in the console of a launch
        return " ".join([*lines, f"{type(error).__name__}: {error}"][0].split())[:100]


def try_family(name, folder, columns=tuple(MODES)):
    """{column: a number or words} of one family, whose model is in `folder`."""
    with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stderr(io.StringIO()):
        found = {"pass": attempt(compare_pass, folder), "greedy": attempt(compare_greedy, folder)}
        for column in columns:
            found[column] = attempt(train, folder, column, Path(temporary))
            if column == "PPO":
                saved = Path(temporary, column, "final").exists()
                found["reload"] = attempt(reload, Path(temporary, column)) if saved else "-"
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="families (default: all)")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for number, name in enumerate(args.names or sorted(FAMILIES)):
        with tempfile.TemporaryDirectory() as folder:
            make_model(name, folder)
            found = try_family(name, folder)
        table = common.markdown(["family", *found], [[name, *found.values()]])
        print(table if number == 0 else table.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
