"""Stores for LangChain's components: one over the bundled model with the registry's passages, small ones to change."""

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
    """Nothing here may reach out, tracing included."""

    def refuse(self: socket.socket, address: object) -> None:
        if self.family != socket.AF_UNIX:
            raise OSError(f"a test reached out to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


mini = made_by(rc.load_lm, "mini", scope="session")


minilm = made_by(rc.load_embedder, "minilm", scope="session")


@pytest.fixture(scope="session")
def made_registry(tmp_path_factory, mini, minilm) -> Path:
    """One document a line of the registry. Copied by `shared_registry`."""
    path = tmp_path_factory.mktemp("registry") / "kb"
    with rc.RagCache.open(path, model=mini, embedder=minilm) as kb:
        RagCacheVectorStore(kb).add_documents(registry_documents())
    return path


@pytest.fixture(scope="session")
def shared_registry(tmp_path_factory, made_registry, mini, minilm) -> Iterator[rc.RagCache]:
    """It keeps the prefix and no placed context: a question that is asked again is read as it was at first."""
    folder = tmp_path_factory.mktemp("read") / "registry"
    shutil.copytree(made_registry, folder)
    config = rc.StoreConfig(prefix_bytes=16 * mini.kv_bytes_per_token)
    with rc.RagCache.open(folder, model=mini, embedder=minilm, store=config) as kb:
        yield kb


@pytest.fixture
def registry(shared_registry) -> rc.RagCache:
    """For tests that add and delete nothing, and read no new passage that another one reads. The prefix's own block is
    computed, the others loaded."""
    shared_registry.ask(QUESTION, len(REGISTRY), sampling=rc.Sampling(1))
    return shared_registry


@pytest.fixture
def store(open_kb, mini) -> RagCacheVectorStore:
    return RagCacheVectorStore(open_kb(model=mini))
