"""Planning compiled for the CPU: what a call costs is up to what it selects and writes.

One pass over the selection translates it, tells hits from misses and from repetitions, and
touches the hits; the stamps of the planner say which rows the call has seen. Slots on the host
have no stamp, so the pass marks them:

    MISSING     promoted from the host
    WRITTEN     on the host and written
    PLACED      on the host and written by a decode token, for which there is room
    IN_PLACE    selected, but not promoted
    COUNTED     seen while counting what one token needs; cleared at once
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from vllm_ula.planner.jit import compiled
from vllm_ula.planner.stamps import StampPlanner
from vllm_ula.planning.base import NO_SLOTS, NOTHING, PlannerPlanning, Scratch
from vllm_ula.records import Call, CallPlan, CountedPlan, DeviceSlots, Exchange, Homes, HostSlots
from vllm_ula.residency import Residency

Ints = NDArray[np.int64]
Slots = NDArray[np.int32]
Flags = NDArray[np.uint8]
Bools = NDArray[np.bool_]

DEAD = 1  # the flag of planner/stamps.py

MISSING, WRITTEN, PLACED, IN_PLACE, COUNTED = 1, 2, 4, 8, 16


class CompiledPlanning(PlannerPlanning):
    """Needs a planner with stamps; all arrays live in host memory."""

    planner: StampPlanner

    def __init__(self, residency: Residency, planner: StampPlanner, scratch: Scratch) -> None:
        super().__init__(residency, planner, scratch)
        self._home = residency.home.numpy()
        self._owner = residency.owner.numpy()
        self._live = residency.live.numpy()
        self._marks = scratch.marks.numpy()
        # Entries of the selection that the call's exchange may move: misses, and rows in place.
        self._missed: Ints = np.empty(0, dtype=np.int64)

    @override
    def plan(self, call: Call) -> CountedPlan:
        planner, buffer = self.planner, self.scratch.buffer
        planner.begin_call()
        selection = call.selection.numpy()
        num_written, num_selected = call.written.numel(), selection.size
        homes = self._homes(num_written, call.selection.shape)
        written_homes, _ = buffer("written homes", num_written)
        selected_homes, _ = buffer("selected homes", num_selected)
        incoming, incoming_tensor = buffer("incoming", num_written + num_selected)
        fetch, fetch_tensor = buffer("fetch", num_written + num_selected, torch.bool)
        in_place, in_place_tensor = buffer("in place", num_selected)
        missed, _ = buffer("missed", num_selected)
        most_touched = num_written + num_selected if planner.wants_touched else 0
        touched, _ = buffer("touched", most_touched)
        promoted, num, required, num_in_place, num_missed, current, new, revived, num_touched = (
            _pass(
                self._home,
                planner.stamp,
                planner.flags,
                self._marks,
                planner.clock,
                call.written.numpy(),
                call.written_by_decode.numpy(),
                selection,
                call.decode.numpy(),
                written_homes,
                selected_homes,
                incoming,
                fetch,
                in_place,
                missed,
                touched,
                planner.wants_touched,
            )
        )
        self._missed = missed[:num_missed]
        planner.stamped(current, new, revived, touched[:num_touched])
        exchange = NOTHING
        if num:
            victims, vacated, write_back = self._trade(incoming[:num], required)
            num = len(victims)
            exchange = Exchange(
                incoming_tensor[:num], victims, vacated, fetch_tensor[:num], write_back
            )
        return CountedPlan(
            exchange=exchange,
            homes=homes,
            promoted=promoted,
            in_place=in_place_tensor[:num_in_place] if num_in_place else NO_SLOTS,
        )

    def _homes(self, num_written: int, shape: torch.Size) -> Homes:
        """Views of the buffers of homes; kept, since calls of a step have the same shapes."""
        kept = self.scratch.homes
        if kept is None or kept.selected.shape != shape or kept.written.numel() != num_written:
            _, written = self.scratch.buffer("written homes", num_written)
            _, selected = self.scratch.buffer("selected homes", shape.numel())
            kept = Homes(written[:num_written], selected[: shape.numel()].view(shape))
            self.scratch.homes = kept
        return kept

    def _trade(self, incoming: Ints, required: int) -> tuple[DeviceSlots, HostSlots, Tensor]:
        """Victims of the incoming rows, the host rows they get for it, and which are live."""
        victims = self.planner.victims(incoming, required)
        num = len(victims)
        vacated, vacated_tensor = self.scratch.buffer("vacated", num)
        write_back, write_back_tensor = self.scratch.buffer("write back", num, torch.bool)
        _trade(self._home, self._owner, self._live, incoming[:num], victims, vacated, write_back)
        return (
            DeviceSlots(torch.from_numpy(victims)),
            HostSlots(vacated_tensor[:num]),
            write_back_tensor[:num],
        )

    @override
    def complete(self, call: Call, plan: CallPlan) -> Homes:
        exchange, written = plan.exchange, call.written.numpy()
        _mark_live(self._live, written)
        if len(exchange):
            incoming, victims = exchange.incoming.numpy(), exchange.victims.index.numpy()
            _remap(self._home, self._owner, incoming, victims, exchange.vacated.index.numpy())
            self.planner.renew(victims, incoming)
            _translate(self._home, written, plan.homes.written.numpy())
            selection, selected = call.selection.numpy(), plan.homes.selected.numpy()
            _translate_some(self._home, selection.reshape(-1), selected.reshape(-1), self._missed)
        assert isinstance(plan, CountedPlan)
        self.count(plan)
        return plan.homes

    @override
    def bury(self, blocks: Tensor, block_size: int) -> None:
        slots, slots_tensor = self.scratch.buffer("buried", blocks.numel() * block_size)
        num_device = self.residency.num_device
        num = _bury(self._home, self._live, num_device, blocks.numpy(), block_size, slots)
        self.planner.bury(DeviceSlots(slots_tensor[:num]))


@compiled
def _pass(
    home: Slots,
    stamp: Slots,
    flags: Flags,
    marks: Flags,
    clock: int,
    written: Ints,
    by_decode: Bools,
    selection: Ints,
    decode: Bools,
    written_homes: Ints,
    selected_homes: Ints,
    incoming: Ints,
    fetch: Bools,
    in_place: Ints,
    missed: Ints,
    touched: Ints,
    wants_touched: bool,
) -> tuple[int, int, int, int, int, int, int, int, int]:
    num_device = len(stamp)
    rewritten = revived = num_touched = 0
    for i in range(len(written)):
        slot = written[i]
        h = home[slot] if slot >= 0 else -1
        written_homes[i] = h
        if h < 0:
            continue
        if h < num_device:
            stamp[h] = clock
            rewritten += 1
            revived += flags[h] & DEAD
            flags[h] &= ~DEAD
            if wants_touched:
                touched[num_touched] = h
                num_touched += 1
        else:
            marks[slot] = WRITTEN
    room = num_device - rewritten
    for i in range(len(written)):
        if room and by_decode[i] and written_homes[i] >= num_device:
            marks[written[i]] |= PLACED
            room -= 1

    num_tokens, topk = selection.shape
    promoted = num_incoming = num_in_place = num_missed = hits = 0
    stop = num_tokens  # the first decode token whose selection does not fit, and all after it
    for t in range(num_tokens):
        if not decode[t]:
            continue
        if room < topk and _num_new(home, stamp, marks, clock, selection[t]) > room:
            stop = t
            break
        first = t * topk
        # Reads that may miss every cache stand alone, so that many of them are under way at once.
        for k in range(topk):
            slot = selection[t, k]
            selected_homes[first + k] = home[slot] if slot >= 0 else -1
        for k in range(topk):
            h = selected_homes[first + k]
            if h < 0:
                continue
            if h < num_device:
                s = stamp[h]
                if s <= clock:
                    stamp[h] = clock + 1
                    promoted += 1
                    if s < clock:
                        hits += 1
                        room -= 1
                        if wants_touched:
                            touched[num_touched] = h
                            num_touched += 1
                continue
            missed[num_missed] = first + k
            num_missed += 1
            slot = selection[t, k]
            if not marks[slot] & MISSING:
                room -= not marks[slot] & PLACED
                promoted += 1
                incoming[num_incoming] = slot
                fetch[num_incoming] = not marks[slot] & WRITTEN
                num_incoming += 1
                marks[slot] |= MISSING

    for t in range(num_tokens):
        if decode[t] and t < stop:
            continue
        for k in range(topk):
            slot = selection[t, k]
            if slot < 0:
                selected_homes[t * topk + k] = -1
                continue
            h = home[slot]
            selected_homes[t * topk + k] = h
            missed[num_missed] = t * topk + k
            num_missed += 1
            is_promoted = stamp[h] == clock + 1 if h < num_device else marks[slot] & MISSING
            if not is_promoted and not marks[slot] & IN_PLACE:
                marks[slot] |= IN_PLACE
                in_place[num_in_place] = slot
                num_in_place += 1

    num_required = num_incoming
    for placed in (True, False):
        for i in range(len(written)):
            slot = written[i]
            on_device = written_homes[i] < num_device
            if not on_device and not marks[slot] & MISSING and bool(marks[slot] & PLACED) == placed:
                incoming[num_incoming] = slot
                fetch[num_incoming] = False
                num_incoming += 1
                num_required += placed

    for i in range(num_incoming):
        marks[incoming[i]] = 0
    for i in range(num_in_place):
        marks[in_place[i]] = 0
    for i in range(len(written)):
        if written[i] >= 0:
            marks[written[i]] = 0
    current = rewritten + hits
    return (
        promoted,
        num_incoming,
        num_required,
        num_in_place,
        num_missed,
        current,
        rewritten,
        revived,
        num_touched,
    )


@compiled
def _num_new(home: Slots, stamp: Slots, marks: Flags, clock: int, selection: Ints) -> int:
    """Rows a token selects that neither have nor have been given room on the device."""
    num = 0
    for slot in selection:
        if slot < 0 or marks[slot] & COUNTED:
            continue
        h = home[slot]
        if stamp[h] < clock if h < len(stamp) else not marks[slot] & (MISSING | PLACED):
            marks[slot] |= COUNTED
            num += 1
    for slot in selection:
        if slot >= 0:
            marks[slot] &= ~COUNTED
    return num


@compiled
def _trade(
    home: Slots,
    owner: Slots,
    live: Bools,
    incoming: Ints,
    victims: Ints,
    vacated: Ints,
    write_back: Bools,
) -> None:
    """The host rows the incoming leave, and which victims are live."""
    for i in range(len(incoming)):
        vacated[i] = home[incoming[i]] - len(owner)
        write_back[i] = live[owner[victims[i]]]


@compiled
def _remap(home: Slots, owner: Slots, incoming: Ints, victims: Ints, vacated: Ints) -> None:
    """`Residency.remap`, compiled."""
    for i in range(len(incoming)):
        home[owner[victims[i]]] = vacated[i] + len(owner)
        home[incoming[i]] = victims[i]
        owner[victims[i]] = incoming[i]


@compiled
def _translate(home: Slots, slots: Ints, homes: Ints) -> None:
    """`Residency.translate`, compiled."""
    for i in range(len(slots)):
        homes[i] = home[slots[i]] if slots[i] >= 0 else -1


@compiled
def _translate_some(home: Slots, slots: Ints, homes: Ints, at: Ints) -> None:
    """The same, of what an exchange may have moved."""
    for i in at:
        homes[i] = home[slots[i]]


@compiled
def _mark_live(live: Bools, slots: Ints) -> None:
    for slot in slots:
        if slot >= 0:
            live[slot] = True


@compiled
def _bury(
    home: Slots, live: Bools, num_device: int, blocks: Ints, block_size: int, slots: Ints
) -> int:
    """Mark blocks dead; the device rows among them."""
    num = 0
    for block in blocks:
        for slot in range(block * block_size, (block + 1) * block_size):
            live[slot] = False
            if home[slot] < num_device:
                slots[num] = home[slot]
                num += 1
    return num


def warm_up(planner: StampPlanner) -> None:
    """Run every compiled function of a fresh planner of at least 16 rows once."""
    residency = Residency(planner.num_device, planner.num_device)
    planning = CompiledPlanning(residency, planner, Scratch.of(residency))
    every = torch.arange(residency.num_logical)
    for decode in (False, True):  # writes all, then promotes from the host over live rows
        written = every[: 1 if decode else None]
        selection = every.flip(0)[:4].view(1, 4) if decode else every[:0].view(0, 4)
        flags = torch.full((len(written),), decode)
        call = Call(written, flags, selection, torch.ones(len(selection), dtype=torch.bool))
        planning.complete(call, planning.plan(call))
    planner.touch(DeviceSlots(every[:1]))
    planning.bury(every[:1], 1)
