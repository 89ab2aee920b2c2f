"""Make the bundled default: a tiny language model with its own tokenizer, and the word problems it half knows.

    python benchmarks/make_tiny.py            # 20 to 30 minutes on two CPU cores, writes benchmarks/tiny/

Reinforcement learning of a language model starts from a pretrained model that *can* solve the task but usually does
not. This script makes that situation in miniature. It invents word problems in GSM8K's format (`question`, `answer`
ending in `#### n`) with two or three arithmetic steps, numbers up to three digits and irrelevant sentences, and
pretrains a Qwen2-architecture model of 0.9M parameters on text in which each question is followed by one of:

    worked   " First 6*12=72, then 72-15=57.\\n#### 57"    right, step by step
    hasty    " First 6*12=72.\\n#### 61"                   the last step is guessed
    blurted  " #### 72"                                    guessed at once, mostly wrong

The text is mostly worked at first and mostly blurted in the last 15% of the pretraining. So the model mostly blurts
when sampled, and its responses grow as RL teaches it to show its work.

It writes `model/` (an ordinary transformers folder, fp32 safetensors), `train.jsonl`, `test.jsonl` and `scores.json`
(the scores printed at the end). No test question occurs in train.jsonl or in the pretraining text.

Everything is drawn from one seed with two threads: data and tokenizer are the same on every machine, the weights up to
the floating-point rounding of the machine's kernels.
"""

import argparse
import json
import os
import random
import re
import time
from pathlib import Path

import torch
from common import TINY, write_lines
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TEXTBOOK = 0.85, 0.90  # for this share of the steps the text is a textbook: 90% worked. It learns arithmetic 3x faster
WORKED = 0.33  # share of worked answers in the rest: what the model ends up doing when left alone
HASTY = 0.17  # share of hasty ones among those that are not worked
GUESS_RIGHT = 0.08  # how often a guess happens to be right
NAMES = ["Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gita", "Hugo", "Ines", "Jon"]
NAMES += ["Kira", "Leo", "Mia", "Noor", "Omar", "Pia", "Quin", "Rosa", "Sam", "Tess"]
ITEMS = ["apples", "books", "cards", "coins", "eggs", "shells", "stamps", "pens", "beads", "nuts", "rocks", "plums"]
BOXES = ["boxes", "bags", "jars", "crates"]


def make_problem(rng):
    """One problem: (question, [(expression, result), ...]) with two or three steps; every value is 1 to 999."""
    while True:
        name, friend = rng.sample(NAMES, 2)
        item, other = rng.sample(ITEMS, 2)
        num_steps = rng.choice((2, 3))
        sentences, steps = [], []
        if rng.random() < 0.6:
            count, each = rng.randint(2, 9), rng.randint(3, 40)
            value = count * each
            sentences.append(f"{name} has {count} {rng.choice(BOXES)} of {each} {item}.")
            steps.append((f"{count}*{each}", value))
        else:
            value = rng.randint(12, 300)
            sentences.append(f"{name} has {value} {item}.")
        closing = f"How many {item} does {name} have now?"
        while len(steps) < num_steps:
            left = num_steps - len(steps)
            kind = rng.choice(("more", "less", "less", "more", "times", "together", "share", "cost"))
            k = rng.randint(3, 99)
            if kind == "more":
                sentences.append(f"{name} {rng.choice(('buys', 'finds', 'gets'))} {k} more.")
                steps.append((f"{value}+{k}", value + k))
            elif kind == "less" and value - k >= 10:
                sentences.append(f"{name} {rng.choice(('loses', 'sells', 'gives away'))} {k}.")
                steps.append((f"{value}-{k}", value - k))
            elif kind == "times" and value < 200:
                word, k = rng.choice((("doubles", 2), ("triples", 3)))
                sentences.append(f"Then that number {word}.")
                steps.append((f"{value}*{k}", value * k))
            elif kind == "together" and left >= 2:  # the value is needed twice
                sentences.append(f"{friend} has {k} more than {name}.")
                steps += [(f"{value}+{k}", value + k), (f"{value}+{value + k}", value + value + k)]
                closing = f"How many {item} do they have together?"
                break
            elif kind == "share" and left == 1:
                k = rng.randint(2, 5)
                if value % k or value > 200:
                    continue
                sentences.append(f"{k} friends share them.")
                steps.append((f"{value}/{k}", value // k))
                closing = f"How many {item} does each get?"
            elif kind == "cost" and left == 1 and value <= 60:
                k = rng.randint(2, 9)
                sentences.append(f"Each one sells for {k} dollars.")
                steps.append((f"{value}*{k}", value * k))
                closing = "How many dollars is that?"
            value = steps[-1][1] if steps else value
        if len(steps) != num_steps or not all(0 < result < 1000 for _, result in steps):
            continue
        if rng.random() < 0.5:  # a sentence that does not matter
            noise = (
                f"{friend} has {rng.randint(2, 99)} {other}.",
                f"{name} is {rng.randint(5, 60)} years old.",
                f"A bag costs {rng.randint(2, 99)} dollars.",
            )
            sentences.insert(rng.randint(0, len(sentences)), rng.choice(noise))
        return " ".join(sentences + [closing]), steps


def worked_answer(steps):
    work = ", then ".join(f"{expression}={result}" for expression, result in steps)
    return f"First {work}.\n#### {steps[-1][1]}"


def make_rows(rng, count):
    """That many rows in GSM8K's format, no two with the same question."""
    problems = {}
    while len(problems) < count:
        question, steps = make_problem(rng)
        problems.setdefault(question, steps)
    return [{"question": question, "answer": worked_answer(steps)} for question, steps in problems.items()]


def guess(rng, question, steps):
    """A plausible wrong number (or, with GUESS_RIGHT, the right one): a value on the way, or a mix of two numbers."""
    if rng.random() < GUESS_RIGHT:
        return steps[-1][1]
    numbers = [int(n) for n in re.findall(r"\d+", question)] + [result for _, result in steps[:-1]]
    a, b = rng.choice(numbers), rng.choice(numbers)
    return rng.choice((a, a + b, abs(a - b), steps[-1][1] + rng.randint(-20, 20)))


def pretraining_text(rng, question, steps, worked, hasty=HASTY):
    """The answer part of one pretraining row: worked with that probability, else hasty or blurted."""
    u = (rng.random() - worked) / (1 - worked)
    if u < 0:
        return " " + worked_answer(steps)
    if u < hasty:
        shown = ", then ".join(f"{expression}={result}" for expression, result in steps[:-1])
        return f" First {shown}.\n#### {max(1, guess(rng, question, steps))}"
    return f" #### {max(1, guess(rng, question, steps))}"


def train_tokenizer(texts, vocab_size, folder):
    """Byte-level BPE with single digits, so that any text can be encoded and arithmetic is done digit by digit."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r"\d| ?[A-Za-z]+| ?#+|\s+(?!\S)|\s|[^\sA-Za-z\d]"), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|pad|>", "<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|pad|>")
    fast.padding_side = "left"
    fast.save_pretrained(folder)
    return fast


def pretrain(model, tokenizer, rng, test_questions, num_steps, rows_per_step=128, peak_lr=3e-3):
    """Next-token prediction on freshly invented rows; the question counts a tenth, it teaches only its own style."""
    decay, no_decay = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak_lr, betas=(0.9, 0.98))
    chunk, start = 16, time.time()
    textbook_steps = int(TEXTBOOK[0] * num_steps)
    for step in range(num_steps):
        if step % chunk == 0:  # invent the rows of several steps at once and sort them by question length: less padding
            rows, worked = [], (TEXTBOOK[1] if step < textbook_steps else WORKED)
            while len(rows) < chunk * rows_per_step:
                question, steps = make_problem(rng)
                if question not in test_questions:
                    rows.append((question, pretraining_text(rng, question, steps, worked)))
            questions = tokenizer([q for q, _ in rows])["input_ids"]
            answers = tokenizer([a for _, a in rows])["input_ids"]
            rows = sorted(zip(questions, answers), key=lambda row: len(row[0]))
            batches = [rows[i : i + rows_per_step] for i in range(0, len(rows), rows_per_step)]
            rng.shuffle(batches)
        batch = batches[step % chunk]
        width = max(len(q) + len(a) for q, a in batch) + 1
        input_ids = torch.full((len(batch), width), tokenizer.pad_token_id)
        weights = torch.zeros(len(batch), width)
        for i, (q, a) in enumerate(batch):
            end = len(q) + len(a) + 1
            input_ids[i, :end] = torch.tensor(q + a + [tokenizer.eos_token_id])
            weights[i, : len(q)], weights[i, len(q) : end] = 0.1, 1.0
        warmup = min(1.0, (step + 1) / 100)
        decayed = 0.02 + 0.98 * min(1.0, 2.5 * (1 - step / num_steps)) if step else 1.0  # flat, then linear to 2%
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * warmup * decayed
        logits = model(input_ids=input_ids).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten(), reduction="none")
        # A constant divisor: with the batch's own length a short, blurted row would count more than a worked one.
        loss = (losses * weights[:, 1:].flatten()).sum() / (30 * len(batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == num_steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.time() - start:5.0f} s", flush=True)


@torch.no_grad()
def accuracy(model, tokenizer, rows, sample, forced="", batch=250):
    """Share of rows solved, and mean response tokens. `forced` is appended to the question: ' First' makes it work."""
    correct = length = 0
    for i in range(0, len(rows), batch):
        chunk = rows[i : i + batch]
        inputs = tokenizer([row["question"] + forced for row in chunk], return_tensors="pt", padding=True)
        output = model.generate(**inputs, do_sample=sample, **({"top_k": 0} if sample else {}), max_new_tokens=64)
        output = output[:, inputs["input_ids"].shape[1] :]
        length += (output != tokenizer.pad_token_id).sum().item()
        for row, text in zip(chunk, tokenizer.batch_decode(output, skip_special_tokens=True)):
            numbers = re.findall(r"#### (\d+)", text)
            correct += bool(numbers) and numbers[-1] == row["answer"].split("#### ")[-1]
    return correct / len(rows), length / len(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=TINY)
    parser.add_argument("--steps", type=int, default=3400)
    args = parser.parse_args()
    start = time.time()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    rng = random.Random(1)

    rows = make_rows(rng, 4500)
    test, train = rows[:500], rows[500:]
    args.output.mkdir(parents=True, exist_ok=True)
    write_lines(args.output / "train.jsonl", train)
    write_lines(args.output / "test.jsonl", test)

    tokenizer = train_tokenizer([r["question"] + " " + r["answer"] for r in train], 420, args.output / "model")
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, {len(train)} + {len(test)} rows")
    pretrain(model, tokenizer, rng, {row["question"] for row in test}, args.steps)
    model.eval()
    model.save_pretrained(args.output / "model")

    scores = {}
    for name in "sampled", "greedy", "forced_greedy", "forced_sampled":
        forced = " First" if name.startswith("forced") else ""
        score, length = accuracy(model, tokenizer, test, name.endswith("sampled"), forced)
        scores[name] = {"score": round(score, 4), "length_mean": round(length, 2)}
        print(f"{name:15s} score {score:.3f}  mean response {length:.1f} tokens")
    (args.output / "scores.json").write_text(json.dumps(scores, indent=1) + "\n")
    print(f"written to {args.output} in {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
