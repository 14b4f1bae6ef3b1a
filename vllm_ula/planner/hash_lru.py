"""LRU inside hash buckets: the variant of the technical breakdown, section 2.

    bucket(l) = (l * 11400714819323198485 mod 2**64) >> (64 - log2 B)

Device rows are partitioned by a multiplicative hash of the logical slot that lives in them, and a
victim comes from the bucket of the row that wants its place. Where every bucket has a lock of its
own, B threads can evict at once; what it costs in hit rate is what `vllm-ula replay` shows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from vllm_ula.errors import IntegrityError
from vllm_ula.planner.jit import compiled
from vllm_ula.planner.stamps import Ints, StampPlanner, Stamps
from vllm_ula.records import DeviceSlots

_GOLDEN = np.uint64(11400714819323198485)
Links = NDArray[np.int32]

DEAD = 1  # the flag of planner/stamps.py


class HashLru(StampPlanner):
    """Victims dead first, then the least recent row of the incoming row's bucket.

    When a bucket has no victim (every row in it is current, or chosen already), the next one that
    has gives its least recent row; `no_victim` counts how often.

    Args:
        num_device: device rows D, > 0.
        num_buckets: hash buckets B, a power of two.
    """

    wants_touched = True

    def __init__(self, num_device: int, num_buckets: int = 64) -> None:
        super().__init__(num_device)
        self.num_buckets = num_buckets
        self.no_victim = 0
        self._shift = np.uint64(64 - num_buckets.bit_length() + 1)
        # A ring per bucket, from its head (node D + b) over the least recent row to the newest.
        nodes = np.arange(num_device + num_buckets, dtype=np.int32)
        self.previous: Links = nodes.copy()
        self.next: Links = nodes.copy()
        self.bucket: Links = np.full(num_device, -1, dtype=np.int32)
        slots = np.arange(num_device, dtype=np.int64)
        self._move(slots, slots)

    def _move(self, slots: Ints, owners: Ints) -> None:
        _move(self.previous, self.next, self.bucket, slots, owners, self._shift)

    @override
    def touch(self, slots: DeviceSlots) -> None:
        super().touch(slots)
        self._touched(slots.index.numpy())

    @override
    def stamped(self, current: int, rewritten: int, revived: int, touched: Ints) -> None:
        super().stamped(current, rewritten, revived, touched)
        self._touched(touched)

    def _touched(self, slots: Ints) -> None:
        _touched(self.previous, self.next, self.bucket, slots, self.num_device)

    @override
    def renew(self, slots: Ints, owners: Ints) -> None:
        super().renew(slots, owners)
        self._move(slots, owners)

    @override
    def _coldest_live(self, incoming: Ints, victims: Ints, found: int) -> None:
        self.no_victim += _pick(
            self.next,
            self.stamp,
            self.flags,
            self.clock,
            incoming,
            victims,
            found,
            self.num_buckets,
            self._shift,
        )

    @override
    def check_integrity(self) -> None:
        super().check_integrity()
        seen = 0
        for bucket in range(self.num_buckets):
            node = head = self.num_device + bucket
            while (after := int(self.next[node])) != head:
                if self.previous[after] != node or self.bucket[after] != bucket:
                    raise IntegrityError(f"hash bucket {bucket} is linked wrongly")
                node, seen = after, seen + 1
        if seen != self.num_device:
            raise IntegrityError(f"hash buckets hold {seen} of {self.num_device} rows")


@compiled
def bucket_of(owner: int, shift: np.uint64) -> int:
    """The bucket of a logical slot."""
    if shift == np.uint64(64):
        return 0
    bucket = (np.uint64(owner) * _GOLDEN) >> shift
    return np.int64(bucket)  # type: ignore[return-value]


@compiled
def _unlink(previous: Links, next_: Links, slot: int) -> None:
    next_[previous[slot]], previous[next_[slot]] = next_[slot], previous[slot]


@compiled
def _link_last(previous: Links, next_: Links, slot: int, head: int) -> None:
    newest = previous[head]
    previous[slot], next_[slot] = newest, head
    next_[newest] = previous[head] = slot


@compiled
def _move(
    previous: Links, next_: Links, bucket: Links, slots: Ints, owners: Ints, shift: np.uint64
) -> None:
    """Rows change owners: each becomes the newest of its new owner's bucket."""
    for i in range(len(slots)):
        slot = slots[i]
        if bucket[slot] >= 0:
            _unlink(previous, next_, slot)
        bucket[slot] = bucket_of(owners[i], shift)
        _link_last(previous, next_, slot, len(bucket) + bucket[slot])


@compiled
def _touched(previous: Links, next_: Links, bucket: Links, slots: Ints, num_device: int) -> None:
    """Rows become the newest of the bucket they are in."""
    for slot in slots:
        _unlink(previous, next_, slot)
        _link_last(previous, next_, slot, num_device + bucket[slot])


@compiled
def _pick(
    next_: Links,
    stamp: Stamps,
    flags: NDArray[np.uint8],
    clock: int,
    incoming: Ints,
    victims: Ints,
    found: int,
    num_buckets: int,
    shift: np.uint64,
) -> int:
    """Fill `victims[found:]`; returns for how many rows their own bucket had none."""
    num_device = len(stamp)
    # Where each bucket's search goes on. Current rows are its newest: the first one ends it.
    at = np.empty(num_buckets, dtype=np.int32)
    for b in range(num_buckets):
        at[b] = next_[num_device + b]
    missed = 0
    for i in range(found, len(victims)):
        b = own = bucket_of(incoming[i], shift)
        while True:
            slot = at[b]
            while slot < num_device and flags[slot] & DEAD:
                slot = next_[slot]
            if slot < num_device and stamp[slot] < clock:
                break
            at[b] = slot
            b = (b + 1) % num_buckets
        missed += b != own
        victims[i] = slot
        at[b] = next_[slot]
    return missed
