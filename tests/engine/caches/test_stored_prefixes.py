"""Prompts that go on from what was read before the store was closed, against plain transformers."""

import logging
import threading
from dataclasses import replace

import forked
import pytest
from engine_texts import TEXTS
from families import assert_same, block_diagonal, load_tiny, method_families, oracle_logits, random_prompt, save_tiny
from kit.makers import open_loading
from plain_oracle import greedy
from tiny_model import save_tiny_llama

import ragcache as rc
from ragcache.engine.caches import stored_prefixes
from ragcache.engine.caches.generation import Generation
from ragcache.engine.caches.prefix_cache import PrefixCache
from ragcache.engine.caches.prefixes import Prefixes
from ragcache.engine.caches.stored_prefixes import StoredPrefixes
from ragcache.engine.loader import BlockLoader
from ragcache.engine.rates import Rates
from ragcache.fusion.fuse import fuse
from ragcache.kv.block_key import Recipe
from ragcache.models.sampler import Sampling
from ragcache.store.kv_store import KVStore
from ragcache.store.prefill_rate import PrefillRate

SHORT = Sampling(max_tokens=6)
LATE = 20  # tokens that a continued prompt may run beside its new ones
TALK = [
    {"role": "system", "content": "You are short and polite, and say nothing that was not asked for."},
    {"role": "user", "content": "Where does the rowing club meet, and on which days of the week does it row?"},
]
OUTSIDE = [
    "The lighthouse of Brenholm was built of oak, and burnt down in a night of May.\n",
    "A ferry goes from Brenholm to the island every second hour, but not on Sundays.\n",
]


class Unchanged:
    """Documents that never change."""

    def chunks_by_vector_ids(self, ids):
        return []

    def generation(self):
        return 1


@pytest.fixture(scope="module", params=method_families("deepseek_v2"))
def family(request, tmp_path_factory):
    return load_tiny(request.param, tmp_path_factory.mktemp(request.param))


open_kb = open_loading(method="full")


def reopened(lm, root, rates=None, policy="always"):
    """A new tree over what is stored, as after a restart."""
    tree, blocks = PrefixCache(lm.shape, 1 << 24), KVStore(root / "foreign", memory_bytes=0)
    loader = BlockLoader(KVStore(root / "kv", foreign=blocks), rates, policy=policy)
    generation = Generation(Unchanged(), list)
    stored = StoredPrefixes(tree, generation, loader, blocks, loader.kv.passages)
    return Prefixes(lm, Unchanged(), generation, Recipe.of("isolated"), "", tree, (), stored), loader


def close(prefixes, loader):
    prefixes.clear()
    loader.close()
    loader.kv.close()


def created(prefixes, ids):
    with prefixes.text(ids) as made:
        assert made.exact.num_tokens == len(ids)
        return made.created_tokens


def files(kb):
    return [path for path in kb.store.layout.foreign.rglob("*") if path.is_file() and len(path.stem) == 64]


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_what_goes_on_from_a_known_prefix_is_what_is_read_at_once(family, tmp_path, monkeypatch, where):
    """The second prompt goes on from the first, the third parts from it within a block, the fourth goes on from the
    third. From disk each prompt meets an empty tree. Windows of 11 tokens begin before the cuts and behind them."""
    lm, oracle = family
    monkeypatch.setattr(stored_prefixes, "PIECE_TOKENS", 24)
    prompt = random_prompt(3, prefix=90, chunks=(7, 13))
    ids, other = list(prompt.prefix_ids), list(random_prompt(4, prefix=40).prefix_ids)
    third = [*ids[:35], *other]
    assert third[35] != ids[35]
    in_memory, asked_for = within(lm, 1 << 24), [(ids[:60], 60), (ids, 30), (third, 40), ([*third, 5, 6, 7], 3)]
    for prefix, ran in [*asked_for, *([(ids[:10], 0), (ids, 0)] if where == "memory" else [])]:
        asked = replace(prompt, prefix_ids=prefix)
        parts = rc.encode(lm, asked, recipe="isolated")
        prefixes, loader = reopened(lm, tmp_path) if where == "disk" else (in_memory, None)
        with prefixes.text(prefix) as made:
            assert made.created_tokens == ran
            fused = fuse(lm, asked, "reposition", parts, exact=made.exact)
        assert_same(fused.next_logits, oracle_logits(oracle, asked, block_diagonal(asked)))
        if loader is not None:
            close(prefixes, loader)


def test_what_is_read_later_than_computed_is_computed(lm, tmp_path):
    ids = list(random_prompt(3, prefix=300).prefix_ids)
    first = reopened(lm, tmp_path)
    assert created(first[0], ids) == 300
    close(*first)
    for latency_s, tokens_s, policy, ran in (
        (1e-6, 1.0, "auto", 0),
        (10.0, 1e9, "auto", 300),
        (30.0, 5.0, "auto", 44),  # 256 tokens in 30 s are quicker, the other 44 are not
        (10.0, 1e9, "always", 0),
        (1e-6, 1.0, "never", 300),
    ):
        rates = Rates()
        rates.tier("disk").set(latency_s, 1e15)
        rates.compute.set(PrefillRate.of(tokens_s))
        again = reopened(lm, tmp_path, rates, policy)
        assert created(again[0], ids) == ran
        close(*again)


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_a_text_goes_on_after_every_restart(open_kb, oracle, codec):
    """Every prompt runs its new tokens alone, and is continued as plain transformers continue it."""
    text, before = TEXTS["cats"] * 2, 0
    for more in ("And where do they row?", "Who told you so?", "That was all that I asked for."):
        with open_kb(store=rc.StoreConfig(codec=codec)) as kb:
            answer = kb.complete(text, sampling=SHORT)
            usage = answer.usage
            assert before - LATE <= usage.cached_tokens <= before
            before = usage.prompt_tokens
            assert usage.computed_tokens + usage.cached_tokens == before
        tokenizer = oracle[1]
        prompt = rc.Prompt([tokenizer.bos_token_id], [], tokenizer(text, add_special_tokens=False).input_ids)
        assert prompt.num_tokens == before
        assert answer.text == greedy(*oracle, prompt, None, SHORT.max_tokens)
        text += more


def ways(kb):
    """A prompt of each kind; every one is asked twice, with a store closed between."""
    text = TEXTS["cats"] * 3
    yield lambda kb: kb.complete(text, sampling=SHORT)
    yield lambda kb: kb.chat(TALK, sampling=SHORT)
    yield lambda kb: kb.ask("Where do dogs bark?", k=3, sampling=SHORT)
    yield lambda kb: kb.ask("Where do dogs bark?", hits=[rc.Passage(text)], sampling=SHORT)
    # Under `reposition` what stands before the passages; they have blocks of their own.
    yield lambda kb: kb.chat([TALK[0], {"role": "user", "content": [rc.Passage(text), "Why?"]}], method="reposition")


@pytest.mark.parametrize("number", range(5))
def test_any_prompt_is_found_after_a_restart(open_kb, number):
    with open_kb(texts=TEXTS) as kb:
        first = list(ways(kb))[number](kb)
        assert first.usage.cached_tokens < 8
    with open_kb() as kb:
        again = list(ways(kb))[number](kb)
        assert again.text == first.text
        ran = again.usage.prompt_tokens - again.usage.cached_tokens
        assert ran <= LATE or (number == 4 and ran < 50)


def leave(kb):
    """A conversation, and passages of no document."""
    kb.complete([*map(rc.Passage, OUTSIDE), "What?"], method="reposition", sampling=SHORT)
    return kb.chat(TALK, sampling=SHORT)


def found(kb):
    """Tokens of TALK, passages of `OUTSIDE` as text, and of them as they are handed over, whose KV is there."""
    talked = kb.chat(TALK, sampling=SHORT).usage.cached_tokens
    as_text = kb.complete(f"Read.\n{''.join(OUTSIDE)}\nWhat?", method="reposition", sampling=SHORT)
    given = kb.complete([*map(rc.Passage, OUTSIDE), "What?"], method="reposition", sampling=SHORT)
    return talked, len(as_text.hits), sum(hit.kv != "computed" for hit in given.hits)


def test_other_collections_and_models_find_nothing(open_kb, tmp_path):
    with open_kb() as kb:
        leave(kb.collection("one"))
    with open_kb() as kb:
        talked, *others = found(kb.collection("one"))
        assert (talked > 100, others) == (True, [2, 2])
        for other in (kb.collection("two"), kb):
            assert found(other) == (0, 0, 0)
    with open_kb(recipe=rc.Recipe(bos=True)) as kb:
        assert found(kb)[1:] == (0, 0)
    # A cache that was carried to a store of another model: names and owners differ.
    other = rc.load_lm(save_tiny_llama(tmp_path / "lm", seed=5))
    open_kb(path=tmp_path / "other", model=other).close()
    (tmp_path / "kb" / "foreign").rename(tmp_path / "other" / "foreign")
    with open_kb(path=tmp_path / "other", model=other) as kb:
        for seen in (kb, kb.collection("one")):
            assert found(seen) == (0, 0, 0)


def test_a_changed_document_takes_what_may_quote_it(open_kb):
    """By whomever it is deleted, no bytes are left (law 10); what is asked later is kept."""
    with open_kb(texts=TEXTS) as kb:
        kb.chat(TALK, sampling=SHORT)
    with rc.Store.open(kb.store.layout.root) as library:
        assert files(library)
        library.delete(next(iter(TEXTS)))
        assert not files(library)
        assert not library.store.kv.passages.prefixes_before(-1)
    with open_kb() as kb:
        assert kb.chat(TALK, sampling=SHORT).usage.cached_tokens == 0
    with open_kb() as kb:
        assert kb.chat(TALK, sampling=SHORT).usage.cached_tokens > 100


def test_what_is_deleted_while_it_is_written_leaves_nothing(open_kb, monkeypatch):
    with open_kb(texts=TEXTS) as kb:
        foreign, other = kb.store.kv.foreign, rc.Store.open(kb.store.layout.root)
        put = foreign.put

        def put_and_delete(*arguments):
            made = put(*arguments)
            other.delete(next(iter(TEXTS)))
            return put(*arguments) or made  # as if the deletion had come just before

        monkeypatch.setattr(foreign, "put", put_and_delete)
        kb.chat(TALK, sampling=SHORT)
    other.close()
    assert not files(kb)


def test_damaged_blocks_are_computed_and_written_again(open_kb, caplog):
    with open_kb() as kb:
        first = leave(kb)
    for path in files(kb):
        data = bytearray(path.read_bytes())
        data[-9] ^= 255
        path.write_bytes(data)
    caplog.set_level(logging.WARNING)
    with open_kb() as kb:
        again = kb.chat(TALK, sampling=SHORT)
        assert (again.text, again.usage.cached_tokens) == (first.text, 0)
        as_text = kb.complete(f"Read.\n{''.join(OUTSIDE)}\nWhat?", method="reposition", sampling=SHORT)
        assert [hit.kv for hit in as_text.hits] == ["computed"] * 2
        assert "dropped from disk" in caplog.text
    with open_kb() as kb:
        assert kb.chat(TALK, sampling=SHORT).usage.cached_tokens > 100


def test_the_budget_holds_and_what_was_evicted_is_computed(open_kb, monkeypatch):
    monkeypatch.setattr(stored_prefixes, "PIECE_TOKENS", 32)
    with open_kb() as kb:
        first = kb.chat(TALK, sampling=SHORT)
    size = sum(path.stat().st_size for path in files(kb))
    for budget in (size // 2, 1000):
        small = rc.StoreConfig(foreign_cache=budget)
        with open_kb(path=kb.store.layout.root.parent / str(budget), store=small) as other:
            other.chat(TALK, sampling=SHORT)
        assert sum(path.stat().st_size for path in files(other)) <= budget
        with open_kb(path=other.store.layout.root, store=small) as other:
            assert other.chat(TALK, sampling=SHORT).text == first.text


@pytest.mark.parametrize("store", [rc.StoreConfig(foreign_cache=0), rc.StoreConfig(prefix_bytes=0)])
def test_nothing_is_kept_where_there_is_no_place_for_it(open_kb, store):
    with open_kb(store=store) as kb:
        first = leave(kb) if store.foreign_cache == 0 else kb.chat(TALK, sampling=SHORT)
        assert not kb.store.layout.foreign.exists()
    with open_kb(store=store) as kb:
        again = kb.chat(TALK, sampling=SHORT)
        assert (again.text, again.usage.cached_tokens) == (first.text, 0)
        assert found(kb)[1:] == (0, 0)


def test_reading_alone_writes_nothing(open_kb):
    with open_kb(texts=TEXTS) as kb:
        kb.chat(TALK, sampling=SHORT)
    before = sorted(files(kb))
    with open_kb(store=rc.StoreConfig(read_only=True)) as kb:
        assert kb.chat(TALK, sampling=SHORT).usage.cached_tokens > 100
        kb.complete(TEXTS["cats"] * 3, sampling=SHORT)
        assert found(kb)[1:] == (0, 0)
    assert sorted(files(kb)) == before


def test_a_full_disk_costs_no_answer(open_kb, monkeypatch, caplog):
    with open_kb() as kb:
        monkeypatch.setattr(kb.store.kv.foreign, "put", no_room)
        assert kb.chat(TALK, sampling=SHORT).text
    assert "not kept on disk" in caplog.text
    with open_kb() as kb:
        assert kb.chat(TALK, sampling=SHORT).usage.cached_tokens == 0


def no_room(*_):
    raise rc.errors.StoreFullError("no room")


def test_an_answer_does_not_wait_for_the_disk(open_kb, monkeypatch):
    """The next question is answered while the KV of the one before is being written."""
    with open_kb() as kb:
        release = threading.Event()
        put = kb.store.kv.foreign.put
        monkeypatch.setattr(kb.store.kv.foreign, "put", lambda *given: (release.wait(60), put(*given))[1])
        first = kb.chat(TALK, sampling=SHORT)
        assert not files(kb)
        assert kb.chat(TALK, sampling=SHORT).text == first.text
        assert not files(kb)
        release.set()
    assert files(kb)


ASK = """
import sys
from test_stored_prefixes import TALK, SHORT
import ragcache as rc
from ragcache_demo.bag_of_words import BagOfWords
store, model, end = sys.argv[1:]
kb = rc.RagCache.open(store, model=model, embedder=BagOfWords(), method="full", store=rc.StoreConfig(load="always"))
for question in TALK[1]["content"].split():
    answer = kb.chat([TALK[0], {"role": "user", "content": question}], sampling=SHORT)
print(answer.text, flush=True)
if end == "kill":
    import os
    os.kill(os.getpid(), 9)
kb.close()
"""


def test_two_processes_write_at_once_and_one_is_killed(open_kb, model_directory, tmp_path):
    open_kb().close()
    ends = (forked.Forked(ASK, tmp_path / "kb", model_directory, end) for end in ("close", "kill"))
    with next(ends) as closed, next(ends) as killed:
        said = {closed.stdout.read(), killed.stdout.read()}
        assert (closed.wait(), killed.wait()) == (0, -9)
    with open_kb() as kb:
        for question in TALK[1]["content"].split():
            answer = kb.chat([TALK[0], {"role": "user", "content": question}], sampling=SHORT)
            assert answer.usage.prompt_tokens - answer.usage.cached_tokens <= LATE
        assert said == {f"{answer.text}\n"}


# In memory alone


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return rc.load_lm(save_tiny("llama", str(tmp_path_factory.mktemp("llama"))))


def within(llama, budget_bytes):
    generation, tree = Generation(Unchanged(), list), PrefixCache(llama.shape, budget_bytes)
    prefixes = Prefixes(llama, Unchanged(), generation, Recipe.of("isolated"), "", tree)
    generation.follow(prefixes.invalidate)
    return prefixes


@pytest.mark.parametrize("tokens", [0, 3, 7])
def test_a_prefix_that_does_not_fit_is_read_every_time_and_right(llama, tokens):
    """Budgets of none, some and all but one of its tokens."""
    prompt = random_prompt(4, prefix=8, chunks=(7, 5))
    prefixes = within(llama, tokens * llama.kv_bytes_per_token)
    expected = rc.fuse(llama, prompt, "reposition").next_logits
    for known in (0, tokens):
        with prefixes.text(prompt.prefix_ids) as made:
            assert made.created_tokens == len(prompt.prefix_ids) - known
            assert_same(rc.fuse(llama, prompt, "reposition", exact=made.exact).next_logits, expected)
        assert prefixes.stats().num_bytes <= tokens * llama.kv_bytes_per_token


def test_nothing_is_a_prefix_of_no_tokens(llama):
    with within(llama, 0).text([]) as made:
        assert made == (None, 0, 0.0, 0.0)


def test_what_is_dropped_while_it_is_read_is_not_kept(llama, monkeypatch):
    """It may quote a document that was deleted meanwhile."""
    prefixes, read = within(llama, 1 << 24), llama.read

    def read_and_drop(*arguments):
        made = read(*arguments)
        prefixes.generation.invalidate()
        return made

    with monkeypatch.context() as patch:
        patch.setattr(llama, "read", read_and_drop)
        assert created(prefixes, [3, 4, 5]) == 3
    assert [created(prefixes, [3, 4, 5]) for _ in range(2)] == [3, 0]
