"""A model and a context of llama.cpp: every call of its C functions. Not thread-safe: one thread at a time calls it."""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp as api
import numpy as np
import torch
from torch import Tensor

from ragcache.errors import ConfigError, EngineError, StaleBlockError, UnsupportedModelError
from ragcache.kv.block_key import digest
from ragcache_llamacpp.options import GUARD, HELD, KV_TYPES, LlamaOptions

log = logging.getLogger(__name__)
BATCH_TOKENS = 2048
PASS_TOKENS = 512  # of a pass inside llama.cpp
TEMPORARY = 0
"""The sequence in which a state is set and shifted before it joins another."""
_ERROR = 4  # level of an error in llama.cpp's log
_SAID: deque[str] = deque(maxlen=1)  # llama.cpp's last error message


@api.llama_log_callback  # type: ignore[untyped-decorator]
def _log(level: int, text: bytes, _data: object) -> None:
    line = text.decode("utf-8", "replace").strip()
    if level == _ERROR and line:
        _SAID.append(line)
    log.debug("%s", line)


api.llama_log_set(_log, ctypes.c_void_p())
api.llama_backend_init()


class Row(NamedTuple):
    """Tokens of a sequence to decode, from a position on. wants_logits: whether the last token's logits are needed"""

    sequence: int
    position: int
    ids: Sequence[int]
    wants_logits: bool = False


class LlamaContext:
    """A model with a context whose sequences share one buffer.

    num_cells: most tokens that all sequences together can hold
    token_bytes: bytes of a token in a state
    uses_gpu:  whether layers run on a GPU
    key:       digest of everything except the model that a state's bytes depend on
    """

    def __init__(self, path: Path, options: LlamaOptions, longest: int, num_sequences: int) -> None:
        """Load a model. longest: number of positions that the model was trained for

        Raises UnsupportedModelError (a file that llama.cpp cannot load, states that cannot be moved), ConfigError (more
        sequences or a larger context than there can be).
        """
        _SAID.clear()
        settings = api.llama_model_default_params()
        settings.n_gpu_layers = options.n_gpu_layers
        self._model = api.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise UnsupportedModelError(f"{path} is not supported: llama.cpp cannot load it ({_reason()})")
        close = weakref.finalize(self, api.llama_model_free, self._model)
        if api.llama_model_is_recurrent(self._model) or api.llama_model_is_hybrid(self._model):
            raise UnsupportedModelError(
                f"{path} is not supported by engine llama.cpp: it has recurrent layers, whose states cannot be joined "
                "there; leave the engine out"
            )
        most = api.llama_max_parallel_sequences()
        if num_sequences > most:
            raise ConfigError(f"parallel={options.parallel} needs {num_sequences} sequences of {most}", "engine")
        given = api.llama_context_default_params()
        given.n_ctx = options.n_ctx or min(longest, 8192)
        given.n_batch, given.n_ubatch, given.n_seq_max = BATCH_TOKENS, PASS_TOKENS, num_sequences
        given.n_threads = given.n_threads_batch = options.threads or torch.get_num_threads()
        given.type_k = given.type_v = KV_TYPES[options.kv]
        self.uses_gpu = bool(api.llama_supports_gpu_offload()) and options.n_gpu_layers != 0
        flash = given.flash_attn_type = int(options.flash_attention(on_gpu=self.uses_gpu))
        given.kv_unified = given.swa_full = True  # states move between sequences, also of sliding layers
        self._context = api.llama_init_from_model(self._model, given)
        if not self._context:
            raise ConfigError(
                f"llama.cpp cannot make a context of {given.n_ctx} tokens and {num_sequences} sequences "
                f"({_reason()}); give a smaller n_ctx",
                "engine",
            )
        close.detach()
        batch = self._batch = api.llama_batch_init(BATCH_TOKENS, 0, 1)
        weakref.finalize(self, _free, self._batch, self._context, self._model)
        self._memory = api.llama_get_memory(self._context)
        if not api.llama_memory_can_shift(self._memory):
            raise UnsupportedModelError(
                f"{path} is not supported by engine llama.cpp, which cannot move its keys to other positions; leave "
                "the engine out"
            )
        self._tokens = np.ctypeslib.as_array(batch.token, (BATCH_TOKENS,))
        self._positions = np.ctypeslib.as_array(batch.pos, (BATCH_TOKENS,))
        self._wants = np.ctypeslib.as_array(batch.logits, (BATCH_TOKENS,))
        np.ctypeslib.as_array(batch.n_seq_id, (BATCH_TOKENS,))[:] = 1
        self.num_cells = int(api.llama_n_ctx(self._context))
        self.vocab_size = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model)))
        self._slides = api.llama_model_n_swa(self._model) > 0
        self._batch_tokens = PASS_TOKENS if self._slides else BATCH_TOKENS  # cells are guarded after every pass
        empty = int(api.llama_state_seq_get_size(self._context, TEMPORARY))
        self.decode([Row(TEMPORARY, 0, [0])])
        self.token_bytes = int(api.llama_state_seq_get_size(self._context, TEMPORARY)) - empty
        self.remove(TEMPORARY)
        build = [api.LLAMA_STATE_SEQ_VERSION, api.__version__]
        self.key = digest({"kv": options.kv, "flash": flash, "build": build})

    def decode(self, rows: Sequence[Row]) -> list[Tensor | None]:
        """Run the rows' tokens together, each row after everything that its sequence holds.

        Returns, for each row, the last token's logits, float32 [vocab_size], or None if they are not wanted. Raises
        EngineError.
        """
        found: list[Tensor | None] = [None] * len(rows)
        pieces: list[tuple[int, Row]] = []
        room = self._batch_tokens
        for rank, row in enumerate(rows):
            done = 0
            while done < len(row.ids):
                count = min(len(row.ids) - done, room)
                ids, position = row.ids[done : done + count], row.position + done
                done, room = done + count, room - count
                pieces.append((rank, Row(row.sequence, position, ids, row.wants_logits and done == len(row.ids))))
                if not room:
                    self._run(pieces, found)
                    pieces, room = [], self._batch_tokens
        if pieces:
            self._run(pieces, found)
        return found

    def _run(self, pieces: Sequence[tuple[int, Row]], found: list[Tensor | None]) -> None:
        stop, ends = 0, []
        for _, piece in pieces:
            start, stop = stop, stop + len(piece.ids)
            self._tokens[start:stop] = piece.ids
            self._positions[start:stop] = range(piece.position, piece.position + len(piece.ids))
            self._wants[start:stop] = 0
            self._wants[stop - 1] = piece.wants_logits
            for place in range(start, stop):
                self._batch.seq_id[place][0] = piece.sequence
            ends.append(stop - 1)
        self._batch.n_tokens = stop
        code = api.llama_decode(self._context, self._batch)
        if code:
            raise EngineError(f"llama.cpp cannot run {stop} tokens (code {code}: {_reason()})")
        for (rank, piece), end in zip(pieces, ends, strict=True):
            if piece.wants_logits:
                logits = api.llama_get_logits_ith(self._context, end)
                found[rank] = torch.from_numpy(np.ctypeslib.as_array(logits, (self.vocab_size,)).copy())
            self._guard(piece.sequence, piece.sequence, piece.position, piece.position + len(piece.ids))

    # Sequences. Positions from `start` to before `stop`; None: to the last.

    def join(self, number: int, start: int, stop: int) -> None:
        """Add the tokens at positions [start, stop) that are held beside a sequence to the sequence."""
        self._copy(number + HELD, number, start, stop)

    def fork(self, source: int, number: int, length: int) -> None:
        """Add the first tokens of a sequence to another, which then shares their cells."""
        self._copy(source, number, 0, length)
        self._guard(source, number, 0, length)

    def _copy(self, source: int, to: int, start: int, stop: int) -> None:
        api.llama_memory_seq_cp(self._memory, source, to, start, stop)

    def remove(self, sequence: int, start: int = 0, stop: int | None = None) -> None:
        """Remove tokens from a sequence. A cell is free once no sequence has it."""
        api.llama_memory_seq_rm(self._memory, sequence, start, -1 if stop is None else stop)

    def end(self, number: int, length: int = 0) -> None:
        """Remove everything after the first `length` tokens of a sequence, and the passages held beside it."""
        for sequence in (number, number + HELD, number + GUARD):
            self.remove(sequence, length)

    def _guard(self, source: int, number: int, start: int, stop: int) -> None:
        """Add tokens to the guard of sequence `number`: llama.cpp takes the cells of tokens that have left a sliding
        window, but not if two sequences have them.
        """
        if self._slides and number != TEMPORARY:
            self._copy(source, number + GUARD, start, stop)

    def state(self, sequence: int) -> Tensor:
        """Return a sequence's state: uint8 [num_bytes]. Raises EngineError."""
        data = torch.empty(api.llama_state_seq_get_size(self._context, sequence), dtype=torch.uint8)
        if api.llama_state_seq_get_data(self._context, _pointer(data), len(data), sequence) != len(data):
            raise EngineError(f"llama.cpp gives no state of a passage ({_reason()})")
        return data

    def place(self, data: Tensor, start: int, stop: int, number: int, position: int) -> None:
        """Hold tokens at positions [start, stop) of a state beside a sequence, from a position on.

        Raises StaleBlockError for bytes that are no state of this model.
        """
        if not api.llama_state_seq_set_data(self._context, _pointer(data), len(data), TEMPORARY):
            self.remove(TEMPORARY)
            raise StaleBlockError(
                f"llama.cpp refuses the state of a passage ({_reason()}): it is another model's; delete its document "
                "and ingest it again"
            )
        self.remove(TEMPORARY, 0, start)
        self.remove(TEMPORARY, stop)
        if position != start:
            api.llama_memory_seq_add(self._memory, TEMPORARY, 0, -1, position - start)
        self._copy(TEMPORARY, number + HELD, 0, -1)
        self._guard(TEMPORARY, number, 0, -1)
        self.remove(TEMPORARY)


def _pointer(data: Tensor) -> Any:
    return ctypes.cast(data.data_ptr(), ctypes.POINTER(ctypes.c_uint8))


def _reason() -> str:
    return _SAID[-1] if _SAID else "it says nothing"


def _free(batch: Any, context: Any, model: Any) -> None:
    api.llama_batch_free(batch)
    api.llama_free(context)
    api.llama_model_free(model)
