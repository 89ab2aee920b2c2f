"""Bugs that are easy to write into a script like these: each replaces one function and says nothing.

    python benchmarks/campaigns/broken.py eos-untrained --total-iterations 8      the other flags are the script's

None of them raises an exception. Chapter 9 shows which metric gives each one away; symptoms.py runs them all. Some
would be stopped because sampler and training pass differ; here, the message is printed and the run continues.
"""

import copy
import importlib
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where the scripts are
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


if __name__ == "__main__":
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in BUGS:
        sys.exit("python benchmarks/campaigns/broken.py NAME [flags], NAME one of " + ", ".join(BUGS))
    script, break_it = BUGS[name]
    algo = importlib.import_module(script)
    go_on(algo)
    break_it(algo)
    algo.main(algo.parse_args())
