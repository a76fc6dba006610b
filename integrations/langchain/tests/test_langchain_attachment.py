"""KV for the documents of a user's own vector store: an unchanged chain finds it, and it is deleted with them."""

from types import SimpleNamespace

import pytest
from engine_texts import PAGES as TEXTS
from kit.makers import tiny_lm
from langchain_classic_double import stuff_chain
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from waiting import in_own_loop

import ragcache as rc
from langchain_ragcache import ChatRagCache, RagCacheDocumentTransformer
from ragcache.errors import ConfigError

PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer from this:\n\n{context}\n\nBe brief."), ("human", "{input}")]
)

wide = tiny_lm(positions=4096)


@pytest.fixture
def kb(open_kb, wide):
    return open_kb(model=wide, method="reposition", store=rc.StoreConfig(load="always"))


@pytest.fixture
def theirs() -> InMemoryVectorStore:
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
    store.add_texts(list(TEXTS.values()), ids=list(TEXTS))
    return store


def handle(kb: rc.RagCache, text: str) -> str | None:
    """Return the handle of a text's KV, or None if none is kept."""
    return kb.precompute(text, dry_run=True).handles[0]


def kept(kb: rc.RagCache) -> set[str]:
    return {id for id, text in TEXTS.items() if handle(kb, text)}


def share(kb: rc.RagCache, message) -> float:
    """Return the number of cached tokens over that of the passages' tokens."""
    return message.usage_metadata["input_token_details"]["cache_read"] / sum(map(kb.count_tokens, TEXTS.values()))


def test_their_chain_finds_all_at_the_first_question(kb, theirs, wide):
    report = kb.precompute(theirs)
    assert (report.computed, report.known, report.failed) == (3, 0, [])
    assert report.tokens == sum(kb.count_tokens(f"{text}\n") for text in TEXTS.values())
    documents = theirs.similarity_search("ferry", k=3)
    assert all("ragcache_handle" not in one.metadata for one in documents)
    chain = stuff_chain(ChatRagCache(kb=kb, max_tokens=2), PROMPT)
    first = chain.invoke({"context": documents, "input": "When does the ferry go?"})
    assert share(kb, first) >= 0.95
    assert [one["kv"] for one in first.response_metadata["sources"]] == ["disk"] * 3
    assert kb.info().chunks == 0


def places(message) -> dict[str, tuple]:
    """Return, by passage, the document, title and place that an answer's sources state."""
    return {
        one["chunk_id"]: (one["document_id"], one["title"], one["place"])
        for one in message.response_metadata["sources"]
    }


@pytest.mark.parametrize("way", ["documents", "texts", "precompute", "retriever"])
def test_sources_name_the_users_own_documents(kb, way):
    metadata = {id: {"source": f"{id}.pdf", "title": id.upper(), "page": 3, "page_label": "4"} for id in TEXTS}
    theirs = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
    mine = rc.attach(theirs, kb)
    store = mine if way in ("documents", "texts") else theirs
    if way == "documents":
        store.add_documents([Document(id=id, page_content=text, metadata=metadata[id]) for id, text in TEXTS.items()])
    else:
        store.add_texts(list(TEXTS.values()), metadatas=list(metadata.values()), ids=list(TEXTS))
    if way == "precompute":
        kb.precompute(theirs)
    found = (mine if way == "retriever" else theirs).as_retriever(search_kwargs={"k": 3}).invoke("ferry")
    chain = stuff_chain(ChatRagCache(kb=kb, max_tokens=2), PROMPT)
    answer = chain.invoke({"context": found, "input": "When does the ferry go?"})
    assert places(answer) == {id: (f"{id}.pdf", id.upper(), "p. 4") for id in TEXTS}
    assert [one["metadata"]["page"] for one in answer.response_metadata["sources"]] == [3, 3, 3]


def test_an_attached_store_is_theirs(kb, theirs):
    kb.precompute(theirs)
    mine = rc.attach(theirs, kb)
    assert isinstance(mine, InMemoryVectorStore)
    assert mine.store is theirs.store
    names = {one.id: one.metadata["ragcache_handle"] for one in mine.similarity_search("ferry", k=3)}
    assert names == {id: handle(kb, text) for id, text in TEXTS.items()}
    scored = mine.similarity_search_with_score("ferry", k=2)
    assert scored[0][0].metadata["ragcache_handle"] == names[scored[0][0].id]
    assert [score for _, score in scored] == [score for _, score in theirs.similarity_search_with_score("ferry", k=2)]
    assert mine.as_retriever().invoke("mill")[0].metadata["ragcache_handle"]
    assert in_own_loop(mine.asimilarity_search("ferry", k=1))[0].metadata["ragcache_handle"]
    assert "ragcache_handle" not in theirs.similarity_search("ferry", k=1)[0].metadata


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_added_and_deleted_reaches_the_kv(kb, theirs, asynchronous):
    mine = rc.attach(InMemoryVectorStore(DeterministicFakeEmbedding(size=8)), kb)
    documents = [Document(id=id, page_content=text) for id, text in TEXTS.items()]

    def call(name, *args, **options):
        if asynchronous:
            return in_own_loop(getattr(mine, f"a{name}")(*args, **options))
        return getattr(mine, name)(*args, **options)

    assert call("add_documents", documents[:2]) == ["light", "ferry"]
    assert call("add_texts", iter([TEXTS["mill"]]), ids=["mill"]) == ["mill"]
    assert kept(kb) == set(TEXTS)
    call("delete", ["ferry"])
    assert kept(kb) == {"light", "mill"}
    call("add_documents", [Document(id="mill", page_content="Another text, of which nobody has heard before.")])
    assert kept(kb) == {"light"}
    assert handle(kb, "Another text, of which nobody has heard before.")


class Changing(InMemoryVectorStore):
    """A store with its own method to change documents."""

    def update_documents(self, ids, documents):
        InMemoryVectorStore.add_documents(self, documents, ids=ids)


@pytest.mark.parametrize("way", ["documents", "documents by name", "texts", "update"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_found_documents_come_back_without_handles(kb, way, asynchronous):
    theirs = Changing(DeterministicFakeEmbedding(size=8))
    mine = rc.attach(theirs, kb)
    mine.add_documents([Document(id="mill", page_content=TEXTS["mill"], metadata={"year": 2024})])
    [found] = mine.similarity_search("mill", k=1)
    assert found.metadata.pop("year") == 2024
    assert list(found.metadata) == ["ragcache_handle"]
    found.metadata["year"] = 2025
    ways = {
        "documents": ("add_documents", [[found]], {}),
        "documents by name": ("add_documents", [], {"documents": iter([found])}),
        "texts": ("add_texts", [[found.page_content]], {"metadatas": [found.metadata], "ids": ["mill"]}),
        "update": ("update_documents", [["mill"]], {"documents": [found]}),
    }
    name, arguments, options = ways[way]
    if asynchronous and way != "update":
        in_own_loop(getattr(mine, f"a{name}")(*arguments, **options))
    else:
        getattr(mine, name)(*arguments, **options)
    assert theirs.get_by_ids(["mill"])[0].metadata == {"year": 2025}
    assert found.metadata["ragcache_handle"] == handle(kb, TEXTS["mill"]) is not None


class Words(BaseRetriever):
    """A retriever that does not state which documents it holds."""

    found: list[Document]

    def _get_relevant_documents(self, query, *, run_manager):
        if query == "error":
            raise RuntimeError("the index is away")
        return self.found


def test_a_retriever_of_their_own_is_learnt_from(kb):
    theirs = Words(found=[Document(page_content=text) for text in TEXTS.values()])
    mine = rc.attach(theirs, kb)
    assert isinstance(mine, Words)
    with pytest.raises(RuntimeError, match="the index is away"):
        mine.invoke("error")
    assert kept(kb) == set()
    found = mine.invoke("ferry")
    assert kept(kb) == set(TEXTS)
    assert [one.metadata["ragcache_handle"] for one in in_own_loop(mine.ainvoke("ferry"))] == [
        one.metadata["ragcache_handle"] for one in found
    ]
    assert [one.metadata for one in theirs.found] == [{}] * 3


def test_nothing_is_learnt_where_the_method_reads_no_blocks(open_kb, wide, theirs):
    kb = open_kb(model=wide, method="full")
    [found] = rc.attach(theirs, kb).similarity_search("ferry", k=1)
    assert "ragcache_handle" not in found.metadata
    assert kept(kb) == set()


def test_a_transformer_stands_in_pipelines_and_chains(kb, theirs):
    step = RagCacheDocumentTransformer(kb)
    documents = [Document(id=id, page_content=text) for id, text in TEXTS.items()]
    named = step.transform_documents([*documents, Document(page_content=" ")])
    assert [one.metadata.get("ragcache_handle") for one in named[:3]] == [handle(kb, text) for text in TEXTS.values()]
    assert named[3].metadata == {}
    assert in_own_loop(step.atransform_documents(documents)) == named[:3]
    chain = theirs.as_retriever() | step
    assert chain.invoke("ferry")[0].metadata["ragcache_handle"]


class Sealed(VectorStore):
    """A vector store that returns nothing, and raises in every method that could tell its content."""

    def add_texts(self, texts, metadatas=None, *, ids=None, **kwargs):
        return ["one"] * len(list(texts)) if kwargs.get("well", True) else None

    def delete(self, ids=None, **kwargs):
        return True

    def similarity_search(self, query, k=4, **kwargs):
        return ["no document"]

    @classmethod
    def from_texts(cls, texts, embedding, metadatas=None, **kwargs):
        return cls()


class LikeChroma(Sealed):
    def get(self):
        rows = {"ids": ["a", "b", "c"], "documents": [TEXTS["light"], TEXTS["ferry"], None]}
        return {**rows, "metadatas": [{"page_label": "1"}, None, None]}


class LikeFaiss(Sealed):
    docstore = SimpleNamespace(
        _dict={
            "a": Document(page_content=TEXTS["light"], metadata={"page_label": "1"}),
            "b": Document(page_content=TEXTS["ferry"]),
        }
    )


@pytest.mark.parametrize("theirs", [LikeChroma(), LikeFaiss()])
def test_metadata_of_stores_that_say_what_they_hold(kb, theirs):
    assert kb.precompute(theirs).computed == 2
    chain = stuff_chain(ChatRagCache(kb=kb, max_tokens=2), PROMPT)
    found = [Document(page_content=text) for text in TEXTS.values()]
    answer = chain.invoke({"context": found, "input": "When does the ferry go?"})
    assert places(answer) == {"a": ("a", "", "p. 1"), "b": ("b", "", "")}


def test_bad_input(kb, theirs, caplog):
    with pytest.raises(ConfigError, match="Sealed does not say which documents it holds"):
        kb.precompute(Sealed())
    with pytest.raises(ConfigError, match="takes no colour"):
        rc.attach(theirs, kb, colour="red")
    with pytest.raises(ConfigError, match="Document cannot be attached"):
        rc.attach(Document(page_content="a"), kb)
    mine = rc.attach(Sealed(), kb)
    assert mine.similarity_search("a") == ["no document"]
    assert mine.add_texts([TEXTS["mill"]], well=False) is None
    assert kept(kb) == {"mill"}
    assert mine.delete() is True
    assert "KV does not follow" in caplog.text


def test_a_store_that_is_closed_does_not_stop_theirs(kb, theirs, caplog):
    mine = rc.attach(theirs, kb)
    kb.close()
    assert mine.add_texts(["A text."], ids=["x"]) == ["x"]
    assert mine.similarity_search("A text.", k=4)
    assert "this store is closed" in caplog.text
