"""Stores whose blocks are in a remote, over real servers: what machines share, what is deleted, and whose it is."""

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from blocks import make_block, make_key, same, size_of, tier_of

from integrations.remote.tests.remotes import KINDS, remote_url, s3_server
from ragcache.codecs import RawCodec
from ragcache.errors import ConfigError, SchemaVersionError, StoreNotFoundError, StoreReadOnlyError
from ragcache.seal import MARK_LENGTH
from ragcache.store.kv_store import KVStore
from ragcache.store.remote import open_blobs
from ragcache.store.remote.connection import Connection
from ragcache.store.tiers import RemoteTier
from ragcache.store.tiers.remote import BLOCKS, USES

KEY, OTHER = make_key(1), make_key(2)
OPTIONS = {"memory_bytes": 0}
Open = Callable[..., KVStore]


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return remote_url(request.param, tmp_path / "kv")


@pytest.fixture
def open_machine(url: str, tmp_path: Path) -> Iterator[Open]:
    """Opens a machine's store by its name: its own disk and memory, one remote."""
    opened: list[KVStore] = []

    def open_one(name: str, **options: object) -> KVStore:
        remote = Connection(open_blobs(url), "one database", read_only=bool(options.get("read_only")))
        opened.append(KVStore(tmp_path / name, remote=remote, **{**OPTIONS, **options}))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def names(url: str, folder: str = BLOCKS) -> list[str]:
    """What the service itself says it has."""
    with closing(open_blobs(url)) as blobs:
        return sorted(blob.name for blob in blobs.walk(folder))


def replace(url: str, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of every block in the remote."""
    with closing(open_blobs(url)) as blobs:
        for blob in list(blobs.walk(BLOCKS)):
            blobs.put(blob.name, change(bytes(blobs.get(blob.name) or b"")))


@pytest.mark.parametrize("codec", ["raw", "int4"])
def test_what_one_machine_puts_another_one_has(open_machine, codec):
    first, second = open_machine("a", codec=codec), open_machine("b")
    held = first.put(KEY, make_block(1, num_tokens=50))
    assert tier_of(second, KEY) == "remote"
    assert second.lookup([KEY, OTHER]) == {KEY: ("remote", size_of(second, KEY))}
    tiers = []
    for _ in range(2):
        loaded = second.get(KEY)
        assert same(loaded.block, held)
        tiers.append(loaded.tier)
    assert tiers == ["remote", "disk"], "the second read is of the copy"
    assert first.get(KEY).tier == "disk"


def unsealed(data: bytes) -> bytes:
    start = data.index(b'"seal":"') + 8
    return bytes(data[:start] + data[start + MARK_LENGTH :])


def test_copies_are_the_disks_own_files(open_machine, url, tmp_path):
    """The same bytes lie in the remote and on the disk, but for the random salts of their seals: one format."""
    open_machine("a", codec="int8").put(KEY, make_block(1))
    (copy,) = (tmp_path / "a").rglob("*.safetensors")
    with closing(open_blobs(url)) as blobs:
        assert unsealed(blobs.get(names(url)[0])) == unsealed(copy.read_bytes())


def test_a_disk_budget_bounds_the_copies_alone(open_machine, tmp_path):
    budget = 4 * make_block(1).num_bytes
    store = open_machine("a", disk_bytes=budget)
    for number in range(20):
        store.put(make_key(number), make_block(number))
    copies = [path.stat().st_size for path in (tmp_path / "a").rglob("*.safetensors")]
    assert 0 < sum(copies) <= budget
    assert len(list(store.keys())) == 20
    assert not store.gives_up, "what a disk gives up the remote has"
    tiers = []
    for number in reversed(range(20)):
        loaded = store.get(make_key(number))
        assert same(loaded.block, make_block(number))
        tiers.append(loaded.tier)
    assert (tiers[0], tiers[-1]) == ("disk", "remote")


def test_a_deleted_block_is_gone_everywhere(open_machine, url, tmp_path):
    """Law 10: from the remote and this machine at once, from another machine when it looks."""
    chunks = {KEY, OTHER}
    machines = [
        open_machine(name, referenced=lambda keys: set(keys) & chunks, memory_bytes=1 << 20, ttl_s=1e6) for name in "ab"
    ]
    for key in (KEY, OTHER):
        machines[0].put(key, make_block(1))
        assert machines[1].get(key) is not None
    assert len(names(url, USES)) == 2, "marks of use belong to the block"
    chunks.remove(KEY)
    machines[0].delete(KEY)
    machines[1].refresh()
    for store in machines:
        assert tier_of(store, KEY) is None
        assert store.get(KEY) is None
        assert tier_of(store, OTHER) == "memory"
    assert not [name for folder in (BLOCKS, USES) for name in names(url, folder) if KEY in name]
    assert not list(tmp_path.rglob(f"*{KEY}*"))


def test_a_damaged_block_is_reported_and_dropped(open_machine, url, caplog):
    open_machine("a").put(KEY, make_block(1))
    replace(url, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    store = open_machine("b")
    with caplog.at_level(logging.WARNING):
        assert store.get(KEY) is None
    assert KEY in caplog.text
    assert "not sealed" in caplog.text
    assert store.stats().damaged == 1
    assert names(url) == []


@pytest.mark.parametrize("change", [lambda data: data[:-7], lambda data: data[:20], lambda data: b"x"])
def test_a_block_that_is_cut_off_is_not_served(open_machine, url, change):
    open_machine("a").put(KEY, make_block(1))
    replace(url, change)
    assert open_machine("b").get(KEY) is None


def test_a_damaged_copy_is_replaced_from_the_remote(open_machine, tmp_path):
    store = open_machine("a")
    store.put(KEY, make_block(1))
    (copy,) = (tmp_path / "a").rglob("*.safetensors")
    whole = copy.read_bytes()
    copy.write_bytes(whole[:-1])
    loaded = store.get(KEY)
    assert loaded.tier == "remote"
    assert same(loaded.block, make_block(1))
    assert unsealed(copy.read_bytes()) == unsealed(whole)
    copy.write_bytes(whole[:-1])
    store.verify(KEY)
    assert not copy.exists()
    assert store.get(KEY) is not None


def test_a_read_only_store_writes_nothing(open_machine, url, tmp_path):
    open_machine("a").put(KEY, make_block(1))
    reader = open_machine("b", read_only=True, ttl_s=60.0)
    assert reader.get(KEY) is not None
    with pytest.raises(StoreReadOnlyError):
        reader.put(OTHER, make_block(2))
    assert not (tmp_path / "b").exists()
    assert len(names(url)) == 1
    assert names(url, USES) == []


def test_a_sweep_removes_marks_without_blocks(open_machine, url):
    store = open_machine("a", ttl_s=60.0)
    for key in (KEY, OTHER):
        store.put(key, make_block(1))
    with closing(open_blobs(url)) as blobs:
        blobs.delete([name for name in names(url) if KEY in name])
    assert store.sweep(0.0) == 1
    assert [OTHER in name for name in names(url, USES)] == [True]


def test_what_is_no_block_is_left_alone(open_machine, url):
    store = open_machine("a")
    store.put(KEY, make_block(1))
    with closing(open_blobs(url)) as blobs:
        for name in (f"{BLOCKS}/README", f"{BLOCKS}/aa/{KEY}.safetensors", f"elsewhere/{OTHER}"):
            blobs.put(name, b"text")
    assert list(store.keys()) == [KEY]
    assert store.stats().blocks == 1


# Whose it is


def test_a_remote_belongs_to_one_database(url):
    """Two stores with documents of their own would each take the other's blocks for garbage."""
    for _ in range(2):
        with closing(Connection(open_blobs(url), "one database")) as first:
            first.check()
    other = Connection(open_blobs(url), "another database")
    with pytest.raises(ConfigError, match=r"holds the blocks of another store.*name another prefix.*PostgreSQL"):
        other.check()
    tier = RemoteTier(other, RawCodec())
    with pytest.raises(ConfigError, match="another store"):
        tier.put(KEY, make_block(1))
    with pytest.raises(ConfigError, match="another store"):
        tier.delete(KEY)
    assert tier.get(KEY) is None
    assert names(url) == []
    tier.close()


@pytest.mark.parametrize("marker", [b"no json", b"[]", b'{"format": 2, "owner": "one database"}'])
def test_a_marker_that_cannot_be_read_is_refused(url, marker):
    blobs = open_blobs(url)
    blobs.put("ragcache.json", marker)
    with closing(Connection(blobs, "one database")) as connection, pytest.raises(SchemaVersionError):
        connection.check()


def test_two_who_begin_at_once_agree(url):
    with closing(open_blobs(url)) as blobs:
        assert blobs.create("ragcache.json", b"first")
        assert not blobs.create("ragcache.json", b"second")
        assert blobs.get("ragcache.json") == b"first"


# What is wrong is said at opening


@pytest.mark.parametrize(
    ("url", "error", "match"),
    [
        ("bucket/prefix", ConfigError, "no URL"),
        ("ftp://host/x", ConfigError, "scheme 'ftp' is unknown; choose one of az, file, gs, redis, rediss, s3"),
        ("s3://", ConfigError, "names no bucket"),
        ("redis://host:port/0", ConfigError, "not a Redis URL"),
        ("redis://host/zero", ConfigError, "not a Redis URL"),
        ("az://container/prefix", ConfigError, "set the account"),
    ],
)
def test_a_wrong_url_is_refused(url, error, match):
    with pytest.raises(error, match=match):
        open_blobs(url)


@pytest.mark.parametrize("url", ["gs://bucket/prefix", "s3://bucket"])
def test_opening_asks_nothing(url, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with closing(open_blobs(url)) as blobs:
        assert blobs.where == url


def test_a_missing_bucket_is_named():
    s3_server()
    missing = Connection(open_blobs("s3://no-such-bucket/prefix"), "one database")
    told = r"s3://no-such-bucket/prefix: no such bucket.*; make it"
    with closing(missing), pytest.raises(StoreNotFoundError, match=told):
        missing.check()


@pytest.mark.parametrize(("url", "module"), [("s3://bucket/x", "obstore.store"), ("redis://host/0", "redis")])
def test_a_missing_package_is_named(url, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install 'ragcache-kv\[remote\]'"):
        open_blobs(url)


def test_nothing_of_a_remote_is_imported_without_one():
    code = "import sys, ragcache.store.kv_store; print({'obstore', 'redis'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
