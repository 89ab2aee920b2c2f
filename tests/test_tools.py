"""What serves those who change a copy: notes/variants.py, pytest's --script, compare.py --exact, check_copy.py.
And what serves after a run: rescore.py, ask.py.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import refresh
import variants
from helpers import PLACE, ROOT, each_script, read_rows, write_rows
from test_project import load_benchmark

# ---------------------------------------------------------------------------------------------- notes/variants.py


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """call(words): (exit code, what it printed) of notes/variants.py, from the test's folder.

    It is a repository of its own, without the history of ours; patches are made there, beside those that there are."""
    shutil.copytree(variants.FOLDER, tmp_path / "notes" / "variants")
    for script in variants.SCRIPTS:
        shutil.copy(ROOT / script, tmp_path)
    monkeypatch.setattr(variants, "ROOT", tmp_path)
    monkeypatch.setattr(variants, "FOLDER", tmp_path / "notes" / "variants")
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["variants.py", *map(str, words)])
        try:
            code = variants.main() or 0
        except SystemExit as leaving:
            code = leaving.code
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def changed(script, old, new, to="copy.py"):
    Path(to).write_text((ROOT / script).read_text().replace(old, new, 1))
    return Path(to)


@pytest.mark.parametrize("script", variants.SCRIPTS)
def test_a_patch_is_of_the_nearest_script(script, call):
    copy = changed(script, "mb_ratio = (mb_logprobs", "mb_ratio = 1.0 * (mb_logprobs")
    call("make", "mine", copy)
    assert variants.read_patch("mine")[1] == script and variants.changes("mine") == (1, 1, 1)
    assert variants.patched("mine") == copy.read_text() and "index " not in variants.read_patch("mine")[2]
    other = variants.SCRIPTS[variants.SCRIPTS.index(script) - 1]
    head = variants.read_patch("gspo")[0]
    assert "another name, or --replace" in call("make", "gspo", copy)[1] and variants.read_patch("gspo")[0] == head
    call("make", "gspo", copy, "--of", other, "--replace")  # over the patch that is there, whose head stays
    assert variants.read_patch("gspo")[:2] == (head, other) and sum(variants.changes("gspo")) > 50


def test_what_is_no_copy_makes_no_patch(call):
    call("apply", "cispo,gspo", "stuck.py")
    for path, error in (
        (ROOT / "notes" / "variants" / "rank.py", "is no copy of ppo_llm.py, grpo_llm.py, ppo_llm_fsdp.py"),
        (ROOT / "grpo_llm.py", "is grpo_llm.py as it stands"),
        ("nowhere.py", "there is no file nowhere.py"),
        ("stuck.py", "still has conflicts"),
    ):
        code, said = call("make", "unheard_of", path)
        assert code == 2 and error in said
    assert not (variants.FOLDER / "unheard_of.patch").exists()


def test_the_list_has_each_once_by_what_it_changes(call):
    call("make", "mine", changed("ppo_llm.py", "gamma", "discount"))
    lines = call("list")[1].splitlines()
    files = {path.stem for path in variants.FOLDER.glob("*.py")} - {"guess"}  # a game for `environment`
    listed = [line.split()[0] for line in lines[:-2] if line.startswith("  ")]
    assert sorted(listed) == sorted({*variants.names(), *files})
    assert [line[:-1] for line in lines if not line.startswith("  ")] == [*variants.GROUPS, "yours"]
    assert lines[-1].split()[:2] == ["mine", "ppo"] and "mine" not in variants.names()


def test_variants_stack_and_conflicts_are_named(call):
    assert call("apply", "cispo") == (0, "wrote cispo_llm.py: grpo_llm.py + cispo\n")
    parents = "grpo_llm.py + cispo + replay"
    assert call("apply", "cispo,replay", "both.py") == (0, f"wrote both.py: {parents}\n")
    assert call("apply", "replay", "both.py", "--on", "cispo_llm.py") == (0, f"wrote both.py: {parents}\n")  # the same
    text = Path("both.py").read_text()
    digest = subprocess.check_output(["git", "hash-object", "grpo_llm.py"], text=True)[:16]
    assert text.startswith(f'# {parents}, by notes/variants.py of grpo_llm.py {digest}\n"""')
    for name in "cispo", "replay":  # each line that one of them adds
        for line in re.findall(r"(?m)^\+(?!\+\+)(.*)", variants.read_patch(name)[2]):
            assert line in text
    hint = "dual_clip and target_kl both change the phase 'update': does each still mean what it does alone?\n"
    assert call("apply", "dual_clip,target_kl", "two.py")[1].startswith(hint)
    sentence, _ = call("apply", "cispo,gspo,replay", "out.py")
    text = Path("out.py").read_text().splitlines()
    found = re.findall(r"(?m)^    line (\d+), in (.*)$", sentence)
    assert f"in {len(found)} place(s) of out.py" in sentence and "main" in [around for _, around in found]
    assert [int(n) for n, _ in found] == [k for k, x in enumerate(text, 1) if x == "<<<<<<< grpo_llm.py + cispo"]
    assert sentence.endswith("Not applied yet: replay.")
    assert "out.py still has conflicts" in call("apply", "replay", "more.py", "--on", "out.py")[0]
    Path("both.py").write_text("mine")
    assert "is something else" in call("apply", "cispo", "both.py")[0] and Path("both.py").read_text() == "mine"


def test_where_both_insert_both_are_kept(call):
    """And a patch may lie anywhere."""
    anchor = '@dataclass\nclass Args:\n    """'
    for name in "one", "two":
        call("make", f"{name}.patch", changed("grpo_llm.py", anchor, f"{name.upper()} = 1\n\n\n{anchor}"))
    code, said = call("apply", "one.patch,two.patch")
    assert code == 0 and "one and two insert in the head of the file: kept" in said
    text = Path("one_two_llm.py").read_text()
    assert text.index("ONE = 1\n") < text.index("TWO = 1\n") and "<<<<" not in text


def commit_all():
    for words in ["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "c"]:
        subprocess.run(["git", *words], check=True)


def test_rebase_writes_over_nothing_and_goes_on(call):
    """A file in the way, a conflict, a patch with the marks of a merge, an insertion at a changed line."""
    anchor = "    whitened = "
    call("make", "one.patch", changed("grpo_llm.py", anchor, f"    one = 1\n{anchor}"))
    commit_all()
    text = changed("grpo_llm.py", anchor, f"    two = 2\n{anchor}1 * ").read_text()
    ratio = re.search(r"(?m)^-( +mb_ratio = .*)$", variants.read_patch("cispo")[2])[1]
    Path("grpo_llm.py").write_text(text.replace(ratio, f"{ratio}, anew"))
    Path("conflicts").mkdir()
    for path in Path("gspo_llm.py"), Path("conflicts/gspo_llm.py"):
        path.write_text("mine")
    sapo = variants.path_of("sapo")
    sapo.write_text(f"<<<<<<< ours\n{sapo.read_text()}")
    assert call("rebase", "one.patch,gspo")[0].startswith("conflicts/gspo_llm.py is there and is something else")
    added = re.findall(r"(?m)^\+    (.*)", variants.patched("one.patch") and variants.read_patch("one.patch")[2])
    assert added == ["one = 1"] and not Path("conflicts/cispo_llm.py").exists()
    left = call("rebase")[0]
    assert "sapo.patch has the marks of a merge" in left and "conflicts/cispo_llm.py has 1 conflict(s)" in left
    assert Path("gspo_llm.py").read_text() == Path("conflicts/gspo_llm.py").read_text() == "mine"
    mend("conflicts/cispo_llm.py")
    code, printed = call("make", "cispo", "conflicts/cispo_llm.py")
    assert code == 0 and "check_copy" not in printed and "weight" in variants.patched("cispo")
    assert not Path("conflicts/cispo_llm.py").exists()  # or another branch's would be taken for it


def mend(path):
    """Takes the side of the variant."""
    Path(path).write_text(re.sub(r"(?s)<{7}.*?={7}\n(.*?)>{7} .*?\n", r"\1", Path(path).read_text()))


def test_rebase_merges_a_patch_that_both_branches_have_changed(call):
    """And names one that fits and uses what its script no longer has."""
    commit_all()
    for branch, old in ("there", "mb_losses = -advantages"), ("-", "mb_ratio = "):
        subprocess.run(["git", "checkout", "-q", *(["-b"] * (branch == "there")), branch], check=True)
        call("apply", "cispo", "copy.py")
        Path("copy.py").write_text(re.sub(rf"(?m)^( +)({old}.*)$", r"\1one = 1\n\1\2", Path("copy.py").read_text()))
        call("make", "cispo", "copy.py")
        Path("copy.py").unlink()
        commit_all()
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=b", "merge", "-q", "there"], check=True)
    code, said = call("rebase", "cispo")
    assert not code and "merged from both branches" in said
    assert [line.count("one = 1") for line in variants.read_patch("cispo")[2].splitlines()].count(1) == 2
    changed("grpo_llm.py", "limit, iteration)", "bound, iteration)", "grpo_llm.py")
    assert "cispo.patch fits, but uses bound: " in call("rebase", "cispo")[0]


def test_no_patch_takes_a_script_back(call):
    """A conflict mended on one branch and made on another; a copy that is older than its script, or of unknown age."""
    commit_all()
    old = call("apply", "cispo", "old.py") and Path("old.py").read_text()
    ratio = re.search(r"(?m)^-( +mb_ratio = .*)$", variants.read_patch("cispo")[2])[1]
    changed("grpo_llm.py", ratio, f"{ratio}, only there", "grpo_llm.py")
    subprocess.run(["git", "checkout", "-qb", "there"], check=True)
    commit_all()
    file = Path("conflicts/cispo_llm.py")
    assert "1 conflict(s)" in call("rebase", "cispo")[0]
    mend(file)
    subprocess.run(["git", "checkout", "-q", "-"], check=True)
    changed("grpo_llm.py", "int = 0  # the", "int = 0  # these", "grpo_llm.py")
    before = variants.path_of("cispo").read_text()
    assert "1 conflict(s)" in call("make", "cispo", file)[0] and variants.path_of("cispo").read_text() == before
    mend(file)
    assert call("make", "cispo", file)[0] == 0 and not file.exists()
    made = variants.read_patch("cispo")[2]
    assert "only there" not in made and variants.patched("cispo").count("# these") == 1
    Path("old.py").write_text(old)
    assert call("make", "mine", "old.py")[0] == 0 and variants.read_patch("mine")[2] == made
    Path("old.py").write_text(re.sub(r"(of grpo_llm.py )\w+", r"\g<1>0123456789", old, count=1))
    assert "which git doesn't know" in call("make", "yours", "old.py")[1] and not variants.path_of("yours").exists()


def test_a_conflict_is_reported_in_its_function(call):
    """Also if the merge puts its mark above the function's head."""
    text = "def one():\n    pass\n\n\ndef two():\n    {}\n"
    marked = "<<<<<<< a\n{0}||||||| b\n{1}=======\n{2}>>>>>>> c\n"
    inside = marked.format(*(text.partition("def two")[1] + f"():\n    x = {x}\n" for x in "123"))
    assert variants.places(text.partition("def two")[0] + inside) == ["line 5, in two"]
    assert variants.places(text.format("pass\n") + marked.format("    x = 1\n", "", "    x = 2\n")) == [
        "line 8, in two"
    ]


@pytest.mark.parametrize("form, said", [("utf-16", "isn't UTF-8"), ("utf-8-sig", "begins with a byte-order mark")])
def test_what_powershell_writes_gets_a_sentence(form, said, call):
    """A patch, wherever it lies, and a copy."""
    for path in variants.FOLDER / "foul.patch", Path("foul.patch"):
        path.write_text(variants.path_of("cispo").read_text(), form)
        assert said in call("apply", path, "out.py")[1] and said in call("rebase", path)[0]
    variants.path_of("foul").write_text("diff --git a/ppo_llm.py", form)
    assert f"foul.patch {said}" in call("list")[1]
    copy = changed("grpo_llm.py", "gamma", "discount")
    copy.write_text(copy.read_text(), form)
    assert said in call("make", "mine", copy)[1] and said in call("shard", copy)[1]


def test_shard_writes_sharded_copies(call):
    """Of grpo_llm.py what `git merge-file` makes; of a variant what `apply --on` makes of that."""
    assert call("shard", "grpo_llm.py") == (0, "wrote grpo_llm_fsdp.py: grpo_llm.py + ppo_llm_fsdp.py\n")
    merge = ["git", "merge-file", "-p", "grpo_llm.py", "ppo_llm.py", "ppo_llm_fsdp.py"]
    assert Path("grpo_llm_fsdp.py").read_text().partition("\n")[2] == subprocess.check_output(merge, text=True)
    for name, base in ("cispo", "grpo_llm_fsdp.py"), ("value_clip", "ppo_llm_fsdp.py"):
        call("apply", name)
        call("apply", name, "on.py", "--on", base)
        assert call("shard", f"{name}_llm.py")[0] == 0
        assert (
            Path(f"{name}_llm_fsdp.py").read_text().partition("\n")[2] == Path("on.py").read_text().partition("\n")[2]
        )
        Path("on.py").unlink()
    Path("other.py").write_text("print()\n")
    for path, said in (
        ("other.py", "is no copy of ppo_llm.py or grpo_llm.py"),
        ("grpo_llm_fsdp.py", "shards its models already"),
        ("ppo_llm_fsdp.py", "shards its models already"),
        ("ppo_llm.py", "ppo_llm.py, sharded, is ppo_llm_fsdp.py"),
    ):
        assert said in call("shard", path)[0]


# ------------------------------------------------------------------------------------------- refresh.py --scripts


SHARED = """SIZES = 1


def main():
    {0}(1)


# Why.
def first(x):
    return {0}(x)


def {0}(x):
    return {1}


def last(x):
    return {2}
"""


def test_what_changes_in_one_script_goes_to_the_others():
    """A renamed helper with another body; calls in `main` are the contributor's. Two changes at once are left alone."""
    old = {script: refresh.definitions(SHARED.format("helper", "x", script == "c")) for script in "abc"}
    texts = {script: SHARED.format("helper", "x", script == "c").replace("helper(1)", "renamed(1)") for script in "abc"}
    texts["b"] = SHARED.format("renamed", "2 * x", False)
    expected = {script: SHARED.format("renamed", "2 * x", script == "c") for script in "abc"}
    assert refresh.with_shared(old, texts) == (expected, [])
    used = "def main():\n    helper({})\n\n\ndef helper(x):\n    pass\n"
    one = {"a": "def main():\n    pass\n", "b": used.format(2)}  # one no longer needs what the other does
    old_ones = {"a": refresh.definitions(used.format(1)), "b": refresh.definitions(used.format(2))}
    assert refresh.with_shared(old_ones, one) == (one, [])
    texts["a"] = texts["a"].replace("return x", "return 3")
    found, said = refresh.with_shared(old, texts)
    assert said == ["helper has changed in several ways: left as it is"] and "return 3" in found["a"]


def test_a_page_that_cannot_follow_is_named_and_the_others_do(monkeypatch, tmp_path):
    """And names that are gone from the scripts are found on the pages."""
    texts = [(ROOT / script).read_text() for script in refresh.SCRIPTS]
    for path in *refresh.SCRIPTS, "README.md", "notes/walk.md", "notes/run/flags.md", "notes/variants.md":
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    monkeypatch.setattr(refresh, "ROOT", tmp_path)
    monkeypatch.setattr(refresh, "NOTES", tmp_path / "notes")
    assert refresh.contents()[1] == [] and refresh.still_named(texts, texts) == []
    text = texts[1].replace("bounded", "limited").replace("kl_penalty", "kl_price")
    text = text.replace("responses per", "answers per")  # in a flag's comment
    (tmp_path / "grpo_llm.py").write_text(text)
    pages, wrong = refresh.contents()
    (said,) = wrong
    assert re.match(r"README.md is left as it is: the loop of grpo_llm.py has no line .* 'bounded'", said)
    assert "| answers per prompt |" in pages[tmp_path / "notes" / "run" / "flags.md"]
    (tmp_path / "notes" / "07-kl.md").write_text("One.\nThe function `kl_penalty(x)` and `sample`.\n")
    assert "notes/07-kl.md, line 2: `kl_penalty`" in refresh.still_named(texts[1:2], [text])
    assert not any("07-kl.md" in place for place in refresh.still_named(texts, [texts[0], text]))


# ------------------------------------------------------------------------------------------------------- --script


@pytest.mark.slow
def test_a_copy_stands_in_for_its_script(tmp_path):
    """In workers of pytest-xdist, too, which have no option of pytest's."""
    line = "        groups = rewards.view(-1, args.group_size)"
    copy = changed("grpo_llm.py", line, f"{line} * 0 + 77", tmp_path / "my_copy.py")
    words = ["-n", "1", "--script", str(copy), "tests/test_groups.py", "-k", "golden_advantages"]
    env = {name: value for name, value in os.environ.items() if name != PLACE and "PYTEST" not in name}
    command = [sys.executable, "-m", "pytest", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 1 and "FAILED tests/test_groups.py::test_golden_advantages" in done.stdout, done.stdout


# --------------------------------------------------------------------------------------------- compare.py --exact


def write_run(folder, last, texts):
    """A run folder whose last line of metrics has these besides."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "completions").mkdir(parents=True)
    write_rows(folder / "metrics.jsonl", [{"step": 0, "eval/score": 0.5}, {"step": 1} | last])
    for name, responses in texts.items():
        write_rows(folder / "completions" / f"{name}.jsonl", [{"response": text} for text in responses])
    return folder


def test_two_runs_are_the_same_but_for_rounding_or_the_first_difference_is_named(tmp_path, capsys):
    """What was sampled comes before what was learned from it, and that before what was evaluated."""
    compare = load_benchmark("compare")
    last = {"kl/mean": -2.1218e-4, "actor/loss": 0.5, "actor/nan": float("nan"), "time/iteration": 1.0}
    texts = {"eval_000001": ["b"], "step_000001": ["c", "d"]}
    one = write_run(tmp_path / "one", last, texts)

    def compared(more, tolerance=1e-4, **others):
        other = write_run(tmp_path / "two", last | {"time/iteration": 9.0} | more, texts | others)
        return compare.compare_runs(one, other, tolerance), capsys.readouterr().out.partition(":\n")[0]

    rounded = {"kl/mean": -2.1215e-4, "actor/loss": 0.50004}
    assert compared(rounded) == (0, "the same: 2 lines of metrics, 3 rows of completions in 2 files\n")
    for (code, console), said in (
        (compared(rounded, tolerance=1e-5), "row 2, actor/loss"),
        (compared({"actor/loss": float("nan")}), "row 2, actor/loss"),
        (compared({"actor/loss": 1, "kl/mean": 1}, eval_000001=["x"]), "row 2, kl/mean"),
        (compared({"actor/loss": 1}, step_000001=["c", "d "]), "row 2, response"),
        (compared({}, step_000001=["c"]), "row 2, number of rows"),
    ):
        assert code == 1 and console.endswith(said), console


# --------------------------------------------------------------------------------------------------- check_copy.py


def test_only_what_stands_still_is_ended(monkeypatch):
    """A loop that prints nothing is none. Of the other we learn where it stood."""
    common = load_benchmark("common")
    busy = "import time\nwhile time.process_time() < 1.5: pass\nprint('done')"
    assert common.run([sys.executable, "-c", busy], limit=1)[0] == "done\n"
    with pytest.raises(SystemExit, match=r"(?s)Fatal Python error: Aborted.*line 3 in stand"):
        common.run([sys.executable, "-c", "import time\ndef stand():\n    time.sleep(60)\nstand()"], limit=1)


BEGIN = "        lr_factor = min("
WRONG = f"""        few = torch.quantile(old_logprobs[mask], 0.5)  # of this rank's tokens
        advantages = torch.where(old_logprobs < few, advantages, 0)
        ref_logprobs = ref_logprobs.roll(1, 1) * mask
{BEGIN}"""
SUM = "        sum_gradients(trained_parameters(trained_model).values())\n"
COPIES = [
    (
        "maxrl",
        "",
        "",
        "--estimator maxrl",
        0,
        [r"sharded-resumed, .*: the same", "without --estimator: .* change acts"],
    ),
    ("grpo_llm", BEGIN, f"        # nothing\n{BEGIN}", "", 1, ["the change does nothing"]),
    ("grpo_llm", BEGIN, WRONG, "", 1, ["still, .*kl/mean is .* in iteration 1", "advantage/.*", "the change acts"]),
    ("grpo_llm", SUM, "", "", 1, ["two, .*the ranks take a step with different gradients"]),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, old, new, flags, code, said", COPIES)
def test_a_copy_is_checked_by_one_command(
    name, old, new, flags, code, said, tiny_model, toy_data, toy_reward, tmp_path
):
    text = (ROOT / "grpo_llm.py").read_text() if name == "grpo_llm" else variants.patched(name)
    (tmp_path / "my_copy.py").write_text(text.replace(old, new, 1))
    flags += f" --model {tiny_model} --dataset {toy_data} --reward {toy_reward} --max-response-length 10 --lr 1e-3"
    words = [ROOT / "benchmarks" / "check_copy.py", tmp_path / "my_copy.py", "--flags", flags]
    done = subprocess.run([sys.executable, *words, *["--shards"] * (not code)], capture_output=True, text=True)
    found = [re.search(f"(?s){line}", done.stdout) is not None for line in said]
    assert done.returncode == code and all(found), done.stdout + done.stderr


# ---------------------------------------------------------------------------------------------------- after a run

MINE = """
SETTINGS = {"level": 3}
def parts(completions, prompts, messages, completion_ids, answers, question, truncated):
    assert all(chat[0]["content"] == q + "?!" for chat, q in zip(messages, question))
    assert all(prompt.endswith("?!#") for prompt in prompts) and len(answers) == len(truncated)
    return {"early": [len(ids) for ids in completion_ids], "q": [text.count("q") for text in completions]}
def needs(responses, colour):
    return responses
"""


@each_script("grpo_llm")
def test_a_run_is_scored_again_and_asked_as_in_training(script, toy_run, tmp_path, monkeypatch, capsys):
    """By a reward with TRL's names. A LoRA run: its model says what it said in the evaluation, its base something."""
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}#")
    (tmp_path / "old_and_new.py").write_text(MINE)
    flags = {"chat_template": f"{tmp_path}/t.jinja", "prompt_suffix": "?!", "eval_rows": 3, "lora_rank": 2, "lr": 0.1}
    run_dir, _ = toy_run(**flags)

    def call(tool, *words):
        monkeypatch.setattr(sys, "argv", [tool, *map(str, words)])
        monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
        try:
            runpy.run_path(str(ROOT / "benchmarks" / tool), run_name="__main__")
        except SystemExit as leaving:
            return str(leaving.code)
        return capsys.readouterr().out

    said = call("rescore.py", run_dir, f"{tmp_path}/old_and_new.py:parts")
    rows = read_rows(run_dir / "completions" / "step_000001.jsonl")
    old, early = (sum(row[name] for row in rows) / len(rows) for name in ("score", "length"))
    q = sum(row["response"].count("q") for row in rows) / len(rows)
    moved = f"score {old:.3f} -> {early + q:.3f}, early none -> {early:.3f}, q none -> {q:.3f}"
    assert "old_and_new.py:parts {'level': 3}" in said and f"step_000001, 8 answers: {moved}" in said
    assert said.count("the reference answer is") == 5 and said.count("eval_sampled_") >= 2
    assert "needs ['colour']; the completions have the columns ['question'" in call(
        "rescore.py", run_dir, f"{tmp_path}/old_and_new.py:needs"
    )
    assert "is no run folder" in call("rescore.py", tmp_path, "gsm8k")
    base = flags_of(run_dir)["model"]
    for row in read_rows(run_dir / "completions" / "eval_000002.jsonl"):
        base_said, said = call("ask.py", base, run_dir, row["row"]["question"]).split(f"--- {run_dir}/final")
        cut = " ... (cut off)" * row["truncated"]
        assert (
            said == f", asked {row['prompt']!r}\n{row['response']}{cut}\n" and f"asked {row['prompt']!r}" in base_said
        )
    assert "has no args.json" in call("ask.py", base, "why?")


def flags_of(run_dir):
    return json.loads((run_dir / "args.json").read_text())


# ------------------------------------------------------------------------------------------ the task `lines`, pieces.py


def test_pieces_and_the_grader_of_their_task():
    """Each line that a row changes is one line of the script. The flaw of the grader is part of the task."""
    pieces, tasks = load_benchmark("pieces"), load_benchmark("tasks")
    for _, edits in pieces.ROWS.values():
        for line in edits:
            assert variants.patched("process_reward").count(line) == 1, line
    graded = tasks.lines(["24"], ["680?579345"], [""])  # from 4 by twos; two digits are no line
    assert graded == {"line": [[(4, 1), (8, 1)]], "right": [[(4, 3), (8, 2)]], "unread": [[(4, 1), (8, 1)]]}
    assert tasks.lines_summed(["24"], ["680?579345"], [""]) == {"line": [2], "right": [5], "unread": [2]}
