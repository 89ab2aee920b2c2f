"""How fast are the scripts? An iteration beside TRL's on the same work, and two processes beside one.

    python benchmarks/speed.py measure --trl TRL/bin/python               beside TRL
    python benchmarks/speed.py measure --trl TRL/bin/python --steps 1     with one optimizer step for each batch
    python benchmarks/speed.py table        tables of everything measured so far

TRL needs an environment of its own (`pip install trl`), in which this file runs, too. All contenders take turns, round
by round, on the bundled model and two processes, ours also on one with the same batch. In a round, we take each
contender's median over the iterations after the warm-up, and their ratios; the number we report is the median of these
ratios over the rounds. Results are appended to benchmarks/results/speed/measured.jsonl, and `table` writes README.md
next to it. phases.py times the phases.
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
from pathlib import Path

import common
import phases
import torch
import torch.distributed as dist
from common import ROOT, TINY, read_lines

RESULTS = common.RESULTS / "speed"
BETA, LR = 0.001, 1e-5  # nothing should be learned: the work has to stay the same
WARM_UP = 2  # iterations that do not count
# Prompts and responses of an iteration, and the longest response.
WORK = {"prompts": 32, "group_size": 8, "length": 40}
GROUPED = ["--estimator", "grpo", "--kl-loss-coef", str(BETA), "--kl-reward-coef", "0"]
SINGLE = ["--kl-reward-coef", str(BETA), "--kl-loss-coef", "0"]


# --- Ours ------------------------------------------------------------------------------------------------------------


def make_task(folder, steps, iterations):
    """What all contenders do: model, rows [{prompt, answer}], sizes."""
    rows = read_lines(TINY / "train.jsonl")
    rows = [{"prompt": row["question"], "answer": row["answer"].split("#### ")[1]} for row in rows]
    common.write_lines(folder / "rows.jsonl", rows)
    return WORK | {"model": str(TINY / "model"), "rows": rows, "steps": steps, "iterations": iterations}


def run_ours(script, flags, task, folder, source=ROOT, processes=2):
    """[{seconds, rollout, tokens, time/PHASE..} per iteration], peak bytes, by a script in `source`.

    The seconds are from one line of the log to the next: what follows it counts, too.
    """
    group_size = task["group_size"] if script.startswith("grpo") else 1
    prompts = task["prompts"] * task["group_size"] // group_size
    words = f"--model {task['model']} --dataset {folder}/rows.jsonl --eval-dataset {folder}/rows.jsonl"
    words += f" --prompt-column prompt --answer-column answer --reward {ROOT}/benchmarks/rewards.py:exact"
    words += f" --chat-template none --batch-size {prompts} --max-prompt-length 512 --lr {LR}"
    words += f" --minibatch-size {prompts * group_size // task['steps']} --max-response-length {task['length']}"
    words += f" --microbatch-tokens 1024 --total-iterations {task['iterations']}"
    if group_size > 1:
        words += f" --group-size {group_size}"
    lines, found = phases.measure(source / f"{script}.py", [*words.split(), *flags], processes)
    result = []
    for i in range(1, len(lines)):  # the first line is from before training
        row = {"seconds": lines[i]["time/clock"] - lines[i - 1]["time/clock"], "rollout": lines[i]["time/rollout"]}
        row["tokens"] = sum(process["tokens"][i] for process in found)
        result.append(row | {key: value for key, value in lines[i].items() if key.startswith("time/")})
    return result, max(process["peak"] for process in found)


# --- TRL's: python speed.py inside TASK.json, in its environment -----------------------------------------------------


class Record:
    """Times of one process, sums of work over all."""

    def __init__(self):
        self.lines, self.rollout, self.tokens, self.last = [], 0.0, 0, time.perf_counter()

    def timed(self, function):
        """Counts as a rollout."""

        def run(*args, **kwargs):
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            self.rollout += time.perf_counter() - begin
            return result

        return run

    def end_iteration(self):
        tokens = torch.tensor(self.tokens)
        dist.all_reduce(tokens)
        seconds = time.perf_counter() - self.last
        self.lines.append({"seconds": seconds, "rollout": self.rollout, "tokens": tokens.item()})
        self.rollout, self.tokens, self.last = 0.0, 0, time.perf_counter()


def run_inside(place):
    """A process of TRL. The first one writes a line per iteration, and the peak of the largest process."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    task, record = json.loads(Path(place).read_text()), Record()

    class Clock(transformers.TrainerCallback):
        """An iteration is the optimizer steps on what was sampled once."""

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % task["steps"] == 0:
                record.end_iteration()

    config = {"output_dir": f"{place}-trl", "learning_rate": LR, "seed": 1, "temperature": 1.0, "use_cpu": True}
    config |= {"bf16": False, "gradient_checkpointing": False}  # TRL's default is True
    config |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 10_000}
    trainer = make_trainer(task, record, config, [Clock()])
    assert trainer.accelerator.num_processes == dist.get_world_size() == 2
    record.last = time.perf_counter()
    trainer.train()
    peak = torch.tensor(phases.largest())
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        common.write_lines(f"{place}.out", [*record.lines, {"peak_bytes": peak.item()}])


def make_trainer(task, record, config, callbacks):
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def reward(prompts, completions, completion_ids, answer, **kwargs):
        record.tokens += sum(map(len, tokenizer(prompts)["input_ids"])) + sum(map(len, completion_ids))
        return [float(text.rsplit("####", 1)[-1].strip() == str(n)) for text, n in zip(completions, answer)]

    tokenizer = AutoTokenizer.from_pretrained(task["model"], padding_side="left")
    config = trl.GRPOConfig(
        per_device_train_batch_size=task["prompts"] * task["group_size"] // task["steps"] // 2,
        steps_per_generation=task["steps"],
        num_generations=task["group_size"],
        max_completion_length=task["length"],
        max_steps=task["steps"] * task["iterations"],
        beta=BETA,
        loss_type="grpo",
        **config,
    )
    trainer = trl.GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(task["rows"]),
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    trainer._generate_single_turn = record.timed(trainer._generate_single_turn)
    return trainer


def run_trl(python, task, folder):
    """As run_ours, by TRL in that environment."""
    place = folder / f"task-{time.time_ns()}.json"
    place.write_text(json.dumps(task))
    command = common.launcher(2, Path(__file__).resolve(), "inside", place, python=python)
    try:
        common.run(command, HF_HUB_OFFLINE="1")
    except SystemExit as error:  # now and then a process of TRL's aborts when it has trained and ends
        print(f"once more: {error}", file=sys.stderr)
        common.run(command, HF_HUB_OFFLINE="1")
    *lines, last = read_lines(f"{place}.out")
    return lines, last["peak_bytes"]


# --- The commands ----------------------------------------------------------------------------------------------------


def measure(args, folder):
    """Every round runs every contender once. Each one's medians are kept."""
    task, runs = make_task(folder, args.steps, args.iterations), {}
    for script, flags in ("grpo_llm", GROUPED), ("ppo_llm", SINGLE):
        ours = f"{script[:-4].upper()} ours"
        for name, processes in (ours, 2), (f"{ours}, one process", 1):
            runs[name] = functools.partial(run_ours, script, flags, task, folder, processes=processes)
    shared = folder / "shared_prompt" / "grpo_llm.py"
    shared.parent.mkdir()
    common.run([sys.executable, ROOT / "notes" / "variants.py", "apply", "shared_prompt", shared])
    runs["GRPO ours, shared_prompt"] = functools.partial(run_ours, "grpo_llm", GROUPED, task, folder, shared.parent)
    if args.trl:
        runs["GRPO TRL"] = functools.partial(run_trl, args.trl, task, folder)
    names = re.findall("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB"
    for _ in range(args.rounds):
        round_number = time.time_ns()
        for name, run in runs.items():
            lines, peak = run()
            values = {key: statistics.median(line[key] for line in lines[WARM_UP:]) for key in lines[0]}
            row = {"steps": args.steps, "machine": machine, "round": round_number, "name": name, "peak_bytes": peak}
            print(json.dumps(row | values), flush=True)
            with open(RESULTS / "measured.jsonl", "a") as file:
                file.write(json.dumps(row | values) + "\n")


def ratios(rows, mine, peer):
    """The median and the ends of mine/peer in the rounds that have both, each on one machine."""
    found = []
    for row in common.grouped(rows, "machine", "round").values():
        seconds = {one["name"]: one["seconds"] for one in row}
        if mine in seconds and peer in seconds:
            found.append(seconds[mine] / seconds[peer])
    return common.spread(found, 2, statistics.median) if found else ""


def middle(rows, key):
    return statistics.median(row[key] for row in rows)


def table(args, folder):
    measured = read_lines(RESULTS / "measured.jsonl")
    text = "# Speed\n\nMedians, made by `python benchmarks/speed.py`, with OMP_NUM_THREADS=1. "
    machines = ", ".join(common.grouped(measured, "machine"))
    text += f"The bundled model and its task.\nMeasured on {machines}. An iteration has 256 responses.\n"
    head = ["", "rounds", "iteration, s", "of it rollout", "tokens/s", "peak memory, MiB", "of TRL's time", "of ours"]
    for steps, rows in common.grouped(measured, "steps").items():
        lines = []
        for name, own in common.grouped(rows, "name").items():
            algorithm = name.split()[0]
            line = [name, len(own), f"{middle(own, 'seconds'):.2f}", f"{middle(own, 'rollout'):.2f}"]
            line.append(f"{statistics.median(row['tokens'] / row['seconds'] for row in own):,.0f}")
            line.append(f"{middle(own, 'peak_bytes') / 2**20:,.0f}")
            peers = f"{algorithm} TRL", f"{algorithm} ours"
            lines.append([*line, *("" if name == peer else ratios(rows, name, peer) for peer in peers)])
        text += f"\n## {steps} optimizer step{'s' * (steps > 1)}, two processes\n\n{common.markdown(head, lines)}\n"
    (RESULTS / "README.md").write_text(text)
    print(text)


def main():
    commands = {"measure": measure, "table": table}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=commands)
    parser.add_argument("--trl", help="python of an environment with the newest TRL")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps per iteration (4)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        commands[args.what](args, Path(folder))


if __name__ == "__main__":
    if sys.argv[1:2] == ["inside"]:
        run_inside(sys.argv[2])
    else:
        main()
