"""Seat, in Triton: see `reference/seat.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ula.kernels import tables as layout
from vllm_ula.kernels.signatures import MAP, signature
from vllm_ula.kernels.tables import CallTables, MapTables
from vllm_ula.kernels.variant import Variant

CLOCK = tl.constexpr(layout.CLOCK)
PERIOD = tl.constexpr(layout.PERIOD)
USED = tl.constexpr(layout.USED)
CURRENT = tl.constexpr(layout.CURRENT)
ADMITTED = tl.constexpr(layout.ADMITTED)
ROOM = tl.constexpr(layout.ROOM)
CUT = tl.constexpr(layout.CUT)
NUM_MISSING = tl.constexpr(layout.NUM_MISSING)
BELOW = tl.constexpr(layout.BELOW)
AT = tl.constexpr(layout.AT)
MOVED = tl.constexpr(layout.MOVED)
WRITTEN = tl.constexpr(layout.WRITTEN)
PLACED = tl.constexpr(layout.PLACED)

BLOCK = 1024


@triton.jit(do_not_specialize=["num_written"])
def _seat_kernel(
    p_home,
    p_stamp,
    p_edges,
    p_levels,
    p_state,
    p_roles,
    p_written,
    p_by_decode,
    p_written_homes,
    num_written,
    num_device,
    rows_per_period,
    NUM_BUCKETS: tl.constexpr,
    LEVELS: tl.constexpr,
    AGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    clock = tl.load(p_state + CLOCK) + 1
    used = tl.load(p_state + USED)
    if AGE == "touched":
        used += tl.load(p_state + CURRENT)
    elif AGE == "admitted":
        used += tl.load(p_state + ADMITTED)
    else:
        used += rows_per_period
    period = tl.load(p_state + PERIOD)
    tl.debug_barrier()  # every warp has read the state before one writes it
    if used >= rows_per_period:
        used = 0
        period += 1
        tl.store(p_state + PERIOD, period)
        tl.store(p_edges + period % NUM_BUCKETS, clock)
    o_level = tl.arange(0, LEVELS)
    tl.store(p_levels + o_level, tl.zeros([LEVELS], tl.int32), mask=o_level <= NUM_BUCKETS)

    rewritten = 0
    for i_start in range(0, num_written, BLOCK):
        o_row = i_start + tl.arange(0, BLOCK)
        m_row = o_row < num_written
        # [BLOCK]
        b_slot = tl.load(p_written + o_row, mask=m_row, other=-1)
        b_home = tl.load(p_home + b_slot, mask=b_slot >= 0, other=-1)
        tl.store(p_written_homes + o_row, b_home.to(tl.int64), mask=m_row)
        m_device = (b_home >= 0) & (b_home < num_device)
        tl.store(p_stamp + b_home, tl.zeros([BLOCK], tl.int32) + 2 * clock, mask=m_device)
        rewritten += tl.sum(m_device.to(tl.int32))

    room = num_device - rewritten
    num_placed = 0
    for i_start in range(0, num_written, BLOCK):
        o_row = i_start + tl.arange(0, BLOCK)
        m_row = o_row < num_written
        # [BLOCK]
        b_slot = tl.load(p_written + o_row, mask=m_row, other=-1)
        b_home = tl.load(p_home + b_slot, mask=b_slot >= 0, other=-1)
        m_decode = tl.load(p_by_decode + o_row, mask=m_row, other=0) != 0
        m_host = b_home >= num_device
        b_asks = (m_host & m_decode).to(tl.int32)
        m_placed = (b_asks > 0) & (num_placed + tl.cumsum(b_asks, 0) <= room)
        b_role = tl.where(m_placed, WRITTEN | PLACED, WRITTEN).to(tl.uint8)
        tl.store(p_roles + b_slot, b_role, mask=m_host)
        num_placed = tl.minimum(num_placed + tl.sum(b_asks), room)

    tl.store(p_state + CLOCK, clock)
    tl.store(p_state + USED, used)
    tl.store(p_state + CURRENT, rewritten)
    tl.store(p_state + ADMITTED, rewritten)
    tl.store(p_state + ROOM, room - num_placed)
    tl.store(p_state + CUT, 0)
    tl.store(p_state + NUM_MISSING, 0)
    tl.store(p_state + BELOW, 0)
    tl.store(p_state + AT, 0)
    tl.store(p_state + MOVED, 0)


def seat(tables: MapTables, call: CallTables, age: str) -> None:
    """See `reference/seat.py`."""
    num_buckets, num_device = tables.edges.numel(), tables.num_device
    _seat_kernel[(1,)](
        tables.home,
        tables.stamp,
        tables.edges,
        tables.levels,
        tables.state,
        tables.roles,
        call.written,
        call.written_by_decode,
        call.written_homes,
        call.written.numel(),
        num_device,
        max(num_device // num_buckets, 1),
        NUM_BUCKETS=num_buckets,
        LEVELS=triton.next_power_of_2(num_buckets + 1),
        AGE=age,
        BLOCK=BLOCK,
    )


VARIANTS = (
    Variant(
        "seat",
        _seat_kernel,
        signature(_seat_kernel, MAP),
        {"NUM_BUCKETS": 64, "LEVELS": 128, "AGE": "admitted", "BLOCK": BLOCK},
        hot=True,
    ),
)
