"""langchain_core.indexing over the vector store."""

from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_registry import QUESTION

from langchain_ragcache import HANDLE_KEY, RagCacheVectorStore, strip_handles

PAGES = [
    Document(page_content=text, metadata={"source": source})
    for source, text in (("a", "one"), ("a", "two"), ("a", "three"), ("b", "four"))
]


def new_records() -> InMemoryRecordManager:
    records = InMemoryRecordManager("test")
    records.create_schema()
    return records


def by_id(store: RagCacheVectorStore) -> list[Document]:
    return sorted(store.similarity_search("anything", 100), key=lambda document: document.id)


def test_what_was_retrieved_has_the_hash_of_what_was_indexed(store):
    records, options = new_records(), {"cleanup": "full", "key_encoder": "blake2b"}
    index(PAGES, records, store, **options)
    skipped = {"num_added": 0, "num_updated": 0, "num_skipped": 4, "num_deleted": 0}
    assert dict(index(store.similarity_search(QUESTION, 10), records, store, **options)) == skipped

    with_handles = store.as_retriever(search_kwargs={"k": 10}).invoke(QUESTION)
    assert all(HANDLE_KEY in document.metadata for document in with_handles)
    assert dict(index(strip_handles(with_handles), records, store, **options)) == skipped
    assert all(HANDLE_KEY in document.metadata for document in with_handles)
    index(with_handles, records, store, **options)  # other hashes: other ids, but nothing of the handle is stored
    assert all(HANDLE_KEY not in document.metadata for document in by_id(store))


def test_upsert_options_reach_the_store(store):
    index(PAGES, new_records(), store, cleanup=None, key_encoder="blake2b", upsert_kwargs={"kv": "lazy"})
    assert all(HANDLE_KEY not in d.metadata for d in store.similarity_search(QUESTION, 10, handles=True))
