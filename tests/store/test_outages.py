"""A device that fails, a disk without a byte free, a store that was removed: typed errors, and nothing left over."""

import errno
import os
import shutil

import pytest
from blocks import make_block, make_key
from flushes import needs_proc
from tiny_disk import run_on_tiny_disk

import ragcache as rc
from ragcache import files
from ragcache.errors import DamagedBlockError, StoreNotFoundError
from ragcache.store.kv_store import KVStore


def failing(*_arguments: object, **_options: object) -> int:
    raise OSError(errno.EIO, "Input/output error")


def test_a_block_that_cannot_be_opened_is_damaged(tmp_path, monkeypatch):
    with KVStore(tmp_path, memory_bytes=0) as store:
        store.put(make_key(1), make_block(1))
        monkeypatch.setattr(os, "open", failing)
        with pytest.raises(DamagedBlockError, match="cannot be opened"):
            store.verify(make_key(1))
        assert store.get(make_key(1)) is None


@needs_proc
def test_directories_of_other_processes_are_flushed_too(tmp_path, monkeypatch):
    """The other process may have made them, and not flushed them, when the power goes."""
    (tmp_path / "kv" / make_key(1)[:2] / make_key(1)[2:4]).mkdir(parents=True)
    flushed = []
    monkeypatch.setattr(files, "flush_directory", flushed.append)
    with KVStore(tmp_path / "kv") as store:
        store.put(make_key(1), make_block(1))
        directory = tmp_path / "kv" / make_key(1)[:2]
        assert {tmp_path, tmp_path / "kv", directory, directory / make_key(1)[2:4]} <= set(flushed)
        flushed.clear()
        store.put(make_key(1), make_block(1))
        assert flushed == [directory / make_key(1)[2:4]], "once a process"


@pytest.fixture
def removed(tmp_path):
    """An open store whose folder is gone."""
    kb = rc.Store.open(tmp_path / "kb", create=True)
    kb.store.kv.put(make_key(1), make_block(1))
    shutil.rmtree(tmp_path / "kb")
    yield kb
    kb.close()
    assert not (tmp_path / "kb").exists(), "nothing makes it anew"


def test_a_removed_folder_is_named_at_the_next_write(removed):
    for write in (
        lambda: removed.delete("a"),
        lambda: removed.doctor(),
        lambda: removed.store.kv.put(make_key(2), make_block(2)),
        lambda: removed.store.kv.foreign.put(make_key(2), make_block(2)),
        lambda: removed.store.kv.keep_prefixes([], [], 0, lambda: 0),
        lambda: removed.store.documents.bind("name", "value"),
    ):
        with pytest.raises(StoreNotFoundError, match=str(removed.store.layout.root)):
            write()


def test_a_replaced_database_is_named_at_the_next_write(tmp_path):
    with rc.Store.open(tmp_path / "kb", create=True) as kb:
        shutil.copy(tmp_path / "kb" / "store.sqlite3", tmp_path / "copy")
        os.replace(tmp_path / "copy", tmp_path / "kb" / "store.sqlite3")
        with pytest.raises(StoreNotFoundError, match=r"removed or replaced since it was opened; open the store again"):
            kb.store.documents.bind("name", "value")
    with rc.Store.open(tmp_path / "kb") as kb:
        kb.store.documents.bind("name", "value")


FULL = """
import ragcache as rc
from ragcache.store.records import NewChunk, NewDocument
import numpy as np

with rc.Store.open(disk / "kb", create=True) as kb:
    kb.store.kv.put(make_key(1), make_block(1))
    row = np.ones(4, np.float32)
    kb.store.documents.replace_document(NewDocument("a", "a", "h"), [NewChunk("a#0", "words", [1], row)])
file = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
for size in (4096, 1):
    try:
        while True:
            os.write(file, bytes(size))
    except OSError:
        pass
assert os.statvfs(disk).f_bavail == 0, os.statvfs(disk)
before = sorted(disk.rglob("*"))
with rc.Store.open(disk / "kb", store=rc.StoreConfig(read_only=True)) as kb:
    assert [one.id for one in kb.documents()] == ["a"]
    assert same(kb.store.kv.get(make_key(1)).block, make_block(1))
    assert kb.info().blocks == 1
assert {path for path in disk.rglob("*") if "sqlite3-" not in path.name} == set(before)
"""


def test_a_disk_without_a_byte_free_is_readable(tmp_path):
    run_on_tiny_disk(tmp_path, FULL, size="8m")


READ_ONLY = """
import numpy as np
from ragcache.errors import StoreReadOnlyError
from ragcache.store.directory import StoreLayout
from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore
from ragcache.store.records import NewChunk, NewDocument
layout = StoreLayout(disk / "kb")
layout.create()
kv, documents = KVStore(layout.kv, memory_bytes=0), DocumentStore.open(layout.database)
def put(id):
    documents.replace_document(NewDocument(id), [NewChunk(f"{id}#0", "words", [1], np.ones(4, np.float32), "h")])
def lock():
    with layout.writer(1):
        pass
kv.put(make_key(1), make_block(1))
put("a")
documents.database._engine.dispose()  # a disk with a file open for writing cannot turn read-only
turn_read_only()
layout.check()
layout.create()
for action in (
    StoreLayout(disk / "new").create, lock, lambda: put("b"),
    lambda: DocumentStore.open(layout.database), lambda: DocumentStore.open(disk / "new.sqlite3"),
    lambda: kv.put(make_key(2), make_block(2)), lambda: kv.put(make_key(1), make_block(1)),
    lambda: kv.delete(make_key(1)),
):
    with pytest.raises(StoreReadOnlyError, match=str(disk)):
        action()
assert same(kv.get(make_key(1)).block, make_block(1))
assert kv.get(make_key(2)) is None
documents.close()
with DocumentStore.open(layout.database, read_only=True) as documents:
    assert documents.chunks_of("a")[0].handle == "h"
    assert documents.vector_ids({"$not": {"a": 1}}) == {1}
"""


def test_a_disk_that_turns_read_only_is_read_and_named_at_every_write(tmp_path):
    run_on_tiny_disk(tmp_path, READ_ONLY, size="600k")
