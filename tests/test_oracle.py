"""Iterations of `main`, computed without it: numbers, gradients and weights from the same responses.

The oracle below takes each response by itself, without padding, and in float64. It imports nothing of the scripts, so a
wrong sign that stood in all of them would not be found in agreement with itself. Read it as the algorithms' definition:
`log_probs`, `credit_of_tokens` (PPO), `credit_of_answers` (GRPO), `step_losses`, `adamw`, and `iterate`, their order.

The weights are taken from the run after each step, once the step itself has been compared: rounding does not add up.
"""

import math
import statistics
import zlib
from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
import torch
from helpers import each_script
from ranks import load_script, run_ranks, train, whole
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers import AutoModel, AutoModelForCausalLM

# ------------------------------------------------------------------------------------- what a run did: on each rank


def record(script, flags):
    """Runs `main` on made-up responses: what was sampled, and each optimizer step, as dictionaries of plain things."""
    algo = load_script(script)
    found = {"rollouts": [], "steps": [], "start": {}}
    names = {}

    def compute_scores(function, tokenizer, rows, responses, real=algo.compute_scores):
        results = real(function, tokenizer, rows, responses)
        answers = [(list(r.ids), bool(r.truncated)) for r in responses]
        scores = [result["score"] for result in results]
        found["rollouts"].append(list(zip([list(row["input_ids"]) for row in rows], answers, scores)))
        return results

    def forward_all(module, *args, real=algo.forward_all):
        network = "critic" if any("score." in name for name, _ in module.named_parameters()) else "actor"
        for name, p in module.named_parameters():
            if p.requires_grad and p not in names:
                names[p] = network, name.removeprefix("model.")
                found["start"][names[p]] = whole(p)
        return real(module, *args)

    def before(optimizer, args, kwargs):
        group = optimizer.param_groups[0]
        gradient = {names[p]: whole(p.grad) for p in group["params"] if p.grad is not None}
        found["steps"].append({"lr": group["lr"], "gradient": gradient})

    def after(optimizer, args, kwargs):
        held = optimizer.param_groups[0]["params"]
        found["steps"][-1]["after"] = {names[p]: whole(p) for p in held if p in names}

    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(algo, compute_scores=compute_scores, forward_all=forward_all))
        for hook in register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after):
            stack.callback(hook.remove)
        (run,) = train(str(script), [(flags, {"fixed": True})])
    return found | {"metrics": run["metrics"]}


# -------------------------------------------------------------------------------------------------------- the oracle


def network(base, trained):
    """All weights: those of the folder, with what has been trained; a LoRA counts twice (alpha is 2 * rank)."""
    weights = dict(base)
    for name, value in trained.items():
        if ".lora_A." in name:
            changed = name.replace(".lora_A.default", "")
            weights[changed] = base[changed] + 2 * trained[name.replace("lora_A", "lora_B")] @ value
        elif ".lora_B." not in name:
            weights[name.replace("modules_to_save.default.", "")] = value
    return weights


def log_probs(model, weights, prompt, answer, temperature):
    """Of the answer's tokens, and the entropy of the distribution that each comes from, and the variance of that."""
    logits = torch.func.functional_call(model, weights, (torch.tensor([prompt + answer]),)).logits[0]
    all_logprobs = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    probs = all_logprobs.exp()
    entropy = -(probs * all_logprobs).sum(-1)
    variance = (probs * (all_logprobs + entropy[:, None]) ** 2).sum(-1)
    return all_logprobs[range(len(answer)), answer], entropy, variance


def values_of(backbone, weights, prompt, answer):
    """Of the states in which the answer's tokens are chosen."""
    inner = {name: value for name, value in weights.items() if not name.startswith("score.")}
    hidden = torch.func.functional_call(backbone, inner, (torch.tensor([prompt + answer]),)).last_hidden_state[0]
    return hidden[len(prompt) - 1 : -1] @ weights["score.weight"][0] + weights["score.bias"]


def divergence(logprobs, others, kind):
    """An estimate, token by token, of the KL of the policy that sampled, whose log-probs come first, from another."""
    difference = logprobs - others
    return {"k1": difference, "k2": difference**2 / 2, "k3": torch.exp(-difference) - 1 + difference}[kind]


def credit_of_tokens(rewards, values, gamma, lam):
    """GAE by its definition, a sum for each token."""
    last = len(rewards) - 1
    deltas = [rewards[t] + (gamma * values[t + 1] if t < last else 0) - values[t] for t in range(last + 1)]
    sums = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, last + 1)) for t in range(last + 1)]
    return torch.stack(sums)


def credit_of_answers(totals, group_size, estimator):
    credits = []
    for first in range(0, len(totals), group_size):
        group = totals[first : first + group_size]
        for i in range(group_size):
            others = group[:i] + group[i + 1 :]
            mean = statistics.fmean(group) if group_size > 1 else 0.0
            centred = group[i] - mean
            if estimator == "grpo":
                centred /= statistics.stdev(group) + 1e-6
            if estimator == "rloo":
                centred = group[i] - statistics.fmean(others)
            credits.append(centred)
    if estimator == "reinforce_pp":
        credits = [(c - statistics.fmean(credits)) / statistics.stdev(credits) for c in credits]
    return credits


def step_losses(losses, flags):
    """The one loss of a step, of the token losses of each of its answers."""
    every = torch.cat(losses)
    mode = flags["loss_agg"]
    if mode == "token-mean":
        return every.sum() / len(every)
    sums = []
    for loss in losses:
        divisor = {"seq-mean-token-mean": len(loss), "seq-mean-token-sum-norm": flags["max_response_length"]}
        sums.append(loss.sum() / divisor.get(mode, 1))
    return sum(sums) / len(sums)


def adamw(p, gradient, moments, lr):
    """1711.05101 with torch's defaults; the moments change in place."""
    moments["t"] += 1
    moments["m"] = 0.9 * moments["m"] + 0.1 * gradient
    moments["v"] = 0.999 * moments["v"] + 0.001 * gradient**2
    mean = moments["m"] / (1 - 0.9 ** moments["t"])
    square = moments["v"] / (1 - 0.999 ** moments["t"])
    return p - lr * mean / (square.sqrt() + 1e-8)


class Oracle:
    """The networks' weights as the run has them, and what each step should do to them."""

    def __init__(self, flags, steps, start):
        self.flags = flags
        self.model = AutoModelForCausalLM.from_pretrained(flags["model"]).double().eval()
        self.backbone = AutoModel.from_pretrained(flags["model"]).double().eval()
        self.base = {"actor": {name: p.detach() for name, p in self.model.named_parameters()}}
        head = {"score.weight": torch.zeros(1, self.model.config.hidden_size), "score.bias": torch.zeros(1)}
        inner = {name: p.detach() for name, p in self.backbone.named_parameters()}
        self.base["critic"] = inner | {name: p.double() for name, p in head.items()}
        self.weights = {"actor": {}, "critic": {}}
        for (which, name), p in start.items():
            self.weights[which][name] = p.double()
        self.moments = {which: {n: dict(t=0, m=0.0, v=0.0) for n in self.weights[which]} for which in self.weights}
        self.steps = iter(steps)

    def actor(self, answer, weights=None):
        weights = network(self.base["actor"], self.weights["actor"] if weights is None else weights)
        return log_probs(self.model, weights, answer["prompt"], answer["ids"], self.flags["temperature"])

    def critic(self, answer, weights=None):
        weights = network(self.base["critic"], self.weights["critic"] if weights is None else weights)
        return values_of(self.backbone, weights, answer["prompt"], answer["ids"])

    def step(self, which, lr, loss_of):
        """Compares the run's next step with the one that the loss asks for: the loss, and the norm of its gradient."""
        taken = next(self.steps)
        leaves = {name: p.clone().requires_grad_() for name, p in self.weights[which].items()}
        loss = loss_of(leaves)
        gradient = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))
        norm = math.sqrt(sum(g.square().sum().item() for g in gradient.values()))
        most = self.flags["max_grad_norm"] or math.inf
        scale = min(1.0, most / max(norm, 1e-6))
        assert {which} == {network for network, _ in taken["gradient"]}
        assert taken["lr"] == pytest.approx(lr, rel=1e-9)
        for name, g in gradient.items():
            error = (taken["gradient"][which, name].double() - g * scale).abs().max().item()
            assert error <= 1e-5 * scale * norm, f"the gradient of {which}'s {name}: {error} of {scale * norm}"
            # With the run's own gradient: AdamW makes a full step of one that is nearly 0.
            g = taken["gradient"][which, name].double()
            moved = adamw(self.weights[which][name], g, self.moments[which][name], lr)
            after = taken["after"][which, name].double()
            assert torch.allclose(after, moved, rtol=1e-6, atol=1e-6), f"{which}'s {name} after the step"
            self.weights[which][name] = after
        return loss.item(), norm


def iterate(oracle, answers, iteration):
    """One iteration: `answers` are of all ranks, in the order of the global batch. Returns its metrics."""
    flags = oracle.flags
    grpo = "group_size" in flags
    for answer in answers:
        answer["old"], answer["entropy"], answer["variance"] = oracle.actor(answer)
        use_reference = flags["kl_reward_coef"] > 0 or flags["kl_loss_coef"] > 0
        answer["ref"] = oracle.actor(answer, {})[0] if use_reference else answer["old"]
        answer["kl"] = divergence(answer["old"], answer["ref"], flags["kl_reward_kind"])
        answer["rewards"] = -flags["kl_reward_coef"] * answer["kl"]
        answer["rewards"][-1] += answer["score"]
    if grpo:
        totals = [answer["rewards"].sum().item() for answer in answers]
        for answer, credit in zip(answers, credit_of_answers(totals, flags["group_size"], flags["estimator"])):
            answer["advantages"] = torch.full_like(answer["old"], credit)
        every = torch.cat([answer["advantages"] for answer in answers])
    else:
        for answer in answers:
            answer["values"] = oracle.critic(answer)
            answer["raw"] = credit_of_tokens(answer["rewards"], answer["values"], flags["gamma"], flags["lam"])
            answer["returns"] = answer["raw"] + answer["values"]
        every = torch.cat([answer["raw"] for answer in answers])
        for answer in answers:
            answer["advantages"] = (answer["raw"] - every.mean()) / every.std(correction=1)

    parts = [answers[i : i + flags["minibatch_size"]] for i in range(0, len(answers), flags["minibatch_size"])]
    seed = zlib.crc32(repr(("minibatches", flags["seed"], iteration)).encode())
    stream = torch.Generator().manual_seed(seed)
    epochs = [torch.rand(len(parts), generator=stream).argsort().tolist() for _ in range(flags["ppo_epochs"])]
    steps = [parts[k] for order in epochs for k in order]
    warm = min(1.0, iteration / max(1, flags["warmup_iterations"]))
    seen = []  # of each token in each epoch: log-ratio, advantage

    def actor_loss(part, weights):
        token_losses = []
        for answer in part:
            now, entropy, _ = oracle.actor(answer, weights)
            log_ratio = now - answer["old"]
            ratio = log_ratio.exp()
            clipped = ratio.clip(1 - flags["clip_low"], 1 + flags["clip_high"])
            gain = torch.minimum(answer["advantages"] * ratio, answer["advantages"] * clipped)
            kl = divergence(now, answer["ref"], flags["kl_loss_kind"])
            token_losses.append(-gain - flags["entropy_coef"] * entropy + flags["kl_loss_coef"] * kl)
            seen.append(torch.stack([log_ratio, answer["advantages"]]).detach())
        return step_losses(token_losses, flags)

    def critic_loss(part, weights):
        errors = torch.cat([oracle.critic(answer, weights) - answer["returns"] for answer in part])
        return (errors**2).mean() / 2

    metrics = {}
    if iteration > flags.get("critic_warmup_iterations", 0):
        done = [oracle.step("actor", flags["lr"] * warm, partial(actor_loss, part)) for part in steps]
        log_ratio, advantages = torch.cat(seen, 1)
        ratio = log_ratio.exp()
        too_high = (advantages > 0) & (ratio > 1 + flags["clip_high"])
        too_low = (advantages < 0) & (ratio < 1 - flags["clip_low"])
        metrics |= {
            "actor/loss": statistics.fmean(loss for loss, _ in done),
            "actor/grad_norm": statistics.fmean(norm for _, norm in done),
            "actor/clipfrac": (too_high | too_low).double().mean(),
            "actor/approx_kl": (ratio - 1 - log_ratio).mean(),
            "actor/ratio_mean": ratio.mean(),
            "actor/ratio_max": ratio.max(),
        }
    entropies, variances = (torch.cat([answer[name] for answer in answers]) for name in ("entropy", "variance"))
    surprises = -torch.cat([answer["old"] for answer in answers]) - entropies
    scores = [answer["score"] for answer in answers]
    metrics |= {
        "reward/mean": statistics.fmean(scores),
        "reward/std": statistics.stdev(scores),
        "reward/total_mean": statistics.fmean(answer["rewards"].sum().item() for answer in answers),
        "response/length_mean": statistics.fmean(len(answer["ids"]) for answer in answers),
        "response/truncated_frac": statistics.fmean(answer["truncated"] for answer in answers),
        "kl/mean": torch.cat([answer["old"] - answer["ref"] for answer in answers]).mean(),
        "advantage/mean": every.mean(),
        "advantage/std": every.std(correction=1),
        "actor/entropy": entropies.mean(),
        "rollout/surprise": surprises.mean(),
        "rollout/surprise_z": surprises.sum() / variances.sum().sqrt(),
    }
    if not grpo:
        done = [oracle.step("critic", flags["critic_lr"] * warm, partial(critic_loss, part)) for part in steps]
        returns = torch.cat([answer["returns"] for answer in answers])
        metrics |= {
            "critic/loss": statistics.fmean(loss for loss, _ in done),
            "critic/grad_norm": statistics.fmean(norm for _, norm in done),
            "critic/explained_variance": 1 - every.var(correction=1) / (returns.var(correction=1) + 1e-5),
        }
    return metrics


def agrees(flags, ranks):
    """Goes through the run with the oracle; returns the run's metrics, an entry for each iteration."""
    world = len(ranks)
    size = flags.get("group_size", 1)
    oracle = Oracle(flags, ranks[0]["steps"], ranks[0]["start"])
    if not flags["lora_rank"]:  # all weights are trained, whatever the run thinks
        assert oracle.weights["actor"].keys() == oracle.base["actor"].keys()
        assert "group_size" in flags or oracle.weights["critic"].keys() == oracle.base["critic"].keys()
    lines = [line for line in ranks[0]["metrics"] if "reward/mean" in line]
    assert len(lines) == flags["total_iterations"]
    for iteration, line in enumerate(lines, 1):
        answers = []
        for place in range(flags["batch_size"]):  # prompt `place` was dealt to this rank, with its group
            share = ranks[place % world]["rollouts"][iteration - 1]
            for prompt, (ids, truncated), score in share[place // world * size :][:size]:
                answers.append({"prompt": prompt, "ids": ids, "truncated": truncated, "score": score})
        for name, expected in iterate(oracle, answers, iteration).items():
            assert line[name] == pytest.approx(float(expected), rel=1e-5, abs=1e-5), f"{name} of iteration {iteration}"
    assert next(oracle.steps, None) is None
    assert 0 < lines[-1]["response/truncated_frac"] < 1
    return lines


# ------------------------------------------------------------------------------------------------------------- tests

# With these every term counts: several epochs and minibatches, rates at which ratios leave the clip's range.
COMMON = {"total_iterations": 2, "ppo_epochs": 2, "minibatch_size": 4, "lr": 1e-3, "kl_reward_coef": 0.1, "seed": 3}
COMMON |= {"microbatch_tokens": 64, "temperature": 1.0, "clip_low": 0.1, "clip_high": 0.15}
PPO = COMMON | {"batch_size": 8, "critic_lr": 3e-3, "gamma": 0.97, "lam": 0.9}
GRPO = COMMON | {"batch_size": 4, "group_size": 2}
# Together these have each kind of KL in each place, each place of the KL with and without the other, and each average.
BOTH = {
    "all at once": {"kl_loss_coef": 0.2, "entropy_coef": 0.05, "temperature": 0.7, "loss_agg": "token-mean"},
    "k2 in the reward": {"kl_reward_kind": "k2", "kl_loss_coef": 0.0, "loss_agg": "seq-mean-token-mean"},
    "k3 in the reward, k2 in the loss": {"kl_reward_kind": "k3", "kl_loss_coef": 0.3, "kl_loss_kind": "k2"},
    "k1 in the loss only": {"kl_reward_coef": 0.0, "kl_loss_coef": 0.3, "kl_loss_kind": "k1"},
    "no KL, gradients as they are": {"kl_reward_coef": 0.0, "kl_loss_coef": 0.0, "max_grad_norm": 0.0},
    "small gradients, warm-up, a price on entropy": {
        "entropy_coef": -0.2,
        "max_grad_norm": 0.01,
        "warmup_iterations": 4,
    },
    "one step": {"minibatch_size": 8, "ppo_epochs": 1, "loss_agg": "seq-mean-token-sum-norm"},
    "LoRA": {"lora_rank": 2, "entropy_coef": 0.1, "kl_loss_coef": 0.2, "lr": 3e-2, "loss_agg": "seq-mean-token-sum"},
}
OF_PPO = {
    "Monte Carlo": {"gamma": 1.0, "lam": 1.0},
    "the critic first, one step ahead": {"critic_warmup_iterations": 1, "lam": 0.0},
}
OF_GRPO = {name: {"estimator": name, "group_size": 4, "batch_size": 2} for name in ("dr_grpo", "rloo", "reinforce_pp")}
OF_GRPO |= {"groups of one": {"estimator": "reinforce_pp", "group_size": 1, "batch_size": 8}}
CASES = [("ppo_llm", name, PPO | case) for name, case in (BOTH | OF_PPO).items()]
CASES += [("grpo_llm", name, GRPO | case) for name, case in (BOTH | OF_GRPO).items()]


def complete(algo, toy_flags, flags, folder):
    """The flags with all defaults of the script."""
    run = {"max_response_length": 8, "output_dir": str(folder), "run_name": "run"}
    return dict(vars(algo.Args(**toy_flags | flags | run)))


@pytest.mark.parametrize("script, name, flags", CASES, indirect=["script"], scope="module")
def test_an_iteration_is_what_the_oracle_says(script, algo, name, flags, toy_flags, tmp_path):
    flags = complete(algo, toy_flags, flags, tmp_path)
    agrees(flags, [record(script, flags)])


@each_script()
def test_two_ranks_do_what_the_oracle_says(script, algo, toy_flags, tmp_path):
    base = GRPO if script.stem == "grpo_llm" else PPO
    flags = complete(algo, toy_flags, base | BOTH["all at once"], tmp_path)
    first, second = run_ranks(2, record, script, flags)
    lines = agrees(flags, [first, second])
    for ours, theirs in zip(first["steps"], second["steps"], strict=True):
        assert all(torch.equal(weights, theirs["after"][name]) for name, weights in ours["after"].items())
    assert lines[-1]["actor/clipfrac"] > 0.05 and lines[-1]["kl/mean"] != 0  # every term has counted
