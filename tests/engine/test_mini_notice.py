"""The bundled models say once that they were made for the registry's text, over any other."""

import copy
import gzip
import inspect
import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from kit.makers import made_by, messages_of
from transformers import AutoTokenizer

import ragcache as rc
from ragcache.engine import questions as mini_notice
from ragcache.engine.questions import is_other_text
from ragcache.ingest.read_limits import ReadLimits
from ragcache_demo.bag_of_words import BagOfWords

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "examples" / "corpus"
REAL = ROOT.parent / "shared" / "data" / "corpus"
ENCYCLOPEDIC = [
    "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France.",
    "Photosynthesis converts light energy into chemical energy that is stored in glucose.",
    "In 1687 Isaac Newton published the laws of motion and of universal gravitation.",
]
ONE = rc.Sampling(max_tokens=1)


mini = made_by(rc.load_lm, "mini")
said = messages_of(mini_notice)


def store(path, model, inputs) -> rc.RagCache:
    kb = rc.RagCache.open(path, model=model, embedder=BagOfWords())
    kb.ingest(inputs, kv="lazy")
    return kb


def test_other_text_is_noticed_at_the_first_question_and_not_again(tmp_path, mini, said):
    with store(tmp_path / "kb", mini, [rc.Document(str(n), text) for n, text in enumerate(ENCYCLOPEDIC)]) as kb:
        assert said() == []
        kb.ask("Where is the Eiffel Tower?", 2, sampling=ONE)
        kb.ask("Who published the laws of motion?", 2, sampling=ONE)
    [text] = said()
    assert "'mini' knows one made-up registry" in text
    for model in (
        "HuggingFaceTB/SmolLM2-360M-Instruct (0.7 GB",
        "Qwen/Qwen3-0.6B (1.2 GB",
        "Llama-3.2-1B-Instruct (2.5",
    ):
        assert model in text


def test_an_ingestion_says_which_model_it_is_for_before_it_begins(tmp_path, mini):
    with store(tmp_path / "kb", mini, []) as kb:
        first, _ = str(kb.estimate_kv([rc.Document("a", ENCYCLOPEDIC[0])])).splitlines()
    assert first.startswith("reading for the model mini, a toy that knows examples/corpus alone")


ASK, OPEN, KNOWN = "say sampling=rc.Sampling({}=...)", "say RagCache.open(..., {}=...)", "the options are {}, "
SAID = {
    "max_tokens": ASK.format("max_tokens"),
    "n_predict": ASK.format("max_tokens"),
    "top_k": "say k=... for passages, sampling=rc.Sampling(top_k=...) for tokens",
    "similarity_top_k": "say k=...",
    "model_name": OPEN.format("model"),
    "embedding_model": OPEN.format("embedder"),
    "colour": KNOWN.format("search"),
}
SAID_OF_OPENING = {
    "model_name": "say model=...",
    "read_only": "say store=rc.StoreConfig(read_only=...)",
    "chunk_size": "say chunker=rc.ChunkerConfig(max_tokens=...)",
    "max_tokens": "say ask(..., sampling=rc.Sampling(max_tokens=...))",
}
SAID_OF_CONFIGURATIONS = [
    (rc.Sampling, "max_new_tokens", "say rc.Sampling(max_tokens=...)"),
    (rc.Sampling, "temp", "say rc.Sampling(temperature=...)"),
    (rc.Sampling, "colour", KNOWN.format("max_tokens")),
    (rc.ChunkerConfig, "chunk_size", "say rc.ChunkerConfig(max_tokens=...)"),
    (rc.ChunkerConfig, "chunk_overlap", "say rc.ChunkerConfig(overlap=...)"),
    (rc.StoreConfig, "memory", KNOWN.format("database")),
    (rc.IngestConfig, "colour", KNOWN.format("window_tokens")),
    (ReadLimits, "timeout", KNOWN.format("seconds")),
]


def test_a_wrong_option_is_told_how_it_is_said(tmp_path, mini):
    """A configuration's by a TypeError too, as any other class's."""
    for name, way_out in SAID_OF_OPENING.items():
        with pytest.raises(rc.errors.ConfigError, match="there is no option") as caught:
            rc.RagCache.open(tmp_path / "kb", **{name: 3})
        assert str(caught.value).endswith(way_out)
        assert not (tmp_path / "kb").exists()
    with store(tmp_path / "kb", mini, []) as kb:
        for name, way_out in SAID.items():
            with pytest.raises(rc.errors.ConfigError) as caught:
                kb.ask("Who?", **{name: 3})
            assert str(caught.value).startswith(f"there is no option {name}; {way_out}")
    for config, name, way_out in SAID_OF_CONFIGURATIONS:
        with pytest.raises(TypeError) as caught:
            config(**{name: 3})
        assert isinstance(caught.value, rc.errors.ConfigError)
        assert caught.value.option == name
        assert str(caught.value).startswith(f"there is no option {name}; {way_out}")


def test_configurations_stay_what_dataclasses_are():
    sampling = rc.Sampling(3, seed=4)
    assert pickle.loads(pickle.dumps(sampling)) == copy.deepcopy(sampling) == replace(sampling) == sampling
    assert list(inspect.signature(rc.Sampling).parameters)[:2] == ["max_tokens", "temperature"]
    with pytest.raises(rc.errors.UnknownOptionError, match=r"max_new_tokens, temp; say .*max_tokens.*temperature"):
        replace(sampling, max_new_tokens=3, temp=1)


def test_another_model_is_offered_a_store_of_its_own(tmp_path, mini):
    store(tmp_path / "kb", mini, []).close()
    with pytest.raises(rc.errors.ModelMismatchError, match="ragcache reencode NEW --store OLD --model mini-base"):
        rc.RagCache.open(tmp_path / "kb", model="mini-base", embedder=BagOfWords())


def test_the_registry_is_what_the_model_knows(tmp_path, mini, said):
    with store(tmp_path / "kb", mini, [CORPUS / "clubs"]) as kb:
        for question in ("Who founded the Archery Club Ivy?", "Where does the Rowing Club Falcon meet?"):
            kb.ask(question, 5, sampling=ONE)
    assert said() == []


def test_other_models_are_not_spoken_of(lm, tmp_path, said):
    with store(tmp_path / "kb", lm, [rc.Document("a", ENCYCLOPEDIC[0])]) as kb:
        kb.ask("Where is the Eiffel Tower?", 1, sampling=ONE)
    assert said() == []


def hits(tokenizer, texts) -> list[rc.Hit]:
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    chunks = [
        rc.Chunk(str(n), "", 0, text, row, {}, n, None, 0.0, "", "")
        for n, (text, row) in enumerate(zip(texts, ids, strict=True))
    ]
    return [rc.Hit(chunk, 0.0, None) for chunk in chunks]


@pytest.fixture(scope="module")
def tokenizer(mini):
    return AutoTokenizer.from_pretrained(ROOT / "ragcache" / "mini")


def test_every_text_of_the_registry_is_told_from_other_text(tokenizer):
    texts = [path.read_text(encoding="utf-8") for path in sorted(CORPUS.rglob("*.md"))]
    assert len(texts) > 50
    assert not [hit.chunk.text for hit in hits(tokenizer, texts) if is_other_text([hit])]


@pytest.mark.parametrize("name", ["xquad_en", "fastapi_docs", "hotpotqa_pooled"])
def test_every_real_passage_is_told_from_the_registrys(tokenizer, name):
    path = REAL / f"{name}.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"{name}.jsonl.gz is not here (../shared/data/corpus)")
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()[:500]]
    texts = [row["text"] for row in rows if len(row["text"]) > 100]
    assert len(texts) > 100
    assert [hit.chunk.text for hit in hits(tokenizer, texts) if not is_other_text([hit])] == []
