"""Tools through the official client: its own types parse every answer, and the engine says what is right."""

import json

import jsonschema
import pytest
from engine_texts import TEXTS
from openai import BadRequestError, OpenAI
from scripted import BROKEN, CALL, CLOCK_CALL, PLACE, SEARCH, THINKS, THOUGHT, script
from serving import Served

import ragcache as rc

CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [SEARCH, CLOCK]
ASKED = [{"role": "user", "content": "What is there?"}]
SAID, CALLED = f"I look.\n{CALL}\n{CLOCK_CALL}", [("search", '{"name": "Arno"}'), ("clock", "{}")]
EARLIER = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
NAMELESS = {"id": "a"}
PLAIN = {"extra_body": {"ragcache": {"retrieve": False}}}


@pytest.fixture
def ask(agent: Served):
    with OpenAI(base_url=agent.base_url, api_key="none", max_retries=0) as client:
        name = agent.service.chat_model

        def ask_one(messages=ASKED, **more):
            asked = {"model": name, "messages": messages, "max_tokens": 300, "tools": TOOLS, **PLAIN, **more}
            return client.chat.completions.create(**asked)

        yield ask_one


def called(calls):
    return [(call.function.name, call.function.arguments) for call in calls]


def test_calls_are_apart_from_the_text(agent, ask, monkeypatch):
    script(monkeypatch, agent.service.kb.lm, SAID, CALL)
    choice = ask().choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert called(choice.message.tool_calls) == CALLED
    assert {call.type for call in choice.message.tool_calls} == {"function"}
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert ask().choices[0].message.content is None


def test_unknown_fields_of_a_tool_reach_no_template(agent, ask, monkeypatch):
    script(monkeypatch, agent.service.kb.lm, CALL, CALL)
    coloured = [{**SEARCH, "function": {**SEARCH["function"], "colour": "red"}}, CLOCK]
    assert ask(tools=coloured).usage.prompt_tokens == ask().usage.prompt_tokens


def test_calls_are_streamed_by_index(agent, ask, monkeypatch):
    script(monkeypatch, agent.service.kb.lm, SAID)
    chunks = [chunk.choices[0] for chunk in ask(stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "I look."
    deltas = [delta for chunk in chunks for delta in chunk.delta.tool_calls or ()]
    assert [delta.index for delta in deltas] == [0, 1]
    assert called(deltas) == CALLED
    assert all(delta.id and delta.type == "function" for delta in deltas)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]


def test_a_call_that_is_no_json_comes_as_it_was_written(agent, ask, monkeypatch):
    script(monkeypatch, agent.service.kb.lm, BROKEN)
    (call,) = ask().choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("search", BROKEN.splitlines()[1])


def test_results_go_back_as_the_client_has_them(agent, ask, monkeypatch):
    kb = agent.service.kb
    script(monkeypatch, kb.lm, CALL, "A river.", "A river.")
    said = ask().choices[0].message
    found = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "It rises in the Vale hills."}
    turns = [*ASKED, said.model_dump(), found]
    answer = ask(turns)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("A river.", "stop")
    call = rc.ToolCall(said.tool_calls[0].id, "search", '{"name": "Arno"}')
    turns[1] = {"role": "assistant", "content": "", "tool_calls": [call]}
    right = kb.chat(turns, tools=[SEARCH, CLOCK], sampling=rc.Sampling(300))
    assert answer.usage.prompt_tokens == right.usage.prompt_tokens
    sources = ask(turns[:1], extra_body={"ragcache": {"k": 1}}, max_tokens=1).ragcache["sources"]
    assert [source["text"].strip() for source in sources] == [TEXTS["rivers"].strip()]


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_is_kept(ask, stream):
    for choice, reason in (("required", "tool_calls"), ({"type": "function", "function": {"name": "search"}}, "stop")):
        answer = ask(tool_choice=choice, parallel_tool_calls=False, stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
        messages = [one.delta if stream else one.message for one in choices]
        (call,) = [call for message in messages for call in message.tool_calls or ()]
        assert [one.finish_reason for one in choices if one.finish_reason] == [reason]
        schema = PLACE if call.function.name == "search" else {"maxProperties": 0}
        assert reason == "tool_calls" or call.function.name == "search"
        jsonschema.validate(json.loads(call.function.arguments), schema)


def test_no_tool_may_be_called(agent, ask, monkeypatch):
    script(monkeypatch, agent.service.kb.lm, CALL)
    message = ask(tool_choice="none").choices[0].message
    assert (message.content, message.tool_calls) == (CALL, None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "dance"}}}, "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [SEARCH, SEARCH]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "tools"),
        ({"messages": [*ASKED, {"role": "tool", "content": "x"}]}, "messages[1]"),
        ({"messages": [{**ASKED[0], "tool_calls": [EARLIER]}]}, "messages[0]"),
        ({"messages": [*ASKED, {"role": "assistant", "tool_calls": [NAMELESS]}]}, "messages[1].tool_calls[0].function"),
        ({"extra_body": {"ragcache": {"tool_format": "odd"}}}, None),
    ],
)
def test_what_cannot_be_is_the_requests_fault(ask, fields, param):
    with pytest.raises(BadRequestError) as caught:
        ask(**fields)
    assert param is None or caught.value.param == param


# Thoughts


@pytest.fixture
def think(agent, ask, monkeypatch):
    monkeypatch.setattr(agent.service.kb.lm.tokenizer, "chat_template", THINKS)
    script(monkeypatch, agent.service.kb.lm, THOUGHT, THOUGHT)
    return lambda **more: ask(tools=[], **more)


def test_thoughts_are_apart_as_vllm_sends_them(think):
    whole = think()
    message = whole.choices[0].message
    assert (message.content, message.reasoning_content) == ("Jonas.", "Who is it?")
    assert len("Who is it?") < whole.usage.completion_tokens_details.reasoning_tokens < len(THOUGHT)
    assert whole.usage.completion_tokens == len(THOUGHT)
    deltas = [chunk.choices[0].delta for chunk in think(stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Who is it?"
    assert "".join(delta.content or "" for delta in deltas) == "Jonas."


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"reasoning_effort": "none"}, "(quiet)"),
        ({"reasoning_effort": "low"}, "low"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}, **PLAIN["extra_body"]}}, "(quiet)"),
        ({"extra_body": {"ragcache": {"retrieve": False, "enable_thinking": False}}}, "(quiet)"),
    ],
)
def test_how_much_a_model_thinks_is_told_in_its_clients_words(think, more, told):
    plain = think().usage.prompt_tokens
    assert think(**more).usage.prompt_tokens == plain + len(told)
