"""Maps that have a past, and calls of which every planner misses the same number of rows.

    rows of a request    | old: R / 4, never selected again | recent: hits come from here |
    stamps               | 1 .. 50                          | 51 .. 100                   |

The calls together fetch fewer rows than are old, so whoever gives up old rows first has all hits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench

CLOCK = 100
NUM_CALLS = 3


@dataclass(frozen=True)
class History:
    """The state of a domain before its calls, and the calls.

    Attributes:
        home: int32 `[N]`; device rows are spread over the requests at random.
        stamp: int32 `[D]`, when a row was last used.
        held: int32 `[requests, R]`: the same rows for planners with a region for each request, by
            position in the request.
        order: int32 `[requests, R]`, least recently used first.
        slots: int64 `[requests, topk]` of each call; request i has slots from `i * positions`.
        written: int64 `[requests]` of each call that writes: on the host, selected by none.
        positions: logical slots of a request.
        missing: rows each call misses, all requests together.
    """

    home: Tensor
    stamp: Tensor
    held: Tensor
    order: Tensor
    slots: list[Tensor]
    written: list[Tensor]
    positions: int
    missing: int

    def positions_of(self, call: int) -> Tensor:
        """The slots of a call as positions in their request: int32 `[requests, topk]`."""
        slots = self.slots[call]
        first = torch.arange(len(slots), device=slots.device) * self.positions
        return (slots - first[:, None]).int()


def history(bench: Bench, requests: int, device_rows: int | None = None) -> History:
    """A past for so many requests, each with its share of all logical slots and device rows.

    Args:
        bench: the sizes.
        requests: a divisor of the logical slots and device rows.
        device_rows: D, where it is not that of the sizes.
    """
    sizes, device, generator = bench.sizes, bench.device, bench.generator(requests)
    device_rows = device_rows or sizes.rows

    def shuffled(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device).argsort(-1)

    num_positions, num_rows = sizes.slots // requests, device_rows // requests
    num_old, num_hits = num_rows // 4, sizes.topk - sizes.missing
    position = shuffled(requests, num_positions)  # the first R of a request are on the device
    first = torch.arange(requests, device=device)[:, None] * num_positions
    on_device = (position[:, :num_rows] + first).flatten()
    on_host = (position[:, num_rows:] + first).flatten()
    home = torch.empty(sizes.slots, dtype=torch.int32, device=device)
    row = shuffled(device_rows).int()
    home[on_device] = row
    home[on_host] = device_rows + shuffled(len(on_host)).int()
    age = torch.arange(num_rows, device=device).expand(requests, num_rows)
    stamps = torch.where(
        age < num_old, 1 + age % (CLOCK // 2), 1 + CLOCK // 2 + age % (CLOCK // 2)
    ).int()
    stamp = torch.empty_like(row)
    stamp[row.long()] = stamps.flatten()
    place = shuffled(requests, num_rows)
    slots, written = [], []
    first_written = num_rows + NUM_CALLS * sizes.missing
    for call in range(NUM_CALLS):
        hits = num_old + shuffled(requests, num_rows - num_old)[:, :num_hits]
        start = num_rows + call * sizes.missing
        misses = torch.arange(start, start + sizes.missing, device=device).expand(requests, -1)
        which = torch.cat([hits, misses], 1).gather(1, shuffled(requests, sizes.topk))
        slots.append(position.gather(1, which) + first)
        written.append(position[:, first_written + call] + first.squeeze(1))
    return History(
        home=home,
        stamp=stamp,
        held=torch.empty_like(stamps).scatter_(1, place, position[:, :num_rows].int()),
        order=torch.empty_like(stamps).scatter_(1, place, stamps).argsort(1).int(),
        slots=slots,
        written=written,
        positions=num_positions,
        missing=requests * sizes.missing,
    )


def us_a_call(
    bench: Bench,
    state: Sequence[Tensor],
    run: Callable[..., object],
    *arguments: Sequence[Tensor],
) -> float:
    """Median microseconds of one of some calls, run one after the other from the same state.

    Args:
        bench: whose timer measures.
        state: what the calls change; it is as before, afterwards too.
        run: a call.
        arguments: of each call; for one that takes several, several sequences.
    """
    saved = [tensor.clone() for tensor in state]
    calls = list(zip(*arguments, strict=True))

    def restore() -> None:
        for tensor, was in zip(state, saved, strict=True):
            tensor.copy_(was)

    def run_all() -> None:
        for call in calls:
            run(*call)

    us = bench.timer.median_us(run_all, restore)
    restore()
    return us / len(calls)
