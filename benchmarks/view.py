"""Look at one run, or at several over each other: curves, texts as they change, responses token by token.

    python benchmarks/view.py runs/NAME [runs/OTHER ...] [--output page.html]

This writes one HTML page, runs/NAME/view.html, that needs no network and no server: open it, send it, keep it. A folder
of run folders stands for all of them. The texts of tokens come from the tokenizer in final/ or best/, or that of the
model in args.json; without one, the page shows ids. A page above --megabytes leaves out some texts, and says so. So
it does of what it can't read, such as a line that the run is writing.
"""

import argparse
import base64
import json
import math
import re
import sys
from array import array
from contextlib import suppress
from functools import cache
from pathlib import Path

from common import TINY, read_starts

KINDS = {"step": "training", "eval": "greedy", "eval_sampled": "sampled"}  # completions/KIND_000010.jsonl
COLUMNS = ["logprobs", "ratio", "kl", "advantages", "values"]  # of the tokens; values only in PPO


def read_resumes(folder):
    """[(first iteration, flags that changed: {name: "OLD to NEW"})] of each start that went on from a checkpoint."""
    starts = read_starts(folder)
    resumes = []
    for (_, before), (step, flags) in zip([(0, starts[0][1]), *starts] if starts else [], starts):
        changed = {x: f"{before.get(x)} to {flags[x]}" for x in flags if before.get(x) != flags[x]}
        resumes += [(step, {x: changed[x] for x in changed if x not in ("resume", "run_name")})] if step > 0 else []
    return resumes


def load_speller(folder, args, named):
    """A function: what the second tuple of ids adds to the text of the first. Or None, without a tokenizer."""
    from transformers import AutoTokenizer

    model = str(args.get("model"))
    bundled = TINY / "model"
    if Path(model).parts[-3:] == bundled.parts[-3:]:  # the bundled model, perhaps of another machine
        model = str(bundled)
    saved = [str(folder / name) for name in ("final", "best") if (folder / name / "tokenizer_config.json").exists()]
    for place in [named] if named else [*saved, model]:
        try:
            decode = AutoTokenizer.from_pretrained(place).decode
            return cache(lambda before, ids: decode([*before, *ids])[len(decode([*before])) :])
        except (OSError, ValueError):
            print(f"there is no tokenizer in {place}")


def pieces_of(ids, speller):
    """The text of each token. Of tokens that share a character the first has the text, the others have none."""
    if speller is None:
        return [f"{token} " for token in ids]
    pieces = []
    while len(pieces) < len(ids):
        first = len(pieces)
        before = tuple(ids[max(0, first - 1) : first])  # it may decide on a space
        parts = [tuple(ids[first : first + size]) for size in (1, 2, 3, 4)]  # a character has at most 4 bytes
        whole = next((part for part in parts if "\ufffd" not in speller(before, part)), parts[0])
        pieces += [speller(before, whole)] + [""] * (len(whole) - 1)
    return pieces


def pack(numbers):
    """Exact float32 in base64, or the one number that all of them are."""
    if len(set(numbers)) == 1 and math.isfinite(numbers[0]):
        return numbers[0]
    return base64.b64encode(array("f", numbers).tobytes()).decode()  # the machine is little-endian, as all are here


def read_rows(path, needed, notes):
    """The rows of a .jsonl file that have what is needed. Notes say how many lines are left out."""
    rows, lines = [], [line for line in path.read_text("utf-8", "replace").split("\n") if line]
    for line in lines:
        with suppress(ValueError):
            row = json.loads(line)
            rows += [row] if isinstance(row, dict) and needed <= row.keys() else []
    if len(rows) < len(lines):
        notes.append(f"{path.name}: {len(lines) - len(rows)} of {len(lines)} lines can't be read")
    return rows


def read_response(line, speller, prompt_column):
    """[texts about the prompt, response, score, length, truncated, parts, tokens] of a line of completions."""
    prompt, answer = line["prompt"], line["answer"]
    others = {x: value for x, value in line.get("row", {}).items() if x != prompt_column and value != answer}
    about = [prompt] if answer is None else [prompt, f"reference: {answer}"]
    about += [f"{name}: {value}" for name, value in others.items()]
    tokens = 0
    batch = line.get("batch")
    if batch and any(batch["mask"]):
        # Column i is about the action that follows the state of tokens 0 to i: token i+1.
        first = batch["mask"].index(True)
        ids = batch["tokens"][first + 1 :]
        tokens = {name: pack(batch[name][first:-1]) for name in COLUMNS if name in batch}
        tokens["inserted"] = [i for i, sampled in enumerate(batch["mask"][first:-1]) if not sampled]
        tokens["pieces"] = [*zip(ids, pieces_of(ids, speller))]
    numbers = [line["score"], line["length"], int(line["truncated"]), [*line.get("parts", {}).values()]]
    return [tuple(about), line["response"], *numbers, tokens]


def read_run(folder, name, tokenizer_name):
    args, notes = {}, []
    with suppress(ValueError, FileNotFoundError):
        args = json.loads((folder / "args.json").read_text())
    notes += [] if args else ["args.json can't be read, so flags are missing"]
    rows = read_rows(folder / "metrics.jsonl", {"step"}, notes)
    resumes = read_resumes(folder)
    for step, changed in resumes:
        told = ", ".join(f"{name} {values}" for name, values in changed.items())
        notes.append(f"resumed at iteration {step}. Flags changed: {told or 'none'}")
    scored_by = {"reward", "reward_settings", "dataset", "eval_dataset"}  # where they change, best/ starts anew
    best_since = max((step for step, changed in resumes if scored_by & changed.keys()), default=0)
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    texts = {name for name in names if any(isinstance(row.get(name), str | list | dict) for row in rows)}
    notes += [f"the metric {name} is no number" for name in texts]
    names = [name for name in names if name not in texts]
    metrics = {x: [row.get(x) if math.isfinite(row.get(x) or 0) else None for row in rows] for x in names}
    files = []
    speller = None
    for path in sorted(folder.glob("completions/*")):
        named = re.fullmatch(r"(step|eval|eval_sampled)_(\d+)\.jsonl", path.name)
        if not named:
            notes.append(f"completions/{path.name} is no file of a script's")
            continue
        kind, step = named.groups()
        lines = read_rows(path, {"prompt", "answer", "response", "score", "length", "truncated"}, notes)
        if not lines:
            continue
        if any("batch" in line for line in lines) and not any(file["kind"] == "training" for file in files):
            speller = load_speller(folder, args, tokenizer_name)
            notes += [] if speller else ["no tokenizer was found, so tokens are shown as ids (--tokenizer)"]
        distinct = len({line["response"] for line in lines}) / len(lines)
        file = {"kind": KINDS[kind], "step": int(step), "distinct": distinct, "count": len(lines)}
        responses = sorted(
            (read_response(line, speller, args.get("prompt_column")) for line in lines), key=lambda row: row[-1] == 0
        )
        files.append(file | {"parts": [*lines[0].get("parts", {})], "rows": responses})
    for kind in "greedy", "sampled", "training":  # curves on which a collapse shows
        shares = {file["step"]: file["distinct"] for file in files if file["kind"] == kind}
        metrics |= {f"distinct/{kind}": [shares.get(row["step"]) for row in rows]} if shares else {}
    run = {"name": name, "args": {name: str(value) for name, value in args.items()}, "metrics": metrics, "files": files}
    run |= {"steps": [row["step"] for row in rows], "resumes": [step for step, _ in resumes], "notes": notes}
    return run | {"best_since": best_since}


def make_page(runs, kept, most):
    """The page with the texts of the iterations `kept`, and at most so many rows of each file."""
    tables = {}, {}, {}  # each text once: {text: its number}
    prompts, texts, pieces = [lambda value, table=table: table.setdefault(value, len(table)) for table in tables]
    packed = []
    for run in runs:
        files = []
        for file in run["files"]:
            rows = []
            for prompt, text, *numbers, tokens in file["rows"][:most] if file["step"] in kept else []:
                tokens = tokens and tokens | {"pieces": [*map(pieces, tokens["pieces"])]}
                rows.append([prompts(prompt), texts(text), *numbers, tokens])
            files.append(file | {"rows": rows})
        packed.append(run | {"files": files})
    notes = [f"{run['name']}: {note}" for run in runs for note in run["notes"]]
    every = {file["step"] for run in runs for file in run["files"]}
    if len(kept) < len(every) or any(most < file["count"] for run in runs for file in run["files"]):
        which = f"{len(kept)} of {len(every)} iterations, at most {most} responses of each file"
        notes.append(f"To keep the page small, it has the texts of {which}. The curves have everything.")
    data = {"runs": packed, "notes": notes} | dict(zip(("prompts", "texts", "pieces"), map(list, tables)))
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    head, _, tail = Path(__file__).with_suffix(".html").read_text("utf-8").partition("THE DATA")
    return (head + text + tail).encode("utf-8", "replace")


def fit(runs, limit):
    """The page, with texts left out until it has at most so many bytes. First and last iterations stay."""
    kept = sorted({file["step"] for run in runs for file in run["files"]})
    most = max((file["count"] for run in runs for file in run["files"]), default=0)
    page = make_page(runs, kept, most)
    while len(page) > limit and (len(kept) > 2 or most > 8):
        if len(kept) > 16 or most <= 8:
            count = max(min(len(kept) - 1, 16), int(0.97 * len(kept) * limit / len(page)))
            kept = [kept[i * (len(kept) - 1) // (count - 1)] for i in range(count)]  # evenly spread
        else:
            most //= 2
        page = make_page(runs, kept, most)
    return page


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, help="file to write (default: view.html in the first run's folder)")
    parser.add_argument("--tokenizer", help="folder or hub id (default: the run's own)")
    parser.add_argument("--megabytes", type=float, default=20, help="of the page, before texts are left out")
    args = parser.parse_args(arguments)
    folders = []
    for path in args.runs:
        found = [file.parent for file in sorted([*path.glob("metrics.jsonl"), *path.glob("*/metrics.jsonl")])]
        if not found:
            sys.exit(f"error: {path} is neither a run folder (metrics.jsonl) nor a folder of them")
        folders += found
    short = [folder.resolve().name for folder in folders]
    names = short if len({*short}) == len(short) else map(str, folders)
    runs = [read_run(folder, name, args.tokenizer) for folder, name in zip(folders, names)]
    page = fit(runs, args.megabytes * 1e6)
    output = args.output or folders[0] / "view.html"
    output.write_bytes(page)
    print(f"wrote {output} ({len(page) / 1e6:.1f} MB): open it in a browser")


if __name__ == "__main__":
    main()
