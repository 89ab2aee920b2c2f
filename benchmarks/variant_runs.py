"""Train with the variants, and with the scripts that they change, to compare: benchmarks/results/variants/.

    python benchmarks/variant_runs.py list
    python benchmarks/variant_runs.py run cispo ...          all whose names begin with it, all seeds, two at a time
    python benchmarks/variant_runs.py table                  README.md with a line for each experiment, and the figures

Each run is one process with one thread. Its metrics are kept as a csv, as benchmarks/learning.py does, so plot.py can
draw them. Existing runs are not run again.

`distill` was run with version 0.2 (commit c9bdd21): its linear schedule is a variant now. Its results stay, and `run`
skips it.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import learning
import plot

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "variants"
sys.path[:0] = str(ROOT), str(ROOT / "notes")
import variants  # noqa: E402

import grpo_llm  # noqa: E402

ONE_STEP, EPOCHS = "--minibatch-size 256", "--ppo-epochs 4"
SEQUENCE = "--model {tasks}/sequence/model --dataset {tasks}/sequence/train.jsonl"
SEQUENCE += " --eval-dataset {tasks}/sequence/test.jsonl --max-response-length 9 --lr 1e-3"
SEQUENCE += " --critic-lr 1e-3 --lam 0.95 --kl-reward-coef 0 --entropy-coef 0.01 --total-iterations 120 --eval-every 20"
CALCULATOR = "--model {tasks}/calculator/model --dataset {tasks}/calculator/train.jsonl"
CALCULATOR += " --eval-dataset {tasks}/calculator/test.jsonl --max-response-length 96"
CALCULATOR += ' --lr 1.5e-4 --total-iterations 30 --microbatch-tokens 2048 --prompt-suffix ""'
BOXES = "--model {tasks}/boxes/model --dataset {tasks}/boxes/train.jsonl"
BOXES += " --eval-dataset {tasks}/boxes/test.jsonl --max-response-length 16 --lr 1e-3"
BOXES += ' --kl-loss-coef 0 --total-iterations 20 --eval-every 5 --prompt-suffix ""'
LENGTHS = "--model {tasks}/lengths/model --dataset benchmarks/tiny/train.jsonl"
LENGTHS += " --eval-dataset benchmarks/tiny/test.jsonl --max-response-length 144 --lr 3e-4"
LENGTHS += ' --total-iterations 60 --microbatch-tokens 2048 --prompt-suffix ""'
TWO_REWARDS = f"{LENGTHS} --total-iterations 20 --eval-rows 200 --reward benchmarks/tasks.py"
CONTROL = f"{LENGTHS} --reward notes/variants/length_control.py:length_control"
# python notes/variants/gym_tasks.py letter_counting --folder runs/tasks/letters --train 3000 --test 200
LETTERS = "--dataset {tasks}/letters/train.jsonl --eval-dataset {tasks}/letters/test.jsonl"
LETTERS += """ --reward notes/variants/gym_tasks.py:gym_tasks --prompt-suffix ' End with "####" and the answer.'"""
REINFORCE = f"{ONE_STEP} --kl-reward-coef 0 --lam 1 --critic-lr 0"  # the values stay 0
# Groups of one, whitened over the batch's responses; with one step the ratio is 1, and the clip does nothing.
BATCH_MEAN = "--estimator reinforce_pp --group-size 1 --batch-size 256 --minibatch-size 256 --kl-loss-coef 0"
BATCH_MEAN += " --loss-agg token-mean"
DR_GRPO = "--estimator dr_grpo --loss-agg seq-mean-token-sum-norm"
GUESS = "--model {tasks}/guess/model --dataset {tasks}/guess/train.jsonl --eval-dataset {tasks}/guess/test.jsonl"
GUESS += " --environment notes/variants/guess.py:GuessInText --max-response-length 24 --microbatch-tokens 4096"
GUESS += ' --lr 2e-3 --kl-loss-coef 0 --total-iterations 100 --eval-every 20 --prompt-suffix ""'
TEN = "--reward benchmarks/rewards.py:ten_or_eleven"  # gsm8k with another zero
EXPERIMENTS = {  # name: (script or variant, flags, seeds)
    "ppo": ("ppo_llm", "", 3),
    "ppo-1step": ("ppo_llm", ONE_STEP, 3),
    "ppo-epochs4": ("ppo_llm", EPOCHS, 3),
    "plain_pg": ("plain_pg", "", 3),
    "plain_pg-1step": ("plain_pg", ONE_STEP, 3),
    "plain_pg-epochs4": ("plain_pg", EPOCHS, 3),
    "ppo-epochs4-ratio": ("ppo_llm", f"{EPOCHS} --clip-low 1 --clip-high 1e9", 3),  # which is no clip
    "reinforce": ("plain_pg", f"{REINFORCE} --no-whiten-advantages", 3),
    "reinforce-ten": ("plain_pg", f"{REINFORCE} --no-whiten-advantages {TEN}", 3),
    "reinforce-tokens": ("plain_pg", REINFORCE, 3),
    "reinforce-mean": ("grpo_llm", BATCH_MEAN, 3),
    "reinforce-ten-mean": ("grpo_llm", f"{BATCH_MEAN} {TEN}", 3),
    "ppo-lam1": ("ppo_llm", "--lam 1", 3),
    "ppo-raw": ("ppo_llm", "--no-whiten-advantages", 3),
    "vc_ppo": ("vc_ppo", "--total-iterations 50", 3),
    "grpo": ("grpo_llm", "", 3),
    "cispo": ("cispo", "", 3),
    "entropy_tokens": ("entropy_tokens", "", 3),
    "dapo": ("dapo", "", 3),
    "gspo": ("gspo", "", 3),
    "replay": ("replay", "", 3),
    "one_step_off": ("one_step_off", "", 3),
    "pass_at_k": ("pass_at_k", "", 3),
    "distill": (
        "distill",
        "--ref-model {teacher} --lr 6e-4 --lr-schedule linear --total-iterations 20 --eval-every 4",
        3,
    ),
    "two_turns": ("two_turns", "--max-response-length 96", 1),
    "boxes": ("two_turns", BOXES, 3),
    "tool_call": ("tool_call", CALCULATOR, 3),
    "calculator-without": ("grpo_llm", CALCULATOR, 1),
    "sequence-each": ("process_reward", f"{SEQUENCE} --reward benchmarks/tasks.py:each_character", 3),
    "sequence-one": ("ppo_llm", f"{SEQUENCE} --reward benchmarks/tasks.py:one_score", 3),
    "sequence-all": ("ppo_llm", f"{SEQUENCE} --reward benchmarks/tasks.py:all_or_nothing", 3),
    "shared_critic": ("shared_critic", "", 3),
    "fp16": ("fp16", "", 3),
    "vllm": ("vllm", "", 2),  # in an environment that has it
    "lengths-gdpo": ("multi_reward", f"{TWO_REWARDS}:right_and_near", 3),
    "lengths-summed": ("grpo_llm", f"{TWO_REWARDS}:right_plus_near", 3),
    "lengths-free": ("grpo_llm", LENGTHS, 3),
    "lengths-80": ("grpo_llm", CONTROL, 3),
    "lengths-100": ("grpo_llm", CONTROL, 3),
    "guess": ("environment", GUESS, 3),
    # With four steps a batch no clip acts, so there are four epochs as well.
    "sapo": ("sapo", "", 3),
    "dppo": ("dppo", "", 3),
    "cov": ("cov", "--clip-low 1 --clip-high 1e9 --cov-share 0.02", 3),
    "cov-clip": ("cov", "--cov clip --cov-share 0.02", 3),
    "grpo-epochs4": ("grpo_llm", EPOCHS, 2),
    "sapo-epochs4": ("sapo", EPOCHS, 2),
    "dppo-epochs4": ("dppo", EPOCHS, 2),
    "maxrl": ("maxrl", f"{ONE_STEP} --kl-loss-coef 0", 3),
    "optimal_baseline": ("optimal_baseline", f"{ONE_STEP} --kl-loss-coef 0", 3),
    "token-sums": ("grpo_llm", f"{ONE_STEP} --kl-loss-coef 0 {DR_GRPO}", 3),  # beside these two
    "mask_truncated": ("mask_truncated", "--max-response-length 40", 3),
    "short-limit": ("grpo_llm", "--max-response-length 40", 3),
    "self_distill": ("self_distill", "--total-iterations 20", 3),
    "paged": ("paged", "", 2),
    "verify_math": ("grpo_llm", "--reward notes/variants/verify_math.py:verify_math --total-iterations 20", 1),
    "letters": ("grpo_llm", LETTERS, 1),
}
OLD = ("distill",)  # as it was run with version 0.2
ENVIRONMENT = {f"lengths-{n}": {"LENGTH_TARGET": str(n)} for n in (80, 100)}
FIGURES = {
    "plain_pg": ("ppo", "plain_pg", "ppo-1step", "plain_pg-1step", "ppo-epochs4", "plain_pg-epochs4"),
    "grpo": ("grpo", "cispo", "entropy_tokens", "dapo", "gspo", "replay", "distill"),
    "tasks": ("sequence-each", "sequence-one", "sequence-all"),
}


def keep(completions, target):
    """The answers of an evaluation without the prompts."""
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in completions.read_text().splitlines()]
    target.write_text("".join(json.dumps({k: x for k, x in line.items() if k != "prompt"}) + "\n" for line in lines))


def run(name, seed, args):
    """One run, unless its csv is there."""
    base, flags, _ = EXPERIMENTS[name]
    target = args.results / name / f"seed_{seed}.csv"
    if target.exists():
        return
    flags = flags.format(tasks=args.tasks, teacher=args.teacher)
    with tempfile.TemporaryDirectory() as folder:
        script = ROOT / f"{base}.py"
        if not script.exists():  # a copy needs the embedded model next to it
            script = Path(folder, f"{base}_llm.py")
            script.write_text(variants.patched(base))
            Path(folder, "benchmarks").symlink_to(ROOT / "benchmarks")
        words = ["--seed", str(seed), "--output-dir", f"{folder}/runs", "--run-name", "run", "--save-every", "0"]
        words += ["--track", "none", *shlex.split(flags)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | ENVIRONMENT.get(name, {})
        begin = time.time()
        done = subprocess.run(
            [sys.executable, script, *words], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        seconds = time.time() - begin
        if done.returncode:
            print(f"{name}, seed {seed}: {done.stderr[-2000:]}", flush=True)
            return
        rows = plot.read_run(Path(folder, "runs", "run"))
        completions = sorted(Path(folder, "runs", "run", "completions").glob("eval_sampled_*.jsonl"))[-1]
        samples = [json.loads(line) for line in completions.read_text().splitlines()]
        if name == "letters":  # the scores do not show what it learns
            for kept in completions.with_name("eval_sampled_000000.jsonl"), completions:
                keep(kept, target.parent / f"seed_{seed}_{kept.name}")
    rows[-1]["time/launch_to_exit"] = seconds
    if name.startswith("lengths"):  # whose score also counts the length
        rows[-1]["eval/characters_sampled"] = statistics.mean(len(row["response"]) for row in samples)
        pairs = [[row[key] for row in samples] for key in ("response", "answer")]
        rows[-1]["eval/right_sampled"] = statistics.mean(grpo_llm.gsm8k(*pairs))
    target.parent.mkdir(parents=True, exist_ok=True)
    learning.write_compact(rows, target)
    last = [row for row in rows if "eval/score" in row][-1]
    print(f"{name}, seed {seed}: greedy {last['eval/score']:.3f}, sampled {last['eval/score_sampled']:.3f}", flush=True)


def cells(name, args):
    """The line of an experiment: means over its seeds, lowest and highest in brackets."""
    base, flags, _ = EXPERIMENTS[name]
    runs = plot.read_runs(args.results / name)

    def over_seeds(value):
        values = [value(rows) for rows in runs]
        spread = f" ({min(values):.3f}-{max(values):.3f})" if len(values) > 1 else ""
        return f"{statistics.mean(values):.3f}{spread}"

    def last(metric):
        return over_seeds(lambda rows: [row[metric] for row in rows if metric in row][-1])

    responses = statistics.mean(rows[-1]["responses"] for rows in runs)
    columns = [name, f"`{base} {flags}`".replace(" `", "`"), str(len(runs)), last("eval/score")]
    return [*columns, last("eval/score_sampled"), last("eval/length_mean"), f"{responses:,.0f}"]


def table(args):
    lines = [
        ["experiment", "script or variant, flags", "seeds", "greedy", "sampled", "length", "responses"],
        ["---"] * 7,
    ]
    lines += [cells(name, args) for name in EXPERIMENTS if (args.results / name).exists()]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    head = "Made by `python benchmarks/variant_runs.py run` and `table`, one process with one thread each. Scores are"
    head += "\nof the last evaluation: means over the seeds, lowest and highest in brackets; length in tokens."
    lengths = [name for name in EXPERIMENTS if name.startswith("lengths") and (args.results / name).exists()]
    about = "Lengths, of the sampled test answers, means over the seeds (their score above counts the length, too):\n\n"
    about += "| experiment | characters | right |\n| --- | --- | --- |\n"
    for name in lengths:
        last = [rows[-1] for rows in plot.read_runs(args.results / name)]
        characters, right = [
            statistics.mean(row[metric] for row in last) for metric in ("eval/characters_sampled", "eval/right_sampled")
        ]
        about += f"| {name} | {characters:.1f} | {right:.3f} |\n"
    (args.results / "README.md").write_text(f"{head}\n\n{text}\n\n{about}")
    print(text)
    for figure, names in FIGURES.items():
        paths = [str(args.results / name) for name in names if (args.results / name).exists()]
        if len(paths) > 1:
            output = args.results / f"{figure}.png"
            words = ["--metrics", "eval/score_sampled", "reward/mean", "--output", str(output)]
            sys.argv = ["plot.py", *paths, *words]
            plot.main()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("list", "run", "table"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--tasks", default="runs/tasks", help="folder of the tasks that benchmarks/tasks.py makes")
    parser.add_argument("--teacher", default="runs/teacher/final", help="final/ of a run, for distill")
    args = parser.parse_args()
    if args.command == "list":
        for name, (base, flags, seeds) in EXPERIMENTS.items():
            note = "  (version 0.2)" if name in OLD else ""
            print(f"{name:20} {seeds} seeds  {base} {flags}{note}")
    elif args.command == "run":
        chosen = [name for prefix in args.names for name in EXPERIMENTS if name.startswith(prefix) and name not in OLD]
        todo = [(name, seed) for seed in args.seeds for name in chosen if seed <= EXPERIMENTS[name][2]]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda one: run(*one, args), todo))
    else:
        table(args)


if __name__ == "__main__":
    main()
