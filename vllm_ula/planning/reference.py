"""Planning in plain torch, on any device: the reference of the compiled one."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from vllm_ula.planning.base import NOTHING, PlannerPlanning
from vllm_ula.records import Call, CallPlan, CountedPlan, DeviceSlots, Exchange, Homes


class ReferencePlanning(PlannerPlanning):
    """Every set is a mask over all rows: slow and obvious."""

    @override
    def plan(self, call: Call) -> CountedPlan:
        residency, planner, marks = self.residency, self.planner, self._marks
        planner.begin_call()
        homes = self._translate(call)
        num_device = residency.num_device
        on_host = homes.written >= num_device
        on_device = (homes.written >= 0) & ~on_host
        rewritten = call.written[on_device]
        planner.admit(DeviceSlots(homes.written[on_device]), rewritten)
        room = num_device - planner.num_current()
        placed = call.written[on_host & call.written_by_decode][:room]
        seated = torch.cat((rewritten, placed))
        selected = _distinct(marks, call.selection)
        promoted = self._promote(call, seated, room - placed.numel())
        promoted_homes = residency.homes(promoted)
        planner.touch(DeviceSlots(promoted_homes[promoted_homes < num_device]))

        missing = promoted[promoted_homes >= num_device]
        unwritten = _is_in(marks, missing, call.written[on_host]).logical_not_()
        placed = placed[~_is_in(marks, placed, missing)]
        incoming = torch.cat((missing, placed))
        fetch = torch.cat((unwritten, torch.zeros_like(placed, dtype=torch.bool)))
        return CountedPlan(
            exchange=self._exchange(call.written[on_host], incoming, fetch),
            homes=homes,
            promoted=promoted.numel(),
            in_place=selected[~_is_in(marks, selected, promoted)],
        )

    @override
    def complete(self, call: Call, plan: CallPlan) -> Homes:
        self.residency.remap(plan.exchange)
        self.planner.admit(plan.exchange.victims, plan.exchange.incoming)
        self.residency.mark_live(call.written[call.written >= 0])
        assert isinstance(plan, CountedPlan)
        self.count(plan)
        return self._translate(call)

    @property
    def _marks(self) -> Tensor:
        return self.scratch.marks.view(torch.bool)

    def _translate(self, call: Call) -> Homes:
        residency = self.residency
        return Homes(residency.translate(call.written), residency.translate(call.selection))

    def _promote(self, call: Call, seated: Tensor, room: int) -> Tensor:
        """Distinct slots selected by the first decode tokens that fit `room` rows together.

        Rows in `seated` have a device row already and take no room.
        """
        selection, marks = call.selection[call.decode], self._marks
        num_tokens = selection.shape[0]
        token = torch.arange(num_tokens, device=marks.device).unsqueeze(1)
        kept = selection >= 0
        slots, inverse = torch.unique(selection[kept], return_inverse=True)
        first = torch.full_like(slots, num_tokens)
        first.scatter_reduce_(0, inverse, token.expand_as(selection)[kept], "amin")
        wanted = torch.bincount(first[~_is_in(marks, slots, seated)], minlength=num_tokens)
        num_fitting = int((wanted.cumsum(0) <= room).sum())
        promoted: Tensor = slots[first < num_fitting]
        return promoted

    def _exchange(self, written_on_host: Tensor, incoming: Tensor, fetch: Tensor) -> Exchange:
        """Victims for the incoming rows, and dead device rows for what else is written."""
        residency, planner = self.residency, self.planner
        dead = residency.dead_device_rows()
        others = written_on_host[~_is_in(self._marks, written_on_host, incoming)]
        incoming = torch.cat((incoming, others))
        fetch = torch.cat((fetch, torch.zeros_like(others, dtype=torch.bool)))
        victims = planner.choose(incoming, num_optional=others.numel())
        if not len(victims):
            return NOTHING
        incoming, fetch = incoming[: len(victims)], fetch[: len(victims)]
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
