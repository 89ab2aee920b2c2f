"""What the tests of this folder and their workers share: the scripts as modules, tiny random models, toy data."""

import importlib.util
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # oversubscribed threads spin and run ten times slower
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
CHARS = list("abcdefghijklmnopqrstuvwxyz0123456789 #.,?\n-$")
torch.set_num_threads(1)


def load_script(name):
    """A script of the repository root as a module; importing it must have no side effects."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


SCRIPTS = "grpo_llm", "ppo_llm_fsdp"  # ppo_llm.py has been rewritten; its tests are one folder up
CRITIC_FLAGS = {"critic_model", "critic_lr", "critic_warmup_iterations", "value_clip"}
CRITIC_FLAGS |= {"gamma", "lam", "whiten_advantages"}
LOSS_AGGS = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
MICROBATCH_TOKENS = 1, 40, 10_000  # one row, at most two, all


only_ppo = pytest.mark.parametrize("algo", ["ppo_llm_fsdp"], indirect=True)
only_grpo = pytest.mark.parametrize("algo", ["grpo_llm"], indirect=True)


def has_critic(algo):
    return hasattr(algo, "Critic")


def make_args(algo, **flags):
    """Args of a script; flags of the critic are left out where there is none."""
    return algo.Args(**{k: v for k, v in flags.items() if has_critic(algo) or k not in CRITIC_FLAGS})


def make_tokenizer(pad="<pad>", eos="<eos>"):
    """One token per character; pad may be None or equal to eos."""
    specials = ["<pad>", "<eos>", "<eos2>"]
    vocab = {token: i for i, token in enumerate(specials + CHARS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(specials)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token=pad)


def make_model(folder, arch="llama", seed=0, pad="<pad>", dropout=0.0, auto_class=AutoModelForCausalLM, **config):
    """A random two-layer model with its tokenizer in `folder`, sharp enough that its tokens differ in probability."""
    tokenizer = make_tokenizer(pad)
    ids = {
        "vocab_size": len(tokenizer),
        "eos_token_id": 1,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    if arch == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2}
        cfg = LlamaConfig(**ids | sizes | config, attention_dropout=dropout)
    else:
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.2}
        drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
        cfg = GPT2Config(**ids | sizes | drops | config)
    torch.manual_seed(seed)
    model = auto_class.from_config(cfg)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def toy_rows(n, start=0):
    return [
        {"question": f"what is {i} + {i % 7}?" + "?" * (i % 5), "answer": f"#### {i + i % 7}"}
        for i in range(start, start + n)
    ]


# A reward that a random model gets signal from: the share of letters before the middle of the alphabet.
TOY_REWARD = """
def early(prompts, responses, answers):
    return [sum(c < "m" for c in r) / max(1, len(r)) + 0.01 * len(r) for r in responses]
"""


def read_metrics(run_dir):
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def untimed(metrics):
    """The metrics that depend on the arguments alone."""
    return [{k: v for k, v in m.items() if not k.startswith(("time/", "throughput/", "memory/"))} for m in metrics]


def read_rows(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
