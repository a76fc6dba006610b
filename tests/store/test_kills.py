"""Law 9: a kill -9 at any instant leaves a store that opens and has everything that was committed.

A child says on its standard output what it has committed. It is killed after a random time, and the parent looks.
"""

import os
import random
import select
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from blocks import garbage_of, make_block, make_key, same
from children import NUM_DOCUMENTS, NUM_KEYS, version_of
from forked import Forked

from integrations.remote.tests.remotes import KINDS, remote_url
from ragcache.codecs import RawCodec
from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore
from ragcache.store.remote import open_blobs
from ragcache.store.remote.connection import Connection
from ragcache.store.tiers import RemoteTier

KILLS = [pytest.param(5, id="5"), pytest.param(200, id="200", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]


class Children:
    """Starts children of `children.py` and kills them."""

    def __init__(self) -> None:
        self.parent = Forked("import children; children.main()")
        self._buffer = b""

    def run_and_kill(self, *command: str, after_lines: int, after_s: float) -> list[str]:
        """Start a child and kill -9 it `after_s` after it said "ready" and `after_lines` lines more (so that it has
        worked however slow the machine is); returns those lines and all that came later."""
        self.parent.stdin.write(" ".join(command) + "\n")
        lines: list[str] = []
        while "ready" not in lines or not any(line.startswith("pid ") for line in lines):
            lines += self._lines_until(1)  # the child may have said much before its parent says who it is
        pid = next(int(line.split()[1]) for line in lines if line.startswith("pid "))
        said = [line for line in lines if line != "ready" and not line.startswith("pid ")]
        said += self._lines_until(after_lines - len(said))
        said += self._lines_for(after_s)
        os.kill(pid, signal.SIGKILL)
        while not said or not said[-1].startswith("exit "):
            said += self._lines_until(1)
        assert said[-1] == "exit -9", "it was to work until it was killed"
        return said[:-1]

    def close(self) -> None:
        with self.parent:
            self.parent.stdin.close()
            assert self.parent.wait() == 0

    def _lines_until(self, count: int) -> list[str]:
        """At least `count` lines."""
        while self._buffer.count(b"\n") < count:
            self._read()
        return self._take_lines()

    def _lines_for(self, seconds: float) -> list[str]:
        """The lines of so many seconds. The pipe is emptied all the while, so that the child never waits for us."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self.parent.stdout], [], [], left)[0]:
                self._read()
        return self._take_lines()

    def _read(self) -> None:
        data = os.read(self.parent.stdout.fileno(), 65536)
        assert data, "the children's parent has ended"
        self._buffer += data

    def _take_lines(self) -> list[str]:
        whole, _, self._buffer = self._buffer.rpartition(b"\n")
        return whole.decode().splitlines()


def random_moment(rng: random.Random) -> dict[str, Any]:
    return {"after_lines": rng.randrange(12), "after_s": rng.uniform(0, 0.03)}


def presence(said: list[str]) -> dict[int, bool]:
    """By number, whether the block was put or deleted last."""
    return {number if number >= 0 else -number - 1: number >= 0 for number in map(int, said)}


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    children = Children()
    yield children
    children.close()


@pytest.mark.parametrize("kills", KILLS)
def test_killed_while_putting_blocks(tmp_path, children, kills):
    """Kills go on beyond `kills` until one has hit a write."""
    rng = random.Random(kills)
    present: dict[int, bool] = {}
    step = leftovers = 0
    for done in range(10 * kills):
        if done >= kills and leftovers:
            break
        said = children.run_and_kill("put_blocks", str(tmp_path), str(step), **random_moment(rng))
        present |= presence(said)
        step += len(said)
        under_way = step % NUM_KEYS
        leftovers += len(list(tmp_path.rglob("*.tmp")))
        with KVStore(tmp_path, memory_bytes=0) as store:
            for number in range(NUM_KEYS):
                loaded = store.get(make_key(number))
                assert loaded is None or same(loaded.block, make_block(number, num_tokens=64))
                if number != under_way:
                    assert (loaded is not None) == present.get(number, False)
            assert store.stats().damaged == 0, "nothing half visible"
            store.sweep(older_than_s=0)
            assert not list(tmp_path.rglob("*.tmp"))
    assert step > kills, "the children did work"
    assert leftovers, "some kills hit a write"


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind == "s3" else kind for kind in KINDS]
)
def test_killed_while_putting_blocks_remotely(tmp_path, kind):
    """Another machine finds what was put, whole, and nothing of what was under way or deleted."""
    rng, url = random.Random(kind), remote_url(kind, tmp_path / "kv")
    children = Children()  # the environment names the server by now
    present: dict[int, bool] = {}
    step = 0
    for _ in range(5):
        said = children.run_and_kill("put_blocks_remotely", str(tmp_path / "a"), url, str(step), **random_moment(rng))
        present |= presence(said)
        step += len(said)
        other = RemoteTier(Connection(open_blobs(url), "tests"), RawCodec())
        for number in range(NUM_KEYS):
            block = other.get(make_key(number))  # raises where something half written shows
            assert block is None or same(block, make_block(number, num_tokens=64))
            if number != step % NUM_KEYS:
                assert (block is not None) == present.get(number, False)
        other.sweep(older_than_s=0)
        other.close()
    children.close()
    assert step > 5, "the children did work"
    assert not list((tmp_path / "remote").rglob("*#*")), "the folder's temporary files are swept"


@pytest.mark.parametrize("kills", KILLS)
def test_killed_while_replacing_documents(url, children, kills):
    rng = random.Random(kills)
    committed: dict[int, int] = {}
    version = highest_id = 0
    for _ in range(kills):
        for line in children.run_and_kill("replace_documents", url, str(version), **random_moment(rng)):
            number, done, ids = line.split(" ")
            committed[int(number)] = int(done)
            version = max(version, int(done) + 1)
            for vector_id in map(int, ids.split(",") if ids else []):
                assert vector_id > highest_id, "a vector id came twice, or went back"
                highest_id = vector_id
        with DocumentStore.open(url) as store:
            store.delete_documents([])  # waits for PostgreSQL to end the transaction of the client that was killed
            highest_id = max([highest_id, *store.vector_ids()])
            check_everything(store, committed)
    assert version > kills // 7, "the children did work"


def check_everything(store: DocumentStore, committed: dict[int, int]) -> None:
    """Each document is whole, in the version that was committed last or in the one that was under way."""
    handles, unsure = set(), 0
    for number in range(NUM_DOCUMENTS):
        document = store.document(f"d{number}")
        version = -1 if document is None else int(document.content_hash)
        unsure += version != committed.get(number, -1)
        committed[number] = version
        chunks = store.chunks_of(f"d{number}")
        if document is None:
            assert chunks == []
            continue
        _, expected = version_of(number, version)
        assert document.metadata == {"version": version}
        assert [(chunk.id, chunk.text, chunk.token_ids, chunk.handle) for chunk in chunks] == [
            (new.id, new.text, new.token_ids, new.handle) for new in expected
        ]
        handles |= {chunk.handle for chunk in chunks}
    assert unsure <= 1, "only the transaction under way may be unreported"
    assert store.handles() == handles
    garbage = garbage_of(store)
    assert garbage == store.collectable()
    assert not garbage & handles, "garbage is what no chunk refers to"
    store.clear_garbage(garbage)
