"""Builds the notes as a web site: notes, scripts beside the notes, differences, variants, search.

    pip install -e '.[notes]' && python notes/build.py        then open site/index.html

Nothing comes from the network, neither here nor in the pages. The settings are in mkdocs.yml, which names this file as
a hook: `mkdocs build` and `mkdocs serve` work, too. What is no Python is in notes/web/.
"""

import argparse
import ast
import html
import json
import logging
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import variants
from refresh import LOOP, NOTES, ROOT, TAG, anchor, titles

try:
    from math_core import LatexToMathML
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.structure.files import File
except ImportError:
    sys.exit("notes/build.py needs mkdocs and math-core: pip install -e '.[notes]'")

WEB, WALK = NOTES / "web", NOTES / "walk.md"
SCRIPTS = {ROOT / "ppo_llm.py": "PPO", ROOT / "grpo_llm.py": "GRPO and its family"}
SCRIPTS |= {ROOT / "ppo_llm_fsdp.py": "PPO, sharded", NOTES / "tiny_ppo.py": "The core alone"}
VARIANTS = {path.stem: variants.group_of(path) for end in ("py", "patch") for path in variants.FOLDER.glob(f"*.{end}")}
NAMES = {NOTES / "README.md": "notes.md", ROOT / "README.md": "project.md", WEB / "home.md": "index.md"}
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


def script_page(path):
    """A script in parts, and beside each what `on_env` puts there: the walk, and the notes that its tags name."""
    lines, page = path.read_text().splitlines(), f"# {SCRIPTS[path]}: `{path.name}`\n"
    if LOOP in lines:
        page += "\nThe flags come first, [the training loop](#an-iteration-begins) is further down.\n"
    found = parts(path.read_text())
    for first, after in zip(found, [*list(found)[1:], len(lines) + 1]):
        heading, mark = found[first]
        if lines[first - 1] == LOOP:
            heading += "\n\nYou are in the training loop. [To the top of the file](#docstring-imports-flags)"
        code = "\n".join(lines[first - 1 : after - 1]).rstrip()
        tags = " ".join(dict.fromkeys(TAG.findall(code)))
        page += f'\n{heading}\n\n<div class="beside" data-search-exclude markdown>\n\n'
        page += f'````python linenums="{first}"\n{code}\n````\n\n'
        page += f"<aside data-search-exclude><!-- notes {tags} walk {html.escape(mark)} --></aside>\n\n</div>\n"
    return page


def code(text, language):
    return f'<div data-search-exclude markdown>\n\n````{language} linenums="1"\n{text}\n````\n\n</div>\n\n'


def with_diffs(text):
    """differences.md with what `git diff` says of two scripts, whatever the user's settings, below its marks."""
    command = ["git", "diff", "--no-index", "--no-color", "--no-ext-diff", "--patience", "--src-prefix=a/"]

    def diff(match):
        scripts = f"{match[1]}.py", f"{match[2]}.py"
        shown = subprocess.run([*command, "--dst-prefix=b/", *scripts], cwd=ROOT, capture_output=True, text=True).stdout
        return f"## From `{scripts[0]}` to `{scripts[1]}`\n\n{code(shown, 'diff')}"

    return re.sub(r"<!-- diff (\w+) (\w+) -->", diff, text)


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


def notebook_page(path):
    """A notebook as a page, with what its cells have printed and drawn."""
    page = ""
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        page += f"{source}\n\n" if cell["cell_type"] == "markdown" else f"```python\n{source}\n```\n\n"
        for output in cell.get("outputs", []):
            drawn = "".join(output.get("data", {}).get("image/png", "")).replace("\n", "")
            printed = "".join(output.get("text", ""))
            page += f"![output](data:image/png;base64,{drawn})\n\n" if drawn else f"```\n{printed}\n```\n\n"
    return page


# --- The site --------------------------------------------------------------------------------------------------------


def under(tab):
    """Paths of the pages under a tab, from its patterns in mkdocs.yml."""
    return [path.resolve() for pattern in tab["pages"] for path in sorted(NOTES.glob(pattern))]


def name_of(path):
    """What a page is called: all are side by side, whatever their folder."""
    if path.parent == variants.FOLDER:
        return f"variant-{path.stem}.md"
    own = path.parent in (ROOT, NOTES, WEB, NOTES / "run")
    return NAMES.get(path) or (f"{path.stem}.md" if own else "-".join(path.relative_to(ROOT).parts))


def on_config(config):
    """mkdocs calls this and the functions below, in their order."""
    config.nav = [{name: [name_of(path) for path in under(tab)]} for name, tab in config.extra["tabs"].items()]
    for group in [*variants.GROUPS, "yours"]:
        pages = [{name: f"variant-{name}.md"} for name in sorted(VARIANTS) if VARIANTS[name] == group]
        config.nav[2]["Change"].append({group[0].upper() + group[1:].replace("ours", "ours, and examples"): pages})
    if "/OWNER/" in config.repo_url:
        config.repo_url = config.edit_uri = None
    version = re.search('(?m)^version = "(.*)"', (ROOT / "pyproject.toml").read_text())[1]
    config.copyright = f"Version {version}, built on {date.today():%-d %B %Y}"


def on_files(files, config):
    """What is under the tabs, the variants, and what they link to, which is not searched."""
    heads = {path: f"search: {{boost: {tab['boost']}}}" for tab in config.extra["tabs"].values() for path in under(tab)}
    heads |= {path: "search: {boost: 0.2}" for path in sorted(variants.FOLDER.iterdir()) if path.stem in VARIANTS}
    heads |= {WEB / "home.md": "hide: [navigation]", ROOT / "README.md": "title: The project"}
    waiting = [*heads]

    def link(source, match):
        path = (source.parent / match[1]).resolve()
        if not path.is_file() or ROOT not in path.parents:
            return match[0]
        if path.suffix == ".md" or path in heads:
            waiting.append(path)
            return f"]({name_of(path)}"
        name = f"files/{path.relative_to(ROOT)}" + ".txt" * (path.suffix not in SHOWN)
        if not files.get_file_from_path(name):
            files.append(File.generated(config, name, abs_src_path=str(path)))
        return f"]({name}"

    for file in list(files.documentation_pages()):
        files.remove(file)
    for path in waiting:
        if not files.get_file_from_path(name := name_of(path)):  # a variant of two files has one page
            page = variant_page(path.stem) if path.parent == variants.FOLDER else path.read_text()
            page = script_page(path) if path in SCRIPTS else page
            page = notebook_page(path) if path.suffix == ".ipynb" else page
            page = with_diffs(page) if path == NOTES / "differences.md" else page
            page = LINK.sub(lambda match, path=path: link(path, match), page)
            head = heads.get(path, "search: {exclude: true}")
            files.append(File.generated(config, name, content=f"---\n{head}\n---\n\n{page}"))
            files.get_file_from_path(name).edit_uri = str(path.relative_to(ROOT))
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
    content, found = re.subn(r"<!-- sliders: (\w+) -->", r'<div class="try" data-view="\1"></div>', content)
    content += '<script src="response.js"></script><script src="sliders.js"></script>' * bool(found)
    return re.sub(r'<p>(<img [^>]*src="([^":]+)"[^>]*>)', r'<p><a href="\2">\1</a>', TAG.sub(tag, content))


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

    for path in SCRIPTS:
        page, of = pages[f"{path.stem}.html"], "" if path.stem == "ppo_llm" else "<p><em>Of ppo_llm.py:</em></p>"

        def beside(match, of=of):
            said = walk.get(html.unescape(match[2]))
            return (of + said if said else "") + "".join(notes[number] for number in match[1].split())

        page.content = re.sub(r"<!-- notes ([\d. ]*) walk (.*?) -->", beside, page.content)


def on_post_page(output, **_):
    """Nobody asks GitHub for stars when a page is opened."""
    return output.replace(' data-md-component="source"', "")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "site", help="folder of the site, emptied first")
    output = parser.parse_args().output.resolve()
    logging.basicConfig(level=logging.WARNING)
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(output)))
    print(f"{output}/index.html")


if __name__ == "__main__":
    main()
