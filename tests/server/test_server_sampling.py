"""Several answers, penalties and log-probabilities over HTTP are those of the engine, in OpenAI's shapes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

import ragcache as rc

MESSAGES = [{"role": "user", "content": "Where does the cat sit?"}]
PROMPT = "Dogs bark at night in"
WARM = rc.Sampling(8, temperature=1.2, seed=3)


@pytest.fixture
def kb(shared_kb):
    return shared_kb


@pytest.fixture
def client(shared_client):
    return shared_client


def asked(**fields):
    return {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, **fields}


def test_every_field_reaches_the_engine(client, kb):
    given = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    of_vllm = {"repetition_penalty": 1.3, "min_p": 0.01, "top_k": 9, "stop_token_ids": [2]}
    sampling = replace(WARM, **given, **of_vllm, logit_bias={5: 3.0, 200: -1.0})
    right = kb.chat(MESSAGES, k=5, sampling=sampling)
    fields = asked(**given, temperature=1.2, seed=3, logit_bias={"5": 3, "200": -1.0}, extra_body=of_vllm)
    assert client.chat.completions.create(**fields).choices[0].message.content == right.text
    nothing = {"logit_bias": {}, "extra_body": {"top_k": -1}, **dict.fromkeys(given, 0)}
    plain = client.chat.completions.create(**{**fields, **nothing})
    assert plain.choices[0].message.content == kb.chat(MESSAGES, k=5, sampling=WARM).text != right.text


def test_several_answers_are_those_of_the_next_seeds_over_one_context(client, kb):
    right = [kb.chat(MESSAGES, k=5, sampling=replace(WARM, seed=3 + rank)).text for rank in range(3)]
    answer = client.chat.completions.create(**asked(temperature=1.2, seed=3, n=3))
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == right
    assert len(set(right)) == 3
    usage = answer.usage
    assert usage.completion_tokens == 24
    one = kb.chat(MESSAGES, k=5, sampling=WARM).usage
    assert (usage.prompt_tokens, usage.total_tokens) == (one.prompt_tokens, one.prompt_tokens + 24)
    assert usage.prompt_tokens_details.cached_tokens == one.cached_tokens
    assert [source["kv"] for source in answer.ragcache["sources"]] == ["shared"] * 4


def test_several_answers_as_a_stream(client, kb):
    right = [kb.chat(MESSAGES, k=5, sampling=replace(WARM, seed=3 + rank)).text for rank in range(2)]
    fields = asked(temperature=1.2, seed=3, n=2, stream=True, stream_options={"include_usage": True})
    texts, reasons, begun = defaultdict(str), {}, []
    *chunks, usage = client.chat.completions.create(**fields)
    for chunk in chunks:
        (choice,) = chunk.choices
        begun += [choice.index] if choice.delta.role == "assistant" and choice.delta.content == "" else []
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert [texts[0], texts[1]] == right
    assert reasons == {0: "length", 1: "length"}
    assert sorted(begun) == [0, 1]
    assert (usage.choices, usage.usage.completion_tokens) == ([], 16)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_chat(client, kb, stream):
    right = kb.chat(MESSAGES, k=5, sampling=rc.Sampling(8, logprobs=2))
    answer = client.chat.completions.create(**asked(logprobs=True, top_logprobs=2, stream=stream))
    if stream:
        told = [chunk.choices[0].logprobs for chunk in answer]
        content = [one.model_dump() for part in told if part is not None for one in part.content]
    else:
        content = [one.model_dump() for one in answer.choices[0].logprobs.content]
    assert [one["token"] for one in content] == [one.text for one in right.logprobs]
    assert [one["logprob"] for one in content] == pytest.approx([one.logprob for one in right.logprobs])
    for one, own in zip(content, right.logprobs, strict=True):
        assert [near["token"] for near in one["top_logprobs"]] == [near.text for near in own.top]
        assert one["bytes"] == (None if "\ufffd" in own.text else list(own.text.encode()))
    bare = client.chat.completions.create(**asked(logprobs=True)).choices[0].logprobs.content
    assert [one.top_logprobs for one in bare] == [[]] * 8


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_completion(client, kb, stream):
    right = kb.complete(PROMPT, sampling=rc.Sampling(8, logprobs=1))
    found = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, logprobs=1, stream=stream)
    lists = defaultdict(list)
    for part in found if stream else [found]:
        if part.choices[0].logprobs is not None:
            for name, values in part.choices[0].logprobs.model_dump().items():
                lists[name] += values
    texts = [one.text for one in right.logprobs]
    assert lists["tokens"] == texts
    assert lists["token_logprobs"] == pytest.approx([one.logprob for one in right.logprobs])
    assert lists["text_offset"] == [sum(map(len, texts[:rank])) for rank in range(8)]
    for near, own in zip(lists["top_logprobs"], right.logprobs, strict=True):
        assert near[own.text] == pytest.approx(own.logprob)


def test_answers_end_with_the_context_unless_the_client_says_otherwise(shared, kb):
    """No token ends an answer of this model: every route writes on to the last of its 4,096 positions. A prompt that
    takes most of them keeps this quick."""
    text, plain = "Cats sleep. " * 320, {"ragcache": {"retrieve": False}}
    chat = {"messages": [{"role": "user", "content": text}], **plain}
    for path, body, names in (
        ("/v1/chat/completions", {**chat, "max_tokens": 2**31 - 1}, ("prompt", "completion")),
        ("/v1/chat/completions", chat, ("prompt", "completion")),
        ("/v1/completions", {"prompt": text}, ("prompt", "completion")),
        ("/v1/responses", {"input": text, **plain}, ("input", "output")),
    ):
        usage = shared.http.post(path, json={"model": "tiny", **body}, timeout=300).json()["usage"]
        read, said = (usage[f"{name}_tokens"] for name in names)
        assert (path, read + said) == (path, 4096)
        assert said > 128
    assert kb.admission.reserved_bytes == 0
