"""Plain transformers with an attention function written out by formula, as the oracle of sparse and adjusted methods.

What each layer and head may see, and how scores become weights, is data here: nothing of ragcache takes part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from families import saved_tiny, tiny
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

import ragcache as rc
from ragcache.models.language_model import LanguageModel

NAME = "formula"
Weigh = Callable[[Tensor, Tensor, Tensor | None], Tensor]
KV = tuple[Tensor, Tensor]


@dataclass
class Plan:
    """What the coming forward does.

    allowed:   bool [n, n], or [num_kv_heads, n, n], by layer; one for all layers when not a list
    positions: int64 [n], for the windows of sliding layers
    weigh:     (scores [1, num_heads, n, n], visible, sinks) -> weights; plain softmax when absent
    change:    (layer, keys, values) -> keys, values, called on each layer's rotated keys and its values
    seen:      scores after scaling and masking, by layer, for oracles that choose from them
    queries:   rotated queries by layer
    """

    allowed: Tensor | list[Tensor]
    positions: Tensor
    weigh: Weigh | None = None
    change: Callable[[int, Tensor, Tensor], KV] | None = None

    def __post_init__(self) -> None:
        self.weights: dict[int, Tensor] = {}
        self.queries: dict[int, Tensor] = {}
        self.kv: dict[int, KV] = {}

    def visible(self, layer: int, window: int | None, groups: int) -> Tensor:
        allowed = self.allowed[layer] if isinstance(self.allowed, list) else self.allowed
        if window is not None:
            allowed = allowed & (self.positions[:, None] - self.positions[None, :] < window)
        return allowed if allowed.dim() == 2 else allowed.repeat_interleave(groups, 0)


_PLANS: list[Plan] = []


def softmax(scores: Tensor, visible: Tensor, sinks: Tensor | None) -> Tensor:
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    plan, layer = _PLANS[-1], module.layer_idx
    if plan.change is not None:
        key, value = plan.change(layer, key, value)
    plan.queries[layer], plan.kv[layer] = query, (key, value)
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3)
    scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = (plan.weigh or softmax)(scores, plan.visible(layer, sliding_window, groups), s_aux)
    plan.weights[layer] = weights
    return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None


@cache
def formula_model(directory: str) -> PreTrainedModel:
    AttentionInterface.register(NAME, _attention)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=NAME).eval()


def with_answer(allowed: Tensor, count: int) -> Tensor:
    """The mask with `count` tokens of an answer behind, which see everything before them."""
    n = allowed.shape[0]
    wider = torch.ones(n + count, n + count, dtype=torch.bool).tril()
    wider[:n, :n] = allowed
    return wider


def step_by_step(lm: LanguageModel, fused: rc.FuseOutput, answer: Sequence[int]) -> Tensor:
    """What ragcache decodes: logits of the prompt's last token and of each of the answer, which it is given."""
    out = [fused.next_logits]
    for step, token in enumerate(answer):
        out.append(lm.run([token], fused.next_position + step, fused.cache))
    return torch.stack(out)


@torch.no_grad()
def planned_logits(model: PreTrainedModel, ids: list[int], plan: Plan) -> Tensor:
    """Logits of every token, [n, vocab_size], in one forward under the plan."""
    _PLANS.append(plan)
    try:
        return model(input_ids=torch.tensor([ids]), position_ids=plan.positions[None], use_cache=False).logits[0]
    finally:
        _PLANS.pop()


class Family:
    """A tiny model as ragcache has it, as plain transformers has it, and by formula."""

    def __init__(self, name):
        self.name, (self.lm, self.oracle), self.formula = name, tiny(name), formula_model(saved_tiny(name))


# What heads dropped.

ANSWER = [5, 77, 31, 8]
CHUNKS = (17, 3, 20, 12)


def held_places(block, layer):
    places = block.places(layer)
    return [list(range(block.num_tokens))] * len(block.layer_keys(layer)) if places is None else places.tolist()


def without_dropped(lm, allowed, blocks, prompt, behind):
    """`allowed` for each layer as [num_kv_heads, n, n]: rows from `behind` on do not see what a head dropped."""
    masks, first = [], []
    at = len(prompt.prefix_ids)
    for chunk in prompt.chunk_ids:
        first.append(at)
        at += len(chunk)
    for layer, shape in enumerate(lm.shape.layers):
        by_head = allowed.repeat(shape.num_kv_heads, 1, 1)
        for start, block in zip(first, blocks, strict=True):
            for head, own in enumerate(held_places(block, layer)):
                gone = [start + place for place in range(block.num_tokens) if place not in own]
                for token in gone:
                    by_head[head, behind:, token] = False
        masks.append(by_head)
    return masks
