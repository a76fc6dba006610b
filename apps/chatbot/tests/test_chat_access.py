"""The chat page for every reader: keyboard, names of controls, contrast, narrow pages, themes, motion."""

import pytest
from browsing import ANSWER, PHONE, QUESTION, Tab
from playwright.sync_api import expect

CONTROLS = {
    "button", "link", "textbox", "combobox", "tab", "checkbox", "spinbutton",
    "progressbar", "DisclosureTriangle", "image",
}  # fmt: skip
CONTRASTS = """() => {
    const placeholder = document.querySelector('textarea');
    const parse = (text) => {
        const parts = text.match(/[\\d.]+/g).map(Number);
        return {rgb: parts.slice(0, 3), alpha: parts[3] ?? 1};
    };
    const light = ({rgb}) => {
        const linear = rgb.map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
    };
    const ground = (node) => {
        for (; node; node = node.parentElement) {
            const found = parse(getComputedStyle(node).backgroundColor);
            if (found.alpha === 1) return found;
        }
        throw new Error('no ground');
    };
    const ratio = (color, node) => {
        const [one, other] = [light(parse(color)), light(ground(node))];
        return [(Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05), node.outerHTML.slice(0, 80)];
    };
    const texts = [...document.querySelectorAll('body *')]
        .filter((node) => node.checkVisibility() && !node.closest('.for-readers, option'))
        .filter((node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim()))
        .map((node) => ratio(getComputedStyle(node).color, node));
    return [...texts, ratio(getComputedStyle(placeholder, '::placeholder').color, placeholder)];
}"""


def tab_to(tab: Tab, selector: str) -> None:
    """Press Tab until an element that matches has the focus, and check that the focus is visible."""
    for _ in range(60):
        tab.page.keyboard.press("Tab")
        if tab.page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            # A file picker is drawn as its label.
            drawn = "document.activeElement" + (".nextElementSibling" if selector == "#files" else "")
            assert tab.page.evaluate(f"getComputedStyle({drawn}).outlineStyle") == "solid"
            return
    raise AssertionError(f"the Tab key does not lead to {selector}")


@pytest.mark.slow
def test_everything_by_keyboard(tab: Tab):
    keyboard, box = tab.page.keyboard, tab.page.get_by_label("Question", exact=True)
    expect(box).to_be_focused()
    keyboard.type("one line")
    keyboard.press("Shift+Enter")
    keyboard.type("another")
    expect(box).to_have_value("one line\nanother")
    expect(tab.page.locator(".turn")).to_have_count(0)
    keyboard.press("Control+A")
    keyboard.type(QUESTION)
    keyboard.press("Enter")
    expect(tab.page.locator(".turn .answer")).to_have_text(ANSWER)
    expect(tab.page.locator(".turn")).to_have_attribute("data-state", "done")
    expect(box).to_be_focused()
    tab.page.evaluate("document.activeElement.blur()")
    tab.page.locator("body").evaluate("body => { body.tabIndex = -1; body.focus(); body.removeAttribute('tabindex'); }")
    for place in ("#new-conversation", "#theme", ".cite"):
        tab_to(tab, place)
    keyboard.press("Enter")
    expect(tab.page.locator(".passage blockquote").first).to_be_visible()
    tab_to(tab, ".chip")
    keyboard.press("Enter")
    expect(tab.page.locator(".passage blockquote").first).to_be_hidden()
    tab_to(tab, ".prefill > summary")
    keyboard.press("Enter")
    tab_to(tab, ".measure")
    for place in ("#question", "#send", "#documents-tab"):
        tab_to(tab, place)
    keyboard.press("ArrowRight")
    for place in ("#method", "#k", "#earlier"):
        tab_to(tab, place)
    tab_to(tab, "#settings-tab")
    keyboard.press("ArrowLeft")
    for place in ("#files", "#documents-list button"):
        tab_to(tab, place)
    keyboard.press("Enter")
    expect(tab.page.get_by_role("dialog")).to_be_visible()
    keyboard.press("Escape")
    expect(tab.page.get_by_role("dialog")).to_be_hidden()
    assert tab.page.evaluate("document.activeElement.title") == "Delete"


def controls(tab: Tab) -> list[tuple[str, str]]:
    nodes = tab.page.context.new_cdp_session(tab.page).send("Accessibility.getFullAXTree")["nodes"]
    return [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"] and node["role"]["value"] in CONTROLS
    ]


@pytest.mark.slow
def test_every_control_has_a_name(tab: Tab):
    turn = tab.ask(QUESTION)
    turn.locator(".prefill > summary").click()
    turn.get_by_text("Figures by phase").click()
    turn.locator(".chip").first.click()
    found = controls(tab)
    assert len(found) > 60
    tab.show("Settings")
    found += controls(tab)
    assert {"tab", "textbox", "combobox", "checkbox", "spinbutton", "DisclosureTriangle", "image"} <= {
        role for role, _ in found
    }
    assert [role for role, name in found if not name.strip()] == []


@pytest.mark.slow
def test_answers_are_announced_whole(tab: Tab):
    said = []
    tab.page.expose_function("heard", lambda text: said.append(text))
    tab.page.evaluate("""() => {
        const place = document.getElementById('announcer');
        new MutationObserver(() => heard(place.textContent)).observe(place, {childList: true, characterData: true});
    }""")
    tab.ask(QUESTION)
    assert said == ["Reading", ANSWER]
    assert tab.page.locator("#turns[aria-live], #turns [aria-live]").count() == 0


@pytest.mark.slow
def test_contrast(open_tab, site):
    tab = open_tab(site).open()
    low, seen = [], 0

    def look() -> None:
        nonlocal seen
        for theme in ("light", "dark"):
            tab.page.emulate_media(color_scheme=theme)
            expect(tab.page.locator("html")).to_have_attribute("data-theme", theme)
            found = tab.page.evaluate(CONTRASTS)
            low.extend((theme, entry) for entry in found if entry[0] < 4.5)
            seen = len(found)

    for name in ("Settings", "Store", "Documents"):
        tab.show(name)
        look()
    turn = tab.ask(QUESTION)
    turn.locator(".chip").first.click()
    turn.locator(".prefill > summary").click()
    turn.get_by_text("Figures by phase").click()
    turn.get_by_label("Compare with").select_option("full")
    expect(turn.locator(".answer-part").last).to_have_attribute("data-state", "done")
    turn.get_by_role("button", name="Edit the question").click()
    tab.page.route("**/v1/chat/completions", lambda route: route.abort())
    expect(tab.send(QUESTION)).to_have_attribute("data-state", "failed")
    look()
    assert seen > 100
    assert low == []
    tab.complaints.clear()


@pytest.mark.slow
def test_theme_follows_the_system_until_one_is_chosen(open_tab, site):
    tab = open_tab(site, color_scheme="dark").open()
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    dark = tab.page.evaluate(ground)
    tab.page.get_by_role("button", name="Light theme").click()
    light = tab.page.evaluate(ground)
    assert light != dark
    tab.page.reload()
    assert tab.page.evaluate(ground) == light
    tab.page.get_by_role("button", name="Dark theme").click()
    tab.page.emulate_media(color_scheme="light")
    expect(tab.page.get_by_role("button", name="Dark theme")).to_be_visible()
    assert tab.page.evaluate(ground) == light


# Citations stand in the lines of a text, where the rule for targets makes an exception; a checkbox has its row's label.
TARGETS = """() => [...document.querySelectorAll('button, select, input, textarea, summary, .button')]
    .filter((node) => node.checkVisibility() && !node.closest('.for-readers') && !node.matches('.cite, .for-readers'))
    .map((node) => [node.type === 'checkbox' ? node.parentElement : node, node.outerHTML.slice(0, 80)])
    .map(([node, html]) => [node.getBoundingClientRect(), html])
    .map(([box, html]) => [Math.round(box.width), Math.round(box.height), html])"""


def expect_targets(tab: Tab) -> None:
    found = tab.page.evaluate(TARGETS)
    assert found
    assert [one for one in found if min(one[:2]) < 44] == []


@pytest.mark.slow
def test_phone(open_tab, site):
    tab = open_tab(site, viewport=PHONE).open()
    tab.expect_no_overflow()
    turn = tab.ask("When does " + "Donaudampfschifffahrtsgesellschaft" * 3 + " meet?")
    turn.locator(".chip").first.click()
    turn.locator(".prefill > summary").click()
    turn.get_by_text("Figures by phase").click()
    turn.get_by_role("button", name="Measure a full prefill").click()
    expect(turn.get_by_role("button", name="Measure again")).to_be_visible()
    table = turn.locator(".figures-table").evaluate("node => [node.scrollWidth, node.clientWidth]")
    assert table[0] <= table[1]
    # A slow machine has the widest figures, and a folder far down the longest paths.
    fill = "(parts, text) => parts.forEach(part => { part.textContent = text; })"
    turn.locator(".figures-table td, .reading-value").evaluate_all(fill, "123,456.7 ms")
    turn.locator(".passage .note").evaluate_all(fill, "/a/folder/far/down/" * 4 + "mira-dormann.md")
    tab.expect_no_overflow()
    wide = "() => { const node = document.getElementById('scroller'); return [node.scrollWidth, node.clientWidth]; }"
    scroll, room = tab.page.evaluate(wide)
    assert scroll <= room
    expect_targets(tab)
    panels = tab.page.get_by_role("complementary")
    expect(panels).to_be_hidden()
    tab.page.get_by_role("button", name="Documents and settings").click()
    expect(panels).to_be_visible()
    expect(tab.page.get_by_label("Question", exact=True)).to_be_hidden()
    for name in ("Settings", "Store", "Documents"):
        tab.show(name)
        tab.expect_no_overflow()
        expect_targets(tab)
    tab.page.get_by_role("button", name="Conversations").click()
    expect(panels).to_be_hidden()
    expect(tab.page.get_by_role("navigation").get_by_role("listitem")).to_have_count(1)
    tab.expect_no_overflow()
    expect_targets(tab)
    tab.page.get_by_role("button", name="Back").click()
    expect(tab.page.get_by_label("Question", exact=True)).to_be_visible()


@pytest.mark.slow
def test_motion_is_left_out_where_it_is_not_wanted(open_tab, site, slowed):
    tab = open_tab(site, reduced_motion="reduce").open()
    slowed.pause_s = 0.2
    tab.send(QUESTION)
    assert tab.page.evaluate("document.getAnimations().length") == 0
