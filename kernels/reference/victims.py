"""Victims: which device rows give way (paper section 5.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_ula.kernels.tables import (
    CLOCK,
    NUM_EXCHANGED,
    NUM_INCOMING,
    NUM_REQUIRED,
    PERIOD,
    CallTables,
    MapTables,
)

_NEVER = torch.iinfo(torch.int32).max


def levels(tables: MapTables) -> Tensor:
    """int32 `[D]`: -1 for dead rows, 0 for cold ones, to B - 1 for those of the open period."""
    edges, num_buckets = tables.edges, tables.edges.numel()
    told_apart = torch.arange(1, num_buckets, device=edges.device) + 1 - num_buckets
    first = edges[(tables.state[PERIOD] + told_apart) % num_buckets]
    level = (tables.stamp.unsqueeze(1) >> 1 >= first).sum(1, dtype=torch.int32)
    return level.masked_fill_(tables.stamp & 1 == 1, -1)


def victims(tables: MapTables, call: CallTables) -> None:
    """Choose a device row for each incoming row that must have one, and dead ones for the others.

    Dead rows come first, then cold ones, then bucket after bucket from older to newer; rows that
    the current call uses never. `touch` has made sure that there are enough.

    Args:
        tables: after `touch`; `state` changes, `levels` is spent.
        call: `victims`, `vacated` and `write_back` are set.
    """
    state = tables.state
    level = levels(tables).masked_fill_(tables.stamp >> 1 == state[CLOCK], _NEVER)
    num_dead = int((level == -1).sum())
    num = max(int(state[NUM_REQUIRED]), min(num_dead, int(state[NUM_INCOMING])))
    chosen = torch.sort(level, stable=True).indices[:num]
    call.victims[:num] = chosen
    call.vacated[:num] = tables.home[call.incoming[:num]] - tables.num_device
    call.write_back[:num] = tables.live[tables.owner[chosen]]
    state[NUM_EXCHANGED] = num
