"""What a store's key protects against, and how it is kept, lost and rotated."""

import json
import logging
import multiprocessing
import os
import shutil
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest
from blocks import make_block, make_key, served_from

import ragcache as rc
from ragcache.codecs import RawCodec
from ragcache.codecs.block_file import write_block
from ragcache.codecs.container import write_container
from ragcache.engine.reencrypt import reencrypt
from ragcache.engine.store_config import StoreParts, open_store
from ragcache.errors import ConfigError, DamagedBlockError, SealError, UnencodableBlockError
from ragcache.retrieval.index_file import IndexHeader, read_index, write_index
from ragcache.retrieval.vector_index import VectorIndex
from ragcache.seal import VARIABLE, Seal, new_secret, open_seal
from ragcache.store.directory import StoreLayout

COUNT = 12
KEYS = [make_key(number) for number in range(COUNT)]
CONFIG = rc.StoreConfig(memory_bytes=0)


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def opened(root: Path, **options) -> closing[StoreParts]:
    return closing(open_store(root, rc.StoreConfig(memory_bytes=0, **options), create=True))


@pytest.fixture
def root(tmp_path) -> Path:
    """A store with blocks, blocks of nobody's passages, and an index."""
    root = tmp_path / "kb"
    fill(root)
    return root


def fill(root: Path, **options) -> None:
    with opened(root, **options) as store:
        for number, key in enumerate(KEYS):
            (store.kv.foreign if number % 3 == 0 else store.kv).put(key, make_block(number))
        index = VectorIndex(4, seal=store.kv.seal)
        index.save(store.layout.index)


def file_of(root: Path, key: str) -> Path:
    (found,) = root.rglob(f"{key}.safetensors")
    return found


def whole(root: Path) -> bool:
    """Whether every block and the index are read back, bit for bit."""
    with opened(root) as store:
        read_index(store.layout.index, store.kv.seal)
        return [served_from(store.kv, key, make_block(number)) for number, key in enumerate(KEYS)] == ["disk"] * COUNT


# Who may write into the folder, and does not have the key


def swap(root: Path, key: str, other: str) -> None:
    shutil.copy(file_of(root, other), file_of(root, key))


def forge(root: Path, key: str, block) -> None:
    """A whole file, by somebody who has the code and another key."""
    write_block(file_of(root, key), key, block, RawCodec(), seal=Seal([new_secret()]))


def not_finite(number: int):
    block = make_block(number)
    block.keys[0, 0, 0, 0] = float("nan")
    return block


def forge_not_finite(root: Path, key: str) -> None:
    block = not_finite(1)
    metadata = {"format_version": "1", "codec": "raw", "codec_version": "1", "num_tokens": "5"}
    write_container(file_of(root, key), {"keys": block.keys, "values": block.values}, metadata)


def cut(root: Path, key: str) -> None:
    os.truncate(file_of(root, key), file_of(root, key).stat().st_size - 1)


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.parametrize(
    "attack",
    [
        lambda root, key: swap(root, key, KEYS[2]),
        lambda root, key: forge(root, key, make_block(2)),
        forge_not_finite,
        cut,
    ],
    ids=["swapped", "forged", "not finite", "cut"],
)
def test_blocks_of_other_texts_are_dropped_and_counted(tmp_path, attack, encrypt, caplog):
    root = tmp_path / "kb"
    fill(root, encrypt=encrypt)
    attack(root, KEYS[1])
    with opened(root) as store:
        with caplog.at_level(logging.WARNING):
            assert store.kv.get(KEYS[1]) is None
        assert store.kv.stats().damaged == 1
        assert KEYS[1] in caplog.text
        assert "not sealed by this store" in caplog.text
        assert served_from(store.kv, KEYS[2], make_block(2)) == "disk"


def test_a_swapped_index_is_not_read(root, tmp_path):
    other = VectorIndex(4, seal=Seal([new_secret()]))
    other.save(tmp_path / "forged")
    os.replace(tmp_path / "forged", root / "index.faiss")
    with opened(root) as store, pytest.raises(rc.errors.DamagedIndexError, match="not sealed by this store"):
        read_index(store.layout.index, store.kv.seal)


def test_a_replaced_key_file_is_refused(root):
    layout = StoreLayout(root)
    layout.key.unlink()
    with pytest.raises(SealError, match=r"cannot be read.*restore it.*RAGCACHE_STORE_KEY.*reencrypt --lost"):
        opened(root)
    layout.key.write_text("00" * 32)
    with pytest.raises(SealError, match=r"others may read or replace.*0644.*chmod 600"):
        opened(root)
    layout.key.chmod(0o600)
    with pytest.raises(SealError, match=r"sealed with the key [0-9a-f]{16}, not with [0-9a-f]{16} of .*ragcache\.key"):
        opened(root)
    for nonsense in ("", "secret", "00" * 31, "zz" * 32):
        layout.key.write_text(nonsense)
        with pytest.raises(SealError, match="holds no key of a store"):
            opened(root)
    assert all(file_of(root, key).exists() for key in KEYS), "nothing is lost for want of the key"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_key_of_another_user_is_refused(root):
    """Who may write into the folder may replace the file, though not read it."""
    os.chown(root / "ragcache.key", 12345, -1)
    with pytest.raises(SealError, match="user 12345"):
        opened(root)
    os.chown(root, 12345, -1)
    with opened(root):
        pass


def test_no_block_is_stored_that_is_not_finite(root):
    with opened(root) as store:
        for where in ("durable", "memory", "nowhere"):
            with pytest.raises(UnencodableBlockError, match="NaN or an infinity"):
                store.kv.put(KEYS[1], not_finite(1), where)
        assert served_from(store.kv, KEYS[1], make_block(1)) == "disk"
        write_container(
            file_of(root, KEYS[1]),
            {"keys": not_finite(1).keys, "values": make_block(1).values},
            {"format_version": "1", "codec": "raw", "codec_version": "1", "num_tokens": "5"},
            seal=store.kv.seal.of(KEYS[1]),
        )
        with pytest.raises(DamagedBlockError, match="NaN or an infinity"):
            store.kv.verify(KEYS[1])


# Where the key is


def test_the_key_is_in_the_environment_where_the_folder_is_shared(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "ab" * 32)
    fill(tmp_path / "kb")
    assert not (tmp_path / "kb" / "ragcache.key").exists()
    assert whole(tmp_path / "kb")
    monkeypatch.setenv(VARIABLE, "cd" * 32)
    with pytest.raises(SealError, match="of RAGCACHE_STORE_KEY"):
        opened(tmp_path / "kb")
    monkeypatch.setenv(VARIABLE, "not hex")
    with pytest.raises(SealError, match="RAGCACHE_STORE_KEY: holds no key"):
        opened(tmp_path / "kb")


def test_no_error_says_the_key(root, monkeypatch):
    for text in ((root / "ragcache.key").read_text().strip()[:-2], "ab" * 31):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(SealError) as caught:
            opened(root)
        assert text not in str(caught.value)


# Rotation


@pytest.mark.parametrize("encrypt", [None, True, False])
def test_a_rotated_key_opens_everything_and_the_old_nothing(root, encrypt):
    old = open_seal(root / "ragcache.key")
    report = reencrypt(root, rc.StoreConfig(encrypt=encrypt))
    assert (report.blocks, report.dropped, report.encrypted) == (COUNT, 0, bool(encrypt))
    assert report.key != next(iter(old._known))
    assert whole(root)
    for number, key in enumerate(KEYS):
        plain = make_block(number).keys.numpy().tobytes() in file_of(root, key).read_bytes()
        assert plain != bool(encrypt)
    assert (root / "ragcache.key").read_text().count("\n") == 1
    with pytest.raises(rc.errors.DamagedIndexError):
        read_index(root / "index.faiss", Seal(old._known.values()))


def test_an_open_store_follows_a_rotation(root):
    with opened(root) as store:
        reencrypt(root, CONFIG)
        assert served_from(store.kv, KEYS[1], make_block(1)) == "disk"
        store.kv.put(make_key(99), make_block(99))
    with opened(root) as store:
        assert served_from(store.kv, make_key(99), make_block(99)) == "disk"


def test_encryption_is_the_stores_own(root):
    with pytest.raises(ConfigError, match="is not encrypted; `ragcache reencrypt`"):
        opened(root, encrypt=True)
    reencrypt(root, rc.StoreConfig(encrypt=True))
    with pytest.raises(ConfigError, match="is encrypted"):
        opened(root, encrypt=False)
    assert whole(root)


def test_a_lost_key_costs_the_blocks_alone(root):
    (root / "ragcache.key").unlink()
    report = reencrypt(root, CONFIG, lost=True)
    assert (report.blocks, report.dropped) == (0, COUNT)
    with opened(root) as store:
        assert [store.kv.get(key) for key in KEYS] == [None] * COUNT
        store.kv.put(KEYS[0], make_block(0))


def test_a_key_in_the_environment_is_rotated_there(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "ab" * 32)
    fill(tmp_path / "kb")
    with pytest.raises(ConfigError, match="RAGCACHE_STORE_KEY=NEW,OLD"):
        reencrypt(tmp_path / "kb", CONFIG)
    monkeypatch.setenv(VARIABLE, f"{'cd' * 32},{'ab' * 32}")
    assert reencrypt(tmp_path / "kb", CONFIG).blocks == COUNT
    monkeypatch.setenv(VARIABLE, "cd" * 32)
    assert whole(tmp_path / "kb")


def rotate_until_killed(root: Path) -> None:
    while True:
        reencrypt(root, rc.StoreConfig(encrypt=bool(time.time_ns() % 2)))


@pytest.mark.parametrize("attempt", range(6))
def test_a_kill_in_a_rotation_loses_nothing(root, attempt):
    child = multiprocessing.get_context("fork").Process(target=rotate_until_killed, args=(root,))
    child.start()
    time.sleep(0.05 + 0.13 * attempt)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert whole(root), "it opens with both keys"
    with opened(root) as store:
        encrypted = store.kv.seal.encrypts
    assert reencrypt(root, rc.StoreConfig(encrypt=not encrypted)).blocks == COUNT
    assert whole(root)
    assert (root / "ragcache.key").read_text().count("\n") == 1


# A remote that stores share


@pytest.mark.parametrize("same_key", [True, False])
def test_a_remote_is_shared_by_stores_with_one_key(tmp_path, same_key):
    pytest.importorskip("obstore")
    url = f"file://{tmp_path}/remote"
    with opened(tmp_path / "a", remote=url) as first:
        first.kv.put(KEYS[0], make_block(0))
        marker = json.loads((tmp_path / "remote" / "ragcache.json").read_text())
        assert marker["seal"] == first.kv.seal.id
    (tmp_path / "b").mkdir()
    shutil.copy(tmp_path / "a" / "store.sqlite3", tmp_path / "shared.sqlite3")
    if same_key:
        shutil.copy(tmp_path / "a" / "ragcache.key", tmp_path / "b")
    shared = {"remote": url, "database": f"sqlite:///{tmp_path}/shared.sqlite3"}
    if not same_key:
        with pytest.raises(SealError, match=r"sealed with the key .*RAGCACHE_STORE_KEY.*ragcache\.key"):
            opened(tmp_path / "b", **shared)
        return
    with opened(tmp_path / "b", **shared) as second:
        assert served_from(second.kv, KEYS[0], make_block(0)) == "remote"
    reencrypt(tmp_path / "a", rc.StoreConfig(remote=url))
    with pytest.raises(SealError, match="sealed with the key"):
        opened(tmp_path / "b", **shared)


def test_a_remote_block_of_another_store_is_not_believed(tmp_path):
    pytest.importorskip("obstore")
    with opened(tmp_path / "a", remote=f"file://{tmp_path}/remote") as store:
        store.kv.put(KEYS[0], make_block(0))
        shutil.rmtree(tmp_path / "a" / "kv")
        forge(tmp_path / "remote", KEYS[0], make_block(1))
        assert store.kv.get(KEYS[0]) is None
        assert store.kv.stats().damaged == 1


def test_an_index_header_is_sealed_too(tmp_path):
    seal = Seal([new_secret()], encrypts=True)
    header = IndexHeader("flat", 4, "words", 3, [1])
    write_index(tmp_path / "index", header, b"payload" * 9, seal)
    assert b"payload" not in (tmp_path / "index").read_bytes()
    found, payload = read_index(tmp_path / "index", seal)
    assert (found, bytes(payload)) == (header, b"payload" * 9)
    data = (tmp_path / "index").read_bytes()
    (tmp_path / "index").write_bytes(data.replace(b'"generation": 3', b'"generation": 4'))
    with pytest.raises(rc.errors.DamagedIndexError):
        read_index(tmp_path / "index", seal)
