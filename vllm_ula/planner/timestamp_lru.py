"""Exact LRU by a timestamp per device row: the oracle PB-LRU is measured against."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from vllm_ula.errors import IntegrityError
from vllm_ula.planner.base import Planner
from vllm_ula.records import DeviceSlots

_DEAD, _NEVER = -1, torch.iinfo(torch.int64).max


class TimestampLru(Planner):
    """Victims in order of the last call that touched them; ties by the lower slot."""

    bytes_per_device_slot = 8

    def __init__(self, num_device: int, device: torch.device | str = "cpu") -> None:
        super().__init__(num_device, device)
        self.clock = 0
        self.stamp = torch.zeros(num_device, dtype=torch.int64, device=self.device)

    @override
    def begin_call(self) -> None:
        self.clock += 1

    @override
    def touch(self, slots: DeviceSlots) -> None:
        self.stamp[slots.index] = self.clock

    @override
    def admit(self, slots: DeviceSlots) -> None:
        self.touch(slots)

    @override
    def _coldest(self, num: int, dead: Tensor, protected: Tensor) -> Tensor:
        key = self.stamp.masked_fill(dead, _DEAD).masked_fill_(protected, _NEVER)
        return torch.sort(key, stable=True).indices[:num]

    @override
    def check_integrity(self) -> None:
        if bool((self.stamp > self.clock).any()):
            raise IntegrityError(f"a row was touched after the clock, {self.clock}")
