"""Scores of the sparse indexer, in Triton: see `reference/index_scores.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_ula.kernels.checks import check
from vllm_ula.kernels.fp8 import converts_fp8, fp8_to_fp16
from vllm_ula.kernels.reference.index_keys import SCALE_BYTES
from vllm_ula.kernels.variant import Variant

# Not measured. A tile of 128 keys is two of Hopper's 64-row products and leaves room in registers
# for its dot products with 64 heads; four tiles a program make up for loading the queries.
BLOCK, PART = 128, 512


@triton.jit(do_not_specialize=["width"])
def _index_scores_kernel(
    p_queries,
    p_weights,
    p_cache,
    p_scales,
    p_table,
    p_request,
    p_position,
    p_scores,
    width,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    i_part = tl.program_id(1) * PART
    i_request = tl.load(p_request + i_token).to(tl.int64)
    i_position = tl.load(p_position + i_token)
    i_position = tl.where(i_request < 0, -1, i_position)
    p_scores += i_token * width
    ROW_BYTES: tl.constexpr = DIM + SCALE_BYTES
    if i_part > i_position:
        o_score = i_part + tl.arange(0, PART)
        tl.store(p_scores + o_score, float("-inf"), mask=o_score < width)
    else:
        o_dim, o_head = tl.arange(0, DIM), tl.arange(0, HEADS_PADDED)
        m_head = o_head < HEADS
        o_query = (i_token * HEADS + o_head[None, :]) * DIM + o_dim[:, None]
        # [DIM, HEADS_PADDED]
        b_query = tl.load(p_queries + o_query, mask=m_head[None, :], other=0)
        b_query = fp8_to_fp16(b_query, NATIVE_FP8).to(DOT_TYPE)
        # [HEADS_PADDED]
        b_weight = tl.load(p_weights + i_token * HEADS + o_head, mask=m_head, other=0.0)
        b_weight = b_weight.to(tl.float32)
        for i_tile in range(PART // BLOCK):
            o_key = i_part + i_tile * BLOCK + tl.arange(0, BLOCK)
            m_key = o_key <= i_position
            # [BLOCK]
            o_block = i_request * table_stride + o_key // BLOCK_SIZE
            b_block = tl.load(p_table + o_block, mask=m_key, other=0).to(tl.int64)
            o_row = (b_block * BLOCK_SIZE + o_key % BLOCK_SIZE) * ROW_BYTES
            b_scale = tl.load(p_scales + (o_row + DIM) // SCALE_BYTES, mask=m_key, other=0.0)
            # [BLOCK, DIM]
            b_key = tl.load(p_cache + o_row[:, None] + o_dim[None, :], mask=m_key[:, None], other=0)
            b_dot = tl.dot(fp8_to_fp16(b_key, NATIVE_FP8).to(DOT_TYPE), b_query)
            b_dot = tl.where(b_dot < 0, 0.0, b_dot)  # tl.maximum would lose NaN
            b_score = tl.sum(b_dot * b_weight[None, :], axis=1) * b_scale
            b_score = tl.where(m_key, b_score, float("-inf"))
            tl.store(p_scores + o_key, b_score, mask=o_key < width)


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
    """See `reference/index_scores.py`."""
    check("queries", queries, torch.float8_e4m3fn, ndim=3)
    tokens, heads, dim = queries.shape
    check("weights", weights, (torch.float32, torch.bfloat16), shape=(tokens, heads))
    check("cache", cache, torch.uint8, shape=(cache.shape[0], dim + SCALE_BYTES))
    # Rows of the table may lie apart: it is part of a larger one.
    check("rows of block_table", block_table[:1], torch.int32, ndim=2)
    check("request_of_token", request_of_token, torch.int64, shape=(tokens,))
    check("position_of_token", position_of_token, torch.int64, shape=(tokens,))
    if dim != max(triton.next_power_of_2(dim), 16):
        raise ValueError(f"queries have {dim} values a head, expected a power of two from 16 on")
    scores = torch.empty(tokens, width, dtype=torch.float32, device=queries.device)
    if scores.numel():
        interpreted = triton.knobs.runtime.interpret  # where large tiles are cheap and fp16 is slow
        _index_scores_kernel[(tokens, triton.cdiv(width, PART))](
            queries.view(torch.uint8),
            weights,
            cache,
            cache.view(torch.float32),
            block_table,
            request_of_token,
            position_of_token,
            scores,
            width,
            block_table.stride(0),
            BLOCK_SIZE=block_size,
            HEADS=heads,
            HEADS_PADDED=max(triton.next_power_of_2(heads), 16),
            DIM=dim,
            SCALE_BYTES=SCALE_BYTES,
            NATIVE_FP8=converts_fp8(queries),
            DOT_TYPE=tl.float32 if interpreted else tl.float16,
            BLOCK=PART if interpreted else BLOCK,
            PART=PART,
        )
    return scores


VARIANTS = tuple(
    Variant(
        f"index_scores_{heads}_heads_{'native' if native else 'integer'}_fp8",
        _index_scores_kernel,
        {
            "p_queries": "*u8:16",
            "p_weights": "*fp32:16",
            "p_cache": "*u8:16",
            "p_scales": "*fp32:16",
            "p_table": "*i32:16",
            "p_request": "*i64:16",
            "p_position": "*i64:16",
            "p_scores": "*fp32:16",
            "width": "i32",
            "table_stride": "i32",
        },
        {
            "BLOCK_SIZE": 64,
            "HEADS": heads,
            "HEADS_PADDED": heads,
            "DIM": 128,
            "SCALE_BYTES": SCALE_BYTES,
            "NATIVE_FP8": native,
            "DOT_TYPE": tl.float16,
            "BLOCK": BLOCK,
            "PART": PART,
        },
        hot=True,
    )
    for heads in (32, 64)
    for native in (True, False)
)
