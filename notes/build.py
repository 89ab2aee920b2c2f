"""Builds the notes as a web site: scripts beside the walk, notes, differences, variants, search.

    pip install -e '.[notes]' && python notes/build.py        then open site/index.html

Nothing comes from the network, neither here nor in the pages: formulas become MathML, search works from files. What is
no Python is in notes/web/.
"""

import argparse
import ast
import functools
import html
import json
import logging
import re
import shutil
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from difflib import SequenceMatcher
from pathlib import Path

import variants
from refresh import DIFFS, LOOP, NOTES, ROOT, TAG, anchor, titles

try:
    from latex2mathml.converter import convert
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.structure.toc import AnchorLink
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer
except ImportError:
    sys.exit("notes/build.py needs mkdocs, pygments and latex2mathml: pip install -e '.[notes]'")

SCRIPTS = {"ppo_llm": "PPO", "grpo_llm": "GRPO and its family", "ppo_llm_fsdp": "PPO, sharded"}
TINY = NOTES / "tiny_ppo.py"  # has a page like a script's, beside chapter 1
WEB = NOTES / "web"
VARIANTS = sorted({path.stem for path in variants.FOLDER.iterdir() if path.suffix in (".patch", ".py")})
HEAD = "---\nsearch: {exclude: true}\n---\n\n"
LINK = re.compile(r"\]\(([^)#\s:]+)")
SECTION = re.compile(r'(?s)<h2 id="([^"]*)">((\d+\.\d+) .*?)(?:<a class="headerlink".*?</a>)?</h2>(.*?)(?=<h2|\Z)')
DIVIDER = re.compile(r"(?m)^# --- ([\w ]+?)(?:\. .*)? -{9,}$")
SHORT = 6  # lines: a text of the walk that is about fewer is shown together with the next


def mathml(tex, display):
    """A formula for the browser. latex2mathml's choice and spacing of operators is brought nearer to TeX's."""
    tex = re.sub(r"(begin|end)\{(?:aligned|split)\}", r"\1{align*}", tex.strip())
    source = convert(tex, display=display).replace(' xmlns="http://www.w3.org/1998/Math/MathML"', "")
    math = ET.fromstring(source)
    for row in math.iter():
        if row.tag in ("msub", "msup", "msubsup") and row[0].text in ("∑", "∏", "max", "min"):  # limits go below
            row.tag = {"msub": "munder", "msup": "mover", "msubsup": "munderover"}[row.tag]
            row[0].set("movablelimits", "true")
        if row.tag == "msup" and row[1].text == "\N{PRIME}":  # few fonts have a prime for that place
            row.tag, row[1].tag = "mrow", "mo"
            row[1].attrib |= {"lspace": "0", "rspace": "0"}
        if row.tag == "mrow" and [x.text for x in row] == [","]:  # 1{,}000
            row[0].set("rspace", "0")
        for at, x in reversed([*enumerate(row)]):
            if x.tag in ("msub", "msup", "msubsup") and x[0].get("minsize"):  # \big)^2
                row.insert(at, x[0])  # browsers stretch it well only by itself
                x[0] = ET.Element("mspace", height="1em")
        before = None
        for x, after in zip(row, [*row[1:], None]):
            operand_before = before is not None and (before.tag != "mo" or before.text in ")]|∇")
            if x.text == "~":
                x.tag, x.text = "mo", "\N{TILDE OPERATOR}"
            elif x.text in ("|", "/"):
                x.attrib |= {"lspace": "0", "rspace": "0"}
            elif x.text in ("\N{MINUS SIGN}", "+", "±") and not operand_before:
                x.set("form", "prefix")
            elif x.text in ("log", "exp", "max", "min") and row.tag in ("math", "mrow", "mtd"):
                x.tag = "mo"
                spaced = after is not None and after.tag != "mo"
                x.attrib |= {"lspace": "0.17em" * operand_before or "0", "rspace": "0.17em" * spaced or "0"}
            before = before if x.tag == "mspace" else x
    return ET.tostring(math, encoding="unicode")


def breakable(line):
    """A line of code as HTML. Where a phone may break long names."""
    long = re.search(r"\S{38}", html.unescape(re.sub("<.*?>", "", line)))
    return re.sub(r'<span class="[op]">[.(]</span>', r"\g<0><wbr>", line) if long else line


def block(match):
    """A block of code on a page, each line with the indentation of what a narrow window wraps.

    That is further than the line's own, and in a plain text that has columns below the second one.
    """
    text, columns = "", not re.search('<span class="(?!whole)', match[2])
    for line in match[2].removesuffix("\n").split("\n"):
        plain = html.unescape(re.sub("<.*?>", "", line))
        column = re.match(r" *\S+(?: \S+)*  +", plain) if columns else None
        hang = len(column[0]) if column and len(column[0]) < 25 else len(re.match(r"(\.\.\.|[-+])? *", plain)[0]) + 4
        text += f'<span class="line" style="--hang:{hang}">{breakable(line)}\n</span>'
    return match[1] + text


@functools.cache
def code_lines(source, page):
    """[(indentation, HTML)] of a script's lines: colours, calls that lead to definitions, tags that lead to notes."""
    notes, coloured = titles(), highlight(source, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).split("\n")
    defined = {x.name: x.lineno for x in ast.parse(source).body if isinstance(x, ast.FunctionDef | ast.ClassDef)}

    def call(match):
        at = defined.get(match[1])
        return f'<a class="call" href="{page}#L{at}">{match[1]}</a>' if at else match[0]

    def tag(match):
        if match[1] not in notes:
            return match[0]
        file, title = notes[match[1]]
        address = f"{Path(file).stem}.html#{anchor(f'{match[1]} {title}')}"
        return f'# <a class="tag" href="{address}" title="{html.escape(title)}">{match[1]}</a>'

    result = []
    for plain, line in zip(source.splitlines(), coloured):
        line = breakable(re.sub(r" -{9,}(?=</span>)", r'</span><span class="c1 rule">\g<0>', line))
        line = re.sub(r'"c1">(?=# [^<]{1,22}</span>)', '"c1 whole">', line)
        line = re.sub(r'<span class="n">(\w+)</span>(?=<span class="p">\()', call, line)
        line = re.sub(r"^(<span class=\"\w+\">)?( +)", r"\1<i>\2</i>", TAG.sub(tag, line))
        result.append((len(plain) - len(plain.lstrip()), line))
    return result


def row(line, numbers, kind="", identity=""):
    """A line of code with its numbers [(page, line)]."""
    indent, text = line
    links = "".join(
        f'<a class="number" href="{page}#L{at}" tabindex="-1">{at}</a>' if at else '<a class="number"></a>'
        for page, at in numbers
    )
    return f'<span class="line{kind}"{identity} style="--i:{indent}">{links}{text}</span>'


def hunks(diff, old, new):
    """The hunks of a diff as HTML, and the numbers of the lines that it adds; old and new are (page, code_lines)."""
    result, added = "", set()
    for a, b, hunk in re.findall(r"(?ms)^@@ -(\d+)\S* \+(\d+).*?\n(.*?)(?=^@@ |\Z)", diff):
        a, b, rows = int(a), int(b), []
        for sign in (line[:1] or " " for line in hunk.splitlines()):
            line, kind = (new[1][b - 1], " plus") if sign == "+" else (old[1][a - 1], " minus" * (sign == "-"))
            numbers = [(old[0], a * (sign != "+")), (new[0], b * (sign != "-"))]
            rows.append(row(line, numbers, kind, f' data-sign="{sign}"'))
            added |= {b} if sign == "+" else set()
            a, b = a + (sign != "+"), b + (sign != "-")
        result += f'<div class="code diff highlight">{"".join(rows)}</div>'
    return result, added


def difference_page(name):
    """The walk's section about a difference between scripts, as Markdown."""
    old, new = DIFFS[name]
    text = re.search(rf"(?ms)^## What `{new}.py` does differently\n(.*?)(?=^## |\Z)", (NOTES / "walk.md").read_text())[
        1
    ]
    diff = (NOTES / f"{name}.diff").read_text()
    counts = [len(re.findall(rf"(?m)^\{sign}(?!\{sign}\{sign})", diff)) for sign in "-+"]
    return (
        f"# {SCRIPTS[old]} → {SCRIPTS[new]}\n\n`{old}.py` → `{new}.py`: {counts[0]} lines go, {counts[1]} come.\n{text}"
    )


def with_numbers(content, name):
    """HTML of that page, its hunks now with the numbers of their lines in both scripts."""
    sides = [(f"{x}.html", code_lines((ROOT / f"{x}.py").read_text(), f"{x}.html")) for x in DIFFS[name]]

    def numbered(match):
        return hunks(html.unescape(re.sub("<.*?>", "", match[1])), *sides)[0]

    return re.sub(r'(?s)<div class="[^"]*highlight"><pre>(.*?)</pre></div>', numbered, content)


def variant_page(name):
    """The head of a variant as Markdown."""
    text, patch = f"# Variant: `{name}`\n\n", (variants.FOLDER / f"{name}.patch").exists()
    for key, value in re.findall(r"(?m)^(\w+): *(.*(?:\n +.*)*)", variants.read_patch(name)[0] if patch else ""):
        value = re.sub(r"\n +(?!for )", " ", value)
        text += f"**{key}.** {value}\n\n" if key != "Run" else f"```\n{value}\n```\n\n"
    if patch:
        return f"{text}[What it changes](#changes), [the whole file](#file)\n"
    return text + (variants.FOLDER / f"{name}.py").read_text().splitlines()[0].strip('"')


def variant_code(name):
    """What is below the head, as HTML: the difference and the whole file, and the file that needs no patch."""
    path, page, text = variants.FOLDER / f"{name}.py", f"variant-{name}.html", ""
    if (variants.FOLDER / f"{name}.patch").exists():
        _, script, diff = variants.read_patch(name)
        base, new = f"{script[:-3]}.html", code_lines(variants.patched(name), page)
        changes, added = hunks(diff, (base, code_lines((ROOT / script).read_text(), base)), (page, new))
        rows = [row(x, [(page, k)], " plus" * (k in added), f' id="L{k}"') for k, x in enumerate(new, 1)]
        text = f'<h2 id="changes">What it changes in <code>{script}</code></h2>{changes}'
        text += f'<h2 id="file">The whole file</h2><div class="code highlight">{"".join(rows)}</div>'
    if path.exists():
        identity = "" if text else ' id="L{}"'
        rows = [row(x, [], identity=identity.format(k)) for k, x in enumerate(code_lines(path.read_text(), page), 1)]
        text += f"<h2><code>notes/variants/{name}.py</code></h2>"
        text += f'<div class="code highlight">{"".join(rows)}</div>'
    return text


def walk_parts(content):
    """The walk's HTML, cut up: its beginning, [(start of a line of the loop, title, text)], {(diff, key): sentence}."""
    pieces = re.split(r'(?s)<!-- (code|hunk) ?(\w*): (.*?) -->\s*<div class="[^"]*highlight">.*?</div>', content)
    begin, title, excerpts, sentences = re.search(r"(?s)</h1>(.*?)<h2", pieces[0])[1], "", [], {}
    for before, kind, diff, key, after in zip(pieces[::4], pieces[1::4], pieces[2::4], pieces[3::4], pieces[4::4]):
        title = [title, *re.findall(r'<h2>(.*?)(?:<a class="headerlink|</h2>)', before)][-1]
        if kind == "code":
            excerpts.append((key, title, after.split("<h2")[0]))
        elif key != "*":
            sentences[diff, key] = before.rsplit("</h2>")[-1]
    return begin, excerpts, sentences


def sections(source):
    """[(line, title, [(line, name, [(line, tag)])])]: the parts of a script, what each defines, the tags in it."""
    found = [(1, "Docstring, imports, flags", [])]
    found += [(source.count("\n", 0, x.start()) + 1, x[1], []) for x in DIVIDER.finditer(source)]
    for x in ast.parse(source).body:
        if isinstance(x, ast.FunctionDef | ast.ClassDef):
            lines = enumerate(source.splitlines()[x.lineno - 1 : x.end_lineno], x.lineno)
            tags = [(number, tag) for number, line in lines for tag in TAG.findall(line)]
            [part for part in found if part[0] < x.lineno][-1][2].append((x.lineno, x.name, tags))
    return found


def outline_of(defined, notes):
    """What a part of a script defines, with the tags in it."""
    tags = '<li><a class="tag" href="#L{}">{}</a> {}</li>'
    return "".join(
        f'<p><a href="#L{at}"><code>{what}</code></a></p>'
        f"<ul>{''.join(tags.format(*spot, notes[spot[1]][1].split(' ', 1)[1]) for spot in spots)}</ul>"
        for at, what, spots in defined
    )


def pane_parts(name, walk, notes):
    """[(first line, {title: its line}, texts)] of a script: what the pane shows while the lines from there on are read.

    In `main` that is the walk. What it says of an excerpt of ppo_llm.py stands beside the same lines of the other
    scripts, below what it says of the hunks there. Elsewhere it is an outline with the tags.
    """
    source, (begin, excerpts, sentences), parts = (ROOT / f"{name}.py").read_text(), walk, {}
    for line, title, defined in sections(source):
        text = begin
        if "main" not in [what for _, what, _ in defined]:
            text = outline_of(defined, notes)
        parts[line] = [title, text]
    base = (ROOT / "ppo_llm.py").read_text().splitlines()
    changes = SequenceMatcher(None, base, source.splitlines(), autojunk=False).get_opcodes()
    at = base.index(LOOP)
    of = '<p class="places">Of <a href="ppo_llm.html">ppo_llm.py</a>:</p>' * (name != "ppo_llm")
    for start, title, text in excerpts:
        at = next(i for i in range(at, len(base)) if base[i].strip().startswith(start))
        kind, a, _, b, _ = next(x for x in changes if x[1] <= at < x[2])
        if kind != "delete":  # of what is replaced, the last part takes the place
            parts[b + 1 + (at - a) * (kind == "equal")] = [title, of + text]
    unlike = {}
    for (diff, key), sentence in sentences.items():
        if DIFFS[diff][1] == name:
            hunk = next(x for x in re.split(r"(?m)^(?=@@ )", (NOTES / f"{diff}.diff").read_text()) if key in x)
            start, context = re.match(r"@@ -\S+ \+(\d+).*\n((?: .*\n)*)", hunk).groups()
            part = max(line for line in parts if line <= int(start) + context.count("\n"))
            unlike[part] = unlike.get(part, f'<a href="{diff}.html">Unlike ppo_llm.py:</a>') + sentence
    for line, text in unlike.items():
        parts[line][1] = f'<div class="differs">{text}</div>{parts[line][1]}'
    joined = []
    for line, (title, text) in sorted(parts.items()):
        if not joined or line - joined[-1][0] >= SHORT:
            joined.append((line, {}, []))
        joined[-1][2].append(text if title in joined[-1][1] else f"<h2>{title}</h2>{text}")
        joined[-1][1].setdefault(title, line)
    return joined


def script_page(path, parts, notes):
    """(HTML, table of contents) of a script: its lines on the left, on the right the pane with what is said of them."""
    name, source = path.stem, path.read_text()
    page = f"{name}.html"
    rows = [row(x, [(page, k)], identity=f' id="L{k}"') for k, x in enumerate(code_lines(source, page), 1)]
    used = sorted({tag for tag in TAG.findall(source) if tag in notes})
    loop = source[: source.index("    for iteration in ")].count("\n") + 1
    ends = [line for line, _, _ in parts[1:]] + [len(rows) + 1]
    code = "".join(f'<div class="part">{"".join(rows[a - 1 : b - 1])}</div>' for (a, _, _), b in zip(parts, ends))
    texts = "".join(f'<section class="text" hidden>{"".join(text)}</section>' for _, _, text in parts)
    for tag in used:
        link, title, text, _ = notes[tag]
        texts += f'<section class="note" data-note="{tag}" hidden><h2><a href="{link}">{title}</a></h2>{text}</section>'
    contents = AnchorLink(f"{name}.py", "", 1)
    outline = sections(source)
    for (line, title, defined), (after, _, _) in zip(outline, [*outline[1:], (0, 0, 0)]):
        contents.children.append(AnchorLink(title, f"L{line}", 2))
        contents.children[-1].children = [AnchorLink(what, f"L{at}", 3) for at, what, _ in defined]
        if "main" in [what for _, what, _ in defined]:
            phases = {
                title: at for _, titles, _ in reversed(parts) for title, at in titles.items() if loop <= at < after
            }
            links = [AnchorLink(title, f"L{at}", 4) for title, at in sorted(phases.items(), key=lambda item: item[1])]
            contents.children[-1].children[-1].children = links
    return (
        f"""<div class="beside" data-loop="L{loop}"><div class="code script highlight">{code}</div>
<aside class="pane" aria-label="Notes" tabindex="-1"><div class="bar"><button class="fold"></button>
<button class="back" hidden>back to the walk</button></div><div class="body">{texts}</div></aside></div>
<script src="pane.js"></script>""",
        [contents],
    )


def with_links(text, source, pages, docs):
    """Markdown with links that fit the site. Files are copied; `pages` has, and gets, what becomes a page."""

    def link(match):
        path = (source.parent / match[1]).resolve()
        if not path.is_file() or ROOT not in path.parents:
            return match[0]
        place = path.relative_to(ROOT)
        if path.suffix == ".md":
            pages.setdefault(path, "-".join(place.parts))
        if path in pages:
            return f"]({pages[path]}"
        copy = f"files/{place}" + ".txt" * (path.suffix not in (".png", ".svg", ".jpg"))
        (docs / copy).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, docs / copy)
        return f"]({copy}"

    return LINK.sub(link, text)


def write_pages(docs):
    """Fills the folder that mkdocs reads, all pages side by side. Returns its navigation."""
    first, second, *others = sorted(NOTES.glob("[0-9]*.md"))
    how = NOTES / "guide.md", NOTES / "real-run.md"
    chapters = [first, NOTES / "walk.md", second, WEB / "sliders.md", *others, *how]
    pages = {WEB / "home.md": "index.md", NOTES / "README.md": "notes.md", ROOT / "README.md": "project.md"}
    pages |= {path: path.name for path in chapters} | {ROOT / f"{name}.py": f"{name}.md" for name in SCRIPTS}
    pages |= {NOTES / f"{name}.diff": f"{name}.md" for name in DIFFS} | {TINY: "tiny_ppo.md"}
    (docs / "tiny_ppo.md").write_text(f"{HEAD}# The core alone: `tiny_ppo.py`\n")
    pages |= {path: f"variant-{path.stem}.md" for path in variants.FOLDER.iterdir() if path.suffix in (".patch", ".py")}
    for name, title in SCRIPTS.items():
        (docs / f"{name}.md").write_text(f"{HEAD}# {title}: `{name}.py`\n")
    for name in DIFFS:
        (docs / f"{name}.md").write_text(HEAD + with_links(difference_page(name), NOTES / "walk.md", pages, docs))
    for name in VARIANTS:
        (docs / f"variant-{name}.md").write_text(HEAD + variant_page(name))
    while missing := [path for path in pages if path.suffix == ".md" and not (docs / pages[path]).exists()]:
        for path in missing:
            text = with_links(path.read_text(), path, pages, docs)
            title = f"# {path.parent.name}: {path.stem}\n\n" * ("# " not in text)
            (docs / pages[path]).write_text(title + text)
    for path in WEB.glob("*.[cj]s*"):
        shutil.copy(path, docs)
    learn = [NOTES / "README.md", *chapters]
    learn = [{re.search("(?m)^# (.*)", x.read_text())[1].replace("`", ""): pages[x]} for x in learn]
    learn.insert(2, {"The core alone: tiny_ppo.py": pages[TINY]})  # after chapter 1
    return [
        {"Home": "index.md"},
        {"Learn": learn},
        {"Scripts": [{title: f"{name}.md"} for name, title in SCRIPTS.items()]},
        {"Differences": [{f"{SCRIPTS[old]} → {SCRIPTS[new]}": f"{name}.md"} for name, (old, new) in DIFFS.items()]},
        {"Variants": [{name: f"variant-{name}.md"} for name in VARIANTS]},
        {"The project": "project.md"},
    ]


def on_config(config):
    """mkdocs calls this and the next two. Headings are called the same as on GitHub."""
    config.mdx_configs["toc"] = {"permalink": True, "slugify": lambda text, _: anchor(text)}


def on_page_content(html_, page, **_):
    if page.url in ("index.html", "project.html"):
        page.meta["hide"] = ["navigation"]  # each is alone under its tab

    def formula(match):
        before, tag, tex, after = match.groups()
        math = mathml(html.unescape(tex)[2:-2], "block" if tag == "div" else "inline")
        return f'<span class="whole">{before}{math}{after}</span>' if before or after else math

    def plain(entries):
        for entry in entries:
            entry.title = re.sub(
                r"\\\((.*?)\\\)", lambda x: re.sub("<.*?>", "", mathml(html.unescape(x[1]), "inline")), entry.title
            )
            plain(entry.children)

    def variant(match):
        return f'<td><a href="variant-{match[1]}.html">{match[0][4:]}</a>' if match[1] in VARIANTS else match[0]

    def cell(match):  # how wide it wants to be
        return f'<td style="--length:{len(re.sub("<.*?>", "", match[1]))}">{match[1]}</td>'

    def flags(match):  # the dashes stay together
        return re.sub(r"(?<![\w-])--?[\w(]+", r'<span class="whole">\g<0></span>', match[0])

    plain(page.toc)
    html_ = re.sub(r'(?s)(\(?)<(div|span) class="arithmatex">(.*?)</\2>([.,:;?)]*)', formula, html_)
    html_ = re.sub(r"<td><code>(\w+)</code>", variant, html_)
    html_ = re.sub(r"(?s)<td>(.*?)</td>", cell, html_)
    html_ = re.sub(r"(?s)<code>.*?</code>", flags, html_)
    html_ = re.sub(r"(?s)(<pre><span></span><code>)(.*?)(?=</code>)", block, html_)
    name = page.url.removesuffix(".html")
    if name in DIFFS:
        html_ = with_numbers(html_, name)
    if name.startswith("variant-"):
        html_ += variant_code(name.removeprefix("variant-"))
    if name == "02-gae":
        html_ += '<p><a href="sliders.html">One response with sliders</a>: discount, lambda, values and clip.</p>'
    return re.sub(r'<img [^>]*src="([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', html_)


def on_env(env, config, files):
    """All pages have their HTML: notes and walk go into the pages of scripts, definitions into the search."""
    pages, notes = {file.page.url: file.page for file in files.documentation_pages()}, {}

    def elsewhere(text, url):
        """HTML of a page as a part of another."""
        text = re.sub(r' id="[^"]*"', "", text).replace('href="#', f'href="{url}#')
        return text.replace("<img ", '<img loading="lazy" ')

    for url, page in pages.items():
        for identity, title, number, text in SECTION.findall(page.content):
            notes[number] = (f"{url}#{identity}", title, elsewhere(text, url), re.sub("<.*?>", "", title))
    search = next(plugin for name, plugin in config.plugins.items() if name.endswith("search")).search_index
    walk, seen = walk_parts(elsewhere(pages["walk.html"].content, "walk.html")), set()
    parts = [
        (line, {title: line}, [f"<h2>{title}</h2>{outline_of(defined, notes)}"])
        for line, title, defined in sections(TINY.read_text())
    ]
    content, pages["tiny_ppo.html"].toc = script_page(TINY, parts, notes)
    pages["tiny_ppo.html"].content += content
    search.entries.append({"location": "tiny_ppo.html", "title": "tiny_ppo.py: the core alone", "text": ""})
    for name in VARIANTS:
        search.entries.append({"location": f"variant-{name}.html", "title": f"Variant: {name}", "text": ""})
    for name, title in SCRIPTS.items():
        content, pages[f"{name}.html"].toc = script_page(ROOT / f"{name}.py", pane_parts(name, walk, notes), notes)
        pages[f"{name}.html"].content += content
        search.entries.append({"location": f"{name}.html", "title": f"{name}.py: {title}", "text": ""})
        source = (ROOT / f"{name}.py").read_text()
        for x in ast.parse(source).body:
            text = isinstance(x, ast.FunctionDef | ast.ClassDef) and ast.get_source_segment(source, x)
            if text and text not in seen:  # what scripts share is found once
                seen.add(text)
                end = x.body[0].end_lineno if isinstance(x, ast.FunctionDef) else x.end_lineno  # after the docstring
                head = html.escape("\n".join(source.splitlines()[x.lineno - 1 : end]))
                where = f"{name}.html#L{x.lineno}"
                search.entries.append({"location": where, "title": x.name, "text": f"<pre>{head}</pre>"})


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "site", help="folder of the site, emptied first")
    output, start = parser.parse_args().output.resolve(), time.time()
    logging.basicConfig(level=logging.WARNING)
    colours = {"light": ("default", "white"), "dark": ("slate", "black")}
    with tempfile.TemporaryDirectory() as folder:
        docs = Path(folder, "docs")
        docs.mkdir()
        settings = {
            "site_name": "Clean LLM RL",
            "docs_dir": str(docs),
            "site_dir": str(output),
            "nav": write_pages(docs),
            "theme": {
                "name": "material",
                "font": False,
                "features": ["navigation.tabs", "navigation.footer", "toc.integrate", "toc.follow", "search.highlight"],
                "palette": [
                    {
                        "media": f"(prefers-color-scheme: {name})",
                        "scheme": scheme,
                        "primary": primary,
                        "toggle": {"icon": "material/brightness-6", "name": "light or dark"},
                    }
                    for name, (scheme, primary) in colours.items()
                ],
            },
            "plugins": [{"search": {"separator": r"""[\s\-,:;()\[\]"`=]+"""}}, "offline"],
            "hooks": [__file__],
            "markdown_extensions": [
                {"pymdownx.arithmatex": {"generic": True}},
                "pymdownx.highlight",
                "pymdownx.superfences",
                "md_in_html",
            ],
            "extra_css": ["style.css"],
            "extra": {"generator": False, "polyfills": ["search.js?iframe-worker"]},
            "validation": {"omitted_files": "ignore", "anchors": "ignore"},  # tests/test_site.py checks all links
        }
        Path(folder, "mkdocs.yml").write_text(json.dumps(settings))  # JSON is YAML
        build(load_config(f"{folder}/mkdocs.yml"))
    for name in "404.html", "sitemap.xml", "sitemap.xml.gz":  # they want to know the address
        (output / name).unlink(missing_ok=True)
    print(f"{output}/index.html: {time.time() - start:.1f} s")


if __name__ == "__main__":
    main()
