"""The language model takes whatever the engine's own options say, and hands it through."""

import inspect

import pytest
from engine_texts import READ
from llama_index.core.base.llms.types import ChatMessage

import ragcache as rc
from llama_index.llms.ragcache import RagCacheLLM
from llama_index.retrievers.ragcache import RagCacheRetriever
from ragcache.errors import ConfigError, TimedOutError

# The sampling's fields stand for it, and LlamaIndex cancels a task or closes a stream.
ELSEWHERE = {"sampling", "cancelled"}
GIVEN = {**READ, "timeout_s": 9.0}
MESSAGES = [ChatMessage("Hi")]


@pytest.fixture
def engine(kb, monkeypatch) -> dict[str, object]:
    """What the engine's streams were last given."""
    given: dict[str, object] = {}
    answer = kb.complete("Hi", sampling=rc.Sampling(1))

    def stream(prompt, **options):
        given.clear()
        given.update(options)
        yield rc.Done(answer)

    async def astream(prompt, **options):
        given.clear()
        given.update(options)
        yield rc.Done(answer)

    for name in ("stream_chat", "stream_completion"):
        monkeypatch.setattr(kb, name, stream)
        monkeypatch.setattr(kb, f"a{name}", astream)
    return given


def test_no_option_of_the_engine_is_absent():
    assert set(GIVEN) == set(rc.GenerationOptions.__annotations__) - ELSEWHERE
    assert {*GIVEN, "context", "drop_turns"} <= set(RagCacheLLM.model_fields)
    taken = {"filter" if name == "filters" else name for name in inspect.signature(RagCacheRetriever).parameters}
    assert set(rc.RetrieveOptions.__annotations__) <= taken


async def test_fields_and_arguments_of_a_call_reach_the_engine(kb, engine):
    of_chats = {"context": "keep", "drop_turns": False}
    for model, options in ((RagCacheLLM(kb, **GIVEN, **of_chats), {}), (RagCacheLLM(kb), {**GIVEN})):
        chats = options and {**of_chats, **options}
        model.chat(MESSAGES, **chats)
        assert engine.items() >= {**GIVEN, **of_chats}.items()
        engine.clear()
        await model.achat(MESSAGES, **chats)
        assert engine.items() >= {**GIVEN, **of_chats}.items()
        engine.clear()
        model.complete("Hi", **options)
        assert engine.items() >= GIVEN.items()
        engine.clear()
        await model.acomplete("Hi", **options)
        assert engine.items() >= GIVEN.items()
        assert not of_chats.keys() & engine  # a raw prompt has no turns


def test_what_cannot_be_is_refused(llm):
    for options, message in (
        ({"order": "random"}, "order 'random' is unknown"),
        ({"context": "forget"}, "context 'forget' is unknown"),
        ({"timeout_s": 0}, "timeout_s is 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            llm.chat(MESSAGES, **options)
    with pytest.raises(ConfigError, match="no option 'context'"):
        llm.complete("Hi", context="keep")
    with pytest.raises(ConfigError, match='context="keep" takes passages in the messages'):
        llm.chat(MESSAGES, segments=["The cat sat."], context="keep")


def test_an_answer_may_take_so_long(llm):
    with pytest.raises(TimedOutError, match="no answer within 1e-06 s"):
        llm.chat(MESSAGES, timeout_s=1e-6)
