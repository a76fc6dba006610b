"""The options that short runs share."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ragcache_train.train_options import TrainOptions


def run_options(base: Path, folder: Path, lines: Iterable[object], **more: Any) -> TrainOptions:
    """Options of a run over these lines, on the CPU, by few link tokens."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    common = {"link_tokens": 2, "link_slots": 4, "batch_tokens": 400, "log_every": 1, "device": "cpu"}
    return TrainOptions(model=base, data=(data,), out=folder / "out", **common, **more)
