"""Scatter, in Triton: see `reference/scatter.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_ula.kernels.checks import check
from vllm_ula.kernels.fp8_rows import LATENT, ROPE, ROW_BYTES, TILE, TILES, WIDTH, store_fp8_rows
from vllm_ula.kernels.rows import FLOATS, as_words, at_home, check_pools, copy_rows, head_of
from vllm_ula.kernels.signatures import AS_BYTES, AS_WORDS
from vllm_ula.kernels.variant import Variant

# Rows of a program. Not measured: a decode step writes about one row a request, and few rows a
# program spread them over more multiprocessors.
ROWS = 4


@triton.jit(do_not_specialize=["num_rows"])
def _scatter_kernel(
    p_device,
    p_host,
    p_homes,
    p_rows,
    num_device,
    num_rows,
    WORDS: tl.constexpr,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # [ROWS]
    b_home = tl.load(p_homes + o_row, mask=o_row < num_rows, other=-1)
    m_row = b_home >= 0
    p_to = at_home(p_device, p_host, b_home, num_device, WORDS)
    copy_rows(p_rows + o_row * WORDS, p_to, m_row, m_row, WORDS, HEAD)


@triton.jit(do_not_specialize=["num_rows"])
def _scatter_packed_kernel(
    p_device,
    p_host,
    p_homes,
    p_rows,
    p_rope,
    rope_stride,
    num_device,
    num_rows,
    ROWS: tl.constexpr,
):
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # [ROWS]
    b_home = tl.load(p_homes + o_row, mask=o_row < num_rows, other=-1)
    m_row = b_home >= 0
    o_latent = tl.arange(0, TILES)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    p_latent = (p_rows + o_row * WIDTH)[:, None, None] + o_latent[None, :, :]
    # [ROWS, TILES, TILE]
    b_latent = tl.load(p_latent, mask=m_row[:, None, None], other=0.0).to(tl.float32)
    p_rope = (p_rope + o_row * rope_stride)[:, None] + tl.arange(0, ROPE)[None, :]
    # [ROWS, ROPE]
    b_rope = tl.load(p_rope, mask=m_row[:, None], other=0.0)
    p_to = at_home(p_device, p_host, b_home, num_device, ROW_BYTES)
    store_fp8_rows(p_to, b_latent, b_rope, m_row)


def scatter(device: Tensor, host: Tensor, homes: Tensor, rows: Tensor) -> None:
    """See `reference/scatter.py`."""
    check_pools(device, host)
    check("homes", homes, torch.int64, ndim=1)
    num = homes.numel()
    if not num:
        return
    grid = (triton.cdiv(num, ROWS),)
    if device.dtype == torch.uint8:
        check("rows", rows, FLOATS, shape=(num, WIDTH.value))
        # Already bf16 in nearly all models: then this is a view, and the stride that of the rows.
        rope = rows[:, LATENT.value :].to(torch.bfloat16)
        _scatter_packed_kernel[grid](
            device, host, homes, rows, rope, rope.stride(0), device.shape[0], num, ROWS=ROWS
        )
        return
    check("rows", rows, FLOATS, shape=(num, device.shape[1]))
    words = as_words(device)
    _scatter_kernel[grid](
        words,
        as_words(host),
        homes,
        as_words(rows.to(device.dtype)),
        device.shape[0],
        num,
        WORDS=words.shape[1],
        HEAD=head_of(words.shape[1]),
        ROWS=ROWS,
    )


VARIANTS = (
    Variant(
        "scatter bf16",
        _scatter_kernel,
        AS_WORDS,
        {"WORDS": 288, "HEAD": 256, "ROWS": ROWS},
        hot=True,
        wide_loads=True,
    ),
    Variant(
        "scatter fp8",
        _scatter_packed_kernel,
        {**AS_BYTES, "p_rope": "*bf16:16", "rope_stride": "i32:16"},
        {"ROWS": ROWS},
        hot=True,
    ),
)
