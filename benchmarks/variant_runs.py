"""Train with the variants, and with the scripts that they change, to compare: benchmarks/results/variants/.

    python benchmarks/variant_runs.py run cispo ...          all whose names begin with it, all seeds, two at a time
    python benchmarks/variant_runs.py table                  README.md with a line for each experiment

Each run is one process with one thread. Its metrics are kept as a csv, as benchmarks/learning.py does, so plot.py can
draw them. Existing runs are not run again. Tasks are in runs/tasks/, where benchmarks/tasks.py makes them.
"""

import argparse
import shlex
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common
import learning
import plot
from common import ROOT, markdown, read_lines, spread

import grpo_llm

RESULTS = common.RESULTS / "variants"

ONE_STEP, EPOCHS = "--minibatch-size 256", "--ppo-epochs 4"
TASK = "--model runs/tasks/{0}/model --dataset runs/tasks/{0}/train.jsonl --eval-dataset runs/tasks/{0}/test.jsonl"
SEQUENCE = TASK.format("sequence") + " --max-response-length 9 --lr 1e-3 --critic-lr 1e-3 --lam 0.95 --kl-reward-coef 0"
SEQUENCE += " --entropy-coef 0.01 --total-iterations 120 --eval-every 20"
CALCULATOR = TASK.format("calculator") + " --max-response-length 96 --lr 1.5e-4 --total-iterations 30"
CALCULATOR += ' --microbatch-tokens 2048 --prompt-suffix ""'
BOXES = (
    TASK.format("boxes") + " --max-response-length 16 --lr 1e-3 --kl-loss-coef 0 --total-iterations 20 --eval-every 5"
)
BOXES += ' --prompt-suffix ""'
LENGTHS = "--model runs/tasks/lengths/model --dataset benchmarks/tiny/train.jsonl"
LENGTHS += " --eval-dataset benchmarks/tiny/test.jsonl --max-response-length 144 --lr 3e-4"
LENGTHS += ' --total-iterations 60 --microbatch-tokens 2048 --prompt-suffix ""'
TWO_REWARDS = f"{LENGTHS} --total-iterations 20 --eval-rows 200 --reward benchmarks/tasks.py"
CONTROL = f"{LENGTHS} --reward notes/variants/length_control.py:length_control"
# python notes/variants/gym_tasks.py letter_counting --folder runs/tasks/letters --train 3000 --test 200
LETTERS = "--dataset runs/tasks/letters/train.jsonl --eval-dataset runs/tasks/letters/test.jsonl"
LETTERS += """ --reward notes/variants/gym_tasks.py:gym_tasks --prompt-suffix ' End with "####" and the answer.'"""
REINFORCE = f"{ONE_STEP} --kl-reward-coef 0 --lam 1 --critic-lr 0"  # the values stay 0
# Groups of one, whitened over the batch's responses; with one step the ratio is 1, and the clip does nothing.
BATCH_MEAN = "--estimator reinforce_pp --group-size 1 --batch-size 256 --minibatch-size 256 --kl-loss-coef 0"
BATCH_MEAN += " --loss-agg token-mean"
DR_GRPO = "--estimator dr_grpo --loss-agg seq-mean-token-sum-norm"
GUESS = TASK.format("guess") + " --environment notes/variants/guess.py:GuessInText"
GUESS += " --max-response-length 24 --microbatch-tokens 4096"
GUESS += ' --lr 2e-3 --kl-loss-coef 0 --total-iterations 100 --eval-every 20 --prompt-suffix ""'
TEN = "--reward benchmarks/rewards.py:ten_or_eleven"  # gsm8k with another zero
# As it was run with version 0.2 (commit c9bdd21), when the linear schedule was in the script.
DISTILL = "--ref-model runs/teacher/final --lr 6e-4 --lr-schedule linear --total-iterations 20 --eval-every 4"
EXPERIMENTS = {  # name: (script or variant, flags, seeds)
    "ppo": ("ppo_llm", "", 3),
    "ppo-1step": ("ppo_llm", ONE_STEP, 3),
    "ppo-epochs4": ("ppo_llm", EPOCHS, 3),
    "plain_pg": ("plain_pg", "", 3),
    "plain_pg-1step": ("plain_pg", ONE_STEP, 3),
    "plain_pg-epochs4": ("plain_pg", EPOCHS, 3),
    "ppo-epochs4-ratio": ("ppo_llm", f"{EPOCHS} --clip-low 1 --clip-high 1e9", 3),  # which is no clip
    "reinforce": ("plain_pg", REINFORCE, 3),
    "reinforce-ten": ("plain_pg", f"{REINFORCE} {TEN}", 3),
    "reinforce-tokens": ("plain_pg", REINFORCE, 3),
    "reinforce-mean": ("grpo_llm", BATCH_MEAN, 3),
    "reinforce-ten-mean": ("grpo_llm", f"{BATCH_MEAN} {TEN}", 3),
    "ppo-lam1": ("ppo_llm", "--lam 1", 3),
    "ppo-raw": ("ppo_llm", "", 3),
    "vc_ppo": ("vc_ppo", "--total-iterations 50", 3),
    "grpo": ("grpo_llm", "", 3),
    "cispo": ("cispo", "", 3),
    "entropy_tokens": ("entropy_tokens", "", 3),
    "dapo": ("dapo", "", 3),
    "gspo": ("gspo", "", 3),
    "replay": ("replay", "", 3),
    "one_step_off": ("one_step_off", "", 3),
    "pass_at_k": ("pass_at_k", "", 3),
    "distill": ("distill", DISTILL, 3),
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
# Not whitened: the line is changed in a copy. (They were run with version 0.4, which had a flag for it.)
RAW = "reinforce", "reinforce-ten", "ppo-raw"
WHITENS = "advantages = masked_whiten(raw_advantages, mask)"
ENVIRONMENT = {f"lengths-{n}": {"LENGTH_TARGET": str(n)} for n in (80, 100)}


def run(name, seed):
    """One run, unless its csv is there."""
    base, flags, _ = EXPERIMENTS[name]
    path = RESULTS / f"{name}.csv"
    if path.exists() and str(seed) in plot.read_table(path):
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "benchmarks").symlink_to(ROOT / "benchmarks")  # a copy needs the embedded model next to it
        script = common.find_script(f"{base.removesuffix('_llm')}_llm", folder)
        if name in RAW:
            text = script.read_text()
            assert text.count(WHITENS) == 1
            script = folder / "raw_llm.py"
            script.write_text(text.replace(WHITENS, "advantages = raw_advantages"))
        words = ["--seed", seed, "--save-every", "0", "--track", "none", *shlex.split(flags)]
        rows = learning.train(script, words, folder / "run", **ENVIRONMENT.get(name, {}))
        first, *_, last = sorted((folder / "run" / "completions").glob("eval_sampled_*.jsonl"))
        samples = read_lines(last)
        if name == "letters":  # the scores do not show what it learns
            kept = [{"iteration": int(file.stem[-6:])} | row for file in (first, last) for row in read_lines(file)]
            answers = [{key: x for key, x in row.items() if key != "prompt"} for row in kept]
            common.write_lines(RESULTS / "letters.jsonl", answers)
    if name.startswith("lengths"):  # whose score also counts the length
        texts, answers = ([row[key] for row in samples] for key in ("response", "answer"))
        rows[-1]["eval/characters_sampled"] = statistics.mean(map(len, texts))
        rows[-1]["eval/right_sampled"] = statistics.mean(grpo_llm.gsm8k(texts, answers))
    learning.keep_run(path, rows, "seed", seed)
    last = [row for row in rows if "eval/score" in row][-1]
    print(f"{name}, seed {seed}: greedy {last['eval/score']:.3f}, sampled {last['eval/score_sampled']:.3f}", flush=True)


def cells(name):
    """The line of an experiment: means over its seeds, lowest and highest in brackets."""
    base, flags, _ = EXPERIMENTS[name]
    runs = plot.read_runs(RESULTS / f"{name}.csv")
    columns = [name, f"`{base} {flags}`".replace(" `", "`") + ", not whitened" * (name in RAW), len(runs)]
    for metric in "eval/score", "eval/score_sampled", "eval/length_mean":
        columns.append(spread([[row[metric] for row in rows if metric in row][-1] for rows in runs]))
    return [*columns, f"{statistics.mean(rows[-1]['responses'] for rows in runs):,.0f}"]


def make_table():
    """What README.md says of the runs that are there."""
    names = [name for name in EXPERIMENTS if (RESULTS / f"{name}.csv").exists()]
    columns = ["experiment", "script or variant, flags", "seeds", "greedy", "sampled", "length", "responses"]
    lengths = []
    for name in [name for name in names if name.startswith("lengths")]:
        last = [rows[-1] for rows in plot.read_runs(RESULTS / f"{name}.csv")]
        characters = statistics.mean(row["eval/characters_sampled"] for row in last)
        right = statistics.mean(row["eval/right_sampled"] for row in last)
        lengths.append([name, f"{characters:.1f}", f"{right:.3f}"])
    return f"""Made by `python benchmarks/variant_runs.py run` and `table`, one process with one thread each. Scores are
of the last evaluation: means over the seeds, lowest and highest in brackets; length in tokens.

{markdown(columns, map(cells, names))}

Lengths, of the sampled test answers, means over the seeds (their score above counts the length, too):

{markdown(["experiment", "characters", "right"], lengths)}
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    if args.command == "run":
        chosen = [name for prefix in args.names for name in EXPERIMENTS if name.startswith(prefix)]
        todo = [(name, seed) for seed in (1, 2, 3) for name in chosen if seed <= EXPERIMENTS[name][2]]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda one: run(*one), todo))
    else:
        (RESULTS / "README.md").write_text(make_table())


if __name__ == "__main__":
    main()
