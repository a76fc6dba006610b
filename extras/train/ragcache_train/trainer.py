"""Train a model for reuse: data, ids and masks handed to transformers' Trainer."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import accelerate  # type: ignore[import-untyped]  # noqa: F401 - the Trainer misses it only when all is loaded
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainingArguments

from ragcache.errors import ConfigError
from ragcache.models.adapter import Adapter
from ragcache.models.hub import resolve
from ragcache.models.language_model import LanguageModel
from ragcache.models.load import checkpoint_digest, load_lm
from ragcache.models.machine import find_device
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_train.batches import BatchPlan
from ragcache_train.compiled import compile_layers
from ragcache_train.data import BadLine, DataRow, read_rows
from ragcache_train.encoding import RowEncoder
from ragcache_train.frozen import keep_passages
from ragcache_train.layout import EncodedRow
from ragcache_train.lora import known_warnings_ignored
from ragcache_train.mask import BLOCK
from ragcache_train.options import TrainOptions
from ragcache_train.own_answers import FILE, OwnAnswers
from ragcache_train.progress import ProgressLog, Show
from ragcache_train.run_files import CHECKPOINTS, find_checkpoint, write_options
from ragcache_train.special_tokens import choose_spec
from ragcache_train.store_rows import store_rows
from ragcache_train.ways import Way, on_frozen_weights, on_weights

logger = logging.getLogger(__name__)

LOADERS = 2
"""Processes that lay rows out while a GPU works on those before."""


@dataclass(frozen=True)
class TrainReport:
    """
    out:      directory of the trained model
    steps:    of the optimizer; tokens: that ran, what fills batches up included; rows: usable
    bad:      lines that were left out
    loss:     mean over the last logged steps; None where nothing was logged
    """

    out: Path
    steps: int
    rows: int
    tokens: int
    loss: float | None
    bad: list[BadLine] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        bad = [line._asdict() for line in self.bad]
        return {**vars(self), "out": str(self.out), "bad": bad}


class ReuseTrainer(Trainer):  # type: ignore[misc]
    """Trainer with our batches and the way's loss."""

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        *args: Any,
        way: Way,
        plan: BatchPlan,
        multiple: int,
        options: TrainOptions,
        log: ProgressLog,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, model=way.model, train_dataset=way.rows, callbacks=[log], **kwargs)
        self._way, self._plan, self._multiple, self._options, self._log = way, plan, multiple, options, log
        self.tokens_seen = 0
        self._compiles = options.compiles(str(self.args.device))

    def get_train_dataloader(self) -> DataLoader[Any]:
        loader: DataLoader[Any] = DataLoader(
            self.train_dataset,
            batch_sampler=self._plan,
            collate_fn=partial(self._way.collate, multiple=self._multiple),
            pin_memory=self.args.dataloader_pin_memory,
            num_workers=self.args.dataloader_num_workers,
        )
        return self.accelerator.prepare(loader)  # type: ignore[no-any-return]

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """A run of so many minutes falls to its last rate by the time, if that is over before the steps are."""
        if self._log.limit_s is None:
            return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[no-any-return]

        def share(step: int) -> float:
            return self._options.rate_share(max(step / num_training_steps, self._log.time_share()))

        self.lr_scheduler: LRScheduler = LambdaLR(self.optimizer if optimizer is None else optimizer, share)
        return self.lr_scheduler

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted: that goes over all parameters at every step."""
        return 0

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        self.tokens_seen += sum(batch["input_ids"].numel() for batch in (inputs, inputs.get("teacher")) if batch)
        inner = self.accelerator.unwrap_model(model)
        if self._compiles:
            self._compiles = False
            trained = [parameter for parameter in inner.parameters() if parameter.requires_grad]
            compile_layers(self._way.layers, trained, partial(self._way.loss, inner, inner, inputs))
        loss = self._way.loss(model, inner, inputs, num_items_in_batch)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over processes
        return (loss, None) if return_outputs else loss


def train(options: TrainOptions, show: Show | None = None) -> TrainReport:
    """Train, and save a Hugging Face directory or an adapter, which `ragcache.load_lm` loads.

    show: called with each line of the log

    Raises ConfigError for options or data that cannot be used, ModelNotFoundError and UnsupportedModelError as
    `ragcache.load_lm` does.
    """
    out = Path(options.out)
    checkpoint = find_checkpoint(options, out)
    rows, bad = _read(options)
    device = str(find_device(options.device))
    lm, earlier = _load(options, device)
    encoded, spec, unfit = _encode(options, lm, rows)
    for line in (bad := [*bad, *unfit]):
        logger.warning("%s; the line is left out", line)
    if options.is_frozen:
        way = on_frozen_weights(lm, spec, encoded, options, out, earlier)
    else:
        way = on_weights(lm, spec, encoded, options, out, earlier)
    log = ProgressLog(out, show, None if options.minutes is None else 60 * options.minutes)
    trainer = _trainer(options, way, encoded, spec, log, device)
    trainer.accelerator.wait_for_everyone()  # all have looked whether `out` is free
    if trainer.is_world_process_zero():
        write_options(options, out)
    with known_warnings_ignored():
        trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.is_world_process_zero():
        way.save()
    return TrainReport(out, trainer.state.global_step, len(encoded), trainer.tokens_seen, log.last_loss, bad)


def _load(options: TrainOptions, device: str) -> tuple[LanguageModel, Adapter | None]:
    """The model to start from, and an adapter beside it that goes on: its rows, and LoRA's matrices where these are
    trained."""
    goes_on = options.is_frozen or options.lora_rank
    earlier = Adapter.find(resolve(options.model)) if goes_on else None
    if earlier is not None and earlier.has_lora and options.is_frozen:
        raise ConfigError(
            f"{options.model} is an adapter with LoRA's matrices, and frozen weights go on from rows alone; train with "
            "lora_rank, or write the whole model with merge first and freeze that"
        )
    name = options.model if earlier is None else earlier.base.name
    lm = load_lm(name, dtype=options.weights_dtype(device), device=device, packed=False)
    files = checkpoint_digest(resolve(name))
    if earlier is not None:
        earlier.check_base(files)
    elif files is None and options.makes_lora_adapter:
        raise ConfigError(
            f"no files of {name} are here that an adapter could belong to (its weights are merged as it is loaded); "
            "train with merge, which writes the whole model"
        )
    return lm, earlier


def _read(options: TrainOptions) -> tuple[list[DataRow], list[BadLine]]:
    """All usable rows, and the lines that are not."""
    drawn: list[DataRow] = []
    if options.store is not None:
        form = {"rows": options.rows, "passages": options.passages, "seed": options.seed}
        drawn = store_rows(options.store, **form, database=options.database)
    if drawn and not options.data:
        return drawn, []
    rows, bad = read_rows(options.data, unlabelled=options.is_frozen)
    return [*rows, *drawn], bad


def _encode(
    options: TrainOptions, lm: LanguageModel, rows: Sequence[DataRow]
) -> tuple[list[EncodedRow], TrainedTokens | None, list[BadLine]]:
    """Rows as ids, the way of reuse with its ids, and lines that cannot be used."""
    form = options.encoding(lm.max_positions)
    filled: Sequence[DataRow | BadLine] = rows
    if options.is_frozen:
        filled = OwnAnswers(lm, Path(options.out) / FILE, form, options.seed).fill(rows)
    stored = *options.packet, options.anchor_tokens, options.anchor_segment, options.text_sees_anchors
    spec = choose_spec(lm.tokenizer, options.reuse, options.link_tokens, options.link_slots, options.positions, *stored)
    encoded, unfit = encode_rows(RowEncoder(lm.tokenizer, form), filled)
    if options.is_frozen:
        encoded, idle = keep_passages(encoded)
        unfit += idle
    _check_slots(encoded, spec)
    return encoded, spec, unfit


def encode_rows(encoder: RowEncoder, rows: Sequence[DataRow | BadLine]) -> tuple[list[EncodedRow], list[BadLine]]:
    """Rows as ids, and those that do not fit or could not be used before. Raises ConfigError when none is left."""
    found = [row if isinstance(row, BadLine) else encoder.encode(row) for row in rows]
    encoded = [row for row in found if isinstance(row, EncodedRow)]
    bad = [line for line in found if isinstance(line, BadLine)]
    if not encoded:
        raise ConfigError(f"no line of the data fits the model: {bad[0]}; train with more max_tokens or shorter texts")
    return encoded, bad


def _check_slots(rows: Sequence[EncodedRow], spec: TrainedTokens | None) -> None:
    if spec is None or not spec.link_tokens:
        return
    longest = max(rows, key=lambda row: len(row.chunks))
    if len(longest.chunks) > spec.link_slots:
        raise ConfigError(
            f"{longest.where} has {len(longest.chunks)} passages and there are link tokens for {spec.link_slots}; "
            f"train with link_slots={len(longest.chunks)} or split the line"
        )


def _trainer(
    options: TrainOptions,
    way: Way,
    rows: Sequence[EncodedRow],
    spec: TrainedTokens | None,
    log: ProgressLog,
    device: str,
) -> ReuseTrainer:
    together = options.accumulate * int(os.environ.get("WORLD_SIZE", 1))  # batches of a step; torchrun's processes
    num_batches = None if options.steps is None else options.steps * together
    plan = BatchPlan(rows, spec, options.batches(), options.seed, num_batches=num_batches, epochs=options.epochs)
    trainer = ReuseTrainer(
        args=_arguments(options, log.out, device, max(1, len(plan) // together)),
        options=options,
        log=log,
        way=way,
        plan=plan,
        multiple=-(-options.batch_tokens // BLOCK) * BLOCK if device.startswith("cuda") else 1,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _arguments(options: TrainOptions, out: Path, device: str, steps: int) -> TrainingArguments:
    on_gpu = device.startswith("cuda")
    arguments = TrainingArguments(
        output_dir=str(out / CHECKPOINTS),
        max_steps=steps,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=options.rate,
        weight_decay=options.weight_decay,
        adam_beta2=options.beta2,
        warmup_steps=round(options.warmup * steps),
        lr_scheduler_type=options.schedule if options.schedule != "constant" else "constant_with_warmup",
        max_grad_norm=options.max_grad_norm,
        seed=options.seed,
        save_steps=options.save_every,
        save_total_limit=options.keep_checkpoints,
        logging_steps=options.log_every,
        bf16=options.runs_bfloat16(device) and not options.is_frozen,  # nothing of a frozen model is float32
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        dataloader_num_workers=LOADERS if on_gpu else 0,
        accelerator_config={"non_blocking": on_gpu},
        logging_nan_inf_filter=False,  # it looks at every step's loss, which waits for the device
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
        log_level="warning",
    )
    if arguments.n_gpu > 1:
        raise ConfigError("this process sees several GPUs; start one process a GPU with torchrun, or show it one")
    return arguments
