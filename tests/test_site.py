"""The web site: links, formulas, and its pages as a browser shows them."""

import html
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
import refresh
import torch
from conftest import ROOT, SCRIPTS
from test_project import load_script

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("mkdocs", "material", "latex2mathml", "pymdownx"))),
    reason="the site needs its packages: pip install -e '.[notes]'",
)
WIDE, TABLET, PHONE = ({"width": w, "height": h} for w, h in ((1440, 900), (1024, 768), (390, 844)))
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


# What is no running text: code, formulas and tags.
NO_TEXT = r'(?s)<(script|style|pre|code|math|svg)\b.*?</\1>|<div class="(?:part|code [^"]*)">.*?</div>|<[^>]+>'


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """{name of a page: its HTML} of the site, and its folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(ROOT / "notes" / "build.py"), "--output", str(folder)]
    subprocess.run(command, check=True, timeout=900, cwd=folder, capture_output=True)
    return {path.name: path.read_text() for path in sorted(folder.glob("*.html"))}, folder


@pytest.fixture(scope="module")
def browser(site):
    """open_page(name) of a headless Chromium. A page's errors and whatever it wants from the network fail."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[browser]'")
    names = "chromium", "chromium-browser", "google-chrome", "chrome"
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with sync_api.sync_playwright() as playwright:
        found = found or playwright.chromium.executable_path
        if not Path(found).is_file():
            pytest.skip("no Chromium: install one, or name it in the environment variable CHROMIUM")
        chromium = playwright.chromium.launch(executable_path=found, args=FLAGS)
        pages, errors = [], []

        def open_page(name, size=WIDE, scheme="light"):
            while pages:
                pages.pop().close()
            page = chromium.new_page(viewport=size, color_scheme=scheme)
            pages.append(page)
            page.set_default_timeout(300_000)  # of a busy machine
            page.on("pageerror", lambda error: errors.append(f"{name}: {error}"))
            page.on("console", lambda said: errors.append(f"{name}: {said.text}") if said.type == "error" else None)
            page.on("request", lambda x: None if x.url.startswith(("file:", "data:")) else errors.append(x.url))
            page.goto(f"file://{site[1]}/{name}")
            return page

        yield open_page
        chromium.close()
        assert not errors


def test_no_link_or_image_is_broken_and_nothing_is_loaded_from_the_network(site):
    pages, folder = site
    ids = {name: re.findall(r'<[^>]* id="([^"]+)"', text) for name, text in pages.items()}
    for name, text in pages.items():
        assert len(ids[name]) == len(set(ids[name])), f"an id of {name} comes twice"
        loads = re.findall(r'<[^>]* src="([^"]+)"|<link rel="(?:stylesheet|icon)" href="([^"]+)"', text)
        assert loads and not [load for load in loads if re.match(r"(https?:)?//", "".join(load))]
        for address in [*re.findall(r'<a [^>]*href="([^"]+)"', text), *map("".join, loads)]:
            if not address.startswith(("http:", "https:")):
                path, _, anchor = unquote(html.unescape(address)).partition("#")
                path = path.partition("?")[0] or name
                assert (folder / path).is_file(), f"{name} -> {address}"
                assert not anchor or path not in pages or anchor in ids[path], f"{name} -> {address}"
    styles = "".join(path.read_text() for path in folder.rglob("*.css"))
    assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", styles)


def test_every_formula_of_the_notes_is_on_its_page(site):
    """As many as in the Markdown, none with a command that was not understood, and no TeX is left."""
    for path in sorted((ROOT / "notes").glob("*.md")):
        text = re.sub(r"(?ms)^```.*?^```$|`[^`\n]*`", "", path.read_text())
        formulas = re.findall(r"(?s)\$\$.+?\$\$|(?<!\\)\$[^$\s](?:[^$]*?[^$\s])??\$", text)
        page = site[0]["notes.html" if path.stem == "README" else f"{path.stem}.html"]
        drawn = [re.sub("<.*?>", "", formula) for formula in re.findall(r"(?s)<math.*?</math>", page)]
        assert len(drawn) == len(formulas), path.name
        assert not [formula for formula in drawn if "\\" in formula or not formula.strip()]
    for name, page in site[0].items():
        assert not re.findall(r".*(?:\\[a-zA-Z]{2}|\\[(\[]|\$[^\d\s]).*", re.sub(NO_TEXT, "", page)), name


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_line_and_tag_of_a_script_is_on_its_page(site, name):
    lines = (ROOT / f"{name}.py").read_text().splitlines()
    text = site[0][f"{name}.html"]
    assert re.findall(r'id="L(\d+)"', text) == [str(number) for number in range(1, len(lines) + 1)]
    for tag in {tag for line in lines for tag in re.findall(r"# \[(\d+\.\d+)\]", line)}:
        assert f'class="note" data-note="{tag}"' in text, f"no section {tag} in the notes"
    entry = r'<a href="#L(\d+)" class="md-nav__link">\s*<span class="md-ellipsis">\s*([^<]*?)\s*</span>'
    parts = {str(k): part[1] for k, line in enumerate(lines, 1) if (part := re.match(r"# --- (\w[\w ]*\w)", line))}
    assert len(parts) == 7 and parts.items() <= dict(re.findall(entry, text)).items()  # in the outline


SHOWN = "[...document.querySelectorAll('.note')].filter(x => x.offsetHeight > 0).map(x => x.dataset.note)"
TEXT = "[...document.querySelectorAll('.pane section')].find(x => x.offsetHeight > 0).innerText"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_click_on_a_tag_opens_its_note(browser, name):
    source = (ROOT / f"{name}.py").read_text()
    for size in WIDE, PHONE:
        opened = browser(f"{name}.html", size).evaluate(f"""[...document.querySelectorAll(".script .tag")].map(tag => {{
            tag.click()
            return [tag.textContent, {SHOWN}.join()]
        }})""")
        assert opened == [[tag, tag] for tag in re.findall(r"# \[(\d+\.\d+)\]", source)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_pane_follows_the_loop_and_every_phase_has_its_text(browser, name):
    page, lines = browser(f"{name}.html"), (ROOT / f"{name}.py").read_text().splitlines()
    loop = lines.index(refresh.LOOP) + 1
    assert 48 < page.locator(f"#L{loop}").bounding_box()["y"] < 0.3 * WIDE["height"]  # where the page opens
    for number, line in enumerate(lines, 1):
        if phase := re.match(r" {8}# (\d\.) \w+", line):
            page.evaluate(f"document.getElementById('L{number}').scrollIntoView()")
            page.wait_for_timeout(300)
            shown = page.evaluate(TEXT)
            assert phase[1] in shown and len(shown) > 150, line


# Code that is wider than its box, and lines that reach out of the window.
CUT = """() => [...document.querySelectorAll(".md-content :is(pre, pre > code, .code, .code .line)")]
    .filter(x => x.offsetWidth)
    .filter(x => x.scrollWidth > x.clientWidth + 1 || x.getBoundingClientRect().right > innerWidth + 1)
    .map(x => x.textContent.slice(0, 80))"""
BOXES = """[...document.querySelectorAll(".md-content math")].filter(x => x.checkVisibility())
    .map(x => x.getBoundingClientRect()).map(x => Math.min(x.width, x.height))"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme, colours", [("light", "default"), ("dark", "slate")])
def test_formulas_are_drawn_and_nothing_is_cut_at_any_width(site, browser, scheme, colours):
    for name in site[0]:
        page = browser(name, scheme=scheme)
        assert page.evaluate("document.body.dataset.mdColorScheme") == colours
        assert min(page.evaluate(BOXES), default=3) > 2, name
        for size in WIDE, TABLET, PHONE:
            page.set_viewport_size(size)
            assert page.evaluate("document.scrollingElement.scrollWidth") <= size["width"], (name, size)
            assert page.evaluate(CUT) == [], (name, size)


@pytest.mark.parametrize("name", ["ppo_to_grpo", "ppo_to_ppo_fsdp"])
def test_a_difference_page_has_every_hunk_and_a_sentence_for_each(browser, name):
    found = browser(f"{name}.html").evaluate("""[...document.querySelectorAll(".diff")].map(
        x => [!!x.closest("details"), x.previousElementSibling?.matches("p") && x.previousElementSibling.innerText])""")
    assert len(found) == (ROOT / "notes" / f"{name}.diff").read_text().count("\n@@ ")
    assert all(folded or sentence for folded, sentence in found) and 2 < sum(folded for folded, _ in found) < 8


def test_the_sliders_compute_what_ppo_llm_does(browser):
    ppo_llm, page = load_script("ppo_llm"), browser("sliders.html")
    numbers = page.evaluate("response")
    rewards, values, ratio = (torch.tensor([x]) for x in (numbers["rewards"], numbers["values"], numbers["ratios"][3]))
    advantages, returns = ppo_llm.gae(rewards, values, torch.ones_like(rewards).bool(), 0.9, 0.5)
    args = ppo_llm.Args(model="", clip_low=0.1, clip_high=0.1)
    losses, _ = ppo_llm.policy_loss(ratio.log(), torch.zeros_like(ratio), advantages, None, args)
    shown = page.evaluate("""() => {
        const {advantages, returns} = gae(response.rewards, response.values, 0.9, 0.5)
        return [advantages, returns, response.ratios[3].map((ratio, t) => policyLoss(ratio, advantages[t], 0.1).loss)]
    }""")
    assert torch.allclose(torch.tensor(shown), torch.cat([advantages, returns, losses]), atol=1e-5)
