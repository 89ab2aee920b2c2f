"""Score the completions of a run again, with another reward or a mended one.

    python benchmarks/rescore.py runs/NAME mine.py:strict

For each file of completions you see the mean score and its parts, as they were and as they are now; then the five
answers whose score has changed most. The reward is called as the scripts call it, with the rows, prompts and texts that
it got then. Token ids are known for 64 responses of a training batch; other texts are cut into tokens again. What a
reward reads from the environment, such as REWARD_MODEL, goes in front of the command. Nothing is written.
"""

import argparse
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

from ask import load_tokenizer, read_args
from common import read_lines
from datasets import Dataset

import ppo_llm


def score(function, lines, args, tokenizer):
    """The results, as the scripts have them, of the lines of a file."""
    table = Dataset.from_list([line["row"] for line in lines])
    rows, _ = ppo_llm.load_prompts("completions", table, args, tokenizer)
    responses = []
    for row, line in zip(rows, lines, strict=True):
        row |= {"prompts": line["prompt"], "answers": line["answer"]}
        ids = tokenizer(line["response"], add_special_tokens=False)["input_ids"]
        if any(line.get("batch", {}).get("mask", [])):
            ids = line["batch"]["tokens"][line["batch"]["mask"].index(True) + 1 :]
        responses.append(ppo_llm.Response(ids, [], line["truncated"]))
    there = {*rows[0], "responses", "tokens", "completions", "completion_ids", "truncated"}
    parameters = inspect.signature(function).parameters.values()
    missing = {x.name for x in parameters if x.default is x.empty and x.kind.value == 1} - there
    if missing:
        sys.exit(f"error: the reward needs {sorted(missing)}; the completions have the columns {[*rows[0]['record']]}")
    texts = SimpleNamespace(batch_decode=lambda *_, **__: [line["response"] for line in lines])  # as they were
    return ppo_llm.compute_scores(function, texts, rows, responses)


def means(results):
    """{"score" or a part: its mean}"""
    columns = {"score": [result["score"] for result in results]}
    for name in results[0]["parts"]:
        columns[name] = [result["parts"][name] for result in results]
    return {name: f"{sum(column) / len(column):.3f}" for name, column in columns.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("reward", help="file.py:function, or gsm8k")
    run, spec = vars(parser.parse_args()).values()
    args = read_args(run)
    files = [file for file in run.glob("completions/*_*.jsonl") if file.stat().st_size]
    if args is None or not files:
        sys.exit(f"error: {run} is no run folder with args.json and completions")
    flags = SimpleNamespace(**args | {"max_prompt_length": sys.maxsize})
    tokenizer, function = load_tokenizer(run, args), ppo_llm.load_reward(spec)
    settings = getattr(sys.modules[function.__module__], "SETTINGS", "")
    print(f"old reward: {args['reward']} {args.get('reward_settings') or ''}\nnew reward: {spec} {settings}")
    changes = []
    for file in sorted(files, key=lambda file: (file.stem.rpartition("_")[2], file.stem)):
        lines = read_lines(file)
        results = score(function, lines, flags, tokenizer)
        old, new = means(lines), means(results)
        moved = [f"{name} {old.get(name, 'none')} -> {new.get(name, 'none')}" for name in old | new]
        print(f"{file.stem}, {len(lines)} answers: {', '.join(moved)}")
        changes += [(file.stem, line, result) for line, result in zip(lines, results)]
    changes = [change for change in changes if change[1]["score"] != change[2]["score"]]
    print(f"{len(changes)} scores have changed")
    once = {(line["prompt"], line["response"]): (name, line, result) for name, line, result in changes}  # the newest
    for name, line, result in sorted(once.values(), key=lambda x: -abs(x[2]["score"] - x[1]["score"]))[:5]:
        print(
            f"\n{name}: {line['score']:.3f} -> {result['score']:.3f}, the reference answer is {line['answer']!r:.100}"
        )
        print(f"  {line['prompt'][-200:]!r}\n  {line['response'][:300]!r}")
