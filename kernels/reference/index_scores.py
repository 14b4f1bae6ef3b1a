"""Scores of the sparse indexer: which positions a token would like to read."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_ula.kernels.reference.index_keys import load

WORKSPACE_BYTES = 16 << 20  # of dot products by head; see attention/impl.py


def index_scores(
    queries: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    request_of_token: Tensor,
    position_of_token: Tensor,
    block_size: int,
    width: int,
) -> Tensor:
    """`score[t, s] = scale[s] * sum_h weight[t, h] * relu(query[t, h] . key[s])`.

    Args:
        queries: float8_e4m3fn `[T, heads, head_dim]`.
        weights: float32 or bfloat16 `[T, heads]`; the queries' scales are folded in.
        cache: uint8 `[N, head_dim + 4]` index keys by logical slot.
        block_table: int32 `[requests, blocks]` logical block ids; rows may lie apart.
        request_of_token: int64 `[T]` row of the block table, -1 for a padding token. Tokens of a
            request follow each other.
        position_of_token: int64 `[T]`; token t may read positions 0 to `position_of_token[t]`.
        block_size: tokens per block.
        width: of the result, more than any position.

    Returns:
        float32 `[T, width]`, -inf for positions a token may not read.
    """
    tokens, heads, _ = queries.shape
    scores = torch.full((tokens, width), -torch.inf, device=queries.device)
    requests, counts = torch.unique_consecutive(request_of_token, return_counts=True)
    stop = 0
    for request, count in zip(requests.tolist(), counts.tolist(), strict=True):
        start, stop = stop, stop + count
        if request < 0:
            continue
        length = int(position_of_token[start:stop].max()) + 1
        blocks = block_table[request, : -(-length // block_size)].long()
        offsets = torch.arange(block_size, device=cache.device)
        slots = (blocks.unsqueeze(1) * block_size + offsets).view(-1)[:length]
        keys, scales = load(cache, slots)
        chunk = max(WORKSPACE_BYTES // (heads * max(length, 1) * 4), 1)
        for first in range(start, stop, chunk):
            part = slice(first, min(first + chunk, stop))
            scores[part, :length] = _request_scores(
                queries[part].float(), weights[part].float(), keys, scales, position_of_token[part]
            )
    return scores


def _request_scores(
    queries: Tensor, weights: Tensor, keys: Tensor, scales: Tensor, positions: Tensor
) -> Tensor:
    """Scores `[T, S]` of tokens of one request; keys and scales in order of position."""
    tokens, heads, dim = queries.shape
    dots = (queries.reshape(tokens * heads, dim) @ keys.T).relu_().view(tokens, heads, -1)
    scores = torch.bmm(weights.unsqueeze(1), dots).squeeze(1) * scales
    later = torch.arange(keys.shape[0], device=keys.device) > positions.unsqueeze(1)
    return scores.masked_fill_(later, -torch.inf)
