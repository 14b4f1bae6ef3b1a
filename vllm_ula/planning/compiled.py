"""Planning compiled for the CPU: a call costs what it selects and writes, not what the pool holds.

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
from vllm_ula.planner.stamps import DEAD, StampPlanner
from vllm_ula.planning.base import NOTHING, Planning, Scratch
from vllm_ula.records import Call, CallPlan, DeviceSlots, Exchange, Homes, HostSlots
from vllm_ula.residency import Residency

Ints = NDArray[np.int64]
Slots = NDArray[np.int32]
Flags = NDArray[np.uint8]
Bools = NDArray[np.bool_]

MISSING, WRITTEN, PLACED, IN_PLACE, COUNTED = 1, 2, 4, 8, 16


class CompiledPlanning(Planning):
    """Needs a planner with stamps; all arrays live in host memory."""

    planner: StampPlanner

    def __init__(self, residency: Residency, planner: StampPlanner, scratch: Scratch) -> None:
        super().__init__(residency, planner, scratch)
        self._home = residency.home.numpy()
        self._owner = residency.owner.numpy()
        self._live = residency.live.numpy()
        self._marks = scratch.marks.numpy()

    @override
    def plan(self, call: Call) -> CallPlan:
        planner, buffer = self.planner, self.scratch.buffer
        planner.begin_call()
        written, selection = call.written, call.selection
        most = written.numel() + selection.numel()
        homes = Homes(
            buffer("written", written.numel()),
            buffer("selected", selection.numel()).view(selection.shape),
        )
        incoming, in_place = buffer("incoming", most), buffer("in place", selection.numel())
        fetch = buffer("fetch", most, torch.bool)
        touched = buffer("touched", most if planner.wants_touched else 0)
        counts = _pass(
            self._home,
            planner.stamp,
            planner.flags,
            self._marks,
            planner.clock,
            planner.num_dead,
            written.numpy(),
            call.written_by_decode.numpy(),
            selection.numpy(),
            call.decode.numpy(),
            homes.written.numpy(),
            homes.selected.numpy(),
            incoming.numpy(),
            fetch.numpy(),
            in_place.numpy(),
            touched.numpy(),
            planner.wants_touched,
        )
        promoted, num_incoming, num_in_place, current, rewritten, revived, num_touched = counts
        planner.stamped(current, rewritten, revived, touched[:num_touched].numpy())
        exchange = self._exchange(incoming[:num_incoming], fetch[:num_incoming])
        return CallPlan(exchange, homes, promoted, in_place[:num_in_place])

    def _exchange(self, incoming: Tensor, fetch: Tensor) -> Exchange:
        if not (num := incoming.numel()):
            return NOTHING
        victims = self.planner.choose(incoming)
        vacated = self.scratch.buffer("vacated", num)
        write_back = self.scratch.buffer("write back", num, torch.bool)
        _trade(
            self._home,
            self._owner,
            self._live,
            incoming.numpy(),
            victims.index.numpy(),
            vacated.numpy(),
            write_back.numpy(),
        )
        return Exchange(incoming, victims, HostSlots(vacated), fetch, write_back)

    @override
    def complete(self, call: Call, plan: CallPlan) -> Homes:
        exchange, homes = plan.exchange, plan.homes
        written = call.written.numpy()
        if len(exchange):
            _remap(
                self._home,
                self._owner,
                exchange.incoming.numpy(),
                exchange.victims.index.numpy(),
                exchange.vacated.index.numpy(),
            )
            self.planner.admit(exchange.victims, exchange.incoming)
            _translate(self._home, written, homes.written.numpy())
            selection = call.selection.view(-1).numpy()
            _translate(self._home, selection, homes.selected.view(-1).numpy())
        _mark_live(self._live, written)
        return homes

    @override
    def bury(self, blocks: Tensor, block_size: int) -> None:
        slots = self.scratch.buffer("buried", blocks.numel() * block_size)
        num = _bury(
            self._home,
            self._live,
            self.residency.num_device,
            blocks.numpy(),
            block_size,
            slots.numpy(),
        )
        self.planner.bury(DeviceSlots(slots[:num]))


@compiled
def _pass(
    home: Slots,
    stamp: Slots,
    flags: Flags,
    marks: Flags,
    clock: int,
    num_dead: int,
    written: Ints,
    by_decode: Bools,
    selection: Ints,
    decode: Bools,
    written_homes: Ints,
    selected_homes: Ints,
    incoming: Ints,
    fetch: Bools,
    in_place: Ints,
    touched: Ints,
    wants_touched: bool,
) -> tuple[int, int, int, int, int, int, int]:
    num_device = len(stamp)
    rewritten = revived = num_touched = 0
    for i in range(len(written)):
        slot = written[i]
        h = home[slot]
        written_homes[i] = h
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
    promoted = num_incoming = num_in_place = hits = 0
    stop = num_tokens  # the first decode token whose selection does not fit, and all after it
    for t in range(num_tokens):
        if not decode[t]:
            continue
        if room < topk and _num_new(home, stamp, marks, clock, selection[t]) > room:
            stop = t
            break
        for k in range(topk):
            slot = selection[t, k]
            if slot < 0:
                selected_homes[t, k] = -1
                continue
            h = home[slot]
            selected_homes[t, k] = h
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
            elif not marks[slot] & MISSING:
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
                selected_homes[t, k] = -1
                continue
            h = home[slot]
            selected_homes[t, k] = h
            is_promoted = stamp[h] == clock + 1 if h < num_device else marks[slot] & MISSING
            if not is_promoted and not marks[slot] & IN_PLACE:
                marks[slot] |= IN_PLACE
                in_place[num_in_place] = slot
                num_in_place += 1

    vacant = num_dead - revived
    for wants_victim in (True, False):
        for i in range(len(written)):
            slot = written[i]
            if written_homes[i] < num_device or marks[slot] & MISSING:
                continue
            if bool(marks[slot] & PLACED) == wants_victim and (
                wants_victim or num_incoming < vacant
            ):
                incoming[num_incoming] = slot
                fetch[num_incoming] = False
                num_incoming += 1

    for i in range(num_incoming):
        marks[incoming[i]] = 0
    for i in range(num_in_place):
        marks[in_place[i]] = 0
    for i in range(len(written)):
        marks[written[i]] = 0
    current = rewritten + hits
    return promoted, num_incoming, num_in_place, current, rewritten, revived, num_touched


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
def _mark_live(live: Bools, slots: Ints) -> None:
    for slot in slots:
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
