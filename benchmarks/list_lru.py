"""A baseline: exact LRU as an intrusive list, fused with everything else a call plans.

One node a device row, `previous, next, stamp` side by side, so that a hit touches one cache line of
its own and one of each neighbour. Only what the benchmark asks for is here: decode tokens whose
selections fit, no writes.

    head <-> newest <-> ... <-> oldest <-> head        node D is the head
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ula.arrays import filled
from vllm_ula.planner.jit import compiled

Ints = NDArray[np.int64]
Slots = NDArray[np.int32]
Flags = NDArray[np.uint8]

PREVIOUS, NEXT, STAMP = 0, 1, 2
BLOCK = 2048


class ListLru:
    """The rows of one domain; all of its N logical slots are live.

    Args:
        num_device: device rows D.
        num_logical: logical slots N.
    """

    def __init__(self, num_device: int, num_logical: int) -> None:
        self.home: Slots = filled(num_logical, 0, np.int32)
        self.owner: Slots = filled(num_device, 0, np.int32)
        self.home[:], self.owner[:] = np.arange(num_logical), np.arange(num_device)
        nodes = np.arange(num_device + 1, dtype=np.int32)
        self.node: Slots = filled(4 * (num_device + 1), 0, np.int32).reshape(-1, 4)
        self.node[:, PREVIOUS], self.node[:, NEXT] = np.roll(nodes, 1), np.roll(nodes, -1)
        self.marks: Flags = filled(num_logical, 0, np.uint8)
        self.call = 0

    def plan(
        self, selection: Ints, homes: Ints, incoming: Ints, victims: Ints, missed: Ints
    ) -> tuple[int, int]:
        """Translate, touch, de-duplicate and choose victims; rows and references that missed."""
        self.call += 1
        arrays = self.home, self.node, self.marks
        return _plan(*arrays, self.call, selection, homes, incoming, victims, missed)

    def complete(
        self, selection: Ints, homes: Ints, incoming: Ints, victims: Ints, missed: Ints
    ) -> None:
        """Change the map; the victims become the newest rows."""
        arrays = self.home, self.owner, self.node
        _complete(*arrays, self.call, selection, homes, incoming, victims, missed)


@compiled
def _renew(node: Slots, slot: int) -> None:
    head = len(node) - 1
    before, after = node[slot, PREVIOUS], node[slot, NEXT]
    node[before, NEXT] = after
    node[after, PREVIOUS] = before
    newest = node[head, NEXT]
    node[slot, PREVIOUS], node[slot, NEXT] = head, newest
    node[newest, PREVIOUS] = slot
    node[head, NEXT] = slot


@compiled
def _plan(
    home: Slots,
    node: Slots,
    marks: Flags,
    call: int,
    selection: Ints,
    homes: Ints,
    incoming: Ints,
    victims: Ints,
    missed: Ints,
) -> tuple[int, int]:
    head = len(node) - 1
    num = num_missed = 0
    for first in range(0, len(selection), BLOCK):
        end = min(first + BLOCK, len(selection))
        # Reads that may miss every cache stand alone, so that many of them are under way at once.
        for i in range(first, end):
            homes[i] = home[selection[i]]
        for i in range(first, end):
            h = homes[i]
            if h < head:
                if node[h, STAMP] != call:
                    node[h, STAMP] = call
                    _renew(node, h)
                continue
            missed[num_missed] = i
            num_missed += 1
            slot = selection[i]
            if not marks[slot]:
                marks[slot] = 1
                incoming[num] = slot
                num += 1
    victim = node[head, PREVIOUS]
    for i in range(num):
        marks[incoming[i]] = 0
        victims[i] = victim
        victim = node[victim, PREVIOUS]
    return num, num_missed


@compiled
def _complete(
    home: Slots,
    owner: Slots,
    node: Slots,
    call: int,
    selection: Ints,
    homes: Ints,
    incoming: Ints,
    victims: Ints,
    missed: Ints,
) -> None:
    for i in range(len(incoming)):
        victim = victims[i]
        home[owner[victim]] = home[incoming[i]]
        home[incoming[i]] = victim
        owner[victim] = incoming[i]
        node[victim, STAMP] = call
        _renew(node, victim)
    for i in missed:
        homes[i] = home[selection[i]]
