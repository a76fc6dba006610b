"""LLMLingua-2's compression against the paper's rule in NumPy, over a plain forward of the classifier."""

import pickle

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForTokenClassification, BertTokenizerFast

import ragcache as rc
from ragcache.errors import ConfigError, ModelNotFoundError
from ragcache_papers.llmlingua2 import Compressor

WORDS = [
    "the",
    "rowing",
    "club",
    "of",
    "kelbrook",
    "meets",
    "on",
    "monday",
    ".",
    "dogs",
    "bark",
    "at",
    "night",
    "##ing",
]
TEXT = "The rowing club of Kelbrook meets on Monday.\nDogs barking at night.  The town of Kelbrook.\n"


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    path = tmp_path_factory.mktemp("classifier")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    ids = {word: number for number, word in enumerate(vocabulary)}
    BertTokenizerFast(vocab=ids, model_max_length=64).save_pretrained(path)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(ids), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=64, num_labels=2, initializer_range=0.5,
    )  # fmt: skip
    BertForTokenClassification(config).eval().save_pretrained(path)
    return path


def brute_force(path, text):
    """(word, tokens, probability) in order: mean over a word's tokens of the softmax of label 1."""
    tokenizer, model = BertTokenizerFast.from_pretrained(path), BertForTokenClassification.from_pretrained(path).eval()
    encoded = tokenizer(text, return_tensors="pt", return_offsets_mapping=True)
    with torch.no_grad():
        logits = model(input_ids=encoded["input_ids"]).logits[0].numpy()
    stay = np.exp(logits[:, 1]) / np.exp(logits).sum(axis=1)
    rows = []
    for word in dict.fromkeys(number for number in encoded.word_ids(0) if number is not None):
        at = [place for place, number in enumerate(encoded.word_ids(0)) if number == word]
        start, end = encoded["offset_mapping"][0][at[0]][0], encoded["offset_mapping"][0][at[-1]][1]
        rows.append((text[start:end], len(at), stay[at].mean()))
    return rows


@pytest.mark.parametrize("keep", [0.1, 0.3, 0.5, 0.9])
def test_the_likeliest_words_stay(classifier, keep):
    rows = brute_force(classifier, TEXT)
    left, stay = keep * sum(tokens for _, tokens, _ in rows), set()
    for place in np.argsort([-probability for *_, probability in rows], kind="stable"):
        if left <= 0:
            break
        left -= rows[place][1]
        stay.add(int(place))
    expected = [word for place, (word, *_) in enumerate(rows) if place in stay]
    found = Compressor(str(classifier), keep).compress(TEXT)
    assert "".join(found.split()) == "".join(expected)


def test_probabilities_are_the_plain_models(classifier):
    words = Compressor(str(classifier), 0.5).words(TEXT)
    rows = brute_force(classifier, TEXT)
    assert [(TEXT[word.start : word.end], word.tokens) for word in words] == [row[:2] for row in rows]
    np.testing.assert_allclose([word.probability for word in words], [row[2] for row in rows], rtol=1e-5)
    assert "barking" in [row[0] for row in rows]  # a word of two tokens


def test_long_texts_are_read_in_windows(classifier):
    """Each window is read alone: the first one's words are those of a short text."""
    compressor = Compressor(str(classifier), 0.5)
    long = compressor.words(TEXT * 8)
    assert "".join((TEXT * 8)[word.start : word.end] for word in long) == "".join((TEXT * 8).split())


def test_keeping_all_is_no_compression(classifier):
    assert Compressor(str(classifier), 1.0).compress(TEXT) == TEXT
    nearly = Compressor(str(classifier), 0.999).compress(TEXT)
    assert "".join(nearly.split()) == "".join(TEXT.split())
    assert nearly == TEXT.strip()


def test_a_store_reads_what_is_left_and_keeps_the_text(open_kb, classifier):
    cut = rc.ChunkerConfig(compressor=str(classifier), keep=0.4)
    kb = open_kb(chunker=cut)
    kb.ingest(rc.Document("clubs", TEXT))
    [chunk] = kb.chunks_of("clubs")
    assert chunk.text.split() == TEXT.split()
    left = Compressor(str(classifier), 0.4).compress(TEXT.strip())
    assert list(chunk.token_ids) == kb.lm.tokenizer(f"{left}\n", add_special_tokens=False)["input_ids"]
    [hit] = kb.ask("Who meets?", k=1, sampling=rc.Sampling(2)).hits
    assert (hit.kv, hit.chunk.text) == ("memory", chunk.text)
    assert kb.ingest(rc.Document("clubs", TEXT)).unchanged == ["clubs"]


def test_another_share_reads_documents_anew(open_kb, classifier):
    open_kb(chunker=rc.ChunkerConfig(compressor=str(classifier), keep=0.4)).ingest(rc.Document("clubs", TEXT))
    again = open_kb(chunker=rc.ChunkerConfig(compressor=str(classifier), keep=0.6))
    assert again.ingest(rc.Document("clubs", TEXT)).updated == ["clubs"]


def test_it_is_sent_by_its_name(classifier):
    compressor = Compressor(str(classifier), 0.5)
    found = compressor.compress(TEXT)
    assert pickle.loads(pickle.dumps(compressor)).compress(TEXT) == found


@pytest.mark.parametrize("keep", [0, -0.1, 1.5])
def test_a_share_out_of_range_is_refused(classifier, keep):
    with pytest.raises(ConfigError, match=f"keep is {keep}"):
        Compressor(str(classifier), keep)


def test_what_is_no_classifier_is_refused_by_name(tmp_path):
    with pytest.raises(ModelNotFoundError, match=f"cannot load a token classifier under '{tmp_path}'"):
        Compressor(str(tmp_path), 0.5).compress(TEXT)


def test_a_name_that_is_nowhere_fails_with_the_nearest_there_is(classifier):
    with pytest.raises(ModelNotFoundError, match=f"did you mean '{classifier}'"):
        Compressor(f"{classifier}x", 0.5).compress(TEXT)
