"""Exact LRU by a timestamp per device row: what PB-LRU is measured against."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from vllm_ula.planner.jit import compiled
from vllm_ula.planner.stamps import Ints, StampPlanner, Stamps

_BINS = 4096
DEAD = 1  # the flag of planner/stamps.py


class TimestampLru(StampPlanner):
    """Victims dead first, then in order of the last call that used them; ties by the lower slot.

    Every choice beyond the dead looks at all stamps: O(D).
    """

    @override
    def _coldest_live(self, incoming: Ints, victims: Ints, found: int) -> None:
        _oldest(self.stamp, self.flags, self.clock, victims, found)


@compiled
def _oldest(stamp: Stamps, flags: NDArray[np.uint8], clock: int, victims: Ints, found: int) -> None:
    """Fill `victims[found:]` with the least recent rows by call and slot.

    A histogram over the calls finds the bin the last victim falls into; rows in older bins are
    taken as they come, those of that bin are sorted.
    """
    oldest = clock
    for s in stamp:
        oldest = min(oldest, s)
    oldest = (oldest + 2) >> 1  # calls from 0 on: the stamp -1 means never
    span = (clock >> 1) + 1 - oldest
    shift = 0
    while span >> shift >= _BINS:
        shift += 1
    count = np.zeros(_BINS, dtype=np.int64)
    for slot in range(len(stamp)):
        if stamp[slot] < clock and not flags[slot] & DEAD:
            count[(((stamp[slot] + 2) >> 1) - oldest) >> shift] += 1
    last, below = 0, found
    while below + count[last] < len(victims):
        below += count[last]
        last += 1
    keys = np.empty(count[last], dtype=np.int64)
    num = 0
    for slot in range(len(stamp)):
        if stamp[slot] < clock and not flags[slot] & DEAD:
            call = ((stamp[slot] + 2) >> 1) - oldest
            if call >> shift < last:
                victims[found] = slot
                found += 1
            elif call >> shift == last:
                keys[num] = call * len(stamp) + slot
                num += 1
    if shift:
        keys.sort()  # within one call, rows come in order already
    for key in keys[: len(victims) - found]:
        victims[found] = key % len(stamp)
        found += 1
