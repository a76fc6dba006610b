"""Bad input: every refusal is OpenAI's error object, names the input, and is no 500."""

import dataclasses
import json
from dataclasses import replace

import httpx
import pytest
from engine_texts import READ
from openai.types import chat, completion_create_params, embedding_create_params, responses
from serving import Served

import ragcache as rc
from ragcache.engine.options import AnswerDefaults
from ragcache.server.answers import engine_call
from ragcache.server.chat_types import ChatRequest, Extension
from ragcache.server.embeddings import EmbeddingRequest
from ragcache_completions.bodies import CompletionRequest
from ragcache_openai.responses import ResponsesRequest

CHAT, EMBED, DOCUMENTS = "/v1/chat/completions", "/v1/embeddings", "/v1/documents"
USER = [{"role": "user", "content": "Cats?"}]


def error_of(response: httpx.Response) -> dict:
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


REFUSED_CHATS = [
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "invalid_value"),
    ({"tool_choice": "required"}, "tools", "invalid_value"),
    ({"tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ({"logprobs": 3}, "logprobs", "invalid_value"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"logit_bias": {"cat": 1}}, "logit_bias.cat", "invalid_value"),
    ({"logit_bias": {"50": 101}}, "logit_bias.50", "invalid_value"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value"),
    ({"stop_token_ids": [99999]}, "stop_token_ids", "invalid_value"),
    ({"stop_token_ids": ["2"]}, "stop_token_ids[0]", "invalid_value"),
    ({"presence_penalty": 2.5}, "presence_penalty", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"min_p": 1.1}, "min_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"response_format": {"type": "xml"}}, "response_format", "invalid_value"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "invalid_value"),
    ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
    ({"messages": None}, "messages", "invalid_value"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [*USER, {"role": "tool", "content": "x"}]}, "messages[1]", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0]", "invalid_value"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "invalid_value"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        "messages[0].content[0].type",
        "invalid_value",
    ),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages", "invalid_prompt"),
    ({"messages": [{"role": "user", "content": " \n"}]}, "messages", "invalid_prompt"),
    ({"messages": [{"role": "user", "content": "a\0b"}]}, "messages[0].content", "invalid_value"),
    ({"temperature": 3}, "temperature", "invalid_value"),
    ({"temperature": "0.5"}, "temperature", "invalid_value"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": 10**30}, "max_tokens", "invalid_value"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_value"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": ["x"] * 17}, "stop", "invalid_value"),
    ({"stream": "yes"}, "stream", "invalid_value"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"ragcache": {"k": 0}}, "ragcache.k", "invalid_value"),
    ({"ragcache": {"method": "telepathy"}}, "ragcache.method", "invalid_value"),
    ({"stream": True, "ragcache": {"method": "telepathy"}}, "ragcache.method", "invalid_value"),
    ({"ragcache": {"method": "link"}}, "ragcache.method", "invalid_value"),
    ({"ragcache": {"method": "epic", "method_options": {"colour": 1}}}, "ragcache.method_options", None),
    ({"ragcache": {"method": "cacheblend", "method_options": {"ratio": 10**30}}}, "ragcache.method_options", None),
    ({"ragcache": {"method": "cacheblend", "method_options": {"ratio": "much"}}}, "ragcache.method_options", None),
    ({"ragcache": {"method": "epic", "method_options": {"first_tokens": [1]}}}, "ragcache.method_options", None),
    ({"ragcache": {"filter": {"year": {"$near": 1}}}}, "ragcache.filter", "invalid_filter"),
    ({"ragcache": {"filter": {"no-such-field": 1}}}, "ragcache.filter", "invalid_filter"),
    ({"ragcache": {"filter": []}}, "ragcache.filter", "invalid_value"),
    ({"ragcache": {"score_threshold": "high"}}, "ragcache.score_threshold", "invalid_value"),
    ({"ragcache": {"mmr_lambda": 2}}, "ragcache.mmr_lambda", "invalid_value"),
    ({"ragcache": {"on_overflow": "cry"}}, "ragcache.on_overflow", "invalid_value"),
    ({"ragcache": {"documents": [{}]}}, "ragcache.documents[0]", "invalid_value"),
    ({"ragcache": {"documents": [{"handle": "0" * 64}]}}, "ragcache.documents", "unknown_handle"),
    ({"ragcache": {"documents": [{"id": "nobody"}]}}, "ragcache.documents", "unknown_handle"),
]
REFUSED_EMBEDDINGS = [
    ({"input": [1, 2, 3]}, "input"),
    ({"input": [[1, 2], [3]]}, "input"),
    ({"input": [1, "x"]}, "input[1]"),
    ({"input": [[1], []]}, "input[1]"),
    ({"input": [[1, -1]]}, "input[0][1]"),
    ({"input": []}, "input"),
    ({"input": ""}, "input"),
    ({"input": ["x", ""]}, "input[1]"),
    ({"input": ["x"] * 2049}, "input"),
    ({"input": "x", "dimensions": 7}, "dimensions"),
    ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
    ({}, "input"),
]
REFUSED_DOCUMENTS = [
    ({"documents": []}, "documents"),
    ({"documents": [{"text": "x"}]}, "documents[0].id"),
    ({"documents": [{"id": "", "text": "x"}]}, "documents[0].id"),
    ({"documents": [{"id": "a"}]}, "documents[0].text"),
    ({"documents": [{"id": "a", "text": "x\0"}]}, "documents[0].text"),
    ({"documents": [{"id": "a", "text": "x", "metadata": []}]}, "documents[0].metadata"),
    ({"documents": [{"id": "a", "text": "x", "metadata": {"n": 10**400}}]}, "documents[0].metadata"),
    ({"documents": [{"id": "a", "text": "x", "metadata": {"n": {"a\0": 1}}}]}, "documents[0].metadata"),
    ({}, "documents"),
]
REFUSED = [
    *((CHAT, {"model": "tiny", "messages": USER, **fields}, *told) for fields, *told in REFUSED_CHATS),
    *((EMBED, {"model": "bag-of-words", **fields}, param, None) for fields, param in REFUSED_EMBEDDINGS),
    *((DOCUMENTS, fields, param, None) for fields, param in REFUSED_DOCUMENTS),
]


@pytest.mark.parametrize(("path", "body", "param", "code"), REFUSED)
def test_a_request_is_refused(shared: Served, path, body, param, code):
    response = shared.http.post(path, json=body)
    error = error_of(response)
    assert (response.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert error["param"] == param, error
    assert code is None or error["code"] == code, error
    assert body.get("input") != [1, 2, 3] or "send text" in error["message"]


SHORT = {"max_tokens": 1}
UNKNOWN = [
    (CHAT, {"model": "tiny", "messages": USER, "max_tokens": 1}, "temprature"),
    (CHAT, {"model": "tiny", "messages": USER, "max_tokens": 1, "ragcache": {}}, "ragcache.kk"),
    (CHAT, {"model": "tiny", "messages": USER, **SHORT, "response_format": {"type": "text"}}, "response_format.y"),
    ("/v1/completions", {"model": "tiny", "prompt": "Cats", "max_tokens": 1, "ragcache": {}}, "ragcache.k"),
    ("/v1/responses", {"model": "tiny", "input": "Cats?", "max_output_tokens": 1}, "max_tokens"),
    (EMBED, {"model": "bag-of-words", "input": "x"}, "dimension"),
    ("/v1/search", {"query": "cats"}, "top_k"),
    ("/v1/search", {"query": "cats"}, "filters"),
    ("/tokenize", {"prompt": "cats"}, "text"),
    (DOCUMENTS, {"documents": [{"id": "cats", "text": "x"}]}, "documents[0].colour"),
]


@pytest.mark.parametrize(("path", "body", "place"), UNKNOWN)
def test_unknown_fields_are_ignored_with_one_warning_unless_the_server_is_strict(
    shared: Served, monkeypatch, path, body, place
):
    def ask(**more: object) -> httpx.Response:
        wrong = json.loads(json.dumps(body))
        inner = wrong
        for step in place.replace("[0]", ".0").split(".")[:-1]:
            inner = inner[int(step) if isinstance(inner, list) else step]
        inner[place.rpartition(".")[2]] = 1
        return shared.http.post(path, json={**wrong, **more})

    found = ask()
    assert (found.status_code, found.headers.get_list("X-Ragcache-Warning")) == (
        200, [f"unknown fields ignored: {place}"],
    )  # fmt: skip
    assert "X-Ragcache-Warning" not in shared.http.post(path, json=body).headers
    named = ask(**{"fou\r\n\u00e9": 1})
    assert r"fou\r\n\xe9" in named.headers["X-Ragcache-Warning"]
    monkeypatch.setattr(shared.service, "settings", replace(shared.service.settings, strict=True))
    error = error_of(ask())
    assert (error["param"], error["code"]) == (place, "unknown_parameter")
    assert shared.http.post(path, json=body).status_code == 200


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (chat.completion_create_params.CompletionCreateParamsBase, ChatRequest),
        (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
        (responses.response_create_params.ResponseCreateParamsBase, ResponsesRequest),
        (embedding_create_params.EmbeddingCreateParams, EmbeddingRequest),
    ],
)
def test_what_changes_an_answer_is_known(given, ours):
    """Unknown fields are ignored, so that whatever OpenAI's API has and an answer depends on has to be known here."""
    of_no_consequence = {"access_programs", "background_options", "image", "max_tool_calls"}
    assert set(given.__annotations__) - set(ours.model_fields) <= of_no_consequence


@pytest.mark.parametrize("path", [CHAT, EMBED, DOCUMENTS])
@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"model": NaN}', None),
        (b"[]", "invalid_value"),
        (b"null", "invalid_value"),
        (b'"text"', "invalid_value"),
        (b"\xff\xfe{}", "invalid_json"),
        (b'{"model": "\xff"}', "invalid_json"),
        (b'{"model": "\\ud800"}', "invalid_json"),
        (b'{"\\udfff": 1}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "invalid_json"),
        (b"1" * 5000, None),
        (b'{"messages": ' + b"9" * 100_000 + b"}", None),
    ],
)
def test_what_is_no_json_is_refused(shared: Served, path, content, code):
    response = shared.http.post(path, content=content, headers={"Content-Type": "application/json; charset=utf-8"})
    assert response.status_code == 400, response.text
    assert code is None or error_of(response)["code"] == code


@pytest.mark.parametrize("where", ["metadata", "filter", "method_options"])
def test_deep_nesting_is_refused(shared: Served, where):
    deep: dict = {}
    for _ in range(100):
        deep = {"a": deep}
    if where == "metadata":
        response = shared.http.post(DOCUMENTS, json={"documents": [{"id": "a", "text": "x", "metadata": deep}]})
    else:
        response = shared.chat("Cats?", ragcache={where: deep})
    assert response.status_code == 400
    assert "nested" in error_of(response)["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", None])
def test_other_content_types_are_refused(shared: Served, kind):
    for path in (CHAT, EMBED, DOCUMENTS):
        body = json.dumps({"model": "tiny", "messages": USER}).encode()
        response = shared.http.post(path, content=body, headers={} if kind is None else {"Content-Type": kind})
        assert response.status_code == 415
        assert error_of(response)["code"] == "unsupported_media_type"


def test_forms_that_are_none(shared: Served):
    for kind, content in (
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=y", b"x"),
        (
            "multipart/form-data; boundary=y",
            b'--y\r\nContent-Disposition: form-data; name="files"\r\n\r\ntext\r\n--y--\r\n',
        ),
        ("multipart/form-data; boundary=y", b"--y--\r\n"),
    ):
        response = shared.http.post(DOCUMENTS, content=content, headers={"Content-Type": kind})
        assert response.status_code == 400, response.text
        error_of(response)


def test_paths_and_methods_that_are_not_there(shared: Served):
    for path in ("/v1", "/v1/", "/v1/nothing", "/v1/chat/completions/", "/docs", "/static/x", "/%00", "//v1/models"):
        response = shared.http.get(path)
        assert (response.status_code, error_of(response)["code"]) == (404, "not_found"), path
    response = shared.http.put(DOCUMENTS)
    assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "DELETE, GET, HEAD, POST"
    assert shared.http.patch(f"{DOCUMENTS}/x").headers["allow"] == "DELETE, GET, HEAD"


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=x", "offset=-1", "offset=9999999999999999999999", "limit="]
)
def test_pages_that_are_none(shared: Served, query):
    response = shared.http.get(f"{DOCUMENTS}?{query}")
    assert response.status_code == 400
    assert error_of(response)["param"] == query.partition("=")[0]


@pytest.mark.parametrize("id", ["nobody", "%00", "a/../b", "%ff", "%ed%a0%80", "a" * 2000])
def test_documents_that_are_not_there(shared: Served, id):
    for method in ("GET", "DELETE"):
        response = shared.http.request(method, f"{DOCUMENTS}/{id}")
        assert (response.status_code, error_of(response)["code"]) == (404, "document_not_found")


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"model": "gpt-4o", "messages": USER}), (EMBED, {"model": "tiny", "input": "x"})]
)
def test_models_that_are_not_there(shared: Served, path, body):
    response = shared.http.post(path, json=body)
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert ("tiny" if path == CHAT else "bag-of-words") in error["message"]


def test_messages_are_short_whatever_comes(shared: Served):
    response = shared.chat("Cats?", **{"x" * 100_000: 1}, n=0)
    assert len(response.content) < 3000
    response = shared.chat("Cats?", **{"x" * 100_000: 1}, max_tokens=1)
    assert len(response.headers["X-Ragcache-Warning"]) < 1100
    response = shared.http.post(CHAT, json={"model": "m" * 1000, "messages": USER})
    assert len(response.content) < 3000


# Options that OpenAI's own fields stand for, and the client that hangs up.
ELSEWHERE = {"sampling", "cancelled"}
RETRIEVE = {
    "search": "hybrid",
    "filter": {"letters": 3},
    "score_threshold": 0.25,
    "mmr_lambda": 0.5,
    "fetch_k": 9,
    "rerank": False,
}


def call(defaults: AnswerDefaults | None = None, **extension):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "ragcache": extension}
    return engine_call(ChatRequest.model_validate(body), defaults or AnswerDefaults(), 4096).options


def test_no_option_of_the_engine_is_absent():
    known = {*rc.GenerationOptions.__annotations__, *rc.RetrieveOptions.__annotations__}
    assert known - ELSEWHERE <= set(Extension.model_fields)
    assert {*READ, "timeout_s"} == set(rc.GenerationOptions.__annotations__) - ELSEWHERE
    assert set(RETRIEVE) == set(rc.RetrieveOptions.__annotations__)
    assert {"k", "context", "drop_turns"} <= set(Extension.model_fields)


def test_every_option_reaches_the_engine():
    options = call(**READ, **RETRIEVE, k=3, context="keep")
    for name, value in {**READ, **RETRIEVE, "k": 3, "context": "keep"}.items():
        assert options[name] == value, name


def test_the_servers_defaults_reach_it_too_and_a_request_wins():
    fields = {field.name for field in dataclasses.fields(AnswerDefaults)}
    stated = {name: value for name, value in {**READ, **RETRIEVE}.items() if name in fields}
    assert {*READ, *RETRIEVE} - set(stated) == {"method", "method_options"}  # the store was opened with one
    defaults = AnswerDefaults(**stated)
    assert call(defaults).items() >= stated.items()
    assert (call()["drop_turns"], call(drop_turns=False)["drop_turns"]) == (True, False)
    off = AnswerDefaults(drop_turns=False)
    assert (call(off)["drop_turns"], call(off, drop_turns=True)["drop_turns"]) == (False, True)
    assert call(defaults, hint=True).items() >= {"hint": True, "order": "shared"}.items()


def test_the_engine_has_defaults_of_its_own():
    assert set(call(retrieve=False)) == {"sampling", "on_overflow", "order", "hint", "context", "drop_turns"}


def test_unknown_query_parameters_are_named(shared):
    for path in ("/v1/models?colour=red", "/v1/documents?limit=1&colour=red", "/metrics?colour=red"):
        refused = shared.http.get(path)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "unknown_parameter", "colour"), path
    assert "known are collection, id, limit, offset, source" in shared.http.get("/v1/documents?Limit=1").text
    assert shared.http.get("/v1/documents?limit=1").status_code == 200


def test_routes_of_get_answer_head(shared):
    for path in ("/v1/models", "/v1/store", "/v1/documents", "/metrics", "/healthz", "/openapi.json"):
        whole, head = shared.http.get(path), shared.http.head(path)
        assert (head.status_code, head.content) == (whole.status_code, b""), path
        assert head.headers["content-type"] == whole.headers["content-type"]
    assert shared.http.head("/v1/documents/none").status_code == 404
    assert shared.http.head("/v1/embeddings").status_code == 405
    assert "HEAD" in shared.http.patch("/v1/models").headers["allow"]
