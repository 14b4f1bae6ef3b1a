"""Storing index keys, in Triton: see `reference/index_keys.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_ula.kernels.checks import check
from vllm_ula.kernels.fp8 import fp32_to_fp8, power_of_two_scale
from vllm_ula.kernels.reference.index_keys import SCALE_BYTES
from vllm_ula.kernels.variant import Variant

# Not measured. A key of 128 fills a warp with 4 values each, so 4 warps hold two keys apiece.
ROWS = 8


@triton.jit(do_not_specialize=["num_keys"])
def _store_index_keys_kernel(
    p_cache,
    p_scales,
    p_slots,
    p_keys,
    num_keys,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
):
    o_key = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_dim = tl.arange(0, DIM_PADDED)
    # [ROWS]
    b_slot = tl.load(p_slots + o_key, mask=o_key < num_keys, other=-1)
    m_key = b_slot >= 0
    m_value = m_key[:, None] & (o_dim < DIM)[None, :]
    # [ROWS, DIM]
    b_key = tl.load(p_keys + o_key[:, None] * DIM + o_dim[None, :], mask=m_value, other=0.0)
    b_key = b_key.to(tl.float32)
    b_scale, b_inverse = power_of_two_scale(tl.maximum(tl.max(tl.abs(b_key), axis=1), 1e-10))
    ROW_BYTES: tl.constexpr = DIM + SCALE_BYTES
    # A product with a power of two is exact.
    b_byte = fp32_to_fp8(b_key * b_inverse[:, None])
    tl.store(p_cache + b_slot[:, None] * ROW_BYTES + o_dim[None, :], b_byte, mask=m_value)
    o_scale = (b_slot * ROW_BYTES + DIM) // SCALE_BYTES
    tl.store(p_scales + o_scale, b_scale, mask=m_key)


def store_index_keys(cache: Tensor, slots: Tensor, keys: Tensor) -> None:
    """See `reference/index_keys.py`."""
    check("keys", keys, (torch.float32, torch.bfloat16, torch.float16), ndim=2)
    num, dim = keys.shape
    check("slots", slots, torch.int64, shape=(num,))
    check("cache", cache, torch.uint8, shape=(cache.shape[0], dim + SCALE_BYTES))
    if dim % SCALE_BYTES:
        raise ValueError(f"keys have {dim} values, expected a multiple of {SCALE_BYTES}")
    if num:
        _store_index_keys_kernel[(triton.cdiv(num, ROWS),)](
            cache,
            cache.view(torch.float32),
            slots,
            keys,
            num,
            DIM=dim,
            DIM_PADDED=triton.next_power_of_2(dim),
            SCALE_BYTES=SCALE_BYTES,
            ROWS=ROWS,
        )


VARIANTS = (
    Variant(
        "store_index_keys",
        _store_index_keys_kernel,
        {
            "p_cache": "*u8:16",
            "p_scales": "*fp32:16",
            "p_slots": "*i64:16",
            "p_keys": "*bf16:16",
            "num_keys": "i32",
        },
        {"DIM": 128, "DIM_PADDED": 128, "SCALE_BYTES": SCALE_BYTES, "ROWS": ROWS},
        hot=True,
    ),
)
