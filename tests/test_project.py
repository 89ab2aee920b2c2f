"""What the project promises about its own files: sizes, the embedded default, plots, that importing does nothing."""

import ast
import difflib
import importlib.util
import io
import json
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from dataclasses import fields

import pytest
import ranks
import yaml
from conftest import ROOT, TINY, read_rows, ruff, write_rows
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from transformers import AutoModelForCausalLM

# One sitting. A ceiling is never raised to let a feature in.
CEILINGS = {
    "ppo_llm": {"tokens": 8450, "code lines": 835, "lines": 1250, "main": 235, "flags": 50, "before loop": 1400},
    "grpo_llm": {"tokens": 8150, "code lines": 815, "lines": 1220, "main": 220, "flags": 47, "before loop": 1350},
    "ppo_llm_fsdp": {"tokens": 9600, "code lines": 950, "lines": 1410, "main": 255, "flags": 53, "before loop": 1650},
}
LONG = 20  # tokens in a line that has to be read twice
for ceilings in CEILINGS.values():
    ceilings |= {"longest other": 40, "refusals": 26, "tags": 38}
    # One statement does one thing.
    ceilings |= {"tokens per line": 10.8, "long lines %": 13.0, "tuple assignments": 6, "conditionals in calls": 2}
    ceilings |= {"nested comprehensions": 1, "walruses": 0}
FORBIDDEN = {"threading", "socket", "select", "mmap", "resource", "ctypes", "multiprocessing"}
# Code lines that one has and the other has not.
DIFF_CEILINGS = {("ppo_llm", "grpo_llm"): 160, ("ppo_llm", "ppo_llm_fsdp"): 188}
# What may differ between scripts under one name, and why. Everything else is one text.
ALGORITHM = {
    "Args": "each algorithm has flags of its own",
    "EMBEDDED": "and settings of them",
    "main": "it is the algorithm",
    "generate": "one prefill for a group",
    "SIZES": "that of a group is one",
    "start_processes": "and must divide that of a minibatch",
}
SHARDING = {
    "Args": "flags",
    "main": "loading, wrapping, micro-batches",
    "load_model": "rank 0 alone reads the weights",
    "pack": "all ranks cut equally many micro-batches",
    "save_models": "shards are gathered first",
    "save_checkpoint": "every rank writes its shards",
    "load_checkpoint": "and reads those it has now",
    "start_processes": "FSDP needs a process group before the accelerator, also of one process",
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
    (path,) = (ROOT / "benchmarks").rglob(f"{name}.py")  # some are in campaigns/
    sys.path.insert(0, str(path.parent))  # as when they are run: they may import each other
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.pop(0)
    return module


def code_numbers(source):
    """Numbers of the lines that are not blank, comment or docstring."""
    docs = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            docs |= set(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(source.splitlines(), 1)
    return {i for i, line in lines if line.strip() and not line.strip().startswith("#") and i not in docs}


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


def packed(node):
    """What the node does besides another thing, if it does: names of CEILINGS."""
    comprehensions = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    found, values = [], []
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
        found.append("tuple assignments")
    elif isinstance(node, ast.NamedExpr):
        found.append("walruses")
    elif isinstance(node, comprehensions):
        inner = sum(isinstance(child, comprehensions) for child in ast.walk(node)) - 1
        found += ["nested comprehensions"] * (inner > 0 or len(node.generators) > 1)
    elif isinstance(node, ast.Call):
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
    elif isinstance(node, ast.JoinedStr):
        values = node.values
    for value in values:  # what is inside of *args and of an f-string's braces counts, too
        inside = value.value if isinstance(value, ast.Starred | ast.FormattedValue) else value
        found += ["conditionals in calls"] * isinstance(inside, ast.IfExp)
    return found


def measure(source):
    """What CEILINGS bounds."""
    nodes, code = list(ast.walk(ast.parse(source))), code_numbers(source)
    by_line = count_tokens(source)
    tokens = sum(by_line.values())
    loop = next(i for i, line in enumerate(source.splitlines(), 1) if line.strip().startswith("for iteration in"))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    lengths = {node: sum(node.lineno <= i <= node.end_lineno for i in code) for node in functions}
    (args,) = (node for node in nodes if isinstance(node, ast.ClassDef) and node.name == "Args")
    refusals = sum(isinstance(node, ast.Raise | ast.Assert) for node in nodes)
    refusals += sum(isinstance(node, ast.Call) and getattr(node.func, "id", "") == "fail" for node in nodes)
    found = {
        "code lines": len(code),
        "lines": len(source.splitlines()),
        "tokens": tokens,
        "main": max(length for node, length in lengths.items() if node.name == "main"),
        "flags": sum(isinstance(field, ast.AnnAssign) for field in args.body),
        "tokens per line": round(tokens / len(code), 1),
        "longest other": max(length for node, length in lengths.items() if node.name != "main"),
        "refusals": refusals,
        "tags": len(re.findall(r"#[^\n]*\[\d+\.\d+\]", source)),
        "before loop": sum(count for i, count in by_line.items() if i < loop),
        "long lines %": round(100 * sum(count >= LONG for count in by_line.values()) / len(code), 1),
    }
    return Counter(kind for node in nodes for kind in packed(node)) + Counter(found)


def imports(source):
    """Names of the modules that a source imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {n.module.split(".")[0] for n in nodes if isinstance(n, ast.ImportFrom) and n.module}


def read_script(name):
    return (ROOT / f"{name}.py").read_text()


def readme():
    return (ROOT / "README.md").read_text().replace("\\\n", " ")


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
def test_scripts_import_no_local_module_and_do_without_threads_and_sockets(script):
    known = {"accelerate", "datasets", "peft", "torch", "transformers", "tyro"}
    assert imports(read_script(script)) <= (set(sys.stdlib_module_names) - FORBIDDEN) | known


@pytest.mark.parametrize("pair", MAY_DIFFER, ids=" and ".join)
def test_what_scripts_share_by_name_is_one_text(pair):
    one, other = (definitions(read_script(script)) for script in pair)
    allowed = MAY_DIFFER[pair]
    assert len(allowed.keys() - {"EMBEDDED", "SIZES"}) <= 9  # these two are about flags
    shared = [name for name in one if name in other]
    assert {name for name in shared if one[name] != other[name]} == allowed.keys()  # none more, and none needlessly
    assert len(shared) >= 50 and shared == [name for name in other if name in one]  # in one order, too
    assert ("sum_gradients" in shared) == ("ppo_llm_fsdp" not in pair)  # there FSDP adds up the gradients


@pytest.mark.parametrize("pair", DIFF_CEILINGS, ids=" to ".join)
def test_the_difference_between_scripts_stays_small(pair):
    lines = []
    for script in pair:
        source = read_script(script)
        lines.append([source.splitlines()[number - 1] for number in sorted(code_numbers(source))])
    changes = [line for line in difflib.unified_diff(*lines, n=0, lineterm="") if line[0] in "+-"][2:]
    assert 100 < len(changes) <= DIFF_CEILINGS[pair]


def test_scripts_compose(tmp_path):
    """The merge has no conflict and is clean code; what it computes: test_ranks.py and test_resume.py."""
    merge = "git merge-file -p grpo_llm.py ppo_llm.py ppo_llm_fsdp.py"
    assert merge in readme()
    done = subprocess.run(merge.split(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "<<<<<<<" not in done.stdout, "conflicts"
    (tmp_path / "grpo_llm_fsdp.py").write_text(done.stdout)
    ruff("check", tmp_path)
    ruff("format", "--check", tmp_path)


def test_scripts_do_nothing_when_imported(tmp_path):
    codes, consoles, _ = ranks.fork_ranks(1, import_scripts, str(tmp_path))
    assert (codes, consoles, list(tmp_path.iterdir())) == ([0], [""], [])


def import_scripts(folder):
    os.chdir(folder)
    for name in CEILINGS:
        load_script(name)


@pytest.mark.parametrize("script", CEILINGS)
def test_every_flag_is_read_and_help_shows_what_holds(script, monkeypatch, capsys):
    module, source = load_script(script), read_script(script)
    names = [field.name for field in fields(module.Args)]
    assert [name for name in names if not re.search(rf"\bargs\.{name}\b", source)] == []
    for given, lr, own in (["--model", "any"], "1e-06", {"model": "any"}), ([], "0.00015", module.EMBEDDED):
        monkeypatch.setattr(sys, "argv", [script, *given])
        assert module.parse_args() == module.Args(**own)
        more = ["--seed", "7", "--run-name", "x", "--no-gradient-checkpointing"]
        monkeypatch.setattr(sys, "argv", [script, *given, *more])
        assert module.parse_args() == module.Args(**own | {"seed": 7, "run_name": "x"})
        monkeypatch.setattr(sys, "argv", [script, *given, "--help"])
        with pytest.raises(SystemExit):
            module.parse_args()
        shown = capsys.readouterr().out
        assert [name for name in names if f"--{name.replace('_', '-')}" not in shown] == []
        assert f"(default: {lr})" in shown


def check_flags(script, flags, num_processes=2):
    """Args of these flags, which the script, a name or a module, must take together."""
    module, words = load_script(script) if isinstance(script, str) else script, shlex.split(flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module.__name__, *words])
        args = module.parse_args()
    group_size = getattr(args, "group_size", 1)
    assert args.batch_size * group_size % args.minibatch_size == 0, flags
    assert args.minibatch_size % (num_processes * group_size) == 0, flags
    return args


def test_the_front_door_is_short_and_what_it_shows_is_there():
    """It shows the loop of grpo_llm.py by lines of it."""
    text = (ROOT / "README.md").read_text()
    assert (
        len(text.splitlines()) <= 130 and len(text.partition("accelerate launch grpo_llm.py --model")[0].split()) <= 450
    )
    (excerpt,) = re.findall(r"(?ms)^```python\n(.*?)^```$", text)
    lines = [line.partition("  # ")[0].strip() for line in excerpt.splitlines()]
    script = [line.strip() for line in read_script("grpo_llm").splitlines()]
    places = [next(i for i, known in enumerate(script) if known.partition("  # ")[0] == line) for line in lines]
    assert places == sorted(places) and len(lines) >= 10


def test_named_algorithms_in_chapter_5_are_legal():
    """What their flags do: test_oracle.py. The variants: test_variants.py."""
    chapter = (ROOT / "notes" / "05-grpo.md").read_text()
    rows = dict(re.findall(r"^\| (\S+) \| `(--[^`]*)` \|", chapter, re.M))
    assert rows.keys() >= {"Dr.GRPO", "RLOO", "REINFORCE++", "REINFORCE++-baseline"}
    for flags in rows.values():
        check_flags("grpo_llm", flags)


def test_results_in_the_readme_are_those_of_the_committed_runs():
    compare, learning = load_benchmark("compare"), load_benchmark("learning")
    results, read_runs = ROOT / "benchmarks" / "results", load_benchmark("plot").read_runs
    names = ["ppo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "grpo-lora", "ppo-fsdp", "grpo-fsdp"]
    assert (results / "comparison.md").read_text().strip() == compare.make_table(results, names)
    assert compare.make_table(results, ["ppo", "grpo", "grpo-lora", "ppo-fsdp"]) in readme()
    hard = compare.make_table(results / "hard", ["grpo", "dr_grpo", "rloo", "ppo", "dapo"], [10, 20, 40])
    assert hard in (results / "hard" / "README.md").read_text()
    for path in [*results.glob("*/table.md"), *results.glob("hard/*/table.md")]:
        if list(path.parent.glob("seed_*.csv")):
            assert path.read_text().endswith(f"\n\n{learning.make_table(path.parent)}\n"), path.parent.name
    # Sharded or not, on one process or on two, the same course.
    for name, other, most in ("ppo", "ppo-fsdp", 0), ("grpo", "grpo-fsdp", 0.004), ("ppo", "ppo-two", 0):
        for run, same in zip(read_runs(results / name), read_runs(results / other)):
            for metric in "eval/score", "eval/score_sampled":
                pairs = [(x[metric], y[metric]) for x, y in zip(run, same, strict=True) if metric in x]
                assert len(pairs) == 5 and max(abs(x - y) for x, y in pairs) < most + 1e-6
    runs = [learning.summarise(run) for run in read_runs(results / "ppo")]
    titles = "sampled before", "sampled after", "greedy before", "greedy after"
    means = [statistics.mean(run[title] for run in runs) for title in titles]
    sentence = "sampled score rises from {:.2f} to {:.3f}, the greedy one from {:.3f} to {:.3f}".format(*means)
    assert sentence in " ".join(readme().split())
    # The example: greedy answers of seed 1, without the line break.
    first, *_, last = read_rows(results / "ppo-two" / "completions.jsonl")
    before, after = [" ".join(row["response"].split()) for row in (first, last)]
    assert (first["iteration"], last["iteration"]) == (0, 40)
    text = " ".join((ROOT / "notes" / "web" / "home.md").read_text().replace("> ", "").split())
    assert first["prompt"] in text
    assert re.search(f"(?i)before: `{re.escape(before)}`.* after: `{re.escape(after)}`", text)
    # That of the real model: the first of the ten answers that are kept of its first seed.
    for when, said in ("before", "10 + 35 = 50"), ("after", "10 + 35 = 45"):
        row = read_rows(results / "real" / f"additions-1-{when}.jsonl")[0]
        assert row["response"] == said and f'"{said}"' in readme()


def test_what_the_notes_say_of_the_story_runs_is_so():
    """Chapter 8; the prices of chapter 1 are computed there."""
    stories = load_benchmark("stories")
    for command in stories.RUNS.values():
        script, *rest = shlex.split(command)
        check_flags(script.removesuffix(".py"), shlex.join(rest))
    assert (stories.RESULTS / "table.md").read_text() == stories.make_table() + "\n"
    runs = {name: stories.plot.read_runs(stories.RESULTS / name) for name in (*stories.OLD, *stories.RUNS)}
    collapsed, held = runs["ppo-kl-off"] + runs["grpo-kl-off"], runs["ppo"] + runs["grpo"]

    def ends(runs, number, digits):
        found = [number(run) for run in runs]
        return f"{min(found):.{digits}f} to {max(found):.{digits}f}"

    def last(metric, count=1):
        return lambda run: statistics.mean(row[metric] for row in run[-count:])

    def gain(run):
        return reward(run) - run[0]["eval/score_sampled"]

    reward, bigrams, nats = last("eval/score_sampled"), last("eval/distinct_bigrams"), last("kl/sequence", 10)
    assert min(map(reward, collapsed)) > max(map(reward, held))  # "by reward alone the collapsed runs are the best"
    drifts = runs["grpo"][1]  # seed 2
    (before,) = (row["eval/score_sampled"] for row in drifts if row["step"] == drifts[-1]["step"] - 20)
    note = " ".join((ROOT / "notes" / "08-rewards-and-data.md").read_text().split())
    for said in (
        f"({ends(collapsed, bigrams, 2)} against {ends(held, bigrams, 2)})",
        f"the KL ({ends(collapsed, last('kl/mean', 10), 1)} nats",
        f"costs {ends(collapsed, nats, 0)} nats (`kl/sequence`, last ten iterations)",
        f"and gains {ends(collapsed, gain, 1)},",
        f"cost: {ends(collapsed, lambda run: gain(run) / nats(run), 3)} in the six runs",
        f"begin at {held[0][1]['kl/coef']:.2f} and end at {ends(held, last('kl/coef'), 3)}:",
        f"went from {before:.2f} to {reward(drifts):.2f} in the last 20 iterations",
        f"its KL to {last('kl/mean')(drifts):.2f}.",
    ):
        assert said in note, said
    opening = re.search(r"Texts after \*\*(.*?)\*\*", note)[1]
    quoted = re.findall(r"\| (before|PPO, no KL|GRPO, no KL|GRPO, KL 0.1) \| (-?[\d.]+) \| (.*?) \.\.\. \|", note)
    assert len(quoted) == 4
    for kind, score, text in quoted:
        name = {"PPO, no KL": "ppo-kl-off", "GRPO, no KL": "grpo-kl-off"}.get(kind, "grpo")
        when = "before" if kind == "before" else "after"
        found = " ".join((stories.RESULTS / name / "stories.md").read_text().split())
        assert f"{when} ({float(score):+.2f}): **{opening}** {text}" in found


def test_ci_ends_with_the_test_command_of_the_readme_and_the_slow_tests():
    """And then the one variant that needs an environment of its own, which the guide makes from the same file."""
    before, after = (ROOT / ".ci" / "run").read_text().split("\npytest -m slow\n")
    assert f"\n{before.splitlines()[-1]}\n```" in readme()
    assert "-r tests/vllm.txt" in after and "tests/test_vllm.py" in after
    assert "-r tests/vllm.txt" in (ROOT / "notes" / "guide.md").read_text()


def test_the_versions_allowed_are_those_that_the_tests_ran_with():
    """The first is the oldest in the guide's table; a cap excludes the minor release after the newest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [Requirement(text) for text in [*project["dependencies"], *project["optional-dependencies"]["lora"]]]
    allowed = {one.name: one.specifier for one in named} | {"Python": SpecifierSet(project["requires-python"])}
    guide = (ROOT / "notes" / "guide.md").read_text()
    lines = re.search(r"(?m)^\| Python \|.*\n(?:\|.*\n)+", guide)[0].splitlines()
    names, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    for name, *versions in zip(names, *rows):
        oldest, *_, newest = sorted(Version(text) for text in versions)
        for bound in allowed[name]:
            limit = Version(bound.version)
            tried = oldest if bound.operator == ">=" else Version(f"{newest.major}.{newest.minor + 1}")
            assert tried.release[: len(limit.release)] == limit.release, f"{name}{bound}"


def test_what_github_reads_says_what_the_project_says():
    """The workflow calls .ci/run with the whole history, which `variants.py rebase` needs; the citation is of today."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1]["run"] == ".ci/run" and job["steps"][0]["with"]["fetch-depth"] == 0
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (citation["version"], citation["abstract"]) == (project["version"], f"{project['description']}.")
    assert citation["license"] == (ROOT / "LICENSE").read_text().split()[0]


def test_embedded_data_are_what_the_maker_makes():
    """Regenerated from the seed; every worked answer is right; no test question in train."""
    maker, gsm8k_number = load_benchmark("make_tiny"), load_script("ppo_llm").gsm8k_number
    rows = maker.make_rows(random.Random(1), 4500)
    test, train = (read_rows(TINY / f"{name}.jsonl") for name in ("test", "train"))
    assert (len(train), len(test)) == (4000, 500) and test + train == rows
    assert not {row["question"] for row in test} & {row["question"] for row in train}
    for row in rows:
        steps = re.findall(r"(\d+[-+*/]\d+)=(\d+)", row["answer"])
        assert len(steps) in (2, 3) and all(eval(step) == int(result) for step, result in steps)
        assert gsm8k_number(row["answer"]) == int(steps[-1][1])


def test_embedded_model_is_small_and_can_but_usually_does_not():
    assert sum(file.stat().st_size for file in TINY.rglob("*") if file.is_file()) <= 6e6
    assert load_script("ppo_llm").load_model(str(TINY / "model"), AutoModelForCausalLM).num_parameters() <= 2e6
    scores = json.loads((TINY / "scores.json").read_text())
    assert 0.25 <= scores["sampled"]["score"] <= 0.40 and scores["forced_greedy"]["score"] >= 0.96


def test_plot_draws_runs_and_seeds(tmp_path, monkeypatch):
    plot, learning = load_benchmark("plot"), load_benchmark("learning")
    seeds = tmp_path / "seeds.csv"
    for seed in (1, 2):
        run = tmp_path / f"run{seed}"
        run.mkdir()
        rows = [{"step": s, "reward/mean": seed * s, "time/elapsed": s} for s in range(5)]
        write_rows(run / "metrics.jsonl", [row | ({"group/generated": 12} if seed == 2 else {}) for row in rows])
        (run / "args.json").write_text(json.dumps({"batch_size": 4, "group_size": 2}))
        learning.keep_run(seeds, plot.read_run(run), "seed", seed)
    assert [row["responses"] for row in plot.read_run(run)] == [0, 24, 48, 72, 96]  # generated, not used
    curve = plot.curve(plot.read_runs(seeds), "reward/mean", "responses")
    assert [column[:3] for column in curve] == [[0, 16, 32], [0, 1.5, 3], [0, 1, 2], [0, 2, 4]]
    picture = tmp_path / "curves.png"
    for flags in [], ["--metrics", "reward/mean", "--x", "responses", "time"]:
        monkeypatch.setattr(sys, "argv", ["plot.py", str(run), str(seeds), "--output", str(picture), *flags])
        plot.main()
        assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 10_000
        picture.unlink()
    with pytest.raises(SystemExit, match="neither a run folder"):
        plot.read_runs(tmp_path / "nothing")
