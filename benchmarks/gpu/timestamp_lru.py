"""A baseline: exact LRU over timestamps, all on the GPU.

A call stamps the device rows it uses and gives up the m oldest of the others. They are found by a
radix select over the stamps, two passes of 11 bits over all device rows:

    stamp   | high digit | low digit |      0: never used
    bits      21      11   10      0

    begin -> split -> high digits -> low digits -> take -> remap -> translate
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_ula.kernels.checks import check
from vllm_ula.kernels.translate import translate
from vllm_ula.kernels.variant import Variant

# Not measured. Two histograms of 2,048 bins are 16 KiB, which every program of the passes after
# them reads from L2; three digits would read all stamps once more.
DIGIT_BITS = 11
BINS = 1 << DIGIT_BITS
MAX_CLOCK = (1 << 2 * DIGIT_BITS) - 1
# Not measured. References are split in programs of 1,024; 2^20 rows are 128 programs of 8,192, one
# for each multiprocessor of a large GPU.
BLOCK_SLOTS, BLOCK_ROWS = 1024, 8192
# After the bins: rows missing, victims older than the threshold, victims of its age.
MISSING, OLDER, EQUAL, NUM_COUNTS = 0, 1, 2, 16


@triton.jit
def _begin_kernel(p_clock, p_high, p_low, p_counts, BINS: tl.constexpr, NUM_COUNTS: tl.constexpr):
    tl.store(p_clock, tl.load(p_clock) + 1)
    b_zero = tl.zeros([BINS], tl.int32)
    tl.store(p_high + tl.arange(0, BINS), b_zero)
    tl.store(p_low + tl.arange(0, BINS), b_zero)
    tl.store(p_counts + tl.arange(0, NUM_COUNTS), tl.zeros([NUM_COUNTS], tl.int32))


@triton.jit
def _split_kernel(
    p_slots,
    p_home,
    p_stamp,
    p_claimed,
    p_clock,
    p_counts,
    p_missing,
    num_slots,
    num_rows,
    BLOCK: tl.constexpr,
):
    clock = tl.load(p_clock)
    o_slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # [BLOCK]
    b_slot = tl.load(p_slots + o_slot, mask=o_slot < num_slots, other=-1)
    m_slot = b_slot >= 0
    b_home = tl.load(p_home + b_slot, mask=m_slot, other=0)
    tl.store(p_stamp + b_home, clock, mask=m_slot & (b_home < num_rows))
    m_miss = m_slot & (b_home >= num_rows)
    # Of several references to a missing row, the first to claim it asks for it.
    b_claim = tl.atomic_xchg(p_claimed + b_slot, tl.full([BLOCK], 0, tl.int32) + clock, mask=m_miss)
    b_first = (m_miss & (b_claim != clock)).to(tl.int32)
    i_first = tl.atomic_add(p_counts, tl.sum(b_first))
    tl.store(p_missing + i_first + tl.cumsum(b_first) - 1, b_slot, mask=b_first > 0)


@triton.jit
def _digit(p_bins, wanted, BINS: tl.constexpr):
    # The digit of the wanted-th oldest row, and how many of the rows with it are wanted.
    o_bin = tl.arange(0, BINS)
    b_bin = tl.load(p_bins + o_bin)
    digit = tl.sum((tl.cumsum(b_bin) < wanted).to(tl.int32))
    return digit, wanted - tl.sum(tl.where(o_bin < digit, b_bin, 0))


@triton.jit
def _count_kernel(
    p_stamp,
    p_clock,
    p_counts,
    p_high,
    p_low,
    num_rows,
    LOW: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
):
    BINS: tl.constexpr = 1 << BITS
    clock = tl.load(p_clock)
    o_row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # [BLOCK]; rows of the current call are no victims.
    b_stamp = tl.load(p_stamp + o_row, mask=o_row < num_rows, other=clock)
    m_row = b_stamp < clock
    b_digit = b_stamp >> BITS
    p_bins = p_high
    if LOW:
        high, _ = _digit(p_high, tl.load(p_counts), BINS)
        m_row = m_row & (b_digit == high)
        b_digit = b_stamp & (BINS - 1)
        p_bins = p_low
    b_bin = tl.histogram(b_digit, BINS, mask=m_row)
    tl.atomic_add(p_bins + tl.arange(0, BINS), b_bin, mask=b_bin > 0)


@triton.jit
def _take_kernel(
    p_stamp,
    p_clock,
    p_counts,
    p_high,
    p_low,
    p_victims,
    num_rows,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
):
    wanted = tl.load(p_counts)
    clock = tl.load(p_clock)
    high, of_high = _digit(p_high, wanted, 1 << BITS)
    low, of_oldest = _digit(p_low, of_high, 1 << BITS)
    threshold = (high << BITS) + low
    o_row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # [BLOCK]
    b_stamp = tl.load(p_stamp + o_row, mask=o_row < num_rows, other=clock)
    b_older = ((b_stamp < threshold) & (b_stamp < clock)).to(tl.int32)
    b_equal = ((b_stamp == threshold) & (b_stamp < clock)).to(tl.int32)
    # Older rows come first, then as many of the same age as are wanted.
    i_older = tl.atomic_add(p_counts + 1, tl.sum(b_older))
    i_equal = tl.atomic_add(p_counts + 2, tl.sum(b_equal))
    b_rank = i_equal + tl.cumsum(b_equal) - 1
    tl.store(
        p_victims + wanted - of_oldest + b_rank,
        o_row.to(tl.int32),
        mask=(b_equal > 0) & (b_rank < of_oldest),
    )
    tl.store(p_victims + i_older + tl.cumsum(b_older) - 1, o_row.to(tl.int32), mask=b_older > 0)


@triton.jit
def _remap_kernel(
    p_home,
    p_owner,
    p_stamp,
    p_clock,
    p_counts,
    p_missing,
    p_victims,
    p_sources,
    BLOCK: tl.constexpr,
):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < tl.load(p_counts)
    # [BLOCK]
    b_slot = tl.load(p_missing + o, mask=m, other=0)
    b_row = tl.load(p_victims + o, mask=m, other=0)
    b_source = tl.load(p_home + b_slot, mask=m, other=0)
    b_owner = tl.load(p_owner + b_row, mask=m, other=0)
    tl.store(p_sources + o, b_source, mask=m)
    tl.store(p_home + b_slot, b_row, mask=m)
    tl.store(p_home + b_owner, b_source, mask=m)
    tl.store(p_owner + b_row, b_slot.to(tl.int32), mask=m)
    tl.store(p_stamp + b_row, tl.load(p_clock), mask=m)


@dataclass(frozen=True)
class Plan:
    """What a call moves; the first `count` entries of each are valid.

    Attributes:
        rows: int64, shape of the references: device rows after the call, -1 where no slot.
        count: int32 `[1]`, rows exchanged.
        missing: int64, logical slots fetched.
        victims: int32, device rows given up for them.
        sources: int32, homes in which what gave way now lives.
    """

    rows: Tensor
    count: Tensor
    missing: Tensor
    victims: Tensor
    sources: Tensor


class TimestampLru:
    """One domain's map and stamps.

    Attributes:
        home: int32 `[N]`.
        owner: int32 `[D]`.
        stamp: int32 `[D]`, the last call that used a row.
        clock: int32 `[1]`, calls so far.

    Args:
        home: int32 `[N]`, a permutation; homes below D are device rows.
        stamp: int32 `[D]`, all at most `clock`.
        clock: calls so far; stamps have 22 bits, so 4 million calls in all.
        known_count: rows missing in every call, where that is known beforehand: the victims are
            then found by `torch.topk`, which wants to know.
    """

    def __init__(
        self, home: Tensor, stamp: Tensor, clock: int, known_count: int | None = None
    ) -> None:
        check("home", home, torch.int32, ndim=1)
        check("stamp", stamp, torch.int32, ndim=1)
        if clock >= MAX_CLOCK:
            raise ValueError(f"clock {clock}: stamps hold {MAX_CLOCK}")
        num_rows = len(stamp)
        self.home, self.stamp = home.clone(), stamp.clone()
        self.owner = home.argsort()[:num_rows].int()
        self.clock = stamp.new_tensor([clock])
        self.claimed = torch.zeros_like(home)
        self.known_count = known_count
        self._bins = stamp.new_empty(2, BINS)
        self._counts = stamp.new_empty(NUM_COUNTS)

    @property
    def state(self) -> tuple[Tensor, ...]:
        """Everything a call changes."""
        return self.home, self.owner, self.stamp, self.clock, self.claimed

    def plan(self, slots: Tensor) -> Plan:
        """Make all rows of a call resident.

        Args:
            slots: int64, any shape: logical slots, -1 no slot, duplicates allowed. Their distinct
                rows fit the device.
        """
        check("slots", slots, torch.int64)
        num, num_rows = slots.numel(), len(self.stamp)
        missing = torch.empty(num, dtype=torch.int64, device=slots.device)
        victims, sources = (missing.new_empty(num, dtype=torch.int32) for _ in range(2))
        stamps, high, low = (self.stamp, self.clock, self._counts), self._bins[0], self._bins[1]
        grid_slots = (triton.cdiv(num, BLOCK_SLOTS),)
        grid_rows = (triton.cdiv(num_rows, BLOCK_ROWS),)
        rows = {"BLOCK": BLOCK_ROWS, "BITS": DIGIT_BITS, "num_warps": 8}
        _begin_kernel[(1,)](
            self.clock, high, low, self._counts, BINS=BINS, NUM_COUNTS=NUM_COUNTS, num_warps=8
        )
        _split_kernel[grid_slots](
            slots,
            self.home,
            self.stamp,
            self.claimed,
            self.clock,
            self._counts,
            missing,
            num,
            num_rows,
            BLOCK=BLOCK_SLOTS,
        )
        if self.known_count is None:
            _count_kernel[grid_rows](*stamps, high, low, num_rows, LOW=False, **rows)
            _count_kernel[grid_rows](*stamps, high, low, num_rows, LOW=True, **rows)
            _take_kernel[grid_rows](*stamps, high, low, victims, num_rows, **rows)
        else:
            oldest = self.stamp.topk(self.known_count, largest=False, sorted=False)
            victims[: self.known_count] = oldest.indices
        _remap_kernel[grid_slots](
            self.home, self.owner, *stamps, missing, victims, sources, BLOCK=BLOCK_SLOTS
        )
        rows_of_slots = translate(self.home, slots)
        return Plan(rows_of_slots, self._counts[:1], missing, victims, sources)


_MAP = {"p_home": "*i32:16", "p_stamp": "*i32:16", "p_clock": "*i32:16", "p_counts": "*i32:16"}
_BINS = {"p_high": "*i32:16", "p_low": "*i32:16"}
_STAMPS = {name: _MAP[name] for name in ("p_stamp", "p_clock", "p_counts")}
_ROWS = {"BLOCK": BLOCK_ROWS, "BITS": DIGIT_BITS}
_LISTS = {"p_missing": "*i64:16", "p_victims": "*i32:16", "p_sources": "*i32:16"}
VARIANTS = (
    Variant(
        "timestamp LRU: begin",
        _begin_kernel,
        {"p_clock": "*i32:16", "p_counts": "*i32:16", **_BINS},
        {"BINS": BINS, "NUM_COUNTS": NUM_COUNTS},
        num_warps=8,
        hot=True,
    ),
    Variant(
        "timestamp LRU: split",
        _split_kernel,
        {
            **_MAP,
            "p_slots": "*i64:16",
            "p_claimed": "*i32:16",
            "p_missing": "*i64:16",
            "num_slots": "i32:16",
            "num_rows": "i32:16",
        },
        {"BLOCK": BLOCK_SLOTS},
        hot=True,
    ),
    *(
        Variant(
            f"timestamp LRU: {'low' if low else 'high'} digits",
            _count_kernel,
            {**_STAMPS, **_BINS, "num_rows": "i32:16"},
            {**_ROWS, "LOW": low},
            num_warps=8,
            hot=True,
        )
        for low in (False, True)
    ),
    Variant(
        "timestamp LRU: take",
        _take_kernel,
        {**_STAMPS, **_BINS, "p_victims": "*i32:16", "num_rows": "i32:16"},
        _ROWS,
        num_warps=8,
        hot=True,
    ),
    Variant(
        "timestamp LRU: remap",
        _remap_kernel,
        {**_MAP, **_LISTS, "p_owner": "*i32:16"},
        {"BLOCK": BLOCK_SLOTS},
        hot=True,
    ),
)
