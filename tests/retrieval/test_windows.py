"""Passages longer than the embedder reads: a vector for each window, the best of which counts, in every kind of index.
The oracle is NumPy's, over vectors that the test keeps."""

import numpy as np
import pytest
from kit.embedders import FourWords
from kit.makers import each
from postgres_server import pgvector_schema

import ragcache as rc
from ragcache.ingest.chunker import ChunkerConfig
from ragcache.retrieval.retriever import Retriever
from ragcache.store.documents import DocumentStore
from ragcache.store.neighbours import NeighbourTable
from ragcache.store.records import NewChunk, NewDocument
from ragcache_demo.bag_of_words import BagOfWords

DIMENSION = 16
RNG = np.random.default_rng(7)


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


class Rows:
    """An embedder that is only asked for vectors of questions, which are given."""

    name, dimension = "rows", DIMENSION

    def __init__(self, question: np.ndarray | None = None) -> None:
        self.question = question

    def embed(self, texts, *, batch_size=32):
        raise NotImplementedError

    def embed_query(self, text):
        return self.question


# Of each document, the windows of each of its passages: most have one, some have up to six.
CORPUS = {
    f"d{number}": [unit(RNG.standard_normal((int(windows), DIMENSION))) for windows in sizes]
    for number, sizes in enumerate(RNG.choice([1, 1, 2, 3, 6], (12, 3)))
}
QUESTIONS = unit(RNG.standard_normal((8, DIMENSION)))


def put(documents: DocumentStore, id: str, passages: list[np.ndarray], texts: list[str] | None = None) -> list[int]:
    chunks = [
        NewChunk(
            f"{id}#{n}", texts[n] if texts else f"{id} {n}", [1], unit(own.mean(0)), windows=own if len(own) > 1 else ()
        )
        for n, own in enumerate(passages)
    ]
    return documents.replace_document(NewDocument(id, metadata={"parity": int(id[1:]) % 2}), chunks)


def oracle(question: np.ndarray, corpus: dict[str, list[np.ndarray]]) -> list[tuple[str, float]]:
    """Every passage with its best window's score, best first."""
    each = [(f"{id}#{n}", own) for id, passages in corpus.items() for n, own in enumerate(passages)]
    scores = [(name, max(window @ question for window in own)) for name, own in each]
    return sorted(scores, key=lambda pair: -pair[1])


def found(retriever: Retriever, question, k: int, **options) -> list[tuple[str, float]]:
    return [(hit.chunk.id, hit.score) for hit in retriever.retrieve(question, k, **options)]


def check_equal(hits: list[tuple[str, float]], expected: list[tuple[str, float]]) -> None:
    assert [id for id, _ in hits] == [id for id, _ in expected]
    np.testing.assert_allclose([score for _, score in hits], [score for _, score in expected], atol=1e-5)


kind = each(["flat", "hnsw", "pgvector"])


@pytest.fixture
def url(kind, tmp_path):
    if kind == "pgvector":
        yield from pgvector_schema()
    else:
        yield tmp_path / "store.sqlite3"


@pytest.fixture
def documents(url):
    with DocumentStore.open(url) as store:
        for id, passages in CORPUS.items():
            put(store, id, passages)
        yield store


@pytest.fixture
def retriever(kind, documents, tmp_path):
    return Retriever.open(documents, tmp_path / "index.faiss", Rows(), kind=kind)


@pytest.mark.parametrize("k", [1, 4, 20, 100])
def test_passages_are_ranked_by_their_best_window(retriever, k):
    for question in QUESTIONS:
        check_equal(found(retriever, question, k), oracle(question, CORPUS)[:k])


def test_filters_keep_k_exact_with_windows(retriever):
    even = {id: passages for id, passages in CORPUS.items() if int(id[1:]) % 2 == 0}
    for question in QUESTIONS:
        check_equal(found(retriever, question, 5, filter={"parity": 0}), oracle(question, even)[:5])


def test_windows_of_one_passage_leave_room_for_others(retriever, documents):
    """All 90 windows are nearer than any other passage is."""
    question = QUESTIONS[0]
    crowd = unit(question + 0.05 * RNG.standard_normal((90, DIMENSION)))
    assert (crowd @ question).min() > oracle(question, CORPUS)[0][1]
    put(documents, "d99", [crowd])
    for k in (2, 5, 30):
        check_equal(found(retriever, question, k), oracle(question, CORPUS | {"d99": [crowd]})[:k])
    few = found(retriever, question, 5, filter={"document_id": "d99"})
    assert [id for id, _ in few] == ["d99#0"]


def test_mmr_compares_the_windows_that_matched(retriever, documents):
    """Two passages that share the paragraph asked for repeat each other, whatever else they hold."""
    question = QUESTIONS[1]
    axes = np.linalg.qr(np.vstack([question, RNG.standard_normal((12, DIMENSION))]).T)[0].T  # [0] is the question
    question = axes[0].astype(np.float32)
    shared, other = unit(question + 0.1 * axes[1]), unit(question + 0.15 * axes[2])
    rest = axes[3:].reshape(2, 5, DIMENSION).astype(np.float32)
    put(documents, "d50", [np.vstack([shared[None], rest[0]])])
    put(documents, "d51", [np.vstack([rest[1], shared[None]])])
    put(documents, "d52", [other[None]])
    assert [id for id, _ in found(retriever, question, 2)] == ["d50#0", "d51#0"]
    varied = [id for id, _ in found(retriever, question, 2, mmr_lambda=0.5, fetch_k=3)]
    assert varied[0] == "d50#0"
    assert varied[1] == "d52#0"


@pytest.mark.parametrize("search", ["text", "hybrid"])
def test_searches_by_words_give_the_best_windows_score(url, tmp_path, kind, search):
    with DocumentStore.open(url) as documents:
        for id, passages in CORPUS.items():
            put(documents, id, passages, [f"zebra {id}", "mill", "river"])
        retriever = Retriever.open(documents, tmp_path / "i", Rows(QUESTIONS[2]), kind=kind)
        hits = found(retriever, "zebra", 5, search=search)
    right = dict(oracle(QUESTIONS[2], CORPUS))
    assert len({id for id, _ in hits}) == len(hits) == 5
    assert any(len(CORPUS[id.split("#")[0]][int(id[-1])]) > 1 for id, _ in hits), "some have windows"
    for id, score in hits:
        assert score == pytest.approx(right[id], abs=1e-5)


def tables(documents: DocumentStore) -> list[int]:
    """Rows of the tables that hold vectors."""
    names = ("ragcache_windows", "ragcache_vectors", "ragcache_vectors_of_windows")
    with documents.database.read() as connection:
        there = [name for name in names if connection.dialect.has_table(connection, name)]
        return [connection.exec_driver_sql(f"SELECT count(*) FROM {name}").scalar_one() for name in there]


def test_deleted_and_replaced_passages_leave_no_window(retriever, documents, kind, tmp_path):
    for id in [*CORPUS][1:]:
        gone = documents.vector_ids_of([id])
        documents.delete_documents([id])
        retriever.apply([], np.empty((0, DIMENSION), np.float32), gone)
    left = {"d0": [unit(RNG.standard_normal((4, DIMENSION))), unit(RNG.standard_normal((1, DIMENSION)))]}
    for passages in (left["d0"], [left["d0"][1]], left["d0"]):
        before = documents.vector_ids_of(["d0"])
        added = put(documents, "d0", passages)
        retriever.apply(added, np.concatenate(passages), before)
        assert retriever.index.ids == set(added) == documents.vector_ids()
        assert len(added) == sum(map(len, passages))
    check_equal(found(retriever, QUESTIONS[0], 9), oracle(QUESTIONS[0], left))
    assert tables(documents) == ([4, 1, 4] if kind == "pgvector" else [4])
    assert documents.counts().chunks == 2
    again = Retriever.open(documents, tmp_path / "other.faiss", Rows(), kind=kind)
    check_equal(found(again, QUESTIONS[0], 9), oracle(QUESTIONS[0], left))
    documents.delete_documents(["d0"])
    assert retriever.retrieve(QUESTIONS[0], 9) == []
    assert set(tables(documents)) == {0}


def test_vectors_follow_each_document_of_another_process(retriever, url):
    with DocumentStore.open(url) as other:
        put(other, "d3", [unit(RNG.standard_normal((5, DIMENSION)))])
        assert len(retriever.retrieve(QUESTIONS[0], 100)) == 36 - 2
        assert retriever.index.ids == other.vector_ids()
        assert all(map(retriever.index.agrees, other.all_vectors(batch_size=5)))
        # Chunks' ids follow each other, whatever windows they have.
        assert [own.tolist() for own, _ in other.embeddings(batch_size=1)] == sorted(
            [chunk.vector_id] for document in other.documents() for chunk in other.chunks_of(document.id)
        )


def test_moved_documents_keep_their_windows(retriever, documents):
    version = documents.versions()["d0"]
    names = [f"d70#{n}" for n in range(3)]
    gone = documents.move_document("d0", "d1", version, names)
    retriever.apply([], np.empty((0, DIMENSION), np.float32), gone)
    assert retriever.index.ids == documents.vector_ids()
    moved = {id: passages for id, passages in CORPUS.items() if id != "d1"} | {"d0": CORPUS["d0"]}
    renamed = [(id.replace("d0#", "d70#"), score) for id, score in oracle(QUESTIONS[0], moved)]
    check_equal(found(retriever, QUESTIONS[0], 100), renamed)


# Ingestion


LONG = " ".join(f"{word}{n}" for n in range(9) for word in ("rope", "tar", "paint", "oar"))
END = "Zebulon keeps the lighthouse"


def cosine(a: str, b: str) -> float:
    return float(BagOfWords().embed_query(a) @ BagOfWords().embed_query(b))


@pytest.fixture
def kb(lm, tmp_path):
    with rc.RagCache.open(tmp_path / "kb", model=lm, embedder=FourWords()) as opened:
        yield opened


def test_a_sentence_at_a_long_passages_end_is_found_as_if_it_stood_alone(kb):
    kb.ingest([rc.Document("minutes", f"{LONG} {END}"), rc.Document("recipe", "Boil potatoes with salt")], split=False)
    best, other = kb.retrieve(END, 2)
    assert (best.chunk.id, other.chunk.id) == ("minutes", "recipe")
    assert best.score == pytest.approx(1, abs=1e-5)
    assert other.score == pytest.approx(cosine(END, "Boil potatoes with salt"), abs=1e-5)
    assert kb.info().chunks == 2
    assert kb.doctor().index == "sound"
    assert 10 + 1 <= len(kb.store.documents.vector_ids()) <= 20 + 1
    every, owners = kb.store.documents.vectors_of([best.chunk.vector_id], 24)
    assert set(owners) == {best.chunk.vector_id}
    mean = kb.vectors(["minutes"])[0]
    assert mean @ unit(every.vectors.mean(0)) > 0.98, "weighted by the windows' lengths"
    assert np.linalg.norm(mean) == pytest.approx(1, abs=1e-5)


def test_similar_passages_are_found_among_windows(lm, tmp_path):
    def turned(text):  # the same words, and no copy
        return " ".join(reversed(text.split()))

    salt = "Boil potatoes with salt"
    texts = {"a": f"{LONG} {END}", "b": turned(END), "c": salt, "d": f"{turned(salt)} {turned(LONG)}"}
    config = rc.StoreConfig(neighbours=1)
    with rc.RagCache.open(tmp_path / "kb", model=lm, embedder=FourWords(), store=config) as kb:
        kb.ingest([rc.Document(id, text) for id, text in texts.items()], split=False)
        hits = {hit.chunk.id: hit.chunk for hit in kb.retrieve(END, 4)}
        near = kb._parts.block_keys.neighbourhood.of([hits[id] for id in "abcd"])
        assert [[chunk.id for chunk in some] for some in near] == [["d"], ["a"], ["d"], ["a"]]


def test_chunks_with_windows_are_read_behind_those_before_them(lm, tmp_path):
    """Chunks' vector ids follow each other, and what an ingestion finds it records for each of them."""
    config = rc.StoreConfig(neighbours=2, neighbours_from="document")
    options = {"store": config, "chunker": ChunkerConfig(64, 16)}
    with rc.RagCache.open(tmp_path / "kb", model=lm, embedder=FourWords(), **options) as kb:
        kb.ingest([rc.Document(id, f"{LONG} {END}. " * 3) for id in "ab"], kv="lazy")
        for id in "ab":
            chunks = kb.store.documents.chunks_of(id)
            assert len(chunks) > 3
            recorded = NeighbourTable(kb.store.documents.database).of(chunk.vector_id for chunk in chunks)
            ids = [chunk.vector_id for chunk in chunks]
            assert recorded == {own: ids[max(0, at - 2) : at][::-1] for at, own in enumerate(ids) if at}
        assert len(kb.store.documents.vector_ids()) > 2 * len(chunks)
