"""Do the tests notice a wrong line? Fixed operators make faults; a seeded sample of them meets the default suite.

    python benchmarks/campaigns/mutants.py run --count 125 --seed 1     the sample, or what is left of it
    python benchmarks/campaigns/mutants.py score                        how many were killed, and the survivors

A mutant is one change to one code line of the three scripts or of notes/tiny_ppo.py. A line that several scripts have
in functions of the same name (the shared functions, and what their `main`s have in common) changes in all of them at
once: otherwise they would only disagree with each other, and a fault that is in all of them would never be tried. Tests
of identity, size, documentation and patches are not run, nor those that merge the scripts: they would notice any
change, even a right one. The others run in one process, the most likely files first, until one fails, in a copy of what
git has committed or staged. A mutant that keeps them from ever finishing counts as killed, too.
"""

import argparse
import ast
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest  # noqa: F401 - without it every mutant would seem killed

sys.path.append(str(Path(__file__).resolve().parents[1]))
import common
from common import ROOT

RESULTS = common.RESULTS / "mutants"
SCRIPTS = "ppo_llm.py", "grpo_llm.py", "ppo_llm_fsdp.py"
TINY = "notes/tiny_ppo.py"
FILES = *SCRIPTS, TINY
LIMIT = 1200  # seconds for a mutant
# In the order for a line of `main`. Not among them: what looks at the text of scripts and notes, or applies patches.
TESTS = "oracle loop ranks launch resume forward groups math data reward faults devices sharding architectures speed"
TESTS = TESTS.split()
NOT_COUNTED = "shared_functions or byte_identical or compose or grpo_llm_fsdp"
NOT_COUNTED_TINY = "pieces_of_the_chapter or counts_right or as_short_as"
# before, after: the lines that change, whole; the `nth` time (from 0) that these lines come in the function.
Mutant = namedtuple("Mutant", "id function operator before after nth")

OPERATORS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is"}
OPERATORS |= {ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.And: "and", ast.Or: "or", ast.Add: "+"}
OPERATORS |= {ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**"}
OPERATORS |= {ast.BitAnd: "&", ast.BitOr: "|", ast.MatMult: "@"}
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
        start = self.text.index(old, self.span(left)[1])
        assert start < self.span(right)[0]
        return start, start + len(old)


def changes(source):
    """(operator, start, end, replacement) of every place in the function where an operator applies."""
    subscripts = set()
    skipped = set()
    for node in ast.walk(source.node):
        if isinstance(node, ast.Subscript):
            subscripts |= {id(x) for x in ast.walk(node.slice)}
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(x) for x in ast.walk(node)}
        if isinstance(node, ast.AnnAssign):
            skipped |= {id(x) for x in ast.walk(node.annotation)}
    for node in ast.walk(source.node):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, right, op in zip(operands, operands[1:], node.ops):
                old = OPERATORS[type(op)]
                for name, table in ("comparison", TURNED), ("edge", EDGES):
                    if old in table:
                        yield name, *source.between(left, right, old), table[old]
        elif isinstance(node, ast.BinOp) and OPERATORS[type(node.op)] in SIGNS:
            old = OPERATORS[type(node.op)]
            yield "sign", *source.between(node.left, node.right, old), SIGNS[old]
        elif isinstance(node, ast.BoolOp):
            old = OPERATORS[type(node.op)]
            yield "sign", *source.between(*node.values[:2], old), SIGNS[old]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            yield "sign", *source.span(node), source.of(node.operand)
        elif isinstance(node, ast.AugAssign):
            old = OPERATORS[type(node.op)]
            if old in "+-":
                yield "sign", *source.between(node.target, node.value, old), SIGNS[old]
            yield "line deleted", *source.span(node), "pass"
        elif isinstance(node, ast.Constant):
            value = node.value
            if isinstance(value, bool):
                yield "constant", *source.span(node), str(not value)
            elif isinstance(value, int):
                yield "index" if id(node) in subscripts else "constant", *source.span(node), str(value + 1)
            elif isinstance(value, float):
                yield "constant", *source.span(node), repr(2 * value or 1.0)
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
        elif isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            yield "line deleted", *source.span(node), "pass"
        elif isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple):
            # To a part of something, without which the name is still there.
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
                id = f"{path}:{line}:{operator}:{number}"
                mutant = Mutant(id, name, operator, before, after, source.text[:first].count(before))
                key = (path in SCRIPTS, *mutant[1:])
                if key not in seen and is_valid(source.text, mutant):
                    mutants.append(mutant)
                seen.add(key)
    return mutants


def replaced(text, mutant):
    """The function's text with the change; None where it has no such lines."""
    *parts, rest = text.split(mutant.before, mutant.nth + 1)
    return mutant.before.join(parts) + mutant.after + rest if len(parts) > mutant.nth else None


def is_valid(text, mutant):
    """It can be parsed, and says something else than before."""
    try:
        return ast.dump(ast.parse(replaced(text, mutant))) != ast.dump(ast.parse(text))
    except SyntaxError:
        return False


def mutate(mutant, folder):
    """Changes the files of a copy of the project."""
    in_scripts = mutant.id.partition(":")[0] in SCRIPTS
    for path in SCRIPTS if in_scripts else [TINY]:
        source = dict(functions(path)).get(mutant.function)
        text = replaced(source.text, mutant) if source else None
        if text:
            whole = (folder / path).read_text()
            assert whole.count(source.text) == 1
            (folder / path).write_text(whole.replace(source.text, text))


def test_files(mutant):
    """Of the default suite, first those that name the function most often; no other test reads tiny_ppo.py."""
    if mutant.id.startswith(TINY):
        return ["tiny"]
    first = {"main": ["oracle"], "Args": ["launch"], "EMBEDDED": ["launch"]}.get(mutant.function, [])
    texts = {name: (ROOT / "tests" / f"test_{name}.py").read_text() for name in TESTS}
    most = sorted(TESTS, key=lambda name: texts[name].count(mutant.function), reverse=True)
    return list(dict.fromkeys([*first, *most]))


def attempt(mutant):
    """(killed, timeout or survived; the test that failed first; seconds)."""
    began = time.monotonic()
    paths = [f"tests/test_{name}.py" for name in test_files(mutant)]
    unwanted = NOT_COUNTED_TINY if mutant.id.startswith(TINY) else NOT_COUNTED
    # What hangs is killed with all that it has started.
    command = ["timeout", "-s", "KILL", str(LIMIT), sys.executable, "-m", "pytest", "-x", "-n", "0"]
    command += ["-k", f"not ({unwanted})", *paths]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "checkout-index", "--all", f"--prefix={folder}/"], cwd=ROOT, check=True)
        mutate(mutant, Path(folder))
        with open(f"{folder}/console.txt", "w+") as file:
            code = subprocess.run(command, cwd=folder, stdout=file, stderr=subprocess.STDOUT).returncode
            subprocess.run(["pkill", "-9", "-f", folder])
            file.seek(0)
            console = file.read()
    verdict = "survived" if code == 0 else "timeout" if code < 0 else "killed"
    failures = re.findall(r"(?m)^(?:FAILED|ERROR) (\S+)", console) or paths
    return verdict, failures[0] if verdict == "killed" else "", time.monotonic() - began


def sample(mutants, count, seed):
    """Each code line has the same chance, however many operators apply to it."""
    noise = random.Random(seed)
    lines = {}
    for mutant in mutants:
        lines.setdefault(tuple(mutant.id.split(":")[:2]), []).append(mutant)
    return [noise.choice(lines[line]) for line in noise.sample(sorted(lines), min(count, len(lines)))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "score"])
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    args = parser.parse_args()
    path = RESULTS / f"seed_{args.seed}.csv"
    rows = common.read_csv(path) if path.exists() else []
    if args.what == "run":
        known = {row["id"] for row in rows}
        todo = [mutant for mutant in sample(all_mutants(), args.count, args.seed) if mutant.id not in known]
        with ThreadPoolExecutor(args.jobs) as pool:
            for mutant, (verdict, test, seconds) in zip(todo, pool.map(attempt, todo)):
                row = {"id": mutant.id, "where": mutant.function, "before": mutant.before.strip()}
                row |= {"after": mutant.after.strip(), "verdict": verdict, "test": test, "seconds": f"{seconds:.0f}"}
                print(row, flush=True)
                rows.append(row)
                common.write_csv(path, rows)
    if args.what == "score":
        survivors = [row for row in rows if row["verdict"] == "survived"]
        print(f"{len(rows) - len(survivors)} of {len(rows)} killed")
        for row in survivors:
            print(f"{row['id']} in {row['where']}\n-    {row['before']}\n+    {row['after']}")


if __name__ == "__main__":
    main()
