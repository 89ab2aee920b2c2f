"""Families of models, tiny and random, go through the scripts, or are refused with a reason.

Every model is as small as its configuration allows, with at least one layer of each kind, and with norms and biases
that are not 0 or 1. One of each kind is tried by default, the others in the slow tests.
"""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, TINY, each_script, forked, read_metrics, run_main
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

sys.path.append(str(ROOT / "notes" / "variants"))
import cuda_graphs

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
    "deepseek_v3": DEEPSEEK,
    "exaone4": GROUPED | SLIDING | {"sliding_window_pattern": 2},
    "falcon": FALCON,
    "falcon, alibi": FALCON | {"alibi": True},
    "falcon_h1": GROUPED | MAMBA | {"mamba_d_ssm": 64, "lm_head_multiplier": 1.0},
    "gemma2": HEADS | SLIDING | {"initializer_range": 1.0},
    "gemma3": {"text_config": GEMMA3, "vision_config": GEMMA_EYES, "mm_tokens_per_image": 4},
    "gemma3n_text": GEMMA4 | {"num_kv_shared_layers": 0, "laurel_rank": 4, "activation_sparsity_pattern": [0.0, 0.0]},
    "gemma4_text": GEMMA4 | {"initializer_range": 1.0, "final_logit_softcapping": 30.0},
    "gemma4_text, shared": GEMMA4 | LONG_GEMMA4 | {"final_logit_softcapping": None},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "initializer_range": 0.2},
    "gpt_neox": BASE | {"rotary_pct": 0.5, "max_position_embeddings": 512, "initializer_range": 0.2},
    "gpt_oss": HEADS | LOCAL_EXPERTS | SLIDING,
    "granite": GROUPED | SCALED | {"logits_scaling": 8.0},
    "granitemoehybrid": GRANITE_HYBRID,
    "jamba": JAMBA | {"mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "kimi_linear": HEADS | LOCAL_EXPERTS | KIMI | {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": GROUPED | {"layer_types": ["conv", "full_attention"]},
    "llama4_text": HEADS | LOCAL_EXPERTS | LLAMA4,
    "mamba": STATE,
    "mamba2": STATE | {"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
    "minimax": HEADS | LOCAL_EXPERTS | {"layer_types": ["linear_attention", "full_attention"]},
    "ministral3": HEADS | {"sliding_window": None, "rope_parameters": YARN},
    "mistral": GROUPED | {"sliding_window": 8},
    "mixtral": GROUPED | LOCAL_EXPERTS,
    "nanochat": GROUPED | {"initializer_range": 1.0, "final_logit_softcapping": 15.0},
    "nemotron_h": NEMOTRON | {"moe_shared_expert_intermediate_size": 16},
    "olmo3": GROUPED | SLIDING,
    "opt": OPT,
    "opt, as 350m": OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "phi3": GROUPED | {"original_max_position_embeddings": 512, "sliding_window": 8},
    "qwen3_5": {"text_config": QWEN3_5, "vision_config": QWEN_EYES} | QWEN_IMAGES,
    "qwen3_moe": HEADS | EXPERTS,
    "qwen3_next": HEADS | EXPERTS | LINEAR | QWEN3_NEXT,
    "recurrent_gemma": HEADS | RECURRENT,
    "smollm3": GROUPED | {"num_hidden_layers": 4},
    "zamba2": ZAMBA | {"chunk_size": 16, "mamba_headdim": 16},
}
# One of each kind: plain, learned positions, tied, a cap, scales, a window, experts, and hybrids with linear attention,
# convolutions, Mamba; two that read images, too; and one whose decoder has another name.
FAST = ["llama", "gpt2", "gpt_neox", "gemma2", "granite", "mistral", "gpt_oss", "qwen3_5", "lfm2", "falcon_h1"]
FAST += ["gemma3", "opt", "llama4_text"]
# What transformers does differently for a row alone, or by eager attention, and why.
APART = {
    "falcon, alibi": "eager attention adds the bias twice, once of it in the mask",
    "zamba2": "the decoding step of its Mamba layers, 1e-4 for one row alone as well",
    "nemotron_h": "the same, 3e-5",
}
# Why a family cannot be trained.
DIFFER = "sampler and training pass have a KL of"
REFUSED = {"mamba": DIFFER, "mamba2": DIFFER, "recurrent_gemma": DIFFER, "minimax": "cache of its own"}
REFUSED["llama4_text"] = "no attribute 'last_hidden_state'"  # transformers looks for its decoder under a wrong name


def families(fast, names=tuple(FAMILIES)):
    """These names, as slow tests those that are not fast."""
    return [pytest.param(name, marks=[] if name in fast else pytest.mark.slow) for name in names]


def make_family(name, folder, **changes):
    """Saves a random model of the family with the embedded model's tokenizer."""
    kind, options = name.partition(",")[0], FAMILIES[name] | changes
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


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """folder_of(name): a folder with a random model of the family."""
    folders = {}

    def make(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("family") / "model"
            make_family(name, folders[name])
        return folders[name]

    return make


@pytest.fixture
def train_flags(algo, toy_reward, tmp_path):
    """Of two iterations on the embedded task, eight responses each."""
    flags = {"dataset": f"{TINY}/test.jsonl", "prompt_suffix": "", "reward": toy_reward, "track": "none", "lr": 1e-4}
    flags |= {"total_iterations": 2, "minibatch_size": 4, "microbatch_tokens": 256, "max_response_length": 12}
    flags |= {"eval_rows": 0, "save_every": 0, "output_dir": str(tmp_path), "run_name": "run"}
    return flags | ({"batch_size": 4, "group_size": 2} if not hasattr(algo, "Critic") else {"batch_size": 8})


def largest_difference(run_dir):
    """Between sampler and training pass, as a root mean square of log-probs: their KL is half its square."""
    return max(math.sqrt(2 * line["rollout/kl"]) for line in read_metrics(run_dir)[1:])


@torch.no_grad()
def compare_pass(algo, folder):
    """The largest difference of a log-prob in a padded batch from that of its row alone by eager attention."""
    model = algo.load_model(str(folder), AutoModelForCausalLM).eval()
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    stream = torch.Generator().manual_seed(2)
    lengths = [5, 30, 17, 9]
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.randint(9, 300, (length,), generator=stream)
        mask[row, 2 : length - 1] = True
    found, *_ = algo.Policy(model, 1.0)(tokens, mask)
    worst = 0.0
    for row, length in enumerate(lengths):
        logits = plain(tokens[row : row + 1, :length], use_cache=False).logits[0].float()
        expected = logits.log_softmax(-1)[:-1].gather(1, tokens[row, 1:length, None]).squeeze(1)
        worst = max(worst, (found[row, 2 : length - 1] - expected[2:]).abs().max().item())
    return worst


@torch.no_grad()
def compare_greedy(algo, folder):
    """Our `generate` chooses as transformers' own does, each prompt of theirs alone and here one of them twice, and so
    does cuda_graphs.py with its static cache. (Its graphs need a GPU.)"""
    model = algo.load_model(str(folder), AutoModelForCausalLM).eval()
    stream = torch.Generator().manual_seed(3)
    first, *rest = [torch.randint(9, 300, (length,), generator=stream).tolist() for length in (4, 23, 11)]
    prompts = [first, first, *rest]  # grpo_llm.py reads a group once
    uniforms = torch.zeros(len(prompts), 12, dtype=torch.float64)
    responses = algo.generate(model, prompts, uniforms, EOS, 0)
    cuda_graphs.script = SimpleNamespace(**vars(algo), own_generate=algo.generate)
    assert [x.ids for x in cuda_graphs.generate(model, prompts, uniforms, EOS, 0)] == [x.ids for x in responses]
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": EOS, "pad_token_id": 0}
    for prompt, response in zip(prompts, responses):
        ids = torch.tensor([prompt])
        output = model.eval().generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert response.ids == output[0, len(prompt) :].tolist()


@torch.no_grad()
def compare_reloaded(ppo, run_dir):
    """What a run has saved loads again, by the script and by the plain class, and says the same."""
    tokens = torch.arange(9, 19)[None]
    mask = tokens < 18
    plain = AutoModelForCausalLM.from_pretrained(run_dir / "final").eval()
    logits = plain(tokens, use_cache=False).logits[0, :-1].float()
    losses = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
    model = ppo.load_model(f"{run_dir}/final", AutoModelForCausalLM).eval()
    logprobs, *_ = ppo.Policy(model, 1.0)(tokens, mask)
    values = ppo.Critic(ppo.load_critic(f"{run_dir}/final/critic", 0).eval())(tokens, mask)
    assert (logprobs[0, :-1] + losses).abs().max() < 1e-3 and values.abs().sum() > 0


@pytest.mark.parametrize("name", families(FAST))
def test_a_family_is_right_or_refused(algo, name, folder_of, train_flags):
    """Each pass as each row alone, greedy answers as transformers', sampler and training pass alike in a run, and what
    it has saved loads."""
    folder = folder_of(name)
    flags = train_flags | {"model": str(folder)}
    if name in REFUSED:
        with pytest.raises((Exception, SystemExit), match=REFUSED[name]):
            run_main(algo, flags)
        return
    assert compare_pass(algo, folder) < 2e-5 or name in APART
    compare_greedy(algo, folder)
    run_dir = run_main(algo, flags)
    most = 1e-3 if name in APART else 2e-5 if name.startswith("qwen3_5") else 1e-5
    assert largest_difference(run_dir) < most
    compare_reloaded(algo, run_dir)


@each_script("grpo_llm")
@pytest.mark.parametrize("name", families(FAST, [name for name in FAMILIES if name not in REFUSED]))
def test_a_family_samples_in_groups(algo, name, folder_of):
    """All that is GRPO's own about a family: the cache of a group's one prefill."""
    compare_greedy(algo, folder_of(name))


KINDS = ["gpt_oss", "qwen3_5", "lfm2", "falcon_h1"]  # experts, linear attention, convolutions, Mamba
MODES = {"checkpointing": {"gradient_checkpointing": True}, "LoRA": {"lora_rank": 2}, "bfloat16": {"dtype": "bfloat16"}}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_in_each_mode(algo, name, mode, folder_of, train_flags):
    run_dir = run_main(algo, train_flags | MODES[mode] | {"model": str(folder_of(name))})
    assert largest_difference(run_dir) < (0.1 if mode == "bfloat16" else 2e-5)


@pytest.mark.slow
@each_script("ppo_llm_fsdp")
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_sharded(script, name, folder_of, train_flags):
    flags = train_flags | {"model": str(folder_of(name))}
    code, console = forked(script, flags)
    assert code == 0, console
    assert largest_difference(f"{flags['output_dir']}/run") < 2e-5


def batch():
    """Tokens of two rows, and a mask of all but the last."""
    tokens = torch.randint(9, 300, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(12) < 11
    return tokens, mask.expand_as(tokens)


TOWERS = ["llama", "gemma3", "qwen3_5", "opt"]  # what stands beside a decoder, or has it elsewhere


@pytest.mark.parametrize("name", families(TOWERS, [name for name in FAMILIES if name != "llama4_text"]))
def test_what_takes_part_is_trained(algo, name, folder_of):
    """What gets a gradient from text, when everything may have one, is what is trained, and a critic's head."""
    folder = str(folder_of(name))
    policy = algo.load_model(folder, AutoModelForCausalLM)
    wrapped = [(policy, algo.Policy(policy, 1.0))]
    if hasattr(algo, "load_critic"):
        critic = algo.load_critic(folder, 0)
        wrapped.append((critic, algo.Critic(critic)))
    for model, wrapper in wrapped:
        trained = set(algo.trained_parameters(model))
        if model is not policy:
            torch.nn.init.normal_(model.score.weight)  # at zero, nothing behind it would get a gradient
        model.requires_grad_(True)
        output = wrapper(*batch())
        (output[0] if isinstance(output, tuple) else output).sum().backward()
        takes_part = {key for key, p in model.named_parameters() if p.grad is not None}
        assert len(takes_part) > 2
        assert trained == takes_part, trained ^ takes_part


DROPS = {"text_config": FAMILIES["gemma3"]["text_config"] | {"attention_dropout": 0.5}}
NOISY = [("mixtral", {"router_jitter_noise": 0.5, "attention_dropout": 0.5}), ("gemma3", DROPS)]


@pytest.mark.parametrize("name, noise", NOISY)
def test_two_passes_of_training_are_the_same(algo, tmp_path, name, noise):
    """Without dropout, also in a part of the model, and without the noise that some routers add while they train."""
    make_family(name, tmp_path / "model", **noise)
    policy = algo.Policy(algo.load_model(str(tmp_path / "model"), AutoModelForCausalLM), 1.0).train()
    first, second = (policy(*batch())[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("script", ["ppo_llm", pytest.param("ppo_llm_fsdp", marks=pytest.mark.slow)], indirect=True)
def test_what_reads_images_is_saved_unchanged(script, folder_of, train_flags, tmp_path):
    """By two processes, to whose sum it has nothing to add. In bfloat16: frozen as it is, it stays float32."""
    folder = folder_of("gemma3")
    code, console = forked(script, train_flags | {"model": str(folder), "dtype": "bfloat16", "total_iterations": 1})
    assert code == 0, console
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "run" / "final"))
    tower = {name for name in before if "vision" in name or "projector" in name}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys() and len(tower) > 5
    assert not changed & tower and len(changed) > 10
