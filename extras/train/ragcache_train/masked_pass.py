"""A batch's forward pass: the mask of training, the attention function that follows it, and the loss on answers.

The mask is a rule over a number per token. KVLink (arXiv 2502.16002), figure 2: a chunk's tokens see only their own
chunk; everything else of the context (prefix, link tokens, KV-START, KV-END) sees all tokens before it; so does a
question. Several questions may follow a context: each sees the context and itself. Order is that of the sequence, not
of the positions, which start again at every question (and at every chunk where TurboRAG's composite positions are
trained).

The number is the token's segment:

    > 0            its chunk, read alone
    0              the open part of the context: prefix, link tokens, KV-START and KV-END
    < 0            its question
    SHARED         the prefix, where passages are read after it; DROPPED: the primer after the prefix

A passage encoded after a prefix or a primer has two sets of positions, as a block does that is encoded and then
placed: its own queries use the first set, queries outside it the second. The model rotates its keys for the first;
`training_attention` rotates them on for the second.

`sees` is the whole rule. The dense masks of a CPU and FlexAttention's block mask of a GPU are both made from it. Rows
of a batch follow each other in a single sequence and do not see each other: a CPU attends to each alone, a GPU
compares the rows' numbers. The sequence is padded with a row that no other row sees.

The attention function is inference's own, registered under "ragcache_training" through transformers' public
AttentionInterface. Layers take their masks from the batch's `Visibility`, which reaches them as a keyword argument of
the model's forward: that interface hands extra arguments on. So windows, soft caps and attention sinks follow each
layer's own settings in every family. Logits are computed only for tokens with a label.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward

from ragcache.errors import UnsupportedModelError
from ragcache.kv.rope import Rope, Source, as_angles, ask
from ragcache.models.attention_kernels import Scoring, additive, attend
from ragcache_train.train_batches import DROPPED, OPEN, SHARED

BLOCK = 128
"""Tokens of a block of FlexAttention's. The length of a sequence on a GPU is a multiple of it."""


def sees(
    query_segment: Tensor,
    key_segment: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    distance: Tensor,
    window: int | None,
) -> Tensor:
    """Return whether a query sees a key; all tensors broadcast.

    index: place in the sequence; distance: the query's position less the key's; window: of a sliding layer
    """
    from_open_to_context = (query_segment <= OPEN) & (key_segment >= OPEN) & (key_segment != DROPPED)
    to_head = (query_segment > OPEN) & is_shared(key_segment)
    visible = (key_index <= query_index) & ((query_segment == key_segment) | from_open_to_context | to_head)
    return visible if window is None else visible & (distance < window)


def is_shared(segment: Tensor) -> Tensor:
    """Return whether tokens belong to a prefix or primer that passages are read after."""
    return segment >= SHARED


@dataclass(eq=False)
class Visibility:
    """Masks of a batch, made once for each sliding window and kept, without reading the tensors' contents.

    segments, positions, rows: int64 [length]; rows: the number of each token's row, ascending
    lengths: of the rows, padding included
    shifts:  int64 [length]: how far each token is moved for queries outside passages; None: no token is
    rope:    turns the keys of moved tokens
    """

    segments: Tensor
    positions: Tensor
    rows: Tensor
    lengths: Sequence[int]
    shifts: Tensor | None = None
    rope: Rope | None = None
    _dense: dict[int | None, list[Tensor]] = field(default_factory=dict)
    _blocks: dict[int | None, BlockMask] = field(default_factory=dict)
    _angles: dict[Source, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: dict[str, Any], rope: Rope | None) -> Visibility:
        """Return the rule of a batch that `collate` made."""
        own = batch["segments"], batch["position_ids"][0], batch["rows"], batch["lengths"]
        return cls(*own, batch.get("shifts"), rope)

    @property
    def placed(self) -> Tensor:
        """Return the positions at which queries outside passages see the tokens."""
        return self.positions if self.shifts is None else self.positions + self.shifts

    @property
    def apart(self) -> Tensor:
        """Return whether tokens are those of a passage read apart, bool [length]."""
        return (self.segments > OPEN) & ~is_shared(self.segments)

    def masks(self, window: int | None = None) -> list[Tensor]:
        """Return each row's mask, bool [tokens, tokens]: the rule for every pair."""
        found = []
        split = (torch.split(one, list(self.lengths)) for one in (self.segments, self.positions, self.placed))
        for segments, positions, placed in zip(*split, strict=True):
            index = torch.arange(len(segments), device=segments.device)
            distance = positions[:, None] - torch.where(segments[:, None] > OPEN, positions, placed)
            found.append(sees(segments[:, None], segments, index[:, None], index, distance, window))
        return found

    def dense(self, window: int | None, dtype: torch.dtype) -> list[Tensor]:
        """Return the rows' masks as numbers to add to the scores: fastest for `scaled_dot_product_attention`."""
        if window not in self._dense:
            self._dense[window] = [additive(mask, dtype) for mask in self.masks(window)]
        return self._dense[window]

    def blocks(self, window: int | None) -> BlockMask:
        """Return the mask as FlexAttention takes it; blocks that no query sees are never computed.

        These blocks follow from the least and greatest numbers in a block, not from all pairs of tokens, of which a
        batch of 16,384 has 268 million. Some unseen blocks are kept, which changes nothing: in each block that is not
        `full`, FlexAttention applies the rule to each pair.
        """
        if window not in self._blocks:
            some, full = self._block_pairs(window)
            kept = (*_in_order(some & ~full), *_in_order(full))
            self._blocks[window] = BlockMask.from_kv_blocks(*kept, BLOCK_SIZE=BLOCK, mask_mod=self.rule(window))
        return self._blocks[window]

    def _block_pairs(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Return, for blocks of queries over blocks of keys, whether some pair of tokens may see each other, and
        whether all do.

        Runs of a passage's tokens and rows ascend, so successive blocks share at most one run: the last of the
        earlier is the first of the later.
        """
        segments, rows, positions = (one.view(-1, BLOCK) for one in (self.segments, self.rows, self.positions))
        passages = segments.clamp(max=SHARED).flatten()
        starts = (passages.diff() != 0) | (self.rows.diff() != 0)
        runs = nn.functional.pad(starts.long().cumsum(0), (1, 0)).view(-1, BLOCK)
        same_run = runs[:, 0, None] == runs[:, -1]
        asking = torch.where(segments <= OPEN, rows, len(self.lengths)).amin(1)
        asked = torch.where((segments >= OPEN) & (segments != DROPPED), rows, -1).amax(1)
        apart = torch.where(segments > OPEN, rows, len(self.lengths)).amin(1)
        head = torch.where(is_shared(segments), rows, -1).amax(1)
        some = same_run | (asking[:, None] == asked) | (apart[:, None] == head)
        placed = torch.stack([positions, self.placed.view(-1, BLOCK)])
        (low, high), (first, last) = segments.aminmax(dim=1), (placed.amin((0, 2)), placed.amax((0, 2)))
        uniform = (low == high) & (rows[:, 0] == rows[:, -1])
        full = (uniform[:, None] & uniform) & (low[:, None] == low) & (rows[:, :1] == rows[:, 0])
        if window is not None:
            some = some & (first[:, None] - last < window)
            full = full & (last[:, None] - first < window)
        earlier = torch.ones_like(some).tril(-1)
        some = some & earlier | torch.eye(len(some), dtype=torch.bool, device=some.device)
        return some, full & earlier

    def for_attention(self, window: int | None, dtype: torch.dtype) -> list[Tensor] | BlockMask:
        """Return the masks in the form that the device's attention takes."""
        return self.blocks(window) if self.segments.is_cuda else self.dense(window, dtype)

    def rule(self, window: int | None) -> Any:
        """Return the rule as FlexAttention's mask_mod: (batch, head, query index, key index) -> bool."""
        segments, positions, rows, placed = self.segments, self.positions, self.rows, self.placed

        def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            distance = positions[query] - torch.where(segments[query] > OPEN, positions[key], placed[key])
            same_row = rows[query] == rows[key]
            return same_row & sees(segments[query], segments[key], query, key, distance, window)

        return mask_mod

    def moved(self, key: Tensor, layer: int) -> Tensor:
        """Return a layer's rotated keys as queries outside passages see them.

        key: [1, num_kv_heads, length, head_dim]
        """
        source = None if self.rope is None or self.shifts is None else self.rope.sources[layer]
        if source is None or self.rope is None or self.shifts is None:
            return key
        if source not in self._angles:
            cos, sin = as_angles(ask(source, key.new_zeros(1, dtype=torch.float32), self.shifts[None]))
            scale = (cos.square() + sin.square()).sqrt()  # keys have the attention's scaling already
            self._angles[source] = cos / scale, sin / scale
        still = key.shape[-1] - self.rope.key_dims[layer]  # in front of the rotary key, in heads made of latents
        turning = key[..., still:].float()
        turned = self.rope.apply(turning[:, :0], turning, *self._angles[source])[1].to(key.dtype)
        return torch.cat([key[..., :still], turned], -1) if still else turned


def _in_order(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return each query block's key blocks as FlexAttention takes them: their number, and all, the visible first."""
    order = pairs.int().argsort(dim=-1, descending=True, stable=True)
    return pairs.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


NAME = "ragcache_training"


def register() -> None:
    """Make `attn_implementation="ragcache_training"` known to transformers. Idempotent."""
    AttentionInterface.register(NAME, training_attention)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # layers are compiled around it
def training_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    visibility: Visibility | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend row by row under dense masks on a CPU; by FlexAttention on a GPU.

    query: [1, num_heads, length, head_dim]; key, value: [1, num_kv_heads, length, head_dim]. Returns [1, length,
    num_heads, head_dim], as transformers' own attention functions do.

    Raises UnsupportedModelError if the model does not pass the batch's rule on to its layers.
    """
    if visibility is None:
        family = type(module).__name__
        raise UnsupportedModelError(
            f"{family} does not get the masks that its model is given; it cannot be trained here"
        )
    query, key = query.to(value.dtype), key.to(value.dtype)  # the rotation of float32 weights leaves them float32
    mask = visibility.for_attention(sliding_window, value.dtype)
    views = [key] if visibility.shifts is None else [key, visibility.moved(key, int(module.layer_idx))]  # type: ignore[arg-type]
    if isinstance(mask, BlockMask):
        extra = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
        outs = [flex_attention_forward(module, query, view, value, mask, **extra)[0] for view in views]
        outside = (visibility.segments <= OPEN)[None, :, None, None]
        return outs[0] if len(outs) == 1 else torch.where(outside, outs[1], outs[0]), None
    scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    sizes = list(visibility.lengths)
    queries, keys, values = (list(torch.split(one, sizes, dim=2)) for one in (query, key, value))
    if visibility.shifts is None:
        rows = zip(queries, keys, values, mask, strict=True)
        out = torch.cat([attend(own, seen, held, hides, False, scoring) for own, seen, held, hides in rows], dim=2)
        return out.transpose(1, 2).contiguous(), None
    outs = []
    split = torch.split(visibility.segments > OPEN, sizes), torch.split(views[1], sizes, dim=2)
    for own, seen, held, hides, apart, moved in zip(queries, keys, values, mask, *split, strict=True):
        places = [apart.nonzero()[:, 0], (~apart).nonzero()[:, 0]]
        parts = [
            attend(own[:, :, at], view, held, hides[at], False, scoring)
            for at, view in zip(places, (seen, moved), strict=True)
        ]
        outs.append(torch.cat(parts, 2)[:, :, torch.cat(places).argsort()])
    out = torch.cat(outs, dim=2)
    return out.transpose(1, 2).contiguous(), None


def answer_loss(
    model: nn.Module,
    inner: nn.Module,
    batch: dict[str, Any],
    num_labels: Tensor | int | None = None,
    rope: Rope | None = None,
) -> Tensor:
    """Return the cross-entropy of the labelled tokens, divided by `num_labels` (None: by their number).

    inner: `model` without accelerate's wrapper
    batch: see collate; rope: the model's, for passages that are read after a prefix
    """
    labels = batch["labels"]
    total = F.cross_entropy(answer_logits(model, inner, batch, rope), labels, reduction="sum")
    return total / (len(labels) if num_labels is None else num_labels)


def divergence(truth: Tensor, logits: Tensor) -> Tensor:
    """Return KL(truth || logits) of each token over the ids that both know: added ids are never predicted."""
    known = min(truth.shape[-1], logits.shape[-1])
    aim, own = (one[:, :known].log_softmax(-1) for one in (truth, logits))
    return F.kl_div(own, aim, log_target=True, reduction="none").sum(-1)


def answer_logits(model: nn.Module, inner: Any, batch: dict[str, Any], rope: Rope | None = None) -> Tensor:
    """Return the labelled tokens' logits, in order: float32 [num_labels, vocab_size]. Arguments: see `answer_loss`."""
    return answer_states(model, inner, batch, rope, hidden=False)[0]


def answer_states(
    model: nn.Module, inner: Any, batch: dict[str, Any], rope: Rope | None = None, *, hidden: bool = True
) -> tuple[Tensor, list[Tensor]]:
    """Return the logits as `answer_logits` does, and the same tokens' hidden states after each layer.

    hidden: whether there are hidden states: float32 [num_labels, hidden_size] each
    """
    with narrowed_head(inner, batch["places"]):
        found = model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            visibility=Visibility.of(batch, rope),
            use_cache=False,
            output_hidden_states=hidden,
        )
    states = found.hidden_states[1:] if hidden else ()
    return found.logits[0].float(), [state[0, batch["places"]].float() for state in states]


@contextmanager
def narrowed_head(model: Any, chosen: Tensor) -> Iterator[None]:
    """Make the output head read only the `chosen` tokens of the sequence: logits are [1, num_chosen, vocab_size].

    Scales and soft caps that a family applies to its logits follow the head and act on each logit alone.
    """

    def narrow(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].index_select(1, chosen), *args[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(narrow)
    try:
        yield
    finally:
        handle.remove()
