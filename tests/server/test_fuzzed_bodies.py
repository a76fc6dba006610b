"""Random bodies are answered or refused with 4xx, within seconds."""

import json

import pytest
from fuzzing import changed_json, counts, inputs, json_values, series
from hypothesis import given
from hypothesis import strategies as st

PATHS = [
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/search",
    "/v1/completions",
    "/tokenize",
    "/api/chat",
    "/api/show",
]
NAMES = [
    "model", "messages", "role", "content", "prompt", "input", "query", "documents", "k", "filter", "stop", "n",
    "stream", "tools", "tool_choice", "response_format", "type", "temperature", "top_p", "seed", "user",
    "metadata", "name", "function", "parameters", "encoding_format", "dimensions", "options", "text",
    "passages", "id", "source", "method", "method_options", "logit_bias", "logprobs", "top_logprobs",
    "reasoning_effort", "extra_body", "ragcache", "search",
]  # fmt: skip
LONG = ("max_tokens", "max_completion_tokens", "num_predict")


@pytest.mark.parametrize("path", PATHS)
@counts
def test_random_bodies_are_answered_or_refused(shared, path, count):
    texts = [shared.service.chat_model, "user", "assistant", "system", "Who?", "text", "function", "auto", "full"]
    fields = st.dictionaries(st.sampled_from(NAMES), json_values(NAMES, texts), max_size=7)
    message = st.fixed_dictionaries({"role": st.sampled_from(texts), "content": json_values(NAMES, texts)})
    chats = st.builds(lambda rest, turns: {**rest, "messages": turns}, fields, st.lists(message, max_size=3))
    bodies = st.one_of(fields, chats, json_values(NAMES, texts))

    @inputs(count // len(PATHS))
    @given(series(bodies, lambda body, random: changed_json(body, random, NAMES)))
    def check(bodies):
        for body in bodies:
            if isinstance(body, dict):
                body |= dict.fromkeys(LONG, 1)
            data = json.dumps(body).encode()
            answer = shared.http.post(path, content=data, headers={"Content-Type": "application/json"})
            assert answer.status_code < 500, (body, answer.text)

    check()
    assert shared.http.get("/healthz").status_code == 200
