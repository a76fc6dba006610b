"""A store that keeps a share of each passage's KV (KVzip), from ingestion to answers, against `rc.fuse` by hand."""

import pytest

import ragcache as rc
from integrations.remote.tests.vllm_double import VllmDouble, serving
from ragcache.engine.verdict import MethodVerdict, Verdict, cannot_read_blocks, save_verdict
from ragcache.errors import ConfigError, IngestError, PromptError, StoreMismatchError
from ragcache.fusion import get_method
from ragcache.models.generate import decode
from ragcache_vllm.request_layout import served_name

IDS = ("cats", "dogs", "rivers", "clubs")
QUESTION = "Where do dogs bark at night?"
SHORT = rc.Sampling(max_tokens=8)
RECIPE = rc.Recipe(kept=0.4)


@pytest.fixture
def sparse(kb, open_kb, tmp_path):
    """The passages of `kb`."""
    texts = {id: kb.chunks_of(id)[0].text for id in IDS}
    kb = open_kb(tmp_path / "sparse", recipe=RECIPE, texts=texts)
    return kb


def ask(kb, **options):
    return kb.ask(QUESTION, k=3, sampling=SHORT, **options)


def by_hand(kb, hits, method="reposition", **options):
    """The answer's ids from blocks that are encoded here."""
    ends = kb._parts.engine.prompts.question_ends(QUESTION)
    prompt = rc.Prompt(ends.prefix_ids, [hit.chunk.token_ids for hit in hits], ends.suffix_ids)
    fused = rc.fuse(kb.lm, prompt, method, recipe=RECIPE, **options)
    eos = (kb.lm.tokenizer.eos_token_id,)
    ids = list(decode(kb.lm, fused.cache, fused.next_logits, fused.next_position, SHORT, eos_ids=eos))
    return kb.lm.tokenizer.decode(ids), fused


def test_answers_are_those_of_blocks_made_by_hand_from_every_tier(sparse, open_kb, tmp_path):
    hits = sparse.retrieve(QUESTION, 3)
    text, fused = by_hand(sparse, hits)
    assert min(fused.kept_tokens) < fused.prompt_tokens - 50
    cold = ask(open_kb(tmp_path / "sparse"))
    again = ask(sparse)
    assert cold.text == again.text == ask(sparse).text == text
    assert {source.kv for source in cold.hits} == {"disk"}
    assert {source.kv for source in ask(sparse).hits} == {"memory"}


def test_the_store_is_smaller_by_the_share(sparse, kb):
    files = [sum(f.stat().st_size for f in one.store.layout.kv.rglob("*.safetensors")) for one in (kb, sparse)]
    blocks = [kb.store.kv.get(kb.chunks_of(id)[0].handle).block for id in IDS]
    few = [sparse.store.kv.get(sparse.chunks_of(id)[0].handle).block for id in IDS]
    for block, less in zip(blocks, few, strict=True):
        assert less.num_tokens == block.num_tokens
        assert sum(less.tokens_by_layer) == less.num_layers * -(-block.num_tokens * 4 // 10)
        assert less.num_bytes < 0.45 * block.num_bytes
    assert files[1] < files[0]


def test_later_openings_know_the_share(sparse, open_kb, tmp_path):
    for recipe in (None, "isolated", RECIPE):
        kb = open_kb(tmp_path / "sparse", recipe=recipe)
        assert {source.kv for source in ask(kb).hits} == {"disk"}
    with pytest.raises(StoreMismatchError, match="kv_kept"):
        open_kb(tmp_path / "sparse", recipe=rc.Recipe(kept=0.5))
    with pytest.raises(StoreMismatchError, match="kv_kept"):
        open_kb(tmp_path / "sparse", recipe=rc.Recipe(kept=0.4, task="names"))


def test_many_askers_get_what_each_gets_alone(sparse):
    questions = [QUESTION, "Is the cat happy?", QUESTION, "Where does the club meet?", QUESTION]
    alone = [sparse.ask(question, k=3, sampling=SHORT).text for question in questions]
    assert [answer.text for answer in sparse.ask_many(questions, k=3, sampling=SHORT)] == alone


def test_concat_works_and_full_reads_text(sparse):
    hits = sparse.retrieve(QUESTION, 3)
    assert ask(sparse, method="concat").text == by_hand(sparse, hits, "concat")[0]
    assert {source.kv for source in ask(sparse, method="full").hits} <= {"unused", "exact"}


def test_a_conversation_keeps_its_passages(sparse, open_kb, tmp_path):
    """Each turn places the blocks of all turns; a store that keeps no context at all answers alike."""
    other = open_kb(tmp_path / "sparse", store=rc.StoreConfig(prefix_bytes=0))
    messages = [{"role": "user", "content": QUESTION}]
    for question in ("Is the cat happy?", "And the dogs?", None):
        one, two = (
            kb.chat(messages, k=2, method="reposition", context="keep", sampling=SHORT) for kb in (sparse, other)
        )
        assert one.text == two.text
        messages += [{"role": "assistant", "content": one.text}, {"role": "user", "content": question or "?"}]


def test_methods_that_need_all_kv_are_refused_by_name(sparse, open_kb, tmp_path):
    for method in ("cacheblend", "epic", "samkv", "a3"):
        with pytest.raises(ConfigError, match=rf"{method}.*all of them.*kept=1"):
            ask(sparse, method=method)
        with pytest.raises(ConfigError, match=method):
            open_kb(tmp_path / "sparse", method=method)
        with pytest.raises(ConfigError, match=method):
            open_kb(tmp_path / "other", method=method, recipe=RECIPE)


@pytest.mark.parametrize("method", [None, "auto"])
def test_what_was_checked_over_whole_kv_says_nothing_of_less(sparse, open_kb, tmp_path, method):
    """Without a method to name, these blocks are not read, even where the check passed one that could."""
    passed = MethodVerdict("reposition", {}, "isolated", True, "", 0.1)
    save_verdict(sparse.store.layout.root, Verdict(sparse.lm.fingerprint, "tiny", "tests", 10, {}, (passed,)))
    kb = open_kb(tmp_path / "sparse", method=method)
    answers = [ask(kb), ask(sparse, method="auto")]
    assert [(one.method, one.method_reason) for one in answers] == [
        ("full", cannot_read_blocks(get_method("cacheblend")))
    ] * 2
    assert kb.method == "full"
    assert ask(kb, method="reposition").text == ask(sparse).text


def test_another_engine_is_refused(sparse, open_kb, tmp_path):
    refused = pytest.raises(ConfigError, match=r"leave out tokens.*leave out the engine")
    with serving(VllmDouble(served_name(sparse.lm.fingerprint), [5])) as vllm, refused:
        open_kb(tmp_path / "sparse", model=None, engine=vllm.url, method="reposition")


def test_a_passage_that_fits_the_model_once_and_not_twice_fails_by_its_name(open_kb, tmp_path):
    kb = open_kb(tmp_path / "sparse", recipe=RECIPE, chunker=rc.ChunkerConfig(max_tokens=400))
    report = kb.ingest([rc.Document("long", "word " * 79 + "end."), rc.Document("short", "A hat.")])
    (failure,) = report.failed
    assert failure.source == "long"
    assert isinstance(failure.error, PromptError | IngestError)
    assert "read behind it" in str(failure.error)
    assert report.added == ["short"]


def test_estimates_know_the_share(sparse, kb):
    documents = [rc.Document(str(n), "The cat sat on the mat. " * 20) for n in range(4)]
    whole, less = kb.estimate_kv(documents), sparse.estimate_kv(documents)
    assert whole.tokens == less.tokens
    assert 0.4 * whole.num_bytes < less.num_bytes < 0.42 * whole.num_bytes
    assert sparse.full_prefill_samples == 0  # reading twice is no measure of a full prefill


def test_kvtc_finds_its_basis_in_such_blocks(open_kb, tmp_path):
    kb = open_kb(tmp_path / "both", recipe=RECIPE, store=rc.StoreConfig(codec="kvtc"))
    kb.ingest(
        rc.Document(str(n), f"Text {n}: " + "the cat sat on the mat, and dogs bark at night. " * 3) for n in range(9)
    )
    answer = ask(kb)
    again = open_kb(tmp_path / "both", store=rc.StoreConfig(codec="kvtc"))
    assert ask(again).text == answer.text
