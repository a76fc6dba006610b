"""Blocks read in threads while others are computed: what comes out, whichever way each goes; nothing is timed."""

import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from blocks import same, size_of, tier_of
from waiting import until

from ragcache.codecs import get_codec
from ragcache.engine.loader import BlockLoader, LoadCounts, Prefetch
from ragcache.engine.rates import Rates
from ragcache.errors import CancelledError, ConfigError, SchemaVersionError, TimedOutError
from ragcache.ingest.encoder import ModelEncoder
from ragcache.kv.block import KVBlock
from ragcache.models.deadline import Limit, limited
from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore
from ragcache.store.prefill_rate import PrefillRate
from ragcache.store.records import Chunk, NewChunk, NewDocument

IDS = [[10 * n + i for i in range(5 + n)] for n in range(6)]
FAST, HOPELESS = 1e12, 1.0  # bytes/s
HANG_S = 60


class TickingClock:
    """Goes on by a hundredth of a second each time somebody looks, unless it stands: then no read is ever late, however
    busy the machine is."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stands = False
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            self.now += 0.0 if self.stands else 0.01
            return self.now


class GatedStore(KVStore):
    """A store whose reads wait for `gate`; `began` says that one waits."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Event()
        self.fetched: list[str] = []

    def fetch(self, key):
        self.began.set()
        assert self.gate.wait(HANG_S)
        self.fetched.append(key)
        return super().fetch(key)


class Watched(ModelEncoder):
    """Says what was computed, in batches; `before` is called with each."""

    def __init__(self, lm, **options) -> None:
        super().__init__(lm, **options)
        self.batches: list[list[list[int]]] = []
        self.before = lambda chunks: None

    @property
    def batch_tokens(self) -> int:
        return 12

    def encode(self, chunks, neighbours=None):
        self.batches.append([list(chunk) for chunk in chunks])
        self.before(chunks)
        return super().encode(chunks, neighbours)


class Setup:
    """A store with the blocks of IDS on disk and nothing in memory, as after a start."""

    def __init__(self, root, lm, template, **options) -> None:
        shutil.copytree(template, root, dirs_exist_ok=True)
        self.encoder = Watched(lm)
        self.handles = [self.encoder.key(ids) for ids in IDS]
        self.chunks = [stored(rank, *pair) for rank, pair in enumerate(zip(IDS, self.handles, strict=True))]
        with KVStore(root / "kv") as kv:
            self.blocks = [kv.get(handle).block for handle in self.handles]
        self.kv = GatedStore(root / "kv", **options)
        self.documents = DocumentStore.open(root / "documents.sqlite3")
        self.clock = TickingClock()
        self.rates = Rates(self.clock)
        self.loaders: list[BlockLoader] = []

    def loader(self, bytes_s: float, tokens_s: float = 1000.0, **options) -> BlockLoader:
        self.rates.tier("disk").set(1e-9, bytes_s)
        self.rates.compute.set(PrefillRate(1 / tokens_s, 0.0))
        self.loaders.append(BlockLoader(self.kv, self.rates, **options))
        return self.loaders[-1]

    def load(self, loader, chunks=None, **options):
        chosen = self.chunks if chunks is None else chunks
        return loader.load(self.encoder, self.documents, chosen, **options)

    def close(self) -> None:
        self.kv.gate.set()
        for loader in self.loaders:
            loader.close()
        self.kv.close()
        self.documents.close()


def stored(rank, ids, handle) -> Chunk:
    return Chunk(f"c{rank}", f"d{rank}", 0, "", ids, {}, rank, handle, 0.0, "", "")


@pytest.fixture(scope="module")
def template(tmp_path_factory, lm):
    """Written once: flushing to a device takes a while where others use it too."""
    root = tmp_path_factory.mktemp("template")
    encoder = ModelEncoder(lm)
    with KVStore(root / "kv") as kv, DocumentStore.open(root / "documents.sqlite3") as documents:
        for rank, ids in enumerate(IDS):
            handle = encoder.key(ids)
            kv.put(handle, encoder.encode([ids])[0])
            chunk = NewChunk(f"c{rank}", "", ids, np.zeros(2, np.float32), handle)
            documents.replace_document(NewDocument(f"d{rank}"), [chunk])
    return root


@pytest.fixture
def open_setup(tmp_path, lm, template):
    made = []

    def open_one(**options):
        made.append(Setup(tmp_path, lm, template, **options))
        return made[-1]

    yield open_one
    for one in made:
        one.close()


@pytest.fixture
def setup(open_setup):
    return open_setup()


def close_to(found: list[KVBlock], wanted: list[KVBlock]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(
        torch.allclose(a.keys, b.keys, rtol=1e-4, atol=1e-5)
        and torch.allclose(a.values, b.values, rtol=1e-4, atol=1e-5)
        for a, b in pairs
    )


def identical(found: list[KVBlock], wanted: list[KVBlock]) -> bool:
    return all(same(a, b) for a, b in zip(found, wanted, strict=True))


def test_from_a_fast_disk_all_is_read_bit_for_bit_and_nothing_computed(setup):
    setup.clock.stands = True
    loader = setup.loader(FAST)
    loaded = setup.load(loader)
    assert (loaded.origins, loaded.encoded_tokens, setup.encoder.batches) == (["disk"] * 6, 0, [])
    assert loaded.handles == setup.handles
    assert identical(loaded.blocks, setup.blocks)
    again = setup.load(loader)
    assert again.origins == ["memory"] * 6
    assert identical(again.blocks, setup.blocks)
    assert setup.kv.stats().hits_by_tier == {**setup.kv.stats().hits_by_tier, "memory": 6, "disk": 6}
    assert setup.kv.stats().misses == 0
    assert loader.counts() == LoadCounts()


def test_a_question_that_gives_up_waits_for_no_read(setup):
    """Its reads never end, and are never late."""
    setup.clock.stands = True
    loader, cancelled = setup.loader(FAST), threading.Event()
    setup.kv.gate.clear()
    with pytest.raises(TimedOutError), limited(Limit.of(None, 0.1, time.perf_counter())):
        setup.load(loader)
    threading.Timer(0.1, cancelled.set).start()
    with pytest.raises(CancelledError), limited(Limit(cancelled)):
        setup.load(loader)
    setup.kv.gate.set()
    assert identical(setup.load(loader).blocks, setup.blocks)


@pytest.mark.parametrize("policy", ["never", "always"])
def test_a_question_that_gives_up_computes_no_further(setup, policy):
    cancelled = threading.Event()
    setup.encoder.before = lambda chunks: cancelled.set()
    loader = setup.loader(HOPELESS, policy=policy)
    fresh = [stored(rank, [90 + rank, *ids], None) for rank, ids in enumerate(IDS)]
    with pytest.raises(CancelledError), limited(Limit(cancelled)):
        setup.load(loader, fresh)
    assert len(setup.encoder.batches) == 1, "the first batch ends amid its pass, and no other begins"


@pytest.mark.parametrize("policy", ["auto", "never"])
def test_what_is_computed_although_the_disk_has_it_is_not_written_again_but_remembered(setup, policy, lm):
    files = {path: path.stat().st_mtime_ns for path in setup.kv.root.rglob("*.safetensors")}
    loader = setup.loader(HOPELESS if policy == "auto" else FAST, policy=policy)
    loaded = setup.load(loader)
    assert loaded.origins == ["computed"] * 6
    assert loaded.encoded_tokens == sum(map(len, IDS))
    assert sorted(ids for batch in setup.encoder.batches for ids in batch) == sorted(IDS)
    assert close_to(loaded.blocks, setup.blocks)
    assert files == {path: path.stat().st_mtime_ns for path in setup.kv.root.rglob("*.safetensors")}
    assert loader.counts().recomputed == 6
    assert setup.kv.stats().misses == 6
    again = setup.load(loader)
    assert again.origins == ["memory"] * 6
    assert identical(again.blocks, loaded.blocks), "the first use is like later ones"


def test_under_always_only_what_no_tier_has_is_computed_however_slow_the_disk_is(setup):
    setup.kv.delete(setup.handles[2])
    loader = setup.loader(HOPELESS, 1e9, policy="always")
    loaded = setup.load(loader)
    assert loaded.origins == ["disk", "disk", "computed", "disk", "disk", "disk"]
    assert setup.encoder.batches == [[IDS[2]]]
    assert loader.counts() == LoadCounts()


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_recomputed_block_is_used_as_its_codec_gives_it_back(open_setup, lm, codec):
    setup = open_setup(codec=codec)
    loaded = setup.load(setup.loader(FAST, policy="never"))
    own = get_codec(codec)
    for batch in setup.encoder.batches:
        for ids, block in zip(batch, lm.encode(batch, batch_tokens=1000), strict=True):
            assert same(loaded.blocks[IDS.index(ids)], own.decode(own.encode(block)))
    assert not identical(loaded.blocks, ModelEncoder(lm).encode(IDS))


def test_some_are_read_while_others_are_computed(setup):
    per_token = size_of(setup.kv, setup.handles[-1]) / len(IDS[-1])
    loader = setup.loader(per_token * 100, 100.0)  # either takes as long
    permits, fetch = threading.Semaphore(0), setup.kv.fetch
    setup.kv.fetch = lambda key: fetch(key) if permits.acquire(timeout=1) else None
    setup.encoder.before = lambda chunks: permits.release()  # one read for one computation
    loaded = setup.load(loader)
    permits.release(len(IDS))
    assert set(loaded.origins) == {"disk", "computed"}
    assert close_to(loaded.blocks, setup.blocks)
    read = [same(block, own) for block, own in zip(loaded.blocks, setup.blocks, strict=True)]
    assert all(same for same, origin in zip(read, loaded.origins, strict=True) if origin == "disk")
    assert loaded.encoded_tokens == sum(len(i) for i, o in zip(IDS, loaded.origins, strict=True) if o == "computed")


def test_what_no_tier_has_is_computed_in_batches_and_kept(setup):
    for handle in setup.handles[1:4]:
        setup.kv.delete(handle)
    loaded = setup.load(setup.loader(FAST))
    assert loaded.origins == ["disk", "computed", "computed", "computed", "disk", "disk"]
    assert setup.encoder.batches == [[IDS[3]], [IDS[2]], [IDS[1]]], "batch_tokens is 12"
    assert (setup.kv.stats().hits_by_tier, setup.kv.stats().misses) == ({"memory": 0, "disk": 3}, 3)
    for handle in setup.handles:
        setup.kv.verify(handle)


def test_an_error_of_a_read_reaches_the_asker_and_the_next_question_is_answered(setup, monkeypatch):
    loader = setup.loader(FAST)

    def newer(key):
        raise SchemaVersionError("written by a newer version")

    with monkeypatch.context() as patch:
        patch.setattr(setup.kv, "fetch", newer)
        with pytest.raises(SchemaVersionError, match="newer"):
            setup.load(loader)
    assert setup.load(loader).origins == ["disk"] * 6


def test_an_error_of_a_computation_reaches_the_asker_though_reads_hang(setup):
    setup.kv.delete(setup.handles[0])
    loader = setup.loader(FAST)
    setup.kv.gate.clear()

    def fail(chunks):
        raise RuntimeError("out of memory")

    setup.encoder.before = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        setup.load(loader)
    setup.encoder.before = lambda chunks: None
    setup.kv.gate.set()
    assert close_to(setup.load(loader).blocks, setup.blocks)


def test_a_block_that_was_deleted_while_it_was_computed_is_not_remembered(setup):
    loader = setup.loader(FAST, policy="never")
    setup.encoder.before = lambda chunks: setup.kv.delete(setup.handles[0]) if IDS[0] in chunks else None
    setup.load(loader)
    assert tier_of(setup.kv, setup.handles[0]) is None
    assert all(tier_of(setup.kv, handle) == "memory" for handle in setup.handles[1:])


def test_the_same_passage_twice_is_read_once_and_counted_twice(setup):
    loaded = setup.load(setup.loader(FAST), [setup.chunks[1], setup.chunks[2], setup.chunks[1]])
    assert loaded.origins == ["disk"] * 3
    assert sorted(setup.kv.fetched) == sorted(setup.handles[1:3])
    assert loaded.blocks[0] is loaded.blocks[2]
    assert setup.kv.stats().hits_by_tier["disk"] == 3


def test_no_chunks_no_blocks(setup):
    assert setup.load(setup.loader(FAST), []).blocks == []


def test_many_askers_with_a_disk_of_moods(setup, lm):
    """Reads take a random while, one in ten finds its block damaged, computing goes on beside."""
    loader = setup.loader(3e5, 2e3)
    chosen = random.Random(5)
    fetch = setup.kv.fetch

    def moody(key):
        threading.Event().wait(chosen.random() * 0.01)
        return None if chosen.random() < 0.1 else fetch(key)

    setup.kv.fetch = moody

    def ask(number):
        mine = random.Random(number)
        ranks = [mine.randrange(len(IDS)) for _ in range(mine.randint(1, 6))]
        if mine.random() < 0.5:
            setup.kv.refresh()
        encoder = Watched(lm)
        loaded = loader.load(encoder, setup.documents, [setup.chunks[r] for r in ranks])
        assert close_to(loaded.blocks, [setup.blocks[rank] for rank in ranks])
        assert set(loaded.origins) <= {"memory", "disk", "computed"}
        computed = {rank for rank, origin in zip(ranks, loaded.origins, strict=True) if origin == "computed"}
        assert loaded.encoded_tokens == sum(len(IDS[rank]) for rank in computed)

    with ThreadPoolExecutor(8) as askers:
        for done in [askers.submit(ask, number) for number in range(80)]:
            done.result(timeout=HANG_S)


def test_reads_begun_ahead_are_taken_or_counted_as_wasted(setup):
    setup.clock.stands = True
    loader = setup.loader(FAST, ahead_bytes=1 << 30)
    sizes = [size_of(setup.kv, handle) for handle in setup.handles]
    ahead = Prefetch(loader)
    ahead.begin(setup.handles[:4])
    assert loader.counts().ahead_bytes == sum(sizes[:4])
    until(lambda: len(setup.kv.fetched) == 4)  # what has not begun is taken back
    loaded = setup.load(loader, setup.chunks[2:], ahead=ahead)
    assert loaded.origins == ["disk"] * 4, "read ahead is not in memory: it came from disk for this question"
    loader.close()
    assert len(setup.kv.fetched) == 6
    assert loader.counts().wasted_bytes == sum(sizes[:2])
    assert setup.kv.stats().hits_by_tier["disk"] == 4, "what is not used is no access"


def test_a_question_that_is_given_up_wastes_what_it_began(setup):
    loader = setup.loader(FAST, ahead_bytes=1 << 30)
    ahead = Prefetch(loader)
    ahead.begin(setup.handles[:2])
    ahead.close()
    ahead.close()
    counts = loader.counts()
    assert counts.wasted_bytes == counts.ahead_bytes  # a read that had not begun is taken back from both


def test_bytes_ahead_never_exceed_their_budget(setup):
    size = max(size_of(setup.kv, handle) for handle in setup.handles)
    loader = setup.loader(FAST, ahead_bytes=2 * size)
    setup.kv.gate.clear()
    first, second = Prefetch(loader), Prefetch(loader)
    first.begin(setup.handles)
    second.begin(setup.handles[3:])
    held = loader.counts().ahead_bytes
    assert 0 < held <= 2 * size
    first.close()
    setup.kv.gate.set()
    loader.close()
    assert loader._ahead_held == 0
    assert loader.counts().wasted_bytes <= held


def test_nothing_is_read_ahead_from_a_slow_tier_from_memory_or_without_a_budget(setup):
    for loader in (setup.loader(HOPELESS, ahead_bytes=1 << 30), setup.loader(FAST)):
        ahead = Prefetch(loader)
        setup.rates.tier("disk").set(1e-9, HOPELESS if loader is setup.loaders[0] else FAST)
        ahead.begin(setup.handles)
        assert loader.counts().ahead_bytes == 0
    setup.load(loader)
    roomy = setup.loader(FAST, ahead_bytes=1 << 30)
    Prefetch(roomy).begin(setup.handles)
    assert roomy.counts().ahead_bytes == 0


@pytest.mark.parametrize("options", [{"policy": "sometimes"}, {"ahead_bytes": -1}])
def test_bad_settings_are_refused(setup, options):
    with pytest.raises(ConfigError, match=r"at least 0|choose one of auto, always, never"):
        BlockLoader(setup.kv, Rates(), **options)
