"""A real pretrained model learns to write sadder stories, with the KL held at a target and without (then it collapses).

    export LLM_RL_DATA=folder VADER_LEXICON=folder/vader/vader_lexicon.txt
    python benchmarks/campaigns/stories.py [--seeds 1 2 3]

The folder holds stories260K/ (a TinyStories model of 0.29M parameters: karpathy's tinyllamas in transformers' format)
and story_prompts/story_{train,test}.parquet (openings, column prompt_text). The reward is benchmarks/rewards.py:sad.
Each run is one launch on two processes. benchmarks/results/stories/ gets the metrics of every run, a table, and stories
of the first seed before and after training: those to the alphabetically first ten openings.

The runs in which the KL is held, ppo and grpo, were made with version 0.2 (commit c9bdd21 has their flags): they need
the adaptive KL controller and the linear schedule, which are variants now. Their results stay in the table and the
figure; you can make the runs without KL, and those with a price on it, here.
"""

import argparse
import itertools
import os
import re
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import common
import learning
import plot

RESULTS = common.RESULTS / "stories"
SHARED = "--max-response-length 96 --minibatch-size 32 --eval-every 10 --prompt-column prompt_text"
SHARED += " --answer-column None --microbatch-tokens 1024 --lr 1e-4 --total-iterations 40"
PPO = f"ppo_llm.py {SHARED} --batch-size 128 --critic-lr 1e-3 --lam 0.95"
GRPO = f"grpo_llm.py {SHARED} --batch-size 16 --group-size 8 --estimator dr_grpo --kl-loss-coef 0"
OLD = "ppo", "grpo"  # runs of version 0.2
# A coefficient of 1e-9 only measures the KL.
RUNS = {"ppo-kl-off": f"{PPO} --kl-reward-coef 1e-9", "grpo-kl-off": f"{GRPO} --kl-reward-coef 1e-9"}
for price in 0.003, 0.01, 0.03, 0.1, 0.3:  # for chapter 1
    RUNS[f"ppo-kl-{price}"] = f"{PPO} --kl-reward-coef {price}"


def distinct_bigrams(texts):
    """Number of different pairs of neighbouring words over the number of pairs, in all texts together."""
    words = [re.findall(r"[a-z']+", text.lower()) for text in texts]
    pairs = [pair for line in words for pair in itertools.pairwise(line)]
    return len(set(pairs)) / max(1, len(pairs))


def run_once(name, seed, data):
    """Trains, writes RESULTS/name/seed_K.csv, and returns the evaluations' completions before and after."""
    script, *flags = shlex.split(RUNS[name])
    with tempfile.TemporaryDirectory() as runs:
        words = ["--seed", seed, *flags, "--model", f"{data}/stories260K"]
        words += ["--dataset", f"{data}/story_prompts/story_train.parquet"]
        words += ["--eval-dataset", f"{data}/story_prompts/story_test.parquet"]
        words += ["--reward", f"{common.ROOT}/benchmarks/rewards.py:sad"]
        rows = learning.train(common.ROOT / script, words, Path(runs) / "run", processes=2)
        files = sorted((Path(runs) / "run" / "completions").glob("eval_sampled_*.jsonl"))
        evaluations = {int(file.stem.rpartition("_")[2]): common.read_lines(file) for file in files}
    for row in rows:
        if evaluation := evaluations.get(row["step"]):
            row["eval/distinct_bigrams"] = distinct_bigrams([line["response"] for line in evaluation])
            row["eval/score_sampled_std"] = statistics.stdev(line["score"] for line in evaluation)
    (RESULTS / name).mkdir(parents=True, exist_ok=True)
    learning.write_compact(rows, RESULTS / name / f"seed_{seed}.csv")
    return evaluations[0], evaluations[max(evaluations)]


def make_table():
    head = ["", "seed", "reward before", "after", "sd of a story before", "rise in sd", "KL at the end"]
    head += ["distinct bigrams before", "after", "change", "seconds"]
    lines = []
    for name in (*OLD, *RUNS):
        for path in sorted((RESULTS / name).glob("seed_*.csv")):
            (rows,) = plot.read_runs(path)
            first, last = rows[0], rows[-1]
            before, after = (row["eval/score_sampled"] for row in (first, last))
            pairs = [row["eval/distinct_bigrams"] for row in (first, last)]
            kl = statistics.mean(row["kl/mean"] for row in rows[-10:])  # of the last ten iterations
            spread = first["eval/score_sampled_std"]
            numbers = [f"{x:.3f}" for x in (before, after, spread)] + [f"{(after - before) / spread:.1f}", f"{kl:.3f}"]
            change = f"{100 * (pairs[1] / pairs[0] - 1):+.0f}%"
            numbers += [f"{pairs[0]:.3f}", f"{pairs[1]:.3f}", change, f"{last['time/launch_to_exit']:.0f}"]
            lines.append([name, path.stem[5:], *numbers])
    return common.markdown(head, lines)


def show_stories(name, seed, before, after, count):
    after = {row["prompt"]: row for row in after}
    text = f"## {name}, seed {seed}\n"
    for row in sorted(before, key=lambda row: row["prompt"])[:count]:
        other = after[row["prompt"]]
        for when, line in (("before", row), ("after", other)):
            response = " ".join(line["response"].split())
            text += f"\n{when} ({line['score']:+.2f}): **{row['prompt']}** {response}\n"
        text += "\n---\n"
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    if not os.environ.get("LLM_RL_DATA"):
        sys.exit("error: set LLM_RL_DATA to the folder with stories260K/ and story_prompts/")
    for seed in args.seeds:
        for name in RUNS:
            before, after = run_once(name, seed, os.environ["LLM_RL_DATA"])
            if seed == args.seeds[0]:
                text = show_stories(name, seed, before, after, 3 if name.endswith("off") else 10)
                (RESULTS / name / "stories.md").write_text(text)
            (RESULTS / "table.md").write_text(make_table() + "\n")
            print(f"{name}, seed {seed}: done", flush=True)
    folders = [str(RESULTS / name) for name in (*OLD, *RUNS)]
    metrics = ["eval/score_sampled", "kl/mean", "eval/distinct_bigrams"]
    sys.argv = ["plot.py", *folders, "--metrics", *metrics, "--output", str(RESULTS.parent / "stories.png")]
    plot.main()
    print(make_table())


if __name__ == "__main__":
    main()
