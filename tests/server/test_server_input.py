"""What is given up ends within a moment, and large input leaves room for questions."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import forked
import numpy as np
import pytest
from serving import Served, send, wait_for

from ragcache.models.deadline import LIMIT
from ragcache.server.uploads import UploadFolder

DOCUMENTS, EMBEDDINGS = "/v1/documents", "/v1/embeddings"
MODEL = "bag-of-words"
# "within a second or two", on a machine that has other things to do.
SOON_S = 3


class Slow:
    """Embeds as a model does that takes long: looks at its limit between batches."""

    def __init__(self, kb, monkeypatch) -> None:
        self.embed = kb.embedder.embed
        self.running = 0
        monkeypatch.setattr(kb.embedder, "embed", self)

    def __call__(self, texts, *, batch_size=32):
        self.running += 1
        try:
            for _ in range(6000):
                LIMIT.get().check()
                time.sleep(0.01)
        finally:
            self.running -= 1
        return self.embed(texts)


def added(id: str) -> dict[str, object]:
    return {"documents": [{"id": id, "text": "Alna is a river. " * 50}]}


def test_an_ingestion_ends_soon_after_its_client_left(served: Served, kb, monkeypatch):
    slow = Slow(kb, monkeypatch)
    client = send(served, DOCUMENTS, added("left"))
    wait_for(lambda: slow.running)
    client.close()
    wait_for(lambda: not served.service.writers.busy and not slow.running, SOON_S)
    monkeypatch.undo()
    assert served.http.post(DOCUMENTS, json=added("next")).json()["added"] == ["next"]
    assert kb.document("left") is None


def test_a_signal_to_stop_ends_an_ingestion_soon(serve, kb, monkeypatch):
    served = serve()
    slow = Slow(kb, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.http.post, DOCUMENTS, json=added("stopped"))
        wait_for(lambda: slow.running)
        served.server.drain_s = 60
        served.server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: not slow.running, SOON_S)
        refused = answer.result(SOON_S)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert kb.document("stopped") is None
    assert kb.document("cats") is not None


def test_embedding_ends_soon_after_its_client_left(served: Served, kb, monkeypatch):
    slow = Slow(kb, monkeypatch)
    client = send(served, EMBEDDINGS, {"model": MODEL, "input": ["a", "b"]})
    wait_for(lambda: slow.running)
    client.close()
    wait_for(lambda: not slow.running and not served.service.embedding_slots.in_use, SOON_S)


def test_embeddings_take_no_slot_of_a_question(serve, kb, monkeypatch):
    served = serve(slots=1)
    slow = Slow(kb, monkeypatch)
    clients = [send(served, EMBEDDINGS, {"model": MODEL, "input": "a"}) for _ in range(6)]
    wait_for(lambda: slow.running == 4)
    wait_for(lambda: served.service.embedding_slots.waiting == 2)
    assert served.chat("Cats?", max_tokens=1).status_code == 200
    assert served.http.get(DOCUMENTS).status_code == 200
    for client in clients:
        client.close()
    wait_for(lambda: not slow.running)


@pytest.fixture
def bounded(kb, monkeypatch):
    """The embedder reads four words of a text."""
    embed = type(kb.embedder).embed
    kind = type(
        "Bounded",
        (type(kb.embedder),),
        {
            "max_tokens": 4,
            "count_tokens": lambda self, texts: [len(text.split()) for text in texts],
            "embed": lambda self, texts, *, batch_size=32: embed(self, [" ".join(t.split()[:4]) for t in texts]),
        },
    )
    monkeypatch.setattr(kb.embedder, "__class__", kind)
    return kb.embedder


def test_a_text_that_is_too_long_to_embed_is_refused_or_cut_when_asked(served: Served, bounded):
    long = {"model": MODEL, "input": ["one two", "one two three four five"]}
    refused = served.http.post(EMBEDDINGS, json=long)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert "'truncate'" in error["message"]
    assert "4 tokens" in error["message"]
    cut = served.http.post(EMBEDDINGS, json={**long, "truncate": True}).json()
    right = bounded.embed(["one two", "one two three four"])
    np.testing.assert_array_equal(np.array([item["embedding"] for item in cut["data"]], np.float32), right)
    assert cut["usage"]["prompt_tokens"] == 6
    fits = {"model": MODEL, "input": "one two three four"}
    assert served.http.post(EMBEDDINGS, json=fits).status_code == 200


def test_an_upload_leaves_no_file(served: Served, kb):
    root = kb.store.layout.root / "uploads"
    files = [("files", ("a.txt", b"Owls hunt.")), ("files", ("b.pdf", b"no PDF"))]
    report = served.http.post(DOCUMENTS, files=files).json()
    assert report["added"] == ["a.txt"]
    assert [failure["source"] for failure in report["failed"]] == ["b.pdf"]
    assert str(root) not in json.dumps(report)
    assert not [path for path in root.rglob("*") if path.is_file() and path.suffix != ".lock"]


HOLDER = """
import io, sys, time
from pathlib import Path
from ragcache.server.uploads import Upload, UploadFolder
with UploadFolder(Path(sys.argv[1])).holding([Upload("a.txt", io.BytesIO(b"secret"))]):
    print("holds", flush=True)
    time.sleep(600)
"""


def test_uploads_of_a_killed_server_are_deleted_and_those_of_a_living_one_stay(tmp_path):
    root = tmp_path / "uploads"
    with forked.Forked(HOLDER, root) as killed, forked.Forked(HOLDER, root) as living:
        assert [holder.stdout.readline() for holder in (killed, living)] == ["holds\n"] * 2
        assert len(list(root.rglob("*.txt"))) == 2
        UploadFolder(root).clean()
        assert len(list(root.rglob("*.txt"))) == 2
        killed.kill()
        killed.wait()
        UploadFolder(root).clean()
        assert len(list(root.rglob("*.txt"))) == 1
    UploadFolder(root).clean()
    assert list(root.iterdir()) == []
