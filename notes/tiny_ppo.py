"""PPO for language models: the core alone. Chapter 1 of the notes builds this file piece by piece.

    python notes/tiny_ppo.py [SEED]

The bundled model (0.86M parameters) learns to show its work in word problems; 40 iterations, 15 minutes on a CPU.
One process, no options, nothing saved: to try something, copy ppo_llm.py, which is this with all that a real run needs.

Shapes: B responses, each in a row of L tokens with its prompt. What belongs to an action, the sampled token i + 1,
stands in column i of a (B,L-1) tensor. `mask` is true there, up to and including the EOS.
"""

import json
import re
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

TINY = Path(__file__).resolve().parents[1] / "benchmarks" / "tiny"
BATCH_SIZE = 256  # responses in an iteration
MINIBATCH_SIZE = 64  # responses in an optimizer step
MAX_RESPONSE_LENGTH = 64  # tokens
LR, CRITIC_LR = 1.5e-4, 1e-3
KL_COEF = 0.001  # what distance from the reference costs
LAM = 0.95  # of GAE: 1 trusts what came, 0 the critic's forecasts
CLIP = 0.2
MAX_GRAD_NORM = 1.0

tokenizer = AutoTokenizer.from_pretrained(TINY / "model", padding_side="left")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


# --- The algorithm ---------------------------------------------------------------------------------------------------


def main(seed, iterations=40):
    torch.manual_seed(seed)
    # eval(): with dropout two passes over the same tokens would differ, and the ratio would not begin at 1.
    actor = AutoModelForCausalLM.from_pretrained(TINY / "model").eval()
    reference = AutoModelForCausalLM.from_pretrained(TINY / "model").eval()
    critic = load_critic()
    actor_optimizer = torch.optim.AdamW(actor.parameters(), lr=LR, weight_decay=0.0)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=CRITIC_LR, weight_decay=0.0)
    train_rows = read_rows("train.jsonl")
    test_rows = read_rows("test.jsonl")
    print(f"before: {evaluate(actor, test_rows):.3f} of the test problems right, answered greedily")

    for iteration in range(1, iterations + 1):
        # 1. Rollout: the policy of the moment answers some prompts.
        chosen = torch.randperm(len(train_rows))[:BATCH_SIZE]
        rows = [train_rows[i] for i in chosen]
        tokens, mask = sample(actor, rows)  # [1.1]

        # 2. Reward: one score for each response.
        scores = score(tokens, mask, rows)  # (B,)

        # 3. and 4. What the policy that sampled, the reference and the critic say of these tokens: constants below.
        with torch.no_grad():
            old_logprobs = log_probs(actor, tokens)  # (B,L-1)
            ref_logprobs = log_probs(reference, tokens)
            values = forecasts(critic, tokens)

        # 5. Rewards of the actions, advantages, and the critic's targets.
        rewards = token_rewards(scores, mask, old_logprobs, ref_logprobs)  # [1.6]
        advantages, returns = gae(rewards, values, mask)  # [1.7]
        advantages = whiten(advantages, mask)  # [1.7]

        for minibatch in torch.arange(BATCH_SIZE).split(MINIBATCH_SIZE):
            # 6. Actor: make good tokens likelier, until the clip takes their gradient.
            logprobs = log_probs(actor, tokens[minibatch])
            losses = policy_losses(logprobs, old_logprobs[minibatch], advantages[minibatch])
            loss = losses[mask[minibatch]].mean()
            step(actor_optimizer, loss)

            # 7. Critic: forecast better.
            errors = forecasts(critic, tokens[minibatch]) - returns[minibatch]
            loss = errors[mask[minibatch]].square().mean() / 2
            step(critic_optimizer, loss)

        kl = (old_logprobs - ref_logprobs)[mask].mean()
        length = mask.sum(1).float().mean()
        print(f"{iteration:3}  score {scores.mean():.3f}  KL {kl:.4f}  length {length:.1f}", flush=True)

    print(f"after: {evaluate(actor, test_rows):.3f} of the test problems right, answered greedily")


# --- Mathematics -----------------------------------------------------------------------------------------------------


def token_rewards(scores, mask, old_logprobs, ref_logprobs):
    """Minus the KL penalty at every action, and the score at the last one: (B,L-1)."""
    kl = old_logprobs - ref_logprobs
    rewards = -KL_COEF * kl * mask
    columns = torch.arange(mask.shape[1])
    last = (mask * columns).argmax(1)
    rewards[torch.arange(len(scores)), last] += scores
    return rewards


def gae(rewards, values, mask):
    """Generalised advantage estimation (1506.02438), from the last action back: advantages, returns (B,L-1)."""
    advantages = torch.zeros_like(rewards)
    advantage = torch.zeros(len(rewards))
    next_value = torch.zeros(len(rewards))  # after the last action there is nothing to come
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + next_value - values[:, t]
        advantage = torch.where(mask[:, t], delta + LAM * advantage, 0.0)
        next_value = torch.where(mask[:, t], values[:, t], 0.0)
        advantages[:, t] = advantage
    return advantages, advantages + values


def whiten(advantages, mask):
    """Shifted and scaled to mean 0 and variance 1 over all actions of the batch."""
    actions = advantages[mask]
    return (advantages - actions.mean()) / (actions.std() + 1e-8)


def policy_losses(logprobs, old_logprobs, advantages):
    """The clipped objective (1707.06347, eq. 7), with a minus, because optimizers minimise."""
    ratio = (logprobs - old_logprobs).exp()  # [1.4]
    clipped_ratio = ratio.clamp(1 - CLIP, 1 + CLIP)
    return torch.max(-advantages * ratio, -advantages * clipped_ratio)  # [1.5]


def step(optimizer, loss):
    """One optimizer step; returns the norm of the gradient before it was cut."""
    optimizer.zero_grad()
    loss.backward()
    parameters = optimizer.param_groups[0]["params"]
    norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
    optimizer.step()
    return norm


# --- Models ----------------------------------------------------------------------------------------------------------


def load_critic():
    """The policy's layers, and a head, `score`, that forecasts 0 for everything until it is trained."""
    critic = AutoModelForTokenClassification.from_pretrained(TINY / "model", num_labels=1).eval()
    torch.nn.init.zeros_(critic.score.weight)
    torch.nn.init.zeros_(critic.score.bias)
    return critic


def attention(tokens):
    """What a model has to be told of padded rows: which tokens are there, and at which positions."""
    there = tokens != tokenizer.pad_token_id
    positions = there.cumsum(1) - 1
    return {"attention_mask": there, "position_ids": positions.clamp(min=0)}


def log_probs(model, tokens):
    """Column i: the log-prob of token i + 1 after the tokens up to i."""
    logits = model(tokens, **attention(tokens)).logits  # (B,L,V)
    logprobs = logits[:, :-1].log_softmax(-1)  # of all tokens that could follow
    labels = tokens[:, 1:, None]  # [1.11]
    return logprobs.gather(-1, labels).squeeze(-1)  # [1.2]


def forecasts(critic, tokens):
    """Column i: the return that the critic expects after the tokens up to i, before token i + 1."""
    values = critic(tokens, **attention(tokens)).logits  # (B,L,1)
    return values[:, :-1, 0]


# --- Responses and their scores --------------------------------------------------------------------------------------


@torch.no_grad()
def sample(model, rows, greedy=False):
    """tokens (B,L), prompts padded at their beginning and responses at their end; mask (B,L-1)."""
    prompts = tokenizer([row["question"] for row in rows], return_tensors="pt", padding=True)
    # top_k=0: by default `generate` draws from the 50 likeliest tokens alone, which is another policy.
    options = {"do_sample": not greedy, "top_k": 0, "max_new_tokens": MAX_RESPONSE_LENGTH}
    tokens = model.generate(**prompts, **options)
    # [1.10] After the EOS `generate` pads. This model's pad is a token of its own, which it does not sample. Where the
    # pad is the EOS this line would lose that: ppo_llm.py makes the mask from what was sampled.
    mask = tokens[:, 1:] != tokenizer.pad_token_id
    prompt_width = prompts["input_ids"].shape[1]
    mask[:, : prompt_width - 1] = False
    return tokens, mask


def number(text):
    """The number after the last ####, None if there is none."""
    match = re.match(r" ?(-?\d+)", text.rpartition("####")[2])
    return match and int(match[1])


def score(tokens, mask, rows):
    """1 where the response's number is the answer's, else 0: (B,)."""
    scores = []
    for row, row_tokens, row_mask in zip(rows, tokens[:, 1:], mask):
        text = tokenizer.decode(row_tokens[row_mask], skip_special_tokens=True)
        right = number(text) == number(row["answer"])
        scores.append(float(right))
    return torch.tensor(scores)


def evaluate(model, rows):
    tokens, mask = sample(model, rows, greedy=True)
    return score(tokens, mask, rows).mean()


def read_rows(name):
    lines = (TINY / name).read_text().splitlines()
    return [json.loads(line) for line in lines]


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
