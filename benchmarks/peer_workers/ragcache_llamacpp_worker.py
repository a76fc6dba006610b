"""ragcache's engine inside llama.cpp, without its retrieval: states from the KV store, placed for each prompt.

The variants "memory" and "disk" name the tier that holds the states. "disk" begins as after a restart: no sequence and
no block is in memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import llama_cpp

from benchmarks.peer_workers.channel import Answer, Prompt, Worker, ask_by, serve
from ragcache.fusion import get_method
from ragcache.ingest.encoder import ModelEncoder
from ragcache.models.deadline import NO_LIMIT
from ragcache.models.generate import decode
from ragcache.models.sampler import Sampling
from ragcache.prompt import Prompt as Parts
from ragcache.store.kv_store import KVStore
from ragcache_llamacpp.entry import load
from ragcache_llamacpp.model import as_cache
from ragcache_llamacpp.reading import Reading, prefill


class RagCacheLlamaWorker(Worker):
    def __init__(self, config: dict[str, Any]) -> None:
        self._settings = f"n_ctx={config['max_tokens']},threads={config['threads']},parallel={config['askers']}"
        self._lm = load(config["gguf"], f"llama.cpp:{self._settings}")
        self._encoder = ModelEncoder(self._lm)
        self._method = get_method("reposition")
        root, num_bytes = Path(config["directory"]) / "kv", int(config["kv_bytes"])
        self._stores = {"memory": KVStore(root, memory_bytes=num_bytes), "disk": KVStore(root, memory_bytes=0)}

    def about(self) -> dict[str, Any]:
        return {"versions": {"llama-cpp-python": llama_cpp.__version__}, "settings": {"engine": self._settings}}

    def read(self, passages: Sequence[Sequence[int]]) -> None:
        keys = [self._encoder.key(ids) for ids in passages]
        for key, block in zip(keys, self._lm.encode(passages), strict=True):
            self._stores["memory"].put(key, block)

    def ask(self, variant: str, prompts: Sequence[Prompt], tokens: Sequence[int], at: Sequence[float]) -> list[Answer]:
        """Answer with a thread per asker, as under a server."""
        if variant == "disk":
            self._lm.sequences.forget()
        return ask_by(partial(self._answer, variant), prompts, tokens, at, len(prompts))

    def _answer(self, variant: str, prompt: Prompt, tokens: int, started: float) -> Answer:
        lm, store = self._lm, self._stores[variant]
        layout = self._method.layout(lm, Parts([], prompt.passages, prompt.suffix).parts, self._encoder.recipe)
        reading = Reading(layout, ())
        pieces = layout.placed(lm.sequences.known(reading.elements, layout.usable))
        found = [store.get(self._encoder.key(piece.ids)) for piece in pieces]
        blocks = {piece.start: one.block for piece, one in zip(pieces, found, strict=True) if one is not None}
        with lm.admit(reading.elements, layout.usable, [layout.num_tokens + tokens], NO_LIMIT) as [sequence]:
            known = len(sequence.elements)
            logits, _, computed = prefill(lm, sequence, reading, blocks)
            ids, first_s = list[int](), 0.0
            for id in decode(lm, as_cache(sequence), logits, layout.num_tokens, Sampling(max_tokens=tokens)):
                first_s = first_s or time.perf_counter() - started
                ids.append(id)
            sequence.keeps = known < layout.num_tokens
        return Answer(first_s, time.perf_counter() - started, ids, layout.num_tokens - computed)


if __name__ == "__main__":
    serve(RagCacheLlamaWorker)
