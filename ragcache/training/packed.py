"""Forward pass of a Llama model over one context and many questions about it, for training.

Each question sees the context and itself, at the positions that it would have if it stood alone behind the context,
so one context is paid for once and the loss is that of the plain prompt `context + question`.

The same weights and arithmetic as `LlamaForCausalLM` (a test compares the two); what differs is that the context's
keys are shared, and that logits are computed only where there is a label.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


class PackedBatch(NamedTuple):
    """context_ids: [batch, context_len], padded at the end; context_lengths: [batch];
    question_ids and labels: [batch, num_questions, question_len], padded at the end; a label is the token that
    follows, or -100 where nothing is to be learned."""

    context_ids: Tensor
    context_lengths: Tensor
    question_ids: Tensor
    labels: Tensor

    @property
    def num_tokens(self) -> int:
        return self.context_ids.numel() + self.question_ids.numel()

    def to(self, device: torch.device) -> PackedBatch:
        return PackedBatch(*(tensor.to(device, non_blocking=True) for tensor in self))


class PackedScores(NamedTuple):
    """loss: mean cross-entropy over labels; right: [batch, num_questions], whether every label is the most likely
    token, which for an answer is whether greedy decoding gives it exactly."""

    loss: Tensor
    right: Tensor


def packed_scores(model: Any, batch: PackedBatch) -> PackedScores:
    """Run `model` (LlamaForCausalLM) over `batch`."""
    hidden = packed_hidden(model, batch)
    labels = batch.labels.flatten()
    chosen = torch.nonzero(labels != -100).squeeze(-1)
    logits = F.linear(hidden.flatten(0, 2)[chosen], model.lm_head.weight).float()
    loss = F.cross_entropy(logits, labels[chosen])
    wrong = torch.zeros_like(labels, dtype=torch.bool)
    wrong[chosen] = logits.detach().argmax(-1) != labels[chosen]
    return PackedScores(loss, ~wrong.view(batch.labels.shape).any(-1))


def packed_hidden(model: Any, batch: PackedBatch) -> Tensor:
    """Last hidden states of the questions: [batch, num_questions, question_len, hidden_size]."""
    batch_size, context_len = batch.context_ids.shape
    shape = batch.question_ids.shape
    ids = torch.cat([batch.context_ids, batch.question_ids.flatten(1)], dim=1)
    x = F.embedding(ids, model.model.embed_tokens.weight)
    cos, sin = (table.to(x.dtype) for table in _rotary(model, batch))
    layout = _Layout(context_len, shape[1], shape[2], _context_mask(batch), (cos, sin))
    for layer in model.model.layers:
        x = _layer(layer, x, layout, model.config)
    return _rms_norm(x[:, context_len:], model.model.norm).view(batch_size, shape[1], shape[2], -1)


class _Layout(NamedTuple):
    context_len: int
    num_questions: int
    question_len: int
    context_mask: Tensor
    rotary: tuple[Tensor, Tensor]


def _context_mask(batch: PackedBatch) -> Tensor:
    """Additive mask [batch, 1, 1, context_len] that hides the context's padding from the questions."""
    positions = torch.arange(batch.context_ids.shape[1], device=batch.context_ids.device)
    padding = positions >= batch.context_lengths[:, None]
    return torch.zeros(padding.shape, device=padding.device).masked_fill(padding, float("-inf"))[:, None, None]


def _rotary(model: Any, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """cos and sin [batch, 1, seq_len, head_dim]; each question starts right behind its context."""
    batch_size, context_len = batch.context_ids.shape
    num_questions, question_len = batch.question_ids.shape[1:]
    device = batch.context_ids.device
    context = torch.arange(context_len, device=device).expand(batch_size, -1)
    question = batch.context_lengths[:, None] + torch.arange(question_len, device=device).repeat(num_questions)
    positions = torch.cat([context, question], dim=1)
    angles = positions[..., None].float() * model.model.rotary_emb.inv_freq.float()
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


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
    """All tensors [batch, num_heads, seq_len, head_dim]; returns [batch, seq_len, num_heads * head_dim]."""
    groups = queries.shape[1] // keys.shape[1]
    if groups > 1:
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    context = _attend_in_context(queries, keys, values, layout.context_len)
    questions = _attend_from_questions(queries, keys, values, layout)
    return torch.cat([context, questions], dim=2).transpose(1, 2).flatten(2)


def _attend_in_context(queries: Tensor, keys: Tensor, values: Tensor, n: int) -> Tensor:
    """Causal attention by plain matrix products: on a CPU, at these lengths, faster than the fused kernel."""
    queries, keys, values = queries[:, :, :n], keys[:, :, :n], values[:, :, :n]
    future = torch.ones(n, n, dtype=torch.bool, device=queries.device).triu(1)
    scores = (queries * queries.shape[-1] ** -0.5) @ keys.transpose(-1, -2)
    attended: Tensor = scores.masked_fill(future, float("-inf")).softmax(-1) @ values
    return attended


def _attend_from_questions(queries: Tensor, keys: Tensor, values: Tensor, layout: _Layout) -> Tensor:
    """Softmax over the context's keys and the question's own, without copying the context for each question."""
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
