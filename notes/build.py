"""Builds the notes as a web site: the notes, every script beside its notes, the diffs between the scripts, search.

    pip install -e '.[notes]' && python notes/build.py        then open site/index.html

Nothing is fetched from the network, neither here nor by the pages: mathematics becomes MathML, search works from files.
"""

import html
import json
import re
import shutil
import tempfile
from pathlib import Path

import markdown
from latex2mathml.converter import convert
from mkdocs.commands.build import build
from mkdocs.config import load_config
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

NOTES = Path(__file__).resolve().parent
ROOT = NOTES.parent
SCRIPTS = {"ppo_llm": "PPO", "grpo_llm": "GRPO and its family", "ppo_llm_fsdp": "PPO, sharded"}
DIFFS = {"ppo_to_grpo": "PPO → GRPO", "ppo_to_ppo_fsdp": "PPO → sharded PPO"}
TAG = re.compile(r"# \[(\d+\.\d+)\]")
EXTENSIONS = ["tables", "fenced_code", "toc", "attr_list", "pymdownx.arithmatex", "pymdownx.superfences"]
OPTIONS = {"pymdownx.arithmatex": {"generic": True}}

STYLE = """
.md-grid { max-width: 90rem; }
.md-typeset math { font-size: 1.05em; }
.md-typeset math[display=block] { overflow-x: auto; overflow-y: hidden; padding: .3em 0; }
.beside { display: grid; grid-template-columns: minmax(0, 7fr) minmax(0, 5fr); gap: 0 1.2rem; }
.beside > .code { border-right: 1px solid var(--md-default-fg-color--lightest); }
.beside > .code pre { margin: 0; padding: 0 .4rem; overflow-x: auto; font-size: .62rem; line-height: 1.45; }
.beside > .code .highlight { margin: 0; }
.beside > .note { font-size: .68rem; }
.beside > .note > .held { position: sticky; top: 3rem; max-height: calc(100vh - 4rem); overflow-y: auto; }
.beside > .note h2 { margin: .2rem 0; font-size: .85rem; }
.beside > .tagged { background: var(--md-code-bg-color); }
.beside .linenos { color: var(--md-default-fg-color--light); padding-right: .6em; user-select: none; }
@media (max-width: 60em) {
  .beside { display: block; }
  .beside > .code { border: 0; }
  .beside > .note > .held { position: static; max-height: 24rem; border-left: 3px solid var(--md-accent-fg-color);
    padding-left: .6rem; margin: .5rem 0; }
}
"""


def with_mathml(page):
    """HTML of arithmatex -> the same with MathML, which browsers render themselves."""

    def replace(match):
        source = html.unescape(match[2])
        return convert(source[2:-2].strip(), display="block" if match[1] == "div" else "inline")

    return re.sub(r'<(div|span) class="arithmatex">(.*?)</\1>', replace, page, flags=re.DOTALL)


def sections():
    """{"2.3": (file name, title, Markdown of the section)} of all notes."""
    result = {}
    for path in sorted(NOTES.glob("[0-9]*.md")):
        for part in re.split(r"(?m)^(?=## )", path.read_text())[1:]:
            title, text = part.split("\n", 1)
            number = re.match(r"## (\d+\.\d+) ", title)
            if number:
                result[number[1]] = (path.name, title[3:], text)
    return result


def anchor(title):
    return markdown.extensions.toc.slugify(title, "-")


def rows(source):
    """[(first line, lines, tag or None)]: a script cut where a tag or a definition at the top level begins."""
    lines, cuts = source.splitlines(), []
    for number, line in enumerate(lines):
        tag = TAG.search(line)
        if (
            tag
            or number == 0
            or (re.match(r"(def|class|@|# -----)", line) and not re.match("(@|#)", lines[number - 1]))
        ):
            cuts.append((number, tag and tag[1]))
    ends = [number for number, _ in cuts[1:]] + [len(lines)]
    return [(begin, lines[begin:end], tag) for (begin, tag), end in zip(cuts, ends)]


def script_page(name, title, notes):
    """A page with the script on the left and, beside each tagged block, its note."""
    formatter, cells = HtmlFormatter(linenos="inline", nowrap=False), []
    for begin, lines, tag in rows((ROOT / f"{name}.py").read_text()):
        formatter.linenostart = begin + 1
        code = highlight("\n".join(lines), PythonLexer(stripnl=False), formatter)
        note = ""
        if tag is not None:
            file, heading, text = notes[tag]
            text = re.sub(r"\]\((?!http|#)([^)]*?)\.md", r"](../\1/index.html", text)
            text = text.replace("](figures/", "](../figures/")
            body = with_mathml(markdown.markdown(text, extensions=EXTENSIONS, extension_configs=OPTIONS))
            link = f"../{file.removesuffix('.md')}/index.html#{anchor(heading)}"
            note = f'<div class="held" id="note-{tag}-{begin}"><h2><a href="{link}">{heading}</a></h2>{body}</div>'
        kind = " tagged" if tag else ""
        cells.append(f'<div class="code{kind}">{code}</div><div class="note">{note}</div>')
    head = f"---\nhide: [navigation, toc]\n---\n\n# {title}: `{name}.py` beside its notes\n\n"
    return head + '<div class="beside">' + "".join(cells).replace("\n\n", "\n&#8203;\n") + "</div>\n"


def main():
    notes = sections()
    with tempfile.TemporaryDirectory() as folder:
        docs = Path(folder, "docs")
        shutil.copytree(NOTES, docs, ignore=shutil.ignore_patterns("*.py", "*.diff", "__pycache__", "*.txt"))
        (docs / "README.md").rename(docs / "index.md")
        for name, title in SCRIPTS.items():
            (docs / f"{name}.md").write_text(script_page(name, title, notes))
        for name, title in DIFFS.items():
            (docs / f"{name}.md").write_text(
                f"# {title}\n\n```diff\n{(NOTES / name).with_suffix('.diff').read_text()}```\n"
            )
        (docs / "beside.css").write_text(STYLE)
        chapters = {path.stem: re.match("# (.*)", path.read_text())[1] for path in sorted(docs.glob("[0-9]*.md"))}
        pages = {"Notes": chapters, "Scripts beside their notes": SCRIPTS, "Differences": DIFFS}
        nav = [{group: [{title: f"{name}.md"} for name, title in part.items()]} for group, part in pages.items()]
        settings = {
            "site_name": "Clean LLM RL",
            "docs_dir": str(docs),
            "site_dir": str(ROOT / "site"),
            "nav": [{"Home": "index.md"}, *nav],
            "theme": {"name": "material", "font": False, "features": ["navigation.tabs", "navigation.footer"]},
            "plugins": ["search", "offline"],
            "hooks": [__file__],
            "markdown_extensions": [name for name in EXTENSIONS if name != "pymdownx.arithmatex"]
            + [{"pymdownx.arithmatex": OPTIONS["pymdownx.arithmatex"]}],
            "extra_css": ["beside.css"],
        }
        colours = (
            ("(prefers-color-scheme: light)", "default", "slate"),
            ("(prefers-color-scheme: dark)", "slate", "default"),
        )
        settings["theme"]["palette"] = [
            {"media": media, "scheme": scheme, "toggle": {"icon": "material/brightness-6", "name": f"to {other}"}}
            for media, scheme, other in colours
        ]
        config_file = Path(folder, "mkdocs.yml")
        config_file.write_text(json.dumps(settings))  # JSON is YAML
        build(load_config(str(config_file)))


def on_page_content(html, **_):
    """mkdocs calls it for every page."""
    return with_mathml(html)


if __name__ == "__main__":
    main()
