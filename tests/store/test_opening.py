"""A store's directory: its writer's lock, and the one database of its documents that it names."""

import json
import multiprocessing
import os
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from blocks import make_block, make_key
from flushes import needs_proc, record_calls, unflushed
from kit.makers import databases
from postgres_server import postgres_schema
from sqlalchemy import make_url
from waiting import at_once

import ragcache as rc
from ragcache import errors
from ragcache.engine.doctor import doctor
from ragcache.engine.options import StoreConfig
from ragcache.engine.store_config import StoreParts, open_store
from ragcache.store.directory import StoreLayout
from ragcache.store.records import NewChunk, NewDocument

KEYS = [make_key(number) for number in range(3)]


other_url = databases("other")


def opened(
    root: Path, database: str | None = None, *, create: bool = True, read_only: bool = False
) -> closing[StoreParts]:
    return closing(open_store(root, StoreConfig(database=database, read_only=read_only), create=create))


def refuse(
    root: Path, error: type[errors.StoreError], words: str | None = None, *, create: bool = False, **options: Any
) -> str:
    """What is said where the store is not opened so."""
    with pytest.raises(error, match=words) as caught:
        open_store(root, StoreConfig(**options), create=create)
    return str(caught.value)


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


def unnamed(root: Path) -> Path:
    marker = json.loads((root / "ragcache.json").read_text())
    del marker["documents"]
    (root / "ragcache.json").write_text(json.dumps(marker) + "\n")
    return root


def test_documents_elsewhere_are_never_taken_for_none(tmp_path, url):
    root = filled(tmp_path / "kb", url)
    for create, read_only in ((False, False), (True, False), (False, True)):
        words = r"its documents are in .*--database URL.*RAGCACHE_DATABASE"
        refuse(root, errors.DatabaseMismatchError, words, create=create, read_only=read_only)
    with pytest.raises(errors.DatabaseMismatchError):
        rc.Store.open(root)
    assert not (root / "store.sqlite3").exists()
    assert blocks_on_disk(root) == set(KEYS)
    with opened(root, url) as store:
        assert doctor(store).blocks == len(KEYS)
        assert store.documents.counts().chunks == len(KEYS)


def test_another_database_is_refused_and_left_as_it_is(tmp_path, url, other_url):
    root = filled(tmp_path / "kb", url)
    refuse(root, errors.DatabaseMismatchError, database=other_url, create=True)  # an empty one: no store is made of it
    with opened(tmp_path / "other", other_url) as store:
        fill(store)  # the same blocks, even
    refuse(root, errors.DatabaseMismatchError, database=other_url)
    with opened(root, url):
        pass


def test_a_store_with_documents_of_its_own_takes_no_other_database(tmp_path, other_url):
    root = filled(tmp_path / "kb")
    refuse(root, errors.DatabaseMismatchError, r"in store.sqlite3, not in .*leave out --database", database=other_url)
    with opened(root, f"sqlite:///{root / 'store.sqlite3'}"):  # its own, by another name
        pass
    moved = Path(shutil.move(root, tmp_path / "moved"))
    with opened(moved) as store:
        assert store.documents.counts().documents == 1


def test_a_database_made_anew_under_the_same_name_is_another_one(tmp_path):
    root = filled(tmp_path / "kb")
    (root / "store.sqlite3").unlink()
    refuse(root, errors.StoreNotFoundError, "restore it from a copy", create=True)
    with opened(tmp_path / "new"):
        pass
    shutil.copy(tmp_path / "new" / "store.sqlite3", root / "store.sqlite3")
    refuse(root, errors.DatabaseMismatchError, "any more")
    assert blocks_on_disk(root) == set(KEYS)


def test_a_database_that_has_moved_is_the_same(tmp_path):
    old, new = tmp_path / "a.sqlite3", tmp_path / "b.sqlite3"
    root = filled(tmp_path / "kb", f"sqlite:///{old}")
    old.rename(new)
    with opened(root, f"sqlite:///{new}") as store:
        assert store.documents.counts().documents == 1
    refuse(root, errors.DatabaseMismatchError, r"b\.sqlite3")


def test_a_server_that_cannot_be_reached_is_an_error_and_no_empty_store(tmp_path):
    """And what was never reached is not held to: another name works."""
    url = "postgresql://user:hush-hush@127.0.0.1:9/rag?password=hush-hush"
    pytest.importorskip("psycopg", reason="needs ragcache-kv[postgres]")
    refuse(tmp_path / "kb", errors.StoreUnreachableError, "reached", database=url, create=True)
    root = filled(tmp_path / "kb")
    marker = json.loads((root / "ragcache.json").read_text())
    marker["documents"]["where"] = "postgresql://user@127.0.0.1:9/rag"
    (root / "ragcache.json").write_text(json.dumps(marker))
    assert "hush" not in refuse(root, errors.StoreUnreachableError, "reached", database=url)
    refuse(root, errors.DatabaseMismatchError, r"postgresql://user@127.0.0.1:9/rag")


def test_the_address_of_a_server_is_written_and_no_password(tmp_path):
    for url in postgres_schema():
        root, expected = filled(tmp_path / "kb", url), make_url(url)
        text = (root / "ragcache.json").read_text()
        found = make_url(json.loads(text)["documents"]["where"])
        assert expected.password
        assert expected.password not in text
        for part in ("username", "host", "port", "database"):
            assert getattr(found, part) == getattr(expected, part)


@pytest.mark.parametrize("left", ["kv", "index.faiss"])
def test_a_marker_without_a_database_beside_content_is_refused(tmp_path, url, left):
    root = unnamed(filled(tmp_path / "kb", url))
    (root / "index.faiss").write_bytes(b"")
    for other in {"kv", "index.faiss"} - {left}:
        shutil.rmtree(root / other) if other == "kv" else (root / other).unlink()
    for options in ({}, {"database": url}, {"read_only": True}):
        words = r"ragcache\.json does not name the database.*ragcache ingest FOLDER --store NEW"
        refuse(root, errors.DatabaseMismatchError, words, create=True, **options)
    assert not (root / "store.sqlite3").exists()
    assert blocks_on_disk(root) == (set(KEYS) if left == "kv" else set())


def test_a_damaged_note_is_named(tmp_path):
    root = filled(tmp_path / "kb")
    (root / "ragcache.json").write_text('{"format": 1, "documents": 7}')
    refuse(root, errors.StoreError, r"ragcache.json: damaged at \"documents\"")


def make_until_killed(root: Path, url: str | None, steps: int) -> None:
    """The child: makes a store, and kills itself at that step."""
    left = [steps]

    def step(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.mkdir", "os.link", "os.remove", "sqlite3.connect"):
            left[0] -= str(root.parent) in str(arguments[0])
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(step)
    open_store(root, StoreConfig(database=url), create=True).close()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_kill_at_any_step_of_the_making_leaves_a_store_that_opens(tmp_path, elsewhere):
    for steps in count():
        root = tmp_path / f"kb{steps}"
        url = f"sqlite:///{root}.db" if elsewhere else None
        child = multiprocessing.get_context("fork").Process(target=make_until_killed, args=(root, url, steps))
        child.start()
        child.join()
        with opened(root, url) as store:
            assert store.documents.counts().documents == 0
            assert store.layout.documents_in() is not None
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
    assert steps > 10


def test_two_that_make_one_store_agree_on_its_database(tmp_path):
    """The second one of two that were opened before either named its database."""
    root = tmp_path / "kb"
    with opened(root):
        unnamed(root)
        with opened(root):
            assert json.loads((root / "ragcache.json").read_text())["documents"]["where"] == "store.sqlite3"
    with sqlite3.connect(root / "store.sqlite3") as connection:
        (bound,) = connection.execute("SELECT value FROM ragcache_properties WHERE name = 'database_id'").fetchone()
    connection.close()
    assert json.loads(bound) == json.loads((root / "ragcache.json").read_text())["documents"]["id"]


# The directory, and its writer's lock


def test_create_makes_a_store_once(tmp_path):
    layout = StoreLayout(tmp_path / "a" / "b")
    assert not layout.exists()
    with pytest.raises(errors.StoreNotFoundError, match="no store here"):
        layout.check()
    layout.create()
    marker = layout.marker.read_bytes()
    layout.create()
    layout.check()
    assert layout.exists()
    assert layout.marker.read_bytes() == marker
    assert sorted(path.name for path in layout.root.iterdir()) == ["ragcache.json", "ragcache.key", "writer.lock"]
    assert layout.key.stat().st_mode & 0o777 == 0o600


@needs_proc
def test_a_new_store_outlives_a_power_cut(tmp_path, monkeypatch):
    layout, calls = StoreLayout(tmp_path / "a" / "b"), record_calls(monkeypatch)
    layout.create()
    assert ("rename", layout.marker) in calls
    assert unflushed(calls) == []


def test_an_empty_directory_becomes_a_store_and_others_do_not(tmp_path):
    StoreLayout(tmp_path).create()
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("")
    for root in (other, tmp_path / "file"):
        with pytest.raises(errors.StoreNotFoundError, match="neither a store nor an empty directory"):
            StoreLayout(root).create()
        with pytest.raises(errors.StoreNotFoundError):
            StoreLayout(root).check()


def test_what_a_killed_creation_left_is_no_obstacle(tmp_path):
    (tmp_path / ".ragcache.json.123-0123abcd.tmp").write_bytes(b'{"for')
    (tmp_path / "writer.lock").write_bytes(b"")
    layout = StoreLayout(tmp_path)
    layout.create()
    layout.check()


@pytest.mark.parametrize("marker", [b"", b"text", b"[1]", b"{}", b'{"format": "1"}', b'{"format": 2}', b"\xff\xfe"])
def test_markers_of_newer_or_other_makers_are_refused(tmp_path, marker):
    layout = StoreLayout(tmp_path)
    layout.marker.write_bytes(marker)
    for action in (layout.check, layout.create):
        with pytest.raises(errors.SchemaVersionError, match=str(tmp_path)):
            action()
    assert layout.marker.read_bytes() == marker


def test_one_writer_at_a_time_among_threads(tmp_path):
    layout = StoreLayout(tmp_path)
    layout.create()
    inside = highest = 0

    def work() -> None:
        nonlocal inside, highest
        with layout.writer(timeout_s=30):
            inside += 1
            highest = max(highest, inside)
            time.sleep(0.002)
            inside -= 1

    at_once(*[work] * 5)
    assert highest == 1


def test_the_same_thread_may_hold_the_lock_twice(tmp_path):
    layout = StoreLayout(tmp_path)
    layout.create()
    with layout.writer(0), layout.writer(0):
        pass
    with StoreLayout(tmp_path).writer(0):
        pass


HOLDER = """
import sys, time
from ragcache.store.directory import StoreLayout
with StoreLayout(sys.argv[1]).writer(0):
    print("held", flush=True)
    time.sleep(60)
"""


def test_another_process_holds_the_lock_until_it_is_killed(tmp_path):
    StoreLayout(tmp_path).create()
    with forked.Forked(HOLDER, tmp_path) as holder:
        assert holder.stdout.readline() == "held\n"
        layout = StoreLayout(tmp_path)
        with pytest.raises(errors.StoreBusyError, match=f"{tmp_path}: another process"), layout.writer(0.1):
            pass
        holder.kill()
        holder.wait()
        with layout.writer(1):
            pass


def test_a_store_that_another_process_makes_meanwhile_is_no_foreign_directory(tmp_path, monkeypatch):
    layout, other = StoreLayout(tmp_path / "kb"), StoreLayout(tmp_path / "kb")
    layout.root.mkdir()
    entries = layout._foreign_entries

    def meanwhile() -> Iterator[Path]:
        other.create()
        other.kv.mkdir()
        return entries()

    monkeypatch.setattr(layout, "_foreign_entries", meanwhile)
    layout.create()
    layout.check()
