"""The chat page against a real server, in headless Chromium: the visible parts of an answer, and their order."""

import re
from typing import Any

import pytest
from browsing import ANSWER, OTHER, QUESTION, Tab
from playwright.sync_api import Locator, expect

SIZES = [*(pytest.param((1366, height), marks=pytest.mark.slow) for height in (768, 600)), (390, 844)]

# The element at a point that is just inside another one's top left corner: nothing else may lie over it.
TOP = """node => {
    const {left, top} = node.getBoundingClientRect();
    const found = document.elementFromPoint(left + 8, top + 8);
    return {top, seen: node.contains(found)};
}"""


@pytest.fixture(params=SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def sized(request, open_tab, site) -> Tab:
    width, height = request.param
    return open_tab(site, viewport={"width": width, "height": height}).open()


def expect_tops_in_view(turn: Locator) -> None:
    for part in (".question .asked, h3.question:not(:has(.asked))", ".answer"):
        found = turn.locator(part).evaluate(TOP)
        assert 0 <= found["top"] < turn.page.viewport_size["height"]
        assert found["seen"], f"something covers the top of {part}"


def lengthen(event: dict[str, Any]) -> None:
    for choice in event["choices"]:
        if choice["delta"].get("content"):
            choice["delta"]["content"] += "and so on " * 60


@pytest.mark.slow
def test_finished_answer_is_in_view_below_its_question(sized: Tab):
    sized.ask(OTHER)
    turn = sized.ask(QUESTION)
    expect(turn.locator(".answer")).to_have_text(ANSWER)
    expect_tops_in_view(turn)
    expect(turn.locator("details.prefill")).not_to_have_attribute("open", "")
    expect(turn.locator(".chip").first).to_be_in_viewport()
    parts = turn.locator(".question, .answer, .sources, .prefill").evaluate_all("all => all.map(one => one.className)")
    assert parts == ["question", "answer", "sources", "fold prefill"]
    line = turn.locator(".prefill > summary")
    usage = sized.kept()[-1]
    cached, prompt = usage["usage"]["cached_tokens"], usage["usage"]["prompt_tokens"]
    assert re.fullmatch(rf"[\d.]+ m?s, {cached} of {prompt} tokens from the cache", line.inner_text())
    chart = turn.locator(".prefill svg[role=img]").first
    expect(chart).to_be_hidden()
    line.click()
    expect(chart).to_be_in_viewport()
    expect(turn.locator(".question")).to_be_in_viewport()
    expect_tops_in_view(sized.ask("Some lines of talk before it. " * 20 + QUESTION))  # leaves room for its answer


@pytest.mark.slow
def test_long_answer_is_read_from_its_top(sized: Tab, slowed):
    sized.ask(OTHER)
    slowed.rewrite, slowed.pause_s = lengthen, 0.1
    turn = sized.send(QUESTION)
    answer, height = turn.locator(".answer"), sized.page.viewport_size["height"]
    while answer.bounding_box()["height"] < height:
        expect(turn).to_have_attribute("data-state", "asking", timeout=1)
        expect_tops_in_view(turn)
    expect_tops_in_view(turn)
    expect(turn).to_have_attribute("data-state", "done")
    expect_tops_in_view(turn)
    sized.page.reload()
    expect_tops_in_view(turn)


@pytest.mark.slow
def test_question_stays_pinned_and_never_covers_the_focus(sized: Tab, slowed):
    slowed.rewrite = lengthen
    turn = sized.ask(QUESTION)
    before = turn.locator(".question").evaluate(TOP)
    turn.locator(".answer").hover()
    sized.page.mouse.wheel(0, 300)
    for _ in range(100):  # the page's policy forbids Playwright's own waiting
        if turn.locator(".answer").evaluate(TOP)["top"] < before["top"] - 100:
            break
        sized.page.wait_for_timeout(50)
    assert turn.locator(".answer").evaluate(TOP)["top"] < before["top"] - 100
    assert turn.locator(".question").evaluate(TOP)["top"] == pytest.approx(before["top"], abs=1)
    assert turn.locator(".asked").evaluate(TOP)["seen"]
    # Nor is the focus ever below it.
    turn.get_by_role("button", name="Ask again").focus()
    turn.get_by_role("button", name="Ask again").evaluate("node => node.scrollIntoView({block: 'end'})")
    for _ in range(8):  # other actions, the line, five chips
        sized.page.keyboard.press("Shift+Tab")
        bottom = turn.locator(".question").evaluate("node => node.getBoundingClientRect().bottom")
        assert sized.page.evaluate("document.activeElement.getBoundingClientRect().top") >= bottom - 1
