"""Supervised fine-tuning (SFT): a policy learns to imitate answers that somebody wrote.
Group: the stages before PPO

    accelerate launch notes/variants/sft.py --train-rows 64                              the bundled task
    accelerate launch notes/variants/sft.py --model MODEL --dataset DATA ...             on any number of processes
    accelerate launch ppo_llm.py --model runs/sft/final --dataset DATA ...               the next stage

    loss = mean over tokens of the answers of -log pi(a_t|s_t)

A row is a prompt and an answer. Prompts are read by the scripts' `load_prompts`, with the flags of the scripts, so the
next stage will show the model the same tokens. An answer stands in the batch as if the policy had sampled it: `mask`
marks its tokens and the EOS, and nothing else is learned. The learning rate falls linearly to 0. Before and after
training, the run prints greedy answers to three test prompts.
"""

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where ppo_llm.py is
import ppo_llm


@dataclass
class Args:
    """Supervised fine-tuning. Flags that the scripts have, too, mean the same here."""

    model: str  # transformers folder or hub id (unset: the bundled model, with its settings)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    lora_rank: int = 0  # with LoRA, too, final/ is a whole model
    gradient_checkpointing: bool = False
    dataset: str = "openai/gsm8k:main"
    eval_dataset: str | None = None
    train_rows: int = 0  # train on the first N rows (0: all)
    prompt_column: str = "question"
    answer_column: str = "answer"  # column with the texts to imitate
    answer_prefix: str = ""  # put before every answer; without a chat template you may want a space
    chat_template: str | None = None
    chat_template_args: str = "{}"
    prompt_suffix: str | None = None
    reward: str = "none"  # of the next stage: gsm8k appends its request for "####" to the prompts
    max_prompt_length: int = 512
    max_response_length: int = 512  # tokens; a longer answer is refused
    total_steps: int = 100  # optimizer steps (0: only evaluate)
    batch_size: int = 64  # rows per step
    microbatch_tokens: int = 2048
    lr: float = 1e-5  # of the first step
    max_grad_norm: float = 1.0
    output_dir: str = "runs"
    run_name: str = "sft"
    seed: int = 1
    eval_every: int = 10  # steps between evaluations (0: only before and after training)
    eval_rows: int = 512
    track: Literal["tensorboard", "wandb", "none"] = "tensorboard"

    resume = False  # no flag


SHARED = "model dataset eval_dataset prompt_suffix max_response_length microbatch_tokens"
BUNDLED = {name: ppo_llm.BUNDLED[name] for name in SHARED.split()}
BUNDLED |= {"answer_prefix": " ", "total_steps": 40, "lr": 1e-3}


def main(args):
    """Trains and returns the run folder."""
    args.minibatch_size = args.batch_size  # start_processes compares them
    accelerator = ppo_llm.start_processes(args)
    rank, world_size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    run_dir, _ = ppo_llm.find_run(args)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if args.chat_template not in (None, "none"):
        tokenizer.chat_template = Path(args.chat_template).read_text()
    train_table, test_table = ppo_llm.read_data(args)
    train_rows, summary = ppo_llm.load_prompts(args.dataset, train_table, args, tokenizer)
    test_rows, _ = ppo_llm.load_prompts(args.eval_dataset or args.dataset, test_table, args, tokenizer)
    train_rows = train_rows[: args.train_rows or None]
    test_rows = test_rows[: args.eval_rows]
    for row in train_rows + test_rows:
        if not row["answers"]:
            ppo_llm.fail(f"there is no answer to {row['prompts'][-100:]!r}")
        row["response"] = encode_answer(f"{args.answer_prefix}{row['answers']}", args, tokenizer)

    model = ppo_llm.load_model(args.model, AutoModelForCausalLM, args.lora_rank, task_type="CAUSAL_LM")
    policy = wrap(ppo_llm.Policy(model, temperature=1.0), args, accelerator)
    optimizer = ppo_llm.make_optimizer(model)
    ppo_llm.open_run(run_dir, args, 0, accelerator)
    first = train_rows[0]["prompts"][-60:] + tokenizer.decode(train_rows[0]["response"].ids)
    accelerator.print(f"sft.py: {world_size} process(es), {summary}, {len(train_rows)} to train, the first: {first!r}")

    def evaluate():
        if len(test_rows) < world_size:
            return {}
        rows = test_rows[rank::world_size]
        tokens, mask, _, lengths = ppo_llm.to_batch(rows, [row["response"] for row in rows], device)  # (B,L)
        microbatches = ppo_llm.pack(lengths, range(len(rows)), args.microbatch_tokens, device)
        logprobs = ppo_llm.forward_all(policy, [microbatches], tokens, mask, False)[0]
        return {"eval/loss": ppo_llm.global_mean(-logprobs, mask)}

    report(0, evaluate(), run_dir, accelerator)
    show_answers(model, tokenizer, test_rows or train_rows, args, accelerator)
    for step in range(1, args.total_steps + 1):
        rows = ppo_llm.draw_prompts(train_rows, (step - 1) * args.batch_size, args.batch_size, args.seed)
        rows = rows[rank::world_size]
        tokens, mask, _, lengths = ppo_llm.to_batch(rows, [row["response"] for row in rows], device)  # (B,L)
        weights = ppo_llm.token_weights(mask, "token-mean", None)  # 1 / tokens of all ranks
        loss = 0
        for mb in ppo_llm.pack(lengths, range(len(rows)), args.microbatch_tokens, device):
            logprobs = policy(tokens[mb], mask[mb], False)[0]  # (b,l)
            share = -(weights[mb] * logprobs).sum()  # of the step's loss
            share.backward()
            loss += share.detach()
        metrics = {"loss": ppo_llm.all_reduce(loss).item()} | take_step(model, optimizer, step, args)
        if step == args.total_steps or (args.eval_every and step % args.eval_every == 0):
            metrics |= evaluate()
        report(step, metrics, run_dir, accelerator)
    show_answers(model, tokenizer, test_rows or train_rows, args, accelerator)
    save(run_dir, model, AutoModelForCausalLM, tokenizer, args, accelerator)
    return run_dir


def encode_answer(text, args, tokenizer):
    """A text as a Response: its tokens and an EOS, as if they had been sampled."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    if len(ids) > args.max_response_length:
        limit = f"--max-response-length {args.max_response_length}"
        ppo_llm.fail(f"an answer has {len(ids)} tokens with its EOS, more than {limit}: {text[:200]!r}")
    return ppo_llm.Response(ids, [0.0] * len(ids), False)


def wrap(module, args, accelerator):
    """As in the scripts: on its device, with autocast."""
    if args.gradient_checkpointing:
        module.model.gradient_checkpointing_enable()
    return accelerator.prepare_model(module.train(), evaluation_mode=True)


def take_step(model, optimizer, step, args):
    """Adds up the ranks' gradients, clips the sum and takes an optimizer step. Returns its metrics."""
    ppo_llm.sum_gradients(ppo_llm.trained_parameters(model).values())
    (group,) = optimizer.param_groups
    group["lr"] = args.lr * (1 - (step - 1) / args.total_steps)
    norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf).item()
    if not math.isfinite(norm):
        ppo_llm.fail(f"step {step}: the gradient norm is {norm}")
    optimizer.step()
    optimizer.zero_grad()
    return {"grad_norm": norm, "lr": group["lr"]}


def report(step, metrics, run_dir, accelerator):
    accelerator.print(f"step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
    ppo_llm.log(step, metrics, run_dir, accelerator)


def show_answers(model, tokenizer, rows, args, accelerator):
    """Prints how the model answers three prompts, greedily: the first hundred tokens."""
    if accelerator.is_main_process:
        width = min(100, args.max_response_length)
        noise = torch.zeros(len(rows[:3]), width, dtype=torch.float64, device=accelerator.device)
        eos_ids = ppo_llm.collect_eos_ids(model, tokenizer)
        with accelerator.autocast():
            answers = ppo_llm.generate(model, [row["input_ids"] for row in rows[:3]], noise, eos_ids, 0)
        for row, answer in zip(rows, answers):
            print(f"  {row['prompts'][-60:]!r}: it says {tokenizer.decode(answer.ids)[:200]!r}")


def save(run_dir, model, model_class, tokenizer, args, accelerator):
    """final/, a whole model. A LoRA adapter is merged into a copy of its base in float32."""
    if args.lora_rank:
        from peft import PeftModel

        ppo_llm.save_models(run_dir / "adapter", {"policy": (model, None)}, tokenizer, accelerator)
        accelerator.wait_for_everyone()
        base = ppo_llm.load_model(args.model, model_class)
        model = PeftModel.from_pretrained(base, run_dir / "adapter").merge_and_unload()
    ppo_llm.save_models(run_dir / "final", {"policy": (model, None)}, tokenizer, accelerator)
    accelerator.print(f"the trained model is in {run_dir}/final")
    time.sleep(0.5)  # as in the scripts, for gloo's threads
    accelerator.end_training()


if __name__ == "__main__":
    ppo_llm.Args = Args  # parse_args reads these two names
    ppo_llm.BUNDLED = BUNDLED
    main(ppo_llm.parse_args())
