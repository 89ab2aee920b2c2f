"""Which metric gives which mistake away, and when? Runs that are broken on purpose, which chapter 9 explains.

    python benchmarks/campaigns/symptoms.py                   all that don't exist yet, two at a time
    python benchmarks/campaigns/symptoms.py one-step nan      only these
    python benchmarks/campaigns/symptoms.py bug eos-untrained --total-iterations 8      one bug; flags are the script's

Each run is one command on the bundled default with one process: flags that break a run, or a bug that is easy to write
into a script, which replaces a function or a few lines of the loop and says nothing. No bug raises an exception. Some
would be stopped because sampler and training pass differ; here, the message is printed and the run continues.

The metrics go to benchmarks/results/symptoms.csv, with four significant digits. When a run stops by itself, or an error
was let pass, the last line that it said is printed. notes/figures/09.py draws the runs.
"""

import argparse
import copy
import functools
import importlib
import shlex
import sys
import tempfile
import types
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

BUGS = {}  # name: (the function of ppo_llm.py that is replaced, by what)
EDITS = {  # name: (script, {lines of its loop: what a bug makes of them})
    # The sign of the advantage is wrong.
    "sign-flipped": ("ppo_llm", {"-advantages[mb] * mb_ratio": "advantages[mb] * mb_ratio"}),
    # No ratio and no clip: the plain policy gradient, from samples that become older with every step.
    "no-ratio": (
        "ppo_llm",
        {
            "mb_losses = torch.maximum(unclipped, bounded)": "mb_losses = -advantages[mb] * mb_logprobs",
            "clipped[epoch][mb] = (bounded > unclipped).float()": "clipped[epoch][mb] = 0",
        },
    ),
    # Groups are made of the answers to other prompts: rows lie prompt by prompt, not round by round.
    "groups-mixed": (
        "grpo_llm",
        {
            "groups = rewards.view(-1, args.group_size)": "groups = rewards.view(args.group_size, -1).T",
            "constant_groups(rewards, ": "constant_groups(groups.flatten(), ",
            "group_advantages.flatten()[:, None]": "group_advantages.T.flatten()[:, None]",
        },
    ),
}
MODELS = {}  # that a bug has seen


def replaces(place):
    """A bug in the place of this function, which it gets first."""

    def register(function):
        BUGS[function.__name__.replace("_", "-")] = place, function
        return function

    return register


@replaces("Policy.forward")
def logprobs_late(real, self, tokens, mask, *options):
    """Log-probs are read one position too late: action i gets that of the token after it."""
    return real(self, tokens, mask.roll(1, 1), *options).roll(-1, -1)


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


@replaces("load_model")
def reference_moves(real, name, auto_class, *rest, **options):
    """The reference is the policy itself: no copy was made."""
    if auto_class not in MODELS:
        model = real(name, auto_class, *rest, **options)
        model.requires_grad_ = lambda _: model  # otherwise the policy would be frozen, too
        MODELS[auto_class] = model
    return MODELS[auto_class]


def go_on(real, sentence):
    """The refusal of a sampler that differs from the training pass is printed, and the run goes on."""
    if "have a KL" not in sentence:
        real(sentence)
    print(f"error: {sentence}", file=sys.stderr)


def edited(script, edits):
    """The script as a module, with other lines."""
    path = ROOT / f"{script}.py"
    source = path.read_text()
    for line, other in edits.items():
        if line not in source:
            sys.exit(f"{path.name} has no {line!r} (any more)")
        source = source.replace(line, other)
    algo = types.ModuleType(script)
    algo.__file__, sys.modules[script] = str(path), algo
    exec(compile(source, path, "exec"), vars(algo))
    return algo


def run_bug(name, flags):
    if name in EDITS:
        algo = edited(*EDITS[name])
    else:
        algo, (place, function) = importlib.import_module("ppo_llm"), BUGS[name]
        kind, _, method = place.rpartition(".")
        owner = getattr(algo, kind) if kind else algo
        real = getattr(owner, method)
        setattr(owner, method, lambda *args, **options: function(real, *args, **options))
    algo.fail = functools.partial(go_on, algo.fail)
    sys.argv[1:] = flags
    algo.main(algo.parse_args())


# ----------------------------------------------------------------------------------------------------------- the runs

OURS = "benchmarks/campaigns/symptoms.py bug"
SYMPTOMS = {
    "wrong-column": "grpo_llm.py --reward benchmarks/rewards.py:exact --answer-column question --total-iterations 8",
    "cut-answers": "ppo_llm.py --max-response-length 12 --total-iterations 8",
    "one-step": "ppo_llm.py --minibatch-size 256 --total-iterations 8",
    "kl-explodes": "ppo_llm.py --lr 3e-3 --total-iterations 8",
    "nan": "ppo_llm.py --lr 1e18 --total-iterations 4",
    "critic-frozen": "ppo_llm.py --critic-lr 1e-7 --total-iterations 8",
    "entropy-collapse": "grpo_llm.py --lr 1e-3 --kl-loss-coef 0 --total-iterations 20",
    "entropy-low": "grpo_llm.py --temperature 0.3 --total-iterations 20",
    "four-epochs": "ppo_llm.py --ppo-epochs 4 --total-iterations 8",
    "no-ratio": f"{OURS} no-ratio --ppo-epochs 4 --total-iterations 8",
    "memory-rollout": "ppo_llm.py --batch-size 4096 --rollout-batch-size 4096 --total-iterations 1 --eval-every 0",
    "memory-held": "ppo_llm.py --batch-size 4096 --rollout-batch-size 128 --total-iterations 1 --eval-every 0",
    "rollout-slow": "ppo_llm.py --rollout-batch-size 4 --total-iterations 3",
}
SYMPTOMS |= {name: f"{OURS} {name} --total-iterations 8" for name in [*BUGS, *EDITS] if name not in SYMPTOMS}


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


def main():
    if sys.argv[1:2] == ["bug"]:
        return run_bug(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="some of " + ", ".join(SYMPTOMS))
    names = parser.parse_args().names
    if unknown := set(names) - SYMPTOMS.keys():
        parser.error(f"no run {', '.join(unknown)}")
    missing = [name for name in SYMPTOMS if name not in plot.read_table(RUNS)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(produce, names or missing))


if __name__ == "__main__":
    main()
