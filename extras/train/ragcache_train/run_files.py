"""Files of a run beside the model: its options, its checkpoints, and its log (a JSON object per line)."""

from __future__ import annotations

import json
import logging
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast  # type: ignore[import-untyped]
from safetensors import SafetensorError, safe_open
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ragcache.errors import ConfigError
from ragcache.models.hub import ADAPTER
from ragcache_train.train_options import TrainOptions

logger = logging.getLogger(__name__)

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
    "evaluate",
    "evaluate_every",
}


def write_options(options: TrainOptions, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / OPTIONS).write_text(json.dumps(options.to_json(), indent=2) + "\n", encoding="utf-8")


def find_checkpoint(options: TrainOptions, out: Path) -> str | None:
    """Return the last whole checkpoint, or None to start anew.

    Raises ConfigError when `out` holds another run, when options differ from its own, or when no checkpoint is whole.
    """
    written = out / OPTIONS
    if not options.resume:
        if any((out / name).exists() for name in (OPTIONS, "config.json", ADAPTER)):
            raise ConfigError(f"{out} holds a trained model already; resume, or give another directory")
        return None
    if not written.exists():
        raise ConfigError(f"{out} holds no training run to resume; train without resume first")
    now, defaults = options.to_json(), TrainOptions(model="", out=Path()).to_json()  # older runs lack newer options
    before = defaults | json.loads(written.read_text(encoding="utf-8"))
    changed = sorted(name for name in now if name not in FREE_TO_CHANGE and now[name] != before.get(name))
    if changed:
        raise ConfigError(
            f"{out} was trained with {changed[0]}={before.get(changed[0])!r} and now it is {now[changed[0]]!r}; "
            "resume with the same options"
        )
    found = list((out / CHECKPOINTS).glob(f"{PREFIX_CHECKPOINT_DIR}-[0-9]*"))
    for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        reason = _damage(path)
        if reason is None:
            return str(path)
        logger.warning("%s is not whole (%s); the run goes on from the checkpoint before", path, reason)
    if found:
        raise ConfigError(f"no checkpoint in {out / CHECKPOINTS} is whole; delete that directory to start anew")
    return None


def _damage(path: Path) -> str | None:
    """Return what a checkpoint lacks, or None if it is whole. A killed run may leave files missing or short."""
    try:
        json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))  # the last file that is written
        for file in path.glob("*.safetensors"):
            with safe_open(file, "pt"):  # checks the file's length
                pass
    except (OSError, ValueError, SafetensorError) as error:
        return str(error)
    short = next((file.name for file in sorted(path.glob("*.pt")) if not zipfile.is_zipfile(file)), None)
    return None if short is None else f"{short} is cut short"


Show = Callable[[dict[str, Any]], None]
LOG = "training_log.jsonl"
FIELDS = ("loss", "kl", "hidden", "learning_rate", "grad_norm", "tokens", "tokens_per_s")
"""Fields of a line of the log beside step, steps and seconds. tokens: that the student ran since the run began."""


class ProgressLog(TrainerCallback):  # type: ignore[misc]
    """Writes `training_log.jsonl` (step, steps, FIELDS, seconds), and ends the run when its time is over.

    show:      called with each line
    limit_s:   seconds that the run may take; None: no limit
    last_loss: the last line's loss

    A resumed run continues the same file, with the step that it resumes at and the seconds until then.
    """

    def __init__(self, out: Path, show: Show | None = None, limit_s: float | None = None) -> None:
        self.out, self.show, self.limit_s = out, show, limit_s
        self.elapsed_s = 0.0  # when the last step ended; the next rate counts from then
        self.last_loss: float | None = None
        self._started = time.monotonic()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        kept = [line for line in read_log(self.out) if line["step"] <= state.global_step]
        self._started = time.monotonic() - (kept[-1]["seconds"] if kept else 0.0)
        self.out.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in kept)
        (self.out / LOG).write_text(text, encoding="utf-8")

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.limit_s is None:
            return
        self.elapsed_s = time.monotonic() - self._started
        if args.world_size > 1:  # all take the first process's time, and end at the same step and learning rate
            own = torch.tensor([self.elapsed_s], dtype=torch.float64, device=args.device)
            self.elapsed_s = float(broadcast(own))
        if self.elapsed_s >= self.limit_s:
            control.should_training_stop = control.should_log = control.should_save = True

    def time_share(self) -> float:
        """Return how much of the time is over, 0..1; 0 if there is no limit."""
        return 0.0 if self.limit_s is None else min(1.0, self.elapsed_s / self.limit_s)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or logs is None or "loss" not in logs:
            return
        line = {"step": state.global_step, "steps": state.max_steps}
        line |= {name: logs[name] for name in FIELDS if name in logs}
        line["seconds"] = round(time.monotonic() - self._started, 1)
        self.last_loss = float(logs["loss"])
        with (self.out / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self.show is not None:
            self.show(line)


def read_log(out: Path) -> list[dict[str, Any]]:
    path = out / LOG
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
