"""Remotes that are slow, down, full, read-only or refuse: typed errors, soon, and no secret in any of them."""

import logging
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import Mock

import pytest
from blocks import make_block, make_key, same

from integrations.remote.tests.remotes import SECRET, free_port, redis_server, remote_url, s3_environment
from ragcache.codecs import RawCodec
from ragcache.errors import RagCacheError, StoreError, StoreFullError, StoreReadOnlyError, StoreUnreachableError
from ragcache.store.kv_store import KVStore
from ragcache.store.remote import Blobs, open_blobs
from ragcache.store.remote.connection import RETRY_AFTER_S, WRITE_AFTER_S, Connection
from ragcache.store.tiers import RemoteTier
from ragcache_remote import object_store

KEY = make_key(1)
Serve = Callable[[int, str], str]


def be_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For services that never answer. Those that do have their time, as this machine may be busy."""
    for name in ("CONNECT_S", "READ_S", "WRITE_S"):
        monkeypatch.setattr(f"ragcache_remote.object_store.{name}", 0.1)
        monkeypatch.setattr(f"ragcache_remote.redis.{name}", 0.1, raising=False)


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries follow each other at once; there are as many as ever."""
    usual, moment = object_store._retry_config, timedelta(milliseconds=1)

    def at_once(timeout_s: float) -> object:
        return {**usual(timeout_s), "backoff": {"init_backoff": moment, "max_backoff": moment, "base": 2}}

    monkeypatch.setattr(object_store, "_retry_config", at_once)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Starts an S3 service that answers everything alike, with a status (0: never) and a text that repeats the
    secret, as a service's debugging answers may."""
    servers = []

    def start(status: int, text: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if not status:
                    time.sleep(3)
                    return
                body = f"<Error><Code>{text}</Code><Key>{SECRET}</Key></Error>".encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_PUT = do_HEAD = do_POST = do_DELETE = do_GET  # noqa: N815

            def log_message(self, *_arguments: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        for name, value in s3_environment(f"http://127.0.0.1:{server.server_port}").items():
            monkeypatch.setenv(name, value)
        return "s3://bucket/prefix"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def opened() -> Iterator[Callable[[str], Blobs]]:
    every: list[Blobs] = []

    def open_one(url: str) -> Blobs:
        every.append(open_blobs(url))
        return every[-1]

    yield open_one
    for blobs in every:
        blobs.close()


def refusal(call: Callable[[], object]) -> RagCacheError:
    """The typed error of a call, after a look for the secret in all that Python would print of it."""
    with pytest.raises(RagCacheError) as caught:
        call()
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    return caught.value


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize(
    ("status", "text", "reading", "writing", "advice"),
    [
        (0, "", StoreUnreachableError, StoreUnreachableError, "no answer in time"),
        (500, "InternalError", StoreUnreachableError, StoreUnreachableError, "try again later"),
        (503, "SlowDown", StoreUnreachableError, StoreUnreachableError, "try again later"),
        (403, "AccessDenied", StoreError, StoreReadOnlyError, "credentials"),
        (401, "Unauthorized", StoreError, StoreReadOnlyError, "credentials"),
        (400, "AuthorizationHeaderMalformed", StoreError, StoreReadOnlyError, "check the URL, the region"),
        (507, "XMinioStorageFull", StoreFullError, StoreFullError, "no space left"),
    ],
)
def test_answers_of_a_service_become_typed_errors(serve, opened, status, text, reading, writing, advice, monkeypatch):
    if not status:
        be_impatient(monkeypatch)
    blobs = opened(serve(status, text))
    calls = [
        (reading, lambda: blobs.get("blocks/x")),
        (reading, lambda: list(blobs.walk("blocks"))),
        (writing, lambda: blobs.put("blocks/x", b"data")),
        (writing, lambda: blobs.create("blocks/x", b"data")),
        (writing, lambda: blobs.delete(["blocks/x"])),
    ]
    for expected, call in calls:
        began = time.monotonic()
        error = refusal(call)
        assert type(error) is expected
        assert str(error).startswith("s3://bucket/prefix: ")
        assert advice in str(error)
        assert time.monotonic() - began < 10


@pytest.mark.usefixtures("quick_retries")
def test_a_service_that_is_down_is_unreachable(opened, monkeypatch):
    for name, value in s3_environment(f"http://127.0.0.1:{free_port()}").items():
        monkeypatch.setenv(name, value)
    for url in ("s3://bucket/prefix", f"redis://:{SECRET}@127.0.0.1:{free_port()}/0"):
        blobs = opened(url)
        assert SECRET not in blobs.where
        for call in (partial(blobs.get, "x"), partial(blobs.put, "x", b"data"), partial(blobs.delete, ["x"])):
            assert type(refusal(call)) is StoreUnreachableError


@pytest.mark.slow
def test_a_redis_that_hangs_is_unreachable(opened, monkeypatch):
    be_impatient(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        blobs = opened(f"redis://127.0.0.1:{silent.getsockname()[1]}/0")
        began = time.monotonic()
        assert type(refusal(lambda: blobs.get("x"))) is StoreUnreachableError
        assert time.monotonic() - began < 10


def test_a_redis_that_refuses(opened):
    server = redis_server("--requirepass", "another", *f"--user reader on >{SECRET} ~* +@read +@connection".split())
    host = server.removeprefix("redis://")
    wrong = opened(f"redis://:{SECRET}@{host}/0")
    assert "check user and password" in str(refusal(lambda: wrong.get("x")))
    reader = opened(f"redis://reader:{SECRET}@{host}/0")
    assert reader.get("x") is None
    assert type(refusal(lambda: reader.put("x", b"data"))) is StoreReadOnlyError


def test_a_full_redis_is_full(opened):
    full = opened(redis_server("--maxmemory", "3mb", "--maxmemory-policy", "noeviction"))
    assert not full.gives_up
    assert "maxmemory" in str(refusal(lambda: [full.put(f"blocks/{n}", bytes(100_000)) for n in range(100)]))
    evicting = opened(redis_server("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru"))
    assert evicting.gives_up
    assert RemoteTier(Connection(evicting, "tests"), RawCodec()).has_been_bounded


def test_no_secret_is_in_a_url_that_is_refused():
    for url in (
        f"s3://key:{SECRET}@bucket/prefix",
        f"az://container/prefix?sig={SECRET}",
        f"redis://user:{SECRET}@host:port/0",
        f"redis://:{SECRET}@host/zero",
        f"ftp://user:{SECRET}@host/x",
        f"user:{SECRET}@host",
    ):
        refusal(lambda url=url: open_blobs(url))


# The circuit breaker


class Faulty:
    """What a remote that counts what it is asked does, and answers when it is told to."""

    def __init__(self) -> None:
        self.asked = 0
        self.works = False
        self.blobs = Mock(spec=Blobs, where="faulty://", gives_up=False)
        answers = {"put": None, "create": True, "get": None, "look": {}, "delete": None, "walk": ()}
        for name, answer in answers.items():
            getattr(self.blobs, name).side_effect = partial(self._ask, answer)

    def _ask(self, answer: object, *_given: object) -> object:
        self.asked += 1
        if not self.works:
            raise StoreUnreachableError("faulty://: no answer in time")
        return answer


def test_after_a_failure_nobody_waits_for_some_seconds(caplog):
    now, remote = [1000.0], Faulty()
    tier = RemoteTier(Connection(remote.blobs, "tests", clock=lambda: now[0]), RawCodec())
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            assert tier.get(KEY) is None
            assert tier.size(KEY) is None
            assert KEY not in tier
            for call in (lambda: tier.put(KEY, make_block(1)), lambda: tier.verify(KEY), lambda: list(tier.keys())):
                with pytest.raises(StoreUnreachableError):
                    call()
    assert remote.asked == 1
    assert len(caplog.records) == 1, "one warning, whatever is asked"
    now[0] += RETRY_AFTER_S
    tier.get(KEY)
    assert remote.asked == 2, "one tries for all"
    remote.works = True
    assert tier.get(KEY) is None
    assert remote.asked == 2
    now[0] += WRITE_AFTER_S
    assert tier.get(KEY) is None
    assert remote.asked == 2, "a read makes do without"
    tier.put(KEY, make_block(1))
    assert remote.asked > 2, "a write would fail, and asks"
    asked = remote.asked
    tier.get(KEY)
    assert remote.asked == asked + 1, "what came back is read at once"


def test_a_store_opens_while_its_remote_is_down(tmp_path, caplog):
    """It serves what is on this machine, takes nothing new, and claims the remote when it is back."""
    url = remote_url("folder", tmp_path / "kv")
    with KVStore(tmp_path / "a", memory_bytes=0, remote=Connection(open_blobs(url), "tests")) as store:
        store.put(KEY, make_block(1))
    remote = Faulty()
    down = Connection(remote.blobs, "tests")
    with caplog.at_level(logging.WARNING):
        down.check()
    assert "until it answers" in caplog.text
    with KVStore(tmp_path / "a", memory_bytes=1 << 20, remote=down) as store:
        assert store.get(KEY).tier == "disk"
        other = make_key(2)
        with pytest.raises(StoreUnreachableError):
            store.put(other, make_block(2))
        assert store.get(other) is None
        assert same(store.put(other, make_block(2), "memory"), make_block(2))
        assert store.stats().bytes_by_tier["remote"] == 0
