"""The model's answers equal the engine's for all ways to pass passages, and only the rest of the prompt runs."""

import asyncio
import pickle
from collections.abc import Callable

import pytest
from li_texts import QUESTION, SHORT
from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock, ThinkingBlock
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.schema import NodeWithScore, TextNode
from waiting import ticking

import ragcache as rc
from llama_index.llms.ragcache import FusedPrompt, PassageBlock, RagCacheLLM
from llama_index.vector_stores.ragcache import HANDLE_KEY

SAMPLING = rc.Sampling(**SHORT)
USER = [{"role": "user", "content": QUESTION}]
MESSAGES = [ChatMessage(QUESTION)]


@pytest.fixture
def passages(kb) -> list[rc.Passage]:
    return [rc.Passage(hit.chunk.text, hit.chunk.id, hit.handle) for hit in kb.retrieve(QUESTION, k=3)]


def twice(ask: Callable[[], rc.Answer]) -> rc.Answer:
    """Return the second answer: the first computed the text before the passages, which is kept."""
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


def test_tokens_are_counted_by_the_frameworks_handler(llm):
    counter = TokenCountingHandler(tokenizer=str.split)
    llm.callback_manager = CallbackManager([counter])
    usage = llm.chat(MESSAGES).raw["usage"]
    assert counter.prompt_llm_token_count == usage["prompt_tokens"]
    assert counter.completion_llm_token_count == usage["completion_tokens"]


def test_what_another_model_thought_is_read_over(llm):
    answers = [
        llm.chat([ChatMessage("Hello"), ChatMessage(role="assistant", blocks=blocks), ChatMessage(QUESTION)])
        for blocks in ([ThinkingBlock(content="Greet back."), TextBlock(text="Hello!")], [TextBlock(text="Hello!")])
    ]
    assert answers[0].message.content == answers[1].message.content
