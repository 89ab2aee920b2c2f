"""Which metric gives which mistake away, and when? Runs that are broken on purpose, which chapter 9 explains.

    python benchmarks/campaigns/symptoms.py                   all that don't exist yet, two at a time
    python benchmarks/campaigns/symptoms.py one-step nan      only these
    python benchmarks/campaigns/symptoms.py table             compares them with five healthy seeds
    python benchmarks/campaigns/symptoms.py bug eos-untrained --total-iterations 8      one bug; flags are the script's

Each run is one command on the embedded default with one process: flags that break a run, or a bug that is easy to write
into a script, which replaces one function and says nothing. No bug raises an exception. Some would be stopped because
sampler and training pass differ; here, the message is printed and the run continues.

benchmarks/results/symptoms/ gets NAME.csv (the metrics, four significant digits), NAME.txt (the last line that the run
printed when it stopped by itself, or the error that was let pass) and, with `table`, table.md. notes/figures/09.py
draws them; a test checks that the chapter has these commands.

kl-negative and entropy-rises were made with version 0.2 (commit c9bdd21), whose scripts had --top-p. It is a variant
now, so their files stay as they are, and you cannot run them here.
"""

import argparse
import copy
import importlib
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import plot
import torch
from common import RESULTS, ROOT, read_csv
from learning import write_compact

OURS = "benchmarks/campaigns/symptoms.py bug"
SYMPTOMS = {
    "wrong-column": "grpo_llm.py --reward benchmarks/rewards.py:exact --answer-column question --total-iterations 8",
    "cut-answers": "ppo_llm.py --max-response-length 12 --total-iterations 8",
    "one-step": "ppo_llm.py --minibatch-size 256 --total-iterations 8",
    "kl-negative": "grpo_llm.py --top-p 0.6 --entropy-coef 0.1 --reward exact --answer-column question"
    " --lr 3e-5 --total-iterations 8",
    "kl-explodes": "ppo_llm.py --lr 3e-3 --total-iterations 8",
    "nan": "ppo_llm.py --lr 1e18 --total-iterations 4",
    "critic-frozen": "ppo_llm.py --critic-lr 1e-7 --total-iterations 8",
    "entropy-collapse": "grpo_llm.py --lr 1e-3 --kl-loss-coef 0 --total-iterations 20",
    "entropy-low": "grpo_llm.py --temperature 0.3 --total-iterations 20",
    "entropy-rises": "ppo_llm.py --top-p 0.6 --entropy-coef 1 --total-iterations 8",
    "four-epochs": "ppo_llm.py --ppo-epochs 4 --total-iterations 8",
    "no-ratio": f"{OURS} no-ratio --ppo-epochs 4 --total-iterations 8",
    "memory-rollout": "ppo_llm.py --batch-size 4096 --rollout-batch-size 4096 --total-iterations 1 --eval-every 0",
    "memory-held": "ppo_llm.py --batch-size 4096 --rollout-batch-size 128 --total-iterations 1 --eval-every 0",
    "rollout-slow": "ppo_llm.py --rollout-batch-size 4 --total-iterations 3",
}
BUGS_RUN = "logprobs-late sampler-colder sampler-stale dropout-on eos-missing eos-untrained score-misplaced"
BUGS_RUN = f"{BUGS_RUN} values-late padding-whitened sign-flipped reference-moves groups-mixed".split()
SYMPTOMS |= {name: f"{OURS} {name} --total-iterations 8" for name in BUGS_RUN}
# A healthy one that the bands have not seen: what it trips is a false alarm.
SYMPTOMS["ppo-seed-6"] = "ppo_llm.py --seed 6 --total-iterations 8"
OLD = "kl-negative", "entropy-rises"  # as they were run with version 0.2


def produce(name, results):
    """Run one symptom's command on one process; returns its exit code."""
    script, *flags = shlex.split(SYMPTOMS[name])
    with tempfile.TemporaryDirectory() as temporary:
        folder, errors = Path(temporary), Path(temporary) / "errors.txt"
        command = [sys.executable, str(ROOT / script), *flags, "--output-dir", temporary, "--run-name", "run"]
        command += ["--track", "none", "--save-every", "1000"]
        with open(errors, "w") as file:
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            run = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=file)
            _, status, usage = os.wait4(run.pid, 0)
        run.returncode = code = os.waitstatus_to_exitcode(status)
        said = errors.read_text().strip().splitlines()
        last = said[-1:] if code else [line for line in said if line.startswith("error: ")][:1]
        if last:
            (results / f"{name}.txt").write_text(last[0].replace(str(folder / "run"), f"runs/{name}") + "\n")
        if (folder / "run" / "metrics.jsonl").is_file():
            rows = plot.read_run(folder / "run")
            if not rows[-1].get("memory/peak_gib"):  # the scripts measure that of a GPU only
                rows[-1]["memory/peak_gib"] = usage.ru_maxrss / 2**20
            write_compact(rows, results / f"{name}.csv")
    return code


# ------------------------------------------------------------------------------------------------------------ the bugs

BUGS = {}  # name: (script, what breaks it)


def bug(script):
    def register(function):
        BUGS[function.__name__.replace("_", "-")] = script, function
        return function

    return register


@bug("ppo_llm")
def logprobs_late(algo):
    """Log-probs are read one position too late: action i gets that of the token after it."""
    forward = algo.Policy.forward
    algo.Policy.forward = lambda self, tokens, mask: tuple(
        x.roll(-1, 1) for x in forward(self, tokens, mask.roll(1, 1))
    )


@bug("ppo_llm")
def sampler_colder(algo):
    """The sampler is at temperature 0.7, for example from a generation_config that no log-prob knows."""
    sample = algo.sample_tokens
    algo.sample_tokens = lambda logits, u, temperature, *rest: sample(logits, u, 0.7 * temperature, *rest)


@bug("ppo_llm")
def sampler_stale(algo):
    """The sampler is a copy of the policy that never gets the new weights."""
    generate, copies = algo.generate, []

    def stale(model, *rest):
        if not copies:
            copies.append(copy.deepcopy(model))
        return generate(copies[0], *rest)

    algo.generate = stale


@bug("ppo_llm")
def dropout_on(algo):
    """Dropout of 0.1 in the attention: the checkpoint's config has it, and all models are in train mode."""
    load_model = algo.load_model

    def load(*args, **options):
        model = load_model(*args, **options)
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.1
        return model

    algo.load_model = load


@bug("ppo_llm")
def eos_missing(algo):
    """The EOS that the model writes does not end the sampling."""
    algo.collect_eos_ids = lambda model, tokenizer: [tokenizer.pad_token_id]


@bug("ppo_llm")
def eos_untrained(algo):
    """The mask ends before the EOS, as it does if the EOS is the padding token and all padding is masked."""
    to_batch = algo.to_batch

    def batch(rows, responses, device):
        tokens, mask, logprobs, lengths = to_batch(rows, responses, device)
        for b, response in enumerate(responses):
            if not response.truncated:
                mask[b, lengths[b] - 2] = False  # the state whose action is the last token
        return tokens, mask, torch.where(mask, logprobs, 0), lengths

    algo.to_batch = batch


@bug("ppo_llm")
def score_misplaced(algo):
    """The score is in the last column, which is the last token of the longest row only."""

    def place_scores(scores, mask):
        rewards = torch.zeros_like(mask, dtype=torch.float32)
        rewards[:, mask.any(0).nonzero().max()] = scores
        return rewards

    algo.place_scores = place_scores


@bug("ppo_llm")
def values_late(algo):
    """Values are read one position too late: the critic has already seen the action."""
    forward = algo.Critic.forward
    algo.Critic.forward = lambda self, tokens, mask: forward(self, tokens, mask.roll(1, 1)).roll(-1, 1)


@bug("ppo_llm")
def padding_whitened(algo):
    """Advantages are whitened over prompt and padding, too."""
    whiten = algo.masked_whiten
    algo.masked_whiten = lambda x, mask: torch.where(mask, whiten(x, torch.ones_like(mask)), 0)


@bug("ppo_llm")
def sign_flipped(algo):
    """The sign of the advantage is wrong."""
    loss = algo.policy_loss
    algo.policy_loss = lambda logprobs, old, advantages, *clips: loss(logprobs, old, -advantages, *clips)


@bug("ppo_llm")
def reference_moves(algo):
    """The reference is the policy itself: no copy was made."""
    load_model, models = algo.load_model, {}

    def load(name, auto_class, *rest, **options):
        if auto_class not in models:
            model = load_model(name, auto_class, *rest, **options)
            model.requires_grad_ = lambda _: model  # otherwise the policy would be frozen, too
            models[auto_class] = model
        return models[auto_class]

    algo.load_model = load


@bug("ppo_llm")
def no_ratio(algo):
    """No ratio and no clip: the plain policy gradient, from samples that become older with every step."""
    algo.policy_loss = lambda logprobs, old, advantages, *clips: (-advantages * logprobs, advantages > torch.inf)


@bug("grpo_llm")
def groups_mixed(algo):
    """Groups are made of the answers to other prompts: rows lie prompt by prompt, not round by round."""
    group_advantages = algo.group_advantages

    def mixed(scores, size, estimator):
        rounds = scores.view(size, -1).T.flatten()
        return group_advantages(rounds, size, estimator).view(-1, size).T.flatten()

    algo.group_advantages = mixed


def go_on(algo):
    """The refusal of a sampler that differs from the training pass is printed, and the run goes on."""
    fail = algo.fail

    def say(sentence):
        if "differ by" not in sentence:
            fail(sentence)
        print(f"error: {sentence}", file=sys.stderr)

    algo.fail = say


def run_bug(name, flags):
    script, break_it = BUGS[name]
    algo = importlib.import_module(script)
    go_on(algo)
    break_it(algo)
    sys.argv[1:] = flags
    algo.main(algo.parse_args())


# ----------------------------------------------------------------------------------------------------------- the table

# The band of a metric in iteration t: the range of five healthy seeds over t-2 ... t+2, half as wide again on either
# side. A run has left it when it is outside, on the same side, in two iterations one after the other, or exactly 0 in
# both where no healthy run is. The first of the two counts.
AROUND, WIDER, REPEATED = 2, 0.5, 2
COLUMNS = "reward/mean reward/total_mean advantage/std rollout/logprob_diff actor/ratio_max actor/ratio_mean"
COLUMNS += " actor/approx_kl actor/clipfrac actor/loss actor/grad_norm actor/entropy kl/mean response/length_mean"
COLUMNS = [*COLUMNS.split(), "critic/explained_variance"]
NOT_COMPARED = {"nan", "memory-rollout", "memory-held", "rollout-slow"}  # too few iterations


def read_metrics(path):
    """{metric: {iteration: value}} of a csv; no evaluations, times and constants."""
    rows = read_csv(path)
    names = [x for x in rows[0] if "/" in x and not re.match("time|throughput|memory|eval|.*/(lr|coef)$", x)]
    return {x: {int(row["step"]): float(row[x]) for row in rows if row[x] and row["step"] != "0"} for x in names}


def outside(run, seeds, metric, t):
    """1 above the band of these healthy seeds, -1 below it, 0 inside."""
    around = range(t - AROUND, t + AROUND + 1)
    found = [seed[metric][k] for seed in seeds for k in around if k in seed[metric]]
    value, low, high = run[metric][t], min(found), max(found)
    margin = WIDER * (high - low)
    if value == 0 and not low <= 0 <= high:  # a margin may reach beyond 0, where most metrics never are
        return -1 if low > 0 else 1
    return (value > high + margin) - (value < low - margin)


def leaves(run, seeds, metric, last=math.inf):
    """(first iteration outside the band, 1 above or -1 below), None if it stays inside up to iteration `last`."""
    sides = {t: outside(run, seeds, metric, t) for t in run.get(metric, {}) if t <= last}
    for t, side in sides.items():
        if side and all(sides.get(t + k) == side for k in range(REPEATED)):
            return t, side
    return None


def script_and_flags(name):
    """(script, bug or None, flags without the number of iterations) of a symptom."""
    command = SYMPTOMS[name]
    script, *flags = shlex.split(command.removeprefix(OURS))
    flags = flags[: flags.index("--total-iterations")]
    return (BUGS[script][0], script, flags) if command.startswith(OURS) else (Path(script).stem, None, flags)


def compare(results):
    """{symptom: {metric: (iteration, side)}}; false alarms of healthy seeds against the other four, of how many."""
    healthy = {f"{x}_llm": [read_metrics(f) for f in sorted((results / x).glob("seed_*.csv"))] for x in ("ppo", "grpo")}
    found, alarms, tried = {}, [], 0
    for name in (name for name in SYMPTOMS if name not in NOT_COMPARED):
        run, seeds = read_metrics(results / "symptoms" / f"{name}.csv"), healthy[script_and_flags(name)[0]]
        found[name] = {metric: out for metric in seeds[0] if (out := leaves(run, seeds, metric))}
    for script, seeds in healthy.items():
        for k, run in enumerate(seeds):
            for metric in run:
                tried += 1
                if leaves(run, seeds[:k] + seeds[k + 1 :], metric, 12):
                    alarms.append((f"{script.partition('_')[0].upper()}'s seed", k + 1, metric))
    return found, alarms, tried


def make_table(results):
    """Markdown: a sentence on false alarms, and a row for each broken run: first iterations outside a band."""
    found, alarms, tried = compare(results)
    said = ", ".join(f"`{metric}` of {script} {seed}" for script, seed, metric in alarms)
    unseen = len(found.pop("ppo-seed-6"))
    about = f"We compared each healthy seed with the other four: {len(alarms)} of {tried} metrics left its band within "
    about += f"12 iterations{' (' * bool(said)}{said}{')' * bool(said)}, and of a sixth seed of PPO {unseen or 'none'}."
    heads = [name if name.endswith(("/mean", "/std")) else name.split("/")[1] for name in COLUMNS]
    lines = [["broken run", *(f"`{head}`" for head in heads)], ["---"] * (1 + len(heads))]
    for name, outs in found.items():
        _, bug, flags = script_and_flags(name)
        words = [re.split(r"[:,]|\.(?!\d)", BUGS[bug][1].__doc__)[0]] if bug else []
        cells = {metric: "↓↑"[side > 0] + str(first) for metric, (first, side) in outs.items()}
        label = f"**{name}** " + ", ".join(words + [f"`{shlex.join(flags)}`"] * bool(flags))
        lines.append([label, *(cells.get(metric, "") for metric in COLUMNS)])
    return "\n".join([about, "", *("|" + "|".join(line) + "|" for line in lines), ""])


def main():
    if sys.argv[1:2] == ["bug"]:
        if sys.argv[2:3] == [] or sys.argv[2] not in BUGS:
            sys.exit(f"python {OURS} NAME [flags], NAME one of {', '.join(BUGS)}")
        return run_bug(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="table, or some of " + ", ".join(SYMPTOMS))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of symptoms/, and of the bands' runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    folder = args.results / "symptoms"
    folder.mkdir(parents=True, exist_ok=True)
    if args.names == ["table"]:
        (folder / "table.md").write_text(make_table(args.results))
        return
    refused = [name for name in args.names if name in OLD]
    if refused:
        parser.error(f"{', '.join(refused)}: made with version 0.2, see above")
    missing = [name for name in SYMPTOMS if name not in OLD and not (folder / f"{name}.csv").is_file()]
    names = args.names or missing

    def run(name):
        print(f"{name}: exit code {produce(name, folder)}", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run, names))


if __name__ == "__main__":
    main()
