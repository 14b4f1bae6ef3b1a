"""What the compiled planners share: a stamp per device row, and which rows are dead.

    stamp    2c      the row was written in call c
    stamp    2c + 1  the row was read in call c, or put there by its exchange

A row is current while its stamp is at least that of the call under way, so that the pass over a
selection (see `planning/compiled.py`) tells hits apart from repetitions, touches rows and protects
them with one store. Dead rows lie on a stack, where a row may stay after it was admitted again.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from vllm_ula.arrays import filled
from vllm_ula.errors import IntegrityError, NotEnoughVictims
from vllm_ula.planner.base import Planner
from vllm_ula.planner.jit import compiled
from vllm_ula.records import DeviceSlots

Ints = NDArray[np.int64]
Stamps = NDArray[np.int32]
Flags = NDArray[np.uint8]

MAX_CLOCK = 2**31 - 8  # even, as is its half

DEAD, STACKED = 1, 2  # flags of a row; others are a subclass's


class StampPlanner(Planner):
    """A planner whose recency is the stamps; victims beyond the dead are up to the subclass.

    Attributes:
        clock: stamp of rows written by the current call; 2 more per call.
        stamp: int32 `[D]`.
        flags: uint8 `[D]`, DEAD and STACKED.
        current, admitted: rows of the current call; whoever stamps rows adds to them.
    """

    wants_touched = False

    def __init__(self, num_device: int) -> None:
        super().__init__(num_device)
        self.clock = 0
        self.stamp: Stamps = filled(num_device, -1, np.int32)
        self.flags: Flags = filled(num_device, 0, np.uint8)
        self.stack = np.zeros(num_device, dtype=np.int32)
        self.num_stacked = self.num_dead = 0
        self.current = self.admitted = 0
        self._victims: Ints = np.empty(1024, dtype=np.int64)

    @override
    def begin_call(self) -> None:
        if self.clock > MAX_CLOCK:
            self.rebase(MAX_CLOCK // 2)
        self.clock += 2
        self.current = self.admitted = 0

    def rebase(self, by: int) -> None:
        """Move all stamps back, once in 2^29 calls; what is older than `by` becomes equally old."""
        self.clock -= by
        np.maximum(self.stamp - by, -1, out=self.stamp)

    @override
    def touch(self, slots: DeviceSlots) -> None:
        self.current += _touch(self.stamp, slots.index.numpy(), self.clock + 1)

    @override
    def admit(self, slots: DeviceSlots, owners: Tensor) -> None:
        self.renew(slots.index.numpy(), owners.numpy())

    def renew(self, slots: Ints, owners: Ints) -> None:
        """`admit` for arrays."""
        new, revived = _admit(self.stamp, self.flags, slots, self.clock + 1)
        self.current += new
        self.num_dead -= revived
        self.admitted += len(slots)

    @override
    def bury(self, slots: DeviceSlots) -> None:
        self.num_dead, self.num_stacked = _bury(
            self.flags, self.stack, slots.index.numpy(), self.num_dead, self.num_stacked
        )

    def stamped(self, current: int, rewritten: int, revived: int, touched: Ints) -> None:
        """The call's rows were stamped from outside (see the module), and flags cleared.

        Args:
            current: distinct rows stamped.
            rewritten: those of them that are written.
            revived: those of them that were dead.
            touched: the rows, if `wants_touched`.
        """
        self.current += current
        self.admitted += rewritten
        self.num_dead -= revived

    @override
    def num_current(self) -> int:
        return self.current

    @override
    def dead(self) -> Tensor:
        return torch.from_numpy((self.flags & DEAD).astype(bool))

    @override
    def _coldest(self, incoming: Tensor, required: int) -> Tensor:
        return torch.from_numpy(self.victims(incoming.numpy(), required))

    def victims(self, incoming: Ints, required: int) -> Ints:
        """`choose` for arrays, of which the first `required` must get a row.

        Raises:
            NotEnoughVictims: as `choose`.
        """
        num = len(incoming)
        if required > self.num_device - self.current:
            raise NotEnoughVictims(required, self.num_device - self.current)
        if num > len(self._victims):
            self._victims = np.empty(2 * num, dtype=np.int64)
        victims = self._victims[:num]
        found, self.num_stacked = _pop_dead(
            self.stamp, self.flags, self.stack, self.num_stacked, self.clock, victims
        )
        if found < required:
            victims = victims[:required]
            self._coldest_live(incoming, victims, found)
            return victims
        return victims[:found]

    @abstractmethod
    def _coldest_live(self, incoming: Ints, victims: Ints, found: int) -> None:
        """Fill `victims[found:]`; all rows that are dead and not current stand before."""

    @override
    def check_integrity(self) -> None:
        if (self.stamp > self.clock + 1).any():
            raise IntegrityError(f"a row was touched after the clock, {self.clock}")
        stacked = np.sort(self.stack[: self.num_stacked])
        if not np.array_equal(stacked, (self.flags & STACKED).nonzero()[0]):
            raise IntegrityError("the stack of dead rows and its flags differ")
        dead = (self.flags & DEAD).astype(bool)
        if (dead & (self.flags & STACKED == 0)).any() or dead.sum() != self.num_dead:
            raise IntegrityError("a dead row is not on the stack of dead rows, or not counted")


@compiled
def _touch(stamp: Stamps, slots: Ints, now: int) -> int:
    new = 0
    for slot in slots:
        new += stamp[slot] < now - 1
        stamp[slot] = now
    return new


@compiled
def _admit(stamp: Stamps, flags: NDArray[np.uint8], slots: Ints, now: int) -> tuple[int, int]:
    new = revived = 0
    for slot in slots:
        new += stamp[slot] < now - 1
        stamp[slot] = now
        revived += flags[slot] & DEAD
        flags[slot] &= ~DEAD
    return new, revived


@compiled
def _bury(
    flags: NDArray[np.uint8],
    stack: NDArray[np.int32],
    slots: Ints,
    num_dead: int,
    num_stacked: int,
) -> tuple[int, int]:
    for slot in slots:
        num_dead += not flags[slot] & DEAD
        if not flags[slot] & STACKED:
            stack[num_stacked] = slot
            num_stacked += 1
        flags[slot] |= DEAD | STACKED
    return num_dead, num_stacked


@compiled
def _pop_dead(
    stamp: Stamps,
    flags: NDArray[np.uint8],
    stack: NDArray[np.int32],
    num_stacked: int,
    clock: int,
    victims: Ints,
) -> tuple[int, int]:
    """Dead rows that are not current, from the top of the stack; drops what is dead no longer.

    What it returns stays below the new top's reach: victims are dead until they are admitted.
    """
    found, top, kept = 0, num_stacked, 0
    while found < len(victims) and top > 0:
        top -= 1
        slot = stack[top]
        if not flags[slot] & DEAD:
            flags[slot] &= ~STACKED
        else:
            if stamp[slot] < clock:
                victims[found] = slot
                found += 1
            kept += 1
            stack[num_stacked - kept] = slot  # at or above `top`, which was read already
    for i in range(kept):
        stack[top + i] = stack[num_stacked - kept + i]
    return found, top + kept
