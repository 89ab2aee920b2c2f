"""Variants: patches that turn a script into another algorithm, in notes/variants/.

    python notes/variants.py list                      what there is: name, script, changed lines, what it does
    python notes/variants.py apply NAME [FILE]         the whole file, to read and run (default: NAME_llm.py)
    python notes/variants.py apply NAME FILE --on ppo_llm_fsdp.py     the same change of another script, by a merge
    python notes/variants.py apply NAME FILE --on OTHER_llm.py        ... or of another variant: both changes
    python notes/variants.py pairs                     which changes stack so, as chapter 13 has it
    python notes/variants.py make NAME FILE [--of grpo_llm.py]        FILE, your changed copy, as a patch (default: of
                                                       the script that it is nearest to)
    python notes/variants.py rebase                    every patch anew, after a script has changed

A patch is what `git diff` prints, below a head in plain words: what changes, whose idea it is, the command, what we
measured. It is applied as it stands, no line of its context may differ. Its `index` line names the script it was made
of, as git stores it: `rebase` finds that old script in the repository's history and merges three ways, so that only
true conflicts need a person. NAME.py in the same folder is a file that needs no patch: a reward, or a script that
imports another and replaces a function.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notes" / "variants"
SCRIPTS = "ppo_llm.py", "grpo_llm.py", "ppo_llm_fsdp.py"
GROUPS = {  # by what a researcher wants to change; chapter 13 has the same
    "the loss": "cispo gspo sapo dppo icepop cov entropy_tokens dual_clip plain_pg value_clip target_kl anneal",
    "the advantage": "maxrl optimal_baseline multi_reward process_reward vc_ppo shared_critic distill self_distill",
    "the KL": "adaptive_kl kl_gradient",
    "which prompts and responses count": "dapo replay mask_truncated",
    "sampling, turns, tools": "two_turns tool_call environment one_step_off bypass top_p pass_at_k",
    "speed, memory, precision": "paged vllm shared_prompt fp16 lora_bf16",
    "the reward, as a file": "verify_math gym_tasks length_control reward_model judge",
}
HEAD = """What: (the change in one or two lines)
Idea: (paper, number)
Run:  python notes/variants.py apply {name} && accelerate launch {name}_llm.py
Measured: (numbers, seeds, beside what)

"""


def git(*words, check=True, **options):
    done = subprocess.run(["git", *map(str, words)], capture_output=True, text=True, **options)
    if check and done.returncode:
        sys.exit(f"git {words[0]}: {done.stderr.strip() or done.stdout.strip()}")
    return done


def read_patch(name):
    """(head, script it is of, id of that script's text, the diff itself)"""
    text = (FOLDER / f"{name}.patch").read_text()
    head, mark, diff = text.partition("diff --git ")
    script, blob = re.search(r"^a/(\S+) .*?^index ([0-9a-f]{40})\.\.", diff, re.M | re.S).groups()
    return head, script, blob, mark + diff


def changes(name):
    """(lines taken away, lines added, hunks) of a patch."""
    body = read_patch(name)[3].partition("\n@@")[2]
    return tuple(len(re.findall(pattern, "\n@@" + body, re.M)) for pattern in (r"^-", r"^\+", r"^@@"))


def size(name):
    removed, added, hunks = changes(name)
    return f"-{removed} +{added} lines in {hunks} hunks"


def patched(name, base=None):
    """The text of the script, or of `base`, with the patch applied exactly as it stands; exits naming the hunk."""
    _, script, _, diff = read_patch(name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, script)
        path.write_text((ROOT / script).read_text() if base is None else base)
        done = git("apply", "--verbose", "-", input=diff, cwd=folder, check=False)
        if done.returncode:
            sys.exit(f"{name}.patch does not fit {script}: {done.stderr.strip()}\n`rebase` may help")
        return path.read_text()


def merged(ours, base, theirs, names=("script", "base", "variant")):
    """(text with both changes of `base`, number of conflicts). names: of the three, in the marks of a conflict."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("ours", "base", "theirs")]
        for path, text in zip(paths, (ours, base, theirs)):
            path.write_text(text)
        labels = [word for name in names for word in ("-L", name)]
        done = git("merge-file", "-p", *labels, *paths, check=False)
        if done.returncode > 127:
            sys.exit(f"git merge-file: {done.stderr.strip()}")
        return done.stdout, done.returncode


def places(text):
    """["line 12, in Args", ...]: where a merge has left both sides between its marks."""
    found, around = [], "the head of the file"
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"(?:def|class) (\w+)", line):
            around = match[1]
        if line.startswith("<<<<<<< "):
            found.append(f"line {number}, in {around}")
    return found


def difference(script, text, *options):
    """What `git diff` says of the script and a changed copy, whatever the user's settings."""
    with tempfile.TemporaryDirectory() as folder:
        for side, content in (("a", (ROOT / script).read_text()), ("b", text)):
            Path(folder, side).mkdir()
            Path(folder, side, script).write_text(content)
        options = "--no-index", "--no-prefix", "--full-index", "--no-color", "--no-ext-diff", *options
        return git("diff", *options, f"a/{script}", f"b/{script}", cwd=folder, check=False).stdout


def nearest(text):
    """The script with the fewest lines changed in the text; None if half of it is gone, which then is no copy."""
    found = []
    for script in SCRIPTS:
        counts = re.match(r"(\d+)\t(\d+)\t", difference(script, text, "--numstat"))
        added, removed = (int(counts[1]), int(counts[2])) if counts else (0, 0)
        found.append((added + removed, removed, script))
    _, removed, script = min(found)
    return script if removed < len((ROOT / script).read_text().splitlines()) / 2 else None


def make(name, text, script, head=None):
    """Writes the patch that turns `script` into `text`; an old patch's head stays."""
    path = FOLDER / f"{name}.patch"
    if head is None:
        head = read_patch(name)[0] if path.exists() else HEAD.format(name=name)
    path.write_text(head + difference(script, text))
    print(f"{path.relative_to(ROOT)}: of {script}, {size(name)}")


def apply(name, file, on=None):
    """Writes the variant, or its change in the script `on`; a conflict is left in the file for a person."""
    text, script = patched(name), read_patch(name)[1]
    if on is None:
        file.write_text(text)
        print(file)
        return
    text, conflicts = merged(on.read_text(), (ROOT / script).read_text(), text, (on, f"{script}, the base", name))
    file.write_text(text)
    if conflicts:
        sys.exit(
            f"{name} and {on} change the same lines of {script}, in {conflicts} place(s) of {file}:\n    "
            + "\n    ".join(places(text))
            + f"\nEach has {on}'s lines, then {name}'s, between <<<<<<< and >>>>>>>: write what both mean, then run it."
        )
    print(file)


def rebase():
    """Makes every patch anew of today's scripts; what conflicts is left as NAME_llm.py for a person, to `make`."""
    stuck = []
    for name in names():
        head, script, blob, _ = read_patch(name)
        today = (ROOT / script).read_text()
        old = git("cat-file", "blob", blob, cwd=ROOT, check=False)
        if old.returncode:
            sys.exit(f"{name}.patch is of a {script} that was never committed: {blob}")
        if old.stdout == today:
            continue
        text, conflicts = merged(today, old.stdout, patched(name, old.stdout))
        if conflicts:
            Path(f"{name}_llm.py").write_text(text)
            stuck.append(f"{name}_llm.py has {conflicts} conflict(s): mend it, then `make {name} {name}_llm.py`")
        else:
            make(name, text, script, head)
    sys.exit("\n".join(stuck) or None)


def names():
    return sorted(path.stem for path in FOLDER.glob("*.patch"))


def stacked():
    """{(file, change): (text, number of conflicts)}: the change of one variant in the file of another, all pairs.

    Of one script once, the other order gives the same. Of two scripts where the change merges with the other script
    alone, as (script, change) says.
    """
    scripts = {name: read_patch(name)[1] for name in names()}
    texts = {name: patched(name) for name in scripts} | {script: (ROOT / script).read_text() for script in SCRIPTS}
    found = {}

    def merge(pairs):
        def both(pair):
            file, change = pair
            return merged(texts[file], texts[scripts[change]], texts[change], (file, scripts[change], change))

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found.update(zip(pairs, pool.map(both, pairs)))

    merge([(file, name) for name, script in scripts.items() for file in SCRIPTS[:2] if file != script])
    merge([(file, name) for file in scripts for name in scripts if file < name and scripts[file] == scripts[name]])
    alone = [pair for pair, (_, conflicts) in found.items() if pair[0] in SCRIPTS and conflicts == 0]
    merge([(file, name) for script, name in alone for file in scripts if scripts[file] == script])
    return found


def table_of_pairs(found):
    """Markdown: which of the changes that `stacked` has found stack."""
    stuck = {pair for pair, (_, conflicts) in found.items() if conflicts}
    lines = ["| change | of | in the other script | not with |", "|---|---|---|---|"]
    for name in names():
        script = read_patch(name)[1]
        (other,) = (file for file in SCRIPTS[:2] if file != script)
        with_others = [file for file in names() if (file, name) in stuck]
        with_others += [file for file in names() if (name, file) in stuck and read_patch(file)[1] == script]
        merges = "conflict" if (other, name) in stuck else "merges"
        lines.append(f"| `{name}` | `{script}` | {merges} | {', '.join(f'`{file}`' for file in sorted(with_others))} |")
    return "\n".join(lines)


def print_list():
    """By what a researcher wants to change: name, script, changed lines, and what it does in half a line."""
    for title, group in GROUPS.items():
        print(f"{title}:")
        for name in group.split():
            script, lines, text = "file", "", ""
            if name in names():
                text, script, _, _ = read_patch(name)
                lines, text = sum(changes(name)[:2]), text.partition("\nIdea:")[0].removeprefix("What:")
                script = script.partition("_")[0]
            else:
                text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())).removeprefix("Reward:")
            print(f"  {name:17} {script:4} {lines:>3}  {textwrap.shorten(text, 88, placeholder=' ...')}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("list", "apply", "make", "rebase", "pairs"))
    parser.add_argument("name", nargs="?")
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--on", type=Path, help="apply: another script or variant that shares the changed parts")
    parser.add_argument("--of", choices=SCRIPTS, help="make: the script that FILE is a changed copy of")
    args = parser.parse_args()
    for path in [args.on, args.file if args.command == "make" else None]:
        if path and not path.is_file():
            parser.error(f"there is no file {path}")
    if args.command == "list":
        print_list()
    elif args.command == "rebase":
        rebase()
    elif args.command == "pairs":
        print(table_of_pairs(stacked()))
    elif args.name is None or (args.command == "make" and args.file is None):
        parser.error(f"{args.command} needs a name{' and a file' if args.command == 'make' else ''}")
    elif args.command == "make":
        text = args.file.read_text()
        script = args.of or nearest(text)
        if script is None:
            parser.error(f"{args.file} is no copy of {', '.join(SCRIPTS)}: --of, if it is")
        if text == (ROOT / script).read_text():
            parser.error(f"{args.file} is {script} as it stands")
        make(args.name, text, script)
    elif not (FOLDER / f"{args.name}.patch").exists():
        parser.error(f"no patch {args.name}; there are {', '.join(names())}; a NAME.py is used as it is")
    else:
        apply(args.name, args.file or Path(f"{args.name}_llm.py"), args.on)


if __name__ == "__main__":
    main()
