"""Attacks on a shared server: connections, long questions, a key that asks too much, and hostile files."""

import asyncio
import io
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest
from serving import Served, half_open
from waiting import until as wait_for

import ragcache as rc
from ragcache.engine.keys import Key, digest_of, write_key_file
from ragcache.errors import ConfigError
from ragcache.ingest.sandbox import IsolatedReader
from ragcache.models import sampler
from ragcache.models.batch import ForwardRequest
from ragcache.models.deadline import CALLER, Limit
from ragcache.models.requests import QueuedRequest
from ragcache.models.scheduler import CREDIT_S, Scheduler
from ragcache.server import chat, error_object
from ragcache.server.connection import address_of
from ragcache.server.http_errors import ApiError
from ragcache.server.limits import Slots
from ragcache.server.quotas import REQUESTS, Quotas

ALICE, BOB = "alice-secret", "bob-secret"


def ask(served: Served, key: str, question: str = "Where does the cat sit?", **fields: object) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": question}], "max_tokens": 2, **fields}
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{served.base_url}/chat/completions", json=body, headers=headers, timeout=60, trust_env=False)


def test_an_address_has_a_share_of_connections(serve, caplog):
    served = serve(max_connections=100, max_address_connections=5)
    halves = [half_open(served) for _ in range(20)]
    assert httpx.get(f"{served.url}/healthz", timeout=5, trust_env=False).status_code == 200
    state = served.server.server_state
    assert len(state.connections) <= 5
    for client in halves:
        client.close()
    wait_for(lambda: not state.by_address)
    assert "more than 5 connections of an address" in str([record.__dict__ for record in caplog.records])


def test_ipv6_hosts_count_by_their_network():
    assert address_of(("2001:db8::1", 1)) == address_of(("2001:db8::ffff:1", 2)) != address_of(("2001:db8:0:1::1", 1))
    assert address_of(("10.0.0.1", 1)) != address_of(("10.0.0.2", 1))


def test_a_body_that_trickles_in_is_refused(serve):
    served = serve(receive_s=0.4)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with half_open(served, head + b"Content-Length: 100000\r\n\r\n") as client:
        client.settimeout(0.05)

        def is_refused() -> bool:
            """Whether it is, after a byte more."""
            try:
                client.sendall(b" ")
                return b"408" in client.recv(100)
            except TimeoutError:  # no answer yet
                return False
            except ConnectionError:
                return True

        wait_for(is_refused)


@pytest.mark.parametrize("unit", ["a", " ", "The cat sat. "])
def test_a_long_question_is_not_tokenised(shared, shared_kb, monkeypatch, unit):
    question = unit * (3_900_000 // len(unit)) + "?"
    monkeypatch.setattr(type(shared_kb.lm), "count_text", lambda *_: pytest.fail("it was tokenised"))
    refused = shared.chat(question)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert re.search(r"3,\d{3},\d{3} characters", refused.text)


class Askers:
    """Questions that hold their slots until `free` is set. began: the callers whose questions got a slot, in order"""

    def __init__(self, slots: Slots) -> None:
        self.slots, self.free, self.began = slots, asyncio.Event(), list[str]()

    async def ask(self, count: int, caller: str) -> list[asyncio.Task]:
        tasks = [asyncio.create_task(self._hold(caller)) for _ in range(count)]
        await asyncio.sleep(0.01)
        return tasks

    async def _hold(self, caller: str) -> None:
        CALLER.set(caller)
        async with self.slots.hold():
            self.began.append(caller)
            await self.free.wait()


async def test_callers_take_turns_at_slots():
    askers = Askers(slots := Slots(4, 100, most_each=3))
    crowd = await askers.ask(40, "a")
    assert (slots.in_use, slots.waiting) == (3, 37)
    late = await askers.ask(2, "b")
    assert askers.began == ["a", "a", "a", "b"]
    askers.free.set()
    await asyncio.gather(*late, *crowd)
    assert askers.began.index("b", 4) < 6
    assert askers.began.count("a") == 40
    assert slots.in_use == slots.waiting == 0


async def test_a_question_cancelled_as_its_turn_comes_passes_it_on():
    askers = Askers(slots := Slots(1, 10))
    tasks = [task for rank in range(4) for task in await askers.ask(1, f"{rank}")]
    tasks[1].cancel()  # while it waits
    askers.free.set()
    tasks[0].cancel()  # frees the slot in the same turn of the loop
    await asyncio.wait(tasks)
    assert askers.began == ["0", "2", "3"]
    assert slots.in_use == slots.waiting == 0


async def test_a_caller_fills_half_of_the_queue():
    askers = Askers(slots := Slots(2, 4, most_each=1))
    crowd = await askers.ask(5, "a")
    refused = [task.exception() for task in crowd if task.done()]
    assert [type(error) for error in refused] == [ApiError] * 2
    others = await askers.ask(3, "b")
    assert not any(task.done() for task in others)
    crowd[2].cancel()
    askers.free.set()
    await asyncio.gather(*others)
    await asyncio.wait(crowd)
    assert slots.in_use == slots.waiting == 0


def test_a_caller_that_returns_goes_before_another_ones_crowd():
    """The model's passes: those of the caller that was away hold none of the other caller's tokens until its credit is
    used up.
    """
    scheduler = Scheduler(lambda _pieces: [], 512, 512)
    run = ForwardRequest(None, None, None, ordered=True)
    crowd = [QueuedRequest(run, limit=Limit(caller="a")) for _ in range(3)]
    scheduler._waiting += crowd
    scheduler._worked_s["a"] = 100.0
    scheduler._welcome("b")
    scheduler._waiting.append(QueuedRequest(run, limit=Limit(caller="b")))
    assert scheduler._worked_s["b"] == 100.0 - CREDIT_S
    assert [one.limit.caller for one in scheduler._whose_turn()] == ["b"]
    scheduler._worked_s["b"] += CREDIT_S
    assert [one.limit.caller for one in scheduler._whose_turn()] == ["a", "a", "a", "b"]


def sheet_of_many_words() -> bytes:
    """A workbook of a few kilobytes whose cells repeat a long shared string."""
    pytest.importorskip("openpyxl")
    from openpyxl import Workbook

    book = Workbook()
    for _ in range(300):
        book.active.append(["river " * 20] * 4)
    file = io.BytesIO()
    book.save(file)
    return file.getvalue()


def test_a_sheet_that_unfolds_is_refused_before_its_kv_is_computed(serve, kb, monkeypatch):
    served = serve(document_tokens=2000)
    monkeypatch.setattr(kb.ingestor.block_keys.encoder, "encode", lambda *_: pytest.fail("KV was computed"))
    data = sheet_of_many_words()
    assert len(data) < 20_000
    report = served.http.post("/v1/documents", files={"files": ("bomb.xlsx", data)}).json()
    assert report["added"] == []
    assert [one["type"] for one in report["failed"]] == ["ReaderLimitError"]
    assert "2,000 are allowed in a document" in report["failed"][0]["error"]


def test_a_text_of_one_character_is_refused_without_tokenising_all_of_it(serve, monkeypatch):
    served, counted, whole = serve(document_tokens=2000), [], rc.LanguageModel.count_text
    monkeypatch.setattr(
        rc.LanguageModel, "count_text", lambda self, text: counted.append(len(text)) or whole(self, text)
    )
    body = {"documents": [{"id": "a", "text": "a" * 3_000_000}, {"id": "small", "text": "A dog barks."}]}
    report = served.http.post("/v1/documents", json=body).json()
    assert report["added"] == ["small"]
    assert report["failed"][0]["type"] == "ReaderLimitError"
    assert 0 < sum(counted) < 300_000


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"upload_tokens": 400}, "an addition"), ({"upload_kv_bytes": 60_000}, "their KV takes 60,000 bytes")],
)
def test_an_addition_beyond_its_limits_names_what_was_left_out(serve, limits, reason):
    served = serve(**limits)
    texts = {f"d{rank}": f"The {rank} cats sat on mats and slept in rooms. " * 4 for rank in range(4)}
    body = {"documents": [{"id": id, "text": text} for id, text in texts.items()]}
    report = served.http.post("/v1/documents", json=body).json()
    assert report["added"], report
    assert len(report["added"]) + len(report["failed"]) == 4
    assert report["failed"]
    assert all(reason in one["error"] for one in report["failed"])
    assert report["tokens"] <= 400 or "upload_kv_bytes" in limits


def test_a_file_that_reads_for_ever_holds_no_writer(serve, kb, tmp_path):
    served = serve()
    entered = threading.Event()
    real = IsolatedReader.read

    def stuck(self, file):
        if file.id == "stuck.txt":
            entered.set()
            free.wait(30)
        yield from real(self, file)

    free = threading.Event()
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setattr(IsolatedReader, "read", stuck)
        slow = pool.submit(
            httpx.post, f"{served.base_url}/documents", files={"files": ("stuck.txt", b"A fox.")}, timeout=60
        )
        try:
            assert entered.wait(20)
            body = {"documents": [{"id": "quick", "text": "A dog barks."}]}
            assert served.http.post("/v1/documents", json=body).json()["added"] == ["quick"]
            assert served.http.delete("/v1/documents/quick").status_code == 200
            assert not slow.done()
        finally:
            free.set()
        assert slow.result().json()["added"] == ["stuck.txt"]


def test_a_key_that_used_up_its_requests_is_told_when_to_return(serve):
    served = serve(api_keys=(ALICE, BOB), key_requests=3)
    statuses = [ask(served, ALICE).status_code for _ in range(4)]
    assert statuses == [200, 200, 200, 429]
    refused = ask(served, ALICE)
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert ALICE not in refused.text
    assert ask(served, BOB).status_code == 200
    assert served.http.get("/healthz").status_code == 200


def add(served: Served, key: str, name: str = "n") -> dict:
    """Return the report of four short documents."""
    texts = [{"id": f"{name}{rank}", "text": f"The {rank} dogs bark at birds."} for rank in range(4)]
    headers = {"Authorization": f"Bearer {key}"}
    return served.http.post("/v1/documents", json={"documents": texts}, headers=headers).json()


def test_a_key_that_used_up_its_tokens_is_refused(serve):
    served = serve(api_keys=(ALICE, BOB), key_tokens=20, key_upload_tokens=70)
    assert ask(served, ALICE, max_tokens=30).status_code == 200
    assert ask(served, ALICE).status_code == 429
    assert ask(served, BOB).status_code == 200
    report = add(served, ALICE)
    assert report["added"]
    assert all("left to this key" in one["error"] for one in report["failed"])
    assert report["failed"]


@pytest.mark.parametrize("limit", ["requests", "tokens"])
def test_a_keys_own_limit_holds_for_it_alone(serve, tmp_path, limit):
    """The limit replaces the server's, and is read again with the key file."""
    alice, bob = (Key(name, digest_of(secret.encode())) for name, secret in (("alice", ALICE), ("bob", BOB)))
    file, most = tmp_path / "keys.toml", {"requests": 100}
    write_key_file(file, [replace(alice, limits={**most, limit: 2}), replace(bob, limits=most)])
    served, now = serve(key_file=file, key_requests=1), 0.0
    served.service.quotas.clock = lambda: now
    refused = [ask(served, ALICE) for _ in range(3)][-1]
    assert refused.status_code == 429
    assert f"the key 'alice' may use 2 {limit} in a minute" in refused.json()["error"]["message"]
    assert [ask(served, BOB).status_code for _ in range(3)] == [200] * 3
    now = float(refused.headers["retry-after"]) - 1
    assert ask(served, ALICE).status_code == 429
    now += 1
    assert [ask(served, ALICE).status_code for _ in range(2)] == [200, 429]
    write_key_file(file, [replace(alice, limits=most), bob])
    assert ask(served, ALICE).status_code == 200
    assert [ask(served, BOB).status_code for _ in range(2)][-1] == 429  # the server's limit is one


def test_a_key_has_its_own_limit_of_added_tokens(serve, tmp_path):
    alice, bob = (Key(name, digest_of(secret.encode())) for name, secret in (("alice", ALICE), ("bob", BOB)))
    write_key_file(tmp_path / "keys.toml", [replace(alice, limits={"upload_tokens": 70}), bob])
    served, now = serve(key_file=tmp_path / "keys.toml"), 0.0
    served.service.quotas.clock = lambda: now

    assert any("left to this key in this hour" in one["error"] for one in add(served, ALICE)["failed"])
    assert add(served, BOB, "b")["failed"] == []
    now = 3600.0
    assert len(add(served, ALICE, "later")["failed"]) < 4


def test_a_bucket_refills_evenly():
    now = 0.0
    quotas = Quotas({REQUESTS: 60}, lambda: now)
    quotas.charge(REQUESTS, 60)
    with pytest.raises(ApiError) as refused:
        quotas.check(REQUESTS)
    assert refused.value.headers["Retry-After"] == "1"
    now = 1.0
    quotas.check(REQUESTS)
    now = 1000.0
    assert quotas.left(REQUESTS) == 60


@pytest.mark.parametrize(("used", "left"), [(60, 0.0), (30, 1.0), (0, 2.0), (120, -2.0)])
def test_use_before_a_lower_limit_keeps_its_share(used, left):
    now = 0.0
    quotas, key = Quotas({}, lambda: now), Key("", limits={REQUESTS: 60})
    quotas.enter(key)
    quotas.charge(REQUESTS, used)
    quotas.enter(replace(key, limits={REQUESTS: 2}))
    assert quotas.left(REQUESTS) == pytest.approx(left)
    quotas.enter(key)
    assert quotas.left(REQUESTS) == pytest.approx(58 + left), "a limit that is raised gives room at once"
    now = 120.0
    assert quotas.left(REQUESTS) == 60


def test_a_large_schema_does_not_hold_the_loop(serve):
    pytest.importorskip("llguidance")
    served = serve()
    fields = {f"f{rank}": {"enum": [f"v{rank}_{other}" for other in range(20)]} for rank in range(500)}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": fields}}}
    threads, begun, free = set(), threading.Event(), threading.Event()

    def compiled(_schema: str) -> str:
        threads.add(threading.current_thread().name.rpartition("_")[0])
        begun.set()
        assert free.wait(60)
        raise ConfigError("json_schema: too much", "json_schema")

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(sampler, "json_grammar", compiled)
        asked = pool.submit(served.chat, "Cats?", response_format=form)
        assert begun.wait(60)
        assert httpx.get(f"{served.url}/healthz", timeout=30, trust_env=False).status_code == 200
        free.set()
        assert asked.result().status_code == 400
    assert threads == {"ragcache-server"}


def test_a_stream_begins_and_beats_while_its_prompt_waits(serve, monkeypatch):
    monkeypatch.setattr(chat, "HEADERS_S", 0.1)
    monkeypatch.setattr(error_object, "HEARTBEAT_S", 0.2)
    served = serve(slots=1)
    free = threading.Event()
    embeddings = served.service.kb.lm.model.get_input_embeddings()
    hook = embeddings.register_forward_pre_hook(lambda *_: free.wait(20) and None)
    try:
        with served.stream("Cats?", max_tokens=2) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            beats = [line for line, _ in zip(lines, range(6), strict=False) if line.startswith(":")]
            assert len(beats) >= 2
            free.set()
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
    finally:
        free.set()
        hook.remove()
