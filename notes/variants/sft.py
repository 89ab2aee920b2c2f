"""Supervised fine-tuning (SFT): a policy that imitates answers somebody wrote, in the batch layout of the scripts.
Group: the stages before PPO

    accelerate launch notes/variants/sft.py --train-rows 64 --run-name sft                    the embedded task
    accelerate launch notes/variants/sft.py --model MODEL --dataset DATA --run-name sft ...   then --model runs/sft/final

    loss = mean over tokens of the answers of -log pi(a_t|s_t)

A row is a prompt, read through the scripts' own `load_prompts` with the scripts' data flags, so PPO and GRPO will show
the model the same tokens, and an answer with an EOS. Only the answer is learned: to the mask, its tokens are actions as
if the policy had sampled them. The learning rate falls linearly to 0. `final/` is a whole model, with LoRA, too.
"""

import math
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import tyro
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where ppo_llm.py is
import ppo_llm


@dataclass
class Args:
    """Supervised fine-tuning. Flags that the scripts have, too, mean the same here."""

    model: str  # transformers folder or hub id (unset: the embedded model, with its settings)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    lora_rank: int = 0
    gradient_checkpointing: bool = False
    dataset: str = "openai/gsm8k:main"
    eval_dataset: str | None = None
    train_rows: int = 0  # train on the first N rows (0: all)
    prompt_column: str = "question"
    answer_column: str = "answer"  # column with the texts to imitate
    answer_prefix: str = ""  # put before every answer: a prompt in plain text may want a space there
    chat_template: str | None = None
    chat_template_args: str = "{}"
    prompt_suffix: str | None = None
    reward: str = "gsm8k"  # what the next stage will have: gsm8k adds its request to the prompts
    max_prompt_length: int = 512
    max_response_length: int = 512  # tokens, with the EOS; a longer answer is refused
    total_steps: int = 100  # optimizer steps (0: only evaluate)
    batch_size: int = 64  # answers per step
    microbatch_tokens: int = 2048
    lr: float = 1e-5  # of the first step
    max_grad_norm: float = 1.0
    output_dir: str = "runs"
    run_name: str | None = None
    seed: int = 1
    eval_every: int = 10  # steps between evaluations (0: only before and after training)
    eval_rows: int = 512
    track: Literal["tensorboard", "wandb", "none"] = "tensorboard"

    resume = False  # no flag: a run of minutes starts again

    @property
    def minibatch_size(self):  # which start_processes checks
        return self.batch_size


EMBEDDED = ppo_llm.EMBEDDED | {"answer_prefix": " ", "total_steps": 40, "lr": 1e-3}


def main(args):
    """Trains and returns the run folder."""
    args.run_name = args.run_name or f"sft-{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
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
        row["response"] = encode_answer(row, row["answers"], args, tokenizer)

    model = ppo_llm.load_model(args.model, AutoModelForCausalLM, args.lora_rank, task_type="CAUSAL_LM")
    policy = wrap(ppo_llm.Policy(model, 1.0), args, accelerator)
    optimizer = ppo_llm.make_optimizer(model)
    ppo_llm.open_run(run_dir, args, 0, accelerator)
    accelerator.print(
        f"sft.py: {world_size} process(es) on {device.type}, {args.total_steps} steps of {args.batch_size} answers\n"
        f"  train      {summary}; {len(train_rows)} are learned from\n"
        f"  the first  {train_rows[0]['prompts'][-60:]!r} -> {tokenizer.decode(train_rows[0]['response'].ids)[:60]!r}"
    )

    def evaluate():
        rows = test_rows[rank::world_size]
        if len(test_rows) < world_size:
            return {}
        tokens, mask, _, lengths = ppo_llm.to_batch(rows, [row["response"] for row in rows], device)  # (B,L)
        microbatches = ppo_llm.pack(lengths, range(len(rows)), args.microbatch_tokens, device)
        logprobs = ppo_llm.forward_all(policy, [microbatches], tokens, mask)
        return {"eval/loss": ppo_llm.global_mean(-logprobs, mask)}

    ppo_llm.log(0, evaluate(), run_dir, accelerator)
    for step in range(1, args.total_steps + 1):
        first = (step - 1) * args.batch_size
        rows = ppo_llm.draw_prompts(train_rows, first, args.batch_size, args.seed)[rank::world_size]
        tokens, mask, _, lengths = ppo_llm.to_batch(rows, [row["response"] for row in rows], device)  # (B,L)
        num_tokens, num_rows = ppo_llm.count_actions(mask)  # on all ranks
        loss = 0
        for mb in ppo_llm.pack(lengths, range(len(rows)), args.microbatch_tokens, device):
            logprobs, _ = policy(tokens[mb], mask[mb])  # (b,l)
            share = ppo_llm.aggregate(-logprobs, mask[mb], "token-mean", num_tokens, num_rows, None)
            share.backward()
            loss += share.detach()
        metrics = take_step(model, optimizer, step, args) | {"loss": ppo_llm.all_reduce(loss).item()}
        if step == args.total_steps or (args.eval_every and step % args.eval_every == 0):
            metrics |= evaluate()
            accelerator.print(f"step {step}/{args.total_steps}: " + describe(metrics))
        ppo_llm.log(step, metrics, run_dir, accelerator)

    save(run_dir, model, AutoModelForCausalLM, tokenizer, args, accelerator)
    return run_dir


def encode_answer(row, text, args, tokenizer):
    """A text as the Response to a row's prompt: its tokens, as if they had been sampled, and an EOS."""
    ids = tokenizer(f"{args.answer_prefix}{text}", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    if not text or len(ids) > args.max_response_length:
        what = f"{len(ids)} tokens with its EOS (--max-response-length {args.max_response_length})" if text else "no text"
        ppo_llm.fail(f"the answer {str(text)[:100]!r} to {row['prompts'][-100:]!r} has {what}")
    return ppo_llm.Response(ids, [0.0] * len(ids), False)


def wrap(module, args, accelerator):
    """On its device, with autocast, as in the scripts."""
    if args.gradient_checkpointing:
        module.model.gradient_checkpointing_enable()
    return accelerator.prepare_model(module.train(), evaluation_mode=True)


def take_step(model, optimizer, step, args):
    """Adds up the ranks' gradients, clips the sum and takes an optimizer step: its metrics."""
    ppo_llm.sum_gradients(ppo_llm.trained_parameters(model).values())
    lr = args.lr * (1 - (step - 1) / args.total_steps)
    for group in optimizer.param_groups:
        group["lr"] = lr
    norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf).item()
    if not math.isfinite(norm):
        ppo_llm.fail(f"step {step}: the gradient norm is {norm}")
    optimizer.step()
    optimizer.zero_grad()
    return {"grad_norm": norm, "lr": lr}


def describe(metrics):
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def save(run_dir, model, model_class, tokenizer, args, accelerator):
    """final/, a whole model. With LoRA, adapter/ is merged into a base that is loaded again, in float32."""
    if args.lora_rank:
        from peft import PeftModel

        ppo_llm.save_models(run_dir / "adapter", {"policy": (model, None)}, tokenizer, accelerator)
        accelerator.wait_for_everyone()
        base = ppo_llm.load_model(args.model, model_class)
        model = PeftModel.from_pretrained(base, run_dir / "adapter").merge_and_unload()
    ppo_llm.save_models(run_dir / "final", {"policy": (model, None)}, tokenizer, accelerator)
    accelerator.print(f"the trained model is in {run_dir}/final")
    time.sleep(0.5)  # as in the scripts: gloo's threads
    accelerator.end_training()


def parse_args(kind, embedded):
    """From the command line. Without --model, the defaults are those of the embedded task."""
    if any(word.startswith("--model") for word in sys.argv):
        return tyro.cli(kind)
    known = {field.name for field in fields(kind)}
    return tyro.cli(kind, default=kind(**{name: value for name, value in embedded.items() if name in known}))


if __name__ == "__main__":
    main(parse_args(Args, EMBEDDED))
