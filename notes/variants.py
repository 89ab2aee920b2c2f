"""Variants: patches that turn a script into another algorithm, in notes/variants/.

    python notes/variants.py list                      what there is: name, script, changed lines, what it does
    python notes/variants.py apply NAME [FILE]         the whole file, to read and run (default: NAME_llm.py)
    python notes/variants.py apply A,B,C [FILE]        ... with the changes of several, merged one after the other
    python notes/variants.py apply NAME FILE --on ppo_llm_fsdp.py     the change of another script, or of your copy
    python notes/variants.py make NAME FILE [--of grpo_llm.py]        FILE, your changed copy, as a patch (default: of
                                                       the script that it is nearest to)
    python notes/variants.py rebase [A,B]              the patches (default: all) that no longer fit their script, anew
    python notes/variants.py shard SCRIPT [FILE]       grpo_llm.py, or a copy, sharded (default: SCRIPT_fsdp.py)

Wherever a NAME stands, the path of a .patch of your own does, too. A patch is what `git diff` prints, below a head in
plain words: what changes, whose idea it is, the command, what we measured. It is applied as it stands, no line of its
context may differ. `rebase` looks in the history for the newest script that it fits, and merges three ways, so that
only true conflicts need a person: it puts them into the folder conflicts/. NAME.py in the same folder is a file that
needs no patch: a reward, or a script that imports another and replaces a function.

No command writes over a file with other contents, but for patches: `rebase` makes them anew, and `make` does so with
--replace, or if the first line of FILE says that it was made with that patch. The line also says of which script, by
its hash. If that isn't today's, `make` takes it from git's history and merges, so no patch takes a script back.
"""

import argparse
import ast
import hashlib
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notes" / "variants"
SCRIPTS = "ppo_llm.py", "grpo_llm.py", "ppo_llm_fsdp.py"
GROUPS = [  # by what a researcher wants to change; chapter 11 has the same
    "the loss",
    "the advantage",
    "the KL",
    "which prompts and responses count",
    "sampling, turns, tools",
    "speed, memory, precision",
    "the reward, as a file",
    "the stages before PPO",
]
HEAD = """What: (the change in one or two lines)
Idea: (paper, number)
Run:  python notes/variants.py apply {name} && accelerate launch {name}_llm.py
Measured: (numbers, seeds, beside what)

"""
# The first line of what we write: what is in it, and the script that it is of, with the hash that git gives its text.
PARENTS = re.compile(r"\A# (.+), by notes/variants\.py(?: of (\S+) (\w+))?\n")
# The lines of ours, of the base and of theirs in a conflict.
CONFLICT = re.compile(
    r"(?m)^<{7} .*\n((?:(?!\|{7} ).*\n)*)\|{7} .*\n((?:(?!={7}\n).*\n)*)={7}\n((?:(?!>{7} ).*\n)*)>{7} .*\n"
)


def git(*words, check=True, **options):
    done = subprocess.run(["git", *map(str, words)], capture_output=True, text=True, **options)
    if check and done.returncode:
        sys.exit(f"git {words[0]}: {done.stderr.strip() or done.stdout.strip()}")
    return done


def group_of(path):
    """What the line `Group:` of a patch or a file says. Without one, it is somebody's own, and no test looks at it."""
    found = re.search(r"(?m)^Group: *(.+)$", path.read_text("utf-8", errors="replace"))
    return found[1] if found else "yours"


def names():
    """The patches that the project publishes."""
    return sorted(path.stem for path in FOLDER.glob("*.patch") if group_of(path) in GROUPS)


def yours():
    return sorted(path.stem for path in FOLDER.glob("*.patch") if path.stem not in names())


def path_of(name):
    """Of a patch by its name, or by its path."""
    return Path(name) if str(name).endswith(".patch") else FOLDER / f"{name}.patch"


def read_patch(name):
    """(head, script it is of, the diff itself)"""
    head, mark, diff = path_of(name).read_text().partition("diff --git ")
    script = re.match(r"a/(\S+) ", diff)[1]
    return head, script, mark + diff


def garbled(path):
    """Why neither git nor Python takes the bytes of a file for text, in half a sentence, or None."""
    try:
        marked = path.read_text("utf-8").startswith("\ufeff")
    except UnicodeDecodeError:
        return "isn't UTF-8 (PowerShell's > writes UTF-16): save it as UTF-8, without a byte-order mark"
    return "begins with a byte-order mark: save it as UTF-8 without one" if marked else None


def unfit(name):
    """Why a file is no patch, in half a sentence, or None."""
    if flaw := garbled(path_of(name)):
        return flaw
    text = path_of(name).read_text()
    if re.search("(?m)^<{7} ", text):
        return "has the marks of a merge: take one side of it (`git checkout --ours`), then `rebase`"
    if not re.search(rf"(?m)^diff --git a/({'|'.join(SCRIPTS)}) ", text):
        return f"has no line `diff --git a/SCRIPT` of {', '.join(SCRIPTS)}"


def changes(name):
    """(lines taken away, lines added, hunks) of a patch."""
    body = read_patch(name)[2].partition("\n@@")[2]
    return tuple(len(re.findall(pattern, "\n@@" + body, re.M)) for pattern in (r"^-", r"^\+", r"^@@"))


def size(name):
    removed, added, hunks = changes(name)
    return f"-{removed} +{added} lines in {hunks} hunks"


def try_patch(name, base):
    """(`base`, a script's text, with the patch as it stands; None and git's complaint if it does not fit)"""
    _, script, diff = read_patch(name)
    return try_diff(script, diff, base)


def try_diff(script, diff, base):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, script)
        path.write_text(base)
        done = git("apply", "--verbose", "-", input=diff, cwd=folder, check=False)
        return (None if done.returncode else path.read_text()), done.stderr.strip()


def patched(name):
    """The text of the script with the patch; exits naming the hunk if it does not fit."""
    script = read_patch(name)[1]
    text, complaint = try_patch(name, (ROOT / script).read_text())
    if text is None:
        sys.exit(f"{name} does not fit {script}: {complaint}\n`rebase` may help")
    return text


def merged(ours, base, theirs, names=("script", "base", "variant")):
    """(text with both changes of `base`, number of conflicts). names: of the three, in the marks of a conflict."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("ours", "base", "theirs")]
        for path, text in zip(paths, (ours, base, theirs)):
            path.write_text(text)
        labels = [word for name in names for word in ("-L", name)]
        done = git("merge-file", "-p", "--diff3", *labels, *paths, check=False)
        if done.returncode > 127:
            sys.exit(f"git merge-file: {done.stderr.strip()}")
        return done.stdout, done.returncode


def places(text):
    """["line 12, in Args", ...]: where a merge has left both sides between its marks."""
    found = []
    for mark in re.finditer("(?m)^<{7} ", text):
        before = text[: mark.start()]
        number = before.count("\n") + 1
        if conflict := CONFLICT.match(text, mark.start()):
            # It may begin with lines that are the same on all sides, the head of a function among them.
            sides = [side.splitlines(keepends=True) for side in conflict.groups()]
            same = list(itertools.takewhile(lambda lines: len({*lines}) == 1, zip(*sides)))
            before += "".join(sides[0][: len(same) + 1])
        around = re.findall(r"(?m)^(?:def|class) (\w+)", before) or ["the head of the file"]
        found.append(f"line {number}, in {around[-1]}")
    return found


def keep_insertions(text):
    """(text with both sides where one of them only inserts lines before or behind those of the base, and the functions
    in which that was so). Where both insert at one spot, ours come first."""
    kept = []

    def both(conflict):
        ours, base, theirs = conflict.groups()
        for inserting, other in (theirs, ours), (ours, theirs):
            before, found, behind = f"\n{inserting}".partition(f"\n{base}")
            if found:
                kept.append(places(text[: conflict.end()])[-1].partition(", in ")[2])
                return f"{before}\n{other}{behind}".removeprefix("\n")
        return conflict[0]

    return CONFLICT.sub(both, text), kept


def difference(script, text, *options):
    """What `git diff` says of the script and a changed copy, whatever the user's settings; without the `index` line,
    in which every patch of a script would change whenever the script does."""
    with tempfile.TemporaryDirectory() as folder:
        for side, content in (("a", (ROOT / script).read_text()), ("b", text)):
            Path(folder, side).mkdir()
            Path(folder, side, script).write_text(content)
        options = "--no-index", "--no-prefix", "--no-color", "--no-ext-diff", *options
        found = git("diff", *options, f"a/{script}", f"b/{script}", cwd=folder, check=False).stdout
        return re.sub(r"(?m)^index .*\n", "", found, count=1)


def nearest(text):
    """The script with the fewest lines changed in the text; None if half of it is gone, which then is no copy."""
    found = []
    for script in SCRIPTS:
        counts = re.match(r"(\d+)\t(\d+)\t", difference(script, text, "--numstat"))
        added, removed = (int(counts[1]), int(counts[2])) if counts else (0, 0)
        found.append((added + removed, removed, script))
    _, removed, script = min(found)
    return script if removed < len((ROOT / script).read_text().splitlines()) / 2 else None


def hash_of(text):
    """The first digits of the name that git gives this text."""
    data = text.encode()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()[:16]


def first_line(parents, script):
    return f"# {parents}, by notes/variants.py of {script} {hash_of((ROOT / script).read_text())}\n"


def spots(name):
    """The phases of the loop and the functions that a patch changes; flags, set-up and log don't count."""
    script = read_patch(name)[1]
    hunks = {int(start) for start in re.findall(r"(?m)^@@ -(\d+)", difference(script, patched(name), "-U0"))}
    found, place, in_main = set(), "", False
    for number, line in enumerate((ROOT / script).read_text().splitlines(), 1):
        named = re.match(r" *(?:def|class) (\w+)", line)
        if re.match(r"\S", line):
            in_main = line.startswith("def main(")
            place = named[1] if named and not in_main else ""
        elif in_main and re.match(r"    \S", line):
            place = named[1] if named else ""
        elif in_main and (phase := re.match(r"        # (?:\d\. (?:Actor )?([\w-]+)|(One batch)|Log\.)", line)):
            place = f"the phase {phase[1] or phase[2]!r}" if phase[1] or phase[2] else ""
        if number in hunks:
            found.add(place)
    return found - {"", "Args"}


def make(name, text, script):
    """Writes the patch that turns `script` into `text`; an old patch's head stays."""
    path = path_of(name)
    head = read_patch(name)[0] if path.exists() else HEAD.format(name=path.stem)
    path.write_text(head + difference(script, text))
    print(f"{path}: of {script}, {size(name)}")


def write_new(path, text):
    """Whether `path` holds the text now: what is there and is something else stays."""
    if path.exists() and path.read_text() != text:
        return False
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return True


def apply(chosen, file, on=None):
    """Writes the script with the changes of these patches, or `on` with them; a true conflict is left for a person."""
    script = read_patch(chosen[0])[1]
    text, parents = (on or ROOT / script).read_text(), str(on or script)
    head = first_line("{}", script) if on is None else "# {}, by notes/variants.py\n"
    if found := PARENTS.match(text):
        text, parents, head = text[found.end() :], found[1], found[0].replace(found[1], "{}", 1)
    if places(text):
        sys.exit(f"{on} still has conflicts, at {'; '.join(places(text))}: write what both sides mean first")
    rest = list(chosen)
    while rest and not places(text):
        name = rest.pop(0)
        script = read_patch(name)[1]
        labels = parents, f"{script}, the base", Path(name).stem
        text, _ = merged(text, (ROOT / script).read_text(), patched(name), labels)
        text, kept = keep_insertions(text)
        if kept:
            print(f"{parents} and {labels[2]} insert in {', '.join(kept)}: kept one after the other, have a look")
        parents += f" + {labels[2]}"
    for one, other in itertools.combinations(chosen, 2):
        if both := spots(one) & spots(other):
            print(f"{one} and {other} both change {', '.join(sorted(both))}: does each still mean what it does alone?")
    text = head.format(parents) + text
    if not write_new(file, text):
        sys.exit(f"{file} is there and is something else: move it away, or name another file")
    if stuck := places(text):
        left = f"\nNot applied yet: {', '.join(rest)}." if rest else ""
        sys.exit(
            f"{labels[0]} and {labels[2]} change the same lines of {script}, in {len(stuck)} place(s) of {file}:\n    "
            + "\n    ".join(stuck)
            + "\nEach has the lines of both and, between ||||||| and =======, the script's: write what both mean,"
            + f" then run it.{left}"
        )
    say_written(file, parents)


def say_written(file, parents):
    print(f"wrote {file}: {parents}")
    if ROOT not in file.resolve().parents:
        print("It is outside the project, without the bundled model and task: run it with --model and --dataset")


def sharded(text, base, root=ROOT):
    """(a copy of `base`, ppo_llm.py or grpo_llm.py, with what ppo_llm_fsdp.py changes in ppo_llm.py; conflicts)"""
    own, ppo, on = ((root / name).read_text() for name in (base, "ppo_llm.py", "ppo_llm_fsdp.py"))
    if base == "grpo_llm.py":
        on, _ = merged(own, ppo, on)
    return merged(on, own, text, ("sharding", base, "copy"))


def shard(path, file):
    """Writes a script or a copy sharded."""
    text = path.read_text()
    base, parents = nearest(text), path.name
    if found := PARENTS.match(text):
        text, parents = text[found.end() :], found[1]
    if base is None:
        sys.exit(f"{path} is no copy of ppo_llm.py or grpo_llm.py: there is nothing that sharding could merge with")
    if base == "ppo_llm_fsdp.py" or "fully_shard(" in text:
        sys.exit(f"{path} shards its models already")
    if text == (ROOT / "ppo_llm.py").read_text():
        sys.exit(f"{path}, sharded, is ppo_llm_fsdp.py")
    text, kept = keep_insertions(sharded(text, base)[0])
    if kept:
        print(f"{path} and the sharding insert in {', '.join(kept)}: kept one after the other, have a look")
    if not write_new(file, f"# {parents} + ppo_llm_fsdp.py, by notes/variants.py\n{text}"):
        sys.exit(f"{file} is there and is something else: move it away, or name another file")
    if stuck := places(text):
        sys.exit(f"{path} and the sharding change the same lines, in {file}:\n    " + "\n    ".join(stuck))
    say_written(file, f"{parents} + ppo_llm_fsdp.py")


def merge_sides(name):
    """In or after a merge, makes a patch that both branches have changed anew, from each script with its own patch, and
    returns whether they merged without a conflict. (git would merge two hunks and leave the number of lines wrong.)"""
    path = path_of(name).resolve()
    merging = git("rev-parse", "-q", "--verify", "MERGE_HEAD", cwd=ROOT, check=False).returncode == 0
    ours, theirs = ("HEAD", "MERGE_HEAD") if merging else ("HEAD^1", "HEAD^2")
    base = git("merge-base", ours, theirs, cwd=ROOT, check=False).stdout.strip()
    if not base or ROOT not in path.parents:
        return False
    heads, scripts, texts = [], [], []
    for commit in ours, base, theirs:
        patch = git("show", f"{commit}:{path.relative_to(ROOT)}", cwd=ROOT, check=False).stdout
        head, mark, diff = patch.partition("diff --git ")
        if not mark:
            return False
        script = re.match(r"a/(\S+) ", diff)[1]
        heads.append(head)
        scripts.append(git("show", f"{commit}:{script}", cwd=ROOT).stdout)
        texts.append(try_diff(script, mark + diff, scripts[-1])[0])
    if None in texts:
        return False
    (head, *conflicts), (old, *more), (text, *most) = merged(*heads), merged(*scripts), merged(*texts)
    if any(conflicts + more + most):
        return False
    path.write_text(f"{head}diff --git a/{script} b/{script}\n")
    print("merged from both branches, ", end="")
    return make_from(name, script, old, text) is None


def unknown_names(name):
    """Names that a patched script uses and no longer has, as ruff finds them: a merge can't see that."""
    command = ["ruff", "check", "--select", "F821", "-"]
    said = subprocess.run(command, input=patched(name), capture_output=True, text=True).stdout
    return ", ".join(dict.fromkeys(re.findall(r"F821 Undefined name `(\w+)`", said)))


def rebase_one(name):
    """Makes a patch anew if it no longer fits. Returns what is left to a person, a sentence or None."""
    flaw = unfit(name)
    if flaw and "marks of a merge" in flaw and merge_sides(name):
        flaw = unfit(name)
    if flaw:
        return f"{path_of(name)} {flaw}"
    _, script, _ = read_patch(name)
    today = (ROOT / script).read_text()
    if try_patch(name, today)[0] is not None or merge_sides(name):
        return None
    # Of all branches: during a merge, a patch of the other side fits a script of the other side.
    for commit in git("log", "--all", "--full-history", "--format=%H", "--", script, cwd=ROOT).stdout.split():
        old = git("show", f"{commit}:{script}", cwd=ROOT).stdout
        theirs, _ = try_patch(name, old)
        if theirs is not None:
            break
    else:
        return f"{path_of(name)} fits no {script} that was ever committed (or this clone has no history)"
    return make_from(name, script, old, theirs)


def conflict_file(name):
    return Path("conflicts", f"{path_of(name).stem}_llm.py")


def make_from(name, script, old, theirs):
    """Makes the patch that does to the script what `theirs` does to `old`, an earlier form of it. Returns what is left
    to a person, a sentence or None.

    A conflict goes to a file in the folder conflicts/, with a first line from which `make` knows patch and script.
    """
    text, kept = keep_insertions(merged((ROOT / script).read_text(), old, theirs)[0])
    if kept:
        print(f"{script} and {path_of(name).stem} insert in {', '.join(kept)}: kept one after the other, have a look")
    if not places(text):
        make(name, text, script)
        return None
    file = conflict_file(name)
    if not write_new(file, first_line(f"{script} + {path_of(name).stem}", script) + text):
        return f"{file} is there and is something else: `make {name} {file}` if you have mended it, or move it away"
    return f"{file} has {len(places(text))} conflict(s): mend it, then `make {name} {file}`"


def rebase(chosen):
    left = []
    for name in chosen:
        left.append(rebase_one(name))
        if left[-1] is None and shutil.which("ruff") and (unknown := unknown_names(name)):
            left[-1] = f"{path_of(name)} fits, but uses {unknown}: `apply` it, mend the copy, `make`"
    sys.exit("\n".join(filter(None, left)) or None)


def describe(name):
    """A line of `list`: name, script, changed lines, and what it does in half a line."""
    script, lines = "file", ""
    if path_of(name).exists():
        text, script, _ = read_patch(name)
        lines, text = sum(changes(name)[:2]), re.split(r"\n(?=\w+:)", text)[0].removeprefix("What:")
        script = script.partition("_")[0]
    else:
        text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()))
        text = text.partition("\nGroup:")[0].removeprefix("Reward:")
    return f"  {name:17} {script:4} {lines:>3}  {textwrap.shorten(text, 88, placeholder=' ...')}"


def print_list():
    for group in [*GROUPS, *(["yours"] if yours() else [])]:
        print(f"{group}:")
        for path in sorted(FOLDER.glob("*.p*")):  # a file without a group helps another
            if group_of(path) == group and (path.suffix == ".patch" or group != "yours"):
                flaw = unfit(path.stem) if path.suffix == ".patch" else None
                print(f"  {path.name} {flaw}" if flaw else describe(path.stem))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("list", "apply", "make", "rebase", "shard"))
    parser.add_argument("name", nargs="?")
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--on", type=Path, help="apply: another script, or a copy that shares the changed parts")
    parser.add_argument("--of", choices=SCRIPTS, help="make: the script that FILE is a changed copy of")
    parser.add_argument("--replace", action="store_true", help="make: write over the patch of this name")
    args = parser.parse_args()
    given = Path(args.name) if args.command == "shard" and args.name else None
    for path in [args.on, args.file if args.command == "make" else given]:
        if path and not path.is_file():
            parser.error(f"there is no file {path}")
        if path and garbled(path):
            parser.error(f"{path} {garbled(path)}")
    chosen = args.name.split(",") if args.name and args.command in ("apply", "rebase") else []
    for name in chosen:
        if not path_of(name).exists():
            parser.error(f"no patch {name}; there are {', '.join(names() + yours())}; a NAME.py is used as it is")
        if args.command == "apply" and unfit(name):
            parser.error(f"{path_of(name)} {unfit(name)}")
    if args.command == "list":
        print_list()
    elif args.command == "rebase":
        rebase(chosen or [*names(), *yours()])
    elif args.command == "shard" and given:
        shard(given, args.file or Path(f"{given.stem}_fsdp.py"))
    elif args.name is None or (args.command == "make" and args.file is None):
        parser.error(f"{args.command} needs a name{' and a file' if args.command == 'make' else ''}")
    elif args.command == "make":
        text = args.file.read_text()
        if places(text):
            parser.error(f"{args.file} still has conflicts, at {'; '.join(places(text))}")
        path, parents = path_of(args.name), PARENTS.match(text)
        if path.exists():
            if unfit(args.name):
                parser.error(f"{path} {unfit(args.name)}")
            made_with_it = parents and parents[1] == f"{read_patch(args.name)[1]} + {path.stem}"
            if not made_with_it and not args.replace:
                parser.error(f"{path} is there, and {args.file} isn't made with it alone: another name, or --replace")
        text = PARENTS.sub("", text, count=1)
        script = args.of or nearest(text)
        if script is None:
            parser.error(f"{args.file} is no copy of {', '.join(SCRIPTS)}: --of, if it is")
        if text == (ROOT / script).read_text():
            parser.error(f"{args.file} is {script} as it stands")
        old = (ROOT / script).read_text()
        if parents and parents[2] == script and parents[3] != hash_of(old):
            found = git("cat-file", "-p", parents[3], check=False, cwd=ROOT)
            if found.returncode:
                parser.error(
                    f"{args.file} is of another {script} ({parents[3]}), which git doesn't know: apply it anew"
                )
            old = found.stdout
        if args.file.resolve() == conflict_file(args.name).resolve():
            args.file.unlink()  # it is used now, and would be taken for that of the next branch
        if left := make_from(args.name, script, old, text):
            sys.exit(left)
        if args.file.exists():  # a used conflict file doesn't
            print(f"does it compute the same on two processes? python benchmarks/check_copy.py {args.file}")
    else:
        apply(chosen, args.file or Path("_".join(Path(name).stem for name in chosen) + "_llm.py"), args.on)


if __name__ == "__main__":
    main()
