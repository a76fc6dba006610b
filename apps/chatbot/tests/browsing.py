"""A real server over the bundled model, and headless Chromium on its page."""

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from fastapi import FastAPI
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Request, expect, sync_playwright
from serving import running
from starlette.types import Message, Receive, Scope, Send

import ragcache as rc
from ragcache.server.app import create_app
from ragcache.server.settings import ServerSettings

CORPUS = Path(__file__).parents[3] / "examples" / "corpus"
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
QUESTION, ANSWER = "What is Victor Branovic's profession?", "Victor Branovic works as a miner."
OTHER, OTHER_ANSWER = "Which product is Mount Birchcombe known for?", "Mount Birchcombe is known for saddles."
DESKTOP = {"width": 1280, "height": 860}
PHONE = {"width": 360, "height": 780}
PATIENCE_MS = 20_000  # a machine that is busy with other tests is slow, not wrong


class Slowed:
    """Middleware between a server and its application: delays, changes or cuts off the events of answers.

    pause_s: seconds before each part of an event stream. rewrite: changes the JSON of each event of an answer in place.
    break_after: events of a stream after which the connection breaks
    """

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.state = app.state
        self.reset()

    def reset(self) -> None:
        self.pause_s = 0.0
        self.rewrite: Callable[[dict[str, Any]], None] | None = None
        self.break_after: int | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streams, sent = False, 0

        async def slowly(message: Message) -> None:
            nonlocal streams, sent
            if message["type"] == "http.response.start":
                streams = any(b"text/event-stream" in value for _, value in message["headers"])
            elif streams:
                await asyncio.sleep(self.pause_s)
                if self.break_after is not None and sent >= self.break_after:
                    return
                sent += message.get("body", b"").startswith(b"data: ")  # others only keep a slow stream alive
                message = {**message, "body": self._rewritten(message.get("body", b""))}
            await send(message)

        await self.app(scope, receive, slowly)

    def _rewritten(self, part: bytes) -> bytes:
        if self.rewrite is None or not part.startswith(b"data: {"):
            return part
        event = json.loads(part.removeprefix(b"data: "))
        self.rewrite(event)
        return f"data: {json.dumps(event)}\n\n".encode()


@dataclass
class Site:
    """A page's server."""

    url: str
    slowed: Slowed

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextmanager
def serving(kb: rc.RagCache, port: int = 0, **settings: object) -> Iterator[Site]:
    """Serve in a thread, at a free loopback port or at `port`."""
    slowed = Slowed(create_app(kb, ServerSettings(figures_s=0, **settings), web=True))
    with running(slowed, 1, port) as (url, _):
        yield Site(url, slowed)


@contextmanager
def open_corpus(
    path: Path, lm: rc.LanguageModel, embedder: rc.Embedder, folders: Sequence[Path]
) -> Iterator[rc.RagCache]:
    """Open a store of folders of the example corpus like a new process: all KV is on disk, none in memory."""
    with rc.RagCache.open(path, model=lm, embedder=embedder) as kb:
        report = kb.ingest(folders)
        assert not report.failed
    with rc.RagCache.open(path, model=lm, embedder=embedder) as kb:
        yield kb


@contextmanager
def running_browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Tab:
    """A page in a browser, with its complaints on the console and its requests."""

    page: Page
    site: Site
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._on_request)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _on_request(self, request: Request) -> None:
        self.requests.append(request.url)

    def open(self) -> Self:
        self.page.goto(self.site.url)
        expect(self.page.locator("#method option")).not_to_have_count(1)
        expect(self.page.locator("#documents-list li")).not_to_have_count(0)
        return self

    def bodies(self) -> list[Any]:
        """Return a list that collects the JSON bodies of the page's requests from now on."""
        sent: list[Any] = []
        self.page.on("request", lambda request: sent.append(request.post_data_json) if request.post_data else None)
        return sent

    def show(self, tab: str) -> None:
        """Open the tab Documents, Settings or Store."""
        self.page.get_by_role("tab", name=tab).click()

    def send(self, question: str) -> Locator:
        """Ask a question, and return its turn at once."""
        turns = self.page.locator(".turn")
        before = turns.count()
        self.page.get_by_label("Question", exact=True).fill(question)
        self.page.keyboard.press("Enter")
        expect(turns).to_have_count(before + 1)
        return turns.nth(before)

    def ask(self, question: str) -> Locator:
        """Ask a question, and return its turn when it is answered."""
        turn = self.send(question)
        expect(turn).to_have_attribute("data-state", "done")
        return turn

    def kept(self) -> list[dict[str, Any]]:
        """Return the turns of the only conversation that the browser keeps."""
        entries = self.page.evaluate("Object.entries(localStorage)")
        [kept] = [json.loads(text) for name, text in entries if name.startswith("ragcache.conversation")]
        return kept["turns"]

    def expect_no_overflow(self) -> None:
        wide, room = self.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide <= room
