"""The ordering that lengthens shared prefixes, against all orders there are."""

from itertools import permutations, takewhile
from operator import eq

from hypothesis import given, settings
from hypothesis import strategies as st

import ragcache as rc
from ragcache.engine.prompts import ReadCounts, relevance_hint, shared_order

SHORT = rc.Sampling(max_tokens=4)


def known_of(kept):
    def known(ids):
        return max((sum(takewhile(bool, map(eq, ids, other))) for other in kept), default=0)

    return known


PASSAGES = [(10, 11), (20,), (30, 31, 32), (10, 12), (40, 41)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.permutations(range(5)), max_size=4), st.permutations(range(5)), st.integers(0, 4))
def test_no_order_shares_more(earlier, asked, count):
    """Try all 24 orders of up to four passages."""
    prefix = (1, 2)
    kept = [[*prefix, *(id for rank in order for id in PASSAGES[rank]), 99] for order in earlier]
    known = known_of(kept)
    chosen = [PASSAGES[rank] for rank in asked[:count]]
    order = shared_order(known, ReadCounts(), prefix, chosen)
    assert sorted(order) == list(range(count))
    longest = max(
        (known([*prefix, *(id for rank in one for id in chosen[rank])]) for one in permutations(range(count))),
        default=0,
    )
    assert known([*prefix, *(id for rank in order for id in chosen[rank])]) == longest


def test_what_is_not_known_goes_by_how_often_it_was_read():
    counts = ReadCounts()
    counts.count([PASSAGES[2], PASSAGES[4]])
    counts.count([PASSAGES[4]])
    assert shared_order(lambda ids: 0, counts, (), PASSAGES) == [4, 2, 0, 1, 3]
    assert shared_order(lambda ids: 0, ReadCounts(), (), PASSAGES) == [0, 1, 2, 3, 4]


def test_the_hint_names_places():
    assert relevance_hint([0, 1, 2]) == relevance_hint([]) == ""
    assert relevance_hint([2, 0, 1]) == "Passages by relevance: 2, 3, 1.\n"


def ask(kb, question, hits, **options):
    return kb.ask(question, hits=hits, sampling=SHORT, **{"method": "full", "order": "shared", **options})


def test_passages_are_read_in_the_shared_order_with_the_hint(kb):
    one, two, three = kb.retrieve("dogs", 3)
    first = ask(kb, "Where do dogs bark?", [one, two])
    assert [hit.chunk.id for hit in first.hits] == [one.chunk.id, two.chunk.id]
    second = ask(kb, "Is the cat happy?", [three, two, one])
    assert [hit.chunk.id for hit in second.hits] == [one.chunk.id, two.chunk.id, three.chunk.id]
    assert [hit.kv for hit in second.hits] == ["exact", "exact", "unused"]
    hint = len(kb.lm.tokenizer("Passages by relevance: 3, 2, 1.\n", add_special_tokens=False)["input_ids"])
    plain = ask(kb, "Is the cat happy?", [three, two, one], order="relevance")
    bare = ask(kb, "Is the cat happy?", [three, two, one], hint=False)
    assert second.usage.prompt_tokens == plain.usage.prompt_tokens + hint
    assert bare.usage.prompt_tokens == plain.usage.prompt_tokens
    assert [hit.chunk.id for hit in plain.hits] == [three.chunk.id, two.chunk.id, one.chunk.id]
    assert bare.text == ask(kb, "Is the cat happy?", [one, two, three], method_options={"reuse": False}).text


def test_a_passage_is_read_once(kb):
    one, two, _ = kb.retrieve("dogs", 3)
    assert [hit.chunk.id for hit in ask(kb, "Where?", [one, two, one]).hits] == [one.chunk.id, two.chunk.id]


def test_methods_that_read_blocks_keep_the_order(kb):
    hits = kb.retrieve("dogs", 3)
    ask(kb, "Where do dogs bark?", hits[::-1])
    answer = ask(kb, "Where do dogs bark?", hits, method="reposition")
    assert [hit.chunk.id for hit in answer.hits] == [hit.chunk.id for hit in hits]
