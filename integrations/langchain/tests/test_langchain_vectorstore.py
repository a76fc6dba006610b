"""The vector store beyond the standard suite: stored, found and refused documents."""

import uuid

import numpy as np
import pytest
from kit.embedders import FourWords
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores.utils import maximal_marginal_relevance
from langchain_doubles import SlowEmbedder
from langchain_registry import QUESTION, REGISTRY, registry_documents
from waiting import ticking

import ragcache as rc
from langchain_ragcache import (
    HANDLE_KEY,
    ChatRagCache,
    LangChainEmbedder,
    RagCacheEmbeddings,
    RagCacheRetriever,
    RagCacheVectorStore,
)
from ragcache import errors
from ragcache_demo.bag_of_words import BagOfWords


@pytest.fixture
def filled(store) -> RagCacheVectorStore:
    store.add_documents(registry_documents())
    return store


# What is stored


def test_a_document_is_one_passage_kept_exactly(store):
    text = "\n  # A heading\n\n" + "A sentence of some length, again and again.  \n" * 100 + "\tthe end "
    metadata = {"list": [1, {"deep": None}], "float": 0.1, "ключ": "wert"}
    store.add_documents([Document(id="long", page_content=text, metadata=metadata)])
    assert store.get_by_ids(["long"]) == [Document(id="long", page_content=text, metadata=metadata)]
    assert len(store.kb.chunks_of("long")) == 1


def test_kv_is_computed_when_a_document_is_added_unless_it_is_to_wait(store):
    store.add_documents(registry_documents()[:2])
    store.add_documents(registry_documents()[2:3], kv="lazy")
    handles = [chunk.handle for chunk in store.kb.chunks(["lansen", "belson", "heron"])]
    assert handles[0]
    assert handles[1]
    assert handles[2] is None
    found = store.similarity_search(REGISTRY["heron"], 1, handles=True)
    assert HANDLE_KEY not in found[0].metadata


def test_ids_come_back_in_order_and_the_last_of_equal_ids_stays(store):
    documents = [Document(id=id, page_content=f"text {n}") for n, id in enumerate(["a", "b", "a", "c", "b"])]
    assert store.add_documents(documents) == ["a", "b", "a", "c", "b"]
    assert [document.page_content for document in store.get_by_ids(["a", "b", "c"])] == ["text 2", "text 4", "text 3"]


def test_given_ids_win_over_the_documents_own_and_new_ones(store):
    documents = [Document(page_content="one"), Document(page_content="one"), Document(page_content="two", id="own")]
    ids = store.add_documents(documents)
    assert ids[2] == "own"
    assert len({*ids, *store.add_documents(documents)}) == 5
    assert all(uuid.UUID(id) for id in ids[:2])
    assert documents[0].id is None
    assert store.add_documents(documents[1:], ids=["given", None]) == ["given", "own"]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (Document(id="wrong", page_content="text", metadata={"when": object()}), errors.MetadataError),
        (Document(id="wrong", page_content="text", metadata={"x": float("nan")}), errors.MetadataError),
        (Document(id="wrong", page_content="  "), errors.ReaderError),
        (Document(id="wrong", page_content="nul \0"), errors.ReaderError),
        (Document(id="wrong", page_content="longer than the model reads " * 1000), errors.ContextTooLongError),
    ],
)
def test_a_document_that_cannot_be_stored_is_named_and_the_others_are_stored(store, wrong, error):
    before, after = Document(id="before", page_content="one"), Document(id="after", page_content="two")
    with pytest.raises(error) as raised:
        store.add_documents([before, wrong, after])
    assert raised.value.__notes__ == ["not stored: wrong"]
    assert store.get_by_ids(["before", "wrong", "after"]) == [before, after]


def test_the_handle_is_attached_when_asked_for_and_never_stored(filled):
    plain = filled.similarity_search(QUESTION, 3)
    with_handles = filled.similarity_search(QUESTION, 3, handles=True)
    for document, same in zip(plain, with_handles, strict=True):
        assert HANDLE_KEY not in document.metadata
        handle = same.metadata.pop(HANDLE_KEY)
        assert same == document
        assert handle == filled.kb.chunks([document.id])[0].handle

    before = {document.id: document.updated_at for document in filled.kb.documents()}
    again = filled.similarity_search(QUESTION, 3, handles=True)
    filled.add_documents(again)
    assert HANDLE_KEY in again[0].metadata, "the caller's document was changed"
    assert {document.id: document.updated_at for document in filled.kb.documents()} == before
    copied = filled.add_documents(again, ids=["x", "y", "z"])
    assert all(HANDLE_KEY not in chunk.metadata for chunk in filled.kb.chunks(copied))


def test_deleting_takes_the_kv_along(filled):
    assert filled.delete(["lansen", "nobody"]) is True
    assert filled.get_by_ids(["lansen"]) == []
    assert len(filled.similarity_search(QUESTION, 10)) == len(REGISTRY) - 1
    answer = filled.kb.chat([{"role": "user", "content": [rc.Passage(REGISTRY["lansen"]), f"Question: {QUESTION}"]}])
    assert answer.hits[0].kv == "computed"
    assert filled.delete([]) is True
    assert len(filled.kb.documents()) == len(REGISTRY) - 1
    assert filled.delete() is True
    assert filled.kb.documents() == []


def test_a_passage_of_a_larger_document_is_not_deleted_alone(store, tmp_path):
    text = "\n\n".join(f"## Part {n}\n\n" + f"Sentence {n} of the file. " * 60 for n in range(6))
    (tmp_path / "file.md").write_text(text)
    report = store.kb.ingest(tmp_path / "file.md")
    [file] = report.added
    found = store.similarity_search("Sentence 3", 2)
    assert len(store.kb.chunks_of(file)) > 2
    assert found[0].metadata["source"] == store.kb.document(file).source
    assert store.get_by_ids([found[0].id])[0].page_content == found[0].page_content
    with pytest.raises(errors.NoSuchDocumentError, match=r"file\.md"):
        store.delete([found[0].id])
    store.delete([file])
    assert store.similarity_search("Sentence 3") == []


def test_a_passage_added_again_leaves_its_document_alone(store):
    text = "\n\n".join(f"## Part {n}\n\n" + f"Sentence {n} of the file. " * 60 for n in range(3))
    store.kb.ingest(rc.Document("manual", text))
    before = [chunk.text for chunk in store.kb.chunks_of("manual")]
    [page] = store.get_by_ids(["manual#1"])
    page.metadata["reviewed"] = True
    assert store.add_documents([page]) == ["manual#1"]
    assert store.get_by_ids(["manual#1"])[0].metadata["reviewed"] is True
    assert [chunk.text for chunk in store.kb.chunks_of("manual")] == before
    store.delete(["manual#1"])
    assert store.get_by_ids(["manual#1"]) == []
    assert [chunk.text for chunk in store.kb.chunks_of("manual")] == before
    with pytest.raises(errors.NoSuchDocumentError, match="'manual'"):
        store.delete(["manual#1##1"])


# What is found


@pytest.mark.parametrize("normalize", [True, False])
def test_relevance_is_the_cosine(tmp_path, mini, normalize):
    embeddings = DeterministicFakeEmbedding(size=6)
    embedder = LangChainEmbedder(embeddings, normalize=normalize)
    with RagCacheVectorStore.from_documents(registry_documents(), embedder, kb=tmp_path / "kb", model=mini) as store:
        assert store.embeddings is embeddings
        found = store.similarity_search_with_relevance_scores(QUESTION, len(REGISTRY))
        question = np.array(embeddings.embed_query(QUESTION))
        expected = {}
        for id, text in REGISTRY.items():
            vector = np.array(embeddings.embed_query(text))
            expected[id] = max(0.0, question @ vector / np.linalg.norm(question) / np.linalg.norm(vector))
        assert {document.id: score for document, score in found} == pytest.approx(expected, abs=1e-5)
        threshold = sorted(expected.values())[3]
        above = store.similarity_search_with_relevance_scores(QUESTION, 6, score_threshold=threshold - 1e-4)
        assert {document.id for document, _ in above} == {id for id, s in expected.items() if s >= threshold - 1e-4}


def test_relevance_is_that_of_a_long_documents_best_window(tmp_path, mini):
    text = "ropes are mended; paint dries; tar boils; the keeper is Zebulon"
    with RagCacheVectorStore.from_texts([text], FourWords(), ids=["long"], kb=tmp_path / "kb", model=mini) as store:
        [(_, relevance)] = store.similarity_search_with_relevance_scores("keeper is Zebulon", 1)
        [(_, score)] = store.similarity_search_with_score("keeper is Zebulon", 1)
        whole = store.kb.vectors(["long"])[0] @ FourWords().embed_query("keeper is Zebulon")
    assert relevance == pytest.approx(score, abs=1e-5)
    assert relevance > whole + 0.1


@pytest.mark.parametrize("lambda_mult", [0.3, *(pytest.param(one, marks=pytest.mark.slow) for one in (0.0, 0.5, 1.0))])
def test_mmr_chooses_what_langchain_chooses(filled, lambda_mult):
    embedder = BagOfWords()
    question = embedder.embed_query("a club and a bricklayer who works")
    nearest = sorted(REGISTRY, key=lambda id: -float(question @ embedder.embed_query(REGISTRY[id])))[:5]
    vectors = [embedder.embed_query(REGISTRY[id]) for id in nearest]
    expected = [nearest[row] for row in maximal_marginal_relevance(question, vectors, lambda_mult, k=3)]
    options = {"k": 3, "fetch_k": 5, "lambda_mult": lambda_mult}
    by_text = filled.max_marginal_relevance_search("a club and a bricklayer who works", **options)
    by_vector = filled.max_marginal_relevance_search_by_vector(question.tolist(), **options)
    assert [document.id for document in by_text] == expected
    assert by_vector == by_text


def test_mmr_takes_fetch_k_below_k(filled):
    assert len(filled.max_marginal_relevance_search(QUESTION, k=5, fetch_k=2)) == 5


def test_a_vector_of_other_length_than_1_finds_the_same(tmp_path, mini):
    embeddings = DeterministicFakeEmbedding(size=6)
    with RagCacheVectorStore.from_documents(registry_documents(), embeddings, kb=tmp_path / "kb", model=mini) as store:
        vector = [7 * value for value in embeddings.embed_query(QUESTION)]
        assert store.similarity_search_by_vector(vector, 6) == store.similarity_search(QUESTION, 6)
        by_text = store.max_marginal_relevance_search(QUESTION, 4, lambda_mult=0.4)
        assert store.max_marginal_relevance_search_by_vector(vector, 4, lambda_mult=0.4) == by_text


@pytest.mark.parametrize(
    ("search_type", "search_kwargs", "count"),
    [
        ("similarity", {"k": 3}, 3),
        ("similarity", {"k": 6, "filter": {"kind": "person"}}, 3),
        ("similarity_score_threshold", {"k": 6, "score_threshold": 0.999}, 1),
        ("mmr", {"k": 4, "fetch_k": 5, "lambda_mult": 0.2}, 4),
    ],
)
async def test_as_retriever(filled, search_type, search_kwargs, count):
    retriever = filled.as_retriever(search_type=search_type, search_kwargs=search_kwargs)
    found = retriever.invoke(REGISTRY["heron"])
    assert len(found) == count
    assert found[0].id == "heron" or "filter" in search_kwargs
    assert all(document.metadata[HANDLE_KEY] for document in found)
    assert await retriever.ainvoke(REGISTRY["heron"]) == found
    assert len(retriever.invoke(REGISTRY["heron"], k=1)) == 1


async def test_an_event_loop_goes_on_while_a_store_works(tmp_path, mini):
    with RagCacheVectorStore(tmp_path / "kb", SlowEmbedder(), model=mini) as store:
        for call in (
            store.aadd_documents(registry_documents()),
            store.asimilarity_search(QUESTION),
            store.amax_marginal_relevance_search(QUESTION),
            store.asimilarity_search_with_relevance_scores(QUESTION, 1),
        ):
            async with ticking() as ticks:
                found = await call
            assert ticks.count >= 5
        assert found == store.similarity_search_with_relevance_scores(QUESTION, 1)
        assert await store.adelete(["torley"])


# Opening


def test_a_store_filled_with_langchains_embeddings_wants_them_again(tmp_path, mini):
    RagCacheVectorStore.from_texts(["text"], DeterministicFakeEmbedding(size=6), kb=tmp_path / "kb", model=mini).close()
    with pytest.raises(errors.EmbedderError, match="RagCacheVectorStore"):
        RagCacheVectorStore(tmp_path / "kb", model=mini)
    with RagCacheVectorStore(str(tmp_path / "kb"), DeterministicFakeEmbedding(size=6), model=mini) as again:
        assert again.similarity_search_with_score("text", k=1)[0][1] == pytest.approx(1)


def test_a_store_that_is_open_keeps_its_embedding(store):
    own = RagCacheVectorStore(store.kb, RagCacheEmbeddings(store.kb))
    assert own.embeddings.embed_query("one word") == pytest.approx(BagOfWords().embed_query("one word").tolist())


def test_the_environment_names_the_store(tmp_path, model_directory, monkeypatch):

    monkeypatch.setenv("RAGCACHE_STORE", str(tmp_path / "named"))
    monkeypatch.setenv("RAGCACHE_MODEL", str(model_directory))
    monkeypatch.setenv("RAGCACHE_METHOD", "concat")
    with RagCacheVectorStore.from_texts(["text"], BagOfWords()) as store:
        assert store.kb.method == "concat"
        assert store.kb.lm.max_positions == 512
    assert (tmp_path / "named").is_dir()


def test_a_store_that_cannot_be_filled_is_closed(tmp_path, mini):
    with pytest.raises(errors.MetadataError):
        RagCacheVectorStore.from_texts(["text"], BagOfWords(), [{"x": object()}], kb=tmp_path / "kb", model=mini)
    RagCacheVectorStore.from_texts(["text"], BagOfWords(), kb=tmp_path / "kb", model=mini).close()


def test_a_writer_gives_up_waiting_for_another(store, open_kb, mini):
    with open_kb(model=mini).store.layout.writer(1.0):
        with pytest.raises(errors.StoreBusyError):
            store.add_documents([Document(id="mine", page_content="mine")], timeout_s=0.2)
        with pytest.raises(errors.StoreBusyError):
            store.delete(["lansen"], timeout_s=0.2)


# Collections


def test_components_of_a_collection_see_it_alone(store):
    store.add_documents(registry_documents()[:1])
    a = RagCacheVectorStore(store.kb, collection="a")
    [document] = registry_documents()[1:2]
    a.add_documents([document])
    assert [one.id for one in a.similarity_search(QUESTION, k=9)] == [document.id]
    assert a.get_by_ids([registry_documents()[0].id]) == []
    a.delete([registry_documents()[0].id])
    assert len(store.kb.documents()) == 2
    retriever = RagCacheRetriever(kb=store.kb, collection="a", k=9)
    assert [one.id for one in retriever.invoke(QUESTION)] == [document.id]
    assert ChatRagCache(kb=store.kb, collection="a").kb is a.kb
    assert len(RagCacheRetriever(kb=store.kb, k=9).invoke(QUESTION)) == 2
