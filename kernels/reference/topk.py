"""Exact top-k whose result does not depend on how it was computed."""

from __future__ import annotations

import torch
from torch import Tensor

WORKSPACE_BYTES = 4 << 20  # of scores at a time: intermediate results stay in the cache


def topk(scores: Tensor, position_of_token: Tensor, k: int) -> Tensor:
    """Positions of the k highest scores; of equal scores the lowest positions.

    Args:
        scores: float32 `[T, S]`; -inf and NaN are never selected, 0.0 and -0.0 are equal.
        position_of_token: int64 `[T]`; token t selects of positions 0 to `position_of_token[t]`,
            with -1 none.
        k: width of the result.

    Returns:
        int32 `[T, k]` positions in ascending order, -1 padded.
    """
    tokens, width = scores.shape
    selection = torch.full((tokens, k), -1, dtype=torch.int32, device=scores.device)
    chunk = max(WORKSPACE_BYTES // (max(width, 1) * 4), 1)
    for first in range(0, tokens, chunk):
        part = slice(first, first + chunk)
        _select(scores[part], position_of_token[part], selection[part])
    return selection


def _select(scores: Tensor, positions: Tensor, selection: Tensor) -> None:
    """Write the positions of the highest scores into a selection of -1."""
    k = selection.shape[1]
    width = min(scores.shape[1], int(positions.max()) + 1)
    earlier = torch.arange(width, device=scores.device) <= positions.unsqueeze(1)
    # NaN is not greater either.
    readable = earlier & (scores[:, :width] > -torch.inf)
    if width <= k:
        kept = readable
    else:
        scores = scores[:, :width].where(readable, -torch.inf)
        lowest = torch.topk(scores, k, dim=1, sorted=True).values[:, -1:]
        above, equal = scores > lowest, scores == lowest
        vacant = k - above.sum(1, keepdim=True)
        kept = above | (equal & (equal.cumsum(1) <= vacant))
        kept &= readable
    token, position = kept.nonzero(as_tuple=True)
    column = (kept.cumsum(1) - 1)[token, position]
    selection[token, column] = position.to(torch.int32)
