"""Multi-head latent attention of each token over its own selected rows."""

from __future__ import annotations

import torch
from torch import Tensor


def sparse_mla(
    queries: Tensor, rows: Tensor, selected: Tensor, scale: float, latent: int
) -> tuple[Tensor, Tensor]:
    """Attention over a workspace of rows; every token is one matrix product of the same shape.

    Args:
        queries: float32 `[T, heads, width]`, absorbed: latent part first, then rope.
        rows: float32 `[T, topk, width]`, the rows token t selected; unselected ones are finite.
        selected: bool `[T, topk]`.
        scale: of the logits.
        latent: leading columns of a row that are its value.

    Returns:
        float32 `[T, heads, latent]` and the log-sum-exp float32 `[T, heads]`; 0 and -inf for a
        token that selected nothing.
    """
    logits = torch.bmm(queries, rows.transpose(1, 2)) * scale
    logits.masked_fill_(~selected.unsqueeze(1), -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse.nan_to_num(neginf=0.0).unsqueeze(-1))
    return torch.bmm(weights, rows[..., :latent]), lse
