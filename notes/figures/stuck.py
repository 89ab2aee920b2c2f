"""Pictures of stuck.md: python notes/figures/stuck.py, after that page's runs, draws them with the viewer.

They are parts of runs/json-*/view.html, as Chromium shows them: pip install playwright, and a Chromium on the path.
"""

import shutil
import subprocess
import sys

from style import FIGURES, ROOT
from playwright.sync_api import sync_playwright


def page_of(browser, *runs):
    """The viewer's page of these runs, opened."""
    output = ROOT / "runs" / "stuck.html"
    folders = [ROOT / "runs" / name for name in runs]
    subprocess.run([sys.executable, ROOT / "benchmarks/view.py", *folders, "--output", output], check=True)
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.goto(output.as_uri())
    return page


def save(page, name, selector, last=0):
    """What lies between the first of these elements and the one with this number."""
    page.add_style_tag(content="#bar { position: static !important }")
    boxes = [page.locator(selector).nth(i).bounding_box() for i in (0, last)]
    top, bottom = boxes[0]["y"] - 8, boxes[1]["y"] + boxes[1]["height"] + 8
    clip = {"x": 0, "y": top, "width": page.viewport_size["width"], "height": bottom - top}
    page.screenshot(path=FIGURES / f"{name}.png", clip=clip, full_page=True)


def main():
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"))
        page = page_of(browser, "json-bad")
        page.locator("#step").fill("4")
        save(page, "stuck_hacked", "#over .columns")
        page = page_of(browser, "json-parts")
        page.locator("#find").fill("part")
        save(page, "stuck_parts", ".panels")
        page.locator("#step").fill("12")
        page.set_viewport_size({"width": 1440, "height": 900})  # so a group of eight is one row
        page.evaluate("document.getElementById('list').style.maxHeight = 'none'")
        save(page, "stuck_groups", ".group", 1)
        page = page_of(browser, "json-parts", "json-even")
        page.locator("#find").fill("content")
        save(page, "stuck_even", ".panels")
        browser.close()


if __name__ == "__main__":
    main()
