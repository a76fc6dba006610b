"""The chat page against a real server, in headless Chromium: conversations that the server keeps."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from browsing import ANSWER, QUESTION, Site, Tab
from playwright.sync_api import expect

pytestmark = pytest.mark.slow

RIVER = "Where does the Alna rise?"


def said(role: str, text: str) -> dict[str, str]:
    return {"type": "message", "role": role, "content": text}


@pytest.fixture
def client(site: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", http_client=httpx.Client(trust_env=False)) as client:
        yield client


@pytest.fixture
def kept(client) -> Iterator[list[str]]:
    """Two conversations of a program: one with a title, one that is called by its first words."""
    ids = [
        client.conversations.create(items=[said("user", RIVER), said("assistant", "Near Osby.")]).id,
        client.conversations.create(
            metadata={"title": "Professions"}, items=[said("user", QUESTION), said("assistant", ANSWER)]
        ).id,
    ]
    yield ids
    for id in ids:
        httpx.delete(f"{client.base_url}conversations/{id}", trust_env=False)


def test_they_are_listed_and_one_goes_on_here(open_tab, site, kept):
    tab: Tab = open_tab(site).open()
    listed = tab.page.locator("#kept-list .title")
    expect(listed).to_have_text(["Professions", RIVER])
    listed.first.click()
    expect(tab.page.locator(".turn .asked")).to_contain_text(QUESTION)
    expect(tab.page.locator(".turn .answer")).to_have_text(ANSWER)
    expect(tab.page.locator("#conversations-list li")).to_have_count(0)  # nothing is kept here until it goes on
    tab.ask("Which product is Mount Birchcombe known for?")
    expect(tab.page.locator(".turn")).to_have_count(2)
    expect(tab.page.locator("#conversations-list .title")).to_have_text([QUESTION])
    tab.page.reload()
    expect(tab.page.locator(".turn")).to_have_count(2)


def test_their_words_are_searched(open_tab, site, kept):
    page = open_tab(site).open().page
    page.get_by_placeholder("Search their words").fill("branovic MINER")
    expect(page.locator("#kept-list .title")).to_have_text([ANSWER])
    page.locator("#kept-list .title").click()
    expect(page.locator(".turn .asked")).to_contain_text(QUESTION)
    page.get_by_placeholder("Search their words").fill("nothing like it")
    expect(page.locator("#kept-news")).to_have_text("None holds these words.")
    page.get_by_placeholder("Search their words").fill("")
    expect(page.locator("#kept-list .title")).to_have_count(2)


def test_one_is_exported_and_deleted(open_tab, site, kept, client):
    page = open_tab(site).open().page
    with page.expect_download() as download:
        page.get_by_role("button", name="Export Professions").click()
    assert download.value.suggested_filename == f"{kept[1]}.json"
    exported = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))
    assert [item["content"][0]["text"] for item in exported["items"]] == [QUESTION, ANSWER]
    for button, left in (("Cancel", 2), ("Delete", 1)):
        page.get_by_role("button", name="Delete Professions").click()
        page.locator("#confirm").get_by_role("button", name=button, exact=True).click()
        expect(page.locator("#kept-list li")).to_have_count(left)
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(kept[1])


def test_without_any_there_is_no_list_and_what_is_gone_is_told(open_tab, site, client):
    tab: Tab = open_tab(site).open()
    page = tab.page
    expect(page.locator("#documents-list li").first).to_be_attached()
    expect(page.locator("#kept")).to_be_hidden()
    gone = client.conversations.create(items=[said("user", RIVER)]).id
    page.reload()
    expect(page.locator("#kept-list .title")).to_have_text([RIVER])
    client.conversations.delete(gone)
    page.locator("#kept-list .title").click()
    expect(page.locator("#kept-news")).to_contain_text("conversation")
    expect(page.locator(".turn")).to_have_count(0)
    assert "404" in tab.complaints.pop()  # the browser's own line


@pytest.mark.parametrize(("width", "height"), [(1366, 768), (390, 844)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_list_fits_its_window(open_tab, site, kept, width, height, scheme):
    tab = open_tab(site, viewport={"width": width, "height": height}, color_scheme=scheme).open()
    if width < 900:
        tab.page.locator("#open-conversations").click()
    expect(tab.page.locator("#kept-list .title").first).to_be_visible()
    pane = tab.page.locator("#conversations").bounding_box()
    for item in tab.page.locator("#kept input, #kept li button").all():
        box = item.bounding_box()
        assert pane["x"] <= box["x"]
        assert box["x"] + box["width"] <= pane["x"] + pane["width"] <= width
