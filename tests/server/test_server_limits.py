"""Many askers at once: limits of queue, time, size and memory, clients that go away, and room for questions beside
large input."""

import asyncio
import ctypes
import json
import logging
import os
import re
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import forked
import httpx
import numpy as np
import pytest
import torch
from kit.embedders import FourWords
from openai import AsyncOpenAI
from serving import Served, events, figures, half_open, send, serving, wait_for

import ragcache as rc
from ragcache.models import machine
from ragcache.models.deadline import LIMIT
from ragcache.server.connection import affordable_connections, raise_file_limit
from ragcache.server.observe import Throttle
from ragcache.server.uploads import UploadFolder
from ragcache_demo.bag_of_words import BagOfWords

ENDLESS = {"max_tokens": 4000, "ragcache": {"retrieve": False}}


def idle(served: Served) -> bool:
    return served.service.slots.in_use == served.service.slots.waiting == 0


@pytest.mark.parametrize("askers", [32, pytest.param(200, marks=pytest.mark.slow)])
async def test_many_streams_at_once(mini: Served, mini_kb, askers):
    names = ("Jonas Lansen", "Tomas Werson", "Arne Olmann", "Mabel Ralwick", "Harald Falmann")
    questions = [f"Which club does {names[rank % len(names)]} belong to?" for rank in range(askers)]
    right = {question: mini_kb.chat([{"role": "user", "content": question}], k=5).text for question in set(questions)}
    async with AsyncOpenAI(base_url=mini.base_url, api_key="none", max_retries=0, timeout=280) as client:

        async def ask(question: str) -> str:
            stream = await client.chat.completions.create(
                model="mini", messages=[{"role": "user", "content": question}], stream=True, max_tokens=32
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        found = await asyncio.gather(*map(ask, questions))
    assert found == [right[question] for question in questions]
    wait_for(lambda: idle(mini))


def open_stream(served: Served, **fields: object) -> socket.socket:
    """A streaming request on a socket of its own, which can be shut like a client that dies."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Cats?"}], "stream": True, **ENDLESS, **fields}
    return send(served, "/v1/chat/completions", body)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_slot(serve, kb, stream):
    """And its work ends: no thread goes on computing."""
    served = serve(slots=1)
    first = open_stream(served, stream=stream)
    wait_for(lambda: figures(served)["ragcache_slots_in_use",] == 1)
    second = open_stream(served)
    wait_for(lambda: figures(served)["ragcache_queue_length",] == 1)
    second.close()
    wait_for(lambda: figures(served)["ragcache_queue_length",] == 0)
    assert figures(served)["ragcache_slots_in_use",] == 1
    first.close()
    wait_for(lambda: figures(served)["ragcache_slots_in_use",] == 0)
    counted = "ragcache_http_requests_total", "POST", "/v1/chat/completions", "499"
    wait_for(lambda: figures(served).get(counted) == (1 if stream else 2))

    def is_still() -> bool:
        before = kb.lm.scheduler.stats().passes
        time.sleep(0.3)
        return kb.lm.scheduler.stats().passes == before

    wait_for(is_still)
    assert served.chat("Cats?", max_tokens=1).status_code == 200


def test_a_full_queue_refuses(serve):
    served = serve(slots=1, max_queue=1)
    held = [open_stream(served)]
    assert b"200 OK" in held[0].recv(1000)
    held.append(open_stream(served))
    wait_for(lambda: served.service.slots.waiting == 1)
    refused = served.chat("Cats?")
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "queue_full"
    assert served.http.get("/readyz").status_code == 200
    for client in held:
        client.close()
    wait_for(lambda: idle(served))


def test_a_server_whose_device_failed_says_so_to_what_starts_it_again(serve, monkeypatch):
    monkeypatch.setattr(machine, "_failures", [])
    served = serve()
    assert served.http.get("/healthz").status_code == 200
    hook = served.service.kb.lm.model.get_input_embeddings().register_forward_pre_hook(fail)
    assert served.chat("Cats?").status_code == 500
    hook.remove()
    for path in ("/healthz", "/readyz"):
        refused = served.http.get(path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "device_failed")
        assert "launch failure" in refused.json()["error"]["message"]


def fail(*_):
    raise torch.AcceleratorError("CUDA error: unspecified launch failure")


def test_a_question_that_takes_too_long(serve):
    served = serve(timeout_s=0.5)
    late = served.chat("Cats?", **ENDLESS)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "request_timeout")
    assert late.headers["x-should-retry"] == "false"
    wait_for(lambda: idle(served))


def test_a_stream_that_takes_too_long_ends_with_an_error(serve):
    with serve(timeout_s=2).stream("Cats?", **ENDLESS) as response:
        *_, last = [data for _, data in events(response.iter_lines())]
    error = json.loads(last)["error"]
    assert (error["code"], "no answer within" in error["message"]) == ("request_timeout", True)


def test_the_loop_is_never_blocked(serve):
    """Health is answered while all slots compute."""
    served = serve(slots=2)
    clients = [open_stream(served) for _ in range(3)]
    wait_for(lambda: served.service.slots.in_use == 2)
    for _ in range(20):
        assert httpx.get(f"{served.url}/healthz", timeout=5, trust_env=False).status_code == 200
    for client in clients:
        client.close()
    wait_for(lambda: idle(served))


def test_large_bodies_are_refused_by_their_length_or_while_they_arrive(serve):
    served = serve(max_body_bytes=2000, max_upload_bytes=4000)
    json_body, form = "application/json", "multipart/form-data; boundary=x"
    head = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\n'
    for path, kind, size in (
        ("/v1/chat/completions", json_body, 2000),
        ("/v1/embeddings", json_body, 2000),
        ("/v1/documents", json_body, 4000),
        ("/v1/documents", form, 4000),
    ):
        for content in (b" " * (size + 1), iter([head, *[b" " * 500] * 10])):
            refused = served.http.post(path, content=content, headers={"Content-Type": kind})
            assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large"), path
        passed = served.http.post(path, content=b" " * size, headers={"Content-Type": kind})
        assert kind == form or passed.json()["error"]["code"] == "invalid_json"


def is_closed_by_the_server(client: socket.socket) -> bool:
    """Whether the server closes it before the socket's own time is over."""
    with client, suppress(ConnectionResetError):
        while client.recv(1 << 16):
            pass
    return True


def test_a_header_has_to_arrive_in_time_whatever_trickles_in(serve):
    served = serve(receive_s=0.5)
    opened = served.server.server_state.connections
    trickling, silent = half_open(served), half_open(served, b"")
    ahead = half_open(served, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /healthz HT")
    with httpx.Client(base_url=served.url, trust_env=False) as kept, open_stream(served) as stream:
        assert kept.get("/healthz").status_code == 200
        assert b"200 OK" in stream.recv(1000)
        with suppress(ConnectionError):
            for _ in range(100):
                trickling.sendall(b"x")
                time.sleep(0.05)
        assert all(map(is_closed_by_the_server, (trickling, silent, ahead)))
        assert len(opened) == 2  # an answer may take longer, and so may a pause between requests
        assert kept.get("/healthz").status_code == 200
        assert stream.recv(1000)


def test_a_body_that_stalls_is_refused(serve):
    served = serve(receive_s=0.3)
    for path, kind in (
        ("/v1/chat/completions", "application/json"),
        ("/v1/documents", "multipart/form-data; boundary=x"),
    ):
        with send(served, path, b"--x\r\n", kind, length=100) as client:
            answer = client.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 408"), answer
        assert b"body_timeout" in answer


def test_idle_connections_make_room_for_others(serve, caplog):
    served = serve(max_connections=8, max_address_connections=8)
    stream = open_stream(served)
    assert b"200 OK" in stream.recv(1000)
    halves = [half_open(served) for _ in range(30)]
    for _ in range(5):
        assert httpx.get(f"{served.url}/healthz", timeout=5, trust_env=False).status_code == 200
    assert len(served.server.server_state.connections) <= 8
    assert stream.recv(1000)
    for client in (stream, *halves[-6:]):
        client.close()
    assert all(map(is_closed_by_the_server, halves[:-6]))
    assert "more than 8 connections" in str([record.__dict__ for record in caplog.records])


def test_an_error_is_logged_once_a_second_with_a_count():
    throttle, other = Throttle(every_s=0.2), logging.makeLogRecord({"msg": "other", "levelno": logging.ERROR})

    def passes(level: int = logging.WARNING, **fields: object) -> logging.LogRecord | None:
        record = logging.makeLogRecord({"name": "x", "msg": "same\nat 0x7f", "levelno": level, "fields": fields})
        return record if throttle.filter(record) else None

    assert passes(request_id="1") is not None
    assert not any(passes(request_id=str(number)) for number in range(50))
    assert throttle.filter(other)
    assert passes(reason="another") is not None
    assert all(passes(logging.INFO) for _ in range(3))
    time.sleep(0.2)
    assert passes(request_id="2").fields == {"request_id": "2", "left_out": 50}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_the_limit_of_open_files_is_raised_and_bounds_connections():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (700, hard))
        assert affordable_connections() == 350
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
        assert affordable_connections() <= min(4096, hard - 512)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_running_stream_finishes_when_the_server_stops(serve):
    served = serve(slots=4)
    served.server.drain_s = 60
    with served.stream("Cats?", max_tokens=300, ragcache=ENDLESS["ragcache"]) as response:
        found = events(response.iter_lines())
        next(found)
        served.server.drain()
        for path, status in (("readyz", 503), ("healthz", 200)):
            assert httpx.get(f"{served.url}/{path}", trust_env=False).status_code == status
        refused = served.chat("Cats?")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        rest = [data for _, data in found]
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["choices"][0]["finish_reason"] in ("stop", "length")
    wait_for(lambda: not is_listening(served))


def test_a_stream_that_does_not_finish_in_time_is_told_so(serve):
    served = serve(slots=4)
    served.server.drain_s = 0.3
    with served.stream("Cats?", **ENDLESS) as response:
        found = events(response.iter_lines())
        next(found)
        served.server.drain()
        *_, last = [data for _, data in found]
    assert json.loads(last)["error"]["code"] == "shutting_down"


def is_listening(served: Served) -> bool:
    try:
        return httpx.get(f"{served.url}/healthz", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def test_a_questions_own_time(served):
    late = served.chat("Where does the cat sit?", max_tokens=4000, ragcache={"timeout_s": 1e-6})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "request_timeout")
    assert served.chat("Where does the cat sit?", max_tokens=2, ragcache={"timeout_s": 60}).status_code == 200
    bad = served.chat("Where does the cat sit?", ragcache={"timeout_s": 0})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "ragcache.timeout_s")


def test_an_answer_that_can_never_fit(kb, lm):
    kb.close()
    with (
        rc.RagCache.open(
            kb.store.layout.root,
            model=lm,
            method="reposition",
            embedder=BagOfWords(),
            store=rc.StoreConfig(answer_bytes=100),
        ) as small,
        serving(small) as served,
    ):
        refused = served.chat("Where does the cat sit?", max_tokens=4)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("answer_too_large", "max_tokens")
    assert "all answers together may take 100" in error["message"]


def test_passes_and_memory_are_shown(serve, kb):
    served = serve(slots=4)
    before = kb.lm.scheduler.stats()
    expected = served.chat("Where does the cat sit?", max_tokens=8).json()["choices"][0]["message"]["content"]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: served.chat("Where does the cat sit?", max_tokens=8).json(), range(8)))
    assert {answer["choices"][0]["message"]["content"] for answer in answers} == {expected}
    wait_for(lambda: kb.admission.reserved_bytes == 0)
    found, stats = figures(served), kb.lm.scheduler.stats()
    assert found["ragcache_pass_members_count",] == stats.passes > before.passes
    assert found["ragcache_pass_members_sum",] == sum(size * count for size, count in stats.members.items())
    assert found["ragcache_pass_members_bucket", "+Inf"] == stats.passes
    assert found["ragcache_pass_members_bucket", "1"] == stats.members[1]
    assert found["ragcache_pass_tokens_total",] == stats.tokens
    assert found["ragcache_answer_bytes",] == found["ragcache_answers_waiting",] == 0


# What is given up ends within a moment, and large input leaves room for questions.


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
    wait_for(lambda: not served.service.writers._lock.locked() and not slow.running, SOON_S)
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


def test_embeddings_take_no_slot_of_a_question_and_end_soon_after_their_clients_left(serve, kb, monkeypatch):
    served = serve(slots=1)
    slow = Slow(kb, monkeypatch)
    clients = [send(served, EMBEDDINGS, {"model": MODEL, "input": "a"}) for _ in range(6)]
    wait_for(lambda: slow.running == 4)
    wait_for(lambda: served.service.embedding_slots.waiting == 2)
    assert served.chat("Cats?", max_tokens=1).status_code == 200
    assert served.http.get(DOCUMENTS).status_code == 200
    for client in clients:
        client.close()
    wait_for(lambda: not slow.running and not served.service.embedding_slots.in_use, SOON_S)


@pytest.fixture
def bounded(kb, monkeypatch):
    """The embedder reads four words of a text."""
    monkeypatch.setattr(kb.embedder, "__class__", FourWords)
    return kb.embedder


def test_a_text_that_is_too_long_to_embed_is_refused_or_windowed_when_asked(served: Served, bounded):
    long = {"model": MODEL, "input": ["one two", "one two three four five"]}
    refused = served.http.post(EMBEDDINGS, json=long)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert "'truncate'" in error["message"]
    assert "4 tokens" in error["message"]
    cut = served.http.post(EMBEDDINGS, json={**long, "truncate": True}).json()
    whole, first, last = bounded.embed(["one two", "one two ", "three four five"])
    mean = (2 * first + 3 * last) / 5
    right = [whole, mean / np.linalg.norm(mean)]
    np.testing.assert_allclose(np.array([item["embedding"] for item in cut["data"]]), right, atol=1e-6)
    assert cut["usage"]["prompt_tokens"] == 7
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


# Each count is a fork's own; what is imported is imported once.
THREADS = """
import ctypes, os, threading
from ragcache.server.run import limit_arenas
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
def count(limited, **variables):
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0
        return
    os.environ.update(variables)
    if limited:
        limit_arenas()
    meet, held = threading.Barrier(8), []
    def work():
        held.append(libc.malloc(1000))
        meet.wait()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
    libc.fflush(None)
    os._exit(0)
count(True)
count(False)
count(True, MALLOC_ARENA_MAX="4")
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="the C library is not glibc")
def test_threads_share_two_arenas_unless_the_environment_says_otherwise():
    environ = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    ran = forked.run(THREADS, env=environ)
    assert ran.returncode == 0, ran.stderr
    limited, free, told = (said.count("<heap nr=") for said in re.findall(r"<malloc .*?</malloc>", ran.stdout, re.S))
    assert limited <= 2 < free
    assert told == free, "left to the variable, which the C library reads at the process's start"
