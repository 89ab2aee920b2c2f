"""Shared pieces: the scripts as modules, tiny random models and data in temporary folders, real data by LLM_RL_DATA."""

import importlib.util
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # oversubscribed threads spin and run ten times slower
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from accelerate.state import AcceleratorState
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
torch.set_num_threads(1)
CHARS = list("abcdefghijklmnopqrstuvwxyz0123456789 #.,?\n-$")


def load_script(name):
    """A script of the repository root as a module; importing it must have no side effects."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


SCRIPTS = "ppo_llm", "grpo_llm", "ppo_llm_fsdp"
CRITIC_FLAGS = {"critic_model", "critic_lr", "critic_warmup_iterations", "value_clip"}
CRITIC_FLAGS |= {"gamma", "lam", "whiten_advantages"}


# Of a module's scope, so that the tests of one file stay together. Tests of a costly fixture that depends on it (two
# ranks, a launch) must not parametrise it themselves: pytest would make that fixture anew for every test.
@pytest.fixture(scope="module", params=SCRIPTS)
def algo(request):
    """Each script in turn, as a module. `only_ppo` and `only_grpo` keep a test that uses it to some of them."""
    return load_script(request.param)


only_ppo = pytest.mark.parametrize("algo", ["ppo_llm", "ppo_llm_fsdp"], indirect=True)
only_grpo = pytest.mark.parametrize("algo", ["grpo_llm"], indirect=True)


@pytest.fixture(scope="session")
def ppo():
    return load_script("ppo_llm")


def has_critic(algo):
    return hasattr(algo, "Critic")


def make_args(algo, **flags):
    """Args of a script; flags of the critic are left out where there is none."""
    return algo.Args(**{k: v for k, v in flags.items() if has_critic(algo) or k not in CRITIC_FLAGS})


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """`main` may run many times in one process, with other precisions."""
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture(scope="session")
def data_dir():
    folder = os.environ.get("LLM_RL_DATA")
    if not folder:
        pytest.skip("real data not found: set LLM_RL_DATA to the folder that holds it")
    return Path(folder)


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


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def toy_rows(n, start=0):
    return [
        {"question": f"what is {i} + {i % 7}?" + "?" * (i % 5), "answer": f"#### {i + i % 7}"}
        for i in range(start, start + n)
    ]


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_rows(folder / "test.jsonl", toy_rows(6, 100))
    return write_rows(folder / "train.jsonl", toy_rows(24))


# A reward that a random model gets signal from: the share of letters before the middle of the alphabet.
TOY_REWARD = """
def early(prompts, responses, answers):
    return [sum(c < "m" for c in r) / max(1, len(r)) + 0.01 * len(r) for r in responses]
"""


@pytest.fixture(scope="session")
def toy_reward(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(TOY_REWARD)
    return f"{path}:early"


@pytest.fixture
def toy_args(algo, tiny_model, toy_data, toy_reward, tmp_path):
    """Arguments of a run of 8 responses that takes about a second; keyword arguments override."""
    sizes = {"batch_size": 8, "group_size": 1} if has_critic(algo) else {"batch_size": 4, "group_size": 2}

    def make(**changes):
        base = {"model": tiny_model, "dataset": toy_data, "reward": toy_reward, "output_dir": str(tmp_path / "runs")}
        base |= sizes | {"minibatch_size": 4, "max_response_length": 10, "total_iterations": 2}
        return make_args(algo, **base | {"eval_every": 0, "lr": 1e-3} | changes)

    return make


def read_metrics(run_dir):
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def toy_run(algo, toy_args, tmp_path):
    """Runs `main` with toy_args(**changes): (run folder, its metrics). May be called several times in one test."""

    def run(**changes):
        AcceleratorState._reset_state(True)
        name = f"run{len(list((tmp_path / 'runs').glob('run*')))}"  # default names have a resolution of one second
        run_dir = algo.main(toy_args(**{"run_name": name} | changes))
        return run_dir, read_metrics(run_dir)

    return run


@pytest.fixture
def spy(monkeypatch):
    """spy(owner, "name") -> list that grows by (positional arguments, result) with every call of owner.name."""

    def install(owner, name):
        real, calls = getattr(owner, name), []

        def wrapper(*args, **kwargs):
            result = real(*args, **kwargs)
            calls.append((args, result))
            return result

        monkeypatch.setattr(owner, name, wrapper)
        return calls

    return install


def untimed(metrics):
    """The metrics that depend on the arguments alone."""
    return [{k: v for k, v in m.items() if not k.startswith(("time/", "throughput/", "memory/"))} for m in metrics]


def read_rows(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
