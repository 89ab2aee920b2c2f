"""The notes: their blocks run, their tags, links, names and flags exist, their figures come from their scripts."""

import csv
import doctest
import itertools
import os
import re
import runpy
import statistics
import sys
from dataclasses import fields

import matplotlib.figure
import memory
import pytest
import ranks
import refresh
import torch
from conftest import ROOT, each_script, make_model, run_main
from matplotlib import pyplot
from PIL import Image
from safetensors.torch import load_file
from test_project import CEILINGS, check_flags, load_benchmark, load_script
from transformers import AutoModelForCausalLM, AutoTokenizer

NOTES = sorted((ROOT / "notes").glob("[0-9]*.md"))
PAGES = [*sorted((ROOT / "notes").glob("*.md")), *sorted(ROOT.glob("[A-Z]*.md")), ROOT / "benchmarks" / "README.md"]
GUIDE = ROOT / "notes" / "guide.md"
RESULTS = ROOT / "benchmarks" / "results"
read_runs = load_benchmark("plot").read_runs
FIGURES = sorted((ROOT / "notes" / "figures").glob("*.py"))
each_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())


def prose(path):
    """A page without its fenced blocks."""
    return re.sub(r"(?ms)^```.*?^```$", "", path.read_text())


def note(stem):
    """The text of a note."""
    return (ROOT / "notes" / f"{stem}.md").read_text()


@pytest.mark.parametrize("path", NOTES, ids=lambda path: path.stem)
def test_blocks_of_the_notes_run_and_print_what_is_shown(path):
    assert doctest.DocTestParser().get_examples(path.read_text()) or path.stem.startswith("11")  # that one has results
    assert "+SKIP" not in path.read_text()
    ranks.run_ranks(1, run_blocks, str(path))


def run_blocks(path):
    """As `python -m doctest -o NORMALIZE_WHITESPACE path` from the root, without a wait for the libraries."""
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    failed, _ = doctest.testfile(path, module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_tags_lead_to_sections():
    assert refresh.by_tag().keys() <= refresh.titles().keys()


def test_what_is_generated_from_the_scripts_is_up_to_date():
    """Otherwise: python notes/refresh.py. The walk is the whole loop, nothing twice, and has every difference."""
    contents = refresh.contents()
    assert [path.name for path, text in contents.items() if path.read_text() != text] == []
    walk = contents[ROOT / "notes" / "walk.md"]
    code = "".join(re.findall(r"(?ms)^```python\n(.*?)^```$", walk)).splitlines()
    assert [line for line in code if line] == [line for line in refresh.loop_lines() if line]
    assert all(hunk in walk for name in refresh.DIFFS for hunk in refresh.hunks(name))


@each_page
def test_formulas_survive_github(path):
    """Markdown reads them first: \\, would become a comma, }_ may begin an emphasis, ]( is a link."""
    text = re.sub(r"`[^`\n]*`", "", prose(path))
    for match in re.finditer(r"(?s)\$\$.+?\$\$|(?<!\\)\$[^$\s](?:[^$]*?[^$\s])??\$", text):
        assert not re.search(r"[^A-Za-z0-9]_|\*|<[A-Za-z]|\]\(|\\[^A-Za-z\s]", match[0]), match[0]


def test_the_table_of_steps_in_chapter_3_is_what_the_runs_say():
    rows = re.findall(r"(?m)^\|[^|]*\| `((?:ppo|plain_pg)[\w-]*)` \| (.*) \|$", note("03-clip"))
    for name, cells in rows:
        runs = read_runs(RESULTS / "variants" / name)
        said = [" ".join(f"{run[step]['eval/score_sampled']:.2f}" for run in runs) for step in (10, 20, 40)]
        said.append(f"{max(row['actor/approx_kl'] for run in runs for row in run[1:]):.2g}")
        assert cells.split(" | ") == said, name
    assert len(rows) == 6


@each_page
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if link.startswith("http"):
            continue
        file, _, place = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        if place and target.suffix == ".md":
            assert place in map(refresh.anchor, re.findall(r"(?m)^#+ (.*)$", prose(target))), link
        if place and target.suffix == ".py":
            assert 0 < int(place[1:]) <= target.read_text().count("\n"), link


def test_chapter_1_says_how_far_the_mean_advantage_is_from_zero():
    late = [row for run in read_runs(RESULTS / "ppo") for row in run[4:]]
    shares = [abs(row["advantage/mean"]) / row["advantage/std"] for row in late]
    median = f"{statistics.median(shares):.0%} of a standard deviation in the median iteration"
    assert f"it is {median}, and {max(shares):.0%}" in " ".join(note("01-ppo").split())


def test_every_benchmark_has_a_row_of_its_own():
    table = (ROOT / "benchmarks" / "README.md").read_text()
    scripts = {path.relative_to(ROOT / "benchmarks").as_posix() for path in (ROOT / "benchmarks").rglob("*.py")}
    rows = re.findall(r"(?m)^\| [^|]+ \| \[`(\w+\.py)`\]\(((?:campaigns/)?\w+\.py)\) \|", table)
    assert all(link.endswith(name) for name, link in rows)
    assert sorted(link for _, link in rows) == sorted(scripts)


RUN_FOLDER = "runs", "completions", "checkpoints", "final"
# Of launchers and of other projects.
OTHERS = {"--multi_gpu", "--num_processes", "--machine_rank", "--mixed_precision", "--compile", "trust_remote_code"}
OTHERS |= {"HF_HOME", "HF_TOKEN", "HF_ENDPOINT", "--index-url", "--local-dir", "--logdir"}  # of pip, hf and tensorboard
OTHERS |= {"PYTORCH_ALLOC_CONF"}  # of torch
OTHERS |= {"part/NAME"}  # a metric


@pytest.fixture(scope="module")
def known():
    """(all text that a name in the notes may be from, names in it, flags and what else there is or was)."""
    files = [*ROOT.glob("*.py"), *ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("tests/*.py"), ROOT / "pyproject.toml"]
    files += [path for path in ROOT.glob("notes/**/*") if path.suffix in (".py", ".patch")]
    text = "\n".join(path.read_text() for path in files)
    flags = [field.name for script in CEILINGS for field in fields(load_script(script).Args)]
    flags += re.findall(r"(?m)^\+    (\w+): ", text)  # of variants
    flags = [f"--{prefix}{name.replace('_', '-')}" for name in flags for prefix in ("", "no-")]
    rows = re.findall(r"(?m)^\| (.*?) \|", (ROOT / "CHANGELOG.md").read_text())
    gone = [span for row in rows for span in re.findall(r"`([^`]+)`", row)]
    return text, set(re.findall(r"\w+", text)), {*flags, *re.findall(r'"(--[\w-]+)"', text), *gone} | OTHERS


@each_page
def test_names_in_the_notes_exist(path, known):
    """Flags, functions, metrics and files, wherever they stand in backticks."""
    text, words, others = known
    for part in prose(path).split("\n\n"):
        for span in re.findall(r"`([^`\n]+)`", part):
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", span):
                assert flag in others, f"`{span}`"
            if span in others or "verl" in part:  # where verl is spoken of, names may be verl's
                continue
            if re.fullmatch(r"[a-z]+/\w+", span):  # a metric, or a folder
                assert span in text or (ROOT / span).exists() or span.split("/")[0] in RUN_FOLDER, f"`{span}`"
            elif re.fullmatch(r"[a-zA-Z]\w*_\w+(\(\))?", span):  # a name
                assert span.removesuffix("()") in words, f"`{span}`"
            elif re.fullmatch(r"[\w/-]+\.(py|md|diff|json|jsonl|csv|png)", span):
                made = span.split("/")[0] in RUN_FOLDER
                assert made or span in text or any(ROOT.glob(f"**/{span}")), f"`{span}`"


def test_commands_are_legal():
    """Those of the path of a real run: test_real_run.py."""
    found = 0
    for path in [*NOTES, GUIDE, ROOT / "README.md"]:
        lines = "".join(re.findall(r"(?ms)^```bash\n(.*?)^```$", path.read_text())).replace("\\\n", " ")
        for command in re.split(r"\n|&&| [|#] ", lines.replace("my_grpo.py", "grpo_llm.py")):
            start = re.search(r"(accelerate launch|python) (?:.*_processes (\d+))?.*?\b(\w+_llm\w*)\.py(.*)", command)
            learning = re.search(r'learning\.py (?:.*?--script (\w+_llm)\.py)?(?:.*--flags="(.*)")?', command)
            if learning:
                check_flags(learning[1] or "ppo_llm", learning[2] or "")
            elif start and start[3] in CEILINGS:
                every_gpu = 8 if start[1] == "accelerate launch" else 1
                check_flags(start[3], start[4].replace("--help", "").strip(" )"), int(start[2] or every_gpu))
            found += bool(learning or start)
    assert found >= 30


def test_the_guide_says_what_a_short_grace_costs():
    results = (RESULTS / "faults" / "grace.md").read_text()
    rows = re.findall(r"(?m)^\| (\w+)\.py \| (\d+) \| (\d+) s \| (\w+) \| (\d+) \| \d+ s \| yes \|$", results)
    assert len(rows) == 48 and len({script for script, *_ in rows}) == 4
    for moments, *shown in ("rollout or reward", "10", "0", "1"), ("update or checkpoint", "0", "0", "0"):
        for setting, lost in zip([("10", "30"), ("10", "600"), ("1", "30")], shown):
            assert {row[4] for row in rows if row[1:3] == setting and row[3] in moments} == {lost}
        assert f"| {moments} | {' | '.join(shown)} |" in GUIDE.read_text()


@each_script("grpo_llm")
def test_the_guide_merges_an_adapter_without_loss(script, toy_flags, tmp_path, monkeypatch):
    """Its own lines, after a short run over a base in bfloat16, in whose steps most of the training would be lost."""
    base = make_model(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(base).bfloat16().save_pretrained(base)
    flags = toy_flags | {"model": base, "lora_rank": 8, "lr": 1e-4, "total_iterations": 1}
    run_main(load_script(script.stem), flags | {"output_dir": str(tmp_path / "runs"), "run_name": "lora"})
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```$", GUIDE.read_text())
    (lines,) = (part for part in blocks if "merge_and_unload" in part)
    monkeypatch.chdir(tmp_path)
    exec(lines, {})
    adapter = load_file("runs/lora/final/adapter_model.safetensors")
    old, new = (AutoModelForCausalLM.from_pretrained(folder, dtype="float32") for folder in (base, "merged"))
    for name in [name for name in adapter if "lora_A" in name]:
        place = name.removeprefix("base_model.model.").replace("lora_A.", "")
        was, now = old.get_parameter(place), new.get_parameter(place)
        trained = 2 * adapter[name.replace("lora_A", "lora_B")] @ adapter[name]  # lora_alpha is twice the rank
        torch.testing.assert_close(now, was + trained, rtol=0, atol=1e-7)
        rounded = (was + trained).bfloat16().float()
        assert (rounded == was).float().mean() > 0.5  # what a sum in bfloat16 would leave as it was
    AutoTokenizer.from_pretrained("merged")  # so that --model can name the folder


def test_the_table_of_broken_runs_is_what_the_runs_say_and_their_commands_are_those_that_were_run():
    """Runs with other flags stand as commands, bugs and what they are compared with as rows of the table."""
    text, symptoms = re.sub(r" \\\n +", " ", note("09-debugging")), load_benchmark("symptoms")
    for name, command in symptoms.SYMPTOMS.items():
        assert f"python {command}\n" in text or f"**{name}**" in text or name == "ppo-seed-6", name
    assert {path.stem for path in (symptoms.RESULTS / "symptoms").glob("*.csv")} == symptoms.SYMPTOMS.keys()
    table = symptoms.make_table(symptoms.RESULTS)
    assert table == (symptoms.RESULTS / "symptoms" / "table.md").read_text()
    for part in table.strip().split("\n\n"):
        assert " ".join(part.split()) in " ".join(text.split())


def test_the_table_of_metrics_in_the_debugging_note():
    """It has every metric, and the lowest and highest number of all iterations of five default runs."""

    def usual(name, metric):
        found = [row[metric] for run in read_runs(RESULTS / name) for row in run if metric in row]
        digits = 4 if metric == "actor/ratio_mean" else 2
        low, high = (f"{end(found):.{digits}g}" for end in (min, max)) if found else ("", "")
        return low if low == high else f"{low}…{high}"

    rows = re.findall(r"(?m)^\| `(\S+/\S+)` \| (.*?) \| (.*?) \| .* \|$", note("09-debugging"))
    assert [row for row in rows if (usual("ppo", row[0]), usual("grpo", row[0])) != row[1:]] == []
    scripts = "".join((ROOT / f"{script}.py").read_text() for script in CEILINGS)
    kinds = "reward|advantage|actor|critic|kl|response|group|rollout|time|memory|eval"
    names = {"eval/score_sampled", *re.findall(rf'"((?:{kinds})/\w+)"', scripts)}
    assert len(names) >= 26 and [name for name in sorted(names) if f"`{name}`" not in note("09-debugging")] == []
    assert len(rows) == 24 and {name for name, *_ in rows} <= names


def test_the_experiments_of_the_path_are_the_committed_runs():
    """Scores of the last evaluations, and groups that agree in the first three iterations."""
    text = note("10-learning-path")
    shown = re.findall(r"(?m)^\| `([\w-]+)`(?:, n = \d)? \| (\d) \| (.*?) \| (.*?) \| (.*?) \| (.*?) ?\|$", text)
    assert [name for name, *_ in shown] == ["ppo", "grpo", "grpo-n2", "grpo-n4"]
    for name, count, *cells, agree in shown:
        runs = read_runs(RESULTS / name)
        scores = [run[-1]["eval/score_sampled"] for run in runs]
        assert int(count) == len(runs)
        assert cells == [f"{score:.3f}" for score in (statistics.mean(scores), min(scores), max(scores))]
        if agree:
            first = [row["group/zero_std_frac"] for run in runs for row in run[1:4]]
            assert agree == f"{statistics.mean(first):.2f}"


def test_the_tables_of_the_hacked_verifier_are_the_committed_runs():
    text = note("08-rewards-and-data")

    def rows(name):
        return list(csv.DictReader((RESULTS / "real" / f"{name}.csv").open()))

    names = "step", "reward/mean", "kl/mean", "actor/entropy", "response/truncated_frac", "eval/score"
    for step in (0, 1, 4, 5, 7, 10):
        row = " | ".join(rows("hacked")[step][name] for name in names)
        assert re.sub(" +", " ", f"\n| {row} |\n") in text
    for seed in 1, 2, 3:
        scores = [row["eval/score"] for row in rows(f"additions-{seed}") if row["eval/score"]]
        assert f"\n| {seed} | {' | '.join(scores)} |\n" in text


@pytest.mark.slow
@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_figures_are_what_their_scripts_draw(path, monkeypatch, tmp_path):
    """Drawn again and compared by eye, as it were: fonts may differ by a pixel, curves may not."""
    drawn, save = [], matplotlib.figure.Figure.savefig

    def save_here(self, file, **options):
        drawn.append(file)
        save(self, tmp_path / file.name, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", save_here)
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(path.parent))  # as when it is run
    runpy.run_path(str(path), run_name="__main__")
    pyplot.close("all")
    assert drawn
    for file in drawn:
        new, old = (Image.open(folder / file.name).convert("L") for folder in (tmp_path, file.parent))
        assert max(abs(a / b - 1) for a, b in zip(new.size, old.size)) < 0.02, file.name
        small = [image.resize((120, 48), Image.Resampling.BOX) for image in (new, old)]
        differences = [abs(a - b) for a, b in zip(*(image.tobytes() for image in small))]
        assert sum(differences) / len(differences) < 1.5 and max(differences) < 60, file.name


def test_the_first_memory_table_of_chapter_14_follows_from_its_formulas():
    rows = re.findall(r"(?m)^\| (Qwen\S+) \| (.*) \|$", note("14-memory"))[:2]
    for name, cells in rows:
        shape = memory.SHAPES[name]
        actor, critic = (memory.count(shape, critic) for critic in (False, True))
        state = 16 * (actor + critic) + 4 * actor
        heads = (1 if shape.tied else 2) * shape.vocab * shape.hidden  # the unit that is no block of layers
        expected = [state, state / 2, state / 4, state / 8, 8 * heads, 2 * actor]
        assert cells.split(" | ") == [f"{n / 2**30:.1f}" for n in expected]


def test_the_defaults_fit_a_card_of_24_gb():
    """Qwen2.5-0.5B with every flag at its default, one process, by the formulas of note 14."""
    shape = memory.SHAPES["Qwen2.5-0.5B"]
    for name in CEILINGS:
        args = load_script(name).Args(model="Qwen/Qwen2.5-0.5B")
        sizes = {"tokens": args.microbatch_tokens, "rows": args.rollout_batch_size}
        sizes |= {"length": args.max_prompt_length + args.max_response_length}
        sizes |= {"response_length": args.max_response_length, "checkpointing": args.gradient_checkpointing}
        kind = {"critic": hasattr(args, "critic_lr"), "sharded": name.endswith("fsdp")}
        peak = memory.budget(shape, microbatches=32, **sizes | kind)["peak"]
        assert peak < 23e9, name  # 24 GB, but for what CUDA and the allocator take
        assert memory.budget(shape, **kind)["peak"] == peak  # they are budget's


def test_the_settings_by_card_are_those_that_fit():
    """The guide's tables are what memory.py prints, and each cell leaves a tenth of the card."""
    for model, shape in memory.SHAPES.items():
        assert f"**{model}**\n\n{memory.settings_table(shape)}\n\n" in GUIDE.read_text()
        for options, card in itertools.product(memory.SCRIPTS.values(), memory.CARDS):
            if cell := memory.settings(shape, card, **options):
                sizes = dict(zip(("rows", "tokens", "checkpointing"), cell))
                assert memory.budget(shape, **options, **sizes)["peak"] <= 0.9e9 * card
