"""A store's documents under another model, against a store that was filled under it from the start."""

import pytest
from tiny_model import save_tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

import ragcache as rc
from ragcache.errors import ConfigError
from ragcache.store.places import Place

TEXTS = {
    "one.md": "# Tolvik\n\nTolvik has a river.\n\n## Mills\n\n"
    + "".join(f"Mill {n} stands at the river. " for n in range(12))
    + "\n",
    "two.txt": "".join(f"Osby has club {n}. " for n in range(9)) + "\n",
}
PAGES = (Place(0, {"page": 0, "page_label": "1"}), Place(18, {"page": 1, "page_label": "2"}))
OWN = rc.Document("own", "Mora has a lake.\nAnd a bridge.", {"year": 1901}, "Mora", "https://mora", PAGES)
CHUNKS = rc.ChunkerConfig(max_tokens=128, min_tokens=16)
SHORT = rc.Sampling(max_tokens=6)


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> rc.LanguageModel:
    """A model with other weights, whose tokenizer has a token for a word."""
    directory = save_tiny_llama(tmp_path_factory.mktemp("other"), seed=1)
    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    tokenizer.add_tokens(["river"])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return rc.load_lm(directory)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "docs"
    path.mkdir()
    for name, text in TEXTS.items():
        (path / name).write_text(text)
    return path


def fill(kb: rc.RagCache, folder) -> rc.RagCache:
    kb.ingest(folder)
    kb.ingest(OWN, split=False)
    return kb


def stored(kb: rc.Store) -> list:
    return [
        (one.id, one.source, one.title, one.metadata, one.file, one.content_hash,
         [(chunk.id, chunk.text, chunk.metadata) for chunk in kb.chunks_of(one.id)])
        for one in kb.documents()
    ]  # fmt: skip


def test_a_copy_is_what_the_other_model_would_have_read(open_kb, other, folder, tmp_path):
    first = fill(open_kb(chunker=CHUNKS), folder)
    before = [chunk.token_ids for chunk in first.chunks_of(str(folder / "one.md"))]
    copy = open_kb(tmp_path / "copy", model=other, method="reposition", chunker=CHUNKS)
    report = copy.copy(first)
    assert (sorted(report.added), report.failed) == (sorted(one.id for one in first.documents()), [])
    assert report.computed_tokens == report.tokens > 0
    assert stored(copy) == stored(first)
    assert [chunk.token_ids for chunk in first.chunks_of(str(folder / "one.md"))] == before  # left alone
    # The oracle: the same passages, given to the other model as documents of their own.
    fresh = open_kb(tmp_path / "fresh", model=other, method="reposition")
    chunks = [chunk for one in copy.documents() for chunk in copy.chunks_of(one.id)]
    fresh.ingest([rc.Document(chunk.id, chunk.text) for chunk in chunks], split=False)
    for chunk in chunks:
        (again,) = fresh.chunks_of(chunk.id)
        plain = other.tokenizer(f"{chunk.text.rstrip()}\n", add_special_tokens=False)["input_ids"]
        assert chunk.token_ids == plain
        assert chunk.handle == again.handle
    assert before != [chunk.token_ids for chunk in copy.chunks_of(str(folder / "one.md"))]
    answer = copy.ask("Where does the mill stand?", 3, sampling=SHORT)
    assert {hit.kv for hit in answer.hits} <= {"memory", "disk"}


def test_files_that_did_not_change_cost_nothing_in_the_copy(open_kb, other, folder, tmp_path):
    first = fill(open_kb(chunker=CHUNKS), folder)
    copy = open_kb(tmp_path / "copy", model=other, method="reposition", chunker=CHUNKS)
    copy.copy(first, kv="lazy")
    assert {one.state for one in copy.documents()} == {"pending"}
    report = copy.ingest(folder, kv="lazy", sync=True)
    assert sorted(report.unchanged) == sorted(str(folder / name) for name in TEXTS)
    assert (report.added, report.updated, report.removed) == ([], [], [])


def test_an_interrupted_copy_goes_on(open_kb, other, folder, tmp_path):
    first = fill(open_kb(chunker=CHUNKS), folder)
    copy = open_kb(tmp_path / "copy", model=other, method="reposition", ingest=rc.IngestConfig(window_tokens=1))

    def stop(event: rc.ProgressEvent) -> None:
        if event.stage == "commit" and event.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy.copy(first, progress=stop)
    done = [one.id for one in copy.documents()]
    report = copy.copy(first)
    assert (len(done), report.unchanged) == (2, done)
    assert [one.id for one in copy.documents()] == [one.id for one in first.documents()]
    with pytest.raises(ConfigError, match="kv 'later' is unknown"):
        copy.copy(first, kv="later")


def test_a_passage_that_is_too_long_is_reported(open_kb, folder, tmp_path):
    first = fill(open_kb(), folder)
    small = rc.load_lm(save_tiny_llama(tmp_path / "small", seed=2, positions=100))
    copy = open_kb(tmp_path / "copy", model=small, method="reposition")
    report = copy.copy(first)
    assert {failure.source for failure in report.failed} == {str(folder / name) for name in TEXTS}
    assert report.added == ["own"]


def test_a_copy_keeps_collections_apart(open_kb, other, tmp_path):
    first = open_kb()
    for name, text in (("a", "Osby has a mill."), ("default", "Tolvik has a river.")):
        first.collection(name).ingest(rc.Document("one", text))
    first.collection("open", public=True).ingest(rc.Document("one", "Mora has a lake."))
    second = open_kb(tmp_path / "second", model=other)
    report = second.copy(first)
    assert (report.added, report.failed, report.chunks) == (["one"] * 3, [], 3)
    there = [(one.collection, one.id) for one in second.documents()]
    assert there == [("a", "one"), ("default", "one"), ("open", "one")]
    secrets = [kb._collections.secrets() for kb in (first, second)]
    assert [secrets[1][name] == "" for name in ("a", "default", "open")] == [False, True, True]
    assert secrets[0]["a"] != secrets[1]["a"]
    assert second.copy(first).unchanged == ["one"] * 3
    flat = open_kb(tmp_path / "flat", model=other).collection("all")
    flat.copy(first.collection("a"))
    assert [(one.collection, one.id) for one in flat.documents()] == [("all", "one")]
