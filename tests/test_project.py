"""What the project promises about its own files: sizes, one text for what scripts share, the merge, what it embeds."""

import ast
import importlib.util
import io
import itertools
import json
import re
import shlex
import sys
import tokenize
import tomllib
from dataclasses import fields
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import ranks
from helpers import ROOT, compose, ruff, write_rows
from refresh import definitions

# One sitting. A release stays 100 below, so that anybody's phase, flag and metric go in.
TOKENS = {"ppo_llm": 8900, "grpo_llm": 8580, "ppo_llm_fsdp": 9900}
# What may differ between scripts under one name, and why. Everything else is one text.
ALGORITHM = {
    "Args": "each algorithm has flags of its own",
    "BUNDLED": "and settings of them",
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
    """Names, operators, numbers and strings of its code, an f-string as one."""
    code, count, inside = code_numbers(source), 0, 0
    kinds = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = tokenize.tok_name[token.type]  # of Python 3.12 and later: 3.11 has f-strings as STRING
        inside -= name == "FSTRING_END"
        count += token.start[0] in code and inside == 0 and (token.type in kinds or name == "FSTRING_START")
        inside += name == "FSTRING_START"
    return count


def read_script(name):
    return (ROOT / f"{name}.py").read_text()


@pytest.mark.parametrize("name", TOKENS)
def test_a_script_is_read_in_one_sitting_and_stands_alone(name):
    source = read_script(name)
    assert count_tokens(source) <= TOKENS[name]
    assert count_tokens(source.replace("def main(", "# One line.\n# Two.\n# Three.\ndef main(")) == count_tokens(source)
    imported = {module.split(".")[0] for module in re.findall(r"(?m)^ *(?:import|from(?= \S+ import)) (\S+)", source)}
    assert imported <= {*sys.stdlib_module_names, "accelerate", "datasets", "peft", "torch", "transformers", "tyro"}


def test_a_script_alone_asks_for_what_the_project_does():
    """By its header (PEP 723), the same in all: what `uv run SCRIPT` installs, with the extra for LoRA."""
    headers = {re.search(r"(?ms)^# /// script\n(.*?)^# ///$", read_script(name))[1] for name in TOKENS}
    (header,) = (tomllib.loads(re.sub("(?m)^# ?", "", header)) for header in headers)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["lora"]
    assert header == {"requires-python": project["requires-python"], "dependencies": wanted}


@pytest.mark.parametrize("pair", itertools.combinations(TOKENS, 2), ids=" and ".join)
def test_what_scripts_share_by_name_is_one_text(pair):
    one, other = (definitions(read_script(script)) for script in pair)
    allowed = {*(ALGORITHM if "grpo_llm" in pair else ()), *(SHARDING if "ppo_llm_fsdp" in pair else ())}
    shared = [name for name in one if name in other]
    assert {name for name in shared if one[name] != other[name]} == allowed  # none more, and none needlessly
    assert len(shared) >= 50 and shared == [name for name in other if name in one]  # in one order, too


def test_scripts_compose(tmp_path):
    """The merge has no conflict and is clean code; what it computes: test_ranks.py and test_resume.py."""
    assert "python notes/variants.py shard grpo_llm.py" in (ROOT / "README.md").read_text()
    compose(tmp_path)
    ruff("check", tmp_path)
    ruff("format", "--check", tmp_path)


@pytest.mark.parametrize("name", TOKENS)
def test_every_flag_is_read_and_help_shows_what_holds(name, monkeypatch, capsys):
    module, source = load_script(name), read_script(name)
    flags = [field.name for field in fields(module.Args)]
    assert [flag for flag in flags if not re.search(rf"\bargs\.{flag}\b", source)] == []
    for given, lr, own in (["--model", "any"], "1e-06", {"model": "any"}), ([], "0.00015", module.BUNDLED):
        monkeypatch.setattr(sys, "argv", [name, *given, "--seed", "7", "--no-gradient-checkpointing"])
        assert module.parse_args() == module.Args(**own | {"seed": 7})
        monkeypatch.setattr(sys, "argv", [name, *given, "--help"])
        with pytest.raises(SystemExit):
            module.parse_args()
        shown = capsys.readouterr().out
        assert [flag for flag in flags if f"--{flag.replace('_', '-')}" not in shown] == []
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


def test_the_front_door_is_short_and_tags_lead_to_sections():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
    notes = "".join(path.read_text() for path in (ROOT / "notes").glob("*.md"))
    tags = {tag for script in TOKENS for tag in re.findall(r"#[^\n]*\[(\d+\.\d+)\]", read_script(script))}
    assert tags <= {*re.findall(r"(?m)^## (\d+\.\d+)\b", notes)} and len(tags) >= 20


def test_plot_draws_runs_and_seeds(tmp_path, monkeypatch):
    plot, learning = load_benchmark("plot"), load_benchmark("learning")
    seeds = tmp_path / "seeds.csv"
    for seed in (1, 2):
        run = tmp_path / f"run{seed}"
        run.mkdir()
        scores = {"eval/score": 0.0, "eval_part/form": 2, "rollout/surprise_z": -1.5}
        rows = [{"step": s, "reward/mean": seed * s, "part/form": -s} | scores for s in range(5)]
        write_rows(run / "metrics.jsonl", [row | ({"group/generated": 12} if seed == 2 else {}) for row in rows])
        scored = {"reward": "code/mine.py:f", "reward_settings": {"REWARD_MODEL": f"rm{seed}"}}
        (run / "args.json").write_text(json.dumps({"batch_size": 4, "group_size": 2, "lr": seed} | scored))
        (run / "mine.py").write_text("f = None\n")
        learning.keep_run(seeds, plot.read_run(run), "seed", seed)
    assert [row["responses"] for row in plot.read_run(run)] == [0, 24, 48, 72, 96]  # generated, not used
    curve = plot.curve(plot.read_runs(seeds), "reward/mean", "responses")
    assert [column[:3] for column in curve] == [[0, 16, 32], [0, 1.5, 3], [0, 1, 2], [0, 2, 4]]
    words = [str(run), str(seeds), "--x", "responses", "time", "--output", str(tmp_path / "curves.png")]
    monkeypatch.setattr(sys, "argv", ["plot.py", *words])
    plot.main()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["plot.py", "run1", "run2"])
    plot.main()
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    panel = next(axis for axis in plt.gcf().axes if axis.get_title().startswith("form"))  # a part of the reward
    assert panel.get_ylim()[0] < -4 and [text.get_text() for text in plt.gcf().legends[0].texts] == ["run1", "run2"]
    seeds.write_text("row,seed,step,reward/mean\na,1,1,2\nb,1,1,3\n")
    assert plot.read_runs(f"{seeds}:b") == [[{"step": 1, "reward/mean": 3}]]  # one of the rows of a csv
    assert plot.name_runs([f"{seeds}:b", str(seeds)]) == ["b", "seeds"]
    with pytest.raises(SystemExit, match="no row ''"):
        plot.read_runs(seeds)
    table = load_benchmark("compare").make_table(ROOT / "benchmarks/results", ["run1", "ppo", "run2"])
    found = [line in table for line in ("| run1 | 1 | 4 | 0.000 |", "| 32 | 2.000 |", "| lr | 1 |  | 2 |")]
    assert found == [True] * 3 and "group_size" not in table and "| -1.500 |" in table, table
    assert "| reward_settings | {'REWARD_MODEL': 'rm1'} |  | {'REWARD_MODEL': 'rm2'} |" in table
    assert "rewards differ" in table and "reward_file" not in table
    Path("run2/mine.py").write_text("f = 1\n")  # an edited file
    assert "| reward_file | " in load_benchmark("compare").differing_flags(["a", "b"], [Path("run1"), Path("run2")])
