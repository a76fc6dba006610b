"""Knowledge bases that share a remote: two machines with a database in common, as a fleet has with PostgreSQL."""

import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from blocks import tier_of

import ragcache as rc
from integrations.remote.tests.remotes import remote_url
from ragcache.errors import StoreMismatchError, StoreUnreachableError
from ragcache.store.prefill_rate import PrefillRate
from ragcache.store.remote import open_blobs
from ragcache_remote.object_store import ObjectBlobs

OpenKB = Callable[..., rc.RagCache]
TEXTS = {"hat": "Jonas Lansen wears a green hat.", "boat": "The boat of Mira Holt is called Petrel."}
QUESTION = "Who wears a hat?"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A folder: what the kinds of remotes do is tested in test_remote_stores.py."""
    return remote_url("folder", tmp_path / "kv")


@pytest.fixture
def open_machine(open_kb: OpenKB, url: str, tmp_path: Path) -> OpenKB:
    def open_one(name: str, remote: str | None = url, **options: object) -> rc.RagCache:
        config = rc.StoreConfig(
            database=f"sqlite:///{tmp_path / 'shared.sqlite3'}", remote=remote, load="always", **options
        )
        return open_kb(tmp_path / name, store=config)

    return open_one


def remote_blocks(url: str) -> list[str]:
    with closing(open_blobs(url)) as blobs:
        return sorted(blob.name.rpartition("/")[2].removesuffix(".safetensors") for blob in blobs.walk("blocks"))


def add(kb: rc.RagCache) -> None:
    kb.ingest([rc.Document(name, text) for name, text in TEXTS.items()])


def test_machines_share_what_one_has_computed(open_machine, url):
    first = open_machine("a")
    add(first)
    expected = first.ask(QUESTION, k=2)
    second = open_machine("b")
    answers = [second.ask(QUESTION, k=2) for _ in range(2)]
    assert [hit.kv for hit in answers[0].hits] == ["remote"] * 2
    assert [answer.text for answer in answers] == [expected.text] * 2
    again = open_machine("b", memory_bytes=0)
    assert [hit.kv for hit in again.ask(QUESTION, k=2).hits] == ["disk"] * 2


def test_deleting_a_document_deletes_its_blocks_remotely(open_machine, url, tmp_path):
    """Law 10, and on the other machine's disk and in its memory with its next question."""
    first, second = open_machine("a"), open_machine("b")
    add(first)
    (gone,) = [hit.handle for hit in second.ask(QUESTION, k=2).hits if hit.chunk.document_id == "hat"]
    assert len(remote_blocks(url)) == 2
    assert len(list((tmp_path / "b").rglob(f"{gone}*"))) == 1
    first.delete("hat")
    assert gone not in remote_blocks(url)
    assert len(remote_blocks(url)) == 1
    assert [hit.chunk.document_id for hit in second.ask(QUESTION, k=2).hits] == ["boat"]
    assert tier_of(second.store.kv, gone) is None
    assert not list(tmp_path.rglob(f"{gone}*"))


def test_a_store_knows_its_remote(open_machine, url, tmp_path):
    """Deleted from a store opened without it, a document's blocks would stay there for ever."""
    add(open_machine("a"))
    config = rc.StoreConfig(database=f"sqlite:///{tmp_path / 'shared.sqlite3'}")
    with rc.Store.open(tmp_path / "a", store=config) as library:
        assert list(library.info().bytes_by_tier) == ["memory", "disk", "remote"]
        assert library.doctor().sound
        library.delete(list(TEXTS))
    assert remote_blocks(url) == []
    with pytest.raises(StoreMismatchError, match="made with remote"):
        open_machine("a", remote=remote_url("folder", tmp_path / "other" / "kv"))


def test_the_doctor_repairs_the_remote(open_machine, url):
    kb = open_machine("a", memory_bytes=0)
    add(kb)
    damaged, lost = remote_blocks(url)
    with closing(open_blobs(url)) as blobs:
        [name] = [blob.name for blob in blobs.walk("blocks") if damaged in blob.name]
        data = bytes(blobs.get(name))
        blobs.put(name, data[:-1])
        blobs.put(name.replace(damaged, damaged[:2] + "0" * 62), data)
    report = kb.doctor()
    assert sorted(report.damaged) == sorted([damaged, damaged[:2] + "0" * 62])
    assert remote_blocks(url) == [lost]
    assert len(kb.ask(QUESTION, k=2).hits) == 2
    assert remote_blocks(url) == sorted([damaged, lost]), "computed again, and kept"
    assert kb.doctor().sound


def test_a_remote_that_fails_costs_no_answer(open_machine, url, monkeypatch, caplog):
    """It is asked for a block once, not by each question; what has to be kept elsewhere is refused."""
    first = open_machine("a")
    add(first)
    expected = first.ask(QUESTION, k=2).text
    asked = []

    def fail(*arguments: object) -> None:
        asked.append(arguments)
        raise StoreUnreachableError("no answer in time")

    second = open_machine("b", memory_bytes=0, prefix_bytes=0)
    for name in ("get", "look", "put", "delete", "walk"):
        monkeypatch.setattr(ObjectBlobs, name, fail)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            answer = second.ask(QUESTION, k=2)
            assert answer.text == expected
            assert {hit.kv for hit in answer.hits} == {"computed"}
    assert len(asked) == 1
    late = rc.Document("late", "Nobody keeps this.")
    for call in (lambda: second.ingest(late), second.doctor, lambda: second.delete("hat")):
        with pytest.raises(StoreUnreachableError):
            call()
    monkeypatch.undo()
    second.store.kv._durable.shared._connection._failed_at = float("-inf")
    report = second.doctor()
    assert (report.damaged, report.missing, report.orphans) == ([], [], [])
    assert len(remote_blocks(url)) == 1


def test_reads_of_a_remote_are_measured_apart_from_the_disks(open_kb, url, tmp_path):
    def open_machine(name: str) -> rc.RagCache:
        config = rc.StoreConfig(
            database=f"sqlite:///{tmp_path / 'shared.sqlite3'}", remote=url, measure_s=0, memory_bytes=0, prefix_bytes=0
        )
        kb = open_kb(tmp_path / name, store=config)
        kb._parts.loader.rates.compute.set(PrefillRate(1.0, 0.0))  # a second a token: everything is worth loading
        return kb

    add(open_machine("a"))
    kb = open_machine("b")
    for tier in ("remote", "disk"):
        assert {hit.kv for hit in kb.ask(QUESTION, k=2).hits} == {tier}
        assert tier in kb.rates().tiers
    assert set(kb.rates().tiers) == {"remote", "disk"}
