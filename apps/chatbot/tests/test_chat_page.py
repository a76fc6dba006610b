"""The chat page against a real server, in headless Chromium: a conversation."""

import re
from typing import Any

import httpx
import pytest
from browsing import ANSWER, CORPUS, OTHER, PHONE, QUESTION, Tab, open_corpus, serving
from playwright.sync_api import expect


def test_question_is_answered_with_its_passages(tab: Tab, kb):
    turn = tab.ask(QUESTION)
    expect(turn.locator(".answer")).to_have_text(ANSWER)
    hits = kb.retrieve(QUESTION, k=5)
    passages = turn.locator(".passage")
    expect(passages).to_have_count(5)
    for hit, passage, chip in zip(hits, passages.all(), turn.locator(".chip").all(), strict=True):
        text = passage.locator("blockquote")
        expect(text).to_be_hidden()
        chip.click()
        expect(text).to_be_visible()
        expect(passages.filter(visible=True)).to_have_count(1)
        expect(chip).to_have_attribute("aria-expanded", "true")
        assert text.text_content() == hit.chunk.text
        expect(passage).to_contain_text(f"score {hit.score:.2f}, {hit.chunk.num_tokens} tokens")


def test_sources_and_citations_name_their_pages(open_tab, site, slowed):
    def paged(event: dict[str, Any]) -> None:
        for source in (event.get("ragcache") or {}).get("sources") or []:
            source |= {"title": "", "source": "files/travel.pdf", "place": "p. 3"}

    slowed.rewrite = paged
    turn = open_tab(site, viewport=PHONE).open().ask(QUESTION)
    chip = turn.locator(".chip").first
    expect(chip).to_have_text("1travel.pdfp. 3")
    expect(turn.locator(".cite").first).to_have_attribute("aria-label", re.compile(r"^Source \d: travel\.pdf, p\. 3$"))
    chip.click()
    expect(turn.locator(".passage-name").first).to_have_text("travel.pdf, p. 3")


@pytest.mark.slow
def test_passages_come_from_disk_and_then_from_memory(open_tab, models, tmp_path):
    with open_corpus(tmp_path / "kb", *models, [CORPUS / "towns"]) as fresh, serving(fresh) as site:
        tab = open_tab(site).open()
        origins = [tab.ask(OTHER).locator(".kv").all_text_contents() for _ in range(2)]
        expect(tab.page.locator("#store")).to_contain_text("Read from memory5")
        expect(tab.page.locator("#store")).to_contain_text("Read from disk5")
    assert origins == [["from disk"] * 5, ["from memory"] * 5]


def test_answer_is_streamed_and_can_be_stopped(open_tab, kb):
    with serving(kb) as site:
        tab = open_tab(site).open()
        site.slowed.pause_s = 0.25
        turn = tab.send(QUESTION)
        expect(turn.locator(".passage")).to_have_count(5)  # before the first word
        expect(turn.locator(".answer")).to_have_text(re.compile(r"^Victor"))
        expect(turn).to_have_attribute("data-state", "asking")
        expect(tab.page.get_by_role("button", name="Stop")).to_be_visible()
        tab.page.keyboard.press("Escape")
        expect(turn).to_have_attribute("data-state", "stopped")
        expect(turn).to_contain_text("Stopped before the end.")
        partial = turn.locator(".answer").text_content()
        assert partial
        assert ANSWER.startswith(partial)
        assert partial != ANSWER
        site.slowed.pause_s = 0
        turn.get_by_role("button", name="Ask again").click()
        expect(tab.page.locator(".turn .answer")).to_have_text(ANSWER)


@pytest.mark.slow
def test_method_and_number_of_passages_are_chosen(tab: Tab):
    picker = tab.page.get_by_label("Method")
    tab.show("Settings")
    expect(picker.locator("option", has_text="a3")).to_have_count(1)
    assert picker.locator("> option").all_text_contents() == ["Recommended", "Fast", "Balanced", "Exact"]
    expect(picker.locator("option", has_text="markers")).to_have_count(0)  # this model was not trained for them
    expect(tab.page.locator("#method-paper")).to_be_hidden()
    tab.page.locator("#method-more summary").click()
    expect(tab.page.locator("#method-paper")).to_have_text(re.compile("^link: .*KVLink"))
    picker.select_option("reposition")
    tab.page.get_by_label("Passages to read").fill("2")
    turn = tab.ask(OTHER)
    expect(turn.locator(".passage")).to_have_count(2)
    expect(turn.locator(".reading-name").first).to_have_text("reposition")
    picker.select_option("full")
    turn = tab.ask(OTHER)
    expect(turn.locator(".kv").first).to_have_text("KV unused")
    expect(turn.get_by_role("button", name="Measure a full prefill")).to_be_hidden()
    tab.page.reload()
    tab.show("Settings")
    expect(picker).to_have_value("full")
    expect(tab.page.get_by_label("Passages to read")).to_have_value("2")


def test_settings_are_sent_and_kept(tab: Tab):
    asked = tab.bodies()
    tab.ask(QUESTION)
    tab.ask(OTHER)
    tab.show("Settings")
    tab.page.get_by_label("Send earlier turns").uncheck()
    tab.page.get_by_label("Temperature").fill("0.25")
    tab.page.get_by_label("Longest answer").fill("2")
    tab.page.get_by_label("System prompt").fill("Answer in one sentence.")
    expect(tab.ask(OTHER)).to_contain_text("cut at the longest answer allowed")
    tab.page.get_by_label("Temperature").fill("3")
    tab.page.get_by_label("Longest answer").fill("")
    tab.page.get_by_label("System prompt").fill("")
    expect(tab.page.locator("#temperature-note")).to_have_text(re.compile("^Give a number from 0 to 2;"))
    tab.ask(OTHER)
    said = [[(message["role"], message["content"]) for message in body["messages"]] for body in asked]
    assert said == [
        [("user", QUESTION)],
        [("user", QUESTION), ("assistant", ANSWER), ("user", OTHER)],
        [("system", "Answer in one sentence."), ("user", OTHER)],
        [("user", OTHER)],
    ]
    sampling = [{name: body.get(name) for name in ("temperature", "max_tokens")} for body in asked]
    nothing = {"temperature": None, "max_tokens": None}
    assert sampling == [nothing, nothing, {"temperature": 0.25, "max_tokens": 2}, nothing]
    tab.page.get_by_label("Longest answer").fill("7")
    tab.page.get_by_label("Longest answer").blur()
    tab.page.reload()
    expect(tab.page.get_by_label("Longest answer")).to_have_value("7")
    expect(tab.page.get_by_label("Send earlier turns")).not_to_be_checked()


def test_conversations_are_kept_listed_and_deleted(tab: Tab):
    tab.ask(QUESTION)
    turn = tab.ask(OTHER)
    turn.locator(".prefill > summary").click()
    turn.get_by_role("button", name="Measure a full prefill").click()
    expect(turn.locator("svg[role=img]")).to_have_count(3)
    shown = [one.inner_html() for one in tab.page.locator(".turn .picture, .turn .answer, .turn .sources").all()]
    tab.page.reload()
    expect(tab.page.locator(".turn")).to_have_count(2)
    assert [
        one.inner_html() for one in tab.page.locator(".turn .picture, .turn .answer, .turn .sources").all()
    ] == shown
    tab.page.get_by_role("button", name="New conversation").click()
    expect(tab.page.locator(".turn")).to_have_count(0)
    tab.page.reload()
    expect(tab.page.get_by_text("Ask your documents")).to_be_visible()
    kept = tab.page.get_by_role("navigation", name="Conversations").get_by_role("button", name=QUESTION, exact=True)
    kept.click()
    expect(tab.page.locator(".turn")).to_have_count(2)
    expect(kept).to_have_attribute("aria-current", "true")
    tab.page.get_by_role("button", name=f"Delete {QUESTION}").click()
    tab.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(tab.page.locator(".turn")).to_have_count(0)
    expect(kept).to_have_count(0)
    tab.page.reload()
    expect(tab.page.get_by_text("Ask your documents")).to_be_visible()


def test_text_is_never_markup_and_the_policy_holds(tab: Tab):
    markup = "<img src=x onerror=alert(1)><b>bold</b>"
    turn = tab.ask(markup)
    expect(turn.locator(".question")).to_contain_text(markup)
    assert tab.page.locator("#turns img, #turns .question b").count() == 0
    assert httpx.get(tab.site.url, trust_env=False).headers["content-security-policy"] == "default-src 'self'"
    inline = "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.head.append(s)"
    tab.page.evaluate(f"() => {{ {inline} }}")
    assert tab.page.evaluate("window.ran") is None
    assert "Content Security Policy" in tab.complaints.pop()
