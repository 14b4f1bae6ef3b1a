"""Exact top-k, in Triton: see `reference/topk.py`.

A radix select. Scores become keys, unsigned integers in the same order. Four passes each find a
byte of the threshold, the lowest selected key: they count, of the keys that begin with the bytes
found before, how many have which next byte. Then every part of a row counts its keys above and at
the threshold, so that in the last pass it knows how many positions are selected before its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_ula.kernels.checks import check
from vllm_ula.kernels.variant import Variant

# Not measured: 11 bits would save one pass of four, but every program of the others would scan
# 2,048 bins, 16 a thread, for each pass before its own.
BINS = tl.constexpr(256)
# Not measured. 1M positions of one token make 128 programs, about one for each multiprocessor.
BLOCK, PART = 2048, 8192
# Tokens of a program: one on a GPU. The interpreter takes as long for one as for many.
TOKENS = 64 if triton.knobs.runtime.interpret else 1


@triton.jit
def _tokens(p_position, num_tokens, width, TOKENS: tl.constexpr, PART: tl.constexpr):
    """Tokens of a program, its first position, and for each token the position after its last."""
    i_token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    start = tl.program_id(1) * PART
    b_stop = tl.load(p_position + i_token, mask=i_token < num_tokens, other=-1).to(tl.int32) + 1
    return i_token, start, tl.minimum(b_stop, tl.minimum(start + PART, width))


@triton.jit
def _keys(p_scores, i_token, o_score, b_stop, width):
    """Keys (uint32) of scores; 0 for what cannot be selected, which is below all others."""
    o_key = i_token[:, None] * width + o_score[None, :]
    m_key = o_score[None, :] < b_stop[:, None]
    # [TOKENS, BLOCK]
    b_score = tl.load(p_scores + o_key, mask=m_key, other=float("-inf"))
    m_readable = b_score > float("-inf")  # which NaN is not either
    b_score = tl.where(b_score == 0, 0.0, b_score)  # -0.0 has other bits
    b_bits = b_score.to(tl.int32, bitcast=True)
    b_bits = b_bits ^ ((b_bits >> 31) | -0x80000000)
    return tl.where(m_readable, b_bits, 0).to(tl.uint32, bitcast=True)


@triton.jit
def _threshold(p_bins, i_token, num_tokens, k, BYTES: tl.constexpr):
    """The first BYTES bytes of the threshold, and how many of the keys that share them to take.

    Of fewer than k keys the threshold is 0, and all are above it.
    """
    o_bin = tl.arange(0, BINS)
    b_vacant = tl.zeros_like(i_token).to(tl.int32) + k
    b_found = tl.zeros_like(b_vacant).to(tl.uint32)
    for i_byte in tl.static_range(BYTES):
        o_count = (i_byte * num_tokens + i_token[:, None]) * BINS + o_bin[None, :]
        # [TOKENS, BINS]
        b_count = tl.load(p_bins + o_count, mask=(i_token < num_tokens)[:, None], other=0)
        # Keys with a higher byte: falls from bin to bin, below the vacant places at the byte.
        b_higher = tl.sum(b_count, axis=1)[:, None] - tl.cumsum(b_count, axis=1)
        b_byte = tl.sum((b_higher >= b_vacant[:, None]).to(tl.int32), axis=1)
        b_vacant -= tl.sum(tl.where(o_bin[None, :] > b_byte[:, None], b_count, 0), axis=1)
        b_found |= b_byte.to(tl.uint32) << (24 - 8 * i_byte)
    return b_found, b_vacant


@triton.jit(do_not_specialize=["num_tokens", "width"])
def _count_bytes_kernel(
    p_scores,
    p_position,
    p_bins,
    num_tokens,
    width,
    k,
    BYTE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    i_token, start, b_stop = _tokens(p_position, num_tokens, width, TOKENS, PART)
    stop = tl.max(b_stop)
    if start < stop:
        b_found, _ = _threshold(p_bins, i_token, num_tokens, k, BYTE)
        b_count = tl.zeros((TOKENS * BINS,), tl.int32)
        for o_block in range(start, stop, BLOCK):
            b_key = _keys(p_scores, i_token, o_block + tl.arange(0, BLOCK), b_stop, width)
            m_key = b_key > 0
            if BYTE > 0:
                m_key &= ((b_key ^ b_found[:, None]) >> (32 - 8 * BYTE)) == 0
            b_byte = ((b_key >> (24 - 8 * BYTE)) & 0xFF).to(tl.int32)
            b_bin = tl.ravel(tl.arange(0, TOKENS)[:, None] * BINS + b_byte)
            b_count += tl.histogram(b_bin, TOKENS * BINS, mask=tl.ravel(m_key))
        o_bin = (BYTE * num_tokens + tl.program_id(0).to(tl.int64) * TOKENS) * BINS
        p_bin = p_bins + o_bin + tl.arange(0, TOKENS * BINS)
        tl.atomic_add(p_bin, b_count, mask=b_count > 0, sem="relaxed")


@triton.jit(do_not_specialize=["num_tokens", "width"])
def _count_parts_kernel(
    p_scores,
    p_position,
    p_bins,
    p_above,
    p_equal,
    num_tokens,
    width,
    k,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    i_token, start, b_stop = _tokens(p_position, num_tokens, width, TOKENS, PART)
    stop = tl.max(b_stop)
    b_above, b_equal = tl.zeros((TOKENS,), tl.int32), tl.zeros((TOKENS,), tl.int32)
    if start < stop:
        b_threshold, _ = _threshold(p_bins, i_token, num_tokens, k, 4)
        for o_block in range(start, stop, BLOCK):
            b_key = _keys(p_scores, i_token, o_block + tl.arange(0, BLOCK), b_stop, width)
            m_equal = (b_key == b_threshold[:, None]) & (b_key > 0)
            b_above += tl.sum((b_key > b_threshold[:, None]).to(tl.int32), axis=1)
            b_equal += tl.sum(m_equal.to(tl.int32), axis=1)
    o_part = i_token * tl.num_programs(1) + tl.program_id(1)
    tl.store(p_above + o_part, b_above, mask=i_token < num_tokens)
    tl.store(p_equal + o_part, b_equal, mask=i_token < num_tokens)


@triton.jit(do_not_specialize=["num_tokens", "width"])
def _select_kernel(
    p_scores,
    p_position,
    p_bins,
    p_above,
    p_equal,
    p_selection,
    num_tokens,
    width,
    k,
    K_PADDED: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    i_token, start, b_stop = _tokens(p_position, num_tokens, width, TOKENS, PART)
    stop = tl.max(b_stop)
    m_token = (i_token < num_tokens)[:, None]
    if (start < stop) | (start == 0):
        b_threshold, b_vacant = _threshold(p_bins, i_token, num_tokens, k, 4)
        i_part = tl.arange(0, PARTS_PADDED)[None, :]
        o_part = i_token[:, None] * tl.num_programs(1) + i_part
        m_part = m_token & (i_part < tl.num_programs(1))
        m_before = i_part < tl.program_id(1)
        # [TOKENS, PARTS_PADDED]
        b_above = tl.load(p_above + o_part, mask=m_part, other=0)
        b_equal = tl.load(p_equal + o_part, mask=m_part, other=0)
        b_num = tl.sum(b_above, axis=1) + tl.minimum(tl.sum(b_equal, axis=1), b_vacant)
        b_above = tl.sum(tl.where(m_before, b_above, 0), axis=1)
        b_equal = tl.sum(tl.where(m_before, b_equal, 0), axis=1)
        for o_block in range(start, stop, BLOCK):
            o_score = o_block + tl.arange(0, BLOCK)
            b_key = _keys(p_scores, i_token, o_score, b_stop, width)
            m_above = b_key > b_threshold[:, None]
            m_equal = (b_key == b_threshold[:, None]) & (b_key > 0)
            # How many are above, and how many equal, up to and including each.
            b_num_above = b_above[:, None] + tl.cumsum(m_above.to(tl.int32), axis=1)
            b_num_equal = b_equal[:, None] + tl.cumsum(m_equal.to(tl.int32), axis=1)
            m_kept = m_above | (m_equal & (b_num_equal <= b_vacant[:, None]))
            o_kept = b_num_above + tl.minimum(b_num_equal, b_vacant[:, None]) - 1
            b_position = tl.broadcast_to(o_score[None, :], (TOKENS, BLOCK))
            tl.store(p_selection + i_token[:, None] * k + o_kept, b_position, mask=m_kept)
            b_above += tl.sum(m_above.to(tl.int32), axis=1)
            b_equal += tl.sum(m_equal.to(tl.int32), axis=1)
        if start == 0:
            o_column = tl.arange(0, K_PADDED)[None, :]
            m_vacant = m_token & (o_column >= b_num[:, None]) & (o_column < k)
            tl.store(p_selection + i_token[:, None] * k + o_column, -1, mask=m_vacant)


def topk(scores: Tensor, position_of_token: Tensor, k: int) -> Tensor:
    """See `reference/topk.py`."""
    check("scores", scores, torch.float32, ndim=2)
    tokens, width = scores.shape
    check("position_of_token", position_of_token, torch.int64, shape=(tokens,))
    selection = torch.empty(tokens, k, dtype=torch.int32, device=scores.device)
    if selection.numel():
        parts = max(triton.cdiv(width, PART), 1)
        grid = (triton.cdiv(tokens, TOKENS), parts)
        bins = torch.zeros(4, tokens, BINS.value, dtype=torch.int32, device=scores.device)
        above, equal = bins.new_empty(tokens, parts), bins.new_empty(tokens, parts)
        row, numbers = (scores, position_of_token, bins), (tokens, width, k)
        sizes = {"TOKENS": TOKENS, "BLOCK": BLOCK, "PART": PART}
        for byte in range(4):
            _count_bytes_kernel[grid](*row, *numbers, BYTE=byte, **sizes)
        _count_parts_kernel[grid](*row, above, equal, *numbers, **sizes)
        padded = {
            "K_PADDED": triton.next_power_of_2(k),
            "PARTS_PADDED": triton.next_power_of_2(parts),
        }
        _select_kernel[grid](*row, above, equal, selection, *numbers, **padded, **sizes)
    return selection


_ROW = {"p_scores": "*fp32:16", "p_position": "*i64:16", "p_bins": "*i32:16"}
_PARTS = {"p_above": "*i32:16", "p_equal": "*i32:16"}
_NUMBERS = {"num_tokens": "i32", "width": "i32", "k": "i32:16"}
_SELECTION = {**_ROW, **_PARTS, "p_selection": "*i32:16", **_NUMBERS}
_SIZES = {"TOKENS": 1, "BLOCK": BLOCK, "PART": PART}
_KERNELS = (
    *((_count_bytes_kernel, {**_ROW, **_NUMBERS}, {"BYTE": byte}) for byte in range(4)),
    (_count_parts_kernel, {**_ROW, **_PARTS, **_NUMBERS}, {}),
    (_select_kernel, _SELECTION, {"K_PADDED": 2048, "PARTS_PADDED": 128}),
)

VARIANTS = tuple(
    Variant(f"topk_{i_pass}", kernel, signature, {**constants, **_SIZES}, hot=True)
    for i_pass, (kernel, signature, constants) in enumerate(_KERNELS)
)
