"""Recurrent layers: passes over given states, and the maps of chunks on states.

Nothing here is specific to a family. A *mixer* is a layer's module that has a short convolution and a layer number and
is no attention. In transformers it keeps its state in the model's cache; here it gets a separate cache for every call.
A chunk's map (P, Q) is found by calling the mixer again on the same inputs, from a zero state and from a basis of
states, since the resulting state is affine in the entering state. This is tested when the model is loaded
(`Mixer.learn`).

Padding after a chunk corrupts the state of its row, so maps are computed row by row, only over real tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from inspect import signature
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from ragcache.kv.cache_shape import StateShape
from ragcache.kv.state import State, StateMap
from ragcache.models.attention import CURRENT, RANK, ArenaPass, BatchedPass, EncodePass
from ragcache.models.latent import near

# Smallest magnitude of a state. The basis has the magnitude of the chunk's own state, so that P is computed precisely.
_LEAST = 1e-3


class _Layer(LinearAttentionLayer):  # type: ignore[misc]
    """A state in transformers' form that is replaced instead of written to.

    transformers' own class marks its memory for the compiler, which takes seconds to import.
    """

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        before = self.conv_states[state_idx]
        whole = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        width: int = kwargs.get("conv_kernel_size") or (conv_states if before is None else before).shape[-1]
        whole = nn.functional.pad(whole, (max(0, width - whole.shape[-1]), 0))
        self.conv_states[state_idx], self.has_previous_state[state_idx] = whole[..., -width:].clone(), True
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class _OneLayer(Cache):  # type: ignore[misc]
    """The state of a single layer, in the form of a transformers cache for its mixer."""

    def __init__(self, number: int, entering: State | None) -> None:
        super().__init__(layers=[])
        self.layer = _Layer()
        self.layers = {number: self.layer}
        if entering is not None:  # copied: a token that runs alone is written into a state in place
            self.layer.update_conv_state(entering.conv)
            self.layer.recurrent_states[0] = None if entering.state is None else entering.state.clone()

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether the layer has a state, whatever the index: OLMo Hybrid asks for the last layer's."""
        return bool(self.layer.has_previous_state[0])

    @property
    def state(self) -> State:
        return State(self.layer.conv_states[0], self.layer.recurrent_states[0])


class Mixer:
    """The mixer of a recurrent layer, whose calls are redirected to `forward`.

    rank:  its index among the model's recurrent layers
    shape: shape of its state; None until `learn` has found it
    """

    def __init__(self, module: nn.Module, rank: int) -> None:
        self.module, self.rank = module, rank
        self.number: int = module.layer_idx  # type: ignore[assignment]
        self.shape: StateShape | None = None
        self.limit = getattr(module, "time_step_limit", None)
        self._plain = module.forward
        self._names = list(signature(module.forward).parameters)
        self._seen: tuple[Tensor, Mapping[str, Any], Tensor] | None = None
        module.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the mixer's output, with the states of the current pass."""
        current, arguments = CURRENT.get(), {**dict(zip(self._names, args, strict=False)), **kwargs}
        if current is None or isinstance(current, ArenaPass):  # models with such layers are not run as graphs
            return self._plain(**arguments)  # type: ignore[no-any-return]
        hidden: Tensor = arguments.pop("hidden_states")
        if isinstance(current, EncodePass):
            return self._encode(current, hidden, arguments)
        members = current.members if isinstance(current, BatchedPass) else [current]
        lengths = list(current.lengths) if isinstance(current, BatchedPass) else [hidden.shape[1]]
        rows = torch.split(hidden, lengths, dim=1)
        outs = []
        for member, part in zip(members, rows, strict=True):
            out, member.cache.states[self.rank] = self.step(part, member.cache.state(self.rank), arguments)
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def step(self, hidden: Tensor, entering: State | None, arguments: Mapping[str, Any]) -> tuple[Tensor, State]:
        """Return the output over these tokens, and the state after them. hidden: [batch, num_tokens, hidden_size]"""
        cache = _OneLayer(self.number, entering)
        name = "cache_params" if "cache_params" in self._names else "past_key_values"
        own = {"attention_mask": None} if "attention_mask" in self._names else {}
        return self._plain(**{**arguments, **own, "hidden_states": hidden, name: cache}), cache.state

    def _encode(self, current: EncodePass, hidden: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        before = current.states[self.rank] if current.states else None
        out, behind = self.step(hidden, before and before.expand(hidden.shape[0]), arguments)
        if self.shape is None:
            self._seen = (hidden, arguments, out)
        for row, count in enumerate(current.lengths):
            size = None if behind.state is None else _size(behind.state[row])
            current.maps[row].append(self.map(hidden[row : row + 1, :count], before, arguments, size))
        return out

    def map(self, hidden: Tensor, before: State | None, arguments: Mapping[str, Any], size: Tensor | None) -> StateMap:
        """Compute the map of a chunk. hidden: [1, num_tokens, hidden_size]

        before: state before the chunk, of which only the convolution's window matters; None: no earlier tokens
        size:   magnitude of the state by head, [num_heads, 1, 1]; None if there is no state
        """
        if self.shape is None:
            raise RuntimeError(f"recurrent layer {self.number} is not learnt")
        conv = hidden.new_zeros(1, *self.shape.conv) if before is None else before.conv
        kept = min(hidden.shape[1], self.shape.conv[1])
        if self.shape.state is None or size is None:
            _, behind = self.step(hidden, State(conv, None), arguments)
            return StateMap(None, None, behind.conv[0, :, -kept:].clone())
        starts = torch.cat([torch.zeros_like(size)[None].expand(1, *self.shape.state), _basis(self.shape, size)])
        window, states = self._through(hidden, State(conv, starts), arguments)
        moved = (states[1:] - states[:1]).float() / size
        if self.shape.is_matrix:
            p = torch.cat(list(moved), dim=-1)[..., : self.shape.state[1]].contiguous()
        else:
            p = moved[0].mean((1, 2), keepdim=True)
        return StateMap(p, states[0].float().clone(), window[0, :, -kept:].clone())

    def _through(self, hidden: Tensor, entering: State, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Compute window and state after the same tokens, [1, num_tokens, hidden_size], for several entering states."""
        count = len(cast(Tensor, entering.state))
        entering = State(entering.conv.expand(count, -1, -1), entering.state)
        _, behind = self.step(hidden.expand(count, -1, -1).contiguous(), entering, arguments)
        return behind.conv, cast(Tensor, behind.state)

    def learn(self) -> StateShape | str:
        """Return the state's shape, or the reason why the state cannot be moved, as an error names it after the layer.

        Both are found by repeating the call that the mixer got in a plain pass.
        """
        if self._seen is None:
            return "was not called"
        hidden, arguments, out = self._seen
        self._seen = None
        if max(self.limit or [math.inf]) < math.inf:  # ignored when a token runs alone, and seldom reached
            return "limits its time step, which a token that runs alone does not keep"
        for pieces in ([2, hidden.shape[1] - 2], [1] * hidden.shape[1]):
            outs, behind = [], None
            for piece in torch.split(hidden, pieces, dim=1):
                own, behind = self.step(piece, behind, arguments)
                outs.append(own)
            if not near(torch.cat(outs, dim=1), out, out):
                return "does not go on from its state as it reads a whole text"
        _, (conv, state) = self.step(hidden, None, arguments)
        window = (conv.shape[1], conv.shape[2])
        if state is None:
            self.shape = StateShape(window)
            return self.shape
        if state.dim() != 4:
            return "keeps a state that is not one matrix a head"
        for is_matrix in (False, True):
            self.shape = StateShape(window, (state.shape[1], state.shape[2], state.shape[3]), is_matrix)
            # A single token distinguishes the kinds: after several, little of the entering state may be left.
            if (is_matrix or self._reproduces(hidden[:, :1], arguments, strict=True)) and self._reproduces(
                hidden, arguments
            ):
                return self.shape
        return "does not change its state by one matrix for each head"

    def _reproduces(self, hidden: Tensor, arguments: Mapping[str, Any], *, strict: bool = False) -> bool:
        """Return whether (P, Q) gives the same result as the mixer from a random state.

        strict: compare only the part of the result that depends on that state
        """
        _, (conv, plain) = self.step(hidden, None, arguments)
        state = cast(Tensor, plain)
        size = _size(state[0])
        drawn = torch.randn(state.shape, generator=torch.Generator().manual_seed(0)).to(state.device) * size
        chunk_map = self.map(hidden, None, arguments, size)
        theirs = self._through(hidden, State(torch.zeros_like(conv), drawn), arguments)[1]
        ours, q = cast(Tensor, chunk_map.advance(drawn)), cast(Tensor, chunk_map.q)[None]
        left = theirs.float() - q
        if strict and float(left.norm()) < _LEAST * float(drawn.norm()):
            return False
        return near(q, state, theirs) and near(ours, theirs, left if strict else theirs)


def hook_mixers(model: PreTrainedModel) -> list[Mixer]:
    """Return the mixers of all recurrent layers, in order; an empty list for a model without any.

    If there are some, attention modules get their index among the layers that keep keys and values.
    """
    numbered = [layer for layer in model.modules() if isinstance(getattr(layer, "layer_idx", None), int)]
    attention = [layer for layer in numbered if hasattr(layer, "is_causal")]
    mixers = [
        layer
        for layer in numbered
        if not hasattr(layer, "is_causal") and (hasattr(layer, "conv1d") or hasattr(layer, "conv"))
    ]
    if mixers:
        for rank, module in enumerate(sorted(attention, key=attrgetter("layer_idx"))):
            setattr(module, RANK, rank)
    return [Mixer(layer, rank) for rank, layer in enumerate(sorted(mixers, key=attrgetter("layer_idx")))]


def _basis(shape: StateShape, size: Tensor) -> Tensor:
    """Return states [n, num_heads, rows, columns] of this size: the identity in parts, or all ones for a scalar P."""
    heads, rows, columns = shape.state or (0, 0, 0)
    if not shape.is_matrix:
        return size.expand(1, heads, rows, columns)
    count = -(-rows // columns)
    whole = torch.eye(rows, count * columns, device=size.device).view(rows, count, columns).transpose(0, 1)
    return whole[:, None] * size


def _size(state: Tensor) -> Tensor:
    """Return the magnitude of a state by head, [num_heads, 1, 1]."""
    return state.float().abs().amax((1, 2), keepdim=True).clamp_min(_LEAST)
