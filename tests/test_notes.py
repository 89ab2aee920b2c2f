"""The notes: their blocks run, their tags, links, names and flags exist, their figures come from their scripts."""

import doctest
import itertools
import os
import re
import runpy
import subprocess
import sys
from dataclasses import fields

import pytest
import ranks
from conftest import ROOT, TOY_REWARD, forked, make_model, toy_rows, write_rows
from test_project import CEILINGS, check_flags, load_benchmark, load_script

NOTES = sorted((ROOT / "notes").glob("[0-9]*.md"))
MORE = [ROOT / "notes" / f"{name}.md" for name in ("README", "walk", "guide", "real-run")]
PAGES = [*NOTES, *MORE, ROOT / "README.md", ROOT / "benchmarks" / "README.md"]
CHAPTERS = range(1, 15)


def load_refresh():
    return runpy.run_path(str(ROOT / "notes" / "refresh.py"))


def prose(path):
    """A page without its fenced blocks."""
    return re.sub(r"(?ms)^```.*?^```$", "", path.read_text())


def sources():
    """Everything that a name in the notes may be the name of."""
    files = [*ROOT.glob("*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("notes/*.py")]
    files += [*ROOT.glob("notes/variants/*.patch"), *ROOT.glob("notes/variants/*.py"), *ROOT.glob("notes/figures/*.py")]
    return "\n".join(path.read_text() for path in files) + (ROOT / "pyproject.toml").read_text()


def test_there_is_a_note_of_each_number():
    assert [int(path.name[:2]) for path in NOTES] == list(CHAPTERS)
    for path in NOTES:
        number, text = int(path.name[:2]), path.read_text()
        assert text.startswith(f"# {number}. ")
        sections = re.findall(r"(?m)^## (\d+)\.(\d+) ", text)
        assert sections == [(str(number), str(k)) for k in range(1, len(sections) + 1)] and len(sections) >= 3
        outside = re.sub(
            r"(?m)^(\||!|.*https?://\S{60}).*$", "", text
        )  # tables, figures and lists of links may be longer
        assert max(map(len, outside.splitlines())) <= 120


@pytest.mark.parametrize("path", NOTES, ids=lambda path: path.stem)
def test_blocks_of_the_notes_run_and_print_what_is_shown(path):
    assert doctest.DocTestParser().get_examples(path.read_text()) or path.stem.startswith("11")  # that one has results
    ranks.run_ranks(1, run_blocks, str(path))


def run_blocks(path):
    """As `python -m doctest -o NORMALIZE_WHITESPACE path` from the root, without a wait for the libraries."""
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    failed, _ = doctest.testfile(path, module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_blocks_that_are_sessions_are_all_run():
    """doctest takes a line for an example by its >>>, whatever the fence says: no other block may look like one."""
    for path in NOTES:
        for kind, block in re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", path.read_text()):
            assert (">>>" in block) == (kind == "pycon"), f"{path.name}: {block[:60]}"
            assert kind != "pycon" or block.endswith("\n\n"), f"{path.name}: no empty line after {block[-60:]!r}"
            assert "+SKIP" not in block


def test_tags_lead_to_sections():
    refresh = load_refresh()
    tags, titles = refresh["by_tag"](), refresh["titles"]()
    assert tags.keys() <= titles.keys()
    assert len(tags) >= 40 and {tag.split(".")[0] for tag in tags} >= {str(k) for k in range(1, 9)}
    for script in CEILINGS:  # nothing else looks like a tag, and no tag has lost its brackets
        text = (ROOT / f"{script}.py").read_text()
        assert len(re.findall(r"#.*\[\d+\.\d+\]", text)) == len(refresh["places"](script))


def test_what_is_generated_from_the_scripts_is_up_to_date():
    """Otherwise: python notes/refresh.py"""
    contents = load_refresh()["contents"]()
    assert len(contents) == 3
    assert [path.name for path, text in contents.items() if path.read_text() != text] == []


def test_the_differences_between_scripts_make_the_one_of_the_other(tmp_path):
    refresh = load_refresh()
    contents = refresh["contents"]()
    for name, (old, new) in refresh["DIFFS"].items():
        script = tmp_path / f"{old}.py"
        script.write_text((ROOT / f"{old}.py").read_text())
        text = contents[ROOT / "notes" / f"{name}.diff"].replace(f"b/{new}.py", f"b/{old}.py")
        subprocess.run(["git", "apply"], input=text, text=True, cwd=tmp_path, check=True)
        assert script.read_text() == (ROOT / f"{new}.py").read_text()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    anchor = load_refresh()["anchor"]
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if link.startswith("http"):
            continue
        file, _, place = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        if place and target.suffix == ".md":
            assert place in {anchor(title) for title in re.findall(r"(?m)^#+ (.*)$", prose(target))}, link
        if place and target.suffix == ".py":
            assert 0 < int(place[1:]) <= target.read_text().count("\n"), link


def test_every_benchmark_has_a_row_of_its_own():
    table = (ROOT / "benchmarks" / "README.md").read_text()
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    assert sorted(re.findall(r"(?m)^\| [^|]+ \| \[`\w+\.py`\]\((\w+\.py)\) \|", table)) == sorted(scripts)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_names_in_the_notes_exist(path):
    """Flags, functions, metrics and files, wherever they stand in backticks."""
    known = {f"--{f.name.replace('_', '-')}" for script in CEILINGS for f in fields(load_script(script).Args)}
    known |= {flag.replace("--", "--no-") for flag in known}
    assert not known & GONE
    everything = sources()
    words = set(re.findall(r"\w+", everything))
    spans = []
    for section in re.split(r"(?m)^(?=#+ )", prose(path)):
        old = GONE if re.search(r"(?i)version\s0\.\d|(left|scripts)\sin\s0\.3", section) else set()
        for variant in (ROOT / "notes" / "variants").glob("*.patch"):  # which has it again
            if f"`{variant.stem}`" in section:
                added = "\n".join(re.findall(r"(?m)^\+(.*)$", variant.read_text()))
                old = old | {name for name in GONE if re.sub("^--", "", name).replace("-", "_") in added}
        for part in section.split("\n\n"):  # where verl is spoken of, names may be verl's
            spans += [(span, "verl" in part, old) for span in re.findall(r"`([^`\n]+)`", part)]
    for span, theirs, old in spans:
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", span):
            own = re.search(rf"(?m)^\+    {flag[2:].replace('-', '_')}: ", everything)  # of a variant
            own = own or f'"{flag}"' in everything
            assert flag in old | known | OTHERS or (own and flag not in GONE), f"`{span}`"
        if span.removesuffix("()") in GONE:
            assert span.removesuffix("()") in old, f"`{span}`"
        elif re.fullmatch(r"[a-z]+/\w+", span):  # a metric, or a folder
            assert span in everything or (ROOT / span).exists() or span.split("/")[0] in RUN_FOLDER, f"`{span}`"
        elif re.fullmatch(r"[a-zA-Z]\w*_\w+(\(\))?", span):  # a name
            assert theirs or {span.removesuffix("()")} <= words | OTHERS, f"`{span}`"
        elif re.fullmatch(r"[\w/-]+\.(py|md|diff|json|jsonl|csv|png)", span):
            inside = theirs or span.split("/")[0] in RUN_FOLDER
            assert inside or span in everything or any(ROOT.glob(f"**/{span}")), f"`{span}`"


RUN_FOLDER = "runs", "completions", "checkpoints", "final"
# Of launchers and of other projects.
OTHERS = {"--multi_gpu", "--num_processes", "--machine_rank", "--mixed_precision", "--compile", "trust_remote_code"}
OTHERS |= {"HF_HOME", "HF_TOKEN", "HF_ENDPOINT", "--index-url", "--local-dir", "--logdir"}  # of pip, hf and tensorboard
OTHERS |= {"PYTORCH_ALLOC_CONF"}  # of torch
# What left the scripts, with 0.1.0 and with 0.2: named only in a section that names the version, or a variant with it.
GONE_FLAGS = (
    "prompt-template overlong-prompts dynamic-sampling max-resamples overlong-buffer overlong-penalty importance-level"
    " old-logprobs is-level is-cap reward-model kl-controller kl-target kl-horizon top-p top-k lr-schedule dual-clip"
    " target-kl value-clip"
)
GONE_METRICS = "rollout/weight_mean rollout/ess kl/coef kl/sequence actor/lr critic/lr critic/value_mean"
GONE_NAMES = "rollout_weights load_reward_model AdaptiveKL read_table default_eval_source"
GONE = {f"--{flag}" for flag in GONE_FLAGS.split()} | {*GONE_METRICS.split(), *GONE_NAMES.split()}


def test_the_guide_says_what_became_of_what_left():
    text = (ROOT / "notes" / "guide.md").read_text()
    rows = re.findall(r"(?m)^\| (.*?) \| .+ \|$", text[text.index("## Since 0.2") :])
    for name in GONE:
        assert any(re.search(rf"(?<![\w-]){name}(?![\w-])", row) for row in rows), name


def test_the_guide_merges_an_adapter_without_loss(tmp_path):
    """Its own lines, after a short run over a base in bfloat16, in whose steps most of the training would be lost."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("peft")
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = make_model(tmp_path / "model", "llama")
    AutoModelForCausalLM.from_pretrained(base).bfloat16().save_pretrained(base)
    (tmp_path / "reward.py").write_text(TOY_REWARD)
    data = write_rows(tmp_path / "data.jsonl", toy_rows(8))
    flags = {"model": base, "dataset": data, "reward": f"{tmp_path}/reward.py:early", "lora_rank": 8, "lr": 1e-4}
    flags |= {"batch_size": 4, "group_size": 4, "minibatch_size": 4, "max_response_length": 10, "total_iterations": 1}
    flags |= {"save_every": 0, "track": "none", "output_dir": tmp_path / "runs", "run_name": "lora"}
    code, console = forked(ROOT / "grpo_llm.py", flags, 1)
    assert code == 0, console

    guide = (ROOT / "notes" / "guide.md").read_text()
    (lines,) = (part for part in re.findall(r"(?ms)^```python\n(.*?)^```$", guide) if "merge_and_unload" in part)
    subprocess.run([sys.executable, "-c", lines], cwd=tmp_path, check=True)

    adapter = load_file(tmp_path / "runs/lora/final/adapter_model.safetensors")
    old, new = (AutoModelForCausalLM.from_pretrained(folder, dtype="float32") for folder in (base, tmp_path / "merged"))
    rounded = []
    for name in [name for name in adapter if "lora_A" in name]:
        place = name.removeprefix("base_model.model.").replace("lora_A.", "")
        was, now = old.get_parameter(place), new.get_parameter(place)
        trained = 2 * adapter[name.replace("lora_A", "lora_B")] @ adapter[name]  # lora_alpha is twice the rank
        torch.testing.assert_close(now, was + trained, rtol=0, atol=1e-7)
        rounded.append(((was + trained).bfloat16().float() == was).float().mean().item())
    assert min(rounded) > 0.5  # what a sum in bfloat16 would leave as it was
    AutoTokenizer.from_pretrained(tmp_path / "merged")  # so that --model can name the folder


def test_commands_of_the_notes_are_legal():
    found = 0
    for path in NOTES:
        for block in re.findall(r"(?ms)^```bash\n(.*?)^```$", path.read_text()):
            for line in block.replace("\\\n", " ").replace("--help", "").replace(")", "").splitlines():
                match = re.search(r"\b(\w+_llm\w*)\.py(?: (.*?))?(?: (?:#|&&|\|) .*)?$", line)
                processes = int(re.search(r"num_processes (\d+)|$", line)[1] or 1)
                if "learning.py" in line:
                    script = re.search(r"--script (\w+_llm\w*)\.py", line)
                    script = script[1] if script else "ppo_llm"
                    if "one_advantage" not in line:
                        check_flags(script, re.search(r'--flags="([^"]*)"|$', line)[1] or "")
                elif match and ("python " in line or "accelerate" in line):
                    check_flags(match[1], (match[2] or "").replace("...", ""), processes)
                else:
                    continue
                found += 1
    assert found >= 20


def test_commands_of_the_symptoms_are_those_that_were_run():
    """Runs with other flags stand as commands, bugs and what they are compared with as rows of the table."""
    text, symptoms = (ROOT / "notes" / "09-debugging.md").read_text(), load_benchmark("symptoms")
    text = re.sub(r" \\\n +", " ", text)
    for name, command in symptoms.SYMPTOMS.items():
        assert f"python {command}\n" in text or f"**{name}**" in text or name == "ppo-seed-6", name
        assert (symptoms.RESULTS / "symptoms" / f"{name}.csv").is_file(), name
    kept = {path.stem for path in (symptoms.RESULTS / "symptoms").glob("*.csv")}
    assert kept == symptoms.SYMPTOMS.keys()


def test_the_table_of_broken_runs_is_what_the_runs_say():
    text, symptoms = (ROOT / "notes" / "09-debugging.md").read_text(), load_benchmark("symptoms")
    table = symptoms.make_table(symptoms.RESULTS)
    assert table == (symptoms.RESULTS / "symptoms" / "table.md").read_text()
    for part in table.strip().split("\n\n"):
        assert " ".join(part.split()) in " ".join(text.split())


def test_every_metric_of_a_run_is_in_the_debugging_note():
    text = (ROOT / "notes" / "09-debugging.md").read_text()
    scripts = "".join((ROOT / f"{script}.py").read_text() for script in CEILINGS)
    names = set(
        re.findall(r'"((?:reward|advantage|actor|critic|kl|response|group|rollout|time|memory|eval)/\w+)"', scripts)
    )
    names |= {"eval/score_sampled"}
    assert len(names) >= 26 and [name for name in sorted(names) if f"`{name}`" not in text] == []
    assert set(re.findall(r"(?m)^\| `(\w+/\w+)` \|", text)) <= names  # and its table has no other


@pytest.mark.parametrize("path", [*NOTES, ROOT / "notes" / "real-run.md"], ids=lambda path: path.stem)
def test_formulas_survive_github(path):
    """Markdown reads them first: \\, would become a comma, }_ may begin an emphasis, ]( is a link."""
    text = re.sub(r"`[^`\n]*`", "", prose(path))
    for match in re.finditer(r"(?s)\$\$.+?\$\$|(?<!\\)\$[^$\s](?:[^$]*?[^$\s])??\$", text):
        assert not re.search(r"[^A-Za-z0-9]_|\*|<[A-Za-z]|\]\(|\\[^A-Za-z\s]", match[0]), match[0]
        assert not re.match(r"[\w-]", text[match.start() - 1]) and not re.match(r"\w", text[match.end()]), match[0]


FIGURES = sorted((ROOT / "notes" / "figures").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_figures_are_what_their_scripts_draw(path, monkeypatch, tmp_path):
    """Drawn again and compared by eye, as it were: fonts may differ by a pixel, curves may not."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    drawn, save = [], matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure,
        "savefig",
        lambda self, file, **options: drawn.append(file) or save(self, tmp_path / file.name, **options),
    )
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
        (note,) = (note for note in NOTES if note.name.startswith(f"{path.stem}-"))
        assert f"](figures/{file.name})" in note.read_text()  # and the note shows it


def test_no_figure_is_left_over():
    shown = {name for path in PAGES for name in re.findall(r"\]\(figures/(\w+\.png)\)", path.read_text())}
    assert shown == {path.name for path in (ROOT / "notes" / "figures").glob("*.png")}


def test_parameters_of_the_memory_arithmetic_are_those_of_the_models():
    """notes/memory.py counts from the shape alone; transformers builds the model, without memory."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    memory = runpy.run_path(str(ROOT / "notes" / "memory.py"))
    for shape in memory["SHAPES"].values():
        sizes = dict(
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            tie_word_embeddings=shape.tied,
        )
        config = transformers.Qwen2Config(**sizes, num_labels=1)
        kinds = {False: transformers.Qwen2ForCausalLM, True: transformers.Qwen2ForTokenClassification}
        with torch.device("meta"):
            for critic, kind in kinds.items():
                assert sum(p.numel() for p in kind(config).parameters()) == memory["count"](shape, critic)


def test_the_defaults_fit_a_card_of_24_gb():
    """Qwen2.5-0.5B with every flag at its default, one process, by the formulas of note 14."""
    memory = runpy.run_path(str(ROOT / "notes" / "memory.py"))
    for name in CEILINGS:
        args = load_script(name).Args(model="Qwen/Qwen2.5-0.5B")
        sizes = {"tokens": args.microbatch_tokens, "rows": args.rollout_batch_size}
        sizes |= {"length": args.max_prompt_length + args.max_response_length}
        sizes |= {"response_length": args.max_response_length, "checkpointing": args.gradient_checkpointing}
        kind = {"critic": hasattr(args, "critic_lr"), "sharded": name.endswith("fsdp")}
        terms = memory["budget"](memory["SHAPES"]["Qwen2.5-0.5B"], microbatches=32, **sizes | kind)
        assert terms["peak"] < 23e9, name  # 24 GB, but for what CUDA and the allocator take
        assert memory["budget"](memory["SHAPES"]["Qwen2.5-0.5B"], **kind)["peak"] == terms["peak"]  # they are budget's


def test_the_settings_by_card_are_those_that_fit():
    """The guide's tables are what memory.py prints; a cell fits with its margin, and nothing before it does."""
    memory = runpy.run_path(str(ROOT / "notes" / "memory.py"))
    guide, found = (ROOT / "notes" / "guide.md").read_text(), 0
    for model, shape in memory["SHAPES"].items():
        assert f"**{model}**\n\n{memory['settings_table'](shape)}\n\n" in guide
        for options, card in itertools.product(memory["SCRIPTS"].values(), memory["CARDS"]):
            cell, room = memory["settings"](shape, card, **options), 0.9e9 * card
            n = options.get("processes", 1)

            def fits(rows, tokens, checkpointing):
                sizes = {"rows": rows, "tokens": tokens, "checkpointing": checkpointing}
                return memory["budget"](shape, **options, **sizes)["peak"] <= room

            if cell is None:
                assert not fits(1, 1024, True)
                continue
            found += 1
            rows, tokens, checkpointing = cell
            assert fits(*cell) and rows <= 256 / n and 1024 <= tokens <= min(16384, 65536 / n)
            assert rows == 256 / n or not fits(2 * rows, tokens, checkpointing)
            assert tokens == min(16384, 65536 / n) or not fits(rows, 2 * tokens, checkpointing)
            assert tokens >= 4096 if not checkpointing else not fits(rows, 4096, False)
    assert found > 50


def test_the_walk_is_the_whole_loop_and_every_difference():
    """Nothing missing, nothing twice; refresh.py puts the excerpts in, this reads them without it."""
    text = (ROOT / "notes" / "walk.md").read_text()
    script = (ROOT / "ppo_llm.py").read_text()
    loop = script[script.index("    for iteration in progress:\n") : script.index("    progress.close()\n")]
    excerpts = re.findall(r"(?ms)^```python\n(.*?)^```$", text)
    code = [line for part in excerpts for line in part.splitlines() if line]
    assert code == [line[4:] for line in loop.splitlines() if line]
    assert max(part.count("\n") for part in excerpts) <= 40  # a screen each, or more is said
    for name in "ppo_to_grpo", "ppo_to_ppo_fsdp":
        shown = re.findall(rf"(?ms)^<!-- hunk {name}: .*?^```diff\n(.*?)^```$", text)
        lines = sorted(line for part in shown for line in part.splitlines())
        whole = (ROOT / "notes" / f"{name}.diff").read_text().splitlines()
        assert lines == sorted(line for line in whole if not line.startswith(("--- ", "+++ "))), name
