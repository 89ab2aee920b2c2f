"""Builds the notes as a web site: notes, scripts beside the notes, differences, variants, search.

    pip install -e '.[notes]' && python notes/build.py        then open site/index.html

Nothing comes from the network, neither here nor in the pages. The settings are in mkdocs.yml, which names this file as
a hook: `mkdocs build` and `mkdocs serve` work, too. What is no Python is in notes/web/.
"""

import argparse
import ast
import html
import logging
import re
import sys
import time
from pathlib import Path

import variants
from refresh import DIFFS, LOOP, NOTES, ROOT, TAG, anchor, titles

try:
    from math_core import LatexToMathML
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.structure.files import File
except ImportError:
    sys.exit("notes/build.py needs mkdocs and math-core: pip install -e '.[notes]'")

SCRIPTS = {"ppo_llm": "PPO", "grpo_llm": "GRPO and its family", "ppo_llm_fsdp": "PPO, sharded"}
TINY = NOTES / "tiny_ppo.py"  # has a page like a script's, after chapter 1
WEB, WALK, DIFFERENCES = NOTES / "web", NOTES / "walk.md", NOTES / "differences.md"
VARIANTS = sorted({path.stem for path in variants.FOLDER.iterdir() if path.suffix in (".patch", ".py")})
UNSEARCHED = "---\nsearch: {exclude: true}\n---\n\n"  # at the head of a page
SHOWN = ".png", ".svg", ".jpg", ".html"  # by a browser; other files become .txt
DIVIDER = re.compile(r"# --- ([\w ]+?)(?:\. .*)? -{9,}$")
LINK = re.compile(r"\]\(([^)#\s:]+)")
FOLLOWED = re.compile(r"<!-- code: (.*?) -->\s*<div.*?</div>", re.DOTALL)  # code of the walk, in HTML
SECTION = re.compile(r'(?s)<h2 id="[^"]*">((\d+\.\d+) .*?)(?:<a class="headerlink".*?</a>)?</h2>(.*?)(?=<h2|\Z)')


# --- Pages made of other files ---------------------------------------------------------------------------------------


def parts(source):
    """{number of a line: (heading, mark of the walk)}: where a script's page is cut.

    That is at its parts, at its functions and classes, and where the walk has something to say about the loop.
    """
    lines, found = source.splitlines(), {1: ("## Docstring, imports, flags", "")}
    for number, line in enumerate(lines, 1):
        if divider := DIVIDER.match(line):
            found[number] = f"## {divider[1]}", ""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[first] = f"### `{node.name}`", ""
    at = lines.index(LOOP) if LOOP in lines else len(lines)
    for title, mark in re.findall(r"(?m)^(?:## (.*)\n\n)?<!-- code: (.*) -->", WALK.read_text()):
        for number in range(at, len(lines)):
            if lines[number].strip().startswith(mark):
                found[number + 1], at = (f"#### {title}" if title else "", mark), number
                break
    return dict(sorted(found.items()))


def script_page(path, title):
    """A script in parts, and beside each what `on_env` puts there: the walk, and the notes that its tags name."""
    lines, page = path.read_text().splitlines(), f"# {title}: `{path.name}`\n"
    found = parts(path.read_text())
    for first, after in zip(found, [*list(found)[1:], len(lines) + 1]):
        heading, mark = found[first]
        code = "\n".join(lines[first - 1 : after - 1]).rstrip()
        tags = " ".join(dict.fromkeys(TAG.findall(code)))
        page += f'\n{heading}\n\n<div class="beside" data-search-exclude markdown>\n\n'
        page += f'````python linenums="{first}"\n{code}\n````\n\n'
        page += f"<aside data-search-exclude><!-- notes {tags} walk {html.escape(mark)} --></aside>\n\n</div>\n"
    return page


def difference_page(name):
    """The section of differences.md about two scripts."""
    old, new = DIFFS[name]
    text = re.search(rf"(?ms)^## What `{new}.py` does differently\n(.*?)(?=^## |\Z)", DIFFERENCES.read_text())[1]
    return f"# {SCRIPTS[old]} → {SCRIPTS[new]}\n\n`{old}.py` → `{new}.py`:\n{text}"


def code(text, language):
    return f'<div data-search-exclude markdown>\n\n````{language} linenums="1"\n{text}\n````\n\n</div>\n\n'


def variant_page(name):
    """What a variant's patch says of it, its difference, and the whole file; or its file, where that needs no patch."""
    path, page = variants.FOLDER / f"{name}.py", f"# Variant: `{name}`\n\n"
    if path.with_suffix(".patch").exists():
        head, script, diff = variants.read_patch(name)
        for key, value in re.findall(r"(?m)^(\w+): *(.*(?:\n +.*)*)", head):
            value = re.sub(r"\n +(?!for )", " ", value)
            page += f"**{key}.** {value}\n\n" if key != "Run" else f"```\n{value}\n```\n\n"
        page += f"## What it changes in `{script}`\n\n{code(diff, 'diff')}"
        page += f"## The whole file\n\n{code(variants.patched(name), 'python')}"
    if path.exists():
        page += f"## `notes/variants/{name}.py`\n\n{code(path.read_text(), 'python')}"
    return page


# --- The site --------------------------------------------------------------------------------------------------------


def chapters():
    """Paths of the pages under the tab Learn, in their order."""
    first, second, *others = sorted(NOTES.glob("[0-9]*.md"))
    start = NOTES / "README.md", first, TINY, WALK, second, WEB / "sliders.md"
    return [*start, *others, NOTES / "guide.md", NOTES / "real-run.md", NOTES / "stuck.md"]


def on_config(config):
    """mkdocs calls this and the functions below, in their order."""
    learn = [{re.search("(?m)^# (.*)", x.read_text())[1].replace("`", ""): x.name} for x in chapters() if x != TINY]
    learn[0] = {"The notes": "notes.md"}
    learn.insert(2, {"The core alone: tiny_ppo.py": "tiny_ppo.md"})
    config.nav = [
        {"Home": "index.md"},
        {"Learn": learn},
        {"Scripts": [{title: f"{name}.md"} for name, title in SCRIPTS.items()]},
        {"Differences": [{f"{SCRIPTS[old]} → {SCRIPTS[new]}": f"{name}.md"} for name, (old, new) in DIFFS.items()]},
        {"Variants": [{name: f"variant-{name}.md"} for name in VARIANTS]},
        {"The project": "project.md"},
    ]


def on_files(files, config):
    """All pages side by side, whatever their folder. What they link to comes with them."""
    alone = "---\nhide: [navigation]\n---\n\n"  # under its tab
    pages = {WEB / "home.md": ("index.md", alone), ROOT / "README.md": ("project.md", alone)}
    pages |= {path: (f"{path.stem}.md", "") for path in chapters()} | {NOTES / "README.md": ("notes.md", "")}
    texts = {TINY: script_page(TINY, "The core alone")}
    texts |= {ROOT / f"{name}.py": script_page(ROOT / f"{name}.py", title) for name, title in SCRIPTS.items()}
    texts |= {NOTES / f"{name}.diff": difference_page(name) for name in DIFFS}
    pages |= {path: (f"{path.stem}.md", UNSEARCHED if path.suffix == ".diff" else "") for path in texts}
    pages[DIFFERENCES] = f"{next(iter(DIFFS))}.md", UNSEARCHED  # two pages here: links lead to the first
    for path in variants.FOLDER.iterdir():
        if path.stem in VARIANTS:
            pages[path] = f"variant-{path.stem}.md", ""
            texts[path] = variant_page(path.stem)
    copies = {}

    def link(source, match):
        path = (source.parent / match[1]).resolve()
        if not path.is_file() or ROOT not in path.parents:
            return match[0]
        place = path.relative_to(ROOT)
        if path.suffix == ".md" and path not in pages:
            pages[path] = "-".join(place.parts), UNSEARCHED
            waiting.append(path)
        if path in pages:
            return f"]({pages[path][0]}"
        copies[path] = f"files/{place}" + ".txt" * (path.suffix not in SHOWN)
        return f"]({copies[path]}"

    for file in [file for file in files if file.src_uri in ("home.md", "sliders.md")]:
        files.remove(file)
    waiting, done = list(pages), set()
    for path in waiting:
        name, head = pages[path]
        if name not in done:  # a variant of two files has one page
            base = WALK if path.suffix == ".diff" else path
            text = LINK.sub(lambda match, base=base: link(base, match), texts.get(path) or path.read_text())
            files.append(File.generated(config, name, content=head + text))
            done.add(name)
    for path, name in copies.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_content(content, **_):
    """Formulas become MathML, tags in code, names of variants in tables, and pictures become links."""
    notes, converter = titles(), LatexToMathML()

    def formula(match):
        tex = html.unescape(match[2])[2:-2]
        return converter.convert_with_local_state(tex, displaystyle=match[1] == "div")

    def tag(match):
        if match[1] not in notes:
            return match[0]
        file, title = notes[match[1]]
        address = f"{Path(file).stem}.html#{anchor(f'{match[1]} {title}')}"
        return f'# <a class="tag" href="{address}" title="{html.escape(title)}">{match[1]}</a>'

    def variant(match):
        return f'<td><a href="variant-{match[1]}.html">{match[0][4:]}</a>' if match[1] in VARIANTS else match[0]

    content = re.sub(r'(?s)<(div|span) class="arithmatex">(.*?)</\1>', formula, content)
    content = re.sub(r"<td><code>(\w+)</code>", variant, content)
    return re.sub(r'<img [^>]*src="([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', TAG.sub(tag, content))


def on_env(env, files, **_):
    """All pages have their HTML: the walk and the sections of the notes go beside the scripts."""
    pages, notes = {file.page.url: file.page for file in files.documentation_pages()}, {}

    def elsewhere(text, url):
        """HTML of a page as a part of another."""
        return re.sub(r' id="[^"]*"', "", text).replace('href="#', f'href="{url}#')

    for url, page in pages.items():
        for title, number, text in SECTION.findall(page.content):
            notes[number] = f"<details><summary>{title}</summary>{elsewhere(text, url)}</details>"
    pieces = FOLLOWED.split(elsewhere(pages["walk.html"].content, "walk.html"))
    walk = {mark: text.split("<h2")[0] for mark, text in zip(pieces[1::2], pieces[2::2])}

    for name in (*SCRIPTS, TINY.stem):
        page, of = pages[f"{name}.html"], "" if name == "ppo_llm" else "<p><em>Of ppo_llm.py:</em></p>"

        def beside(match, of=of):
            said = walk.get(html.unescape(match[2]))
            return (of + said if said else "") + "".join(notes[number] for number in match[1].split())

        page.content = re.sub(r"<!-- notes ([\d. ]*) walk (.*?) -->", beside, page.content)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "site", help="folder of the site, emptied first")
    output, start = parser.parse_args().output.resolve(), time.time()
    logging.basicConfig(level=logging.WARNING)
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(output)))
    print(f"{output}/index.html: {time.time() - start:.1f} s")


if __name__ == "__main__":
    main()
