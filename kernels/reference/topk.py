"""Exact top-k whose result does not depend on how it was computed."""

from __future__ import annotations

import torch
from torch import Tensor


def topk(scores: Tensor, k: int) -> Tensor:
    """Positions of the k highest scores; of equal scores the lowest positions.

    Args:
        scores: float32 `[T, S]`; -inf is never selected.
        k: width of the result.

    Returns:
        int32 `[T, k]` positions in ascending order, -1 padded.
    """
    tokens, width = scores.shape
    if width <= k:
        kept = scores > -torch.inf
    else:
        lowest = torch.topk(scores, k, dim=1, sorted=True).values[:, -1:]
        above, equal = scores > lowest, scores == lowest
        vacant = k - above.sum(1, keepdim=True)
        kept = above | (equal & (equal.cumsum(1) <= vacant))
        kept &= scores > -torch.inf
    token, position = kept.nonzero(as_tuple=True)
    column = (kept.cumsum(1) - 1)[token, position]
    selection = torch.full((tokens, k), -1, dtype=torch.int32, device=scores.device)
    selection[token, column] = position.to(torch.int32)
    return selection
