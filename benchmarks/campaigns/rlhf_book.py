"""The embedded task in the code of rlhfbook.com, in turns with ours: seconds of an iteration, and what is learned.

    git clone https://github.com/natolambert/rlhf-book
    python benchmarks/campaigns/rlhf_book.py rlhf-book/code --python BOOK/bin/python

BOOK is an environment with what their pyproject.toml lists. Their loop, sampler, losses and optimizer run as they are,
in one process on one thread as ours do. (Of commit a66b0bf: they sample one prompt at a time, and always recompute
activations.) Given to them are our model in float32, questions and verifier (theirs want tags), the sizes and learning
rate of our defaults, and sampling from the whole distribution at temperature 1. As in their configs, critic and policy
have one optimizer, and there is no KL; ours has none here either.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
from common import ROOT, TINY

# Runs in their environment, and writes a line per iteration: seconds since the one before, mean score.
THEIRS = """
import json, sys, time
from pathlib import Path
task = json.loads(Path(sys.argv[1]).read_text())
sys.path.insert(0, task["code"])
import torch, transformers, wandb
from policy_gradients import rollout, train, utils
from policy_gradients.config import Config

torch.set_num_threads(1)
utils.console.quiet = True
load = transformers.AutoModelForCausalLM.from_pretrained
utils.AutoModelForCausalLM.from_pretrained = lambda *a, **k: load(*a, **k | {"torch_dtype": torch.float32})
template = "{% for message in messages %}{% if message.role == 'user' %}{{ message.content }}{% endif %}{% endfor %}"
real, real_values = utils.load_model, utils.get_val_model


def load_model(*args, **kwargs):
    model, tokenizer = real(*args, **kwargs)
    tokenizer.chat_template = template
    return model, tokenizer


def get_val_model(*args):
    model = real_values(*args)
    return model and model.float()  # its new head


def score(dataset, completions, entries):
    return [float(c.rsplit("####", 1)[-1].strip() == e["answer"]) for c, e in zip(completions, entries)]


def log(values):
    if "avg_correctness" in values:  # the responses of an iteration are there; the one before has ended
        times.append((time.perf_counter(), values["avg_correctness"]))


times = []
train.load_model, train.get_val_model = load_model, get_val_model
train.create_dataset = lambda cfg: task["rows"]
train.wandb.init, train.wandb.log = lambda **kwargs: None, log
utils._correctness_reward = score
train.main(Config(**task["config"]))
times.append((time.perf_counter(), None))
begin, lines = [moment for moment, _ in times], [score for _, score in times]
with open(task["result"], "w") as file:
    for i in range(len(times) - 1):
        file.write(json.dumps({"seconds": begin[i + 1] - begin[i], "score": lines[i]}) + "\\n")
"""


def run_theirs(args, algorithm, iterations, seed, folder):
    rows = [json.loads(line) for line in (TINY / "train.jsonl").read_text().splitlines()]
    rows = [{"question": row["question"], "answer": row["answer"].split("#### ")[1]} for row in rows]
    prompts, group = (32, 8) if algorithm == "grpo" else (256, 1)
    config = {"data": {"specs": [], "size": 0}, "loss": algorithm, "model_name": str(TINY / "model"), "seed": seed}
    config |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 64, "lr": 1.5e-4, "device": "cpu"}
    config |= {"prompts_per_step": prompts, "num_rollouts": group, "train_batch_size": 64, "batch_acc": 1}
    config |= {"format_weight": 0.0, "gamma": 1.0, "lam": 0.95, "vf_coef": 0.5, "clip_eps_val": 0.4}
    task = {"code": str(args.code.resolve()), "rows": rows[: prompts * iterations], "config": config}
    task["result"] = str(folder / "theirs.jsonl")
    (folder / "task.json").write_text(json.dumps(task))
    (folder / "theirs.py").write_text(THEIRS)
    common.run([args.python, folder / "theirs.py", folder / "task.json"], HF_HUB_OFFLINE="1")
    return common.read_lines(task["result"])


def run_ours(algorithm, iterations, seed, folder):
    name = f"{algorithm}-{seed}"
    words = f"--total-iterations {iterations} --eval-every 0 --save-every 0 --track none --seed {seed}"
    words += f" --run-name {name} --kl-loss-coef 0 --kl-reward-coef 0 --output-dir {folder}"
    common.run([sys.executable, ROOT / f"{algorithm}_llm.py", *words.split()])
    lines = common.read_lines(folder / name / "metrics.jsonl")[1:]
    return [{"seconds": line["time/iteration"], "score": line["reward/mean"]} for line in lines]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("code", type=Path)
    parser.add_argument("--python", required=True)
    parser.add_argument("--iterations", type=int, nargs=2, default=(20, 5), metavar=("GRPO", "PPO"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    found = {}
    for seed in args.seeds:
        for algorithm, iterations in zip(("grpo", "ppo"), args.iterations):
            with tempfile.TemporaryDirectory() as folder:
                ours = run_ours(algorithm, iterations, seed, Path(folder))
                theirs = run_theirs(args, algorithm, iterations, seed, Path(folder))
            for name, lines in ("ours", ours), ("theirs", theirs):
                seconds = statistics.median(line["seconds"] for line in lines[1:-1])
                score = statistics.mean(line["score"] for line in lines[-3:])
                found.setdefault((algorithm, iterations, name), []).append((seconds, score))
            print(algorithm, seed, {key[2]: values[-1] for key, values in found.items()}, flush=True)
    rows = []
    for (algorithm, iterations, name), values in found.items():
        seconds, scores = zip(*values)
        ratios = [own[0] / other[0] for own, other in zip(found[algorithm, iterations, "ours"], values)]
        spread = common.spread(seconds, 2, statistics.median), common.spread(scores), common.spread(ratios, 3)
        rows.append([f"{algorithm.upper()}, {name}", iterations, *spread])
    head = ["", "iterations", "iteration, s", "score in the last three", "ours takes, of its time"]
    seeds = ", ".join(map(str, args.seeds))
    text = f"`python {Path(__file__).relative_to(ROOT)}`, in turns, seeds {seeds}. Without a KL.\n"
    text += "Theirs samples one prompt at a time, and always recomputes activations (commit a66b0bf).\n\n"
    text += common.markdown(head, rows) + "\n"
    (common.RESULTS / "speed" / "rlhf_book.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
