"""A row becomes the sequence that the papers show, and that the engine builds."""

import pytest
import reuse_oracle as oracle
from families import tiny

import ragcache as rc
from ragcache.errors import ConfigError
from ragcache.fusion import get_method
from ragcache.fusion.fuse import block_recipe
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_train.train_batches import Ask, EncodedRow, context_tokens, lay_out, layout_tokens

LINK = TrainedTokens("link", "isolated", 2, 4, 50, 90, 91)
REPOSITION = TrainedTokens("reposition")
MARKERS = {
    name: TrainedTokens("markers", doc_start_id=80, doc_end_id=81, positions=name)
    for name in ("reordered", "composite")
}
PREFIX, CHUNKS = [1, 2], [[10, 11, 12], [13], [14, 15]]
ASKS = [Ask([20, 21], [30, 31, 3]), Ask([22, 23, 24], [32, 3])]
READ = [[20, 21, 30, 31], [22, 23, 24, 32]]
ROW = EncodedRow("qa", "rows.jsonl:1", PREFIX, CHUNKS, ASKS, None, True)


def drawn(spec, asked):
    """Return the papers' tokens."""
    links = [[50, 51], [52, 53], [54, 55]]
    if spec.method == "link":
        return oracle.linked(PREFIX, CHUNKS, asked, links, 90, 91)
    if spec.method == "markers":
        return oracle.marked(PREFIX, CHUNKS, asked, (80, 81), spec.positions == "composite")
    return oracle.linked(PREFIX, CHUNKS, asked, [[], [], []])


@pytest.mark.parametrize("spec", [LINK, REPOSITION, *MARKERS.values()], ids=str)
@pytest.mark.parametrize("apart", [True, False])
def test_layouts_are_the_papers(spec, apart):
    layout = lay_out(ROW, spec, apart)
    tokens = drawn(spec, READ) if apart else oracle.together(PREFIX, CHUNKS, READ)
    assert layout.ids == [token.id for token in tokens]
    assert layout.positions == [token.position for token in tokens]


@pytest.mark.parametrize("spec", [LINK, REPOSITION, *MARKERS.values()], ids=str)
def test_what_is_served_is_what_the_papers_draw(spec):
    lm, _ = tiny("llama", spec)
    method, suffix = get_method(spec.method), [20, 21]
    layout = method.layout(lm, rc.Prompt(PREFIX, CHUNKS, suffix).parts, block_recipe(lm, method))
    tokens = drawn(spec, [suffix])
    served = [(id, piece.start + n) for piece in layout.pieces for n, id in enumerate(piece.ids)]
    assert served == [(token.id, token.position) for token in tokens]
    prefix = len(PREFIX) + (spec == LINK)
    run = [token for place, token in enumerate(tokens) if token.part != "chunk" and place >= prefix]
    ids, positions, behind = layout.running(prefix)
    assert list(zip(ids, positions, strict=True)) == [(token.id, token.position) for token in run]
    assert behind == (spec != LINK)
    starts = [next(t.position for t in tokens if (t.part, t.number) == ("chunk", n)) for n in range(3)]
    assert [piece.start for piece in layout.placed(prefix)] == starts
    assert layout.end == max(token.position for token in tokens) + 1


def test_each_label_is_the_id_that_follows_and_only_answers_have_one():
    layout = lay_out(ROW, LINK, apart=True)
    n = -100
    assert layout.labels == [n] * 16 + [n, 30, 31, 3] + [n, n, 32, 3]


def test_passages_take_the_order_that_is_asked_for_and_links_stay_at_their_slots():
    layout = lay_out(ROW, LINK, apart=True, order=[2, 0, 1])
    assert layout.ids[3:15] == [14, 15, 50, 51, 10, 11, 12, 52, 53, 13, 54, 55]


def test_a_row_without_passages_gets_nothing_added():
    row = ROW._replace(chunks=[])
    assert lay_out(row, LINK, apart=True).ids == [1, 2, *READ[0], *READ[1]]


@pytest.mark.parametrize("spec", [LINK, REPOSITION, *MARKERS.values()], ids=str)
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("row", [ROW, ROW._replace(chunks=[])])
def test_lengths_are_known_before(spec, apart, row):
    assert layout_tokens(row, spec, apart) == len(lay_out(row, spec, apart).ids)
    assert context_tokens(row, spec, apart) == len(lay_out(row._replace(asks=[]), spec, apart).ids)


def test_more_passages_than_slots_is_refused():
    row = ROW._replace(chunks=[[5]] * 5)
    with pytest.raises(ConfigError, match=r"5 passages.*link tokens for 4"):
        lay_out(row, LINK, apart=True)
    assert lay_out(row, LINK, apart=False).ids[:7] == [1, 2, 5, 5, 5, 5, 5]
