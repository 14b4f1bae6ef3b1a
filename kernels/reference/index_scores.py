"""Scores of the sparse indexer: which positions a token would like to read."""

from __future__ import annotations

import torch
from torch import Tensor


def index_scores(
    queries: Tensor, weights: Tensor, keys: Tensor, scales: Tensor, positions: Tensor
) -> Tensor:
    """`score[t, s] = scale[s] * sum_h weight[t, h] * relu(query[t, h] . key[s])`.

    Args:
        queries: float32 `[T, heads, head_dim]`, unscaled fp8 values.
        weights: float32 `[T, heads]`; the queries' scales are folded in.
        keys: float32 `[S, head_dim]`, unscaled fp8 values, in order of position.
        scales: float32 `[S]`.
        positions: int64 `[T]`; token t may read positions 0 to `positions[t]`.

    Returns:
        float32 `[T, S]`, -inf for positions a token may not read.
    """
    tokens, heads, dim = queries.shape
    dots = (queries.reshape(tokens * heads, dim) @ keys.T).relu_().view(tokens, heads, -1)
    scores = torch.bmm(weights.unsqueeze(1), dots).squeeze(1) * scales
    later = torch.arange(keys.shape[0], device=keys.device) > positions.unsqueeze(1)
    return scores.masked_fill_(later, -torch.inf)
