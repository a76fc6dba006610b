"""`ragcache serve` and `ragcache chat --web` as processes: addresses, keys, signals, and options that are refused."""

import importlib.util
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import forked
import httpx
import pytest
from terminal import invoke

from ragcache.server.auth import LOOPBACK_NAMES
from ragcache.server.run import listen
from ragcache.server.settings import ServerSettings

QUESTION = {"model": "ours", "messages": [{"role": "user", "content": "Cat?"}]}


@contextmanager
def process(*arguments: object, **env: str) -> Iterator[tuple[forked.Forked, str, list[str]]]:
    """A running command, the URL that it printed, and its lines on standard error so far."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAGCACHE_")}
    with forked.Forked(forked.COMMAND, *arguments, env={**clean, **env}) as running:
        errors: list[str] = []
        reading = threading.Thread(target=lambda: errors.extend(iter(running.stderr.readline, "")), daemon=True)
        reading.start()
        try:
            url = running.stdout.readline().split()[0:1]
            assert url, errors
            yield running, url[0].removesuffix("/").removesuffix("/v1"), errors
        finally:
            running.kill()
            running.wait()
            reading.join(10)


def test_a_server_from_its_start_to_its_end(tmp_path, model):
    """A store that is not there is made; keys come from file and environment; SIGTERM lets a stream finish."""
    keys = tmp_path / "keys"
    keys.write_text("from-file\n", encoding="utf-8")
    options = ("--store", tmp_path / "new", "--model", model, "--model-name", "ours", "--max-tokens", 3, "--k", 1)
    with process("serve", *options, "--port", 0, "--api-keys-file", keys, RAGCACHE_API_KEYS="from-env") as started:
        running, url, errors = started
        with httpx.Client(base_url=url, trust_env=False, timeout=120) as http:
            assert http.get("/readyz").status_code == 200
            assert http.get("/v1/models").status_code == 401
            http.headers["Authorization"] = "Bearer from-file"
            assert json.loads((tmp_path / "new" / "server.json").read_text())["url"] == url
            added = http.post("/v1/documents", json={"documents": [{"id": "a", "text": "Cats sit."}]})
            assert added.json() == {**added.json(), "added": ["a"]}, errors
            http.headers["Authorization"] = "Bearer from-env"
            answer = http.post("/v1/chat/completions", json=QUESTION).json()
            assert answer["usage"]["completion_tokens"] <= 3
            assert [source["document_id"] for source in answer["ragcache"]["sources"]] == ["a"]
            with http.stream("POST", "/v1/chat/completions", json={**QUESTION, "stream": True}) as response:
                lines = response.iter_lines()
                next(lines)
                running.send_signal(signal.SIGTERM)
                assert [line for line in lines if line][-1] == "data: [DONE]"
        assert running.wait(120) == 0
    assert not (tmp_path / "new" / "server.json").exists()
    assert all(line.startswith("{") for line in errors), "".join(errors)
    logged = [json.loads(line)["event"] for line in errors]
    assert logged.count("request") >= 4
    assert "draining" in logged
    assert "from-" not in "".join(errors)


@pytest.mark.slow
def test_chat_in_a_page(store):
    with process("chat", "--web", "--store", store, "--port", 0) as (running, url, _errors):
        page = httpx.get(f"{url}/", trust_env=False, timeout=120)
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert page.headers["content-security-policy"] == "default-src 'self'"
        running.send_signal(signal.SIGINT)
        assert running.wait(120) == 0


def test_a_port_that_is_taken(store):
    with listen("127.0.0.1", 0) as taken:
        result = invoke("serve", "--store", store, "--port", taken.getsockname()[1])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "cannot listen there" in result.stderr


def test_without_the_extra(store, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fastapi" else real(name))
    for command in (["serve"], ["chat", "--web"]):
        result = invoke(*command, "--store", store)
        assert result.exit_code == 2
        assert 'pip install "ragcache-kv[server]"' in result.stderr


def test_options_are_the_servers_settings(store, monkeypatch):
    made = settings_of(
        monkeypatch,
        *("serve", "--store", store, "--k", 3, "--max-tokens", 9, "--temperature", 0.5, "--stop", "x"),
        *("--filter", '{"a": 1}', "--on-overflow", "trim", "--evict", 7, "--order", "shared", "--no-hint"),
        *("--context", "keep", "--slots", 2, "--queue", 3, "--timeout", 4, "--drain", 5, "--max-body", "6000"),
        *("--max-upload", "7KiB", "--model-name", "ours", "--open-metrics"),
    )
    assert (made.slots, made.max_queue, made.timeout_s, made.drain_s) == (2, 3, 4.0, 5.0)
    assert (made.max_body_bytes, made.max_upload_bytes) == (6000, 7168)
    assert (made.model_name, made.open_metrics, tuple(made.api_keys)) == ("ours", True, ())
    assert set(made.allowed_hosts) == {"localhost", "127.0.0.1", "[::1]"}
    given = made.answers
    assert (given.k, given.max_tokens, given.temperature, tuple(given.stop)) == (3, 9, 0.5, ("x",))
    assert (given.filter, given.on_overflow, given.evict) == ({"a": 1}, "trim", 7)
    assert (given.order, given.hint, given.context) == ("shared", False, "keep")


def test_a_server_for_others_goes_by_any_name_and_keys_come_from_the_environment(store, monkeypatch):
    made = settings_of(monkeypatch, "serve", "--store", store, "--host", "0.0.0.0", env={"RAGCACHE_API_KEYS": "a b"})
    assert (made.allowed_hosts, tuple(made.api_keys)) == ((), ("a", "b"))


def test_defaults_are_those_of_the_settings(store, monkeypatch):
    own = {"allowed_hosts": LOOPBACK_NAMES}
    assert settings_of(monkeypatch, "serve", "--store", store) == ServerSettings(**own)
    assert settings_of(monkeypatch, "chat", "--web", "--store", store) == ServerSettings(**own)
    late = settings_of(monkeypatch, "chat", "--web", "--store", store, "--timeout", 7)
    assert late == ServerSettings(**own, timeout_s=7.0)


def settings_of(monkeypatch, *arguments, env=None) -> ServerSettings:
    """The settings that a command's server is made with; it is not run."""
    made = []

    class NoServer:
        def __init__(self, app, drain_s):
            made.append(app.state.service.settings)

        def run(self, sockets):
            app_closed.append(sockets)

    app_closed: list[object] = []
    monkeypatch.setattr("ragcache.server.run.Server", NoServer)
    result = invoke(*arguments, "--port", 0, env=env)
    assert result.exit_code == 0, result.output
    assert app_closed
    return made[0]
