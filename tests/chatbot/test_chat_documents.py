"""The chat page against a real server, in headless Chromium: documents."""

from __future__ import annotations

import httpx
import pytest
from browsing import Tab, serving
from playwright.sync_api import expect

NAME = "hanna-melson.md"
TEXT = """# Hanna Melson

Hanna Melson was christened in 1961. Melson now lives in Port Rushfield. Melson works as a potter.
"""
QUESTION = "What is Hanna Melson's profession?"


def as_file(name: str, text: str) -> dict[str, object]:
    return {"name": name, "mimeType": "text/markdown", "buffer": text.encode()}


@pytest.fixture
def deleting(site):
    """Leaves the store without what a test uploads."""
    yield
    httpx.delete(f"{site.url}/v1/documents/{NAME}", trust_env=False)


@pytest.mark.usefixtures("deleting")
def test_upload_ask_and_delete(open_tab, site, kb):
    tab = open_tab(site).open()
    before = len(kb.documents())
    progress = []
    tab.page.expose_function("sawProgress", lambda seen: progress.append(seen))
    tab.page.evaluate("""() => new MutationObserver(() => {
        const bar = document.getElementById('upload-bar');
        sawProgress([document.getElementById('upload-text').textContent, bar.value, bar.max]);
    }).observe(document.getElementById('upload'), {subtree: true, childList: true, attributes: true})""")
    site.slowed.pause_s = 0.05
    tab.page.get_by_label("Add files").set_input_files(as_file(NAME, TEXT))
    news = tab.page.locator("#documents-news")
    expect(news).to_have_text("1 document added.")
    site.slowed.pause_s = 0
    expect(tab.page.locator("#upload")).to_be_hidden()
    assert any(text.startswith("Computing KV") for text, _, _ in progress)
    assert any(value == 1 for _, value, _ in progress)
    expect(tab.page.get_by_role("heading", name=f"{before + 1} documents")).to_be_visible()
    assert kb.document(NAME).num_chunks == 1

    turn = tab.ask(QUESTION)
    expect(turn.locator(".answer")).to_have_text("Hanna Melson works as a potter.")
    expect(turn.locator(".passage-name").first).to_have_text("Hanna Melson")

    delete = tab.page.get_by_role("button", name="Delete Hanna Melson")
    delete.click()
    tab.page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert kb.document(NAME) is not None
    delete.click()
    tab.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(news).to_have_text("Hanna Melson was deleted.")
    expect(tab.page.get_by_role("heading", name=f"{before} documents")).to_be_visible()
    assert kb.document(NAME) is None
    expect(tab.page.locator("#store")).to_contain_text(f"Documents{before}")
    turn = tab.ask(QUESTION)
    assert "Hanna Melson" not in turn.locator(".passage-name").all_text_contents()


@pytest.mark.usefixtures("deleting")
def test_files_are_dropped_and_bad_ones_are_named(tab: Tab, kb):
    tab.page.evaluate(
        """([name, text]) => {
            const data = new DataTransfer();
            data.items.add(new File([text], name));
            data.items.add(new File(['x'], 'picture.bmp'));
            const place = document.getElementById('drop');
            for (const kind of ['dragenter', 'dragover', 'drop'])
                place.dispatchEvent(new DragEvent(kind, {dataTransfer: data, bubbles: true, cancelable: true}));
        }""",
        [NAME, TEXT],
    )
    news = tab.page.locator("#documents-news")
    expect(news).to_contain_text("1 document added.")
    assert news.locator("li").text_content().count("picture.bmp") == 1
    expect(news.locator("li")).to_contain_text(".bmp' cannot be read")
    assert kb.document(NAME) is not None


def test_upload_that_is_too_large(open_tab, kb):
    with serving(kb, max_upload_bytes=2048) as site:
        tab = open_tab(site).open()
        tab.page.get_by_label("Add files").set_input_files(as_file(NAME, TEXT * 100))
        trouble = tab.page.locator("#documents-news [role=alert]")
        expect(trouble).to_contain_text("2048")
        expect(trouble).to_contain_text("fewer or smaller files")
        assert kb.document(NAME) is None
        assert "413" in tab.complaints.pop()  # the browser's own line


def test_long_list_is_shown_by_pages(tab: Tab, kb):
    total = len(kb.documents())
    items = tab.page.locator("#documents-list li")
    expect(items).to_have_count(50)
    for shown in (100, 150):
        tab.page.get_by_role("button", name="Show more").click()
        expect(items).to_have_count(shown)
    expect(tab.page.get_by_role("button", name="Show more")).to_have_text(f"Show more ({total - 150})")
