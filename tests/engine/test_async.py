"""The engine from an event loop: same answers, a loop that runs on, work that stops when nobody wants it."""

from __future__ import annotations

import asyncio

import pytest

import ragcache as rc
from ragcache.errors import CancelledError, PromptError

SHORT = rc.Sampling(max_tokens=8)
QUESTION = "Where do dogs bark?"
TURNS = [{"role": "user", "content": QUESTION}]


async def events(stream):
    return [event async for event in stream]


async def test_async_twins_answer_alike(kb):
    assert [hit.chunk.id for hit in await kb.aretrieve(QUESTION, 2)] == [h.chunk.id for h in kb.retrieve(QUESTION, 2)]
    assert (await kb.aask(QUESTION, 2, sampling=SHORT)).text == kb.ask(QUESTION, 2, sampling=SHORT).text
    assert (await kb.achat(TURNS, k=2, sampling=SHORT)).text == kb.chat(TURNS, k=2, sampling=SHORT).text
    assert (await kb.acomplete("Once", sampling=SHORT)).text == kb.complete("Once", sampling=SHORT).text
    streams = [
        (kb.astream(QUESTION, 2, sampling=SHORT), kb.stream(QUESTION, 2, sampling=SHORT)),
        (kb.astream_chat(TURNS, k=2, sampling=SHORT), kb.stream_chat(TURNS, k=2, sampling=SHORT)),
        (kb.astream_completion("Once", sampling=SHORT), kb.stream_completion("Once", sampling=SHORT)),
    ]
    for one, other in streams:
        found, expected = await events(one), list(other)
        assert found[1:-1] == expected[1:-1]
        assert (type(found[0]), found[-1].answer.text) == (rc.Sources, expected[-1].answer.text)
    assert (await kb.aingest(rc.Document("new", "A new text."))).added == ["new"]
    assert await kb.adelete(["new", "absent"]) == ["new"]


async def test_many_at_once(kb):
    expected = kb.ask(QUESTION, 2, sampling=SHORT).text
    found = await asyncio.gather(*(kb.aask(QUESTION, 2, sampling=SHORT) for _ in range(12)))
    assert {answer.text for answer in found} == {expected}


@pytest.mark.usefixtures("slow_model")
async def test_the_loop_runs_on(kb):
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    seen = [ticks async for _ in kb.astream(QUESTION, 2, sampling=SHORT)]
    await kb.aask(QUESTION, 2, sampling=SHORT)
    ticking.cancel()
    assert ticks > 2 * len(seen)  # a blocked loop ticks once an event at most


async def test_a_closed_stream_stops_the_work(kb):
    long = rc.Sampling(max_tokens=100_000)
    stream = kb.astream(QUESTION, 1, sampling=long)
    await anext(stream)
    await stream.aclose()
    task = asyncio.create_task(kb.aask(QUESTION, 1, sampling=long))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(kb.close)  # waits for the threads: it would hang, had they gone on


async def test_a_stream_that_waits_when_the_store_is_closed_ends(kb):
    kb._threads._pool._max_workers = 1
    long = rc.Sampling(max_tokens=100_000)
    running = kb.astream(QUESTION, 1, sampling=long)
    await anext(running)
    waiting = asyncio.create_task(events(kb.astream(QUESTION, 1, sampling=SHORT)))
    await asyncio.sleep(0.05)
    closing = asyncio.create_task(asyncio.to_thread(kb.close))
    with pytest.raises(CancelledError):
        await waiting
    await running.aclose()
    await closing


def test_tokens_are_counted_without_special_ones(kb):
    assert kb.count_tokens("abc") == len(kb.lm.tokenizer("abc", add_special_tokens=False)["input_ids"])


# Many questions


QUESTIONS = ["Where do dogs bark?", "Where does the river rise?", "When does the club meet?", "Is the cat happy?"] * 2
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
