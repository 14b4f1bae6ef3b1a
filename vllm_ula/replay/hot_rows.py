"""The hot region of one request: B rows, and who leaves when a selected row comes in.

order   [ 0 .. not selected .. | 0 .. selected now .. )
          oldest -> newest
LRU     the oldest m that are not selected leave; then: rest, the m new ones, the selected ones
FIFO    the same m leave; then: the others as they were, the m new ones
RANDOM  any m that are not selected leave
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from vllm_ula.planner.jit import compiled
from vllm_ula.traces.events import Int64s


class Eviction(IntEnum):
    """Who leaves a hot region."""

    LRU = 0
    FIFO = 1
    RANDOM = 2


class HotRows:
    """Which positions of one request have a row in its hot region of one domain.

    A call's hits and misses are decided before anything moves, and rows the call selects never
    leave in it. Rows for which no other row can leave are fetched and not kept.

    Args:
        num_rows: B, > 0.
        eviction: who leaves.
        seed: for `Eviction.RANDOM`.
    """

    def __init__(self, num_rows: int, eviction: Eviction = Eviction.LRU, seed: int = 0) -> None:
        self.eviction = eviction
        self.order = np.arange(num_rows, dtype=np.int32)
        self.position = np.full(num_rows, -1, dtype=np.int64)
        self.slot = np.full(1024, -1, dtype=np.int32)
        self.state = np.array([seed + 1], dtype=np.uint64)
        self._scratch = np.zeros(num_rows, dtype=np.bool_)
        self._spare = np.empty((2, num_rows), dtype=np.int32)

    def fill(self, num: int) -> None:
        """Put the rows of positions `0 .. num - 1` into an empty region; at most B."""
        self.reserve(num)
        self.position[:num] = self.slot[:num] = np.arange(num)

    def reserve(self, length: int) -> None:
        """Make room for positions below `length`."""
        if length > len(self.slot):
            grown = np.full(max(length, 2 * len(self.slot)), -1, dtype=np.int32)
            grown[: len(self.slot)] = self.slot
            self.slot = grown

    def serve(self, wanted: Int64s) -> int:
        """Make the rows of distinct positions `[n]` readable; returns the number of misses."""
        if len(wanted) == 0:
            return 0
        self.reserve(int(wanted.max()) + 1)
        return int(
            _serve(
                wanted,
                self.order,
                self.position,
                self.slot,
                self.state,
                int(self.eviction),
                self._scratch,
                self._spare,
            )
        )

    def positions(self) -> list[int]:
        """Positions with a row here, from the next to leave to the last."""
        return [p for p in self.position[self.order].tolist() if p >= 0]


@compiled
def _serve(wanted, order, position, slot, state, eviction, selected, spare):  # type: ignore[no-untyped-def]
    misses = 0
    for p in wanted:
        if slot[p] >= 0:
            selected[slot[p]] = True
        else:
            misses += 1
    if misses == 0 and eviction != 0:
        for p in wanted:
            selected[slot[p]] = False
        return 0

    # spare[0]: slots that may leave; spare[1]: selected ones. Both from oldest to newest.
    num_out = num_in = 0
    for s in order:
        if selected[s]:
            spare[1, num_in] = s
            num_in += 1
        else:
            spare[0, num_out] = s
            num_out += 1
    leaving = min(misses, num_out)
    if eviction == 2:
        for i in range(leaving):
            state[0] ^= state[0] << np.uint64(13)
            state[0] ^= state[0] >> np.uint64(7)
            state[0] ^= state[0] << np.uint64(17)
            j = i + np.int64(state[0] >> np.uint64(33)) % (num_out - i)
            spare[0, i], spare[0, j] = spare[0, j], spare[0, i]

    placed = 0
    for p in wanted:
        if slot[p] >= 0:
            continue
        if placed == leaving:
            break
        s = spare[0, placed]
        if position[s] >= 0:
            slot[position[s]] = -1
        position[s] = p
        slot[p] = s
        placed += 1

    if eviction == 0:
        at = 0
        for i in range(leaving, num_out):
            order[at] = spare[0, i]
            at += 1
        for i in range(leaving - 1, -1, -1):
            order[at] = spare[0, i]
            at += 1
        for i in range(num_in):
            order[at] = spare[1, i]
            at += 1
    elif eviction == 1:
        for i in range(leaving):
            selected[spare[0, i]] = True
        # Those that left are marked too now; keep the others in place and append the new ones.
        at = 0
        for i in range(num_in):
            selected[spare[1, i]] = False
        for s in order:
            if not selected[s]:
                order[at] = s
                at += 1
        for i in range(leaving):
            order[at] = spare[0, i]
            selected[spare[0, i]] = False
            at += 1
    for i in range(num_in):
        selected[spare[1, i]] = False
    return misses
