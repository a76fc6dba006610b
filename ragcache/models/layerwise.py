"""Passes that run layer by layer, with a callback before each layer that chooses which tokens continue.

Recompute methods drop tokens on the way up, or add tokens that were skipped in lower layers. A hook before every
decoder layer narrows the inputs that transformers passes to it: hidden states, rotary angles, positions and per-layer
inputs. The only assumptions about a family are that its layers take the hidden states first and name the other inputs
as transformers does.
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
    """A decoder layer and the arguments that transformers called it with, without hidden states."""

    layer: nn.Module
    kwargs: Mapping[str, Any]

    def __call__(self, hidden: Tensor, rows: Tensor | None, num_tokens: int) -> Any:
        return self.layer.forward(hidden, **narrowed(self.kwargs, rows, num_tokens))


@dataclass(frozen=True, eq=False)
class LayerPoint:
    """The moment before a layer runs.

    layer: its index
    rows:  int64 [num_rows], ascending: the tokens of the pass that run up to here
    """

    layer: int
    rows: Tensor
    _hidden: Tensor = field(repr=False)
    _call: _LayerCall = field(repr=False)
    _current: FusedPass = field(repr=False)
    _attention: nn.Module = field(repr=False)

    def probe(self) -> Projected:
        """Compute the queries, keys and values of the running tokens in this layer, without the rest of the layer."""
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
        """Return the layer's current keys, values and key positions.

        Keys and values are [1, num_kv_heads, length, head_dim], positions int64 [length]. Those of the running tokens,
        which `probe` returns, come after them.
        """
        keys, values, positions = self._current.cache.layer_state(self.layer)
        return *expand(self._attention, (keys, values)), positions


class RowsToRun(NamedTuple):
    """Tokens that run from a layer on, for use if the host knows enough about them not to wait for the device.

    rows: of the pass, int64, ascending, including the last token
    late: how many of the rows, the first ones, were skipped in lower layers
    """

    rows: Tensor
    late: int


BeforeLayer = Callable[[LayerPoint], Tensor | RowsToRun | None]
"""Returns the tokens of the pass that run from this layer on: int64, ascending, including the last; None: no change.

Tokens that were skipped in lower layers run through those layers first, over the cache as it is."""


@dataclass(eq=False)
class _Walk:
    """State of a layer-by-layer pass.

    embedded: hidden states of all tokens before the first layer
    calls:    the layers so far, for tokens that are added later
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
    """Let `walking` narrow the tokens before each decoder layer; does nothing in other passes.

    The decoder layer of an index is the parent of that index's attention module.
    """
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    for index, module in attention.items():
        layer = parents[id(module)]
        names = list(signature(layer.forward).parameters)[1:]
        layer.register_forward_pre_hook(partial(_before, index, names, module), with_kwargs=True)


def walking(before_layer: BeforeLayer | None) -> AbstractContextManager[None]:
    """Return a context in which the current fused pass calls `before_layer` before every layer."""
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
    chosen = walk.before_layer(LayerPoint(index, rows, hidden, call, current, attention))
    if chosen is not None:
        hidden = _with_rows(walk, index, hidden, rows, chosen)
        rows = chosen.rows if isinstance(chosen, RowsToRun) else chosen
        _set_rows(current, rows)
    return (hidden,), narrowed(call.kwargs, rows, walk.num_tokens)


def _with_rows(walk: _Walk, index: int, hidden: Tensor, rows: Tensor, chosen: Tensor | RowsToRun) -> Tensor:
    """Return the hidden states of `chosen` before layer `index`, given those of `rows`."""
    if isinstance(chosen, RowsToRun):
        late, known = chosen.rows[: chosen.late], hidden[:, torch.searchsorted(rows, chosen.rows[chosen.late :])]
        return torch.cat([_caught_up(walk, index, late), known], dim=1) if chosen.late else known
    if not chosen.numel() or int(chosen[-1]) != walk.num_tokens - 1:
        raise ConfigError("the tokens that go on must end with the last one: the answer is read off it")
    stood_aside = ~torch.isin(chosen, rows)
    out = hidden.new_empty(hidden.shape[0], chosen.shape[0], hidden.shape[2])
    out[:, ~stood_aside] = hidden[:, torch.isin(rows, chosen)]
    if (late := chosen[stood_aside]).numel():
        out[:, stood_aside] = _caught_up(walk, index, late)
    return out


def _caught_up(walk: _Walk, index: int, rows: Tensor) -> Tensor:
    """Compute the hidden states, before layer `index`, of tokens that were skipped until now."""
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
    """Return a layer's keyword arguments, with per-token values cut down to `rows`."""
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
