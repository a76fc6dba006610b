"""Every row occurs once an epoch, in batches that fit, by the seed alone."""

from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader

from ragcache.errors import ConfigError
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_train.train_batches import Ask, BatchPlan, Draw, DrawnRows, EncodedRow, collate, lay_out
from ragcache_train.train_options import BatchOptions

LINK = TrainedTokens("link", "isolated", 2, 16, 500, 600, 601)


def rows(count: int = 200, kind: str = "qa", apart: bool | None = None) -> list[EncodedRow]:
    def chunks(row: int) -> list[list[int]]:
        return [[7 + rank] * (1 + row % 9) for rank in range(1 + row % 6)]

    return [EncodedRow(kind, str(n), [1], chunks(n), [Ask([2, 3], [4, 5])], apart, True) for n in range(count)]


def plan(data: list[EncodedRow], spec: TrainedTokens = LINK, seed: int = 0, **more) -> BatchPlan:
    options = {name: more.pop(name) for name in ("tokens", "rows", "separate_share", "mixture") if name in more}
    return BatchPlan(data, spec, BatchOptions(**options), seed, **more)


def test_every_row_once_an_epoch():
    batches = plan(rows(), epochs=2, tokens=300)
    assert Counter(draw.row for batch in batches for draw in batch) == dict.fromkeys(range(200), 2)
    assert len(batches) == len(list(batches))


def test_batches_fit_and_are_full():
    data = rows()
    batches = list(plan(data, tokens=300))
    lengths = [sum(len(lay_out(data[draw.row], LINK, draw.apart).ids) for draw in batch) for batch in batches]
    assert max(lengths) <= 300
    assert sum(lengths) > 0.97 * 300 * len(batches)


def test_a_row_that_is_longer_than_a_batch_runs_alone():
    batches = list(plan(rows(20), tokens=1))
    assert [len(batch) for batch in batches] == [1] * 20


def test_rows_of_a_batch_may_be_limited():
    assert max(len(batch) for batch in plan(rows(), rows=3)) == 3


def test_the_seed_alone_decides():
    first, again, other = (list(plan(rows(), seed=seed, tokens=300)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    epochs = plan(rows(), seed=1, tokens=300)
    assert epochs.epoch(0) == first
    assert epochs.epoch(1) != first


def test_so_many_batches_as_asked_for():
    batches = list(plan(rows(), tokens=300, num_batches=70))
    assert len(batches) == 70
    epoch = list(plan(rows(), tokens=300))
    assert len(epoch) < 70
    assert batches[: len(epoch)] == epoch
    half = plan(rows(), tokens=300, epochs=0.5)
    assert len(half) == round(len(half.epoch(0)) / 2) == len(list(half))


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.25, 150, 250), (1.0, 800, 800)])
def test_the_share_of_rows_encoded_separately(share, least, most):
    drawn = [draw.apart for batch in plan(rows(800), separate_share=share) for draw in batch]
    assert least <= sum(drawn) <= most


def test_rows_that_have_one_way_only_keep_it():
    data = rows(50, apart=True) + rows(50, "text", apart=False)
    drawn = {draw.row: draw.apart for batch in plan(data, separate_share=0.5) for draw in batch}
    assert drawn == {n: n < 50 for n in range(100)}


def test_the_mixture_sets_the_share_of_each_kind():
    data = rows(150) + rows(30, "chat", True) + rows(20, "text", False)
    mixed = plan(data, mixture={"qa": 1, "chat": 2, "text": 1})
    drawn = Counter(draw.row for batch in mixed for draw in batch)
    kinds = Counter(
        {kind: sum(n for row, n in drawn.items() if data[row].kind == kind) for kind in ("qa", "chat", "text")}
    )
    assert kinds == {"qa": 50, "chat": 100, "text": 50}
    assert max(n for row, n in drawn.items() if data[row].kind == "qa") == 1
    assert {n for row, n in drawn.items() if data[row].kind == "chat"} == {3, 4}
    with pytest.raises(ConfigError, match="summary"):
        plan(data, mixture={"qa": 1, "summary": 1})


@pytest.mark.parametrize("bad", [{"tokens": 0}, {"rows": 0}, {"separate_share": 1.5}, {"mixture": {"qa": -1.0}}])
def test_options_out_of_range_are_refused(bad):
    with pytest.raises(ConfigError, match=str(next(iter(bad.values()))).split(".")[0].strip("{}").split(":")[0]):
        plan(rows(3), **bad)


def chunk_order(data: DrawnRows, draw: Draw) -> list[int]:
    ids = data[draw].ids
    return [i for i in ids if i in range(7, 20)]


def test_passages_change_places_by_the_draws_seed():
    row = EncodedRow("qa", "", [1], [[n] for n in range(7, 13)], [Ask([2], [3])], None, True)
    data = DrawnRows([row, row._replace(shuffle=False)], LINK, shuffle=True)
    orders = [chunk_order(data, Draw(0, True, seed)) for seed in range(300)]
    assert orders == [chunk_order(data, Draw(0, True, seed)) for seed in range(300)]
    firsts = Counter(order[0] for order in orders)
    assert set(firsts) == set(range(7, 13))  # every passage comes first at times
    assert min(firsts.values()) > 20
    assert all(sorted(order) == list(range(7, 13)) for order in orders)
    kept = list(range(7, 13))
    assert chunk_order(data, Draw(1, True, 5)) == kept
    assert chunk_order(DrawnRows([row], LINK, shuffle=False), Draw(0, True, 5)) == kept


def test_processes_beside_the_training_lay_out_the_same_batches():
    data, batches = DrawnRows(rows(40), LINK, shuffle=True), plan(rows(40), tokens=200)
    alone, beside = (
        [batch["input_ids"] for batch in DataLoader(data, batch_sampler=batches, collate_fn=collate, num_workers=n)]
        for n in (0, 2)
    )
    assert len(alone) == len(batches)
    assert all(torch.equal(*pair) for pair in zip(alone, beside, strict=True))
