"""Train a model for reuse: data, ids and masks handed to transformers' Trainer.

A run trains all weights or LoRA's matrices, by labels or by a teacher: a `Way`.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import accelerate  # type: ignore[import-untyped]  # noqa: F401 - if it is missing, fail before a model is loaded
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader
from transformers import AutoConfig, PreTrainedModel, PrinterCallback, Trainer, TrainingArguments, set_seed
from transformers.modeling_layers import GradientCheckpointingLayer

from ragcache.errors import ConfigError
from ragcache.models.adapter import Adapter, Base
from ragcache.models.checkpoint_digest import checkpoint_digest
from ragcache.models.hub import resolve
from ragcache.models.language_model import LanguageModel
from ragcache.models.load import DTYPES, base_of, load_lm
from ragcache.models.machine import find_device
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_train.distill import Distillation, Evaluation, check_teacher, train_layers
from ragcache_train.kept_logits import KeptLogits
from ragcache_train.lora import add_lora, known_warnings_ignored, merge_lora, save_lora
from ragcache_train.masked_pass import BLOCK, NAME, answer_loss, register
from ragcache_train.own_answers import FILE, OwnAnswers
from ragcache_train.row_encoder import RowEncoder
from ragcache_train.run_files import CHECKPOINTS, ProgressLog, Show, find_checkpoint, write_options
from ragcache_train.special_tokens import choose_spec, prepare_model, take_rows
from ragcache_train.train_batches import BatchPlan, DrawnPairs, DrawnRows, EncodedRow, collate, collate_pairs
from ragcache_train.train_options import TrainOptions
from ragcache_train.train_rows import BadLine, DataRow, read_rows, store_rows

logger = logging.getLogger(__name__)

LOADERS = 2
"""Processes that lay out the next rows while a GPU runs the current ones."""


@dataclass(frozen=True)
class TrainReport:
    """The result of a training run.

    out:      directory of the trained model
    steps:    number of the optimizer's steps
    rows:     number of usable rows
    tokens:   number of tokens that ran, padding and the teacher's tokens included
    bad:      lines that were left out
    loss:     mean over the last logged steps; None if nothing was logged
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
    """transformers' Trainer with the batches of a `BatchPlan` and the loss of a `Way`."""

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
        self.tokens_seen = self._logged_tokens = 0
        self._logged: float | None = None  # time of the last line
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
        """Create the schedule. A run with a time limit lowers its rate by time, if the time ends before the steps."""
        if self._log.limit_s is None:
            return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[no-any-return]

        def share(step: int) -> float:
            return self._options.rate_share(max(step / num_training_steps, self._log.time_share()))

        self.lr_scheduler: LRScheduler = LambdaLR(self.optimizer if optimizer is None else optimizer, share)
        return self.lr_scheduler

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Create the optimizer, with a separate learning rate for the parameters in `Way.apart`."""
        made: Optimizer | None = self.optimizer
        if made is not None:
            return made
        optimizer: Optimizer = super().create_optimizer(model)
        chosen = {id(parameter) for parameter in self._way.apart}
        found = [one for group in optimizer.param_groups for one in group["params"] if id(one) in chosen]
        for group in optimizer.param_groups:
            group["params"] = [one for one in group["params"] if id(one) not in chosen]
        if found:
            optimizer.add_param_group({"params": found, "lr": self._options.rate_of_links, "weight_decay": 0.0})
        return optimizer

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the tokens that ran since the run began, their number per second, and the loss's measurements."""
        if "loss" in logs:
            now, before = time.monotonic(), self._logged or 0.0
            logs["tokens"] = tokens = self.state.num_input_tokens_seen
            logs["tokens_per_s"] = round((tokens - self._logged_tokens) / (now - before), 1)
            self._logged, self._logged_tokens = now, tokens
            logs |= {name: round(value, 6) for name, value in self._way.measured().items()}
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return 0: to count operations would take a loop over all parameters at every step."""
        return 0

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        if self._logged is None:
            self._logged, self._logged_tokens = time.monotonic(), self.state.num_input_tokens_seen
        self.state.num_input_tokens_seen += inputs["input_ids"].numel()
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
    held_out = _held_out(options, lm) if options.evaluate is not None else []
    for line in (bad := [*bad, *unfit]):
        logger.warning("%s; the line is left out", line)
    way = choose_way(lm, spec, encoded, options, out, earlier)
    log = ProgressLog(out, show, None if options.minutes is None else 60 * options.minutes)
    trainer = _trainer(options, way, encoded, spec, log, device)
    if isinstance(way.loss, Distillation) and held_out:
        trainer.add_callback(Evaluation(way.loss, spec, held_out, options.evaluate_every, out))
    trainer.accelerator.wait_for_everyone()  # all processes have checked that `out` is free
    if trainer.is_world_process_zero():
        write_options(options, out)
    with known_warnings_ignored():
        trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.is_world_process_zero():
        way.save()
    return TrainReport(out, trainer.state.global_step, len(encoded), trainer.tokens_seen, log.last_loss, bad)


def _load(options: TrainOptions, device: str) -> tuple[LanguageModel, Adapter | None]:
    """Load the model to start from, and an adapter whose rows and matrices LoRA trains further."""
    earlier = Adapter.find(resolve(options.model)) if options.lora_rank else None
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
    """Return all usable rows, and the unusable lines."""
    drawn: list[DataRow] = []
    if options.store is not None:
        form = {"rows": options.rows, "passages": options.passages, "seed": options.seed}
        drawn = store_rows(options.store, **form, database=options.database)
    if drawn and not options.data:
        return drawn, []
    rows, bad = read_rows(options.data, unlabelled=options.distills)
    return [*rows, *drawn], bad


def _encode(
    options: TrainOptions, lm: LanguageModel, rows: Sequence[DataRow]
) -> tuple[list[EncodedRow], TrainedTokens, list[BadLine]]:
    """Return rows as ids, the way of reuse with its ids, and lines that cannot be used."""
    form = options.encoding(lm.max_positions)
    filled: Sequence[DataRow | BadLine] = rows
    if options.distills:
        filled = OwnAnswers(lm, Path(options.out) / FILE, form, options.seed).fill(rows)
    spec = choose_spec(lm.tokenizer, options.reuse, options.link_tokens, options.link_slots, options.positions)
    encoded, unfit = encode_rows(RowEncoder(lm.tokenizer, form), filled)
    if options.distills:
        _read_apart(encoded)  # raises if there is no row to learn from; the others leave the model unchanged
        encoded = [row._replace(asks=[ask.learned for ask in row.asks]) for row in encoded]
    _check_slots([row for row in encoded if options.most is None or not row.shuffle], spec)
    encoded = _with_primer(encoded, options, lm)
    return encoded, replace(spec, recipe=options.recipe), unfit


def _held_out(options: TrainOptions, lm: LanguageModel) -> list[EncodedRow]:
    """Return the rows to evaluate on, whole and in their order. Raises ConfigError where none has passages."""
    rows, bad = read_rows((str(options.evaluate),))
    encoded, _ = encode_rows(RowEncoder(lm.tokenizer, options.encoding(lm.max_positions)), [*rows, *bad])
    return _with_primer(_read_apart(encoded), options, lm)


def _read_apart(rows: Sequence[EncodedRow]) -> list[EncodedRow]:
    """Return the rows whose passages are read apart. Raises ConfigError if there is none."""
    kept = [row for row in rows if row.chunks and row.apart is not False]
    if not kept:
        raise ConfigError(
            f"no line of the data can be used: {rows[0].where} has no passages to read apart, from which alone a model "
            "learns to do so; give lines of type qa"
        )
    return kept


def _with_primer(rows: Sequence[EncodedRow], options: TrainOptions, lm: LanguageModel) -> list[EncodedRow]:
    """Return the rows with the ids of the primer that the recipe reads passages after."""
    primer = lm.recipe(options.recipe).primer_ids
    return [row._replace(primer=primer) for row in rows]


def encode_rows(encoder: RowEncoder, rows: Sequence[DataRow | BadLine]) -> tuple[list[EncodedRow], list[BadLine]]:
    """Return rows as ids, and rows that do not fit or were already unusable. Raises ConfigError if no row is left."""
    found = [row if isinstance(row, BadLine) else encoder.encode(row) for row in rows]
    encoded = [row for row in found if isinstance(row, EncodedRow)]
    bad = [line for line in found if isinstance(line, BadLine)]
    if not encoded:
        raise ConfigError(f"no line of the data fits the model: {bad[0]}; train with more max_tokens or shorter texts")
    return encoded, bad


def _check_slots(rows: Sequence[EncodedRow], spec: TrainedTokens) -> None:
    if not spec.link_tokens or not rows:
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
    spec: TrainedTokens,
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
        adam_beta2=options.beta2,
        warmup_steps=round(options.warmup * steps),
        seed=options.seed,
        save_steps=options.save_every,
        save_total_limit=options.keep_checkpoints,
        logging_steps=min(options.log_every, steps),  # the report of a short run says its loss too
        bf16=options.runs_bfloat16(device),
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        dataloader_num_workers=LOADERS if on_gpu else 0,
        accelerator_config={"non_blocking": on_gpu},
        logging_nan_inf_filter=False,  # the filter reads every step's loss, which waits for the device
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
        log_level="warning",
    )
    if arguments.n_gpu > 1:
        raise ConfigError("this process sees several GPUs; start one process a GPU with torchrun, or show it one")
    return arguments


class Way(NamedTuple):
    """A way of training.

    model:   the model that the Trainer trains
    layers:  the model that has the layers, which may be compiled
    rows:    a data set, from a Draw to what `collate` takes
    collate: turns a batch of rows into tensors
    loss:    of the model, the model without accelerate's wrapper, a batch, and the number of labels
    save:    writes the result
    apart:   parameters with a separate learning rate, `TrainOptions.rate_of_links`
    measured: figures of the steps since its last call, for the log
    """

    model: nn.Module
    layers: nn.Module
    rows: Any
    collate: Callable[..., dict[str, Any]]
    loss: Callable[..., Tensor]
    save: Callable[[], None]
    apart: Sequence[nn.Parameter] = ()
    measured: Callable[[], dict[str, float]] = dict


def choose_way(
    lm: LanguageModel,
    spec: TrainedTokens,
    rows: Sequence[EncodedRow],
    options: TrainOptions,
    out: Path,
    earlier: Adapter | None,
) -> Way:
    """Return how all weights are trained, into a Hugging Face directory, or LoRA's matrices, into an adapter.

    earlier: the adapter that LoRA goes on from; its base is `lm`
    """
    base, dtype = _base(lm), _saved_dtype(options)
    teacher = _teacher(lm, options, earlier) if options.distills else None
    apart: list[nn.Parameter] = []
    prepare_model(lm.model, spec, options.seed)
    if earlier is not None:
        take_rows(lm.model, spec, earlier)
    _prepare(lm, options)
    model: nn.Module = lm.model
    if options.lora_rank:
        set_seed(options.seed)  # half of LoRA's matrices start random
        mixed = options.runs_bfloat16(str(lm.device))
        scale = options.lora_rank, options.lora_alpha
        model = add_lora(lm.model, spec, *scale, earlier, mixed, options.lora_on_passages)
    elif teacher is None:
        model.requires_grad_(True)
    else:
        apart = train_layers(lm.model, spec)
    save = partial(_save, lm, model, dtype, out)
    if options.makes_lora_adapter:
        save = partial(save_lora, lm, model, base, spec, dtype, options.lora_on_passages, out)
    if teacher is None:
        loss = partial(answer_loss, rope=lm.rope)
        return Way(model, lm.model, DrawnRows(rows, spec, options.shuffle_passages), collate, loss, save)
    if options.lora_rank:
        apart = [one for name, one in model.named_parameters() if "trainable_tokens_delta" in name]
    distill = _distillation(lm, teacher, spec, options)
    pairs = DrawnPairs(rows, spec, options.shuffle_passages, options.most)
    return Way(model, lm.model, pairs, collate_pairs, distill, save, apart, distill.take)


def _teacher(lm: LanguageModel, options: TrainOptions, earlier: Adapter | None) -> PreTrainedModel:
    """Load the teacher: the model that the options name, or a second copy of the model to start from.

    Raises ConfigError for a teacher that cannot be learned from. If no teacher is named, the model to start from must
    not have been trained for reuse, which has changed its answers.
    """
    if options.teacher is None and earlier is None and lm.reuse is not None:
        raise ConfigError(
            f"{lm.name} was trained for reuse already, and distillation learns from a model that was not; name the "
            "model that it was made from as teacher"
        )
    name = lm.name if options.teacher is None else options.teacher
    teacher = load_lm(name, dtype=options.weights_dtype(str(lm.device)), device=str(lm.device), packed=False)
    check_teacher(teacher, lm, options.hidden_weight)
    register()
    teacher.model.set_attn_implementation(NAME)
    return teacher.model


def _distillation(
    lm: LanguageModel, teacher: PreTrainedModel, spec: TrainedTokens, options: TrainOptions
) -> Distillation:
    """Return the loss of distillation as the options say.

    Raises ConfigError if damage is to be measured and the teacher has no embedding of the added ids, or if the folder
    of kept logits cannot be written.
    """
    known = teacher.get_input_embeddings().weight.shape[0]
    if options.damage_weight and any(id >= known for id in spec.added_ids):
        raise ConfigError(
            f"damage_weight={options.damage_weight} reads the rows by the teacher, whose {known} ids lack the added "
            "tokens; leave it out, or train with link_tokens=0 first"
        )
    kept = None
    if options.keep_logits is not None:
        name = str(lm.name if options.teacher is None else options.teacher)
        kept = KeptLogits(Path(options.keep_logits), str(checkpoint_digest(resolve(name))))
    mixed = options.runs_bfloat16(str(lm.device))
    return Distillation(teacher, lm.rope, options.hidden_weight, mixed, options.damage_weight, kept)


def _prepare(lm: LanguageModel, options: TrainOptions) -> None:
    """Make the model's attention follow the masks of training."""
    register()
    lm.model.set_attn_implementation(NAME)
    if options.checkpointing:
        lm.model.gradient_checkpointing_enable({"use_reentrant": False})


def _base(lm: LanguageModel) -> Base:
    """Return the adapter's description of the model trained beside it, before anything is added to the model."""
    name, text = str(lm.name), lm.config.get_text_config(decoder=True)
    return Base(
        str(Path(name).resolve()) if Path(name).exists() else name,
        str(checkpoint_digest(resolve(name))),
        int(text.num_hidden_layers),
        int(text.hidden_size),
        int(text.vocab_size),
        len(lm.tokenizer),
    )


def _saved_dtype(options: TrainOptions) -> torch.dtype:
    """Return the dtype in which the model to start from was saved, unless the options name another."""
    saved = (
        getattr(AutoConfig.from_pretrained(base_of(options.model), trust_remote_code=False), "dtype", None)
        or torch.float32
    )
    return DTYPES[options.save_dtype] if options.save_dtype is not None else saved


def _save(lm: LanguageModel, model: Any, dtype: torch.dtype, out: Path) -> None:
    """Save weights, configuration and tokenizer, as any Hugging Face directory."""
    lm.model.config.use_cache = True  # the Trainer turns it off
    merged = merge_lora(model).to(dtype)
    merged.set_attn_implementation("sdpa")
    merged.save_pretrained(out)
    lm.tokenizer.save_pretrained(out)


BOUND = 0.05
"""Largest relative difference that compiling may make to a first batch's loss and gradients' norm: bfloat16 is rounded
at other places."""


def compile_layers(
    model: nn.Module, trained: Sequence[nn.Parameter], loss: Callable[[], Tensor], backend: str = "inductor"
) -> bool:
    """Compile the model's layers, unless that fails or changes the results, which is then logged.

    Returns whether they are compiled. A layer's hundred and more small operations become a few kernels.

    Attention is unchanged (FlexAttention is compiled by itself), and so is everything around the layers, whose
    shapes differ from batch to batch. A batch's length does not (`collate`), so that a run compiles once.

    trained: parameters; loss: of a batch, which is computed and differentiated twice. The gradients are dropped
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    plain = _measure(loss, trained)
    for layer in layers:  # all run the same code, which is compiled once
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=False)
    try:
        compiled = _measure(loss, trained)
        if all(math.isclose(*pair, rel_tol=BOUND) for pair in zip(plain, compiled, strict=True)):
            return True
        reason = "loss {:.4g} and gradients {:.4g} become {:.4g} and {:.4g}".format(*plain, *compiled)
    except RuntimeError as error:  # torch.compile raises it for everything that the compiler lacks
        reason = " ".join(str(error).split())[:200]
    for layer in layers:
        del layer.forward
    logger.warning("layers cannot be compiled (%s); training goes on without, more slowly", reason)
    return False


def _measure(loss: Callable[[], Tensor], trained: Sequence[nn.Parameter]) -> tuple[float, float]:
    """Return the loss, and the norm of its gradients, which are dropped."""
    found = loss()
    found.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.get_total_norm([one.grad for one in trained if one.grad is not None])
    for one in trained:
        one.grad = None
    return found.item(), norm.item()
