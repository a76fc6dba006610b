"""Fixtures of all tests: the models and the store that most of them read."""

import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from tiny_model import save_tiny_llama

import ragcache as rc
from kit.makers import QUIET
from ragcache.engine import assemble
from ragcache.retrieval import embedder
from ragcache_demo.bag_of_words import BagOfWords

LOADED_ONCE = cache(assemble.load_lm)


@pytest.fixture
def models_once(monkeypatch):
    """Stores that are opened with a model's name share it. For tests that change no model's files."""
    monkeypatch.setattr(assemble, "load_lm", LOADED_ONCE)


@pytest.fixture(scope="session", autouse=True)
def _minilm_is_loaded_once():
    """Loading and hashing it takes longer than most tests that open a store by name."""
    load, loaded, package = embedder._load, {}, embedder.MINILM_PACKAGE

    def load_once(name, build, origin):
        if name != "minilm" or package != embedder.MINILM_PACKAGE:
            return load(name, build, origin)
        if origin not in loaded:
            loaded[origin] = load(name, build, origin)
        return loaded[origin]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedder, "_load", load_once)
        yield


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def lm(model_directory) -> rc.LanguageModel:
    return rc.load_lm(model_directory)


@pytest.fixture
def slow_model(lm):
    """Every pass takes at least 20 ms: long enough for a loop to be seen going on, and for askers to meet."""
    with lm.model.get_input_embeddings().register_forward_hook(lambda *_: time.sleep(0.02)):
        yield


@pytest.fixture
def exported(monkeypatch):
    """Keeps the spans of what a server or an engine does."""
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    exporter, provider = memory.InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("ragcache.server.tracing.tracer", lambda: provider.get_tracer("ragcache"))
    return exporter


@pytest.fixture
def open_kb(tmp_path, lm):
    """Opens the test's store, as often as wanted, and closes what was opened.

    The tiny model is read by `reposition` unless a test says otherwise: its own default, `full`, would reuse no block.
    texts: documents to ingest, by id
    """
    opened = []

    def open_one(path: Path = tmp_path / "kb", *, texts: Mapping[str, str] | None = None, **options) -> rc.RagCache:
        method = {} if options.get("model") else {"method": "reposition"}
        own = {"model": lm, "embedder": BagOfWords(), "store": QUIET, **method}
        kb = rc.RagCache.open(path, **{**own, **options})
        opened.append(kb)
        if texts:
            kb.ingest(rc.Document(id, text) for id, text in texts.items())
        return kb

    yield open_one
    for kb in opened:
        kb.close()


@pytest.fixture
def recorded(monkeypatch):
    """Has a store give the same answer to every call, and returns a dictionary that holds the last call's options."""

    def record(kb: rc.RagCache) -> dict[str, object]:
        given, answer = {}, kb.complete("Hi", sampling=rc.Sampling(1))

        def note(_prompt, **options):
            given.clear()
            given.update(options)
            return answer

        def stream(prompt, **options):
            yield rc.Done(note(prompt, **options))

        async def anote(prompt, **options):
            return note(prompt, **options)

        async def astream(prompt, **options):
            yield rc.Done(note(prompt, **options))

        calls = {"chat": note, "achat": anote, "stream_chat": stream, "astream_chat": astream}
        for name, call in {**calls, "stream_completion": stream, "astream_completion": astream}.items():
            monkeypatch.setattr(kb, name, call)
        return given

    return record
