"""Contexts of several turns against one plain forward: a passage sees itself alone, all else what comes before it."""

import pytest
from families import assert_same, causal_logits, figure_2, oracle_logits_of, tiny
from kit.makers import each, made_by

import ragcache as rc
from ragcache.engine.caches.prefix_cache import PrefixCache
from ragcache.errors import ConfigError, PromptError, StaleBlockError
from ragcache.fusion import get_method
from ragcache.fusion.layout import lay_out
from ragcache.kv.exact import read_cache
from ragcache.models.trained_tokens import TrainedTokens
from ragcache.prompt import Passages, Text

TRAINED = TrainedTokens("link", link_tokens=2, link_slots=4, first_link_id=150, kv_start_id=160, kv_end_id=161)
TURNS = [
    ("text", [3, 4, 5]),
    ("passages", [[10, 11, 12, 13, 14, 15], [20, 21, 22]]),
    ("text", [6, 7, 8, 9]),  # a question, its answer, and what opens the next turn
    ("passages", [[30, 31, 32, 33]]),
    ("text", [40, 41]),
    ("passages", []),
    ("text", [42, 43]),
    ("passages", [[10, 11, 12], [13, 14, 15]]),
    ("text", [44, 45, 46]),
]


family = each(["llama", "mistral-window", "gemma3", "smollm3"], tiny)
trained = made_by(tiny, "llama", TRAINED)


def parts_of(turns):
    return [Text(tuple(what)) if kind == "text" else Passages(tuple(map(tuple, what))) for kind, what in turns]


def spelt_out(turns, spec=None):
    """Parts for `figure_2`, with KVLink's tokens where its paper puts them, turn by turn."""
    parts = []
    for kind, what in turns:
        if kind == "text":
            parts.append(("text", what))
            continue
        passages = []
        for rank, passage in enumerate(what):
            passages += [("chunk", passage), ("text", spec.link_ids(rank) if spec else [])]
        if spec is not None and what:
            passages = [("text", [spec.kv_start_id]), *passages, ("text", [spec.kv_end_id])]
        parts += passages
    return parts


def expected(oracle, parts):
    return oracle_logits_of(oracle, *figure_2(parts))


def read(lm, method, turns, tree=None):
    """Fused prefill of the turns, over what the tree has of them; returns it, tokens taken over and their pieces."""
    parts = parts_of(turns)
    layout = method.layout(lm, parts, rc.Recipe())
    elements = layout.elements
    tree = tree or PrefixCache(lm.shape, 0)
    with tree.match("turns", elements) as exact:
        exact.cut(layout.usable(min(exact.num_tokens, len(elements) - 1)))
        blocks = lm.encode([piece.ids for piece in layout.placed(exact.num_tokens)])
        fused = rc.fuse(lm, parts, method, blocks, exact=exact)
        known = exact.num_tokens
    tree.insert("turns", elements, read_cache(fused.cache))
    return fused, known, layout.pieces


@pytest.mark.parametrize("count", [3, 9])
def test_several_turns_are_one_forward(family, count):
    lm, oracle = family
    fused, _, _ = read(lm, get_method("reposition"), TURNS[:count])
    assert_same(fused.next_logits, expected(oracle, spelt_out(TURNS[:count])))


@pytest.mark.parametrize("grows", [False, True], ids=["at once", "turn by turn"])
def test_tokens_that_run_again_do_so_in_every_turn(family, grows):
    """All of them: full prefill (law 3)."""
    lm, oracle = family
    ids, _ = figure_2(spelt_out(TURNS))
    for method in (get_method("cacheblend", ratio=1.0), get_method("epic", first_tokens=100)):
        tree = PrefixCache(lm.shape, 1 << 20)
        taken = [read(lm, method, TURNS[:count], tree)[:2] for count in ((3, 5, 9) if grows else (9,))]
        assert_same(taken[-1][0].next_logits, causal_logits(oracle, ids))
        assert (taken[-1][1] > 0) == grows


@pytest.mark.parametrize("name", ["reposition", "link"])
def test_a_turn_goes_on_from_the_one_before(trained, name):
    """Only what is new runs, and the answer is that of reading everything."""
    lm, oracle = trained
    spec = TRAINED if name == "link" else None
    tree = PrefixCache(lm.shape, 1 << 24, page_tokens=4)
    before = 0
    for count in (3, 5, 7, 9, 9):
        fused, known, pieces = read(lm, get_method(name), TURNS[:count], tree)
        ids, allowed = figure_2(spelt_out(TURNS[:count], spec))
        assert [id for piece in pieces for id in piece.ids] == ids
        assert_same(fused.next_logits, oracle_logits_of(oracle, ids, allowed))
        total = pieces[-1].end
        assert known == min(before, total - 1)
        apart = sum(len(piece.ids) for piece in pieces if piece.passage is not None and piece.start >= known)
        assert set(fused.computed_tokens) == {total - known - apart}
        before = total


def test_a_passage_is_not_known_in_part_nor_by_its_tokens_alone(trained):
    """Same tokens: as text, as one passage, as two. And a passage that begins like a known one is placed whole."""
    lm, oracle = trained
    method, tree = get_method("reposition"), PrefixCache(lm.shape, 1 << 24)
    same = [
        [("text", [3]), ("passages", [[10, 11, 12, 13]]), ("text", [5])],
        [("text", [3]), ("passages", [[10, 11], [12, 13]]), ("text", [5])],
        [("text", [3, 10, 11, 12, 13]), ("text", [5])],
        [("text", [3]), ("passages", [[10, 11, 12, 13, 14]]), ("text", [5])],
        [("text", [3]), ("passages", [[10, 11, 12, 13]]), ("text", [6])],
    ]
    found = []
    for turns in same:
        fused, known, _ = read(lm, method, turns, tree)
        found.append(known)
        assert_same(fused.next_logits, expected(oracle, spelt_out(turns)))
    assert found == [0, 3, 1, 1, 5], "the first of two is known where a longer one begins with its tokens"


def test_what_cannot_be_read_is_named(trained):
    lm, _ = trained
    parts = parts_of(TURNS[:3])
    with pytest.raises(ConfigError, match="'a3' cannot keep"):
        rc.fuse(lm, parts, "a3", [])
    with pytest.raises(ConfigError, match="recipe 'prefix' encodes passages behind a Prompt's prefix"):
        rc.fuse(lm, parts, "reposition", recipe="prefix")
    with pytest.raises(PromptError, match="ends with no text"):
        rc.fuse(lm, parts[:2], "reposition")
    tree, layout = PrefixCache(lm.shape, 1 << 24), get_method("reposition").layout(lm, parts, rc.Recipe())
    tree.insert("turns", layout.elements, read_cache(rc.fuse(lm, parts, "reposition").cache))
    with tree.match("turns", layout.elements) as exact:
        exact.cut(5)
        with pytest.raises(ConfigError, match="within a passage; cut it to 3"):
            rc.fuse(lm, parts, "reposition", exact=exact)
    with pytest.raises(StaleBlockError, match="not those of the passages"):
        rc.fuse(lm, parts, "reposition", lm.encode([[1, 2]]))
    with pytest.raises(ConfigError, match="5 passages of one turn, and the method reads 4"):
        lay_out([Passages(((5,),) * 5)], rc.Recipe(), get_method("link").additions(lm))
