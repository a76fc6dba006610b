"""Plain transformers as the oracle of recompute methods: a forward in which kept entries override the model's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from families import block_diagonal, masks_of
from torch import Tensor
from transformers import Cache, PreTrainedModel

import ragcache as rc


class _Blend(Cache):
    """Hands every layer the recorded keys and values, except those of the tokens that are computed there."""

    def __init__(self, recorded: dict[int, tuple[Tensor, Tensor]], computed: Sequence[Tensor]) -> None:
        super().__init__(layers=[])
        self.recorded = recorded
        self.computed = computed

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if not self.computed:
            self.recorded[layer_idx] = (key_states, value_states)
            return key_states, value_states
        chosen = torch.zeros(key_states.shape[2], dtype=torch.bool)
        chosen[self.computed[layer_idx]] = True
        keys, values = self.recorded[layer_idx]
        where = chosen[None, None, :, None]
        return torch.where(where, key_states, keys), torch.where(where, value_states, values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


@torch.no_grad()
def recorded_kv(model: PreTrainedModel, prompt: rc.Prompt, allowed: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """Rotated keys and values by layer, [1, num_kv_heads, num_tokens, head_dim], of one forward under `allowed`."""
    cache = _Blend({}, [])
    model(input_ids=torch.tensor([prompt.ids]), attention_mask=masks_of(model, allowed), past_key_values=cache)
    return cache.recorded


@torch.no_grad()
def blended_logits(model: PreTrainedModel, prompt: rc.Prompt, chosen_by_layer: Sequence[Tensor]) -> Tensor:
    """Last token's logits when, in each layer, only the chosen tokens' keys and values are the model's own.

    All others are those of the block-diagonal forward. Every token sees what stands at or before it. A chosen token
    must be chosen in all layers below, or its hidden state has no meaning.
    """
    recorded = recorded_kv(model, prompt, block_diagonal(prompt))
    n = prompt.num_tokens
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    out = model(
        input_ids=torch.tensor([prompt.ids]),
        attention_mask=masks_of(model, causal),
        past_key_values=_Blend(recorded, chosen_by_layer),
    )
    return out.logits[0, -1]
