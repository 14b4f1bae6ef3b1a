"""Touch: who reads device rows, what of it is there, and what has to come."""

from __future__ import annotations

import torch

from vllm_ula.kernels.reference.claim import winners
from vllm_ula.kernels.reference.translate import translate
from vllm_ula.kernels.tables import (
    CLOCK,
    CURRENT,
    CUT,
    NUM_INCOMING,
    NUM_MISSING,
    NUM_REQUIRED,
    PLACED,
    PROMOTED,
    ROOM,
    WRITTEN,
    CallTables,
    MapTables,
)


def touch(tables: MapTables, call: CallTables) -> None:
    """Promote the first decode tokens whose rows fit together: hits are touched, misses listed.

    After the misses `incoming` lists what decode tokens write on the host, which was given room,
    then what else is written there, which takes dead rows or stays.

    Args:
        tables: after `claim`; `stamp`, `state` and `totals` change.
        call: `incoming` and `fetch` are set.
    """
    state, clock = tables.state, tables.state[CLOCK]
    width = call.selection.shape[1]
    fits = call.decode & (call.wanted.cumsum(0) <= state[ROOM])
    state[CUT] = int(fits.nonzero().amax()) + 1 if bool(fits.any()) else 0
    selection = call.selection.reshape(-1)
    promoted = winners(tables, call) & fits.repeat_interleave(width)
    homes = translate(tables.home, selection)
    hits = homes[promoted & (homes < tables.num_device)]
    missing = selection[promoted & (homes >= tables.num_device)]
    stamp = tables.stamp[hits]
    state[CURRENT] += int((stamp >> 1 != clock).sum())
    tables.stamp[hits] = 2 * clock | stamp & 1
    tables.totals[PROMOTED] += int(promoted.sum())

    # Written rows on the host that no entry has listed.
    written = call.written[call.written_homes >= tables.num_device]
    written = written[~torch.isin(written, missing)]
    placed = tables.roles[written] & PLACED != 0
    unwritten = tables.roles[missing] & WRITTEN == 0
    incoming = torch.cat((missing, written[placed], written[~placed]))[: call.incoming.numel()]
    call.incoming[: incoming.numel()] = incoming
    call.fetch[: incoming.numel()] = False
    call.fetch[: missing.numel()] = unwritten
    state[NUM_MISSING] = missing.numel()
    state[NUM_REQUIRED] = missing.numel() + int(placed.sum())
    state[NUM_INCOMING] = incoming.numel()
