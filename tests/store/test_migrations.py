"""A store of every earlier schema version opens; one of a later version is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection, Engine, create_engine, inspect, make_url, text

from ragcache.errors import SchemaVersionError
from ragcache.store import schema
from ragcache.store.documents import DocumentStore
from ragcache.store.records import Chunk, NewChunk, NewDocument

FROZEN = Path(__file__).parent / "frozen"
TODAY = schema.SCHEMA_VERSION
VERSIONS = range(1, TODAY + 1)


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    """The database without the store's code."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    engine = create_engine(parsed)
    yield engine
    engine.dispose()


def build(engine: Engine, version: int) -> None:
    """A database as that version of the code made it."""
    script = (FROZEN / f"v{version}.{engine.dialect.name}.sql").read_text()
    with engine.begin() as connection:
        for statement in script.split(";\n"):
            if statement.strip():
                connection.exec_driver_sql(statement)


def structure(engine: Engine) -> dict[str, Any]:
    """Columns, indexes and keys by table."""
    look = inspect(engine)
    return {
        table: (
            [(column["name"], str(column["type"]), column["nullable"]) for column in look.get_columns(table)],
            sorted((index["name"], index["column_names"], index["unique"]) for index in look.get_indexes(table)),
            look.get_pk_constraint(table)["constrained_columns"],
            [
                (key["constrained_columns"], key["referred_table"], key["options"])
                for key in look.get_foreign_keys(table)
            ],
            sorted(key["column_names"] for key in look.get_unique_constraints(table)),
        )
        for table in sorted(look.get_table_names())
        if table.startswith(schema.PREFIX)
    }


def set_version(engine: Engine, value: str) -> None:
    with engine.begin() as connection:
        statement = "UPDATE ragcache_properties SET value = :value WHERE name = 'schema_version'"
        connection.execute(text(statement), {"value": value})


def version_of(engine: Engine) -> int:
    with engine.connect() as connection:
        query = "SELECT value FROM ragcache_properties WHERE name = 'schema_version'"
        return int(json.loads(connection.execute(text(query)).scalar_one()))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_opens_and_keeps_its_content(url: str, engine: Engine, version: int) -> None:
    build(engine, version)
    with DocumentStore.open(url) as store:
        document = store.document("d")
        assert document is not None
        assert (document.source, document.title, document.content_hash) == ("d.md", "Title", "f00")
        assert (document.metadata, document.created_at, document.updated_at) == ({"year": 2024}, 1000.5, 2000.5)
        assert store.chunks_of("d") == [
            Chunk("d.0", "d", 0, "text", [1, 2], {"year": 2024, "page": 1}, 7, "h0", 2000.5, "d.md", "Title")
        ]
        (batch,) = store.all_vectors()
        assert (batch.ids.tolist(), batch.vectors.tolist()) == ([7], [[1.0, -2.0]])
        assert (store.garbage(), store.handles(), store.generation()) == ({"h9"}, {"h0"}, 3)
        assert store.vector_ids({"year": {"$gt": 2000}}) == {7}
        new = store.replace_document(NewDocument("e"), [NewChunk("e.0", "t", [1], np.ones(2, np.float32))])
        assert new == [8]
        assert store.properties() == {
            "schema_version": schema.SCHEMA_VERSION,
            "embedder": "minilm",
            "embedding_dim": 2,
        }


@pytest.mark.parametrize("version", VERSIONS)
def test_a_migrated_database_equals_a_new_one(
    url: str, engine: Engine, version: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also fails when the schema was changed and its version was not."""
    build(engine, version)
    DocumentStore.open(url).close()
    migrated = structure(engine)
    with engine.begin() as connection:
        schema.metadata_obj.drop_all(connection)
    assert structure(engine) == {}
    DocumentStore.open(url).close()
    assert structure(engine) == migrated
    assert len(migrated) == 6


def add_language(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE ragcache_documents ADD COLUMN language TEXT NOT NULL DEFAULT 'en'"))


def move_language(connection: Connection) -> None:
    connection.execute(text("CREATE TABLE ragcache_languages (id TEXT PRIMARY KEY, language TEXT NOT NULL)"))
    connection.execute(text("INSERT INTO ragcache_languages SELECT id, language FROM ragcache_documents"))
    connection.execute(text("ALTER TABLE ragcache_documents DROP COLUMN language"))


def fail(connection: Connection) -> None:
    connection.execute(text("DELETE FROM ragcache_chunks"))
    raise RuntimeError("stop")


def use_migrations(patch: pytest.MonkeyPatch, *steps: schema.Migration) -> None:
    """Let the code be some versions ahead of today's."""
    added = {TODAY + number: step for number, step in enumerate(steps)}
    patch.setattr(schema, "MIGRATIONS", {**schema.MIGRATIONS, **added})
    patch.setattr(schema, "SCHEMA_VERSION", TODAY + len(steps))


def test_migrations_run_in_order_once(url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    build(engine, 1)
    use_migrations(monkeypatch, add_language, move_language)
    for _ in range(2):
        with DocumentStore.open(url) as store:
            assert store.properties()["schema_version"] == TODAY + 2
            assert store.chunks_of("d")[0].text == "text"
    with engine.connect() as connection:
        assert connection.execute(text("SELECT id, language FROM ragcache_languages")).all() == [("d", "en")]
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE ragcache_languages"))


def test_several_processes_may_come_first(url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process does the work when several find an old store, or none, at the same time."""
    build(engine, 1)
    use_migrations(monkeypatch, add_language)
    with ThreadPoolExecutor(4) as threads:
        stores = list(threads.map(lambda _: DocumentStore.open(url), range(4)))
    for store in stores:
        assert store.properties()["schema_version"] == TODAY + 1
        store.close()


def test_a_failed_migration_leaves_the_old_version(url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    build(engine, 1)
    before = structure(engine)
    with monkeypatch.context() as patch:
        use_migrations(patch, add_language, fail)
        with pytest.raises(RuntimeError, match="stop"):
            DocumentStore.open(url)
    assert (version_of(engine), structure(engine)) == (1, before)
    with DocumentStore.open(url) as store:
        assert store.counts().chunks == 1


def test_a_reader_does_not_migrate(url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    build(engine, 1)
    use_migrations(monkeypatch, add_language)
    with pytest.raises(SchemaVersionError, match=rf"version 1 is older .* {TODAY + 1}; open it once for writing"):
        DocumentStore.open(url, read_only=True)
    assert version_of(engine) == 1


@pytest.mark.parametrize("read_only", [False, True])
def test_a_newer_version_is_refused_and_untouched(url: str, engine: Engine, read_only: bool) -> None:
    build(engine, 1)
    set_version(engine, str(schema.SCHEMA_VERSION + 1))
    newer, ours = schema.SCHEMA_VERSION + 1, schema.SCHEMA_VERSION
    with pytest.raises(SchemaVersionError, match=f"version {newer} is newer than .* {ours};"):
        DocumentStore.open(url, read_only=read_only)
    assert version_of(engine) == newer


def test_there_is_a_step_from_every_version() -> None:
    assert sorted(schema.MIGRATIONS) == list(range(1, schema.SCHEMA_VERSION))
    assert all((FROZEN / f"v{version}.sqlite.sql").exists() for version in VERSIONS)
