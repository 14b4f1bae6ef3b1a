"""Logical slots of positions, in Triton: see `reference/logical_slots.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_ula.kernels.checks import check
from vllm_ula.kernels.variant import Variant

# Not measured: the largest selection in one program, 16 positions a thread.
BLOCK = 2048


@triton.jit(do_not_specialize=["num_tokens"])
def _logical_slots_kernel(
    p_positions,
    p_request,
    p_table,
    p_slots,
    num_tokens,
    topk,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    o_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_token = i_token < num_tokens
    m_slot = m_token[:, None] & (o_column < topk)[None, :]
    # [TOKENS]
    b_request = tl.load(p_request + i_token, mask=m_token, other=-1).to(tl.int64)
    o_slot = i_token[:, None] * topk + o_column[None, :]
    # [TOKENS, BLOCK]
    b_position = tl.load(p_positions + o_slot, mask=m_slot, other=-1)
    m_read = (b_position >= 0) & (b_request >= 0)[:, None]
    o_block = b_request[:, None] * table_stride + b_position // BLOCK_SIZE
    b_block = tl.load(p_table + o_block, mask=m_read, other=0).to(tl.int64)
    b_slot = tl.where(m_read, b_block * BLOCK_SIZE + b_position % BLOCK_SIZE, -1)
    tl.store(p_slots + o_slot, b_slot, mask=m_slot)


def logical_slots(
    positions: Tensor, request_of_token: Tensor, block_table: Tensor, block_size: int
) -> Tensor:
    """See `reference/logical_slots.py`."""
    check("positions", positions, (torch.int32, torch.int64), ndim=2)
    tokens, topk = positions.shape
    check("request_of_token", request_of_token, torch.int64, shape=(tokens,))
    # Rows of the table may lie apart: it is part of a larger one.
    check("rows of block_table", block_table[:1], torch.int32, ndim=2)
    slots = torch.empty(positions.shape, dtype=torch.int64, device=positions.device)
    if slots.numel():
        block = min(triton.next_power_of_2(topk), BLOCK)
        rows = BLOCK // block
        _logical_slots_kernel[(triton.cdiv(tokens, rows), triton.cdiv(topk, block))](
            positions,
            request_of_token,
            block_table,
            slots,
            tokens,
            topk,
            block_table.stride(0),
            BLOCK_SIZE=block_size,
            TOKENS=rows,
            BLOCK=block,
        )
    return slots


VARIANTS = tuple(
    Variant(
        f"logical_slots_{block_size}",
        _logical_slots_kernel,
        {
            "p_positions": "*i32:16",
            "p_request": "*i64:16",
            "p_table": "*i32:16",
            "p_slots": "*i64:16",
            "num_tokens": "i32",
            "topk": "i32:16",
            "table_stride": "i32",
        },
        {"BLOCK_SIZE": block_size, "TOKENS": 1, "BLOCK": BLOCK},
        hot=True,
    )
    for block_size in (64, 128)
)
