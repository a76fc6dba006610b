"""The chat model: for LangChain's messages it gives the engine's own answers."""

import asyncio
import time
from dataclasses import replace

import pytest
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, ChatMessage, HumanMessage, SystemMessage
from langchain_core.messages.content import create_text_block
from langchain_doubles import Seen
from langchain_registry import QUESTION, REGISTRY, is_json
from waiting import ticking

import ragcache as rc
from langchain_ragcache import ChatRagCache, RagCacheRetriever, RagCacheVectorStore, document_block
from langchain_ragcache.answers import to_result
from ragcache.engine.verdict import TRAINED
from ragcache.errors import CancelledError
from ragcache_demo.bag_of_words import BagOfWords

ASKED = f"Question: {QUESTION}"


@pytest.fixture
def chat(registry) -> ChatRagCache:
    return ChatRagCache(kb=registry)


@pytest.fixture
def babbler(tmp_path, lm) -> ChatRagCache:
    """Yield a chat model over a random model, which writes until its limit."""
    with rc.RagCache.open(tmp_path / "babble", model=lm, embedder=BagOfWords()) as kb:
        yield ChatRagCache(kb=kb, max_tokens=300)


@pytest.fixture
def passages(registry) -> list[Document]:
    return RagCacheRetriever(kb=registry, k=3).invoke(QUESTION)


def reading(documents, question=ASKED) -> list[HumanMessage]:
    return [HumanMessage(content_blocks=[*(document_block(d) for d in documents), create_text_block(question)])]


def details(message: AIMessage) -> dict[str, int]:
    return message.usage_metadata["input_token_details"]


# Answers


def test_an_answer_is_the_engines(registry, chat, passages):
    own = registry.ask(QUESTION, 3)
    answer = chat.invoke(reading(passages))
    assert answer.text == own.text
    assert "Heron" in answer.text
    usage = answer.usage_metadata
    assert usage["input_tokens"] == own.usage.prompt_tokens
    assert usage["output_tokens"] == own.usage.completion_tokens
    assert usage["total_tokens"] == own.usage.prompt_tokens + own.usage.completion_tokens
    assert details(answer) == {"cache_read": own.usage.cached_tokens, "cache_creation": 0}
    about = answer.response_metadata
    assert is_json(about)
    assert (about["model_name"], about["computed_tokens"]) == ("mini", own.usage.computed_tokens)
    assert (about["finish_reason"], about["method"], about["method_reason"]) == ("stop", registry.method, TRAINED)
    assert [source["chunk_id"] for source in about["sources"]] == [document.id for document in passages]
    assert [source["text"] for source in about["sources"]] == [document.page_content for document in passages]
    assert {source["kv"] for source in about["sources"]} == {"memory"}
    assert about["timings"]["ttft_s"] > 0
    cut = to_result(replace(own, dropped=2, dropped_turns=1, finish_reason="length"), "mini").generations[0].message
    names = ("dropped", "dropped_turns", "finish_reason")
    assert [cut.response_metadata[name] for name in names] == [2, 1, "length"]


def test_every_form_of_content_is_read_alike(registry, chat, passages):
    blocks = [dict(document_block(document)) for document in passages]
    top_level = [
        {"type": "text", "text": block["text"], "id": block["id"], "ragcache": block["extras"]["ragcache"]}
        for block in blocks
    ]
    forms = [
        HumanMessage([*blocks, ASKED]),
        HumanMessage([*blocks, {"type": "text", "text": ASKED}]),
        HumanMessage(content_blocks=[*blocks, create_text_block(ASKED)]),
        HumanMessage([*top_level, {"type": "text", "text": ASKED, "cache_control": {"type": "ephemeral"}}]),
        ChatMessage(role="user", content=[*blocks, ASKED]),
        {"role": "user", "content": [*blocks, {"type": "text", "text": ASKED}]},
    ]
    expected = registry.ask(QUESTION, 3)
    for message in forms:
        answer = chat.invoke([message])
        assert (answer.text, answer.usage_metadata["input_tokens"]) == (expected.text, expected.usage.prompt_tokens)


def test_a_conversation_is_the_engines(registry, chat):
    messages = [
        SystemMessage("Answer from the registry."),
        HumanMessage(f"{REGISTRY['lansen']}\n{ASKED}"),
        AIMessage([{"type": "text", "text": "Jonas Lansen "}, "belongs to the Rowing Club Heron."]),
        HumanMessage("Question: When does it meet?"),
    ]
    own = registry.chat(
        [
            {"role": "system", "content": "Answer from the registry."},
            {"role": "user", "content": f"{REGISTRY['lansen']}\n{ASKED}"},
            {"role": "assistant", "content": "Jonas Lansen belongs to the Rowing Club Heron."},
            {"role": "user", "content": "Question: When does it meet?"},
        ]
    )
    answer = chat.invoke(messages)
    assert answer.text == own.text
    assert answer.usage_metadata["input_tokens"] == own.usage.prompt_tokens


async def test_streams_add_up_to_the_answer(chat, passages):
    whole = chat.invoke(reading(passages))
    chunks = list(chat.stream(reading(passages)))
    achunks = [chunk async for chunk in chat.astream(reading(passages))]
    for pieces in (chunks, achunks):
        assert "".join(chunk.text for chunk in pieces) == whole.text
        assert len([chunk for chunk in pieces if chunk.text]) > 3
        total = sum(pieces[1:], pieces[0])
        assert total.usage_metadata == whole.usage_metadata
        for key in ("model_name", "method", "finish_reason", "dropped", "computed_tokens"):
            assert total.response_metadata[key] == whole.response_metadata[key]
        assert len(total.response_metadata["sources"]) == 3
    assert (await chat.ainvoke(reading(passages))).text == whole.text


async def test_an_event_loop_goes_on_while_the_model_runs(babbler, slow_model):
    async with ticking() as ticks:
        await babbler.ainvoke("Hi", max_tokens=6)
    assert ticks.count >= 5
    async with ticking() as ticks:
        [chunk async for chunk in babbler.astream("Hi", max_tokens=6)]
    assert ticks.count >= 5


# Handles


def test_a_handle_alone_names_a_stored_passage(chat, passages):
    by_handle = [create_text_block("", ragcache={"handle": d.metadata["ragcache_handle"]}) for d in passages]
    by_id = [create_text_block("", id=document.id, ragcache={}) for document in passages]
    expected = chat.invoke(reading(passages)).text
    assert chat.invoke([HumanMessage([*by_handle, ASKED])]).text == expected
    assert chat.invoke([HumanMessage([*by_id, ASKED])]).text == expected


# Stopping


def test_closing_a_stream_stops_the_work(babbler, monkeypatch):
    steps = counted(babbler.kb.lm, monkeypatch)
    stream = babbler.stream("Hi")
    next(stream)
    stream.close()
    done = len(steps)
    assert done < 10
    time.sleep(0.3)
    assert len(steps) == done


async def test_closing_a_stream_in_an_event_loop_stops_the_work(babbler, monkeypatch):
    steps = counted(babbler.kb.lm, monkeypatch, pause_s=0.01)
    stream = babbler.astream("Hi")
    await anext(stream)
    await stream.aclose()
    await asyncio.sleep(0.2)
    done = len(steps)
    assert done < 100
    await asyncio.sleep(0.2)
    assert len(steps) == done


async def test_a_timeout_ends_an_answer(babbler, monkeypatch):
    counted(babbler.kb.lm, monkeypatch, pause_s=0.01)
    with pytest.raises(CancelledError, match=r"timeout=0\.2"):
        babbler.invoke("Hi", timeout=0.2)
    with pytest.raises(CancelledError, match=r"timeout=0\.2"):
        [chunk async for chunk in ChatRagCache(kb=babbler.kb, timeout=0.2, max_tokens=300).astream("Hi")]


def counted(lm, monkeypatch, pause_s: float = 0.0) -> list[float]:
    """Return a list of the times at which the model ran, from now on."""
    steps, forward = [], lm.scheduler.forward

    def count(pieces):
        steps.append(time.perf_counter())
        time.sleep(pause_s)
        return forward(pieces)

    monkeypatch.setattr(lm.scheduler, "forward", count)
    return steps


# Callbacks, traces, caches


async def test_callbacks_see_tokens_and_usage(chat, passages):
    text = chat.invoke(reading(passages)).text
    for stream in (chat.stream, chat.astream):
        seen = Seen()
        result = stream(reading(passages), {"callbacks": [seen]})
        chunks = [chunk async for chunk in result] if hasattr(result, "__aiter__") else list(result)
        assert "".join(seen.pieces) == text
        assert seen.response.generations[0][0].text == text
        assert len(chunks) == len(seen.pieces)
    usage = UsageMetadataCallbackHandler()
    answer = chat.invoke(reading(passages), {"callbacks": [usage]})
    assert usage.usage_metadata == {"mini": answer.usage_metadata}


def test_traces_name_the_model_and_its_parameters(chat):
    seen = Seen()
    ends_soon = {"temperature": 0.5, "stop": ["e"]}
    chat.bind(**ends_soon).invoke(ASKED, {"callbacks": [seen], "metadata": {"user": "u1"}})
    expected = {
        "ls_provider": "ragcache",
        "ls_model_name": "mini",
        "ls_model_type": "chat",
        "ls_temperature": 0.5,
        "ls_stop": ["e"],
        "user": "u1",
    }
    assert {key: seen.metadata.get(key) for key in expected} == expected
    assert "ls_max_tokens" not in seen.metadata, "an answer ends by itself"
    assert seen.metadata["lc_versions"]["ragcache"] == rc.__version__
    assert is_json(seen.parameters)
    assert seen.parameters["fingerprint"] == chat.kb.lm.fingerprint
    assert seen.parameters["_type"] == "ragcache"


def test_tokens_are_counted_by_the_models_own_tokenizer(chat):
    ids = chat.kb.lm.tokenizer(QUESTION, add_special_tokens=False)["input_ids"]
    assert chat.get_token_ids(QUESTION) == ids
    assert chat.get_num_tokens(QUESTION) == len(ids)
    assert chat.get_num_tokens_from_messages([HumanMessage(QUESTION)]) >= len(ids)
    assert chat.profile["max_input_tokens"] == 4096


def test_components_by_path_or_environment_share_one_store(tmp_path, model_directory, monkeypatch):
    with RagCacheVectorStore(tmp_path / "kb", BagOfWords(), model=model_directory) as store:
        chat = ChatRagCache(kb=tmp_path / "kb", model=str(model_directory), max_tokens=3)
        monkeypatch.setenv("RAGCACHE_STORE", str(tmp_path / "kb"))
        assert chat.kb is RagCacheRetriever(kb=tmp_path / "kb").kb is ChatRagCache().kb is store.kb
        assert chat.model == store.kb.lm.name
        assert chat.bind(max_tokens=2).bound.kb is store.kb
