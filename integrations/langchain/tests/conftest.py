"""Stores for LangChain's components: one over the bundled model with the registry's passages, small ones to change."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from langchain_registry import QUESTION, REGISTRY, registry_documents
from tiny_model import save_tiny_llama

import ragcache as rc
from langchain_ragcache import RagCacheVectorStore
from ragcache_demo.bag_of_words import BagOfWords


@pytest.fixture(autouse=True)
def no_network(monkeypatch) -> None:
    """Nothing here may reach out, tracing included."""

    def refuse(self: socket.socket, address: object) -> None:
        if self.family != socket.AF_UNIX:
            raise OSError(f"a test reached out to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


@pytest.fixture(scope="session")
def mini() -> rc.LanguageModel:
    return rc.load_lm("mini")


@pytest.fixture(scope="session")
def minilm() -> rc.Embedder:
    return rc.load_embedder("minilm")


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(tiny_directory) -> rc.LanguageModel:
    return rc.load_lm(tiny_directory)


@pytest.fixture
def open_store(tmp_path, mini) -> Iterator[Callable[..., rc.RagCache]]:
    """Opens stores over the bundled model and closes them; the same path is the same store."""
    opened = []

    def open_one(name: str = "kb", **options: object) -> rc.RagCache:
        kb = rc.RagCache.open(tmp_path / name, **{"model": mini, "embedder": BagOfWords(), **options})
        opened.append(kb)
        return kb

    yield open_one
    for kb in opened:
        kb.close()


@pytest.fixture(scope="session")
def made_registry(tmp_path_factory, mini, minilm) -> Path:
    """One document a line of the registry. Not to be changed: take `registry`."""
    path = tmp_path_factory.mktemp("registry") / "kb"
    with rc.RagCache.open(path, model=mini, embedder=minilm) as kb:
        RagCacheVectorStore(kb).add_documents(registry_documents())
    return path


@pytest.fixture
def registry(open_store, tmp_path, made_registry, mini, minilm) -> rc.RagCache:
    """A store of its own for each test, which keeps the prefix and no placed context: a question that is asked again is
    read as it was at first."""
    shutil.copytree(made_registry, tmp_path / "registry")
    config = rc.StoreConfig(prefix_bytes=16 * mini.kv_bytes_per_token)
    kb = open_store("registry", embedder=minilm, store=config)
    kb.ask(QUESTION, len(REGISTRY), sampling=rc.Sampling(1))  # the prefix's own block is computed, the others loaded
    return kb


@pytest.fixture
def store(open_store) -> RagCacheVectorStore:
    return RagCacheVectorStore(open_store())
