"""The chat page against a real server, in headless Chromium: its figures of tokens and times."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from browsing import QUESTION, Tab
from playwright.sync_api import Locator, Route, expect

pytestmark = pytest.mark.slow


def endings(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """Return a function that changes the costs in an answer's last event."""

    def rewrite(event: dict[str, Any]) -> None:
        if (event.get("ragcache") or {}).get("timings"):
            change(event["ragcache"])

    return rewrite


def estimate(seconds: float | None) -> Callable[[dict[str, Any]], None]:
    return endings(lambda costs: costs.update(full_prefill_estimate_s=seconds))


def open_chart(turn: Locator) -> Locator:
    turn.locator(".prefill > summary").click()
    return turn.locator(".prefill")


def test_no_estimate_is_shown_where_the_server_has_none(tab: Tab, slowed):
    for value in (None, 0):
        slowed.rewrite = estimate(value)
        chart = open_chart(tab.ask(QUESTION))
        expect(chart.locator("svg[role=img]")).to_have_count(1)
        assert "estimate" not in chart.text_content()
        assert "null" not in chart.text_content()


def test_estimate_is_called_one_and_is_no_verdict(tab: Tab, slowed):
    slowed.rewrite = estimate(9.5)
    turn = tab.ask(QUESTION)
    assert "9.5" not in turn.locator(".prefill > summary").text_content()
    chart = open_chart(turn)
    expect(chart.locator("svg[role=img]").nth(1)).to_have_attribute(
        "aria-label", re.compile("^full, estimated: .* prefill 9.50 s$")
    )
    expect(chart).to_contain_text("a full prefill is estimated at 9.50 s")


def test_bars_are_as_long_as_their_phases(open_tab, site, slowed):
    """Widths are compared with the timings that the server sent."""
    slowed.rewrite = estimate(0.5)
    tab = open_tab(site)
    received = []
    tab.page.on("response", lambda response: received.append(response) if "completions" in response.url else None)
    turn = tab.open().ask(QUESTION)
    timings = json.loads(re.search(r'"timings": (\{[^}]*\})', received[0].text())[1])
    longest = max(timings["ttft_s"], timings["retrieve_s"] + 0.5)
    bar = turn.locator("svg[role=img]").first
    for phase in ("retrieve", "prefill"):
        rect = bar.locator(f".phase-{phase}")
        assert float(rect.get_attribute("width")[:-1]) == pytest.approx(100 * timings[f"{phase}_s"] / longest, abs=0.5)


def answering(ttfts: list[float]) -> Callable[[Route], None]:
    """Return a route that answers each request with the next time to the first token."""
    rest = iter(ttfts)

    def answer(route: Route) -> None:
        phases = dict.fromkeys(("retrieve_s", "load_s", "encode_s", "place_s", "prefill_s"), 0)
        ttft_s = next(rest)
        timings = {**phases, "prefill_s": ttft_s, "ttft_s": ttft_s, "total_s": ttft_s}
        route.fulfill(body=json.dumps({"ragcache": {"timings": timings}}))

    return answer


def test_a_full_prefill_is_measured_and_medians_are_drawn(tab: Tab):
    asked = tab.bodies()
    turn = tab.ask(QUESTION)
    own, full = [0.05, 0.9, 0.01, 0.04, 0.03], [0.2, 0.3, 0.1, 0.7, 0.5]
    tab.page.route("**/v1/chat/completions", answering([one for pair in zip(own, full, strict=True) for one in pair]))
    bars = turn.locator("svg[role=img]")
    expect(bars.first).to_have_attribute("aria-label", re.compile(r"^link: .* to the first token: retrieve .*prefill"))
    chart = open_chart(turn)
    turn.get_by_role("button", name="Measure a full prefill").click()
    expect(bars).to_have_count(3)
    expect(bars.nth(1)).to_have_attribute("aria-label", "link, median of 5: 40 ms to the first token: prefill 40 ms")
    expect(bars.nth(2)).to_have_attribute("aria-label", "full, median of 5: 300 ms to the first token: prefill 300 ms")
    expect(chart).to_contain_text("median of 5 runs each: link 40 ms, full 300 ms.")
    ask, *measures = asked
    texts = [passage.text_content() for passage in turn.locator(".passage blockquote").all()]
    assert [measure["ragcache"].get("method") for measure in measures] == [None, "full"] * 5
    for measure in measures:
        assert (measure["messages"], measure["max_tokens"]) == (ask["messages"], 1)
        assert [document["text"] for document in measure["ragcache"]["documents"]] == texts
    turn.get_by_text("Figures by phase").click()
    rows = turn.locator(".figures-table tr")
    expect(rows).to_have_count(8)
    expect(rows.first).to_have_text(re.compile("phase.*link.*link, median of 5.*full, median of 5"))
    expect(rows.last).to_have_text(re.compile(r"first token.*\d m?s.*\d m?s.*\d m?s"))


def test_conversation_shows_medians_by_method(tab: Tab, slowed):
    figures = tab.page.locator("#conversation-figures")
    expect(figures).to_have_text("Answers0")
    times, rest = [0.02, 0.5, 0.04, 0.06], iter((0.02, 0.5, 0.04, 0.06))
    slowed.rewrite = endings(lambda costs: costs["timings"].update(ttft_s=next(rest)))
    for number, median in enumerate(["20 ms", "260 ms, median of 2", "40 ms, median of 3"], 1):
        tab.ask(QUESTION)
        expect(figures).to_contain_text(f"Answers{number}")
        expect(figures).to_contain_text(f"First token, link{median}")
    tab.show("Settings")
    tab.page.get_by_label("Method").select_option("full")
    tab.ask(QUESTION)
    expect(figures).to_contain_text("First token, link40 ms, median of 3First token, full60 ms")
    turns = tab.kept()
    assert len(turns) == len(times)
    avoided, tokens = (sum(turn["usage"][name] for turn in turns) for name in ("cached_tokens", "prompt_tokens"))
    expect(figures).to_contain_text(f"Tokens from the cache{avoided:,} of {tokens:,}")
    tab.page.reload()
    expect(figures).to_contain_text(f"Tokens from the cache{avoided:,} of {tokens:,}")
    tab.page.get_by_role("button", name="New conversation").click()
    expect(figures).to_have_text("Answers0")
