"""The chat model takes whatever the engine's own options say, and hands it through."""

import pytest
from engine_texts import READ
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.messages.content import create_text_block

import ragcache as rc
from langchain_ragcache import ChatRagCache, RagCacheRetriever
from ragcache.errors import ConfigError
from ragcache_demo.bag_of_words import BagOfWords

# Options that other names stand for: the sampling's fields, `timeout`, and a task or stream that is cancelled.
ELSEWHERE = {"sampling", "timeout_s", "cancelled"}
GIVEN = {**READ, "context": "keep", "drop_turns": False}


class Engine:
    """Notes what a store's calls are given, and goes on."""

    def __init__(self, kb: rc.RagCache, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options: dict[str, object] = {}
        answer = kb.chat([{"role": "user", "content": "Hi"}], sampling=rc.Sampling(1))

        def chat(messages, **options):
            self.options = options
            return answer

        def stream_chat(messages, **options):
            self.options = options
            yield rc.Done(answer)

        async def achat(messages, **options):
            return chat(messages, **options)

        async def astream_chat(messages, **options):
            self.options = options
            yield rc.Done(answer)

        for call in (chat, stream_chat, achat, astream_chat):
            monkeypatch.setattr(kb, call.__name__, call)


@pytest.fixture
def kb(tmp_path, tiny) -> rc.RagCache:
    with rc.RagCache.open(tmp_path / "kb", model=tiny, embedder=BagOfWords()) as kb:
        yield kb


def test_no_option_of_the_engine_is_absent():
    assert set(GIVEN) - {"context", "drop_turns"} == set(rc.GenerationOptions.__annotations__) - ELSEWHERE
    assert {*GIVEN, "timeout"} <= set(ChatRagCache.model_fields)
    assert set(rc.RetrieveOptions.__annotations__) <= set(RagCacheRetriever.model_fields)


async def test_fields_and_arguments_of_a_call_reach_the_engine(kb, monkeypatch):
    engine = Engine(kb, monkeypatch)
    for model, options in (
        (ChatRagCache(kb=kb, timeout=9, **GIVEN), {}),
        (ChatRagCache(kb=kb), {"timeout": 9, **GIVEN}),
    ):
        for way in ("invoke", "stream", "ainvoke", "astream"):
            engine.options = {}
            if way == "invoke":
                model.invoke("Hi", **options)
            elif way == "stream":
                list(model.stream("Hi", **options))
            elif way == "ainvoke":
                await model.ainvoke("Hi", **options)
            else:
                [chunk async for chunk in model.astream("Hi", **options)]
            assert engine.options.items() >= {**GIVEN, "timeout_s": 9}.items(), way


def test_what_a_call_says_wins(kb, monkeypatch):
    engine = Engine(kb, monkeypatch)
    ChatRagCache(kb=kb, **GIVEN).invoke("Hi", hint=True, evict=None, context="last")
    assert engine.options.items() >= {**GIVEN, "hint": True, "evict": None, "context": "last"}.items()


def test_answers_of_other_options_are_other_answers_to_a_cache(kb):
    own = ChatRagCache(kb=kb)._identifying_params
    for name, value in GIVEN.items():
        assert ChatRagCache(kb=kb, **{name: value})._identifying_params != own, name


def test_what_cannot_be_is_refused_by_the_engine(kb):
    model = ChatRagCache(kb=kb)
    for options, message in (
        ({"order": "random"}, "order 'random' is unknown"),
        ({"context": "forget"}, "context 'forget' is unknown"),
        ({"timeout": 0}, "timeout_s is 0"),
        ({"timeout_s": 3}, "does not take timeout_s"),
    ):
        with pytest.raises(ConfigError, match=message):
            model.invoke("Hi", **options)


def test_a_conversation_keeps_its_passages(kb):
    """What was read at the first turn is not read again at the second: the engine's own figures say so."""
    turns = [
        HumanMessage(content_blocks=[create_text_block("The cat sat. " * 8, ragcache={}), create_text_block("Who?")]),
        HumanMessage(content_blocks=[create_text_block("The dog ran. " * 8, ragcache={}), create_text_block("And?")]),
    ]
    model = ChatRagCache(kb=kb, context="keep", method="reposition", max_tokens=4)
    first = model.invoke(turns[:1])
    second = model.invoke([turns[0], AIMessage(first.text), turns[1]])
    sources = [(one["text"], one["kv"]) for one in second.response_metadata["sources"]]
    assert [text for text, _ in sources] == ["The dog ran. " * 8]
    read = second.usage_metadata["input_tokens"]
    plain = ChatRagCache(kb=kb, method="reposition", max_tokens=4).invoke([turns[0], AIMessage(first.text), turns[1]])
    assert second.response_metadata["computed_tokens"] < plain.response_metadata["computed_tokens"] < read
