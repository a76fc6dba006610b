"""A row becomes the sequence that the papers show."""

import pytest
import reuse_oracle as oracle

from ragcache.errors import ConfigError
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


@pytest.mark.parametrize("spec", [LINK, REPOSITION, *MARKERS.values()], ids=str)
@pytest.mark.parametrize("apart", [True, False])
def test_layouts_are_the_papers(spec, apart):
    layout = lay_out(ROW, spec, apart)
    tokens = oracle.apart(spec, PREFIX, CHUNKS, READ) if apart else oracle.together(PREFIX, CHUNKS, READ)
    assert layout.ids == [token.id for token in tokens]
    assert layout.positions == [token.position for token in tokens]


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
