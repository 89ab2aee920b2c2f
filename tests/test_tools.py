"""What serves those who change a copy: notes/variants.py, pytest's --script, benchmarks/compare.py --exact."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest
import variants
from conftest import PLACE, ROOT, SCRIPTS, TAKES, path_of, write_rows
from test_project import load_benchmark

# ---------------------------------------------------------------------------------------------- notes/variants.py


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """call(words): (exit code, what it printed) of notes/variants.py, from the test's folder."""

    def run(*words):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["variants.py", *map(str, words)])
        try:
            variants.main()
            code = 0
        except SystemExit as leaving:
            code = leaving.code
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Patches are made in a folder of the test's own, beside those that there are."""
    folder = tmp_path / "notes" / "variants"
    shutil.copytree(variants.FOLDER, folder)
    for script in variants.SCRIPTS:
        shutil.copy(ROOT / script, tmp_path)
    monkeypatch.setattr(variants, "ROOT", tmp_path)
    monkeypatch.setattr(variants, "FOLDER", folder)
    return folder


@pytest.mark.parametrize("script", variants.SCRIPTS)
def test_a_patch_is_of_the_nearest_script(script, own_folder, call, tmp_path):
    copy = tmp_path / "copy.py"
    copy.write_text((ROOT / script).read_text().replace("ratio = (logprobs", "ratio = 1.0 * (logprobs"))
    call("make", "mine", copy)
    assert variants.read_patch("mine")[1] == script and variants.changes("mine") == (1, 1, 1)
    assert variants.patched("mine") == copy.read_text()
    other = variants.SCRIPTS[variants.SCRIPTS.index(script) - 1]
    call("make", "mine", copy, "--of", other)  # also over the patch that is there
    assert variants.read_patch("mine")[1] == other and sum(variants.changes("mine")) > 50
    call("make", "mine", copy)
    assert variants.read_patch("mine")[1] == script


def test_a_new_patch_keeps_the_head_of_the_old_one(own_folder, call, tmp_path):
    head = variants.read_patch("gspo")[0]
    (tmp_path / "gspo.py").write_text(variants.patched("gspo") + "\n# more\n")
    call("make", "gspo", tmp_path / "gspo.py")
    assert variants.read_patch("gspo")[0] == head and variants.patched("gspo").endswith("# more\n")


def test_what_is_no_copy_makes_no_patch(call, tmp_path):
    for path, error in (
        (ROOT / "notes" / "variants" / "cispo.py", "is no copy of ppo_llm.py, grpo_llm.py, ppo_llm_fsdp.py"),
        (ROOT / "grpo_llm.py", "is grpo_llm.py as it stands"),
        (tmp_path / "nowhere.py", "there is no file"),
    ):
        code, said = call("make", "unheard_of", path)
        assert code == 2 and error in said
    assert not (variants.FOLDER / "unheard_of.patch").exists()


def test_the_list_has_a_line_for_each(call):
    code, said = call("list")
    titles, *lines = said.splitlines()
    assert code == 0 and titles.split() == ["name", "of", "lines", "what"] and max(map(len, lines)) <= 120
    files = {path.name for path in variants.FOLDER.glob("*.py")}
    assert [line.split()[0] for line in lines] == sorted({*variants.names(), *files})
    for name in variants.names():
        removed, added, _ = variants.changes(name)
        _, script, _, _ = variants.read_patch(name)
        assert re.search(rf"(?m)^{name} +{script} +{removed + added}  \w.* \w", said)
    for name in files:
        assert re.search(rf"(?m)^{name} +a file +-  \w.* \w", said)


def test_variants_stack_and_conflicts_are_named(call, tmp_path):
    assert call("apply", "cispo") == (0, "cispo_llm.py\n")
    assert call("apply", "replay", "both.py", "--on", "cispo_llm.py") == (0, "both.py\n")
    both = (tmp_path / "both.py").read_text()
    assert both == variants.merged(*(read(name) for name in ("replay", None, "cispo")))[0]
    for name in "cispo", "replay":  # each line that one of them adds
        for line in re.findall(r"(?m)^\+(?!\+\+)(.*)", variants.read_patch(name)[3]):
            assert line in both
    sentence, said = call("apply", "gspo", "out.py", "--on", "cispo_llm.py")
    text = (tmp_path / "out.py").read_text().splitlines()
    found = re.findall(r"(?m)^    line (\d+), in (.*)$", sentence)
    assert said == "" and f"in {len(found)} place(s) of out.py" in sentence and len(found) >= 2
    assert [text[int(number) - 1] for number, _ in found] == ["<<<<<<< cispo_llm.py"] * len(found)
    assert "policy_loss" in [around for _, around in found]
    assert text.count(">>>>>>> gspo") == len(found)
    code, said = call("apply", "replay", "out.py", "--on", "nowhere.py")
    assert code == 2 and said.endswith("there is no file nowhere.py\n")


def read(name):
    return variants.patched(name) if name else (ROOT / "grpo_llm.py").read_text()


# ------------------------------------------------------------------------------------------------------- --script


def pytest_with(copy, *words):
    """(exit code, console) of the tests run with --script."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "--durations", "0", "--script", str(copy), *words]
    env = {name: value for name, value in os.environ.items() if name != PLACE and "PYTEST" not in name}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def copy(tmp_path):
    """copy(script, old, new): a changed copy elsewhere, by another name."""

    def change(script, old="", new=""):
        text = (ROOT / f"{script}.py").read_text()
        assert old in text
        (tmp_path / "my_copy.py").write_text(text.replace(old, new))
        return tmp_path / "my_copy.py"

    return change


BROKEN = """def group_advantages(scores, group_size, estimator):
    return scores * 0 + 77


def old_group_advantages(scores, group_size, estimator):"""


def test_a_copy_stands_in_for_its_script(copy):
    broken = copy("grpo_llm", "def group_advantages(scores, group_size, estimator):", BROKEN)
    words = ["tests/test_groups.py", "tests/test_math.py", "-k", "test_golden_advantages or masked_mean or gae"]
    code, console = pytest_with(broken, *words)
    assert code == 1 and console.count("FAILED tests/test_groups.py::test_golden_advantages") == 9, console
    assert re.search(r"(?m)^9 failed, [1-9]\d* passed, \d+ deselected", console), console  # no gae, nor a test of it
    assert f"{broken} in place of grpo_llm.py" in console


@pytest.mark.slow
def test_ranks_see_the_copy(copy):
    """Processes that a test starts, and workers of pytest-xdist, have no option of pytest's."""
    broken = copy("grpo_llm", "    for iteration in progress:\n", '    fail("this is the copy")\n    for _ in ():\n')
    for words in (
        ["tests/test_ranks.py", "-k", "test_grpo_by_two"],
        ["tests/test_loop.py", "-k", "test_the_same_seed"],
    ):
        code, console = pytest_with(broken, *words, "-n", "2")
        assert code == 1 and "error: this is the copy" in console and "passed" not in console, console


@pytest.fixture
def configure(monkeypatch, tmp_path, request):
    """configure(copy, words): what pytest is told of --script and the files named, in this process."""
    monkeypatch.setitem(os.environ, PLACE, "")
    monkeypatch.delitem(os.environ, PLACE)

    def run(copy, *words):
        asked = SimpleNamespace(getoption=lambda name: str(copy), args=list(words), add_cleanup=request.addfinalizer)
        conftest.pytest_configure(asked)

    return run


@pytest.mark.parametrize(
    "script, words, error",
    [
        ("ppo_llm", ["tests/test_groups.py"], "test_groups.py takes copies of grpo_llm.py;"),
        ("grpo_llm", ["tests/test_sharding.py::test_x"], "test_sharding.py takes copies of ppo_llm_fsdp.py;"),
        ("ppo_llm", ["tests/test_math.py", "tests/test_notes.py"], "test_notes.py takes no copy;"),
    ],
)
def test_a_file_that_takes_no_such_copy_is_refused(copy, configure, script, words, error):
    with pytest.raises(pytest.UsageError) as refusal:
        configure(copy(script), *words)
    said = str(refusal.value)
    assert f"is a copy of {script}.py, but tests/{error}" in said and " tests/test_math.py" in said
    assert PLACE not in os.environ


def test_what_is_no_copy_is_refused(configure, tmp_path):
    for path, error in (
        (ROOT / "benchmarks" / "rewards.py", "is no changed copy"),
        (tmp_path / "x.py", "no such file"),
    ):
        with pytest.raises(pytest.UsageError, match=f"--script {path}.*{error}"):
            configure(path, "tests/test_math.py")


def test_the_folder_of_a_copy(copy, configure):
    """The copy by its script's name, beside what the script finds beside itself."""
    for script in SCRIPTS:
        configure(copy(script, "import torch\n", "import torch  # mine\n"), "tests")
        assert [name for name in SCRIPTS if "# mine" in path_of(name).read_text()] == [script] == [conftest.the_copy()]
        assert (path_of(script).parent / "benchmarks" / "tiny" / "model").is_dir()
        del os.environ[PLACE]
    assert conftest.the_copy() is None and path_of("ppo_llm") == ROOT / "ppo_llm.py"


def test_every_test_file_is_known():
    """Each that has the fixtures of a script takes copies; what is in the list is there."""
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        name, text = path.stem.removeprefix("test_"), path.read_text()
        takes = re.search(r"def test_\w+\([^)]*\b(algo|toy_run)\b|^SCRIPT = |^@copies", text, re.M)
        assert bool(takes) == (name in TAKES), name
        own = re.search(r'(?m)^SCRIPT = "(\w+)"', text)
        assert own is None or TAKES[name] == (own[1],)
    assert all((ROOT / "tests" / f"test_{name}.py").exists() for name in TAKES)
    assert {script for scripts in TAKES.values() for script in scripts} == set(SCRIPTS)


# --------------------------------------------------------------------------------------------- compare.py --exact

METRICS = [{"step": 0, "eval/score": 0.5}, {"step": 1, "kl/mean": -2.1218e-4, "actor/loss": 0.5, "reward/mean": 0.25}]
TIMES = {"time/rollout": 1.0, "memory/peak_gib": 2.0, "rollout/logprob_diff": 3e-7}
TEXTS = {
    "eval_000000": [{"prompt": "a", "response": "b", "score": 1.0}],
    "step_000001": [{"prompt": "a", "response": "c", "score": 0.0}, {"prompt": "b", "response": "d", "score": 1 / 3}],
    "eval_000001": [{"prompt": "a", "response": "b", "score": 1.0}],
}


@pytest.fixture(scope="module")
def compare():
    return load_benchmark("compare")


@pytest.fixture
def compared(compare, tmp_path, monkeypatch, capsys):
    """compared(changed run, tolerance): (exit code, console) against METRICS and TEXTS."""
    monkeypatch.chdir(tmp_path)

    def run(metrics=METRICS, texts=TEXTS, tolerance=1e-4):
        for name, rows, files in (("one", METRICS, TEXTS), ("two", metrics, texts)):
            folder = tmp_path / name
            shutil.rmtree(folder, ignore_errors=True)
            (folder / "completions").mkdir(parents=True)
            factor = 1 if name == "one" else 9
            timed = [row | {key: value * factor for key, value in TIMES.items()} for row in rows]
            write_rows(folder / "metrics.jsonl", timed)
            for file, lines in files.items():
                write_rows(folder / "completions" / f"{file}.jsonl", lines)
        return compare.compare_runs(Path("one"), Path("two"), tolerance), capsys.readouterr().out

    return run


def changed(rows, place, **values):
    return [row | (values if i == place else {}) for i, row in enumerate(rows)]


def test_runs_that_are_the_same_but_for_rounding(compared):
    rounded = changed(METRICS, 1, **{"kl/mean": -2.1215e-4, "actor/loss": 0.50004})
    assert compared(rounded) == (0, "the same: 2 lines of metrics, 4 rows of completions in 3 files\n")
    code, said = compared(rounded, TEXTS, 1e-5)
    assert code == 1 and said.startswith(
        "metrics.jsonl (iteration 1), row 2, actor/loss:\n    0.5  in one\n    0.50004"
    )
    code, said = compared(METRICS, {})
    assert code == 1 and said.startswith(
        "completions/eval_000000.jsonl (iteration 0), row 1, number of rows:\n    1  in"
    )


def text(name, place, **values):
    return TEXTS | {name: changed(TEXTS[name], place, **values)}


DIFFERENT = {  # what: (metrics, completions, beginning of what is said)
    "a metric": (
        changed(METRICS, 1, **{"actor/loss": 0.5001, "reward/mean": 0.5}),
        TEXTS,
        "metrics.jsonl (iteration 1), row 2, actor/loss:\n    0.5  in one\n    0.5001  in two\n"
        "    of this row differ, too: reward/mean\n",
    ),
    "a metric that is no number": (
        changed(METRICS, 1, **{"actor/loss": float("nan")}),
        TEXTS,
        "metrics.jsonl (iteration 1), row 2, actor/loss:\n    0.5  in one\n    nan  in two\n",
    ),
    "a metric more": (
        changed(METRICS, 1, **{"actor/more": 0.5}),
        TEXTS,
        "metrics.jsonl (iteration 1), row 2, actor/more:\n    not there  in one\n    0.5  in two\n",
    ),
    "an iteration less": (METRICS[:1], TEXTS, "metrics.jsonl (iteration 1), row 1, number of rows:\n    1  in one\n"),
    "a completion": (
        METRICS,
        text("step_000001", 1, response="d "),
        "completions/step_000001.jsonl (iteration 1), row 2, response:\n    'd'  in one\n    'd '  in two\n",
    ),
    "a score": (
        METRICS,
        text("step_000001", 1, score=0.5),
        "completions/step_000001.jsonl (iteration 1), row 2, score",
    ),
    "an evaluated one": (
        METRICS,
        text("eval_000001", 0, response="x"),
        "completions/eval_000001.jsonl (iteration 1), row 1, response:\n",
    ),
    "a row less": (
        METRICS,
        TEXTS | {"step_000001": TEXTS["step_000001"][:1]},
        "completions/step_000001.jsonl (iteration 1), row 2, number of rows:\n    2  in one\n    1  in two\n",
    ),
    "a file more": (
        METRICS,
        TEXTS | {"step_000002": TEXTS["step_000001"]},
        "completions/step_000002.jsonl (iteration 2), row 1, number of rows:\n    0  in one\n    2  in two\n",
    ),
    # What was sampled comes before what was learned from it, and that before what was evaluated.
    "the first of several": (
        changed(METRICS, 1, **{"actor/loss": 0.6}),
        text("step_000001", 1, response="x") | {"eval_000001": []},
        "completions/step_000001.jsonl (iteration 1), row 2, response:\n",
    ),
    "a metric, and what is evaluated after it": (
        changed(METRICS, 1, **{"actor/loss": 0.6}),
        text("eval_000001", 0, response="x"),
        "metrics.jsonl (iteration 1), row 2, actor/loss:\n",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_runs_that_differ(compared, what):
    metrics, texts, expected = DIFFERENT[what]
    code, said = compared(metrics, texts)
    assert code == 1 and said.startswith(expected), said


def test_both_are_no_number(compare):
    assert compare.same(float("nan"), float("nan"), 1e-4) and not compare.same(float("nan"), 0.0, 1e-4)
    assert compare.same(1e-9, -1e-9, 1e-4) and compare.same("a", "a", 1e-4) and not compare.same(1.0, None, 1e-4)


def test_what_is_no_run_is_refused(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "compare.py"), "--exact", tmp_path, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "is no run folder: it has no metrics.jsonl" in done.stderr
