"""Merge the attention of each split of a selection into that of the whole, by log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm_ula.kernels.variant import Variant

HEADS = 4  # of a program; not measured: 2 KiB of each split and head, all under way at once


@triton.jit
def _merge_kernel(
    p_parts,
    p_lses,
    p_out,
    p_lse,
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
):
    GROUPS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    i_token = (tl.program_id(0) // GROUPS).to(tl.int64)
    o_head = (tl.program_id(0) % GROUPS) * HEADS + tl.arange(0, HEADS)
    m_head = o_head < NUM_HEADS
    o_split, o_latent = tl.arange(0, SPLITS_BLOCK), tl.arange(0, LATENT_BLOCK)
    m_split, m_latent = o_split < SPLITS, o_latent < LATENT
    o_part = i_token * SPLITS * NUM_HEADS + o_head
    # [HEADS, SPLITS_BLOCK]
    b_lses = tl.load(
        p_lses + o_part[:, None] + o_split[None, :] * NUM_HEADS,
        mask=m_head[:, None] & m_split[None, :],
        other=-float("inf"),
    )
    b_most = tl.max(b_lses, axis=1)
    b_base = tl.where(b_most == -float("inf"), 0.0, b_most)
    b_sum = tl.sum(tl.exp(b_lses - b_base[:, None]), axis=1)
    b_log = tl.log(tl.where(b_sum > 0.0, b_sum, 1.0))
    b_out = tl.zeros((HEADS, LATENT_BLOCK), tl.float32)
    for i_split in tl.static_range(SPLITS):
        o_this = o_part + i_split * NUM_HEADS
        # [HEADS]
        b_weight = tl.exp(
            tl.load(p_lses + o_this, mask=m_head, other=-float("inf")) - b_base - b_log
        )
        m_part = m_head[:, None] & m_latent[None, :]
        # [HEADS, LATENT_BLOCK]
        p_part = p_parts + o_this[:, None] * LATENT + o_latent[None, :]
        b_out += b_weight[:, None] * tl.load(p_part, mask=m_part, other=0.0)
    o_result = i_token * NUM_HEADS + o_head
    p_result = p_out + o_result[:, None] * LATENT + o_latent[None, :]
    tl.store(p_result, b_out, mask=m_head[:, None] & m_latent[None, :])
    tl.store(p_lse + o_result, b_most + b_log, mask=m_head)


def merge_splits(parts: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Attention over a whole selection; a split that selects nothing is 0 and -inf, as is a token.

    Args:
        parts: float32 `[T, splits, heads, latent]`.
        lses: float32 `[T, splits, heads]`.
        out: float32 `[T, heads, latent]`, written.
        lse: float32 `[T, heads]`, written.
    """
    tokens, splits, heads, latent = parts.shape
    _merge_kernel[(tokens * triton.cdiv(heads, HEADS),)](
        parts,
        lses,
        out,
        lse,
        NUM_HEADS=heads,
        LATENT=latent,
        SPLITS=splits,
        SPLITS_BLOCK=triton.next_power_of_2(splits),
        HEADS=HEADS,
        LATENT_BLOCK=block(latent),
    )


def block(width: int) -> int:
    """Columns of a tile that holds so many: tensor cores multiply 16 at least."""
    return max(1 << (width - 1).bit_length(), 16)


_FLOATS = dict.fromkeys(("p_parts", "p_lses", "p_out", "p_lse"), "*fp32:16")
_SIZES = {"LATENT": 512, "SPLITS": 4, "SPLITS_BLOCK": 4, "HEADS": HEADS, "LATENT_BLOCK": 512}

MERGES = tuple(
    Variant(
        f"sparse_mla merge {heads}",
        _merge_kernel,
        _FLOATS,
        {"NUM_HEADS": heads, **_SIZES},
        hot=True,
        wide_loads=True,
    )
    for heads in (64, 128)
)
