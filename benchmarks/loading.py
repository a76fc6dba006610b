"""Load or recompute: time to first token where all blocks are read, all are computed, or each is taken the faster way.

python -m benchmarks.loading                      # 10 passages of 500 tokens in SmolLM2-135M's shape

One run measures all of them in turn over a warm disk, a cold page cache, and a disk throttled to 10 MB/s, for each
codec. The throttled disk is the real one behind a token bucket: a read waits, outside all locks of the store, until its
bytes would have come, and reads at the same time share them.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import ragcache as rc
from benchmarks.codecs import normal_block
from benchmarks.environment import environment
from benchmarks.files import drop_page_cache, file_system
from benchmarks.options import add_numbers, add_places, settings_from
from benchmarks.reading import random_prompt
from benchmarks.report import Goal, Result, show, write
from benchmarks.shapes import SHAPES, build
from benchmarks.timing import Samples, Variant, alternate, ratio, summarise
from ragcache.codecs import CODECS
from ragcache.engine.loader import BlockLoader, LoadedBlocks
from ragcache.engine.probe import probe_disk, probe_prefill
from ragcache.engine.rates import ALWAYS, AUTO, NEVER, Rates
from ragcache.ingest.encoder import ModelEncoder
from ragcache.kv.block import KVBlock
from ragcache.store.counters import Loaded
from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore
from ragcache.store.records import Chunk

WARM, COLD, THROTTLED = "warm disk", "cold disk", "throttled disk"
PLACES = (WARM, COLD, THROTTLED)
POLICIES = {ALWAYS: "all loaded", NEVER: "all recomputed", AUTO: "auto"}
MOST_SLOWER = 1.10


@dataclass(frozen=True)
class Settings:
    """passages x tokens of context, then suffix tokens. rounds: of each; megabytes_s: of the throttled disk.

    codecs: separated by commas
    """

    shape: str = "SmolLM2-135M"
    passages: int = 10
    tokens: int = 500
    suffix: int = 30
    rounds: int = 10
    megabytes_s: int = 10
    threads: int = 0
    seed: int = 0
    codecs: str = "raw,int8"


class Bucket:
    """Bytes that have come by now, at a constant rate: who reads more waits. Thread-safe."""

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + num_bytes / self._bytes_s
            wait_s = self._free_at - time.perf_counter()
        if wait_s > 0:
            time.sleep(wait_s)


class ThrottledStore(KVStore):
    """A store whose reads from disk go through a bucket; what is in memory does not."""

    bucket: Bucket

    def fetch(self, key: str) -> Loaded | None:
        stored = self.lookup([key]).get(key)
        if stored is not None and stored.tier == "disk":
            self.bucket.take(stored.num_bytes)
        return super().fetch(key)


class Place:
    """One codec's blocks on one kind of disk, read by every policy with nothing in memory."""

    def __init__(
        self, lm: rc.LanguageModel, prompt: rc.Prompt, root: Path, codec: str, place: str, rate: float
    ) -> None:
        self.lm, self.prompt, self.root, self.codec, self.place = lm, prompt, root, codec, place
        self._encoder = ModelEncoder(lm)
        handles = [self._encoder.key(ids) for ids in prompt.chunk_ids]
        pairs = zip(prompt.chunk_ids, handles, strict=True)
        self._chunks = [Chunk(f"c{n}", "d", n, "", ids, {}, n, key, 0.0, "", "") for n, (ids, key) in enumerate(pairs)]
        self._documents = DocumentStore.open(root.parent / "documents.sqlite3")
        self._bucket = Bucket(rate)
        self._store = self._open()
        # Rates are learnt over all rounds, as in a process that goes on; each begins as a fresh opening would.
        self.rates = Rates()
        self.rates.compute.set(probe_prefill(lm, 0.15))
        self.rates.tier("disk").set(*probe_disk(next(root.rglob("*.safetensors")), 0.075))
        self._loader = BlockLoader(self._store, self.rates)
        self.last: LoadedBlocks | None = None

    def _open(self) -> KVStore:
        if self.place == THROTTLED:
            store = ThrottledStore(self.root, memory_bytes=4 << 30, codec=self.codec)
            store.bucket = self._bucket
            return store
        return KVStore(self.root, memory_bytes=4 << 30, codec=self.codec)

    def forget(self, policy: str) -> None:
        """Nothing in memory; on a cold disk nothing in the page cache either."""
        self.close_loader()
        self.last = None
        self._store.close()
        gc.collect()
        if self.place == COLD:
            drop_page_cache(self.root)
        self._store = self._open()
        self._loader = BlockLoader(self._store, Rates() if policy == ALWAYS else self.rates, policy=policy)

    def first_token(self) -> int:
        loaded = self._loader.load(self._encoder, self._documents, self._chunks)
        fused = rc.fuse(self.lm, self.prompt, "reposition", loaded.blocks, reserve_tokens=0)
        token = int(fused.next_logits.argmax())
        fused.cache.release()
        self.last = loaded
        return token

    def close_loader(self) -> None:
        self._loader.close()

    def close(self) -> None:
        self.close_loader()
        self._store.close()
        self._documents.close()

    def variants(self, counted: dict[str, list[int]]) -> list[Variant]:
        return [self._variant(policy, name, counted) for policy, name in POLICIES.items()]

    def _variant(self, policy: str, name: str, counted: dict[str, list[int]]) -> Variant:
        label = f"{self.codec}, {self.place}: {name}"

        def run() -> int:
            token = self.first_token()
            if policy == AUTO and self.last is not None:
                counted.setdefault(label, []).append(self.last.origins.count("computed"))
            return token

        return Variant(label, run, lambda: self.forget(policy))


def write_blocks(root: Path, codec: str, lm: rc.LanguageModel, prompt: rc.Prompt, blocks: Sequence[KVBlock]) -> None:
    encoder = ModelEncoder(lm)
    with KVStore(root, codec=codec, memory_bytes=0) as store:
        for ids, block in zip(prompt.chunk_ids, blocks, strict=True):
            store.put(encoder.key(ids), block)


def measure(settings: Settings, workdir: Path, arguments: Sequence[str]) -> Result:
    hardware = environment("benchmarks.loading", arguments, torch.device("cpu"))
    lm = build(settings.shape, "float32", seed=settings.seed).lm
    prompt = random_prompt(lm.vocab_size, settings.passages, settings.tokens, settings.suffix, settings.seed)
    blocks = [normal_block(settings.shape, settings.tokens, lm.dtype, seed) for seed in range(settings.passages)]
    counted: dict[str, list[int]] = {}
    places: list[Place] = []
    for codec in settings.codecs.split(","):
        root = workdir / codec / "kv"
        write_blocks(root, codec, lm, prompt, blocks)
        places += [Place(lm, prompt, root, codec, place, settings.megabytes_s * 1e6) for place in PLACES]
    del blocks
    variants = [variant for place in places for variant in place.variants(counted)]
    samples = alternate(variants, settings.rounds, settings.rounds, lm.device, label="loading")
    figures = {
        "file_system": file_system(workdir),
        "computed_of": settings.passages,
        **{f"{name}, blocks computed": numbers for name, numbers in counted.items()},
        **{f"{place.codec}, {place.place}: rates": place.rates.figures().to_json() for place in places},
    }
    for place in places:
        place.close()
    ratios = {f"{place.codec}, {place.place}: auto / {of}": ratio(samples, *_names(place, of)) for place in places
              for of in ("all loaded", "all recomputed")}  # fmt: skip
    applies = (settings.shape, settings.passages, settings.tokens) == ("SmolLM2-135M", 10, 500)
    goals = [_goal(samples, place, applies) for place in places]
    name = f"loading-{settings.shape}-{settings.passages}x{settings.tokens}"
    return Result(name, settings, hardware, summarise(samples), ratios, figures, goals)


def _names(place: Place, other: str) -> tuple[str, str]:
    return f"{place.codec}, {place.place}: auto", f"{place.codec}, {place.place}: {other}"


def _goal(samples: Samples, place: Place, applies: bool) -> Goal:
    """Against whichever of the two is faster over all rounds: a single round's choice would be hindsight."""
    timings = summarise(samples)
    faster = min(("all loaded", "all recomputed"), key=lambda other: timings[_names(place, other)[1]].median_s)
    measured = ratio(samples, *_names(place, faster))
    return Goal.of(f"{place.codec}, {place.place}: auto / {faster}", "at most", MOST_SLOWER, measured, applies)


def parse(arguments: Sequence[str]) -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser("benchmarks.loading", description=__doc__)
    default = Settings()
    parser.add_argument("--shape", choices=SHAPES, default=default.shape)
    parser.add_argument("--codecs", default=default.codecs, help=f"separated by commas, of {', '.join(CODECS)}")
    names = ("passages", "tokens", "suffix", "rounds", "megabytes_s", "threads", "seed")
    add_numbers(parser, default, names)
    add_places(parser, "where blocks are written; a disk, not tmpfs")
    given = parser.parse_args(arguments)
    for name in given.codecs.split(","):
        if name in CODECS and CODECS[name].needs_basis:  # this store would keep raw blocks in place of them
            parser.error(
                f"--codecs {name} needs a basis of trained KV; python -m benchmarks.codecs --codec {name} times it"
            )
    return settings_from(given, Settings), given


def main(arguments: Sequence[str] | None = None) -> Result:
    arguments = sys.argv[1:] if arguments is None else arguments
    settings, given = parse(arguments)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    with tempfile.TemporaryDirectory(dir=given.workdir, prefix="ragcache-loading-") as directory:
        result = measure(settings, Path(directory), arguments)
    write(result, given.out)
    show(result)
    return result


if __name__ == "__main__":
    main()
