"""Plain transformers as the oracle of recompute methods: a forward in which kept entries override the model's own."""

import math
from collections.abc import Mapping, Sequence

import torch
from families import block_diagonal, causal, masks_of
from torch import Tensor
from transformers import Cache, PreTrainedModel

import ragcache as rc

KV = Mapping[int, tuple[Tensor, Tensor]]
"""Rotated keys and values by layer: [1, num_kv_heads, num_tokens, head_dim]."""


class Held(Cache):
    """Keys and values by layer: the model's own for the tokens that are computed there, `before`'s for all others."""

    def __init__(self, before: KV | None, computed: Sequence[Tensor]) -> None:
        super().__init__(layers=[])
        self.before, self.computed = before, computed
        self.now: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        new = key_states, value_states
        if self.before is not None:
            chosen = torch.zeros(key_states.shape[2], dtype=torch.bool)
            chosen[self.computed[layer_idx]] = True
            grown = [self._grown(old, one.shape[2]) for old, one in zip(self.before[layer_idx], new, strict=True)]
            new = tuple(torch.where(chosen[None, None, :, None], a, b) for a, b in zip(new, grown, strict=True))
        self.now[layer_idx] = new
        return new

    @staticmethod
    def _grown(old: Tensor, length: int) -> Tensor:
        return torch.nn.functional.pad(old, (0, 0, 0, length - old.shape[2]))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


@torch.no_grad()
def forward(
    model: PreTrainedModel,
    ids: Sequence[int],
    allowed: Tensor,
    before: KV | None = None,
    computed: Sequence[Tensor] = (),
) -> tuple[Tensor, KV, tuple[Tensor, ...]]:
    """Last token's logits, keys and values by layer, and each layer's attention, [1, heads, tokens, tokens].

    before:   what stands in each layer where a token is not computed; None: everything is computed
    computed: tokens by layer whose keys and values are the model's own. A computed token must be computed in all layers
              below, or its hidden state has no meaning
    """
    held, mask = Held(before, computed), masks_of(model, allowed)
    out = model(input_ids=torch.tensor([ids]), attention_mask=mask, past_key_values=held, output_attentions=True)
    return out.logits[0, -1], held.now, out.attentions


def recorded_kv(model: PreTrainedModel, prompt: rc.Prompt, allowed: Tensor) -> KV:
    """Keys and values of one forward under `allowed`."""
    return forward(model, prompt.ids, allowed)[1]


def blended_logits(
    model: PreTrainedModel, prompt: rc.Prompt, chosen_by_layer: Sequence[Tensor], before: KV | None = None
) -> Tensor:
    """Last token's logits when, in each layer, only the chosen tokens' keys and values are the model's own.

    before: all others'; None: those of the block-diagonal forward. Every token sees what stands at or before it.
    """
    causal = torch.ones(prompt.num_tokens, prompt.num_tokens, dtype=torch.bool).tril()
    apart = before or recorded_kv(model, prompt, block_diagonal(prompt))
    return forward(model, prompt.ids, causal, apart, chosen_by_layer)[0]


class Watched(Held):
    """Remembers what the model itself computed, before anything is overridden."""

    def __init__(self, before, computed):
        super().__init__(before, computed)
        self.own = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.own[layer_idx] = (key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@torch.no_grad()
def most_deviating(oracle, prompt, counts, always=()):
    """Tokens by layer: the counts[layer] of those below whose own keys and values are farthest from the recorded.

    always: tokens that come before all others
    """
    recorded = recorded_kv(oracle, prompt, block_diagonal(prompt))
    suffix = list(range(prompt.context_tokens, prompt.num_tokens))
    going = list(range(len(prompt.prefix_ids), prompt.context_tokens))
    chosen = [torch.tensor(going + suffix)]
    for layer in range(1, len(recorded)):
        blend = Watched(recorded, [*chosen, *[chosen[-1]] * (len(recorded) - layer)])
        ids = torch.tensor([prompt.ids])
        oracle(input_ids=ids, attention_mask=masks_of(oracle, causal(prompt.num_tokens)), past_key_values=blend)
        distance = {
            token: sum(
                math.dist(own[0, :, token].flatten().tolist(), theirs[0, :, token].flatten().tolist()) ** 2
                for own, theirs in zip(blend.own[layer], recorded[layer], strict=True)
            )
            for token in going
        }
        going = sorted(sorted(going, key=lambda token: (token not in always, -distance[token]))[: counts[layer]])
        chosen.append(torch.tensor(going + suffix, dtype=torch.int64))
    return chosen
