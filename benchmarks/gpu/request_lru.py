"""A baseline in the style of HiSparse: every request owns R device rows and an LRU of its own.

One program a request; nothing is shared between them, so nothing is atomic. The host keeps every
row, so what gives way is forgotten, not copied.

    order   least recent ...... most recent        before
            survivors | hits | fetched             after
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_ula.kernels.checks import check
from vllm_ula.kernels.variant import Variant

# Not measured. 2,048 references and 4,096 rows are 4 and 8 values in each of 512 threads: 108
# registers (Triton 3.8), of 128 there are.
NUM_WARPS = 16


@triton.jit
def _plan_kernel(
    p_positions,
    p_row_of,
    p_held,
    p_order,
    p_used,
    p_clock,
    p_rows,
    p_missing,
    p_victims,
    p_counts,
    topk,
    num_positions,
    num_rows,
    TOPK: tl.constexpr,
    ROWS: tl.constexpr,
):
    i_request = tl.program_id(0).to(tl.int64)
    clock = tl.load(p_clock + i_request) + 1
    p_row_of += i_request * num_positions
    p_held += i_request * num_rows
    p_order += i_request * num_rows
    p_used += i_request * num_rows
    p_missing += i_request * topk
    p_victims += i_request * topk
    o_k, o_r = tl.arange(0, TOPK), tl.arange(0, ROWS)
    m_r = o_r < num_rows
    # [TOPK]
    b_position = tl.load(p_positions + i_request * topk + o_k, mask=o_k < topk, other=-1)
    m_position = b_position >= 0
    b_row = tl.load(p_row_of + b_position, mask=m_position, other=-1)
    m_hit = b_row >= 0
    m_miss = m_position & (b_row < 0)
    b_missing = tl.cumsum(m_miss.to(tl.int32)) - 1
    num_missing = tl.sum(m_miss.to(tl.int32))
    tl.store(p_used + b_row, clock, mask=m_hit)
    tl.store(p_missing + b_missing, b_position, mask=m_miss)
    tl.store(p_counts + i_request, num_missing)
    # [ROWS]: the least recent rows that this call does not use give way.
    b_order = tl.load(p_order + o_r, mask=m_r, other=0)
    tl.debug_barrier()
    m_used = m_r & (tl.load(p_used + b_order, mask=m_r, other=0) == clock)
    m_unused = m_r & (m_used == 0)
    b_unused = tl.cumsum(m_unused.to(tl.int32)) - 1
    num_unused = tl.sum(m_unused.to(tl.int32))
    m_victim = m_unused & (b_unused < num_missing)
    o_used = num_unused - num_missing + tl.cumsum(m_used.to(tl.int32)) - 1
    o_victim = num_rows - num_missing + b_unused
    b_place = tl.where(m_used, o_used, tl.where(m_victim, o_victim, b_unused - num_missing))
    tl.store(p_order + b_place, b_order, mask=m_r)
    tl.store(p_victims + b_unused, b_order, mask=m_victim)
    tl.debug_barrier()
    tl.store(p_clock + i_request, clock)
    # [TOPK]: the n-th missing position takes the row of the n-th victim.
    b_victim = tl.load(p_victims + b_missing, mask=m_miss, other=0)
    b_old = tl.load(p_held + b_victim, mask=m_miss, other=-1)
    tl.store(p_row_of + b_old, -1, mask=m_miss & (b_old >= 0))
    tl.store(p_held + b_victim, b_position, mask=m_miss)
    tl.store(p_row_of + b_position, b_victim, mask=m_miss)
    b_row = tl.where(m_miss, b_victim, b_row)
    tl.store(
        p_rows + i_request * topk + o_k,
        tl.where(m_position, i_request * num_rows + b_row, -1),
        mask=o_k < topk,
    )


@dataclass(frozen=True)
class Plan:
    """What a call fetches; of a request the first `counts` entries are valid.

    Attributes:
        rows: int64 `[requests, topk]`, device rows after the call, -1 where no position.
        counts: int32 `[requests]`, rows fetched.
        missing: int32 `[requests, topk]`, positions fetched.
        victims: int32 `[requests, topk]`, the request's rows they are fetched into.
    """

    rows: Tensor
    counts: Tensor
    missing: Tensor
    victims: Tensor


class RequestLru:
    """The tables of all requests of one domain.

    Attributes:
        row_of: int32 `[requests, positions]`, the request's row that holds a position, or -1.
        held: int32 `[requests, R]`, the inverse.
        order: int32 `[requests, R]`, rows, least recently used first.

    Args:
        held: int32 `[requests, R]`, -1 for a free row; those are given first if `order` says so.
        order: int32 `[requests, R]`.
        num_positions: of each request.
    """

    def __init__(self, held: Tensor, order: Tensor, num_positions: int) -> None:
        check("held", held, torch.int32, ndim=2)
        check("order", order, torch.int32, shape=tuple(held.shape))
        self.held, self.order = held.clone(), order.clone()
        rows = torch.arange(held.shape[1], dtype=torch.int32, device=held.device).expand_as(held)
        # The last column catches free rows.
        row_of = held.new_full((len(held), num_positions + 1), -1)
        row_of.scatter_(1, torch.where(held < 0, num_positions, held).long(), rows)
        self.row_of = row_of[:, :-1].contiguous()
        self.clock = torch.zeros_like(held[:, 0])
        self._used = torch.zeros_like(held)

    @property
    def state(self) -> tuple[Tensor, ...]:
        """Everything a call changes."""
        return self.row_of, self.held, self.order, self.clock, self._used

    def plan(self, positions: Tensor) -> Plan:
        """Make all rows of a call resident.

        Args:
            positions: int32 `[requests, topk]`, distinct in a request, -1 no position; at most R
                of them.
        """
        requests, num_rows = self.held.shape
        check("positions", positions, torch.int32, ndim=2)
        topk = positions.shape[1]
        if len(positions) != requests or topk > num_rows:
            raise ValueError(
                f"{tuple(positions.shape)} positions for {requests} requests of {num_rows} rows"
            )
        rows = torch.empty(positions.shape, dtype=torch.int64, device=positions.device)
        missing, victims = torch.empty_like(positions), torch.empty_like(positions)
        counts = torch.empty_like(positions[:, 0])
        _plan_kernel[(requests,)](
            positions,
            self.row_of,
            self.held,
            self.order,
            self._used,
            self.clock,
            rows,
            missing,
            victims,
            counts,
            topk,
            self.row_of.shape[1],
            num_rows,
            TOPK=triton.next_power_of_2(topk),
            ROWS=triton.next_power_of_2(num_rows),
            num_warps=NUM_WARPS,
        )
        return Plan(rows, counts, missing, victims)


_TABLES = ("positions", "row_of", "held", "order", "used", "clock", "missing", "victims", "counts")
VARIANTS = (
    Variant(
        "request LRU: plan",
        _plan_kernel,
        {
            **{f"p_{name}": "*i32:16" for name in _TABLES},
            "p_rows": "*i64:16",
            "topk": "i32:16",
            "num_positions": "i32:16",
            "num_rows": "i32:16",
        },
        {"TOPK": 2048, "ROWS": 4096},
        num_warps=NUM_WARPS,
        hot=True,
    ),
)
