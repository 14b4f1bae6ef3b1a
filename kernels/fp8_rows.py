"""fp8 rows in registers: the layout is drawn in `reference/fp8_rows.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ula.kernels.reference import fp8, fp8_rows

LATENT = tl.constexpr(fp8_rows.LATENT)
TILE = tl.constexpr(fp8_rows.TILE)
TILES = tl.constexpr(fp8_rows.LATENT // fp8_rows.TILE)
ROPE = tl.constexpr(fp8_rows.ROPE)
WIDTH = tl.constexpr(fp8_rows.WIDTH)
ROW_BYTES = tl.constexpr(fp8_rows.ROW_BYTES)
LEAST = tl.constexpr(fp8_rows.LEAST)
FP8_MAX = tl.constexpr(fp8.FP8_MAX)


@triton.jit
def _parts(p_rows):
    """Pointers to the values `[ROWS, TILES, TILE]`, scales `[ROWS, TILES]`, rope `[ROWS, ROPE]`."""
    o_value = tl.arange(0, TILES)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    p_value = (p_rows[:, None, None] + o_value[None, :, :]).to(tl.pointer_type(tl.float8e4nv))
    p_scale = (p_rows[:, None] + LATENT).to(tl.pointer_type(tl.float32))
    p_rope = (p_rows[:, None] + LATENT + 4 * TILES).to(tl.pointer_type(tl.bfloat16))
    return (
        p_value,
        p_scale + tl.arange(0, TILES)[None, :],
        p_rope + tl.arange(0, ROPE)[None, :],
    )


@triton.jit
def load_fp8_rows(p_rows, m_rows):
    """Latent bf16 `[ROWS, 512]` and rope bf16 `[ROWS, 64]`, zeros where masked.

    Args:
        p_rows: pointers `[ROWS]` to the first bytes.
        m_rows: `[ROWS]`.
    """
    p_value, p_scale, p_rope = _parts(p_rows)
    # [ROWS, TILES, TILE], [ROWS, TILES] and [ROWS, ROPE]
    b_value = tl.load(p_value, mask=m_rows[:, None, None], other=0.0).to(tl.float32)
    b_scale = tl.load(p_scale, mask=m_rows[:, None], other=0.0)
    b_rope = tl.load(p_rope, mask=m_rows[:, None], other=0.0)
    # Four significant bits times a power of two: bf16 has eight.
    b_latent = (b_value * b_scale[:, :, None]).to(tl.bfloat16)
    return tl.reshape(b_latent, (p_rows.shape[0], LATENT)), b_rope


@triton.jit
def store_fp8_rows(p_rows, b_latent, b_rope, m_rows):
    """Pack rows, bit for bit as `reference/fp8_rows.py` does with finite ones.

    Rounding is spelled out in integers, because the interpreter truncates.

    Args:
        p_rows: pointers `[ROWS]` to the first bytes.
        b_latent: float32 `[ROWS, TILES, TILE]`.
        b_rope: bf16 `[ROWS, ROPE]`.
        m_rows: `[ROWS]`, what to write.
    """
    p_value, p_scale, p_rope = _parts(p_rows)
    b_most = tl.maximum(tl.max(tl.abs(b_latent), axis=2), LEAST) * (1.0 / FP8_MAX)
    b_bits = b_most.to(tl.int32, bitcast=True)
    b_exponent = (b_bits >> 23) + ((b_bits & 0x7FFFFF) != 0).to(tl.int32)
    b_scale = (b_exponent << 23).to(tl.float32, bitcast=True)
    b_inverse = ((254 - b_exponent) << 23).to(tl.float32, bitcast=True)
    b_value = _e4m3(b_latent * b_inverse[:, :, None])
    tl.store(p_value, b_value.to(tl.float8e4nv, bitcast=True), mask=m_rows[:, None, None])
    tl.store(p_scale, b_scale, mask=m_rows[:, None])
    tl.store(p_rope, b_rope, mask=m_rows[:, None])


@triton.jit
def _e4m3(b_value):
    """The nearest e4m3 values of float32, ties to even, at most 448, as uint8."""
    MOST: tl.constexpr = 0x43E00000  # 448.0
    b_bits = b_value.to(tl.int32, bitcast=True)
    b_size = tl.minimum(b_bits & 0x7FFFFFFF, MOST)
    # Three of 23 mantissa bits stay; the bias of the exponent falls from 127 to 7.
    b_normal = ((b_size + 0x7FFFF + ((b_size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2**-6 the step is 2**-9, which is the step of floats from 2**14 on: adding rounds.
    b_small = b_size.to(tl.float32, bitcast=True) + 16384.0
    b_small = b_small.to(tl.int32, bitcast=True) - 0x46800000  # 16384.0
    b_code = tl.where(b_size < 0x3C800000, b_small, b_normal)  # 2**-6
    return (b_code | ((b_bits >> 24) & 0x80)).to(tl.uint8)
