"""What vLLM's processes read: a store's blocks, or copies of a remote's. No vLLM is needed."""

import os
import shutil

import pytest
import torch

import ragcache as rc
from ragcache.errors import ConfigError, DamagedBlockError, MissingBlockError, SchemaVersionError, StoreNotFoundError
from ragcache.store.directory import StoreLayout
from ragcache_vllm.blocks import StoredBlocks

pytest.importorskip("obstore", reason="needs ragcache-kv[remote]")
ABSENT = "0" * 64


@pytest.fixture
def remote(open_kb, tmp_path):
    """A store with a remote: its URL, the database's id, and a block with its key."""
    url = f"file://{tmp_path / 'remote'}"
    with open_kb(store=rc.StoreConfig(remote=url)) as kb:
        kb.ingest(rc.Document("clubs", "The rowing club of Kelbrook meets on Monday."))
        key = next(iter(kb.store.kv.keys()))
        return url, kb.store.documents.properties()["database_id"], key, kb.store.kv.get(key).block


@pytest.fixture
def elsewhere(remote, tmp_path):
    """A machine with nothing of its own but the store's key."""
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(tmp_path / "kb" / "ragcache.key", tmp_path / "elsewhere")
    layout = StoreLayout(tmp_path / "elsewhere")
    layout.create()
    return layout


def test_a_remote_block_is_brought_here_and_served(remote, elsewhere, tmp_path):
    url, owner, key, block = remote
    blocks = StoredBlocks(elsewhere.root, url, owner)
    with pytest.raises(MissingBlockError, match="here or in the remote"):
        blocks.verify(ABSENT)
    blocks.verify(key)
    shutil.rmtree(tmp_path / "remote" / "blocks")
    found = blocks.get(key)
    assert torch.equal(found.layer_keys(0), block.layer_keys(0))
    assert blocks.get(ABSENT) is None
    blocks.close()


def test_a_damaged_remote_block_is_not_promised(remote, elsewhere, tmp_path):
    url, owner, key, _ = remote
    (file,) = (tmp_path / "remote" / "blocks").rglob(f"{key}*")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    blocks = StoredBlocks(elsewhere.root, url, owner)
    with pytest.raises((MissingBlockError, DamagedBlockError)):
        blocks.verify(key)
    assert not list(elsewhere.kv.rglob(f"{key}*"))
    blocks.close()


def test_another_databases_remote_is_refused(remote, elsewhere):
    url, _, _, _ = remote
    with pytest.raises(ConfigError, match="holds the blocks of another store"):
        StoredBlocks(elsewhere.root, url, "another")


@pytest.fixture
def key(open_kb):
    """The key of the only block of a store without a remote."""
    with open_kb() as kb:
        kb.ingest(rc.Document("clubs", "The rowing club of Kelbrook meets on Monday."))
        [key] = kb.store.kv.keys()
        return key


def test_without_a_remote_nothing_is_written(key, tmp_path):
    blocks = StoredBlocks(tmp_path / "kb")
    before = sorted(path for path in (tmp_path / "kb").rglob("*"))
    blocks.verify(key)
    assert blocks.get(key) is not None
    with pytest.raises(MissingBlockError):
        blocks.verify(ABSENT)
    blocks.close()
    assert sorted(path for path in (tmp_path / "kb").rglob("*")) == before


def test_a_file_is_verified_once_and_again_when_it_changed(key, tmp_path):
    blocks = StoredBlocks(tmp_path / "kb")
    blocks.verify(key)
    (file,) = (tmp_path / "kb").rglob(f"{key}*")
    known, data = file.stat(), bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedBlockError):
        blocks.verify(key)
    os.utime(file, ns=(known.st_atime_ns, known.st_mtime_ns))  # as rot on a disk leaves it
    blocks.verify(key)
    assert blocks.get(key) is None, "what is read is checked all the same"
    file.unlink()
    with pytest.raises(MissingBlockError):
        blocks.verify(key)
    blocks.close()


def test_a_store_that_is_not_there(tmp_path):
    with pytest.raises((StoreNotFoundError, SchemaVersionError)):
        StoredBlocks(tmp_path / "none")
