"""Touch, in Triton: see `reference/touch.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ula.kernels import tables as layout
from vllm_ula.kernels.claim import winners
from vllm_ula.kernels.signatures import MAP, signature
from vllm_ula.kernels.tables import CallTables, MapTables, block_of
from vllm_ula.kernels.variant import Variant

CLOCK = tl.constexpr(layout.CLOCK)
CURRENT = tl.constexpr(layout.CURRENT)
ROOM = tl.constexpr(layout.ROOM)
CUT = tl.constexpr(layout.CUT)
NUM_MISSING = tl.constexpr(layout.NUM_MISSING)
NUM_REQUIRED = tl.constexpr(layout.NUM_REQUIRED)
NUM_INCOMING = tl.constexpr(layout.NUM_INCOMING)
PROMOTED = tl.constexpr(layout.PROMOTED)
WRITTEN = tl.constexpr(layout.WRITTEN)
PLACED = tl.constexpr(layout.PLACED)

TOKENS = 1024  # whose counts are summed at a time: more than the decode tokens of most calls
WRITES = 1024


@triton.jit(do_not_specialize=["num_entries"])
def _touch_kernel(
    p_home,
    p_stamp,
    p_state,
    p_totals,
    p_marks,
    p_roles,
    p_selection,
    p_decode,
    p_wanted,
    p_missing,
    p_incoming,
    p_fetch,
    num_entries,
    num_device,
    width,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    is_decode = tl.load(p_decode + i_token) != 0
    if is_decode:
        wanted = 0
        missing = 0  # of the tokens before this one
        for i_start in range(0, i_token + 1, TOKENS):
            o_token = i_start + tl.arange(0, TOKENS)
            # [TOKENS]
            wanted += tl.sum(tl.load(p_wanted + o_token, mask=o_token <= i_token, other=0))
            missing += tl.sum(tl.load(p_missing + o_token, mask=o_token < i_token, other=0))
        if wanted <= tl.load(p_state + ROOM):
            clock = tl.load(p_state + CLOCK)
            _, b_slot, m_won = winners(
                p_marks, p_selection, i_token, width, num_entries, is_decode, BLOCK
            )
            # [BLOCK]
            b_home = tl.load(p_home + b_slot, mask=m_won, other=0)
            m_hit = m_won & (b_home < num_device)
            m_miss = m_won & (b_home >= num_device)

            b_stamp = tl.load(p_stamp + b_home, mask=m_hit, other=0)
            tl.store(p_stamp + b_home, (2 * clock) | (b_stamp & 1), mask=m_hit)

            b_at = missing + tl.cumsum(m_miss.to(tl.int32), 0) - 1
            b_role = tl.load(p_roles + b_slot, mask=m_miss, other=0).to(tl.int32)
            tl.store(p_incoming + b_at, b_slot, mask=m_miss)
            tl.store(p_fetch + b_at, (b_role & WRITTEN) == 0, mask=m_miss)

            num_new = tl.sum((m_hit & (b_stamp >> 1 != clock)).to(tl.int32))
            num_won = tl.sum(m_won.to(tl.int32))
            tl.atomic_add(p_state + CURRENT, num_new, sem="relaxed")
            tl.atomic_add(p_totals + PROMOTED, num_won.to(tl.int64), sem="relaxed")
            tl.atomic_max(p_state + CUT, (i_token + 1).to(tl.int32), sem="relaxed")
            num_missing = missing + tl.sum(m_miss.to(tl.int32))
            tl.atomic_max(p_state + NUM_MISSING, num_missing, sem="relaxed")


@triton.jit(do_not_specialize=["num_entries", "num_written", "most"])
def _append_kernel(
    p_state,
    p_marks,
    p_roles,
    p_written,
    p_written_homes,
    p_incoming,
    p_fetch,
    num_entries,
    num_written,
    num_device,
    width,
    most,
    BLOCK: tl.constexpr,
):
    num = tl.load(p_state + NUM_MISSING)
    last = tl.load(p_state + CUT).to(tl.int64) * width  # promoted entries lie before it
    for i_turn in tl.static_range(2):  # what has room, then what takes dead rows
        for i_start in range(0, num_written, BLOCK):
            o_row = i_start + tl.arange(0, BLOCK)
            m_row = o_row < num_written
            # [BLOCK]
            b_home = tl.load(p_written_homes + o_row, mask=m_row, other=-1)
            m_host = b_home >= num_device
            b_slot = tl.load(p_written + o_row, mask=m_host, other=-1)
            b_role = tl.load(p_roles + b_slot, mask=m_host, other=0).to(tl.int32)
            b_mark = tl.load(p_marks + b_slot, mask=m_host, other=0)
            m_missing = (b_mark > num_entries) & (2 * num_entries - b_mark < last)
            m_turn = ((b_role & PLACED) != 0) == (i_turn == 0)
            m_append = m_host & (m_missing == 0) & m_turn
            b_at = num + tl.cumsum(m_append.to(tl.int32), 0) - 1
            tl.store(p_incoming + b_at, b_slot, mask=m_append & (b_at < most))
            tl.store(p_fetch + b_at, tl.zeros([BLOCK], tl.int1), mask=m_append & (b_at < most))
            num += tl.sum(m_append.to(tl.int32))
        if i_turn == 0:
            tl.store(p_state + NUM_REQUIRED, num)
    tl.store(p_state + NUM_INCOMING, tl.minimum(num, most))


def touch(tables: MapTables, call: CallTables) -> None:
    """See `reference/touch.py`."""
    num_tokens, width = call.selection.shape
    block = block_of(width)
    if num_tokens:
        _touch_kernel[(num_tokens,)](
            tables.home,
            tables.stamp,
            tables.state,
            tables.totals,
            tables.marks,
            tables.roles,
            call.selection,
            call.decode,
            call.wanted,
            call.missing,
            call.incoming,
            call.fetch,
            call.selection.numel(),
            tables.num_device,
            width,
            BLOCK=block,
            TOKENS=TOKENS,
            num_warps=4 if block <= 1024 else 8,
        )
    _append_kernel[(1,)](
        tables.state,
        tables.marks,
        tables.roles,
        call.written,
        call.written_homes,
        call.incoming,
        call.fetch,
        call.selection.numel(),
        call.written.numel(),
        tables.num_device,
        width,
        call.incoming.numel(),
        BLOCK=WRITES,
    )


VARIANTS = (
    Variant(
        "touch",
        _touch_kernel,
        signature(_touch_kernel, MAP),
        {"BLOCK": 2048, "TOKENS": TOKENS},
        num_warps=8,
        hot=True,
    ),
    Variant(
        "touch append",
        _append_kernel,
        signature(_append_kernel, MAP),
        {"BLOCK": WRITES},
        hot=True,
    ),
)
