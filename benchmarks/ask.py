"""Ask models a question the way they were asked in training, side by side.

    python benchmarks/ask.py runs/NAME/final "Compute 12 + 7."
    python benchmarks/ask.py models/smollm2 runs/ONE/best runs/TWO/final "Compute 12 + 7." --temperature 0.7 --samples 3

The scripts' own function makes the prompt, as args.json in or above a folder says: template, switches, suffix. A folder
without one, such as the model that you began with, is asked as the first folder that has it. A chat goes as JSON,
'[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]'. An adapter comes with its base.
"""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import common  # noqa: F401  puts the scripts on the path
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import ppo_llm


def read_args(folder):
    """The flags of the run that a folder belongs to, or None."""
    files = [place / "args.json" for place in (folder, folder.resolve().parent) if (place / "args.json").is_file()]
    return json.loads(files[0].read_text()) if files else None


def load_tokenizer(folder, args):
    """That of the folder, of the run's models, or of the model that the run began with; with the run's template."""
    places = [place for place in (folder, folder / "final", folder / "best") if [*place.glob("tokenizer*")]]
    tokenizer = AutoTokenizer.from_pretrained([*places, args["model"]][0])
    if Path(args["chat_template"] or "").is_file():  # else the saved tokenizer has it
        tokenizer.chat_template = Path(args["chat_template"]).read_text()
    return tokenizer


def load_model(folder):
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model.to("cuda" if torch.cuda.is_available() else "cpu")
    except OSError as error:
        adapter = folder / "adapter_config.json"
        base = json.loads(adapter.read_text())["base_model_name_or_path"] if adapter.exists() else None
        hint = f"its base is {base}: start where the run was started, or merge it" if base else "no model is there"
        sys.exit(f"error: {folder} can't be loaded, {hint} ({str(error)[:200]})")


def ask(folder, args, question, options):
    """(the prompt, the answers) of a model."""
    tokenizer, model = load_tokenizer(folder, args), load_model(folder)
    row = {args["answer_column"] or "answer": "0", args["prompt_column"]: question}
    (row,), _ = ppo_llm.load_prompts("the question", Dataset.from_list([row]), SimpleNamespace(**args), tokenizer)
    shape = options.samples, options.max_response_length or args["max_response_length"]
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(model.device)
    prompts, eos_ids = [row["input_ids"]] * options.samples, ppo_llm.collect_eos_ids(model, tokenizer)
    responses = ppo_llm.generate(model, prompts, noise, eos_ids, options.temperature)
    texts = [tokenizer.decode(x.ids, skip_special_tokens=True) + " ... (cut off)" * x.truncated for x in responses]
    return row["prompts"], texts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="models, or run folders, whose final/ is then asked")
    parser.add_argument("question")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    parser.add_argument("--samples", type=int, default=1, help="answers of each model")
    parser.add_argument("--max-response-length", type=int, help="default: that of the run")
    options = parser.parse_args()
    question = json.loads(options.question) if options.question.startswith("[{") else options.question
    folders = [folder / "final" if (folder / "final").exists() else folder for folder in options.folders]
    known = [args for args in map(read_args, folders) if args]
    if not known:
        sys.exit(f"error: {folders[0]} has no args.json in it or above it, so I don't know how to ask it")
    ppo_llm.transformers.utils.logging.disable_progress_bar()
    for folder in folders:
        prompt, answers = ask(folder, read_args(folder) or known[0], question, options)
        print(f"--- {folder}, asked {prompt[-500:]!r}", *answers, sep="\n")
