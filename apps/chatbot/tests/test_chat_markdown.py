"""The chat page against a real server, in headless Chromium: Markdown, and citations."""

from typing import Any

from browsing import QUESTION, Tab
from playwright.sync_api import expect

LINK = 'target="_blank" rel="noopener noreferrer"'
FOCUSABLE = 'tabindex="0" role="group"'
MARKDOWN = {
    "# One #\nsome *a*, **b**, __c__, `d`, ~~e~~": (
        '<h4 data-level="1">One</h4><p>some <em>a</em>, <strong>b</strong>, <strong>c</strong>, <code>d</code>, '
        "<del>e</del></p>"
    ),
    "snake_case_name, 2*3*4, \\*a\\*, **open": "<p>snake_case_name, 2*3*4, *a*, **open</p>",
    "- a\n- b\n  - c\n\n    more\n\n3. x\n4. y": (
        "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p><p>more</p></li></ul></li></ul>"
        '<ol start="3"><li><p>x</p></li><li><p>y</p></li></ol>'
    ),
    "> q\n> - r\n\n---": "<blockquote><p>q</p><ul><li><p>r</p></li></ul></blockquote><hr>",
    "```py\na < b\n\n- no\n```\nafter": (
        f'<div class="code"><pre {FOCUSABLE} aria-label="Code, py"><code>a &lt; b\n\n- no</code></pre></div>'
        "<p>after</p>"
    ),
    "~~~\nopen": f'<div class="code"><pre {FOCUSABLE} aria-label="Code"><code>open</code></pre></div>',
    "| a | b |\n|:-|-:|\n| 1 \\| 2 |": (
        f'<div class="wide" {FOCUSABLE} aria-label="Table"><table>'
        '<thead><tr><th data-align="start">a</th><th data-align="end">b</th></tr></thead>'
        '<tbody><tr><td data-align="start">1 | 2</td><td data-align="end"></td></tr></tbody></table></div>'
    ),
    "[one](https://a.b/c), https://a.b/d.": (
        f'<p><a href="https://a.b/c" {LINK}>one</a>, <a href="https://a.b/d" {LINK}>https://a.b/d</a>.</p>'
    ),
    "[one], **重要**です, [two](page.html)\n\n[one]: https://a.b/c": (
        f'<p><a href="https://a.b/c" {LINK}>one</a>, <strong>重要</strong>です, <span>two</span></p>'
    ),
    # Nothing is loaded, nothing runs.
    "![picture](https://a.b/p.png)": f'<p><a href="https://a.b/p.png" {LINK}>picture</a></p>',
    "[x](javascript:alert(1)) [y](data:text/html,z)": "<p>[x](javascript:alert(1)) [y](data:text/html,z)</p>",
    "<img src=x onerror=alert(1)> &amp;": "<p>&lt;img src=x onerror=alert(1)&gt; &amp;amp;</p>",
}
RENDER = """async (texts) => {
    const {markdown} = await import('/static/js/markdown.js');
    return texts.map((text) => markdown(text).map((node) => node.outerHTML).join(''));
}"""
# Each would take minutes where a pattern tries the same characters in more than one way.
LONG = [
    part * (18_000 // len(part)) for part in ("*", "[", "`", "**a ", "> ", "- ", "_a", "![", "~~a", "[a](", "1. x\n")
]
TIMES = f"""async (texts) => {{
    const start = performance.now();
    await ({RENDER})(texts);
    return performance.now() - start;
}}"""

PASSAGES = [
    "Julia Haleau was christened in 1933. Haleau now lives in North Langham. Haleau is now a miner.",
    "North Langham is famous for umbrellas.",
    "Ada Olden is a typist.",
]
CITED = {
    "Olden is a typist.": [2],
    "Julia Haleau lives in a town that makes umbrellas.": [0, 1],
    "The weather is fine today.": [],
    "": [],
}
HOLDING = """async ([sentences, passages]) => {
    const {holding, words} = await import('/static/js/citations.js');
    return sentences.map((sentence) => holding(sentence, passages.map(words)));
}"""


def test_markdown_and_citations(tab: Tab, slowed):
    made = tab.page.evaluate(RENDER, list(MARKDOWN))
    assert dict(zip(MARKDOWN, made, strict=True)) == MARKDOWN
    assert tab.page.evaluate(TIMES, LONG) < 20_000
    assert tab.page.evaluate(HOLDING, [list(CITED), PASSAGES]) == list(CITED.values())

    def rewrite(event: dict[str, Any]) -> None:
        for choice in event["choices"]:
            text = choice["delta"].get("content")
            choice["delta"]["content"] = {"Victor": f"- {text}", ".": ". Who *knows*?"}.get(text, text)

    slowed.rewrite = rewrite
    turn = tab.ask(QUESTION)
    item = turn.locator(".answer li")
    names = turn.locator(".passage-name").all_text_contents()
    expect(item.locator(".cite")).to_have_accessible_name(f"Source 1: {names[0]}")
    assert names[0] == "Victor Branovic"
    passage = turn.locator(".passage").first
    expect(passage).to_be_hidden()
    item.locator(".cite").click()
    expect(passage).to_be_visible()
    expect(turn.locator(".chip").first).to_have_attribute("aria-expanded", "true")
    passage.get_by_role("button", name="Close").click()
    expect(passage).to_be_hidden()
