"""All benchmarks with the sizes that the goals are stated for; JSON, a plot and a table of goals.

python -m benchmarks.run                      # CPU: 135M shape, float32
python -m benchmarks.run --device cuda        # GPU: 8B shape, bfloat16
python -m benchmarks.run --corpus CORPUS.jsonl.gz --questions QUESTIONS.jsonl.gz
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import corpus_report, decode, ingest, ttft
from benchmarks.environment import settle
from benchmarks.report import MOST_LOAD, RESULTS, Result, goals_table
from benchmarks.shapes import SHAPES
from ragcache.retrieval.embedder import Embedder

PATIENCE_S = 300  # a minute's average falls from 2 to 0.5 in 83 s
MakeEmbedder = Callable[[], Embedder] | None


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.run", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=SHAPES, help="SmolLM2-135M on a CPU, Llama-3.1-8B on a GPU")
    parser.add_argument("--dtype", help="float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    parser.add_argument("--workdir", type=Path, help="where stores are written; a disk, not tmpfs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--corpus", type=Path, help="with --questions: report on a real corpus too")
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--model", default="mini", help="the model that reads the corpus")
    parser.add_argument("--quick", action="store_true", help="few tokens and rounds: to see that it runs")
    given = parser.parse_args(arguments)
    on_gpu = given.device.startswith("cuda")
    given.shape = given.shape or ("Llama-3.1-8B" if on_gpu else "SmolLM2-135M")
    given.dtype = given.dtype or ("bfloat16" if on_gpu else "float32")
    if (given.corpus is None) != (given.questions is None):
        parser.error("--corpus and --questions go together")
    return given


def run_all(given: argparse.Namespace, embedder: MakeEmbedder) -> list[Result]:
    common = ["--shape", given.shape, "--dtype", given.dtype, "--device", given.device, "--out", str(given.out)]
    common += ["--threads", str(given.threads)]
    disk = ["--workdir", str(given.workdir)] if given.workdir else []
    small = _QUICK if given.quick else {"ttft": [], "ingest": [], "decode": []}
    steps: list[Callable[[], Result]] = [
        lambda: ttft.main([*common, *disk, *small["ttft"]], embedder),
        lambda: ingest.main([*common, *disk, *small["ingest"]], embedder),
        lambda: decode.main([*common, *small["decode"]]),
    ]
    if given.corpus:
        corpus = [str(given.corpus), str(given.questions), "--model", given.model, "--device", given.device]
        steps.append(lambda: corpus_report.main([*corpus, *disk, "--out", str(given.out)], embedder))
    return [_alone(step, 0 if given.quick else PATIENCE_S) for step in steps]


_QUICK = {
    "ttft": ["--passages=3", "--tokens=20", "--suffix=5", "--rounds=2", "--long-rounds=1", "--vectors=100"],
    "ingest": ["--tokens=600", "--chunk-tokens=100", "--rounds=1"],
    "decode": ["--context=40", "--tokens=4", "--rounds=2"],
}


def _alone(step: Callable[[], Result], patience_s: float) -> Result:
    """Let go of one benchmark's model before the next one makes its own. Each waits for the last one's load to pass."""
    if patience_s and not settle(MOST_LOAD, patience_s):
        print(f"the load does not fall to {MOST_LOAD:g}: goals will not be decided", file=sys.stderr)
    result = step()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result


def main(arguments: Sequence[str] | None = None, embedder: MakeEmbedder = None) -> list[Result]:
    """embedder: makes the embedding model; the default one when None."""
    from benchmarks.plots import plot  # needs matplotlib, from the extra `bench`; missing it shows before the work

    given = parse(sys.argv[1:] if arguments is None else arguments)
    results = run_all(given, embedder)
    picture = given.out / f"benchmarks-{given.device.partition(':')[0]}.png"
    plot([result.to_json() for result in results], picture)
    console = Console(width=140)
    console.print(goals_table(results))
    console.print(f"written to {given.out}: {', '.join(f'{result.name}.json' for result in results)}, {picture.name}")
    return results


if __name__ == "__main__":
    main()
