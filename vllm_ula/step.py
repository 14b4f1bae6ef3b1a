"""One forward call of a domain: the paper's step, every stage on one screen.

    translate -> plan -> transfer -> remap -> write -> attend

A domain is the layers that consume one selection and therefore share one map. The first layer of
a domain runs the step; bytes move for all its layers before the map changes (paper section 5.2).
From then on the map is frozen until the last layer has attended: the others follow, they wait for
their rows, then write and read by the homes the step returned.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from vllm_ula.kernels import dispatch
from vllm_ula.planning import Planning
from vllm_ula.records import Call, Counts, DeviceSlots, Exchange, Homes, HostSlots, LayerRows
from vllm_ula.residency import Residency
from vllm_ula.streams import CopyLane
from vllm_ula.transfer import transfer

_NONE = torch.empty(0, dtype=torch.int64)


@dataclass(slots=True)
class Domain:
    """The layers of one selection with how their calls are planned and what they counted.

    Attributes:
        planning: holds the domain's map and recency.
        layers: rows of each layer; all have the D and H of the map.
        lane: moves the rows of the layers that follow the first one; one for all domains of a rank,
            None if they move in program order.
        homes: of the last step, for the layers that follow the first one.
        counts: running totals; whoever reports them may start them anew.
    """

    planning: Planning
    layers: list[LayerRows]
    lane: CopyLane | None = None
    homes: Homes = field(default_factory=lambda: Homes(_NONE, _NONE.view(0, 0)))
    counts: Counts = field(default_factory=Counts)
    plan_seconds: list[float] = field(default_factory=list)
    transfer_seconds: list[float] = field(default_factory=list)

    @property
    def residency(self) -> Residency:
        """The map."""
        return self.planning.residency

    def wait(self, layer: int) -> None:
        """Before layer `layer` writes or reads: its rows have moved."""
        if self.lane is not None:
            self.lane.wait(layer)

    def count(self) -> Counts:
        """Add what was counted since this was last called to the totals."""
        counted = self.planning.counted()
        row_bytes = sum(layer.row_bytes for layer in self.layers)
        counted.fetched_bytes = counted.fetched * row_bytes
        counted.written_back_bytes = counted.written_back * row_bytes
        self.counts.add(counted)
        return counted

    def check_integrity(self) -> None:
        """Raise IntegrityError if map and recency contradict themselves or each other."""
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
    if domain.lane is not None:
        domain.lane.join()
    start = time.perf_counter()
    plan = domain.planning.plan(call)
    planned = time.perf_counter()
    _move(domain, plan.exchange)
    transferred = time.perf_counter()
    domain.homes = domain.planning.complete(call, plan)
    completed = time.perf_counter()
    if (
        not domain.planning.counts_lag
    ):  # a device is at work still: these would be times of launches
        if domain.count().exchanges:
            domain.transfer_seconds.append(transferred - planned)
        domain.plan_seconds.append(planned - start + completed - transferred)
    return domain.homes


def prepare(domain: Domain) -> None:
    """Move nothing once, so that a device knows where rows lie before a graph is captured."""
    where = domain.residency.home.device
    if where.type == "cpu":
        return
    slot, no = torch.zeros(1, dtype=torch.int64, device=where), torch.zeros(1, device=where)
    none = Exchange(slot, DeviceSlots(slot), HostSlots(slot), no.bool(), no.bool(), no.int())
    _move(domain, none)
    if domain.lane is not None:
        domain.lane.join()


def _move(domain: Domain, exchange: Exchange) -> None:
    """Move the rows of every layer, those of the first one now."""
    layers, lane = domain.layers, domain.lane
    if lane is None:
        transfer(layers, exchange)
        return
    transfer(layers[:1], exchange)
    lane.start([partial(transfer, [layer], exchange) for layer in layers[1:]])


def write(layer: LayerRows, homes: Tensor, rows: Tensor) -> None:
    """Write rows of one layer to the homes `run` returned.

    Args:
        layer: changed in place.
        homes: int64 `[W]`, -1 where nothing is written.
        rows: `[W, width]`, any float dtype.
    """
    dispatch.scatter(layer.device, layer.host, homes, rows)
