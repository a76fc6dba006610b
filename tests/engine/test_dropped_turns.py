"""Conversations that outgrow the model: what is left of them is read as if nothing else had been said."""

import logging

import pytest
from engine_texts import TEXTS, said, user
from transformers import PreTrainedTokenizerFast

import ragcache as rc
from ragcache.engine.conversation import Conversation
from ragcache.engine.prompts import Prompts
from ragcache.errors import ContextTooLongError
from ragcache.prompt import NOTHING_SHOWN

LONGEST = 512  # of the tiny model, whose tokens are bytes
SHORT = rc.Sampling(max_tokens=4)
SYSTEM = {"role": "system", "content": "Be kind."}


@pytest.fixture
def kb(open_kb):
    """A store without documents."""
    return open_kb()


def talk(pairs, last="And now?"):
    """The system message, so many questions with answers of about 50 tokens together, and a question."""
    middle = [one for n in range(pairs) for one in (user(f"What is number {n} of it?"), said(f"Number {n} is it."))]
    return [SYSTEM, *middle, user(last)]


def called(number, content="twelve degrees"):
    call = {"id": f"c{number}", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": content},
    ]


def read(kb, messages, **options):
    answer = kb.chat(messages, sampling=SHORT, method="full", **options)
    return answer.text, answer.usage.prompt_tokens


@pytest.mark.parametrize("context", ["last", "keep"])
def test_the_oldest_pairs_go_and_the_rest_is_read_alone(kb, caplog, context):
    caplog.set_level(logging.INFO)
    answer = kb.chat(talk(30), sampling=SHORT, method="full", context=context)
    gone = answer.dropped_turns
    assert gone > 0
    assert gone % 2 == 0
    assert f"its {gone} oldest messages are left out" in caplog.text
    rest = talk(30)
    del rest[1 : 1 + gone]
    assert (answer.text, answer.usage.prompt_tokens) == read(kb, rest, context=context)
    assert answer.usage.prompt_tokens <= LONGEST - 4
    # No more than an eighth of the context goes beyond what has to, and a pair.
    more = [SYSTEM, *talk(30)[1 + gone - 2 :]]
    assert read(kb, more)[1] > LONGEST - 4 - LONGEST // 8 - 60
    assert kb.chat(rest, sampling=SHORT).dropped_turns == 0
    assert answer.to_json()["dropped_turns"] == gone


def test_the_beginning_stays_the_same_for_some_turns(kb):
    """Else every turn would be computed as a whole."""
    gone = [kb.chat(talk(pairs), sampling=SHORT, method="full").dropped_turns for pairs in range(6, 30)]
    assert gone == sorted(gone)
    some = [one for one in gone if one]
    assert 3 < len(set(some)) <= len(some) * 0.75


def test_it_can_be_switched_off(kb):
    for options in ({}, {"k": 2}, {"context": "keep"}):
        with pytest.raises(ContextTooLongError, match=r"oldest messages, or pass drop_turns=True"):
            kb.chat(talk(30), drop_turns=False, method="full", **options)
    fits = talk(6)
    assert kb.chat(fits, drop_turns=False, sampling=SHORT).dropped_turns == 0


def test_what_may_not_go_is_named(kb):
    for last in ("word " * 200, rc.Passage("word " * 200)):
        with pytest.raises(ContextTooLongError, match="shorten these"):
            kb.chat([*talk(3)[:-1], user(last, "What?")])
    with pytest.raises(ContextTooLongError, match="ask a shorter one"):
        kb.chat([user("word " * 200)])


def test_calls_of_tools_go_with_their_results(kb):
    """Before the last question with it; behind it the oldest first, and never the newest."""
    for messages in (
        [SYSTEM, user("How is it?"), *called(1), *called(2), said("Warm."), *talk(11)[1:]],
        [SYSTEM, user("How is it?"), *called(1), *called(2, "rain " * 70), *called(3, "sun " * 40)],
    ):
        answer = kb.chat(messages, sampling=SHORT, method="full", context="last")
        rest = [message for rank, message in enumerate(messages) if rank not in left_out(messages, answer)]
        assert answer.dropped_turns == len(messages) - len(rest) > 0
        assert (answer.text, answer.usage.prompt_tokens) == read(kb, rest)
        ids = {call["id"] for one in rest for call in one.get("tool_calls", ())}
        assert {one["tool_call_id"] for one in rest if one["role"] == "tool"} == ids
    assert rest[:2] == messages[:2]
    assert rest[-2:] == messages[-2:]


def left_out(messages, answer):
    """The oldest messages but system messages and the last question, as many as the answer says."""
    last = max(rank for rank, one in enumerate(messages) if one["role"] == "user")
    may_go = [rank for rank, one in enumerate(messages) if one["role"] != "system" and rank != last]
    return may_go[: answer.dropped_turns]


def test_groups():
    def old(*roles):
        calls = {"c": called(1)[0], "t": called(1)[1], "s": SYSTEM, "u": user("?"), "a": said("!")}
        return Conversation(None, [calls[role] for role in roles]).old

    assert old(*"su") == []
    assert old(*"suauau") == [[1, 2], [3, 4]]
    assert old(*"auau") == [[0], [1, 2]]
    assert old(*"suctctau") == [[1, 2, 3, 4, 5, 6]]
    assert old(*"uctctctt") == [[1, 2], [3, 4]]
    assert old(*"uauct") == [[0, 1]]
    assert old(*"uauctct") == [[0, 1], [3, 4]]
    assert old(*"usaua") == [[0, 2]]
    assert old(*"uau") == [[0, 1]]


@pytest.mark.parametrize("context", ["last", "keep"])
def test_passages_have_the_room_that_they_had_at_first(open_kb, context):
    """Turns go for those that are found, and come back where these alone are too much."""
    with open_kb(texts=TEXTS) as kb:
        options = {"k": 2, "sampling": SHORT, "method": "full", "context": context}
        first = kb.chat(talk(0, "Where do dogs bark?"), **options)
        later = kb.chat(talk(10, "Where do dogs bark?"), **options)
        assert [hit.chunk.id for hit in later.hits] == [hit.chunk.id for hit in first.hits]
        assert later.dropped_turns > kb.chat(talk(10), sampling=SHORT).dropped_turns
        assert later.dropped == 0
        kb.ingest(rc.Document(f"d{n}", f"Dogs bark at night, says number {n}. " * 4) for n in range(12))
        many = kb.chat(talk(3, "Where do dogs bark?"), **{**options, "k": 30}, on_overflow="trim")
        assert many.dropped > 0
        assert many.dropped_turns == 0


def test_passages_in_the_messages_stay(kb):
    passage = rc.Passage("The cat sleeps on the warm stove all day long. " * 4)
    for context in ("last", "keep"):
        answer = kb.chat([*talk(8)[:-1], user(passage, "Why?")], sampling=SHORT, context=context)
        assert len(answer.hits) == 1
        assert answer.dropped_turns > 0


def test_a_kept_conversation_finds_what_its_later_turns_read(open_kb):
    """Turns keep their places when earlier ones are gone, and with them their passages."""
    with open_kb(texts=TEXTS) as kb:
        messages, options = [SYSTEM], {"k": 1, "context": "keep", "sampling": SHORT, "method": "full"}
        for n in range(9):
            messages.append(user(f"Where do dogs bark, and who says so, number {n}?"))
            answer = kb.chat(messages, **options)
            messages.append(said(answer))
        assert answer.dropped_turns > 0
        assert answer.usage.prompt_tokens <= LONGEST
        assert answer.hits


HUGE = "All work and no play. " * 180_000  # four megabytes


@pytest.fixture
def tokenised(monkeypatch):
    """Lengths of the texts that a tokenizer has been given."""
    lengths, original = [], PreTrainedTokenizerFast.__call__

    def call(self, text, *args, **options):
        lengths.append(len(text) if isinstance(text, str) else sum(map(len, text)))
        return original(self, text, *args, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", call)
    return lengths


@pytest.mark.parametrize(
    "ask",
    [
        lambda kb: kb.ask(HUGE),
        lambda kb: kb.ask("Hm?", system=HUGE, method="full"),
        lambda kb: kb.complete(HUGE),
        lambda kb: kb.chat([user(HUGE)]),
        lambda kb: kb.chat([user(HUGE)], k=2),
        lambda kb: kb.chat([user(HUGE)], k=2, context="keep"),
        lambda kb: kb.chat([user("Hm?")], system=HUGE, method="full"),
        lambda kb: kb.chat([{"role": "system", "content": HUGE}, user("Hm?")]),
        lambda kb: kb.chat([user(HUGE), said("Hm."), user("Hm?")], drop_turns=False),
    ],
)
def test_text_that_can_never_fit_is_refused_before_it_is_tokenised(kb, tokenised, ask):
    tokenised.clear()
    with pytest.raises(ContextTooLongError, match=r"3,960,\d\d\d characters.* 512 tokens"):
        ask(kb)
    assert sum(tokenised) < 100_000


@pytest.mark.parametrize("options", [{}, {"k": 2}, {"k": 2, "context": "keep"}])
def test_old_turns_that_can_never_fit_go_before_they_are_tokenised(kb, tokenised, options):
    rest = [user("Cats?"), said("Yes."), user("And dogs?")]
    kb.ingest([rc.Document("cats", TEXTS["cats"])])
    without = kb.chat(rest, sampling=SHORT, method="full", **options)
    tokenised.clear()
    for old in ([user(HUGE)], [user("Hm?"), said(HUGE)]):
        answer = kb.chat([*old, *rest], sampling=SHORT, method="full", **options)
        assert (answer.text, answer.dropped_turns) == (without.text, len(old))
    assert sum(tokenised) < 100_000


def test_a_huge_history_is_not_read_again_and_again(kb, tokenised):
    turns = talk(2000)
    tokenised.clear()
    assert kb.chat(turns, sampling=SHORT, method="full").dropped_turns > 3900
    assert sum(tokenised) < 2 * sum(len(one["content"]) for one in turns)


def test_old_turns_go_in_whole_steps(lm):
    """Else each later prompt would begin otherwise."""
    prompts = Prompts(lm, None, None)
    talks = (Conversation(lm.tokenizer, talk(n)) for n in range(0, 900, 9))
    gone = [prompts.bounded(one, NOTHING_SHOWN, drops=True).num_gone for one in talks]
    assert gone == sorted(gone)
    assert gone[-1] > 0
    assert len(set(gone)) <= 1 + 900 * 60 // (16 * LONGEST)
