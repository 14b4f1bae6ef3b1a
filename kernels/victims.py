"""Victims, in Triton: see `reference/victims.py`.

One pass counts how many rows each level holds, from which every program of a second one knows the
level that gives up only some of its rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ula.kernels import tables as layout
from vllm_ula.kernels.signatures import MAP, signature
from vllm_ula.kernels.tables import CallTables, MapTables
from vllm_ula.kernels.variant import Variant

CLOCK = tl.constexpr(layout.CLOCK)
PERIOD = tl.constexpr(layout.PERIOD)
NUM_REQUIRED = tl.constexpr(layout.NUM_REQUIRED)
NUM_INCOMING = tl.constexpr(layout.NUM_INCOMING)
NUM_EXCHANGED = tl.constexpr(layout.NUM_EXCHANGED)
BELOW = tl.constexpr(layout.BELOW)
AT = tl.constexpr(layout.AT)

ROWS = 4096  # of a program: 256 programs for 2^20 rows, two on each processor of an H200
NUM_WARPS = 8  # with 4 the second pass spills


@triton.jit
def _level(p_edges, b_call, period, NUM_BUCKETS: tl.constexpr, STEPS: tl.constexpr):
    """Bisect the edges: the last level whose first call is not after the row's."""
    b_low = tl.zeros_like(b_call)  # level 0 has no edge
    b_high = b_low + NUM_BUCKETS
    for _ in tl.static_range(STEPS):
        b_middle = (b_low + b_high) // 2
        b_edge = tl.load(p_edges + (period + 1 + b_middle) % NUM_BUCKETS)
        m_up = (b_call >= b_edge) & (b_middle > 0)
        b_low = tl.where(m_up, b_middle, b_low)
        b_high = tl.where(m_up, b_high, tl.maximum(b_middle, 1))
    return b_low


@triton.jit
def _count_kernel(
    p_stamp,
    p_edges,
    p_levels,
    p_state,
    num_device,
    NUM_BUCKETS: tl.constexpr,
    LEVELS: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    if tl.load(p_state + NUM_INCOMING) > 0:
        o_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        m_row = o_row < num_device
        # [ROWS]
        b_stamp = tl.load(p_stamp + o_row, mask=m_row, other=0)
        b_call = b_stamp >> 1
        m_row &= b_call != tl.load(p_state + CLOCK)
        b_level = _level(p_edges, b_call, tl.load(p_state + PERIOD), NUM_BUCKETS, STEPS)
        b_bin = tl.where((b_stamp & 1) != 0, 0, b_level + 1)
        b_count = tl.histogram(b_bin, LEVELS, mask=m_row)
        tl.atomic_add(p_levels + tl.arange(0, LEVELS), b_count, mask=b_count > 0, sem="relaxed")


@triton.jit
def _take_kernel(
    p_home,
    p_owner,
    p_live,
    p_stamp,
    p_edges,
    p_levels,
    p_state,
    p_incoming,
    p_victims,
    p_vacated,
    p_write_back,
    num_device,
    NUM_BUCKETS: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
):
    o_level = tl.arange(0, LEVELS)
    # [LEVELS]
    b_count = tl.load(p_levels + o_level, mask=o_level <= NUM_BUCKETS, other=0)
    num_dead = tl.sum(tl.where(o_level == 0, b_count, 0))
    num = tl.minimum(num_dead, tl.load(p_state + NUM_INCOMING))
    num = tl.maximum(num, tl.load(p_state + NUM_REQUIRED))
    if tl.program_id(0) == 0:
        tl.store(p_state + NUM_EXCHANGED, num)
    if num > 0:
        # Levels that give up every row, and how many the next one gives up.
        b_upto = tl.cumsum(b_count, 0)
        level = tl.sum((b_upto < num).to(tl.int32))
        below = tl.sum(tl.where(o_level < level, b_count, 0))
        period = tl.load(p_state + PERIOD)
        first = -2147483648  # the calls of that level
        if level > 1:
            first = tl.load(p_edges + (period + level) % NUM_BUCKETS)
        beyond = 2147483647
        if level > 0 and level < NUM_BUCKETS:
            beyond = tl.load(p_edges + (period + level + 1) % NUM_BUCKETS)

        o_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        m_row = o_row < num_device
        # [ROWS]
        b_stamp = tl.load(p_stamp + o_row, mask=m_row, other=0)
        b_call = b_stamp >> 1
        m_row &= b_call != tl.load(p_state + CLOCK)
        m_dead = (b_stamp & 1) != 0
        m_live = m_row & (m_dead == 0)
        m_below = (m_row & m_dead & (level > 0)) | (m_live & (level > 0) & (b_call < first))
        m_at = tl.where(level == 0, m_row & m_dead, m_live & (b_call >= first) & (b_call < beyond))

        b_below, b_at = m_below.to(tl.int32), m_at.to(tl.int32)
        start_below = tl.atomic_add(p_state + BELOW, tl.sum(b_below), sem="relaxed")
        start_at = tl.atomic_add(p_state + AT, tl.sum(b_at), sem="relaxed")
        b_to = tl.where(
            m_below,
            start_below + tl.cumsum(b_below, 0) - 1,
            below + start_at + tl.cumsum(b_at, 0) - 1,
        )
        m_taken = (m_below | m_at) & (b_to < num)
        b_incoming = tl.load(p_incoming + b_to, mask=m_taken, other=0)
        b_vacated = tl.load(p_home + b_incoming, mask=m_taken, other=0) - num_device
        b_owner = tl.load(p_owner + o_row, mask=m_taken, other=0)
        b_live = tl.load(p_live + b_owner, mask=m_taken, other=0)
        tl.store(p_victims + b_to, o_row.to(tl.int64), mask=m_taken)
        tl.store(p_vacated + b_to, b_vacated.to(tl.int64), mask=m_taken)
        tl.store(p_write_back + b_to, b_live, mask=m_taken)


def victims(tables: MapTables, call: CallTables) -> None:
    """See `reference/victims.py`; which rows the last level gives up is left open."""
    num_buckets = tables.edges.numel()
    levels = triton.next_power_of_2(num_buckets + 1)
    grid = (triton.cdiv(tables.num_device, ROWS),)
    _count_kernel[grid](
        tables.stamp,
        tables.edges,
        tables.levels,
        tables.state,
        tables.num_device,
        NUM_BUCKETS=num_buckets,
        LEVELS=levels,
        STEPS=num_buckets.bit_length(),
        ROWS=ROWS,
        num_warps=NUM_WARPS,
    )
    _take_kernel[grid](
        tables.home,
        tables.owner,
        tables.live,
        tables.stamp,
        tables.edges,
        tables.levels,
        tables.state,
        call.incoming,
        call.victims,
        call.vacated,
        call.write_back,
        tables.num_device,
        NUM_BUCKETS=num_buckets,
        LEVELS=levels,
        ROWS=ROWS,
        num_warps=NUM_WARPS,
    )


VARIANTS = (
    Variant(
        "victims count",
        _count_kernel,
        signature(_count_kernel, MAP),
        {"NUM_BUCKETS": 64, "LEVELS": 128, "STEPS": 7, "ROWS": ROWS},
        num_warps=NUM_WARPS,
        hot=True,
    ),
    Variant(
        "victims take",
        _take_kernel,
        signature(_take_kernel, MAP),
        {"NUM_BUCKETS": 64, "LEVELS": 128, "ROWS": ROWS},
        num_warps=NUM_WARPS,
        hot=True,
    ),
)
