"""Save a model of a real shape with random weights, to run commands on it: `python -m benchmarks.random_model DIR`.

Its answers mean nothing. It shows that a command runs from end to end at that size, and what it takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.prose import train_tokenizer
from benchmarks.shapes import SHAPES, build
from ragcache.models.load import DTYPES

VOCABULARY = 16384


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("benchmarks.random_model", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="SmolLM2-135M")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    tokenizer = train_tokenizer(vocab_size=min(VOCABULARY, int(SHAPES[given.shape]["vocab_size"])))
    build(given.shape, given.dtype, seed=given.seed).plain.save_pretrained(given.directory)
    tokenizer.save_pretrained(given.directory)


if __name__ == "__main__":
    main()
