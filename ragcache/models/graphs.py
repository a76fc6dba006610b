"""Short passes as CUDA graphs: a question's tokens, and every decoding step, without the cost of launching kernels.

Such a pass consists of a thousand kernels, and launching them from Python takes longer than running them. A graph
launches them together: always the same kernels, over the same memory. So passes are recorded in a few sizes
(`Bucket`), and between passes only the numbers in a single tensor differ: ids, positions, and each row's places in the
pool's arena for reading and writing KV. Missing rows and tokens are padding, which reads zeros and writes to an unused
slot.

A graph is used once it has given the same result as a plain pass on random prompts. If none fits, `run_pieces` runs
the pass.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, product
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from ragcache.errors import ConfigError, UnsupportedModelError, first_line
from ragcache.kv.buffers import BufferPool
from ragcache.models.attention import CURRENT, ArenaPass
from ragcache.models.batch import ForwardRequest, ScheduledTokens, run_pieces
from ragcache.models.language_model import LanguageModel
from ragcache.models.support import same
from ragcache.runtime import during

log = logging.getLogger(__name__)
# ARENA_SHARE: share of the bytes for graphs that is used for KV; the rest is the graphs' scratch memory. DEFAULT_SHARE:
# share of the device's free memory that is used for both by default.
ARENA_SHARE, DEFAULT_SHARE = 0.75, 0.125
WARM_S = 10.0  # after this time no further bucket is recorded
PART_LAYERS = 4  # later layers' KV may be on its way while these run


class Bucket(NamedTuple):
    """The size of a recorded pass: number of requests, new tokens of each, and all tokens of each."""

    rows: int
    tokens: int
    context: int


CONTEXTS = (1024, 3072, 6144, 12288)  # attention takes time for all places, used or not
SIZES = (*product((1, 2, 4, 8), (1,), CONTEXTS), *product((1, 8), (32, 64), CONTEXTS))
BUCKETS = sorted(
    (Bucket(*sizes) for sizes in SIZES), key=lambda bucket: bucket.rows * (bucket.tokens + 64) * bucket.context
)
MOST_ROWS, MOST_TOKENS = 8, 64
BeforeLayer = Callable[[int], None]


class Recorded(NamedTuple):
    """A recorded pass.

    parts: functions that replay the pass in order, each with the layer before which it ends
    out:   the pass's logits
    """

    parts: list[tuple[int, Callable[[], None]]]
    out: Tensor


class CudaRecorder:
    """A recorder of passes as CUDA graphs. They share scratch memory, as they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def record(self, run: Callable[[BeforeLayer], Tensor], num_layers: int) -> Recorded:
        """Record a pass. run: runs it, and calls its argument before each layer"""
        ends: list[int] = []
        graphs = [torch.cuda.CUDAGraph()]

        def before_layer(layer: int) -> None:
            if layer and layer % PART_LAYERS == 0:
                graphs[-1].capture_end()
                ends.append(layer)
                graphs.append(torch.cuda.CUDAGraph())
                graphs[-1].capture_begin(self._pool, "thread_local")

        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            run(lambda layer: None)  # libraries take memory when they are first used, which a capture does not allow
            torch.cuda.synchronize(self._device)
            graphs[0].capture_begin(self._pool, "thread_local")
            try:
                out = run(before_layer)
            finally:
                graphs[-1].capture_end()
        return Recorded(list(zip([*ends, num_layers], (graph.replay for graph in graphs), strict=True)), out)


class GraphedPasses:
    """Recorded passes of a model, and `forward`, which replaces `run_pieces`.

    recorded: by bucket, the tensor of numbers that the recorded pass reads, and the pass
    """

    def __init__(self, lm: LanguageModel, num_bytes: int, recorder: CudaRecorder) -> None:
        self._model = lm.model
        self._arena = lm.pool.open_arena(int(num_bytes * ARENA_SHARE) // lm.kv_bytes_per_token)
        self._is_named = False
        self.recorded: dict[Bucket, tuple[Tensor, Recorded]] = {}
        self._warm(lm, recorder, recorder.free_bytes() - int(num_bytes * (1 - ARENA_SHARE)))

    @torch.inference_mode()
    def forward(self, pieces: Sequence[ScheduledTokens]) -> list[Tensor]:
        """Run the pieces as `run_pieces` does, by a recorded pass if one fits."""
        tokens = max(piece.num_tokens for piece in pieces)
        if not self.recorded or tokens > MOST_TOKENS:
            return run_pieces(self._model, pieces)
        if len(pieces) > MOST_ROWS:
            return [*self.forward(pieces[:MOST_ROWS]), *self.forward(pieces[MOST_ROWS:])]
        places = self._places(pieces)
        room = (len(pieces), tokens, max((place[-1] for place in places), default=sys.maxsize))
        fitting = (bucket for bucket in BUCKETS if all(a >= b for a, b in zip(bucket, room, strict=True)))
        bucket = next((bucket for bucket in fitting if bucket in self.recorded), None)
        try:
            if bucket is not None:
                return self._replay(bucket, pieces, places)
        except Exception as error:
            self.recorded.clear()
            _warn(error)
        if bucket is None and not self._is_named:
            self._is_named = True
            log.info("passes over KV that is too long for a CUDA graph, or not where one can read it, run without")
        return run_pieces(self._model, pieces)

    def _places(self, pieces: Sequence[ScheduledTokens]) -> list[tuple[int, int, int, int]]:
        """Return each piece's place in the arena (`FusedCache.places`); an empty list if a graph cannot read all."""
        found = [piece.run.cache.places(piece.num_tokens) for piece in pieces if piece.run.ordered]
        places = [place for place in found if place is not None]
        return places if len(places) == len(pieces) else []

    def _replay(
        self, bucket: Bucket, pieces: Sequence[ScheduledTokens], places: Sequence[tuple[int, int, int, int]]
    ) -> list[Tensor]:
        inputs, (parts, out) = self.recorded[bucket]
        count, padding = bucket.rows * bucket.tokens, inputs.new_zeros(bucket.rows * bucket.tokens)
        slots, rows = [BufferPool.SINK] * count, [(0, 0, 0, 0)] * bucket.rows
        ids, positions = [], []
        for rank, (piece, place) in enumerate(zip(pieces, places, strict=True)):
            rows[rank], end, behind = place, (rank + 1) * bucket.tokens, place[2] + place[3] - place[1]
            slots[end - piece.num_tokens : end] = range(behind - piece.num_tokens, behind)
            ids += [padding[: bucket.tokens - piece.num_tokens], piece.ids]
            positions += [padding[: bucket.tokens - piece.num_tokens], piece.positions]
        rest = padding[len(pieces) * bucket.tokens :]
        torch.cat([*ids, rest, *positions, rest], out=inputs[: 2 * count])
        inputs[2 * count :].copy_(torch.tensor([*slots, *chain(*rows)]), non_blocking=True)
        done = 0
        for end, run in parts:
            for layer, piece in product(range(done, end), pieces):
                piece.run.cache.ensure(layer)
            run()
            done = end
        for piece in pieces:
            piece.run.cache.appended(piece.num_tokens)
        return list(out[: len(pieces)].clone().unbind(0))

    def _run(self, bucket: Bucket, inputs: Tensor, before_layer: BeforeLayer) -> Tensor:
        """Run the pass that is recorded, and return its logits, float32 [rows, vocab_size].

        In each row of `tokens` tokens the padding comes first, then the new tokens.
        """
        rows, tokens, context = bucket
        count = rows * tokens
        ids, positions, slots = inputs[: 3 * count].view(3, count)
        base, shared, own, length = inputs[3 * count :].view(rows, 4, 1).unbind(1)
        number = torch.arange(context, device=inputs.device)
        places = torch.where(number < shared, base + number, own - shared + number)
        places = torch.where(number < length, places, BufferPool.NOWHERE)
        order = number <= (length - tokens + number[:tokens])[..., None]
        current = ArenaPass(self._arena, positions.view(rows, tokens), slots, places, order, before_layer)
        last = torch.arange(tokens - 1, count, tokens, device=inputs.device)
        with during(CURRENT, current):
            out = self._model(input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=last)
        logits: Tensor = out.logits[0].float()
        return logits

    @torch.inference_mode()
    def _warm(self, lm: LanguageModel, recorder: CudaRecorder, least_free: int) -> None:
        """Record and compare buckets, the smallest first, while memory and WARM_S allow."""
        until = time.monotonic() + WARM_S
        for bucket in (
            bucket for bucket in BUCKETS if bucket.context < 2 * min(lm.max_positions, self._arena.capacity)
        ):
            if recorder.free_bytes() < least_free or time.monotonic() > until:
                log.info("CUDA graphs of %d sizes, for want of memory or time for more", len(self.recorded))
                return
            inputs = torch.zeros(bucket.rows * (3 * bucket.tokens + 4), dtype=torch.int64, device=lm.device)
            inputs[2 * bucket.rows * bucket.tokens : 3 * bucket.rows * bucket.tokens] = BufferPool.SINK
            recorded = recorder.record(partial(self._run, bucket, inputs), lm.shape.num_layers)
            self.recorded[bucket] = inputs, recorded
            self._compare(lm, bucket)

    def _compare(self, lm: LanguageModel, bucket: Bucket) -> None:
        """Run the last tokens of random prompts by the recorded pass and by a plain pass.

        Raises ArithmeticError if the results differ by more than rounding, ConfigError if the arena is too small.
        """
        ids = torch.randint(lm.vocab_size, (bucket.rows, 2 * MOST_TOKENS), generator=torch.Generator().manual_seed(0))
        positions = torch.arange(2 * MOST_TOKENS, device=lm.device)
        runs = [ForwardRequest(row, positions, lm.new_cache(len(row)), ordered=True) for row in ids.to(lm.device)]
        pieces = [ScheduledTokens.next(run, MOST_TOKENS - rank) for rank, run in enumerate(runs)]
        run_pieces(self._model, pieces)
        for piece in pieces:
            piece.end()
        pieces = [ScheduledTokens.next(run, max(1, bucket.tokens - rank)) for rank, run in enumerate(runs)]
        plain = run_pieces(self._model, pieces)
        for piece in pieces:
            piece.undo()
        if not (places := self._places(pieces)):
            raise ConfigError("graph_bytes is too small for the prompts to compare; give more, or 0 for no graphs")
        ours = self._replay(bucket, pieces, places)
        if not same(*(torch.stack(logits)[None].to(lm.dtype) for logits in (ours, plain))):
            raise ArithmeticError(f"a pass of {bucket} gives something else than a plain one")


_tried: WeakSet[LanguageModel] = WeakSet()
_lock = threading.Lock()


def use_graphs(lm: LanguageModel, num_bytes: int | None = None, recorder: CudaRecorder | None = None) -> None:
    """Let a model on CUDA run its short passes as graphs. Only the first call for a model has an effect.

    num_bytes: of the device's memory, for KV and graphs' scratch; None: an eighth of the free memory; 0: no graphs
    """
    if num_bytes == 0 or (recorder is None and lm.device.type != "cuda"):
        return
    with _lock:
        if lm in _tried:
            return
        _tried.add(lm)
        try:  # other callers wait meanwhile
            if lm.shape.states:
                raise UnsupportedModelError(f"{lm.name} has recurrent layers")
            recorder = recorder or CudaRecorder(lm.device)
            num_bytes = num_bytes or int(recorder.free_bytes() * DEFAULT_SHARE)
            lm.scheduler.forward = GraphedPasses(lm, num_bytes, recorder).forward
        except Exception as error:
            lm.pool.arena = None
            _warn(error)


def _warn(error: Exception) -> None:
    why = f"{type(error).__name__}: {first_line(error)}"
    log.warning("passes run without CUDA graphs, which takes longer on a GPU: %s", why)
