"""Look at model, data and reward before a run, with the script's own functions. Nothing is trained or written.

    python benchmarks/preflight.py --script grpo_llm.py --num-processes 2 FLAGS OF THE RUN

A finding is a line: `ok`, `look:` (read this before you start), `skip:` (this needs what has failed above) or `stop:`
(the run would fail, or train on the wrong thing; the exit code is 1). Only the first 20,000 rows of the data are read.
With --no-model, or above 3e9 parameters, no weights are loaded.
"""

import argparse
import importlib.util
import inspect
import json
import os
import re
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from unittest import mock

import torch
from accelerate.commands.config.config_args import default_config_file
from common import ROOT
from memory import GIB, Shape, budget, count
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import cached_file

# Names of what a reward gets from the script. A column of the data that is called the same is hidden.
OURS = {"prompts", "responses", "answers", "messages", "tokens", "completions", "completion_ids", "truncated", "record"}
OURS |= {"input_ids", "is_chat"}
# By model_type. PhiMoE's router reads router_jitter_noise, which the scripts set to 0, as a threshold.
UNFIT = {"phimoe", "modernbert-decoder", "openai-gpt", "cpmant", "xlstm", "minimax", "falcon_mamba", "rwkv", "mamba"}
UNFIT |= {"mamba2", "recurrent_gemma"}
STOPS = []


def look(condition, sentence, word="look:"):
    if condition:
        print(word, sentence)
    return condition


def stop(condition, sentence):
    STOPS.extend([sentence] if condition else [])
    return look(condition, sentence, "stop:")


# The looks. Each gets what it names, from those before it.


def flags(run, path, words, processes):
    stop(os.name == "nt", "Windows lacks fcntl and os.register_at_fork: start the scripts in WSL")
    command = threading.current_thread() is threading.main_thread() and "ipykernel" not in sys.modules
    stop(not command, "a notebook or a thread cannot catch signals: start the script as a command (with !)")
    file = Path(default_config_file)
    asked = re.findall('distributed_type"?: "?(FSDP|DEEPSPEED)', file.read_text() if file.exists() else "")
    asked += [name for name in ("FSDP", "DEEPSPEED") if os.environ.get(f"ACCELERATE_USE_{name}") == "true"]
    stop(asked, f"accelerate's configuration asks for {asked}, which no script uses: launch with --multi_gpu")
    sys.path.insert(0, str(path.resolve().parent))
    run.script = importlib.import_module(path.stem)
    with mock.patch.object(sys, "argv", [path.name, *words]):
        args = run.args = run.script.parse_args()
    print(f"ok    {path.name} on {sys.platform}, {processes} process(es), {torch.cuda.device_count()} GPU(s)")
    if stop(args.temperature == 0, "--temperature 0 divides by zero (evaluations are greedy anyway)"):
        args.temperature = 1.0  # for the looks below
    if stop(args.lora_rank and not importlib.util.find_spec("peft"), "--lora-rank needs peft: pip install peft"):
        args.lora_rank = 0
    group = getattr(args, "group_size", 1)
    unit, total, wish = group * processes, args.batch_size * group, args.minibatch_size
    sizes = [size for size in range(unit, total + 1, unit) if total % size == 0]
    if wish not in sizes:
        args.minibatch_size = max(1, round(wish / unit)) * unit
        args.batch_size = max(1, round(total / args.minibatch_size)) * args.minibatch_size // group
        said = f"{total} responses on {processes} process(es) make minibatches of {sizes}, not {wish}"
        stop(True, f"{said}; --batch-size {args.batch_size} --minibatch-size {args.minibatch_size} would do, too")


def folder(run, args, script, processes):
    run.bf16 = script.start_processes(args).mixed_precision == "bf16"  # refuses other flags
    run_dir, checkpoint = script.find_run(args)
    print(f"ok    run folder {run_dir}, from {checkpoint or 'the beginning'}")
    if checkpoint:
        old = json.loads((run_dir / "args.json").read_text())
        new = vars(args) | {"num_processes": processes, "resume": old["resume"]}
        changed = [f"{name} {old[name]} -> {new[name]}" for name in new if old.get(name) != new[name]]
        look(changed, f"changed since the run was last started: {', '.join(changed)}")
    with suppress(FileNotFoundError), open(run_dir / "lock", "r+") as file:
        try:
            script.fcntl.lockf(file, script.fcntl.LOCK_EX | script.fcntl.LOCK_NB)  # until the file is closed
        except BlockingIOError:
            stop(True, f"{run_dir} is in use by {file.read().strip()}")


def paths(run, args, script):
    for flag in "model", "critic_model", "dataset", "eval_dataset":
        name = getattr(args, flag, None) or ""
        place = Path(name.partition(":")[0])  # without the configuration of a hub id
        model, file = "model" in flag, re.match(r".*\.(json|csv|parquet)", name.lower())
        local = (
            file or name.startswith((".", "/", "~")) or name.count("/") > 1 or place.parent.name * place.parent.is_dir()
        )
        bad = [
            stop(local and not place.exists(), f"--{flag} {name} is not there"),
            stop(place.is_file() and (model or not file), f"--{flag} {name}: only folders, .json(l), .csv, .parquet"),
            stop(model and Path(name, "adapter_config.json").exists(), f"{name} is an adapter: merge it into its base"),
            stop(name.count(":") > 1, f"--{flag} {name} names a split: save the split as a file"),
        ]
        look(not any(bad) and not place.exists(), f"--{flag} {name} is not here: the hub is asked, for up to minutes")
        if not any(bad):
            setattr(run, flag, name or None)
    for name, file in ("reward", args.reward.rpartition(":")[0]), ("chat_template", args.chat_template):
        value = getattr(args, name)
        if not stop(
            value not in (None, "none", "gsm8k") and not Path(file).is_file(), f"--{name} {value}: no file {file!r}"
        ):
            setattr(run, name, value)


def architecture(run, args, script, words, model):
    run.config = config = AutoConfig.from_pretrained(model)
    kind, text = config.model_type, config.get_text_config()
    stop(kind in UNFIT, f"{kind} cannot be trained: its log-probs would be wrong, or its code would fail")
    stop("llama4" in kind and args.lora_rank, "peft cannot adapt Llama 4's router: no --lora-rank")
    look("gemma4" in kind, "a run ends when Gemma 4 samples its image placeholder, where its log-probs differ")
    stop(hasattr(config, "quantization_config"), f"{model} is quantized: take the model before quantization")
    look(
        [*Path(model).glob("*processor*.json")], "best/ and final/ will lack its processor files: copy them for servers"
    )
    tiny = AutoConfig.from_pretrained(script.EMBEDDED["model"])
    embedded = all(getattr(text, x, 0) == getattr(tiny, x) for x in ("model_type", "hidden_size", "vocab_size"))
    other = {name: x for name, x in script.EMBEDDED.items() if name != "model" and getattr(args, name) != x}
    look(embedded and "--model" in words and other, f"--model turned the embedded model's settings off: {other}")
    fast = args.lr >= script.EMBEDDED["lr"] and not args.lora_rank and not embedded
    look(fast, f"--lr {args.lr} is for the embedded model; try 1e-6")
    with torch.device("meta"):
        run.shell = AutoModelForCausalLM.from_config(config)
    print(f"ok    model {kind}, {run.shell.num_parameters():,} parameters")


def tokens(run, args, script, model, shell, chat_template):
    files = not Path(model).is_dir() or [*Path(model).glob("*token*")]
    tokenizer = AutoTokenizer.from_pretrained(model) if files else None
    if stop(not files or not tokenizer("7 plus 5", add_special_tokens=False)["input_ids"], f"{model} has no tokenizer"):
        return
    if chat_template not in (None, "none"):
        tokenizer.chat_template = Path(chat_template).read_text()
    with suppress(OSError):  # it may have none
        shell.generation_config = GenerationConfig.from_pretrained(model)
    run.tokenizer, run.eos_ids = tokenizer, script.collect_eos_ids(shell, tokenizer)
    stop(not run.eos_ids, "there is no EOS id, so no response would end: set eos_token in tokenizer_config.json")
    print(f"ok    {len(tokenizer)} tokens, EOS {run.eos_ids} {tokenizer.convert_ids_to_tokens(run.eos_ids)}")
    if not look(not tokenizer.chat_template or chat_template == "none", "no chat template: prompts are plain text"):
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "zzz"}]
        end = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("zzz")[2]
        marks = {*tokenizer(end, add_special_tokens=False)["input_ids"]} & {*tokenizer.added_tokens_decoder}
        open_end = marks and not marks & {*run.eos_ids}
        look(open_end, f"the template ends turns with {end!r}, no EOS id: responses may run on (the guide, Templates)")


def data(run, args, script, tokenizer, dataset, eval_dataset):
    splits = [*script.read_splits(dataset)]
    if stop("train" not in splits, f"{dataset} has the splits {splits}, and only `train` is read. Save one as a file:"):
        how = f"load_from_disk({dataset!r})" if Path(dataset).exists() else f"load_dataset(*{dataset.split(':')})"
        return print(f"      import datasets\n      datasets.{how}[{splits[0]!r}].to_json('{splits[0]}.jsonl')")
    run.test_rows = []
    for name, source, table in zip(["rows", "test_rows"], [dataset, eval_dataset or dataset], script.read_data(args)):
        if look(table is None, "without test data (--eval-dataset) there is no evaluation, and no best/"):
            continue
        file = Path(source).read_text("utf-8") if re.match(r".*\.jsonl?$", source.lower()) else ""
        lines = json.loads(file) if file.startswith("[") else map(json.loads, file.splitlines())
        pairs = [(line.get(args.answer_column), x) for line, x in zip(lines, table[:1000].get(args.answer_column, []))]
        changed = [(x, y) for x, y in pairs if isinstance(x, str | int | float) and str(x) != str(y)]
        look(changed, f"{len(changed)} answers are others than in {source}, as (there, here) {changed[:1]}: quote them")
        hidden = OURS & {*table.column_names} - {args.prompt_column, args.answer_column}
        look(hidden, f"no reward sees the columns {hidden} of {source}, as the script uses these names itself")
        table = table.select(range(min(len(table), 20_000)))
        with mock.patch.object(tokenizer, "apply_chat_template", wraps=tokenizer.apply_chat_template) as template:
            try:
                rows, said = script.load_prompts(source, table, args, tokenizer)
            except Exception as error:  # of a template, which does not say where
                sys.exit(f"{source}, row {template.call_count}: {type(error).__name__}: {error}")
        setattr(run, name, rows)
        print(f"ok    {said}")


def prompts(run, args, model, config, tokenizer, rows, test_rows):
    print("ok    prompts", *[f"{row['prompts'][:60]!r} ... {row['prompts'][-90:]!r}" for row in rows[:2]])
    leading = rows[0]["input_ids"][:2].count(tokenizer.bos_token_id)
    missing = not leading and tokenizer("x")["input_ids"][:1] == [tokenizer.bos_token_id]
    look(missing or leading == 2, f"prompts begin with {leading} BOS tokens")
    all_ids = [row["input_ids"] for row in rows + test_rows[: args.eval_rows]]
    run.length, highest = max(map(len, all_ids)) + args.max_response_length, max(map(max, all_ids))
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", run.length)
    stop(
        run.length > positions, f"the longest prompt and --max-response-length exceed {positions} positions of {model}"
    )
    look(len(tokenizer) > text.vocab_size, f"{len(tokenizer)} tokens, but {text.vocab_size} embeddings")
    stop(highest >= text.vocab_size, f"a prompt has token {highest}, but {model} has {text.vocab_size} embeddings")
    if cached_file(model, "tokenizer.json", _raise_exceptions_for_missing_entries=False):
        original = Tokenizer.from_file(cached_file(model, "tokenizer.json"))
        original.no_truncation()
        texts, plain = (
            [row["prompts"] for row in rows[:100]] + ["Cafe\u0301  1234567\n\n don't"],
            {"add_special_tokens": False},
        )
        wrong = [x for x in texts if original.encode(x, **plain).ids != tokenizer(x, **plain)["input_ids"]]
        said = f"{type(tokenizer).__name__} reads {len(wrong)} of {len(texts)} texts otherwise than tokenizer.json:"
        stop(wrong, f'{said} in tokenizer_config.json, set "tokenizer_class": "TokenizersBackend"')


def rewards(args, script, reward, tokenizer, eos_ids, rows, test_rows):
    function = script.load_reward(reward)
    needed = [x for x in inspect.signature(function).parameters.values() if x.default is x.empty and x.kind.value == 1]
    for kind, row in zip(["train", "test"], rows[:1] + test_rows[:1]):
        missing = {x.name for x in needed} - {*row} - OURS
        if stop(missing, f"the reward needs {missing}; the {kind} data have {[*row['record']]}"):
            continue
        mark, answer = "#### " if reward == "gsm8k" else "", str(row["answers"])
        made = {
            "right": mark * (mark not in answer) + answer,
            "wrong": f"{mark}987654321",
            "empty": "",
            "cut off": "I think",
        }
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] + eos_ids[:1] for text in made.values()]
        responses = [script.Response(x, [0.0] * len(x), False) for x in ids[:3]]
        responses.append(script.Response(ids[3][:-1], [0.0] * len(ids[3][:-1]), True))
        started = time.perf_counter()
        results = script.compute_scores(function, tokenizer, [row] * 4, responses)
        seconds = time.perf_counter() - started
        found = {name: result["parts"] or result["score"] for name, result in zip(made, results)}
        print(f"ok    reward for made-up responses to the first {kind} row: {found}, {seconds:.2f} s")
        right, *others = [result["score"] for result in results]
        look(right <= max(others), "the reward cannot tell right (the reference answer) from wrong")


def log_probs(args, script, model, shell, eos_ids, rows, no_model):
    if look(no_model or shell.num_parameters() > 3e9, "no weights are loaded, so no log-probs are compared"):
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ours = script.load_model(model, AutoModelForCausalLM, args.lora_rank, task_type="CAUSAL_LM").to(device)
    some = [
        min(rows[:64], key=lambda row: len(row["input_ids"])),
        max(rows[:64], key=lambda row: len(row["input_ids"])),
    ] * 2
    uniforms = torch.rand(4, min(8, args.max_response_length), dtype=torch.float64, device=device)
    responses = script.generate(ours, [row["input_ids"] for row in some], uniforms, eos_ids, args.temperature)
    tokens, mask, sampled, _ = script.to_batch(some, responses, device)
    with torch.no_grad():
        logprobs = script.Policy(ours, args.temperature).train()(tokens, mask)[0]
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
        expected = (plain(tokens).logits.float() / args.temperature).log_softmax(-1)
    expected = expected.gather(-1, tokens.roll(-1, 1)[..., None]).squeeze(-1)
    inexact, changed = [((logprobs - x) * mask).abs().max() for x in (sampled, expected)]
    stop(not inexact <= 0.01, f"sampler and training pass differ by {inexact:.2}: the run will be refused")
    stop(not changed <= 0.01, f"log-probs differ by {changed:.2} from those of {model} loaded without the script")
    print(f"ok    log-probs differ by {inexact:.0e} from the sampler's, by {changed:.0e} from the plain model's")


def forecast(args, config, shell, length, processes, bf16):
    sizes = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    ]
    shape = Shape(*[getattr(config, size, 1) for size in sizes], config.tie_word_embeddings)
    if not look(
        abs(count(shape) / shell.num_parameters() - 1) > 0.1, "no forecast of memory: it is for models like Qwen2"
    ):
        kind = {"sharded": hasattr(args, "offload"), "critic": hasattr(args, "critic_lr"), "lora_rank": args.lora_rank}
        kind |= {"length": length, "response_length": args.max_response_length, "rows": args.rollout_batch_size}
        kind |= {"tokens": max(args.microbatch_tokens, length), "checkpointing": args.gradient_checkpointing}
        peak = budget(shape, processes, bf16=bf16, **kind)["peak"]
        print(f"ok    memory of a device: {peak / GIB:.1f} GiB by the arithmetic of chapter 14")


LOOKS = flags, folder, paths, architecture, tokens, data, prompts, rewards, log_probs, forecast


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--script", type=Path, default=ROOT / "ppo_llm.py", dest="path")
    parser.add_argument("--num-processes", type=int, default=max(1, torch.cuda.device_count()), dest="processes")
    parser.add_argument("--no-model", action="store_true")
    run, words = parser.parse_known_args(arguments)
    run.run, run.words = run, words
    STOPS.clear()
    for see in LOOKS:
        names = inspect.signature(see).parameters
        missing = [name for name in names if not hasattr(run, name)]
        try:
            if not look(missing, f"{see.__name__}, which needs {', '.join(missing)}", "skip:"):
                see(**{name: getattr(run, name) for name in names})
        except SystemExit as error:  # the script's `fail`
            stop(True, str(error.code).removeprefix("error: "))
        except Exception as error:
            stop(True, f"{see.__name__}: {type(error).__name__}: {str(error)[:300]}")
    return int(bool(STOPS))


if __name__ == "__main__":
    sys.exit(main())
