"""The path of a real run (notes/real-run.md): its commands are legal, and run with a random Qwen2 made small."""

import importlib.util
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import ROOT, launch, read_metrics, read_rows, toy_rows
from datasets import Dataset, DatasetDict
from ranks import load_script, run_script
from test_project import check_flags
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

PAGE = ROOT / "notes" / "real-run.md"
# The sizes of a run here, in place of the page's: of a flag that comes twice the last one counts.
SMALL = "--batch-size 4 --group-size 4 --minibatch-size 8 --rollout-batch-size 8 --max-prompt-length 400 --track none"
SMALL += " --max-response-length 6 --total-iterations 2 --eval-every 1 --eval-rows 3 --save-every 1"
# What else stands on the page, and is not run: it installs, or shows curves.
NOT_RUN = "pip install -r tests/vllm.txt", "python3.11 -m venv", "tensorboard --logdir", "python benchmarks/plot.py"
COMPARED = "reward/mean", "actor/grad_norm", "actor/entropy", "kl/mean"
# As in Qwen2.5-Instruct, but for the tools.
TEMPLATE = """{% if messages[0]['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def blocks(kind):
    return re.findall(rf"(?ms)^```{kind}\n(.*?)^```$", PAGE.read_text())


def commands():
    """All lines of the page's shell blocks, continued ones in one."""
    lines = "".join(blocks("bash")).replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines]


def training(line):
    """(script's name, processes, its words, name of the run) of a line that starts a script; None of another."""
    match = re.fullmatch(r"accelerate launch (?:--multi_gpu --num_processes (\d+) )?(\w+)\.py (.*)", line)
    if match is None:
        return None
    words = shlex.split(match[3])
    return match[2], int(match[1] or 1), words, words[words.index("--run-name") + 1]


RUNS = {run[3]: run for run in map(training, commands()) if run}
LOOKS = "look", "score"  # they train nothing
WITH_VLLM = [name for name in RUNS if "vllm" in name]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder that looks like a clone, in which the page's lines that make scripts were run, as they stand."""
    folder = tmp_path_factory.mktemp("clone")
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git"):
            (folder / path.name).symlink_to(path)
    for line in commands():
        if line.startswith(("git merge-file", "python notes/variants.py")):
            line = line.replace("python ", f"{sys.executable} ", 1)
            subprocess.run(line, shell=True, cwd=folder, check=True, capture_output=True)
    return folder


def load(path):
    """A script of the clone as a module. Its flags can be read without vLLM: an empty module stands in."""
    stub = "vllm" in path.stem and "vllm" not in sys.modules
    if stub:
        sys.modules["vllm"] = SimpleNamespace(LLM=None, SamplingParams=None, TokensPrompt=None)
    try:
        return load_script(path)
    finally:
        if stub:
            del sys.modules["vllm"]


def parse(module, words):
    """Args of the words, read by the script's own parser."""
    with mock.patch.object(sys, "argv", ["script", *words]):
        return module.parse_args()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Words that replace the page's model and data: a random Qwen2 with a tied head, its template, short questions."""
    folder = tmp_path_factory.mktemp("inputs")
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    text_end, turn_end = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "max_position_embeddings": 512, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    config = Qwen2Config(**sizes, tie_word_embeddings=True, initializer_range=0.2, eos_token_id=turn_end)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = [turn_end, text_end]
    model.generation_config.pad_token_id = text_end
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = {"train": toy_rows(24), "test": toy_rows(7, 100)}
    DatasetDict({split: Dataset.from_list(rows[split]) for split in rows}).save_to_disk(folder / "data")
    words = ["--model", str(folder / "model"), "--dataset", str(folder / "data"), *shlex.split(SMALL)]
    return SimpleNamespace(words=words, data=folder / "data", eos_ids=sorted([text_end, turn_end]))


def run(name, clone, inputs, *more):
    """The page's line with the inputs in place of its own: (exit code, console, run folder)."""
    script, processes, words, _ = RUNS[name]
    more = [*inputs.words, *more, *(["--total-iterations", "0"] if name in LOOKS else [])]
    if "runs/" in words[1]:  # the model that another line of the page has trained
        more = more[2:]
    code, console = run_script(clone / f"{script}.py", [*words, *more], processes, clone)
    return code, console, clone / "runs" / name


@pytest.fixture(scope="module")
def done(clone, inputs):
    """Each of the page's runs, done once."""
    found = {}

    def get(name):
        if name not in found:
            found[name] = run(name, clone, inputs)
        code, console, folder = found[name]
        assert code == 0, console
        return console, folder

    return get


def test_every_line_of_the_page_is_run_here_or_known():
    others = [line for line in commands() if not training(line)]
    made = [line for line in others if line.startswith(("git merge-file", "python notes/variants.py"))]
    assert len(RUNS) == sum(line.startswith("accelerate launch") for line in commands()) == 7
    assert len(WITH_VLLM) == 2 and len(made) == 3
    assert [line for line in others if line not in made and not line.startswith(NOT_RUN)] == []
    long = [line for line in PAGE.read_text().splitlines() if len(line) > 120 and not line.startswith("|")]
    assert long == []
    kinds = re.findall(r"(?m)^```(\w*)$", PAGE.read_text())
    assert {*kinds} == {"bash", "python", ""} and len(blocks("python")) == 3


@pytest.mark.parametrize("name", RUNS)
def test_flags_are_legal(name, clone):
    script, processes, words, _ = RUNS[name]
    check_flags(load(clone / f"{script}.py"), shlex.join(words), processes)
    assert script == "vllm_llm" or not {"--is-cap", "--cache-gib"} & {*words} or "vllm" in script


@pytest.mark.parametrize(
    ("more", "error"),
    [("--learning-rate 1", SystemExit), ("--cache-gib 1", SystemExit), ("--minibatch-size 12", AssertionError)],
)
def test_illegal_flags_would_be_found(more, error, clone, capsys):
    script, processes, words, _ = RUNS["gsm8k"]
    with pytest.raises(error):
        check_flags(load(clone / f"{script}.py"), f"{shlex.join(words)} {more}", processes)


def test_the_table_explains_the_flags_of_the_command(clone):
    script, _, words, _ = RUNS["gsm8k"]
    rows = re.findall(r"(?m)^\| `(--[a-z-]+)` \| (\S+) \| .+ \|$", PAGE.read_text())
    assert [word for row in rows for word in row] == [*words]
    args, defaults = parse(load(clone / f"{script}.py"), words), load(clone / f"{script}.py").Args("x")
    for flag, value in re.findall(r"(?m)^\| `--([a-z-]+)` \| (\S+) \| .*\bthe default\b.* \|$", PAGE.read_text()):
        name = flag.replace("-", "_")
        assert getattr(args, name) == getattr(defaults, name), f"--{flag} {value}"
    assert args.total_iterations == -(-7473 // args.batch_size)


def needed(name, clone, **changes):
    """Bytes per card of a command of the page, by notes/memory.py; with vLLM its weights and its cache on top."""
    memory = runpy.run_path(str(ROOT / "notes" / "memory.py"))
    script, processes, words, _ = RUNS[name]
    args = parse(load(clone / f"{script}.py"), words)
    shape = memory["SHAPES"][args.model.removeprefix("Qwen/").removesuffix("-Instruct")]
    share = args.batch_size * args.group_size // processes
    options = {"critic": False, "sharded": "fsdp" in script, "checkpointing": args.gradient_checkpointing}
    options |= {"tokens": args.microbatch_tokens, "rows": min(args.rollout_batch_size, share)}
    terms = memory["budget"](shape, processes, **options | changes)
    engine = 2 * (memory["count"](shape) + shape.vocab * shape.hidden) if "vllm" in script else 0
    return terms["peak" if not engine else "update"] + engine + getattr(args, "cache_gib", 0) * 2**30


def test_figures_of_memory_are_computed(clone):
    text = PAGE.read_text()
    rows = re.findall(r"(?m)^\| `(\S+)` \| (?:one|two) of (\d+) GB \| (\S+) GB \|$", text)
    assert {name for name, _, _ in rows} == RUNS.keys() - {*LOOKS}
    for name, card, shown in rows:
        assert f"{needed(name, clone) / 1e9:.1f}" == shown, name
        assert float(shown) <= 0.9 * float(card), name
    memory = runpy.run_path(str(ROOT / "notes" / "memory.py"))
    half, whole = memory["SHAPES"]["Qwen2.5-0.5B"], memory["SHAPES"]["Qwen2.5-1.5B"]
    shown = [f"{memory['ddp_buckets'](half, critic=False) / 1e9:.1f} GB"]
    shown += [f"{2 * (memory['count'](x) + x.vocab * x.hidden) / 1e9:.1f} GB" for x in (half, whole)]
    small = {"critic": False, "checkpointing": True, "rows": 32}
    shown += [f"{memory['budget'](whole, n, **small)['peak'] / 1e9:.1f}" for n in (1, 2)]
    lora = {"critic": False, "checkpointing": True, "lora_rank": 16}
    shown += [f"takes {memory['budget'](whole, **lora)['peak'] / 1e9:.1f} GB"]
    cached = memory["kv_cache"](half, 1, 1, True, True)
    shown += [f"{cached:,} bytes each", f"{2 * 2**30 // cached:,} tokens", f"{2 * 2**30 // cached // 1024} rows"]
    assert [figure for figure in shown if figure not in " ".join(text.split())] == []
    # Without the advice of the page it would not fit.
    assert needed("gsm8k-two", clone, tokens=4096) > 0.9 * 24e9
    assert needed("gsm8k", clone, tokens=8192) > 0.9 * 24e9


@pytest.mark.parametrize("name", [name for name in RUNS if name not in WITH_VLLM])
def test_commands_run(name, done, inputs):
    if name == "score":
        done("gsm8k")
    console, folder = done(name)
    assert f"{RUNS[name][1]} process(es) on cpu" in console
    assert f"EOS ids {inputs.eos_ids}" in console and r"<|im_start|>assistant\n" in console
    metrics, args = read_metrics(folder), json.loads((folder / "args.json").read_text())
    assert args["num_processes"] == RUNS[name][1] and args["run_name"] == name
    assert (folder / "completions" / "eval_000000.jsonl").exists()
    assert 'the final answer after "####"' in read_rows(folder / "completions" / "eval_000000.jsonl")[0]["prompt"]
    if name in LOOKS:
        assert len(metrics) == 1 and not (folder / "final").exists()
    else:
        assert [line["step"] for line in metrics] == [0, 1, 2] and (folder / "final" / "config.json").exists()
        shown = set(
            re.findall(r"`((?:reward|kl|group|response|rollout|actor|time|eval|memory)/\w+)`", PAGE.read_text())
        )
        assert shown - {"rollout/ess", "rollout/weight_mean"} <= metrics[-1].keys()


def test_two_processes_do_what_one_does(clone, inputs, toy_reward):
    """The commands of one card and of two, as the page says; in float32, and with a reward that teaches something."""
    found = []
    for name, seed in ("gsm8k", 1), ("gsm8k-two", 1), ("gsm8k", 2):
        more = "--reward", toy_reward, "--lr", "1e-3", "--seed", str(seed), "--run-name", f"{name}-learns-{seed}"
        code, console, _ = run(name, clone, inputs, *more)
        assert code == 0, console
        found.append(read_metrics(clone / "runs" / f"{name}-learns-{seed}")[-1])
    one, two, other = ([line[name] for name in COMPARED] for line in found)
    assert one == pytest.approx(two, rel=1e-3, abs=1e-6)
    assert all(a != pytest.approx(b, rel=1e-2) for a, b in zip(one, other))


def test_a_stopped_run_gets_its_final_folder_by_the_same_line(done, clone, inputs):
    _, folder = done("gsm8k")
    shutil.rmtree(folder / "final")
    code, console, _ = run("gsm8k", clone, inputs)
    assert code == 0 and (folder / "final" / "config.json").exists(), console
    assert len(read_metrics(folder)) == 3  # and nothing else was done


@pytest.mark.parametrize("number", range(3))
def test_python_of_the_page_runs(number, done, clone, inputs):
    """As it stands, but for the data, which are not fetched."""
    done("look" if number == 1 else "gsm8k")
    local = f"import datasets\ndatasets.load_dataset = lambda *names: datasets.load_from_disk({str(inputs.data)!r})\n"
    words = [sys.executable, "-c", local + blocks("python")[number]]
    process = subprocess.run(words, cwd=clone, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    lines = [line for line in process.stdout.splitlines() if line.strip()]
    assert sum("->" in line for line in lines) == 3 if number == 0 else len(lines) >= 1
    assert number != 1 or process.stdout.count(" | ") >= 2 * 3


def test_the_example_asks_as_the_training_does():
    names = {}
    (line,) = (line for line in blocks("python")[2].splitlines() if line.startswith("question += "))
    exec(line.replace("+=", "="), names)
    assert names["question"] == load_script(ROOT / "grpo_llm.py").GSM8K_REQUEST


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: its flags alone are read")
@pytest.mark.parametrize("name", WITH_VLLM)
def test_commands_with_vllm_run(name, clone, inputs):
    """By the launcher: the engine must not be forked."""
    script, processes, words, _ = RUNS[name]
    words = [*words, *inputs.words, "--cache-gib", "0.1"]
    code, console = launch(clone / f"{script}.py", words, processes, cwd=clone)
    assert code == 0 and f"{processes} process(es) on cpu" in console, console
    last = read_metrics(clone / "runs" / name)[-1]
    assert last["step"] == 2 and last["rollout/logprob_diff"] < 1e-4
    assert last["rollout/weight_mean"] == pytest.approx(1, abs=1e-3) and last["rollout/ess"] > 0.999
