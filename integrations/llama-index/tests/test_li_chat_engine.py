import pytest
from li_texts import SHORT
from llama_index.core.async_utils import asyncio_run
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.prompts import PromptTemplate
from waiting import ticking

import ragcache as rc
from llama_index.chat_engine.ragcache import RagCacheChatEngine
from llama_index.retrievers.ragcache import RagCacheRetriever

SAMPLING = rc.Sampling(**SHORT)
FIRST, SECOND = "Which club meets in Kelbrook?", "Where does the Arno rise?"


@pytest.fixture
def chat_engine(kb, llm):
    """Return a function that makes a chat engine. Its memory keeps no database connection open, unlike LlamaIndex's
    default.
    """

    def make(**options) -> RagCacheChatEngine:
        options.setdefault("memory", ChatMemoryBuffer.from_defaults(tokenizer_fn=str.split))
        return RagCacheChatEngine.from_defaults(RagCacheRetriever(kb, k=2), llm=llm, **options)

    return make


def asked(kb, turns, **options) -> str:
    """Return the engine's answer to (role, text) turns, over the passages of the last turn."""
    messages = [{"role": role, "content": text} for role, text in turns]
    hits = kb.retrieve(turns[-1][1], k=2)
    return kb.chat(messages, passages=hits, sampling=SAMPLING, **options).text


def test_turns_are_answered_as_the_engine_answers_them(kb, chat_engine):
    engine = chat_engine()
    assert isinstance(engine, ContextChatEngine)
    first = engine.chat(FIRST)
    assert first.response == asked(kb, [("user", FIRST)])
    assert [node.node_id for node in first.source_nodes] == [hit.chunk.id for hit in kb.retrieve(FIRST, k=2)]
    second = engine.chat(SECOND)
    turns = [("user", FIRST), ("assistant", first.response), ("user", SECOND)]
    assert second.response == asked(kb, turns)
    assert second.source_nodes[0].node_id == "rivers#0"
    kept = [(message.role.value, message.content) for message in engine.chat_history]
    assert kept == [*turns, ("assistant", second.response)]


def test_streaming_is_non_streaming(chat_engine):
    whole = chat_engine().chat(FIRST)
    engine = chat_engine()
    streamed = engine.stream_chat(FIRST)
    assert "".join(streamed.response_gen) == whole.response
    assert streamed.source_nodes == whole.source_nodes
    assert [message.content for message in engine.chat_history] == [FIRST, whole.response]


async def test_async_is_sync_and_leaves_the_loop_alone(chat_engine, slow_model):
    whole = chat_engine().chat(FIRST)
    engine = chat_engine()
    async with ticking() as ticks:
        answered = await engine.achat(FIRST)
    assert ticks.count >= 5
    assert answered.response == whole.response
    assert [message.content for message in engine.chat_history] == [FIRST, whole.response]
    engine = chat_engine()
    streamed = await engine.astream_chat(FIRST)
    assert "".join([piece async for piece in streamed.async_response_gen()]) == whole.response
    assert [message.content for message in engine.chat_history] == [FIRST, whole.response]


def test_a_system_prompt_and_a_history_are_read(kb, chat_engine):
    history = [("user", "Who?"), ("assistant", "Nobody.")]
    messages = [ChatMessage(text, role=role) for role, text in history]
    answer = chat_engine(system_prompt="Be brief.").chat(FIRST, chat_history=messages)
    assert answer.response == asked(kb, [("system", "Be brief."), *history, ("user", FIRST)])


@pytest.mark.parametrize("kind", [str, PromptTemplate])
def test_a_context_template_is_a_system_message(kb, chat_engine, kind):
    engine = chat_engine(context_template=kind("Know this:\n{context_str}\nSo: "), system_prompt="Be brief.")
    found = [rc.Passage(hit.chunk.text) for hit in kb.retrieve(FIRST, k=2)]
    messages = [{"role": "system", "content": ["Know this:\n", *found, "\nSo: Be brief."]}]
    expected = kb.chat([*messages, {"role": "user", "content": FIRST}], sampling=SAMPLING).text
    assert engine.chat(FIRST).response == expected


def test_braces_in_earlier_turns_are_left_alone(kb, chat_engine):
    engine = chat_engine(context_template="Know this:\n{context_str}\n")
    history = [("user", "What is {context_str}?"), ("assistant", "{query_str}")]
    answer = engine.chat(FIRST, chat_history=[ChatMessage(text, role=role) for role, text in history])
    found = [rc.Passage(hit.chunk.text) for hit in kb.retrieve(FIRST, k=2)]
    messages = [
        {"role": "system", "content": ["Know this:\n", *found, "\n"]},
        *({"role": role, "content": text} for role, text in [*history, ("user", FIRST)]),
    ]
    assert answer.response == kb.chat(messages, sampling=SAMPLING).text


def test_postprocessors_and_reset_are_the_stock_engines(kb, chat_engine):
    engine = chat_engine(node_postprocessors=[SimilarityPostprocessor(similarity_cutoff=9.0)])
    assert engine.chat(FIRST).response == "Empty Response"
    before = RagCacheRetriever(kb, k=2).retrieve(FIRST)
    assert engine.chat(FIRST, chat_history=[], prev_chunks=before).response == asked(kb, [("user", FIRST)])
    engine.reset()
    assert engine.chat_history == []


def test_the_default_memory_counts_in_the_models_tokens(kb, llm):
    engine = RagCacheChatEngine.from_defaults(RagCacheRetriever(kb, k=2), llm=llm)
    assert engine.chat(FIRST).response == asked(kb, [("user", FIRST)])
    assert [message.role for message in engine.chat_history] == [MessageRole.USER, MessageRole.ASSISTANT]
    assert engine._memory.token_limit == llm.metadata.context_window // 2
    assert len(engine._memory.tokenizer_fn("four")) == 4  # the tiny model's tokens are bytes
    asyncio_run(engine._memory.sql_store._async_engine.dispose())  # LlamaIndex leaves it open
