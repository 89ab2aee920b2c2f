"""Builds the notes as a web site: every script beside its notes, the notes, the differences between scripts, search.

    pip install -e '.[notes]' && python notes/build.py        then open site/index.html

Nothing comes from the network, neither here nor in the pages: formulas become MathML, search works from files.
"""

import argparse
import ast
import html
import json
import logging
import re
import shutil
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.commands.build import build
from mkdocs.config import load_config
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from refresh import DIFFS, NOTES, ROOT, TAG, anchor, titles

SCRIPTS = {"ppo_llm": "PPO", "grpo_llm": "GRPO and its family", "ppo_llm_fsdp": "PPO, sharded"}
INTRODUCTION = "Numbered lines have notes. A click shows one; on a wide screen they follow what you read."
HEAD = "---\nhide: [{}]\nsearch: {{exclude: true}}\n---\n\n"
LINK = re.compile(r"\]\(([^)#\s:]+)")
SECTION = re.compile(r'(?s)<h2 id="([^"]*)">((\d+\.\d+) .*?)(?:<a class="headerlink".*?</a>)?</h2>(.*?)(?=<h2|\Z)')
TOP = re.compile(r"(?:def|class) (\w+)|@|# -----|if |[A-Z_]+ =")  # what begins at the left edge of a script

STYLE = """
.md-grid { max-width: 68rem; }
.md-main__inner:has(.code) { max-width: none; margin-top: .5rem; }
.md-typeset pre > code { font-size: .62rem; }
.md-content__inner > :is(p, ul, ol) { max-width: 36rem; }
.md-typeset h2:has(+ .code) { font-size: .8rem; margin: 1.2rem 0 .2rem; }
.md-typeset h1:has(~ .beside) { font-size: 1.2rem; margin-bottom: .6rem; }
.md-typeset math { font-family: "Latin Modern Math", "STIX Two Math", "Cambria Math", "Noto Sans Math",
  "DejaVu Math TeX Gyre", math; font-size: 1.08em; }
.md-typeset math[display=block] { overflow: auto hidden; padding: .2em 0; }
.md-typeset mtd[columnalign=left] { text-align: left; }
.md-typeset :is(td, th) code { word-break: normal; overflow-wrap: normal; }
.md-typeset p.places { font-size: .85em; color: var(--md-default-fg-color--light); }

.code { font: .6rem/1.5 var(--md-code-font-family); color: var(--md-code-fg-color); --step: 1; --gutter: 2.1rem; }
.code .line { display: block; position: relative; min-height: 1.5em; white-space: pre-wrap; overflow-wrap: anywhere;
  padding-left: calc(var(--gutter) + (var(--i, 0) * var(--step) + 4) * 1ch); scroll-margin-top: 30vh;
  text-indent: calc((var(--i, 0) * var(--step) + 4) * -1ch); }
.code .line:target, .line:has(> .tag[aria-current]) { background: var(--md-accent-fg-color--transparent); }
.code .number { position: absolute; left: 0; width: 1.7rem; text-align: right; text-indent: 0; user-select: none;
  color: var(--md-default-fg-color--lighter); }
.code a.call { color: inherit; text-decoration: underline dotted var(--md-default-fg-color--lighter); }
.md-typeset a.tag { font-weight: 700; padding: 0 .2em; border-radius: .2em; background: var(--md-code-bg-color);
  color: var(--md-typeset-a-color); }
.md-typeset a.tag:hover, .md-typeset a.tag[aria-current] { background: var(--md-accent-fg-color); color: #fff; }
.block.shown { box-shadow: -3px 0 var(--md-accent-fg-color); }

.diff { --gutter: 4.6rem; }
.diff .number + .number { left: 2rem; }
.diff .minus { background: #f8514926; }
.diff .plus { background: #2ea04330; }
.diff .line::before { content: attr(data-sign); position: absolute; text-indent: 0; user-select: none;
  left: calc(var(--gutter) - .6rem); }

.beside { display: grid; grid-template-columns: minmax(0, 2fr) minmax(0, 1fr); gap: 1rem; }
.pane { position: sticky; top: 2.9rem; height: calc(100vh - 3.3rem); display: flex; flex-direction: column;
  font-size: .7rem; border: 1px solid var(--md-default-fg-color--lightest); border-radius: .2rem;
  background: var(--md-default-bg-color); outline-offset: 2px; }
.pane .bar { display: flex; gap: .2rem; padding: .2rem; background: var(--md-code-bg-color); }
.pane .bar > * { padding: .15rem .5rem; border-radius: .2rem; cursor: pointer; }
.pane .bar > :hover { background: var(--md-accent-fg-color--transparent); }
.pane .bar .outliner { margin-right: auto; }
.pane .bar [hidden], .pane .close { display: none; }
.pane .body { overflow-y: auto; overscroll-behavior: contain; padding: 0 .8rem .8rem; flex: 1; }
.pane h2 { font-size: .95rem; margin: .6rem 0; }
.pane h3 { font-size: .75rem; margin: .6rem 0 .2rem; }
.md-typeset .pane table:not([class]) :is(td, th) { padding: .5em .7em; min-width: 0; }
.md-typeset .pane pre > code { white-space: pre-wrap; font-size: .58rem; padding: .5rem; }
.md-typeset .outline p { margin: .3rem 0; }
.outline .here code { font-weight: 700; color: #fff; background: var(--md-accent-fg-color); }
@media (max-width: 59.99em) {
  .md-typeset pre > code { white-space: pre-wrap; }
  .md-typeset table:not([class]) :is(td, th) { padding: .5em .7em; min-width: 0; }
  .code { font-size: .56rem; --step: .5; --gutter: .3rem; }
  .diff { --gutter: .7rem; }
  .code .number { display: none; }
  .md-typeset .code a.tag { padding: .15em .5em; }
  .code .line i { display: inline-block; width: calc(var(--i) * var(--step) * 1ch); overflow: hidden;
    white-space: pre; text-indent: 0; vertical-align: bottom; }
  .code .line { scroll-margin-top: 15vh; }
  .beside { display: block; }
  .pane { position: fixed; z-index: 3; inset: auto 0 0; height: auto; max-height: 65vh; border-radius: .5rem .5rem 0 0;
    box-shadow: 0 0 1rem #0006; }
  .pane .close { display: block; }
  .pane:not(.open) { inset: auto .5rem .5rem auto; border-radius: .5rem; }
  .pane:not(.open) .body, .pane:not(.open) .bar > :not(.outliner) { display: none; }
}

"""

# Keeps the pane in step with the code: the note of the block at the reading line, or the one that was asked for.
PANE = """
(() => {
  const $ = selector => document.querySelector(selector), all = selector => [...document.querySelectorAll(selector)]
  const pane = $(".pane"), body = $(".pane .body"), outline = $(".outline"), wide = matchMedia("(min-width: 60em)")
  const line = element => Number((element.hash ?? "#" + element.firstElementChild.id).slice(2))
  const edge = element => element.getBoundingClientRect()
  const blocks = all(".block"), tagged = blocks.filter(block => block.dataset.note), places = all(".outline .place")
  let shown, held, opener  // the block whose note is shown, the line that was asked for, the tag that had the focus

  function show(block, at) {  // the note of a block, or the outline at one
    const steps = {before: tagged.findLast(x => line(x) < line(at)), after: tagged.find(x => line(x) > line(at))}
    for (const [name, target] of Object.entries(steps)) {
      const link = $(".bar ." + name)
      link.hidden = !target
      link.href = target ? "#" + target.firstElementChild.id : ""
      link.lastElementChild.textContent = target?.dataset.note
    }
    const place = places.findLast(x => line(x) <= line(at))
    for (const x of places) x.classList.toggle("here", x === place)
    for (const x of tagged) x.classList.toggle("shown", x === block)
    for (const note of all(".note")) note.hidden = note.dataset.note !== block?.dataset.note
    outline.hidden = !!block
    if (block !== shown) body.scrollTop = 0
    if (!block && place) body.scrollTop = place.offsetTop - body.offsetTop - body.clientHeight / 3
    shown = block
  }
  function follow() {
    if (!wide.matches || (held && edge(held).bottom > 50 && edge(held).top < innerHeight)) return
    held = null
    const at = blocks.findLast(x => edge(x).top <= innerHeight * 0.3 + 8) ?? blocks[0]
    const block = tagged.findLast(x => line(x) <= line(at))  // one above it while that can be seen
    show(block && edge(block).bottom > 50 ? block : null, at)
  }
  function hold(element) {
    held = element
    show(held.closest(".block"), held.closest(".block"))
  }
  function byAddress() {
    const target = document.getElementById(location.hash.slice(1))
    const about = target?.closest(".block[data-note]")
    if (about && (wide.matches || outline.hidden)) hold(target)
    else pane.classList.remove("open")
  }
  document.addEventListener("click", event => {
    const tag = event.target.closest(".script .tag")
    if (tag && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
      event.preventDefault()
      hold(opener = tag)
      pane.classList.add("open")
      if (!wide.matches && edge(tag).bottom > edge(pane).top) tag.closest(".line").scrollIntoView()
      if (event.detail === 0) pane.focus()  // by keyboard
    } else if (event.target.closest(".outliner")) {
      show(held = null, shown ?? blocks[0])
      pane.classList.add("open")
    } else if (event.target.closest(".close")) pane.classList.remove("open")
  })
  pane.addEventListener("keydown", event => {
    if (event.key !== "Escape") return
    pane.classList.remove("open")
    opener?.focus()
  })
  addEventListener("scroll", () => requestAnimationFrame(follow), {passive: true})
  addEventListener("resize", follow)
  addEventListener("hashchange", byAddress)
  show(null, blocks[0])
  follow()
  byAddress()
})()
"""

# Browsers give no workers to pages opened from files: there the search runs in a frame.
WORKER = """
if (location.protocol === "file:") window.Worker = class extends EventTarget {
  constructor(url) {
    super()
    const frame = document.createElement("iframe")
    frame.hidden = true
    document.body.append(frame)
    const inner = frame.contentWindow
    inner.document.write(`<body><script src="${url}"></script>`)
    inner.document.close()
    inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
    const ready = new Promise(resolve => inner.addEventListener("load", resolve))
    this.postMessage = data => ready.then(() => inner.dispatchEvent(new MessageEvent("message", {data})))
  }
}
"""


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


def code_lines(name):
    """The lines of a script as HTML: colours, calls that lead to definitions, tags that lead to notes."""
    source, notes = (ROOT / f"{name}.py").read_text(), titles()
    coloured = highlight(source, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).split("\n")
    defined = {x.name: x.lineno for x in ast.parse(source).body if isinstance(x, ast.FunctionDef | ast.ClassDef)}

    def call(match):
        at = defined.get(match[1])
        return f'<a class="call" href="{name}.html#L{at}">{match[1]}</a>' if at else match[0]

    def tag(match):
        if match[1] not in notes:
            return match[0]
        file, title = notes[match[1]]
        address = f"{Path(file).stem}.html#{anchor(f'{match[1]} {title}')}"
        return f'# <a class="tag" href="{address}" title="{html.escape(title)}">{match[1]}</a>'

    result = []
    for plain, line in zip(source.splitlines(), coloured):
        line = re.sub(r'<span class="n">(\w+)</span>(?=<span class="p">\()', call, line)
        line = re.sub(r"^(<span class=\"\w+\">)?( +)", r"\1<i>\2</i>", TAG.sub(tag, line))
        result.append((len(plain) - len(plain.lstrip()), line))
    return result


def row(indent, text, numbers, kind="", identity=""):
    """A line of code with its numbers [(script, line)]."""
    links = "".join(
        f'<a class="number" href="{script}.html#L{at}" tabindex="-1">{at}</a>' if at else '<a class="number"></a>'
        for script, at in numbers
    )
    return f'<span class="line{kind}"{identity} style="--i:{indent}">{links}{text}</span>'


def script_page(name, notes):
    """A script on the left; on the right a pane with the outline and all notes, of which one is shown."""
    plain, lines = (ROOT / f"{name}.py").read_text().splitlines(), code_lines(name)
    blocks, outline, used = [], [INTRODUCTION], {}
    for number, (source, (indent, text)) in enumerate(zip(plain, lines), 1):
        tag, top = TAG.search(source), TOP.match(source)
        if tag or number == 1 or (top and not re.match(r"@|# ", plain[number - 2])):
            blocks.append((tag and tag[1], []))
        if plain[number - 2].startswith("# -----") and source.startswith("# ") and number > 1:
            outline.append(f'</p><h3><a class="place" href="#L{number}">{source[2:]}</a></h3><p>')
        if top and top[1]:
            outline.append(f'</p><p><a class="place" href="#L{number}"><code>{top[1]}</code></a>')
        if tag and tag[1] in notes:
            used[tag[1]] = notes[tag[1]]
            outline.append(f' <a class="tag" href="#L{number}" title="{notes[tag[1]][3]}">{tag[1]}</a>')
        blocks[-1][1].append(row(indent, text, [(name, number)], identity=f' id="L{number}"'))
    code = "".join(
        f'<div class="block"{f""" data-note="{tag}" """ if tag in notes else ""}>{"".join(rows)}</div>'
        for tag, rows in blocks
    )
    panes = "".join(
        f'<section class="note" data-note="{tag}" hidden><h2><a href="{link}">{title}</a></h2>{text}</section>'
        for tag, (link, title, text, _) in used.items()
    )
    return f"""<div class="beside"><div class="code script highlight">{code}</div>
<aside class="pane" aria-label="Notes" tabindex="-1"><div class="bar"><button class="outliner">☰ Outline</button>
<a class="before" title="previous note" hidden>↑ <span></span></a><a class="after" title="next note" hidden>↓ <span>
</span></a><button class="close" aria-label="close">✕</button></div>
<div class="body"><nav class="outline"><p>{"".join(outline)}</p></nav>{panes}</div></aside></div>
<script>{PANE}</script>"""


def diff_page(name):
    """A difference between scripts as Markdown: one heading and one table of coloured lines for each hunk."""
    old, new = DIFFS[name]
    lines, text = {"-": code_lines(old), "+": code_lines(new)}, (NOTES / f"{name}.diff").read_text()
    plain, hunks = (ROOT / f"{new}.py").read_text().splitlines(), re.split(r"(?m)^@@ -(\d+)\S* \+(\d+).*\n", text)[1:]
    result = []
    for a, b, hunk in zip(hunks[::3], hunks[1::3], hunks[2::3]):
        a, b, rows, first = int(a), int(b), [], None
        for sign in (line[:1] or " " for line in hunk.splitlines()):
            first = first or (sign != " " and b) or None
            indent, code = lines["+"][b - 1] if sign == "+" else lines["-"][a - 1]
            numbers = [(old, a * (sign != "+")), (new, b * (sign != "-"))]
            kind = {"-": " minus", "+": " plus", " ": ""}[sign]
            rows.append(row(indent, code, numbers, kind, f' data-sign="{sign}"'))
            a, b = a + (sign != "+"), b + (sign != "-")
        around = [top[1] for top in map(TOP.match, plain[:first]) if top and top[1]] or ["module"]
        result.append(f'## `{around[-1]}` {first}\n\n<div class="code diff highlight">{"".join(rows)}</div>\n')
    counts = [len(re.findall(rf"(?m)^\{sign}(?!\{sign}\{sign})", text)) for sign in "-+"]
    head = f"# {SCRIPTS[old]} → {SCRIPTS[new]}\n\n`{old}.py` → `{new}.py`: {counts[0]} lines go, {counts[1]} come.\n\n"
    return head + "\n".join(result)


def write_pages(docs):
    """Fills the folder that mkdocs reads, all pages side by side, with links made to fit. Returns its navigation."""
    chapters = sorted(path for path in NOTES.glob("*.md") if path.name != "README.md")
    pages = {NOTES / "README.md": "index.md", ROOT / "README.md": "project.md"} | {x: x.name for x in chapters}
    texts = list(pages)
    pages |= {ROOT / f"{name}.py": f"{name}.md" for name in SCRIPTS}
    pages |= {NOTES / f"{name}.diff": f"{name}.md" for name in DIFFS}
    for source in texts:  # grows while pages link to others

        def link(match, source=source):
            path = (source.parent / match[1]).resolve()
            if not path.is_file() or ROOT not in path.parents:
                return match[0]
            place = path.relative_to(ROOT)
            if path.suffix == ".md" and path not in pages:
                pages[path] = "-".join(place.parts)
                texts.append(path)
            if path in pages:
                return f"]({pages[path]}"
            copy = f"files/{place}" + ".txt" * (path.suffix not in (".png", ".svg", ".jpg"))
            (docs / copy).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, docs / copy)
            return f"]({copy}"

        (docs / pages[source]).write_text(LINK.sub(link, source.read_text()))
    for name, title in SCRIPTS.items():
        (docs / f"{name}.md").write_text(f"{HEAD.format('navigation, toc')}# {title}: `{name}.py`\n")
    for name in DIFFS:
        (docs / f"{name}.md").write_text(f"{HEAD.format('navigation')}{diff_page(name)}")
    (docs / "site.css").write_text(STYLE)
    (docs / "worker.js").write_text(WORKER)
    return [
        {"Home": "index.md"},
        {"Notes": [{re.match("# (.*)", x.read_text())[1]: x.name} for x in chapters]},
        {"Scripts": [{title: f"{name}.md"} for name, title in SCRIPTS.items()]},
        {"Differences": [{f"{SCRIPTS[old]} → {SCRIPTS[new]}": f"{name}.md"} for name, (old, new) in DIFFS.items()]},
        {"The project": "project.md"},
    ]


def on_config(config):
    """mkdocs calls this and the next two. Headings are called the same as on GitHub."""
    config.mdx_configs["toc"] = {"permalink": True, "slugify": lambda text, _: anchor(text)}


def on_page_content(html_, page, **_):
    if page.url in ("index.html", "project.html"):
        page.meta["hide"] = ["navigation"]  # each is alone under its tab

    def formula(match):
        return mathml(html.unescape(match[2])[2:-2], "block" if match[1] == "div" else "inline")

    def plain(entries):
        for entry in entries:
            entry.title = re.sub(
                r"\\\((.*?)\\\)", lambda x: re.sub("<.*?>", "", mathml(html.unescape(x[1]), "inline")), entry.title
            )
            plain(entry.children)

    plain(page.toc)
    html_ = re.sub(r'(?s)<(div|span) class="arithmatex">(.*?)</\1>', formula, html_)
    html_ = html_.replace("<p><em>In the code:", '<p class="places"><em>In the code:')
    return re.sub(r'<img [^>]*src="([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', html_)


def on_env(env, config, files):
    """All pages have their HTML: sections of notes go into the pages of scripts, definitions into the search."""
    pages, notes = {file.page.url: file.page for file in files.documentation_pages()}, {}
    for url, page in pages.items():
        for identity, title, number, text in SECTION.findall(page.content):
            text = re.sub(r' id="[^"]*"', "", text).replace('href="#', f'href="{url}#')
            text = text.replace("<img ", '<img loading="lazy" ')
            notes[number] = (f"{url}#{identity}", title, text, html.escape(re.sub("<.*?>", "", title)))
    search = next(plugin for name, plugin in config.plugins.items() if name.endswith("search")).search_index
    seen = set()
    for name, title in SCRIPTS.items():
        pages[f"{name}.html"].content += script_page(name, notes)
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
                "features": ["navigation.tabs", "navigation.footer", "toc.follow", "search.highlight"],
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
            "markdown_extensions": [{"pymdownx.arithmatex": {"generic": True}}, "pymdownx.superfences"],
            "extra_css": ["site.css"],
            "extra": {"generator": False, "polyfills": ["worker.js?iframe-worker"]},
            "validation": {"omitted_files": "ignore", "anchors": "ignore"},  # tests/test_site.py checks all links
        }
        Path(folder, "mkdocs.yml").write_text(json.dumps(settings))  # JSON is YAML
        build(load_config(f"{folder}/mkdocs.yml"))
    for name in "404.html", "sitemap.xml", "sitemap.xml.gz":  # they want to know the address
        (output / name).unlink(missing_ok=True)
    print(f"{output}/index.html: {time.time() - start:.1f} s")


if __name__ == "__main__":
    main()
