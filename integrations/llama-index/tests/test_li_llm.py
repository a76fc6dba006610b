"""The model's answers are the engine's, whichever way passages reach it; only what has to run runs."""

import asyncio
import pickle
from collections.abc import Callable

import pytest
from li_loop import ticking
from li_texts import QUESTION, SHORT, TEXTS
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole, TextBlock, ThinkingBlock
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import NodeWithScore, TextNode

import ragcache as rc
from llama_index.llms.ragcache import (
    FusedPrompt,
    PassageBlock,
    RagCacheFirstTokenEvent,
    RagCacheKVLoadEvent,
    RagCacheLLM,
    RagCachePrefillEvent,
)
from llama_index.vector_stores.ragcache import HANDLE_KEY
from ragcache.errors import ConfigError, ContextTooLongError, PromptError, UnknownHandleError

SAMPLING = rc.Sampling(**SHORT)
USER = [{"role": "user", "content": QUESTION}]
MESSAGES = [ChatMessage(QUESTION)]


@pytest.fixture
def passages(kb) -> list[rc.Passage]:
    return [rc.Passage(hit.chunk.text, hit.chunk.id, hit.handle) for hit in kb.retrieve(QUESTION, k=3)]


def twice(ask: Callable[[], rc.Answer]) -> rc.Answer:
    """The second answer: the first one has computed what stands before the passages, and it is kept."""
    ask()
    return ask()


def as_node(passage: rc.Passage) -> TextNode:
    return TextNode(id_=passage.id, text=passage.text, metadata={HANDLE_KEY: passage.handle})


WAYS = {
    "passages": lambda passages: passages,
    "nodes": lambda passages: [as_node(one) for one in passages],
    "scored nodes": lambda passages: [NodeWithScore(node=as_node(one), score=0.5) for one in passages],
    "mappings": lambda passages: [{"text": one.text, "id": one.id, "handle": one.handle} for one in passages],
    "texts": lambda passages: [one.text for one in passages],
    "ids without text": lambda passages: [{"id": one.id} for one in passages],
    "handles without text": lambda passages: [{"handle": one.handle} for one in passages],
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_segments_are_read_as_the_engine_reads_passages(kb, llm, passages, way):
    expected = twice(lambda: kb.chat(USER, passages=passages, sampling=SAMPLING))
    answer = llm.chat(MESSAGES, segments=way(passages))
    assert answer.message.content == expected.text
    assert answer.message.role == MessageRole.ASSISTANT
    assert answer.raw["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
    assert answer.raw["usage"]["cached_tokens"] == expected.usage.cached_tokens > 0


def test_only_the_rest_of_the_prompt_runs(lm, llm, passages, tokens_run):
    llm.chat(MESSAGES, segments=passages, max_tokens=1)  # computes the prefix once for all
    tokens_run()
    usage = llm.chat(MESSAGES, segments=passages, max_tokens=1).raw["usage"]
    suffix = len(lm.tokenizer(f"Question: {QUESTION}\nAnswer:", add_special_tokens=False)["input_ids"])
    assert tokens_run() == suffix == usage["computed_tokens"]
    read = sum(len(lm.tokenizer(one.text)["input_ids"]) for one in passages)
    assert usage["cached_tokens"] >= read
    plain = "".join(one.text.upper() for one in passages)
    llm.chat([ChatMessage(plain + QUESTION)], max_tokens=1)
    assert tokens_run() > read


def test_blocks_of_a_message_are_read_where_they_stand(kb, llm, passages):
    parts = ["Read this:\n", *passages, f"\nThen say: {QUESTION}"]
    expected = twice(lambda: kb.chat([{"role": "user", "content": parts}], sampling=SAMPLING))
    blocks = [PassageBlock.of(one) if isinstance(one, rc.Passage) else TextBlock(text=one) for one in parts]
    answer = llm.chat([ChatMessage(blocks=blocks)])
    assert answer.message.content == expected.text
    assert answer.raw["usage"]["computed_tokens"] == expected.usage.computed_tokens < expected.usage.prompt_tokens
    assert [hit["chunk_id"] for hit in answer.raw["hits"]] == [one.id for one in passages]


def test_a_passage_block_is_text_to_everything_else(passages):
    message = ChatMessage(blocks=[TextBlock(text="a"), PassageBlock.of(passages[0])])
    assert message.content == f"a\n{passages[0].text}"
    back = pickle.loads(pickle.dumps(message))
    assert back.blocks[1].passage() == passages[0]
    plain = ChatMessage.model_validate(message.model_dump())
    assert plain.content == message.content


def test_a_raw_prompt_is_completed_as_the_engine_does(kb, llm, passages):
    assert llm.complete("The cat sat").text == kb.complete("The cat sat", sampling=SAMPLING).text
    parts = ["Read:\n", *passages, "\nQ: what?\nA:"]
    expected = twice(lambda: kb.complete(parts, sampling=SAMPLING))
    answer = llm.complete(FusedPrompt(parts))
    assert answer.text == expected.text
    assert answer.raw["usage"]["cached_tokens"] == expected.usage.cached_tokens > 0
    in_front = llm.complete("\nQ: what?\nA:", segments=passages)
    assert in_front.text == kb.complete([*passages, "\nQ: what?\nA:"], sampling=SAMPLING).text


def test_a_fused_prompt_is_a_string_to_everything_else(passages):
    prompt = FusedPrompt(["Read:\n", *passages, "Q"])
    assert prompt == "Read:\n" + "".join(one.text.rstrip() + "\n" for one in passages) + "Q"
    assert prompt.parts[1] == passages[0]
    back = pickle.loads(pickle.dumps(prompt))
    assert (back, back.parts) == (prompt, prompt.parts)
    assert FusedPrompt("Q").parts == ("Q",)


def test_a_conversation_is_read_as_the_engine_reads_it(kb, llm):
    turns = [("system", "Be brief."), ("user", "Who?"), ("assistant", "Nobody."), ("user", QUESTION)]
    expected = kb.chat([{"role": role, "content": text} for role, text in turns], sampling=SAMPLING)
    assert llm.chat([ChatMessage(text, role=role) for role, text in turns]).message.content == expected.text
    same = [MessageRole.DEVELOPER, MessageRole.USER, MessageRole.MODEL, MessageRole.USER]
    others = [ChatMessage(text, role=role) for role, (_, text) in zip(same, turns, strict=True)]
    assert llm.chat(others).message.content == expected.text


def test_streaming_is_non_streaming(llm, passages):
    whole = llm.chat(MESSAGES, segments=passages)
    pieces = list(llm.stream_chat(MESSAGES, segments=passages))
    assert "".join(piece.delta for piece in pieces) == whole.message.content == pieces[-1].message.content
    assert len(pieces) > 3
    assert [len(piece.message.content) for piece in pieces] == sorted(len(piece.message.content) for piece in pieces)
    assert pieces[-1].raw["usage"]["completion_tokens"] == whole.raw["usage"]["completion_tokens"]
    whole_text = llm.complete("The cat")
    pieces = list(llm.stream_complete("The cat"))
    assert "".join(piece.delta for piece in pieces) == whole_text.text == pieces[-1].text


async def test_async_is_sync(llm, passages):
    whole = llm.chat(MESSAGES, segments=passages).message.content
    assert (await llm.achat(MESSAGES, segments=passages)).message.content == whole
    pieces = [piece async for piece in await llm.astream_chat(MESSAGES, segments=passages)]
    assert "".join(piece.delta for piece in pieces) == whole
    text = llm.complete("The cat").text
    assert (await llm.acomplete("The cat")).text == text
    assert "".join([piece.delta async for piece in await llm.astream_complete("The cat")]) == text


@pytest.mark.parametrize("call", ["achat", "acomplete", "astream_chat", "astream_complete"])
async def test_the_loop_goes_on_while_the_model_works(llm, call, slow_model):
    prompt = MESSAGES if "chat" in call else QUESTION
    async with ticking() as ticks:
        result = await getattr(llm, call)(prompt)
        if "stream" in call:
            async for _ in result:
                pass
    assert ticks.count >= 5


@pytest.mark.slow
async def test_answers_side_by_side_are_those_one_by_one(llm, passages):
    alone = [llm.chat(MESSAGES, segments=[one]).message.content for one in passages]
    together = await asyncio.gather(*(llm.achat(MESSAGES, segments=[one]) for one in passages))
    assert [answer.message.content for answer in together] == alone


async def test_a_stream_that_is_left_early_stops_the_work(kb, llm, tokens_run):
    stream = await llm.astream_chat(MESSAGES, max_tokens=300)
    async for _ in stream:
        break
    await stream.aclose()
    await asyncio.sleep(0.2)
    tokens_run()
    await asyncio.sleep(0.2)
    assert tokens_run() == 0
    for _ in llm.stream_chat(MESSAGES, max_tokens=300):
        break
    assert llm.chat(MESSAGES).message.content


def test_options_of_a_call_win_over_fields(kb, llm):
    greedy = llm.chat(MESSAGES).message.content
    drawn = {"temperature": 1.0, "seed": 4, "max_tokens": 20, "top_p": 0.9, "top_k": 50}
    expected = kb.chat(USER, sampling=rc.Sampling(**drawn)).text
    assert llm.chat(MESSAGES, **drawn).message.content == expected != greedy
    assert RagCacheLLM(kb, **drawn).chat(MESSAGES).message.content == expected
    stop = greedy[3:5]
    for given in (stop, [stop]):
        assert llm.chat(MESSAGES, stop=given).message.content == greedy[: greedy.index(stop)]
    assert llm.chat(MESSAGES, max_tokens=None).message.content == greedy
    full = llm.chat(MESSAGES, segments=["The cat sat."], method="full")
    assert full.raw["method"] == "full"
    assert full.raw["hits"][0]["kv"] == "unused"


def test_metadata_says_what_the_model_is(kb, lm, llm):
    assert llm.metadata.context_window == lm.max_positions == 512
    assert (llm.metadata.model_name, llm.metadata.num_output) == (lm.name, 12)
    unlimited = RagCacheLLM(kb)
    assert (unlimited.max_tokens, unlimited.metadata.num_output) == (None, 256), "what the framework assumes"
    assert not llm.metadata.is_chat_model  # it has no chat template
    assert not llm.metadata.is_function_calling_model
    lm.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    try:
        assert llm.metadata.is_chat_model
    finally:
        lm.tokenizer.chat_template = None


def test_prompts_of_the_framework_go_through(kb, llm):
    template = PromptTemplate("Say {word}")
    assert llm.predict(template, word="no") == kb.complete("Say no", sampling=SAMPLING).text
    assert "".join(llm.stream(template, word="no")) == llm.predict(template, word="no")


def test_tokens_are_counted_by_the_frameworks_handler(llm):
    counter = TokenCountingHandler(tokenizer=str.split)
    llm.callback_manager = CallbackManager([counter])
    usage = llm.chat(MESSAGES).raw["usage"]
    assert counter.prompt_llm_token_count == usage["prompt_tokens"]
    assert counter.completion_llm_token_count == usage["completion_tokens"]


def test_an_answer_reports_itself(llm, passages, recorder):
    answer = llm.chat(MESSAGES, segments=passages)
    usage, timings = answer.raw["usage"], answer.raw["timings"]
    [load] = recorder.of(RagCacheKVLoadEvent)
    assert load.ids == [one.id for one in passages]
    assert load.handles == [one.handle for one in passages]
    assert load.origins == {"disk": 3}
    assert load.tokens == usage["cached_tokens"] + usage["created_tokens"] - 1  # BOS, the prefix
    [first] = recorder.of(RagCacheFirstTokenEvent)
    [prefill] = recorder.of(RagCachePrefillEvent)
    assert load.elapsed_s < first.ttft_s < prefill.total_s + 0.1
    for name, value in {**usage, **timings}.items():
        if name != "retrieve_s":
            assert getattr(prefill, name) == value, name
    assert (prefill.method, prefill.dropped) == ("reposition", 0)
    ours = [name for name in recorder.names() if name.startswith("RagCache")]
    assert ours == ["RagCacheKVLoadEvent", "RagCacheFirstTokenEvent", "RagCachePrefillEvent"]
    assert {"LLMChatStartEvent", "LLMChatEndEvent"} <= set(recorder.names())


# Handles are hints


def altered(handle: str) -> str:
    return handle[:-1] + ("0" if handle[-1] != "0" else "1")


@pytest.mark.parametrize("spoil", [altered, lambda handle: "x", lambda handle: "0" * 64, lambda handle: None])
def test_a_wrong_handle_serves_nothing_wrong(llm, passages, spoil):
    expected = llm.chat(MESSAGES, segments=passages).message.content
    spoiled = [rc.Passage(one.text, None, spoil(one.handle)) for one in passages]
    assert llm.chat(MESSAGES, segments=spoiled).message.content == expected


def test_a_handle_of_another_text_is_no_match_for_the_text(kb, llm, passages):
    swapped = [rc.Passage(passages[0].text, passages[1].id, passages[1].handle)]
    assert (
        llm.chat(MESSAGES, segments=swapped).message.content
        == kb.chat(USER, passages=[rc.Passage(passages[0].text)], sampling=SAMPLING).text
    )


def test_handles_of_another_model_or_store_are_computed_again(open_kb, tmp_path, other_lm, llm, passages):
    elsewhere = open_kb(tmp_path / "elsewhere", model=other_lm)
    elsewhere.ingest([rc.Document("a", TEXTS["cats"])])
    foreign = rc.Passage(TEXTS["cats"], "a#0", elsewhere.retrieve("cat", k=1)[0].handle)
    fresh = open_kb(tmp_path / "fresh")
    answer = RagCacheLLM(fresh, **SHORT).chat(MESSAGES, segments=[foreign])
    assert answer.message.content == llm.chat(MESSAGES, segments=[TEXTS["cats"]]).message.content
    assert answer.raw["usage"]["created_tokens"] >= len(TEXTS["cats"])  # a token a byte
    assert answer.raw["hits"][0]["kv"] == "computed"


def test_a_handle_of_another_tenant_is_no_hit(open_kb, tmp_path, llm, passages):
    tenant = RagCacheLLM(open_kb(tmp_path / "tenant", tenant="them"), **SHORT)
    answer = tenant.chat(MESSAGES, segments=passages)
    assert answer.message.content == llm.chat(MESSAGES, segments=passages).message.content
    assert {hit["kv"] for hit in answer.raw["hits"]} == {"computed"}
    assert not {hit["handle"] for hit in answer.raw["hits"]} & {one.handle for one in passages}


def test_a_deleted_block_is_computed_from_the_text_and_refused_without_it(kb, llm, passages):
    expected = llm.chat(MESSAGES, segments=passages).message.content
    kb.delete(list(TEXTS))
    answer = llm.chat(MESSAGES, segments=passages)
    assert answer.message.content == expected
    assert {hit["kv"] for hit in answer.raw["hits"]} == {"computed"}
    with pytest.raises(UnknownHandleError, match="send the text"):
        llm.chat(MESSAGES, segments=[{"handle": passages[0].handle}])
    with pytest.raises(UnknownHandleError, match="clubs#0"):
        llm.chat(MESSAGES, segments=[{"id": "clubs#0"}])


# Bad input


def test_what_is_no_segment_is_refused(llm):
    for bad in (["a", 7], [{"body": "a"}], [{}]):
        with pytest.raises(PromptError, match="no segment"):
            llm.chat(MESSAGES, segments=bad)
    with pytest.raises(PromptError, match="give a list"):
        llm.chat(MESSAGES, segments="a text")
    with pytest.raises(PromptError, match="no text"):
        llm.chat(MESSAGES, segments=[" "])


def test_messages_that_cannot_be_read_are_refused(llm):
    with pytest.raises(PromptError, match="message 1 has the role 'function'"):
        llm.chat([*MESSAGES, ChatMessage("x", role="function")])
    with pytest.raises(PromptError, match="message 0 holds a block of type 'image'"):
        llm.chat([ChatMessage(blocks=[ImageBlock(url="http://localhost/a.png")])])
    with pytest.raises(PromptError, match="no user message"):
        llm.chat([ChatMessage("x", role="system")])
    between = [PassageBlock(text="a"), TextBlock(text="and"), PassageBlock(text="b"), TextBlock(text="?")]
    with pytest.raises(PromptError, match="between two passages"):
        llm.chat([ChatMessage(blocks=between)], method="a3")


def test_bad_options_are_refused(kb, llm):
    with pytest.raises(ConfigError, match="'functions'"):
        llm.chat(MESSAGES, functions=[])
    with pytest.raises(ConfigError, match="'api_key'"):
        RagCacheLLM(kb, api_key="x")
    with pytest.raises(ConfigError, match="temperature"):
        RagCacheLLM(kb, temperature=-1.0)
    with pytest.raises(ConfigError, match="telepathy"):
        llm.chat(MESSAGES, method="telepathy")
    with pytest.raises(ContextTooLongError, match="512"):
        llm.chat(MESSAGES, segments=["word " * 200])
    with pytest.raises(ConfigError, match="pickled"):
        pickle.dumps(llm)


async def test_async_errors_are_the_same(llm):
    with pytest.raises(PromptError, match="no segment"):
        await llm.achat(MESSAGES, segments=[7])
    with pytest.raises(ContextTooLongError, match="512"):
        await llm.achat(MESSAGES, segments=["word " * 200])
    stream = await llm.astream_chat(MESSAGES, segments=[{"id": "nobody"}])
    with pytest.raises(UnknownHandleError):
        [piece async for piece in stream]


def test_what_another_model_thought_is_read_over(llm):
    answers = [
        llm.chat([ChatMessage("Hello"), ChatMessage(role="assistant", blocks=blocks), ChatMessage(QUESTION)])
        for blocks in ([ThinkingBlock(content="Greet back."), TextBlock(text="Hello!")], [TextBlock(text="Hello!")])
    ]
    assert answers[0].message.content == answers[1].message.content


async def test_a_last_message_of_the_models_own_is_continued(llm, kb):
    begun = "Jonas wears"
    own = kb.chat([*USER, {"role": "assistant", "content": begun}], sampling=SAMPLING)
    messages = [*MESSAGES, ChatMessage(role="assistant", content=begun)]
    *_, streamed = llm.stream_chat(messages)
    *_, astreamed = [step async for step in await llm.astream_chat(messages)]
    for answer in (llm.chat(messages), await llm.achat(messages), streamed, astreamed):
        assert answer.message.content == own.text
        assert answer.raw["usage"]["prompt_tokens"] == own.usage.prompt_tokens
    assert own.usage.prompt_tokens == llm.chat(MESSAGES).raw["usage"]["prompt_tokens"] + len(f" {begun}")
