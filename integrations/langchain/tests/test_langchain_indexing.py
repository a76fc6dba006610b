"""langchain_core.indexing over the vector store, beside LangChain's own in-memory one."""

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_registry import QUESTION

from langchain_ragcache import HANDLE_KEY, RagCacheVectorStore, strip_handles

CLEANUPS = [None, "incremental", "full", "scoped_full"]


def page(source: str, *texts: str) -> list[Document]:
    return [Document(page_content=text, metadata={"source": source, "rank": rank}) for rank, text in enumerate(texts)]


# What a loader gives in one run after the other: more, less, changed, moved, twice the same, and nothing of one source.
RUNS = [
    page("a", "one", "two", "three") + page("b", "four"),
    page("a", "one", "two", "three") + page("b", "four"),
    page("a", "one", "changed", "three") + page("b", "four", "five"),
    page("a", "three", "one"),
    page("b", "four", "four") + page("c", "six"),
    page("c", "six"),
]


def reference_run(runs, cleanup) -> list[tuple[dict[str, int], list[Document]]]:
    """Return, after each run, the results and the documents by id of LangChain's own store."""
    store, records = InMemoryVectorStore(DeterministicFakeEmbedding(size=6)), new_records()
    found = []
    for run in runs:
        result = index(run, records, store, cleanup=cleanup, source_id_key="source", key_encoder="blake2b")
        found.append((dict(result), by_id(store)))
    return found


def new_records() -> InMemoryRecordManager:
    records = InMemoryRecordManager("test")
    records.create_schema()
    return records


def by_id(store: RagCacheVectorStore | InMemoryVectorStore) -> list[Document]:
    return sorted(store.similarity_search("anything", 100), key=lambda document: document.id)


@pytest.mark.parametrize("cleanup", CLEANUPS)
def test_indexing_does_what_it_does_with_langchains_own_store(store, cleanup):
    records = new_records()
    for run, (result, documents) in zip(RUNS, reference_run(RUNS, cleanup), strict=True):
        found = index(run, records, store, cleanup=cleanup, source_id_key="source", key_encoder="blake2b")
        assert dict(found) == result
        assert by_id(store) == documents


def test_what_was_retrieved_has_the_hash_of_what_was_indexed(store):
    records, options = new_records(), {"cleanup": "full", "key_encoder": "blake2b"}
    index(RUNS[0], records, store, **options)
    skipped = {"num_added": 0, "num_updated": 0, "num_skipped": 4, "num_deleted": 0}
    assert dict(index(store.similarity_search(QUESTION, 10), records, store, **options)) == skipped

    with_handles = store.as_retriever(search_kwargs={"k": 10}).invoke(QUESTION)
    assert all(HANDLE_KEY in document.metadata for document in with_handles)
    assert dict(index(strip_handles(with_handles), records, store, **options)) == skipped
    assert all(HANDLE_KEY in document.metadata for document in with_handles)
    index(with_handles, records, store, **options)  # other hashes: other ids, but nothing of the handle is stored
    assert all(HANDLE_KEY not in document.metadata for document in by_id(store))


def test_upsert_options_reach_the_store(store):
    index(RUNS[0], new_records(), store, cleanup=None, key_encoder="blake2b", upsert_kwargs={"kv": "lazy"})
    assert all(HANDLE_KEY not in d.metadata for d in store.similarity_search(QUESTION, 10, handles=True))
