"""Shared pieces: the script as a module, tiny random models and data in temporary folders, launches."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import variants
from accelerate.state import AcceleratorState
from conftest import PLACE, ROOT
from datasets import Dataset, DatasetDict
from ranks import load_script, run_script
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

TINY = ROOT / "benchmarks" / "tiny"
SCRIPTS = "ppo_llm", "grpo_llm", "ppo_llm_fsdp"
# Of the KL of sampler and training pass, the mean over responses at temperature 1; 40 times as much in one of them.
KL_LIMITS = {"float32": 1e-5, "bfloat16": 1e-2}
torch.set_num_threads(1)


def path_of(name):
    """Where a script is by its name; with --script the copy stands in for its own."""
    return Path(os.environ.get(PLACE, ROOT)) / f"{name}.py"


def run_lines(algo, first, last, **given):
    """Runs lines of `main` of a script, those from the assignment of `first` to that of `last` in the same block, on
    the given variables: all variables as a namespace. args: fields of Args; those that are missing have their defaults.
    """
    given["args"] = algo.Args(**{"model": "m"} | given.get("args", {}))
    tree = ast.parse(Path(algo.__file__).read_text())
    (main,) = (node for node in tree.body if getattr(node, "name", None) == "main")
    for block in (node.body for node in ast.walk(main) if isinstance(node, ast.For | ast.With | ast.If)):
        names = [
            {x.id for t in getattr(line, "targets", []) for x in ast.walk(t) if hasattr(x, "id")} for line in block
        ]
        begins, ends = ([i for i, found in enumerate(names) if name in found] for name in (first, last))
        if begins and ends:
            variables = vars(algo) | given
            exec(compile(ast.Module(block[begins[0] : ends[-1] + 1], []), algo.__file__, "exec"), variables)
            return SimpleNamespace(**variables)
    raise AssertionError(f"main of {algo.__file__} has no block that assigns {first} and {last}")


def compose(folder):
    """Merges grpo_llm_fsdp.py out of the three scripts, in the folder: its path."""
    text, conflicts = variants.sharded(path_of("grpo_llm").read_text(), "grpo_llm.py", path_of("grpo_llm").parent)
    assert conflicts == 0, "the three scripts do not merge"
    (folder / "grpo_llm_fsdp.py").write_text(text)
    return folder / "grpo_llm_fsdp.py"


def the_copy():
    """The name of the script that --script gave a copy of, if any."""
    return next((name for name in SCRIPTS if PLACE in os.environ and not path_of(name).is_symlink()), None)


def ruff(*words):
    """Its complaints fail. By the project's rules, wherever the files are."""
    command = [sys.executable, "-m", "ruff", *map(str, words), "--config", str(ROOT / "pyproject.toml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def scripts_in(module):
    own = getattr(module, "SCRIPT", SCRIPTS)
    return (own,) if isinstance(own, str) else own


def names_of(item):
    """Of which scripts the test is."""
    if hasattr(item, "callspec") and "script" in item.callspec.params:
        return (item.callspec.params["script"],)
    return scripts_in(item.module) if "script" in item.fixturenames or hasattr(item.module, "SCRIPT") else ()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if copy := the_copy():
        config.hook.pytest_deselected(items=[item for item in items if copy not in names_of(item)])
        items[:] = [item for item in items if copy in names_of(item)]


@pytest.fixture(scope="module")
def script(request):
    """Path of the script under test: the one that `each_script` names, or the copy, or the first of SCRIPT."""
    return path_of(getattr(request, "param", None) or the_copy() or scripts_in(request.module)[0])


def each_script(*names):
    """Mark: the test runs once for each of these scripts, or of all."""
    return pytest.mark.parametrize("script", names or SCRIPTS, indirect=True, scope="module")


@pytest.fixture(scope="module")
def algo(script):
    """The script under test as a module; importing it must have no side effects."""
    return load_script(script)


@pytest.fixture(autouse=True)
def as_it_was():
    """`main` may run many times in one process, with other precisions; it leaves its signal handlers behind, and if it
    is refused its group of processes, too."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    AcceleratorState._reset_state(True)
    if dist.is_initialized():
        dist.destroy_process_group()


def make_tokenizer(pad="<pad>", eos="<eos>"):
    """One token per character; pad may be None or equal to eos."""
    specials = ["<pad>", "<eos>", "<eos2>"]
    vocab = {token: i for i, token in enumerate([*specials, *"abcdefghijklmnopqrstuvwxyz0123456789 #.,?\n-$"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(specials)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token=pad)


def make_model(folder, arch="llama", seed=0, pad="<pad>", dropout=0.0, auto_class=AutoModelForCausalLM, **config):
    """A random two-layer model with its tokenizer in `folder`, sharp enough that its tokens differ in probability."""
    tokenizer = make_tokenizer(pad)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
    sizes |= {"initializer_range": 0.2, "vocab_size": len(tokenizer)}
    sizes |= {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": tokenizer.pad_token_id}
    if arch == "llama":
        kind, own = LlamaConfig, {"intermediate_size": 48, "num_key_value_heads": 2, "attention_dropout": dropout}
    else:
        kind, own = GPT2Config, dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], dropout)
    torch.manual_seed(seed)
    model = auto_class.from_config(kind(**sizes | own | config))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_rows(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def read_metrics(run_dir):
    return read_rows(Path(run_dir) / "metrics.jsonl")


def toy_rows(n, start=0):
    numbers = range(start, start + n)
    return [{"question": f"what is {i} + {i % 7}?" + "?" * (i % 5), "answer": f"#### {i + i % 7}"} for i in numbers]


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory):
    """Both splits in a folder: with another --dataset a run has other test rows, or none."""
    folder = str(tmp_path_factory.mktemp("data") / "toy")
    rows = {"train": toy_rows(24), "test": toy_rows(7, 100)}  # an odd number: two processes have unequal shares
    DatasetDict({split: Dataset.from_list(rows[split]) for split in rows}).save_to_disk(folder)
    return folder


# A reward that a random model gets signal from: the share of letters before the middle of the alphabet.
TOY_REWARD = """
def early(prompts, responses, answers):
    return [sum(c < "m" for c in r) / max(1, len(r)) + 0.01 * len(r) for r in responses]
"""


@pytest.fixture(scope="session")
def toy_reward(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "toy_reward.py"
    path.write_text(TOY_REWARD)
    return f"{path}:early"


@pytest.fixture(scope="module")
def toy_flags(algo, tiny_model, toy_data, toy_reward):
    """Fields of Args for a run of 8 responses an iteration that takes less than a second."""
    flags = {"model": tiny_model, "dataset": toy_data, "reward": toy_reward, "track": "none", "lr": 1e-3}
    flags |= {"critic_lr": 1e-3, "batch_size": 8, "minibatch_size": 4, "microbatch_tokens": 128}
    flags |= {"max_response_length": 10, "total_iterations": 2, "eval_every": 0, "eval_rows": 0, "save_every": 0}
    known = {field.name for field in fields(algo.Args)}
    flags |= {"group_size": 2, "batch_size": 4} if "group_size" in known else {}
    return {name: value for name, value in flags.items() if name in known}


def run_main(algo, flags):
    """The run folder of `main` with these fields of Args, on this process alone."""
    AcceleratorState._reset_state(True)
    with mock.patch.object(time, "sleep"):  # the pause at the end is for gloo's threads
        return algo.main(algo.Args(**flags))


@pytest.fixture
def toy_run(algo, toy_flags, tmp_path):
    """Runs `main` with toy_flags | changes: (run folder, its metrics). May be called several times in one test."""

    def run(algo=algo, **changes):
        name = f"run{len(list((tmp_path / 'runs').glob('run*')))}"
        run_dir = run_main(algo, toy_flags | {"output_dir": str(tmp_path / "runs"), "run_name": name} | changes)
        return run_dir, read_metrics(run_dir)

    return run


@pytest.fixture
def spy(monkeypatch):
    """spy(owner, name): a list that from now on gets (arguments, result) of every call of owner.name.

    note: it gets note(arguments) instead, taken before the call.
    """

    def watch(owner, name, note=None):
        real, calls = getattr(owner, name), []

        def called(*args, **options):
            if note:
                calls.append(note(*args, **options))
                return real(*args, **options)
            calls.append((args, real(*args, **options)))
            return calls[-1][1]

        monkeypatch.setattr(owner, name, called)
        return calls

    return watch


def refusal(run):
    """The sentence with which `run` is refused: the script's `fail` leaves it as the exit code, which Python prints."""
    with pytest.raises(SystemExit) as stop:
        run()
    assert str(stop.value.code).startswith("error: "), stop.value.code
    return stop.value.code


def untimed(metrics):
    """The metrics that depend on the arguments alone."""
    return [{k: v for k, v in m.items() if not k.startswith(("time/", "throughput/", "memory/"))} for m in metrics]


def as_flags(fields):
    """Fields of Args as words of the command line."""
    words = []
    for name, value in fields.items():
        flag = name.replace("_", "-")
        words += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return words


def forked(script, fields, processes=2, **options):
    """As `launch`, by ranks that need no launcher: (exit code, console)."""
    return run_script(script, as_flags(fields), processes, **options)


def start(script, fields, processes=2, machine=(), **options):
    """A launch as the README has it, output in one pipe: the Popen object. machine: words for one of several."""
    command = [str(Path(sys.executable).with_name("accelerate")), "launch", "--num_processes", str(processes)]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command += ["--multi_gpu"] if processes > 1 else []
    command += [*machine, str(script)]  # of a flag that comes twice the last one counts
    command += as_flags(fields) if isinstance(fields, dict) else fields
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    # Tests in the background of a shell are deaf to SIGINT, and what they start would be, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, env=env, **pipes | options)


def launch(script, fields, processes=2, timeout=500, **options):
    """Runs a launch to its end: (exit code, console)."""
    process = start(script, fields, processes, **options)
    try:
        console, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, console
