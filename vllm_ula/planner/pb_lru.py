"""PB-LRU: LRU over recency buckets instead of rows (paper section 5.1).

    period      0 .. period-B+1 | period-B+2 ... period-1 | period
    level            0          |      1     ...   B-2    |  B-1
                   cold         |  older  ->  newer       |  open

A row's bucket is the period in which it was last touched. A period ends at the first call after
`D / B` rows were admitted in it, so that B buckets together remember as many evictions as the
pool has rows, however many hits there are between two of them. What is older is cold and not told
apart any more. Rows the current call uses are protected by the caller; that is the paper's
current bucket.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from vllm_ula.errors import IntegrityError
from vllm_ula.planner.base import Planner
from vllm_ula.records import DeviceSlots


class PbLru(Planner):
    """Victims dead first, then cold, then bucket by bucket from older to newer.

    Args:
        num_device: device rows D, > 0.
        num_buckets: recency buckets B, >= 2, the cold one included.
        device: where the recency metadata lives.
    """

    bytes_per_device_slot = 4

    def __init__(
        self, num_device: int, num_buckets: int = 64, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(num_device, device)
        self.num_buckets = num_buckets
        self.rows_per_bucket = max(num_device // num_buckets, 1)
        self.period = num_buckets
        self.admitted = 0
        self.bucket = torch.zeros(num_device, dtype=torch.int32, device=self.device)

    @override
    def begin_call(self) -> None:
        if self.admitted >= self.rows_per_bucket:
            self.period += 1
            self.admitted = 0

    @override
    def touch(self, slots: DeviceSlots) -> None:
        self.bucket[slots.index] = self.period

    @override
    def admit(self, slots: DeviceSlots) -> None:
        self.touch(slots)
        self.admitted += len(slots)

    def levels(self) -> Tensor:
        """int32 `[D]`: 0 for cold rows to `num_buckets - 1` for rows of the open bucket."""
        return (self.bucket - (self.period - self.num_buckets + 1)).clamp_min_(0)

    @override
    def _coldest(self, num: int, dead: Tensor, protected: Tensor) -> Tensor:
        # One rank more than there are levels in front for the dead, one behind for the protected.
        never = self.num_buckets + 1
        rank = (self.levels() + 1).masked_fill_(dead, 0).masked_fill_(protected, never)
        reach = torch.bincount(rank, minlength=never + 1).cumsum(0)
        last = int(torch.searchsorted(reach, num))
        whole = (rank < last).nonzero().squeeze(1)
        partial = (rank == last).nonzero().squeeze(1)[: num - whole.numel()]
        victims = torch.cat((whole, partial))
        return victims[torch.argsort(rank[victims], stable=True)]

    @override
    def check_integrity(self) -> None:
        if bool((self.bucket > self.period).any()):
            raise IntegrityError(f"a row lies in a bucket after the open one, {self.period}")
