"""Selection of the keys and values of a chunk to keep: KVzip (Kim et al., arXiv 2505.23416).

The model is prompted to repeat the chunk and reads the repetition after the chunk's own KV. The score of a key-value
pair is the largest attention weight that it receives in this pass, over all rows and the query heads of its KV head
(section 3): a pair that the model does not need to repeat the text is not needed by any question either. No questions
are used.

With a task or examples instead of the repetition, the same attention shows which pairs the task needs (Finch, arXiv
2408.00167; Beyond RAG, arXiv 2503.04973).

Differences from the paper: the heads of a layer keep equally many tokens, while KVzip ranks the pairs of all heads
together (layers do share a block's tokens by that ranking here, `evict_lowest`); the first tokens of a chunk and its
recipe's markers always stay; a long text is repeated as a whole and not in parts of 2,048 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ragcache.kv.block import KVBlock
from ragcache.kv.block_key import Recipe
from ragcache.kv.sparse_block import keep
from ragcache.models.attention import CURRENT, Attended, FusedPass, observing
from ragcache.models.card import ModelCard
from ragcache.models.encode import AbandonedSignal
from ragcache.prompt import encode_text
from ragcache.runtime import during

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ragcache.kv.fused_cache import FusedCache, Place
    from ragcache.kv.rope import Rope

REPEAT = "\n\nRepeat the previous text exactly.\n\n"
FIRST_TOKENS = 4  # attention sinks of a chunk that is read alone
ROWS = 256  # of the repetition that run together: their attention weights take memory, a layer at a time


def replay_ids(card: ModelCard, recipe: Recipe, chunk_ids: Sequence[int]) -> list[int]:
    """Return the ids that run after a chunk to score its KV; an empty list if the recipe keeps the whole chunk.

    A model without a tokenizer gets only the chunk again, without a prompt. Raises ConfigError if it is given a task.
    """
    if recipe.kept == 1:
        return []
    if recipe.task:
        return encode_text(card.tokenizer, recipe.task)
    return [*(encode_text(card.tokenizer, REPEAT) if card.has_tokenizer else ()), *chunk_ids]


def check_replay(
    card: ModelCard, recipe: Recipe, prefix_ids: Sequence[int], chunk_ids: Sequence[int], subject: str
) -> None:
    """Raise ContextTooLongError if a chunk with its prefix and markers is too long together with its `replay_ids`.

    subject: the chunk's name in the error
    """
    if recipe.kept < 1:
        ids = [*prefix_ids, *recipe.marked(chunk_ids), *replay_ids(card, recipe, chunk_ids)]
        card.check_ids(ids, f"{subject}, with what is read behind it to find the {recipe.kept:g} of its KV that stays,")


def num_kept(recipe: Recipe, num_tokens: int) -> int:
    """Return how many tokens a head keeps of a block of `num_tokens`, with its markers: a mean over layers."""
    always = len(recipe.front) + FIRST_TOKENS + len(recipe.back)
    return min(num_tokens, max(math.ceil(recipe.kept * num_tokens), always))


@dataclass
class KVzipScorer:
    """An observer of passes over a cache that finds the largest attention that some of its tokens receive (KVzip).

    start, num_tokens: the tokens, by their slot
    by_layer:          scores so far, float32 [num_kv_heads, num_tokens]
    """

    start: int
    num_tokens: int
    by_layer: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, attended: Attended) -> None:
        weights = attended.weights(attended.query.shape[2])
        most = weights[..., self.start : self.start + self.num_tokens].amax((1, 2))
        known = self.by_layer.get(attended.layer)
        self.by_layer[attended.layer] = most if known is None else torch.maximum(known, most)


@torch.inference_mode()
def measure_scores(
    model: PreTrainedModel,
    rope: Rope,
    new_cache: Callable[[int, Place], FusedCache],
    block: KVBlock,
    behind_ids: Sequence[int],
    prefix: Sequence[tuple[Tensor, Tensor]] = (),
    is_needed: Callable[[], bool] | None = None,
) -> list[Tensor]:
    """Compute the scores of a block's tokens by layer, float32 [num_kv_heads, num_tokens].

    behind_ids: ids that run after the block
    prefix:     rotated keys and values that the chunk was encoded after; see `encode_batch`
    is_needed:  called before every pass; AbandonedSignal is raised if it returns False
    """
    start = prefix[0][0].shape[2] if prefix else 0
    end = start + block.num_tokens

    def place(cache: FusedCache, layer: int) -> None:
        keys, values = cache.reserve(layer, torch.arange(end, device=model.device))
        if prefix:
            keys[:, :, :start], values[:, :, :start] = prefix[layer]
        rope.rotate(block.layer_keys(layer), layer, start, out=keys[0, :, start:])
        block.copy_values(layer, values[0, :, start:])

    cache = new_cache(end + len(behind_ids), place)
    scorer, ids = KVzipScorer(start, block.num_tokens), torch.tensor(behind_ids, device=model.device)
    positions = torch.arange(end, end + len(behind_ids), device=model.device)
    with observing(scorer):
        for own, where in zip(torch.split(ids, ROWS), torch.split(positions, ROWS), strict=True):
            if is_needed is not None and not is_needed():
                raise AbandonedSignal
            cache.begin(where)
            with during(CURRENT, FusedPass(cache, where, ordered=True)):
                model.base_model(input_ids=own[None], position_ids=where[None], past_key_values=cache, use_cache=True)
    cache.release()
    return [scorer.by_layer[layer] for layer in range(block.num_layers)]


def evict_lowest(block: KVBlock, layer_scores: Sequence[Tensor], recipe: Recipe) -> KVBlock:
    """Return the block's tokens with the highest scores, as many as the recipe keeps; of equal scores the first stay.

    A layer's heads keep equally many tokens. The score of the layer's j-th place is the mean of the heads' j-th best
    scores, and the best places of all layers are filled, so layers that receive little attention keep few tokens.
    """
    length = block.num_tokens
    first, last = len(recipe.front) + FIRST_TOKENS, length - len(recipe.back)
    orders, places = [], []
    for own in layer_scores:
        scores = own.clone()
        scores[:, :first] = scores[:, last:] = torch.inf
        best = scores.sort(dim=1, descending=True, stable=True)
        orders.append(best.indices)
        places.append(best.values.mean(0))
    filled = (
        torch.cat(places).sort(descending=True, stable=True).indices[: num_kept(recipe, length) * len(layer_scores)]
    )
    counts = torch.bincount(filled // max(length, 1), minlength=len(layer_scores)).tolist()
    masks = [
        torch.zeros_like(own, dtype=torch.bool).scatter_(1, order[:, :count], True)
        for own, order, count in zip(layer_scores, orders, counts, strict=True)
    ]
    return keep(block, masks)
