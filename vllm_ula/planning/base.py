"""The contract of planning: two phases around the transfer of a call's bytes.

plan       translate, split hits and misses, choose victims; the map stays as it is
(transfer  the bytes move)
complete   the map changes, homes are final
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from vllm_ula.arrays import filled
from vllm_ula.errors import IntegrityError
from vllm_ula.planner import Planner
from vllm_ula.records import (
    Call,
    CallPlan,
    CountedPlan,
    Counts,
    DeviceSlots,
    Exchange,
    Homes,
    HostSlots,
)
from vllm_ula.residency import Residency

NO_SLOTS = torch.empty(0, dtype=torch.int64)
NOTHING = Exchange(
    NO_SLOTS, DeviceSlots(NO_SLOTS), HostSlots(NO_SLOTS), NO_SLOTS.bool(), NO_SLOTS.bool()
)


@dataclass
class Scratch:
    """Memory that planning needs during a call only; all domains of a rank share it.

    Attributes:
        marks: uint8 `[N]`, all 0 between calls.
        buffers: of host memory, grown as calls need them, by name; and the same as tensors.
        homes: views of two of the buffers, of the last call.
    """

    marks: Tensor
    buffers: dict[str, tuple[NDArray[Any], Tensor]] = field(default_factory=dict)
    homes: Homes | None = None

    @classmethod
    def of(cls, residency: Residency) -> Scratch:
        """For domains with as many logical slots as `residency`."""
        home = residency.home
        if home.device.type != "cpu":
            return cls(torch.zeros(home.numel(), dtype=torch.uint8, device=home.device))
        return cls(torch.from_numpy(filled(home.numel(), 0, np.uint8)))

    def buffer(
        self, name: str, num: int, dtype: torch.dtype = torch.int64
    ) -> tuple[NDArray[Any], Tensor]:
        """At least `num` elements, left alone until the buffer is asked for again."""
        found = self.buffers.get(name)
        if found is None or len(found[0]) < num:
            # Half as much again: batches that grow by one request do not allocate every time.
            self.homes = None
            tensor = torch.empty(max(num * 3 // 2, 64), dtype=dtype)
            found = self.buffers[name] = tensor.numpy(), tensor
        return found


class Planning(ABC):
    """Plans the calls of one domain.

    Device rows go, in this order:

    1. to rows being written that have one;
    2. to rows that decode tokens write, as far as there is room;
    3. to the selections of decode tokens, in order, while they fit together;
    4. what is dead, to other rows being written.

    What is left over is written to, and read from, where it lives: no call can fail.

    Args:
        residency: the domain's map.
    """

    def __init__(self, residency: Residency) -> None:
        self.residency = residency

    @abstractmethod
    def plan(self, call: Call) -> CallPlan:
        """Decide what a call does; the map stays as it is.

        Its records are valid until the next call of any domain of the rank.
        """

    @abstractmethod
    def complete(self, call: Call, plan: CallPlan) -> Homes:
        """The bytes have moved: change the map.

        Returns:
            Where the rows of the call live now, valid as long as the plan.
        """

    @property
    def counts_lag(self) -> bool:
        """Whether the host learns of counts late, and asking for them costs a copy."""
        return False

    @abstractmethod
    def counted(self) -> Counts:
        """What calls counted, in rows, since this was last asked; a device may lag behind."""

    @abstractmethod
    def bury(self, blocks: Tensor, block_size: int) -> None:
        """Nobody reads these blocks again before writing them.

        Args:
            blocks: int64 `[m]`, distinct, where the map lives.
            block_size: tokens per block.
        """

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise IntegrityError if map or recency contradict themselves or each other."""


class PlannerPlanning(Planning):
    """Planning whose recency is a `Planner`, and whose host knows how many rows a call moves.

    Args:
        residency: the domain's map.
        planner: its recency; every row starts dead.
        scratch: of the rank.
    """

    def __init__(self, residency: Residency, planner: Planner, scratch: Scratch) -> None:
        super().__init__(residency)
        self.planner = planner
        self.scratch = scratch
        self._counts = Counts()
        planner.bury(DeviceSlots(torch.arange(residency.num_device)))

    def count(self, plan: CountedPlan) -> None:
        """Add one call to the totals; its homes have changed already."""
        num_in_place = in_place_host = plan.in_place.numel()
        if num_in_place:
            in_place = self.residency.homes(plan.in_place)
            in_place_host = int((in_place >= self.residency.num_device).sum())
        exchange, counts = plan.exchange, self._counts
        fetched = int(exchange.fetch.sum()) if len(exchange) else 0
        written_back = int(exchange.write_back.sum()) if len(exchange) else 0
        counts.selected += plan.promoted + num_in_place
        counts.hits += plan.promoted - fetched
        counts.in_place_device += num_in_place - in_place_host
        counts.in_place_host += in_place_host
        counts.fetched += fetched
        counts.written_back += written_back
        counts.exchanges += bool(fetched or written_back)

    @override
    def counted(self) -> Counts:
        counted, self._counts = self._counts, Counts()
        return counted

    @override
    def bury(self, blocks: Tensor, block_size: int) -> None:
        self.residency.mark_dead(blocks, block_size)
        offsets = torch.arange(block_size, device=blocks.device)
        homes = self.residency.homes((blocks.unsqueeze(1) * block_size + offsets).view(-1))
        self.planner.bury(DeviceSlots(homes[homes < self.residency.num_device]))

    @override
    def check_integrity(self) -> None:
        self.residency.check_integrity()
        self.planner.check_integrity()
        if bool((self.planner.dead() & ~self.residency.dead_device_rows()).any()):
            raise IntegrityError("the planner takes a live row for dead")
        if bool(self.scratch.marks.any()):
            raise IntegrityError("a call has left marks behind")
