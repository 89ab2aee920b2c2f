"""From comparisons of answers: a reward model (Bradley-Terry), or with --dpo-beta a policy without one (DPO).
Group: the stages before PPO

    accelerate launch notes/variants/preferences.py --model runs/sft/final --dataset PAIRS --run-name rm ...
    REWARD_MODEL=runs/rm/final accelerate launch ppo_llm.py --model runs/sft/final --critic-model runs/rm/final \
        --reward notes/variants/reward_model.py:reward_model ...

    P(chosen is better) = sigmoid(r_chosen - r_rejected),  loss = mean over pairs of -log of it

In a reward model, r is what a linear layer `score` makes of the last token of the text that isn't the padding token, as
reward_model.py reads it. In a critic, this is the value of the state after that token. In DPO (2305.18290), r is beta
times the log-ratio of policy and reference, summed over the answer; prompt and answer are cut into tokens as in sft.py.
Before and after training, the run prints what the model makes of three test pairs: the scores, or its own answers.

A pair has columns `chosen` and `rejected`: chats that differ in their last message; answers, with --prompt-column; or
texts that begin with the same prompt. The rest is as in sft.py.
"""

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import sft
import torch
import tyro
from datasets import Dataset
from torch.nn.functional import logsigmoid
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where ppo_llm.py is
import ppo_llm


@dataclass
class Args(sft.Args):
    """A reward model or a policy from pairs of answers. Flags that the scripts have, too, mean the same here."""

    dataset: str = "trl-lib/ultrafeedback_binarized"
    run_name: str = "preferences"
    prompt_column: str | None = None  # column with the prompts (unset: chosen and rejected begin with them)
    dpo_beta: float = 0.0  # train a policy, and weigh its KL from --model with this (0: train a reward model)
    # What sft.py and load_prompts want to know and pairs don't have.
    answer_column: tyro.conf.Suppress[str | None] = None
    reward: tyro.conf.Suppress[str] = "none"


class RewardModel(AutoModelForSequenceClassification):
    """A classifier with one label, for load_model, which sets a new head to zero."""

    @classmethod
    def from_pretrained(cls, name, config, **options):
        config.num_labels = 1
        return super().from_pretrained(name, config=config, **options)


def main(args):
    """Trains and returns the run folder."""
    args.minibatch_size = args.batch_size  # start_processes compares them
    accelerator = ppo_llm.start_processes(args)
    rank, world_size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    run_dir, _ = ppo_llm.find_run(args)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if args.chat_template:  # saved with the model, so reward_model.py will read the same texts
        tokenizer.chat_template = None if args.chat_template == "none" else Path(args.chat_template).read_text()
    train_table, test_table = ppo_llm.read_data(args)
    pad = AutoConfig.from_pretrained(args.model).get_text_config().pad_token_id
    train_rows = read_pairs(args.dataset, train_table, args, tokenizer, pad)[: args.train_rows or None]
    test_rows = read_pairs(args.eval_dataset or args.dataset, test_table, args, tokenizer, pad)[: args.eval_rows]

    if args.dpo_beta:
        model_class = AutoModelForCausalLM
        model = ppo_llm.load_model(args.model, model_class, args.lora_rank, task_type="CAUSAL_LM")
        scorer = sft.wrap(ppo_llm.Policy(model, 1.0), args, accelerator)
        reference = scorer  # with LoRA: the policy with its adapter switched off
        if args.lora_rank == 0:
            reference_model = ppo_llm.load_model(args.model, model_class).requires_grad_(False)
            reference = sft.wrap(ppo_llm.Policy(reference_model, 1.0), args, accelerator)
    else:
        model_class = RewardModel
        lora = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
        model = ppo_llm.load_model(args.model, model_class, args.lora_rank, **lora)
        scorer = sft.wrap(ppo_llm.Critic(model), args, accelerator)
    optimizer = ppo_llm.make_optimizer(model)
    ppo_llm.open_run(run_dir, args, 0, accelerator)
    first = [train_rows[0][name][-60:] for name in ("prompts", "chosen", "rejected")]
    accelerator.print(f"preferences.py: {world_size} process(es), {len(train_rows)} pairs, {len(test_rows)} held out")
    accelerator.print("  the first: after {!r} rather {!r} than {!r}".format(*first))

    def to_pairs(rows):
        """tokens, mask (2b,L), chosen sides first, and micro-batches (index into them) in which pairs stay together."""
        sides = [row["sides"][0] for row in rows] + [row["sides"][1] for row in rows]
        tokens, mask, _, lengths = ppo_llm.to_batch(*zip(*sides), device)
        widths = [max(pair) for pair in zip(lengths[: len(rows)], lengths[len(rows) :])]
        parts = ppo_llm.pack(widths, range(len(rows)), args.microbatch_tokens // 2, device)
        return tokens, mask, [(torch.cat([pairs, pairs + len(rows)]), columns) for pairs, columns in parts]

    def score(tokens, mask):
        """r of a micro-batch: (b,) of the chosen, (b,) of the rejected sides."""
        if args.dpo_beta == 0:
            return scorer(tokens, mask).sum(1).chunk(2)  # the mask has one state in each row
        if reference is scorer:
            model.disable_adapters()
        with torch.no_grad():
            ref_logprobs = reference(tokens, mask, False)[0]
        if reference is scorer:
            model.enable_adapters()
        logprobs = scorer(tokens, mask, False)[0]
        return (args.dpo_beta * (logprobs - ref_logprobs)).sum(1).chunk(2)

    @torch.no_grad()
    def evaluate():
        if len(test_rows) < world_size:
            return {}
        tokens, mask, microbatches = to_pairs(test_rows[rank::world_size])
        scores = torch.cat([torch.stack(score(tokens[mb], mask[mb])) for mb in microbatches], 1)  # (2,b)
        margins = scores[0] - scores[1]
        return {
            "eval/accuracy": ppo_llm.global_mean((margins.sign() + 1) / 2),  # a tie counts half
            "eval/loss": ppo_llm.global_mean(-logsigmoid(margins)),
            "eval/margin": ppo_llm.global_mean(margins),
            "eval/score_mean": ppo_llm.global_mean(scores),
            "eval/score_std": ppo_llm.global_std(scores),  # the scale that it has learned
        }

    def show():
        if args.dpo_beta:
            sft.show_answers(model, tokenizer, test_rows or train_rows, args, accelerator)
        for row in [] if args.dpo_beta else (test_rows or train_rows)[:3]:
            tokens, mask, microbatches = to_pairs([row])
            with torch.no_grad():
                scores = [r.item() for mb in microbatches for r in score(tokens[mb], mask[mb])]
            texts = [f"{r:.3g} for {row[name][-100:]!r}" for r, name in zip(scores, ("chosen", "rejected"))]
            accelerator.print(f"  {row['prompts'][-60:]!r}: {' and '.join(texts)}")

    sft.report(0, evaluate(), run_dir, accelerator)
    show()
    for step in range(1, args.total_steps + 1):
        rows = ppo_llm.draw_prompts(train_rows, (step - 1) * args.batch_size, args.batch_size, args.seed)
        tokens, mask, microbatches = to_pairs(rows[rank::world_size])
        loss = 0
        for mb in microbatches:
            chosen, rejected = score(tokens[mb], mask[mb])
            share = -logsigmoid(chosen - rejected).sum() / args.batch_size
            share.backward()
            loss += share.detach()
        metrics = {"loss": ppo_llm.all_reduce(loss).item()} | sft.take_step(model, optimizer, step, args)
        if step == args.total_steps or (args.eval_every and step % args.eval_every == 0):
            metrics |= evaluate()
        sft.report(step, metrics, run_dir, accelerator)
    show()
    sft.save(run_dir, model, model_class, tokenizer, args, accelerator)
    return run_dir


def read_pairs(source, table, args, tokenizer, pad):
    """Rows as load_prompts makes them, with `sides`: of chosen and of rejected, a row and a Response for to_batch."""
    if table is None:
        return []
    records = []
    for number, record in enumerate(table.to_list(), 1):
        prompt = record[args.prompt_column] if args.prompt_column else None
        chosen, rejected = record["chosen"], record["rejected"]
        if chosen == rejected:
            ppo_llm.fail(f"{source}, row {number}: chosen and rejected are equal: {str(chosen)[-200:]!r}")
        if isinstance(chosen, list):  # chats
            prompt = (chosen[:-1] or prompt) if chosen[:-1] == rejected[:-1] else None
            chosen, rejected = chosen[-1]["content"], rejected[-1]["content"]
        elif prompt is None:  # what they share, up to the last space: answers may begin with the same letters
            same = [a == b for a, b in zip(chosen, rejected)]
            prompt = re.match(r"(?:(.*)\s)?", chosen[: [*same, False].index(False)], re.DOTALL)[1] or ""
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        if not prompt:
            ppo_llm.fail(f"{source}, row {number}: no common prompt before {chosen[:99]!r} and {rejected[:99]!r}")
        answers = {"chosen": args.answer_prefix + chosen, "rejected": args.answer_prefix + rejected}
        records.append({"prompt": prompt} | answers)
    rows, _ = ppo_llm.load_prompts(source, Dataset.from_list(records), replace(args, prompt_column="prompt"), tokenizer)
    for row in rows:
        row["sides"] = []
        for text in row["chosen"], row["rejected"]:
            side = row, sft.encode_answer(text, args, tokenizer)
            if args.dpo_beta == 0:  # the whole text, and its last token as the only state
                chat = [*row["messages"], {"role": "assistant", "content": text}]
                whole = row["prompts"] + text
                if tokenizer.chat_template:
                    whole = tokenizer.apply_chat_template(chat, tokenize=False)
                ids = tokenizer(whole, add_special_tokens=not tokenizer.chat_template)["input_ids"]
                while ids[-1:] == [pad]:  # transformers' classifiers pass over it, also where it is the EOS
                    ids.pop()
                side = {"input_ids": ids}, ppo_llm.Response([tokenizer.eos_token_id], [0.0], False)
            row["sides"].append(side)
    return rows


if __name__ == "__main__":
    main(tyro.cli(Args))
