"""Training of the long model for reuse: link tokens are told what leans, and hidden pages are asked for that alone."""

from __future__ import annotations

import json
import random

import pytest
import torch

import ragcache as rc
from ragcache.evaluation.registry import draw_pages
from tools.mini.base import train
from tools.mini.batches import IGNORED
from tools.mini.long import LEANING_LAYER
from tools.mini.packed import packed_hidden
from tools.mini.page_data import SMALL
from tools.mini.reuse import ANSWERING, HIDDEN, SEPARATE, STANDARD
from tools.mini.reuse_pages import (
    HIDDEN_QUESTIONS,
    LEANING_APART,
    LEANING_WHOLE,
    PageReuseOptions,
    PageReuseTrainer,
    PageRow,
    replace_asked,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return PageReuseTrainer(PageReuseOptions(out=str(tmp_path_factory.mktemp("run")), workers=1), 0, 1)


def row_of(seed: int, passages: int = 4) -> PageRow:
    pages = draw_pages(random.Random(seed), passages, articles=SMALL.articles)
    return PageRow(pages, pages.questions[:3])


@pytest.mark.parametrize("seed", range(8))
def test_link_tokens_are_told_what_leans(made, seed):
    """Hints and focus against the texts: what stands in the context at the place looked at, and who looks."""
    row = row_of(seed)
    batch = made._pack([row], SEPARATE)
    ids = batch.context_ids[0].tolist()
    spec = made.spec
    told: dict[int, set[tuple[int, int]]] = {}
    for _, place, *hint in batch.hints.tolist():
        told.setdefault((ids[place] - spec.first_link_id) // 5, set()).add(tuple(hint))
    leaning = [one for one in row.pages.questions if one.kind == "leaning"]
    assert len(leaning) == 2
    for asked in leaning:
        first, second = asked.gold
        name, value = ([made.tokenizer.encode(text).ids[-1]] for text in (asked.question.gold[0], asked.question.value))
        assert told[first] == {(*name, *name)}
        assert told[second] == {(*name, *value)}
    assert len(batch.hints) == len(batch.focus) == 5 * 2 * len(leaning)
    names = {made.tokenizer.encode(asked.question.gold[0]).ids[-1] for asked in leaning}
    looks = set()
    for layer, _, place, seen in batch.focus.tolist():
        assert layer == LEANING_LAYER
        assert ids[seen] in names
        looks.add(((ids[place] - spec.first_link_id) // 5, int(batch.segments[0, seen]) - 1))
    assert looks == {(rank, asked.gold[0]) for asked in leaning for rank in asked.gold}


def test_nothing_is_told_once_questions_are_answered_and_where_pages_are_read_together(made, tmp_path):
    row = row_of(1)
    assert made._pack([row], STANDARD).hints is None
    later = PageReuseTrainer(PageReuseOptions(out=str(tmp_path), workers=1, start_stage=ANSWERING), 0, 1)
    batch = later._pack([row], SEPARATE)
    assert batch.hints is None
    assert batch.focus is None


def test_hidden_pages_are_asked_for_what_leans(made):
    row = replace_asked(random.Random(0), row_of(2))
    assert len(row.asked) == HIDDEN_QUESTIONS
    assert {one.kind for one in row.asked} == {"leaning"}
    readings = set()
    for seed in range(12):
        kinds, batch = made._draw(random.Random(seed))
        assert kinds.shape == batch.question_ids.shape[:2]
        readings.add(frozenset(kinds.unique().tolist()))
    assert frozenset({HIDDEN}) in readings
    assert readings <= {
        frozenset({HIDDEN}),
        *map(frozenset, ({STANDARD}, {STANDARD, LEANING_WHOLE}, {SEPARATE}, {SEPARATE, LEANING_APART})),
    }


@torch.no_grad()
def test_the_packed_forward_is_the_plain_one_at_stretched_positions(made):
    """Over pages read apart: against transformers, its mask written out."""
    batch = made._pack([row_of(3, 3)], SEPARATE)._replace(hints=None, focus=None)
    model = made.master.eval()
    model.set_attn_implementation("eager")
    length = int(batch.context_lengths[0])
    size = int((batch.labels[0, 0] != IGNORED).nonzero().max()) + 1
    ids = torch.cat([batch.context_ids[0, :length], batch.question_ids[0, 0, :size]])
    own = torch.cat([batch.segments[0, :length], torch.zeros(size, dtype=torch.int64)])
    seen = ((own[:, None] == 0) | (own[:, None] == own[None])).tril()
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    plain = model.model(ids[None], attention_mask=mask).last_hidden_state[0, length:]
    torch.testing.assert_close(packed_hidden(model, batch)[0, 0, :size], plain, atol=1e-4, rtol=1e-3)


def test_the_result_loads_for_its_method(tmp_path, capsys):
    threads = torch.get_num_threads()
    try:
        train(PageReuseOptions(out=str(tmp_path), workers=1, max_tokens=1500, log_every=1), PageReuseTrainer)
    finally:
        torch.set_num_threads(threads)
    assert len(json.loads(capsys.readouterr().out.splitlines()[0])["accuracy"]) == LEANING_APART + 1
    assert rc.load_lm(tmp_path).default_method == "link"
