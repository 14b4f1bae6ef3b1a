"""One forward call of a domain: the paper's step, every stage on one screen.

    translate -> plan -> transfer -> remap -> write -> attend

A domain is the layers that consume one selection and therefore share one map. The first layer of
a domain runs the step; bytes move for all its layers before the map changes (paper section 5.2).
From then on the map is frozen until the last layer has attended: the others follow, they write
and read by the homes the step returned.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_ula.kernels import dispatch
from vllm_ula.planner import Planner
from vllm_ula.planning import Planning
from vllm_ula.records import Call, CallPlan, Counts, Homes, LayerRows, Moved
from vllm_ula.residency import Residency
from vllm_ula.transfer import transfer

_NONE = torch.empty(0, dtype=torch.int64)


@dataclass(slots=True)
class Domain:
    """The layers of one selection with how their calls are planned and what they counted.

    Attributes:
        planning: holds the domain's map and planner.
        layers: rows of each layer; all have the D and H of the map.
        homes: of the last step, for the layers that follow the first one.
    """

    planning: Planning
    layers: list[LayerRows]
    homes: Homes = field(default_factory=lambda: Homes(_NONE, _NONE.view(0, 0)))
    counts: Counts = field(default_factory=Counts)
    plan_seconds: list[float] = field(default_factory=list)
    transfer_seconds: list[float] = field(default_factory=list)

    @property
    def residency(self) -> Residency:
        """The map."""
        return self.planning.residency

    @property
    def planner(self) -> Planner:
        """Recency of the device rows."""
        return self.planning.planner

    def count(self, plan: CallPlan, moved: Moved) -> None:
        """Add one call to the totals; its homes have changed already."""
        num_in_place = in_place_host = plan.in_place.numel()
        if num_in_place:
            in_place = self.residency.homes(plan.in_place)
            in_place_host = int((in_place >= self.residency.num_device).sum())
        counts = self.counts
        counts.selected += plan.promoted + num_in_place
        counts.hits += plan.promoted - moved.fetched
        counts.in_place_device += num_in_place - in_place_host
        counts.in_place_host += in_place_host
        counts.fetched += moved.fetched
        counts.written_back += moved.written_back
        counts.fetched_bytes += moved.fetched_bytes
        counts.written_back_bytes += moved.written_back_bytes
        counts.exchanges += bool(moved.fetched or moved.written_back)

    def check_integrity(self) -> None:
        """Raise IntegrityError if map or planner contradict themselves or each other."""
        self.planning.check_integrity()


def run(domain: Domain, call: Call) -> Homes:
    """Make every row of a call readable and every row to be written writable.

    Args:
        domain: changed in place.
        call: what the call writes and selects.

    Returns:
        Where each layer must write its rows before it reads, and where it reads; also kept in
        `domain.homes`. Valid until the next step of any domain of the rank.
    """
    start = time.perf_counter()
    plan = domain.planning.plan(call)
    planned = time.perf_counter()
    moved = transfer(domain.layers, plan.exchange)
    transferred = time.perf_counter()
    domain.homes = domain.planning.complete(call, plan)
    domain.count(plan, moved)
    domain.plan_seconds.append(planned - start + time.perf_counter() - transferred)
    if moved.fetched or moved.written_back:
        domain.transfer_seconds.append(transferred - planned)
    return domain.homes


def write(layer: LayerRows, homes: Tensor, rows: Tensor) -> None:
    """Write rows `[W, width]` of one layer, any float dtype, to the homes `run` returned."""
    dispatch.scatter(layer.device, layer.host, homes, rows)
