"""Layouts against what the papers draw, token by token; serving and training lay out alike."""

from __future__ import annotations

import pytest
import reuse_oracle as oracle
from families import tiny

import ragcache as rc
from ragcache.fusion import get_method
from ragcache.fusion.fuse import block_recipe
from ragcache.models.trained_tokens import TrainedTokens
from ragcache.prompt import Passages, Text
from ragcache_train.train_batches import Ask, EncodedRow, lay_out

PREFIX, CHUNKS, SUFFIX = [1, 2], [[10, 11, 12], [13], [14, 15]], [20, 21]
LINK = TrainedTokens("link", "isolated", 2, 4, 150, 190, 191)
MARKERS = {
    name: TrainedTokens("markers", doc_start_id=180, doc_end_id=181, positions=name)
    for name in ("reordered", "composite")
}
SPECS = {"link": LINK, "reposition": TrainedTokens("reposition"), **MARKERS}
PROMPT = rc.Prompt(PREFIX, CHUNKS, SUFFIX)


def drawn(name):
    """The papers' tokens."""
    if name in MARKERS:
        return oracle.marked(PREFIX, CHUNKS, [SUFFIX], (180, 181), name == "composite")
    links, around = ([[150, 151], [152, 153], [154, 155]], (190, 191)) if name == "link" else ([[], [], []], ())
    return oracle.linked(PREFIX, CHUNKS, [SUFFIX], links, *around)


def tokens_of(layout):
    return [(id, piece.start + n) for piece in layout.pieces for n, id in enumerate(piece.ids)]


@pytest.mark.parametrize("name", SPECS)
def test_what_is_served_and_what_is_trained_is_what_the_papers_draw(name):
    spec = SPECS[name]
    lm, _ = tiny("llama", spec)
    method = get_method(spec.method)
    layout = method.layout(lm, PROMPT.parts, block_recipe(lm, method))
    tokens = drawn(name)
    assert tokens_of(layout) == [(token.id, token.position) for token in tokens]
    row = lay_out(EncodedRow("qa", "", PREFIX, CHUNKS, [Ask(SUFFIX, [3])], None, True), spec, apart=True)
    assert list(zip(row.ids, row.positions, strict=True)) == tokens_of(layout)
    prefix = len(PREFIX) + (name == "link")
    run = [token for place, token in enumerate(tokens) if token.part != "chunk" and place >= prefix]
    ids, positions, behind = layout.running(prefix)
    assert list(zip(ids, positions, strict=True)) == [(token.id, token.position) for token in run]
    assert behind == (name != "link")
    starts = [next(t.position for t in tokens if (t.part, t.number) == ("chunk", n)) for n in range(3)]
    assert [piece.start for piece in layout.placed(prefix)] == starts
    assert layout.end == max(token.position for token in tokens) + 1


@pytest.mark.parametrize(("recipe", "starts"), [("isolated", [0, 0, 0]), ("prefix", [2, 2, 2])])
def test_raw_reuse_keeps_positions_and_drops_no_passage(lm, recipe, starts):
    """Positions of an isolated passage lie within the prefix's, and it is placed all the same."""
    layout = get_method("concat").layout(lm, PROMPT.parts, rc.Recipe(recipe))
    assert [piece.start for piece in layout.placed(2)] == starts
    assert layout.running(2) == (SUFFIX, [8, 9], True)


def test_text_between_passages_runs_and_sees_what_stands_before_it(lm):
    parts = [Text((1, 2)), Passages(((10, 11),)), Text((5,)), Text((6,)), Passages(((12,), (13, 14))), Text((7, 8))]
    layout = get_method("reposition").layout(lm, parts, rc.Recipe())
    assert [(p.start, p.ids, p.passage) for p in layout.pieces] == [
        (0, (1, 2), None),
        (2, (10, 11), 0),
        (4, (5, 6), None),
        (6, (12,), 1),
        (7, (13, 14), 2),
        (9, (7, 8), None),
    ]
    assert layout.running(0) == ([1, 2, 5, 6, 7, 8], [0, 1, 4, 5, 9, 10], False)
    assert layout.running(5) == ([6, 7, 8], [5, 9, 10], False)
    assert [layout.usable(n) for n in range(12)] == [0, 1, 2, 2, 4, 5, 6, 7, 7, 9, 10, 11]
    assert [p.passage for p in layout.placed(7)] == [2]


def test_full_prefill_reads_passages_as_text_and_no_marker(lm):
    layout = get_method("full").layout(lm, PROMPT.parts, rc.Recipe(markers=(180, 181)))
    assert layout.ids == layout.elements == layout.running().ids == PROMPT.ids
    assert layout.placed() == []
    assert layout.usable(4) == 4
    assert [piece.ids for piece in layout.passages] == [tuple(chunk) for chunk in CHUNKS]
