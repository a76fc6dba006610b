"""Laws 8 and 10 and the care of a store, through the engine."""

import os
import subprocess
import sys
import zlib
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from blocks import tier_of
from tiny_model import save_tiny_llama

import ragcache as rc
from ragcache import errors
from ragcache.retrieval.vector_index import VectorIndex
from ragcache_demo.bag_of_words import BagOfWords

QUESTION = "Where do dogs bark at night?"
SHORT = rc.Sampling(max_tokens=8)
TEXTS = ("cats", "clubs", "dogs", "rivers")  # ids of the store `kb`


def ask(kb, **options):
    return kb.ask(QUESTION, k=4, sampling=SHORT, **options)


def block_file(kb, handle) -> Path:
    (found,) = kb.store.layout.kv.rglob(f"{handle}*")
    return found


def corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


# Law 8


def test_another_model_is_refused(kb, open_kb, tmp_path):
    other = save_tiny_llama(tmp_path / "other-model", seed=1)
    with pytest.raises(errors.ModelMismatchError, match="fingerprint"):
        open_kb(model=rc.load_lm(other))
    with pytest.raises(errors.ModelMismatchError):
        open_kb(model=rc.load_lm(kb.lm.name, dtype="bfloat16"))
    assert ask(open_kb()).text == ask(kb).text


class OurEmbedder(BagOfWords):
    """An application's own: it has one name, whichever model is behind it."""

    def __init__(self, model: int, noise: float = 0.0) -> None:
        super().__init__("ours", 48)
        self.model, self.noise = model, noise
        self.asked = 0

    def _direction(self, word):
        return np.random.default_rng([self.model, zlib.crc32(word.encode())]).standard_normal(self.dimension)

    def embed_query(self, text):
        self.asked += 1
        vector = super().embed_query(text)
        blur = np.random.default_rng().standard_normal(self.dimension)
        return (vector + self.noise * blur / np.linalg.norm(blur)).astype(np.float32)


@pytest.mark.parametrize("read_only", [False, True])
def test_another_model_by_the_same_name_is_refused_before_it_ranks(open_kb, read_only):
    kb = open_kb(embedder=OurEmbedder(1))
    kb.ingest([rc.Document("cats", "# Cats\n\nThe cat sat on the mat.\n", title="About cats")])
    kb.close()
    config = rc.StoreConfig(read_only=read_only)
    for other in (OurEmbedder(2), OurEmbedder(1, noise=0.2)):
        with pytest.raises(
            errors.EmbedderMismatchError, match=r"'ours' makes another vector of .*use the model that filled"
        ):
            open_kb(embedder=other, store=config)
    same = OurEmbedder(1, noise=0.03)
    assert open_kb(embedder=same, store=config).retrieve("cat", 1)[0].chunk.document_id == "cats"


def test_an_embedder_is_asked_once_at_an_opening(open_kb):
    open_kb(embedder=OurEmbedder(1)).close()  # nothing was embedded by it yet, but its name was bound
    embedder = OurEmbedder(1)
    open_kb(embedder=embedder)
    assert embedder.asked == 1
    with pytest.raises(errors.EmbedderMismatchError):
        open_kb(embedder=OurEmbedder(2))


def test_vectors_of_another_length_are_another_embedders(open_kb):
    """Scores are inner products: the same directions at twice the length rank otherwise."""
    embedder = OurEmbedder(1)
    open_kb(embedder=embedder).close()
    single = embedder.embed_query
    embedder.embed_query = lambda text: 2 * single(text)
    with pytest.raises(errors.EmbedderMismatchError):
        open_kb(embedder=embedder)


def test_the_store_knows_its_model(kb, open_kb, model_directory):
    again = open_kb(model=None)
    assert again.lm.fingerprint == kb.lm.fingerprint
    assert again.lm.name == str(model_directory)


def test_blocks_of_another_recipe_are_never_served(kb, open_kb):
    before = {hit.handle for hit in ask(kb).hits}
    first = ask(open_kb(recipe="prefix"))
    assert {hit.kv for hit in first.hits} == {"computed"}
    assert not before & {hit.handle for hit in first.hits}


def test_a_changed_prefix_changes_prefix_blocks_and_leaves_isolated_ones(kb, open_kb, tmp_path):
    assert {hit.kv for hit in ask(open_kb(system="Be brief.")).hits} == {"disk"}
    open_kb(tmp_path / "p", recipe="prefix", texts={"cats": "The cat sat on the mat.\n"})
    assert {hit.kv for hit in ask(open_kb(tmp_path / "p", recipe="prefix")).hits} == {"disk"}
    assert {hit.kv for hit in ask(open_kb(tmp_path / "p", recipe="prefix", system="Be brief.")).hits} == {"computed"}


def test_a_store_keeps_its_primer_and_serves_any_system_prompt(kb, open_kb, tmp_path):
    recipe = rc.Recipe("primer", primer="Ships carry grain along the coast in summer.")
    texts = {id: kb.chunks_of(id)[0].text for id in TEXTS}
    with open_kb(tmp_path / "primed", recipe=recipe, texts=texts) as primed:
        handles = primed.store.documents.handles()
        assert primed.info().primer_tokens == len(primed.lm.recipe(recipe).primer_ids) > 0
    again = open_kb(tmp_path / "primed")
    turns = [{"role": "user", "content": QUESTION}]
    answers = [*(ask(again, system=system) for system in (None, "Be brief.")), again.chat(turns, k=4, context="keep")]
    for answer in answers:
        assert {source.handle for source in answer.hits} == handles == again.store.documents.handles()
    assert {source.kv for answer in answers[:2] for source in answer.hits} <= {"disk", "memory", "device", "shared"}
    with pytest.raises(errors.StoreMismatchError, match=r"read by recipe 'primer' with \d+ tokens, not by 'isolated'"):
        open_kb(tmp_path / "primed", recipe="isolated")


# Law 10


@pytest.mark.parametrize("models", [True, False])
def test_deleting_a_document_deletes_every_trace(kb, open_kb, models):
    other = open_kb()
    gone = next(hit for hit in ask(other).hits if hit.chunk.document_id == "dogs")
    path = block_file(kb, gone.handle)
    with nullcontext(kb) if models else rc.Store.open(kb.store.layout.root) as deleter:
        assert deleter.delete(["dogs", "never there"]) == ["dogs"]
        assert tier_of(deleter.store.kv, gone.handle) is None
    assert not path.exists()
    assert [d.id for d in kb.documents()] == ["cats", "clubs", "rivers"]
    for reader in (kb, other, open_kb()):
        assert gone.chunk.id not in [hit.chunk.id for hit in ask(reader).hits]
        assert tier_of(reader.store.kv, gone.handle) is None, "another process's memory let go of it too"
    assert kb.doctor().sound


def test_a_misspelt_field_of_a_filter_is_named_and_deletes_nothing(kb):
    kb.ingest(rc.Document("ferry", "The ferry leaves at nine.", {"year": 2024}))
    for wrong in ({"documentid": "ferry"}, {"year": 2024, "chunkid": "ferry#0"}):
        for call in (kb.documents, partial(kb.chunks, filter=wrong), partial(kb.delete, filter=wrong)):
            with pytest.raises(
                errors.FilterError, match=r"has metadata field '(document|chunk)id'.*have: year, source, title"
            ):
                call() if isinstance(call, partial) else call(wrong)
    either = {"$or": [{"documentid": "x"}, {"document_id": {"$in": ["cats", "dogs"]}}]}
    assert [one.id for one in kb.documents(either, limit=1)] == ["cats"]
    assert kb.documents(either, limit=0) == kb.documents(either, offset=2) == []  # others pass
    assert kb.chunks(filter={"year": 2025}) == kb.documents({"year": 2025}) == []
    assert [one.id for one in kb.chunks(filter={"year": 2024})] == ["ferry#0"]
    assert kb.delete(filter={"document_id": "ferry"}) == ["ferry"]
    assert kb.delete(filter={"document_id": "ferry"}) == []  # twice is no error


def test_opening_without_models_names_the_library(open_kb, tmp_path):
    with pytest.raises(errors.ConfigError, match=r"models=False.*Store\.open"):
        open_kb(models=False)
    assert not (tmp_path / "kb").exists()
    with pytest.raises(errors.StoreNotFoundError, match="kb"):
        rc.Store.open(tmp_path / "kb")
    with rc.Store.open(tmp_path / "kb", create=True) as empty:
        assert empty.delete("nobody") == []
        assert empty.doctor().index == "absent"


def test_a_library_loads_no_model_library(kb):
    """Listing and deleting start in the time that it takes to open the files."""
    kb.close()
    look = (
        "import sys, ragcache as rc\n"
        "with rc.Store.open(sys.argv[1]) as library:\n"
        "    print(len(library.documents()), library.info().chunks, len(library.chunks_of('cats')))\n"
        "    print(library.delete('cats'), len(library.pin('dogs')), library.doctor().sound)\n"
        "print('transformers' in sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", look, kb.store.layout.root], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["4 4 1", "['cats'] 1 True", "False"]


def test_a_block_computed_while_its_document_is_deleted_is_not_left_behind(kb, monkeypatch):
    """The block had been dropped as damaged; its chunk, retrieved before, still names it."""
    gone = next(hit for hit in ask(kb).hits if hit.chunk.document_id == "dogs")
    kb.store.kv.delete(gone.handle)
    kb._engine.contexts.clear()
    put = kb.store.kv.put

    def put_too_late(key, block):
        if key == gone.handle:
            assert kb.delete("dogs") == ["dogs"]
        return put(key, block)

    monkeypatch.setattr(kb.store.kv, "put", put_too_late)
    assert "dogs" in [hit.chunk.document_id for hit in ask(kb).hits], "the question was asked before"
    assert kb.document("dogs") is None
    assert tier_of(kb.store.kv, gone.handle) is None
    assert set(kb.store.kv.keys()) == set(kb.store.documents.handles())
    assert kb.doctor().sound


# Lazy, read-only, care


def test_lazy_blocks_are_computed_at_first_use(open_kb):
    kb = open_kb()
    report = kb.ingest(rc.Document("cats", "The cat sat on the mat.\n"), kv="lazy")
    assert report.computed_tokens == 0
    assert [d.state for d in kb.documents()] == ["pending"]
    first = ask(kb)
    kb._engine.contexts.clear()
    second = ask(kb)
    assert [hit.kv for hit in first.hits] == ["computed"]
    assert [hit.kv for hit in second.hits] == ["memory"]
    assert first.text == second.text
    assert [d.state for d in kb.documents()] == ["ready"]
    tokens = len(second.hits[0].chunk.token_ids)  # and BOS, the prefix
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 1 + tokens)
    assert (first.usage.created_tokens, second.usage.created_tokens) == (1 + tokens, 0)


def test_a_read_only_store_answers_and_writes_nothing(kb, open_kb):
    expected = ask(kb).text
    corrupt(block_file(kb, ask(kb).hits[0].handle))
    kb.close()
    before = {path: path.stat().st_mtime_ns for path in kb.store.layout.kv.rglob("*")}
    reader = open_kb(store=rc.StoreConfig(read_only=True))
    assert ask(reader).text == expected
    reader._engine.contexts.clear()
    assert ask(reader).hits[0].kv == "memory"
    with pytest.raises(errors.StoreReadOnlyError):
        reader.ingest(rc.Document("x", "y"))
    with pytest.raises(errors.StoreReadOnlyError):
        reader.delete("cats")
    assert {path: path.stat().st_mtime_ns for path in kb.store.layout.kv.rglob("*")} == before


def test_a_store_that_is_not_there_is_named(open_kb, tmp_path):
    with pytest.raises(errors.StoreNotFoundError, match="nowhere"):
        open_kb(tmp_path / "nowhere", create=False)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(errors.StoreNotFoundError, match="full"):
        open_kb(tmp_path / "full")
    assert os.listdir(tmp_path / "full") == ["thesis.txt"]


def test_the_doctor_repairs_what_can_be_repaired(kb, open_kb):
    expected = ask(kb).text
    handles = [hit.handle for hit in ask(kb).hits]
    corrupt(block_file(kb, handles[0]))
    block_file(kb, handles[1]).unlink()
    kb.store.kv.put("ab" * 32, kb.lm.encode([[1, 2, 3]])[0])
    index = kb.store.layout.index
    index.write_bytes(index.read_bytes()[:100])
    kb.close()
    patient = rc.Store.open(kb.store.layout.root)
    report = patient.doctor()
    assert not report.sound
    assert report.damaged == [handles[0]]
    assert report.orphans == ["ab" * 32]
    assert len(report.missing) == 2
    assert report.index.startswith("rebuilt")
    assert patient.doctor().sound
    patient.close()
    healed = open_kb()
    answer = ask(healed)
    assert answer.text == expected
    assert sorted(hit.kv for hit in answer.hits) == ["computed", "computed", "disk", "disk"]


def test_an_index_that_lies_is_rebuilt(kb, open_kb):
    expected = [hit.chunk.id for hit in ask(kb).hits]
    stolen = kb.store.layout.index.read_bytes()
    kb.ingest(rc.Document("later", "Dogs bark at night in the morning too.\n"))
    kb.close()
    kb.store.layout.index.write_bytes(stolen)
    with rc.Store.open(kb.store.layout.root) as patient:
        assert patient.doctor().index.startswith("rebuilt")
    assert [hit.chunk.id for hit in open_kb().ask(QUESTION, k=5, sampling=SHORT).hits if hit.chunk.id in expected]


def test_an_index_of_other_vectors_is_rebuilt(kb):
    """Its ids are those of the documents, and its seal is the store's."""
    path, seal = kb.store.layout.index, kb.store.kv.seal
    index = VectorIndex.load(path, seal)
    ids = np.array(sorted(index.ids))
    _, vectors = index.vectors_present(ids)
    index.remove(ids.tolist())
    index.add(ids, vectors[::-1])
    index.save(path)
    kb.close()
    with rc.Store.open(kb.store.layout.root) as patient:
        assert patient.doctor().index == "rebuilt: it held other vectors than the documents"
        assert patient.doctor().index == "sound"


def test_info_counts_over_the_life_of_the_store(kb, open_kb):
    ask(kb)
    kb.close()
    again = open_kb()
    ask(again)
    info = again.info()
    assert (info.documents, info.chunks, info.blocks, info.pending) == (4, 4, 4, 0)
    assert info.hits_by_tier == {"memory": 4, "disk": 4}
    assert (info.misses, info.hit_rate) == (0, 1.0)
    tokens = sum(len(hit.chunk.token_ids) for hit in ask(again).hits)
    assert info.tokens == tokens
    assert info.bytes_by_tier["memory"] == tokens * again.lm.kv_bytes_per_token
    assert info.bytes_by_tier["disk"] > info.bytes_by_tier["memory"]


STAYS = {"club": "The rowing club of Kelbrook meets on Monday.", "river": "The river Arno rises in the Vale hills."}


def read_from_elsewhere(kb):
    """Ask over the texts as passages of the caller's: their KV is in memory then, and nowhere else."""
    passages = [rc.Passage(text) for text in STAYS.values()]
    answer = kb.chat([{"role": "user", "content": [*passages, "Who?"]}], sampling=SHORT)
    handles = [hit.handle for hit in answer.hits]
    assert {tier_of(kb.store.kv, handle) for handle in handles} == {"memory"}
    return set(handles)


def on_disk(kb):
    return {path.stem for path in kb.store.layout.kv.rglob("*.safetensors")}


def test_what_is_in_memory_alone_is_not_stored(open_kb):
    kb = open_kb()
    handles = read_from_elsewhere(kb)
    documents = [rc.Document(id, text) for id, text in STAYS.items()]
    assert kb.ingest(documents, split=False, dry_run=True).computed_tokens > 0
    report = kb.ingest(documents, split=False)
    assert (sorted(report.added), report.reused_blocks) == (["club", "river"], 0)
    assert handles <= on_disk(kb)
    assert (kb.info().blocks, kb.info().pending) == (len(on_disk(kb)), 0)
    kb.close()
    again = open_kb()
    assert {hit.kv for hit in again.ask("Who?", k=2, sampling=SHORT).hits} == {"disk"}
    assert again.doctor().sound


def test_documents_stored_without_kv_do_not_count_what_is_in_memory(open_kb):
    kb = open_kb()
    read_from_elsewhere(kb)
    documents = [rc.Document(id, text) for id, text in STAYS.items()]
    kb.ingest(documents, split=False, kv="lazy")
    assert (kb.info().pending, [d.state for d in kb.documents()]) == (2, ["pending", "pending"])
    report = kb.ingest(documents, split=False)
    assert (report.unchanged, kb.info().pending) == (["club", "river"], 0)
    assert {chunk.handle for id in STAYS for chunk in kb.chunks_of(id)} <= on_disk(kb)


def test_a_block_that_is_lost_is_pending_and_missing_though_memory_has_it(kb):
    ask(kb)
    handle = kb.chunks_of("dogs")[0].handle
    block_file(kb, handle).unlink()
    assert tier_of(kb.store.kv, handle) == "memory"
    assert kb.info().pending == 1
    assert kb.ingest(rc.Document("dogs", "Dogs bark at night in the town of Kelbrook.\n")).unchanged == ["dogs"]
    assert kb.info().pending == 0
    block_file(kb, handle).unlink()
    assert kb.doctor().missing == ["dogs#0"]
    assert [d.state for d in kb.documents({"document_id": "dogs"})] == ["pending"]
