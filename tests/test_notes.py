"""The notes: their blocks run, their quotes are the scripts', and links, flags and commands are there."""

import doctest
import os
import re
import sys
from dataclasses import fields
from decimal import Decimal

import pytest
import ranks
import refresh
import torch
import variants
from helpers import ROOT, SCRIPTS, each_script, load_script, make_model, run_main
from safetensors.torch import load_file
from test_project import check_flags, load_benchmark
from transformers import AutoModelForCausalLM, AutoTokenizer

plot = load_benchmark("plot")
NUMBER = r"(-?\d[\d.]*(?:e-?\d+)?)"
NOTES = sorted([*(ROOT / "notes").glob("[0-9]*.md"), ROOT / "notes" / "from-others.md"])
RUN = sorted((ROOT / "notes" / "run").glob("*.md"))
PAGES = [*RUN, *(ROOT / "notes").glob("*.md"), *ROOT.glob("[A-Z]*.md"), ROOT / "benchmarks" / "README.md"]
PAGES += (ROOT / "notes" / "web").glob("*.md")
each_page = pytest.mark.parametrize("path", sorted(PAGES), ids=lambda path: path.relative_to(ROOT).as_posix())


def prose(path):
    """A page without its fenced blocks."""
    return re.sub(r"(?ms)^```.*?^```$", "", path.read_text())


LONG = {path: pytest.mark.slow for path in NOTES if path.stem in ("01-ppo", "12-sampler")}  # they train


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem, marks=LONG.get(path, ())) for path in NOTES])
def test_blocks_of_the_notes_run_and_print_what_is_shown(path):
    ranks.run_ranks(1, run_blocks, str(path))


def run_blocks(path):
    """As `python -m doctest -o NORMALIZE_WHITESPACE path` from the root, without a wait for the libraries."""
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    failed, _ = doctest.testfile(path, module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_what_is_generated_from_the_scripts_is_up_to_date():
    """Otherwise: python notes/refresh.py. The walk is the whole loop, nothing twice."""
    contents, wrong = refresh.contents()
    assert wrong == [path.name for path, text in contents.items() if path.read_text() != text] == []
    walk = contents[ROOT / "notes" / "walk.md"]
    code = "".join(re.findall(r"(?ms)^```python\n(.*?)^```$", walk)).splitlines()
    assert [line for line in code if line] == [line for line in refresh.loop_lines() if line]


@each_page
def test_links_and_pictures_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        file, _, place = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert link.startswith("http") or target.exists(), link
        if place and target.suffix == ".md":
            assert place in map(refresh.anchor, re.findall(r"(?m)^#+ (.*)$", prose(target))), link


def test_every_picture_is_drawn_by_a_script_and_shown():
    figures, pages = ROOT / "notes" / "figures", "".join(path.read_text() for path in PAGES)
    scripts = "".join(path.read_text() for path in figures.glob("*.py"))
    for path in [*figures.glob("*.png"), *figures.glob("*.svg")]:
        assert f'"{path.stem}"' in scripts and f"figures/{path.name}" in pages, path.name


def test_numbers_are_those_of_their_files():
    """95.0%<!-- ppo.csv eval/score_sampled 20 --> is a mean over runs, two numbers are the lowest and the highest."""
    text = "".join(path.read_text() for path in PAGES)
    for metric, *ranges in re.findall(r"(?m)^\| `(\w+/(?!kl`|surprise)\w+)` \| (\S+…\S+) \| (\S*) \|", text):
        text += "".join(f"{x}<!-- {file} {metric} -->" for x, file in zip(ranges, ("ppo.csv", "grpo.csv")) if x)
    found = re.findall(rf"{NUMBER}(?:(?:\sto\s|…){NUMBER})?(%?)<!--\s(\S+\.csv)\s(\S+)\s?(\d*)\s-->", text)
    for *shown, percent, file, metric, step in found:
        runs = plot.read_runs(ROOT / "benchmarks" / "results" / file)
        values = [row[metric] for run in runs for row in run if metric in row and step in ("", str(int(row["step"])))]
        expected = [min(values), max(values)] if shown[1] else [sum(values) / len(values)]
        for number, value in zip(shown, expected):
            off = abs(float(number) - value * (100 if percent else 1))
            assert off <= 0.51 * 10.0 ** Decimal(number).as_tuple().exponent, (file, metric, number, value)
    assert len(found) > 40


def test_scores_in_the_head_of_a_patch_are_those_of_its_runs():
    """The lowest and the highest at the end."""
    for name in set(variants.names()) - {"plain_pg", "vllm"}:  # rounded; of two seeds
        path = ROOT / "benchmarks" / "results" / "variants" / f"{name}.csv"
        for metric in ("eval/score", "eval/score_sampled") if path.exists() else ():
            last = [100 * run[-1][metric] for run in plot.read_runs(path)]
            assert f"{min(last):.1f}-{max(last):.1f}%" in " ".join(variants.read_patch(name)[0].split()), (name, last)


@each_page
def test_formulas_survive_github(path):
    """Markdown reads them first: \\, would become a comma, }_ may begin an emphasis, ]( is a link."""
    text = re.sub(r"`[^`\n]*`", "", prose(path))
    for match in re.finditer(r"(?s)\$\$.+?\$\$|(?<!\\)\$[^$\s](?:[^$]*?[^$\s])??\$", text):
        assert not re.search(r"[^A-Za-z0-9]_|\*|<[A-Za-z]|\]\(|\\[^A-Za-z\s]", match[0]), match[0]


def test_flags_of_the_scripts_are_those_the_notes_name():
    """In chapters and run/, wherever a flag is an argument of a script in code."""
    patches = "".join(path.read_text() for path in (ROOT / "notes" / "variants").glob("*.patch"))
    flags = {field.name for name in SCRIPTS for field in fields(load_script(ROOT / f"{name}.py").Args)}
    flags |= set(re.findall(r"(?m)^\+    (\w+): ", patches))
    for path in [*NOTES, *RUN]:
        for command in re.findall(r"`\w+_llm\w*\.py ([^`]*)`", prose(path)):
            for flag in re.findall(r"--(?:no-)?([a-z][\w-]*)", command):
                assert flag.replace("-", "_") in flags, f"{path.name}: {command}"


def test_commands_are_legal():
    """Runs with names, of variants as well: test_real_run.py."""
    found = 0
    for path in [*NOTES, *RUN, ROOT / "README.md"]:
        lines = "".join(re.findall(r"(?ms)^```bash\n(.*?)^```$", path.read_text())).replace("\\\n", " ")
        for command in re.split(r"\n|&&| [|#] ", lines.replace("my_grpo.py", "grpo_llm.py")):
            start = re.search(r"(accelerate launch|python) (?:.*_processes (\d+))?.*?\b(\w+_llm\w*)\.py(.*)", command)
            learning = re.search(r'learning\.py (?:.*?--script (\w+_llm)\.py)?(?:.*--flags="(.*)")?', command)
            if learning:
                check_flags(learning[1] or "ppo_llm", learning[2] or "")
            elif start and start[3] in SCRIPTS:
                every_gpu = 8 if start[1] == "accelerate launch" else 1
                check_flags(start[3], start[4].replace("--help", "").strip(" )"), int(start[2] or every_gpu))
            found += bool(learning or start)
    assert found >= 30


@each_script("grpo_llm")
def test_the_page_merges_an_adapter_without_loss(script, toy_flags, tmp_path, monkeypatch):
    """Its own lines, after a short run over a base in bfloat16, in whose steps most of the training would be lost."""
    base = make_model(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(base).bfloat16().save_pretrained(base)
    flags = toy_flags | {"model": base, "lora_rank": 8, "lr": 1e-4, "total_iterations": 1}
    run_main(load_script(script), flags | {"output_dir": str(tmp_path / "runs"), "run_name": "lora"})
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```$", (ROOT / "notes" / "run" / "after.md").read_text())
    (lines,) = (part for part in blocks if "merge_and_unload" in part)
    monkeypatch.chdir(tmp_path)
    exec(lines, {})
    adapter = load_file("runs/lora/final/adapter_model.safetensors")
    old, new = (AutoModelForCausalLM.from_pretrained(folder, dtype="float32") for folder in (base, "merged"))
    for name in [name for name in adapter if "lora_A" in name]:
        place = name.removeprefix("base_model.model.").replace("lora_A.", "")
        trained = 2 * adapter[name.replace("lora_A", "lora_B")] @ adapter[name]  # lora_alpha is twice the rank
        torch.testing.assert_close(new.get_parameter(place), old.get_parameter(place) + trained, rtol=0, atol=1e-7)
    AutoTokenizer.from_pretrained("merged")  # so that --model can name the folder
