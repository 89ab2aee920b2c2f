"""Six architectures, tiny and random, go through every script. The script compares the
sampler with the training pass; here that is compared with each row alone, by eager attention."""

import pytest
import torch
from conftest import each_script, make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2}
WINDOW = 8  # the shortest prompt of toy_rows has 14 tokens
ARCHITECTURES = {
    "llama": GROUPED,
    "qwen3": GROUPED | {"head_dim": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.2},
    "gpt_neox": SIZES | {"rotary_pct": 0.5, "max_position_embeddings": 256, "initializer_range": 0.2},
    # A soft cap of logits behind lm_head, and of attention scores: far above both, they act.
    "gemma2": GROUPED | {"head_dim": 8, "initializer_range": 1.0, "tie_word_embeddings": False},
    "mistral": GROUPED | {"sliding_window": WINDOW},
}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request, tmp_path_factory):
    """(its name, a folder with a random model of it)."""
    folder, tokenizer = tmp_path_factory.mktemp(request.param), make_tokenizer()
    ids = {"vocab_size": len(tokenizer), "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    torch.manual_seed(1)
    config = AutoConfig.for_model(request.param, **ARCHITECTURES[request.param], **ids)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return request.param, str(folder)


@pytest.mark.once
@each_script()
def test_one_iteration(architecture, toy_run):
    """The critic is of that architecture, too; rows of 14 to 30 tokens in micro-batches of up to five."""
    _, folder = architecture
    flags = {"model": folder, "total_iterations": 1, "max_response_length": 12}
    _, metrics = toy_run(**flags)
    assert metrics[1]["rollout/logprob_diff"] < 1e-4 and metrics[1]["actor/grad_norm"] > 0


def test_log_probs_are_those_of_each_row_alone(architecture, algo):
    name, folder = architecture
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    stream = torch.Generator().manual_seed(2)
    lengths = [5, 30, 17, 9]
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, n in enumerate(lengths):
        tokens[row, :n] = torch.randint(3, 40, (n,), generator=stream)
        mask[row, 2 : n - 1] = True
    found, _ = algo.Policy(model, 1.0)(tokens, mask)
    worst = 0.0
    for row, n in enumerate(lengths):
        logits = plain(tokens[row : row + 1, :n]).logits[0].float()
        expected = logits.log_softmax(-1)[:-1].gather(1, tokens[row, 1:n, None]).squeeze(1)
        worst = max(worst, (found[row, 2 : n - 1] - expected[2:]).abs().max().item())
    assert worst < 1e-4
    if name == "mistral":  # longer than the window: two layers do not reach further
        tokens[1, 0] -= 1
        changed = (algo.Policy(model, 1.0)(tokens, mask)[0] != found)[1].nonzero()
        assert 0 < changed.max() <= 2 * (WINDOW - 1)
