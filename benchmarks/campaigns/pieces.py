"""What does each piece of PPO do? Copies of ppo_llm.py in which one is left out, on the task `lines` of tasks.py.

    python benchmarks/campaigns/pieces.py                                     three seeds of all rows, one run at a time
    python benchmarks/campaigns/pieces.py base lambda-0 --seeds 1 2 3 4 5     only these

A row is flags, or another line in the loop, of process_reward.patch's script, with a reward for each line of an answer,
or of grpo_llm.py. A run has one thread, and its seconds are processor time. The metrics go to
benchmarks/results/pieces/pieces.csv; runs that are there are not repeated. At the end, a table has the means over seeds
and their range: `half` of iterations 16 to 20, the others of the last five.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import types
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import plot
import tasks
import torch
from common import RESULTS, ROOT, find_script, grouped, markdown, read_csv, spread, write_csv

CSV = RESULTS / "pieces" / "pieces.csv"
FLAGS = """--total-iterations 40 --batch-size 48 --minibatch-size 16 --max-response-length 60 --lr 1e-3 --ppo-epochs 4
    --eval-rows 0 --save-every 0 --track none"""
PPO = "--critic-lr 5e-3 --lam 0.95 --kl-reward-coef 0.3"
GRPO = "--kl-reward-coef 0.3 --kl-loss-coef 0"
WHITEN = "masked_whiten(raw_advantages, mask)"
WHOLE = "torch.where(mask, rewards.sum(1, keepdim=True), 0)"  # the score of a response for each of its tokens
HUNDRED = {"        # GAE (1506": "        rewards = 100 * rewards\n        # GAE (1506"}
LOGPROBS = {"policy(tokens[mb], mask[mb], args.entropy": "policy(tokens[mb], mask[mb].roll(1, 1)).roll(-1, 2)  # "}
VALUES = {"(critic, minibatches, tokens, mask)": "(critic, minibatches, tokens, mask.roll(1, 1)).roll(-1, 1)"}
VALUES["critic(tokens[mb], mask[mb])"] = "critic(tokens[mb], mask[mb].roll(1, 1)).roll(-1, 1)"
EOS = "        mask = mask & (tokens.roll(-1, 1) != tokenizer.eos_token_id)\n        # 6."  # it is not trained
ROWS = {  # name: (flags, {lines of the loop: what stands there instead})
    "base": (PPO, {}),
    "no-baseline": (f"{PPO} --critic-lr 0", {WHITEN: WHOLE}),
    "no-ratio": (PPO, {"= torch.maximum(unclipped, bounded)": "= -advantages[mb] * mb_logprobs"}),
    "no-clip": (f"{PPO} --clip-low 1 --clip-high 1e6", {}),
    "no-kl": (f"{PPO} --kl-reward-coef 1e-9", {}),  # not 0, so that it is measured
    "no-critic": (f"{PPO} --critic-lr 0", {WHITEN: f"masked_whiten({WHOLE}, mask)"}),
    "grpo": (f"{GRPO} --batch-size 6 --group-size 8", {}),
    "lambda-1": (f"{PPO} --lam 1", {}),
    "lambda-0": (f"{PPO} --lam 0", {}),
    "hundredfold": (PPO, HUNDRED),
    "hundredfold-raw": (PPO, HUNDRED | {WHITEN: "raw_advantages"}),
    "shift": (PPO, LOGPROBS),
    "shift-values": (PPO, VALUES),
    "no-eos": (PPO, {"        # 6.": EOS}),
    "score-at-end": (f"{PPO} --reward {ROOT}/benchmarks/tasks.py:lines_summed", {}),
    "score-at-end-lambda-1": (f"{PPO} --lam 1 --reward {ROOT}/benchmarks/tasks.py:lines_summed", {}),
    "kl-reward-0.1": (f"{PPO} --kl-reward-coef 0.1", {}),
    "kl-loss-0.03": (f"{PPO} --kl-reward-coef 0 --kl-loss-coef 0.03", {}),
    "kl-loss-0.1": (f"{PPO} --kl-reward-coef 0 --kl-loss-coef 0.1", {}),
    "kl-loss-0.3": (f"{PPO} --kl-reward-coef 0 --kl-loss-coef 0.3", {}),
    "grpo-2": (f"{GRPO} --batch-size 24 --group-size 2", {}),
    "grpo-4": (f"{GRPO} --batch-size 12 --group-size 4", {}),
    "grpo-16": (f"{GRPO} --batch-size 3 --group-size 16", {}),
}
METRICS = """reward/mean part/right part/unread actor/clipfrac actor/approx_kl actor/ratio_mean actor/entropy kl/mean
    critic/explained_variance responses time/elapsed"""


def edited(script, edits):
    """The script as a module, with other lines."""
    source = script.read_text()
    for line, other in edits.items():
        if line not in source:
            sys.exit(f"{script.name} has no {line!r} (any more)")
        source = source.replace(line, other)
    algo = types.ModuleType(script.stem)
    algo.__file__, sys.modules[script.stem] = str(script), algo
    exec(compile(source, script, "exec"), vars(algo))
    return algo


def train(name, seed, folder):
    """A run of this row's copy, in a process of its own."""
    torch.set_num_threads(1)
    flags, edits = ROWS[name]
    grpo = name.startswith("grpo")
    script = find_script("grpo_llm" if grpo else "process_reward_llm", folder)
    copy = edited(script, {"perf_counter": "process_time"} | edits)
    data = f"--model {folder}/model --dataset {folder}/train.jsonl --eval-dataset {folder}/test.jsonl"
    data += f" --reward {ROOT}/benchmarks/tasks.py:{'lines_summed' if grpo else 'lines'}"
    sys.argv[1:] = f"{data} {FLAGS} {flags} --seed {seed} --output-dir {folder} --run-name {name}-{seed}".split()
    copy.main(copy.parse_args())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="some of " + ", ".join(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    found = read_csv(CSV) if CSV.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OMP_NUM_THREADS"] = "1"  # with two, tasks.py would round otherwise and make another model
        tasks.make_lines(Path(folder))
        for seed in args.seeds:
            for name in args.rows or ROWS:
                if any(row["row"] == name and row["seed"] == str(seed) for row in found):
                    continue
                run = multiprocessing.get_context("fork").Process(target=train, args=(name, seed, Path(folder)))
                run.start()
                run.join()
                assert run.exitcode == 0, f"{name}, seed {seed}: exit code {run.exitcode}"
                for metrics in plot.read_run(Path(folder, f"{name}-{seed}"))[-40:]:
                    row = {"row": name, "seed": str(seed), "step": str(metrics["step"])}
                    found.append(row | {metric: f"{metrics.get(metric, 0):.4g}" for metric in METRICS.split()})
                write_csv(CSV, found)
    lines = []
    for name, rows in grouped(found, "row").items():
        line = [name, len(rows) // 40]
        for metric, first in ("part/right", 16), ("part/right", 36), ("part/unread", 36), ("reward/mean", 36):
            runs = grouped([row for row in rows if first <= int(row["step"]) < first + 5], "seed").values()
            line.append(spread([sum(float(row[metric]) for row in run) / 5 for run in runs], 1))
        lines.append([*line, spread([float(row["time/elapsed"]) for row in rows if row["step"] == "40"], 0)])
    print(markdown(["row", "seeds", "right, half", "right", "unread", "score", "seconds"], lines))


if __name__ == "__main__":
    main()
