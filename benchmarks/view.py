"""Look at one run, or at several over each other: curves, texts as they change, responses token by token.

    python benchmarks/view.py runs/NAME [runs/OTHER ...] [--output page.html]

This writes one HTML page, runs/NAME/view.html, that needs no network and no server: open it, send it, keep it. A folder
of run folders stands for all of them. The texts of tokens come from the tokenizer in final/ or best/, or that of the
model in args.json; without one, the page shows ids. If the page would be larger than --megabytes, it lacks the texts of
some iterations, then some responses of each batch, and says so.
"""

import argparse
import base64
import json
import math
import sys
from array import array
from pathlib import Path

TINY = Path(__file__).resolve().parent / "tiny" / "model"
KINDS = {"step": "training", "eval": "greedy", "eval_sampled": "sampled"}  # completions/KIND_000010.jsonl
COLUMNS = ["logprobs", "ratio", "kl", "advantages", "values"]  # of the tokens; values only in PPO


def read_lines(path):
    """The rows of a .jsonl file, without a last line that the run is just writing."""
    rows = []
    lines = path.read_text("utf-8").split("\n")  # splitlines() would also cut at U+2028, which a text may hold
    for number, line in enumerate(lines, 1):
        try:
            rows += [json.loads(line)] if line else []
        except ValueError:
            if number < len(lines):
                raise
    return rows


def read_resumes(folder):
    """[(first iteration, flags that changed)] of each start that went on from a checkpoint.

    Each start writes a TensorBoard file, with its flags at the step of its first iteration. With another --track, a
    resume leaves no trace.
    """
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    resumes, before = [], {}
    for file in sorted(folder.glob("events.out.tfevents.*")):  # the names begin with the time
        for event in EventFileLoader(str(file)).Load():
            texts = [value for value in event.summary.value if value.tag.startswith("args")]
            if texts:
                flags = json.loads(texts[0].tensor.string_val[0].decode().strip("`\n"))
                names = [name for name in flags if name not in ("resume", "run_name")]
                changed = [f"{x} {before.get(x)} to {flags[x]}" for x in names if before.get(x) != flags[x]]
                if event.step > 0:
                    resumes.append((event.step, changed if before else []))
                before = flags
                break
    return resumes


def load_tokenizer(folder, args, named):
    """A tokenizer, or None."""
    from transformers import AutoTokenizer

    model = str(args.get("model"))
    if Path(model).parts[-3:] == TINY.parts[-3:]:  # the embedded model, perhaps of another machine
        model = str(TINY)
    saved = [str(folder / name) for name in ("final", "best") if (folder / name / "tokenizer_config.json").exists()]
    for place in [named] if named else [*saved, model]:
        try:
            return AutoTokenizer.from_pretrained(place)
        except (OSError, ValueError):
            print(f"there is no tokenizer in {place}")
    return None


def pieces_of(ids, tokenizer, cache):
    """The text of each token. Of tokens that share a character the first has the text, the others have none."""
    if tokenizer is None:
        return [f"{token} " for token in ids]
    pieces = []
    first = 0
    while first < len(ids):
        for last in range(first + 1, first + 5):  # a character has at most 4 bytes
            key = tuple(ids[max(0, first - 1) : last]), first > 0
            if key not in cache:  # what they add to the token before, which may decide on a space
                before = tokenizer.decode(key[0][:1]) if first else ""
                cache[key] = tokenizer.decode(key[0])[len(before) :]
            if not cache[key].endswith("\ufffd"):
                break
        else:  # bytes that make no character
            last = first + 1
        key = tuple(ids[max(0, first - 1) : last]), first > 0
        pieces += [cache[key]] + [""] * (min(last, len(ids)) - first - 1)
        first = last
    return pieces


def pack(numbers):
    """Exact float32 in base64, or the one number that all of them are."""
    if len(set(numbers)) == 1 and math.isfinite(numbers[0]):
        return numbers[0]
    numbers = array("f", numbers)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


def read_response(line, tokenizer, cache):
    """[(prompt, answer, other columns), response, score, length, truncated, parts, tokens] of a line of completions."""
    prompt, answer = line["prompt"], line["answer"]
    others = {name: value for name, value in line.get("row", {}).items() if value not in (prompt, answer)}
    texts = [x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for x in (prompt, answer, others)]
    tokens = 0
    batch = line.get("batch")
    if batch and any(batch["mask"]):
        # Column i is about the action that follows the state of tokens 0 to i: token i+1.
        first = batch["mask"].index(True)
        ids = batch["tokens"][first + 1 :]
        tokens = {name: pack(batch[name][first:-1]) for name in COLUMNS if name in batch}
        tokens["inserted"] = [i for i, sampled in enumerate(batch["mask"][first:-1]) if not sampled]
        tokens["pieces"] = [*zip(ids, pieces_of(ids, tokenizer, cache))]
    numbers = [line["score"], line["length"], int(line["truncated"]), [*line.get("parts", {}).values()]]
    return [(*texts[:2], texts[2] if others else ""), line["response"], *numbers, tokens]


def read_run(folder, name, tokenizer_name):
    args = json.loads((folder / "args.json").read_text()) if (folder / "args.json").exists() else {}
    rows = read_lines(folder / "metrics.jsonl")
    resumes = read_resumes(folder)
    notes = [f"resumed at iteration {step}. Flags changed: {', '.join(changed) or 'none'}" for step, changed in resumes]
    if args.get("resume") and not resumes:
        notes.append("its last start had --resume, but no TensorBoard file tells of an iteration where it went on")
    names = list(dict.fromkeys(name for row in rows for name in row if name != "step"))
    metrics = {name: [row.get(name) for row in rows] for name in names}
    finite = {name: [x if math.isfinite(x or 0) else None for x in column] for name, column in metrics.items()}
    files = []
    tokenizer, cache = None, {}
    for path in sorted(folder.glob("completions/*_*.jsonl")):
        kind, _, step = path.stem.rpartition("_")
        lines = read_lines(path)
        if kind not in KINDS or not lines:
            continue
        if any("batch" in line for line in lines) and not any(file["kind"] == "training" for file in files):
            tokenizer = load_tokenizer(folder, args, tokenizer_name)
            notes += [] if tokenizer else ["no tokenizer was found, so tokens are shown as ids (--tokenizer)"]
        distinct = len({line["response"] for line in lines}) / len(lines)
        file = {"kind": KINDS[kind], "step": int(step), "distinct": distinct, "count": len(lines)}
        responses = [read_response(line, tokenizer, cache) for line in lines]
        files.append(file | {"parts": [*lines[0].get("parts", {})], "rows": responses})
    for kind in "training", "sampled":  # curves on which a collapse shows
        shares = {file["step"]: file["distinct"] for file in files if file["kind"] == kind}
        finite |= {f"distinct/{kind}": [shares.get(row["step"]) for row in rows]} if shares else {}
    run = {"name": name, "args": {name: str(value) for name, value in args.items()}, "metrics": finite, "files": files}
    return run | {"steps": [row["step"] for row in rows], "resumes": [step for step, _ in resumes], "notes": notes}


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
    every = {file["step"]: file["count"] for run in runs for file in run["files"]}
    if len(kept) < len(every):
        notes.append(
            f"To keep the page small, the texts of {len(every) - len(kept)} of {len(every)} iterations are left out."
        )
    if most < max(every.values(), default=0):
        notes.append(f"To keep the page small, it has only the first {most} responses of each file.")
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
            kept = kept[:-1:2] + kept[-1:]
        else:
            most //= 2
        page = make_page(runs, kept, most)
    return page


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, help="file to write (default: view.html in the first run's folder)")
    parser.add_argument("--tokenizer", help="folder or hub id (default: the run's own)")
    parser.add_argument("--megabytes", type=float, default=20, help="of the page, before texts are left out")
    args = parser.parse_args()
    folders = []
    for path in args.runs:
        found = [file.parent for file in sorted([*path.glob("metrics.jsonl"), *path.glob("*/metrics.jsonl")])]
        if not found:
            sys.exit(f"error: {path} is neither a run folder (metrics.jsonl) nor a folder of them")
        folders += found
    names = [folder.resolve().name for folder in folders]
    names = [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders)]
    runs = [read_run(folder, name, args.tokenizer) for folder, name in zip(folders, names)]
    page = fit(runs, args.megabytes * 1e6)
    output = args.output or folders[0] / "view.html"
    output.write_bytes(page)
    print(f"wrote {output} ({len(page) / 1e6:.1f} MB): open it in a browser")


if __name__ == "__main__":
    main()
