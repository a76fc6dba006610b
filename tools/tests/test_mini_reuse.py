"""Training of the mini model for reuse: rows, mask, and a directory that loads for its method."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ragcache as rc
from ragcache_eval.registry.names import is_held_out
from ragcache_train.row_encoder import RowEncoder
from ragcache_train.train_batches import lay_out
from ragcache_train.train_options import EncodingOptions
from ragcache_train.train_rows import read_rows
from tools.mini.base import train
from tools.mini.batches import IGNORED
from tools.mini.evaluate import MINI, MINI_BASE
from tools.mini.packed import packed_hidden, packed_scores
from tools.mini.reuse import ANSWERING, HIDDEN, SEPARATE, SETTLING, STANDARD, TAKING_UP, ReuseOptions, ReuseTrainer
from tools.mini.reuse_data import draw_row, draw_rows


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def trainer(directory, **options):
    return ReuseTrainer(ReuseOptions(out=str(directory), workers=1, **options), 0, 1)


def rows_of(seed, passages, count=3):
    rng = random.Random(seed)
    return [draw_row(rng, passages, kind) for kind in ("leaning", "single", "two-hop")[:count]]


def oracle_mask(segments, context_len, is_hidden):
    """Return an additive mask, [1, 1, n, n], for a context and a question, written out pair by pair."""
    n = len(segments)
    mask = torch.full((n, n), torch.finfo(torch.float32).min)
    for query in range(n):
        for key in range(query + 1):
            in_context = query < context_len
            own_chunk = segments[query] == 0 or segments[key] == segments[query]
            hidden = is_hidden and segments[key] > 0
            if own_chunk if in_context else not hidden:
                mask[query, key] = 0.0
    return mask[None, None]


@pytest.mark.parametrize(
    "reading", [*(pytest.param(own, marks=pytest.mark.slow) for own in (STANDARD, SEPARATE)), HIDDEN]
)
@torch.no_grad()
def test_the_packed_forward_is_the_plain_one_under_the_mask(reading, tmp_path):
    made = trainer(tmp_path)
    batch = made._pack(rows_of(1, 4), reading)._replace(hints=None)
    model = made.master.eval()
    model.set_attn_implementation("eager")
    hidden = packed_hidden(model, batch)
    for row in range(len(batch.context_ids)):
        length = int(batch.context_lengths[row])
        for question in (0, 7):
            size = int((batch.labels[row, question] != IGNORED).nonzero().max()) + 1
            ids = torch.cat([batch.context_ids[row, :length], batch.question_ids[row, question, :size]])
            segments = batch.segments[row, :length].tolist() + [0] * size
            mask = oracle_mask(segments, length, reading == HIDDEN)
            plain = model.model(ids[None], attention_mask=mask).last_hidden_state[0, length:]
            torch.testing.assert_close(hidden[row, question, :size], plain, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_hints_ask_link_tokens_for_names_and_cut_ends(tmp_path):
    made = trainer(tmp_path)
    row = rows_of(2, 6, count=1)[0]
    batch = made._pack([row], SEPARATE)
    spec = made.spec
    assert len(batch.hints) == 6 * 5
    for _, place, name, end in batch.hints.tolist():
        slot = (int(batch.context_ids[0, place]) - spec.first_link_id) // 5
        subject, text = row.subjects[slot], row.passages[slot]
        assert made.tokenizer.decode([name]).strip()
        assert subject.endswith(made.tokenizer.decode([name]).strip())
        if slot and row.subjects[slot - 1] == subject:
            assert text.rstrip(".\n").endswith(made.tokenizer.decode([end]).strip())
        else:
            assert name == end
    hinted, bare = (packed_scores(made.master, batch._replace(hints=hints)).loss for hints in (batch.hints, None))
    assert hinted > bare
    assert made._pack([row], STANDARD).hints is None


def test_rows_are_those_that_the_general_trainer_reads(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in draw_rows(40, seed=5)), encoding="utf-8")
    rows, bad = read_rows([path])
    assert len(rows) == 40
    assert not bad
    lm = rc.load_lm(MINI_BASE)
    encoder = RowEncoder(lm.tokenizer, EncodingOptions())
    made = trainer(tmp_path / "run")
    rng = random.Random("reuse/5")
    drawn = [draw_row(rng, rng.randint(2, 16)) for _ in range(40)]
    assert {row.leaning for row in drawn} == {True, False}
    for row, read in zip(drawn, rows, strict=True):
        theirs, ours = encoder.encode(read), made._encode(row)
        asked = len(read.asked)
        assert read.shuffle is not row.leaning
        assert 2 <= len(read.passages) <= 16
        assert 1 <= asked <= 10
        assert not any(is_held_out(name) for name in row.subjects)
        assert lay_out(theirs, made.spec, True) == lay_out(ours._replace(asks=ours.asks[:asked]), made.spec, True)


def test_rows_are_the_same_each_time():
    assert list(draw_rows(5, seed=1)) == list(draw_rows(5, seed=1)) != list(draw_rows(5, seed=2))


@pytest.mark.parametrize(("leaning", "of_40"), [(0.0, [0]), (0.8, range(26, 38)), (1.0, [40])])
def test_a_share_of_rows_leans(leaning, of_40):
    assert sum(not row["shuffle"] for row in draw_rows(40, seed=1, leaning=leaning)) in of_40


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_the_result_loads_for_its_method(tmp_path, capsys):
    train(ReuseOptions(str(tmp_path), workers=1, max_tokens=2000, log_every=1), ReuseTrainer)
    assert json.loads(capsys.readouterr().out.splitlines()[0])["stage"] == "taking-up"
    assert rc.load_lm(tmp_path).default_method == "link"
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16


def test_the_first_stage_ends_once_learned_or_after_its_tokens(tmp_path):
    made = trainer(tmp_path, first_tokens=100)
    made.progress.stage_tokens = 99
    made._advance()
    assert made.progress.stage == TAKING_UP
    made.progress.accuracy[HIDDEN] = made.options.threshold
    made._advance()
    assert (made.progress.stage, made.progress.stage_tokens) == (ANSWERING, 0)
    made.progress.stage, made.progress.stage_tokens, made.progress.accuracy[HIDDEN] = TAKING_UP, 100, 0.0
    made._advance()
    assert made.progress.stage == ANSWERING


def test_the_second_stage_leads_to_the_third_and_that_to_the_end(tmp_path):
    made = trainer(tmp_path, start_stage=ANSWERING, final_tokens=1000, settling_tokens=2000, warmup_steps=10)
    made.progress.step, made.progress.stage_step, made.progress.stage_tokens = 500, 500, 750
    assert made._schedule() == pytest.approx(0.25)
    made.progress.stage_tokens = 1000
    made._advance()
    assert (made.progress.stage, made.progress.stage_step, made.progress.stage_tokens) == (SETTLING, 0, 0)
    assert made._schedule() == pytest.approx(made.options.settling_rate / 10)  # warmed up again
    made.progress.stage_step, made.progress.stage_tokens = 100, 1000
    made._advance()
    assert made.progress.stage == SETTLING
    assert made._schedule() == pytest.approx(made.options.settling_rate / 2)
    assert not made._finished()
    made.progress.stage_tokens = 2000
    assert made._finished()


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_settling_keeps_the_rows_of_its_base_and_saves_the_average(tmp_path):
    made = trainer(tmp_path, base=str(MINI), start_stage=SETTLING, dtype="float32")
    bundled = load_file(MINI / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(made.master.get_input_embeddings().weight, bundled.float())
    expected = [p.detach().clone() for p in made.parameters]
    for step in range(3):
        made._step()
        if step == 0:
            expected = [p.detach().clone() for p in made.parameters]
        expected = [a + (p.detach() - a) * 0.003 for a, p in zip(expected, made.parameters, strict=True)]
    assert not torch.equal(made.average[0], made.parameters[0])
    made._save()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for parameter, average in zip(saved.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter, average, atol=1e-3, rtol=1e-2)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("stage", [TAKING_UP, SETTLING])
def test_a_resumed_run_for_reuse_equals_an_uninterrupted_one(stage, tmp_path):
    options = ReuseOptions(out=str(tmp_path / "whole"), workers=1, max_tokens=20_000, start_stage=stage)
    train(options, ReuseTrainer)
    stopped = StoppedTrainer(ReuseOptions(**{**vars(options), "out": str(tmp_path / "resumed")}), 0, 1)
    stopped.run()
    train(stopped.options, ReuseTrainer)
    whole, resumed = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("whole", "resumed"))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name])


class StoppedTrainer(ReuseTrainer):
    """A trainer that stops after its second step."""

    def _finished(self):
        return self.progress.step >= 2

    def _save(self):
        pass
