"""POST /v1/responses through the official client: the same answers as the engine's, in OpenAI's newer shapes."""

import pytest
from kit.makers import same_as
from openai import BadRequestError, OpenAI

import ragcache as rc
from ragcache_openai.responses import ResponsesRequest

QUESTION = "Where does the cat sit?"
SHORT = rc.Sampling(8)


kb = same_as("shared_kb")


client = same_as("shared_client")


def ask(client: OpenAI, input=QUESTION, **more):
    return client.responses.create(model="tiny", input=input, **{"max_output_tokens": 8, **more})


def test_an_answer_is_the_engines(client, kb):
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": QUESTION}]
    kb.chat(messages, k=5, sampling=SHORT)
    right = kb.chat(messages, k=5, sampling=SHORT)
    found = ask(client, instructions="Be short.")
    assert (found.object, found.instructions, found.model) == ("response", "Be short.", "tiny")
    assert found.output_text == right.text
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    usage = found.usage
    assert (usage.input_tokens, usage.output_tokens) == (right.usage.prompt_tokens, 8)
    assert usage.input_tokens_details.cached_tokens == right.usage.cached_tokens > 0
    assert usage.total_tokens == usage.input_tokens + 8
    assert [one["chunk_id"] for one in found.ragcache["sources"]] == [hit.chunk.id for hit in right.hits]


def test_what_was_asked_is_said_again(client):
    found = ask(client, temperature=0.5, top_p=0.9, metadata={"for": "a test"})
    assert (found.temperature, found.top_p, found.metadata) == (0.5, 0.9, {"for": "a test"})


def test_a_conversation_goes_on_with_what_came_back(client, kb):
    first = ask(client)
    sent = [{"role": "user", "content": QUESTION}, *[item.model_dump() for item in first.output]]
    parts = [{"type": "input_text", "text": text} for text in ("And who ", "barks?")]
    sent.append({"role": "user", "content": parts})
    meant = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And who barks?"},
    ]
    assert ask(client, sent).output_text == kb.chat(meant, k=5, sampling=SHORT).text


def test_a_stream_brings_the_same_answer_event_by_event(client):
    ask(client)  # the first to ask computes more
    whole = ask(client)
    *events, last = ask(client, stream=True)
    kinds = [event.type.removeprefix("response.") for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.annotation.added"] * len(whole.output[0].content[0].annotations),
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert [event.sequence_number for event in (*events, last)] == list(range(len(events) + 1))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text == last.response.output_text
    assert last.type == "response.incomplete"
    assert (last.response.id, last.response.usage) == (events[0].response.id, whole.usage)
    assert events[0].response.ragcache["sources"] == last.response.ragcache["sources"]
    assert len({event.item_id for event in events if hasattr(event, "item_id")} | {last.response.output[0].id}) == 1


def test_a_schema_is_the_chats(kb):
    schema = {"type": "object", "properties": {"year": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "place", "schema": schema, "strict": True}
    asked = ResponsesRequest.model_validate({"model": "tiny", "input": "Where?", "text": {"format": form}})
    assert asked.as_chat().response_format.json_schema.schema_ == schema


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "there is no previous response 'resp_1'"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "file_search"),
        ({"reasoning": {"effort": "high"}}, "reasoning", "does not have it think"),
        ({"background": True}, "background", "not supported"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"input": []}, "input", ""),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", ""),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", ""),
        ({"input": " "}, "input", "the question is empty"),
        ({"input": "word " * 5000}, "input", "takes 4096"),
        ({"max_output_tokens": 0}, "max_output_tokens", ""),
        ({"extra_body": {"ragcache": {"method": "telepathy"}}}, "ragcache.method", "choose one of"),
        ({"extra_body": {"moderation": {"model": "x"}}}, "moderation", "not supported"),
        ({"context_management": [{"type": "compaction"}]}, "context_management", "not supported"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_refused_by_name(client, fields, param, said, stream):
    with pytest.raises(BadRequestError) as refused:
        ask(client, **{"stream": stream, **fields})
    assert refused.value.param == param
    assert said in refused.value.message
