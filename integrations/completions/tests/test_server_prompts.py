"""Raw prompts, searches and token ids over HTTP are those of the engine."""

from collections import defaultdict

import openai
import pytest
from kit.makers import same_as
from transformers import PreTrainedTokenizerFast

import ragcache as rc

PROMPT = "Dogs bark at night in"


kb = same_as("shared_kb")


served = same_as("shared")


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


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_completion(shared_client, kb, stream):
    right = kb.complete(PROMPT, sampling=rc.Sampling(8, logprobs=1))
    found = shared_client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, logprobs=1, stream=stream)
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


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"echo": True}, "echo"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [" "]}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [[1], [99999]], "logprobs": 1}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
    ],
)
def test_what_is_not_done_is_refused_by_name(served, fields, param):
    response = completed(served, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)


def test_fields_that_ask_for_nothing_are_taken(served, kb):
    expected = kb.complete(PROMPT, sampling=rc.Sampling(max_tokens=6)).text
    found = completed(served, suffix="", echo=False, n=2, best_of=2, stop=[], logit_bias={}).json()["choices"]
    assert [one["text"] for one in found] == [expected] * 2


def test_tokens_of_one_text_are_all_among_the_likeliest(served, kb):
    """Bytes of no whole character are all written as U+FFFD."""
    found = completed(served, logprobs=20).json()["choices"][0]["logprobs"]
    right = kb.complete(PROMPT, sampling=rc.Sampling(6, logprobs=20)).logprobs
    assert any(sum(near.text == "\ufffd" for near in token.top) > 1 for token in right)
    for top, chosen, token in zip(found["top_logprobs"], found["tokens"], right, strict=True):
        assert sorted(top.values()) == pytest.approx(sorted(near.logprob for near in token.top), abs=1e-3)
        assert top[chosen] == pytest.approx(token.logprob, abs=1e-3)


def test_each_prompt_of_a_list_is_answered(served, kb):
    """Choices of the first prompt come first, as OpenAI and vLLM number them; each prompt is counted."""
    client = openai.OpenAI(base_url=served.base_url, api_key="none")
    tokenizer = kb.lm.tokenizer
    texts = [PROMPT, "The cat"]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    told = {"max_tokens": 6, "n": 2, "temperature": 1.0, "seed": 7}
    for prompts in (texts, ids):
        found = client.completions.create(model="tiny", prompt=prompts, **told)
        each = [[kb.complete(one, sampling=rc.Sampling(6, 1.0, seed=7 + rank)) for rank in (0, 1)] for one in prompts]
        assert [(choice.index, choice.text) for choice in found.choices] == list(
            enumerate(answer.text for answers in each for answer in answers)
        )
        assert found.usage.prompt_tokens == sum(answers[0].usage.prompt_tokens for answers in each)
        assert found.usage.completion_tokens == 24
    assert client.completions.create(model="tiny", prompt=ids[0], max_tokens=6).usage.prompt_tokens == len(ids[0])
    whole = kb.complete(PROMPT, sampling=rc.Sampling(6))
    assert kb.complete([tokenizer.bos_token_id, *ids[0]], sampling=rc.Sampling(6)).text == whole.text
    *parts, last = client.completions.create(
        model="tiny", prompt=ids, stream=True, stream_options={"include_usage": True}, **told
    )
    streamed = ["".join(part.choices[0].text for part in parts if part.choices[0].index == rank) for rank in range(4)]
    assert (streamed, last.usage.prompt_tokens) == ([one.text for one in found.choices], found.usage.prompt_tokens)
    assert (last.choices, last.usage.completion_tokens) == ([], 24)
    assert {(part.object, part.id) for part in parts} == {("text_completion", last.id)}
    assert [part.choices[0].finish_reason for part in parts if part.choices[0].finish_reason] == ["length"] * 4


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
        ({"prompt": PROMPT, "model": "tiny:plain"}, True),
    ):
        text = body.get("prompt", body.get("content"))
        expected = tokenizer.encode(text, add_special_tokens=special)
        found = served.http.post("/tokenize", json=body).json()
        assert found == {"count": len(expected), "max_model_len": kb.lm.max_positions, "tokens": expected}
    assert served.http.post("/tokenize", json={"prompt": "a", "content": "b"}).status_code == 400
    assert served.http.post("/tokenize", json={"prompt": "a", "model": "other"}).status_code == 404


def test_a_prompt_that_can_never_fit_is_not_tokenised(served, kb, monkeypatch):
    lengths, encode = [], PreTrainedTokenizerFast._encode_plus

    def counted(self, text, *args, **options):
        lengths.append(len(text))
        return encode(self, text, *args, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", counted)
    for name in ("prompt", "content"):
        refused = served.http.post("/tokenize", json={name: "All work and no play. " * 180_000})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "the prompt has 3,960,000 characters" in refused.json()["error"]["message"]
    assert lengths == []
    twice = "ab" * kb.lm.max_positions
    assert served.http.post("/tokenize", json={"prompt": twice}).json()["count"] >= 2 * kb.lm.max_positions


def test_completions_are_explained_if_asked(shared):
    body = {"model": shared.service.chat_model, "prompt": "A text of a few words.", "max_tokens": 2}
    told = shared.http.post("/v1/completions?explain=1", json=body).json()
    assert told["ragcache"]["reasons"] == []
