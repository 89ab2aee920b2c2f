"""GRPO and its family for language models: no critic, the responses to a prompt are each other's baseline.

The model answers every prompt several times, a reward function scores the answers, and the policy is pushed towards
those that scored better than the others in their group. The tokens of the answer are the actions a_t, the text before
each is the state s_t, and r_i is the score of answer i:

    reward          R_i   = r_i - beta*sum_t KL(pi_old || pi_ref)_t                     (beta is --kl-reward-coef, 0)
    advantage       A_i   = (R_i - mean of the group) / std of the group      GRPO            (DeepSeekMath, 2402.03300)
                          = R_i - mean of the group                           Dr.GRPO                       (2503.20783)
                          = R_i - mean of the others of the group             RLOO                          (2402.14740)
                          = R_i, whitened over the batch                      REINFORCE++, groups of one    (2501.03262)
                          = R_i - mean of the group, then whitened            REINFORCE++ with baseline

    ratio           rho_t = pi(a_t|s_t) / pi_old(a_t|s_t)
    loss                  = mean over tokens of [max(-A*rho, -A*clip(rho, 1-lo, 1+hi)) - c_H*H + c_KL*KL]  (1707.06347)

lo and hi are --clip-low and --clip-high; c_H is --entropy-coef and c_KL --kl-loss-coef.

An estimator alone does not make its paper's algorithm: averages (--loss-agg) and the place of the KL differ, too. The
notes (6.2) list the flags. The defaults follow the GRPO paper. Most projects of 2026 start from --loss-agg token-mean
and --kl-loss-coef 0, which needs no reference, and some from --clip-high 0.28.

Departures from the papers: the reference never moves. A KL in the reward counts for the whole answer. REINFORCE++ is
whitened over answers, not tokens. Each optimizer step has a single denominator, so every token or answer has the same
weight, whatever the micro-batch size or number of processes.

All phases share one batch. Each row of `tokens` (B,L) is a prompt followed by its response, padded at the end, so no
attention mask is needed. B is the number of rows on this process, L the padded width, T that of the responses. Column i
of every other (B,L) tensor belongs to one action: choosing token i+1 after reading tokens 0 to i. `mask` marks the
actions, the tokens that the policy sampled. Log-probs, values, rewards and advantages are 0 everywhere else. Here a
prompt of three tokens p is answered by a and the EOS token e, in a batch that is six tokens wide:

    tokens  p p p a e .
    action  . . a e . .
    mask    0 0 1 1 0 0

Launch. Without --model, the script trains the small model in benchmarks/tiny on the task that comes with it:
    accelerate launch SCRIPT                              on every GPU of this machine, or one process without a GPU
    accelerate launch --multi_gpu --num_processes 2 SCRIPT --model Qwen/Qwen2.5-0.5B
    python SCRIPT --model MODEL --help                    all flags, with the defaults for a real model
Comments like [4.3] point to a section of notes/.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.9,<2.16", "transformers>=5.21,<6", "accelerate>=1.10", "datasets>=4.8.5",
#     "safetensors>=0.8", "tyro>=0.9.2", "tensorboard>=2.19", "peft>=0.20", "transformers<5.24"]
# ///

import copy
import fcntl
import glob
import importlib.util
import inspect
import json
import math
import os
import re
import shutil
import signal
import sys
import time
import zlib
from collections import namedtuple
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Literal

import datasets
import torch
import torch.distributed as dist
import transformers
import tyro
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import broadcast_object_list, gather_object, set_seed, tqdm
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

TINY = Path(__file__).parent / "benchmarks/tiny"
KLKind = Literal["k1", "k2", "k3"]
LossAgg = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
# What follows a prompt: token ids, a log-prob for each, and whether it was cut off. A token that the policy did not
# sample, such as text from an environment, is not an action: its log-prob is NOT_SAMPLED (a real one is never above 0).
Response = namedtuple("Response", "ids logprobs truncated")
NOT_SAMPLED = math.inf


@dataclass
class Args:
    """GRPO for language models. Batch sizes are totals over all processes, unless they say "each device"."""

    # Models
    model: str  # policy to train: transformers folder or hub id (unset: the bundled model, with its settings)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of forward and backward passes; auto: bfloat16 on a GPU
    lora_rank: int = 0  # train low-rank matrices next to the frozen weights (LoRA, 2106.09685); 0: train all weights
    gradient_checkpointing: bool = False  # recompute activations: saves memory, costs about a third more time

    # Prompts and their reward
    dataset: str = "openai/gsm8k:main"  # .jsonl/.json/.parquet/.csv, folder saved by `datasets`, hub id `name[:config]`
    eval_dataset: str | None = None  # test data, given like --dataset (unset: its `test` split)
    prompt_column: str = "question"  # column with the prompts: texts or chats
    answer_column: str | None = "answer"  # column with the reference answers, if any; verl's `reward_model` works, too
    chat_template: str | None = None  # Jinja file, or none: prompts stay plain text (unset: the tokenizer's template)
    chat_template_args: str = "{}"  # JSON for the template, as in '{"enable_thinking": false}'
    prompt_suffix: str | None = None  # appended to text prompts (unset: with --reward gsm8k, a request for "####")
    max_prompt_length: int = 512  # tokens; longer prompts are left out
    max_response_length: int = 512  # tokens; a response that has no EOS by then is truncated
    reward: str = "gsm8k"  # gsm8k (compares the number after ####) or file.py:function

    # Rollout
    batch_size: int = 32  # prompts per iteration
    group_size: int = 8  # [6.3] responses per prompt
    rollout_batch_size: int = 256  # responses that each device samples at a time: limits memory
    temperature: float = 1.0  # divides the logits when sampling and in every log-prob

    # Update
    total_iterations: int = 100  # iterations of rollout and update (0: only evaluate)
    ppo_epochs: int = 1  # passes over each batch
    minibatch_size: int = 64  # responses per optimizer step
    microbatch_tokens: int = 4096  # padded tokens per forward pass of each device: limits memory
    lr: float = 1e-6  # learning rate of the actor
    warmup_iterations: int = 0  # the learning rates rise from 0 over the first N iterations
    max_grad_norm: float = 1.0  # scale gradients down to this global norm (0: never)
    clip_low: float = 0.2  # clip the ratio below 1 minus this
    clip_high: float = 0.2  # clip the ratio above 1 plus this
    entropy_coef: float = 0.0  # weight of the entropy bonus
    loss_agg: LossAgg = "seq-mean-token-mean"  # how the actor averages the losses of tokens

    # Advantages
    estimator: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"] = "grpo"  # what a score is compared with, and how

    # KL divergence from the reference, the model as it was before training
    kl_reward_coef: float = 0.0  # weight of the KL penalty in the reward of a response
    kl_reward_kind: KLKind = "k1"  # estimator of this penalty
    kl_loss_coef: float = 0.001  # weight of the KL in the actor loss
    kl_loss_kind: KLKind = "k3"  # estimator in the loss (k1 is useless there: its gradient averages to 0)

    # Files, seed and evaluation
    output_dir: str = "runs"  # folder that holds all runs
    run_name: str | None = None  # name of this run's folder (unset: SCRIPT-SEED-TIME)
    seed: int = 1  # seed of data order and sampling
    eval_every: int = 20  # iterations between evaluations (0: only before and after training)
    eval_rows: int = 512  # evaluate on the first N test rows (0: no evaluation)
    track: Literal["tensorboard", "wandb", "none"] = "tensorboard"  # where metrics go, besides metrics.jsonl
    save_every: int = 10  # iterations between checkpoints (0: only after SIGTERM or Ctrl-C)
    keep_checkpoints: int = 2  # how many of the newest checkpoints to keep (0: all)
    resume: bool = False  # continue the run --run-name from its newest checkpoint, or start it


# Settings for the bundled task: the defaults when --model is not given.
BUNDLED = {
    "model": f"{TINY}/model",
    "dataset": f"{TINY}/train.jsonl",
    "eval_dataset": f"{TINY}/test.jsonl",
    "prompt_suffix": "",
    "max_response_length": 64,
    "total_iterations": 20,
    "eval_every": 10,
    "rollout_batch_size": 128,
    "microbatch_tokens": 1024,
    "lr": 1.5e-4,
}


# --- The algorithm ---------------------------------------------------------------------------------------------------


def main(args: Args):
    """Trains and returns the run folder."""
    accelerator = start_processes(args)
    rank = accelerator.process_index
    world_size = accelerator.num_processes
    device = accelerator.device
    bf16 = accelerator.mixed_precision == "bf16"
    run_dir, checkpoint_path = find_run(args)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if args.chat_template not in (None, "none"):
        tokenizer.chat_template = Path(args.chat_template).read_text()
    train_table, test_table = read_data(args)
    train_rows, train_summary = load_prompts(args.dataset, train_table, args, tokenizer)
    test_rows, test_summary = load_prompts(args.eval_dataset or args.dataset, test_table, args, tokenizer)
    test_rows = test_rows[: args.eval_rows]
    reward_function = load_reward(args.reward)

    def wrap(module):
        """Moves a module to the device and gives it autocast. There is no DDP: take_step adds up the gradients."""
        if args.gradient_checkpointing:
            module.model.gradient_checkpointing_enable()
        module.train()  # gradient checkpointing works only in this mode; dropout is 0 anyway
        if bf16 and (args.lora_rank or not trained_parameters(module)):
            # Cast frozen layers once; autocast would do it in every pass, so for every token of the rollout.
            embedding = module.model.get_input_embeddings().weight  # stays, as does the weight of a head tied to it
            for layer in module.modules():
                if isinstance(layer, nn.Linear) and not layer.weight.requires_grad and layer.weight is not embedding:
                    layer.to(torch.bfloat16)
        return accelerator.prepare_model(module, evaluation_mode=True)  # evaluation_mode leaves DDP out

    # `policy_model` is a plain transformers model, sampled from and saved. The module `policy` computes its log-probs.
    policy_model = load_model(args.model, AutoModelForCausalLM, args.lora_rank, task_type="CAUSAL_LM")
    policy = wrap(Policy(policy_model, args.temperature))
    trainees = {"policy": (policy_model, make_optimizer(policy_model))}

    use_reference = args.kl_reward_coef or args.kl_loss_coef  # [1.6]
    reference = policy  # with LoRA: the policy with its adapter switched off (phase 3)
    if use_reference and not args.lora_rank:
        reference_model = load_model(args.model, AutoModelForCausalLM).requires_grad_(False)
        reference = wrap(Policy(reference_model, args.temperature))

    positions = getattr(policy_model.config.get_text_config(), "max_position_embeddings", math.inf)
    longest = max(len(row["input_ids"]) for row in train_rows + test_rows)
    if longest + args.max_response_length > positions:
        fail(f"a prompt of {longest} tokens and --max-response-length exceed the {positions} positions of {args.model}")

    # A checkpoint holds `trainees` and this dictionary: put in here what else must survive a restart. Only rank 0 saves
    # it, so it must be the same on all ranks. A key that the checkpoint lacks keeps the value given here.
    # With others, best/ starts anew. Names without folders: the same run may be resumed from elsewhere.
    best = f"best score by {Path(args.reward).name} on {Path(args.eval_dataset or args.dataset).name}"
    state = {"iteration": 0, "prompts": 0, best: -math.inf, "best_iteration": 0}
    if checkpoint_path:
        accelerator.print(f"continuing from {checkpoint_path}")
        state |= load_checkpoint(checkpoint_path, trainees)
    first_iteration = state["iteration"] + 1
    first_step = first_iteration if checkpoint_path else 0  # step 0 in the log is before training
    eos_ids = collect_eos_ids(policy_model, tokenizer)
    open_run(run_dir, args, first_step, accelerator)

    accelerator.print(
        f"{Path(__file__).name}: {world_size} process(es) on {device.type}, {'bfloat16' if bf16 else 'float32'}\n"
        f"  policy     {args.model}: {policy_model.num_parameters():,} parameters, lr {args.lr}, EOS ids {eos_ids}\n"
        f"  reward     {args.reward}; KL penalty: {args.kl_reward_coef} in it, {args.kl_loss_coef} in the loss\n"
        f"  train      {train_summary}; the first ends in {train_rows[0]['prompts'][-60:]!r}\n"
        f"  eval       {test_summary}; the first {len(test_rows)} are evaluated\n"
        f"  batch      {args.batch_size} x {args.group_size} responses in minibatches of {args.minibatch_size},"
        f" {args.ppo_epochs} epoch(s)\n"
        f"  run folder {run_dir}, iterations {first_iteration} to {args.total_iterations}\n"
        "  Ctrl-C     saves at the end of an iteration; the launcher of several processes waits 30 s for it"
    )

    def rollout(rows, uniforms, temperature):
        """Samples a Response to each row, for training and for evaluation. uniforms (B,T) is the noise for it.

        This is the place for an environment or a second turn: append text to the prompts, call `generate` again with
        the next columns of noise, and return one Response per row whose inserted tokens have log-prob NOT_SAMPLED.
        """
        with accelerator.autocast():
            responses = []
            for first in range(0, len(rows), args.rollout_batch_size):
                part = slice(first, first + args.rollout_batch_size)
                prompts = [row["input_ids"] for row in rows[part]]
                responses += generate(policy_model, prompts, uniforms[part].to(device), eos_ids, temperature)
        return responses

    def take_step(name, lr):
        """Adds up the ranks' gradients, clips the sum and takes an optimizer step. Returns the norm before clipping."""
        trained_model, optimizer = trainees[name]
        sum_gradients(trained_parameters(trained_model).values())
        for group in optimizer.param_groups:
            group["lr"] = lr
        norm = nn.utils.clip_grad_norm_(trained_model.parameters(), args.max_grad_norm or math.inf).item()
        if not math.isfinite(norm):
            fail(f"iteration {state['iteration']}: the gradient norm of the {name} is {norm}")
        optimizer.step()
        optimizer.zero_grad()
        return norm

    if state[best] == -math.inf:  # before training, or resumed with another reward or other data
        metrics = evaluate(
            state["iteration"], test_rows, rollout, reward_function, tokenizer, run_dir, args, accelerator
        )
        state[best] = metrics.get("eval/score", -math.inf)  # a best model must beat the one we started from
        if not checkpoint_path:
            log(0, metrics, run_dir, accelerator)
    signals = catch_signals()

    for iteration in range(first_iteration, args.total_iterations + 1):
        state["iteration"] = iteration
        started = time.perf_counter()

        # 1. Rollout: a group of responses to each of this rank's prompts. With W ranks, rank r takes prompts r, r+W,
        # ... of the batch and their noise. So minibatch k, a part from each rank, has the same rows whatever W is.
        drawn = draw_prompts(train_rows, state["prompts"], args.batch_size, args.seed)[rank::world_size]  # [13.2]
        state["prompts"] += args.batch_size
        rows = []
        for row in drawn:
            rows += [row] * args.group_size  # a group side by side
        shape = args.batch_size, args.group_size, args.max_response_length
        stream = random_stream("rollout", args.seed, iteration)
        # [13.3] (B,T)
        uniforms = torch.rand(shape, generator=stream, dtype=torch.float64)[rank::world_size].flatten(0, 1)
        responses = rollout(rows, uniforms, args.temperature)
        rollout_seconds = time.perf_counter() - started

        # 2. Reward: a score for each response.
        results = compute_scores(reward_function, tokenizer, rows, responses)
        truncated = to_tensor(results, "truncated", device)  # (B,)
        scores = to_tensor(results, "score", device)  # [8.5] (B,)

        # One batch, cut for all passes below. A micro-batch `mb`, a part of a minibatch, is an index (row numbers,
        # slice(0, l)): tokens[mb] are those rows of a (B,L) tensor, cut to l columns, (b,l). Of a (B,) tensor, take
        # x[mb[0]].
        tokens, mask, rollout_logprobs, row_lengths = to_batch(rows, responses, device)  # (B,L)
        minibatch_rows = torch.arange(len(rows)).split(args.minibatch_size // world_size)  # this rank's rows in each
        minibatches = [pack(row_lengths, part.tolist(), args.microbatch_tokens, device) for part in minibatch_rows]
        # What a token's loss weighs in the loss of its optimizer step, which spans all micro-batches and ranks.
        loss_weights = [token_weights(mask[p], args.loss_agg, args.max_response_length) for p in minibatch_rows]
        loss_weights = torch.cat(loss_weights)  # [13.4] (B,L)
        # Every epoch visits the minibatches in another order, the same on all ranks. Their rows stay together.
        stream = random_stream("minibatches", args.seed, iteration)
        steps = []  # [5.7] (epoch, minibatch) of each optimizer step
        for epoch in range(args.ppo_epochs):
            order = torch.rand(len(minibatches), generator=stream).argsort()
            steps += [(epoch, k) for k in order.tolist()]

        # 3. Log-probs under the policy that sampled and under the reference, computed by the training forward pass.
        old_logprobs, entropy, variance = forward_all(policy, minibatches, tokens, mask)  # [5.1] (B,L)
        limit = 1e-2 / args.temperature if bf16 else 1e-5  # dividing the logits magnifies their rounding
        checked = check_sampler(rollout_logprobs, old_logprobs, entropy, variance, mask, limit, iteration)  # [12.6]
        ref_logprobs = old_logprobs  # without a reference, every KL is 0
        if use_reference:
            if reference is policy:  # [7.11] with LoRA
                policy_model.disable_adapters()
            ref_logprobs = forward_all(reference, minibatches, tokens, mask, False)[0]
            if reference is policy:
                policy_model.enable_adapters()

        # 4. Rewards, and advantages over the group's mean. All tokens of a response have the same advantage.
        kl = kl_penalty(old_logprobs, ref_logprobs, args.kl_reward_kind)  # [7.5] (B,L)
        rewards = scores - args.kl_reward_coef * kl.sum(1)  # (B,)
        groups = rewards.view(-1, args.group_size)  # (N,G)
        group_advantages = groups - groups.mean(1, keepdim=True)  # [6.4] Dr.GRPO
        if args.estimator == "grpo":
            group_advantages = group_advantages / (groups.std(1, keepdim=True) + 1e-6)  # [6.6]
        if args.estimator == "rloo":  # minus the mean of the others: s - (sum - s) / (G - 1)
            group_advantages = group_advantages * args.group_size / (args.group_size - 1)
        if args.estimator == "reinforce_pp":  # [6.8] verl whitens over tokens
            if args.group_size == 1:
                group_advantages = groups
            group_advantages = masked_whiten(group_advantages, torch.ones_like(groups, dtype=torch.bool))
        if args.group_size > 1:  # where all have the same score, nothing but rounding is left
            group_advantages = torch.where(constant_groups(rewards, args.group_size)[:, None], 0, group_advantages)
        advantages = torch.where(mask, group_advantages.flatten()[:, None], 0)  # (B,L)

        lr_factor = min(1.0, iteration / max(1, args.warmup_iterations))

        # 5. Update. new_logprobs and clipped record what each epoch computes, for the log.
        new_logprobs = old_logprobs.repeat(args.ppo_epochs, 1, 1)  # (epochs,B,L)
        clipped = torch.zeros_like(new_logprobs)
        actor_loss = 0
        actor_norms = []
        for epoch, k in steps:
            for mb in minibatches[k]:
                mb_logprobs, mb_entropy, _ = policy(tokens[mb], mask[mb], args.entropy_coef != 0)  # (b,l)
                mb_ratio = (mb_logprobs - old_logprobs[mb]).clamp(-20.0, 20.0).exp()  # [5.12] exp stays finite
                unclipped = -advantages[mb] * mb_ratio
                bounded = -advantages[mb] * mb_ratio.clamp(1 - args.clip_low, 1 + args.clip_high)
                mb_losses = torch.maximum(unclipped, bounded)  # [5.3] the clipped surrogate (1707.06347, eq. 7)
                clipped[epoch][mb] = (bounded > unclipped).float()  # 1: the clip takes the gradient
                if args.entropy_coef:
                    mb_losses = mb_losses - args.entropy_coef * mb_entropy  # [1.9]
                if args.kl_loss_coef:
                    mb_kl = kl_penalty(mb_logprobs, ref_logprobs[mb], args.kl_loss_kind)
                    mb_losses = mb_losses + args.kl_loss_coef * mb_kl
                loss = torch.where(mask[mb], loss_weights[mb] * mb_losses, 0).sum()  # a share of the step's
                loss.backward()  # the gradients of the shares add up
                actor_loss += loss.detach()
                new_logprobs[epoch][mb] = mb_logprobs.detach()
            actor_norms.append(take_step("policy", args.lr * lr_factor))

        # Log. Except for memory and time, all numbers are taken over the actions or responses of all ranks, so every
        # rank must call `global_mean` and `global_std`.
        actions = mask.expand_as(new_logprobs)  # (epochs,B,L)
        ratio = torch.where(actions, (new_logprobs - old_logprobs).exp(), 0)
        metrics = {
            "reward/mean": global_mean(scores),
            "reward/std": global_std(scores),
            "reward/total_mean": global_mean(rewards),
            "advantage/mean": global_mean(advantages, mask),
            "advantage/std": global_std(advantages, mask),
            "response/length_mean": global_mean(mask.sum(1)),
            "response/truncated_frac": global_mean(truncated),
            "kl/mean": global_mean(old_logprobs - ref_logprobs, mask),  # k1
            "memory/peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "time/rollout": rollout_seconds,
            "time/iteration": time.perf_counter() - started,  # without evaluating and saving
            "actor/entropy": global_mean(entropy, mask),
            "actor/clipfrac": global_mean(clipped, actions),
            "actor/approx_kl": global_mean(kl_penalty(old_logprobs, new_logprobs, "k3"), actions),  # [5.9]
            "actor/ratio_mean": global_mean(ratio, actions),
            "actor/ratio_max": global_max(ratio),
        }
        parts = mean_parts("part", results)
        metrics |= checked | parts
        if actor_norms:  # without an actor step, nothing has computed these
            metrics["actor/loss"] = all_reduce(actor_loss).item() / len(actor_norms)
            metrics["actor/grad_norm"] = sum(actor_norms) / len(actor_norms)
            metrics["actor/lr"] = args.lr * lr_factor
        if args.group_size > 1:
            metrics["group/zero_std_frac"] = global_mean(constant_groups(scores, args.group_size))

        shown = "".join(f"{part} {value:.3f}, " for part, value in parts.items())
        accelerator.print(
            f"iteration {iteration}/{args.total_iterations}: reward {metrics['reward/mean']:.3f}, {shown}"
            f"KL {metrics['kl/mean']:.4f}, length {metrics['response/length_mean']:.1f}, "
            f"rollout/kl {metrics['rollout/kl']:.0e}, {metrics['time/iteration']:.1f} s"
        )

        # Evaluate, log, save, stop.
        evaluated = iteration == args.total_iterations or (args.eval_every and iteration % args.eval_every == 0)
        if evaluated or iteration == 1:
            columns = {"tokens": tokens, "mask": mask, "logprobs": old_logprobs, "ratio": ratio[-1], "kl": kl}
            columns["advantages"] = advantages
            # Rows of the batch, for the viewer: as many whole groups as make 64 responses.
            for i, result in enumerate(results[: max(1, 64 // world_size // args.group_size) * args.group_size]):
                result["batch"] = {name: column[i, : row_lengths[i]].tolist() for name, column in columns.items()}
            write_completions(run_dir, f"step_{iteration:06d}", rows, results, accelerator)
        if evaluated:
            metrics |= evaluate(iteration, test_rows, rollout, reward_function, tokenizer, run_dir, args, accelerator)
            if metrics.get("eval/score", -math.inf) > state[best]:
                state |= {best: metrics["eval/score"], "best_iteration": iteration}
                save_models(run_dir / "best", trainees, tokenizer, accelerator)
        log(iteration, metrics, run_dir, accelerator)
        stop = gather_object(signals)  # a signal on any rank stops them all
        if stop or (args.save_every and iteration % args.save_every == 0):
            path = run_dir / f"checkpoints/step_{iteration:06d}.pt"
            save_checkpoint(path, trainees, state, args.keep_checkpoints, accelerator)
        if stop:
            break

    if state["iteration"] < args.total_iterations:
        accelerator.print(
            f"stopped early: the same command with --run-name {run_dir.relative_to(args.output_dir)} --resume continues"
        )
    elif args.total_iterations:
        save_models(run_dir / "final", trainees, tokenizer, accelerator)
        if state["best_iteration"]:
            accelerator.print(f"the best greedy score was that of iteration {state['best_iteration']}: {run_dir}/best")
        accelerator.print(
            f"the trained model is in {run_dir}/final\n"
            f"what it wrote, token by token: python benchmarks/view.py {run_dir}"
        )
    if args.track == "tensorboard":
        accelerator.print(f"curves: tensorboard --logdir {args.output_dir}")
    # On exit, torch joins gloo's threads while holding the lock (GIL) that they need. Without this pause, some runs
    # hung here after saving everything (pytorch issue 56297).
    time.sleep(0.5)
    accelerator.end_training()
    return run_dir


# --- Mathematics. T is any width; `main` calls these functions with (B,L). -------------------------------------------
# The same in all three scripts, but for place_scores (PPO) and sum_gradients (not FSDP).


def all_reduce(tensor, op=dist.ReduceOp.SUM):
    """Reduces `tensor` in place over all ranks, if there are several, and returns it."""
    if dist.is_initialized():
        dist.all_reduce(tensor, op)
    return tensor


def sum_gradients(parameters):  # [13.5]
    """Replaces each parameter's gradient by its sum over all ranks. All ranks must call it.

    A parameter without a gradient, such as an expert that no token of this rank chose, counts as zero.
    """
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    for first in range(0, len(gradients), 16):  # exchanging them one by one would take several times as long
        bucket = gradients[first : first + 16]
        flat = all_reduce(nn.utils.parameters_to_vector(bucket))
        nn.utils.vector_to_parameters(flat, bucket)  # the gradients become views of `flat`: there is no second copy


def global_moments(x, mask=None):
    """(mean, unbiased variance) of x, or of x over a mask, on all ranks together. All ranks must call it.

    Two passes, because E[x^2] - E[x]^2 cancels in floating point. The variance of fewer than two numbers is 0.
    """
    if mask is None:
        mask = torch.ones_like(x, dtype=torch.bool)
    x = torch.where(mask, x, 0).double()
    total, count = all_reduce(torch.stack([x.sum(), mask.sum().double()]))
    average = total / count.clamp(min=1)
    squares = all_reduce(torch.where(mask, x - average, 0).square().sum())
    return average, squares / (count - 1).clamp(min=1)


def global_mean(x, mask=None):
    """For the log: mean of x on all ranks together, as a number. All ranks must call it."""
    return global_moments(x, mask)[0].item()


def global_std(x, mask=None):
    """For the log: standard deviation of x on all ranks together, as a number. All ranks must call it."""
    return global_moments(x, mask)[1].sqrt().item()


def global_max(x):
    """The largest number in x on all ranks together. All ranks must call it."""
    return all_reduce(x.max(), dist.ReduceOp.MAX).item()


def masked_whiten(x, mask):  # [4.7]
    """x (B,T) -> (B,T), shifted and scaled to mean 0 and variance 1 over the mask on all ranks together; 0 outside it.

    Unbiased variance, eps 1e-8. All zeros if the mask has fewer than two tokens. All ranks must call it.
    """
    average, variance = global_moments(x, mask)
    whitened = (x - average) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask, whitened, 0)


def constant_groups(scores, group_size):
    """scores (B,) -> (N,) bool: whether all responses of a group have the same score, so nothing can be learned."""
    groups = scores.view(-1, group_size)
    return groups.amax(1) - groups.amin(1) <= 1e-6 * groups.abs().amax(1).clamp(min=1)


def kl_penalty(logprobs, ref_logprobs, kind):  # [7.2]
    """Per-token estimate of KL(pi || pi_ref) from tokens sampled by pi (Schulman, "Approximating KL Divergence").

    With x = ref_logprobs - logprobs: k1 = -x, k2 = x^2/2, k3 = exp(x) - 1 - x. Above x = 5, k3 continues as its
    tangent, so its gradient is finite, has the right sign and never vanishes, as it would if x were clamped.
    """
    x = ref_logprobs - logprobs
    if kind == "k1":
        return -x
    if kind == "k2":
        return x.square() / 2
    near = x.clamp(max=5.0)  # [7.2]
    k3 = near.expm1() - near  # exp(x) - 1 - x would have no correct digit near 0
    return torch.where(x > 5.0, k3 + math.expm1(5.0) * (x - near), k3)  # the slope at x = 5, times the distance


def check_sampler(rollout_logprobs, old_logprobs, entropy, variance, mask, limit, iteration):  # [12.6]
    """Did the policy sample these tokens? Two tests, as metrics; ends the run above the limit. All ranks must call it.

    kl: of sampler and training pass, per token, by k3. Rounding has no direction and so next to no KL, 1e-12 in float32
    and 1e-3 in bfloat16. A wrong mask, other weights, or logits that only one of the two scales have more.
    surprise: the mean of -log pi(a) - H(pi). It is 0 if a was drawn from pi, whatever log-prob the sampler reports, and
    below if the sampler cuts the tail or is colder. z counts its standard errors, by the variance of -log pi under pi.
    """
    token_kl = kl_penalty(rollout_logprobs, old_logprobs, "k3")  # (B,T)
    row_kl = token_kl.sum(1) / mask.sum(1).clamp(min=16)  # (B,) in a short response, one token would count too much
    mean_kl = global_mean(row_kl)
    worst_kl = global_max(row_kl)  # a few wrong rows vanish in the mean
    if not (mean_kl <= limit and worst_kl <= 40 * limit):  # refuses NaN, too
        fail(
            f"iteration {iteration}: sampler and training pass have a KL of {mean_kl:.2} (limit {limit:.2}), in one "
            f"response {worst_kl:.2} (limit {40 * limit:.2}): wrong mask, weights or sampler (notes, 12.6)"
        )
    surprise = global_mean(-old_logprobs - entropy, mask)
    count = all_reduce(mask.sum()).item()
    total_variance = count * global_mean(variance, mask)
    z = count * surprise / math.sqrt(total_variance + 1e-30)
    # A sound z is below 4. With less variance than this it isn't normal: one rare token could bring it to 15.
    if abs(z) > 8 and abs(surprise) > limit and total_variance > 1000:
        fail(
            f"iteration {iteration}: the policy would not have sampled these tokens: their mean surprise is "
            f"{surprise:.3f} nats (limit {limit:.2}), {z:.1f} standard errors: too cold, too warm or cut? (notes, 12.6)"
        )
    return {"rollout/kl": mean_kl, "rollout/surprise": surprise, "rollout/surprise_z": z}


def token_weights(mask, mode, max_response_length):  # [6.9]
    """mask (B,T), this rank's rows of an optimizer step -> (B,T): the weight of each token's loss, 0 outside the mask.

    The step's loss is the sum of weights times losses. Tokens and rows with an action are counted on all ranks
    together, so it's the same however the step is cut; without a token it is 0. All ranks must call it.
    """
    weights = mask.float()
    if mode == "token-mean":
        return weights / all_reduce(mask.sum()).clamp(min=1)
    if mode == "seq-mean-token-mean":
        weights = weights / mask.sum(1, keepdim=True).clamp(min=1)
    if mode == "seq-mean-token-sum-norm":
        weights = weights / max_response_length
    # seq-mean-token-sum leaves them at 1.
    return weights / all_reduce(mask.any(1).sum()).clamp(min=1)


# --- Models ----------------------------------------------------------------------------------------------------------
# The same in all three scripts, but for PPO's critic, and for sharding: `shard`, and rank 0 alone loads in load_model.


def load_model(name, model_class, lora_rank=0, **lora):
    """A model in float32 without dropout, from safetensors only and without remote code.

    Missing weights are an error, except in the head of a new critic (`score`), which is set to zero. With a lora_rank,
    the model is frozen and gets trainable low-rank matrices next to all its linear layers.
    """
    config = AutoConfig.from_pretrained(name)
    text_config = config.get_text_config()  # a part of config if the model also reads images
    for key, value in text_config.to_dict().items():
        if re.search("drop|jitter", key) and isinstance(value, float):  # or two passes by the same weights would differ
            setattr(text_config, key, 0.0)
    options = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
    # The value head of a critic or reward model is called `score` or `classifier`.
    model, info = model_class.from_pretrained(name, config=config, key_mapping={"^classifier": "score"}, **options)
    for key in info["missing_keys"]:
        if not key.startswith("score."):
            fail(f"{name} cannot be loaded as {model_class.__name__}: it has no weights {key}")
        nn.init.zeros_(model.get_parameter(key))
    if model_class is AutoModelForCausalLM:  # a critic's backbone has no place for the head
        if info["unexpected_keys"]:
            fail(f"{name} has weights that its config has no place for, such as {min(info['unexpected_keys'])}")
        tied = text_config.tie_word_embeddings
        if tied and model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
            fail(f"{name} has a head of its own, but its config says tie_word_embeddings: set that to false")
    if model.base_model is not model.get_decoder():  # what stands beside the decoder reads images and is not trained
        for key, part in model.base_model.named_children():
            part.requires_grad_(part is model.get_decoder() or key == "score")
    if lora_rank:
        from peft import LoraConfig

        # The value head is trained in full, and the fused kernels of some Mamba layers read `out_proj` themselves.
        lora["exclude_modules"] = ["score", "out_proj"] if "mamba" in str(config) else ["score"]
        model.add_adapter(LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear", **lora))
    return model


class Policy(nn.Module):
    """Log-probs of actions under a causal language model."""

    def __init__(self, model, temperature):
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.chunk_elements = 2**26  # [15.2] logits at a time: 256 MiB in fp32, 1 GiB with what is computed from them

    def forward(self, tokens, mask, with_entropy=True):
        """tokens, mask (B,L) -> (3,B,L) in fp32, 0 outside the mask: logprobs; if asked, entropy, variance (head)."""
        actions = mask.nonzero(as_tuple=True)  # (n,) twice, computed once: indexing by the mask waits for the GPU
        output = self.model.get_decoder()(tokens, use_cache=False)
        hidden = output.last_hidden_state[actions]  # (n,H)
        labels = tokens.roll(-1, 1)[actions]  # [1.11] the one shift: state i predicts token i+1
        # Logits exist for one chunk at a time. The backward pass computes them again.
        size = max(1, self.chunk_elements // self.model.config.get_text_config().vocab_size)
        chunks = zip(hidden.split(size), labels.split(size))
        kind = type(output)  # the class in which this model's decoder returns hidden states
        results = [
            checkpoint(self.head, *chunk, kind, with_entropy, use_reentrant=False, preserve_rng_state=False)
            for chunk in chunks
        ]
        blank = mask.float()  # 0 where there is no action
        return torch.stack([blank.masked_scatter(mask, torch.cat(parts)) for parts in zip(*results)])

    def head(self, hidden, labels, kind, with_entropy):
        """hidden (n,H), labels (n,) -> (n,) each: log-prob of the label, mean and variance of -log pi under pi."""
        # Models may scale the logits of their head (Cohere, Granite) or cap them (Gemma). So we call the model itself,
        # with a decoder that only returns `hidden`. It never reads the ids, for which the labels have the right shape.
        decoder = self.model.get_decoder()
        decoder.forward = lambda *args, **kwargs: kind(hidden[None])  # hides the method of its class, for this call
        logits = self.model(labels[None]).logits.squeeze(0).float()  # (n,V)
        del decoder.forward
        if self.temperature != 1:
            logits = logits / self.temperature  # [12.9]
        all_logprobs = logits.log_softmax(-1)
        entropy = variance = torch.zeros_like(all_logprobs[:, 0])
        if with_entropy:
            terms = all_logprobs.exp() * all_logprobs  # NaN for a token that can't be sampled: its log-prob is -inf
            entropy = -terms.nansum(-1)
            with torch.no_grad():
                variance = (terms * all_logprobs).nansum(-1) - entropy.square()
        return all_logprobs.gather(-1, labels[:, None]).squeeze(1), entropy, variance


def trained_parameters(model):
    """{name: parameter} of the parameters that are trained. With LoRA, these are the adapter and the value head."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def make_optimizer(model):
    """AdamW over exactly the trained parameters of `model`. take_step sets the learning rate."""
    return torch.optim.AdamW(trained_parameters(model).values(), weight_decay=0.0, fused=True)


def collect_eos_ids(model, tokenizer):
    """All EOS ids of tokenizer, config and generation config, sorted: each of them ends a response."""
    eos_ids = set()
    for source in tokenizer, model.config, model.generation_config:
        ids = getattr(source, "eos_token_id", None)  # a number, a list of numbers, or None
        eos_ids.update(ids if isinstance(ids, list) else [ids])
    return sorted(eos_ids - {None})


# --- Sampling and batches --------------------------------------------------------------------------------------------
# The same, but for `generate`, which in GRPO reads a group's prompt once, and for sharding: `generating` and `pack`.


def random_stream(*key):
    """A CPU generator seeded by the key alone, e.g. ("rollout", seed, iteration): there is no random state to save."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def draw_prompts(rows, start, count, seed):
    """Entries `start` to `start + count` of an endless list: the rows shuffled, then shuffled again, and so on."""
    data_epoch, first = divmod(start, len(rows))
    order = []
    while len(order) < first + count:
        order += torch.randperm(len(rows), generator=random_stream("epoch", seed, data_epoch)).tolist()
        data_epoch += 1
    return [rows[i] for i in order[first : first + count]]


def sample_tokens(logits, uniforms, temperature):
    """logits (B,V), uniforms (B,) in [0,1) -> tokens (B,), logprobs (B,): the inverse of the cumulative distribution.

    Temperature 0 is greedy: it takes the most likely token and gives it log-prob 0.
    """
    if temperature == 0:
        return logits.argmax(-1), torch.zeros(len(logits), device=logits.device)
    logprobs = (logits.float() / temperature).log_softmax(-1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)  # in fp32, rare tokens could never be drawn
    tokens = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)  # (B,1)
    return tokens.squeeze(1), logprobs.gather(-1, tokens).squeeze(1)


@torch.inference_mode()
def generate(model, prompts, uniforms, eos_ids, temperature):
    """Samples a Response to each of the B prompts (lists of ids) with a KV cache. Equal neighbours are read only once.

    uniforms (B,T) in [0,1), one per row and token: up to rounding, a response depends only on its own row of noise,
    not on the process or batch that it is sampled in. The model's generation_config is ignored.
    """
    prompts = [torch.tensor(ids, device=uniforms.device) for ids in prompts]
    inputs = pad_sequence(prompts, batch_first=True, padding_value=-1, padding_side="left")  # all end in one column
    inputs, owners = torch.unique_consecutive(inputs, return_inverse=True, dim=0)  # (N,P), (B,) its row for each prompt
    attention_mask = (inputs >= 0).long()  # (N,P)
    tokens = torch.zeros_like(uniforms, dtype=torch.long)  # (B,T)
    logprobs = torch.zeros_like(uniforms, dtype=torch.float32)  # (B,T)
    slots = torch.arange(len(uniforms), device=uniforms.device)  # the response that each row of the batch belongs to
    alive = slots >= 0  # (B,) true: so far all of them
    eos = slots.new_tensor(eos_ids)
    cache = transformers.DynamicCache(config=model.config)
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # before 5.24
    model.eval()  # in train mode, gradient checkpointing would switch the KV cache off
    # `inputs` are the tokens to read in this step: the prompts at t = 0, after that the last token (b,1) of the b rows
    # that are left in the batch. Row j belongs to response slots[j].
    for t in tqdm(range(uniforms.shape[1]), "sampling", leave=False, disable=not sys.stderr.isatty()):
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, -inputs.shape[1] :]  # of the inputs
        options = {"position_ids": positions, cache_name: cache, "use_cache": True, "logits_to_keep": 1}
        logits = model(inputs.clamp(min=0), attention_mask=attention_mask, **options).logits[:, -1]  # (b,V)
        if t == 0:  # from here on every response has a row of its own
            cache.reorder_cache(owners)
            logits = logits[owners]
            attention_mask = attention_mask[owners]
        tokens[slots, t], logprobs[slots, t] = sample_tokens(logits, uniforms[slots, t], temperature)
        alive &= ~torch.isin(tokens[slots, t], eos)
        num_alive = int(alive.sum())
        if num_alive == 0:
            break
        # [15.2] Finished rows leave when they are a tenth of the batch, because each removal copies the whole cache.
        # Until then, they keep sampling, and cut_responses removes the excess.
        if num_alive <= 0.9 * len(slots):
            kept = alive.nonzero().squeeze(1)
            cache.reorder_cache(kept)
            slots = slots[kept]
            alive = alive[kept]
            attention_mask = attention_mask[kept]
        inputs = tokens[slots, t][:, None]
        attention_mask = nn.functional.pad(attention_mask, (0, 1), value=1)
    model.train()
    return cut_responses(tokens, logprobs, eos_ids)


def cut_responses(tokens, logprobs, eos_ids):  # [1.10]
    """tokens, logprobs (B,T) -> a list of B Responses, each up to and including its first EOS."""
    responses = []
    for ids, row_logprobs in zip(tokens.tolist(), logprobs.tolist()):
        ends = [t for t, token in enumerate(ids, 1) if token in eos_ids]
        length = ends[0] if ends else len(ids)
        responses.append(Response(ids[:length], row_logprobs[:length], truncated=not ends))
    return responses


def to_batch(rows, responses, device):
    """Rows of data and their Responses -> tokens, mask, rollout_logprobs (B,L), and a list of the rows' lengths."""
    token_rows = []
    logprob_rows = []
    for row, response in zip(rows, responses):
        prompt = row["input_ids"]
        token_rows.append(torch.tensor(prompt + response.ids))
        # The last token of the prompt is the state of the first action. Nothing is sampled after the last token.
        before = [NOT_SAMPLED] * (len(prompt) - 1)
        logprob_rows.append(torch.tensor(before + response.logprobs + [NOT_SAMPLED]))
    tokens = pad_sequence(token_rows, batch_first=True).to(device)
    logprobs = pad_sequence(logprob_rows, batch_first=True, padding_value=NOT_SAMPLED).to(device)
    mask = logprobs != NOT_SAMPLED
    return tokens, mask, torch.where(mask, logprobs, 0), [len(ids) for ids in token_rows]


def pack(lengths, row_numbers, max_tokens, device):  # [5.2]
    """Groups rows, longest first, into micro-batches of at most max_tokens padded tokens; a longer row gets its own.

    A micro-batch is an index into (B,L): the numbers of its rows, and a slice up to the end of the longest. Every pass
    of an iteration uses the same ones, because log-probs change slightly (3e-6 in float32) with the other rows of the
    batch, and the ratio of an unchanged policy must be exactly 1.
    """
    parts = []
    width = 0  # of the last part
    for row in sorted(row_numbers, key=lambda row: lengths[row], reverse=True):
        if not parts or (len(parts[-1]) + 1) * width > max_tokens:
            parts.append([])
            width = lengths[row]
        parts[-1].append(row)
    return [(torch.tensor(part, device=device), slice(lengths[part[0]])) for part in parts]  # the first row is longest


@torch.no_grad()
def forward_all(module, minibatches, tokens, mask, *options):
    """What a Policy (3,B,L) or a Critic (B,L) returns for the whole batch, in the micro-batches of training."""
    result = None
    for minibatch in minibatches:
        for mb in minibatch:
            output = module(tokens[mb], mask[mb], *options)  # (...,b,l)
            if result is None:
                result = output.new_zeros(*output.shape[:-2], *mask.shape)
            result[(..., *mb)] = output
    return result


# --- Data and rewards ------------------------------------------------------------------------------------------------
# The same in all three scripts.

# Appended to questions without "####", because a model that has not seen GSM8K would not write it. Worded by verl.
GSM8K_REQUEST = ' Let\'s think step by step and output the final answer after "####".'


def read_splits(source):
    """{split: table} of a file (all of it is `train`), a folder saved by `datasets`, or a hub id `name[:config]`."""
    if Path(source).is_file():
        kind = re.match(r".*\.(json|csv|parquet)", source.lower())
        if not kind:
            fail(f"{source} is not a .json, .jsonl, .csv or .parquet file")
        return datasets.load_dataset(kind[1], data_files=glob.escape(source))  # this file, whatever stands beside it
    try:
        saved = datasets.load_from_disk(source)
    except FileNotFoundError:
        return datasets.load_dataset(*source.split(":"))
    return saved if isinstance(saved, dict) else {"train": saved}


def read_data(args):
    """(training table, test table or None). Of --eval-dataset, the split `test` is used, or else the last."""
    splits = read_splits(args.dataset)
    test_table = splits.get("test")
    if args.eval_dataset:
        named = read_splits(args.eval_dataset)
        test_table = named.get("test", [*named.values()][-1])
    return splits["train"], test_table


def load_prompts(source, table, args, tokenizer):
    """A list of rows, each a dictionary, and a sentence about them for the start-up block.

    A row has the columns of the data; `prompts`, the text that the model reads, and `input_ids`, its tokens;
    `messages`, the prompt as a chat; `answers`, the reference answer; `record`, the row of the data as it was read.
    Empty and overlong prompts are left out.
    """
    if table is None:
        return [], "no test data (--eval-dataset)"
    for column in args.prompt_column, args.answer_column:
        if column not in [None, *table.column_names]:
            fail(f"{source} has no column {column}; --prompt-column, --answer-column (or None): {table.column_names}")
    use_chat = tokenizer.chat_template and args.chat_template != "none"
    switches = json.loads(args.chat_template_args)
    rows = []
    for number, record in enumerate(table.to_list(), 1):
        prompt = record[args.prompt_column]
        answer = record.get(args.answer_column)
        if isinstance(answer, dict):  # verl's column reward_model
            answer = answer.get("ground_truth", answer)
        if hasattr(answer, "isoformat"):
            fail(f"{source}, row {number}: `datasets` made {answer!r} of the answer; in a .csv file it stays a text")
        if args.reward == "gsm8k" and math.isnan(gsm8k_number(f"####{answer}")):
            fail(f"{source}, row {number}: --reward gsm8k needs one number as the reference answer, not {answer!r}")
        messages = prompt if isinstance(prompt, list) else []
        if isinstance(prompt, str):
            suffix = args.prompt_suffix
            if suffix is None:
                suffix = GSM8K_REQUEST if args.reward == "gsm8k" and "####" not in prompt else ""
            messages = [{"role": "user", "content": prompt + suffix}]
        kinds = {isinstance(message, dict) and type(message.get("content")) for message in messages}
        if kinds != {str} or messages[-1].get("role") == "assistant":
            fail(f"{source}, row {number}: a prompt is a text or a chat of texts that awaits an answer, not {prompt!r}")
        text = "\n".join(message["content"] for message in messages)
        if use_chat:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **switches)
        ids = tokenizer(text, add_special_tokens=not use_chat)["input_ids"]  # a chat template adds the BOS token itself
        if not use_chat and ids[-1:] == [tokenizer.eos_token_id]:  # some tokenizers append it
            ids.pop()
        if prompt and 0 < len(ids) <= args.max_prompt_length:
            row = record | {"prompts": text, "input_ids": ids, "is_chat": prompt is messages}
            rows.append(row | {"messages": messages, "answers": answer, "record": record})
    if not rows:
        fail(f"{source}: every prompt is empty or has more than {args.max_prompt_length} tokens (--max-prompt-length)")
    distinct = len({row["prompts"] for row in rows})
    return rows, f"{source}: {len(rows)} rows, {distinct} distinct, {len(table) - len(rows)} left out"


def gsm8k_number(text):
    """The one number in the line after the last '####', exactly: Decimal('-1234.50') for '#### -$1,234.50'. Else NaN.

    Whatever else stands there is ignored: emphasis, a box, a unit, and a heading, too ('#### 3. Total cost'). A second
    number makes it no answer: '#### 3 + 4 = 7', '#### 10-12', '#### 4.2e1'.
    """
    _, mark, rest = text.replace("\u2212", "-").rpartition("####")  # the typographer's minus
    line = re.sub(r"[$\\]|\{(?=,)|(?<=,)\}", "", rest).strip().split("\n")[0]  # \$42, 1{,}234; \frac{1}{2} stays two
    numbers = re.findall(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d*\.?\d+)", line)
    if mark and len(numbers) == 1:
        return Decimal(numbers[0].replace(",", ""))  # a float would call numbers of 17 digits equal
    return math.nan


def gsm8k(responses, answers):
    """1 if the number after the response's last '####' is that of the answer (a number, or a solution with '####')."""
    # The prefix lets a bare number be read. In a solution, its own last #### decides. NaN equals nothing.
    return [float(gsm8k_number(text) == gsm8k_number(f"####{answer}")) for text, answer in zip(responses, answers)]


def load_reward(spec):
    """The function that --reward names. It returns a number for each response; compute_scores calls it."""
    if spec == "gsm8k":
        return gsm8k
    file, _, name = spec.rpartition(":")
    path = Path(file).resolve()
    sys.path.insert(0, str(path.parent))  # so that it can import its neighbours and start process pools
    found = importlib.util.find_spec(path.stem)
    if not found or found.origin != str(path):
        fail(f"--reward {spec} is neither gsm8k nor path/to/file.py:function, or another module is called {path.stem}")
    return getattr(importlib.import_module(path.stem), name)


def compute_scores(reward_function, tokenizer, rows, responses):  # [8.5]
    """A dictionary for each Response: `response`, its text; its `score` and the `parts` of that; `length`; `truncated`.

    A reward returns a list of numbers, the scores, or a dictionary of such lists, as in {"format": [...], "correct":
    [...]}: these are parts, and the score is their sum. It gets lists by the names of its parameters: prompts and
    responses, texts; answers; messages, the prompts as chats; tokens, the ids of the responses, special ones included;
    truncated, whether each was cut off; record, the row of the data; and any column of the data. A function with
    **kwargs gets them all. One that asks for `completions` is written for TRL and gets chats as TRL has them.
    """
    if not rows:
        return []
    ids = [response.ids for response in responses]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    named = {name: [row[name] for row in rows] for name in rows[0]}
    named |= {"responses": texts, "tokens": ids, "completions": texts, "completion_ids": ids}
    named["truncated"] = [response.truncated for response in responses]
    parameters = inspect.signature(reward_function).parameters
    if "completions" in parameters and rows[0]["is_chat"]:
        named |= {"prompts": named["messages"], "completions": [[{"role": "assistant", "content": x}] for x in texts]}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        parameters = named
    # A reward may change what it gets: every response has copies of its own.
    named = {name: [*map(copy.deepcopy, named[name])] for name in parameters if name in named}
    try:
        returned = reward_function(**named)
    except SystemExit as error:  # the run would end as if all were well
        fail(f"the reward function has ended the program: exit({error.code!r})")
    columns = returned if isinstance(returned, dict) else {"score": returned}
    if {hasattr(column, "__getitem__") and len(column) for column in columns.values()} != {len(rows)}:
        fail(f"the reward must return numbers for {len(rows)} responses, not {str(returned)[:300]}")
    results = []
    for row, response, text, *values in zip(rows, responses, texts, *columns.values()):
        # Beyond 1e15, the squares that a standard deviation adds up are soon more than a float32 can hold.
        if not all(hasattr(value, "__float__") and abs(value) < 1e15 for value in values):
            fail(f"the reward must be numbers below 1e15, not {values}, of {text!r} after {row['prompts'][-300:]!r}")
        parts = dict(zip(columns, map(float, values)))
        result = {"response": text, "score": sum(parts.values()), "parts": parts if columns is returned else {}}
        results.append(result | {"length": len(response.ids), "truncated": response.truncated})
    return results


def to_tensor(dictionaries, name, device):
    """The numbers of that name, (B,)."""
    return torch.tensor([dictionary[name] for dictionary in dictionaries], device=device)


def mean_parts(prefix, results):
    """{prefix/NAME: mean of this part of the scores on all ranks together}. Every rank must call it."""
    parts = gather_object([result["parts"] for result in results])
    names = set(map(frozenset, parts))
    if len(names) > 1:
        fail(f"the reward must return the same parts on every rank, not {[*map(sorted, names)]}")
    means = {}
    for name in sorted(*names):
        means[f"{prefix}/{name}"] = sum(part[name] for part in parts) / len(parts)
    return means


# --- Evaluation and files --------------------------------------------------------------------------------------------
# The same, but for sharding: how models and checkpoints are saved and loaded.


def evaluate(iteration, rows, rollout, reward_function, tokenizer, run_dir, args, accelerator):
    """Scores every row twice, greedy and sampled at temperature 1; writes the completions and returns the metrics.

    The noise of a row is always the same, so two evaluations differ only by the model.
    """
    if not rows:
        return {}
    uniforms = torch.rand(
        len(rows), args.max_response_length, generator=random_stream("eval", args.seed), dtype=torch.float64
    )
    # A rank without rows still takes part in the means.
    mine = slice(accelerator.process_index, None, accelerator.num_processes)
    rows = rows[mine]
    metrics = {}
    for kind, temperature in ("", 0), ("_sampled", 1):
        responses = rollout(rows, uniforms[mine], temperature)
        results = compute_scores(reward_function, tokenizer, rows, responses)
        metrics[f"eval/score{kind}"] = global_mean(to_tensor(results, "score", accelerator.device))
        metrics |= mean_parts(f"eval_part{kind}", results)
        write_completions(run_dir, f"eval{kind}_{iteration:06d}", rows, results, accelerator)
    # Of the sampled responses, which came last.
    metrics["eval/length_mean"] = global_mean(to_tensor(results, "length", accelerator.device))
    metrics["eval/truncated_frac"] = global_mean(to_tensor(results, "truncated", accelerator.device))
    shown = ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
    accelerator.print(f"iteration {iteration}, greedy and sampled at temperature 1: {shown}")
    return metrics


def log(iteration, metrics, run_dir, accelerator):
    """Writes a line of metrics.jsonl and hands it to the tracker. All ranks call it; rank 0 writes."""
    if accelerator.is_main_process:
        with open(run_dir / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": iteration} | metrics) + "\n")
    accelerator.log(metrics, step=iteration)


def find_run(args):
    """(folder of the run, its newest checkpoint or None)."""
    if args.resume and not args.run_name:
        fail("--resume needs --run-name, the name of the run to continue")
    name = args.run_name or f"{Path(__file__).stem}-{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = Path(args.output_dir, broadcast_object_list([name])[0])  # the time is that of rank 0
    if run_dir.exists() and not args.resume:
        fail(f"the run folder {run_dir} exists: choose another --run-name, or continue that run with --resume")
    complete = [path for path in run_dir.glob("checkpoints/*") if re.fullmatch(r"step_\d+(\.pt)?", path.name)]
    # Rank 0's answer: a rank that doesn't see its disk then says which file is missing.
    return run_dir, broadcast_object_list([max(complete, default=None)])[0]


def lock_run(run_dir):
    """Refuses a run folder that another process uses. The lock is free again as soon as this process has ended.

    A pool of workers that a reward has forked does not inherit it. That is why it is lockf and not flock, and closing
    the file anywhere would free it, so the run opens it only here.
    """
    file = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"{run_dir} is in use by another process")
    except OSError as error:
        print(f"{run_dir} cannot be locked ({error}): see to it that no other process writes there")


def open_run(run_dir, args, first_step, accelerator):
    """Creates and locks the run folder, keeps the lines of metrics.jsonl before `first_step`, starts the tracker."""
    script = Path(getattr(sys.modules["__main__"], "__file__", __file__))
    reward = Path(args.reward.rpartition(":")[0])
    own = getattr(sys.modules.get(reward.stem), "SETTINGS", None)  # what a reward file says of itself: its judge, say
    settings = vars(args) | {"num_processes": accelerator.num_processes, "script": script.name, "reward_settings": own}
    if accelerator.is_main_process:
        run_dir.mkdir(parents=True, exist_ok=args.resume)  # a rival may have made it since find_run
        lock_run(run_dir)
        (run_dir / "completions").mkdir(exist_ok=True)
        saved = run_dir / "args.json"
        if saved.exists():  # the run is resumed
            for flag, value in json.loads(saved.read_text()).items():
                if settings.get(flag, value) != value and flag not in ("resume", "run_name"):
                    print(f"  changed    {flag}: it was {value!r} and is {settings[flag]!r}")
        saved.write_text(json.dumps(settings, indent=1))
        for file in {Path(__file__), script, reward}:  # two scripts if one imports this and replaces a part of it
            if file.is_file():
                (run_dir / file.name).write_text(file.read_text())
        path = run_dir / "metrics.jsonl"
        path.touch()
        with open(path, "r+") as file:
            # A killed run may have left half a line, and lines of iterations that are done again.
            kept = [line for line in file if line.endswith("}\n") and json.loads(line)["step"] < first_step]
            file.seek(0)
            file.writelines(kept)
            file.truncate()
    trackers = {"wandb": {"name": run_dir.name, "config": settings}, "tensorboard": {"purge_step": first_step}}
    # accelerate has one name for both: TensorBoard's folder and the project of W&B.
    project = str(run_dir) if args.track == "tensorboard" else Path(__file__).stem
    accelerator.init_trackers(project, None, trackers)
    accelerator.log({"args": f"```\n{json.dumps(settings, indent=1)}\n```"}, step=first_step)


def write_completions(run_dir, name, rows, results, accelerator):
    """Writes the completions of all ranks as .jsonl, sorted: the file does not depend on the number of processes."""
    lines = []
    for row, result in zip(rows, results):
        completion = {"prompt": row["prompts"], "answer": row["answers"]} | result | {"row": row["record"]}
        lines.append(json.dumps(completion, ensure_ascii=False, default=str))
    lines = gather_object(lines)
    if accelerator.is_main_process:
        (run_dir / f"completions/{name}.jsonl").write_text("\n".join(sorted(lines)))


def save_models(path, trainees, tokenizer, accelerator):
    """Saves transformers folders with the tokenizer: the policy (or its adapter) in `path`, other models in subfolders.

    A folder gets its name last, so a model that has it is complete. All ranks call this; rank 0 writes.
    """
    if not accelerator.is_main_process:
        return
    unfinished = path.with_name("unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a run that was killed
    for name, (model, _) in trainees.items():
        target = unfinished if name == "policy" else unfinished / name
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    shutil.rmtree(path, ignore_errors=True)
    unfinished.rename(path)


def save_checkpoint(path, trainees, state, keep, accelerator):  # [13.12]
    """Saves the trained parameters, the states of their optimizers and `state`, and deletes all but the `keep` newest.

    All ranks call it; rank 0 writes.
    """
    if not accelerator.is_main_process:
        return
    saved = {"state": state}
    for name, (model, optimizer) in trainees.items():
        saved[name] = (trained_parameters(model), optimizer.state_dict())
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_name("unfinished")
    torch.save(saved, unfinished)
    torch.load(unfinished, map_location="cpu", mmap=True)  # names the type of what could not be loaded again
    unfinished.replace(path)  # so a file of that name is complete
    for old in sorted(path.parent.glob("step_??????.pt"))[:-keep]:  # none of them if keep is 0
        old.unlink()


def load_checkpoint(path, trainees):
    """Loads a checkpoint into models and optimizers and returns its `state`. Hyperparameters come from the flags."""
    saved = torch.load(path, map_location="cpu", mmap=True)  # a folder would be the sharded script's checkpoint
    if saved.keys() != {*trainees, "state"}:
        fail(f"{path} was written by another script or version, so this one cannot continue it")
    for name, (model, optimizer) in trainees.items():
        weights, saved_optimizer = saved[name]
        if weights.keys() != trained_parameters(model).keys():
            fail(f"{path} was written with another model or another --lora-rank than {name} has now")
        model.load_state_dict(weights, strict=False)  # torch refuses other shapes
        optimizer.load_state_dict(optimizer.state_dict() | {"state": saved_optimizer["state"]})
    return saved["state"]


# --- Processes and signals -------------------------------------------------------------------------------------------
# The same, but for `start_processes`.

SIZES = "batch_size group_size minibatch_size ppo_epochs microbatch_tokens rollout_batch_size max_response_length"


def start_processes(args):
    """Joins the launched processes, checks the flags as far as possible without a model, returns the Accelerator."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    sys.stdout.reconfigure(line_buffering=True)  # lines appear in a log file at once
    automatic = args.dtype == "auto" and torch.cuda.is_bf16_supported(including_emulation=False)  # false without a GPU
    precision = "bf16" if automatic or args.dtype == "bfloat16" else "no"
    tracker = None if args.track == "none" else args.track
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # otherwise, two CPU processes would not form a group
        mixed_precision=precision,
        log_with=tracker,
        project_dir=".",
        # While one process downloads a model or scores, the others wait; NCCL would give up after ten minutes.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=1))],
    )
    if tracker and not accelerator.log_with:  # left out by accelerate
        fail(f"--track {tracker} needs a package that is not installed: pip install {tracker}")
    for name, value in vars(args).items():
        least = int(name in SIZES.split())
        if isinstance(value, int | float) and name != "entropy_coef" and not value >= least:  # refuses NaN, too
            fail(f"--{name} must be at least {least}, but is {value}")
    world_size = accelerator.num_processes
    if args.batch_size * args.group_size % args.minibatch_size or args.minibatch_size % (args.group_size * world_size):
        fail(f"--minibatch-size must be a multiple of --group-size x {world_size} processes that divides all responses")
    if args.group_size == 1 and args.estimator != "reinforce_pp":
        fail(f"--estimator {args.estimator} compares responses to one prompt: --group-size must be 2 or more")
    set_seed(args.seed)  # for LoRA's matrices; all other random numbers come from generators of their own
    return accelerator


def catch_signals():
    """From now on, SIGTERM, SIGHUP and Ctrl-C only append to the returned list, and `main` stops after this iteration.

    The launcher of several processes kills them 30 s after it has forwarded a signal, so a longer iteration is lost
    (TORCH_ELASTIC_SHUTDOWN_TIMEOUT sets other seconds).
    """
    signals = []

    def unblock():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    def reset():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    for number in signal.SIGTERM, signal.SIGINT, signal.SIGHUP:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, frame: signals.append(number))
    # Processes that a reward forks must still die of SIGTERM, which is how a pool ends its workers. A child would lose
    # a SIGTERM that arrives before it has reset the handler, so the signal stays blocked from the fork until then.
    # (Without all this, 12 of 148 pools hung at their end, and 161 of 200 early signals were lost.)
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]),
        after_in_parent=unblock,
        after_in_child=reset,
    )
    return signals


def fail(sentence):
    """Ends this process with one sentence. The launcher then ends the others."""
    sys.exit(f"error: {sentence}")


def parse_args():
    """Args from the command line. Without --model, the defaults are those of the bundled task."""
    if any(word.startswith("--model") for word in sys.argv):
        return tyro.cli(Args)
    if not TINY.exists():
        fail(f"--model is needed: the bundled one is not beside this copy of the script ({TINY})")
    return tyro.cli(Args, default=Args(**BUNDLED))


if __name__ == "__main__":
    main(parse_args())
