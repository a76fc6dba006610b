"""Reranking: scores against plain transformers, choice and order against sorting all of them."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizerFast

import ragcache as rc
from ragcache.errors import CancelledError, ConfigError, RerankerError
from ragcache.models.deadline import Limit, limited
from ragcache.retrieval.embedder import load_reranker
from ragcache_demo.bag_of_words import BagOfWords

WORDS = ["tolvik", "osby", "alna", "berg", "holm", "mora", "has", "a", "river", "mill", "club", ".", "which", "town"]
TEXTS = [f"{town} has a {thing}." for town in ("Tolvik", "Osby", "Alna", "Berg") for thing in ("river", "mill", "club")]
QUESTION = "Which town has a mill"


def save(path: Path, make: type, **options: object) -> Path:
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    BertTokenizerFast(vocab={word: i for i, word in enumerate(vocabulary)}, model_max_length=32).save_pretrained(path)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32, initializer_range=0.5, **options,
    )  # fmt: skip
    make(config).eval().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("cross-encoder"), BertForSequenceClassification, num_labels=1)


@pytest.fixture(scope="module")
def kb(directory, lm, tmp_path_factory) -> rc.RagCache:
    path = tmp_path_factory.mktemp("reranked") / "kb"
    with rc.RagCache.open(path, model=lm, embedder=BagOfWords(), reranker=directory) as kb:
        kb.ingest([rc.Document(f"d{n}", text) for n, text in enumerate(TEXTS)], kv="lazy")
        yield kb


def plain_logits(directory: Path, texts: list[str]) -> np.ndarray:
    tokenizer = BertTokenizerFast.from_pretrained(directory)
    model = BertForSequenceClassification.from_pretrained(directory).eval()
    found = []
    for text in texts:
        inputs = tokenizer(QUESTION, text, truncation=True, return_tensors="pt")
        with torch.no_grad():
            found.append(model(**inputs).logits[0, 0].item())
    return np.array(found)


def texts_of(hits: list[rc.Hit]) -> list[str]:
    return [hit.chunk.text.strip() for hit in hits]


def test_scores_are_the_models_logits(directory):
    texts = [*TEXTS, "Berg " * 100, "Holm"]
    scores = load_reranker(directory).scores(QUESTION, texts)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, plain_logits(directory, texts), atol=1e-5)
    assert load_reranker(directory).scores(QUESTION, []).shape == (0,)


@pytest.mark.parametrize("search", ["vector", "text", "hybrid"])
def test_the_reranker_chooses_among_the_candidates(kb, directory, search):
    near = kb.retrieve(QUESTION, 9, search=search, rerank=False)
    logits = plain_logits(directory, texts_of(near))
    assert len(set(np.round(logits, 4))) == len(logits)
    expected = [near[row] for row in np.argsort(-logits)[:3]]
    assert expected != near[:3]
    assert kb.retrieve(QUESTION, 3, search=search, fetch_k=9) == expected  # scores and handles are the search's own
    assert kb.retrieve(QUESTION, 3, search=search, fetch_k=9, rerank=True) == expected


def test_a_question_is_answered_from_the_reranked(kb, directory):
    best = [TEXTS[row] for row in np.argsort(-plain_logits(directory, TEXTS))]  # 5 * 4 candidates: all of them
    asked = {"sampling": rc.Sampling(1), "rerank": True}
    assert texts_of(kb.ask(QUESTION, 4, **asked).hits) == best[:4]
    assert texts_of(kb.chat([{"role": "user", "content": QUESTION}], k=4, **asked).hits) == best[:4]
    least = kb.retrieve(QUESTION, 4, rerank=False)[1].score
    above = kb.retrieve(QUESTION, 12, rerank=False, score_threshold=least)
    kept = kb.retrieve(QUESTION, 4, score_threshold=least)
    assert texts_of(kept) == [text for text in best if text in texts_of(above)][:4]


def test_variety_and_vectors_are_not_reranked(kb):
    varied = kb.retrieve(QUESTION, 3, mmr_lambda=0.5)
    assert varied == kb.retrieve(QUESTION, 3, mmr_lambda=0.5, rerank=False)
    vector = kb.embedder.embed_query(QUESTION)
    assert kb.retrieve(vector, 3) == kb.retrieve(QUESTION, 3, rerank=False)
    with pytest.raises(ConfigError, match="mmr_lambda and rerank"):
        kb.retrieve(QUESTION, 3, mmr_lambda=0.5, rerank=True)
    with pytest.raises(ConfigError, match="the question is a vector"):
        kb.retrieve(vector, 3, rerank=True)
    kb.retriever.reranker, reranker = None, kb.retriever.reranker
    try:
        with pytest.raises(ConfigError, match="open the store with one"):
            kb.retrieve(QUESTION, 3, rerank=True)
    finally:
        kb.retriever.reranker = reranker


def test_reranking_ends_when_the_caller_gives_up(directory):
    limit = Limit(threading.Event())
    limit.cancelled.set()
    with pytest.raises(CancelledError), limited(limit):
        load_reranker(directory).scores(QUESTION, TEXTS)


def test_what_is_no_cross_encoder_is_refused(tmp_path):
    with pytest.raises(RerankerError, match="cannot be loaded"):
        load_reranker(tmp_path)
    with pytest.raises(RerankerError, match="BertModel"):
        load_reranker(save(tmp_path / "embedder", BertModel))
    with pytest.raises(RerankerError, match="3 labels"):
        load_reranker(save(tmp_path / "three", BertForSequenceClassification, num_labels=3))
