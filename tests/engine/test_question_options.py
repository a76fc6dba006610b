"""Options of questions: each is taken by every call that it concerns, and one that there is not is refused by name."""

from __future__ import annotations

import inspect

import pytest

import ragcache as rc
from ragcache.errors import ConfigError

QUESTION = "Where do dogs bark?"
TURNS = [{"role": "user", "content": QUESTION}]
CALLS = {
    "retrieve": lambda kb, **options: kb.retrieve(QUESTION, **options),
    "ask": lambda kb, **options: kb.ask(QUESTION, **options),
    "stream": lambda kb, **options: kb.stream(QUESTION, **options),
    "chat": lambda kb, **options: kb.chat(TURNS, **options),
    "stream_chat": lambda kb, **options: kb.stream_chat(TURNS, **options),
    "complete": lambda kb, **options: kb.complete(QUESTION, **options),
    "stream_completion": lambda kb, **options: kb.stream_completion(QUESTION, **options),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_option_that_there_is_not_is_refused_with_those_there_are(kb, call):
    with pytest.raises(ConfigError, match=r"no option timout_s, Filter; .*") as refused:
        CALLS[call](kb, timout_s=3, Filter={})
    listed = "mmr_lambda" if call == "retrieve" else "timeout_s"
    assert listed in str(refused.value)


async def test_so_it_is_from_an_event_loop(kb):
    for call in (kb.aretrieve, kb.aask, kb.acomplete):
        with pytest.raises(ConfigError, match="no option colour"):
            await call(QUESTION, colour="red")
    with pytest.raises(ConfigError, match="no option colour"):
        await kb.achat(TURNS, colour="red")
    for stream in (kb.astream(QUESTION, colour="red"), kb.astream_chat(TURNS, colour="red")):
        with pytest.raises(ConfigError, match="no option colour"):
            await anext(stream)


@pytest.mark.parametrize("call", CALLS)
def test_calls_for_an_event_loop_say_what_they_take_as_the_others_do(call):
    own, twin = (inspect.signature(getattr(rc.RagCache, name)) for name in (call, f"a{call}"))
    assert list(own.parameters.values()) == list(twin.parameters.values())
    assert str(own.parameters["options"].annotation).startswith("Unpack[")


def test_a_question_chooses_among_as_many_candidates_as_it_says(kb):
    for options in ({"fetch_k": 4}, {"fetch_k": 2}):
        wanted = [hit.chunk.id for hit in kb.retrieve(QUESTION, 2, mmr_lambda=0.01, **options)]
        answer = kb.ask(QUESTION, 2, mmr_lambda=0.01, sampling=rc.Sampling(1), **options)
        assert [hit.chunk.id for hit in answer.hits] == wanted
    with pytest.raises(ConfigError, match="fetch_k"):
        kb.chat(TURNS, k=2, mmr_lambda=0.5, fetch_k=1)


def test_a_conversation_keeps_or_does_not_and_nothing_else(kb):
    with pytest.raises(ConfigError, match="'forget' is unknown; choose one of last, keep"):
        kb.chat(TURNS, context="forget")
