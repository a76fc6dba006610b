"""APE by its formula: attention over passages and over all other tokens, computed separately and merged."""

import torch
from formula_oracle import softmax


def merged(scores, visible, sinks, *, of_chunks, context_tokens, temperature, scale):
    """Return attention over the chunks and over all other tokens, merged with weights S T LSE and LSE."""
    weights = softmax(scores, visible, sinks)
    scores = scores.masked_fill(~visible, -torch.inf)[:, :, context_tokens:]
    inside, outside = scores[..., of_chunks] / temperature, scores[..., ~of_chunks]
    if sinks is not None:
        outside = torch.cat([outside, sinks.view(1, -1, 1, 1).expand(*outside.shape[:-1], 1)], -1)
    parts = torch.stack([scale * temperature * inside.logsumexp(-1), outside.logsumexp(-1)], -1).softmax(-1)
    rows = torch.empty_like(scores)
    rows[..., of_chunks] = (parts[..., :1] * inside.softmax(-1)).nan_to_num()
    rows[..., ~of_chunks] = (parts[..., 1:] * outside.softmax(-1))[..., : int((~of_chunks).sum())]
    weights[:, :, context_tokens:] = rows
    return weights
