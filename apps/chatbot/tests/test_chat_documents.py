"""The chat page against a real server, in headless Chromium: documents."""

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
    assert any(text == f"Sending 1 file, {len(TEXT)} B" and value == 1 for text, value, _ in progress)
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


@pytest.mark.slow
@pytest.mark.usefixtures("deleting")
def test_a_file_of_a_name_that_is_taken_replaces_it_at_a_click(tab: Tab, kb):
    news = tab.page.locator("#documents-news")
    files = tab.page.get_by_label("Add files")
    files.set_input_files(as_file(NAME, TEXT))
    expect(news).to_have_text("1 document added.")
    files.set_input_files(as_file(NAME, TEXT.replace("potter", "baker")))
    expect(news).to_contain_text("another text is stored")
    assert "potter" in kb.chunks_of(NAME)[0].text
    news.get_by_role("button", name="Replace 1 document").click()
    expect(news).to_have_text("1 document replaced.")
    assert "baker" in kb.chunks_of(NAME)[0].text


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.usefixtures("deleting")
def test_folder_is_added_under_its_name(tab: Tab, kb, tmp_path):
    (tmp_path / "notes" / "deep").mkdir(parents=True)
    (tmp_path / "notes" / "deep" / NAME).write_text(TEXT)
    (tmp_path / "notes" / "picture.bmp").write_bytes(b"x")
    tab.page.get_by_label("Add folder").set_input_files(tmp_path / "notes")
    expect(tab.page.locator("#documents-news")).to_have_text("1 document added.")
    expect(tab.page.locator("#documents-list .folder summary").first).to_have_text("deep")
    assert kb.document(f"notes/deep/{NAME}").num_chunks == 1


@pytest.mark.slow
@pytest.mark.usefixtures("deleting")
def test_uploads_keep_to_the_servers_limits(open_tab, kb):
    with serving(kb, max_upload_bytes=4096, max_upload_files=3) as site:
        tab = open_tab(site).open()
        sent = []
        tab.page.on("request", lambda request: sent.append(request) if request.method == "POST" else None)
        news = tab.page.locator("#documents-news")
        large, names = as_file(NAME, TEXT * 100), [f"{number}.md" for number in range(5)]
        add = tab.page.get_by_label("Add files")
        assert {".md", ".pdf"} < set(add.get_attribute("accept").split(","))
        add.set_input_files([large, *(as_file(name, f"Note {name}.") for name in names)])
        expect(news.get_by_text("5 documents added.")).to_be_visible()
        expect(news.locator("li")).to_have_text(
            f"{NAME} has {len(TEXT) / 10.24:.1f} KiB; this server takes 4.0 KiB at once."
        )
        assert len(sent) == 2  # three files and two
        for name in names:
            expect(tab.page.locator("#documents-list")).to_contain_text(name.removesuffix(".md"))
        # If the page does not know the limits, the server's error names them.
        tab.page.route("**/v1/store", lambda route: None)
        tab.page.reload()
        add.set_input_files(large)
        trouble = tab.page.locator("#documents-news [role=alert]")
        expect(trouble).to_contain_text("4096")
        expect(trouble).to_contain_text("fewer or smaller files")
        expect(trouble.get_by_role("button")).to_have_count(0)  # a retry would fail again
        assert kb.document(NAME) is None
        assert "413" in tab.complaints.pop()  # the browser's own line


@pytest.mark.slow
def test_list_is_searched_and_shown_by_folders_and_pages(tab: Tab, kb):
    total = len(kb.documents())
    items = tab.page.locator("#documents-list li")
    expect(items).to_have_count(50)
    for shown in (100, 150):
        tab.page.get_by_role("button", name="Show more").click()
        expect(items).to_have_count(shown)
    expect(tab.page.get_by_role("button", name="Show more")).to_have_text(f"Show more ({total - 150})")
    folders = tab.page.locator("#documents-list .folder")
    expect(folders.locator("summary")).to_have_text(["people", "towns"])
    expect(folders.first.locator("li")).to_have_count(sum("/people/" in one.id for one in kb.documents()))
    folders.first.locator("summary").click()
    expect(folders.first.locator("li").first).to_be_hidden()
    tab.page.get_by_role("button", name="Show more").click()
    expect(items).to_have_count(total)
    expect(folders.first.locator("li").first).to_be_hidden()
    find = tab.page.get_by_label("Find documents by name")
    find.fill("Victor Branovic")
    expect(tab.page.get_by_role("heading", name="1 found")).to_be_visible()
    assert items.get_by_text("Victor Branovic").count() == 1
    find.fill("no such thing")
    expect(tab.page.locator("#documents-list")).to_have_text("No document has this in its name.")
    find.fill("")
    expect(items).to_have_count(50)
