"""How fast are the scripts? Against other projects on the same work, and part by part.

    python benchmarks/speed.py iteration --trl TRL/bin/python --trl-ppo TRL12/bin/python    against TRL
    python benchmarks/speed.py iteration --steps 1 --only GRPO --trl TRL/bin/python         one optimizer step a batch
    python benchmarks/speed.py scaling      two processes against one
    python benchmarks/speed.py sharding --rounds 3      ppo_llm_fsdp.py against ppo_llm.py
    python benchmarks/speed.py ablation     GRPO without each of the things that make it fast
    python benchmarks/speed.py profile      what the phases of an iteration spend their time on
    python benchmarks/speed.py floors       operations and bytes per second of one core
    python benchmarks/speed.py table        tables of everything measured so far, but for:
    python benchmarks/speed.py book --code rlhf-book/code --python BOOK/bin/python          against rlhfbook.com

The peers need separate environments: `pip install trl` (newest), `trl==1.12.0` (the last with a PPOTrainer), and what
the pyproject.toml of https://github.com/natolambert/rlhf-book lists. What they run there is in peers.py.

All contenders take turns, round by round. In a round, we take each contender's median over the iterations after the
warm-up, and their ratios; the number we report is the median of these ratios over the rounds. Results are appended to
benchmarks/results/speed/measured.jsonl, or to the one in another folder (--results); the tables are made from it.
Phases are timed from outside, by benchmarks/phases.py.

`book` trains the embedded model in the code of rlhfbook.com (commit a66b0bf) and in ours, a seed a round: seconds of an
iteration, and what is learned. Their loop, sampler, losses and optimizer run as they are, in one process on one thread
as ours do. Given to them are our model in float32, questions and verifier (theirs want tags), the sizes and learning
rate of our defaults, and sampling from the whole distribution at temperature 1. As in their configs, critic and policy
have one optimizer, and there is no KL; ours has none here either.
"""

import argparse
import functools
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
import timeit
from pathlib import Path

import common
import footprint
import phases
import torch
import variants
from common import ROOT, TINY, read_lines
from transformers import AutoTokenizer

RESULTS = common.RESULTS / "speed"
BETA, LR = 0.001, 1e-5  # nothing should be learned: the work has to stay the same
WARM_UP = 2  # iterations that do not count

# Prompts and responses of an iteration, longest response, optimizer steps; tokens that prompts are cut to.
SIZES = {
    "tiny": {"prompts": 32, "group_size": 8, "length": 40, "steps": 4},
    "20m": {"prompts": 4, "group_size": 8, "length": 128, "prompt_length": 128, "steps": 1},
}
SHAPE_20M = {"vocab_size": 32_768, "hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 8}
SHAPE_20M |= {"num_attention_heads": 5, "num_key_value_heads": 5, "tie_word_embeddings": True}
SETTING = "size", "forced", "steps"  # of a measurement of iterations
GROUPED = ["--estimator", "grpo", "--kl-loss-coef", str(BETA), "--kl-reward-coef", "0"]
SINGLE = ["--kl-reward-coef", str(BETA), "--kl-loss-coef", "0"]

# What is undone, as replacements in a copy of grpo_llm.py, where each text stands once.
UNDONE = {
    "as it is": {},
    "prefill for every response": {
        "torch.unique_consecutive(inputs, return_inverse=True, dim=0)": "(inputs, torch.arange(len(inputs)))"
    },
    "finished rows stay": {"if num_alive <= 0.9 * len(slots):": "if False:"},
    "padding columns kept": {
        "width = lengths[row]": "width = max(lengths)",
        "slice(lengths[part[0]])": "slice(max(lengths))",
    },
    "logits of all positions": {
        ".last_hidden_state[actions]": ".last_hidden_state.flatten(0, 1)",
        "tokens.roll(-1, 1)[actions]": "tokens.roll(-1, 1).flatten()",
        "map(torch.cat, zip(*results))": "(torch.cat(part)[mask.flatten()] for part in zip(*results))",
    },
    "AdamW not fused": {", fused=True)": ")"},
}
WAYS = {"replicated": ("ppo_llm", []), "gathered": ("ppo_llm_fsdp", ["--rollout-params", "gathered"])}
WAYS |= {"sharded": ("ppo_llm_fsdp", ["--rollout-params", "sharded"])}
BOOK = {"grpo": (15, 32, 8), "ppo": (4, 256, 1)}  # iterations, prompts of an iteration, responses to each


# --- The work, and runs that do it -----------------------------------------------------------------------------------


def make_task(folder, size, forced=False, **changes):
    """Model, rows [{prompt, answer}] and sizes. forced: every response has the full length."""
    task = SIZES[size] | changes
    tokenizer = AutoTokenizer.from_pretrained(TINY / "model")
    rows = read_lines(TINY / "train.jsonl")
    task["rows"] = [{"prompt": row["question"], "answer": row["answer"].split("#### ")[1]} for row in rows]
    task["model"] = str(TINY / "model")
    if size == "20m":
        task["model"] = str(folder / size)
        common.make_model(folder / size, SHAPE_20M)
        parts = [" ".join(row["question"] for row in rows[i : i + 12]) for i in range(0, len(rows) // 8, 12)]
        cut = [tokenizer.decode(tokenizer(part)["input_ids"][: task["prompt_length"]]) for part in parts]
        task["rows"] = [{"prompt": prompt, "answer": "1"} for prompt in cut]
    if forced:
        task["model"] = never_ending(task["model"], folder / "forced")
    common.write_lines(folder / "rows.jsonl", task["rows"])
    return task


def never_ending(model, folder):
    """A copy whose EOS is the padding, which it never samples."""
    from transformers import AutoModelForCausalLM

    model, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = tokenizer.pad_token
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run_ours(script, flags, task, folder, source=ROOT, processes=2):
    """What `watch` says of this work, done by a script in `source`."""
    group_size = task["group_size"] if script.startswith("grpo") else 1
    prompts = task["prompts"] * task["group_size"] // group_size
    words = f"--model {task['model']} --dataset {folder}/rows.jsonl --eval-dataset {folder}/rows.jsonl"
    words += f" --prompt-column prompt --answer-column answer --reward {ROOT}/benchmarks/rewards.py:exact"
    words += f" --chat-template none --batch-size {prompts} --max-prompt-length 512 --lr {LR}"
    words += f" --minibatch-size {prompts * group_size // task['steps']} --max-response-length {task['length']}"
    words += f" --microbatch-tokens 1024 --total-iterations {task['iterations']}"
    if group_size > 1:
        words += f" --group-size {group_size}"
    return watch(source / f"{script}.py", [*words.split(), *flags], processes)


def watch(path, words, processes=2):
    """[{seconds, rollout, tokens, communication, time/PHASE..} per iteration], peak bytes.

    The seconds are from one line of the log to the next: what follows it counts, too.
    """
    lines, found = phases.measure(phases.Exchange, path, words, processes)
    result = []
    for i in range(1, len(lines)):  # the first line is from before training
        row = {"seconds": lines[i]["time/clock"] - lines[i - 1]["time/clock"], "rollout": lines[i]["time/rollout"]}
        row["tokens"] = sum(process["tokens"][i] for process in found)
        waited = statistics.mean(process["collectives"][i] for process in found)
        row["communication"] = waited / lines[i]["time/iteration"]
        result.append(row | {key: value for key, value in lines[i].items() if key.startswith("time/")})
    return result, max(process["peak"] for process in found)


def run_peer(python, trainer, folder, processes=2, **task):
    """What peers.py says of each iteration in that environment, peak bytes."""
    place = folder / f"task-{time.time_ns()}.json"
    task |= {"trainer": trainer, "beta": BETA, "processes": processes}
    place.write_text(json.dumps(task | {"folder": str(folder / "trl"), "result": f"{place}.out"}))
    command = common.launcher(processes, ROOT / "benchmarks" / "peers.py", place, python=python)
    try:
        common.run(command, HF_HUB_OFFLINE="1")
    except SystemExit as error:  # now and then a process of TRL's aborts when it has trained and ends
        print(f"{trainer}, once more: {error}", file=sys.stderr)
        common.run(command, HF_HUB_OFFLINE="1")
    *lines, last = read_lines(f"{place}.out")
    return lines, last["peak_bytes"]


def contenders(task, trl, trl_ppo, folder):
    """{name: function that runs it}; each algorithm with the KL setting of its peer."""
    shared, bypass = folder / "shared_prompt", folder / "bypass"
    for place, script in (shared, "grpo_llm"), (bypass, "grpo_llm"), (bypass, "ppo_llm"):
        place.mkdir(exist_ok=True)
        variants.apply(place.name, place / f"{script}.py", ROOT / f"{script}.py")
    result = {
        "GRPO ours": lambda: run_ours("grpo_llm", GROUPED, task, folder),
        "GRPO ours, shared_prompt": lambda: run_ours("grpo_llm", GROUPED, task, folder, shared),
        "GRPO ours, bypass": lambda: run_ours("grpo_llm", GROUPED, task, folder, bypass),
        "GRPO TRL": trl and (lambda: run_peer(trl, "GRPO", folder, **task)),
        "PPO ours": lambda: run_ours("ppo_llm", SINGLE, task, folder),
        "PPO ours, bypass": lambda: run_ours("ppo_llm", SINGLE, task, folder, bypass),
        "PPO TRL": trl_ppo and (lambda: run_peer(trl_ppo, "PPO", folder, **task)),
    }
    return {name: run for name, run in result.items() if run}


def take_turns(what, runs, args, **about):
    """Every round runs every contender once. Each one's medians are kept: all rows."""
    rows = []
    for _ in range(args.rounds):
        round_number = time.time_ns()
        for name, run in runs.items():
            lines, peak = run()
            values = {key: statistics.median(line[key] for line in lines[WARM_UP:]) for key in lines[0]}
            rows.append(record(what, round=round_number, name=name, peak_bytes=peak, **about, **values))
    return rows


def record(what, **values):
    names = re.findall("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB"
    row = {"what": what, "machine": machine} | values
    RESULTS.mkdir(parents=True, exist_ok=True)
    with open(RESULTS / "measured.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(values), flush=True)
    return row


# --- The commands ----------------------------------------------------------------------------------------------------


def iteration(args, folder):
    args.steps = args.steps or SIZES[args.size]["steps"]
    task = make_task(folder, args.size, args.forced, steps=args.steps, iterations=args.iterations)
    runs = contenders(task, args.trl, args.trl_ppo, folder)
    runs = {name: run for name, run in runs.items() if not args.only or name.split()[0] in args.only.split(",")}
    take_turns("iteration", runs, args, size=args.size, forced=args.forced, steps=args.steps)


def scaling(args, folder):
    task = make_task(folder, "tiny", iterations=args.iterations)
    for script, flags in ("grpo_llm", GROUPED), ("ppo_llm", SINGLE):
        runs = {n: functools.partial(run_ours, script, flags, task, folder, processes=n) for n in (1, 2)}
        take_turns("processes", runs, args, script=script)


def ablation(args, folder):
    task, source = make_task(folder, "tiny", iterations=args.iterations), (ROOT / "grpo_llm.py").read_text()
    runs = {}
    for name, changes in UNDONE.items():
        text = source
        for old, new in changes.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        place = folder / name.replace(" ", "_")
        place.mkdir()
        (place / "grpo_llm.py").write_text(text)
        runs[name] = functools.partial(run_ours, "grpo_llm", GROUPED, task, folder, place)
    take_turns("ablation", runs, args)


def sharding(args, folder):
    """With the embedded model and with 50 million random weights. Writes results/sharding/table.md."""
    common.make_model(folder / "wide", footprint.DEEP)
    wide = f"--model {folder}/wide --dataset {TINY}/train.jsonl --eval-dataset {TINY}/test.jsonl --prompt-suffix="
    wide += " --batch-size 16 --minibatch-size 16 --max-response-length 16 --lr 1e-6 --critic-lr 1e-6"
    wide += " --microbatch-tokens 1024"
    text = "Seconds of the phases, and the share of an iteration that a process spends in collectives: two processes."
    for title, flags in ("Embedded task", ""), ("50 million parameters", wide):
        runs = {}
        for way, (script, own) in WAYS.items():
            words = [*flags.split(), "--total-iterations", args.iterations, *own]
            runs[way] = functools.partial(watch, ROOT / f"{script}.py", words)
        of = common.grouped(take_turns("sharding", runs, args, model=title), "name")
        columns = "rollout", "logprobs", "values", "actor", "critic", "iteration"
        lines = []
        for way, rows in of.items():
            cells = []
            for column in columns:
                seconds = middle(rows, f"time/{column}")
                ratio = seconds / middle(of["replicated"], f"time/{column}")
                cells.append(f"{seconds:.2f} s" + f" ({ratio:.2f}x)" * (way != "replicated"))
            lines.append([way, *cells, f"{middle(rows, 'communication'):.0%}"])
        text += f"\n\n{title}:\n\n{common.markdown(['', *columns, 'communication'], lines)}"
    (common.RESULTS / "sharding" / "table.md").write_text(f"{text}\n")
    print(text)


def profile(args, folder):
    """One process, the embedded task."""
    for script, flags in ("grpo_llm", f"--kl-loss-coef {BETA}"), ("ppo_llm", f"--kl-reward-coef {BETA}"):
        words = [*flags.split(), "--total-iterations", "5"]
        _, (found,) = phases.measure(phases.Profile, ROOT / f"{script}.py", words)
        record("profile", name=script, phases={phase: found[phase] for phase in phases.PHASES if phase in found})


def floors(args, folder):
    """Products of the shapes of the embedded model and of larger ones, and a copy, on one thread."""
    torch.set_num_threads(1)

    def rate(work, run):
        """By the fastest of 20 times: what a core does when nothing disturbs it."""
        return work / min(timeit.repeat(run, number=1, repeat=21)[1:])

    for n, k, m in ((2048, 128, 352), (2048, 320, 960), (2048, 896, 4864)):
        a, b = torch.randn(n, k), torch.randn(k, m)
        record("floors", name=f"{n}x{k} times {k}x{m}", per_second=rate(2 * n * k * m, lambda a=a, b=b: a @ b))
    x = torch.empty(2**26)
    y = torch.empty_like(x)
    record("floors", name="copy", per_second=rate(8 * x.numel(), lambda: y.copy_(x)))


def book(args, folder):
    """Writes results/speed/rlhf_book.md."""
    rows = make_task(folder, "tiny")["rows"]
    seeds = range(1, args.rounds + 1)
    table = []
    for algorithm, (count, prompts, group_size) in BOOK.items():
        found = {"ours": [], "theirs": []}
        for seed in seeds:
            flags = f"--total-iterations {count} --seed {seed} --kl-loss-coef 0 --kl-reward-coef 0"
            lines, _ = phases.measure(phases.Clock, ROOT / f"{algorithm}_llm.py", flags.split())
            ours = [{"seconds": line["time/iteration"], "score": line["reward/mean"]} for line in lines[1:]]
            task = {"code": str(args.code.resolve()), "model": str(TINY / "model"), "rows": rows[: prompts * count]}
            task |= {"prompts": prompts, "group_size": group_size, "algorithm": algorithm, "seed": seed}
            theirs, _ = run_peer(args.python, "book", folder, 1, **task)
            for name, lines in ("ours", ours), ("theirs", theirs):
                seconds = statistics.median(line["seconds"] for line in lines[1:-1])
                found[name].append((seconds, statistics.mean(line["score"] for line in lines[-3:])))
            print(algorithm, seed, found, flush=True)
        for name, values in found.items():
            seconds, scores = zip(*values)
            ratios = [own[0] / other[0] for own, other in zip(found["ours"], values)]
            cells = common.spread(seconds, 2, statistics.median), common.spread(scores), common.spread(ratios)
            table.append([f"{algorithm.upper()}, {name}", count, *cells])
    head = ["", "iterations", "iteration, s", "score in the last three", "ours takes, of its time"]
    text = f"`python benchmarks/speed.py book`, in turns, seeds {', '.join(map(str, seeds))}. Without a KL.\n"
    text += "Theirs samples one prompt at a time, and always recomputes activations (commit a66b0bf).\n\n"
    text += common.markdown(head, table) + "\n"
    (RESULTS / "rlhf_book.md").write_text(text)
    print(text)


# --- The tables ------------------------------------------------------------------------------------------------------


def ratios(rows, mine, peer):
    """The median and the ends of mine/peer in the rounds that have both, each on one machine."""
    found = []
    for row in common.grouped(rows, "machine", "round").values():
        seconds = {one["name"]: one["seconds"] for one in row}
        if mine in seconds and peer in seconds:
            found.append(seconds[mine] / seconds[peer])
    return common.spread(found, 2, statistics.median) if found else ""


def middle(rows, key):
    return statistics.median(row[key] for row in rows if key in row)


def section(title, head, lines):
    return [f"## {title}", "", common.markdown(head, lines), ""]


def table(args, folder):
    of = common.grouped(read_lines(RESULTS / "measured.jsonl"), "what")
    text = ["# Speed", "", "Medians, made by benchmarks/speed.py, with OMP_NUM_THREADS=1.", ""]
    for machine in dict.fromkeys(row["machine"] for rows in of.values() for row in rows):
        text.append(f"- {machine}: {', '.join(what for what in of if machine in {r['machine'] for r in of[what]})}")
    text.append("")
    for (size, forced, steps), rows in common.grouped(of.get("iteration", []), *SETTING).items():
        lines = []
        for name, own in common.grouped(rows, "name").items():
            ratio = "" if name.endswith("TRL") else ratios(rows, name, f"{name.split()[0]} TRL")
            line = [name, len(own), f"{middle(own, 'seconds'):.2f}", f"{middle(own, 'rollout'):.2f}"]
            line.append(f"{statistics.median(row['tokens'] / row['seconds'] for row in own):,.0f}")
            lines.append([*line, f"{middle(own, 'peak_bytes') / 2**20:,.0f}", ratio])
        title = f"Iterations: {size}, two processes, {'lengths forced equal' if forced else 'EOS on'}"
        title += f", {SIZES[size]['prompts'] * SIZES[size]['group_size']} responses, {steps} step{'s' * (steps > 1)}"
        head = ["", "rounds", "iteration, s", "of it rollout", "tokens/s", "peak memory, MiB", "of TRL's time"]
        text += section(title, head, lines)
    lines = []
    for script, rows in common.grouped(of.get("processes", []), "script").items():
        own = common.grouped(rows, "name")
        seconds = [f"{middle(own[n], 'seconds'):.2f}" for n in (1, 2)]
        lines.append([script, len(own[2]), *seconds, ratios(rows, 1, 2), f"{middle(own[2], 'communication'):.0%}"])
    if lines:
        head = ["", "rounds", "one process, s", "two, s", "times as fast", "of the time of two in collectives"]
        text += section("Two processes against one, the same global batch", head, lines)
    lines = []
    for name, own in common.grouped(of.get("ablation", []), "name").items():
        times = [f"{middle(own, key):.2f}" for key in ("seconds", "time/rollout", "time/logprobs", "time/actor")]
        lines.append([name, len(own), *times, ratios(of["ablation"], name, "as it is")])
    if lines:
        head = ["grpo_llm.py", "rounds", "iteration, s", "rollout", "log-probs", "update", "of its time as it is"]
        text += section("What each thing buys", head, lines)
    for row in of.get("profile", []):
        found = {phase: kinds for phase, kinds in row["phases"].items() if sum(kinds.values()) > 0.01}
        names = [*phases.KINDS, "between operators"]
        lines = [[phase, *(f"{kinds.get(kind, 0):.2f}" for kind in names)] for phase, kinds in found.items()]
        text += section(f"Where the time goes: {row['name']}.py, one process, seconds", ["", *names], lines)
    if "floors" in of:
        lines = [[row["name"], f"{row['per_second'] / 1e9:.1f}"] for row in of["floors"]]
        text += section("One core", ["", "billion operations, or bytes, per second"], lines)
    (RESULTS / "README.md").write_text("\n".join(text))
    print("\n".join(text))


if __name__ == "__main__":
    commands = [iteration, scaling, sharding, ablation, profile, floors, book, table]
    commands = {command.__name__: command for command in commands}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=commands)
    parser.add_argument("--trl", help="python of an environment with the newest TRL")
    parser.add_argument("--trl-ppo", help="python of an environment with TRL 1.12.0")
    parser.add_argument("--code", type=Path, help="folder of rlhfbook.com's code, for `book`")
    parser.add_argument("--python", help="of its environment")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--forced", action="store_true", help="every response has the full length")
    parser.add_argument("--steps", type=int, help="optimizer steps per iteration (default: that of the size)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--only", help="only these algorithms, e.g. GRPO,PPO")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    RESULTS = options.results
    with tempfile.TemporaryDirectory() as temporary:
        commands[options.what](options, Path(temporary))
