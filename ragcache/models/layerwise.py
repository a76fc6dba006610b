"""Run tokens layer by layer, with a say before each layer over which of them go on.

Recompute methods drop tokens on the way up, or take up tokens that stood aside below. A hook in front of every decoder
layer narrows what transformers hands to it: hidden states, rotary angles, positions and inputs that a layer has of its
own. Nothing of a family is known here but that its layers take the hidden states first and name those others as
transformers does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ragcache.errors import ConfigError
from ragcache.models.attention import CURRENT, FusedPass, Projected, ProjectedSignal
from ragcache.models.latent import expand
from ragcache.runtime import during

BY_TOKEN = ("position_embeddings", "position_ids", "cache_position", "per_layer_input")


@dataclass(frozen=True, eq=False)
class _LayerCall:
    """One decoder layer and what transformers called it with, hidden states left out."""

    layer: nn.Module
    kwargs: Mapping[str, Any]

    def __call__(self, hidden: Tensor, rows: Tensor | None, num_tokens: int) -> Any:
        return self.layer.forward(hidden, **narrowed(self.kwargs, rows, num_tokens))


@dataclass(frozen=True, eq=False)
class LayerPoint:
    """The moment before a layer runs.

    layer: its index
    rows:  int64 [num_rows], ascending: the tokens of the pass that have come so far
    """

    layer: int
    rows: Tensor
    _hidden: Tensor = field(repr=False)
    _call: _LayerCall = field(repr=False)
    _current: FusedPass = field(repr=False)
    _attention: nn.Module = field(repr=False)

    def probe(self) -> Projected:
        """Queries, keys and values of the running tokens in this layer, which goes no further than that."""
        cache = self._current.cache
        cache.probing = True
        try:
            self._call(self._hidden, self.rows, self._current.positions.shape[0])
        except ProjectedSignal as signal:
            return signal.projected
        finally:
            cache.probing = False
        raise RuntimeError(f"layer {self.layer} did not reach its attention")

    def held(self) -> tuple[Tensor, Tensor, Tensor]:
        """keys and values, [1, num_kv_heads, length, head_dim], and key positions, int64 [length], as they stand: those
        that `probe` gives of the running tokens stand behind them."""
        keys, values, positions = self._current.cache.layer_state(self.layer)
        return *expand(self._attention, (keys, values)), positions


class Kept(NamedTuple):
    """Tokens that run from a layer on, where the host knows enough of them not to wait for the device.

    rows: of the pass, int64, ascending, the last token among them
    late: how many of them stood aside below: the first ones
    """

    rows: Tensor
    late: int


BeforeLayer = Callable[[LayerPoint], Tensor | Kept | None]
"""Says which tokens of the pass run from this layer on: int64, ascending, the last token among them; None: no change.

Tokens that stood aside below are run through the layers below first, over the cache as it is."""


@dataclass(eq=False)
class _Walk:
    """State of one layer-by-layer pass.

    embedded: hidden states of all tokens before the first layer
    calls:    the layers so far, for tokens that are taken up later
    """

    before_layer: BeforeLayer
    current: FusedPass
    embedded: Tensor | None = None
    calls: list[_LayerCall] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.current.positions.shape[0]


WALK: ContextVar[_Walk | None] = ContextVar("ragcache_walk", default=None)


def hook_layers(model: PreTrainedModel, attention: Mapping[int, nn.Module]) -> None:
    """Let `walking` narrow the tokens before each decoder layer, which is what holds the attention module of its index.
    Does nothing in other passes."""
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    for index, module in attention.items():
        layer = parents[id(module)]
        names = list(signature(layer.forward).parameters)[1:]
        layer.register_forward_pre_hook(partial(_before, index, names, module), with_kwargs=True)


def walking(before_layer: BeforeLayer | None) -> AbstractContextManager[None]:
    """Within, the current fused pass asks `before_layer` in front of every layer."""
    current = CURRENT.get()
    if before_layer is None or not isinstance(current, FusedPass):
        return nullcontext()
    return during(WALK, _Walk(before_layer, current))


def _before(
    index: int,
    names: Sequence[str],
    attention: nn.Module,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    walk = WALK.get()
    if walk is None:
        return None
    hidden = args[0] if args else kwargs["hidden_states"]
    others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
    call = _LayerCall(module, {**dict(zip(names, args[1:], strict=False)), **others})
    walk.calls.append(call)
    if walk.embedded is None:
        walk.embedded = hidden
    current = walk.current
    rows = torch.arange(walk.num_tokens, device=hidden.device) if current.rows is None else current.rows
    kept = walk.before_layer(LayerPoint(index, rows, hidden, call, current, attention))
    if kept is not None:
        hidden = _with_rows(walk, index, hidden, rows, kept)
        rows = kept.rows if isinstance(kept, Kept) else kept
        _set_rows(current, rows)
    return (hidden,), narrowed(call.kwargs, rows, walk.num_tokens)


def _with_rows(walk: _Walk, index: int, hidden: Tensor, rows: Tensor, kept: Tensor | Kept) -> Tensor:
    """Hidden states of `kept` before layer `index`, given those of `rows`."""
    if isinstance(kept, Kept):
        late, known = kept.rows[: kept.late], hidden[:, torch.searchsorted(rows, kept.rows[kept.late :])]
        return torch.cat([_caught_up(walk, index, late), known], dim=1) if kept.late else known
    if not kept.numel() or int(kept[-1]) != walk.num_tokens - 1:
        raise ConfigError("the tokens that go on must end with the last one: the answer is read off it")
    stood_aside = ~torch.isin(kept, rows)
    out = hidden.new_empty(hidden.shape[0], kept.shape[0], hidden.shape[2])
    out[:, ~stood_aside] = hidden[:, torch.isin(rows, kept)]
    if (late := kept[stood_aside]).numel():
        out[:, stood_aside] = _caught_up(walk, index, late)
    return out


def _caught_up(walk: _Walk, index: int, rows: Tensor) -> Tensor:
    """Hidden states, before layer `index`, of tokens that stood aside until now."""
    if walk.embedded is None or walk.current.rows is None or walk.embedded.shape[1] != walk.num_tokens:
        raise ConfigError("tokens can be taken up later only where all of them reached the first layer")
    before, hidden = walk.current.rows, walk.embedded[:, rows]
    _set_rows(walk.current, rows)
    try:
        for call in walk.calls[:index]:
            out = call(hidden, rows, walk.num_tokens)
            hidden = out[0] if isinstance(out, tuple) else out
    finally:
        _set_rows(walk.current, before)
    return hidden


def _set_rows(current: FusedPass, rows: Tensor) -> None:
    current.rows = rows
    current.masks.clear()
    current.cache.narrow(rows)


def narrowed(kwargs: Mapping[str, Any], rows: Tensor | None, num_tokens: int) -> dict[str, Any]:
    """Keyword arguments of a layer, with what is given by token cut down to `rows`."""
    if rows is None:
        return dict(kwargs)
    return {name: _take(value, rows, num_tokens) if name in BY_TOKEN else value for name, value in kwargs.items()}


def _take(value: Any, rows: Tensor, num_tokens: int) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_take(part, rows, num_tokens) for part in value)
    if isinstance(value, Tensor):
        dim = 0 if value.dim() == 1 else 1
        return value.index_select(dim, rows) if value.shape[dim] == num_tokens else value
    return value
