"""Do the tests notice a wrong line? Fixed operators make faults; a seeded sample of them meets the default suite.

    python benchmarks/campaigns/mutants.py list --count 125 --seed 1          the sample, without a run
    python benchmarks/campaigns/mutants.py run --count 125 --seed 1           the sample, or what is left of it
    python benchmarks/campaigns/mutants.py run --only ppo_llm.py:412:sign:0   one, with the console of what killed it
    python benchmarks/campaigns/mutants.py score                              how many were killed, and the survivors

A mutant is one change to one code line of the three scripts or of notes/tiny_ppo.py. A line that several scripts have
in functions of the same name (the shared functions, and what their `main`s have in common) changes in all of them at
once: otherwise they would only disagree with each other, and a fault that is in all of them would never be tried. Tests
of identity, size, documentation and patches are not run, nor those that merge the scripts: they would notice any
change, even a right one. The others run in one process, the most likely files first, until one fails. A mutant that
keeps them from ever finishing counts as killed, too.
"""

import argparse
import ast
import csv
import importlib.util
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import common
from common import ROOT

RESULTS = common.RESULTS / "mutants"
SCRIPTS = "ppo_llm.py", "grpo_llm.py", "ppo_llm_fsdp.py"
TINY = "notes/tiny_ppo.py"
FILES = *SCRIPTS, TINY
# In the order for a line of `main`. Not among them: what looks at the text of scripts and notes, or applies patches.
TESTS = "oracle loop ranks launch resume forward groups math data reward faults devices sharding architectures speed"
TESTS = TESTS.split()
NOT_COUNTED = "shared_functions or byte_identical or compose or grpo_llm_fsdp"
NOT_COUNTED_TINY = "pieces_of_the_chapter or counts_right or as_short_as"
COLUMNS = "id", "where", "before", "after", "verdict", "test", "seconds"
# before, after: the lines that change, whole; the `nth` time (from 0) that these lines come in the function.
Mutant = namedtuple("Mutant", "id function operator before after nth")

TURNED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "==", "in": "not in", "not in": "in"}
TURNED |= {"is": "is not", "is not": "is"}
EDGES = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
SIGNS = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "//", "**": "*", "and": "or", "or": "and"}
SIGNS |= {"&": "|", "|": "&"}
REDUCTIONS = {"sum": "mean", "mean": "sum", "max": "min", "min": "max", "amax": "amin", "amin": "amax"}
REDUCTIONS |= {"argmax": "argmin", "any": "all", "all": "any", "cumsum": "cumprod", "MAX": "MIN", "SUM": "MAX"}


class Source:
    """A function (or class, or assignment at the top) as text, with the nodes' places in it."""

    def __init__(self, text, node):
        self.lines = text.splitlines(keepends=True)
        self.first = min([node.lineno, *[d.lineno for d in getattr(node, "decorator_list", [])]])
        self.text = "".join(self.lines[self.first - 1 : node.end_lineno])
        self.node = node

    def place(self, line, column):
        """Of a line of the file and a column in bytes: the index in `text`."""
        before = self.lines[line - 1].encode()[:column].decode()
        return sum(map(len, self.lines[self.first - 1 : line - 1])) + len(before)

    def span(self, node):
        return self.place(node.lineno, node.col_offset), self.place(node.end_lineno, node.end_col_offset)

    def of(self, node):
        start, end = self.span(node)
        return self.text[start:end]

    def between(self, left, right, old):
        """The place of an operator's sign between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        word = r"\s+".join(map(re.escape, old.split()))
        bounds = r"\b" if old[0].isalpha() else ""
        found = re.search(bounds + word + bounds, self.text[start:end])
        return (start + found.start(), start + found.end()) if found else None


def is_documentation(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def is_operator(op, sign):
    if sign in ("and", "or"):
        return False
    expression = ast.parse(f"a {sign} b", mode="eval").body
    return type(op) is type(expression.ops[0] if isinstance(expression, ast.Compare) else expression.op)


def is_kept(node):
    """An assignment to a part of something, without which the name would still be there."""
    return isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple)


def changes(source):
    """(operator, start, end, replacement) of every place in the function where an operator applies."""
    subscripts = set()
    skipped = set()
    for node in ast.walk(source.node):
        if isinstance(node, ast.Subscript):
            subscripts |= {id(x) for x in ast.walk(node.slice)}
        if is_documentation(node) or isinstance(node, ast.JoinedStr):
            skipped |= {id(x) for x in ast.walk(node)}
        if isinstance(node, ast.AnnAssign):
            skipped |= {id(x) for x in ast.walk(node.annotation)}
    for node in ast.walk(source.node):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, right, op in zip(operands, operands[1:], node.ops):
                for name, table in ("comparison", TURNED), ("edge", EDGES):
                    for old, new in table.items():
                        if is_operator(op, old) and (place := source.between(left, right, old)):
                            yield name, *place, new
        elif isinstance(node, ast.BinOp):
            for old, new in SIGNS.items():
                if is_operator(node.op, old) and (place := source.between(node.left, node.right, old)):
                    yield "sign", *place, new
        elif isinstance(node, ast.BoolOp):
            old = "and" if isinstance(node.op, ast.And) else "or"
            if place := source.between(node.values[0], node.values[1], old):
                yield "sign", *place, SIGNS[old]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            yield "sign", *source.span(node), source.of(node.operand)
        elif isinstance(node, ast.AugAssign):
            old = {ast.Add: "+=", ast.Sub: "-=", ast.Mult: "*=", ast.BitOr: "|="}.get(type(node.op))
            if old in ("+=", "-=") and (place := source.between(node.target, node.value, old)):
                yield "sign", *place, "-=" if old == "+=" else "+="
            yield "line deleted", *source.span(node), "pass"
        elif isinstance(node, ast.Constant):
            value = node.value
            if isinstance(value, bool) or value is None:
                if value is not None:
                    yield "constant", *source.span(node), str(not value)
            elif isinstance(value, int) and id(node) in subscripts:
                yield "index", *source.span(node), str(value + 1)
            elif isinstance(value, int | float):
                new = value + 1 if isinstance(value, int) else value * 2 if value else 1.0
                yield "constant", *source.span(node), repr(new)
        elif isinstance(node, ast.Slice):
            for end in (node.lower, node.upper):
                if end is not None and not isinstance(end, ast.Constant):
                    yield "index", *source.span(end), f"{source.of(end)} + 1"
        elif isinstance(node, ast.Call):
            name = source.of(node.func)
            last = name.rpartition(".")[2]
            if name == "torch.where" and len(node.args) == 3:
                yield "mask left out", *source.span(node), source.of(node.args[1])
            masked = len(node.args) == 2 and "mask" in source.of(node.args[1])
            if masked and last in ("mean", "std", "global_moments"):
                yield "mask left out", *source.span(node), f"{name}({source.of(node.args[0])})"
            if last == "all_reduce" and node.args:
                yield "reduction", *source.span(node), source.of(node.args[0])
            if last in REDUCTIONS and isinstance(node.func, ast.Attribute):
                end = source.span(node.func)[1]
                yield "reduction", end - len(last), end, REDUCTIONS[last]
            plain = [x for x in node.args if not isinstance(x, ast.Starred)]
            if len(plain) >= 2 and plain == node.args and source.of(plain[0]) != source.of(plain[1]):
                first, second = source.span(plain[0]), source.span(plain[1])
                between = source.text[first[1] : second[0]]
                swapped = source.of(plain[1]) + between + source.of(plain[0])
                yield "arguments swapped", first[0], second[1], swapped
        elif isinstance(node, ast.Expr) or is_kept(node):
            yield "line deleted", *source.span(node), "pass"
        elif isinstance(node, ast.If) and not node.orelse:
            # Under the condition nothing happens any more. (Where it is computed, nothing else is.)
            yield "line deleted", *source.span(node.test), "False"


def functions(path):
    """(name, Source) of every definition and every assignment at the top of a file."""
    text = (ROOT / path).read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, Source(text, node)
        elif isinstance(node, ast.Assign):
            yield ast.unparse(node.targets[0]), Source(text, node)


def all_mutants():
    """Of each file, without those that another file's change makes along with its own."""
    seen = set()
    mutants = []
    for path in FILES:
        for name, source in functions(path):
            counted = {}
            for operator, start, end, new in changes(source):
                first = source.text.rfind("\n", 0, start) + 1
                last = source.text.find("\n", end) % (len(source.text) + 1)
                before = source.text[first:last]
                after = source.text[first:start] + new + source.text[end:last]
                line = source.first + source.text[:start].count("\n")
                number = counted[line, operator] = counted.get((line, operator), -1) + 1
                mutant = Mutant(
                    f"{path}:{line}:{operator}:{number}",
                    name,
                    operator,
                    before,
                    after,
                    source.text[:first].count(before),
                )
                key = (path in SCRIPTS, *mutant[1:])
                if key not in seen and is_valid(source.text, mutant):
                    mutants.append(mutant)
                seen.add(key)
    return mutants


def replaced(text, mutant):
    """The function's text with the change; None where it has no such lines."""
    parts = text.split(mutant.before)
    if len(parts) <= mutant.nth + 1:
        return None
    head = mutant.before.join(parts[: mutant.nth + 1])
    return head + mutant.after + mutant.before.join(parts[mutant.nth + 1 :])


def is_valid(text, mutant):
    """It can be parsed, and says something else than before."""
    try:
        return ast.dump(ast.parse(replaced(text, mutant))) != ast.dump(ast.parse(text))
    except SyntaxError:
        return False


def mutate(mutant, folder):
    """Changes the files of a copy of the project; returns the names of those that changed."""
    changed = []
    in_scripts = mutant.id.partition(":")[0] in SCRIPTS
    for path in SCRIPTS if in_scripts else [TINY]:
        source = dict(functions(path)).get(mutant.function)
        text = replaced(source.text, mutant) if source else None
        if text:
            file = folder / path
            whole = file.read_text()
            assert whole.count(source.text) == 1
            file.write_text(whole.replace(source.text, text))
            changed.append(path)
    return changed


def copy_project(folder):
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.rstrip("\0").split("\0"):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)


def test_files(mutant):
    """Of the default suite, first those that share rare words with the line; no other test reads tiny_ppo.py."""
    if mutant.id.startswith(TINY):
        return ["tiny"]
    texts = {name: (ROOT / "tests" / f"test_{name}.py").read_text() for name in TESTS}
    shares = dict.fromkeys(TESTS, 0.0)
    for word in {*re.findall(r"[a-z_]{4,}", mutant.before), mutant.function}:
        counts = {name: len(re.findall(rf"\b{word}\b", text)) for name, text in texts.items()}
        for name, count in counts.items():
            shares[name] += count / max(1, sum(counts.values()))
    first = {"main": ["oracle"], "Args": ["launch"], "EMBEDDED": ["launch"]}.get(mutant.function, [])
    return list(dict.fromkeys([*first, *sorted(TESTS, key=lambda name: -shares[name])]))


def attempt(mutant, limit):
    """(verdict, test that failed first, seconds, console): killed, timeout or survived."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        copy_project(folder)
        mutate(mutant, folder)
        paths = [f"tests/test_{name}.py" for name in test_files(mutant)]
        unwanted = NOT_COUNTED_TINY if mutant.id.startswith(TINY) else NOT_COUNTED
        words = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-k", f"not ({unwanted})", *paths]
        command = [sys.executable, "-m", "pytest", *words]
        with tempfile.TemporaryFile("w+") as file:
            # A session of its own: what hangs is killed with all that it has started.
            process = subprocess.Popen(
                command, cwd=folder, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            subprocess.run(["pkill", "-9", "-f", str(folder)], check=False)
            file.seek(0)
            console = file.read()
    seconds = time.monotonic() - began
    if process.returncode < 0:
        return "timeout", "", seconds, console
    if process.returncode == 0:
        return "survived", "", seconds, console
    failures = re.findall(r"(?m)^(?:FAILED|ERROR) (\S+)", console)
    return "killed", failures[0] if failures else paths[0], seconds, console


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["list", "run", "score"])
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="the id of a mutant")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--limit", type=int, default=1200, help="seconds for a mutant")
    args = parser.parse_args()
    if args.what == "run" and importlib.util.find_spec("pytest") is None:  # otherwise every mutant would seem killed
        sys.exit("mutants.py run needs pytest: pip install -e '.[test]'")
    mutants = all_mutants()
    chosen = [x for x in mutants if x.id == args.only] if args.only else sample(mutants, args.count, args.seed)
    path = RESULTS / f"seed_{args.seed}.csv"
    done = {row["id"]: row for row in csv.DictReader(path.open())} if path.exists() and not args.only else {}
    if args.what == "list":
        print(f"{len(mutants)} mutants")
        for mutant in chosen:
            print(f"{mutant.id} in {mutant.function}\n-{mutant.before}\n+{mutant.after}")
    if args.what == "run":
        RESULTS.mkdir(parents=True, exist_ok=True)
        todo = [mutant for mutant in chosen if mutant.id not in done]
        with ThreadPoolExecutor(args.jobs) as pool:
            for mutant, found in zip(todo, pool.map(lambda mutant: attempt(mutant, args.limit), todo)):
                verdict, test, seconds, console = found
                row = dict(zip(COLUMNS, [mutant.id, mutant.function, mutant.before.strip(), mutant.after.strip()]))
                row |= {"verdict": verdict, "test": test, "seconds": f"{seconds:.0f}"}
                print(row, flush=True)
                if args.only:
                    print(console[-6000:])
                    continue
                fresh = not path.exists()
                with path.open("a") as file:
                    writer = csv.DictWriter(file, COLUMNS)
                    if fresh:
                        writer.writeheader()
                    writer.writerow(row)
    if args.what == "score":
        survivors = [row for row in done.values() if row["verdict"] == "survived"]
        print(f"{len(done) - len(survivors)} of {len(done)} killed")
        for row in survivors:
            print(f"{row['id']} in {row['where']}\n-    {row['before']}\n+    {row['after']}")


def sample(mutants, count, seed):
    """Each code line has the same chance, however many operators apply to it."""
    noise = random.Random(seed)
    lines = {}
    for mutant in mutants:
        lines.setdefault(tuple(mutant.id.split(":")[:2]), []).append(mutant)
    return [noise.choice(lines[line]) for line in noise.sample(sorted(lines), min(count, len(lines)))]


if __name__ == "__main__":
    main()
