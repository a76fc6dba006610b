"""Files of a run beside the model: its options and its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

from transformers.trainer_utils import get_last_checkpoint

from ragcache.errors import ConfigError
from ragcache.models.hub import ADAPTER
from ragcache_train.options import TrainOptions

OPTIONS, CHECKPOINTS = "training_options.json", "checkpoints"
FREE_TO_CHANGE = {
    "resume",
    "out",
    "log_every",
    "save_every",
    "keep_checkpoints",
    "device",
    "save_dtype",
    "merge",
    "minutes",
    "compile",
}


def write_options(options: TrainOptions, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / OPTIONS).write_text(json.dumps(options.to_json(), indent=2) + "\n", encoding="utf-8")


def find_checkpoint(options: TrainOptions, out: Path) -> str | None:
    """The checkpoint to go on from. Raises ConfigError when `out` holds another run, or options differ from its own."""
    written = out / OPTIONS
    if not options.resume:
        if any((out / name).exists() for name in (OPTIONS, "config.json", ADAPTER)):
            raise ConfigError(f"{out} holds a trained model already; resume, or give another directory")
        return None
    if not written.exists():
        raise ConfigError(f"{out} holds no training run to resume; train without resume first")
    now, defaults = options.to_json(), TrainOptions("", (), "").to_json()  # older runs lack newer options
    before = defaults | json.loads(written.read_text(encoding="utf-8"))
    changed = sorted(name for name in now if name not in FREE_TO_CHANGE and now[name] != before.get(name))
    if changed:
        raise ConfigError(
            f"{out} was trained with {changed[0]}={before.get(changed[0])!r} and now it is {now[changed[0]]!r}; "
            "resume with the same options"
        )
    folder = out / CHECKPOINTS
    found: str | None = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    return found
