"""Estimates: the time of a full prefill, learnt from what is read anyway and never from how loaded the machine was, and
the KV of an ingestion."""

import time
from pathlib import Path

import pytest
from reportlab.pdfgen.canvas import Canvas

import ragcache as rc
from ragcache.engine.estimate import LEAST_TOKENS, PrefillEstimate
from ragcache.store.prefill_rate import PrefillRate

SHORT = rc.Sampling(max_tokens=1)
LONG = " ".join(f"word{number}" for number in range(30))


def test_the_fastest_read_of_a_length_counts():
    """A machine that was busy at the start does not make later answers look fast."""
    estimate = PrefillEstimate()
    for slower in (10.0, 1.0, 7.0):
        estimate.add(1000, slower)
    assert estimate.seconds(1000) == pytest.approx(1.0)
    assert estimate.samples == 3


def test_lengths_between_and_beyond():
    """Exact where a length was read; seconds a token in between; beyond, no attention is made up."""
    estimate, line = PrefillEstimate(), PrefillRate(0.001, 1e-6)
    for tokens in (4000, 200, 1000):
        estimate.add(tokens, line.seconds(tokens))
    for tokens in (200, 1000, 2500, 4000):
        assert estimate.seconds(tokens) == pytest.approx(line.seconds(tokens))
    beyond = estimate.seconds(8000)
    assert beyond == pytest.approx(2 * line.seconds(4000))
    assert beyond < line.seconds(8000)


def test_a_batch_is_as_many_reads_and_a_short_pass_is_none():
    estimate = PrefillEstimate()
    estimate.add(LEAST_TOKENS - 1, 100.0)
    assert (estimate.samples, estimate.seconds(50)) == (0, None)
    estimate.add(64, 4.0, sequences=4)
    assert estimate.seconds(64) == pytest.approx(1.0)


def test_the_engine_learns_from_prompts_that_it_read_whole(open_kb, monkeypatch):
    kb = open_kb()
    assert (kb.full_prefill_estimate_s(500), kb.full_prefill_samples) == (None, 0)
    passages = [rc.Passage(LONG)]
    run, slow = kb.lm.run, [0.3]

    def slowed(ids, *args, **options):
        time.sleep(slow.pop() if slow else 0)
        return run(ids, *args, **options)

    monkeypatch.setattr(kb.lm, "run", slowed)
    full = {"method": "full", "method_options": {"reuse": False}, "sampling": SHORT}
    tokens = kb.ask("Which word?", hits=passages, **full).usage.prompt_tokens
    assert tokens > LEAST_TOKENS
    loaded = kb.full_prefill_estimate_s(tokens)
    assert loaded > 0.3
    kb.ask("Which word?", hits=passages, **full)
    assert 0 < kb.full_prefill_estimate_s(tokens) <= loaded
    assert kb.full_prefill_samples == 2


def test_the_engine_learns_from_passages_and_not_from_questions(open_kb):
    kb = open_kb(texts={"long": LONG})
    assert kb.full_prefill_samples > 0
    known, estimate = kb.full_prefill_samples, kb.full_prefill_estimate_s(1000)
    assert estimate > 0
    kb.ask("Which word?", 1, sampling=SHORT)  # its blocks are there: nothing is read whole
    assert (kb.full_prefill_samples, kb.full_prefill_estimate_s(1000)) == (known, estimate)


def test_a_prompt_that_goes_on_from_an_earlier_one_is_no_sample(open_kb):
    kb = open_kb()
    asked = {"hits": [rc.Passage(LONG)], "method": "full", "sampling": SHORT}
    for _ in range(2):
        answer = kb.ask("Which word?", **asked)
    assert answer.usage.cached_tokens > 0
    assert kb.full_prefill_samples == 1


# What the KV of an ingestion takes on disk: said about before, exactly afterwards


SENTENCE = "The river Arno rises in the Vale hills and flows past {} on its way to the sea. "


def text(name: str, sentences: int) -> str:
    return "".join(SENTENCE.format(f"{name}{n}") for n in range(sentences))


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "documents"
    folder.mkdir()
    for n in range(12):
        (folder / f"{n}.txt").write_text(text(f"Town {n} ", 3 + n), encoding="utf-8")
    (folder / "umlauts.md").write_text(text("Flöße über Öresund ", 9), encoding="utf-8")
    return folder


def files_of(kb: rc.RagCache) -> int:
    """What the operating system says."""
    return sum(path.stat().st_size for path in kb.store.layout.kv.rglob("*.safetensors"))


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_the_estimate_is_near_and_the_report_exact(open_kb, folder, codec):
    kb = open_kb(store=rc.StoreConfig(codec=codec))
    inputs = [folder, rc.Document("own", text("Own ", 40))]
    estimate = kb.estimate_kv(inputs)
    assert files_of(kb) == 0
    report = kb.ingest(inputs)
    assert report.kv_bytes == files_of(kb) > 0
    # A tiny model's blocks are a few KB: their files' heads, which the estimate leaves out, are a part of them.
    heads = 1500 * report.chunks
    assert report.tokens == pytest.approx(estimate.tokens, rel=0.05)
    assert 0.9 * estimate.num_bytes < report.kv_bytes < 1.1 * estimate.num_bytes + heads
    assert estimate.text_bytes == len(text("Own ", 40)) + sum(path.stat().st_size for path in folder.iterdir())
    assert kb.ingest(inputs).kv_bytes == 0, "only what this run wrote is counted"
    assert kb.ingest(rc.Document("new", text("New ", 5))).kv_bytes == files_of(kb) - report.kv_bytes > 0
    assert kb.ingest(rc.Document("later", text("Later ", 5)), kv="lazy").kv_bytes == 0


def test_a_pdf_is_named_apart(open_kb, tmp_path):
    page = Canvas(str(tmp_path / "paper.pdf"))
    page.drawString(72, 720, "The river Arno rises in the Vale hills.")
    page.save()
    (tmp_path / "note.txt").write_text("A note of some words.\n")
    estimate = open_kb().estimate_kv([tmp_path / "paper.pdf", tmp_path / "note.txt", tmp_path / "absent.txt"])
    assert (estimate.unknown, estimate.text_bytes) == (1, 22)
    assert "1 PDF file" in str(estimate)


def test_nothing_to_ingest_takes_nothing(open_kb, tmp_path):
    assert open_kb().estimate_kv(tmp_path / "absent").num_bytes == 0


@pytest.mark.slow
def test_progress_says_both(open_kb, folder, capsys):
    kb = open_kb()
    estimate = kb.estimate_kv(folder)
    report = kb.ingest(folder, progress=True)
    said = capsys.readouterr().err
    assert said.index(str(estimate)) < said.index("Storing documents") < said.index(report.kv_text)
