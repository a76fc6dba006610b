"""Training of the long model for reuse: link tokens are told what leans, and hidden pages are asked for that alone."""

import json
import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

import ragcache as rc
from ragcache_eval.registry import draw_pages
from tools.mini.base import train
from tools.mini.batches import IGNORED
from tools.mini.long import LEANING_LAYER
from tools.mini.packed import packed_hidden
from tools.mini.page_data import SMALL
from tools.mini.reuse import ANSWERING, HIDDEN, SEPARATE, STANDARD
from tools.mini.reuse_pages import (
    ANSWERING_LAYER,
    HIDDEN_QUESTIONS,
    LEANING_APART,
    LEANING_WHOLE,
    MINI_LONG,
    READING_HEAD,
    READING_LAYER,
    PageReuseOptions,
    PageReuseTrainer,
    PageRow,
    read_links,
    replace_asked,
)

pytestmark = pytest.mark.slow


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
    told: dict[int, list[list[int]]] = {}
    for _, place, *hint in batch.hints.tolist():
        told.setdefault((ids[place] - spec.first_link_id) // 5, []).append(hint)
    leaning = [one for one in row.pages.questions if one.kind == "leaning"]
    assert len(leaning) == 2
    for asked in leaning:
        first, second = asked.gold
        assert [name for name, _ in told[first]] == [end for _, end in told[first]]
        (name,) = {hint[0] for hint in (*told[first], *told[second])}
        assert asked.question.gold[0].endswith(text_of(made, [name]))
        values = list(dict.fromkeys(value for _, value in told[second]))
        assert text_of(made, values) == asked.question.value
    assert len(batch.hints) == 5 * 2 * len(leaning)


@pytest.mark.parametrize("seed", range(8))
def test_what_looks_at_link_tokens_and_what_they_look_at(made, seed):
    row = row_of(seed)
    row = row._replace(asked=[one for one in row.pages.questions if one.kind != "unanswerable"])
    batch = made._pack([row], SEPARATE)
    context, spec = batch.context_ids[0], made.spec
    leaning = [one for one in row.asked if one.kind == "leaning"]
    names, answers = set(), {}
    for layer, _, place, seen in batch.focus.tolist():
        if place < len(context):
            assert layer == LEANING_LAYER
            slot = (int(context[place]) - spec.first_link_id) // 5
            names.add((slot, int(batch.segments[0, seen]) - 1, text_of(made, [context[seen]])))
        else:
            assert layer == ANSWERING_LAYER
            slot = (int(context[seen]) - spec.first_link_id) // 5
            answers.setdefault(slot, []).append(int(batch.labels[0].flatten()[place - len(context)]))
    assert names == {
        (rank, asked.gold[0], asked.question.gold[0].split()[-1]) for asked in leaning for rank in asked.gold
    }
    assert {slot: text_of(made, ids) for slot, ids in answers.items()} == {
        asked.gold[1]: asked.question.value for asked in leaning
    }


def text_of(made, ids) -> str:
    return made.tokenizer.decode([int(one) for one in ids]).strip()


@torch.no_grad()
def test_the_head_that_reads_links_is_the_one_that_reads_names(made):
    """Over the same states both attend alike and write alike."""
    base = AutoModelForCausalLM.from_pretrained(MINI_LONG, dtype=torch.float32)
    config = base.config
    read_links(base)
    states = torch.randn(1, 6, config.hidden_size, generator=torch.Generator().manual_seed(0))
    rotary = base.model.rotary_emb(states, torch.arange(6)[None])
    written = []
    for number, head in ((READING_LAYER, READING_HEAD), (ANSWERING_LAYER, config.num_attention_heads - 1)):
        layer = base.model.layers[number]
        others = torch.arange(config.hidden_size) // config.head_dim != head
        layer.self_attn.o_proj.weight[:, others] = 0
        written.append(
            layer.self_attn(layer.input_layernorm(states), position_embeddings=rotary, attention_mask=None)[0]
        )
    assert written[0].abs().max() > 0.1
    torch.testing.assert_close(*written, atol=1e-4, rtol=1e-3)


def test_nothing_is_told_once_questions_are_answered_and_where_pages_are_read_together(made, tmp_path):
    row = row_of(1)
    assert made._pack([row], STANDARD).hints is None
    later = PageReuseTrainer(PageReuseOptions(out=str(tmp_path), workers=1, start_stage=ANSWERING), 0, 1)
    batch = later._pack([row], SEPARATE)
    assert batch.hints is None
    assert batch.focus is None


def test_the_second_stage_hides_some_pages_still_and_helps_there(tmp_path):
    options = PageReuseOptions(out=str(tmp_path), workers=1, start_stage=ANSWERING, hidden_share=0.5)
    made = PageReuseTrainer(options, 0, 1)
    rng = random.Random(0)
    readings = [made._draw_reading(rng) for _ in range(400)]
    shares = [readings.count(reading) / len(readings) for reading in (STANDARD, SEPARATE, HIDDEN)]
    assert shares == pytest.approx([0.25, 0.375, 0.375], abs=0.06)
    batch = made._pack([replace_asked(rng, row_of(1))], HIDDEN)
    assert len(batch.hints) > 0
    assert len(batch.focus) > 0
    plain = PageReuseTrainer(replace(options, variant="link0"), 0, 1)
    assert HIDDEN not in {plain._draw_reading(rng) for _ in range(100)}


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
        options = PageReuseOptions(out=str(tmp_path), workers=1, max_tokens=1500, log_every=1, dtype="float32")
        train(options, PageReuseTrainer)
    finally:
        torch.set_num_threads(threads)
    assert len(json.loads(capsys.readouterr().out.splitlines()[0])["accuracy"]) == LEANING_APART + 1
    assert rc.load_lm(tmp_path).default_method == "link"
