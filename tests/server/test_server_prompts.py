"""Raw prompts, searches and token ids over HTTP are those of the engine."""

from __future__ import annotations

import json

import jsonschema
import openai
import pytest
from serving import events

import ragcache as rc

PROMPT = "Dogs bark at night in"


def completed(served, **fields):
    return served.http.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT, "max_tokens": 6, **fields})


def test_a_completion_is_the_engines(served, kb):
    expected = kb.complete(PROMPT, sampling=rc.Sampling(max_tokens=6))
    for prompt in (PROMPT, [PROMPT]):
        found = completed(served, prompt=prompt).json()
        assert found["object"] == "text_completion"
        assert found["id"].startswith("cmpl-")
        [choice] = found["choices"]
        assert choice == {"index": 0, "text": expected.text, "logprobs": None, "finish_reason": "length"}
        assert found["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
        assert found["usage"]["completion_tokens"] == 6
    assert completed(served, temperature=1.0, seed=5).json() != expected.text


def test_a_stream_brings_the_same_text(served, kb):
    expected = kb.complete(PROMPT, sampling=rc.Sampling(max_tokens=6)).text
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 6,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with served.http.stream("POST", "/v1/completions", json=body) as response:
        data = [one for _, one in events(response.iter_lines())]
    assert data.pop() == "[DONE]"
    found = [json.loads(one) for one in data]
    assert {one["object"] for one in found} == {"text_completion"}
    assert len({one["id"] for one in found}) == 1
    assert "".join(choice["text"] for one in found for choice in one["choices"]) == expected
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == 6
    assert found[-2]["choices"][0]["finish_reason"] == "length"


def test_the_openai_client_reads_it(served, kb):
    client = openai.OpenAI(base_url=served.base_url, api_key="none")
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=6)
    expected = kb.complete(PROMPT, sampling=rc.Sampling(max_tokens=6)).text
    assert answer.choices[0].text == expected
    parts = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=6, stream=True)
    assert "".join(part.choices[0].text for part in parts) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"ragcache": {"k": 3}}, "ragcache.k"),
    ],
)
def test_what_is_not_done_is_refused_by_name(served, fields, param):
    response = completed(served, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)


def test_an_unknown_model_and_a_prompt_that_does_not_fit(served):
    assert completed(served, model="other").status_code == 404
    response = completed(served, prompt="dog " * 5000)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    "options", [{}, {"k": 2}, {"search": "text"}, {"search": "hybrid", "k": 3}, {"filter": {"letters": 4}}]
)
def test_a_search_is_the_engines(served, kb, options):
    question = "Where do dogs bark in Kelbrook?"
    found = served.http.post("/v1/search", json={"query": question, **options}).json()
    hits = kb.retrieve(question, **options)
    assert found["object"] == "list"
    assert [(one["id"], one["text"], one["handle"]) for one in found["data"]] == [
        (hit.chunk.id, hit.chunk.text, hit.handle) for hit in hits
    ]
    assert [one["score"] for one in found["data"]] == pytest.approx([float(hit.score) for hit in hits])


@pytest.mark.parametrize("body", [{}, {"query": ""}, {"query": "a", "search": "bm25"}, {"query": "a", "k": 0}])
def test_a_bad_search_is_refused(served, body):
    assert served.http.post("/v1/search", json=body).status_code == 400


def test_tokens_are_the_tokenizers(served, kb):
    tokenizer = kb.lm.tokenizer
    for body, special in (
        ({"prompt": PROMPT}, True),
        ({"content": PROMPT}, False),
        ({"content": PROMPT, "add_special_tokens": True, "model": "tiny"}, True),
        ({"prompt": ""}, True),
    ):
        text = body.get("prompt", body.get("content"))
        expected = tokenizer.encode(text, add_special_tokens=special)
        found = served.http.post("/tokenize", json=body).json()
        assert found == {"count": len(expected), "max_model_len": kb.lm.max_positions, "tokens": expected}
    assert served.http.post("/tokenize", json={"prompt": "a", "content": "b"}).status_code == 400
    assert served.http.post("/tokenize", json={"prompt": "a", "model": "other"}).status_code == 404


def test_a_key_guards_them(serve):
    served = serve(api_keys=["secret"])
    for path, body in (("/tokenize", {"prompt": "a"}), ("/v1/search", {"query": "a"}), ("/v1/completions", {})):
        assert served.http.post(path, json=body).status_code == 401


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["club", "town"]}, "year": {"type": "integer", "minimum": 1900, "maximum": 1999}},
    "required": ["kind", "year"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_answers_hold_to_a_schema(mini, stream):
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    client = openai.OpenAI(base_url=mini.base_url, api_key="none")
    asked = {"model": "mini", "messages": [{"role": "user", "content": "Where?"}], "response_format": wanted}
    if stream:
        parts = client.chat.completions.create(**asked, stream=True)
        text = "".join(part.choices[0].delta.content or "" for part in parts)
    else:
        text = client.chat.completions.create(**asked).choices[0].message.content
    jsonschema.validate(json.loads(text), SCHEMA)


def test_a_schema_that_cannot_be_compiled_is_the_requests_fault(mini):
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}}
    response = mini.chat("Where?", response_format=wanted)
    assert response.status_code == 400
    assert "json_schema cannot be compiled" in response.json()["error"]["message"]
