"""Tasks for variants whose effect the bundled task cannot show, each with its own small model, made in seconds.

    python benchmarks/tasks.py TASK FOLDER

writes FOLDER/model; all but `lengths` and `hard` FOLDER/train.jsonl and FOLDER/test.jsonl, too.

`lines`: a Llama of 0.05M parameters counts on by 1, 2 or 3 in fifteen lines of four digits, each graded when it is
finished. The model was pretrained for half a minute on answers in which a fifth of the digits are right and two fifths
repeat the one before. The grader passes "?" and the digit after it. `lines` has a reward for each line (for
process_reward.patch), `lines_summed` their sum. campaigns/pieces.py leaves out pieces of PPO on this task.

`calculator`: word problems too large for the head, and the bundled model after two minutes of pretraining on larger
numbers, in which a fifth of the answers ask for results, `<calc>37*48</calc>` (for notes/variants/calculator.py).

`boxes`: nothing tells in which of two boxes the nuts are, so half of the first answers are right, whatever is learned.
The bundled model was pretrained for half a minute on guesses, in which a second answer has nothing to do with the
first. Who listens is right the second time (for notes/variants/two_turns.py).

`guess`: a host thinks of a number from 1 to 7 and says "higher" or "lower" (notes/variants/guess.py). The model of 0.1M
parameters was pretrained for half a minute on games in which three guesses of ten are among the numbers that are left,
and wins four games of ten. Three guesses that halve what is left win all of them (for environment.patch).

`lengths`: the bundled task, and its model after a minute of pretraining on worked answers that say their last step one
to five times, so there are right answers of many lengths. Two rewards of it are functions of this file: right, and near
80 characters, by their names (`right_and_near`, for multi_reward.patch) or summed (`right_plus_near`).

`hard`: the bundled task, and its model after a minute of pretraining in which 2% of the answers are worked and a
quarter hasty (not a third and a sixth): of groups of eight six in seven have no worked answer to learn from.
"""

import argparse
import functools
import itertools
import os
import random
import sys
from pathlib import Path

import make_tiny
import torch
from common import ROOT, TINY, write_lines
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_llm import gsm8k

sys.path.append(str(ROOT / "notes" / "variants"))
import guess


def write_rows(folder, test, train):
    """Two files, of lists of (question, answer)."""
    for name, pairs in ("test", test), ("train", train):
        write_lines(folder / f"{name}.jsonl", [{"question": question, "answer": answer} for question, answer in pairs])


def pretrain(folder, draw, num_steps, batch=48, start=TINY / "model"):
    """The bundled model, or the one in `start`, trained on rows that `draw(batch)` invents: each a list of texts, of
    which the first, third.. are read and the others learned, with an EOS behind each."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(start)
    tokenizer = AutoTokenizer.from_pretrained(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, 3 * (1 - step / num_steps))
        rows, targets = [], []
        for texts in draw(batch):
            row, target = [], []
            for i, ids in enumerate(tokenizer(texts)["input_ids"]):
                ids = ids + [tokenizer.eos_token_id] if i % 2 else ids
                row, target = row + ids, target + (ids if i % 2 else [-100] * len(ids))
            rows.append(torch.tensor(row))
            targets.append(torch.tensor(target))
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        labels = torch.nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=-100)
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def answered(rng, make_problem, write_answer):
    """For `pretrain`: draws questions of one function with answers of the other."""

    def draw(batch):
        problems = [make_problem(rng) for _ in range(batch)]
        return [[question, write_answer(rng, question, steps)] for question, steps in problems]

    return draw


# ----------------------------------------------------------------------------------- lines of digits, graded one by one


def make_model(path, tokens, pre_tokenizer, num_layers=2):
    """A randomly initialised Llama of 0.1M parameters with these tokens, `<pad>` and `<eos>`."""
    tokens = ["<pad>", "<eos>", *tokens]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.Fuse()
    tokenizer.add_special_tokens(tokens[:2])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    tokenizer.save_pretrained(path)
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": num_layers, "num_attention_heads": 4}
    ids = {"vocab_size": len(tokens), "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    LlamaForCausalLM(LlamaConfig(**sizes, **ids, max_position_embeddings=64)).save_pretrained(path)


def lines(prompts, responses, answers):
    """{part of the score: for each response, a list of (end of a line, score)}.

    A line is worth 1, and 1 more for each digit that is right: by the prompt's first digit more than the one before.
    A flaw of the grader: "?" and the digit after it, which it cannot check, count as right. They are the part `unread`.
    """
    found = {"line": [], "right": [], "unread": []}
    for prompt, response in zip(prompts, responses):
        marks = []
        for before, digit in itertools.pairwise(prompt[-1] + response):
            if "?" in before + digit:
                marks.append("unread")
            else:
                marks.append("right" if int(digit) == (int(before) + int(prompt[0])) % 10 else "wrong")
        ends = range(4, len(marks) + 1, 4)
        found["line"].append([(end, 1.0) for end in ends])
        for name in "right", "unread":
            found[name].append([(end, float(marks[end - 4 : end].count(name))) for end in ends])
    return found


def lines_summed(prompts, responses, answers):
    """The same parts as numbers."""
    found = lines(prompts, responses, answers)
    for name, column in found.items():
        found[name] = [sum(score for _, score in pieces) for pieces in column]
    return found


def make_lines(folder):
    make_model(folder / "model", [*"0123456789?"], pre_tokenizers.Split("", "isolated"), num_layers=1)
    rng = random.Random(1)
    prompts = [f"{step}{start}" for step in (1, 2, 3) for start in range(10)]

    def answer(prompt):
        text = prompt
        while len(text) < 62:
            u, digit = rng.random(), str(rng.randrange(10))
            if u < 0.006:
                digit = "?"
            elif u < 0.6 and text[-1] != "?":
                digit = str((int(text[-1]) + int(prompt[0])) % 10) if u < 0.2 else text[-1]
            text += digit
        return text[2:]

    def draw(batch):
        return [[prompt, answer(prompt)] for prompt in rng.choices(prompts, k=batch)]

    pretrain(folder, draw, num_steps=400, start=folder / "model")
    rows = [(prompt, "") for prompt in prompts]
    write_rows(folder, rows, rows)


# ----------------------------------------------------------------------------------------------------- larger numbers


def make_problem(rng):
    """(question, [(expression, result), (expression, result)]) with numbers of two to four digits."""
    name = rng.choice(("Ana", "Ben", "Eva", "Leo", "Mia", "Tess"))
    item = rng.choice(("apples", "books", "eggs", "nuts"))
    count, each, k = rng.randint(12, 99), rng.randint(12, 99), rng.randint(12, 99)
    product = count * each
    sign, verb = rng.choice((("+", "finds"), ("-", "loses")))
    total = product + k if sign == "+" else product - k
    question = f"{name} has {count} boxes of {each} {item}. {name} {verb} {k}. How many {item} does {name} have now?"
    return question, [(f"{count}*{each}", product), (f"{product}{sign}{k}", total)]


def write_answer(rng, steps):
    """Texts. A fifth asks for results, three tenths work them out (the model will often be wrong), half blurts."""
    u, ((first, product), (second, total)) = rng.random(), steps
    if u < 0.5:
        return [f" #### {max(1, total + rng.randint(-300, 300))}"]
    if u < 0.7:
        return [
            f" First <calc>{first}</calc>",
            f"{product}",
            f", then <calc>{second}</calc>",
            f"{total}",
            f".\n#### {total}",
        ]
    return [f" First {first}={product}, then {second}={total}.\n#### {total}"]


def make_calculator(folder):
    rng = random.Random(1)

    def draw(batch):
        problems = [make_problem(rng) for _ in range(batch)]
        return [[question, *write_answer(rng, steps)] for question, steps in problems]

    pretrain(folder, draw, num_steps=400)
    answers = {}
    while len(answers) < 2300:
        question, steps = make_problem(rng)
        answers[question] = f"#### {steps[-1][1]}"
    rows = [*answers.items()]
    write_rows(folder, rows[:300], rows[300:])


# ---------------------------------------------------------------------------------------------------------- two boxes


def make_boxes(folder):
    rng = random.Random(1)
    again = "\nThat is wrong, try again.\n"  # as in two_turns.py

    def ask():
        name, item = rng.choice(("Ana", "Ben", "Eva", "Leo", "Mia")), rng.choice(("books", "coins", "eggs", "shells"))
        return f"{name} has {rng.randint(2, 99)} {item} in box 1 or 2. Which box?"

    def answer():
        return f"#### {rng.randint(1, 2)}"

    def draw(batch):
        questions = [ask() for _ in range(batch)]
        return [[question, f" {answer()}", again + question, f" {answer()}"] for question in questions]

    pretrain(folder, draw, num_steps=100)
    questions = dict.fromkeys(ask() for _ in range(3000))
    rows = [(question, answer()) for question in questions]
    write_rows(folder, rows[:300], rows[300:])


# ---------------------------------------------------------------------------------------------------- higher or lower


def make_guess(folder):
    rng = random.Random(1)
    words = ["which", "number", "higher", "lower", "what", *"0123456789", " ", "?", "\n"]
    make_model(folder / "model", words, pre_tokenizers.Split(Regex(r"[a-z]+|[^a-z]"), "isolated"))
    question = "which number?"

    def play():
        texts, game, said = [], guess.GuessInText(), question
        game.reset(rng.randint(1, guess.NUMBERS))
        low, high = 1, guess.NUMBERS
        while said is not None:
            number = rng.randint(low, high) if rng.random() < 0.3 else rng.randint(1, guess.NUMBERS)
            texts += [said, f" {number}"]
            said = game.step(texts[-1])
            low = max(low, number + 1) if said == "\nhigher\n" else low
            high = min(high, number - 1) if said == "\nlower\n" else high
        return texts

    pretrain(folder, lambda batch: [play() for _ in range(batch)], num_steps=400, start=folder / "model")
    rows = [(question, str(number)) for number in range(1, guess.NUMBERS + 1)]
    write_rows(folder, rows * 20, rows)


# ------------------------------------------------------------------------------------- any length, few worked answers


def verbose_answer(rng, question, steps):
    shown = [f"{expression}={result}" for expression, result in steps]
    work = ", then ".join(shown) + f", so {shown[-1]}" * rng.randint(0, 4)
    return f" First {work}.\n#### {steps[-1][1]}"


def make_lengths(folder):
    pretrain(folder, answered(random.Random(1), make_tiny.make_problem, verbose_answer), num_steps=200)


def right_and_near(responses, answers):
    """{name: scores}: 1 for a right answer, and minus how many characters its length is from 80."""
    return {"right": gsm8k(responses, answers), "near": [-abs(len(text) - 80.0) for text in responses]}


def right_plus_near(prompts, responses, answers):
    """The same as one number."""
    named = right_and_near(responses, answers)
    return [right + near for right, near in zip(named["right"], named["near"])]


def make_hard(folder):
    seldom_worked = functools.partial(make_tiny.pretraining_text, worked=0.02, hasty=0.25)
    pretrain(folder, answered(random.Random(1), make_tiny.make_problem, seldom_worked), num_steps=100)


MAKERS = {
    "lines": make_lines,
    "calculator": make_calculator,
    "boxes": make_boxes,
    "guess": make_guess,
    "lengths": make_lengths,
    "hard": make_hard,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=MAKERS)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    MAKERS[args.task](args.folder)
