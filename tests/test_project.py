"""What the project promises about its own files: sizes, the embedded default, plots, that importing does nothing."""

import ast
import csv
import difflib
import importlib.util
import io
import itertools
import json
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from dataclasses import fields

import pytest
import ranks
from conftest import ROOT, read_metrics
from transformers import AutoModelForCausalLM

TINY = ROOT / "benchmarks" / "tiny"
# One sitting. A ceiling is never raised to let a feature in.
CEILINGS = {
    "ppo_llm": {"tokens": 8300, "code lines": 800, "lines": 1200, "main": 270, "flags": 51, "before loop": 2000},
    "grpo_llm": {"tokens": 8000, "code lines": 780, "lines": 1170, "main": 260, "flags": 48, "before loop": 2000},
    "ppo_llm_fsdp": {"tokens": 9350, "code lines": 905, "lines": 1350, "main": 285, "flags": 54, "before loop": 2250},
}
LONG = 20  # tokens in a line that has to be read twice
for ceilings in CEILINGS.values():
    ceilings |= {"longest other": 40, "refusals": 22, "tags": 38}
    # One statement does one thing.
    ceilings |= {"tokens per line": 10.8, "long lines %": 13.0, "tuple assignments": 6, "conditionals in calls": 2}
    ceilings |= {"nested comprehensions": 1, "walruses": 0}
FORBIDDEN = {"threading", "socket", "select", "mmap", "fcntl", "resource", "ctypes", "multiprocessing"}
# Code lines that one has and the other has not.
DIFF_CEILINGS = {("ppo_llm", "grpo_llm"): 170, ("ppo_llm", "ppo_llm_fsdp"): 170}
# What may differ between scripts under one name, and why. Everything else is one text.
ALGORITHM = {
    "Args": "each algorithm has flags of its own",
    "EMBEDDED": "and settings of them",
    "main": "it is the algorithm",
    "generate": "one prefill for a group",
}
SHARDING = {
    "Args": "flags",
    "main": "loading, wrapping, micro-batches",
    "load_model": "rank 0 alone reads the weights",
    "pack": "all ranks cut equally many micro-batches",
    "save_models": "shards are gathered first",
    "save_checkpoint": "every rank writes its shards",
    "load_checkpoint": "and reads those it has now",
}
MAY_DIFFER = {
    ("ppo_llm", "grpo_llm"): ALGORITHM,
    ("ppo_llm", "ppo_llm_fsdp"): SHARDING,
    ("grpo_llm", "ppo_llm_fsdp"): ALGORITHM | SHARDING,
}


def load_script(name):
    """A script of the repository root as a module."""
    return ranks.load_script(ROOT / f"{name}.py")


def load_benchmark(name):
    sys.path.insert(0, str(ROOT / "benchmarks"))  # as when they are run: they may import each other
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.pop(0)
    return module


def code_numbers(source):
    """Numbers of the lines that are not blank, comment or docstring."""
    docs = set()
    for node in ast.walk(ast.parse(source)):
        for child in getattr(node, "body", []) if isinstance(getattr(node, "body", []), list) else []:
            if isinstance(child, ast.Expr) and isinstance(getattr(child.value, "value", None), str):
                docs |= set(range(child.lineno, child.end_lineno + 1))
    lines = enumerate(source.splitlines(), 1)
    return {i for i, line in lines if line.strip() and not line.strip().startswith("#") and i not in docs}


def code_lines(source):
    return [source.splitlines()[number - 1] for number in sorted(code_numbers(source))]


def count_tokens(source):
    """{number of a code line: its names, operators, numbers and strings}; an f-string is one."""
    found, inside = dict.fromkeys(code_numbers(source), 0), 0
    kinds = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = tokenize.tok_name[token.type]  # of Python 3.12 and later: 3.11 has f-strings as STRING
        inside -= name == "FSTRING_END"
        if token.start[0] in found and inside == 0 and (token.type in kinds or name == "FSTRING_START"):
            found[token.start[0]] += 1
        inside += name == "FSTRING_START"
    return found


def is_packed(node):
    """What of `packed` a node is, or nothing."""
    comprehensions = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
        return "tuple assignments"
    if isinstance(node, ast.NamedExpr):
        return "walruses"
    inner = sum(isinstance(child, comprehensions) for child in ast.walk(node)) - 1
    if isinstance(node, comprehensions) and (inner or len(node.generators) > 1):
        return "nested comprehensions"
    return None


def packed(nodes):
    """{what: how often} of statements that do several things."""
    found = Counter({"tuple assignments": 0, "conditionals in calls": 0, "nested comprehensions": 0, "walruses": 0})
    found.update(kind for kind in map(is_packed, nodes) if kind)
    for node in nodes:
        if isinstance(node, ast.Call):
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.JoinedStr):
            values = [part.value for part in node.values]
        else:
            continue
        values = [value.value if isinstance(value, ast.Starred) else value for value in values]
        found["conditionals in calls"] += sum(isinstance(value, ast.IfExp) for value in values)
    return dict(found)


def functions_of(node, prefix=""):
    """{qualified name: node} of all functions and methods, nested ones too."""
    found = {}
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        name = f"{prefix}{child.name}" if named else prefix
        if named and not isinstance(child, ast.ClassDef):
            found[name] = child
        found |= functions_of(child, f"{name}." if named else prefix)
    return found


def measure(source):
    """What CEILINGS bounds."""
    tree, code = ast.parse(source), code_numbers(source)
    nodes, by_line = list(ast.walk(tree)), count_tokens(source)
    tokens = sum(by_line.values())
    loops = [i for i, line in enumerate(source.splitlines(), 1) if line.strip().startswith("for iteration in")]
    lengths = {name: sum(f.lineno <= i <= f.end_lineno for i in code) for name, f in functions_of(tree).items()}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Args")]
    refusals = sum(isinstance(node, ast.Raise | ast.Assert) for node in nodes)
    refusals += sum(isinstance(node, ast.Call) and getattr(node.func, "id", "") == "fail" for node in nodes)
    return {
        "code lines": len(code),
        "lines": len(source.splitlines()),
        "tokens": tokens,
        "main": lengths.get("main", 0),
        "flags": sum(isinstance(field, ast.AnnAssign) for node in classes for field in node.body),
        "tokens per line": round(tokens / len(code), 1),
        "longest other": max([length for name, length in lengths.items() if name != "main"], default=0),
        "refusals": refusals,
        "tags": len(re.findall(r"#[^\n]*\[\d+\.\d+\]", source)),
        "before loop": sum(count for i, count in by_line.items() if loops and i < loops[0]),
        "long lines %": round(100 * sum(count >= LONG for count in by_line.values()) / len(code), 1),
    } | packed(nodes)


def imports(source):
    """Names of the modules that a source imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {n.module.split(".")[0] for n in nodes if isinstance(n, ast.ImportFrom) and n.module}


def read_script(name):
    return (ROOT / f"{name}.py").read_text()


def definitions(source):
    """{name: text} of the functions, classes and constants of a module, with decorators and the comments above them."""
    lines, result = source.splitlines(), {}
    for node in ast.parse(source).body:
        names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        while lines[first - 1].startswith("#"):
            first -= 1
        result |= dict.fromkeys(names, "\n".join(lines[first : node.end_lineno]))
    return result


@pytest.mark.parametrize("script", CEILINGS)
def test_scripts_stay_readable_in_one_sitting(script):
    found = measure(read_script(script))
    assert {name: found[name] for name, most in CEILINGS[script].items() if found[name] > most} == {}


@pytest.mark.parametrize("script", CEILINGS)
def test_scripts_do_without_threads_and_sockets(script):
    assert imports(read_script(script)) & FORBIDDEN == set()


def test_what_is_counted():
    source = '''"""Of a module."""
import select as s  # [1.2]


class Args:
    """Flags."""

    lr: float = 1.0  # how fast


def main():  # [3.4] of it
    # a comment
    def inner():
        raise ValueError(f"{lr} and {lr:{width}}")

    fail("no" if lr else "yes", *(a if a else b))
    text = """

    """
    for iteration in range(3):
        a, b = b, [[x for x in y] for y in a if y]
    assert inner and (c := f"{a if b else c}")


class Other:
    def method(self):
        return 1
'''
    found = {"code lines": 15, "lines": 27, "main": 9, "flags": 1, "longest other": 2, "refusals": 3, "tags": 2}
    tokens = [4, 3, 5, 5, 5, 5, 17, 3, 8, 21, 8, 3, 6, 2]  # of each statement
    found |= {"tokens": sum(tokens), "tokens per line": round(sum(tokens) / 15, 1), "before loop": sum(tokens[:8])}
    found |= {"long lines %": 6.7, "tuple assignments": 1, "conditionals in calls": 3, "nested comprehensions": 1}
    found |= {"walruses": 1}
    assert measure(source) == found and imports(source) == {"select"}


@pytest.mark.parametrize("pair", MAY_DIFFER, ids=" and ".join)
def test_what_scripts_share_by_name_is_one_text(pair):
    one, other = (definitions(read_script(script)) for script in pair)
    allowed = MAY_DIFFER[pair]
    assert len(allowed.keys() - {"EMBEDDED"}) <= 8  # settings of flags, which differed before, in lines not seen here
    shared = [name for name in one if name in other]
    assert {name for name in shared if one[name] != other[name]} == allowed.keys()  # none more, and none needlessly
    assert len(shared) >= 50 and shared == [name for name in other if name in one]  # in one order, too


def test_a_difference_in_a_comment_is_seen():
    text = "# why\n@wraps\ndef f():\n    return 1  # one\n"
    for changed in (text.replace("why", "how"), text.replace("one", "1"), text.replace("@wraps", "@cache")):
        assert definitions(changed)["f"] != definitions(text)["f"]
    assert definitions(text + "\n\nX = 1\n")["f"] == definitions(text)["f"]


@pytest.mark.parametrize("pair", DIFF_CEILINGS, ids=" to ".join)
def test_the_difference_between_scripts_stays_small(pair):
    lines = [code_lines(read_script(script)) for script in pair]
    changes = [line for line in difflib.unified_diff(*lines, n=0, lineterm="") if line[0] in "+-"][2:]
    assert 100 < len(changes) <= DIFF_CEILINGS[pair]


# ------------------------------------------------------------------------------------------------------ composition


def changed_lines(one, other):
    """Lines of `one`, as (first, last), that a difference replaces; an insertion stands before `first`."""
    command = ["git", "diff", "--no-index", "-U0", *(str(ROOT / f"{name}.py") for name in (one, other))]
    text, found = subprocess.run(command, capture_output=True, text=True).stdout, []
    for start, count in re.findall(r"^@@ -(\d+)(?:,(\d+))? ", text, re.M):
        start, count = int(start), int(count or 1)
        found.append((start, start + count - 1) if count else (start + 1, start))
    return found


def smallest_distance():
    """Unchanged lines of ppo_llm.py, at the least, between what makes it GRPO and what shards it."""
    grpo, fsdp = changed_lines("ppo_llm", "grpo_llm"), changed_lines("ppo_llm", "ppo_llm_fsdp")
    assert len(grpo) > 20 and len(fsdp) > 20
    return min(max(a, c) - min(b, d) - 1 for a, b in grpo for c, d in fsdp)


def test_differences_stand_apart():
    """One unchanged line between two differences: then they merge, and each can be read by itself."""
    assert smallest_distance() >= 1


def test_scripts_compose(tmp_path):
    """The merge has no conflict and is clean code; what it computes: test_ranks.py and test_resume.py."""
    files = [f"{name}.py" for name in ("grpo_llm", "ppo_llm", "ppo_llm_fsdp")]
    merge = ["git", "merge-file", "-p", *files]
    assert " ".join(merge) in readme()
    done = subprocess.run(merge, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "<<<<<<<" not in done.stdout, "conflicts"
    (tmp_path / "grpo_llm_fsdp.py").write_text(done.stdout)
    for check in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--config", str(ROOT / "pyproject.toml")]
        done = subprocess.run([*command, "grpo_llm_fsdp.py"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", CEILINGS)
def test_scripts_import_no_local_module(script):
    known = ["accelerate", "datasets", "peft", "torch", "transformers", "tyro"]
    assert imports(read_script(script)) <= set(sys.stdlib_module_names) | set(known)


def test_scripts_do_nothing_when_imported(tmp_path):
    codes, consoles, _ = ranks.fork_ranks(1, import_scripts, str(tmp_path))
    assert (codes, consoles, list(tmp_path.iterdir())) == ([0], [""], [])


def import_scripts(folder):
    os.chdir(folder)
    for name in CEILINGS:
        load_script(name)


@pytest.mark.parametrize("script", CEILINGS)
def test_every_flag_is_read(script):
    source, args = read_script(script), {field.name for field in fields(load_script(script).Args)}
    assert not {name for name in args if not re.search(rf"\bargs\.{name}\b", source)}


@pytest.mark.parametrize("script", CEILINGS)
def test_help_shows_what_holds(script, monkeypatch, capsys):
    module = load_script(script)
    for given, lr in (["--model", "any"], "1e-06"), ([], "0.00015"):
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *given, "--help"])
        with pytest.raises(SystemExit):
            module.parse_args()
        shown = capsys.readouterr().out
        assert [f.name for f in fields(module.Args) if f"--{f.name.replace('_', '-')}" not in shown] == []
        assert f"(default: {lr})" in shown


def test_the_command_line_becomes_args(monkeypatch):
    for script in CEILINGS:
        module = load_script(script)
        own = getattr(module, "EMBEDDED", {})  # used when --model is absent
        monkeypatch.setattr(sys, "argv", [script, "--lr", "0.5", "--run-name", "x", "--no-gradient-checkpointing"])
        assert module.parse_args() == module.Args(**own | {"lr": 0.5, "run_name": "x"})
        monkeypatch.setattr(sys, "argv", [script, "--model", "any"])
        assert module.parse_args() == module.Args(model="any")


def readme():
    return (ROOT / "README.md").read_text().replace("\\\n", " ")


def test_flags_in_the_readme_exist():
    shown = {flag.replace("-", "_") for flag in re.findall(r"(?<![\w-])--([a-z][a-z-]+)(?![\w-])", readme())}
    known = {field.name for script in CEILINGS for field in fields(load_script(script).Args)}
    assert shown <= known | {
        "labels",
        "output",
        "metrics",
        "seeds",
        "flags",
        "script",
        "local_dir",
        "on",
        "ref_model",
        "exact",
    }  # and of the benchmark scripts


def check_flags(script, flags, num_processes=2):
    """That the script, a name or a module, takes these flags together."""
    module, words = load_script(script) if isinstance(script, str) else script, shlex.split(flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module.__name__, *words])
        args = module.parse_args()
    group_size = getattr(args, "group_size", 1)
    assert args.batch_size * group_size % args.minibatch_size == 0, flags
    assert args.minibatch_size % (num_processes * group_size) == 0, flags


def test_commands_in_the_readme_are_legal():
    blocks = re.findall(r"```bash\n(.*?)```", readme(), re.S)
    commands = [part for block in blocks for line in block.splitlines() for part in line.split("&&")]
    commands = [part.replace("my_grpo.py", "grpo_llm.py") for part in commands]
    learning = [line for line in commands if "learning.py" in line]
    for line in learning:
        script = re.search(r"--script (\w+)\.py", line)
        check_flags(script[1] if script else "ppo_llm", re.search(r'--flags="([^"]*)"|$', line)[1] or "")
    direct = [re.search(r"()\b(\w+_llm\w*)\.py ?(.*)", c) for c in commands if "python ppo" in c]
    direct += [re.search(r"num_processes (\d+).* (\w+_llm\w*)\.py ?(.*)", c) for c in commands if "num_processes" in c]
    for command in commands:  # on every GPU, or a variant, as it was applied
        if "accelerate launch" in command and "num_processes" not in command:
            name, flags = re.search(r"launch (\w+)\.py ?(.*)$", command.strip()).groups()
            if name in CEILINGS:
                check_flags(name, flags, 8)
                direct.append(re.search(r"()(\w+_llm\w*)\.py ?()", command))
            else:
                assert (ROOT / "notes" / "variants" / f"{name.removesuffix('_llm')}.patch").exists()
    for match in direct:
        check_flags(match[2], match[3].replace("...", ""), int(match[1] or 1))
    assert {match[2] for match in direct} >= {"ppo_llm", "ppo_llm_fsdp"}  # learning.py's commands: tests/test_notes.py


def test_tables_of_results_in_the_readme_are_those_of_the_committed_runs():
    pytest.importorskip("matplotlib")
    compare, learning, results = (
        load_benchmark("compare"),
        load_benchmark("learning"),
        ROOT / "benchmarks" / "results",
    )
    names = ["ppo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "grpo-lora", "ppo-fsdp", "grpo-fsdp"]
    table = compare.make_table(results, names)
    assert table in readme() and (results / "comparison.md").read_text().strip() == table
    hard = compare.make_table(results / "hard", ["grpo", "dr_grpo", "rloo", "ppo", "dapo"], [10, 20, 40])
    assert hard in (results / "hard" / "README.md").read_text()
    for path in [*results.glob("*/table.md"), *results.glob("hard/*/table.md")]:
        if list(path.parent.glob("seed_*.csv")):
            assert path.read_text().endswith(f"\n\n{learning.make_table(path.parent)}\n"), path.parent.name
    # Sharded or not, on one process or on two, the same course.
    for name, other, seeds, most in (
        ("ppo", "ppo-fsdp", 3, 0),
        ("grpo", "grpo-fsdp", 3, 0.004),
        ("ppo", "ppo-two", 2, 0),
    ):
        assert len(compare.plot.read_runs(results / other)) == seeds
        for run, same in zip(*(compare.plot.read_runs(results / x)[:seeds] for x in (name, other))):
            for metric in "eval/score", "eval/score_sampled":
                pairs = [(x[metric], y[metric]) for x, y in zip(run, same, strict=True) if metric in x]
                assert len(pairs) == 5 and max(abs(x - y) for x, y in pairs) < most + 1e-6
    means = [
        statistics.mean(learning.summarise(run)[name] for run in compare.plot.read_runs(results / "ppo"))
        for name in ("sampled before", "sampled after", "greedy before", "greedy after")
    ]
    sentence = "sampled score rises from {:.2f} to {:.3f}, the greedy one from {:.3f} to {:.3f}".format(*means)
    assert sentence in " ".join(readme().split())


def test_named_algorithms_in_the_readme_are_legal():
    rows = dict(re.findall(r"^\| (\S+) \| `(--[^`]*)` \|", readme(), re.M))
    assert rows.keys() >= {"Dr.GRPO", "RLOO", "REINFORCE++", "REINFORCE++-baseline"}
    for flags in rows.values():
        check_flags("grpo_llm", flags)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GRPO", "Dr.GRPO", "RLOO", "REINFORCE++", "REINFORCE++-baseline"])
def test_named_algorithms_in_the_readme_run(name, tmp_path):
    """Its line, as printed, on two processes: one iteration. The variants: tests/test_variants.py."""
    flags = re.search(rf"^\| {re.escape(name)} \| (?:`(--[^`]*)`)? ?\|", readme(), re.M)[1] or ""
    words = ["--total-iterations", "1", "--eval-rows", "0", "--save-every", "0", "--track", "none"]
    words += ["--output-dir", str(tmp_path), "--run-name", "run", *shlex.split(flags)]
    code, console = ranks.run_script(ROOT / "grpo_llm.py", words, 2)
    assert code == 0, console
    metrics = read_metrics(tmp_path / "run")[-1]
    assert metrics["actor/grad_norm"] > 0 and metrics["advantage/std"] > 0.01
    assert metrics["rollout/logprob_diff"] < 1e-4 and metrics["actor/clipfrac"] < 0.5
    assert json.loads((tmp_path / "run" / "args.json").read_text())["num_processes"] == 2


def test_the_memory_table_of_the_notes_follows_from_its_formulas():
    notes = (ROOT / "notes" / "14-memory.md").read_text()
    # Vocabulary, hidden size, output heads of their own: the unit that is no block of layers.
    rest = {"Qwen2.5-0.5B": 151_936 * 896, "Qwen2.5-7B": 2 * 152_064 * 3584}
    counts = {name: counts for name, *counts in re.findall(r"^(Qwen\S+) ([\d,]+) ([\d,]+)$", notes, re.M)}
    rows = re.findall(r"^\| (Qwen\S+) \| (.*) \|$", notes, re.M)[:2]
    assert [row[0] for row in rows] == list(rest)
    for name, cells in rows:
        actor, critic = (int(n.replace(",", "")) for n in counts[name])
        state = 16 * (actor + critic) + 4 * actor
        expected = [state, state / 2, state / 4, state / 8, 8 * rest[name], 2 * actor]
        assert cells.split(" | ") == [f"{n / 2**30:.1f}" for n in expected]


def test_the_story_results_are_what_the_table_and_the_readme_say():
    stories = load_benchmark("stories")
    assert stories.distinct_bigrams(["A cat, a cat", "a dog"]) == 3 / 4  # a cat twice, cat a, a dog
    for name in stories.NOW:
        script, *rest = shlex.split(stories.RUNS[name])
        check_flags(script.removesuffix(".py"), shlex.join(rest))
    table = stories.make_table()
    assert (stories.RESULTS / "table.md").read_text() == table + "\n"
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert Counter(row[0] for row in rows) == dict.fromkeys(stories.RUNS, 3)
    outside, prices = [], [f"ppo-kl-{price}" for price in stories.PRICES]
    paid = [[(float(row[5]), float(row[6])) for row in rows if row[0] == name] for name in prices]
    for cheap, dear in itertools.pairwise(paid):  # chapter 1: a higher price buys less score and less distance
        assert min(rise for rise, _ in cheap) > min(rise for rise, _ in dear)
        assert statistics.mean(kl for _, kl in cheap) > statistics.mean(kl for _, kl in dear)
    for name, seed, _, after, _, rise, kl, *_, change, seconds in rows:
        assert int(seconds) < 600
        if name in prices:
            continue
        if name.endswith("off"):
            assert int(change[:-1]) < -90
            usual = float(after) > 1.5
        else:
            assert -15 < int(change[:-1]) <= -2
            usual = 2.5 <= float(rise) <= 4.9 and 0.065 <= float(kl) <= 0.14
        outside += [] if usual else [(name, seed, after)]
    assert outside == [("grpo", "2", "0.544"), ("ppo-kl-off", "1", "0.930")]  # both count in the note, see below
    runs = {name: stories.plot.read_runs(stories.RESULTS / name) for name in stories.RUNS}
    collapsed, held = runs["ppo-kl-off"] + runs["grpo-kl-off"], runs["ppo"] + runs["grpo"]
    assert len(collapsed) == len(held) == 6

    def ends(kind, number, digits):
        return " to ".join(f"{end:.{digits}f}" for end in (min(map(number, kind)), max(map(number, kind))))

    def last_ten(metric):
        return lambda run: statistics.mean(row[metric] for row in run[-10:])

    def gain(run):
        return run[-1]["eval/score_sampled"] - run[0]["eval/score_sampled"]

    after = {id(run): run[-1]["eval/score_sampled"] for run in collapsed + held}
    assert min(after[id(run)] for run in collapsed) > max(after[id(run)] for run in held)
    bigrams = [ends(kind, lambda run: run[-1]["eval/distinct_bigrams"], 2) for kind in (collapsed, held)]
    drifts = runs["grpo"][1]  # seed 2
    (before,) = (row["eval/score_sampled"] for row in drifts if row["step"] == drifts[-1]["step"] - 20)
    note = " ".join((ROOT / "notes" / "08-rewards-and-data.md").read_text().split())
    kl, nats = last_ten("kl/mean"), last_ten("kl/sequence")
    for said in (
        f"distinct bigrams ({bigrams[0]} against {bigrams[1]}), the KL ({ends(collapsed, kl, 1)} nats",
        f"costs {ends(collapsed, nats, 0)} nats (`kl/sequence`, last ten iterations)",
        f"and gains {ends(collapsed, gain, 1)},",
        f"cost: {ends(collapsed, lambda run: gain(run) / nats(run), 3)} in the six runs",
        f"begin at {held[0][1]['kl/coef']:.2f} and end at {ends(held, lambda run: run[-1]['kl/coef'], 3)}:",
        f"(GRPO, seed 2) went from {before:.2f} to {drifts[-1]['eval/score_sampled']:.2f} in the last 20 iterations, "
        f"its KL to {drifts[-1]['kl/mean']:.2f}.",
    ):
        assert said in note, said
    for run in runs["ppo"]:  # note 4.8, below its figure: the coefficient falls through the whole run
        coefficients = [row["kl/coef"] for row in run[1:]]
        assert coefficients == sorted(coefficients, reverse=True) and max(row["kl/mean"] for row in run[1:]) < 0.1
    opening = re.search(r"Texts after \*\*(.*?)\*\*", note)[1]
    quoted = re.findall(r"\| (before|PPO, no KL|GRPO, no KL|GRPO, KL 0.1) \| (-?[\d.]+) \| (.*?) \.\.\. \|", note)
    assert len(quoted) == 4
    for kind, score, text in quoted:
        name = {"PPO, no KL": "ppo-kl-off", "GRPO, no KL": "grpo-kl-off"}.get(kind, "grpo")
        when = "before" if kind == "before" else "after"
        found = " ".join((stories.RESULTS / name / "stories.md").read_text().split())
        assert f"{when} ({float(score):+.2f}): **{opening}** {text}" in found


def test_ci_ends_with_the_test_command_of_the_readme_and_the_slow_tests():
    lines = (ROOT / ".ci" / "run").read_text().strip().splitlines()
    slow = lines.index("pytest -m slow")
    assert f"```bash\n{lines[slow - 1]}\n```" in (ROOT / "README.md").read_text()
    # Then the one variant that needs an environment of its own, which the guide makes from the same file.
    after = "\n".join(lines[slow + 1 :])
    assert "-r tests/vllm.txt" in after and "tests/test_vllm.py" in after
    assert "-r tests/vllm.txt" in (ROOT / "notes" / "guide.md").read_text()


def test_embedded_data_are_what_the_maker_makes():
    """Regenerated from the seed; every worked answer is right; no test question in train."""
    maker, gsm8k_number = load_benchmark("make_tiny"), load_script("ppo_llm").gsm8k_number
    rows = maker.make_rows(random.Random(1), 4500)
    test, train = ([json.loads(line) for line in open(TINY / f"{n}.jsonl")] for n in ("test", "train"))  # noqa: SIM115
    assert (len(train), len(test)) == (4000, 500) and test + train == rows
    assert not {row["question"] for row in test} & {row["question"] for row in train}
    for row in rows:
        steps = re.findall(r"(\d+)([-+*/])(\d+)=(\d+)", row["answer"])
        for a, operator, b, result in steps:
            exact = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) / int(b)}[operator]
            assert exact == int(result)
        assert len(steps) in (2, 3) and gsm8k_number(row["answer"]) == int(steps[-1][3])


def test_embedded_model_is_small_and_can_but_usually_does_not():
    assert sum(file.stat().st_size for file in TINY.rglob("*") if file.is_file()) <= 6e6
    assert load_script("ppo_llm").load_model(str(TINY / "model"), AutoModelForCausalLM).num_parameters() <= 2e6
    scores = json.loads((TINY / "scores.json").read_text())
    assert 0.25 <= scores["sampled"]["score"] <= 0.40 and scores["forced_greedy"]["score"] >= 0.96


def write_run(path, scale, **metrics):
    rows = [{"step": s, "reward/mean": scale * s, "eval/score": 0.1 * s, "time/elapsed": s} | metrics for s in range(5)]
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def test_plot_draws_runs_and_seeds(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    plot, learning = load_benchmark("plot"), load_benchmark("learning")
    (tmp_path / "seeds").mkdir()
    for seed in (1, 2):
        learning.write_compact(write_run(tmp_path / f"run{seed}", seed), tmp_path / "seeds" / f"seed_{seed}.csv")
    with open(tmp_path / "seeds" / "seed_2.csv", newline="") as file:
        assert [float(row["reward/mean"]) for row in csv.DictReader(file)] == [0, 2, 4, 6, 8]
    steps, mean, low, high = plot.curve(plot.read_runs(tmp_path / "seeds"), "reward/mean")
    assert (steps, mean[2], low[2], high[2]) == ([0, 1, 2, 3, 4], 3, 2, 4)
    picture = tmp_path / "curves.png"
    arguments = [str(tmp_path / "run1"), str(tmp_path / "seeds"), "--output", str(picture)]
    monkeypatch.setattr(sys, "argv", ["plot.py", *arguments])
    plot.main()
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 20_000
    monkeypatch.setattr(sys, "argv", ["plot.py", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit, match="neither a run folder"):
        plot.main()


def test_plot_of_metrics_against_responses_and_time(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    plot, learning = load_benchmark("plot"), load_benchmark("learning")
    write_run(tmp_path / "run", 1, **{"group/generated": 12})
    (tmp_path / "run" / "args.json").write_text(json.dumps({"batch_size": 4, "group_size": 2}))
    rows = plot.read_run(tmp_path / "run")
    assert [row["responses"] for row in rows] == [0, 24, 48, 72, 96]  # what was generated, not what was used
    write_run(tmp_path / "plain", 1)
    (tmp_path / "plain" / "args.json").write_text(json.dumps({"batch_size": 4, "group_size": 2}))
    assert [row["responses"] for row in plot.read_run(tmp_path / "plain")] == [0, 8, 16, 24, 32]
    (tmp_path / "seeds").mkdir()
    learning.write_compact(rows, tmp_path / "seeds" / "seed_1.csv")
    learning.write_compact(plot.read_run(tmp_path / "plain"), tmp_path / "seeds" / "seed_2.csv")
    places, mean, low, high = plot.curve(plot.read_runs(tmp_path / "seeds"), "reward/mean", "responses")
    assert places == [0, 16, 32, 48, 64] and mean == low == high == [0, 1, 2, 3, 4]
    picture = tmp_path / "curves.png"
    flags = ["--metrics", "reward/mean", "eval/score", "--x", "responses", "time", "--output", str(picture)]
    monkeypatch.setattr(sys, "argv", ["plot.py", str(tmp_path / "run"), str(tmp_path / "seeds"), *flags])
    plot.main()
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 20_000


def test_summary_of_runs(tmp_path):
    pytest.importorskip("matplotlib")
    learning = load_benchmark("learning")
    evals = {0: (0.1, 0.3), 4: (0.8, 0.7), 8: (0.9, 0.8)}
    rows = [{"step": s, "time/iteration": s, "critic/explained_variance": s / 10} for s in range(9)]
    rows[0] = {"step": 0}
    for step, (greedy, sampled) in evals.items():
        rows[step] |= {"eval/score": greedy, "eval/score_sampled": sampled, "eval/length_mean": 1}
    rows[-1]["time/launch_to_exit"] = 12.3
    summary = learning.summarise(rows)
    assert summary["sampled before"] == 0.3 and summary["greedy after"] == 0.9 and summary["seconds"] == 12.3
    assert summary["sampled after"] == 0.8
    assert summary["explained variance from iteration 6"] == pytest.approx(
        (0.6 + 0.7 + 0.8) / 3
    )  # iterations after the fifth
    assert summary["seconds per iteration"] == 4.5
    for seed in (10, 2):
        learning.write_compact(rows, tmp_path / f"seed_{seed}.csv")
    header, _, *lines = learning.make_table(tmp_path).splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["| 2", "| 10"] and len(header.split("|")) == 12
    without = [{k: v for k, v in row.items() if "critic" not in k} for row in rows]
    assert not any("explained" in name for name in learning.summarise(without))


def test_comparison_of_results(tmp_path):
    pytest.importorskip("matplotlib")
    learning, compare = load_benchmark("learning"), load_benchmark("compare")
    for name, seeds in {"one": (1,), "two": (1, 2)}.items():
        (tmp_path / name).mkdir()
        for seed in seeds:
            rows = [{"step": s, "responses": 2560 * s, "time/iteration": s + seed} for s in range(12)]
            for step in (10, 11):
                rows[step] |= {"eval/score": seed / 10, "eval/score_sampled": step / 100 + seed / 100}
            rows[-1] |= {"time/launch_to_exit": 100} | ({"kl/mean": 0.5} if name == "one" else {})
            learning.write_compact(rows, tmp_path / name / f"seed_{seed}.csv")
    _, _, one, two = compare.make_table(tmp_path, ["one", "two"]).splitlines()
    assert one == "| one | 1 | 0.100 | 0.110 | 0.120 | 0.500 | 28,160 |"
    cells = "0.150 (0.100-0.200) | 0.115 (0.110-0.120) | 0.125 (0.120-0.130) |  | 28,160"
    assert two == f"| two | 2 | {cells} |"
    head, _, one = compare.make_table(tmp_path, ["one"], at=[10, 11]).splitlines()
    assert (
        head.count("sampled at iteration") == 2
        and one == "| one | 1 | 0.100 | 0.110 | 0.120 | 0.120 | 0.500 | 28,160 |"
    )
