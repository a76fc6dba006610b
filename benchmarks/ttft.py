"""Time to first token of fused prefill: by phase, and against the floor and full prefill.

python -m benchmarks.ttft --shape SmolLM2-135M --dtype float32 --device cpu --passages 10 --tokens 500 --suffix 30
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.environment import environment
from benchmarks.files import file_system
from benchmarks.options import add_numbers, add_places, settings_from
from benchmarks.questions import RetrievalPhase
from benchmarks.reading import Bench, agreement
from benchmarks.report import Goal, Result, show, write
from benchmarks.shapes import SHAPES, build
from benchmarks.timing import Ratio, Samples, Variant, alternate, ratio, summarise
from ragcache.models.load import DTYPES
from ragcache.retrieval.embedder import Embedder, load_embedder


@dataclass(frozen=True)
class Settings:
    """passages x tokens of context, then suffix tokens. rounds: of short variants; long_rounds: of full prefill.

    vectors: chunks that retrieval searches
    """

    shape: str = "SmolLM2-135M"
    dtype: str = "float32"
    device: str = "cpu"
    passages: int = 10
    tokens: int = 500
    suffix: int = 30
    rounds: int = 15
    long_rounds: int = 10
    vectors: int = 4000
    threads: int = 0
    seed: int = 0

    @property
    def name(self) -> str:
        return f"ttft-{self.shape}-{self.dtype}-{self.device.partition(':')[0]}-{self.passages}x{self.tokens}"


def measure(settings: Settings, embedder: Embedder, workdir: Path, arguments: Sequence[str]) -> Result:
    device = torch.device(settings.device)
    hardware = environment("benchmarks.ttft", arguments, device)
    built = build(settings.shape, settings.dtype, device, seed=settings.seed)
    with (
        Bench(built, settings.passages, settings.tokens, settings.suffix, workdir / "kv", settings.seed) as bench,
        RetrievalPhase(embedder, settings.vectors, settings.passages, workdir / "documents") as retrieval,
    ):
        checks = agreement(bench)
        variants = [*retrieval.variants(), *_variants(bench, device)]
        samples = alternate(variants, settings.rounds, settings.long_rounds, device, label="ttft")
        figures = {
            "kv_bytes": bench.num_bytes,
            "file_system": file_system(workdir),
            "cold_device_read_bytes": bench.cold_read_bytes,
            **checks,
        }
    ratios = _ratios(samples)
    timings = summarise(samples)
    return Result(settings.name, settings, hardware, timings, ratios, figures, _goals(settings, ratios))


def _variants(bench: Bench, device: torch.device) -> list[Variant]:
    """Phases first (load, place, suffix, first token), then whole prefills, then what they are held against."""
    on_gpu = device.type == "cuda"
    in_hand = "pinned host memory" if on_gpu else "host memory"
    variants = [
        Variant("load: memory tier", bench.load_memory),
        Variant("load: disk, warm page cache", bench.load_disk, bench.forget_memory),
        Variant("load: disk, cold page cache", bench.load_disk, bench.forget_all),
        Variant("rotate and place", bench.place),
        Variant("first token", bench.first_token),
        Variant("floor", bench.floor),
        Variant(f"reposition: {in_hand}", bench.reposition_in_hand),
        Variant("reposition: context of an earlier question", bench.reposition_again),
        Variant("reposition: memory tier", bench.reposition_memory),
        Variant("reposition: disk, warm page cache", bench.reposition_disk, bench.forget_memory),
        Variant("reposition: disk, cold page cache", bench.reposition_disk, bench.forget_all),
        Variant("transformers: full caches", bench.plain_reuse, bench.fill_plain_cache),
        Variant("ragcache: full prefill", bench.full, long=True),
        Variant("transformers: full prefill", bench.plain_full, long=True),
    ]
    if on_gpu:
        variants.append(Variant("reposition: device memory", bench.reposition_on_device))
    return variants


def _ratios(samples: Samples) -> dict[str, Ratio]:
    fused = [name for name in samples if name.startswith("reposition")]
    pairs = [(name, "floor") for name in fused]
    pairs += [(name, "transformers: full prefill") for name in [*fused, "floor", "transformers: full caches"]]
    pairs += [("floor", "transformers: full caches"), ("ragcache: full prefill", "transformers: full prefill")]
    return {f"{above} / {below}": ratio(samples, above, below) for above, below in pairs}


def _goals(settings: Settings, ratios: dict[str, Ratio]) -> list[Goal]:
    sizes = (settings.passages, settings.tokens, settings.suffix) == (10, 500, 30)
    if torch.device(settings.device).type == "cuda":
        applies = sizes and settings.shape == "Llama-3.1-8B"
        wanted = [
            ("reposition: pinned host memory / transformers: full prefill", 0.04),
            ("reposition: device memory / floor", 1.3),
        ]
    else:
        applies = sizes and (settings.shape, settings.dtype) == ("SmolLM2-135M", "float32")
        wanted = [
            ("reposition: context of an earlier question / floor", 1.10),
            ("reposition: memory tier / floor", 1.10),
            ("reposition: memory tier / transformers: full prefill", 0.020),
            ("reposition: disk, cold page cache / transformers: full prefill", 0.08),
        ]
    return [Goal.of(what, "at most", limit, ratios[what], applies) for what, limit in wanted]


def parse(arguments: Sequence[str]) -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser("benchmarks.ttft", description=__doc__)
    default = Settings()
    parser.add_argument("--shape", choices=SHAPES, default=default.shape)
    parser.add_argument("--dtype", choices=DTYPES, default=default.dtype)
    parser.add_argument("--device", default=default.device)
    add_numbers(
        parser, default, ("passages", "tokens", "suffix", "rounds", "long_rounds", "vectors", "threads", "seed")
    )
    add_places(parser, "where blocks are written; a disk, not tmpfs")
    given = parser.parse_args(arguments)
    return settings_from(given, Settings), given


def main(arguments: Sequence[str] | None = None, embedder: Callable[[], Embedder] | None = None) -> Result:
    """embedder: makes the embedding model; the default one when None."""
    arguments = sys.argv[1:] if arguments is None else arguments
    settings, given = parse(arguments)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    with tempfile.TemporaryDirectory(dir=given.workdir) as workdir:
        made = embedder() if embedder else load_embedder()
        result = measure(settings, made, Path(workdir), arguments)
    write(result, given.out)
    show(result)
    return result


if __name__ == "__main__":
    main()
