"""Variants: patches that turn a script into another algorithm, in notes/variants/.

    python notes/variants.py list                      what there is: name, script, changed lines, what it does
    python notes/variants.py apply NAME [FILE]         the whole file, to read and run (default: NAME_llm.py)
    python notes/variants.py apply NAME FILE --on ppo_llm_fsdp.py     the same change of another script, by a merge
    python notes/variants.py make NAME FILE [--of grpo_llm.py]        FILE, your changed copy, as a patch
    python notes/variants.py rebase                    every patch anew, after a script has changed

A patch is what `git diff` prints, below a head in plain words: what changes, whose idea it is, the command, what we
measured. It is applied as it stands, no line of its context may differ. Its `index` line names the script it was made
of, as git stores it: `rebase` finds that old script in the repository's history and merges three ways, so that only
true conflicts need a person. NAME.py in the same folder is a file that needs no patch: a reward, or a script that
imports another and replaces a function.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notes" / "variants"
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


def merged(ours, base, theirs):
    """(text with both changes of `base`, number of conflicts)"""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("script", "base", "variant")]
        for path, text in zip(paths, (ours, base, theirs)):
            path.write_text(text)
        done = git("merge-file", "-p", *paths, check=False)
        return done.stdout, done.returncode


def make(name, text, script, head=None):
    """Writes the patch that turns `script` into `text`; an old patch's head stays."""
    path, base = FOLDER / f"{name}.patch", (ROOT / script).read_text()
    if head is None:
        head = read_patch(name)[0] if path.exists() else HEAD.format(name=name)
    with tempfile.TemporaryDirectory() as folder:
        for side, content in (("a", base), ("b", text)):
            Path(folder, side).mkdir()
            Path(folder, side, script).write_text(content)
        options = "--no-index", "--no-prefix", "--full-index", "--no-color", "--no-ext-diff"
        diff = git("diff", *options, f"a/{script}", f"b/{script}", cwd=folder, check=False).stdout
    path.write_text(head + diff)
    print(f"{path.relative_to(ROOT)}: {size(name)}")


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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("list", "apply", "make", "rebase"))
    parser.add_argument("name", nargs="?")
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--on", type=Path, help="apply: another script that shares the changed parts")
    parser.add_argument("--of", default="grpo_llm.py", help="make: the script that FILE is a changed copy of")
    args = parser.parse_args()
    if args.command == "list":
        for path in sorted(FOLDER.glob("*.py")):
            print(f"{path.stem:16} a file of its own: {path.read_text().splitlines()[0][3:]}")
        for name in names():
            head, script, _, _ = read_patch(name)
            print(f"{name:16} {script:12} {size(name):26} {head.splitlines()[0][6:]}")
    elif args.command == "rebase":
        rebase()
    elif args.name is None or (args.command == "make" and args.file is None):
        parser.error(f"{args.command} needs a name{' and a file' if args.command == 'make' else ''}")
    elif args.command == "make":
        known = (FOLDER / f"{args.name}.patch").exists()
        make(args.name, args.file.read_text(), read_patch(args.name)[1] if known else args.of)
    elif not (FOLDER / f"{args.name}.patch").exists():
        parser.error(f"no patch {args.name}; there are {', '.join(names())}; a NAME.py is used as it is")
    else:
        text, file = patched(args.name), args.file or Path(f"{args.name}_llm.py")
        if args.on:
            text, conflicts = merged(args.on.read_text(), (ROOT / read_patch(args.name)[1]).read_text(), text)
            if conflicts:
                sys.exit(f"{args.name} and {args.on} change the same lines, in {conflicts} place(s)")
        file.write_text(text)
        print(file)


if __name__ == "__main__":
    main()
