"""Token positions of requests to logical slots through vLLM's block table."""

from __future__ import annotations

from torch import Tensor


def logical_slots(
    positions: Tensor, request_of_token: Tensor, block_table: Tensor, block_size: int
) -> Tensor:
    """Logical slots `block_id * block_size + offset` of selected positions.

    Args:
        positions: int32 or int64 `[T, topk]` positions in the token's own request, -1 padded.
        request_of_token: int64 `[T]` row of the block table; -1 for a padding token, which
            selects nothing, whatever stale positions it carries.
        block_table: int32 `[requests, blocks]` logical block ids.
        block_size: tokens per block.

    Returns:
        int64 `[T, topk]`, -1 where nothing is selected.
    """
    nothing = (positions < 0) | (request_of_token < 0).unsqueeze(1)
    at = positions.long().masked_fill(nothing, 0)
    width = block_table.shape[1]
    entry = request_of_token.clamp_min(0).unsqueeze(1) * width + at // block_size
    blocks = block_table.reshape(-1)[entry].long()
    return (blocks * block_size + at % block_size).masked_fill_(nothing, -1)
