"""UlaCache's own planners in replay: the very planning that serves, without the bytes."""

from __future__ import annotations

import time
from array import array

import numpy as np
import torch
from typing_extensions import override

from vllm_ula.planner.stamps import StampPlanner
from vllm_ula.planning import Scratch
from vllm_ula.planning.compiled import CompiledPlanning
from vllm_ula.records import Call
from vllm_ula.replay.policy import Policy, Served
from vllm_ula.residency import Residency
from vllm_ula.traces.events import Admission, Deaths, End, TracedCall


class ServingPolicy(Policy):
    """One domain with a shared device pool.

    Args:
        planner: a fresh one; its device rows are the pool.
        logical_slots: N, more than the device rows or as many.
        block_size: logical slots of a block.

    Attributes:
        plan_seconds: of every call so far.
        references: selected rows of every call so far, repetitions included.
    """

    def __init__(self, planner: StampPlanner, logical_slots: int, block_size: int) -> None:
        residency = Residency(planner.num_device, logical_slots - planner.num_device)
        self.planning = CompiledPlanning(residency, planner, Scratch.of(residency))
        self.block_size = block_size
        self.plan_seconds = array("d")
        self.references = array("q")

    @override
    def call(self, call: TracedCall) -> Served:
        decode = torch.from_numpy(call.decode)
        # Prefill tokens read their rows where they are: they cost and change nothing.
        asked = Call(
            written=torch.from_numpy(np.ascontiguousarray(call.written)),
            written_by_decode=decode,
            selection=torch.from_numpy(call.selection)[decode].contiguous(),
            decode=decode[decode],
        )
        start = time.perf_counter()
        plan = self.planning.plan(asked)
        exchange = plan.exchange
        fetched, written_back = int(exchange.fetch.sum()), int(exchange.write_back.sum())
        self.planning.complete(asked, plan)
        self.plan_seconds.append(time.perf_counter() - start)
        self.references.append(int((asked.selection >= 0).sum()))
        residency = self.planning.residency
        in_place = residency.homes(plan.in_place)
        on_host = int((in_place >= residency.num_device).sum())
        return Served(
            selected=plan.promoted + len(in_place),
            hits=plan.promoted - fetched,
            fetched=fetched,
            in_place_device=len(in_place) - on_host,
            in_place_host=on_host,
            written_back=written_back,
        )

    @override
    def deaths(self, deaths: Deaths) -> None:
        self.planning.bury(torch.from_numpy(deaths.blocks), self.block_size)

    @override
    def admit(self, admission: Admission) -> None:
        """Rows are known by the calls that write them."""

    @override
    def end(self, end: End) -> None:
        """Rows are known dead by `deaths`."""
