"""Questions side by side: the answers of one by one, in fewer passes, and one failure ends all."""

from __future__ import annotations

import threading

import pytest

import ragcache as rc
from ragcache.errors import CancelledError, ConfigError, PromptError

QUESTIONS = ["Where do dogs bark?", "Where does the river rise?", "When does the club meet?", "Is the cat happy?"] * 2
SHORT = rc.Sampling(max_tokens=6)
LONG = rc.Sampling(max_tokens=200)


@pytest.mark.usefixtures("slow_model")
async def test_answers_are_those_of_one_by_one_in_fewer_passes(kb):
    start = kb.pass_stats().passes
    together = kb.ask_many(iter(QUESTIONS), 2, sampling=SHORT)
    middle = kb.pass_stats().passes
    alone = [kb.ask(question, 2, sampling=SHORT) for question in QUESTIONS]
    assert middle - start < kb.pass_stats().passes - middle
    expected = [(answer.text, [hit.chunk.id for hit in answer.hits]) for answer in alone]
    assert [(answer.text, [hit.chunk.id for hit in answer.hits]) for answer in together] == expected
    assert [answer.text for answer in await kb.aask_many(QUESTIONS, 2, sampling=SHORT)] == [a.text for a in alone]
    assert kb.ask_many([]) == []


def test_the_first_error_ends_the_others(kb):
    assert kb.ask(QUESTIONS[0], sampling=LONG).usage.completion_tokens == 200
    before = kb.pass_stats().passes
    with pytest.raises(PromptError, match="the question is empty"):
        kb.ask_many(["  ", *QUESTIONS * 10], sampling=LONG)
    assert kb.pass_stats().passes - before < 200


def test_what_cannot_be_asked_is_refused(kb):
    with pytest.raises(ConfigError, match="give a list of questions"):
        kb.ask_many("Where do dogs bark?")
    with pytest.raises(ConfigError, match="temperature"):
        kb.ask_many(QUESTIONS, temperature=1)
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(CancelledError):
        kb.ask_many(QUESTIONS, cancelled=cancelled)
