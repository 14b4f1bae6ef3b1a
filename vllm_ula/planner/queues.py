"""FIFO queues over the device rows: every row lies in exactly one of them.

A queue is a chain of chunks of row numbers, so that going through it reads memory in order.

    first[q] -> chunk -> chunk -> ... -> last[q]        size[c] rows in chunk c, next[c] after it

Unused chunks form one more chain. Of two neighbouring chunks one is more than half full, up to
what looking for victims leaves at one place per queue: that bounds the number of chunks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ula.planner.jit import compiled

Ints = NDArray[np.int64]
Stamps = NDArray[np.int32]
Rows = NDArray[np.int32]
Flags = NDArray[np.uint8]

NONE = -1
DEAD, TAKEN = 1, 4  # flags of a row, as in planner/stamps.py


class Queues:
    """`num_queues` empty queues for `num_rows` rows.

    Attributes:
        arrays: rows `[chunks, chunk]`, size and next `[chunks]`, first and last `[queues + 1]`;
            the last entry of `first` is the chain of unused chunks.
    """

    def __init__(self, num_rows: int, num_queues: int) -> None:
        chunk = min(max(num_rows // (4 * num_queues), 8), 256)
        num_chunks = 2 * -(-num_rows // chunk) + 3 * num_queues
        next_ = np.arange(1, num_chunks + 1, dtype=np.int32)
        next_[-1] = NONE
        first = np.full(num_queues + 1, NONE, dtype=np.int32)
        first[-1] = 0
        self.arrays: tuple[Rows, Rows, Rows, Rows, Rows] = (
            np.zeros((num_chunks, chunk), dtype=np.int32),
            np.zeros(num_chunks, dtype=np.int32),
            next_,
            first,
            np.full(num_queues, NONE, dtype=np.int32),
        )


def rows_of(queues: Queues, queue: int) -> Rows:
    """The rows of a queue in order, for checks."""
    rows, size, next_, first, _ = queues.arrays
    found, chunk = [rows[:0, 0]], first[queue]
    while chunk != NONE:
        found.append(rows[chunk, : size[chunk]])
        chunk = next_[chunk]
    return np.concatenate(found)


@compiled
def append(rows: Rows, size: Rows, next_: Rows, first: Rows, last: Rows, q: int, row: int) -> None:
    """Put a row at the end of queue `q`."""
    chunk = last[q]
    if chunk == NONE or size[chunk] == rows.shape[1]:
        new = first[-1]
        first[-1] = next_[new]
        next_[new] = NONE
        size[new] = 0
        if chunk == NONE:
            first[q] = new
        else:
            next_[chunk] = new
        last[q] = chunk = new
    rows[chunk, size[chunk]] = row
    size[chunk] += 1


@compiled
def append_all(
    rows: Rows, size: Rows, next_: Rows, first: Rows, last: Rows, q: int, num: int
) -> None:
    """Put rows 0 to `num - 1` at the end of queue `q`."""
    for row in range(num):
        append(rows, size, next_, first, last, q, row)


@compiled
def merge(rows: Rows, size: Rows, next_: Rows, first: Rows, last: Rows, q: int, other: int) -> None:
    """Put the rows of queue `other` at the end of queue `q`."""
    a, b = last[q], first[other]
    if b == NONE:
        return
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
def level_of(stamp: int, edges: Stamps, low: int, high: int) -> int:
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
    size: Rows,
    next_: Rows,
    first: Rows,
    last: Rows,
    stamp: Stamps,
    flags: Flags,
    edges: Stamps,
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
            append(rows, size, next_, first, last, queue[level], row)
            num += 1
    return num


@compiled
def find_victims(
    rows: Rows,
    size: Rows,
    next_: Rows,
    first: Rows,
    last: Rows,
    stamp: Stamps,
    flags: Flags,
    edges: Stamps,
    queue: Rows,
    clock: int,
    victims: Ints,
    found: int,
) -> int:
    """Fill `victims[found:]` with rows neither dead nor current, from the oldest queue on.

    They leave their queues and are TAKEN. Rows used since their queue was theirs move on.

    Args:
        rows: of the queues, as the following four.
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
        # Rows that stay are packed towards the front: `to` is the chunk being packed.
        to, filled = first[q], 0
        chunk = first[q]
        until = edges[min(level + 1, newest)]
        while chunk != NONE and found < len(victims):
            num, after, i = size[chunk], next_[chunk], 0
            while i < num and found < len(victims):
                row = rows[chunk, i]
                i += 1
                s = stamp[row]
                if level < newest and s >= until:
                    newer = level_of(s, edges, level + 1, newest)
                    append(rows, size, next_, first, last, queue[newer], row)
                    continue
                if s < clock and not flags[row] & DEAD:
                    flags[row] |= TAKEN
                    victims[found] = row
                    found += 1
                    continue
                if filled == rows.shape[1]:
                    size[to] = filled
                    to, filled = next_[to], 0
                rows[to, filled] = row
                filled += 1
            looked_at += i
            while i < num:  # enough was found: what is left of the chunk stays too
                if filled == rows.shape[1]:
                    size[to] = filled
                    to, filled = next_[to], 0
                rows[to, filled] = rows[chunk, i]
                filled += 1
                i += 1
            chunk = after
        _cut(size, next_, first, last, q, to, filled, chunk)
        if found == len(victims):
            break
    return looked_at


@compiled
def _cut(
    size: Rows, next_: Rows, first: Rows, last: Rows, q: int, to: int, filled: int, rest: int
) -> None:
    """End the packed part of queue `q` at chunk `to`, free what it has left, link the rest."""
    if to == NONE:
        return
    if to == rest:
        return
    spare = next_[to]
    size[to] = filled
    while spare != rest:
        after = next_[spare]
        next_[spare] = first[-1]
        first[-1] = spare
        spare = after
    if filled:
        next_[to] = rest
        if rest == NONE:
            last[q] = to
        return
    # Nothing stayed: `to` is the first chunk of the queue.
    first[q] = rest
    if rest == NONE:
        last[q] = NONE
    next_[to] = first[-1]
    first[-1] = to
