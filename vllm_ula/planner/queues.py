"""FIFO queues over the device rows: every row lies in at most one of them.

A queue is a chain of chunks of row numbers, so that going through it reads memory in order.

    first[q] -> chunk -> chunk -> ... -> last[q]      rows[c, start[c]:size[c]] are in chunk c
                                                      next[c] comes after it

Unused chunks form one more chain. Only the first chunk of a queue has rows taken from its front.
Of two neighbours behind it one is more than half full, so D rows in Q queues never need more than
2 D / chunk + 3 Q chunks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ula.errors import IntegrityError
from vllm_ula.planner.jit import compiled

Ints = NDArray[np.int64]
Rows = NDArray[np.int32]
Flags = NDArray[np.uint8]

NONE = -1
DEAD, TAKEN = 1, 4  # flags of a row, beside those of planner/stamps.py


class Queues:
    """`num_queues` empty queues for `num_rows` rows.

    Attributes:
        arrays: rows `[chunks, chunk]`, start, size and next `[chunks]`, first and last
            `[queues + 1]`; the last entry of `first` is the chain of unused chunks.
    """

    def __init__(self, num_rows: int, num_queues: int) -> None:
        chunk = min(max(num_rows // (4 * num_queues), 8), 256)
        num_chunks = 2 * -(-num_rows // chunk) + 3 * num_queues
        next_ = np.arange(1, num_chunks + 1, dtype=np.int32)
        next_[-1] = NONE
        first = np.full(num_queues + 1, NONE, dtype=np.int32)
        first[-1] = 0
        self.arrays: tuple[Rows, Rows, Rows, Rows, Rows, Rows] = (
            np.zeros((num_chunks, chunk), dtype=np.int32),
            np.zeros(num_chunks, dtype=np.int32),
            np.zeros(num_chunks, dtype=np.int32),
            next_,
            first,
            np.full(num_queues, NONE, dtype=np.int32),
        )

    def rows_of(self, queue: int) -> Rows:
        """The rows of a queue in order, for checks."""
        rows, start, size, *_ = self.arrays
        found = [rows[chunk, start[chunk] : size[chunk]] for chunk in self._chain(queue)]
        return np.concatenate([rows[:0, 0], *found])

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every chunk is in exactly one chain."""
        num_queues = len(self.arrays[-1])
        chunks = [chunk for queue in range(num_queues + 1) for chunk in self._chain(queue)]
        if sorted(chunks) != list(range(len(self.arrays[0]))):
            raise IntegrityError("a chunk is in two queues, or in none")

    def _chain(self, queue: int) -> list[int]:
        *_, next_, first, _ = self.arrays
        chunks: list[int] = []
        chunk = int(first[queue])
        while chunk != NONE and len(chunks) <= len(next_):
            chunks.append(chunk)
            chunk = int(next_[chunk])
        return chunks


@compiled
def append(
    rows: Rows, start: Rows, size: Rows, next_: Rows, first: Rows, last: Rows, q: int, row: int
) -> None:
    """Put a row at the end of queue `q`."""
    chunk = last[q]
    if chunk == NONE or size[chunk] == rows.shape[1]:
        new = first[-1]
        if new == NONE:
            raise RuntimeError("no chunk is left: a row is in two queues")
        first[-1] = next_[new]
        next_[new] = NONE
        start[new] = size[new] = 0
        if chunk == NONE:
            first[q] = new
        else:
            next_[chunk] = new
        last[q] = chunk = new
    rows[chunk, size[chunk]] = row
    size[chunk] += 1


@compiled
def append_all(
    rows: Rows, start: Rows, size: Rows, next_: Rows, first: Rows, last: Rows, q: int, num: int
) -> None:
    """Put rows 0 to `num - 1` at the end of queue `q`."""
    for row in range(num):
        append(rows, start, size, next_, first, last, q, row)


@compiled
def merge(
    rows: Rows, start: Rows, size: Rows, next_: Rows, first: Rows, last: Rows, q: int, other: int
) -> None:
    """Put the rows of queue `other` at the end of queue `q`."""
    a, b = last[q], first[other]
    if b == NONE:
        return
    for chunk in (a, b):  # neighbours from now on: what was taken from their fronts is closed up
        if chunk != NONE and start[chunk]:
            for i in range(start[chunk], size[chunk]):
                rows[chunk, i - start[chunk]] = rows[chunk, i]
            size[chunk] -= start[chunk]
            start[chunk] = 0
    if a != NONE and size[a] + size[b] <= rows.shape[1]:
        for i in range(size[b]):
            rows[a, size[a] + i] = rows[b, i]
        size[a] += size[b]
        after = next_[b]
        next_[b] = first[-1]
        first[-1] = b
        b = after
    if a == NONE:
        first[q] = b
    elif b != NONE:
        next_[a] = b
    if b != NONE:
        last[q] = last[other]
    first[other] = last[other] = NONE


@compiled
def level_of(stamp: int, edges: Rows, low: int, high: int) -> int:
    """The level of a row that is at least `low`; `edges[level]` is the first stamp of a level."""
    while low < high:
        middle = (low + high + 1) >> 1
        if stamp >= edges[middle]:
            low = middle
        else:
            high = middle - 1
    return low


@compiled
def put_back(
    rows: Rows,
    start: Rows,
    size: Rows,
    next_: Rows,
    first: Rows,
    last: Rows,
    stamp: Rows,
    flags: Flags,
    edges: Rows,
    queue: Rows,
    slots: Ints,
) -> int:
    """Rows that were taken go to the queue of their bucket; others are where they are.

    From the last to the first: a selection names what it wants most first, and of one call that
    shall be given up last.

    Returns:
        Rows that were taken.
    """
    num = 0
    for row in slots[::-1]:
        if flags[row] & TAKEN:
            flags[row] &= ~TAKEN
            level = level_of(stamp[row], edges, 0, len(edges) - 1)
            append(rows, start, size, next_, first, last, queue[level], row)
            num += 1
    return num


@compiled
def find_victims(
    rows: Rows,
    start: Rows,
    size: Rows,
    next_: Rows,
    first: Rows,
    last: Rows,
    stamp: Rows,
    flags: Flags,
    edges: Rows,
    queue: Rows,
    clock: int,
    victims: Ints,
    found: int,
) -> int:
    """Fill `victims[found:]` with rows neither dead nor current, from the oldest queue on.

    They leave their queues and are TAKEN. Rows used since their queue was theirs move on, dead
    and current ones to the end of their own queue.

    Args:
        rows: of the queues, as the following five.
        start: see Queues.
        size: see Queues.
        next_: see Queues.
        first: see Queues.
        last: see Queues.
        stamp: of the planner, int32 `[D]`.
        flags: of the planner, uint8 `[D]`.
        edges: `[B]` first stamp of each level; level 0 has none.
        queue: `[B]` queue of each level.
        clock: lowest stamp of current rows.
        victims: filled from `found` on.
        found: victims there are already.

    Returns:
        Rows looked at.
    """
    looked_at, newest = 0, len(edges) - 1
    for level in range(len(edges)):
        q = queue[level]
        # What is put at the end of this queue below is not looked at again.
        end, end_size = last[q], size[last[q]] if last[q] != NONE else 0
        until = edges[min(level + 1, newest)]
        while end != NONE and found < len(victims):
            chunk = first[q]
            stop = end_size if chunk == end else size[chunk]
            i = start[chunk]
            while i < stop and found < len(victims):
                row = rows[chunk, i]
                i += 1
                s = stamp[row]
                if level < newest and s >= until:
                    newer = level_of(s, edges, level + 1, newest)
                    append(rows, start, size, next_, first, last, queue[newer], row)
                elif s < clock and not flags[row] & DEAD:
                    flags[row] |= TAKEN
                    victims[found] = row
                    found += 1
                else:
                    append(rows, start, size, next_, first, last, q, row)
            looked_at += i - start[chunk]
            start[chunk] = i
            if chunk == end and i == end_size:
                end = NONE
            if i == size[chunk]:  # all of it was taken
                first[q] = next_[chunk]
                if first[q] == NONE:
                    last[q] = NONE
                next_[chunk] = first[-1]
                first[-1] = chunk
        if found == len(victims):
            break
    return looked_at
