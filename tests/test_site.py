"""The web site: links, formulas, and its pages as a browser shows them."""

import html
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from conftest import ROOT
from test_project import load_script

NEEDED = "mkdocs", "material", "latex2mathml", "pymdownx"
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED),
    reason="the site needs its packages: pip install -e '.[notes]'",
)
SCRIPTS = "ppo_llm", "grpo_llm", "ppo_llm_fsdp"
PAGES = [f"{name}.html" for name in SCRIPTS]
WIDE, TABLET, PHONE = ({"width": w, "height": h} for w, h in ((1440, 900), (1024, 768), (390, 844)))
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
            pages[0].set_default_timeout(300_000)  # of a busy machine
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
        page = site[0]["notes.html" if path.stem == "README" else f"{path.stem}.html"]
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
        page.locator(".pane .fold").click()
        assert page.evaluate(SHOWN) == []
        assert page.locator(".pane").bounding_box()["height"] < 60


def loop_of(name):
    """Numbers of the first line of the loop and of the last of `main`."""
    lines = (ROOT / name.replace(".html", ".py")).read_text().splitlines()
    return lines.index("    for iteration in progress:") + 1, lines.index("    return run_dir") + 1


@pytest.mark.parametrize("name", PAGES)
def test_a_script_opens_at_its_loop_with_its_outline(browser, name):
    page, (loop, _) = browser(name), loop_of(name)
    assert 48 < page.locator(f"#L{loop}").bounding_box()["y"] < 0.3 * WIDE["height"]
    outline = page.locator(".md-sidebar--primary a[href^='#L']")
    titles = [title.strip() for title in outline.all_text_contents()]
    assert {"Mathematics", "Policy", "main", "1. Rollout", "6. Actor update", "Data and rewards"} <= set(titles)
    outline.nth(titles.index("6. Actor update")).click()
    page.wait_for_timeout(300)
    assert "6. Actor update" in page.locator(".pane h2:visible").all_text_contents()


@pytest.mark.parametrize("name", PAGES)
def test_the_pane_follows_the_loop_and_every_phase_has_its_text(browser, name):
    page, (loop, end) = browser(name), loop_of(name)
    shown = page.evaluate(
        """async ([first, last]) => {
        const shown = []
        for (let line = first; line <= last; line++) {
            document.getElementById("L" + line).scrollIntoView()
            await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))
            shown.push([...document.querySelectorAll(".pane section")].find(x => x.offsetHeight > 0).innerText)
        }
        return shown
    }""",
        [loop, end],
    )
    changes = [k for k in range(1, len(shown)) if shown[k] != shown[k - 1]] + [len(shown)]
    assert len(changes) > 8 and min(b - a for a, b in zip([0, *changes], changes)) >= 6
    for number, line in enumerate((ROOT / name.replace(".html", ".py")).read_text().splitlines(), 1):
        phase = re.match(r" {8}# (\d\. \w+)", line)
        if phase and loop <= number <= end:
            assert shown[number - loop].count(phase[1][:3]) and len(shown[number - loop]) > 150, line
    assert min(page.evaluate("[...document.querySelectorAll('.part')].map(x => x.children.length)")) >= 6
    assert ("Unlike ppo_llm.py" in "".join(shown)) == (name == "grpo_llm.html")  # sharding leaves the loop as it is


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
    """The line is shown, and its note; back to the walk by the arrow."""
    lines = (ROOT / "grpo_llm.py").read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.endswith("# [3.3]"))
    page = browser(f"grpo_llm.html#L{line}")
    assert 50 < page.locator(f"#L{line}").bounding_box()["y"] < 850
    assert page.evaluate(SHOWN) == ["3.3"]
    page.locator(".pane .back").click()
    assert page.evaluate(SHOWN) == [] and page.locator(".pane .text:visible").count() == 1


# Code that is wider than its box, and lines that reach out of the window.
CUT = """() => [...document.querySelectorAll(".md-content :is(pre, pre > code, .code, .code .line)")]
    .filter(x => x.offsetWidth)
    .filter(x => x.scrollWidth > x.clientWidth + 1 || x.getBoundingClientRect().right > innerWidth + 1)
    .map(x => x.textContent.slice(0, 80))"""


@pytest.mark.slow
def test_formulas_are_drawn_and_no_code_is_cut_at_any_width(site, browser):
    for name in site[0]:
        page = browser(name)
        for size in WIDE, TABLET, PHONE:
            page.set_viewport_size(size)
            assert page.evaluate("document.scrollingElement.scrollWidth") <= size["width"], (name, size)
            assert page.evaluate(CUT) == [], (name, size)
        boxes = """[...document.querySelectorAll(".md-content math")].filter(x => x.checkVisibility()).map(
            x => [x.getBoundingClientRect().width, x.getBoundingClientRect().height])"""
        assert all(width > 2 and height > 2 for width, height in page.evaluate(boxes)), name


def test_a_table_of_fifteen_columns_fits(browser):
    page = browser("09-debugging.html")
    boxes = """[...document.querySelectorAll("table:has(th:nth-child(12))")].map(
        x => [x.parentElement.scrollWidth - x.parentElement.clientWidth, x.querySelector("td").clientWidth])"""
    ((beyond, first),) = page.evaluate(boxes)
    assert beyond <= 0 and first > 200


def test_home_has_three_doors_a_curve_and_an_answer_before_and_after(site):
    text = (site[1] / "index.html").read_text()
    doors = text[text.index('class="doors"') : text.index('<h2 id="what-you-will-see"')]
    assert re.findall(r"<h2 [^>]*>(\w+)", doors) == ["Learn", "Run", "Change", "Walls"]
    assert all(door.count("<a href") >= 3 for door in doors.split("<h2 ")[1:]) and "ppo.png" in text
    readme = re.sub(r"[\s>]+", " ", (ROOT / "README.md").read_text())  # the same answers
    home = (ROOT / "notes" / "web" / "home.md").read_text()
    assert all(answer in readme for answer in re.findall(r"(?:Before|After): (`.*`)", home)) and "After: `" in home


@pytest.mark.parametrize("name", ["ppo_to_grpo", "ppo_to_ppo_fsdp"])
def test_a_difference_page_has_every_hunk_and_a_sentence_for_each(browser, name):
    page = browser(f"{name}.html")
    found = page.evaluate("""[...document.querySelectorAll(".diff")].map(
        x => [!!x.closest("details"), x.previousElementSibling?.matches("p") && x.previousElementSibling.innerText])""")
    assert len(found) == (ROOT / "notes" / f"{name}.diff").read_text().count("\n@@ ")
    assert all(folded or sentence for folded, sentence in found) and 2 < sum(folded for folded, _ in found) < 8
    assert not page.locator("details .line").first.is_visible()  # what is folded is out of the way


def test_variants_are_pages_with_their_whole_files(site):
    sys.path.insert(0, str(ROOT / "notes"))
    patched = runpy.run_path(str(ROOT / "notes" / "variants.py"))["patched"]
    paths = sorted((ROOT / "notes" / "variants").glob("*.*"))
    assert len(paths) >= 14
    for path in paths:
        text = (site[1] / f"variant-{path.stem}.html").read_text()
        lines = re.sub(r'<a class="number".*?</a>', "", text).split('<span class="line')[1:]
        lines = [html.unescape(re.sub("<.*?>", "", x.partition(">")[2].partition("</div>")[0])) for x in lines]
        whole = patched(path.stem) if path.suffix == ".patch" else path.read_text()
        whole = re.sub(r"# \[(\d+\.\d+)\]", r"# \1", whole)
        assert "\n".join(whole.splitlines()) in "\n".join(lines), path.name
        if path.suffix == ".patch":
            assert "<strong>Measured.</strong>" in text and 'class="line plus"' in text and 'id="changes"' in text


def sliders(browser, place, value):
    """Moves a slider of the page as a hand would."""
    browser.locator(place).evaluate(
        "(input, value) => { input.value = value; input.dispatchEvent(new Event('input')) }", str(value)
    )


def test_the_sliders_compute_what_ppo_llm_does(browser):
    import torch

    ppo_llm = load_script("ppo_llm")

    page = browser("sliders.html")
    response = page.evaluate("response")
    rewards, values = torch.tensor([response["rewards"]]), torch.tensor([response["values"]])
    for gamma, lam, clip, step, changed in [
        (1, 0.95, 0.2, 4, {}),
        (0.9, 0.5, 0.05, 2, {3: 0, 9: 1}),
        (1, 0, 0, 3, {0: 1}),
    ]:
        for name, value in {"gamma": gamma, "lam": lam, "clip": clip, "step": step}.items():
            sliders(page, f".sliders [name={name}]", value)
        for t in range(values.shape[1]):
            sliders(page, f".numbers [name=value] >> nth={t}", round(changed.get(t, values[0, t].item()), 2))
        now = torch.tensor(
            [[float(x) for x in page.eval_on_selector_all(".numbers input", "x => x.map(y => y.value)")]]
        )
        advantages, returns = ppo_llm.gae(rewards, now, torch.ones_like(rewards).bool(), gamma, lam)
        ratio = torch.tensor([response["ratios"][step - 1]])
        losses, clipped = ppo_llm.policy_loss(ratio.log(), torch.zeros_like(ratio), advantages, clip, clip)
        for column, expected in {"A": advantages, "return": returns, "loss": losses}.items():
            shown = page.eval_on_selector_all(f".numbers [data-name={column}]", "x => x.map(y => +y.dataset.exact)")
            assert torch.allclose(torch.tensor([shown]), expected, atol=1e-5), (column, gamma, lam)
        marks = page.eval_on_selector_all(".numbers [data-name=ratio]", "x => x.map(y => y.matches('.cut'))")
        at_edge = (ratio - 1).abs() < 1e-6  # there it is the last digit that decides
        assert (torch.tensor([marks]) == clipped).logical_or(at_edge).all()


def test_search(browser):
    """Without a server; a function is found where it is defined, and in the notes."""
    page = browser("03-clip.html")
    page.locator(".md-search__input").click()
    page.keyboard.type("masked_whiten", delay=30)
    page.wait_for_selector(".md-search-result__item a", timeout=20_000)
    found = page.eval_on_selector_all(".md-search-result__item a", "links => links.map(x => x.getAttribute('href'))")
    assert any("ppo_llm.html" in x and "#L" in x for x in found)
    assert any("02-gae.html" in x for x in found)
