"""The chat page against a real server, in headless Chromium: failures, and the page's advice."""

import json
from collections.abc import Callable

import pytest
from browsing import ANSWER, QUESTION, Tab, serving
from playwright.sync_api import Route, expect


def test_server_that_stops_and_comes_back(open_tab, kb):
    with serving(kb) as site:
        tab = open_tab(site).open()
        tab.ask(QUESTION)
    turn = tab.send(QUESTION)
    expect(turn).to_have_attribute("data-state", "failed")
    expect(turn.get_by_role("alert")).to_contain_text("The server does not answer.")
    expect(turn.get_by_role("alert")).to_contain_text("ragcache chat --web")
    expect(tab.page.locator(".turn").first.locator(".answer")).to_have_text(ANSWER)
    expect(tab.page.get_by_role("alert")).to_have_count(1)
    assert all("ERR_CONNECTION" in text for text in tab.complaints)
    tab.complaints.clear()
    with serving(kb, site.port):
        turn.get_by_role("button", name="Try again").click()
        expect(tab.page.locator(".turn")).to_have_count(2)
        expect(tab.page.locator(".turn").last.locator(".answer")).to_have_text(ANSWER)
        expect(tab.page.get_by_role("alert")).to_have_count(0)


@pytest.mark.slow
def test_connection_that_breaks_within_an_answer(open_tab, kb):
    with serving(kb) as site:
        tab = open_tab(site).open()
        site.slowed.break_after = 3
        turn = tab.send(QUESTION)
        expect(turn).to_have_attribute("data-state", "failed")
        expect(turn.locator(".answer")).to_have_text("Victor Branovic")
        expect(turn.get_by_role("alert")).to_contain_text("server")
        tab.page.reload()
        expect(turn.get_by_role("alert")).to_contain_text("try again")
        site.slowed.break_after = None
        turn.get_by_role("button", name="Try again").click()
        expect(tab.page.locator(".turn .answer")).to_have_text(ANSWER)
        tab.complaints.clear()


@pytest.mark.slow
def test_question_that_is_asked_before_the_page_knows_its_model(open_tab, site):
    tab = open_tab(site)
    tab.page.route("**/v1/store", lambda route: None)  # held until there is no such route any more
    tab.page.goto(site.url)
    turn = tab.send(QUESTION)
    expect(turn).to_have_attribute("aria-busy", "true")
    tab.page.unroute("**/v1/store")
    expect(turn.locator(".answer")).to_have_text(ANSWER)


@pytest.mark.slow
def test_page_that_cannot_be_filled_says_so_once(open_tab, site):
    tab = open_tab(site)
    for path in ("**/v1/store", "**/v1/documents?*"):
        tab.page.route(path, lambda route: route.abort(), times=1)
    tab.page.goto(site.url)
    alert = tab.page.get_by_role("alert")
    expect(alert).to_contain_text("The server does not answer.")
    expect(alert).to_have_count(1)
    alert.get_by_role("button", name="Try again").click()
    expect(tab.page.locator("#documents-list li")).to_have_count(50)
    expect(alert).to_have_count(0)
    tab.complaints.clear()


def test_key_is_asked_for_and_kept_for_the_tab(open_tab, kb):
    with serving(kb, api_keys=["right"]) as site:
        tab = open_tab(site)
        tab.page.goto(site.url)
        dialog = tab.page.get_by_role("dialog")
        expect(dialog).to_contain_text("This server wants a key")
        tab.page.get_by_label("API key").fill("wrong")
        tab.page.keyboard.press("Enter")
        expect(dialog).to_contain_text("did not accept this key")
        tab.page.get_by_label("API key").fill("right")
        tab.page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(tab.page.locator("#documents-list li").first).to_be_visible()
        expect(tab.ask(QUESTION).locator(".answer")).to_have_text(ANSWER)
        tab.page.reload()
        expect(tab.page.locator("#documents-list li").first).to_be_visible()
        expect(dialog).to_be_hidden()
        assert tab.page.evaluate(
            "[localStorage, sessionStorage].map((kept) => JSON.stringify(kept).includes('right'))"
        ) == [False, True]
        tab.page.get_by_role("button", name="Forget key").click()
        turn = tab.send(QUESTION)
        tab.page.get_by_role("button", name="Cancel").click()
        expect(turn.get_by_role("alert")).to_contain_text("enter the server's key")
        expect(tab.page.get_by_role("alert")).to_have_count(1)
        assert all("401" in text for text in tab.complaints)
        tab.complaints.clear()


@pytest.mark.slow
def test_prompt_that_is_too_long(tab: Tab):
    tab.ask(QUESTION)
    turn = tab.send("river " * 6000)
    expect(turn).to_have_attribute("data-state", "failed")
    expect(turn.get_by_role("alert")).to_contain_text("Read fewer passages, ask without earlier turns")
    expect(turn.get_by_role("button", name="Leave out what does not fit")).to_be_visible()
    bodies = tab.bodies()
    turn.get_by_role("button", name="Without earlier turns").click()
    expect(tab.page.locator(".turn").last).to_have_attribute("data-state", "failed")
    assert len(bodies[0]["messages"]) == 1
    assert all("400" in text for text in tab.complaints)
    tab.complaints.clear()


def refusing(status: int) -> Callable[[Route], None]:
    error = {"error": {"message": "too many questions", "type": "overloaded_error", "param": None, "code": "busy"}}
    return lambda route: route.fulfill(status=status, headers={"Retry-After": "7"}, body=json.dumps(error))


@pytest.mark.slow
def test_busy_server_is_asked_again(tab: Tab):
    """This server has no limit that gives such answers on demand, so a route of the browser gives them."""
    for status in (429, 503):
        tab.page.route("**/v1/chat/completions", refusing(status), times=1)
        turn = tab.send(QUESTION)
        says = "too many questionsThe server is busy. Try again in 7 s."
        expect(turn.get_by_role("alert")).to_have_text(says)
        turn.get_by_role("button", name="Try again").click()
        expect(tab.page.locator(".turn").last.locator(".answer")).to_have_text(ANSWER)
        expect(tab.page.locator(".turn").last).to_have_attribute("data-state", "done")
        assert str(status) in tab.complaints.pop()


@pytest.mark.slow
def test_full_prefill_that_cannot_be_measured(tab: Tab):
    turn = tab.ask(QUESTION)
    tab.page.route("**/v1/chat/completions", lambda route: route.abort(), times=1)
    turn.locator(".prefill > summary").click()
    turn.get_by_role("button", name="Measure a full prefill").click()
    expect(turn.locator(".prefill [role=alert]")).to_contain_text("does not answer")
    turn.get_by_role("button", name="Measure a full prefill").click()
    expect(turn.get_by_role("button", name="Measure again")).to_be_visible()
    expect(turn.locator(".prefill [role=alert]")).to_be_hidden()
    tab.complaints.clear()
