"""The chat page against a real server, in headless Chromium: actions on a question and its answer."""

import json
import re

import pytest
from browsing import ANSWER, OTHER, OTHER_ANSWER, QUESTION, Tab
from playwright.sync_api import expect

PHASES = ("queue_s", "retrieve_s", "load_s", "encode_s", "place_s", "prefill_s", "ttft_s", "total_s")
ENDING = {"method": "full", "timings": dict.fromkeys(PHASES, 0.1)}
# Pixels between the top of the view and a turn.
ABOVE = "turn => turn.getBoundingClientRect().top - document.getElementById('scroller').getBoundingClientRect().top"


def test_answer_is_copied_and_question_edited(open_tab, site):
    tab = open_tab(site, permissions=["clipboard-read", "clipboard-write"]).open()
    turn = tab.ask(QUESTION)
    turn.get_by_role("button", name="Copy the answer").click()
    expect(tab.page.locator("#announcer")).to_have_text("Copied")
    assert tab.page.evaluate("navigator.clipboard.readText()") == ANSWER
    assert tab.ask(QUESTION).evaluate(ABOVE) == pytest.approx(0, abs=1), "each question is scrolled to the top"
    edit, box = turn.get_by_role("button", name="Edit the question"), turn.get_by_role("textbox")
    edit.click()
    expect(box).to_have_value(QUESTION)
    expect(turn).to_contain_text("The turns below are removed.")
    box.press("Escape")
    expect(box).to_have_count(0)
    expect(edit).to_be_focused()
    edit.click()
    box.fill(OTHER)
    turn.get_by_role("button", name="Ask this").click()
    expect(tab.page.locator(".turn")).to_have_count(1)
    expect(tab.page.locator(".turn .asked")).to_have_text(re.compile(f"{re.escape(OTHER)}$"))
    expect(tab.page.locator(".turn .answer")).to_have_text(OTHER_ANSWER)


@pytest.mark.slow
def test_two_methods_answer_side_by_side(tab: Tab):
    asked = tab.bodies()
    turn = tab.ask(QUESTION)
    texts = turn.locator(".passage blockquote").all_text_contents()
    turn.get_by_label("Compare with").select_option("full")
    answers = turn.locator(".answer-part")
    expect(answers.locator(".answer-name")).to_have_text(["Recommended", "Exact"])
    expect(answers.locator(".answer")).to_have_text([ANSWER, ANSWER])
    expect(answers.nth(1)).to_have_attribute("data-state", "done")
    own, beside = asked
    assert (beside["messages"], beside["ragcache"]["method"]) == (own["messages"], "full")
    assert [document["text"] for document in beside["ragcache"]["documents"]] == texts
    left, right = (one.bounding_box() for one in answers.all())
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] <= right["x"]
    expect(tab.page.locator("#conversation-figures")).to_contain_text("Answers2")
    tab.page.reload()
    expect(answers.locator(".answer")).to_have_text([ANSWER, ANSWER])


@pytest.mark.slow
def test_thoughts_are_a_line_that_opens(tab: Tab):
    """The answer is sent piece by piece, as by a thinking model's server."""
    pieces = [
        {"role": "assistant"},
        {"reasoning_content": "It is <b>"},
        {"reasoning_content": "his."},
        {"content": "His."},
    ]
    chunks = [{"choices": [{"index": 0, "delta": piece, "finish_reason": None}]} for piece in pieces]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "ragcache": ENDING})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    tab.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=body, headers={"Content-Type": "text/event-stream"})
    )
    turn = tab.ask("Whose is it?")
    expect(turn.locator(".answer-part")).to_contain_text("His.")
    line = turn.locator(".thinking summary")
    expect(line).to_have_text(re.compile(r"^Thought( for [0-9.]+ s)?$"))
    expect(turn.locator(".thoughts")).to_be_hidden()
    line.click()
    expect(turn.locator(".thoughts")).to_have_text("It is <b>his.")
    tab.page.reload()
    expect(tab.page.locator(".thinking summary")).to_have_text(re.compile("^Thought"))
    tab.expect_no_overflow()
