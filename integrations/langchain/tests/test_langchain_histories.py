"""Histories that other services wrote."""

import pytest
from langchain_core.messages import AIMessage, ChatMessage, HumanMessage, SystemMessage
from tiny_model import save_tiny_llama

import ragcache as rc
from langchain_ragcache import ChatRagCache
from ragcache_demo.bag_of_words import BagOfWords


@pytest.fixture(scope="module")
def kb(tmp_path_factory):
    lm = rc.load_lm(save_tiny_llama(tmp_path_factory.mktemp("model"), positions=2048))
    with rc.RagCache.open(tmp_path_factory.mktemp("kb"), model=lm, embedder=BagOfWords()) as kb:
        yield kb


def test_a_developer_is_the_system(kb):
    chat = ChatRagCache(kb=kb, max_tokens=4)
    told, asked = "Answer in verse.", HumanMessage("Where is the ferry?")
    as_developer = chat.invoke([ChatMessage(role="developer", content=told), asked])
    assert as_developer.text == chat.invoke([SystemMessage(told), asked]).text
    assert (
        as_developer.usage_metadata["input_tokens"]
        == chat.invoke([SystemMessage(told), asked]).usage_metadata["input_tokens"]
    )


def test_thoughts_of_other_services_are_read_over(kb):
    thought = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "non_standard", "value": {"type": "redacted_thinking", "data": "x"}},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c", "id": "fc_1"},
        {"type": "reasoning", "summary": [], "id": "rs_1"},
        {"type": "text", "text": "At the pier."},
    ]
    chat = ChatRagCache(kb=kb, max_tokens=4)
    first, last = HumanMessage("Where is the ferry?"), HumanMessage("And now?")
    counts = [
        chat.invoke([first, AIMessage(content), last]).usage_metadata["input_tokens"]
        for content in (thought, "At the pier.")
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("provider", ["anthropic", "openai"])
def test_so_are_langchains_own_readings_of_them(kb, provider):
    """`content_blocks` of an answer, as LangChain translates them: what an application that changes models keeps."""
    blocks = {
        "anthropic": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "At the pier."},
        ],
        "openai": [
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"type": "text", "text": "At the pier.", "annotations": []},
        ],
    }[provider]
    answer = AIMessage(blocks, response_metadata={"model_provider": provider})
    standard = AIMessage(content_blocks=answer.content_blocks)
    assert any(block["type"] == "reasoning" for block in standard.content)
    chat, first, last = ChatRagCache(kb=kb, max_tokens=4), HumanMessage("Where is the ferry?"), HumanMessage("And now?")
    read = [chat.invoke([first, one, last]) for one in (standard, answer, AIMessage("At the pier."))]
    assert len({message.usage_metadata["input_tokens"] for message in read}) == 1
