"""Which metric gives which mistake away, and when? Runs that are broken on purpose, which chapter 9 explains.

    python benchmarks/campaigns/symptoms.py                   all that don't exist yet, two at a time
    python benchmarks/campaigns/symptoms.py one-step nan      only these
    python benchmarks/campaigns/symptoms.py table             compares them with five healthy seeds
    python benchmarks/campaigns/symptoms.py bug eos-untrained --total-iterations 8      one bug; flags are the script's

Each run is one command on the embedded default with one process: flags that break a run, or a bug that is easy to write
into a script, which replaces one function and says nothing. No bug raises an exception. Some would be stopped because
sampler and training pass differ; here, the message is printed and the run continues.

The metrics go to benchmarks/results/symptoms.csv, with four significant digits; `table` writes symptoms.md next to it.
When a run stops by itself, or an error was let pass, the last line that it said is printed. notes/figures/09.py draws
the runs.

kl-negative and entropy-rises were made with version 0.2 (commit c9bdd21), whose scripts had --top-p. It is a variant
now, so they stay as they are, and you cannot run them here.
"""

import argparse
import copy
import functools
import importlib
import math
import re
import shlex
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import common
import plot
import torch
from common import RESULTS, ROOT
from learning import keep_run

RUNS = RESULTS / "symptoms.csv"

# ------------------------------------------------------------------------------------------------------------ the bugs

BUGS = {}  # name: (script, the function in it that is replaced, by what)
MODELS = {}  # that a bug has seen


def replaces(place, script="ppo_llm"):
    """A bug in the place of this function of the script, which it gets first."""

    def register(function):
        BUGS[function.__name__.replace("_", "-")] = script, place, function
        return function

    return register


@replaces("Policy.forward")
def logprobs_late(real, self, tokens, mask):
    """Log-probs are read one position too late: action i gets that of the token after it."""
    logprobs, entropy = real(self, tokens, mask.roll(1, 1))
    return logprobs.roll(-1, 1), entropy.roll(-1, 1)


@replaces("sample_tokens")
def sampler_colder(real, logits, u, temperature, *rest):
    """The sampler is at temperature 0.7, for example from a generation_config that no log-prob knows."""
    return real(logits, u, 0.7 * temperature, *rest)


@replaces("generate")
def sampler_stale(real, model, *rest):
    """The sampler is a copy of the policy that never gets the new weights."""
    if not MODELS:
        MODELS["first"] = copy.deepcopy(model)
    return real(MODELS["first"], *rest)


@replaces("load_model")
def dropout_on(real, *args, **options):
    """Dropout of 0.1 in the attention: the checkpoint's config has it, and all models are in train mode."""
    model = real(*args, **options)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    return model


@replaces("collect_eos_ids")
def eos_missing(_, model, tokenizer):
    """The EOS that the model writes does not end the sampling."""
    return [tokenizer.pad_token_id]


@replaces("to_batch")
def eos_untrained(real, rows, responses, device):
    """The mask ends before the EOS, as it does if the EOS is the padding token and all padding is masked."""
    tokens, mask, logprobs, lengths = real(rows, responses, device)
    for b, response in enumerate(responses):
        if not response.truncated:
            mask[b, lengths[b] - 2] = False  # the state whose action is the last token
    return tokens, mask, torch.where(mask, logprobs, 0), lengths


@replaces("place_scores")
def score_misplaced(_, scores, mask):
    """The score is in the last column, which is the last token of the longest row only."""
    rewards = torch.zeros_like(mask, dtype=torch.float32)
    rewards[:, mask.any(0).nonzero().max()] = scores
    return rewards


@replaces("Critic.forward")
def values_late(real, self, tokens, mask):
    """Values are read one position too late: the critic has already seen the action."""
    return real(self, tokens, mask.roll(1, 1)).roll(-1, 1)


@replaces("masked_whiten")
def padding_whitened(real, x, mask):
    """Advantages are whitened over prompt and padding, too."""
    return torch.where(mask, real(x, torch.ones_like(mask)), 0)


@replaces("policy_loss")
def sign_flipped(real, logprobs, old, advantages, *rest):
    """The sign of the advantage is wrong."""
    return real(logprobs, old, -advantages, *rest)


@replaces("load_model")
def reference_moves(real, name, auto_class, *rest, **options):
    """The reference is the policy itself: no copy was made."""
    if auto_class not in MODELS:
        model = real(name, auto_class, *rest, **options)
        model.requires_grad_ = lambda _: model  # otherwise the policy would be frozen, too
        MODELS[auto_class] = model
    return MODELS[auto_class]


@replaces("policy_loss")
def no_ratio(_, logprobs, old, advantages, *rest):
    """No ratio and no clip: the plain policy gradient, from samples that become older with every step."""
    return -advantages * logprobs, advantages > torch.inf


@replaces("group_advantages", "grpo_llm")
def groups_mixed(real, scores, size, estimator):
    """Groups are made of the answers to other prompts: rows lie prompt by prompt, not round by round."""
    rounds = scores.view(size, -1).T.flatten()
    return real(rounds, size, estimator).view(-1, size).T.flatten()


def go_on(real, sentence):
    """The refusal of a sampler that differs from the training pass is printed, and the run goes on."""
    if "differ by" not in sentence:
        real(sentence)
    print(f"error: {sentence}", file=sys.stderr)


def run_bug(name, flags):
    script, place, function = BUGS[name]
    algo = importlib.import_module(script)
    algo.fail = functools.partial(go_on, algo.fail)
    kind, _, method = place.rpartition(".")
    owner = getattr(algo, kind) if kind else algo
    real = getattr(owner, method)
    setattr(owner, method, lambda *args, **options: function(real, *args, **options))
    sys.argv[1:] = flags
    algo.main(algo.parse_args())


# ----------------------------------------------------------------------------------------------------------- the runs

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
SYMPTOMS |= {name: f"{OURS} {name} --total-iterations 8" for name in BUGS if name not in SYMPTOMS}
# A healthy one that the bands have not seen: what it trips is a false alarm.
SYMPTOMS["ppo-seed-6"] = "ppo_llm.py --seed 6 --total-iterations 8"


def produce(name):
    """Runs one symptom's command on one process."""
    script, *flags = shlex.split(SYMPTOMS[name])
    with tempfile.TemporaryDirectory() as temporary:
        run_dir = Path(temporary) / "run"
        command = [sys.executable, ROOT / script, *flags, "--output-dir", temporary, "--run-name", "run"]
        try:
            said, peak = common.run([*command, "--track", "none", "--save-every", "1000"])
            last = [line for line in said.splitlines() if line.startswith("error: ")][:1]
        except SystemExit as error:  # with the last of what it printed
            last, peak = str(error).splitlines()[-1:], 0
        if (run_dir / "metrics.jsonl").is_file():
            rows = plot.read_run(run_dir)
            if not rows[-1].get("memory/peak_gib"):  # the scripts measure that of a GPU only
                rows[-1]["memory/peak_gib"] = peak / 2**30
            keep_run(RUNS, rows, "run", name)
    print(f"{name}: {last or 'done'}", flush=True)


# ----------------------------------------------------------------------------------------------------------- the table

# The band of a metric in iteration t: the range of five healthy seeds over t-2 ... t+2, half as wide again on either
# side. A run has left it when it is outside, on the same side, in two iterations one after the other, or exactly 0 in
# both where no healthy run is. The first of the two counts.
AROUND, WIDER, REPEATED = 2, 0.5, 2
COLUMNS = "reward/mean reward/total_mean advantage/std rollout/logprob_diff actor/ratio_max actor/ratio_mean"
COLUMNS += " actor/approx_kl actor/clipfrac actor/loss actor/grad_norm actor/entropy kl/mean response/length_mean"
COLUMNS = [*COLUMNS.split(), "critic/explained_variance"]
NOT_COMPARED = {"nan", "memory-rollout", "memory-held", "rollout-slow"}  # too few iterations


def by_metric(rows):
    """{metric: {iteration: value}} of a run; no evaluations, times and constants."""
    names = sorted({x for row in rows for x in row if "/" in x})
    names = [x for x in names if not re.match("time|throughput|memory|eval|.*/(lr|coef)$", x)]
    return {x: {int(row["step"]): row[x] for row in rows if x in row and row["step"] > 0} for x in names}


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


def make_table(results):
    """Markdown: a sentence on false alarms, and a row for each broken run: first iterations outside a band."""
    healthy = {f"{x}_llm": [by_metric(run) for run in plot.read_runs(results / f"{x}.csv")] for x in ("ppo", "grpo")}
    broken = plot.read_table(results / "symptoms.csv")
    alarms, tried = [], 0  # of healthy seeds against the other four
    for script, seeds in healthy.items():
        for k, run in enumerate(seeds):
            out = [metric for metric in run if leaves(run, seeds[:k] + seeds[k + 1 :], metric, 12)]
            alarms += [f"`{metric}` of {script.partition('_')[0].upper()}'s seed {k + 1}" for metric in out]
            tried += len(run)
    heads = [name if name.endswith(("/mean", "/std")) else name.split("/")[1] for name in COLUMNS]
    lines = [["broken run", *(f"`{head}`" for head in heads)], ["---"] * (1 + len(heads))]
    for name in (name for name in SYMPTOMS if name not in NOT_COMPARED):
        script, bug, flags = script_and_flags(name)
        run = by_metric(broken[name])
        outs = {metric: leaves(run, healthy[script], metric) for metric in healthy[script][0]}
        outs = {metric: "↓↑"[out[1] > 0] + str(out[0]) for metric, out in outs.items() if out}
        words = [re.split(r"[:,]|\.(?!\d)", BUGS[bug][2].__doc__)[0]] if bug else []
        label = f"**{name}** " + ", ".join(words + [f"`{shlex.join(flags)}`"] * bool(flags))
        lines.append([label, *(outs.get(metric, "") for metric in COLUMNS)])
    lines.pop()  # the healthy run comes last: its alarms, `outs`, are in the sentence
    about = f"We compared each healthy seed with the other four: {len(alarms)} of {tried} metrics left its band within "
    about += f"12 iterations{' (' * bool(alarms)}{', '.join(alarms)}{')' * bool(alarms)}, and of a sixth seed of PPO "
    about += f"{len(outs) or 'none'}."
    return "\n".join([about, "", *("|" + "|".join(line) + "|" for line in lines), ""])


def main():
    if sys.argv[1:2] == ["bug"]:
        return run_bug(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="table, or some of " + ", ".join(SYMPTOMS))
    names = parser.parse_args().names
    if names == ["table"]:
        (RESULTS / "symptoms.md").write_text(make_table(RESULTS))
    else:
        missing = SYMPTOMS.keys() - plot.read_table(RUNS)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(produce, names or missing))


if __name__ == "__main__":
    main()
