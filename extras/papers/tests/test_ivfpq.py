"""The quantised kind, trained: against brute force, and over a SQL store that other processes change."""

import numpy as np
import pytest

from ragcache.engine.doctor import doctor
from ragcache.engine.options import StoreConfig
from ragcache.engine.store_config import open_store
from ragcache.errors import DamagedIndexError
from ragcache.retrieval.deletion import delete_documents
from ragcache.retrieval.retriever import Retriever
from ragcache.retrieval.vector_index import VectorIndex
from ragcache.store.records import NewChunk, NewDocument, VectorBatch
from ragcache_papers import ivfpq

DIMENSION = 32
THRESHOLD = 600


@pytest.fixture(autouse=True)
def low_threshold(monkeypatch):
    monkeypatch.setattr(ivfpq, "TRAIN_AT", THRESHOLD)
    monkeypatch.setattr(ivfpq, "OPQ_ROUNDS", 2)


def clustered(count: int, seed: int) -> np.ndarray:
    """Unit vectors around 40 centres, which are the same for every seed."""
    centres = np.random.default_rng(99).standard_normal((40, DIMENSION))
    random = np.random.default_rng(seed)
    rows = centres[random.integers(40, size=count)] + 0.5 * random.standard_normal((count, DIMENSION))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


class Shelf(dict):
    """Vectors by id, read as the SQL store does. read: ids that were asked for"""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    def put(self, index: VectorIndex, ids, vectors: np.ndarray) -> None:
        self.update(zip(map(int, ids), vectors, strict=True))
        index.add(np.asarray(ids), vectors)

    def __call__(self, ids: np.ndarray) -> VectorBatch:
        self.read += len(ids)
        found = sorted(id for id in ids.tolist() if id in self)
        rows = np.array([self[id] for id in found], np.float32).reshape(-1, DIMENSION)
        return VectorBatch(np.array(found, np.int64), rows)


def trained(count: int = 2000) -> tuple[VectorIndex, Shelf]:
    shelf = Shelf()
    index = VectorIndex(DIMENSION, kind="ivfpq", embedder="e", stored=shelf)
    shelf.put(index, range(1, count + 1), clustered(count, 0))
    return index, shelf


def recall(index: VectorIndex, rows: dict[int, np.ndarray], k: int = 10) -> float:
    """Share of the true k nearest that are found, over queries that are not in the index."""
    ids, vectors = np.array(list(rows)), np.stack(list(rows.values()))
    hits = 0
    queries = clustered(50, 7)
    for query in queries:
        true = set(ids[np.argsort(-(vectors @ query))[:k]].tolist())
        hits += len(true & set(index.search(query, k).ids.tolist()))
    return hits / (k * len(queries))


def bytes_a_vector(index: VectorIndex, path) -> float:
    """What 1,000 more take in the file: all else in it is of the same size."""
    sizes = []
    for _ in range(2):
        index.save(path)
        sizes.append(path.stat().st_size)
        if len(sizes) == 1:
            index.add(np.arange(10**6, 10**6 + 1000), clustered(1000, 5))
    return (sizes[1] - sizes[0]) / 1000


def test_nearly_all_true_neighbours_are_found_before_and_after_changes():
    index, shelf = trained()
    assert recall(index, shelf) >= 0.95
    for id in range(1, 500):
        del shelf[id]
    index.remove(range(1, 500))
    shelf.put(index, range(5001, 5501), clustered(500, 3))
    assert index.ids == frozenset(shelf)
    assert recall(index, shelf) >= 0.95


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_exactly_k_live_allowed_ids_come_with_their_true_scores(seed):
    index, shelf = trained(700)
    random = np.random.default_rng(seed)
    gone = random.choice(700, 200, replace=False) + 1
    assert index.remove(gone.tolist()) == 200
    for query in clustered(8, seed):
        for allowed in (None, set(random.choice(700, 300).tolist()), {3, 900}, set(gone.tolist())):
            eligible = (set(shelf) - set(gone.tolist())) & (set(shelf) if allowed is None else allowed)
            result = index.search(query, 25, allowed)
            assert len(result.ids) == min(25, len(eligible))
            assert set(result.ids.tolist()) <= eligible
            np.testing.assert_allclose(result.scores, [shelf[id] @ query for id in result.ids.tolist()], rtol=1e-5)
            assert (np.diff(result.scores) <= 0).all()


def test_it_is_exact_until_the_threshold_and_holds_codes_alone_from_there(tmp_path):
    index, shelf = trained(THRESHOLD - 1)
    assert recall(index, shelf) == 1.0
    assert shelf.read == 0
    index, shelf = trained(THRESHOLD)
    assert shelf.read > 0
    assert bytes_a_vector(index, tmp_path / "trained") == DIMENSION / 4 + 8


def test_it_is_trained_again_when_it_has_grown():
    index, shelf = trained(THRESHOLD)
    lists = index._index.lists
    first = ivfpq.wanted_lists(THRESHOLD)
    assert lists == first
    shelf.put(index, range(10_001, 10_001 + 4 * THRESHOLD), clustered(4 * THRESHOLD, 1))
    assert index._index.lists == 2 * first
    assert index.ids == frozenset(shelf)
    assert recall(index, shelf) >= 0.95


def test_many_that_are_known_beforehand_train_it_once(monkeypatch):
    shelf, trainings = Shelf(), []
    index = VectorIndex(DIMENSION, kind="ivfpq", stored=shelf)
    rows = clustered(5000, 0)
    shelf.update(enumerate(rows))
    train = ivfpq.IvfPq._train
    monkeypatch.setattr(ivfpq.IvfPq, "_train", lambda self, *given: trainings.append(given) or train(self, *given))
    index.make_ready(range(5000))
    for start in range(0, 5000, 500):
        index.add(np.arange(start, start + 500), rows[start : start + 500])
    assert len(trainings) == 1
    assert recall(index, shelf) >= 0.95


def test_save_and_load_keep_everything_and_damage_is_refused(tmp_path):
    path = tmp_path / "index.faiss"
    index, shelf = trained(700)
    index.remove([7, 8])
    index.generation = 41
    index.save(path)
    loaded = VectorIndex.load(path, shelf)
    assert (loaded.kind, loaded.embedder, loaded.generation, loaded.ids) == ("ivfpq", "e", 41, index.ids)
    for query in clustered(5, 2):
        assert loaded.search(query, 9).ids.tolist() == index.search(query, 9).ids.tolist()
    shelf.put(loaded, [7], shelf[7][None])
    assert 7 in loaded.search(shelf[7], 1).ids
    good, random = path.read_bytes(), np.random.default_rng(5)
    for offset in random.integers(0, len(good), 100).tolist():
        bad = bytearray(good)
        bad[offset] ^= 1 << int(random.integers(8))
        path.write_bytes(bad)
        with pytest.raises(DamagedIndexError):
            VectorIndex.load(path, shelf)


class Rows:
    """An embedder whose texts are numbers of rows."""

    name, dimension = "rows", DIMENSION

    def embed(self, texts, *, batch_size=32):
        return clustered(3000, 0)[[int(text) for text in texts]]

    def embed_query(self, text):
        return self.embed([text])[0]


@pytest.fixture
def store(tmp_path):
    opened = open_store(tmp_path / "kb", StoreConfig(index="ivfpq"), create=True)
    yield opened
    opened.close()


def put(documents, id: str, numbers) -> None:
    vectors = Rows().embed([str(number) for number in numbers])
    chunks = [NewChunk(f"{id}#{n}", str(n), [1], row) for n, row in zip(numbers, vectors, strict=True)]
    documents.replace_document(NewDocument(id, metadata={"id": id}), chunks)


def test_a_store_is_searched_through_codes_and_deletions_leave_none(store):
    put(store.documents, "first", range(1000))
    retriever = Retriever.open(store.documents, store.layout.index, Rows(), kind="ivfpq")
    other = Retriever.open(store.documents, store.layout.index, Rows(), kind="ivfpq")
    assert retriever.index._index.lists
    assert retriever.retrieve("17", 1)[0].chunk.text == "17"
    put(store.documents, "second", range(1000, 1500))
    assert retriever.retrieve("1200", 1)[0].chunk.text == "1200"
    assert retriever.retrieve("17", 3, filter={"id": "second"})[0].chunk.document_id == "second"
    delete_documents(*store, retriever, ["first"])
    for one in (retriever, other):
        hits = one.retrieve("17", 2000)
        assert len(hits) == 500
        assert {hit.chunk.document_id for hit in hits} == {"second"}
        assert one.index._index.ntotal == 500


def test_the_doctor_knows_an_index_of_other_vectors(store):
    put(store.documents, "a", range(1000))
    sealed = Retriever.open(store.documents, store.layout.index, Rows(), kind="ivfpq", seal=store.kv.seal)
    sealed.save(store.layout.index)
    store.documents.bind("embedder", "rows")
    assert doctor(store, index_kind="ivfpq").index == "sound"
    stolen = VectorIndex(DIMENSION, kind="ivfpq", embedder="rows", stored=(shelf := Shelf()))
    shelf.put(stolen, range(1, 1001), clustered(1000, 8)[::-1])
    stolen.generation, stolen.seal = store.documents.generation(), store.kv.seal
    stolen.save(store.layout.index)
    assert doctor(store, index_kind="ivfpq").index == "rebuilt: it held other vectors than the documents"
    assert doctor(store, index_kind="ivfpq").index == "sound"
