"""What kernels that touch rows share: where a home lies, and copying rows as they are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_ula.kernels.checks import check
from vllm_ula.kernels.reference.fp8_rows import ROW_BYTES

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def check_pools(device: Tensor, host: Tensor) -> None:
    """Refuse pools that are not rows of one kind, or start where no 16-byte load can."""
    check("device", device, (torch.uint8, *FLOATS), ndim=2)
    if device.dtype == torch.uint8:
        check("device", device, torch.uint8, shape=(device.shape[0], ROW_BYTES))
    check("host", host, device.dtype, shape=(host.shape[0], device.shape[1]))
    for name, pool in (("device", device), ("host", host)):
        if pool.data_ptr() % 16:
            raise ValueError(f"{name} starts at {pool.data_ptr()}, not at a multiple of 16 bytes")


def as_words(rows: Tensor) -> Tensor:
    """The same rows as int32 words, or as bytes if they are no whole number of words."""
    whole = rows.shape[1] * rows.element_size() % 4 == 0
    return rows.view(torch.int32 if whole else torch.uint8)


def head_of(words: int) -> int:
    """The largest power of two in a row: most of it, as a tile without idle lanes."""
    return 1 << (words.bit_length() - 1)


@triton.jit
def at_home(p_device, p_host, b_home, num_device, WIDTH: tl.constexpr):
    """Pointers `[ROWS]` to the rows of homes int64 `[ROWS]`; that of -1 must not be followed."""
    p_on_device = p_device + b_home * WIDTH
    p_on_host = p_host + (b_home - num_device) * WIDTH
    p_rows = tl.where(b_home < num_device, p_on_device, p_on_host)
    # The compiler loses alignment where it selects, and 16-byte loads with it.
    if WIDTH * (p_device.dtype.element_ty.primitive_bitwidth // 8) % 16 == 0:
        p_rows = tl.multiple_of(p_rows, 16)
    return p_rows


@triton.jit
def copy_rows(p_from, p_to, m_from, m_to, WORDS: tl.constexpr, HEAD: tl.constexpr):
    """Copy rows behind pointers `[ROWS]`; those masked by `m_from` alone become zeros.

    All loads stand before all stores, which the compiler could not swap: so the whole rows of a
    program are under way at once. A row is its largest power of two and the rest, 288 words are
    256 and 32: one tile of 512 would leave almost half of its lanes idle.
    """
    TAIL: tl.constexpr = WORDS - HEAD
    o_head = tl.arange(0, HEAD)[None, :]
    # [ROWS, HEAD]
    b_head = tl.load(p_from[:, None] + o_head, mask=m_from[:, None], other=0)
    if TAIL > 0:
        o_tail = HEAD + tl.arange(0, triton.next_power_of_2(TAIL))[None, :]
        m_tail = o_tail < WORDS
        # [ROWS, TAIL]
        b_tail = tl.load(p_from[:, None] + o_tail, mask=m_from[:, None] & m_tail, other=0)
        tl.store(p_to[:, None] + o_tail, b_tail, mask=m_to[:, None] & m_tail)
    tl.store(p_to[:, None] + o_head, b_head, mask=m_to[:, None])
