"""The language model takes all options of the engine, and passes them on."""

import inspect
from dataclasses import fields

import pytest
from engine_texts import FORMS, READ, SAMPLED
from llama_index.core.base.llms.types import ChatMessage

import ragcache as rc
from llama_index.llms.ragcache import RagCacheLLM
from llama_index.retrievers.ragcache import RagCacheRetriever

# The sampling's fields stand for it, and LlamaIndex cancels a task or closes a stream.
ELSEWHERE = {"sampling", "cancelled"}
GIVEN = {**READ, "timeout_s": 9.0}
MESSAGES = [ChatMessage("Hi")]


@pytest.fixture
def engine(kb, recorded) -> dict[str, object]:
    return recorded(kb)


def test_no_option_of_the_engine_is_absent():
    assert set(GIVEN) == set(rc.GenerationOptions.__annotations__) - ELSEWHERE
    assert {*GIVEN, "context", "drop_turns"} <= set(RagCacheLLM.model_fields)
    assert {*SAMPLED, *FORMS} == {field.name for field in fields(rc.Sampling)}
    taken = {"filter" if name == "filters" else name for name in inspect.signature(RagCacheRetriever).parameters}
    assert set(rc.RetrieveOptions.__annotations__) <= taken


async def test_fields_and_arguments_of_a_call_reach_the_engine(kb, engine):
    of_chats = {"context": "keep", "drop_turns": False}
    right = {**GIVEN, "sampling": rc.Sampling(**SAMPLED)}
    given = {**GIVEN, **SAMPLED}
    for model, options in ((RagCacheLLM(kb, **given, **of_chats), {}), (RagCacheLLM(kb, max_tokens=2), given)):
        chats = options and {**of_chats, **options}
        model.chat(MESSAGES, **chats)
        assert engine.items() >= {**right, **of_chats}.items()
        engine.clear()
        await model.achat(MESSAGES, **chats)
        assert engine.items() >= {**right, **of_chats}.items()
        engine.clear()
        model.complete("Hi", **options)
        assert engine.items() >= right.items()
        engine.clear()
        await model.acomplete("Hi", **options)
        assert engine.items() >= right.items()
        assert not of_chats.keys() & engine  # a raw prompt has no turns


def test_forms_stops_and_absent_limits_reach_the_engine(kb, engine):
    llm = RagCacheLLM(kb, max_tokens=3)
    for given, wanted in (
        *(({name: value}, {name: value}) for name, value in FORMS.items()),
        ({"stop": "x"}, {"stop": "x"}),
        ({"stop": None}, {}),
        ({"max_tokens": None}, {}),
    ):
        llm.chat(MESSAGES, **given)
        assert engine["sampling"] == rc.Sampling(3, **wanted)
