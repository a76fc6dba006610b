"""A GGUF model that llama.cpp runs: passages in, states out, and tokens over sequences of its context."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ragcache.errors import ConfigError, PromptError
from ragcache.kv.block import KVBlock
from ragcache.kv.block_key import Neighbours, Recipe, digest
from ragcache.kv.fused_cache import FusedCache
from ragcache.kv.opaque_block import OpaqueBlock
from ragcache.models.batch import ForwardRequest, ScheduledTokens
from ragcache.models.block_model import BlockModel
from ragcache.models.checkpoint import load_config, load_generation, load_tokenizer
from ragcache.models.deadline import LIMIT, NO_LIMIT, Limit, limited
from ragcache.models.encode import AbandonedSignal
from ragcache.models.gguf_copy import known_sha256
from ragcache.models.pull import find_gguf
from ragcache.models.scheduler import Scheduler
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_llamacpp.context import LlamaContext, Row
from ragcache_llamacpp.options import NAME, NUMBERS, LlamaOptions
from ragcache_llamacpp.sequences import CellSequence, SequencePool, same

T = TypeVar("T")
CPU_BATCH_TOKENS, CPU_PASS_TOKENS, CPU_ALONE_TOKENS = 512, 64, 512
GPU_BATCH_TOKENS, GPU_PASS_TOKENS, GPU_ALONE_TOKENS = 2048, 512, 2048
NO_IDS = torch.empty(0, dtype=torch.int64)
NO_LOGITS = torch.empty(0)
MOVED_ROPES = ("default", "linear", "llama3")  # llama.cpp's shift multiplies keys again by YaRN's and LongRoPE's factor
EIGHT_BIT_WIDTH = 64  # llama.cpp 0.3.36 crashes where it shifts 8-bit keys of other widths
NO_ELEMENT = -1  # follows elements of which all may be known: of a prompt, the last element never is


class LlamaModel(BlockModel):
    """A model in a GGUF file, run by llama.cpp in the scheduler's thread. Thread-safe.

    weights:   digest of the file's content
    moves_keys: whether llama.cpp moves keys exactly, so that states can be read at other positions
    context:   llama.cpp's; only the scheduler's thread calls it
    sequences: the sequences of the context, and the cells that each holds
    """

    def __init__(self, name: str | Path, options: LlamaOptions) -> None:
        """Load a model. Raises ModelNotFoundError, UnsupportedModelError, ConfigError."""
        path = find_gguf(name)
        config = load_config(str(path), name)
        text_config = config.get_text_config(decoder=True)
        tokenizer = load_tokenizer(str(path))
        trained = None if tokenizer is None else TrainedTokens.of_vocabulary(tokenizer.get_vocab())
        super().__init__(config, load_generation(str(path)), tokenizer, 0, "", str(name), trained)
        width = int(getattr(text_config, "head_dim", 0) or text_config.hidden_size // text_config.num_attention_heads)
        if options.kv != "f16" and width % EIGHT_BIT_WIDTH:
            raise ConfigError(
                f"kv={options.kv} needs heads of a multiple of {EIGHT_BIT_WIDTH} numbers, and those of {name} have "
                f"{width}: llama.cpp cannot move such keys; leave kv out",
                "engine",
            )
        numbers = SequencePool.numbers(options.parallel)
        self.context = LlamaContext(path, options, self.max_positions, max(numbers) + NUMBERS)
        self.sequences = SequencePool(self.context.num_cells, options.parallel, self._undo)
        self.vocab_size = self.context.vocab_size
        self.max_positions = min(self.max_positions, self.context.num_cells)
        ropes = getattr(text_config, "rope_parameters", None) or {}
        nested = [one for one in ropes.values() if isinstance(one, dict)]
        self.moves_keys = all(one.get("rope_type", "default") in MOVED_ROPES for one in nested or [ropes])
        self.weights = digest({NAME: known_sha256(path)})
        self.fingerprint = digest({"weights": self.weights, "state": self.context.key})
        on_cpu = not self.context.uses_gpu
        passes = (CPU_PASS_TOKENS, CPU_ALONE_TOKENS) if on_cpu else (GPU_PASS_TOKENS, GPU_ALONE_TOKENS)
        self.scheduler = Scheduler(self._forward, *passes)
        self._batch_tokens = CPU_BATCH_TOKENS if on_cpu else GPU_BATCH_TOKENS
        self._encoding = threading.Lock()
        self._idle = CellSequence(0, self._undo)

    @property
    def batch_tokens(self) -> int:
        return self._batch_tokens

    @property
    def kv_bytes_per_token(self) -> int:
        return self.context.token_bytes

    def encode(
        self,
        chunks: Sequence[Sequence[int]],
        recipe: str | Recipe = "isolated",
        prefix_ids: Sequence[int] = (),
        *,
        prefix: object = None,
        batch_tokens: int | None = None,
        is_needed: Callable[[], bool] | None = None,
        neighbours: Sequence[Neighbours] | None = None,
    ) -> list[KVBlock]:
        """Run each chunk in a sequence of its own, many sequences at once, and return their states.

        The text before a chunk (prefix, primer, neighbours) is cut off its sequence before the state is taken. prefix,
        batch_tokens: without effect. Raises the errors of `LanguageModel.encode`, and EngineError.
        """
        recipe = self.recipe(recipe)
        if not recipe.is_dense:
            raise ConfigError(
                f"engine {NAME} keeps whole states, and recipe {recipe} leaves out tokens of a passage; use isolated, "
                "prefix or primer",
                "recipe",
            )
        context = [*prefix_ids, *recipe.primer_ids] if recipe.sees_prefix else []
        bos = [self._bos_id()] if recipe.bos else []
        near = neighbours or [()] * len(chunks)
        heads = [[*bos, *recipe.before(one)] for one in near]
        rows = [[*head, *recipe.marked(chunk)] for head, chunk in zip(heads, chunks, strict=True)]
        for rank, (chunk, row) in enumerate(zip(chunks, rows, strict=True)):
            if not chunk:
                raise PromptError(f"chunk {rank} has no tokens; leave empty passages out")
            self.check_ids([*context, *row], f"chunk {rank}")
        blocks: list[KVBlock] = []
        limit = LIMIT.get()
        with self._encoding, self._read(context, limit):
            for group in self._groups([len(row) for row in rows]):
                if is_needed is not None and not is_needed():
                    raise AbandonedSignal
                lengths = [len(context) + len(rows[rank]) for rank in group]
                with self.admit([*context, NO_ELEMENT], same, lengths, limit) as found:
                    work = [
                        (sequence.number, len(context), heads[rank], rows[rank])
                        for sequence, rank in zip(found, group, strict=True)
                    ]
                    blocks += self.call(partial(self._states, work, recipe))
        return blocks

    def _states(self, work: Sequence[tuple[int, int, list[int], list[int]]], recipe: Recipe) -> list[KVBlock]:
        """Run the rows and return the states of their chunks, in the model's thread.

        work: for each row, its sequence's number and length, the ids before the chunk, and these ids with the chunk's
        """
        self.context.decode([Row(number, length, row) for number, length, _, row in work])
        blocks: list[KVBlock] = []
        for number, length, head, row in work:
            first = length + len(head)
            self.context.remove(number, 0, first)
            blocks.append(OpaqueBlock(self.context.state(number), first, 0, len(row) - len(head), recipe))
        return blocks

    @contextmanager
    def _read(self, ids: Sequence[int], limit: Limit) -> Iterator[None]:
        """Keep a sequence that holds these ids until the context ends, and longer if there is room."""
        if not ids:
            yield
            return
        with self.admit([*ids, NO_ELEMENT], same, [len(ids)], limit) as [sequence]:
            if left := ids[len(sequence.elements) :]:
                self.run(left, sequence)
            sequence.keeps = True
            yield

    def _groups(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the indices of rows that run together, in order. lengths: tokens of each row"""
        group: list[int] = []
        most = min(self.batch_tokens, self.context.num_cells // 2)
        for rank, length in enumerate(lengths):
            if group and (len(group) == self.sequences.parallel or sum(lengths[one] for one in group) + length > most):
                yield group
                group = []
            group.append(rank)
        if group:
            yield group

    def _bos_id(self) -> int:
        bos = self.config.get_text_config(decoder=True).bos_token_id
        if bos is None:
            raise ConfigError(f"{self.name} has no BOS token; use a recipe without bos")
        return int(bos)

    @contextmanager
    def admit(
        self, elements: Sequence[int], usable: Callable[[int], int], lengths: Sequence[int], limit: Limit
    ) -> Iterator[list[CellSequence]]:
        """Wait for sequences, copy what is known of their elements into them, and end them afterwards; see
        `SequencePool.acquire`.

        A sequence whose `keeps` was set is kept for later prompts.
        """
        found, base = self.sequences.acquire(elements, usable, lengths, limit)
        try:
            try:
                if base is not None:
                    known = len(found[0].elements)
                    self.call(partial(self._fork, base.number, [one.number for one in found], known))
            finally:
                self.sequences.begin(found, base)
            yield found
        finally:
            for sequence in found:
                self.sequences.release(sequence, keep=sequence.keeps)

    def run(self, ids: Sequence[int], sequence: CellSequence) -> Tensor:
        """Run tokens after everything that a sequence holds, and return the last token's logits.

        Raises EngineError, and CancelledError and TimedOutError within `limited`.
        """
        positions = torch.arange(len(sequence.elements), len(sequence.elements) + len(ids))
        return self.scheduler.run(ForwardRequest(torch.tensor(ids), positions, as_cache(sequence), True))

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` in the model's thread, between passes, and return its result. The caller's limit has no effect."""

        def alone() -> T:
            self._remove_ended()
            return work()

        if self.scheduler.is_current_thread:
            return alone()
        request = ForwardRequest(NO_IDS, NO_IDS, as_cache(self._idle), True)
        with limited(NO_LIMIT):
            return cast(T, self.scheduler.run(request, cast(Callable[[], Tensor], alone)))

    def _forward(self, pieces: Sequence[ScheduledTokens]) -> list[Tensor]:
        """Run pieces of several requests in a single batch; see `Scheduler.forward`."""
        self._remove_ended()
        held = [cast(CellSequence, cast(Any, piece.run.cache)) for piece in pieces]
        rows = [
            Row(one.number, len(one.elements), piece.ids.tolist(), piece.num_tokens == piece.run.left)
            for one, piece in zip(held, pieces, strict=True)
        ]
        found = self.context.decode(rows)
        for sequence, row in zip(held, rows, strict=True):
            self.sequences.extend(sequence, row.ids)
        return [NO_LOGITS if logits is None else logits for logits in found]

    def _fork(self, source: int, numbers: Sequence[int], length: int) -> None:
        for number in numbers:
            self.context.fork(source, number, length)

    def _remove_ended(self) -> None:
        """Free the cells of ended sequences, before their numbers are used again."""
        while self.sequences.removed:
            self.context.end(self.sequences.removed.popleft())

    def _undo(self, sequence: CellSequence, length: int) -> None:
        def undo() -> None:
            self.context.end(sequence.number, length)
            self.sequences.shorten(sequence, length)

        self.call(undo)


def as_cache(sequence: CellSequence) -> FusedCache:
    """Return a sequence in the scheduler's type: its requests only pass it on to `_forward`."""
    return cast(FusedCache, cast(Any, sequence))
