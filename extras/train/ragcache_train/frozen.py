"""Training on frozen weights: embedding rows of added ids, by the divergence from the model's own full prefill.

The student reads passages apart, with the added tokens; the teacher is the same model over the same passages as a
single text, without them. The right answer is not needed: rows learn to make up for the loss of reading apart (KV
Packet, arXiv 2604.13226, trains the vectors that it stores with blocks in this way; link tokens learn alike).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedModel

from ragcache.errors import ConfigError
from ragcache.kv.rope import Rope
from ragcache.models.adapter import Adapter, Base, write_adapter
from ragcache.models.language_model import LanguageModel
from ragcache.models.trained_tokens import TrainedTokens
from ragcache.prompt import encode_text
from ragcache_train.masked_pass import answer_logits, divergence
from ragcache_train.train_batches import EncodedRow
from ragcache_train.train_rows import BadLine

NOISE = 0.1
"""Spread of a row about the token that it starts as, in standard deviations of the embedding: like rows part."""


class FrozenModel(nn.Module):
    """A frozen model, and trained rows that replace its embeddings of the added ids.

    row_of: number of each added id's row; start: float32 [num_rows, hidden_size]

    The rows are its only parameter. They enter after the embedding: a head that shares the embedding's weights is
    unchanged.
    """

    accepts_loss_kwargs = True  # or the Trainer would not count the labels of a step
    index: Tensor

    def __init__(self, base: PreTrainedModel, row_of: Mapping[int, int], start: Tensor) -> None:
        super().__init__()
        self._held = (base,)  # in a tuple it is no part of this module
        self.rows = nn.Parameter(start.float())
        size = max(base.get_input_embeddings().weight.shape[0], max(row_of) + 1)
        index = torch.full((size,), -1)
        index[list(row_of)] = torch.tensor(list(row_of.values()))
        self.register_buffer("index", index.to(start.device), persistent=False)

    @property
    def base(self) -> PreTrainedModel:
        return self._held[0]

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.base.dtype
        return dtype

    def get_output_embeddings(self) -> nn.Module:
        head: nn.Module = self.base.get_output_embeddings()
        return head

    def forward(self, input_ids: Tensor, **more: Any) -> Any:
        known = self.base.get_input_embeddings().weight.shape[0]
        with self._rows_inserted(self.index[input_ids]):
            return self.base(input_ids=input_ids.masked_fill(input_ids >= known, 0), **more)

    @contextmanager
    def _rows_inserted(self, numbers: Tensor) -> Iterator[None]:
        """Let the embedding give these rows, where `numbers` is at least 0: int64 [batch, length]."""
        added = (numbers >= 0)[..., None]

        def insert(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            rows = F.embedding(numbers.clamp(min=0), self.rows).to(output.dtype)
            scale = getattr(module, "embed_scale", 1.0)  # as the embedding scales its own
            scale = scale.to(rows.dtype) if isinstance(scale, Tensor) else scale
            return torch.where(added, rows * scale, output)

        handle = self.base.get_input_embeddings().register_forward_hook(insert)
        try:
            yield
        finally:
            handle.remove()


def freeze(
    lm: LanguageModel, spec: TrainedTokens, prefix_ids: Sequence[int], seed: int, earlier: Adapter | None = None
) -> FrozenModel:
    """Return the model with rows that start as words: a header's as the prefix, all others as a line's end.

    earlier: an adapter whose rows are trained further where `spec` has them too; additional tokens of a kind repeat its
             rows. Raises ConfigError if it has none of the rows.
    """
    row_of = number_rows(spec)
    newline = (encode_text(lm.tokenizer, "\n") or list(prefix_ids) or [0])[-1]
    words = dict.fromkeys(row_of.values(), newline)
    for place, id in enumerate((spec.packet or ((), ()))[0]):
        words[row_of[id]] = prefix_ids[place % len(prefix_ids)] if prefix_ids else newline
    table: Tensor = lm.model.get_input_embeddings().weight.detach()
    start = table[[words[row] for row in range(len(words))]].float()
    noise = torch.randn(start.shape, generator=torch.Generator().manual_seed(seed)).to(start.device)
    start = start + NOISE * table.float().std() * noise
    if earlier is not None:
        for row, (found, again) in _earlier_rows(earlier, spec, row_of).items():
            start[row] = found.to(start) + NOISE * again * found.std() * noise[row]
    return FrozenModel(lm.model, row_of, start)


def _earlier_rows(earlier: Adapter, spec: TrainedTokens, row_of: Mapping[int, int]) -> dict[int, tuple[Tensor, bool]]:
    """Return, by number, an earlier row of the same kind, and whether another row also started from it."""
    rows, known = earlier.rows(), {} if earlier.spec is None else earlier.spec.groups
    found = {
        row_of[id]: (rows[known[name][place % len(known[name])]], place >= len(known[name]))
        for id, (name, place) in spec.roles.items()
        if known.get(name)
    }
    if not found:
        method = None if earlier.spec is None else earlier.spec.method
        raise ConfigError(
            f"{earlier.directory} was trained for {method} and has nothing that {spec.method} could go on "
            f"from; train with its reuse, or from its base, {earlier.base.name}"
        )
    return found


def number_rows(spec: TrainedTokens) -> dict[int, int]:
    """Return the row of each added id. The j-th link tokens of all slots share a row, so all slots learn together."""
    found = {id: place for slot in range(spec.link_slots) for place, id in enumerate(spec.link_ids(slot))}
    alone = sorted(spec.added_ids - found.keys())
    return found | {id: spec.link_tokens + number for number, id in enumerate(alone)}


def divergence_loss(
    model: nn.Module,
    inner: FrozenModel,
    batch: dict[str, Any],
    num_labels: Tensor | int | None = None,
    rope: Rope | None = None,
) -> Tensor:
    """KL(teacher || student) over the answers' tokens, divided by `num_labels` (None: by their number).

    inner: `model` without what accelerate wraps around it
    batch: the student's (see collate), and under "teacher" the teacher's, with as many labels in the same order
    rope:  see `answer_loss`
    """
    with torch.no_grad():
        teacher = answer_logits(inner.base, inner.base, batch["teacher"])
    total = divergence(teacher, answer_logits(model, inner, batch, rope)).sum()
    return total / (len(teacher) if num_labels is None else num_labels)


def keep_passages(rows: Sequence[EncodedRow]) -> tuple[list[EncodedRow], list[BadLine]]:
    """Return the rows that are read apart, and the others, which student and teacher read alike.

    Raises ConfigError if no row is read apart.
    """
    kept = [row for row in rows if row.chunks and row.apart is not False]
    reason = "it has no passages to read apart, from which alone a model learns to do so"
    idle = [BadLine(row.where, reason) for row in rows if not row.chunks or row.apart is False]
    if not kept:
        raise ConfigError(f"no line of the data can be used: {idle[0]}; give lines of type qa")
    return kept, idle


def save_frozen(model: FrozenModel, lm: LanguageModel, base: Base, spec: TrainedTokens, out: Path) -> None:
    """Write the rows, the tokenizer and the base's identity: an adapter, which `load_lm` accepts as a model."""
    lm.tokenizer.save_pretrained(out)
    rows = model.rows.detach()
    write_adapter(out, base, spec, {id: rows[row] for id, row in number_rows(spec).items()}, lm.tokenizer)
