"""Ingestion on a local Ray makes the same store as the local pipeline, also if processes die."""

import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from kit.ingestion import DyingEmbedder, Kit

import ragcache as rc
from ragcache.errors import CancelledError, ClusterError, ConfigError
from ragcache.ingest.document import Document
from ragcache.store.kv_store import KVStore
from ragcache.store.schema import PREFIX
from ragcache_demo.bag_of_words import BagOfWords
from ragcache_ray.cluster import Cluster, RayConfig

SENTENCE = "The river Alna rises near Osby and ends in the lake of Tolvik."


def text_of(town: str, sentences: int = 5) -> str:
    return f"# {town}\n\n" + " ".join(f"{town} has mill number {n}. {SENTENCE}" for n in range(sentences)) + "\n"


@pytest.fixture(scope="module")
def local_ray():
    """Start a Ray for all of these tests, whose processes can import the test's modules."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # a busy machine would starve its workers
        ray.init(
            "local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error",
            object_store_memory=100 << 20, _node_ip_address="127.0.0.1",
        )  # fmt: skip
        yield
        ray.shutdown()


def on_ray(test):
    return pytest.mark.slow(pytest.mark.usefixtures("local_ray")(test))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Return folders, records, repeated texts, unreadable files, and texts that the model cannot take."""
    path = tmp_path_factory.mktemp("corpus")
    for number in range(24):
        (path / f"town{number:02}.md").write_text(text_of(f"Town{number % 17}", 1 + number % 5))
    records = [{"id": f"r{n}", "text": text_of(f"Rec{n % 40}", 2), "metadata": {"n": n}} for n in range(60)]
    (path / "records.jsonl").write_text("\n".join(map(json.dumps, [*records, records[3]])) + "\nno JSON\n")
    (path / "broken.pdf").write_bytes(b"%PDF-1.4 nothing")
    (path / "empty.txt").write_text(" \n")
    (path / "picture.png").write_bytes(b"png")
    return path


def rows(root: Path) -> dict[str, list[tuple]]:
    """Return documents and chunks as SQLite holds them, without counters and dates."""
    with sqlite3.connect(root / "store.sqlite3") as connection:
        found = {}
        for table in (PREFIX + "documents", PREFIX + "chunks"):
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            kept = [name for name in columns if not name.endswith("_at")]
            found[table] = sorted(connection.execute(f"SELECT {', '.join(kept)} FROM {table}").fetchall(), key=repr)
    return found


def blocks(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / "kv").rglob("*.safetensors")}


def facts(report) -> dict:
    plain = {name: value for name, value in vars(report).items() if name not in ("seconds", "failed")}
    return {**plain, "failed": [(failure.source, type(failure.error), str(failure.error)) for failure in report.failed]}


def assert_same(here: Kit, there: Kit, *, same_batches: bool = True) -> None:
    """Assert that two stores are equal.

    same_batches: whether no window was computed in two parts: then blocks are equal bit for bit, otherwise nearly
    """
    ours, theirs = rows(here.layout.root), rows(there.layout.root)
    assert ours == theirs
    assert len(ours[PREFIX + "chunks"]) > 50
    there.check()
    if same_batches:
        assert blocks(here.layout.root) == blocks(there.layout.root)
    assert blocks(here.layout.root).keys() == blocks(there.layout.root).keys()
    for key in sorted(here.kv.keys()):
        one, two = here.kv.get(key).block, there.kv.get(key).block
        torch.testing.assert_close(one.keys, two.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(one.values, two.values, atol=1e-5, rtol=1e-5)


@on_ray
def test_the_store_and_the_report_are_those_of_the_local_pipeline(tmp_path, lm, corpus):
    given = [corpus, corpus / "absent.txt", Document("own", text_of("Own"), {"a": [1]}), Document("bad", "x", {1: 2})]
    events = []
    with Kit(tmp_path / "here", lm) as here, Kit(tmp_path / "there", lm) as there:
        expected = here.ingestor.ingest(given)
        report = there.ingestor.ingest(given, cluster=there.cluster(), progress=events.append)
        assert facts(report) == facts(expected)
        assert len(expected.failed) >= 5
        assert (there.encoder.tokens, there.embedder.texts) == (0, 0), "the models ran in the actors"
        assert_same(here, there)
        last = {event.stage: event for event in events}
        assert set(last) == {"read", "embed", "encode", "commit"}
        assert all(event.done == event.total for event in last.values())
        assert last["encode"].done == report.computed_tokens

        # Again, changed and unchanged; then what lost its KV.
        (corpus / "town03.md").write_text(text_of("Changed", 3))
        expected = here.ingestor.ingest([corpus], sync=True)
        assert facts(there.ingestor.ingest([corpus], sync=True, cluster=there.cluster(1))) == facts(expected)
        assert (len(expected.updated), expected.computed_tokens > 0) == (1, True)
        for kit in (here, there):
            for chunk in kit.documents.chunks_of("r7"):
                kit.kv.delete(chunk.handle)
        expected = here.ingestor.ingest([corpus])
        assert facts(there.ingestor.ingest([corpus], cluster=there.cluster(1))) == facts(expected)
        assert expected.computed_tokens > 0
        assert_same(here, there, same_batches=False)


@on_ray
def test_options_of_an_ingestion_hold_in_the_actors(tmp_path, lm, corpus):
    with Kit(tmp_path / "here", lm) as here, Kit(tmp_path / "there", lm) as there:
        for options in ({"dry_run": True}, {"kv": "lazy"}, {}):
            expected = here.ingestor.ingest([corpus], **options)
            assert facts(there.ingestor.ingest([corpus], cluster=there.cluster(1), **options)) == facts(expected)
            assert blocks(here.layout.root) == blocks(there.layout.root)
        assert rows(here.layout.root) == rows(there.layout.root)


def living_actors() -> list[int]:
    """Return the process ids of this process's Ray actors: children of its raylet with an actor's name."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(b"ray::Actor") and parent(
                parent(folder.name)
            ) == os.getpid():
                found.append(int(folder.name))
    return found


def parent(process: int | str) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@on_ray
def test_a_killed_actor_is_replaced_and_nothing_is_missing(tmp_path, lm, corpus):
    killed = []

    def kill_one(event) -> None:
        if event.stage == "commit" and event.done >= 10 and not killed:
            killed.append(min(living_actors()))
            os.kill(killed[0], signal.SIGKILL)

    with Kit(tmp_path / "here", lm) as here, Kit(tmp_path / "there", lm) as there:
        expected = here.ingestor.ingest([corpus])
        report = there.ingestor.ingest([corpus], cluster=there.cluster(), progress=kill_one)
        assert killed
        # What the killed actor had stored of a window counts as stored.
        assert {**facts(report), **dict.fromkeys(("computed_tokens", "reused_blocks", "kv_bytes"))} == {
            **facts(expected), **dict.fromkeys(("computed_tokens", "reused_blocks", "kv_bytes"))
        }  # fmt: skip
        assert_same(here, there, same_batches=False)


@on_ray
def test_an_actor_that_always_dies_is_reported(tmp_path, lm, monkeypatch):
    monkeypatch.setattr("ragcache_ray.cluster.RETRIES", 1)
    with Kit(tmp_path / "kb", lm) as kit:
        kit.retriever.embedder = DyingEmbedder()
        documents = [Document(f"d{n}", text_of(f"Town{n}")) for n in range(6)] + [Document("end", "poison")]
        with pytest.raises(ClusterError, match=r"died 2 times.*run again"):
            kit.ingestor.ingest(documents, cluster=kit.cluster(1))
        kit.check()
        assert "end" not in kit.ids()


@on_ray
def test_cancelling_ends_within_seconds(tmp_path, lm, corpus):
    cancelled = threading.Event()
    with Kit(tmp_path / "kb", lm) as kit:
        with pytest.raises(CancelledError):
            kit.ingestor.ingest(
                [corpus], cluster=kit.cluster(1), cancelled=cancelled,
                progress=lambda event: cancelled.set() if event.stage == "read" else None,
            )  # fmt: skip
        kit.check()


@on_ray
def test_what_actors_lack_is_named(tmp_path, lm, monkeypatch):
    with Kit(tmp_path / "kb", lm) as kit:
        with monkeypatch.context() as patch:
            patch.setattr("ragcache.__version__", "0.0.7")
            with pytest.raises(ClusterError, match=r"ragcache 0.*this is 0.0.7; install the same version"):
                kit.ingestor.ingest([Document("a", "A.")], cluster=kit.cluster(1))
        (tmp_path / "only_here.py").write_text(
            "class Actor:\n    def __init__(self, setup): ...\n    def version(self): ...\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        import only_here

        monkeypatch.setattr("ragcache_ray.cluster.Actor", only_here.Actor)
        with pytest.raises(ClusterError, match=r"No module named 'only_here'.*install ragcache-kv"):
            kit.ingestor.ingest([Document("a", "A.")], cluster=kit.cluster(1))
        assert kit.ids() == []


@on_ray
def test_a_store_that_the_actors_do_not_share_is_noticed(tmp_path, lm):
    with Kit(tmp_path / "kb", lm) as kit:
        elsewhere = Cluster(RayConfig(actors=1), partial(KVStore, tmp_path / "elsewhere", memory_bytes=0))
        with pytest.raises(ClusterError, match="a file system that all nodes share"):
            kit.ingestor.ingest([Document("a", "A town.")], cluster=elsewhere)
        assert kit.ids() == []


@on_ray
def test_actors_write_to_a_stores_remote(tmp_path, lm, lm_directory):
    pytest.importorskip("obstore", reason="needs ragcache-kv[remote]")
    remote = tmp_path / "remote"
    given = [Document(f"d{number}", text_of(f"Town{number}")) for number in range(6)]
    config = rc.StoreConfig(remote=f"file://{remote}")
    with rc.RagCache.open(tmp_path / "kb", model=str(lm_directory), embedder=BagOfWords(), store=config) as kb:
        report = kb.ingest(given, ray=True)
        assert len(report.added) == 6
        keys = set(kb.store.kv.keys())
    assert {path.stem for path in (remote / "blocks").rglob("*.safetensors")} == keys
    with rc.RagCache.open(tmp_path / "plain", model=str(lm_directory), embedder=BagOfWords()) as plain:
        plain.ingest(given)
        assert set(plain.store.kv.keys()) == keys
    shutil.rmtree(tmp_path / "kb" / "kv")
    store = rc.StoreConfig(load="always")
    with rc.RagCache.open(
        tmp_path / "kb", model=str(lm_directory), method="reposition", embedder=BagOfWords(), store=store
    ) as kb:
        assert {source.kv for source in kb.ask("Which mill is in Town3?", k=1).hits} == {"remote"}


@on_ray
def test_an_embedder_that_cannot_be_sent_is_refused(tmp_path, lm):
    with Kit(tmp_path / "kb", lm) as kit:
        kit.embedder.lock = threading.Lock()
        with pytest.raises(ConfigError, match="cannot be sent to Ray's actors"):
            kit.ingestor.ingest([Document("a", "A.")], cluster=kit.cluster(1))


def test_without_ray_the_extra_is_named(tmp_path, lm, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with Kit(tmp_path / "kb", lm) as kit, pytest.raises(ConfigError, match=r"ragcache-kv\[ray\]"):
        kit.ingestor.ingest([Document("a", "A.")], cluster=kit.cluster())


def test_an_address_that_nobody_answers(tmp_path, lm, monkeypatch):
    monkeypatch.setattr(pytest.importorskip("ray"), "is_initialized", lambda: False)
    monkeypatch.setattr("ragcache_ray.cluster.ANSWER_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as mute, Kit(tmp_path / "kb", lm) as kit:
        port = mute.getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as other:
            closed = other.getsockname()[1]
        for number, why in ((closed, "refused"), (port, "within 1 s")):
            started = time.monotonic()
            cluster = Cluster(RayConfig(f"127.0.0.1:{number}"), partial(KVStore, kit.layout.kv))
            with pytest.raises(ClusterError, match=f"127.0.0.1:{number}.*{why}.*ray start --head"):
                kit.ingestor.ingest([Document("a", "A.")], cluster=cluster)
            assert time.monotonic() - started < 30


@pytest.mark.parametrize("address", ["docs/", "ray://head:10001", "head", ":6379", "head:port"])
def test_what_is_no_address(address):
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        RayConfig(address)
    with pytest.raises(ConfigError, match="actors is 0"):
        RayConfig(actors=0)
