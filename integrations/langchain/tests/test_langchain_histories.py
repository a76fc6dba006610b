"""Conversations whose earlier answers other services wrote."""

import pytest
from kit.makers import tiny_lm
from langchain_core.messages import AIMessage, ChatMessage, HumanMessage, SystemMessage

from langchain_ragcache import ChatRagCache

lm = tiny_lm(positions=2048)


@pytest.fixture
def chat(open_kb):
    return ChatRagCache(kb=open_kb(), max_tokens=4)


def prompt_tokens(chat, answer):
    """Return the number of tokens of a conversation in which the model gave this answer."""
    messages = [HumanMessage("Where is the ferry?"), answer, HumanMessage("And now?")]
    return chat.invoke(messages).usage_metadata["input_tokens"]


def test_a_developer_is_the_system(chat):
    told, asked = "Answer in verse.", HumanMessage("Where is the ferry?")
    developer, system = (
        chat.invoke([one, asked]) for one in (ChatMessage(role="developer", content=told), SystemMessage(told))
    )
    assert developer.text == system.text
    assert developer.usage_metadata["input_tokens"] == system.usage_metadata["input_tokens"]


THOUGHTS = [
    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
    {"type": "redacted_thinking", "data": "x"},
    {"type": "non_standard", "value": {"type": "redacted_thinking", "data": "x"}},
    {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c", "id": "fc_1"},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
]


@pytest.mark.parametrize(
    ("provider", "thoughts"), [("", THOUGHTS), ("anthropic", THOUGHTS[:2]), ("openai", THOUGHTS[4:])]
)
def test_thoughts_of_other_services_are_read_over(chat, provider, thoughts):
    """So are LangChain's own readings of them, `content_blocks`, which an application keeps if it changes models."""
    text = {"type": "text", "text": "At the pier.", "annotations": []}
    answer = AIMessage([*thoughts, text], response_metadata={"model_provider": provider} if provider else {})
    standard = AIMessage(content_blocks=answer.content_blocks)
    assert not provider or any(block["type"] == "reasoning" for block in standard.content)
    read = (standard, answer) if provider else (answer,)
    assert {prompt_tokens(chat, one) for one in read} == {prompt_tokens(chat, AIMessage("At the pier."))}
