"""Open WebUI over a real server, in headless Chromium."""

import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from browsing import ANSWER, QUESTION, Site, serving
from fastapi import FastAPI
from playwright.sync_api import Browser, Page, expect
from starlette.types import Message, Receive, Scope, Send
from waiting import until

INSTALLED = Path(__file__).parents[3] / ".peers" / "open-webui"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Overheard:
    """Records, between Open WebUI and the server, the bodies of requests for chat completions and of their answers."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.chats: list[tuple[dict[str, Any], str]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked, told = bytearray(), bytearray()

        async def hear() -> Message:
            message = await receive()
            asked.extend(message.get("body", b""))
            return message

        async def tell(message: Message) -> None:
            told.extend(message.get("body", b""))
            await send(message)

        await self.app(scope, hear, tell)
        if scope.get("path") == "/v1/chat/completions":
            self.chats.append((json.loads(asked), told.decode()))


@pytest.fixture(scope="module")
def site(kb) -> Iterator[Site]:
    with serving(kb) as site:
        site.slowed.app = Overheard(site.slowed.app)
        yield site


@pytest.fixture(scope="module")
def open_webui(site, tmp_path_factory) -> Iterator[str]:
    """Return the URL of Open WebUI, with the settings of docs/server.md."""
    if not (INSTALLED / "ready").is_file():
        pytest.skip("Open WebUI is not installed (scripts/peers-environment .peers open-webui)")
    folder = tmp_path_factory.mktemp("open-webui")
    settings = {
        "OPENAI_API_BASE_URL": f"{site.url}/v1",
        "OPENAI_API_KEY": "none",
        "ENABLE_OLLAMA_API": "false",
        "TASK_MODEL_EXTERNAL": "mini:plain",
        "DEFAULT_MODEL_METADATA": '{"capabilities": {"builtin_tools": false}}',
        "RAG_EMBEDDING_ENGINE": "openai",
        "RAG_EMBEDDING_MODEL": "minilm",
        "RAG_OPENAI_API_BASE_URL": f"{site.url}/v1",
        "WEBUI_AUTH": "False",
        "OFFLINE_MODE": "true",
        "DATA_DIR": str(folder),
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [INSTALLED / "bin" / "open-webui", "serve", "--host", "127.0.0.1", "--port", str(port)]
    with open(folder / "log.txt", "wb") as log:
        process = subprocess.Popen(command, cwd=folder, env={**os.environ, **settings}, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: process.poll() is not None or is_up(url), 600, every_s=0.1)
        assert process.poll() is None, (folder / "log.txt").read_text()
        yield url
    finally:
        process.terminate()
        process.wait(60)


def is_up(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", trust_env=False).is_success
    return False


@pytest.fixture
def page(browser: Browser, open_webui: str) -> Iterator[Page]:
    with browser.new_context() as context:
        page = context.new_page()
        news = page.get_by_role("button", name="Okay, Let's Go!")
        page.add_locator_handler(news, lambda: news.click())
        page.goto(open_webui)
        yield page


def test_question_is_answered_from_the_store_and_tasks_are_not(page: Page, site: Site, kb):
    page.get_by_role("button", name="Selected model").click()
    page.get_by_role("option", name="Select mini model").click()
    page.locator("#chat-input").click()
    site.slowed.pause_s = 1.5  # longer than the browser waits between two looks
    page.keyboard.type(QUESTION)
    page.keyboard.press("Enter")
    answer = page.locator("#response-content-container")
    expect(answer).to_have_text(re.compile(r"^\s*Victor\b[^.]*5 Sources\s*$"))  # a part: it is streamed
    site.slowed.pause_s = 0
    expect(answer).to_contain_text(ANSWER)

    hits = kb.retrieve(QUESTION, k=5)
    page.get_by_role("button", name="5 sources").click()
    sources = page.locator("button[id^=source-]")
    expect(sources).to_have_text([re.compile(rf"{Path(hit.chunk.source).name}\s*$") for hit in hits])
    sources.first.click()
    expect(page.get_by_role("dialog")).to_contain_text(hits[0].chunk.text.splitlines()[-1])

    chats = site.slowed.app.chats
    until(lambda: len(chats) >= 4)  # with the title, the tags and what could be asked next
    assert sorted(request["model"] for request, _ in chats) == ["mini", "mini:plain", "mini:plain", "mini:plain"]
    tasks = [json.loads(told) for request, told in chats if request["model"] == "mini:plain"]
    assert [task["ragcache"]["sources"] for task in tasks] == [[], [], []]
