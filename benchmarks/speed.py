"""How fast are the scripts? Against other trainers on the same work, and part by part.

    python benchmarks/speed.py iteration --trl TRL/bin/python --trl-ppo TRL12/bin/python    against TRL
    python benchmarks/speed.py iteration --steps 1 --only GRPO --trl TRL/bin/python         one optimizer step a batch
    python benchmarks/speed.py rollout      against transformers' generate and generate_batch
    python benchmarks/speed.py memory       of an update with a vocabulary of 151,936
    python benchmarks/speed.py scaling      two processes against one, batches of 1x to 8x
    python benchmarks/speed.py start        from launch to the first evaluation
    python benchmarks/speed.py ablation     GRPO without each of the things that make it fast
    python benchmarks/speed.py profile      what the phases of an iteration spend their time on
    python benchmarks/speed.py floors       operations and bytes per second of one core
    python benchmarks/speed.py table        tables and figures of everything measured so far

The peers need separate environments: `pip install trl` (newest) and `trl==1.12.0` (the last with a PPOTrainer). All
contenders take turns, round by round. In a round, we take each contender's median over the iterations after the
warm-up, and their ratios; the number we report is the median of these ratios over the rounds. Results are appended to
benchmarks/results/speed/measured.jsonl, or to the one in another folder (--results); tables and figures are made from
it. Phases are timed from outside, by benchmarks/phases.py. Against TRL, a round does not count if a peer took a fifth
more or less than in its median round: something else disturbed it. Such rounds are repeated, up to twice as many rounds
in all; the table says how many did not count.

`iteration` continues from the rounds that are already measured.
"""

import argparse
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
import phases
import torch
import variants
from common import ROOT, TINY, launcher, read_lines

RESULTS = common.RESULTS / "speed"
BETA, LR = 0.001, 1e-5  # nothing should be learned: the work has to stay the same

# Prompts and responses of an iteration, longest response, prompt length (None: as they are), optimizer steps.
SIZES = {
    "tiny": {"prompts": 32, "group_size": 8, "length": 40, "prompt_length": None, "steps": 4},
    "20m": {"prompts": 4, "group_size": 8, "length": 128, "prompt_length": 128, "steps": 1},
    "0.5b": {"prompts": 1, "group_size": 8, "length": 32, "prompt_length": 128, "steps": 1},
}
SHAPES = {
    "20m": {"vocab_size": 32_768, "hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 8},
    "0.5b": {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24},
}
SHAPES["20m"] |= {"num_attention_heads": 5, "num_key_value_heads": 5, "tie_word_embeddings": True}
SHAPES["0.5b"] |= {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}

# Runs a script of ours, and has its phases timed.
RUN = """
import sys
sys.path[:0] = [{folder!r}, {benchmarks!r}]
import phases
import {script} as algo

phases.Clock(algo)
if {forced}:  # an EOS is a token like any other
    algo.collect_eos_ids = lambda *args: []
algo.main(algo.parse_args())
"""

SETTING = "size", "processes", "forced", "steps"  # of a measurement of iterations

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
        "torch.cat(results).unbind(1)": "torch.cat(results)[mask.flatten()].unbind(1)",
    },
    "AdamW not fused": {", fused=True)": ")"},
}


def make_model(folder, size):
    """The folder of a model: the embedded one, or random weights with its tokenizer."""
    if size == "tiny":
        return TINY / "model"
    common.make_model(folder / size, SHAPES[size])
    return folder / size


def make_rows(size):
    """[{prompt, answer}]; prompts as our scripts would write them, joined and cut to the length if one is asked for."""
    from transformers import AutoTokenizer

    length = SIZES[size]["prompt_length"]
    tokenizer = AutoTokenizer.from_pretrained(TINY / "model")
    rows = read_lines(TINY / "train.jsonl")
    if length is not None:
        parts = [" ".join(row["question"] for row in rows[i : i + 12]) for i in range(0, len(rows) // 8, 12)]
        cut = [tokenizer.decode(tokenizer(part)["input_ids"][:length]) for part in parts]
        return [{"prompt": prompt, "answer": "1"} for prompt in cut]
    if tokenizer.chat_template is None:
        return [{"prompt": row["question"], "answer": row["answer"].split("#### ")[1]} for row in rows]
    options = {"tokenize": False, "add_generation_prompt": True}
    chats = [[{"role": "user", "content": row["question"]}] for row in rows]
    texts = tokenizer.apply_chat_template(chats, **options)
    return [{"prompt": text, "answer": row["answer"].split("#### ")[1]} for text, row in zip(texts, rows)]


def launch(python, processes, *command):
    """Runs it to the end: bytes of the largest process. A process is a core."""
    _, peak = common.run(launcher(processes, *command, python=python), HF_HUB_OFFLINE="1")
    return peak


def run_lines(*command):
    """What a Python program prints as JSON."""
    said, _ = common.run([sys.executable, *command])
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def count_prompt_tokens(task, step):
    """Of an iteration, all responses together."""
    import transformers

    from ppo_llm import draw_prompts

    tokenizer = transformers.AutoTokenizer.from_pretrained(task["model"])
    drawn = draw_prompts([row["prompt"] for row in task["rows"]], (step - 1) * task["prompts"], task["prompts"], 1)
    return task["group_size"] * sum(map(len, tokenizer(drawn)["input_ids"]))


def our_flags(script, flags, task, folder, name):
    """Those of a run `name` in the folder, as a list."""
    if not (folder / "rows.jsonl").exists():
        common.write_lines(folder / "rows.jsonl", task["rows"])
        common.write_lines(folder / "one.jsonl", task["rows"][:1])
    minibatch_size = task["prompts"] * task["group_size"] // task["steps"]
    words = f"--model {task['model']} --dataset {folder}/rows.jsonl --eval-dataset {folder}/one.jsonl"
    words += f" --prompt-column prompt --answer-column answer --reward {ROOT}/benchmarks/rewards.py:exact"
    words += f" --chat-template none --batch-size {task['prompts']} --minibatch-size {minibatch_size}"
    words += f" --max-response-length {task['length']} --max-prompt-length 512 --lr {LR}"
    if script.startswith("grpo"):
        words += f" --group-size {task['group_size']}"
    if not Path("/dev/nvidia0").exists():  # on CPUs small passes are as fast as large ones, and have less padding
        words += " --microbatch-tokens 1024"
    words += f" --total-iterations {task['iterations']} --eval-every 0 --save-every 0 --track none --run-name {name}"
    return f"{words} --output-dir {folder} {flags}".split()


def run_ours(script, flags, task, folder, source=ROOT):
    """[{seconds, rollout, tokens, responses, optimizer_steps, time/PHASE..} per iteration], peak bytes.

    The script is in `source`. The seconds are from one line of the log to the next: what follows it counts, too.
    """
    name = f"{script}-{time.time_ns()}"
    file = folder / f"{name}.py"
    benchmarks = str(ROOT / "benchmarks")
    file.write_text(RUN.format(folder=str(source), benchmarks=benchmarks, script=script, forced=task["forced"]))
    peak = launch(sys.executable, task["processes"], file, *our_flags(script, flags, task, folder, name))
    lines = read_lines(folder / name / "metrics.jsonl")
    work = {"responses": task["prompts"] * task["group_size"], "optimizer_steps": task["steps"]}
    result = []
    for before, now in itertools.pairwise(lines[:-1]):  # the last one evaluates
        seconds = now["time/clock"] - before["time/clock"]
        tokens = count_prompt_tokens(task, now["step"]) + round(now["response/length_mean"] * work["responses"])
        times = {key: now[key] for key in now if key.startswith("time/") and key[5:] in phases.PHASES}
        result.append({"seconds": seconds, "rollout": now["time/rollout"], "tokens": tokens} | work | times)
    return result, lines[-1]["memory/peak_gib"] * 2**30 or peak


def run_peer(python, trainer, task, folder):
    place = folder / f"task-{time.time_ns()}.json"
    task = task | {"trainer": trainer, "beta": BETA, "folder": str(folder / "trl"), "result": f"{place}.out"}
    place.write_text(json.dumps(task | {"model": str(task["model"])}))
    command = python, task["processes"], ROOT / "benchmarks" / "peers.py", place
    try:
        launch(*command)
    except SystemExit as error:  # now and then a process of TRL's aborts when it has trained and ends
        print(f"{trainer}, once more: {error}", file=sys.stderr)
        launch(*command)
    lines = read_lines(task["result"])
    return lines[:-1], lines[-1]["peak_bytes"]


def contenders(task, trl, trl_ppo, folder):
    """{name: function that runs it}; each algorithm with the KL setting of its peer."""
    loss = f"--kl-loss-coef {BETA} --kl-reward-coef 0"
    reward = f"--kl-reward-coef {BETA} --kl-loss-coef 0"
    single = task | {"prompts": task["prompts"] * task["group_size"], "group_size": 1}
    shared, bypass = folder / "shared_prompt", folder / "bypass"
    for place, script in (shared, "grpo_llm"), (bypass, "grpo_llm"), (bypass, "ppo_llm"):
        place.mkdir(exist_ok=True)
        variants.apply(place.name, place / f"{script}.py", ROOT / f"{script}.py")
    result = {
        "GRPO ours": lambda: run_ours("grpo_llm", f"--estimator grpo {loss}", task, folder),
        "GRPO ours, shared_prompt": lambda: run_ours("grpo_llm", f"--estimator grpo {loss}", task, folder, shared),
        "GRPO ours, bypass": lambda: run_ours("grpo_llm", f"--estimator grpo {loss}", task, folder, bypass),
        "GRPO TRL": trl and (lambda: run_peer(trl, "GRPO", task, folder)),
        "RLOO ours": lambda: run_ours("grpo_llm", f"--estimator rloo {reward}", task, folder),
        "RLOO ours, shared_prompt": lambda: run_ours("grpo_llm", f"--estimator rloo {reward}", task, folder, shared),
        "RLOO TRL": trl and (lambda: run_peer(trl, "RLOO", task, folder)),
        "PPO ours": lambda: run_ours("ppo_llm", reward, single, folder),
        "PPO ours, bypass": lambda: run_ours("ppo_llm", reward, single, folder, bypass),
        "PPO TRL": trl_ppo and (lambda: run_peer(trl_ppo, "PPO", single, folder)),
    }
    return {name: run for name, run in result.items() if run}


def machine():
    names = re.findall("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB"


def record(what, **values):
    RESULTS.mkdir(parents=True, exist_ok=True)
    about = {"what": what, "machine": machine()}
    with open(RESULTS / "measured.jsonl", "a") as file:
        file.write(json.dumps(about | values) + "\n")
    print(json.dumps(values), flush=True)


def iteration(args):
    """Every round runs every contender once."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        base = {"model": make_model(folder, args.size), "rows": make_rows(args.size), "iterations": args.iterations}
        base |= SIZES[args.size] | {"processes": args.processes, "forced": args.forced}
        args.steps = base["steps"] = args.steps or base["steps"]
        runs = contenders(base, args.trl, args.trl_ppo, folder)
        runs = {name: run for name, run in runs.items() if not args.only or name.split()[0] in args.only.split(",")}
        setting = {key: getattr(args, key) for key in SETTING}
        rows = measured_before(setting)
        number = max([row["round"] for row in rows], default=-1) + 1
        while number < 2 * args.rounds and len(counting_rounds(rows, runs)) < args.rounds:
            for name, run in runs.items():
                lines, peak = run()
                lines = lines[args.warm_up :]
                values = {key: statistics.median(line[key] for line in lines) for key in lines[0]}
                rows.append({"machine": machine(), "round": number, "name": name} | values)
                record("iteration", round=number, name=name, peak_bytes=peak, **setting, **values)
            number += 1


def measured_before(setting):
    """Rows of this setting, from this kind of machine."""
    path = RESULTS / "measured.jsonl"
    rows = [row for row in read_lines(path) if row["what"] == "iteration"] if path.exists() else []
    return [row for row in rows if row["machine"] == machine() and all(row[key] == setting[key] for key in setting)]


def counting_rounds(rows, names):
    """Numbers of the rounds that have all of the names and were not disturbed."""
    found = {}
    for row in rows:
        found.setdefault(row["round"], set()).add(row["name"])
    disturbed = {number for _, number in disturbed_rounds(rows)}
    return [number for number, have in found.items() if have >= set(names) and number not in disturbed]


def disturbed_rounds(rows):
    """{(machine, round)} in which a peer's time was a fifth off that of its median round on that machine."""
    times = {}
    for row in rows:
        if row["name"].endswith("TRL"):
            times.setdefault((row["machine"], row["name"]), {})[row["round"]] = row["seconds"]
    disturbed = set()
    for (where, _), seconds in times.items():
        usual = statistics.median(seconds.values())
        disturbed |= {(where, number) for number, x in seconds.items() if abs(x / usual - 1) > 0.2}
    return disturbed


# A process of its own for each case of `rollout`, so that no peer leaves its memory or settings to another.
ROLLOUT = """
import json, sys, time
sys.path.insert(0, {root!r})
import torch, transformers
import grpo_llm, ppo_llm

transformers.utils.logging.set_verbosity_error()
torch.set_num_threads(1)
task = json.loads(sys.argv[1])
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = transformers.AutoTokenizer.from_pretrained(task["model"])
dtype = torch.bfloat16 if device == "cuda" else torch.float32
model = transformers.AutoModelForCausalLM.from_pretrained(task["model"], dtype=dtype).to(device)
ids = tokenizer(task["prompts"])["input_ids"]
inputs = tokenizer(task["prompts"], padding=True, padding_side="left", return_tensors="pt").to(device)
eos, group, length = [tokenizer.eos_token_id], task["group_size"], task["length"]
options = {{"max_new_tokens": length, "do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}}

def ours(number):
    algo, prompts = grpo_llm if group > 1 else ppo_llm, [row for row in ids for _ in range(group)]
    noise = torch.rand(len(prompts), length, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    return sum(len(x.ids) for x in algo.generate(model, prompts, noise.to(device), eos, 1.0))

def generate(number):
    torch.manual_seed(number)
    output = model.generate(**inputs, **options, num_return_sequences=group, eos_token_id=eos)
    return int(ppo_llm.make_response_mask(output[:, inputs["input_ids"].shape[1]:], eos).sum())

def generate_batch(number):
    torch.manual_seed(number)
    config = transformers.GenerationConfig(**options, eos_token_id=eos, pad_token_id=tokenizer.pad_token_id)
    outputs = model.generate_batch([row for row in ids for _ in range(group)], generation_config=config)
    return sum(len(output.generated_tokens) for output in outputs.values())

contenders = {{"ours": ours, "generate": generate, "generate_batch": generate_batch}}
contenders = {{name: run for name, run in contenders.items() if not task["only"] or name in task["only"].split(",")}}
for number in range(task["rounds"] + 1):  # the first is a warm-up
    for name, run in list(contenders.items()):
        begin = time.perf_counter()
        try:
            with torch.no_grad():
                tokens = run(number)
        except Exception as error:
            contenders.pop(name)
            print(json.dumps({{"name": name, "failed": f"{{type(error).__name__}}: {{error}}"[:200]}}), flush=True)
            continue
        if device == "cuda":
            torch.cuda.synchronize()
        if number > 0:
            seconds = time.perf_counter() - begin
            print(json.dumps({{"name": name, "round": number, "seconds": seconds, "tokens": tokens}}), flush=True)
"""


def rollout(args):
    """Groups of 8 and single responses, as many in all, on one thread."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, size = Path(temporary), SIZES[args.size]
        (folder / "rollout.py").write_text(ROLLOUT.format(root=str(ROOT)))
        model, prompts = make_model(folder, args.size), [row["prompt"] for row in make_rows(args.size)]
        for group_size in (size["group_size"], 1):
            count = size["prompts"] * size["group_size"] // group_size
            task = {"model": str(model), "prompts": prompts[:count], "group_size": group_size}
            task |= {"length": size["length"], "rounds": args.rounds, "only": args.only}
            for line in run_lines(folder / "rollout.py", json.dumps(task)):
                record("rollout", size=args.size, group_size=group_size, **line)


MEMORY = """
import json, sys
sys.path.insert(0, {root!r})
import torch, transformers
import ppo_llm as algo

kind, torch_seed = sys.argv[1], torch.manual_seed(0)
shape = {{"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 2}}
shape |= {{"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}}
model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**shape))
policy = algo.Policy(model, temperature=1.0).train()
for parameter in policy.parameters():
    parameter.grad = torch.zeros_like(parameter)
tokens = torch.randint(0, 151_936, (8, 32 + 512), generator=torch.Generator().manual_seed(1))
mask = (torch.arange(544) >= 31) & (torch.arange(544) < 543) & torch.ones_like(tokens).bool()  # 512 actions in each row
weights = torch.randn(4096, generator=torch.Generator().manual_seed(2)) / 4096

def resident(what):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(what))

before = resident("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # resets the peak
if kind == "ours":
    logprobs = policy(tokens, mask)[0][mask]
else:
    hidden = model.base_model(tokens, use_cache=False).last_hidden_state[mask]
    logits = model.get_output_embeddings()(hidden).float()  # (4096,V)
    logprobs = logits.log_softmax(-1).gather(-1, tokens.roll(-1, 1)[mask][:, None]).squeeze(1)
(logprobs * weights).sum().backward()
print(json.dumps({{"peak": resident("VmHWM") - before}}))
torch.save({{name: p.grad for name, p in policy.named_parameters()}}, sys.argv[2])
"""


def memory(args):
    """Of forward and backward, above weights and gradients."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, peaks = Path(temporary), {}
        (folder / "memory.py").write_text(MEMORY.format(root=str(ROOT)))
        for kind in ("ours", "full"):
            peaks[kind] = run_lines(folder / "memory.py", kind, folder / kind)[-1]["peak"]
        ours, full = (torch.load(folder / kind, weights_only=True) for kind in ("ours", "full"))
        difference = max((ours[name] - full[name]).abs().max().item() for name in ours)
        largest = max(grad.abs().max().item() for grad in full.values())
        record("memory", **peaks, difference=difference, largest=largest)


def scaling(args):
    """Two processes against one on the same work, with the share of communication; 1 to 8 times the batch."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        base = {"model": make_model(folder, "tiny"), "rows": make_rows("tiny"), "iterations": args.iterations}
        base |= SIZES["tiny"] | {"forced": False}
        grpo = f"--estimator grpo --kl-loss-coef {BETA} --kl-reward-coef 0"
        single = {"prompts": base["prompts"] * base["group_size"], "group_size": 1}

        def take(script, flags, task, **about):
            lines, peak = run_ours(script, flags, task, folder)
            values = {key: statistics.median(line[key] for line in lines[args.warm_up :]) for key in lines[0]}
            about |= {"name": script, "processes": task["processes"], "round": number}
            return about | {"peak_bytes": peak} | values

        for number in range(args.rounds):
            for script, flags, work in (("grpo_llm", grpo, {}), ("ppo_llm", f"--kl-reward-coef {BETA}", single)):
                for processes in (1, 2):
                    record("processes", **take(script, flags, base | work | {"processes": processes}))
                output, shares = f"{folder}/shares-{script}-{number}", []
                worker = [ROOT / "benchmarks" / "campaigns" / "sharding.py", "--worker", script, output, "--"]
                words = our_flags(script, flags, base | work, folder, f"{script}-communication-{number}")
                launch(sys.executable, 2, *worker, *words)
                for rank in range(2):
                    found = json.loads(Path(f"{output}-{rank}.json").read_text())
                    lines = list(zip(found["communication"], found["rows"]))[args.warm_up + 1 : -1]
                    shares += [seconds / row["time/iteration"] for seconds, row in lines]
                record("communication", name=script, round=number, share=statistics.mean(shares))
            for times in (1, 2, 4, 8):  # at fixed budgets of tokens and of responses that are sampled at a time
                task = base | {"processes": 2, "prompts": 8 * times, "steps": times}
                record("batch", **take("grpo_llm", f"{grpo} --rollout-batch-size 32", task, times=times))


def start(args):
    """Seconds from the launch to the end of the start-up block, after which the evaluation begins."""
    for script in ("ppo_llm", "grpo_llm", "ppo_llm_fsdp"):
        for number in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder:
                words = launcher(2, ROOT / f"{script}.py", "--output-dir", folder)
                begin = time.perf_counter()
                env = os.environ | {"PYTHONUNBUFFERED": "1"}
                run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
                for line in run.stdout:
                    if line.startswith("  run folder"):
                        record("start", name=script, round=number, seconds=time.perf_counter() - begin)
                        break
                run.terminate()
                run.stdout.read()
                run.wait()


def ablation(args):
    with tempfile.TemporaryDirectory() as temporary:
        folder, source = Path(temporary), (ROOT / "grpo_llm.py").read_text()
        base = {"model": make_model(folder, "tiny"), "rows": make_rows("tiny"), "iterations": args.iterations}
        base |= SIZES["tiny"] | {"forced": False, "processes": args.processes}
        for number in range(args.rounds):
            for name, changes in UNDONE.items():
                text = source
                for old, new in changes.items():
                    assert text.count(old) == 1, old
                    text = text.replace(old, new)
                (folder / "grpo_llm.py").write_text(text)
                flags = f"--estimator grpo --kl-loss-coef {BETA} --kl-reward-coef 0"
                lines, peak = run_ours("grpo_llm", flags, base, folder, folder)
                values = {key: statistics.median(line[key] for line in lines[args.warm_up :]) for key in lines[0]}
                record("ablation", name=name, round=number, peak_bytes=peak, **values)


# In the order of the figures; what PROFILE tells apart by the names of torch's operators, and what is left.
OPERATORS = "matrix products", "attention", "sampling, log-softmax", "copies", "AdamW", "the rest", "between operators"

# Runs a script on one process and writes the seconds of each kind of operator in each phase of iterations 3 to 5.
PROFILE = """
import bisect, collections, json, sys
sys.path[:0] = [{root!r}, {benchmarks!r}]
import torch
import phases
import {script} as algo

KINDS = {{
    "matrix products": ("mm", "bmm", "linear"),
    "attention": ("attention",),
    "sampling, log-softmax": ("softmax", "cumsum", "searchsorted"),
    "copies": ("copy_", "cat", "index", "gather", "scatter", "repeat_interleave", "sort", "clone"),
    "AdamW": ("adam",),
}}
profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
count = 0

class Marks(phases.Clock):
    def ended(self, phase, seconds):
        with torch.profiler.record_function(f"phase:{{phase}}"):
            pass

def log_and_count(*args):  # called once before training and once an iteration
    global count
    count += 1
    log(*args)
    if count == 3:
        profiler.start()
        with torch.profiler.record_function("phase:start"):
            pass
    if count == 6:
        profiler.stop()

Marks(algo)
log = algo.log
algo.log = log_and_count
torch.set_num_threads(1)
algo.main(algo.parse_args())
events = sorted(profiler.events(), key=lambda event: event.time_range.start)
marks = [event for event in events if event.name.startswith("phase:")]
ends = [event.time_range.start for event in marks]
seconds = collections.defaultdict(collections.Counter)
for begin, end, mark in zip(ends, ends[1:], marks[1:]):
    seconds[mark.name[6:]]["between operators"] += (end - begin) / 1e6 / 3
for event in events:
    place = bisect.bisect_left(ends, event.time_range.start)
    if not 0 < place < len(ends) or event.name.startswith(("phase:", "ProfilerStep")):
        continue
    kind = next((kind for kind, names in KINDS.items() if any(name in event.name for name in names)), "the rest")
    spent = event.self_cpu_time_total / 1e6 / 3
    seconds[marks[place].name[6:]][kind] += spent
    seconds[marks[place].name[6:]]["between operators"] -= spent
print(json.dumps(seconds))
"""


def profile(args):
    """One process, the embedded task."""
    for script, flags in (("grpo_llm", f"--kl-loss-coef {BETA}"), ("ppo_llm", f"--kl-reward-coef {BETA}")):
        with tempfile.TemporaryDirectory() as folder:
            text = PROFILE.format(root=str(ROOT), benchmarks=str(ROOT / "benchmarks"), script=script)
            Path(folder, "run.py").write_text(text)
            words = f"{flags} --total-iterations 7 --eval-every 0 --save-every 0 --track none --output-dir {folder}"
            record("profile", name=script, phases=run_lines(f"{folder}/run.py", *words.split())[-1])


def floors(args):
    """Products of the shapes of the embedded and the 20m model, and a copy, on one thread."""
    torch.set_num_threads(1)

    def rate(work, run):
        run()
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return work / min(times)  # a floor: what a core does when nothing disturbs it

    for n, k, m in ((2048, 128, 352), (2048, 320, 960), (2048, 896, 4864)):
        a, b = torch.randn(n, k), torch.randn(k, m)
        record("floors", name=f"{n}x{k} times {k}x{m}", per_second=rate(2 * n * k * m, lambda a=a, b=b: a @ b))
    x = torch.empty(2**26)
    y = torch.empty_like(x)
    record("floors", name="copy", per_second=rate(8 * x.numel(), lambda: y.copy_(x)))


def ratios(rows, mine, peer, key="seconds"):
    """mine/peer in every round that has both, on one machine."""
    by_round = {}
    for row in rows:
        by_round.setdefault((row["machine"], row["round"]), {})[row["name"]] = row[key]
    return [found[mine] / found[peer] for found in by_round.values() if mine in found and peer in found]


def spread(found):
    """Median of ratios and, of several, the smallest and the largest: the machine is noisy."""
    ends = f" ({min(found):.2f}-{max(found):.2f})" if len(found) > 1 else ""
    return f"{statistics.median(found):.2f}x{ends}" if found else ""


def middle(rows, key):
    return statistics.median(row[key] for row in rows)


def section(title, head, lines):
    return [f"## {title}", "", common.markdown(head, lines), ""]


def bars(path, title, lines):
    """Horizontal stacked bars: lines of (name, {part: seconds})."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        sys.exit("speed.py table needs matplotlib: pip install -e '.[plots]'")
    plt.switch_backend("Agg")
    figure, axes = plt.subplots(figsize=(8, 0.45 * len(lines) + 1.4))
    left = dict.fromkeys([name for name, _ in lines], 0.0)
    for part in dict.fromkeys(part for _, parts in lines for part in parts):
        widths = [parts.get(part, 0.0) for _, parts in lines]
        axes.barh(list(left), widths, left=list(left.values()), label=part)
        left = {name: begin + width for (name, begin), width in zip(left.items(), widths)}
    axes.set(xlabel="seconds per iteration", title=title)
    axes.invert_yaxis()
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def table(args):
    rows = read_lines(RESULTS / "measured.jsonl")
    of = {what: [row for row in rows if row["what"] == what] for what in dict.fromkeys(row["what"] for row in rows)}
    text = ["# Speed", "", "Medians, made by benchmarks/speed.py, with OMP_NUM_THREADS=1.", ""]
    for machine in dict.fromkeys(row["machine"] for row in rows):
        text += [f"- {machine}: {', '.join(what for what in of if any(r['machine'] == machine for r in of[what]))}"]
    text += [""]
    settings = dict.fromkeys(tuple(r[key] for key in SETTING) for r in of.get("iteration", []))
    for setting in settings:
        size, processes, forced, steps = setting
        measured = [r for r in of["iteration"] if tuple(r[key] for key in SETTING) == setting]
        disturbed = disturbed_rounds(measured)
        mine = [r for r in measured if (r["machine"], r["round"]) not in disturbed]
        title = f"{size}, {processes} process{'es' * (processes > 1)}, {'lengths forced equal' if forced else 'EOS on'}"
        title += f", {steps} step{'s' * (steps > 1)} a batch"
        work = (
            f"{SIZES[size]['prompts'] * SIZES[size]['group_size']} responses per iteration. Rounds that were disturbed"
        )
        work += f" and did not count: {len(disturbed)}."
        lines, stacks = [], []
        for name in dict.fromkeys(r["name"] for r in mine):
            own = [r for r in mine if r["name"] == name]
            seconds, sampling = middle(own, "seconds"), middle(own, "rollout")
            ratio = "" if name.endswith("TRL") else spread(ratios(mine, name, f"{name.split()[0]} TRL"))
            speed, peak = statistics.median(r["tokens"] / r["seconds"] for r in own), middle(own, "peak_bytes") / 2**20
            line = [name, len(own), f"{seconds:.2f}", f"{sampling:.2f}", f"{speed:,.0f}", f"{peak:,.0f}"]
            lines.append([*line, ratio])
            stacks.append((name, {"rollout": sampling, "the rest": seconds - sampling}))
        head = ["", "rounds", "iteration, s", "of it rollout", "tokens/s", "peak memory, MiB", "against TRL"]
        text += [f"## Iterations: {title}", "", work, "", common.markdown(head, lines), ""]
        bars(RESULTS / f"{size}-{processes}-{'forced' if forced else 'eos'}-{steps}.png", title, stacks)
    for size, group_size in dict.fromkeys((r["size"], r["group_size"]) for r in of.get("rollout", [])):
        mine = [r for r in of["rollout"] if (r["size"], r["group_size"]) == (size, group_size)]
        failed = {r["name"]: r["failed"] for r in mine if "failed" in r}
        mine = [r for r in mine if "failed" not in r]
        lines = []
        for name in dict.fromkeys(r["name"] for r in mine):
            own = [r for r in mine if r["name"] == name]
            ratio = spread(ratios(mine, name, "generate"))
            lines.append([name, len(own), f"{middle(own, 'seconds'):.2f}", f"{middle(own, 'tokens'):,.0f}", ratio])
        lines += [[name, 0, "does not run", "", why] for name, why in failed.items()]
        title = f"Rollout: {size}, {'groups of ' + str(group_size) if group_size > 1 else 'single responses'}"
        text += section(title, ["", "rounds", "seconds", "response tokens", "against generate"], lines)
    for row in of.get("memory", [])[-1:]:
        ours, full = row["ours"] / 2**20, row["full"] / 2**20
        text += ["## Memory of an update", ""]
        text += ["Vocabulary 151,936, width 896, two layers, 8 rows of 512 response tokens,"]
        text += [f"above weights and gradients: {ours:,.0f} MiB, {ours / full:.2f}x of the"]
        text += [f"{full:,.0f} MiB with all logits in float32. Gradients differ by {row['difference']:.1e} at"]
        text += [f"most, the largest is {row['largest']:.1e}.", ""]
    if "processes" in of:
        lines = []
        for name in dict.fromkeys(r["name"] for r in of["processes"]):
            one, two = ([r for r in of["processes"] if (r["name"], r["processes"]) == (name, n)] for n in (1, 2))
            both = [{**r, "name": str(r["processes"])} for r in one + two]
            share = statistics.median(r["share"] for r in of["communication"] if r["name"] == name)
            numbers = [f"{middle(own, 'seconds'):.2f}" for own in (one, two)]
            lines.append([name, len(two), *numbers, spread(ratios(both, "1", "2")), f"{share:.0%}"])
        head = ["", "rounds", "one process, s", "two, s", "as fast", "of the time of two in collectives"]
        text += section("Two processes against one, the same global batch", head, lines)
    if "batch" in of:
        lines = []
        for times in dict.fromkeys(r["times"] for r in of["batch"]):
            own = [r for r in of["batch"] if r["times"] == times]
            speed = statistics.median(1e6 * r["seconds"] / r["tokens"] for r in own)
            lines.append([64 * times, f"{middle(own, 'seconds'):.2f}", f"{speed:.0f}"])
            lines[-1].append(f"{middle(own, 'peak_bytes') / 2**20:,.0f}")
        head = ["responses per iteration", "iteration, s", "microseconds per token", "peak memory, MiB"]
        text += section("Batch size, two processes, grpo_llm.py with `--rollout-batch-size 32`", head, lines)
    if "start" in of:
        lines = []
        for name in dict.fromkeys(r["name"] for r in of["start"]):
            own = [r for r in of["start"] if r["name"] == name]
            lines.append([name, len(own), f"{middle(own, 'seconds'):.1f}"])
        text += section("From the launch to the first evaluation", ["", "launches", "seconds"], lines)
    if "ablation" in of:
        lines, stacks = [], []
        for name in dict.fromkeys(r["name"] for r in of["ablation"]):
            own = [r for r in of["ablation"] if r["name"] == name]
            parts = {key[5:]: middle(own, key) for key in own[0] if key.startswith("time/")}
            times = [f"{parts[key]:.2f}" for key in ("rollout", "logprobs", "actor")]
            ratio = spread(ratios(of["ablation"], name, "as it is"))
            lines.append([name, len(own), f"{middle(own, 'seconds'):.2f}", *times, ratio])
            stacks.append((name, parts))
        head = ["grpo_llm.py", "rounds", "iteration, s", "rollout", "log-probs", "update", "against as it is"]
        text += section("What each thing buys", head, lines)
        bars(RESULTS / "ablation.png", "grpo_llm.py without each of the things that make it fast", stacks)
    for script in dict.fromkeys(r["name"] for r in of.get("profile", [])):
        found = next(r["phases"] for r in reversed(of["profile"]) if r["name"] == script)
        found = {phase: kinds for phase, kinds in found.items() if sum(kinds.values()) > 0.01}
        names = [kind for kind in OPERATORS if any(kind in kinds for kinds in found.values())]
        lines = [[phase, *(f"{kinds.get(kind, 0):.2f}" for kind in names)] for phase, kinds in found.items()]
        text += section(f"Where the time goes: {script}.py, one process, seconds", ["", *names], lines)
        bars(
            RESULTS / f"profile-{script}.png",
            f"{script}.py, one process",
            [(phase, {k: kinds.get(k, 0) for k in names}) for phase, kinds in found.items()],
        )
    if "floors" in of:
        lines = [[r["name"], r["machine"].split(",")[0], f"{r['per_second'] / 1e9:.1f}"] for r in of["floors"]]
        text += section("One core", ["", "of", "billion operations, or bytes, per second"], lines)
    (RESULTS / "README.md").write_text("\n".join(text))
    print("\n".join(text))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", choices=["iteration", "rollout", "memory", "scaling", "start", "ablation", "profile", "floors", "table"]
    )
    parser.add_argument("--trl", help="python of an environment with the newest TRL")
    parser.add_argument("--trl-ppo", help="python of an environment with TRL 1.12.0")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--forced", action="store_true", help="every response has the full length")
    parser.add_argument("--steps", type=int, help="optimizer steps per iteration (default: that of the size)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=2, help="iterations that do not count")
    parser.add_argument("--only", help="only these algorithms, e.g. GRPO,PPO; or only these samplers")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    RESULTS = options.results
    globals()[options.what](options)
