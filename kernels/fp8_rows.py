"""fp8 rows in registers: the layout is drawn in `reference/fp8_rows.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ula.kernels.fp8 import fp8_to_fp16, fp32_to_fp8, power_of_two_scale
from vllm_ula.kernels.reference import fp8_rows

LATENT = tl.constexpr(fp8_rows.LATENT)
TILE = tl.constexpr(fp8_rows.TILE)
TILES = tl.constexpr(fp8_rows.LATENT // fp8_rows.TILE)
ROPE = tl.constexpr(fp8_rows.ROPE)
WIDTH = tl.constexpr(fp8_rows.WIDTH)
ROW_BYTES = tl.constexpr(fp8_rows.ROW_BYTES)
LEAST = tl.constexpr(fp8_rows.LEAST)


@triton.jit
def _parts(p_rows):
    """Pointers to the values `[ROWS, TILES, TILE]`, scales `[ROWS, TILES]`, rope `[ROWS, ROPE]`."""
    o_value = tl.arange(0, TILES)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    p_value = p_rows[:, None, None] + o_value[None, :, :]
    p_scale = (p_rows[:, None] + LATENT).to(tl.pointer_type(tl.float32))
    p_rope = (p_rows[:, None] + LATENT + 4 * TILES).to(tl.pointer_type(tl.bfloat16))
    return (
        p_value,
        p_scale + tl.arange(0, TILES)[None, :],
        p_rope + tl.arange(0, ROPE)[None, :],
    )


@triton.jit
def load_fp8_rows(p_rows, m_rows, NATIVE: tl.constexpr):
    """Latent bf16 `[ROWS, 512]` and rope bf16 `[ROWS, 64]`, zeros where masked.

    Args:
        p_rows: pointers `[ROWS]` to the first bytes, uint8.
        m_rows: `[ROWS]`.
        NATIVE: see `fp8.converts_fp8`.
    """
    p_value, p_scale, p_rope = _parts(p_rows)
    # [ROWS, TILES, TILE], [ROWS, TILES] and [ROWS, ROPE]
    b_byte = tl.load(p_value, mask=m_rows[:, None, None], other=0)
    b_value = fp8_to_fp16(b_byte, NATIVE).to(tl.float32)
    b_scale = tl.load(p_scale, mask=m_rows[:, None], other=0.0)
    b_rope = tl.load(p_rope, mask=m_rows[:, None], other=0.0)
    # Four significant bits times a power of two: bf16 has eight.
    b_latent = (b_value * b_scale[:, :, None]).to(tl.bfloat16)
    return tl.reshape(b_latent, (p_rows.shape[0], LATENT)), b_rope


@triton.jit
def store_fp8_rows(p_rows, b_latent, b_rope, m_rows):
    """Pack rows, bit for bit as `reference/fp8_rows.py` does with finite ones.

    Args:
        p_rows: pointers `[ROWS]` to the first bytes, uint8.
        b_latent: float32 `[ROWS, TILES, TILE]`.
        b_rope: bf16 `[ROWS, ROPE]`.
        m_rows: `[ROWS]`, what to write.
    """
    p_value, p_scale, p_rope = _parts(p_rows)
    b_most = tl.maximum(tl.max(tl.abs(b_latent), axis=2), LEAST)
    b_scale, b_inverse = power_of_two_scale(b_most)
    b_value = fp32_to_fp8(b_latent * b_inverse[:, :, None])
    tl.store(p_value, b_value, mask=m_rows[:, None, None])
    tl.store(p_scale, b_scale, mask=m_rows[:, None])
    tl.store(p_rope, b_rope, mask=m_rows[:, None])
