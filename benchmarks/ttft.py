"""Time to first token of fused prefill: by phase, and against the floor and full prefill.

python -m benchmarks ttft --set shape=SmolLM2-135M --set passages=10 --set tokens=500
python -m benchmarks ttft --codecs int8 kvtc           # stored blocks of these codecs beside raw ones
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch

from benchmarks.files import file_system
from benchmarks.questions import RetrievalPhase, load_named
from benchmarks.reading import Bench, agreement
from benchmarks.report import Goal, Result
from benchmarks.runner import Run
from benchmarks.shapes import PromptSettings, build
from benchmarks.timing import Ratio, Samples, Variant, alternate, ratio, summarise


@dataclass(frozen=True)
class Settings(PromptSettings):
    """passages x tokens of context, then suffix tokens. rounds: rounds of short variants; long_rounds: of full prefill.

    vectors: number of chunks that retrieval searches; embedder: see `load_named`
    codecs:  further codecs, whose blocks are read from the memory tier and from a cold disk
    """

    rounds: int = 15
    long_rounds: int = 10
    vectors: int = 4000
    codecs: tuple[str, ...] = ()
    embedder: str = "minilm"


def measure(settings: Settings, run: Run) -> Result:
    device = torch.device(settings.device)
    built = build(settings.shape, settings.dtype, device, seed=settings.seed)
    sizes = settings.passages, settings.tokens, settings.suffix
    with ExitStack() as stack:
        bench = stack.enter_context(Bench(built, *sizes, run.workdir / "kv", settings.seed))
        coded = {
            name: stack.enter_context(Bench(built, *sizes, run.workdir / name, settings.seed, name))
            for name in settings.codecs
        }
        chunks, embedder = run.workdir / "documents", load_named(settings.embedder, settings.device)
        phase = RetrievalPhase(embedder, settings.vectors, settings.passages, chunks)
        retrieval = stack.enter_context(closing(phase))
        checks = agreement(bench)
        variants = [*retrieval.variants(), *_variants(bench, device)]
        for name, other in coded.items():
            variants += _coded(name, other)
        samples = alternate(variants, settings.rounds, settings.long_rounds, device, run.journal)
        figures = {
            "kv_bytes": bench.num_bytes,
            "file_system": file_system(run.workdir),
            "cold_device_read_bytes": bench.cold_read_bytes,
            **checks,
        }
    ratios = _ratios(samples, settings.codecs)
    return run.result(summarise(samples), ratios, figures, _goals(settings, ratios))


def _coded(name: str, bench: Bench) -> list[Variant]:
    """Return the same question over blocks of another codec."""
    return [
        Variant(f"{name}: memory tier", lambda: bench.reposition(bench.load_memory())),
        Variant(f"{name}: disk, cold page cache", lambda: bench.reposition(bench.load_disk()), bench.forget_all),
    ]


def _variants(bench: Bench, device: torch.device) -> list[Variant]:
    """Return phases first (load, place, suffix, first token), then whole prefills, then their baselines."""
    on_gpu = device.type == "cuda"
    in_hand = "pinned host memory" if on_gpu else "host memory"
    variants = [
        Variant("load: memory tier", bench.load_memory),
        Variant("load: disk, warm page cache", bench.load_disk, bench.forget_memory),
        Variant("load: disk, cold page cache", bench.load_disk, bench.forget_all),
        Variant("rotate and place", bench.place),
        Variant("first token", bench.choose_token),
        Variant("floor", bench.floor),
        Variant(f"reposition: {in_hand}", lambda: bench.reposition(bench.in_hand)),
        Variant("reposition: context of an earlier question", bench.reposition_again),
        Variant("reposition: memory tier", lambda: bench.reposition(bench.load_memory())),
        Variant("reposition: disk, warm page cache", lambda: bench.reposition(bench.load_disk()), bench.forget_memory),
        Variant("reposition: disk, cold page cache", lambda: bench.reposition(bench.load_disk()), bench.forget_all),
        Variant("transformers: full caches", bench.plain_reuse, bench.fill_plain_cache),
        Variant("ragcache: full prefill", bench.full, long=True),
        Variant("transformers: full prefill", bench.plain_full, long=True),
    ]
    if on_gpu:
        variants.append(Variant("reposition: device memory", lambda: bench.reposition(bench.on_device)))
    return variants


def _ratios(samples: Samples, codecs: Sequence[str]) -> dict[str, Ratio]:
    fused = [name for name in samples if name.startswith("reposition")]
    pairs = [(name, "floor") for name in fused]
    pairs += [(name, "transformers: full prefill") for name in [*fused, "floor", "transformers: full caches"]]
    pairs += [("floor", "transformers: full caches"), ("ragcache: full prefill", "transformers: full prefill")]
    for place in ("memory tier", "disk, cold page cache"):
        pairs += [(f"{name}: {place}", f"reposition: {place}") for name in codecs]
    return {f"{above} / {below}": ratio(samples, above, below) for above, below in pairs}


def _goals(settings: Settings, ratios: dict[str, Ratio]) -> list[Goal]:
    if torch.device(settings.device).type == "cuda":
        applies = settings.has_goals_sizes and settings.shape == "Llama-3.1-8B"
        wanted = [
            ("reposition: pinned host memory / transformers: full prefill", 0.04),
            ("reposition: device memory / floor", 1.3),
        ]
    else:
        applies = settings.has_goals_sizes and settings.has_cpu_goals
        wanted = [
            ("reposition: context of an earlier question / floor", 1.10),
            ("reposition: memory tier / floor", 1.10),
            ("reposition: memory tier / transformers: full prefill", 0.020),
            ("reposition: disk, cold page cache / transformers: full prefill", 0.08),
        ]
    cold = "disk, cold page cache"
    wanted += [(f"{name}: {cold} / reposition: {cold}", 1.0) for name in settings.codecs]
    return [Goal.of(what, "at most", limit, ratios[what], applies) for what, limit in wanted]
