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

from vllm_ula.kernels.reference.scatter import scatter
from vllm_ula.planner import Planner
from vllm_ula.records import (
    Call,
    CallPlan,
    Counts,
    DeviceSlots,
    Exchange,
    Homes,
    HostSlots,
    LayerRows,
    Moved,
)
from vllm_ula.residency import Residency
from vllm_ula.transfer import transfer

_NONE = torch.empty(0, dtype=torch.int64)
NOTHING = Exchange(_NONE, DeviceSlots(_NONE), HostSlots(_NONE), _NONE.bool(), _NONE.bool())


@dataclass(slots=True)
class Domain:
    """The layers of one selection with their map, their planner and what they counted.

    Attributes:
        layers: rows of each layer; all have the D and H of `residency`.
        marks: bool `[N]` scratch, all false between calls; domains of a rank share it.
        homes: of the last step, for the layers that follow the first one.
    """

    residency: Residency
    planner: Planner
    layers: list[LayerRows]
    marks: Tensor
    homes: Homes = field(default_factory=lambda: Homes(_NONE, _NONE.view(0, 0)))
    counts: Counts = field(default_factory=Counts)
    plan_seconds: list[float] = field(default_factory=list)
    transfer_seconds: list[float] = field(default_factory=list)

    def count(self, plan: CallPlan, moved: Moved) -> None:
        """Add one call to the totals; its homes have changed already."""
        in_place = self.residency.homes(plan.in_place)
        in_place_host = int((in_place >= self.residency.num_device).sum()) if len(in_place) else 0
        counts = self.counts
        counts.selected += plan.promoted.numel() + in_place.numel()
        counts.hits += plan.promoted.numel() - moved.fetched
        counts.in_place_device += in_place.numel() - in_place_host
        counts.in_place_host += in_place_host
        counts.fetched += moved.fetched
        counts.written_back += moved.written_back
        counts.fetched_bytes += moved.fetched_bytes
        counts.written_back_bytes += moved.written_back_bytes
        counts.exchanges += bool(moved.fetched or moved.written_back)

    def check_integrity(self) -> None:
        """Raise IntegrityError if map or planner contradict themselves."""
        self.residency.check_integrity()
        self.planner.check_integrity()


def run(domain: Domain, call: Call) -> Homes:
    """Make every row of a call readable and every row to be written writable.

    Args:
        domain: changed in place.
        call: what the call writes and selects.

    Returns:
        Where each layer must write its rows before it reads, and where it reads; also kept in
        `domain.homes`.
    """
    start = time.perf_counter()
    residency, planner = domain.residency, domain.planner
    planner.begin_call()
    homes = translate(residency, call)
    plan = plan_call(domain, call, homes)
    planned = time.perf_counter()
    domain.plan_seconds.append(planned - start)

    moved = transfer(domain.layers, plan.exchange)
    residency.remap(plan.exchange)
    planner.touch(plan.touched)
    planner.admit(plan.admitted)
    residency.mark_live(call.written)
    if moved.fetched or moved.written_back:
        domain.transfer_seconds.append(time.perf_counter() - planned)

    domain.count(plan, moved)
    domain.homes = translate(residency, call) if len(plan.exchange) else homes
    return domain.homes


def translate(residency: Residency, call: Call) -> Homes:
    """Homes of what a call writes and selects, as of now."""
    return Homes(residency.homes(call.written), residency.translate(call.selection))


def write(layer: LayerRows, homes: Tensor, rows: Tensor) -> None:
    """Write rows `[W, width]` of one layer to the homes `run` returned."""
    scatter(layer.device, layer.host, homes, rows)


def plan_call(domain: Domain, call: Call, homes: Homes) -> CallPlan:
    """Decide who gets a device row, in this order; changes nothing.

    1. rows being written keep the device rows they have;
    2. rows that decode tokens write, as far as there is room;
    3. the selections of decode tokens, in order, while they fit together;
    4. other rows being written take what is dead.

    What is left over is written to, and read from, where it lives: no call can fail. A decode
    call whose rows are all on the device only touches them.
    """
    residency, marks, num_device = domain.residency, domain.marks, domain.residency.num_device
    written_on_host = homes.written >= num_device
    on_host = written_on_host.any() | (homes.selected >= num_device).any()
    if not bool(on_host | ~call.decode.all()):
        touched = DeviceSlots(_distinct(marks[:num_device], homes.selected))
        return CallPlan(
            exchange=NOTHING,
            touched=touched,
            admitted=DeviceSlots(homes.written),
            promoted=residency.owners(touched),
            in_place=_NONE,
        )

    selected = _distinct(marks, call.selection)
    rewritten = homes.written[~written_on_host]
    protected = torch.zeros(num_device, dtype=torch.bool, device=marks.device)
    protected[rewritten] = True
    room = num_device - int(protected.sum())
    placed = call.written[written_on_host & call.written_by_decode][:room]
    seated = torch.cat((call.written[~written_on_host], placed))
    promoted = _promote(marks, call, selected, seated, room - placed.numel())
    promoted_homes = residency.homes(promoted)
    read = promoted_homes[promoted_homes < num_device]
    protected[read] = True

    missing = promoted[promoted_homes >= num_device]
    unwritten = _is_in(marks, missing, call.written).logical_not_()
    placed = placed[~_is_in(marks, placed, missing)]
    incoming = torch.cat((missing, placed))
    fetch = torch.cat((unwritten, torch.zeros_like(placed, dtype=torch.bool)))
    exchange = _exchange(domain, call.written[written_on_host], incoming, fetch, protected)
    return CallPlan(
        exchange=exchange,
        touched=DeviceSlots(read),
        admitted=DeviceSlots(torch.cat((rewritten, exchange.victims.index))),
        promoted=promoted,
        in_place=selected[~_is_in(marks, selected, promoted)],
    )


def _promote(marks: Tensor, call: Call, selected: Tensor, seated: Tensor, room: int) -> Tensor:
    """Distinct slots selected by the first decode tokens that fit `room` rows together.

    Rows in `seated` have a device row already and take no room.
    """
    if not bool(call.decode.all()):
        selected = _distinct(marks, call.selection[call.decode])
    if selected.numel() <= room:
        return selected
    selection = call.selection[call.decode]
    token = torch.arange(selection.shape[0], device=marks.device).unsqueeze(1)
    kept = selection >= 0
    slots, inverse = torch.unique(selection[kept], return_inverse=True)
    first = torch.full_like(slots, selection.shape[0])
    first.scatter_reduce_(0, inverse, token.expand_as(selection)[kept], "amin")
    wanted = torch.bincount(first[~_is_in(marks, slots, seated)], minlength=selection.shape[0])
    num_fitting = int((wanted.cumsum(0) <= room).sum())
    promoted: Tensor = slots[first < num_fitting]
    return promoted


def _exchange(
    domain: Domain, written_on_host: Tensor, incoming: Tensor, fetch: Tensor, protected: Tensor
) -> Exchange:
    """Victims for the incoming rows, and dead device rows for what else is written."""
    residency = domain.residency
    dead = residency.dead_device_rows()
    others = written_on_host[~_is_in(domain.marks, written_on_host, incoming)]
    vacant = int((dead & ~protected).sum()) - incoming.numel()
    others = others[: max(vacant, 0)]
    incoming = torch.cat((incoming, others))
    fetch = torch.cat((fetch, torch.zeros_like(others, dtype=torch.bool)))
    victims = domain.planner.choose(incoming.numel(), dead, protected)
    vacated = residency.host_slots(residency.homes(incoming))
    return Exchange(incoming, victims, vacated, fetch, write_back=~dead[victims.index])


def _distinct(marks: Tensor, selection: Tensor) -> Tensor:
    """Distinct slots of a -1 padded selection, ascending, int64 `[d]`."""
    flat = selection[selection >= 0]
    marks[flat] = True
    slots = marks.nonzero().squeeze(1)
    marks[slots] = False
    return slots


def _is_in(marks: Tensor, slots: Tensor, members: Tensor) -> Tensor:
    """Which of the slots are members: bool like `slots`."""
    marks[members] = True
    found: Tensor = marks[slots]
    marks[members] = False
    return found
