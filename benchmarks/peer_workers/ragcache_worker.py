"""ragcache's own engine without retrieval: memory tier, contexts that questions share, fused prefill and decoding.

The method `full` uses the prefix tree.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import ragcache as rc
from benchmarks.peer_workers.channel import Answer, Prompt, Worker, ask_by, serve
from ragcache.engine.admission import Admission, Size, default_budget, kv_bytes
from ragcache.engine.caches.prefix_cache import PrefixCache
from ragcache.engine.caches.shared_prefixes import MemoryNeed, SharedPrefixes
from ragcache.fusion import get_method
from ragcache.fusion.fuse import FuseOutput, block_recipe, fuse
from ragcache.fusion.method import FusionMethod
from ragcache.ingest.encoder import ModelEncoder
from ragcache.kv.block import KVBlock
from ragcache.kv.exact import read_cache
from ragcache.models.deadline import NO_LIMIT
from ragcache.models.generate import decode
from ragcache.models.sampler import Sampling
from ragcache.runtime import team_ends
from ragcache.store.kv_store import KVStore

LINK_TOKENS = 5
NAMESPACE = "peers"
MOST_AT_ONCE = 16


class RagCacheWorker(Worker):
    """A worker whose variants are names of methods. Link tokens may be any ids: their cost does not depend on them."""

    def __init__(self, config: dict[str, Any]) -> None:
        torch.set_num_threads(config["threads"])
        self._kv_bytes = int(config["kv_bytes"])
        self._lm = rc.load_lm(config["model"], dtype=config["dtype"])
        self._encoder = ModelEncoder(self._lm, block_recipe(self._lm, get_method("reposition")))
        self._store = KVStore(Path(config["directory"]) / "kv", memory_bytes=self._kv_bytes)
        self._tree = PrefixCache(self._lm.shape, self._kv_bytes)
        self._contexts = SharedPrefixes(Admission(default_budget(self._lm)), self._tree)

    def about(self) -> dict[str, Any]:
        return {
            "versions": {
                "ragcache": rc.__version__,
                "transformers": transformers.__version__,
                "torch": str(torch.__version__),
            },
            "settings": {
                "threads": torch.get_num_threads(),
                "memory_tier_bytes": self._kv_bytes,
                "prefix_tree_bytes": self._kv_bytes,
                "link_tokens": LINK_TOKENS,
            },
        }

    @team_ends()
    def read(self, passages: Sequence[Sequence[int]]) -> None:
        """Encode the passages as ingestion does, in batches that suit the device, and keep their blocks in memory."""
        size = max(1, self._encoder.batch_tokens // max(len(passage) for passage in passages))
        for start in range(0, len(passages), size):
            self._keep(passages[start : start + size])

    def ask(self, variant: str, prompts: Sequence[Prompt], tokens: Sequence[int], at: Sequence[float]) -> list[Answer]:
        """Answer with a thread per asker, as under a server."""
        return ask_by(partial(self._answer, variant), prompts, tokens, at, MOST_AT_ONCE)

    @team_ends()
    def _answer(self, variant: str, prompt: Prompt, tokens: int, started: float) -> Answer:
        method = _method(variant, len(prompt.passages))
        with ExitStack() as leases:
            read = self._over_context if method.reuses_blocks else self._over_prefix
            fused, reused = read(leases, method, prompt, tokens)
            sampling, ids, first_s = Sampling(max_tokens=tokens), list[int](), 0.0
            for token in decode(self._lm, fused.cache, fused.next_logits, fused.next_position, sampling):
                first_s = first_s or time.perf_counter() - started
                ids.append(token)
            if not method.reuses_blocks:
                self._keep_prefix(prompt, ids, fused)
            fused.cache.release()
        return Answer(first_s, time.perf_counter() - started, ids, reused)

    def _over_context(
        self, leases: ExitStack, method: FusionMethod, prompt: Prompt, tokens: int
    ) -> tuple[FuseOutput, int]:
        """Read the prompt over a context that an earlier question left, or place the passages' blocks.

        Returns the output, and the number of tokens whose KV existed.
        """
        key = (repr(method), tuple(map(tuple, prompt.passages)))
        seat = leases.enter_context(self._contexts.admit(key, self._need(prompt, tokens), NO_LIMIT, keep=True))
        with seat.placing(NO_LIMIT) as tell:
            if seat.placed is not None:
                return self._fuse(method, prompt, tokens, base=seat.placed), len(prompt.ids) - len(prompt.suffix)
            blocks, reused = self._blocks(prompt.passages)
            fused = self._fuse(method, prompt, tokens, blocks=blocks)
            if tell is not None:
                tell(fused.share())
            return fused, reused

    def _fuse(self, method: FusionMethod, prompt: Prompt, tokens: int, **over: Any) -> FuseOutput:
        recipe = self._encoder.recipe
        return fuse(self._lm, _prompt(prompt), method, recipe=recipe, reserve_tokens=tokens, **over)

    def _need(self, prompt: Prompt, tokens: int) -> MemoryNeed:
        links = LINK_TOKENS * len(prompt.passages)
        whole, own = len(prompt.ids) + links + tokens, len(prompt.suffix) + tokens
        return MemoryNeed(Size(whole, kv_bytes(self._lm, whole)), Size(own, kv_bytes(self._lm, own)))

    def _over_prefix(
        self, leases: ExitStack, method: FusionMethod, prompt: Prompt, tokens: int
    ) -> tuple[FuseOutput, int]:
        known = leases.enter_context(self._tree.match(NAMESPACE, prompt.ids))
        known.cut(len(prompt.ids) - 1)  # the last token has to run: its logits choose the answer's first
        exact = known if known.num_tokens else None
        return fuse(self._lm, _prompt(prompt), method, exact=exact, reserve_tokens=tokens), known.num_tokens

    def _keep_prefix(self, prompt: Prompt, answer: Sequence[int], fused: FuseOutput) -> None:
        """Keep the KV of prompt and answer: all but the answer's last token has run."""
        self._tree.insert(NAMESPACE, [*prompt.ids, *answer[:-1]], read_cache(fused.cache))

    def _blocks(self, passages: Sequence[Sequence[int]]) -> tuple[list[KVBlock], int]:
        """Return the passages' blocks, and the number of tokens in those that existed; the others are made and kept."""
        found = [self._store.get(self._encoder.key(passage)) for passage in passages]
        reused = sum(loaded.block.num_tokens for loaded in found if loaded is not None)
        made = iter(self._keep([ids for ids, loaded in zip(passages, found, strict=True) if loaded is None]))
        return [next(made) if loaded is None else loaded.block for loaded in found], reused

    def _keep(self, passages: Sequence[Sequence[int]]) -> list[KVBlock]:
        blocks = self._lm.encode(passages, self._encoder.recipe) if passages else []
        pairs = zip(passages, blocks, strict=True)
        return [self._store.put(self._encoder.key(ids), block, "memory") for ids, block in pairs]


def _prompt(prompt: Prompt) -> rc.Prompt:
    return rc.Prompt(prefix_ids=[], chunk_ids=[list(one) for one in prompt.passages], suffix_ids=list(prompt.suffix))


def _method(variant: str, passages: int) -> FusionMethod:
    if variant != "link":
        return get_method(variant)
    return get_method("link", link_ids=[list(range(LINK_TOKENS * n, LINK_TOKENS * (n + 1))) for n in range(passages)])


if __name__ == "__main__":
    serve(RagCacheWorker)
