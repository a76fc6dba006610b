"""Fixtures that a test module makes in one line, under the name on the left:

lm = tiny_lm(positions=2048)
family = each(METHOD_FAMILIES, tiny)
"""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from postgres_server import postgres_schema
from tiny_model import save_tiny_llama

import ragcache as rc
from ragcache_demo.bag_of_words import BagOfWords

QUIET = rc.StoreConfig(learn="off")
"""Nothing is learnt from prompts, so that a prompt is read the same way each time."""


def each(values: Iterable[Any], make: Callable[[Any], Any] = lambda value: value, **options: Any) -> Any:
    """Return a fixture with what `make` makes of each value. options: the fixture's, such as its scope"""

    @pytest.fixture(params=list(values), **options)
    def made(request):
        return make(request.param)

    return made


def made_by(make: Callable[..., Any], *given: Any, scope: str = "module") -> Any:
    """Return a fixture with what one call makes."""

    @pytest.fixture(scope=scope)
    def made():
        return make(*given)

    return made


def same_as(name: str) -> Any:
    """Return a fixture that is the one of this name."""

    @pytest.fixture
    def same(request):
        return request.getfixturevalue(name)

    return same


def tiny_directory(**options: Any) -> Any:
    """Return a fixture with the directory of a tiny Llama. options: those of `save_tiny_llama`"""

    @pytest.fixture(scope="module")
    def directory(tmp_path_factory):
        return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", **options)

    return directory


def tiny_lm(**options: Any) -> Any:
    """Return a fixture with a loaded tiny Llama. options: those of `save_tiny_llama`"""

    @pytest.fixture(scope="module")
    def lm(tmp_path_factory):
        return rc.load_lm(save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", **options))

    return lm


def module_kb(*documents: rc.Document) -> Any:
    """Return a fixture with a store of these documents for a whole module, over the module's `lm`."""

    @pytest.fixture(scope="module")
    def kb(lm, tmp_path_factory):
        path = tmp_path_factory.mktemp("module") / "kb"
        with rc.RagCache.open(path, model=lm, method="reposition", embedder=BagOfWords(), store=QUIET) as kb:
            kb.ingest(documents)
            yield kb

    return kb


def threads(count: int) -> Any:
    """Return a fixture with a pool of threads that ends with the test."""

    @pytest.fixture
    def pool():
        with ThreadPoolExecutor(count) as pool:
            yield pool

    return pool


def messages_of(module: ModuleType, level: int = logging.WARNING) -> Any:
    """Return a fixture with a function that lists what the module has logged so far."""

    @pytest.fixture
    def messages(caplog):
        caplog.set_level(level, module.__name__)
        return lambda: [record.getMessage() for record in caplog.records if record.name == module.__name__]

    return messages


def databases(name: str = "store") -> Any:
    """Return a fixture with an empty database: SQLite, then PostgreSQL where a server is given."""

    @pytest.fixture(params=["sqlite", "postgresql"])
    def url(request, tmp_path):
        if request.param == "sqlite":
            yield f"sqlite:///{tmp_path / name}.sqlite3"
        else:
            yield from postgres_schema()

    return url


def open_loading(**defaults: Any) -> Any:
    """Return a fixture `open_kb` whose stores load blocks, however quickly a tiny model computes them."""

    @pytest.fixture
    def open_kb(open_kb):
        def open_one(store=None, **options):
            return open_kb(store=replace(store or QUIET, load="always"), **{**defaults, **options})

        return open_one

    return open_kb
