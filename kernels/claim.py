"""Claim, in Triton: see `reference/claim.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ula.kernels import tables as layout
from vllm_ula.kernels.signatures import MAP, signature
from vllm_ula.kernels.tables import CallTables, MapTables, block_of
from vllm_ula.kernels.variant import Variant

CLOCK = tl.constexpr(layout.CLOCK)
PLACED = tl.constexpr(layout.PLACED)


@triton.jit
def _entries(p_selection, i_token, width, BLOCK: tl.constexpr):
    """Entries of a token `[BLOCK]`, and the slots they select, -1 where there is none."""
    o_entry = i_token * width + tl.arange(0, BLOCK)
    # [BLOCK]
    b_slot = tl.load(p_selection + o_entry, mask=tl.arange(0, BLOCK) < width, other=-1)
    return o_entry, b_slot


@triton.jit
def _claims(o_entry, num_entries, is_decode):
    """What the entries of a token claim their rows with."""
    return (tl.where(is_decode, 2 * num_entries, num_entries) - o_entry).to(tl.int32)


@triton.jit
def winners(p_marks, p_selection, i_token, width, num_entries, is_decode, BLOCK: tl.constexpr):
    """Entries of a token `[BLOCK]`, their slots, and whose claim stands."""
    o_entry, b_slot = _entries(p_selection, i_token, width, BLOCK)
    # [BLOCK]
    b_mark = tl.load(p_marks + b_slot, mask=b_slot >= 0, other=0)
    m_won = (b_slot >= 0) & (b_mark == _claims(o_entry, num_entries, is_decode))
    return o_entry, b_slot, m_won


@triton.jit(do_not_specialize=["num_entries"])
def _claim_kernel(p_marks, p_selection, p_decode, num_entries, width, BLOCK: tl.constexpr):
    i_token = tl.program_id(0).to(tl.int64)
    o_entry, b_slot = _entries(p_selection, i_token, width, BLOCK)
    b_claim = _claims(o_entry, num_entries, tl.load(p_decode + i_token) != 0)
    tl.atomic_max(p_marks + b_slot, b_claim, mask=b_slot >= 0, sem="relaxed")


@triton.jit(do_not_specialize=["num_entries"])
def _count_kernel(
    p_home,
    p_stamp,
    p_state,
    p_marks,
    p_roles,
    p_selection,
    p_decode,
    p_wanted,
    p_missing,
    num_entries,
    num_device,
    width,
    BLOCK: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    is_decode = tl.load(p_decode + i_token) != 0
    wanted = 0
    missing = 0
    if is_decode:
        clock = tl.load(p_state + CLOCK)
        _, b_slot, m_won = winners(
            p_marks, p_selection, i_token, width, num_entries, is_decode, BLOCK
        )
        # [BLOCK]
        b_home = tl.load(p_home + b_slot, mask=m_won, other=0)
        m_host = m_won & (b_home >= num_device)
        m_device = m_won & (b_home < num_device)
        b_stamp = tl.load(p_stamp + b_home, mask=m_device, other=0)
        b_role = tl.load(p_roles + b_slot, mask=m_host, other=0).to(tl.int32)
        m_seated = (m_device & (b_stamp >> 1 == clock)) | (m_host & ((b_role & PLACED) != 0))
        wanted = tl.sum((m_won & (m_seated == 0)).to(tl.int32))
        missing = tl.sum(m_host.to(tl.int32))
    tl.store(p_wanted + i_token, wanted)
    tl.store(p_missing + i_token, missing)


def claim(tables: MapTables, call: CallTables) -> None:
    """See `reference/claim.py`."""
    num_tokens, width = call.selection.shape
    if not num_tokens:
        return
    block = block_of(width)
    num_warps = 4 if block <= 1024 else 8
    _claim_kernel[(num_tokens,)](
        tables.marks,
        call.selection,
        call.decode,
        call.selection.numel(),
        width,
        BLOCK=block,
        num_warps=num_warps,
    )
    _count_kernel[(num_tokens,)](
        tables.home,
        tables.stamp,
        tables.state,
        tables.marks,
        tables.roles,
        call.selection,
        call.decode,
        call.wanted,
        call.missing,
        call.selection.numel(),
        tables.num_device,
        width,
        BLOCK=block,
        num_warps=num_warps,
    )


VARIANTS = (
    Variant(
        "claim",
        _claim_kernel,
        signature(_claim_kernel, MAP),
        {"BLOCK": 2048},
        num_warps=8,
        hot=True,
    ),
    Variant(
        "claim count",
        _count_kernel,
        signature(_count_kernel, MAP),
        {"BLOCK": 2048},
        num_warps=8,
        hot=True,
    ),
)
