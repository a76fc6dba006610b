"""pgvector on a real server, beyond the tests of every kind of index (test_retriever.py)."""

import os

import numpy as np
import pytest
from postgres_server import POSTGRES, administrator, pgvector_schema
from sqlalchemy import make_url, text

import ragcache_postgres.pgvector as module
from ragcache.engine.doctor import doctor
from ragcache.engine.options import StoreConfig
from ragcache.engine.store_config import open_store
from ragcache.errors import ConfigError, StoreNotFoundError
from ragcache.retrieval.deletion import delete_documents
from ragcache.retrieval.retriever import Retriever
from ragcache.store.documents import DocumentStore
from ragcache.store.records import NewChunk, NewDocument

DIMENSION = 16


def unit_rows(count: int, seed: int = 0, dimension: int = DIMENSION) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((count, dimension)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


class Embedder:
    def __init__(self, dimension: int = DIMENSION) -> None:
        self.name, self.dimension = "rows", dimension

    def embed(self, texts, *, batch_size=32):
        raise NotImplementedError

    embed_query = embed


@pytest.fixture
def url():
    yield from pgvector_schema()


@pytest.fixture
def documents(url):
    with DocumentStore.open(url) as store:
        yield store


def put(documents: DocumentStore, id: str, vectors: np.ndarray) -> list[int]:
    chunks = [NewChunk(f"{id}#{n}", f"{id} {n}", [1], row) for n, row in enumerate(vectors)]
    return documents.replace_document(NewDocument(id), chunks)


def opened(documents: DocumentStore, dimension: int = DIMENSION) -> Retriever:
    return Retriever.open(documents, None, Embedder(dimension), kind="pgvector")


def run(documents: DocumentStore, statement: str):
    with documents.database.write() as connection:
        result = connection.execute(text(statement))
        return result.scalars().all() if result.returns_rows else None


@pytest.mark.slow
def test_nearly_all_true_neighbours_are_found_and_all_without_the_graph(documents):
    rows = unit_rows(1200)
    ids = np.array(put(documents, "a", rows))
    retriever = opened(documents)
    assert run(documents, f"SELECT indexname FROM pg_indexes WHERE indexname = '{module.GRAPH}'")
    hits = 0
    for query in unit_rows(30, 1):
        true = ids[np.argsort(-(rows @ query))[:10]].tolist()
        hits += len(set(true) & {hit.chunk.vector_id for hit in retriever.retrieve(query, 10)})
    assert hits >= 0.95 * 300
    run(documents, f"DROP INDEX {module.GRAPH}")
    for query in unit_rows(30, 1):
        true = ids[np.argsort(-(rows @ query))[:10]].tolist()
        assert [hit.chunk.vector_id for hit in opened(documents).retrieve(query, 10)] == true


def test_deleting_a_document_deletes_its_vectors_in_the_same_transaction(documents):
    first, second = put(documents, "a", unit_rows(5)), put(documents, "b", unit_rows(4, 1))
    opened(documents)
    assert run(documents, f"SELECT vector_id FROM {module.TABLE} ORDER BY 1") == first + second
    documents.delete_documents(["a"])
    assert run(documents, f"SELECT vector_id FROM {module.TABLE} ORDER BY 1") == second
    third = put(documents, "b", unit_rows(2, 2))
    assert opened(documents).index.ids == set(third)


@pytest.mark.slow
def test_vectors_are_copied_bit_for_bit_and_once(documents, url):
    rows = np.concatenate([unit_rows(1500), 1e-30 * unit_rows(3, 4), np.zeros((1, DIMENSION), np.float32)])
    put(documents, "a", rows)
    index = opened(documents).index
    assert len(index) == len(rows)
    assert all(map(index.agrees, documents.all_vectors()))
    with DocumentStore.open(url) as other:
        put(other, "b", unit_rows(2, 9))
        assert len(opened(other).index) == len(index) == len(rows) + 2


def test_a_reader_searches_what_is_there_and_makes_nothing(documents, url):
    put(documents, "a", unit_rows(5))
    with DocumentStore.open(url, read_only=True) as reader:
        documents.bind("embedder", "rows")
        with pytest.raises(StoreNotFoundError, match="once for writing"):
            opened(reader)
        opened(documents)
        assert len(opened(reader).retrieve(unit_rows(1)[0], 9)) == 5


def test_another_database_is_refused(tmp_path):
    with DocumentStore.open(tmp_path / "s.sqlite3") as documents, pytest.raises(ConfigError, match="--database"):
        opened(documents)


def test_a_table_of_another_dimension_is_refused_and_filled_again_once_it_is_dropped(documents):
    ids = put(documents, "a", unit_rows(5))
    run(documents, f"CREATE TABLE {module.TABLE} (vector_id bigint, embedding public.vector(7))")
    with pytest.raises(ConfigError, match=r"of 7 numbers.*makes 16.*DROP TABLE ragcache_vectors"):
        opened(documents)
    run(documents, f"DROP TABLE {module.TABLE}")
    assert opened(documents).index.ids == set(ids)
    run(documents, f"DROP TABLE {module.TABLE}")
    assert opened(documents).index.ids == set(ids)


def test_a_server_without_the_extension_is_refused(documents, monkeypatch):
    monkeypatch.setattr(module, "EXTENSION", "vector_that_nobody_installed")
    with pytest.raises(ConfigError, match=r"no extension.*install pgvector"):
        opened(documents)


def test_a_role_that_may_not_create_the_extension_is_told_who_may(url):
    """The test has its own database, in which the extension is not created yet."""
    with administrator() as connection:
        connection.execute(text("CREATE ROLE plain LOGIN PASSWORD 'secret'"))
        connection.execute(text("CREATE DATABASE plain OWNER plain"))
    own = make_url(os.environ[POSTGRES]).set(database="plain")
    try:
        with DocumentStore.open(own.set(username="plain", password="secret").render_as_string(False)) as documents:
            with pytest.raises(ConfigError, match="administrator run CREATE EXTENSION vector") as refused:
                opened(documents)
            assert "secret" not in str(refused.value)
        with DocumentStore.open(own.render_as_string(False)) as documents:
            put(documents, "a", unit_rows(3))
            assert len(opened(documents).index) == 3
    finally:
        with administrator() as connection:
            connection.execute(text("DROP DATABASE plain WITH (FORCE)"))
            connection.execute(text("DROP ROLE plain"))


def test_the_doctor_repairs_the_table(url, tmp_path):
    store = open_store(tmp_path / "kb", StoreConfig(database=url, index="pgvector"), create=True)
    ids = put(store.documents, "a", unit_rows(20))
    retriever = opened(store.documents)
    assert doctor(store, index_kind="pgvector").index == "sound"
    ones = f"[{','.join('1' * DIMENSION)}]"
    for damage in (
        f"DELETE FROM {module.TABLE} WHERE vector_id = {ids[3]}",
        f"UPDATE {module.TABLE} SET embedding = '{ones}' WHERE vector_id = {ids[4]}",
    ):
        run(store.documents, damage)
        assert doctor(store, index_kind="pgvector").index.startswith("rebuilt")
        assert doctor(store, index_kind="pgvector").index == "sound"
    delete_documents(*store, retriever, ["a"])
    assert len(retriever.index) == 0
    store.close()
