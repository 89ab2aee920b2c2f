"""The README's picture of the viewer: python notes/figures/viewer.py (needs the extra `browser` and a Chromium).

It opens the page of the PPO run in benchmarks/results/view/, chooses a wrong response of iteration 20 and one of its
tokens, and cuts out the first row of curves and the response.
"""

import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

FIGURES = Path(__file__).resolve().parent
ROOT = FIGURES.parents[1]
SCALE = 1.5  # pixels of the picture per pixel of the page


def cut(page, picture, selector):
    """The part of a full-page picture, as wide as the page, with the first element that fits, and a little more."""
    box = page.query_selector(selector).bounding_box()
    top = box["y"] + page.evaluate("scrollY") - 8
    return picture.crop((0, int(top * SCALE), picture.width, int((top + box["height"] + 14) * SCALE)))


def main():
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"))
        page = browser.new_page(viewport={"width": 1150, "height": 900}, device_scale_factor=SCALE)
        page.goto((ROOT / "benchmarks/results/view/example.html").as_uri())
        page.evaluate(
            "step => { step.value = 20; step.dispatchEvent(new Event('input')) }", page.query_selector("#step")
        )
        page.select_option("#sort", label="lowest score")
        page.query_selector_all("#list > *")[0].click()
        page.query_selector_all("#tokens span")[21].click()
        picture = Image.open(io.BytesIO(page.screenshot(full_page=True)))
        parts = [cut(page, picture, "#curves .card"), cut(page, picture, "#detail")]
    whole = Image.new("RGB", (picture.width, sum(part.height for part in parts)))
    for part, top in zip(parts, (0, parts[0].height)):
        whole.paste(part, (0, top))
    whole.quantize(128).save(FIGURES / ("viewer" + ".png"), optimize=True)


if __name__ == "__main__":
    main()
