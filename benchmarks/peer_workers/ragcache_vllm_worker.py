"""vLLM over ragcache's blocks: the engine of `vllm_worker`, with the connector of `ragcache_vllm`.

Runs in the environment that `scripts/peers-environment` makes for vLLM. Blocks are loaded from the store's files and
verified for every request, as by `ragcache vllm`. Passages that were never read are encoded and stored first, in this
process.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

import ragcache as rc
from benchmarks.peer_workers.channel import Prompt, serve
from benchmarks.peer_workers.vllm_worker import VLLMWorker
from ragcache.fusion.layout import Span
from ragcache.ingest.encoder import ModelEncoder
from ragcache.store.directory import StoreLayout
from ragcache.store.kv_store import KVStore
from ragcache_vllm.command import WORKERS, transfer_config
from ragcache_vllm.request_layout import RequestLayout


class RagCacheVLLMWorker(VLLMWorker):
    """A worker whose only variant is `reposition`."""

    def __init__(self, config: dict[str, Any]) -> None:
        torch.set_num_threads(config["threads"])
        self._layout = StoreLayout(Path(config["directory"]) / "store")
        self._layout.create()
        self._encoder = ModelEncoder(rc.load_lm(config["model"], dtype=config["dtype"]))
        self._store = KVStore(self._layout.kv, memory_bytes=0, seal=self._layout.seal())
        super().__init__(config)

    def options(self) -> dict[str, Any]:
        from vllm.config import KVTransferConfig

        root, fingerprint = str(self._layout.root), self._encoder.lm.fingerprint
        transfer = KVTransferConfig(**transfer_config({"store": root, "fingerprint": fingerprint, "load": "step"}))
        return {"kv_transfer_config": transfer, "disable_hybrid_kv_cache_manager": True, "worker_cls": WORKERS["cpu"]}

    def extra(self, prompt: Prompt) -> dict[str, Any]:
        ends = accumulate((len(passage) for passage in prompt.passages), initial=0)
        layout = RequestLayout(tuple(Span(start, stop) for start, stop in pairwise(ends)))
        return {"kv_transfer_params": layout.to_params()}

    def about(self) -> dict[str, Any]:
        found = super().about()
        return {**found, "versions": {"ragcache": rc.__version__, **found["versions"]}}

    def read(self, passages: Sequence[Sequence[int]]) -> None:
        size = max(1, self._encoder.batch_tokens // max(len(passage) for passage in passages))
        for start in range(0, len(passages), size):
            self._keep(passages[start : start + size])

    def prepare(self, prompt: Prompt) -> int:
        new = {tuple(one) for one in prompt.passages if self._encoder.key(one) not in self._store}
        if new:
            self._keep(list(new))
        return sum(len(one) for one in prompt.passages if tuple(one) in new)

    def _keep(self, passages: Sequence[Sequence[int]]) -> None:
        for ids, block in zip(passages, self._encoder.encode(passages), strict=True):
            self._store.put(self._encoder.key(ids), block)


if __name__ == "__main__":
    serve(RagCacheVLLMWorker)
