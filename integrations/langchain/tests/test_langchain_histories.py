"""The whole of `rc.Sampling` through both of LangChain's ways, and histories of other services."""

import pytest
from langchain_core.messages import AIMessage, ChatMessage, HumanMessage, SystemMessage
from tiny_model import save_tiny_llama

import ragcache as rc
from langchain_ragcache import ChatRagCache
from ragcache.errors import ConfigError
from ragcache_demo.bag_of_words import BagOfWords

MESSAGES = [{"role": "user", "content": "Where is the ferry?"}]


@pytest.fixture(scope="module")
def kb(tmp_path_factory):
    lm = rc.load_lm(save_tiny_llama(tmp_path_factory.mktemp("model"), positions=2048))
    with rc.RagCache.open(tmp_path_factory.mktemp("kb"), model=lm, embedder=BagOfWords()) as kb:
        yield kb


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 1.0, "seed": 3, "min_p": 0.2},
        {"presence_penalty": 1.5, "frequency_penalty": 1.0},
        {"repetition_penalty": 1.8},
        {"logit_bias": {70: 50.0}},
        {"stop_token_ids": [70, 71, 72, 73]},
        {"logprobs": 2},
    ],
)
def test_each_option_is_the_engines_own(kb, given):
    own = kb.chat(MESSAGES, sampling=rc.Sampling(max_tokens=12, **given))
    plain = ChatRagCache(kb=kb, max_tokens=12)
    for model in (ChatRagCache(kb=kb, max_tokens=12, **given), plain.bind(**given)):
        message = model.invoke("Where is the ferry?")
        assert message.text == own.text
        assert len(message.response_metadata.get("logprobs", {"content": []})["content"]) == len(own.logprobs or ())
    chunks = list(plain.stream("Where is the ferry?", **given))
    assert "".join(chunk.text for chunk in chunks) == own.text


def test_the_other_name_of_the_longest_answer(kb):
    by_field = ChatRagCache(kb=kb, max_completion_tokens=3).invoke("Where?")
    by_call = ChatRagCache(kb=kb).invoke("Where?", max_completion_tokens=3)
    assert by_field.usage_metadata["output_tokens"] == by_call.usage_metadata["output_tokens"] == 3


def test_a_value_out_of_range_is_refused(kb):
    with pytest.raises(ConfigError, match="stop_token_ids"):
        ChatRagCache(kb=kb).invoke("Where?", stop_token_ids=[10**9])
    with pytest.raises(ConfigError, match="min_p"):
        ChatRagCache(kb=kb).invoke("Where?", min_p=2)


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


async def test_a_last_message_of_the_models_own_is_continued(kb):
    own = kb.chat([*MESSAGES, {"role": "assistant", "content": "At the"}], sampling=rc.Sampling(max_tokens=8))
    chat, turns = ChatRagCache(kb=kb, max_tokens=8), [HumanMessage("Where is the ferry?"), AIMessage("At the")]
    pieces = [*chat.stream(turns)], [piece async for piece in chat.astream(turns)]
    for message in (chat.invoke(turns), await chat.ainvoke(turns), *(sum(some[1:], some[0]) for some in pieces)):
        assert message.text == own.text
        assert message.usage_metadata["input_tokens"] == own.usage.prompt_tokens
    assert own.usage.prompt_tokens == chat.invoke(turns[:1]).usage_metadata["input_tokens"] + len(" At the")
