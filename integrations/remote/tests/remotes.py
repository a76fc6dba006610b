"""Real servers on loopback for tests of remotes: moto's S3 and Debian's redis-server, started at first use."""

import atexit
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from functools import cache
from pathlib import Path

import pytest

BUCKET = "ragcache-tests"
SECRET = "Sekret0fTheTests"
KINDS = ["folder", "redis", "s3"]


def remote_url(kind: str, path: Path) -> str:
    """The URL of a remote of this kind that belongs to a test's path."""
    name = hashlib.sha256(str(path).encode()).hexdigest()[:16]
    if kind == "folder":
        return f"file://{path.parent / 'remote'}"
    if kind == "redis":
        return f"{redis_server()}/0/{name}"
    s3_server()
    return f"s3://{BUCKET}/{name}"


@cache
def s3_server() -> str:
    """The endpoint of a server with an empty bucket; the environment points there."""
    pytest.importorskip("obstore", reason="needs ragcache-kv[remote]")
    pytest.importorskip("moto", reason="needs ragcache-kv[dev]")
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    _start([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port)
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT"), timeout=30).close()
    os.environ |= s3_environment(endpoint)
    return endpoint


def s3_environment(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


@cache
def redis_server(*options: str) -> str:
    """The URL of a server of its own for these options."""
    pytest.importorskip("redis", reason="needs ragcache-kv[remote]")
    port = free_port()
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None:
        pytest.skip("no Redis server is installed (apt-get install redis-server)")
    keeps_nothing = ["--save", "", "--appendonly", "no", "--dir", "/tmp"]
    _start([server, "--port", str(port), "--bind", "127.0.0.1", *keeps_nothing, *options], port)
    return f"redis://127.0.0.1:{port}"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _start(command: list[str], port: int) -> None:
    """Start a server that ends with this process, and wait until it answers."""
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    atexit.register(server.wait)
    atexit.register(server.kill)
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert server.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.05)
