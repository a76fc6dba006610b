"""Opening databases, good, bad and of earlier versions, and several users of one."""

import json
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from sqlalchemy import Connection, Engine, create_engine, inspect, make_url, text
from tiny_disk import run_on_tiny_disk
from waiting import at_once, beside

from ragcache.errors import (
    ConfigError,
    SchemaVersionError,
    StoreBusyError,
    StoreError,
    StoreNotFoundError,
    StoreReadOnlyError,
)
from ragcache.store import schema
from ragcache.store.database import Database
from ragcache.store.documents import DocumentStore
from ragcache.store.records import Chunk, Counts, NewChunk, NewDocument


def put(store: DocumentStore, id: str, num_chunks: int = 1) -> list[int]:
    chunks = [NewChunk(f"{id}.{n}", "t", [1], np.zeros(2, np.float32), f"{id}{n}") for n in range(num_chunks)]
    return store.replace_document(NewDocument(id), chunks)


# Opening


def test_a_path_is_a_sqlite_file(tmp_path):
    for name in ("plain", "with space %20 ? # é.db"):
        for given in (tmp_path / name, str(tmp_path / name), f"sqlite:///{tmp_path / name}"):
            if "://" in str(given) and "?" in name:
                continue
            with DocumentStore.open(given) as store:
                put(store, "a")
        assert (tmp_path / name).is_file()
    assert len(list(tmp_path.glob("*"))) == 2, "no log is left after the last one closed"


def test_sqlite_is_set_up_to_be_durable_and_read_beside_a_writer(tmp_path):
    database = Database(tmp_path / "s.db")
    with database.read() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    database.close()
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 30000}


@pytest.mark.parametrize(
    "content", [b"no database, but some text " * 100, b"\0" * 5000, b"SQLite format 3\0" + b"x" * 999]
)
@pytest.mark.parametrize("read_only", [False, True])
def test_a_file_that_is_no_database_is_refused_and_untouched(tmp_path, content, read_only):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(SchemaVersionError, match=str(path)):
        DocumentStore.open(path, read_only=read_only)
    assert path.read_bytes() == content


def test_another_programs_database_is_refused_and_untouched(tmp_path):
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE bookmarks (id)")
    connection.close()
    for read_only in (False, True):
        with pytest.raises(SchemaVersionError, match="other"):
            DocumentStore.open(path, read_only=read_only)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("bookmarks",)]
    connection.close()


def test_a_reader_makes_nothing(url, tmp_path):
    with pytest.raises(StoreNotFoundError if "sqlite" in url else SchemaVersionError):
        DocumentStore.open(url, read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_a_path_below_nothing_is_not_found(tmp_path):
    with pytest.raises(StoreNotFoundError, match="none"):
        DocumentStore.open(tmp_path / "none" / "s.db")
    (tmp_path / "directory").mkdir()
    with pytest.raises(StoreError, match="directory"):
        DocumentStore.open(tmp_path / "directory")


@pytest.mark.parametrize("url", ["mysql://host/db", "://", "sqlite://", "sqlite:///:memory:", "nonsense://x"])
def test_urls_that_name_no_database_are_refused(url):
    with pytest.raises(ConfigError):
        DocumentStore.open(url)


def test_a_server_that_refuses(url):
    if "postgresql" not in url:
        pytest.skip("about a server")
    with pytest.raises(StoreError, match="password authentication failed") as caught:
        DocumentStore.open(make_url(url).set(password="wrong-password").render_as_string(hide_password=False))
    assert "wrong-password" not in str(caught.value)
    with pytest.raises(StoreNotFoundError, match="absent_db"):
        DocumentStore.open(make_url(url).set(database="absent_db").render_as_string(hide_password=False))


def test_a_damaged_database_is_a_store_error(tmp_path):
    path = tmp_path / "s.db"
    with DocumentStore.open(path) as store:
        for number in range(50):
            put(store, f"d{number}", 5)
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"damaged|not a database|reports an error"), DocumentStore.open(path) as store:
        store.documents()


# Several users


def test_a_writer_waits_then_gives_up(url):
    with DocumentStore.open(url) as store, DocumentStore.open(url, busy_timeout_s=0.2) as impatient:
        put(store, "a")
        with store.database.write() as connection:
            connection.exec_driver_sql("UPDATE ragcache_counters SET value = value")
            started = time.monotonic()
            with pytest.raises(StoreBusyError, match="another process is writing"):
                put(impatient, "b")
            assert 0.1 < time.monotonic() - started < 10
            assert impatient.counts() == Counts(1, 1, 1), "readers do not wait"
        put(impatient, "b")


def test_readers_never_see_half_a_change(url):
    """One writer replaces a document of n chunks, n changing; readers count."""
    with DocumentStore.open(url) as store, DocumentStore.open(url, read_only=True) as reader:
        put(store, "d", 1)

        def read() -> None:
            document = reader.document("d")
            assert document.num_chunks in (1, 20)
            assert reader.counts().chunks in (1, 20)

        with beside(read, read):
            for step in range(30):
                put(store, "d", 20 if step % 2 else 1)


WRITERS = """
import os, sys
import numpy as np
from ragcache.store.documents import DocumentStore
from ragcache.store.records import NewChunk, NewDocument
def work(url, name):
    with DocumentStore.open(url) as store:
        for number in range(8):
            chunks = [NewChunk(f"{name}.{number}.{n}", "t", [1], np.zeros(2, np.float32), "shared") for n in range(3)]
            ids = store.replace_document(NewDocument(f"{name}.{number}"), chunks)
            os.write(1, (" ".join(map(str, ids)) + "\\n").encode())
children = []
for number in range(4):
    children.append(os.fork())
    if children[-1] == 0:
        status = 1
        try:
            work(sys.argv[1], f"writer{number}")
            status = 0
        finally:
            os._exit(status)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
"""


def test_processes_write_at_the_same_time_and_lose_nothing(url):
    """They make the database together, too."""
    result = forked.run(WRITERS, url)
    assert result.returncode == 0, result.stderr
    ids = [int(number) for number in result.stdout.split()]
    assert len(ids) == len(set(ids)) == 96, "no vector id was given twice"
    with DocumentStore.open(url) as store:
        assert store.counts() == Counts(32, 96, 96)
        assert store.vector_ids() == set(ids)
        assert store.generation() == 32


def test_threads_share_one_store(url):
    with DocumentStore.open(url) as store:

        def work(number: int) -> list[int]:
            ids = []
            for step in range(4):
                ids += put(store, f"{number}.{step % 3}", 2)
                assert len(store.chunks_of(f"{number}.{step % 3}")) == 2
            return ids

        ids = [id for part in at_once(*(partial(work, number) for number in range(6))) for id in part]
        assert len(ids) == len(set(ids)) == 48
        assert store.counts() == Counts(18, 36, 36)


# Disks that take nothing more

SETUP = """
import numpy as np
from ragcache.errors import StoreFullError, StoreReadOnlyError
from ragcache.store.documents import DocumentStore
from ragcache.store.records import NewChunk, NewDocument
path = disk / "store.sqlite3"
def put(store, number):
    chunk = NewChunk(f"c{number}", "text " * 1000, [1] * 1000, np.zeros(8, np.float32), "h")
    store.replace_document(NewDocument(f"d{number}"), [chunk])
"""

FULL = """
store = DocumentStore.open(path)
written = 0
with pytest.raises(StoreFullError, match=str(path)):
    while written < 10_000:
        put(store, written)
        written += 1
assert written > 3
assert store.counts().documents == written
store.close()
with DocumentStore.open(path) as store:
    assert [document.id for document in store.documents()] == sorted(f"d{n}" for n in range(written))
    assert all(len(store.chunks_of(f"d{n}")) == 1 for n in range(written))
"""

READ_ONLY = """
with DocumentStore.open(path) as store:
    put(store, 1)
store = DocumentStore.open(path)
store.database._engine.dispose()  # a disk with a file open for writing cannot turn read-only
turn_read_only()
for attempt in (
    lambda: put(store, 2),
    lambda: DocumentStore.open(path),
    lambda: DocumentStore.open(path.with_name("new.sqlite3")),
):
    with pytest.raises(StoreReadOnlyError, match=str(disk)):
        attempt()
store.close()
with DocumentStore.open(path, read_only=True) as store:
    assert store.chunks_of("d1")[0].handle == "h"
    assert store.vector_ids({"$not": {"a": 1}}) == {1}
"""


@pytest.mark.parametrize("script", [FULL, READ_ONLY], ids=["full", "read-only"])
def test_a_disk_that_takes_nothing_more(tmp_path, script):
    run_on_tiny_disk(tmp_path, SETUP + script, size="600k")


def test_a_file_that_may_not_be_written(tmp_path, monkeypatch):
    """The driver opens a file without write permission for reading, and says so only at the first write."""
    path = tmp_path / "s.db"
    with DocumentStore.open(path) as store:
        put(store, "a")
    opened = sqlite3.connect

    def read_only(name: str, **options: Any) -> sqlite3.Connection:
        return opened(name.replace("mode=rwc", "mode=ro"), **options)

    monkeypatch.setattr(sqlite3, "connect", read_only)
    with DocumentStore.open(path) as store:
        assert store.counts() == Counts(1, 1, 1)
        with pytest.raises(StoreReadOnlyError, match=r"s\.db: cannot be written"):
            put(store, "b")


# A database of every earlier version opens; one of a later version is refused


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
def test_every_version_opens_and_keeps_its_content(url, engine, version):
    build(engine, version)
    with DocumentStore.open(url) as store:
        document = store.document("d")
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
def test_a_migrated_database_equals_a_new_one(url, engine, version, tmp_path_factory):
    """Also fails when the schema was changed and its version was not."""
    build(engine, version)
    DocumentStore.open(url).close()
    migrated = structure(engine)
    with engine.begin() as connection:
        schema.metadata_obj.drop_all(connection)
    assert structure(engine) == {}
    DocumentStore.open(url).close()
    assert structure(engine) == migrated
    assert len(migrated) == 7


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


def test_migrations_run_in_order_once(url, engine, monkeypatch):
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


def test_several_processes_may_come_first(url, engine, monkeypatch):
    """One process does the work when several find an old store, or none, at the same time."""
    build(engine, 1)
    use_migrations(monkeypatch, add_language)
    with ThreadPoolExecutor(4) as threads:
        stores = list(threads.map(lambda _: DocumentStore.open(url), range(4)))
    for store in stores:
        assert store.properties()["schema_version"] == TODAY + 1
        store.close()


def test_a_failed_migration_leaves_the_old_version(url, engine, monkeypatch):
    build(engine, 1)
    before = structure(engine)
    with monkeypatch.context() as patch:
        use_migrations(patch, add_language, fail)
        with pytest.raises(RuntimeError, match="stop"):
            DocumentStore.open(url)
    assert (version_of(engine), structure(engine)) == (1, before)
    with DocumentStore.open(url) as store:
        assert store.counts().chunks == 1


def test_a_reader_does_not_migrate(url, engine, monkeypatch):
    build(engine, 1)
    use_migrations(monkeypatch, add_language)
    with pytest.raises(SchemaVersionError, match=rf"version 1 is older .* {TODAY + 1}; open it once for writing"):
        DocumentStore.open(url, read_only=True)
    assert version_of(engine) == 1


@pytest.mark.parametrize("read_only", [False, True])
def test_a_newer_version_is_refused_and_untouched(url, engine, read_only):
    build(engine, 1)
    set_version(engine, str(schema.SCHEMA_VERSION + 1))
    newer, ours = schema.SCHEMA_VERSION + 1, schema.SCHEMA_VERSION
    with pytest.raises(SchemaVersionError, match=f"version {newer} is newer than .* {ours};"):
        DocumentStore.open(url, read_only=read_only)
    assert version_of(engine) == newer
