"""The path of a real run (notes/real-run.md): its commands are legal, and run with a random Qwen2 made small."""

import functools
import re
import shlex
import subprocess
import sys
from importlib.metadata import packages_distributions
from types import SimpleNamespace

import datasets
import memory
import pytest
import torch
from conftest import ROOT, launch, read_metrics, read_rows
from ranks import load_script, run_script
from test_project import check_flags
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

PAGE = (ROOT / "notes" / "real-run.md").read_text()
# The sizes of a run here, in place of the page's: of a flag that comes twice the last one counts.
SMALL = "--batch-size 4 --group-size 4 --minibatch-size 8 --rollout-batch-size 8 --max-prompt-length 400 --track none"
SMALL += " --max-response-length 6 --total-iterations 2 --eval-every 1 --eval-rows 3 --save-every 1"
# What else stands on the page, and is not run: it installs, or shows curves.
NOT_RUN = "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600", "pip install -r tests/vllm.txt", "python3.11 -m venv"
NOT_RUN += "tensorboard --logdir", "python benchmarks/plot.py"
MADE = "git merge-file", "python notes/variants.py"
# As in Qwen2.5-Instruct, but for the tools and the system's message.
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
BLOCKS = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", PAGE)
PYTHON = [block for kind, block in BLOCKS if kind == "python"]
# All lines of the page's shell blocks, continued ones in one.
COMMANDS = "".join(block for kind, block in BLOCKS if kind == "bash").replace("\\\n", " ").splitlines()
COMMANDS = [" ".join(line.split()) for line in COMMANDS]
# {name of a run: (script, processes, words)}
LINE = r"accelerate launch (?:--multi_gpu --num_processes (\d+) )?(\w+)\.py (.* --run-name (\S+).*)"
RUNS = {m[4]: (m[2], int(m[1] or 1), shlex.split(m[3])) for m in map(re.compile(LINE).fullmatch, COMMANDS) if m}
LOOKS = "look", "score"  # they train nothing
WITH_VLLM = [name for name in RUNS if "vllm" in name]
MARKS = [pytest.mark.slow, pytest.mark.skipif("vllm" not in packages_distributions(), reason="no vLLM")]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder that looks like a clone, in which the page's lines that make scripts were run, as they stand."""
    folder = tmp_path_factory.mktemp("clone")
    for name in "ppo_llm.py", "grpo_llm.py", "ppo_llm_fsdp.py", "notes":
        (folder / name).symlink_to(ROOT / name)
    for line in COMMANDS:
        if line.startswith(MADE):
            line = line.replace("python ", f"{sys.executable} ", 1)
            subprocess.run(line, shell=True, cwd=folder, check=True, capture_output=True)
    return folder


def parse(name, clone):
    """Args of a run, read by its script's own parser. That needs no vLLM: an empty module stands in."""
    script, processes, words = RUNS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=None, SamplingParams=None, TokensPrompt=None))
        return check_flags(load_script(clone / f"{script}.py"), shlex.join(words), processes)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, toy_data):
    """(words that replace the page's: a random Qwen2 with a tied head, its template, short questions; its EOS ids)."""
    folder = tmp_path_factory.mktemp("inputs")
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytewise = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    specials = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, chat_template=TEMPLATE, **specials)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**sizes, tie_word_embeddings=True, initializer_range=0.2))
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    words = ["--model", str(folder / "model"), "--dataset", toy_data, *shlex.split(SMALL)]
    return words, sorted(model.generation_config.eos_token_id)


@pytest.fixture(scope="module")
def done(clone, inputs):
    """done(name): the page's line, once, with the inputs in place of its own: (console, run folder)."""

    @functools.cache
    def run(name):
        script, processes, words = RUNS[name]
        more = [*inputs[0], *(["--total-iterations", "0"] if name in LOOKS else [])]
        if "runs/" in words[1]:  # the model that another line of the page has trained
            run("gsm8k")
            more = more[2:]
        path = clone / f"{script}.py"
        if name in WITH_VLLM:  # by the launcher: the engine must not be forked
            code, console = launch(path, [*words, *more, "--cache-gib", "0.1"], processes, cwd=clone)
        else:
            code, console = run_script(path, [*words, *more], processes, clone)
        assert code == 0, console
        return console, clone / "runs" / name

    return run


def test_every_line_of_the_page_is_run_here_or_known():
    others = [line for line in COMMANDS if not line.startswith("accelerate launch")]
    assert [line for line in others if not line.startswith((*NOT_RUN, *MADE))] == []
    assert len(RUNS) == len(COMMANDS) - len(others) == 7 and len(PYTHON) == 3


def test_the_table_explains_the_flags_of_the_command(clone):
    words, args = RUNS["gsm8k"][2], parse("gsm8k", clone)
    rows = re.findall(r"(?m)^\| `(--[a-z-]+)` \| (\S*) ?\| (.+) \|$", PAGE)
    assert [word for flag, value, _ in rows for word in (flag, value) if word] == words
    for flag, _, why in rows:
        name = flag[2:].replace("-", "_")
        assert "the default" not in why or getattr(args, name) == getattr(type(args)("x"), name), flag


def forecast(script, processes, args):
    """(shape of a run's model, terms of notes/memory.py)."""
    shape = memory.SHAPES[args.model.removeprefix("Qwen/").removesuffix("-Instruct")]
    options = {"critic": False, "sharded": "fsdp" in script, "checkpointing": args.gradient_checkpointing}
    options |= {"lora_rank": args.lora_rank, "tokens": args.microbatch_tokens}
    options |= {"rows": min(args.rollout_batch_size, args.batch_size * args.group_size // processes)}
    return shape, memory.budget(shape, processes, **options)


def test_figures_of_memory_are_computed(clone):
    """By notes/memory.py; vLLM brings its weights, in bfloat16 with an output head of their own, and its cache."""
    text = " ".join(PAGE.split())
    rows = re.findall(r"\| `(\S+)` \| (?:one|two) of (\d+) GB \| (\S+) GB \|", text)
    assert {name for name, _, _ in rows} == RUNS.keys() - {*LOOKS}
    engine = {shape: 2 * (memory.count(shape) + shape.vocab * shape.hidden) for shape in memory.SHAPES.values()}
    for name, card, shown in rows:
        script, processes, _ = RUNS[name]
        args = parse(name, clone)
        shape, terms = forecast(script, processes, args)
        size = terms["update"] + engine[shape] + args.cache_gib * 2**30 if "vllm" in script else terms["peak"]
        assert f"{size / 1e9:.1f}" == shown and size <= 0.9e9 * float(card), name
    half, whole = memory.SHAPES["Qwen2.5-0.5B"], memory.SHAPES["Qwen2.5-1.5B"]
    sizes = [engine[half], engine[whole]]
    for more in {"processes": 1, "rows": 32}, {"processes": 2, "rows": 32}, {"lora_rank": 16}:
        sizes.append(memory.budget(whole, critic=False, checkpointing=True, **more)["peak"])
    cached = memory.kv_cache(half, 1, 1, True, True)
    shown = [f"{cached:,} bytes each", f"{2 * 2**30 // cached:,} tokens", f"{2 * 2**30 // cached // 1024} rows"]
    shown += [f" {size / 1e9:.1f}" for size in sizes]
    assert [figure for figure in shown if figure not in text] == []


def test_the_memory_that_the_readme_forecasts_is_computed():
    """Of its real run on other cards; a cell names the flags that are added, or another script."""
    text = (ROOT / "README.md").read_text()
    start = re.search(r"(?s)accelerate launch grpo_llm.py --model \S+ (.*?)\n```", text)[1].replace("\\\n", " ")
    found = re.findall(r"(?m)^\| (\S+) \| (\w+) of (\d+) GB \| (.+) \| (\S+) GB \|$", text)
    for model, cards, card, what, shown in found:
        processes = {"one": 1, "two": 2, "four": 4}[cards]
        script, _, flags = what.strip("`").partition(" ") if "py" in what else ("grpo_llm.py", "", start)
        args = check_flags("grpo_llm", f"--model Qwen/{model} {flags}", processes)
        _, terms = forecast(script, processes, args)
        assert f"{terms['peak'] / 1e9:.1f}" == shown and terms["peak"] <= 0.9e9 * float(card), model
    assert len(found) == 4


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS * (name in WITH_VLLM)) for name in RUNS])
def test_commands_run(name, done, inputs):
    console, folder = done(name)
    assert f"{RUNS[name][1]} process(es) on cpu" in console
    assert f"EOS ids {inputs[1]}" in console and r"<|im_start|>assistant\n" in console
    metrics = read_metrics(folder)
    assert 'the final answer after "####"' in read_rows(folder / "completions" / "eval_000000.jsonl")[0]["prompt"]
    if name in LOOKS:
        assert len(metrics) == 1 and not (folder / "final").exists()
        return
    assert [line["step"] for line in metrics] == [0, 1, 2] and (folder / "final" / "config.json").exists()
    shown = set(re.findall(r"`([a-z]+/\w+)`", PAGE))
    assert shown <= {*metrics[-1], "rollout/ess", "rollout/weight_mean"}
    if name in WITH_VLLM:
        weights = metrics[-1]["rollout/weight_mean"], metrics[-1]["rollout/ess"]
        assert weights == pytest.approx((1, 1), abs=1e-3) and metrics[-1]["rollout/logprob_diff"] < 1e-4


@pytest.mark.parametrize("number, mark, times", [(0, "->", 3), (1, " | ", 6), (2, "", 1)])
def test_python_of_the_page_runs(number, mark, times, done, clone, toy_data, monkeypatch, capsys):
    """As it stands, but for the data, which are not fetched, and with fewer tokens."""
    done("gsm8k" if number == 2 else "look")
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: datasets.load_from_disk(toy_data))
    monkeypatch.chdir(clone)
    exec(PYTHON[number].replace("max_new_tokens=512", "max_new_tokens=20"), {})
    said = capsys.readouterr().out
    assert said.strip() and said.count(mark) >= times
    assert number != 2 or repr(load_script(ROOT / "grpo_llm.py").GSM8K_REQUEST) in PYTHON[2]  # it asks as the training
