"""Look at one run, or at several over each other: curves, texts as they change, responses token by token.

    python benchmarks/view.py runs/NAME [runs/OTHER ...] [--output page.html]

This writes one HTML page, runs/NAME/view.html, that needs no network and no server: open it, send it, keep it. A folder
of run folders stands for all of them. The texts of tokens come from the tokenizer in final/ or best/, or that of the
model in args.json; without one, the page shows ids. Of a page beyond --megabytes some iterations' texts are left out,
then some responses of each batch, and the page says so.
"""

import argparse
import base64
import json
import math
import sys
from array import array
from pathlib import Path

TINY = Path(__file__).resolve().parent / "tiny" / "model"
KINDS = {"step": "train", "eval": "greedy", "eval_sampled": "sampled"}  # completions/KIND_000010.jsonl
COLUMNS = ["logprobs", "ratio", "kl", "advantages", "values"]  # of the tokens; values only in PPO
JOINED = ""  # the text of a token that only completes a character of the token before


def read_lines(path):
    """The rows of a .jsonl file. The run may be writing its last line just now."""
    lines = path.read_text("utf-8").split("\n")  # splitlines() would also cut at U+2028, which a text may hold
    lines = [line for line in lines if line]
    rows = [json.loads(line) for line in lines[:-1]]
    try:
        rows += [json.loads(line) for line in lines[-1:]]
    except ValueError:
        print(f"{path}: its last line is not complete yet")
    return rows


def read_starts(folder):
    """[{"step": first iteration, "args": flags}] of each start of the run, as TensorBoard's files have them.

    Each start writes a file, which has its flags at the step of its first iteration. Runs with another --track leave
    no trace of a resume.
    """
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    starts = []
    for file in sorted(folder.glob("events.out.tfevents.*")):  # the names begin with the time
        for event in EventFileLoader(str(file)).Load():
            texts = [value for value in event.summary.value if value.tag.startswith("args")]
            if texts:
                flags = json.loads(texts[0].tensor.string_val[0].decode().strip("`\n"))
                starts.append({"step": event.step, "args": flags})
                break
    return starts


def resumes(starts):
    """[{"step": .., "changed": ["lr 0.1 to 0.01", ..]}] of the starts that went on from a checkpoint."""
    marks = []
    for before, start in zip(starts, starts[1:]):
        names = sorted((before["args"].keys() | start["args"].keys()) - {"resume", "run_name"})
        pairs = [(name, before["args"].get(name), start["args"].get(name)) for name in names]
        changed = [f"{name} {old} to {new}" for name, old, new in pairs if old != new]
        if start["step"] > 0:  # else it began anew
            marks.append({"step": start["step"], "changed": changed})
    return marks


def load_tokenizer(folder, args, named):
    """(tokenizer, where it is from), or (None, why there is none)."""
    from transformers import AutoTokenizer

    model = str(args.get("model"))
    if Path(model).parts[-3:] == TINY.parts[-3:]:  # the embedded model, perhaps of another machine
        model = str(TINY)
    places = [named] if named else [str(folder / "final"), str(folder / "best"), model]
    for place in places:
        if named or place == model or [*Path(place).glob("*token*")]:
            try:
                return AutoTokenizer.from_pretrained(place), place
            except (OSError, ValueError):  # neither a folder nor on the hub
                continue
    return None, f"no tokenizer in {' or '.join(places)}: tokens are shown as ids (--tokenizer names one)"


def pieces_of(ids, tokenizer, cache):
    """The text of each token. Tokens that share a character have it once: the first its text, the others JOINED."""
    if tokenizer is None:
        return [f"{token} " for token in ids]
    pieces = []
    first = 0
    while first < len(ids):
        for last in range(first + 1, min(first + 4, len(ids)) + 1):  # a character has at most 4 bytes
            key = *ids[max(0, first - 1) : first], -1, *ids[first:last]  # with the token before: it decides on spaces
            if key not in cache:
                texts = [tokenizer.decode(ids[max(0, first - 1) : end]) for end in (first, last)] if first else []
                texts = texts or ["", tokenizer.decode(ids[:last])]
                cache[key] = texts[1][len(texts[0]) :]
            if not cache[key].endswith("\ufffd"):
                break
        else:  # bytes that make no character
            last = first + 1
        pieces += [cache[(*ids[max(0, first - 1) : first], -1, *ids[first:last])]] + [JOINED] * (last - first - 1)
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
    """A line of a completions file, as the page has it."""
    prompt, answer = line["prompt"], line["answer"]
    other = {name: value for name, value in line.get("row", {}).items() if value not in (prompt, answer)}
    answer = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    row = {"prompt": (prompt, answer, json.dumps(other, ensure_ascii=False) if other else "")}
    row |= {name: line[name] for name in ("response", "score", "length", "truncated")}
    row |= {"parts": [*line.get("parts", {}).values()], "tokens": None}
    batch = line.get("batch")
    if batch and any(batch["mask"]):
        # Column i is about the action that follows the state of tokens 0 to i: the token i+1.
        first = batch["mask"].index(True)
        ids = batch["tokens"][first + 1 :]
        tokens = {name: pack(batch[name][first:-1]) for name in COLUMNS if name in batch}
        inserted = [i for i, sampled in enumerate(batch["mask"][first:-1]) if not sampled]  # by an environment
        row["tokens"] = tokens | {"inserted": inserted, "pieces": [*zip(ids, pieces_of(ids, tokenizer, cache))]}
    return row


def read_run(folder, tokenizer_name):
    args = json.loads((folder / "args.json").read_text()) if (folder / "args.json").exists() else {}
    rows = read_lines(folder / "metrics.jsonl")
    starts = read_starts(folder)
    notes = []
    if args.get("resume") and len(starts) < 2:
        notes.append("may have been resumed: its flags have --resume, but no TensorBoard file says where")
    files = []
    tokenizer, cache = None, {}
    for path in sorted(folder.glob("completions/*_*.jsonl")):
        kind, _, step = path.stem.rpartition("_")
        lines = read_lines(path)
        if tokenizer is None and not notes[1:] and any("batch" in line for line in lines):
            tokenizer, said = load_tokenizer(folder, args, tokenizer_name)
            notes += [said] if tokenizer is None else []
        if kind in KINDS and lines:
            distinct = len({line["response"] for line in lines}) / len(lines)
            file = {"kind": KINDS[kind], "step": int(step), "distinct": distinct, "count": len(lines)}
            file["parts"] = [*lines[0].get("parts", {})]
            files.append(file | {"rows": [read_response(line, tokenizer, cache) for line in lines]})
    names = {name: None for row in rows for name in row if name != "step"}  # in order
    values = {name: [row.get(name) for row in rows] for name in names}
    finite = {n: [x if x is None or math.isfinite(x) else None for x in column] for n, column in values.items()}
    run = {"args": {name: str(value) for name, value in args.items()}, "notes": notes, "resumes": resumes(starts)}
    return run | {"steps": [row["step"] for row in rows], "metrics": finite}, files


def number(table, value):
    return table.setdefault(value, len(table))


def make_page(runs, kept, most):
    """The page with the files of the iterations `kept`, and at most so many rows of each."""
    prompts, texts, pieces = {}, {}, {}
    packed = []
    for run, files in runs:
        run = run | {"files": []}
        for file in files:
            rows = []
            for row in file["rows"][:most] if file["step"] in kept else []:
                tokens = row["tokens"]
                tokens = tokens and tokens | {"pieces": [number(pieces, piece) for piece in tokens["pieces"]]}
                line = [number(prompts, row["prompt"]), number(texts, row["response"]), row["score"], row["length"]]
                rows.append(line + [int(row["truncated"]), row["parts"], tokens or 0])
            run["files"].append(file | {"rows": rows})
        packed.append(run)
    data = {"runs": packed, "prompts": [*prompts], "texts": [*texts], "pieces": [*pieces]}
    every = {file["step"] for _, files in runs for file in files}
    data["left_out"] = {"steps": len(every - kept), "of": len(every), "rows": most}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    head, mark, tail = Path(__file__).with_suffix(".html").read_text("utf-8").partition("THE DATA")
    return head + text + tail


def fit(runs, limit):
    """The page, of at most so many bytes if thinning can bring that about. First and last iterations stay."""
    kept = sorted({file["step"] for _, files in runs for file in files})
    most = max([file["count"] for _, files in runs for file in files], default=0)
    while True:
        page = make_page(runs, {*kept}, most).encode("utf-8", "replace")
        if len(page) <= limit or (len(kept) <= 2 and most <= 8):
            return page
        if len(kept) > 16 or most <= 8:
            kept = kept[:-1:2] + kept[-1:]
        else:
            most //= 2


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
    runs = [read_run(folder, args.tokenizer) for folder in folders]
    for name, (run, _) in zip(names, runs):
        run["name"] = name
        print("".join(f"{name}: {note}\n" for note in run["notes"]), end="")
    page = fit(runs, args.megabytes * 1e6)
    output = args.output or folders[0] / "view.html"
    output.write_bytes(page)
    print(f"wrote {output} ({len(page) / 1e6:.1f} MB): open it in a browser")


if __name__ == "__main__":
    main()
