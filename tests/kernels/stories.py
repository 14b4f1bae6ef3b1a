"""Small states written out by hand, for the operations of the map."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kernels.agreement import poisoned

from vllm_ula.kernels import tables
from vllm_ula.kernels.tables import CallTables, MapTables

CLOCK = 10


def story_map(
    owner: Sequence[int],
    num_host: int,
    calls: Sequence[int] | None = None,
    dead: Sequence[int] = (),
    edges: Sequence[int] = (0, 3, 6, 9),
) -> MapTables:
    """Device row d holds `owner[d]`, last used in `calls[d]`; other slots lie on the host.

    The current call is number 10; rows in `dead` are dead; level l begins with call `edges[l]`.
    """
    num_device = len(owner)
    num = num_device + num_host
    home = torch.full((num,), -1, dtype=torch.int32)
    home[list(owner)] = torch.arange(num_device, dtype=torch.int32)
    home[home < 0] = torch.arange(num_device, num, dtype=torch.int32)
    live = torch.ones(num, dtype=torch.bool)
    live[[owner[d] for d in dead]] = False
    mine = MapTables.of(
        home,
        torch.tensor(owner, dtype=torch.int32),
        live,
        len(edges),
        torch.zeros(num, dtype=torch.int32),
        torch.zeros(num, dtype=torch.uint8),
    )
    mine.stamp.copy_(2 * torch.tensor(calls if calls is not None else [1] * num_device))
    mine.stamp[list(dead)] += 1
    mine.edges.copy_(torch.tensor(edges))
    mine.state[tables.CLOCK] = CLOCK
    mine.state[tables.PERIOD] = 2 * len(edges) - 1
    return mine


def story_call(
    mine: MapTables,
    select: Sequence[Sequence[int]] = (),
    decode: Sequence[bool] | None = None,
    write: Sequence[int] = (),
    by_decode: Sequence[bool] | None = None,
) -> CallTables:
    """What a call asks; its outputs are poisoned."""
    width = len(select[0]) if select else 0
    return poisoned(
        CallTables.of(
            torch.tensor(write, dtype=torch.int64),
            torch.tensor(by_decode if by_decode is not None else [True] * len(write)).bool(),
            torch.tensor(select, dtype=torch.int64).view(len(select), width),
            torch.tensor(decode if decode is not None else [True] * len(select)).bool(),
            mine.num_device,
        )
    )
