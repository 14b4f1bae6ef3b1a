"""The planners in plain torch, on any device: what the compiled ones are held against."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from vllm_ula.errors import IntegrityError
from vllm_ula.planner.base import BucketAge, Planner
from vllm_ula.records import DeviceSlots

_NEVER = torch.iinfo(torch.int64).max
_DEAD = -1


class MaskPlanner(Planner):
    """Dead and current rows as masks; subclasses rank the rest.

    Args:
        num_device: device rows D, > 0.
        device: where the masks live.
    """

    def __init__(self, num_device: int, device: torch.device | str = "cpu") -> None:
        super().__init__(num_device)
        self._dead = torch.zeros(num_device, dtype=torch.bool, device=device)
        self._current = torch.zeros(num_device, dtype=torch.bool, device=device)

    @override
    def begin_call(self) -> None:
        self._current.zero_()

    @override
    def touch(self, slots: DeviceSlots) -> None:
        self._current[slots.index] = True

    @override
    def admit(self, slots: DeviceSlots, owners: Tensor) -> None:
        self.touch(slots)
        self._dead[slots.index] = False

    @override
    def bury(self, slots: DeviceSlots) -> None:
        self._dead[slots.index] = True

    @override
    def num_current(self) -> int:
        return int(self._current.sum())

    @override
    def dead(self) -> Tensor:
        return self._dead.clone()

    @override
    def _coldest(self, incoming: Tensor, required: int) -> Tensor:
        rank = self.ranks().masked_fill(self._dead, _DEAD).masked_fill_(self._current, _NEVER)
        num = max(required, min(int((rank == _DEAD).sum()), incoming.numel()))
        return torch.sort(rank, stable=True).indices[:num]

    @abstractmethod
    def ranks(self) -> Tensor:
        """int64 `[D]`, >= 0: rows of a lower rank are given up before those of a higher one."""

    @override
    def check_integrity(self) -> None:
        if bool((self.ranks() < 0).any()):
            raise IntegrityError("a rank is negative")


class ReferencePbLru(MaskPlanner):
    """See `planner/pb_lru.py`."""

    def __init__(
        self,
        num_device: int,
        num_buckets: int = 64,
        bucket_age: BucketAge = BucketAge.ADMITTED,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(num_device, device)
        self.num_buckets = num_buckets
        self.bucket_age = bucket_age
        self.period = num_buckets
        self.used = 0
        self._admitted = 0
        self.bucket = torch.zeros(num_device, dtype=torch.int64, device=device)

    @override
    def begin_call(self) -> None:
        rows_per_bucket = max(self.num_device // self.num_buckets, 1)
        self.used += {
            BucketAge.CALLS: rows_per_bucket,
            BucketAge.TOUCHED: self.num_current(),
            BucketAge.ADMITTED: self._admitted,
        }[self.bucket_age]
        if self.used >= rows_per_bucket:
            self.period += 1
            self.used = 0
        self._admitted = 0
        super().begin_call()

    @override
    def touch(self, slots: DeviceSlots) -> None:
        super().touch(slots)
        self.bucket[slots.index] = self.period

    @override
    def admit(self, slots: DeviceSlots, owners: Tensor) -> None:
        super().admit(slots, owners)
        self._admitted += len(slots)

    @override
    def ranks(self) -> Tensor:
        """0 for cold rows to `num_buckets - 1` for rows of the open bucket."""
        return (self.bucket - (self.period - self.num_buckets + 1)).clamp_min_(0)


class ReferenceTimestampLru(MaskPlanner):
    """See `planner/timestamp_lru.py`."""

    def __init__(self, num_device: int, device: torch.device | str = "cpu") -> None:
        super().__init__(num_device, device)
        self.clock = 0
        self.used_at = torch.zeros(num_device, dtype=torch.int64, device=device)

    @override
    def begin_call(self) -> None:
        super().begin_call()
        self.clock += 1

    @override
    def touch(self, slots: DeviceSlots) -> None:
        super().touch(slots)
        self.used_at[slots.index] = self.clock

    @override
    def ranks(self) -> Tensor:
        return self.used_at
