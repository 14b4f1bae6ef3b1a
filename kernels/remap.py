"""Remap, in Triton: see `reference/remap.py`."""

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
ADMITTED = tl.constexpr(layout.ADMITTED)
CUT = tl.constexpr(layout.CUT)
MOVED = tl.constexpr(layout.MOVED)
NUM_EXCHANGED = tl.constexpr(layout.NUM_EXCHANGED)
FETCHED = tl.constexpr(layout.FETCHED)
WRITTEN_BACK = tl.constexpr(layout.WRITTEN_BACK)
IN_PLACE_DEVICE = tl.constexpr(layout.IN_PLACE_DEVICE)
IN_PLACE_HOST = tl.constexpr(layout.IN_PLACE_HOST)
EXCHANGES = tl.constexpr(layout.EXCHANGES)

BLOCK = 1024
PROGRAMS = 256  # for the worst case of entries; two on each processor of an H200


@triton.jit
def _swap_kernel(
    p_home,
    p_owner,
    p_stamp,
    p_state,
    p_totals,
    p_incoming,
    p_fetch,
    p_victims,
    p_vacated,
    p_write_back,
    num_device,
    BLOCK: tl.constexpr,
):
    num = tl.load(p_state + NUM_EXCHANGED)
    clock = tl.load(p_state + CLOCK)
    fetched = tl.full([], 0, tl.int64)
    written_back = tl.full([], 0, tl.int64)
    for i_start in range(tl.program_id(0) * BLOCK, num, tl.num_programs(0) * BLOCK):
        o_entry = i_start + tl.arange(0, BLOCK)
        m_entry = o_entry < num
        # [BLOCK]
        b_incoming = tl.load(p_incoming + o_entry, mask=m_entry, other=0)
        b_victim = tl.load(p_victims + o_entry, mask=m_entry, other=0)
        b_vacated = tl.load(p_vacated + o_entry, mask=m_entry, other=0)
        b_outgoing = tl.load(p_owner + b_victim, mask=m_entry, other=0)
        tl.debug_barrier()  # all have read owners before one of them changes, whoever that is
        tl.store(p_home + b_outgoing, (b_vacated + num_device).to(tl.int32), mask=m_entry)
        tl.store(p_home + b_incoming, b_victim.to(tl.int32), mask=m_entry)
        tl.store(p_owner + b_victim, b_incoming.to(tl.int32), mask=m_entry)
        tl.store(p_stamp + b_victim, tl.zeros([BLOCK], tl.int32) + 2 * clock, mask=m_entry)
        b_fetch = tl.load(p_fetch + o_entry, mask=m_entry, other=0)
        b_write_back = tl.load(p_write_back + o_entry, mask=m_entry, other=0)
        fetched += tl.sum(b_fetch.to(tl.int64))
        written_back += tl.sum(b_write_back.to(tl.int64))
    if fetched + written_back > 0:
        tl.atomic_add(p_totals + FETCHED, fetched, sem="relaxed")
        tl.atomic_add(p_totals + WRITTEN_BACK, written_back, sem="relaxed")
        is_first = tl.atomic_xchg(p_state + MOVED, 1, sem="relaxed") == 0
        tl.atomic_add(p_totals + EXCHANGES, is_first.to(tl.int64), sem="relaxed")
    if tl.program_id(0) == 0:
        tl.atomic_add(p_state + CURRENT, num, sem="relaxed")
        tl.atomic_add(p_state + ADMITTED, num, sem="relaxed")


@triton.jit(do_not_specialize=["num_entries", "num_written", "num_tokens"])
def _settle_kernel(
    p_home,
    p_live,
    p_state,
    p_totals,
    p_marks,
    p_roles,
    p_written,
    p_written_homes,
    p_selection,
    p_selected_homes,
    p_decode,
    num_entries,
    num_written,
    num_tokens,
    num_device,
    width,
    BLOCK: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    if i_token < num_tokens:
        is_decode = tl.load(p_decode + i_token) != 0
        o_entry, b_slot, m_won = winners(
            p_marks, p_selection, i_token, width, num_entries, is_decode, BLOCK
        )
        # [BLOCK]
        b_home = tl.load(p_home + b_slot, mask=b_slot >= 0, other=-1)
        m_entry = tl.arange(0, BLOCK) < width
        tl.store(p_selected_homes + o_entry, b_home.to(tl.int64), mask=m_entry)
        # Only the entry that won clears the mark: others compare theirs with it.
        tl.store(p_marks + b_slot, tl.zeros([BLOCK], tl.int32), mask=m_won)
        if (is_decode & (i_token < tl.load(p_state + CUT))) == 0:
            on_host = tl.sum((m_won & (b_home >= num_device)).to(tl.int64))
            on_device = tl.sum((m_won & (b_home < num_device)).to(tl.int64))
            tl.atomic_add(p_totals + IN_PLACE_HOST, on_host, sem="relaxed")
            tl.atomic_add(p_totals + IN_PLACE_DEVICE, on_device, sem="relaxed")
    else:
        o_row = (i_token - num_tokens) * BLOCK + tl.arange(0, BLOCK)
        m_row = o_row < num_written
        # [BLOCK]
        b_slot = tl.load(p_written + o_row, mask=m_row, other=-1)
        m_slot = b_slot >= 0
        b_home = tl.load(p_home + b_slot, mask=m_slot, other=-1)
        tl.store(p_written_homes + o_row, b_home.to(tl.int64), mask=m_row)
        tl.store(p_live + b_slot, m_slot, mask=m_slot)
        tl.store(p_roles + b_slot, tl.zeros([BLOCK], tl.uint8), mask=m_slot)


def remap(tables: MapTables, call: CallTables) -> None:
    """See `reference/remap.py`."""
    num_tokens, width = call.selection.shape
    num_written, most = call.written.numel(), call.incoming.numel()
    if most:
        _swap_kernel[(min(triton.cdiv(most, BLOCK), PROGRAMS),)](
            tables.home,
            tables.owner,
            tables.stamp,
            tables.state,
            tables.totals,
            call.incoming,
            call.fetch,
            call.victims,
            call.vacated,
            call.write_back,
            tables.num_device,
            BLOCK=BLOCK,
        )
    block = block_of(width)
    programs = num_tokens + triton.cdiv(num_written, block)
    if programs:
        _settle_kernel[(programs,)](
            tables.home,
            tables.live,
            tables.state,
            tables.totals,
            tables.marks,
            tables.roles,
            call.written,
            call.written_homes,
            call.selection,
            call.selected_homes,
            call.decode,
            call.selection.numel(),
            num_written,
            num_tokens,
            tables.num_device,
            width,
            BLOCK=block,
            num_warps=4 if block <= 1024 else 8,
        )


VARIANTS = (
    Variant(
        "remap swap",
        _swap_kernel,
        signature(_swap_kernel, MAP),
        {"BLOCK": BLOCK},
        hot=True,
    ),
    Variant(
        "remap settle",
        _settle_kernel,
        signature(_settle_kernel, MAP),
        {"BLOCK": 2048},
        num_warps=8,
        hot=True,
    ),
)
