"""Look at model, data and reward before a run, with the script's own functions. Nothing is trained or written.

    python benchmarks/preflight.py --script grpo_llm.py --num-processes 2 FLAGS OF THE RUN

Findings are `ok`, `look:`, `skip:` (needs what failed above) or `stop:` (the run would go wrong: exit code 1). We read
at most 20,000 rows of data, and no weights with --no-model or above 3e9 parameters.
"""

import argparse
import csv
import importlib.util
import inspect
import json
import os
import random
import re
import sys
import time
import traceback
from collections import Counter
from contextlib import suppress
from operator import ne
from pathlib import Path
from unittest import mock

import torch
from accelerate.commands.config.config_args import default_config_file
from common import ROOT
from memory import of_run, shape_of
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import cached_file

# What a reward gets from the script, whatever the columns; families that fail, by model_type (small ones are tried).
OURS = {"prompts", "responses", "answers", "messages", "tokens", "completions", "completion_ids", "truncated", "record"}
UNFIT = {"phimoe", "cpmant", "xlstm", "falcon_mamba", "rwkv", "recurrent_gemma", "minimax", "llama4", "llama4_text"}
FORMS = "{}", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>", '{{"answer": "{}"}}'  # how a reward may want an answer
STOPS = []


def look(condition, sentence, word="look:"):
    if condition:
        print(word, sentence)
    return condition


def stop(condition, sentence):
    STOPS.extend([sentence] if condition else [])
    return look(condition, sentence, "stop:")


def flags(run, path, words, processes):
    stop(os.name == "nt", "Windows lacks fcntl and os.register_at_fork: start the scripts in WSL")
    said = Path(default_config_file).read_text() if Path(default_config_file).exists() else ""
    asked = re.findall('(?:type"?: "?|ACCELERATE_USE_)(FSDP|DEEPSPEED)', said + " ".join(os.environ))
    stop(asked, f"accelerate's configuration asks for {asked}, which no script uses: launch with --multi_gpu")
    sys.path.insert(0, str(path.resolve().parent))
    own = importlib.import_module(path.stem)
    script = run.script = getattr(own, "ppo_llm", own)  # sft.py uses its functions
    run.encode_answer = getattr(own, "encode_answer", None)
    if stop(not run.encode_answer and not hasattr(own, "generate"), f"{path.name} doesn't sample, and isn't sft.py"):
        return
    sys.argv = [path.name, *words]
    with mock.patch.multiple(script, Args=own.Args, BUNDLED=own.BUNDLED):
        args = run.args = script.parse_args()
    args.minibatch_size = args.batch_size if run.encode_answer else args.minibatch_size
    stop(os.getenv("SLURM_STEP_NUM_TASKS", "1") != "1", "srun has started several tasks: one launcher a node will do")
    stop(args.lora_rank and not importlib.util.find_spec("peft"), "--lora-rank needs peft: pip install peft")
    look(args.lora_rank and args.lr < 1e-5, f"--lora-rank with --lr {args.lr}: LoRA needs ten times the usual rate")
    script.start_processes(args)  # refuses other flags
    odd = args.minibatch_size % (processes * getattr(args, "group_size", 1))
    stop(odd, "--minibatch-size must be a multiple of --group-size times --num-processes")
    run_dir, checkpoint = script.find_run(args)
    old = run.old = json.loads((run_dir / "args.json").read_text()) | {"resume": True} if checkpoint else {}
    changed = [f"{name} {old[name]} -> {x}" for name, x in vars(args).items() if old.get(name, x) != x]
    look(changed, f"changed since the run was last started: {', '.join(changed)}")
    print(f"ok    {path.name} on {sys.platform}, {processes} process(es); {run_dir}, from {checkpoint or 'its start'}")


def paths(run, args):
    for flag in "model", "critic_model", "dataset", "eval_dataset":
        name = getattr(args, flag, None) or ""
        place = Path(name.partition(":")[0])  # without the configuration of a hub id
        model, file = "model" in flag, re.match(r".*\.(json|csv|parquet)", name.lower())
        local = file or name.startswith((".", "/", "~")) or name.count("/") > 1 or place.parent.name in os.listdir()
        bad = [
            stop(local and not place.exists(), f"--{flag} {name} is not there"),
            stop(place.is_file() and (model or not file), f"--{flag} {name}: only folders, .json(l), .csv, .parquet"),
            stop(name.count(":") > 1, f"--{flag} {name} names a split: save the split as a file"),
        ]
        if place.is_file() and name.lower().endswith(".csv"):
            head, *rows = filter(None, csv.reader(place.open(newline="", encoding="utf-8")))
            uneven = [row for row in rows if len(row) != len(head)]
            stop(uneven, f"{name} has {len(head)} columns, but not in {uneven[:1]}: put texts with a comma in quotes")
        look(not any(bad) and not place.exists(), f"--{flag} {name} is not here: the hub is asked, for up to minutes")
        if not any(bad):
            setattr(run, flag, name or None)
    file = args.reward.rpartition(":")[0]
    if not stop(args.reward not in ("gsm8k", "none") and not Path(file).is_file(), f"--reward: there is no {file!r}"):
        run.reward = args.reward


def models(run, args, script, model):
    config = AutoConfig.from_pretrained(model)
    kind = config.model_type
    stop(kind in UNFIT, f"{kind} cannot be trained: its log-probs would be wrong, or its code would fail")
    stop(Path(model).is_dir() and not [*Path(model).glob("*token*")], f"{model} has no tokenizer files")
    tokenizer = run.tokenizer = AutoTokenizer.from_pretrained(model)
    if args.chat_template not in (None, "none"):
        tokenizer.chat_template = Path(args.chat_template).read_text()
    with torch.device("meta"):
        run.shell = shell = AutoModelForCausalLM.from_config(config)
    with suppress(OSError):  # it may have none
        shell.generation_config = GenerationConfig.from_pretrained(model)
    run.eos_ids = script.collect_eos_ids(shell, tokenizer)
    stop(not run.eos_ids, "there is no EOS id, so no response would end: set eos_token in tokenizer_config.json")
    print(f"ok    {kind}, {shell.num_parameters():,} parameters, {len(tokenizer)} tokens, EOS ids {run.eos_ids}")
    size, experts = shell.num_parameters(), shape_of(config.get_text_config()).experts
    ends = ["mixtures of experts above 10B"] * bool(experts and size > 1e10) + ["models above 14B"] * (size > 1.4e10)
    ends += ["responses above 8,000 tokens"] * (args.max_response_length > 8000)
    look(ends, f"{' and '.join(ends)} are more than these scripts are for (notes/run/launch.md, Where the scripts end)")
    ordinary = [x for x in run.eos_ids if x not in tokenizer.added_tokens_decoder]
    look(ordinary, f"EOS ids {ordinary} are ordinary tokens: every answer ends at the first of them")
    penalty = shell.generation_config.repetition_penalty or 1
    look(penalty != 1, f"final/ will bring repetition_penalty {penalty}, which servers apply and evaluations don't")
    quantised = getattr(config, "quantization_config", None) and not args.lora_rank
    stop(quantised, f"{model} is quantised: without --lora-rank, most of its weights would not be trained")
    run.templated, run.before = tokenizer.chat_template and args.chat_template != "none", ""
    if run.templated:
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "zzz"}]
        start, _, end = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("zzz")
        asked, bare = [tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=x) for x in (1, 0)]
        header = start.removeprefix(asked).strip() if asked == bare and start.startswith(asked) else ""
        look(header, f"the template ignores add_generation_prompt: prompts lack the {header!r} before an answer")
        run.before = start  # what stands before an earlier answer
        marks = {*tokenizer(end, add_special_tokens=False)["input_ids"]} & {*tokenizer.added_tokens_decoder}
        look(marks and not marks & {*run.eos_ids}, f"the template ends turns with {end!r}, no EOS id: they may run on")


def data(run, args, script, processes, model, shell, tokenizer, templated, before, dataset, eval_dataset):
    splits = [*script.read_splits(dataset)]
    stop("train" not in splits, f"{dataset} has {splits}, only `train` is read: save one as a file")
    table, test_table = script.read_data(args)
    file = Path(dataset).read_text("utf-8") if re.match(r".*\.jsonl?$", dataset.lower()) else ""
    lines = json.loads(file) if file.startswith("[") else map(json.loads, filter(str.strip, file.split("\n")))
    pairs = zip((line.get(args.answer_column) for line in lines), table[:1000].get(args.answer_column, []))
    pairs = [pair for pair in pairs if isinstance(pair[0], str | int | float) and str(pair[0]) != str(pair[1])]
    look(pairs, f"`datasets` has changed {len(pairs)} answers, (from, to) {pairs[:1]}: put numbers in quotes")
    for name, source, part in ("rows", dataset, table), ("test_rows", eval_dataset or dataset, test_table):
        with mock.patch.object(tokenizer, "apply_chat_template", wraps=tokenizer.apply_chat_template) as template:
            try:
                rows, said = script.load_prompts(source, part and part.take(min(len(part), 20_000)), args, tokenizer)
            except Exception as error:  # of a template, which does not say where
                sys.exit(f"{source}, row {template.call_count}: {type(error).__name__}: {error}")
        setattr(run, name, rows)
        for row in rows if run.encode_answer else []:
            answer = row["answers"] or script.fail(f"{source}: there is no answer to {row['prompts'][-100:]!r}")
            run.encode_answer(f"{args.answer_prefix}{answer}", args, tokenizer)
        shown = [f"; the first: {row['prompts'][:60]!r} ... {row['prompts'][-90:]!r}" for row in rows[:1]]
        print("ok   " if rows else "look:", said + "".join(shown))
        look(part and 2 * len(rows) < min(len(part), 20_000), f"most rows of {source} are left out: long or empty")
    first, bos = run.rows[0], tokenizer.bos_token_id
    look(first["input_ids"][:2] == [bos] * 2, "prompts begin with two BOS tokens")
    lost = tokenizer("a")["input_ids"][0] == bos != first["input_ids"][0]
    look(lost, f"the tokenizer begins texts with {tokenizer.bos_token!r}, prompts lack it: put it into the template")
    tag = re.search(r"<(\w+)>\s*$", first["prompts"])
    look(tag and not before.rstrip().endswith(tag[0].rstrip()), f"prompts open {tag and tag[0]!r}: no reward sees that")
    gone = Counter()  # roles whose texts the template drops; a plain word is neither trimmed nor escaped nor a thought
    for row in run.rows[:1000] if templated else []:
        chat = [turn | {"content": f"zqx{i}zqx"} for i, turn in enumerate(row["messages"])]
        with suppress(Exception):  # of a template that wants certain texts
            text = tokenizer.apply_chat_template(chat, tokenize=False, **json.loads(args.chat_template_args))
            gone.update(turn["role"] for turn in chat if turn["content"] not in text)
    look(gone, f"the template drops messages, by role: {dict(gone)}")
    look({"tools", "chat_template_kwargs"} & {*table.column_names}, "no template gets tools or chat_template_kwargs")
    look(len(run.rows) >= 4 * len({row["prompts"] for row in run.rows}), "each distinct prompt is there four times")
    look(first["is_chat"] and not templated, "no chat template: the prompts' messages are joined by newlines")
    turns = " ".join(turn["content"] for row in run.rows[:1000] for turn in row["messages"])
    written = {str(x) for x in tokenizer.added_tokens_decoder.values() if x.special and str(x) in turns}
    look(written, f"prompts contain {written}: if a template has made them, --chat-template none leaves them alone")
    ends = [(row["messages"][-1]["content"], str(row["answers"])) for row in run.rows[:1000]]
    told = [text[-40:] for text, answer in ends if answer and text.rstrip(" .\n").endswith(answer.rstrip(" .\n"))]
    look(len(told) > 0.9 * len(ends), f"prompts end in their own answers, as in {told[:1]}: is --prompt-column right?")
    both = {row["prompts"] for row in run.rows} & {row["prompts"] for row in run.test_rows}
    look(both, f"{len(both)} of the test prompts are training prompts, too")
    ids = [row["input_ids"] for row in run.rows + run.test_rows[: args.eval_rows]]
    longest, highest, size = max(map(len, ids)), max(map(max, ids)), shell.get_input_embeddings().num_embeddings
    positions = getattr(shell.config.get_text_config(), "max_position_embeddings", float("inf"))
    stop(longest + args.max_response_length > positions, f"prompt and response can exceed {positions} positions")
    stop(highest >= size, f"a prompt has the token {highest}, but {model} has {size} embeddings")
    sizes = args, shell.config.get_text_config(), shell.num_parameters(), longest, processes
    peak = None if run.encode_answer else of_run(*sizes)  # None, too, for models unlike Qwen2 or Qwen3-MoE
    print(f"ok    {f'about {peak:.1f}' if peak else 'no forecast of the'} GiB of memory a process (notes/run/speed.md)")
    look(len(tokenizer) > size, f"{len(tokenizer)} tokens, but {size} embeddings: the others must not occur")
    file = cached_file(model, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    original = Tokenizer.from_file(file) if file else tokenizer.backend_tokenizer
    original.no_truncation()  # of these, transformers ignores what the file says
    original.no_padding()
    texts = [row["prompts"] for row in run.rows[:100]]
    ours = tokenizer(texts, add_special_tokens=False)["input_ids"]
    wrong = [x for x, ids in zip(texts, ours) if original.encode(x, add_special_tokens=False).ids != ids]
    stop(wrong, f"tokenizer.json has other ids for {wrong[:1]!a:.40}: set tokenizer_class to TokenizersBackend")


def tests(args, tokenizer, rows, test_rows):
    if not test_rows[: args.eval_rows]:
        return
    counts = []
    for some in rows, test_rows:
        texts = [turn["content"] for row in random.Random(1).choices(some, k=500) for turn in row["messages"]]
        ids = tokenizer(" ".join(texts), add_special_tokens=False)["input_ids"]
        counts.append(torch.bincount(torch.tensor(ids), minlength=len(tokenizer)).double())
    alike = torch.cosine_similarity(*counts, dim=0)
    look(alike < 0.75, f"test prompts have other words ({alike:.2f} of 1 alike): another task, or another language?")
    columns = {name: [str(row[name]) for row in test_rows] for name in test_rows[0]["record"]}
    for name, values in (columns | {"length": [len(row["input_ids"]) for row in test_rows]}).items():
        missed = len({*values} - {*values[: args.eval_rows]})
        grouped = 1 + sum(map(ne, values, values[1:])) == len({*values}) < len(values) / 2
        look(grouped and missed, f"test data are sorted by {name}: the first --eval-rows lack {missed} of its values")


def rewards(run, args, script, reward, tokenizer, rows, test_rows):
    function = run.function = script.load_reward(reward)
    settings = getattr(sys.modules[function.__module__], "SETTINGS", None)
    before = run.old.get("reward_settings", settings)
    look(before != settings, f"the reward was {before} when the run was last started, and is {settings}")
    needed = [x for x in inspect.signature(function).parameters.values() if x.default is x.empty and x.kind.value == 1]

    def score(rows, texts):
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        responses = [script.Response(x, [0.0] * len(x), text[:6] == "First,") for x, text in zip(ids, texts)]
        results = script.compute_scores(function, tokenizer, rows, responses)
        return results, [result["score"] for result in results]

    def as_json(row):
        return json.dumps({x: value for x, value in row["record"].items() if x != args.prompt_column}, default=str)

    for kind, row in zip(["train", "test"], rows[:1] + test_rows[: min(1, args.eval_rows)]):
        missing = {x.name for x in needed} - {*row} - OURS
        stop(missing, f"the reward needs {missing}; the {kind} data have {[*row['record']]}")
        answer, known = str(row["answers"]), row["answers"] is not None
        others = [x for x in dict.fromkeys(str(x["answers"]) for x in rows[:100]) if x != answer][:9]
        started = time.perf_counter()
        for form in FORMS[: None if known else 1]:  # until the right answer is the best
            texts = {"wrong": form.format(987654321), "empty": ""}
            texts |= {"cut off": args.max_response_length // 4 * "First, we ", "the row as JSON": as_json(row)}
            texts |= {"many": " ".join([*others, answer, *others]), "right": form.format(answer)} if known else {}
            results, scores = score([row] * len(texts), [*texts.values()])
            *less, best = scores[:4]
            if known and scores[-1] > max(less):
                break
        each = [result["parts"] or {"score": result["score"]} for result in results]
        found = {name: result["parts"] or result["score"] for name, result in zip(texts, results)}
        print(f"ok    reward of answers to the first {kind} row: {found}, {time.perf_counter() - started:.2f} s")
        run.reached = {x: [result["parts"][x] for result in results] for x in results[0]["parts"]}
        plain = known and scores[-1] >= best
        best = max(best, scores[-1])
        unsure = known and best <= max(less)
        look(unsure, "the reward cannot tell right (the reference answer) from wrong, or it pays length")
        paid = known and others and not unsure and any(each[4][x] >= each[-1][x] > each[0][x] for x in each[0])
        look(paid, "many answers in one are paid as much as the right one")
        some = random.Random(1).choices(rows if kind == "train" else test_rows, k=500)
        some = {str(x["answers"]) if others else x["prompts"]: x for x in some}
        some = sorted(some.values(), key=lambda x: str(x["answers"]) == str(x["answers"]).strip())[:8]
        texts = [form.format(str(x["answers"]).strip()) if plain else as_json(x) for x in some]
        name = "right" if plain else "the row as JSON"
        together = score(some, texts)[1]
        apart = [score([x], [text])[1][0] for x, text in zip(some, texts)]
        print(f"ok    `{name}` for {len(some)} {kind} rows scores {min(apart):.4g} to {max(apart):.4g} alone")
        for one, other in [pair for pair in zip(apart, together) if abs(pair[0] - pair[1]) > 0.01][:1]:
            print(f"look: `{name}` scores {one:.4g} alone, {other:.4g} in a list: do chance, place or others decide?")
        time.sleep(1)
        later = [abs(a - b) > 0.01 for a, b in zip(together, score(some, texts)[1])]
        look(any(later), f"`{name}` scores something else a second later: do chance or the time decide?")
        low = [x["answers"] for x, one in zip(some, apart) if known and not unsure and one <= max(less)]
        look(low, f"{len(low)} right answers, as {low[:1]}, are paid like wrong ones: does a space at the end count?")


def own_answers(args, script, model, shell, tokenizer, eos_ids, rows, function, reached, no_model):
    if look(no_model or shell.num_parameters() > 3e9, "no weights are loaded, so the model is not asked"):
        return
    ours = script.load_model(model, AutoModelForCausalLM, args.lora_rank, task_type="CAUSAL_LM")
    some = random.Random(1).choices(rows, k=32)  # neighbours in the file may have the same answer
    uniforms = torch.rand(32, args.max_response_length, dtype=torch.float64)
    responses = script.generate(ours, [row["input_ids"] for row in some], uniforms, eos_ids, args.temperature)
    results = script.compute_scores(function, tokenizer, some, responses)
    swapped = script.compute_scores(function, tokenizer, some[1:] + some[:1], responses)
    for name in "score", *results[0]["parts"]:
        here, there = [[(x | x["parts"])[name] for x in each] for each in (results, swapped)]
        said = f"mean {sum(here) / 32:.4g}, as answers to other prompts {sum(there) / 32:.4g}"
        print(f"ok    {name} of 32 answers of the model: {min(here):.4g} to {max(here):.4g}, {said}")
        tried = reached.get(name, here)  # with answers of our own; where these are all alike, too, nothing moves it
        same = f"{name} is {here[0]:.4g} in all of 32, and at most {max(tried):.4g} in answers that we made up"
        look(name in reached and len({*here}) < 2 and (max(tried) > here[0] or len({*tried}) < 2), same)
    scores = [result["score"] for result in results]
    cut = sum(result["truncated"] for result in results)
    print(f"ok    {cut} of {len(results)} have no EOS within {args.max_response_length} tokens")
    look(cut > 0.8 * len(results), "most answers would be cut off: --max-response-length, or no turn ends in an EOS")
    print(f"ok    one scores {scores[-1]:.4g}: {results[-1]['response'][-90:]!r}; right is {some[-1]['answers']!r:.90}")
    look(len({*scores}) < 2, "all of them score alike: where the answers to a prompt do, nothing is learned")
    (nothing,) = script.compute_scores(function, tokenizer, some[:1], [script.Response([], [], False)])
    look(nothing["score"] >= max(scores) > min(scores), "an empty answer scores as much as the best of these")
    tokens, mask, sampled, _ = script.to_batch(some[:8], responses[:8], "cpu")
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        passed, expected = [script.Policy(x, args.temperature)(tokens, mask) for x in (ours.train(), plain)]  # (3,B,L)
    kl, _, z = script.check_sampler(sampled, *passed, mask, 1e-5, 0).values()  # refuses what the scripts would
    changed = ((passed[0] - expected[0]) * mask).abs().max()
    look(abs(z) > 5, f"the surprise of these answers is {z:.1f} standard errors from 0: are they the policy's? (12.6)")
    stop(not changed <= 0.01, f"log-probs differ by {changed:.2} from those of {model} loaded without the script")
    print(f"ok    KL from the sampler, float32: {kl:.0e}, surprise {z:.1f}; {changed:.0e} from plain log-probs")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--script", type=Path, default=ROOT / "ppo_llm.py", dest="path")
    parser.add_argument("--num-processes", type=int, default=max(1, torch.cuda.device_count()), dest="processes")
    parser.add_argument("--no-model", action="store_true")
    run, words = parser.parse_known_args(arguments)
    run.run, run.words = run, words
    for part in flags, paths, models, data, tests, rewards, own_answers:  # they get what they name from earlier ones
        if getattr(run, "encode_answer", None) and part is rewards:
            break  # sft.py scores nothing
        names = inspect.signature(part).parameters
        missing = [name for name in names if not hasattr(run, name)]
        try:
            if not look(missing, f"{part.__name__}, which needs {', '.join(missing)}", "skip:"):
                part(**{name: getattr(run, name) for name in names})
        except SystemExit as error:  # the script's `fail`
            stop(True, str(error).removeprefix("error: ")[:400])
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            line = f"{Path(place.filename).name}, line {place.lineno}: {place.line}"
            stop(True, f"{type(error).__name__}: {str(error)[:400]} ({line})")
    return int(bool(STOPS))


if __name__ == "__main__":
    sys.exit(main())
