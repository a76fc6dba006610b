"""The chat model takes all options of the engine, and passes them on."""

from dataclasses import fields

import pytest
from engine_texts import FORMS, READ, SAMPLED

import ragcache as rc
from langchain_ragcache import ChatRagCache, RagCacheRetriever

# Options that other names stand for: the sampling's fields, `timeout`, and a task or stream that is cancelled.
ELSEWHERE = {"sampling", "timeout_s", "cancelled"}
GIVEN = {**READ, "context": "keep", "drop_turns": False}


@pytest.fixture
def kb(open_kb) -> rc.RagCache:
    return open_kb()


def test_no_option_of_the_engine_is_absent():
    assert set(GIVEN) - {"context", "drop_turns"} == set(rc.GenerationOptions.__annotations__) - ELSEWHERE
    assert {*GIVEN, "timeout"} <= set(ChatRagCache.model_fields)
    assert {*SAMPLED, *FORMS} == {field.name for field in fields(rc.Sampling)}
    assert set(rc.RetrieveOptions.__annotations__) <= set(RagCacheRetriever.model_fields)


async def test_fields_and_arguments_of_a_call_reach_the_engine(kb, recorded):
    engine = recorded(kb)
    for model, options in (
        (ChatRagCache(kb=kb, timeout=9, **GIVEN, **SAMPLED), {}),
        (ChatRagCache(kb=kb), {"timeout": 9, **GIVEN, **SAMPLED}),
    ):
        for way in ("invoke", "stream", "ainvoke", "astream"):
            engine.clear()
            if way == "invoke":
                model.invoke("Hi", **options)
            elif way == "stream":
                list(model.stream("Hi", **options))
            elif way == "ainvoke":
                await model.ainvoke("Hi", **options)
            else:
                [chunk async for chunk in model.astream("Hi", **options)]
            assert engine.items() >= {**GIVEN, "timeout_s": 9}.items(), way
            assert engine["sampling"] == rc.Sampling(**SAMPLED), way


def test_forms_other_names_and_stops_reach_the_engine(kb, recorded):
    engine, plain = recorded(kb), ChatRagCache(kb=kb)
    for model, given, wanted in (
        *((plain, {name: value}, {name: value}) for name, value in FORMS.items()),
        (ChatRagCache(kb=kb, max_completion_tokens=3), {}, {"max_tokens": 3}),
        (plain, {"max_completion_tokens": 3}, {"max_tokens": 3}),
        (plain, {"stop": "x"}, {"stop": ["x"]}),
        (ChatRagCache(kb=kb, stop="x"), {}, {"stop": ["x"]}),
        (ChatRagCache(kb=kb, stop="x"), {"stop": []}, {}),
    ):
        model.invoke("Hi", **given)
        assert engine["sampling"] == rc.Sampling(**wanted)


def test_what_a_call_says_wins(kb, recorded):
    engine = recorded(kb)
    ChatRagCache(kb=kb, **GIVEN).invoke("Hi", hint=True, enable_thinking=None, context="last")
    assert engine.items() >= {**GIVEN, "hint": True, "enable_thinking": None, "context": "last"}.items()


def test_answers_of_other_options_are_other_answers_to_a_cache(kb):
    own = ChatRagCache(kb=kb)._identifying_params
    for name, value in GIVEN.items():
        assert ChatRagCache(kb=kb, **{name: value})._identifying_params != own, name
