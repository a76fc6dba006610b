"""Forward pass of a Llama model over contexts and many questions about each, for training.

Each question sees the context and itself, at the positions that it would have directly after the context. So a context
is run only once, and the loss equals that of the plain prompts `context + question`.

Weights and arithmetic are those of `LlamaForCausalLM` (a test compares both), except that questions share the context's
keys, and that logits are computed only where there is a label.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

HINT_WEIGHT = 0.3
"""Weight of the hints' loss beside that of the answers."""
FUSED_LENGTH = 768
"""Length of a context, in tokens, from which the fused attention kernel is faster."""


class PackedBatch(NamedTuple):
    """Contexts and their questions as tensors.

    context_ids: [batch, context_len], padded at the end; context_lengths: [batch]
    question_ids, labels: [batch, num_questions, question_len], padded at the end; a label is the token that follows, or
        -100 if nothing is learned
    segments: [batch, context_len], for contexts whose chunks are read apart: the number of a chunk, from 1, for tokens
        that see only this chunk, 0 for tokens that see all before them (`ragcache_train.masked_pass`); None: a context
        is a single text
    hidden: [batch], whether questions see only those tokens of their context that are in no chunk, such as link tokens
    hints: [num_hints, 4]: row, place, and two ids that a context token should hold after half of the layers
    """

    context_ids: Tensor
    context_lengths: Tensor
    question_ids: Tensor
    labels: Tensor
    segments: Tensor | None = None
    hidden: Tensor | None = None
    hints: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.context_ids.numel() + self.question_ids.numel()

    def to(self, device: torch.device) -> PackedBatch:
        return PackedBatch(*(None if t is None else t.to(device, non_blocking=True) for t in self))  # type: ignore[arg-type]


class PackedScores(NamedTuple):
    """Scores of a batch.

    loss:  mean cross-entropy over labels, plus HINT_WEIGHT times that of the hints
    right: [batch, num_questions], whether each label is the likeliest token: then greedy decoding gives the answer
    """

    loss: Tensor
    right: Tensor


def packed_scores(model: Any, batch: PackedBatch) -> PackedScores:
    """Run `model` (LlamaForCausalLM) over `batch`."""
    states = _states(model, batch)
    hidden = _questions(model, batch, states[-1])
    labels = batch.labels.flatten()
    chosen = torch.nonzero(labels != -100).squeeze(-1)
    logits = F.linear(hidden.flatten(0, 2)[chosen], model.lm_head.weight).float()
    loss = F.cross_entropy(logits, labels[chosen])
    if batch.hints is not None:
        loss = loss + HINT_WEIGHT * _hint_loss(model, states[len(states) // 2 - 1], batch.hints)
    wrong = torch.zeros_like(labels, dtype=torch.bool)
    wrong[chosen] = logits.detach().argmax(-1) != labels[chosen]
    return PackedScores(loss, ~wrong.view(batch.labels.shape).any(-1))


def packed_hidden(model: Any, batch: PackedBatch) -> Tensor:
    """Return the last hidden states of the questions: [batch, num_questions, question_len, hidden_size]."""
    return _questions(model, batch, _states(model, batch)[-1])


def _states(model: Any, batch: PackedBatch) -> list[Tensor]:
    """Return each layer's output for context and questions: [batch, seq_len, hidden_size] each."""
    context_len = batch.context_ids.shape[1]
    num_questions, question_len = batch.question_ids.shape[1:]
    ids = torch.cat([batch.context_ids, batch.question_ids.flatten(1)], dim=1)
    x = F.embedding(ids, model.model.embed_tokens.weight)
    cos, sin = (table.to(x.dtype) for table in _rotary(model, batch))
    masks = (_context_mask(batch), _unseen(batch), batch.segments is None)
    layout = _Layout(context_len, num_questions, question_len, *masks, (cos, sin))
    states = []
    for layer in model.model.layers:
        x = _layer(layer, x, layout, model.config)
        states.append(x)
    return states


def _questions(model: Any, batch: PackedBatch, last: Tensor) -> Tensor:
    hidden = _rms_norm(last[:, batch.context_ids.shape[1] :], model.model.norm)
    return hidden.view(*batch.question_ids.shape, -1)


def _hint_loss(model: Any, state: Tensor, hints: Tensor) -> Tensor:
    """Return the cross-entropy of the hinted ids, equally likely, if the output head reads the hidden state `state`."""
    row, place = hints[:, 0], hints[:, 1]
    logits = F.linear(_rms_norm(state[row, place], model.model.norm), model.lm_head.weight).float()
    return -logits.log_softmax(-1).gather(1, hints[:, 2:]).mean()


class _Layout(NamedTuple):
    context_len: int
    num_questions: int
    question_len: int
    context_mask: Tensor
    unseen: Tensor
    is_causal: bool
    rotary: tuple[Tensor, Tensor]


def _context_mask(batch: PackedBatch) -> Tensor:
    """Return an additive mask, [batch, 1, 1, context_len], that hides padding and hidden chunks from questions."""
    positions = torch.arange(batch.context_ids.shape[1], device=batch.context_ids.device)
    unseen = positions >= batch.context_lengths[:, None]
    if batch.segments is not None and batch.hidden is not None:
        unseen = unseen | (batch.hidden[:, None] & (batch.segments > 0))
    return torch.zeros(unseen.shape, device=unseen.device).masked_fill(unseen, float("-inf"))[:, None, None]


def _unseen(batch: PackedBatch) -> Tensor:
    """Return whether a context token (row) does not see another (column): [batch or 1, 1, context_len, context_len]."""
    n = batch.context_ids.shape[1]
    future = torch.ones(n, n, dtype=torch.bool, device=batch.context_ids.device).triu(1)[None, None]
    if batch.segments is None:
        return future
    own = batch.segments[:, None, :, None]
    return future | ((own > 0) & (own != batch.segments[:, None, None, :]))


def _rotary(model: Any, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Return cos and sin, [batch, 1, seq_len, head_dim] each; a question's positions follow its context's."""
    batch_size, context_len = batch.context_ids.shape
    num_questions, question_len = batch.question_ids.shape[1:]
    device = batch.context_ids.device
    context = torch.arange(context_len, device=device).expand(batch_size, -1)
    question = batch.context_lengths[:, None] + torch.arange(question_len, device=device).repeat(num_questions)
    positions = torch.cat([context, question], dim=1)
    angles = positions[..., None].float() * model.model.rotary_emb.inv_freq.float()
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    scale = model.model.rotary_emb.attention_scaling  # YaRN's
    return angles.cos() * scale, angles.sin() * scale


def _layer(layer: Any, x: Tensor, layout: _Layout, config: Any) -> Tensor:
    attention, mlp = layer.self_attn, layer.mlp
    normed = _rms_norm(x, layer.input_layernorm)
    queries = _rotate(_heads(attention.q_proj(normed), config.head_dim), layout.rotary)
    keys = _rotate(_heads(attention.k_proj(normed), config.head_dim), layout.rotary)
    values = _heads(attention.v_proj(normed), config.head_dim)
    x = x + attention.o_proj(_attend(queries, keys, values, layout))
    normed = _rms_norm(x, layer.post_attention_layernorm)
    return x + mlp.down_proj(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))  # type: ignore[no-any-return]


def _rms_norm(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


def _heads(x: Tensor, head_dim: int) -> Tensor:
    return x.view(*x.shape[:-1], -1, head_dim).transpose(1, 2)


def _rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotary
    half = x.shape[-1] // 2
    swapped = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return (x * cos + swapped * sin).to(x.dtype)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, layout: _Layout) -> Tensor:
    """Return the attention's output, [batch, seq_len, num_heads * head_dim].

    queries: [batch, num_heads, seq_len, head_dim]; keys, values: [batch, num_kv_heads, seq_len, head_dim]
    """
    groups = queries.shape[1] // keys.shape[1]
    if groups > 1:
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    context = _attend_in_context(queries, keys, values, layout)
    questions = _attend_from_questions(queries, keys, values, layout)
    return torch.cat([context, questions], dim=2).transpose(1, 2).flatten(2)


def _attend_in_context(queries: Tensor, keys: Tensor, values: Tensor, layout: _Layout) -> Tensor:
    """Attend within the context; short contexts by plain matrix products, which are faster on a CPU."""
    n = layout.context_len
    queries, keys, values = queries[:, :, :n], keys[:, :, :n], values[:, :, :n]
    if n >= FUSED_LENGTH:
        mask = None if layout.is_causal else ~layout.unseen
        return F.scaled_dot_product_attention(queries, keys, values, mask, is_causal=layout.is_causal)
    scores = (queries * queries.shape[-1] ** -0.5) @ keys.transpose(-1, -2)
    attended: Tensor = scores.masked_fill(layout.unseen, float("-inf")).softmax(-1) @ values
    return attended


def _attend_from_questions(queries: Tensor, keys: Tensor, values: Tensor, layout: _Layout) -> Tensor:
    """Attend from questions to the context and themselves, without a copy of the context for each question."""
    n = layout.context_len
    apart = (*queries.shape[:2], layout.num_questions, layout.question_len, -1)
    scaled = queries[:, :, n:] * queries.shape[-1] ** -0.5
    own_keys, own_values = keys[:, :, n:].reshape(apart), values[:, :, n:].reshape(apart)
    to_context = scaled @ keys[:, :, :n].transpose(-1, -2) + layout.context_mask.to(scaled.dtype)
    to_own = scaled.reshape(apart) @ own_keys.transpose(-1, -2)
    future = torch.ones(to_own.shape[-2:], dtype=torch.bool, device=queries.device).triu(1)
    to_own = to_own.masked_fill(future, float("-inf")).flatten(2, 3)
    weights = torch.cat([to_context, to_own], dim=-1).softmax(-1).to(values.dtype)
    from_context = weights[..., :n] @ values[:, :, :n]
    from_own = weights[..., n:].reshape(apart) @ own_values
    attended: Tensor = from_context + from_own.flatten(2, 3)
    return attended
