"""Options of a training run, and how the command line takes them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from ragcache.cli.terminal import option
from ragcache.errors import ConfigError, check_choice, check_least
from ragcache.kv.block_key import RECIPE_NAMES

PRECISIONS = ("float32", "bfloat16")
LEARNING_RATES = {False: 1e-5, True: 2e-4}  # full fine-tuning, LoRA
OBJECTIVES = ("labels", "distill")
LORA_ON = ("all", "passages")
DISTILL_RATE = 1e-4  # all weights; the teacher's distribution says more of a token than its label does
DISTILL_BETA2 = 0.98  # of Adam
DEFAULT_MAX_TOKENS = 4096  # the paper's A.1


@dataclass(frozen=True)
class EncodingOptions:
    """How rows become ids.

    system:          text before everything if a row has no system text; None: the template's own
    question_format: see `prompt_format`
    segment_tokens:  of the pieces that a text to be summarised is cut into (100 in the paper)
    max_tokens:      longest sequence; link tokens and markers are not counted
    blocks:          chunks at most that a "text" is cut into, of about `segment_tokens` each; 0: it is not cut
    """

    system: str | None = None
    question_format: str | None = None
    segment_tokens: int = 100
    max_tokens: int = 4096
    blocks: int = 0


@dataclass(frozen=True)
class BatchOptions:
    """Sizes and mixture of the batches.

    tokens:         of a batch at most (a single long row may exceed it)
    rows:           of a batch at most; None: as many as fit
    separate_share: share of the rows encoded separately, of the rows that may be encoded either way
    mixture:        share of each kind of row in an epoch; None: as the data has them
    most:           passages of a row at most, if rows vary from epoch to epoch (`vary`); None: they do not vary

    Raises ConfigError for numbers out of range.
    """

    tokens: int = 8192
    rows: int | None = None
    separate_share: float = 0.5
    mixture: Mapping[str, float] | None = None
    most: int | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1 or (self.rows is not None and self.rows < 1):
            raise ConfigError(f"batch_tokens is {self.tokens} and batch_size {self.rows}; both must be at least 1")
        if not 0 <= self.separate_share <= 1:
            raise ConfigError(f"separate_share is {self.separate_share}; it must lie in 0..1")
        shares = list((self.mixture or {"": 1.0}).values())
        if min(shares) < 0 or sum(shares) <= 0:
            raise ConfigError(f"mixture is {self.mixture}; shares must be at least 0 and one of them more")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of a training run. Each field's help text describes it; further details:

    model:           an adapter is trained further by LoRA
    data:            files of JSON lines (ragcache_train.train_rows); may be empty if a store is given
    objective:       "distill" learns the divergence from a frozen teacher that reads all passages as a single text,
                     along every token after them, and the relative error of hidden states there
    recipe:          how passages are encoded apart
    teacher:         of the same family and vocabulary; None: the model to start from, unchanged
    damage_weight:   additional weight of a token whose reading apart hurts an untrained model by as much as the mean;
                     0: all tokens count alike
    keep_logits:     needs hidden_weight=0. Rows that are drawn anew in each epoch are found again only without
                     shuffle_passages
    store:           `rows` rows of `passages` neighbouring passages are drawn from it, without labels. Other rows, too,
                     have a random number of passages, at most this many
    database:        None: in the store's directory. Not written down: it may hold a password
    separate_share:  the other question rows are read in standard encoding. All are encoded separately where LoRA acts
                     on passages alone
    mixture:         share of each kind of row; None: as the data has them
    shuffle_passages: put the passages of "qa" rows in another order each epoch
    system, question_format, segment_tokens: see EncodingOptions
    max_tokens:      None: 4,096 or the model's limit
    minutes:         the steps may end the run earlier. The minutes before a run was resumed count
    warmup:          the learning rate falls to 0 linearly after that
    lora_rank:       the result is an adapter with the matrices
    lora_on:         "passages": those read apart, so that the model which reads questions, and all as a single text,
                     stays the model to start from; None: "passages" with "distill", unless merge is given
    device:          see `load_lm`
    precision:       bfloat16: mixed precision; weights beside an adapter are bfloat16 themselves
    """

    model: Annotated[str, option("--model", "Model to start from: bundled name, directory, hub id, or an adapter.")]
    out: Annotated[Path, option("--out", "Directory of the trained model, its checkpoints and its log.")]
    data: tuple[str | Path, ...] = ()
    reuse: Annotated[
        Literal["link", "markers"],
        option("--reuse", "KVLink (Block-Attention with --link-tokens 0) or TurboRAG."),
    ] = "link"
    recipe: Annotated[
        Literal["isolated", "prefix", "primer"],
        option("--recipe", "What passages are read after: nothing, the prefix or a primer."),
    ] = "isolated"
    link_tokens: Annotated[int, option("--link-tokens", "K: link tokens after each passage.")] = 5
    link_slots: Annotated[int, option("--link-slots", "Passages that have link tokens of their own.")] = 16
    positions: Annotated[Literal["reordered", "composite"], option("--positions", "Of passages between markers.")] = (
        "reordered"
    )
    objective: Annotated[
        Literal["labels", "distill"],
        option("--objective", "Learn the answers, or a frozen teacher's full attention over all after the passages."),
    ] = "labels"
    teacher: Annotated[
        str | None, option("--teacher", "Of distill: model to learn from; the one to start from if not given.")
    ] = None
    hidden_weight: Annotated[
        float, option("--hidden-weight", "Of distill: weight of the relative error of hidden states.")
    ] = 0.5
    damage_weight: Annotated[
        float,
        option("--damage-weight", "Of distill: additional weight of tokens that reading apart hurts most; 0: none."),
    ] = 0.0
    keep_logits: Annotated[
        Path | None,
        option("--keep-logits", "Of distill: folder of the teacher's likeliest logits, for later epochs and runs."),
    ] = None
    link_rate: Annotated[
        float | None,
        option("--link-rate", "Of distill: learning rate of added tokens; ten times the other if not given."),
    ] = None
    evaluate: Annotated[
        Path | None, option("--evaluate", "Of distill: held-out rows in --data's form, for evaluation.jsonl in --out.")
    ] = None
    evaluate_every: Annotated[int, option("--evaluate-every", "Steps between evaluations.")] = 100
    store: Annotated[
        Path | None,
        option("--store", "Of distill: draw rows from this store's passages.", environment=False),
    ] = None
    database: Annotated[
        str | None,
        option("--database", "SQLAlchemy URL of that store's documents.", environment=False),
    ] = None
    rows: Annotated[int, option("--rows", "Rows drawn from the store.")] = 200
    passages: Annotated[int, option("--passages", "Of distill: passages of a row at most.")] = 8
    separate_share: Annotated[
        float, option("--separate-share", "Share of question rows whose passages are encoded separately.")
    ] = 0.5
    mixture: Mapping[str, float] | None = None
    shuffle_passages: bool = True
    system: Annotated[str | None, option("--system", "System prompt of rows that have none.")] = None
    question_format: Annotated[str | None, option("--question-format", "Text around {question}.")] = None
    segment_tokens: Annotated[int, option("--segment-tokens", "Size of the pieces of a text to be summarised.")] = 100
    max_tokens: Annotated[
        int | None, option("--max-length", "Longest sequence in tokens, link tokens not counted; 4096 if not given.")
    ] = None
    epochs: Annotated[float, option("--epochs", "Passes over the data.")] = 1.0
    steps: Annotated[int | None, option("--steps", "Steps of the optimizer, in place of --epochs.")] = None
    minutes: Annotated[
        float | None, option("--minutes", "End after so many; the learning rate falls with the time then.")
    ] = None
    batch_tokens: Annotated[int, option("--batch-tokens", "Tokens of a batch at most.")] = 8192
    batch_size: Annotated[int | None, option("--batch-size", "Rows of a batch at most.")] = None
    accumulate: Annotated[int, option("--accumulate", "Batches of one step.")] = 1
    learning_rate: Annotated[
        float | None, option("--learning-rate", "1e-5 if not given, 1e-4 with distill, 2e-4 with LoRA.")
    ] = None
    warmup: Annotated[float, option("--warmup", "Share of the steps over which the learning rate rises.")] = 0.03
    lora_rank: Annotated[int, option("--lora-rank", "Rank of LoRA's matrices; 0 trains all weights.")] = 0
    lora_alpha: Annotated[float | None, option("--lora-alpha", "Scale of LoRA; twice the rank if not given.")] = None
    lora_on: Annotated[
        Literal["all", "passages"] | None,
        option("--lora-on", "Tokens that LoRA acts on; with distill passages', all others if not given."),
    ] = None
    merge: Annotated[bool, option("--merge", "With LoRA: write the whole model, in place of an adapter.")] = False
    checkpointing: Annotated[bool, option("--checkpointing", "Compute activations twice to save memory.")] = False
    seed: Annotated[int, option("--seed", "Of new rows, order and batches.")] = 0
    device: Annotated[str, option("--device", "auto, cuda, xpu, mps or cpu.")] = "auto"
    dtype: Annotated[str, option("--dtype", "Of the weights while training.")] = "float32"
    precision: Annotated[
        Literal["float32", "bfloat16"] | None,
        option("--precision", "Of the passes; bfloat16 on a GPU, else float32, if not given."),
    ] = None
    compile: Annotated[
        bool | None, option("--compile/--no-compile", "Compile the model's layers; on a GPU, if not given.")
    ] = None
    save_dtype: Annotated[str | None, option("--save-dtype", "Of the saved weights; as before if not given.")] = None
    save_every: Annotated[int, option("--save-every", "Steps between checkpoints.")] = 500
    keep_checkpoints: Annotated[int, option("--keep-checkpoints", "Checkpoints that are kept.")] = 2
    log_every: Annotated[int, option("--log-every", "Steps between lines of the log.")] = 10
    resume: Annotated[bool, option("--resume", "Go on from the last checkpoint in --out.")] = False

    def __post_init__(self) -> None:
        """Raise ConfigError naming the option that is out of range."""
        from ragcache.models.load import DTYPES  # imports torch, and `ragcache --help` loads this file

        self.batches()
        self._check_distill()
        check_least("steps", 1 if self.steps is None else self.steps, 1)
        if not self.epochs > 0:
            raise ConfigError(f"epochs is {self.epochs}; it must be more than 0")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"minutes is {self.minutes}; it must be more than 0")
        if self.lora_rank < 0:
            raise ConfigError(f"lora_rank is {self.lora_rank}; it must be at least 0 (0: train all weights)")
        if self.lora_alpha is not None and not 0 < self.lora_alpha < math.inf:
            raise ConfigError(f"lora_alpha is {self.lora_alpha}; it must be a number above 0")
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
