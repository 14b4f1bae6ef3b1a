"""Pass 1 of the optimum: from the last use to the first, when each row is read next.

call     1          2          3
row a    read(2) .. read(3) .. read(never)
row b    read(never) ......... write(never)     what is overwritten is not read again
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ula.traces.events import Int64s

# A decode token selects the row; a decode token writes it; a prefill token writes it.
READ, WRITE, FILL = 1, 2, 4


class Uses:
    """Uses in the order of the trace; a group is the rows that share device rows."""

    def __init__(self) -> None:
        self.num = 0
        self._parts: list[tuple[int, Int64s, NDArray[np.int8]]] = []
        self._rounds: list[int] = []
        self._lengths: list[int] = []

    def append(self, group: int, keys: Int64s, kinds: NDArray[np.int8]) -> None:
        """One round of a group.

        Args:
            group: numbered from 0.
            keys: int64 `[n]`, distinct rows, numbered within the group.
            kinds: int8 `[n]`, READ, WRITE and FILL added up.
        """
        while group >= len(self._rounds):
            self._rounds.append(0)
            self._lengths.append(0)
        self._rounds[group] += 1
        if len(keys):
            self._lengths[group] = max(self._lengths[group], int(keys.max()) + 1)
        self._parts.append((group, keys.astype(np.int32), kinds))
        self.num += len(keys)

    def next_uses(self) -> tuple[Int64s, NDArray[np.int32], Int64s, int]:
        """What pass 2 needs.

        Returns:
            int64 `[groups + 1]`: what to add to the keys of each group to tell all rows apart;
            int32 `[uses]`: the round in which a use's row is read next, as it is now; the number
            of rounds of the group if never;
            int64 `[groups]`: rounds of each group;
            rows in all.
        """
        rounds = np.array(self._rounds or [0], dtype=np.int64)
        base = np.concatenate(([0], np.cumsum(self._lengths, dtype=np.int64)))
        pending = np.full(int(base[-1]), -1, dtype=np.int32)
        result = np.empty(self.num, dtype=np.int32)
        left, end = rounds.copy(), self.num
        for group, keys, kinds in reversed(self._parts):
            left[group] -= 1
            place = keys + base[group]
            result[end - len(keys) : end] = pending[place]
            pending[place] = np.where(kinds == READ, left[group], -1)
            end -= len(keys)
        never = np.repeat(
            np.array([rounds[group] for group, _, _ in self._parts], dtype=np.int32),
            [len(keys) for _, keys, _ in self._parts],
        )
        return base, np.where(result < 0, never, result), rounds, int(base[-1])
