"""API keys, other origins, other host names."""

import hmac
from itertools import product

import pytest
from openai import AuthenticationError, OpenAI
from serving import Served

from ragcache.errors import ConfigError
from ragcache.server import auth
from ragcache.server.auth import ApiKeys, read_keys
from ragcache.server.settings import ServerSettings

LONG = "rk-0123456789abcdefghijklmnopqrstuvwxyz-0123456789"
KEYS = ("key-one", "schlüssel-zwei", LONG)


def test_keys_open_the_api(serve):
    served = serve(api_keys=KEYS)
    for key in KEYS:
        response = served.http.get("/v1/models", headers=[(b"Authorization", f"Bearer {key}".encode())])
        assert response.status_code == 200
    with OpenAI(base_url=served.base_url, api_key="key-one", max_retries=0) as client:
        assert client.models.list().data
    with (
        OpenAI(base_url=served.base_url, api_key="wrong", max_retries=0) as client,
        pytest.raises(AuthenticationError) as refused,
    ):
        client.models.list()
    assert refused.value.code == "invalid_api_key"


WRONG = (
    [],
    [("Authorization", "")],
    [("Authorization", "Bearer")],
    [("Authorization", "Basic key-one")],
    [("Authorization", "key-one")],
    [("Authorization", "Bearer key-on")],
    [("Authorization", "Bearer key-onee")],
    [("Authorization", "Bearer key-one key-one")],
    [("Authorization", "Bearer key-one"), ("Authorization", "Bearer wrong")],
    [("Authorization", b"Bearer \xff\xfe")],
    [("X-API-Key", "key-one")],
)


def test_nothing_else_does(serve):
    served = serve(api_keys=KEYS)
    routes = (
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/documents/cats"),
        ("DELETE", "/v1/documents/cats"),
        ("GET", "/v1/nothing"),
        ("GET", "/metrics"),
        ("POST", "/mcp"),
    )
    for headers, (method, path) in product(WRONG, routes):
        response = served.http.request(method, path, headers=headers)
        assert response.status_code == 401, (headers, path)
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["type"] == "authentication_error"
        assert "key-one" not in response.text
    for headers, path in product(WRONG, ("/healthz", "/readyz", "/openapi.json")):
        assert served.http.get(path, headers=headers).status_code == 200, (headers, path)
    for path in ("/healthz", "/readyz"):  # what monitors send
        response = served.http.head(path)
        assert (response.status_code, response.content) == (200, b"")


def test_metrics_may_be_open_and_a_wrong_key_is_told_before_the_body_is_read(serve):
    served = serve(api_keys=KEYS, open_metrics=True, max_body_bytes=2000)
    assert served.http.get("/metrics").status_code == 200
    assert served.http.get("/v1/models").status_code == 401
    assert served.http.post("/v1/chat/completions", content=b" " * 10_000).status_code == 401


def test_every_key_is_compared_in_constant_time(monkeypatch):
    compared, real = [], hmac.compare_digest

    def compare(given: bytes, known: bytes) -> bool:
        compared.append((len(given), len(known)))
        return real(given, known)

    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    keys = ApiKeys(["a", "b" * 500, "c"])
    for key in (b"a", b"c", b"wrong", b""):
        compared.clear()
        assert (keys.find(key) is not None) == (key in (b"a", b"c"))
        assert compared == [(64, 64)] * 3  # digests: no length of a key shows


def test_a_key_is_compared_whole():
    """Every byte counts, wherever it stands, and every length."""
    keys, right = ApiKeys(["other", LONG]), LONG.encode()
    assert keys.find(right) is not None
    for place in range(len(right)):
        assert keys.find(right[:place]) is None
        assert keys.find(right[:place] + b"?" + right[place + 1 :]) is None
    for wrong in (right + b"?", right + b"\0", right * 2, right.upper()):
        assert keys.find(wrong) is None


def test_keys_of_a_file_and_of_the_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# who may ask\none\n\n  two  # the second\none\n", encoding="utf-8")
    assert read_keys(file, {"RAGCACHE_API_KEYS": "three, four\ttwo"}) == ("three", "four", "two", "one")
    assert read_keys(None, {}) == ()
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")  # as editors on Windows write it
    assert read_keys(file, {}) == ("one", "two")


@pytest.mark.parametrize("content", [None, b"", b"# nobody\n", b"\xff\xfe"])
def test_a_file_without_keys_locks_nothing_and_is_refused(tmp_path, content):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="keys"):
        read_keys(file, {})


@pytest.mark.parametrize("empty", ["", " ", ",", " , \t,"])
def test_a_variable_without_keys_is_refused(tmp_path, empty):
    file = tmp_path / "keys"
    file.write_text("one\n")
    for given in (None, file):
        with pytest.raises(ConfigError, match="RAGCACHE_API_KEYS is set and there is no API key"):
            read_keys(given, {"RAGCACHE_API_KEYS": empty})


def test_settings_are_checked():
    for wrong in (
        {"slots": 0},
        {"slots": 16},
        {"max_queue": -1},
        {"timeout_s": 0},
        {"api_keys": ["a", " "]},
        {"max_body_bytes": 1},
        {"receive_s": 0},
        {"max_connections": 0},
    ):
        with pytest.raises(ConfigError):
            ServerSettings(**wrong)


def test_pages_of_another_origin_change_nothing(served: Served):
    form = [("files", ("a.txt", b"planted"))]
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "http://[", "https://" + served.url[7:] + ".x"):
        response = served.http.post("/v1/documents", files=form, headers={"Origin": origin})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed"), origin
        response = served.http.delete("/v1/documents/cats", headers={"Origin": origin})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed"), origin
    assert served.http.post("/v1/documents", files=form, headers={"Origin": served.url}).status_code == 200


def test_names_that_are_rebound_to_this_machine(serve):
    served = serve(allowed_hosts=("localhost", "127.0.0.1", "[::1]"))
    for name in ("evil.example", "evil.example:8000", "localhost.evil.example", ""):
        response = served.http.get("/v1/documents", headers={"Host": name})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "host_not_allowed"), name
    for name in ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "[::1]"):
        assert served.http.get("/healthz", headers={"Host": name}).status_code == 200, name


def test_the_key_is_declared(serve):
    with_keys, without = serve(api_keys=KEYS), serve()
    document = with_keys.http.get("/openapi.json").json()
    assert document["components"]["securitySchemes"] == {"bearer": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) == (
                path.startswith(("/v1", "/api/")) or path in ("/tokenize", "/metrics")
            ), path
            assert ("401" in operation["responses"]) == ("security" in operation)
    document = without.http.get("/openapi.json").json()
    assert "securitySchemes" not in document["components"]
