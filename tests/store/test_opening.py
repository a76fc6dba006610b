"""A store's directory names the database of its documents, and no other one is opened."""

from __future__ import annotations

import json
import logging
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import forked
import numpy as np
import pytest
from blocks import make_block, make_key
from postgres_server import postgres_schema
from sqlalchemy import make_url

import ragcache as rc
from ragcache.engine.doctor import doctor
from ragcache.engine.options import StoreConfig
from ragcache.engine.store_config import StoreParts, open_store
from ragcache.errors import DatabaseMismatchError, StoreError, StoreNotFoundError
from ragcache.store.records import NewChunk, NewDocument

KEYS = [make_key(number) for number in range(3)]


@pytest.fixture(params=["sqlite", "postgresql"])
def other_url(request, tmp_path):
    """A second database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'other.sqlite3'}"
        return
    yield from postgres_schema()


def opened(
    root: Path, database: str | None = None, *, create: bool = True, read_only: bool = False
) -> closing[StoreParts]:
    return closing(open_store(root, StoreConfig(database=database, read_only=read_only), create=create))


def fill(store: StoreParts) -> None:
    chunks = []
    for number, key in enumerate(KEYS):
        store.kv.put(key, make_block(number))
        chunks.append(NewChunk(f"d#{number}", f"text {number}", [number], np.ones(4, np.float32), key))
    store.documents.replace_document(NewDocument("d"), chunks)


def filled(root: Path, database: str | None = None) -> Path:
    with opened(root, database) as store:
        fill(store)
    return root


def blocks_on_disk(root: Path) -> set[str]:
    return {path.stem for path in (root / "kv").rglob("*.safetensors")}


def as_an_earlier_version_left_it(root: Path) -> Path:
    (root / "ragcache.json").write_text(json.dumps({"format": 1, "made_by": "ragcache"}) + "\n")
    return root


def test_documents_elsewhere_are_never_taken_for_none(tmp_path, url):
    root = filled(tmp_path / "kb", url)
    for create, read_only in ((False, False), (True, False), (False, True)):
        with pytest.raises(DatabaseMismatchError, match=r"its documents are in .*--database URL.*RAGCACHE_DATABASE"):
            open_store(root, StoreConfig(read_only=read_only), create=create)
    with pytest.raises(DatabaseMismatchError):
        rc.Store.open(root)
    assert not (root / "store.sqlite3").exists()
    assert blocks_on_disk(root) == set(KEYS)
    with opened(root, url) as store:
        assert doctor(store).blocks == len(KEYS)
        assert store.documents.counts().chunks == len(KEYS)


def test_another_database_is_refused_and_left_as_it_is(tmp_path, url, other_url):
    root = filled(tmp_path / "kb", url)
    with pytest.raises(DatabaseMismatchError):  # an empty one: no store is made of it
        open_store(root, StoreConfig(database=other_url), create=True)
    with opened(tmp_path / "other", other_url) as store:
        fill(store)  # the same blocks, even
    with pytest.raises(DatabaseMismatchError):
        open_store(root, StoreConfig(database=other_url), create=False)
    with opened(root, url):
        pass


def test_a_store_with_documents_of_its_own_takes_no_other_database(tmp_path, other_url):
    root = filled(tmp_path / "kb")
    with pytest.raises(DatabaseMismatchError, match=r"in store.sqlite3, not in .*leave out --database"):
        open_store(root, StoreConfig(database=other_url), create=False)
    with opened(root, f"sqlite:///{root / 'store.sqlite3'}"):  # its own, by another name
        pass
    moved = Path(shutil.move(root, tmp_path / "moved"))
    with opened(moved) as store:
        assert store.documents.counts().documents == 1


def test_a_database_made_anew_under_the_same_name_is_another_one(tmp_path):
    root = filled(tmp_path / "kb")
    (root / "store.sqlite3").unlink()
    with pytest.raises(StoreNotFoundError, match="restore it from a copy"):
        open_store(root, StoreConfig(), create=True)
    with opened(tmp_path / "new"):
        pass
    shutil.copy(tmp_path / "new" / "store.sqlite3", root / "store.sqlite3")
    with pytest.raises(DatabaseMismatchError, match="any more"):
        open_store(root, StoreConfig(), create=False)
    assert blocks_on_disk(root) == set(KEYS)


def test_a_database_that_has_moved_is_the_same(tmp_path):
    old, new = tmp_path / "a.sqlite3", tmp_path / "b.sqlite3"
    root = filled(tmp_path / "kb", f"sqlite:///{old}")
    old.rename(new)
    with opened(root, f"sqlite:///{new}") as store:
        assert store.documents.counts().documents == 1
    with pytest.raises(DatabaseMismatchError, match=r"b\.sqlite3"):
        open_store(root, StoreConfig(), create=False)


def test_a_server_that_cannot_be_reached_is_an_error_and_no_empty_store(tmp_path):
    """And what was never reached is not held to: another name works."""
    url = "postgresql://user:hush-hush@127.0.0.1:9/rag?password=hush-hush"
    pytest.importorskip("psycopg", reason="needs ragcache-kv[postgres]")
    with pytest.raises(StoreNotFoundError, match="reached"):
        open_store(tmp_path / "kb", StoreConfig(database=url), create=True)
    root = filled(tmp_path / "kb")
    marker = json.loads((root / "ragcache.json").read_text())
    marker["documents"]["where"] = "postgresql://user@127.0.0.1:9/rag"
    (root / "ragcache.json").write_text(json.dumps(marker))
    with pytest.raises(StoreNotFoundError, match="reached") as caught:
        open_store(root, StoreConfig(database=url), create=False)
    assert "hush" not in str(caught.value)
    with pytest.raises(DatabaseMismatchError, match=r"postgresql://user@127.0.0.1:9/rag"):
        open_store(root, StoreConfig(), create=False)


def test_the_address_of_a_server_is_written_and_no_password(tmp_path):
    for url in postgres_schema():
        root, expected = filled(tmp_path / "kb", url), make_url(url)
        text = (root / "ragcache.json").read_text()
        found = make_url(json.loads(text)["documents"]["where"])
        assert expected.password
        assert expected.password not in text
        for part in ("username", "host", "port", "database"):
            assert getattr(found, part) == getattr(expected, part)


# Stores of versions that named no database


def test_an_earlier_store_opens_and_says_once_what_is_new(tmp_path, caplog, url):
    for root, database in ((tmp_path / "in", None), (tmp_path / "out", url)):
        as_an_earlier_version_left_it(filled(root, database))
        with opened(root, database, read_only=True, create=False) as store:
            assert store.documents.counts().documents == 1
        assert "documents" not in json.loads((root / "ragcache.json").read_text())
        with caplog.at_level(logging.WARNING), opened(root, database) as store:
            assert doctor(store).orphans == []
        (said,) = caplog.messages
        assert str(root) in said
        assert "is refused" in said
        caplog.clear()
        with caplog.at_level(logging.WARNING), opened(root, database) as store:
            assert store.documents.counts().documents == 1
        assert caplog.messages == []
        assert blocks_on_disk(root) == set(KEYS)


def test_an_earlier_store_with_documents_elsewhere_is_not_opened_without_them(tmp_path, url):
    root = as_an_earlier_version_left_it(filled(tmp_path / "kb", url))
    for read_only in (True, False):
        with pytest.raises(DatabaseMismatchError, match=r"elsewhere; name it: --database URL"):
            open_store(root, StoreConfig(read_only=read_only), create=False)
    assert not (root / "store.sqlite3").exists()
    shutil.rmtree(root / "kv")
    (root / "index.faiss").write_bytes(b"")  # KV was computed nowhere, or in a remote
    with pytest.raises(DatabaseMismatchError):
        open_store(root, StoreConfig(), create=True)


def test_an_empty_file_beside_the_blocks_of_an_earlier_store_lets_none_be_deleted(tmp_path, caplog, url):
    """As `ask` or `doctor` of an earlier version made it, where --database was forgotten."""
    root = filled(tmp_path / "kb", url)
    with opened(tmp_path / "empty"):
        pass
    shutil.copy(tmp_path / "empty" / "store.sqlite3", root)
    as_an_earlier_version_left_it(root)
    refused = pytest.raises(DatabaseMismatchError, match=r"nothing was changed.*--database URL.*run it again")
    with caplog.at_level(logging.WARNING), opened(root, create=False) as store, refused:
        doctor(store)
    assert "has KV of documents that are not in its store.sqlite3" in caplog.text
    assert blocks_on_disk(root) == set(KEYS)
    with opened(root, url) as store:
        report = doctor(store)
        assert (report.orphans, report.missing) == ([], [])
    with pytest.raises(DatabaseMismatchError):
        open_store(root, StoreConfig(), create=False)


def test_an_earlier_store_takes_no_database_that_has_none_of_its_documents(tmp_path, url, other_url):
    root = as_an_earlier_version_left_it(filled(tmp_path / "kb", url))
    with pytest.raises(DatabaseMismatchError, match="name the database that has them"):
        open_store(root, StoreConfig(database=other_url), create=False)
    inside = as_an_earlier_version_left_it(filled(tmp_path / "inside"))
    shutil.rmtree(inside / "kv")
    with pytest.raises(DatabaseMismatchError, match=r"in store.sqlite3"):
        open_store(inside, StoreConfig(database=other_url), create=False)


def test_an_ingestion_that_broke_off_in_an_earlier_version_goes_on(tmp_path):
    with opened(tmp_path / "kb") as store:
        store.kv.put(KEYS[0], make_block(0))
    root = as_an_earlier_version_left_it(tmp_path / "kb")
    with opened(root) as store:
        fill(store)
    with opened(root) as store:
        assert doctor(store).orphans == []


def test_a_damaged_note_is_named(tmp_path):
    root = filled(tmp_path / "kb")
    (root / "ragcache.json").write_text('{"format": 1, "documents": 7}')
    with pytest.raises(StoreError, match=r"ragcache.json: damaged at \"documents\""):
        open_store(root, StoreConfig(), create=False)


KILLED = """
import os, signal, sys
from contextlib import closing
from pathlib import Path
from ragcache.engine.options import StoreConfig
from ragcache.engine.store_config import open_store
import ragcache.store.database, ragcache.store.kv_store

base = sys.argv[1]

def make(root, url, steps):
    left = [steps]
    def step(event, arguments):
        if event in ("open", "os.rename", "os.mkdir", "os.link", "os.remove", "sqlite3.connect"):
            if base in str(arguments[0]) or "/store" in str(arguments[0]):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(step)
    open_store(root, StoreConfig(database=url), create=True).close()

for kind in ("inside", "elsewhere"):
    steps, killed = 0, True
    while killed:
        root = Path(base) / f"{kind}{steps}"
        url = None if kind == "inside" else f"sqlite:///{base}/{kind}{steps}.db"
        pid = os.fork()
        if pid == 0:
            try:
                make(root, url, steps)
            except BaseException as error:
                print(error, flush=True)
                os._exit(1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, -signal.SIGKILL), status
        killed = status != 0
        with closing(open_store(root, StoreConfig(database=url), create=True)) as store:
            assert store.documents.counts().documents == 0
            assert store.layout.documents_in() is not None
        steps += 1
    print(kind, steps)
"""


def test_a_kill_at_any_step_of_the_making_leaves_a_store_that_opens(tmp_path):
    done = forked.run(KILLED, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(counts) == 2
    assert min(counts) > 10


def test_two_that_make_one_store_agree_on_its_database(tmp_path):
    """The second one of two that were opened before either named its database."""
    root = tmp_path / "kb"
    with opened(root):
        as_an_earlier_version_left_it(root)
        with opened(root):
            assert json.loads((root / "ragcache.json").read_text())["documents"]["where"] == "store.sqlite3"
    with sqlite3.connect(root / "store.sqlite3") as connection:
        (bound,) = connection.execute("SELECT value FROM ragcache_properties WHERE name = 'database_id'").fetchone()
    connection.close()
    assert json.loads(bound) == json.loads((root / "ragcache.json").read_text())["documents"]["id"]
