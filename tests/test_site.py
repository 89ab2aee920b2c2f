"""The web site of the notes: links, formulas, and the pages of the scripts as a browser shows them."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from conftest import ROOT

NEEDED = "mkdocs", "material", "latex2mathml", "pymdownx"
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED),
    reason="the site needs its packages: pip install -e '.[notes]'",
)
SCRIPTS = "ppo_llm", "grpo_llm", "ppo_llm_fsdp"
PAGES = [f"{name}.html" for name in SCRIPTS]
WIDE, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


class Page(HTMLParser):
    """What a page holds: ids, links, what it loads, formulas, and its text without code and formulas."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loads, self.texts, self.formulas, self.inside = set(), [], [], [], [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if "id" in attributes:
            assert attributes["id"] not in self.ids, f"id {attributes['id']} twice"
            self.ids.add(attributes["id"])
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        elif "src" in attributes or (tag == "link" and attributes.get("rel") in ("stylesheet", "icon")):
            self.loads.append(attributes.get("src") or attributes["href"])
        if (
            tag in ("code", "pre", "script", "style", "math", "svg")
            or "code" in (attributes.get("class") or "").split()
        ):
            self.inside.append(tag)
            self.formulas += [""] * (tag == "math")
        elif self.inside and tag == self.inside[-1]:
            self.inside.append(tag)

    def handle_endtag(self, tag):
        if self.inside and tag == self.inside[-1]:
            self.inside.pop()

    def handle_data(self, data):
        if not self.inside:
            self.texts.append(data)
        elif self.inside[-1] == "math":
            self.formulas[-1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """{name of a page: Page} of the site, and its folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(ROOT / "notes" / "build.py"), "--output", str(folder)]
    subprocess.run(command, check=True, timeout=300, cwd=folder, capture_output=True)
    return {path.name: Page(path) for path in sorted(folder.glob("*.html"))}, folder


@pytest.fixture(scope="module")
def browser(site):
    """open_page(name, size) of a headless Chromium. A page's errors and whatever it wants from the network fail."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[browser]'")
    names = "chromium", "chromium-browser", "google-chrome", "chrome"
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with sync_api.sync_playwright() as playwright:
        found = found or playwright.chromium.executable_path
        if not Path(found).is_file():
            pytest.skip("no Chromium: install one, or name it in the environment variable CHROMIUM")
        chromium = playwright.chromium.launch(executable_path=found, args=FLAGS)
        errors, pages = [], []

        def open_page(name, size=WIDE):
            while pages:
                pages.pop().close()
            pages.append(chromium.new_page(viewport=size))
            pages[0].on("pageerror", lambda error: errors.append(f"{name}: {error}"))
            pages[0].on(
                "request", lambda x: None if x.url.startswith(("file:", "data:", "about:")) else errors.append(x.url)
            )
            pages[0].goto(f"file://{site[1]}/{name}")
            return pages[0]

        yield open_page
        chromium.close()
        assert not errors


def test_no_link_or_image_is_broken(site):
    pages, folder = site
    broken = set()
    for name, page in pages.items():
        for address in page.links + page.loads:
            parts = urlsplit(address)
            if parts.scheme in ("http", "https"):
                continue
            path, anchor = unquote(parts.path) or name, unquote(parts.fragment)
            if not (folder / path).is_file() or (path in pages and anchor and anchor not in pages[path].ids):
                broken.add(f"{name} -> {address}")
    assert not broken


def test_nothing_is_loaded_from_the_network(site):
    pages, folder = site
    loads = [address for page in pages.values() for address in page.loads]
    for path in folder.rglob("*.css"):
        loads += re.findall(r"url\(\s*[\"']?([^)\"']+)|@import\s+[\"']([^\"']+)", path.read_text())
    assert len(loads) > 50 and not [x for x in loads if re.match(r"(https?:)?//", x if isinstance(x, str) else x[0])]


def test_every_formula_of_the_notes_is_on_its_page(site):
    """As many as in the Markdown, none with a command that was not understood."""
    for path in sorted((ROOT / "notes").glob("*.md")):
        text = re.sub(r"(?ms)^```.*?^```$|`[^`\n]*`", "", path.read_text())
        formulas = re.findall(r"(?s)\$\$.+?\$\$|(?<!\\)\$[^$\s](?:[^$]*?[^$\s])??\$", text)
        page = site[0]["index.html" if path.stem == "README" else f"{path.stem}.html"]
        assert len(page.formulas) == len(formulas), path.name
        assert not [formula for formula in page.formulas if "\\" in formula or not formula.strip()]


def test_no_tex_is_left(site):
    for name, page in site[0].items():
        assert not re.findall(r".*(?:\\[a-zA-Z]{2}|\\[(\[]|\$[^\d\s]).*", "".join(page.texts)), name


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_line_and_tag_of_a_script_is_on_its_page(site, name):
    lines = (ROOT / f"{name}.py").read_text().splitlines()
    page = site[0][f"{name}.html"]
    assert {x for x in page.ids if re.fullmatch(r"L\d+", x)} == {f"L{number}" for number in range(1, len(lines) + 1)}
    text = (site[1] / f"{name}.html").read_text()
    for tag in {tag for line in lines for tag in re.findall(r"# \[(\d+\.\d+)\]", line)}:
        assert f'class="note" data-note="{tag}"' in text, f"no section {tag} in the notes"


SHOWN = "[...document.querySelectorAll('.note')].filter(x => x.offsetHeight > 0).map(x => x.dataset.note)"


@pytest.mark.parametrize("name", PAGES)
def test_a_click_on_a_tag_opens_its_note(browser, name):
    page = browser(name)
    opened = page.evaluate(f"""[...document.querySelectorAll(".script .tag")].map(tag => {{
        tag.click()
        return [tag.textContent, {SHOWN}.join()]
    }})""")
    source = (ROOT / name.replace(".html", ".py")).read_text()
    assert [tag for tag, _ in opened] == re.findall(r"# \[(\d+\.\d+)\]", source)
    assert [note for _, note in opened] == [tag for tag, _ in opened]


@pytest.mark.parametrize("name", PAGES)
def test_a_tap_on_a_phone_opens_a_note_above_the_code(browser, name):
    page = browser(name, PHONE)
    for tag in page.locator(".script .tag").all()[::9]:
        tag.click()
        assert page.evaluate(SHOWN) == [tag.text_content()]
        assert 40 < tag.bounding_box()["y"] < page.locator(".pane").bounding_box()["y"]  # it is not covered
        page.locator(".pane .close").click()
        assert page.evaluate(SHOWN) == []


@pytest.mark.parametrize("name", PAGES)
def test_the_pane_is_in_step_while_scrolling(browser, name):
    page = browser(name)
    wrong = page.evaluate(f"""async () => {{
        const wrong = []
        for (const tag of document.querySelectorAll(".script .tag")) {{
            tag.closest(".line").scrollIntoView()
            await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))
            if ({SHOWN}.join() !== tag.textContent) wrong.push(tag.textContent + " shows " + {SHOWN})
        }}
        return wrong
    }}""")
    assert not wrong


def test_keyboard(browser):
    page = browser("ppo_llm.html")
    page.locator(".script .tag").nth(20).focus()
    page.keyboard.press("Enter")
    tag = page.locator(".script .tag").nth(20).text_content()
    assert page.evaluate(SHOWN) == [tag]
    assert page.evaluate("document.activeElement.className.split(' ')[0]") == "pane"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.textContent") == tag


def test_a_link_to_a_line(browser):
    """From a note to the line, whose note is shown; on to the next note by the arrow."""
    page = browser("03-clip.html")
    link = page.locator("a[href^='grpo_llm.html#L']").first
    line, section = link.get_attribute("href").split("#")[1], link.locator("xpath=preceding::h2[1]").text_content()
    link.click()
    page.wait_for_url("**/grpo_llm.html#L*")
    assert 50 < page.locator(f"#{line}").bounding_box()["y"] < 850
    assert page.evaluate(SHOWN) == [section.split()[0]]
    after = page.locator(".bar .after span").text_content()
    page.locator(".bar .after").click()
    page.wait_for_timeout(300)
    assert page.evaluate(SHOWN) == [after.strip()]


def test_formulas_are_drawn_and_phones_need_no_sideways_scrolling(site, browser):
    for name in site[0]:
        page = browser(name, PHONE)
        assert page.evaluate("document.scrollingElement.scrollWidth") <= PHONE["width"], name
        boxes = """[...document.querySelectorAll(".md-content math")].filter(x => x.checkVisibility()).map(
            x => [x.getBoundingClientRect().width, x.getBoundingClientRect().height])"""
        assert all(width > 2 and height > 2 for width, height in page.evaluate(boxes)), name


def test_search(browser):
    """Without a server; a function is found where it is defined, and in the notes."""
    page = browser("03-clip.html")
    page.locator(".md-search__input").click()
    page.keyboard.type("masked_whiten", delay=30)
    page.wait_for_selector(".md-search-result__item a", timeout=20_000)
    found = page.eval_on_selector_all(".md-search-result__item a", "links => links.map(x => x.getAttribute('href'))")
    assert any("ppo_llm.html" in x and "#L" in x for x in found)
    assert any("02-gae.html" in x for x in found)
