"""What the project promises about its own files: sizes, the embedded default, plots, that importing does nothing."""

import ast
import csv
import importlib.util
import io
import json
import random
import re
import subprocess
import sys
import tokenize
from dataclasses import fields

import pytest
from conftest import ROOT, load_script

TINY = ROOT / "benchmarks" / "tiny"
CEILINGS = {"ppo_llm": 850}  # code lines


def load_benchmark(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_lines(source):
    """Lines that are not blank, comment or docstring."""
    docs = set()
    for node in ast.walk(ast.parse(source)):
        for child in getattr(node, "body", []) if isinstance(getattr(node, "body", []), list) else []:
            if isinstance(child, ast.Expr) and isinstance(getattr(child.value, "value", None), str):
                docs |= set(range(child.lineno, child.end_lineno + 1))
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type not in skipped]
    return len({line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - docs)


@pytest.mark.parametrize("script, ceiling", CEILINGS.items())
def test_scripts_stay_readable_in_one_sitting(script, ceiling):
    source = (ROOT / f"{script}.py").read_text()
    assert code_lines(source) <= ceiling and source.count("\n") <= 1250
    assert len(fields(load_script(script).Args)) <= 70


@pytest.mark.parametrize("script", CEILINGS)
def test_scripts_import_no_local_module_and_do_nothing_when_imported(script, tmp_path):
    known = ["accelerate", "datasets", "torch", "transformers", "tyro"]
    tree = ast.parse((ROOT / f"{script}.py").read_text())
    names = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert names <= set(sys.stdlib_module_names) | set(known)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {script}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (0, "", [])


@pytest.mark.parametrize("script", CEILINGS)
def test_every_flag_is_read_and_documented(script):
    source = (ROOT / f"{script}.py").read_text()
    readme = (ROOT / "README.md").read_text()
    args = {field.name for field in fields(load_script(script).Args)}
    assert not {name for name in args if not re.search(rf"\bargs\.{name}\b", source)}
    shown = {flag.replace("-", "_") for flag in re.findall(r"(?<![\w-])--([a-z][a-z-]+)(?![\w-])", readme)}
    assert shown <= args | {"labels", "output", "seeds", "flags", "script"}  # and those of the benchmark scripts


def test_ci_ends_with_the_test_command_of_the_readme():
    command = (ROOT / ".ci" / "run").read_text().strip().splitlines()[-1]
    assert f"```bash\n{command}\n```" in (ROOT / "README.md").read_text()


def test_embedded_data_are_what_the_maker_makes(ppo):
    """Regenerated from the seed; every worked answer is right; no test question in train."""
    maker = load_benchmark("make_tiny")
    rows = maker.make_rows(random.Random(1), 4500)
    test, train = ([json.loads(line) for line in open(TINY / f"{n}.jsonl")] for n in ("test", "train"))  # noqa: SIM115
    assert (len(train), len(test)) == (4000, 500) and test + train == rows
    assert not {row["question"] for row in test} & {row["question"] for row in train}
    for row in rows:
        steps = re.findall(r"(\d+)([-+*/])(\d+)=(\d+)", row["answer"])
        for a, operator, b, result in steps:
            exact = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) / int(b)}[operator]
            assert exact == int(result)
        assert len(steps) in (2, 3) and ppo.gsm8k_number(row["answer"]) == int(steps[-1][3])


def test_embedded_model_is_small_and_can_but_usually_does_not(ppo):
    assert sum(file.stat().st_size for file in TINY.rglob("*") if file.is_file()) <= 6e6
    assert ppo.load_causal_lm(str(TINY / "model")).num_parameters() <= 2e6
    scores = json.loads((TINY / "scores.json").read_text())
    assert 0.25 <= scores["sampled"]["score"] <= 0.40 and scores["forced_greedy"]["score"] >= 0.96


def write_run(path, scale):
    rows = [{"step": s, "reward/mean": scale * s, "eval/score": 0.1 * s} for s in range(5)]
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


def test_summary_of_a_run():
    learning = load_benchmark("learning")
    rows = [{"step": s, "critic/explained_variance": s / 10} for s in range(1, 9)]
    evals = [(0, 0.1, 0.3), (4, 0.8, 0.7), (8, 0.9, 0.8)]
    rows += [{"step": s, "eval/score": g, "eval/score_sampled": x, "eval/length_mean": 1} for s, g, x in evals]
    summary = learning.summarise(rows, 12.3)
    assert summary["sampled before"] == 0.3 and summary["greedy after"] == 0.9 and summary["seconds"] == 12.3
    assert summary["sampled after (last two)"] == pytest.approx(0.75)
    assert summary["explained variance"] == pytest.approx((0.6 + 0.7 + 0.8) / 3)  # iterations after the fifth
