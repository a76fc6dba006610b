"""Opening databases, good, bad and of other versions, and several users of one."""

import multiprocessing
import sqlite3
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from postgres_server import engine_of
from sqlalchemy import Engine, make_url, text
from tiny_disk import run_on_tiny_disk
from waiting import at_once, beside

from ragcache import errors
from ragcache.store import schema
from ragcache.store.database import Database
from ragcache.store.documents import DocumentStore
from ragcache.store.records import Counts, NewChunk, NewDocument


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
    with pytest.raises(errors.SchemaVersionError, match=str(path)):
        DocumentStore.open(path, read_only=read_only)
    assert path.read_bytes() == content


def test_another_programs_database_is_refused_and_untouched(tmp_path):
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE bookmarks (id)")
    connection.close()
    for read_only in (False, True):
        with pytest.raises(errors.SchemaVersionError, match="other"):
            DocumentStore.open(path, read_only=read_only)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("bookmarks",)]
    connection.close()


def test_a_reader_makes_nothing(url, tmp_path):
    with pytest.raises(errors.StoreNotFoundError if "sqlite" in url else errors.SchemaVersionError):
        DocumentStore.open(url, read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_a_path_below_nothing_is_not_found(tmp_path):
    with pytest.raises(errors.StoreNotFoundError, match="none"):
        DocumentStore.open(tmp_path / "none" / "s.db")
    (tmp_path / "directory").mkdir()
    with pytest.raises(errors.StoreError, match="directory"):
        DocumentStore.open(tmp_path / "directory")


@pytest.mark.parametrize("url", ["mysql://host/db", "://", "sqlite://", "sqlite:///:memory:", "nonsense://x"])
def test_urls_that_name_no_database_are_refused(url):
    with pytest.raises(errors.ConfigError):
        DocumentStore.open(url)


def test_a_server_that_refuses(url):
    if "postgresql" not in url:
        pytest.skip("about a server")
    with pytest.raises(errors.StoreError, match="password authentication failed") as caught:
        DocumentStore.open(make_url(url).set(password="wrong-password").render_as_string(hide_password=False))
    assert "wrong-password" not in str(caught.value)
    with pytest.raises(errors.StoreNotFoundError, match="absent_db"):
        DocumentStore.open(make_url(url).set(database="absent_db").render_as_string(hide_password=False))


def test_a_damaged_database_is_a_store_error(tmp_path):
    path = tmp_path / "s.db"
    with DocumentStore.open(path) as store:
        for number in range(50):
            put(store, f"d{number}", 5)
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)
    with (
        pytest.raises(errors.StoreError, match=r"damaged|not a database|reports an error"),
        DocumentStore.open(path) as store,
    ):
        store.documents()


# Several users


def test_a_writer_waits_then_gives_up(url):
    with DocumentStore.open(url) as store, DocumentStore.open(url, busy_timeout_s=0.2) as impatient:
        put(store, "a")
        with store.database.write() as connection:
            connection.exec_driver_sql("UPDATE ragcache_counters SET value = value")
            started = time.monotonic()
            with pytest.raises(errors.StoreBusyError, match="another process is writing"):
                put(impatient, "b")
            assert 0.1 < time.monotonic() - started < 10
            assert impatient.counts() == Counts(1, 1, 1), "readers do not wait"
        put(impatient, "b")


def test_a_writer_that_reads_first_has_the_lock(tmp_path):
    """Otherwise a commit between its read and its write would make the write fail."""
    path = tmp_path / "documents.sqlite3"
    with DocumentStore.open(path) as store, DocumentStore.open(path, busy_timeout_s=0.1) as other:
        with store.database.write() as connection:
            connection.exec_driver_sql("SELECT value FROM ragcache_counters")
            with pytest.raises(errors.StoreBusyError):
                put(other, "a")
        put(other, "a")


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


def write(url: str, name: str) -> list[int]:
    with DocumentStore.open(url) as store:
        return [id for number in range(8) for id in put(store, f"{name}.{number}", 3)]


def test_processes_write_at_the_same_time_and_lose_nothing(url):
    """They make the database together, too."""
    with multiprocessing.get_context("fork").Pool(4) as processes:
        found = processes.starmap(write, [(url, f"writer{number}") for number in range(4)], chunksize=1)
    ids = [id for part in found for id in part]
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


FULL = """
import numpy as np
from ragcache.errors import StoreFullError
from ragcache.store.documents import DocumentStore
from ragcache.store.records import NewChunk, NewDocument
path, written = disk / "store.sqlite3", 0
store = DocumentStore.open(path)
with pytest.raises(StoreFullError, match=str(path)):
    while written < 10_000:
        chunk = NewChunk(f"c{written}", "text " * 1000, [1] * 1000, np.zeros(8, np.float32), "h")
        store.replace_document(NewDocument(f"d{written}"), [chunk])
        written += 1
assert written > 3
assert store.counts().documents == written
store.close()
with DocumentStore.open(path) as store:
    assert [document.id for document in store.documents()] == sorted(f"d{n}" for n in range(written))
    assert all(len(store.chunks_of(f"d{n}")) == 1 for n in range(written))
"""


def test_a_disk_that_takes_nothing_more(tmp_path):
    run_on_tiny_disk(tmp_path, FULL, size="600k")


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
        with pytest.raises(errors.StoreReadOnlyError, match=r"s\.db: cannot be written"):
            put(store, "b")


# Databases of other versions are refused


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    """The database without the store's code."""
    engine = engine_of(url)
    yield engine
    engine.dispose()


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("schema_version", "5", "made before ragcache 0.1, .*: ragcache ingest FOLDER --store NEW"),
        ("schema", "3", "schema version 3 is newer than .* 2; use the version of ragcache that wrote it"),
    ],
)
def test_a_store_of_another_version_is_refused_and_untouched(url, engine, name, value, said, read_only):
    with DocumentStore.open(url) as store:
        put(store, "d")
    change = "UPDATE ragcache_properties SET name = :name, value = :value WHERE name = 'schema'"
    with engine.begin() as connection:
        connection.execute(text(change), {"name": name, "value": value})
    before = content(engine)
    with pytest.raises(errors.SchemaVersionError, match=said):
        DocumentStore.open(url, read_only=read_only)
    assert content(engine) == before


def content(engine: Engine) -> dict[str, list[Any]]:
    with engine.connect() as connection:
        tables = (table.name for table in schema.metadata_obj.sorted_tables)
        return {table: list(connection.execute(text(f"SELECT * FROM {table}"))) for table in tables}
