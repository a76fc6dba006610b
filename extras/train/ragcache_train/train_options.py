"""Options of a training run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ragcache.errors import ConfigError, check_choice, check_least
from ragcache.kv.block_key import RECIPE_NAMES
from ragcache.models.load import DTYPES
from ragcache_train.row_encoder import EncodingOptions
from ragcache_train.train_batches import BatchOptions

PRECISIONS = ("float32", "bfloat16")
LEARNING_RATES = {False: 1e-5, True: 2e-4}  # full fine-tuning, LoRA
OBJECTIVES = ("labels", "distill")
LORA_ON = ("all", "passages")
DISTILL_RATE = 1e-4  # all weights; the teacher's distribution says more of a token than its label does
DISTILL_BETA2 = 0.98  # of Adam
DEFAULT_MAX_TOKENS = 4096  # the paper's A.1


@dataclass(frozen=True)
class TrainOptions:
    """Options of a training run.

    model:           bundled name, directory or hub id of the model to start from, or an adapter, which LoRA trains
                     further
    data:            files of JSON lines (ragcache_train.train_rows); may be empty if a store is given
    out:             directory of the trained model, its checkpoints and its log
    reuse:           "link" (KVLink; Block-Attention with link_tokens 0) or "markers" (TurboRAG)
    objective:       "labels", or "distill": the divergence from a frozen teacher that reads all passages as a single
                     text, along every token after them, and the relative error of hidden states there
    recipe:          how passages are encoded apart: "isolated", "prefix" or "primer"
    teacher:         of "distill": a model of the same family and vocabulary; None: the model to start from, unchanged
    hidden_weight:   of "distill": weight of the hidden states' error
    damage_weight:   of "distill": additional weight of a token whose reading apart hurts an untrained model by as much
                     as the mean; 0: all tokens count alike
    keep_logits:     of "distill": folder that keeps the teacher's likeliest logits, for later epochs and runs; needs
                     hidden_weight=0. Rows that are drawn anew in each epoch are found again only with keep_order
    link_rate:       of "distill": learning rate of the added tokens' embeddings; None: ten times that of the weights
    evaluate:        of "distill": file of held-out rows with answers, read every `evaluate_every` steps
    store:           of "distill": draw `rows` rows of `passages` neighbouring passages from this store, without
                     labels. Other rows, too, have a random number of passages, at most this many
    database:        SQLAlchemy URL of its documents; None: in its directory. Not written down: it may hold a
                     password
    link_tokens:     K, after each passage; link_slots: passages that have their own link tokens
    positions:       of markers: "reordered" or "composite"
    separate_share:  share of "qa" rows whose passages are encoded separately; the others in standard encoding. All are
                     where LoRA acts on passages alone
    mixture:         share of each kind of row; None: as the data has them
    shuffle_passages: put the passages of "qa" rows in another order each epoch
    system, question_format, segment_tokens: see EncodingOptions; max_tokens: longest sequence, link tokens not counted;
                     None: 4,096 or the model's limit
    steps:           of the optimizer; None: `epochs` of the data
    minutes:         the run ends after this time, unless its steps end earlier; the learning rate then falls with the
                     time. The minutes before a run was resumed count
    batch_tokens, batch_size: tokens and rows of a batch at most; accumulate: batches per step
    learning_rate:   None: 1e-5, or 2e-4 with LoRA, or 1e-4 for "distill" of all weights
    warmup:          share of the steps over which the learning rate rises; it falls to 0 linearly after that
    lora_rank:       0: train all weights; else the rank of LoRA's matrices: the result is an adapter with them
    lora_on:         tokens that the matrices act on: "all", or with "distill" those of "passages" read apart, so that
                     the model which reads questions, and all as a single text, stays the one to start from; None:
                     "passages" with "distill", unless merge is given
    merge:           with LoRA: the result is the whole model with the matrices in its weights
    resume:          go on from the last checkpoint in `out`
    device:          "auto" (see `load_lm`), "cuda", "cpu", ...
    dtype:           of the weights while training; save_dtype: of the saved ones; None: as the model was saved
    precision:       of the passes: "float32" or "bfloat16" (mixed precision; weights beside an adapter are bfloat16
                     themselves); None: bfloat16 on a GPU
    compile:         the model's layers, on the first batch; None: on a GPU
    """

    model: str | Path
    data: tuple[str | Path, ...]
    out: str | Path
    reuse: str = "link"
    objective: str = "labels"
    recipe: str = "isolated"
    teacher: str | Path | None = None
    hidden_weight: float = 0.5
    damage_weight: float = 0.0
    keep_logits: str | Path | None = None
    link_rate: float | None = None
    evaluate: str | Path | None = None
    evaluate_every: int = 100
    store: str | Path | None = None
    database: str | None = None
    rows: int = 200
    passages: int = 8
    link_tokens: int = 5
    link_slots: int = 16
    positions: str = "reordered"
    separate_share: float = 0.5
    mixture: Mapping[str, float] | None = None
    shuffle_passages: bool = True
    system: str | None = None
    question_format: str | None = None
    segment_tokens: int = 100
    max_tokens: int | None = None
    steps: int | None = None
    minutes: float | None = None
    epochs: float = 1.0
    batch_tokens: int = 8192
    batch_size: int | None = None
    accumulate: int = 1
    learning_rate: float | None = None
    warmup: float = 0.03
    lora_rank: int = 0
    lora_alpha: int | None = None
    lora_on: str | None = None
    merge: bool = False
    checkpointing: bool = False
    seed: int = 0
    save_every: int = 500
    keep_checkpoints: int = 2
    log_every: int = 10
    resume: bool = False
    device: str = "auto"
    dtype: str = "float32"
    save_dtype: str | None = None
    precision: str | None = None
    compile: bool | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError naming the option that is out of range."""
        self.batches()
        self._check_distill()
        check_least("steps", 1 if self.steps is None else self.steps, 1)
        if not self.epochs > 0:
            raise ConfigError(f"epochs is {self.epochs}; it must be more than 0")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"minutes is {self.minutes}; it must be more than 0")
        if self.lora_rank < 0:
            raise ConfigError(f"lora_rank is {self.lora_rank}; it must be at least 0 (0: train all weights)")
        if self.merge and not self.lora_rank:
            raise ConfigError("merge goes with lora_rank: all weights are written whole anyway")
        if self.lora_on is not None:
            check_choice("lora_on", self.lora_on, LORA_ON)
            if not self.lora_rank:
                raise ConfigError(f"lora_on is {self.lora_on!r} and no matrices are trained; add lora_rank")
        if self.lora_on == "passages" and (self.merge or not self.distills):
            raise ConfigError(
                "lora_on is 'passages', which needs objective='distill' and cannot be merged into the weights that "
                "questions share; add objective, and leave merge out"
            )
        if self.precision not in (None, *PRECISIONS):
            raise ConfigError(f"precision is {self.precision!r}; it must be one of {', '.join(PRECISIONS)}")
        for name in ("dtype", "save_dtype"):
            if getattr(self, name) not in (None, *DTYPES):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(DTYPES)}")
        if not 0 <= self.warmup <= 1:
            raise ConfigError(f"warmup is {self.warmup}; it is a share of the steps and must lie in 0..1")
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ConfigError(f"learning_rate is {self.learning_rate}; it must be more than 0")
        counts = ("accumulate", "evaluate_every", "save_every", "keep_checkpoints", "log_every", "rows", "passages")
        for name in (*counts, "segment_tokens"):
            check_least(name, getattr(self, name), 1)
        check_least("max_tokens", 2 if self.max_tokens is None else self.max_tokens, 2)

    def _check_distill(self) -> None:
        check_choice("objective", self.objective, OBJECTIVES)
        check_choice("recipe", self.recipe, RECIPE_NAMES)
        given = {
            "teacher": self.teacher,
            "store": self.store,
            "link_rate": self.link_rate,
            "evaluate": self.evaluate,
            "keep_logits": self.keep_logits,
            "damage_weight": self.damage_weight or None,
        }
        for name, value in given.items():
            if value is not None and not self.distills:
                raise ConfigError(f"{name} goes with objective='distill'; add it, or leave {name} out")
        for name in ("hidden_weight", "damage_weight"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if self.keep_logits is not None and self.hidden_weight:
            raise ConfigError(
                f"hidden_weight is {self.hidden_weight}, and keep_logits keeps no hidden states; set hidden_weight=0, "
                "or leave keep_logits out"
            )
        if self.database is not None and self.store is None:
            raise ConfigError("database is that of a store; add store")
        if self.link_rate is not None and not self.link_rate > 0:
            raise ConfigError(f"link_rate is {self.link_rate}; it must be more than 0")

    @property
    def distills(self) -> bool:
        return self.objective == "distill"

    @property
    def makes_lora_adapter(self) -> bool:
        return self.lora_rank > 0 and not self.merge

    @property
    def lora_on_passages(self) -> bool:
        """Return whether LoRA's matrices act on passages alone."""
        chosen = "passages" if self.distills and not self.merge else "all"
        return self.lora_rank > 0 and (self.lora_on or chosen) == "passages"

    def batches(self) -> BatchOptions:
        # A row that is read as a single text would teach matrices that act on passages alone nothing.
        share = 1.0 if self.lora_on_passages else self.separate_share
        return BatchOptions(self.batch_tokens, self.batch_size, share, self.mixture, self.most)

    @property
    def most(self) -> int | None:
        """Return the most passages of a row, if their number is drawn anew in each epoch."""
        return self._passages if self.distills and self.shuffle_passages else None

    @property
    def _passages(self) -> int:
        return min(self.passages, self.link_slots) if self.link_tokens else self.passages

    def encoding(self, max_positions: int) -> EncodingOptions:
        """Return the encoding's options. max_positions: the model's limit on tokens."""
        wanted = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        if self.max_tokens is not None and wanted > max_positions:
            raise ConfigError(f"max_tokens is {wanted} and the model takes {max_positions}; lower max_tokens")
        form = self.system, self.question_format, self.segment_tokens
        blocks = self._passages if self.distills else 0
        return EncodingOptions(*form, min(wanted, max_positions), blocks)

    def runs_bfloat16(self, device: str) -> bool:
        """Return whether the passes are in bfloat16."""
        return device.startswith("cuda") if self.precision is None else self.precision == "bfloat16"

    def weights_dtype(self, device: str) -> str:
        """Return the dtype of the weights while training: beside an adapter they need only the passes' precision.

        If LoRA's matrices are merged into the weights, the weights are saved, and keep their precision.
        """
        return "bfloat16" if self.makes_lora_adapter and self.runs_bfloat16(device) else self.dtype

    def compiles(self, device: str) -> bool:
        """Return whether the model's layers are compiled."""
        return device.startswith("cuda") if self.compile is None else self.compile

    @property
    def rate(self) -> float:
        own = DISTILL_RATE if self.distills and not self.lora_rank else LEARNING_RATES[self.lora_rank > 0]
        return own if self.learning_rate is None else self.learning_rate

    @property
    def rate_of_links(self) -> float:
        """Return the learning rate of the added tokens' embeddings, if it is separate."""
        return 10 * self.rate if self.link_rate is None else self.link_rate

    def rate_share(self, done: float) -> float:
        """Return the learning rate as a share of its peak after this share of the run, as the Trainer has it."""
        if done < self.warmup:
            return done / self.warmup
        return max(0.0, (1 - done) / (1 - self.warmup)) if self.warmup < 1 else 0.0

    @property
    def beta2(self) -> float:
        """Return the decay of Adam's mean of squared gradients."""
        return DISTILL_BETA2 if self.distills else 0.999

    def to_json(self) -> dict[str, Any]:
        """Return the options as JSON, for the file beside the checkpoints."""
        return dict(json.loads(json.dumps(asdict(replace(self, database=None)), default=str)))
