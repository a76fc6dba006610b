"""Chat completions through the official client: its own types parse every answer, and the engine says what is right."""

import json
from dataclasses import asdict, replace

import pytest
from engine_texts import TEXTS
from kit.makers import same_as
from openai import BadRequestError, OpenAI
from openai.types.chat.chat_completion_message import Annotation
from openai.types.responses import ResponseOutputText, ResponseOutputTextAnnotationAddedEvent
from serving import Served, events, serving

import ragcache as rc
from ragcache.engine.verdict import ASKED_UNCHECKED
from ragcache.server.settings import ServerSettings
from ragcache.store.places import Place

QUESTION = "Where does the cat sit?"
PLAIN = {"ragcache": {"retrieve": False}}


kb = same_as("shared_kb")


served = same_as("shared")


client = same_as("shared_client")


def ask(client: OpenAI, question: str = QUESTION, **more):
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(**{"model": "tiny", "messages": messages, "max_tokens": 12, **more})


def expected(kb: rc.RagCache, question: str = QUESTION, **options) -> rc.Answer:
    messages = options.pop("messages", [{"role": "user", "content": question}])
    options = {"sampling": rc.Sampling(12), **options}
    kb.chat(messages, **options)  # the first to ask computes the prefix, and with it one token more
    return kb.chat(messages, **options)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "method"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": QUESTION}]}, "cacheblend(ratio=0.5)"),
        ("/v1/responses", {"input": QUESTION}, "cacheblend(ratio=0.5)"),
        ("/v1/completions", {"prompt": QUESTION}, "full"),  # it holds no passage
        ("/v1/completions", {"prompt": "".join(TEXTS.values()) + QUESTION}, "cacheblend(ratio=0.5)"),
    ],
)
def test_a_header_names_the_method_with_its_options(served, path, body, method, stream):
    asked = {"method": "cacheblend", "method_options": {"ratio": 0.5}}
    limit = {"max_output_tokens" if "input" in body else "max_tokens": 1}
    response = served.http.post(path, json={"model": "tiny", "stream": stream, "ragcache": asked, **limit, **body})
    assert response.headers["X-Ragcache-Method"] == method
    assert stream or response.json()["ragcache"]["method"] == method


def test_an_answer_is_the_engines(client, kb):
    right = expected(kb, k=5)
    answer = ask(client)
    choice = answer.choices[0]
    assert choice.message.content == right.text
    assert (choice.message.role, choice.index, choice.finish_reason) == ("assistant", 0, right.finish_reason)
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (right.usage.prompt_tokens, right.usage.completion_tokens)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == right.usage.cached_tokens > 0


def test_a_second_model_answers_without_passages(client, kb):
    """What Open WebUI asks its task model: titles and tags, which are in no document."""
    assert [model.id for model in client.models.list()][:2] == ["tiny", "tiny:plain"]
    assert client.models.retrieve("tiny:plain").id == "tiny:plain"
    right, read = expected(kb), expected(kb, k=5)
    assert right.usage.prompt_tokens < read.usage.prompt_tokens
    plain = ask(client, model="tiny:plain")
    assert (plain.model, plain.choices[0].message.content) == ("tiny:plain", right.text)
    assert (plain.usage.prompt_tokens, plain.ragcache["sources"]) == (right.usage.prompt_tokens, [])
    chunks = list(ask(client, model="tiny:plain", stream=True))
    assert {chunk.model for chunk in chunks} == {"tiny:plain"}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == right.text
    answer = client.responses.create(model="tiny:plain", input=QUESTION, max_output_tokens=12)
    assert (answer.model, answer.output_text, answer.usage.input_tokens) == (
        "tiny:plain", right.text, right.usage.prompt_tokens,
    )  # fmt: skip


def test_what_a_request_says_of_passages_wins_over_the_model(client, kb):
    for extension, passages in (({"retrieve": True, "k": 2}, 2), ({"documents": [{"text": "The cat sits."}]}, 1)):
        answer = ask(client, model="tiny:plain", extra_body={"ragcache": extension})
        assert len(answer.ragcache["sources"]) == passages


def test_a_server_that_retrieves_only_when_asked(kb):
    with (
        serving(kb, ServerSettings(retrieve="off")) as server,
        OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client,
    ):
        assert ask(client).ragcache["sources"] == []
        found = ask(client, extra_body={"ragcache": {"retrieve": True}}).ragcache["sources"]
        assert [source["text"] for source in found] == [hit.chunk.text for hit in expected(kb, k=5).hits] != []


def test_the_extension_names_sources_and_costs(client, kb):
    right = expected(kb, k=2)
    extension = ask(client, extra_body={"ragcache": {"k": 2}}).ragcache
    assert [source["chunk_id"] for source in extension["sources"]] == [hit.chunk.id for hit in right.hits]
    assert [source["text"] for source in extension["sources"]] == [hit.chunk.text for hit in right.hits]
    assert [source["score"] for source in extension["sources"]] == pytest.approx([hit.score for hit in right.hits])
    assert extension["method"] == right.method == "reposition"
    assert extension["method_reason"] == right.method_reason == ASKED_UNCHECKED
    assert extension["dropped"] == 0
    counts = (right.usage.prompt_tokens, right.usage.computed_tokens, right.usage.cached_tokens)
    assert tuple(extension[f"{kind}_tokens"] for kind in ("prompt", "computed", "avoided")) == counts
    parts = sum(extension[f"{kind}_tokens"] for kind in ("computed", "created", "avoided"))
    assert extension["prompt_tokens"] == parts
    assert 0 < extension["timings"]["ttft_s"] <= extension["timings"]["total_s"]


def test_a_stream_is_the_same_answer(client, kb):
    right = expected(kb, k=5)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks}) == 1
    first, *middle, last, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert [source["chunk_id"] for source in first.ragcache["sources"]] == [hit.chunk.id for hit in right.hits]
    assert "".join(chunk.choices[0].delta.content for chunk in middle) == right.text
    assert {chunk.choices[0].finish_reason for chunk in (first, *middle)} == {None}
    assert {chunk.usage for chunk in chunks[:-1]} == {None}
    assert last.choices[0].finish_reason == right.finish_reason
    assert last.ragcache["computed_tokens"] == right.usage.computed_tokens
    assert usage.choices == []
    assert usage.usage.prompt_tokens_details.cached_tokens == right.usage.cached_tokens
    assert usage.usage.completion_tokens == right.usage.completion_tokens


def test_usage_is_not_in_a_stream_that_did_not_ask_for_it(served):
    with served.stream(QUESTION, max_tokens=3) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        found = [data for _, data in events(response.iter_lines())]
    assert found[-1] == "[DONE]"
    assert all("usage" not in json.loads(data) for data in found[:-1])


@pytest.mark.parametrize(
    ("documents", "passages"),
    [
        (
            [{"text": TEXTS["dogs"], "id": "mine"}, {"id": "cats#0"}],
            [rc.Passage(TEXTS["dogs"], id="mine"), rc.Passage(id="cats#0")],
        ),
        ([], []),
    ],
)
def test_documents_of_the_request_stand_in_for_retrieval(client, kb, documents, passages):
    answer = ask(client, extra_body={"ragcache": {"documents": documents}})
    right = expected(kb, passages=passages)
    assert answer.choices[0].message.content == right.text
    assert [source["text"] for source in answer.ragcache["sources"]] == [hit.chunk.text for hit in right.hits]
    assert len(right.hits) == len(documents)


PAGE = {"page": 2, "page_label": "3"}
CITED = [
    rc.Document("page", "The cat sits on a mat.", title="On cats", source="https://example.org/cats"),
    rc.Document("page-2", "The cat sits on a mat, again.", title="On cats", source="https://example.org/cats"),
    rc.Document("notes", "The cat sits on a chair.", source="kept/notes.md", places=[Place(0, PAGE)]),
]


@pytest.fixture
def cited(kb):
    kb.ingest(CITED)
    yield
    kb.delete([document.id for document in CITED])


@pytest.mark.usefixtures("cited")
def test_sources_are_cited_as_openais_own_types_read_them(client, kb):
    """A page once, however many of its passages were read; a file where the API knows files; strictly parsed."""
    told = {"ragcache": {"k": 3, "filter": {"document_id": {"$in": ["page", "page-2", "notes"]}}}}
    message = ask(client, extra_body=told).choices[0].message
    length = len(message.content)
    page = {"url": "https://example.org/cats", "title": "On cats", "start_index": 0, "end_index": length}
    assert [Annotation.model_validate(one.to_dict(), strict=True).to_dict() for one in message.annotations] == [
        {"type": "url_citation", "url_citation": page}
    ]
    *parts, end = ask(client, extra_body=told, stream=True)
    shown = parts[0].event["data"]  # for Open WebUI, where `source` in `metadata` tells documents apart
    hits = kb.retrieve(QUESTION, **told["ragcache"])
    assert (parts[0].event["type"], shown["document"]) == ("source", [hit.chunk.text for hit in hits])
    pages = {"source": "https://example.org/cats", "name": "On cats"}
    named = {"page": pages, "page-2": pages, "notes": {"source": "notes", "name": "notes.md", "page": 2}}
    assert shown["metadata"] == [named[hit.chunk.document_id] for hit in hits]
    assert [one["place"] for one in parts[0].ragcache["sources"]] == [
        "p. 3" if hit.chunk.document_id == "notes" else "" for hit in hits
    ]
    assert not any(hasattr(part, "event") for part in [*parts[1:], end])
    assert not any(hasattr(part.choices[0].delta, "annotations") for part in parts)
    assert (end.choices[0].finish_reason, end.choices[0].delta.annotations) == (
        "length", [one.to_dict() for one in message.annotations],
    )  # fmt: skip
    file = {"type": "file_citation", "file_id": "notes", "filename": "notes.md", "index": length}
    asked = {"model": "tiny", "input": QUESTION, "max_output_tokens": 12, "extra_body": told}
    [part] = client.responses.create(**asked).output[0].content
    right = [{"type": "url_citation", **page}, file]
    assert sorted((one.to_dict() for one in part.annotations), key=lambda one: one["type"], reverse=True) == right
    ResponseOutputText.model_validate(part.to_dict(), strict=True)
    events = list(client.responses.create(**asked, stream=True))
    added = [one for one in events if one.type == "response.output_text.annotation.added"]
    assert [one.annotation.to_dict() for one in added] == [one.to_dict() for one in part.annotations]
    assert [one.annotation_index for one in added] == [0, 1]
    for one in added:
        ResponseOutputTextAnnotationAddedEvent.model_validate(one.to_dict(), strict=True)
    assert events[-1].response.output[0].content[0].annotations == part.annotations
    assert ask(client, extra_body=PLAIN).choices[0].message.annotations == []
    assert not hasattr(next(iter(ask(client, extra_body=PLAIN, stream=True))), "event")


def test_sources_that_come_back_as_text_are_read_from_their_kv(client, caplog):
    with caplog.at_level("WARNING", "ragcache"):
        sources = ask(client, extra_body={"ragcache": {"k": 4}}).ragcache["sources"]
        pasted = "\n\n".join(source["text"].strip() for source in sources)

        def again(**extension):
            return ask(client, f"{pasted}\nWho?", extra_body={"ragcache": {"retrieve": False, **extension}})

        answer = again()
        assert [source["text"] for source in answer.ragcache["sources"]] == [source["text"] for source in sources]
        assert answer.usage.prompt_tokens_details.cached_tokens > len(pasted) // 2
        for _ in range(2):
            assert again(method="a3").ragcache["sources"] == []
    said = [record.getMessage() for record in caplog.records if "plain text" in record.getMessage()]
    assert ["4 stored passages" in text and "ragcache.documents" in text for text in said] == [True]


def test_a_conversation_with_parts_and_system_messages(client, kb):
    sent = [
        {"role": "developer", "content": "Be short."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "barks?"}]},
        {"role": "assistant", "content": "Dogs.", "refusal": None, "annotations": []},
        {"role": "user", "content": "And who sits?"},
    ]
    meant = [
        {"role": "system", "content": "Be short.\n\nBe kind."},
        {"role": "user", "content": "Who barks?"},
        {"role": "assistant", "content": "Dogs."},
        {"role": "user", "content": "And who sits?"},
    ]
    assert ask(client, messages=sent).choices[0].message.content == expected(kb, messages=meant, k=5).text


def test_stop_strings(client, kb):
    whole = expected(kb, k=5).text
    stop = whole[4:6]
    for given in (stop, [stop, "never there"]):
        choice = ask(client, stop=given).choices[0]
        assert choice.message.content == whole.partition(stop)[0]
        assert choice.finish_reason == "stop"


def test_the_newer_name_of_max_tokens_wins(client):
    answer = ask(client, max_tokens=9, max_completion_tokens=4)
    assert answer.usage.completion_tokens <= 4


def test_what_does_not_fit(client):
    long = "a" * 5000
    with pytest.raises(BadRequestError, match="tiny takes 4096") as caught:
        ask(client, long)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert "/" not in caught.value.message  # the model's place on this machine
    documents = [{"text": "b" * 1500} for _ in range(4)]
    with pytest.raises(BadRequestError, match="trim"):
        ask(client, extra_body={"ragcache": {"documents": documents}})
    answer = ask(client, extra_body={"ragcache": {"documents": documents, "on_overflow": "trim"}})
    assert answer.ragcache["dropped"] == 2


def test_old_turns_are_left_out_or_refused(client):
    pair = [{"role": "user", "content": "b" * 700}, {"role": "assistant", "content": "c" * 700}]
    messages = [*pair * 5, {"role": "user", "content": "Who?"}]
    answer = ask(client, messages=messages, extra_body=PLAIN)
    assert answer.ragcache["dropped_turns"] in (6, 8)
    off = {"ragcache": {"retrieve": False, "drop_turns": False}}
    with pytest.raises(BadRequestError, match="leave out its oldest messages, or pass drop_turns") as caught:
        ask(client, messages=messages, extra_body=off)
    assert caught.value.code == "context_length_exceeded"


def test_harmless_fields_are_accepted(client, kb):
    of_openai = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "modalities": ["text"]}
    of_openai |= {"parallel_tool_calls": False, "safety_identifier": "x", "prompt_cache_key": "y"}
    as_without = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "logprobs": False}
    as_without |= {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}}
    answer = ask(client, temperature=None, stop=None, **of_openai, **as_without)
    assert answer.choices[0].message.content == expected(kb, k=5).text


def test_a_model_may_have_an_owner(serve, kb):
    served = serve(model_name="acme/tiny-1")
    with OpenAI(base_url=served.base_url, api_key="none", max_retries=0) as client:
        listed = {model.id: model.max_model_len for model in client.models.list()}
        assert listed == {"acme/tiny-1": 4096, "acme/tiny-1:plain": 4096, "bag-of-words": None}
        assert client.models.retrieve("acme/tiny-1").id == "acme/tiny-1"
        assert ask(client, model="acme/tiny-1").choices
    assert served.http.get("/v1/models/acme/tiny-1:plain").json()["id"] == "acme/tiny-1:plain"
    assert served.http.get("/v1/models/acme").json()["error"]["code"] == "model_not_found"


def test_answers_carry_ids_and_guarding_headers(served: Served):
    made = served.chat(QUESTION, max_tokens=1).headers["x-request-id"]
    assert made.startswith("req_")
    given = served.http.get("/healthz", headers={"X-Request-ID": "mine-1"}).headers
    assert given["x-request-id"] == "mine-1"
    assert given["x-content-type-options"] == "nosniff"
    assert given["content-security-policy"] == "default-src 'self'"
    assert served.http.get("/healthz", headers={"X-Request-ID": "a b"}).headers["x-request-id"].startswith("req_")


def test_a_conversation_keeps_its_context_where_it_is_asked_to(client, served):
    keep = {"extra_body": {"ragcache": {"context": "keep", "k": 2}}}
    turns = [{"role": "user", "content": QUESTION}]
    first = ask(client, messages=turns, **keep)
    turns += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "Why?"}]
    second = ask(client, messages=turns, **keep)
    own = served.app.state.service.kb.chat(turns, k=2, context="keep", sampling=rc.Sampling(12))
    assert second.choices[0].message.content == own.text
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + first.usage.completion_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    with pytest.raises(BadRequestError, match="takes passages in the messages"):
        ask(client, extra_body={"ragcache": {"context": "keep", "documents": [{"text": TEXTS["cats"]}]}})


# An answer that is begun


BEGUN = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "The cat"}]


def test_a_last_assistant_message_is_continued(client, kb):
    right = expected(kb, messages=BEGUN)
    for words in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
        whole = ask(client, messages=BEGUN, extra_body={**PLAIN, **words})
        assert (whole.choices[0].message.content, whole.usage.prompt_tokens) == (right.text, right.usage.prompt_tokens)
    chunks = ask(client, messages=BEGUN, stream=True, extra_body=PLAIN)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == right.text
    answer = client.responses.create(model="tiny", input=BEGUN, max_output_tokens=12, extra_body=PLAIN)
    assert answer.output_text == right.text
    assert right.usage.prompt_tokens == expected(kb).usage.prompt_tokens + len(" The cat")


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        (BEGUN, {"continue_final_message": False}),
        (BEGUN, {"add_generation_prompt": True}),
        (BEGUN[:1], {"continue_final_message": True}),
        (BEGUN[:1], {"add_generation_prompt": False}),
    ],
)
def test_vllms_words_cannot_say_otherwise(client, messages, word):
    with pytest.raises(BadRequestError, match=f"{next(iter(word))} is .* is continued where it is an assistant's"):
        ask(client, messages=messages, extra_body={**PLAIN, **word})


def test_thoughts_of_other_services_are_read_over(client, kb):
    """Anthropic's parts and OpenAI's items, as clients keep them in a history."""
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "On the mat."}, BEGUN[0]]
    right = expected(kb, messages=turns)
    for thought in (
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
    ):
        kept = {"role": "assistant", "content": [thought, {"type": "text", "text": "On the mat."}]}
        answer = ask(client, messages=[turns[0], kept, turns[2]], extra_body=PLAIN)
        assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == (
            right.text,
            right.usage.prompt_tokens,
        )
    items = [turns[0], thought, turns[1], turns[2]]
    answer = client.responses.create(model="tiny", input=items, max_output_tokens=12, extra_body=PLAIN)
    assert (answer.output_text, answer.usage.input_tokens) == (right.text, right.usage.prompt_tokens)
    with pytest.raises(BadRequestError, match="holds no message"):
        client.responses.create(model="tiny", input=[thought], extra_body=PLAIN)


# Several answers, penalties and log-probabilities are those of the engine, in OpenAI's shapes.


MESSAGES = [{"role": "user", "content": QUESTION}]
WARM = rc.Sampling(8, temperature=1.2, seed=3)


def test_every_field_reaches_the_engine(client, kb):
    given = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    of_vllm = {"repetition_penalty": 1.3, "min_p": 0.01, "top_k": 9, "stop_token_ids": [2]}
    sampling = replace(WARM, **given, **of_vllm, top_p=0.9, logit_bias={5: 3.0, 200: -1.0})
    right = kb.chat(MESSAGES, k=5, sampling=sampling)
    fields = {**given, "temperature": 1.2, "seed": 3, "top_p": 0.9, "logit_bias": {"5": 3, "200": -1.0}}
    assert ask(client, max_tokens=8, **fields, extra_body=of_vllm).choices[0].message.content == right.text
    nothing = {"logit_bias": {}, "top_p": 1, "extra_body": {"top_k": -1}, **dict.fromkeys(given, 0)}
    plain = ask(client, max_tokens=8, **{**fields, **nothing})
    assert plain.choices[0].message.content == kb.chat(MESSAGES, k=5, sampling=WARM).text != right.text


def test_several_answers_are_those_of_the_next_seeds_over_one_context(client, kb):
    right = [kb.chat(MESSAGES, k=5, sampling=replace(WARM, seed=3 + rank)).text for rank in range(3)]
    answer = ask(client, max_tokens=8, temperature=1.2, seed=3, n=3)
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
    fields = {"temperature": 1.2, "seed": 3, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = ask(client, max_tokens=8, **fields)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    for rank in (0, 1):
        first, *rest = [choice for choice in choices if choice.index == rank]
        assert (first.delta.role, first.delta.content) == ("assistant", "")
        assert "".join(choice.delta.content or "" for choice in rest) == right[rank]
        assert [choice.finish_reason for choice in rest if choice.finish_reason] == ["length"]
    assert (usage.choices, usage.usage.completion_tokens) == ([], 16)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_chat(client, kb, stream):
    right = kb.chat(MESSAGES, k=5, sampling=rc.Sampling(8, logprobs=2))
    answer = ask(client, max_tokens=8, logprobs=True, top_logprobs=2, stream=stream)
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
    bare = ask(client, max_tokens=8, logprobs=True).choices[0].logprobs.content
    assert [one.top_logprobs for one in bare] == [[]] * 8


def test_answers_end_with_the_context_unless_the_client_says_otherwise(shared, kb):
    """No token ends an answer of this model: every route writes on to the last of its 4,096 positions. A prompt that
    takes most of them keeps this quick."""
    text = "Cats sleep. " * 327
    chat = {"messages": [{"role": "user", "content": text}], **PLAIN}
    for path, body, names in (
        ("/v1/chat/completions", {**chat, "max_tokens": 2**31 - 1}, ("prompt", "completion")),
        ("/v1/chat/completions", chat, ("prompt", "completion")),
        ("/v1/completions", {"prompt": text}, ("prompt", "completion")),
        ("/v1/responses", {"input": text, **PLAIN}, ("input", "output")),
    ):
        usage = shared.http.post(path, json={"model": "tiny", **body}, timeout=300).json()["usage"]
        read, said = (usage[f"{name}_tokens"] for name in names)
        assert (path, read + said) == (path, 4096)
        assert said > 128
    assert kb.admission.reserved_bytes == 0


def test_answers_are_explained_if_asked(shared, shared_kb):
    question, options = "Where does the river rise?", {"ragcache": {"k": 2}, "max_tokens": 2}
    body = {"model": shared.service.chat_model, "messages": [{"role": "user", "content": question}], **options}
    right = [asdict(one) for one in shared_kb.why([{"role": "user", "content": question}], k=2)]
    assert [one["why"] for one in right][:2] == ["found", "found"]
    told = shared.http.post("/v1/chat/completions?explain=1", json=body).json()
    assert [{**one, "detail": ""} for one in told["ragcache"]["reasons"]] == [{**one, "detail": ""} for one in right]
    streamed = shared.http.post("/v1/chat/completions?explain=true", json={**body, "stream": True}).text
    reasons = [line for line in streamed.splitlines() if '"reasons":' in line]
    assert len(reasons) == 1
    last = json.loads(reasons[0].removeprefix("data: "))["ragcache"]["reasons"]
    assert [one["why"] for one in last] == [one["why"] for one in right]
    assert "reasons" not in shared.http.post("/v1/chat/completions?explain=0", json=body).json()["ragcache"]
    assert "reasons" not in shared.http.post("/v1/chat/completions", json=body).json()["ragcache"]
    refused = shared.http.post("/v1/chat/completions?explain=perhaps", json=body)
    assert refused.status_code == 400
    assert "explain" in refused.text
