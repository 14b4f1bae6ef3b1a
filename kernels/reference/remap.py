"""Remap: the bytes have moved, now the map says so."""

from __future__ import annotations

from vllm_ula.kernels.reference.claim import winners
from vllm_ula.kernels.reference.translate import translate
from vllm_ula.kernels.tables import (
    ADMITTED,
    CLOCK,
    CURRENT,
    CUT,
    EXCHANGES,
    FETCHED,
    IN_PLACE_DEVICE,
    IN_PLACE_HOST,
    MOVED,
    NUM_EXCHANGED,
    WRITTEN_BACK,
    CallTables,
    MapTables,
)


def remap(tables: MapTables, call: CallTables) -> None:
    """Swap the homes of incoming rows and victims' rows, then translate the call.

    Args:
        tables: after `victims`; `home`, `owner`, `live`, `stamp`, `state` and `totals` change,
            `marks` and `roles` are 0 again.
        call: `written_homes` and `selected_homes` are set.
    """
    state, totals, num_device = tables.state, tables.totals, tables.num_device
    num = int(state[NUM_EXCHANGED])
    incoming, taken = call.incoming[:num], call.victims[:num]
    tables.home[tables.owner[taken]] = (call.vacated[:num] + num_device).int()
    tables.home[incoming] = taken.int()
    tables.owner[taken] = incoming.int()
    tables.stamp[taken] = 2 * state[CLOCK]
    state[CURRENT] += num
    state[ADMITTED] += num
    fetched, written_back = int(call.fetch[:num].sum()), int(call.write_back[:num].sum())
    totals[FETCHED] += fetched
    totals[WRITTEN_BACK] += written_back
    state[MOVED] = bool(fetched or written_back)
    totals[EXCHANGES] += state[MOVED]

    selection, written = call.selection.reshape(-1), call.written[call.written >= 0]
    tables.live[written] = True
    call.written_homes.copy_(translate(tables.home, call.written))
    homes = translate(tables.home, selection)
    call.selected_homes.copy_(homes.view_as(call.selection))
    promoted = call.decode.clone()
    promoted[int(state[CUT]) :] = False
    in_place = winners(tables, call) & ~promoted.repeat_interleave(call.selection.shape[1])
    totals[IN_PLACE_DEVICE] += int((in_place & (homes < num_device)).sum())
    totals[IN_PLACE_HOST] += int((in_place & (homes >= num_device)).sum())
    tables.marks[selection[selection >= 0]] = 0
    tables.roles[written] = 0
