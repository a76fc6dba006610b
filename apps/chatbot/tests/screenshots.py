"""Make docs/images/chat-*.png: .venv/bin/python apps/chatbot/tests/screenshots.py

Needs chromium; the font is Inter if it is installed (fonts-inter). Times in the pictures are this machine's.
"""

import os
import tempfile
from pathlib import Path

from browsing import DESKTOP, PHONE, QUESTION, Tab, open_corpus, running_browser, serving
from playwright.sync_api import expect

import ragcache as rc

ROOT = Path(__file__).parents[3]
IMAGES = ROOT / "docs" / "images"
CORPUS = Path("examples/corpus")  # sources are shown by this path
SECOND = "What does the home town of Julia Haleau make?"


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    os.chdir(ROOT)
    models = rc.load_lm("mini"), rc.load_embedder("minilm")
    with (
        tempfile.TemporaryDirectory() as folder,
        open_corpus(Path(folder, "kb"), *models, [CORPUS]) as kb,
        serving(kb) as site,
        running_browser() as browser,
    ):
        kb.ask(QUESTION)  # the first question computes what later questions reuse
        for name, view, scheme in (("light", DESKTOP, "light"), ("dark", DESKTOP, "dark"), ("phone", PHONE, "light")):
            _picture(Tab(browser.new_page(viewport=view, color_scheme=scheme), site), name, chart=name == "dark")


def _picture(tab: Tab, name: str, *, chart: bool) -> None:
    tab.open().ask(QUESTION)
    turn = tab.ask(SECOND)
    if chart:
        turn.locator(".prefill > summary").click()
        turn.get_by_role("button", name="Measure a full prefill").click()
        expect(turn.get_by_role("button", name="Measure again")).to_be_visible()
        turn.evaluate("turn => turn.scrollIntoView()")
    tab.page.mouse.move(0, 0)
    tab.page.screenshot(path=IMAGES / f"chat-{name}.png")
    tab.page.close()


if __name__ == "__main__":
    main()
