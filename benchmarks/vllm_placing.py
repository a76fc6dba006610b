"""The first token inside vLLM: stored blocks through ragcache's connector, beside vLLM's own prefill.

    python -m benchmarks vllm_placing --set shape=Llama-3.1-8B --set dtype=bfloat16 --set device=cuda

Runs in an environment with vLLM. Weights and blocks are random, as the times depend on the shape alone. Blocks are read
from files for every question, as by `ragcache vllm`; vLLM's prefix cache is off. ragcache's kernel fills the pages, or
vLLM's own writer with `RAGCACHE_PLACE=plain`; vLLM's log says which of them did.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Result
from benchmarks.runner import Run
from benchmarks.shapes import SHAPES, PromptSettings
from benchmarks.timing import Ratio, Timing
from ragcache.errors import RagCacheError
from ragcache.fusion.layout import Span
from ragcache.fusion.place_check import random_block
from ragcache.kv.cache_shape import CacheShape, LayerShape
from ragcache.models.load import DTYPES
from ragcache.store.directory import StoreLayout
from ragcache.store.kv_store import KVStore
from ragcache_vllm.command import WORKERS, transfer_config
from ragcache_vllm.plan import make_plan
from ragcache_vllm.request_layout import RequestLayout

FINGERPRINT = "random"
LOADED, PREFILL = "in vLLM: reposition", "full prefill"


@dataclass(frozen=True)
class Settings(PromptSettings):
    """passages x tokens of context, then suffix tokens; load: when blocks are loaded, in the "step" that needs them or
    "ahead" of it"""

    load: str = "step"


def write_model(where: Path, shape: str, dtype: str) -> CacheShape:
    """Write a model's configuration without weights, and return the shape of its KV."""
    from transformers import LlamaConfig

    config = LlamaConfig(**SHAPES[shape], architectures=["LlamaForCausalLM"], dtype=dtype)
    config.save_pretrained(where)
    layer = LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim)
    return CacheShape((layer,) * config.num_hidden_layers, DTYPES[dtype], torch.device("cpu"))


def engine(where: Path, root: Path, given: Settings, longest: int) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = transfer_config({"store": str(root), "fingerprint": FINGERPRINT, "load": given.load})
    return LLM(
        str(where),
        dtype=given.dtype,
        load_format="dummy",
        skip_tokenizer_init=True,
        seed=0,
        trust_remote_code=False,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=longest,
        max_num_batched_tokens=longest,
        max_num_seqs=8,
        kv_transfer_config=KVTransferConfig(**transfer),
        disable_hybrid_kv_cache_manager=True,
        worker_cls=WORKERS["cuda" if given.device == "cuda" else "cpu"],
    )


def first_tokens(llm: Any, ids: list[int], layout: RequestLayout, rounds: int) -> list[tuple[float, float]]:
    """Return, for each round, the seconds to the first token from blocks and by prefill, after an untimed round."""
    from vllm import SamplingParams

    def ask(params: dict[str, Any] | None) -> int:
        sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False, extra_args=params)
        (output,) = llm.generate([{"prompt_token_ids": ids}], [sampling], use_tqdm=False)
        told = (output.kv_transfer_params or {}).get("ragcache", {})
        return int(told.get("loaded_tokens", 0))

    def timed(params: dict[str, Any] | None) -> float:
        started = time.perf_counter()
        ask(params)
        return time.perf_counter() - started

    blocks = {"kv_transfer_params": layout.to_params()}
    loaded = ask(blocks)
    if loaded != layout.blocks[-1].stop:
        raise RagCacheError(f"vLLM loaded {loaded} of {layout.blocks[-1].stop} tokens from blocks")
    ask(None)
    return [(timed(blocks), timed(None)) for _ in range(rounds)]


def measure(settings: Settings, run: Run) -> Result:
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, on a CPU
    ends = list(accumulate([settings.tokens] * settings.passages, initial=0))
    layout = RequestLayout(tuple(Span(start, stop) for start, stop in pairwise(ends)))
    numbers = random.Random(settings.seed)
    ids = [numbers.randrange(3, 500) for _ in range(ends[-1] + settings.suffix)]
    shape = write_model(run.workdir / "model", settings.shape, settings.dtype)
    store = StoreLayout(run.workdir / "kb")
    store.create()
    with KVStore(store.kv, memory_bytes=0, seal=store.seal()) as kv:
        for key in make_plan(ids, layout, FINGERPRINT).keys:
            kv.put(key, random_block(shape, "raw", settings.tokens))
    llm = engine(run.workdir / "model", store.root, settings, -(-(len(ids) + 8) // 64) * 64)
    loaded, prefill = zip(*first_tokens(llm, ids, layout, settings.rounds), strict=True)
    ratios = {f"{LOADED} / {PREFILL}": Ratio.of([one / other for one, other in zip(loaded, prefill, strict=True)])}
    figures = {"place": os.environ.get("RAGCACHE_PLACE", "kernel, where it runs")}
    return run.result({LOADED: Timing.of(loaded), PREFILL: Timing.of(prefill)}, ratios, figures)
