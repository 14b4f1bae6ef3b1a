"""Seat: a call begins, and the rows it writes come first."""

from __future__ import annotations

import torch

from vllm_ula.kernels.reference.translate import translate
from vllm_ula.kernels.tables import (
    ADMITTED,
    AT,
    BELOW,
    CLOCK,
    CURRENT,
    CUT,
    MOVED,
    NUM_MISSING,
    PERIOD,
    PLACED,
    ROOM,
    USED,
    WRITTEN,
    CallTables,
    MapTables,
)


def seat(tables: MapTables, call: CallTables, age: str) -> None:
    """Begin a call: perhaps a period of recency ends; device rows being written are current.

    Rows on the host that decode tokens write get room on the device, in order, as far as there is
    any; selections get what is left.

    Args:
        tables: `state`, `edges`, `stamp` and `roles` change, `levels` is zeroed.
        call: `written_homes` is set.
        age: what fills a period: "calls", rows "touched" or rows "admitted".
    """
    state, num_device = tables.state, tables.num_device
    rows_per_period = max(num_device // tables.edges.numel(), 1)
    clock = int(state[CLOCK]) + 1
    aged = {"touched": int(state[CURRENT]), "admitted": int(state[ADMITTED])}
    used = int(state[USED]) + aged.get(age, rows_per_period)
    if used >= rows_per_period:
        used = 0
        state[PERIOD] += 1
        tables.edges[int(state[PERIOD]) % tables.edges.numel()] = clock
    tables.levels.zero_()

    homes = call.written_homes.copy_(translate(tables.home, call.written))
    on_device, on_host = (homes >= 0) & (homes < num_device), homes >= num_device
    rewritten = int(on_device.sum())
    tables.stamp[homes[on_device]] = 2 * clock
    by_decode = on_host & call.written_by_decode
    placed = by_decode & (by_decode.cumsum(0) <= num_device - rewritten)
    tables.roles[call.written[on_host]] = WRITTEN
    tables.roles[call.written[placed]] = WRITTEN | PLACED

    state[CLOCK], state[USED] = clock, used
    state[CURRENT] = state[ADMITTED] = rewritten
    state[ROOM] = num_device - rewritten - int(placed.sum())
    state[torch.tensor([CUT, NUM_MISSING, BELOW, AT, MOVED])] = 0
