"""Recording of a pass: every layer's inputs, the keys and values that it caches, and its outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from ragcache.models.attention import layer_of


class KeptCache(Cache):  # type: ignore[misc]
    """A cache that records the keys and values of each layer."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.seen[layer_idx] = (key_states.clone(), value_states.clone())
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class Call(NamedTuple):
    """An attention module and the arguments that its layer called it with, by name."""

    module: nn.Module
    given: dict[str, object]


@dataclass(eq=False)
class Watch:
    """Inputs and outputs of a pass, by layer.

    calls:    calls of the attention modules
    entered:  input of the layer, [batch, num_tokens, hidden_size]
    attended: output of its attention; left: output of the layer
    """

    calls: dict[int, Call] = field(default_factory=dict)
    entered: dict[int, Tensor] = field(default_factory=dict)
    attended: dict[int, Tensor] = field(default_factory=dict)
    left: dict[int, Tensor] = field(default_factory=dict)

    @contextmanager
    def watching(self, model: PreTrainedModel, plain: Watch | None = None, at: slice = slice(0)) -> Iterator[None]:
        """Record the passes of `model` within this context.

        plain: an earlier pass, whose inputs every layer gets instead of its own
        at:    the tokens of `plain` whose inputs are used
        """
        parents = {id(child): parent for parent in model.modules() for child in parent.children()}
        handles = []
        for module in model.modules():
            if isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "is_causal"):
                layer = layer_of(module)
                parent = parents[id(module)]
                hidden = None if plain is None or layer not in plain.entered else plain.entered[layer][..., at, :]
                handles += [
                    parent.register_forward_pre_hook(partial(self._enter, layer, hidden), with_kwargs=True),
                    parent.register_forward_hook(partial(self._leave, self.left, layer)),
                    module.register_forward_pre_hook(partial(self._call, layer), with_kwargs=True),
                    module.register_forward_hook(partial(self._leave, self.attended, layer)),
                ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, layer: int, hidden: Tensor | None, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        own = args[0] if args else kwargs["hidden_states"]
        self.entered[layer] = own.clone()
        if hidden is None:
            return None
        hidden = hidden.expand(own.shape).clone()
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def _call(self, layer: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        named = dict(zip(signature(module.forward).parameters, args, strict=False))
        self.calls[layer] = Call(module, {**named, **kwargs})

    @staticmethod
    def _leave(outputs: dict[int, Tensor], layer: int, module: nn.Module, args: Any, output: Any) -> None:
        outputs[layer] = (output[0] if isinstance(output, tuple) else output).clone()
