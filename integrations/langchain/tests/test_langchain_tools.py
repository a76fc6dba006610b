"""Tools: the model's calls as LangChain's messages, and tools' results read by fused prefill."""

import json

import pytest
from kit.makers import tiny_lm
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import create_retriever_tool, tool
from pydantic import BaseModel
from scripted import script
from templates import TOOL_TEMPLATES

from langchain_ragcache import ChatRagCache, RagCacheRetriever, RagCacheVectorStore, document_block

STORED = "Jonas Lansen belongs to the Rowing Club Heron."
ASKED = "Which club does Jonas Lansen belong to?"
CALL = '<tool_call>\n{"name": "registry", "arguments": {"query": "Jonas Lansen"}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
BROKEN = '{"name": "clock", "arguments": {"zone": }}'


@tool
def clock() -> str:
    """Say the time."""
    return "noon"


lm = tiny_lm(positions=4096, chat_template=TOOL_TEMPLATES["hermes"])


@pytest.fixture
def chat(open_kb):
    kb = open_kb()
    RagCacheVectorStore(kb).add_texts([STORED, "Rosa makes clocks."])
    return ChatRagCache(kb=kb, max_tokens=300)


@pytest.fixture
def registry(chat):
    retriever = RagCacheRetriever(kb=chat.kb, k=1)
    return create_retriever_tool(retriever, "registry", "Looks people up.", response_format="content_and_artifact")


@pytest.fixture
def bound(chat, registry):
    return chat.bind_tools([registry, clock])


def called(message):
    return [(call["name"], call["args"], call["type"]) for call in message.tool_calls]


CALLED = [("registry", {"query": "Jonas Lansen"}, "tool_call"), ("clock", {}, "tool_call")]


async def test_calls_of_an_answer(bound, lm, monkeypatch):
    script(monkeypatch, lm, *[f"I look.\n{CALL}\n{CLOCK}"] * 4)
    for message in (bound.invoke(ASKED), await bound.ainvoke(ASKED)):
        assert (message.content, called(message), message.invalid_tool_calls) == ("I look.", CALLED, [])
        assert message.response_metadata["finish_reason"] == "tool_calls"
    for chunks in (list(bound.stream(ASKED)), [chunk async for chunk in bound.astream(ASKED)]):
        whole = sum(chunks[1:], chunks[0])
        assert (whole.content, called(whole)) == ("I look.", CALLED)
        assert [call["index"] for chunk in chunks for call in chunk.tool_call_chunks] == [0, 1]
        assert whole.response_metadata["finish_reason"] == "tool_calls"


def test_a_call_that_cannot_be_read_is_told_as_such(bound, lm, monkeypatch):
    script(monkeypatch, lm, *[f"<tool_call>{BROKEN}</tool_call>"] * 3, "Noon.")
    message = bound.invoke(ASKED)
    (call,) = message.invalid_tool_calls
    assert (message.tool_calls, call["name"], call["args"]) == ([], "clock", BROKEN)
    assert "cannot be read" in call["error"]
    first, *rest = bound.stream(ASKED)
    whole = sum(rest, first)
    assert whole.tool_calls == []
    assert [json.loads(call["args"]) for call in whole.invalid_tool_calls] == [BROKEN]
    cut = bound.invoke(ASKED, max_tokens=30)
    assert (cut.tool_calls, cut.response_metadata["finish_reason"]) == ([], "length")
    assert BROKEN.startswith(cut.invalid_tool_calls[0]["args"])
    result = ToolMessage("No such zone.", tool_call_id=call["id"])
    assert bound.invoke([HumanMessage(ASKED), message, result]).content == "Noon."


@pytest.mark.parametrize(
    "choice", ["any", "required", True, "clock", {"type": "function", "function": {"name": "clock"}}]
)
def test_a_choice_is_kept(chat, registry, choice):
    message = chat.bind_tools([registry, clock], tool_choice=choice, parallel_tool_calls=False).invoke(ASKED)
    (call,) = message.tool_calls
    assert list(call["args"]) == {"clock": [], "registry": ["query"]}[call["name"]]
    assert call["name"] == "clock" or choice in ("any", "required", True)


def test_the_documents_of_a_tool_are_fused(chat, registry, bound, lm, monkeypatch):
    script(monkeypatch, lm, CALL, "The Heron.", "The Heron.", "The Heron.")
    turns = [HumanMessage(ASKED)]
    turns.append(bound.invoke(turns))
    turns.append(registry.invoke(turns[-1].tool_calls[0]))
    answer = bound.invoke(turns)
    assert answer.content == "The Heron."
    (source,) = answer.response_metadata["sources"]
    assert (source["text"].strip(), source["kv"] in ("disk", "memory")) == (STORED, True)
    stored = chat.kb.count_tokens(STORED)
    assert answer.usage_metadata["input_token_details"]["cache_read"] >= stored
    call = turns[-1].tool_call_id
    block = ToolMessage([document_block(turns[-1].artifact[0])], tool_call_id=call, name="registry")
    told = bound.invoke([*turns[:-1], block])  # the same, said by hand
    assert told.usage_metadata["input_tokens"] == answer.usage_metadata["input_tokens"]
    assert told.response_metadata["sources"][0]["text"] == STORED
    plain = bound.invoke([*turns[:-1], ToolMessage("It is closed.", tool_call_id=call)])
    assert plain.response_metadata["sources"] == []


def test_an_agent_answers_as_an_object(chat, registry, lm, monkeypatch):
    class Member(BaseModel):
        """What somebody is."""

        member: bool

    agents = pytest.importorskip("langchain.agents")
    look = '[{"name":"registry","arguments":{"query":"Jonas Lansen"}}]'
    script(monkeypatch, lm, look, '[{"name":"Member","arguments":{"member":true}}]')
    agent = agents.create_agent(chat, [registry], response_format=Member)
    assert agent.invoke({"messages": [HumanMessage(ASKED)]})["structured_response"] == Member(member=True)


async def test_thoughts_are_a_block_of_their_own(chat, lm, monkeypatch):
    monkeypatch.setattr(lm.tokenizer, "chat_template", "{# <think> #}{{ messages[-1].content }}")
    script(monkeypatch, lm, *["<think>\nWho is it?\n</think>\n\nJonas."] * 4)
    chunks = [chunk async for chunk in chat.astream(ASKED)]
    for message in (chat.invoke(ASKED), await chat.ainvoke(ASKED), sum(chunks[1:], chunks[0])):
        assert message.text == "Jonas."
        assert [(block["type"], block.get("reasoning")) for block in message.content_blocks] == [
            ("reasoning", "Who is it?"),
            ("text", None),
        ]
        assert message.usage_metadata["output_token_details"]["reasoning"] > 0
    assert chat.invoke([HumanMessage(ASKED), message, HumanMessage("Sure?")], enable_thinking=False).text == "Jonas."
