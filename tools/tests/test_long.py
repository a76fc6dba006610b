"""Growing the base model changes nothing but its positions; long contexts run through the same arithmetic."""

import json
import random
from collections import Counter

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from ragcache_eval.registry import PAGE_KINDS, draw_pages
from ragcache_train.train_rows import read_rows
from tools.mini import page_data
from tools.mini.base import save_model, train
from tools.mini.batches import BatchMaker
from tools.mini.evaluate import MINI_BASE
from tools.mini.long import CARRY_GAIN, LEANING_LAYER, LongOptions, LongTrainer, carry_names, grow
from tools.mini.packed import FOCUS_WEIGHT, FUSED_LENGTH, PackedBatch, packed_hidden, packed_scores
from tools.mini.page_data import KIND_SHARES, draw_questions
from tools.mini.tokenizer import build_tokenizer, save_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def grown():
    return grow(MINI_BASE, build_tokenizer(pages=True), seed=0).eval()


def test_new_layers_change_nothing_and_tokens_keep_their_embeddings(grown):
    base = AutoModelForCausalLM.from_pretrained(MINI_BASE, dtype=torch.float32).eval()
    assert grown.config.num_hidden_layers == 2 * base.config.num_hidden_layers
    text = "# Selma Permann\n\nSelma Permann works as a weaver. Permann now lives in East Birchbury.\n"
    old = Tokenizer.from_file(str(MINI_BASE / "tokenizer.json")).encode(text).ids
    new = build_tokenizer(pages=True).encode(text).ids
    rotary = grown.model.rotary_emb
    kept = rotary.inv_freq, rotary.attention_scaling
    try:
        rotary.inv_freq, rotary.attention_scaling = base.model.rotary_emb.inv_freq, 1.0
        with torch.no_grad():
            hidden = [model.model(torch.tensor([ids])).last_hidden_state for model, ids in ((base, old), (grown, new))]
    finally:
        rotary.inv_freq, rotary.attention_scaling = kept
    torch.testing.assert_close(hidden[1], hidden[0], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_head_starts_by_carrying_what_the_first_layer_carries():
    """Looking at a token, both write the same of it, but for a factor; all other weights stay."""
    model = grow(MINI_BASE, build_tokenizer(pages=True), seed=0)
    before = {name: one.clone() for name, one in model.named_parameters()}
    carry_names(model)
    seen = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    written = []
    for layer in (model.model.layers[0], model.model.layers[LEANING_LAYER]):
        values = layer.self_attn.v_proj(layer.input_layernorm(seen))
        values[:, : -model.config.head_dim] = 0
        written.append(layer.self_attn.o_proj(values))
    torch.testing.assert_close(written[1], written[0] * CARRY_GAIN, atol=1e-5, rtol=1e-4)
    changed = {name for name, one in model.named_parameters() if not torch.equal(one, before[name])}
    assert changed == {f"model.layers.{LEANING_LAYER}.self_attn.{name}_proj.weight" for name in "vo"}


@torch.no_grad()
@pytest.mark.parametrize("apart", [False, True])
def test_long_contexts_are_read_as_transformers_reads_them(grown, apart):
    length, room = FUSED_LENGTH + 40, 12
    generator = torch.Generator().manual_seed(1)
    context = torch.randint(70, 2000, (1, length), generator=generator)
    questions = torch.randint(70, 2000, (1, 2, room), generator=generator)
    segments = torch.arange(length)[None] // 100 + 1 if apart else None
    batch = PackedBatch(context, torch.tensor([length]), questions, questions, segments, torch.zeros(1, dtype=bool))
    hidden = packed_hidden(grown, batch)
    for number in range(2):
        ids = torch.cat([context[0], questions[0, number]])[None]
        sees = torch.ones(length + room, length + room, dtype=torch.bool).tril()
        if apart:
            sees[:length, :length] &= segments[0][:, None] == segments[0][None]
        plain = grown.model(ids, attention_mask=sees[None, None]).last_hidden_state[0, length:]
        torch.testing.assert_close(hidden[0, number], plain, atol=1e-4, rtol=1e-3)


def test_what_leans_is_shown_what_it_hangs_on():
    """Every token of a sentence that leans is asked to see the last one of the name."""
    trainer = LongTrainer.__new__(LongTrainer)
    trainer.tokenizer = build_tokenizer(pages=True)
    decode = trainer.tokenizer.decode
    pages = draw_pages(random.Random(4), 8, articles=(1, 2))
    row = BatchMaker(trainer.tokenizer, random.Random(0)).row(pages.passages, [])
    leaning = [one for one in pages.questions if one.kind == "leaning"]
    shown: dict[int, list[int]] = {}
    for place, seen in trainer._focus(pages, row):
        shown.setdefault(seen, []).append(place)
    assert len(shown) == len(leaning) > 1
    for (seen, places), asked in zip(shown.items(), leaning, strict=True):
        assert decode(row.context[: seen + 1]).split()[-1] == asked.question.gold[0].split()[-1]
        said = decode([row.context[place] for place in places])
        assert said.split() == "".join(asked.reference).rstrip(".\n").split()


def test_the_loss_of_attention_is_that_of_transformers_attention(grown):
    generator = torch.Generator().manual_seed(2)
    context = torch.randint(70, 2000, (2, 30), generator=generator)
    questions = torch.randint(70, 2000, (2, 1, 5), generator=generator)
    focus = torch.tensor([[1, 0, 20, 3], [1, 1, 29, 29], [3, 1, 7, 2]])
    plain = PackedBatch(context, torch.tensor([30, 30]), questions, questions)
    with torch.no_grad():
        asked = packed_scores(grown, plain._replace(focus=focus)).loss - packed_scores(grown, plain).loss
        grown.set_attn_implementation("eager")
        attentions = grown(context, output_attentions=True).attentions
        grown.set_attn_implementation("sdpa")
    wanted = [-attentions[layer][row, -1, place, seen].log() for layer, row, place, seen in focus.tolist()]
    torch.testing.assert_close(asked, FOCUS_WEIGHT * torch.stack(wanted).mean(), atol=1e-4, rtol=1e-3)


def test_questions_of_all_kinds_come_once_before_any_comes_twice():
    pages = draw_pages(random.Random(3), 8)
    drawn = draw_questions(random.Random(0), pages.questions, len(pages.questions) + 3)
    assert set(drawn[:-3]) == set(pages.questions)
    counts = Counter(one.kind for n in range(300) for one in draw_questions(random.Random(n), pages.questions, 1))
    assert counts["leaning"] / 300 == pytest.approx(KIND_SHARES["leaning"], abs=0.1)


def test_rows_of_pages_are_those_that_training_reads(tmp_path):
    """The same ones for the same seed, pages in their order."""
    rows = list(page_data.draw_rows(20, seed=1))
    assert rows == list(page_data.draw_rows(20, seed=1)) != list(page_data.draw_rows(20, seed=2))
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, refused = read_rows([path])
    assert len(found) == 20
    assert not refused
    assert not any(row.shuffle for row in found)
    assert {len(row.passages) for row in found} >= {4, 5, 6}
    short = [row for row in rows if len(row["passages"]) <= 5]
    assert 0 < len(short) < len(rows)
    assert list(page_data.draw_rows(len(short), seed=1, most=5)) == short


def test_a_run_goes_on_from_a_model_that_was_grown(tmp_path, grown):
    save_model(grown, build_tokenizer(pages=True), tmp_path / "base")
    trainer = LongTrainer(LongOptions(out=str(tmp_path / "out"), base=str(tmp_path / "base")), 0, 1)
    kept = grown.state_dict()
    assert all(torch.equal(own, kept[name].bfloat16().float()) for name, own in trainer.master.state_dict().items())
    save_tokenizer(build_tokenizer(), tmp_path / "base")
    with pytest.raises(ValueError, match="other tokens"):
        LongTrainer(LongOptions(out=str(tmp_path / "out"), base=str(tmp_path / "base")), 0, 1)


def test_a_run_trains_on_all_kinds_and_resumes(tmp_path, capsys):
    threads = torch.get_num_threads()
    options = {"out": str(tmp_path), "workers": 1, "log_every": 1}
    try:
        train(LongOptions(max_tokens=6_000, **options), LongTrainer)
        train(LongOptions(max_tokens=12_000, **options), LongTrainer)
    finally:
        torch.set_num_threads(threads)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert len(lines[-1]["accuracy"]) == len(PAGE_KINDS) + 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.rope_parameters["rope_type"] == "yarn"
    kinds, batch = LongTrainer(LongOptions(**options), 0, 1)._draw(random.Random(0))
    assert kinds.shape == batch.question_ids.shape[:2]
    assert set(kinds.flatten().tolist()) <= set(range(len(PAGE_KINDS) + 1))
