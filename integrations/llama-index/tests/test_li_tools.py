"""Function calling: the model's calls as LlamaIndex's blocks, and tools' results read by fused prefill."""

import pytest
from kit.makers import tiny_lm
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, MessageRole, ThinkingBlock, ToolCallBlock
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel
from scripted import script
from templates import TOOL_TEMPLATES

import ragcache as rc
from llama_index.llms.ragcache import PassageBlock, RagCacheLLM
from ragcache.errors import ConfigError

STORED = "Jonas Lansen belongs to the Rowing Club Heron."
ASKED = "Which club does Jonas Lansen belong to?"
CALL = '<tool_call>\n{"name": "registry", "arguments": {"person": "Jonas Lansen"}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
BROKEN = '{"name": "clock", "arguments": {"zone": }}'
CALLED = [("registry", {"person": "Jonas Lansen"}), ("clock", {})]


class Kind(BaseModel):
    """What somebody is."""

    member: bool


def clock() -> str:
    """Say the time."""
    return "noon"


lm = tiny_lm(positions=4096, chat_template=TOOL_TEMPLATES["hermes"])


@pytest.fixture
def kb(open_kb):
    kb = open_kb()
    kb.ingest([rc.Document("lansen", STORED), rc.Document("rosa", "Rosa makes clocks.")])
    return kb


@pytest.fixture
def llm(kb):
    return RagCacheLLM(kb, max_tokens=300)


@pytest.fixture
def tools(kb):
    def registry(person: str) -> list[PassageBlock]:
        """Look people up."""
        return [PassageBlock.of(hit) for hit in kb.retrieve(person, k=1)]

    return [FunctionTool.from_defaults(registry), FunctionTool.from_defaults(clock)]


def selected(llm, response):
    found = llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
    return [(one.tool_name, one.tool_kwargs) for one in found]


async def test_calls_of_an_answer(llm, tools, lm, monkeypatch):
    script(monkeypatch, lm, *[f"I look.\n{CALL}\n{CLOCK}"] * 5)
    both = {"allow_parallel_tool_calls": True}
    answers = [llm.chat_with_tools(tools, ASKED, **both), await llm.achat_with_tools(tools, ASKED, **both)]
    answers.append(list(llm.stream_chat_with_tools(tools, ASKED, **both))[-1])
    stream = await llm.astream_chat_with_tools(tools, chat_history=[ChatMessage(ASKED)], **both)
    answers.append([response async for response in stream][-1])
    for answer in answers:
        assert (answer.message.content, selected(llm, answer)) == ("I look.", CALLED)
        assert answer.raw["finish_reason"] == "tool_calls"
    assert selected(llm, llm.chat_with_tools(tools, ASKED)) == CALLED[:1]


def test_a_call_may_be_required(llm, tools):
    assert llm.metadata.is_function_calling_model
    (call,) = llm.get_tool_calls_from_response(llm.chat_with_tools(tools[1:], ASKED, tool_required=True))
    assert (call.tool_name, call.tool_kwargs) == ("clock", {})
    assert isinstance(llm.structured_predict(Kind, PromptTemplate("Is he?")), Kind)


def test_a_call_that_cannot_be_read_is_not_made(llm, tools, lm, monkeypatch):
    script(monkeypatch, lm, f"<tool_call>{BROKEN}</tool_call>", "Noon.")
    response = llm.chat_with_tools(tools, ASKED)
    (block,) = response.message.blocks
    assert (block.tool_name, block.tool_kwargs) == ("clock", BROKEN)
    assert "cannot be read" in response.raw["tool_calls"][0]["error"]
    assert selected(llm, response) == []
    with pytest.raises(ConfigError, match="tool_required=True"):
        llm.get_tool_calls_from_response(response)
    failed = ChatMessage("It is no JSON.", role="tool", additional_kwargs={"tool_call_id": block.tool_call_id})
    history = [ChatMessage(ASKED), response.message, failed]
    assert llm.chat_with_tools(tools, chat_history=history).message.content == "Noon."


def test_passages_of_a_tool_are_fused(llm, tools, kb):
    (found,) = kb.retrieve("Jonas Lansen", k=1)
    arguments = '{"person": "Jonas Lansen"}'
    call = ToolCallBlock(tool_call_id="abcdefgh1", tool_name="registry", tool_kwargs={"person": "Jonas Lansen"})
    history = [
        ChatMessage(ASKED),
        ChatMessage(role=MessageRole.ASSISTANT, blocks=[call]),
        ChatMessage(role="tool", blocks=[PassageBlock.of(found)], additional_kwargs={"tool_call_id": "abcdefgh1"}),
    ]
    answer = llm.chat_with_tools(tools, chat_history=history, max_tokens=8)
    turns = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": "", "tool_calls": [rc.ToolCall("abcdefgh1", "registry", arguments)]},
        {"role": "tool", "tool_call_id": "abcdefgh1", "content": [found]},
    ]
    shown = [tool.metadata.to_openai_tool() for tool in tools]
    right = kb.chat(turns, tools=shown, sampling=rc.Sampling(8))
    assert (answer.message.content, answer.raw["usage"]["prompt_tokens"]) == (right.text, right.usage.prompt_tokens)
    (hit,) = answer.raw["hits"]
    assert (hit["text"].strip(), hit["kv"] in ("disk", "memory")) == (STORED, True)
    assert answer.raw["usage"]["cached_tokens"] >= found.chunk.num_tokens


# LlamaIndex's agents ask pydantic for names that it will drop.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_an_agent(llm, tools, lm, monkeypatch):
    script(monkeypatch, lm, CALL, "The Heron.")
    response = await FunctionAgent(tools=tools, llm=llm, system_prompt="Be brief.").run(user_msg=ASKED)
    assert str(response) == "The Heron."
    assert [(call.tool_name, call.tool_kwargs) for call in response.tool_calls] == CALLED[:1]
    (hit,) = response.raw["hits"]
    assert (hit["text"].strip(), hit["kv"] in ("disk", "memory")) == (STORED, True)


def test_a_model_whose_template_shows_no_tools(kb, tools, monkeypatch):
    monkeypatch.setattr(kb.lm.tokenizer, "chat_template", "{{ messages[0].content }}")
    llm = RagCacheLLM(kb)
    assert not llm.metadata.is_function_calling_model
    with pytest.raises(ConfigError, match="shows no tools"):
        llm.chat_with_tools(tools, ASKED)


def test_thoughts_are_a_block_of_their_own(llm, lm, monkeypatch):
    monkeypatch.setattr(lm.tokenizer, "chat_template", "{# <think> #}{{ messages[-1].content }}")
    script(monkeypatch, lm, *["<think>\nWho is it?\n</think>\n\nJonas."] * 3)
    for answer in (llm.chat([ChatMessage("Who?")]), list(llm.stream_chat([ChatMessage("Who?")]))[-1]):
        assert answer.message.content == "Jonas."
        assert [block.content for block in answer.message.blocks if isinstance(block, ThinkingBlock)] == ["Who is it?"]
        assert answer.raw["usage"]["reasoning_tokens"] > 0
    assert llm.chat([answer.message, ChatMessage("Sure?")], reasoning_effort="none").message.content == "Jonas."
