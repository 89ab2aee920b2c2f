"""Brings what the notes say about the code up to date with it: run after every change of a script.

    python notes/refresh.py             (with --check it changes nothing, and fails where it would)
    python notes/refresh.py --scripts   first copies what you changed in one script to the others

It writes the excerpts of walk.md: below `<!-- code: START -->` the loop of ppo_llm.py from the line that begins so to
the next such mark, below `<!-- function: NAME -->` a function of it. Below `<!-- flags: PART -->` of run/flags.md come
the flags of this part of the scripts' Args, and between the marks of variants.md what the heads of the patches say. A
line of README's loop follows that of grpo_llm.py which begins like it. A page whose mark or line has no match any
more is named and left as it is.

--scripts compares with HEAD, or with a commit that you name after it. A function, class or constant that was the same
in several scripts becomes so again. A new one goes to the scripts that use its name, behind the one that it follows.
What is in one script alone, or differs between them, such as `main`, and imports are left to you. It also says where
pages still have, in backticks, a name that is gone from all scripts.
"""

import ast
import itertools
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import variants

NOTES = Path(__file__).resolve().parent
ROOT = NOTES.parent
SCRIPTS = "ppo_llm.py", "grpo_llm.py", "ppo_llm_fsdp.py"
TAG = re.compile(r"# \[(\d+\.\d+)\]")
SECTION = re.compile(r"(?m)^## (\d+\.\d+) (.*)$")
LOOP = "    for iteration in range(first_iteration, args.total_iterations + 1):"  # the loop's first line


def titles():
    """{"4.3": (file name, title)} of the sections of all notes."""
    found = {}
    for path in sorted(NOTES.glob("[0-9]*.md")):
        found |= {number: (path.name, title) for number, title in SECTION.findall(path.read_text())}
    return found


def anchor(title):
    """The name that a heading has in a link, on GitHub and in the site."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def loop_lines():
    """The loop of ppo_llm.py's `main`, without its indentation."""
    lines = (ROOT / "ppo_llm.py").read_text().splitlines()
    first = lines.index(LOOP)
    last = next(i for i in range(first + 1, len(lines)) if re.match(r" {0,4}\S", lines[i]))
    return [line[4:] for line in lines[first:last]]


def function_source(name):
    """The source of a function of ppo_llm.py, without its docstring; Policy.forward is one inside of Policy."""
    source = (ROOT / "ppo_llm.py").read_text()
    node = ast.parse(source)
    for part in name.split("."):
        node = next((x for x in node.body if getattr(x, "name", None) == part), None)
        if node is None:
            raise SystemExit(f"ppo_llm.py has no {name} (any more)")
    lines, body = source.splitlines(), node.body[1:] if ast.get_docstring(node) else node.body
    own = [*lines[node.lineno - 1 : node.body[0].lineno - 1], *lines[body[0].lineno - 1 : node.end_lineno]]
    return textwrap.dedent("\n".join(own))


def with_excerpts(text):
    """A page with its excerpts. Marks of the code come in its order, and the first is the loop's first line."""
    lines, starts = loop_lines(), [0]
    for mark in re.findall(r"<!-- code: (.*) -->", text):
        found = (i for i in range(starts[-1], len(lines)) if lines[i].strip().startswith(mark))
        starts.append(next(found, None))
        if starts[-1] is None:
            raise SystemExit(f"the loop has no line (any more, or behind the last mark) that begins {mark!r}")
    ends = iter([*starts[2:], len(lines)])
    begins = iter(starts[1:])

    def code(match):
        part = "\n".join(lines[next(begins) : next(ends)]).strip("\n")
        return f"<!-- code: {match[1]} -->\n```python\n{part}\n```\n"

    def function(match):
        return f"<!-- function: {match[1]} -->\n```py\n{function_source(match[1])}\n```\n"

    text = re.sub(r"(?s)<!-- function: ([\w.]+) -->\n(```py\n.*?\n```\n)?", function, text)
    return re.sub(r"(?s)<!-- code: ([^\n]*) -->\n(```python\n.*?\n```\n)?", code, text)


def with_flags(text):
    """run/flags.md with its tables of the scripts' flags, from the lines of Args and the comments in them."""
    parts, scripts = {}, {"ppo_llm": "PPO", "grpo_llm": "GRPO", "ppo_llm_fsdp": "sharded"}
    for script, short in scripts.items():
        source = (ROOT / f"{script}.py").read_text()
        choices = dict(re.findall(r"(?m)^(\w+) = (Literal\[.*\])", source))
        bundled = dict(re.findall(r'(?m)^    "(\w+)": (.*),$', source.replace('f"{TINY}/', '"bundled ')))
        for part in re.split(r"\n    # ", re.search(r"(?s)class Args:\n(.*?)\n\n\n", source)[1])[1:]:
            title, *lines = part.strip().splitlines()
            for line in lines:
                name, kind, default, says = re.fullmatch(r"    (\w+): (.*?)(?: = (.*?))?  # (.*)", line).groups()
                default = {"None": "unset", "False": "off"}.get(default, (default or "required").strip('"'))
                if name in bundled:
                    default += f" ({bundled[name]})".replace('"', "").replace("()", '("")')
                if values := re.findall('"(.*?)"', choices.get(kind, kind)):
                    says += f" ({', '.join(values)})"
                parts.setdefault(title, {}).setdefault(name, [says]).append((short, default))

    def table(match):
        rows = "| flag | default | what it does | scripts |\n|---|---|---|---|\n"
        for name, (says, *found) in parts.pop(match[1]).items():
            defaults = {default: short for short, default in reversed(found)}
            shown = "; ".join(f"{short} {x}" if len(defaults) > 1 else x for x, short in defaults.items())
            of = "all" if len(found) == 3 else found[0][0]
            rows += f"| `--{name.replace('_', '-')}` | {shown} | {TAG.sub('', '# ' + says).strip('# ')} | {of} |\n"
        return f"<!-- flags: {match[1]} -->\n\n{rows}"

    text = re.sub(r"<!-- flags: (.*) -->\n(?:\n(?:\|.*\n)+)?", table, text)
    if parts:
        raise SystemExit(f"there is no mark for {', '.join(parts)}")
    return text


def item_of(path):
    """A variant's item in variants.md: the first sentence of what it does, its papers, and what it showed."""
    head, size = path.read_text().partition("\ndiff --git")[0], "a file"
    if path.suffix == ".patch":
        size = f"{sum(variants.changes(path.stem)[:2])} lines"
    else:
        head = "What: " + ast.get_docstring(ast.parse(head)).removeprefix("Reward: ")
    fields = dict(re.findall(r"(?ms)^(\w+): +(.*?)(?=^\w+: |\n\n|\Z)", head))
    papers = re.findall(r"\b\d{4}\.\d{5}\b", fields.get("Idea", ""))
    papers = [f"[{number}](https://arxiv.org/abs/{number})" for number in dict.fromkeys(papers)]
    what = re.split(r"(?<=[^.]\.) ", " ".join(fields["What"].split()))[0].rstrip(".")
    showed = " ".join(fields.get("Measured", "").split())
    says = f"{what}. {showed[:1].upper()}{showed[1:]}"
    says = re.sub(r"(?<!`)(--[a-z][\w-]*)", r"`\1`", says)
    for number, (page, title) in titles().items():
        link = f"[{number}]({page}#{anchor(f'{number} {title}')})"
        says = re.sub(rf"[Ss]ection {re.escape(number)}(?!\d)( of the notes)?", link, says)
    item = f"- `{path.stem}` ({', '.join([size, *papers])}) {says}"
    return textwrap.fill(item, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def with_variants(text):
    """variants.md with a list of the variants, from the heads of the patches and the docstrings of the files."""
    paths = sorted(variants.FOLDER.glob("*.p*"))
    found = ""
    for group in variants.GROUPS:
        items = "\n".join(item_of(path) for path in paths if variants.group_of(path) == group)
        found += f"**{group[0].upper()}{group[1:]}**\n\n{items}\n\n"
    first, last = "<!-- variants -->\n", "<!-- end of variants -->"
    return re.sub(rf"(?s){first}.*{last}", lambda _: f"{first}\n{found}{last}", text)


def with_loop(text):
    """README.md with the lines of its excerpt as they stand in grpo_llm.py, in its order, with README's comments."""
    (excerpt,) = re.findall(r"(?ms)^```python\n(.*?)^```$", text)
    script = [line.partition("  # ")[0].strip() for line in (ROOT / "grpo_llm.py").read_text().splitlines()]
    script = script[script.index(LOOP.strip()) :]
    result = ""
    ours = re.sub(r"(?ms)^<{7} .*?\n(.*?)^={7}\n.*?^>{7} .*?\n", r"\1", excerpt)  # if a merge has left its marks
    for line in ours.splitlines():
        code, mark, comment = line.partition("  # ")
        start = re.match(r".*?(?= = |\(|$)", code.strip())[0]
        found = [x for x in script if x == code.strip()] or [x for x in script if x.startswith(start)]
        if not found:
            raise SystemExit(f"the loop of grpo_llm.py has no line (any more) that begins {start!r}: mend it by hand")
        script = script[script.index(found[0]) + 1 :]
        result += code[: len(code) - len(code.lstrip())] + found[0] + mark + comment + "\n"
    return text.replace(excerpt, result)


def contents():
    """({path: what it should hold} of everything that this script writes, [why some of it cannot be written])"""
    writers = {NOTES / "walk.md": with_excerpts, NOTES / "run" / "flags.md": with_flags}
    writers |= {ROOT / "README.md": with_loop, NOTES / "variants.md": with_variants}
    result, wrong = {}, []
    for page, write in writers.items():
        try:
            result[page] = write(page.read_text())
        except SystemExit as error:
            wrong.append(f"{page.relative_to(ROOT)} is left as it is: {error}")
    return result, wrong


def definitions(source):
    """{name: text} of the functions, classes and constants of a module, with decorators and the comments above them."""
    lines, result = source.splitlines(), {}
    for node in ast.parse(source).body:
        names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        while lines[first - 1].startswith("#"):
            first -= 1
        result |= dict.fromkeys(names, "\n".join(lines[first : node.end_lineno]))
    return result


def with_shared(old, texts):
    """{script: text} with what one has changed since `old`, {script: its definitions}; and what is left to say."""
    now = {script: definitions(text) for script, text in texts.items()}
    texts, said = dict(texts), []
    for name in dict.fromkeys(name for script in old for name in old[script]):
        owners = [script for script in old if name in old[script]]
        before = old[owners[0]][name]
        same = [script for script in owners if old[script][name] == before]
        found = {now[script].get(name) for script in same} - {before}
        if len(same) > 1 and len(found) > 1:
            said.append(f"{name} has changed in several ways: left as it is")
        elif len(same) > 1 and found:
            (new,) = found
            for script in same:
                gone, put = (before, new) if new else (f"{before}\n\n\n", "")
                changed = texts[script].replace(gone, put, 1)
                if new or not is_used(name, changed):  # one may no longer need what another has
                    texts[script] = changed
    for script in old:
        for behind, name in itertools.pairwise(now[script]):
            for other in old if name not in old[script] else ():
                there = definitions(texts[other])
                if name not in there and is_used(name, texts[other]):
                    if behind not in there:
                        said.append(f"{other} uses {name}, and has no {behind} behind which it would stand")
                        continue
                    new = f"{there[behind]}\n\n\n{now[script][name]}"
                    texts[other] = texts[other].replace(there[behind], new, 1)
    for script in old:
        gone = old[script].keys() - definitions(texts[script]).keys()
        said += [f"{script} still uses {name}, which is gone" for name in sorted(gone) if is_used(name, texts[script])]
    return texts, said


def is_used(name, text):
    return re.search(rf"\b{name}\b", text)


def names_in(source):
    """What code calls things: functions, classes, variables, arguments, attributes."""
    kinds = "name", "id", "arg", "attr"
    return {getattr(node, kind) for node in ast.walk(ast.parse(source)) for kind in kinds if hasattr(node, kind)}


def still_named(old, new):
    """["notes/01-ppo.md, line 12: `gae`", ...]: what pages name in backticks, and the scripts' texts no longer do."""
    gone = set().union(*map(names_in, old)) - set().union(*map(names_in, new))
    found = []
    for page in sorted([*NOTES.rglob("*.md"), *ROOT.glob("*.md")]):
        for number, line in enumerate(page.read_text().splitlines(), 1) if page.name != "CHANGELOG.md" else ():
            codes = re.findall("`([^`]+)`", line)
            words = {word for code in codes for word in re.findall(r"\w+(?!\w*\.py)", code)}
            found += [f"{page.relative_to(ROOT)}, line {number}: `{name}`" for name in sorted(words & gone)]
    return found


def copy_shared(base):
    before, texts = {}, {}
    for script in SCRIPTS:
        before[script] = subprocess.check_output(["git", "show", f"{base}:{script}"], cwd=ROOT, text=True)
        texts[script] = (ROOT / script).read_text()
    new, said = with_shared({script: definitions(text) for script, text in before.items()}, texts)
    for script in SCRIPTS:
        if new[script] != texts[script]:
            (ROOT / script).write_text(new[script])
            said.insert(0, f"{script} follows")
    said += [f"no longer in a script: {place}" for place in still_named(before.values(), new.values())]
    print("\n".join(said))


if __name__ == "__main__":
    if "--scripts" in sys.argv[1:]:
        copy_shared(sys.argv[2] if len(sys.argv) > 2 else "HEAD")
    pages, wrong = contents()
    stale = {path: text for path, text in pages.items() if path.read_text() != text}
    if "--check" in sys.argv[1:] and stale:
        wrong.append(f"python notes/refresh.py would change {', '.join(path.name for path in stale)}")
    else:
        for path, text in stale.items():
            path.write_text(text)
    sys.exit("\n".join(wrong) or None)
