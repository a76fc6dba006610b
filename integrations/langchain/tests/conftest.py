"""Stores for LangChain's components: a store of the registry's passages with the bundled model, and small stores to
change.
"""

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.makers import made_by
from langchain_registry import QUESTION, REGISTRY, registry_documents

import ragcache as rc
from langchain_ragcache import RagCacheVectorStore

STANDARD = {
    "test_langchain_standard_chat_model.py": "invoke stream astream conversation usage_metadata stop_sequence "
    "tool_calling usage_metadata_streaming structured_output_async no_overrides_DO_NOT_OVERRIDE",
    "test_langchain_standard_vectorstore.py": "vectorstore_is_empty add_documents deleting_documents get_by_ids "
    "add_documents_by_id_with_mutation_async no_overrides_DO_NOT_OVERRIDE",
}
"""Tests of LangChain's own suites that a commit runs; the others are slow."""


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for item in items:
        kept = STANDARD.get(item.path.name, "").split()
        if kept and "Unit" not in item.cls.__name__ and item.originalname.removeprefix("test_") not in kept:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def no_network(monkeypatch) -> None:
    """Refuse all network access, tracing included."""

    def refuse(self: socket.socket, address: object) -> None:
        if self.family != socket.AF_UNIX:
            raise OSError(f"a test reached out to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


mini = made_by(rc.load_lm, "mini", scope="session")


minilm = made_by(rc.load_embedder, "minilm", scope="session")


@pytest.fixture(scope="session")
def made_registry(tmp_path_factory, mini, minilm) -> Path:
    """Return the path of a store with a document for each line of the registry, which `shared_registry` copies."""
    path = tmp_path_factory.mktemp("registry") / "kb"
    with rc.RagCache.open(path, model=mini, embedder=minilm) as kb:
        RagCacheVectorStore(kb).add_documents(registry_documents())
    return path


@pytest.fixture(scope="session")
def shared_registry(tmp_path_factory, made_registry, mini, minilm) -> Iterator[rc.RagCache]:
    """Yield a store that keeps the prefix but no placed context: a repeated question is read as at first."""
    folder = tmp_path_factory.mktemp("read") / "registry"
    shutil.copytree(made_registry, folder)
    config = rc.StoreConfig(prefix_bytes=16 * mini.kv_bytes_per_token)
    with rc.RagCache.open(folder, model=mini, embedder=minilm, store=config) as kb:
        yield kb


@pytest.fixture
def registry(shared_registry) -> rc.RagCache:
    """Return a store for tests that change nothing and read no new passage that another test reads. The prefix's block
    is computed, the others are loaded.
    """
    shared_registry.ask(QUESTION, len(REGISTRY), sampling=rc.Sampling(1))
    return shared_registry


@pytest.fixture
def store(open_kb, mini) -> RagCacheVectorStore:
    return RagCacheVectorStore(open_kb(model=mini))
