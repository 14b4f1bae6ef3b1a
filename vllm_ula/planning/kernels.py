"""Planning by map operations, on the device where the map lives and without telling the host.

    seat  claim  touch  victims   |  exchange  |  remap

The host knows shapes only, so nothing waits and a CUDA graph can replay it. Lists have the length
of the worst case, and what a call counted is read later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from vllm_ula.errors import IntegrityError
from vllm_ula.kernels import dispatch, tables
from vllm_ula.kernels.tables import Buffers, CallTables, MapTables
from vllm_ula.planner import BucketAge
from vllm_ula.planning.base import Planning
from vllm_ula.records import Call, CallPlan, Counts, DeviceSlots, Exchange, Homes, HostSlots
from vllm_ula.residency import Residency

CALLS_BEFORE_REBASE = 1 << 24


@dataclass(frozen=True)
class Marks:
    """Memory that map operations need during a call only; all domains of a rank share it.

    Attributes:
        claims: int32 `[N]`, all 0 between calls.
        roles: uint8 `[N]`, all 0 between calls.
        buffers: of the call's lists and homes.
    """

    claims: Tensor
    roles: Tensor
    buffers: Buffers

    @classmethod
    def of(cls, residency: Residency) -> Marks:
        """For domains with as many logical slots as `residency`."""
        num, device = residency.num_logical, residency.home.device
        return cls(
            torch.zeros(num, dtype=torch.int32, device=device),
            torch.zeros(num, dtype=torch.uint8, device=device),
            Buffers(device),
        )


class KernelPlanning(Planning):
    """PB-LRU in map operations: see `kernels/tables.py`.

    Args:
        residency: the domain's map.
        marks: of the rank.
        num_buckets: recency buckets B, 2 to `tables.MAX_BUCKETS`.
        bucket_age: what fills a bucket.
    """

    def __init__(
        self,
        residency: Residency,
        marks: Marks,
        num_buckets: int = 64,
        bucket_age: BucketAge = BucketAge.ADMITTED,
    ) -> None:
        super().__init__(residency)
        self.bucket_age = bucket_age
        self._buffers = marks.buffers
        self.tables = MapTables.of(
            residency.home,
            residency.owner,
            residency.live,
            num_buckets,
            marks.claims,
            marks.roles,
        )
        self._call: CallTables | None = None
        self._num_calls = 0
        self._told = [0] * tables.NUM_TOTALS
        self._totals = _Totals(self.tables.totals)

    @override
    def plan(self, call: Call) -> CallPlan:
        if self._num_calls >= CALLS_BEFORE_REBASE:
            self._num_calls = 0
            self.tables.rebase()
        self._num_calls += 1
        asked = self._call = CallTables.of(
            call.written,
            call.written_by_decode,
            call.selection,
            call.decode,
            self.residency.num_device,
            self._buffers,
        )
        dispatch.seat(self.tables, asked, self.bucket_age.value)
        dispatch.claim(self.tables, asked)
        dispatch.touch(self.tables, asked)
        dispatch.victims(self.tables, asked)
        exchange = Exchange(
            asked.incoming,
            DeviceSlots(asked.victims),
            HostSlots(asked.vacated),
            asked.fetch,
            asked.write_back,
            self.tables.num_exchanged,
        )
        return CallPlan(exchange, Homes(asked.written_homes, asked.selected_homes))

    @override
    def complete(self, call: Call, plan: CallPlan) -> Homes:
        assert self._call is not None
        dispatch.remap(self.tables, self._call)
        self._call = None
        return plan.homes

    @property
    @override
    def counts_lag(self) -> bool:
        return self.tables.home.is_cuda

    @override
    def counted(self) -> Counts:
        totals = self._totals.latest()
        new = [total - told for total, told in zip(totals, self._told, strict=True)]
        self._told = totals
        in_place_device, in_place_host = new[tables.IN_PLACE_DEVICE], new[tables.IN_PLACE_HOST]
        return Counts(
            selected=new[tables.PROMOTED] + in_place_device + in_place_host,
            hits=new[tables.PROMOTED] - new[tables.FETCHED],
            fetched=new[tables.FETCHED],
            written_back=new[tables.WRITTEN_BACK],
            in_place_device=in_place_device,
            in_place_host=in_place_host,
            exchanges=new[tables.EXCHANGES],
        )

    @override
    def bury(self, blocks: Tensor, block_size: int) -> None:
        dispatch.bury(blocks, block_size, self.tables)

    @override
    def check_integrity(self) -> None:
        self.residency.check_integrity()
        mine = self.tables
        dead = mine.stamp & 1 == 1
        if bool((dead & ~self.residency.dead_device_rows()).any()):
            raise IntegrityError("the planner takes a live row for dead")
        clock = mine.state[tables.CLOCK]
        if bool((mine.stamp >> 1 > clock).any()):
            raise IntegrityError(f"a row was used after call {int(clock)}")
        if bool(mine.marks.any()) or bool(mine.roles.any()):
            raise IntegrityError("a call has left marks behind")


class _Totals:
    """Totals of a device, read without waiting for it: as of a call or two ago on a GPU."""

    def __init__(self, totals: Tensor) -> None:
        self._totals = totals
        self._read = [0] * totals.numel()
        self._copied: tuple[Tensor, Any] | None = None

    def latest(self) -> list[int]:
        """The totals, as far as the host knows them."""
        if not self._totals.is_cuda:
            return [int(total) for total in self._totals.tolist()]
        if self._copied is not None and self._copied[1].query():
            self._read = [int(total) for total in self._copied[0].tolist()]
            self._copied = None
        if self._copied is None:
            copy = torch.empty_like(self._totals, device="cpu", pin_memory=True)
            copy.copy_(self._totals, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied = copy, event
        return self._read
