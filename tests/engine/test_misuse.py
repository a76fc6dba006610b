"""What is called wrongly, or too late, says so and names the way out; nothing is lost by it."""

from __future__ import annotations

import pytest

import ragcache as rc
from ragcache.errors import ConfigError, PromptError, StoreClosedError

QUESTION = "Where do dogs bark?"
ONE = rc.Sampling(max_tokens=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda kb: kb.ask(QUESTION, max_tokens=5),
            r"no option max_tokens; say sampling=rc.Sampling\(max_tokens=\.\.\.\)",
        ),
        (lambda kb: kb.chat([], temperature=1, top_p=0.5), r"rc.Sampling\(temperature=\.\.\., top_p=\.\.\.\)"),
        (lambda kb: kb.ask(QUESTION, colour="red"), "no option colour; the options are search, filter"),
        (lambda kb: kb.retrieve(QUESTION, max_tokens=5), "no option max_tokens; the options are search"),
        (
            lambda kb: kb.chat("hello"),
            "messages is 'hello', of type str; give a list such as .*`ask` takes a lone question",
        ),
        (lambda kb: kb.chat({"role": "user", "content": "hello"}), "of type dict; give a list such as"),
        (lambda kb: kb.ask(None), "question is None, of type NoneType; give its text"),
        (lambda kb: kb.retrieve(5), "question is 5, of type int; give its text, or its vector"),
        (lambda kb: kb.ask(QUESTION, "3"), "k is '3', of type str; give a number, at least 1"),
        (
            lambda kb: kb.ask(QUESTION, sampling={"max_tokens": 5}),
            r"of type dict; give rc.Sampling\(max_tokens=\.\.\.\)",
        ),
        (lambda kb: kb.ask_many(QUESTION), "give a list of questions"),
        (lambda kb: kb.ingest(5), "inputs is 5, of type int; give paths, folders, or rc.Document objects"),
    ],
)
def test_a_wrong_argument_is_named_with_the_way_out(kb, call, message):
    with pytest.raises(ConfigError, match=message):
        call(kb)
    assert kb.ask(QUESTION, k=1, sampling=ONE).hits


@pytest.mark.parametrize("field", ["max_tokens", "temperature", "top_k", "min_p", "seed"])
def test_a_sampling_field_of_another_type_is_named(field):
    with pytest.raises(ConfigError, match=f"{field} is 'much'.* give a number"):
        rc.Sampling(**{field: "much"})


async def test_a_closed_store_says_so(kb):
    kb.close()
    kb.close()
    calls = [
        lambda: kb.ask(QUESTION),
        lambda: kb.retrieve(QUESTION),
        lambda: kb.chat([{"role": "user", "content": QUESTION}]),
        lambda: kb.complete(QUESTION),
        lambda: kb.ingest(rc.Document("new", "Owls hunt.")),
        lambda: kb.delete("dogs"),
    ]
    for call in calls:
        with pytest.raises(StoreClosedError, match="closed; open it again"):
            call()
    with pytest.raises(StoreClosedError):
        await kb.aask(QUESTION)
    with pytest.raises(StoreClosedError):
        _ = [event async for event in kb.astream(QUESTION)]


HALF = f"{QUESTION} \ud83d"


@pytest.mark.parametrize(
    "call",
    [
        lambda kb: kb.ask(HALF, k=1),
        lambda kb: kb.retrieve(HALF, k=1),
        lambda kb: kb.retrieve(HALF, k=1, search="text"),
        lambda kb: kb.chat([{"role": "user", "content": HALF}]),
        lambda kb: kb.chat([{"role": "user", "content": [rc.Passage(HALF), QUESTION]}]),
        lambda kb: kb.complete(HALF),
    ],
)
def test_half_of_a_surrogate_pair_is_named(kb, call):
    with pytest.raises(PromptError, match="half of a surrogate pair"):
        call(kb)
    assert kb.ask(QUESTION, k=1, sampling=ONE).hits
