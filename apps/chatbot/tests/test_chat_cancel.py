"""The chat page against a real server, in headless Chromium: stopping anything ends its request at once."""

import pytest
from browsing import QUESTION, Tab
from playwright.sync_api import Locator, expect

pytestmark = pytest.mark.slow


def expect_aborted(tab: Tab, path: str, button: Locator) -> None:
    """Check that a click on `button` aborts the request to `path` before it ends."""
    with tab.page.expect_event("requestfailed", lambda request: request.url.endswith(path), timeout=5000) as failed:
        button.click()
    assert failed.value.failure == "net::ERR_ABORTED"


def test_stop_and_new_conversation_end_an_answer(tab: Tab, slowed):
    slowed.pause_s = 0.3
    turn = tab.send(QUESTION)
    expect(turn.locator(".chip").first).to_be_visible()
    expect_aborted(tab, "/v1/chat/completions", tab.page.get_by_role("button", name="Stop", exact=True))
    expect(turn).to_have_attribute("data-state", "stopped")
    expect(tab.page.get_by_role("button", name="Send")).to_be_visible()
    tab.send(QUESTION)
    expect_aborted(tab, "/v1/chat/completions", tab.page.get_by_role("button", name="New conversation"))
    expect(tab.page.locator(".turn")).to_have_count(0)


def test_stop_ends_a_question_that_waits_for_the_models_name(open_tab, site):
    tab = open_tab(site)
    tab.page.route("**/v1/store", lambda route: None)  # never answered
    tab.page.goto(site.url)
    turn = tab.send(QUESTION)
    expect_aborted(tab, "/v1/store", tab.page.get_by_role("button", name="Stop", exact=True))
    expect(turn).to_have_attribute("data-state", "stopped")


@pytest.mark.usefixtures("deleting")
@pytest.mark.parametrize("sent", [False, True], ids=["while it is sent", "while it is ingested"])
def test_cancel_ends_an_upload(tab: Tab, slowed, sent):
    slowed.pause_s = 0.3
    if not sent:
        tab.page.route("**/v1/documents?replace=*", lambda route: None)
    file = {"mimeType": "text/plain", "buffer": b"Some text. " * 20}
    tab.page.get_by_label("Add files").set_input_files([{**file, "name": f"{number}.txt"} for number in range(5)])
    if sent:
        expect(tab.page.locator("#upload-text")).to_contain_text("txt")
    with tab.page.expect_request("**/v1/documents?limit=*"):  # what was stored until then is shown
        expect_aborted(tab, "/v1/documents?replace=false", tab.page.get_by_role("button", name="Cancel"))
    expect(tab.page.locator("#documents-news")).to_contain_text("Cancelled.")
    expect(tab.page.locator("#upload")).to_be_hidden()


def test_measuring_is_stopped(tab: Tab):
    turn = tab.ask(QUESTION)
    turn.locator(".prefill > summary").click()
    asked = []
    tab.page.route("**/v1/chat/completions", lambda route: asked.append(route))  # never answered
    measure = turn.get_by_role("button", name="Measure a full prefill")
    stop = turn.get_by_role("button", name="Stop measuring (1 of 10)")
    for number, button in enumerate((stop, tab.page.get_by_role("button", name="New conversation")), 1):
        measure.click()
        expect(stop).to_be_visible()
        expect_aborted(tab, "/v1/chat/completions", button)
        assert len(asked) == number
        if button == stop:
            expect(measure).to_be_visible()
            expect(turn.locator(".prefill [role=alert]")).to_be_hidden()
