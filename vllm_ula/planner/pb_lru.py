"""PB-LRU: LRU over recency buckets instead of rows (paper section 5.1).

    period      0 .. period-B+1 | period-B+2 ... period-1 | period
    level            0          |      1     ...   B-2    |  B-1
                   cold         |  older  ->  newer       |  open

A row's bucket is the period in which it was last used; what is older than B buckets is cold and
not told apart any more. When a period ends is the setting `bucket_age`, see `BucketAge`.

A hit only stamps its row. Which rows a bucket holds is a queue that may lag behind the stamps:
every row lies in exactly one queue, of its own bucket or of an older one. Looking for victims
goes through the queues from cold to open; a row that was used since moves to the queue it belongs
to. Victims enter the open queue when they are admitted, ahead of the hits of their call: of two
rows of one bucket, the one used once goes first. m victims cost m + B steps, and one for each row
used since its queue was last looked through, however large the pool is.
"""

from __future__ import annotations

import numpy as np
from typing_extensions import override

from vllm_ula.errors import IntegrityError
from vllm_ula.planner.base import BucketAge
from vllm_ula.planner.queues import (
    TAKEN,
    Queues,
    append_all,
    find_victims,
    merge,
    put_back,
)
from vllm_ula.planner.stamps import Ints, StampPlanner, Stamps


class PbLru(StampPlanner):
    """Victims dead first, then cold, then bucket by bucket from older to newer.

    Attributes:
        looked_at: rows looked at in search of victims so far.

    Args:
        num_device: device rows D, > 0.
        num_buckets: recency buckets B, >= 2, the cold one included.
        bucket_age: a period ends after every call, or after the first call with which D / B rows
            were touched (hits included) or admitted (given new bytes, fetched or written) in it.
            Admitted rows age nothing while there are only hits, and a bucket more or less costs
            no hits: on recorded and synthetic traces all three are within 0.03 points of each
            other and of exact LRU (benchmarks/results/planner.csv, `policies`).
    """

    def __init__(
        self,
        num_device: int,
        num_buckets: int = 64,
        bucket_age: BucketAge = BucketAge.ADMITTED,
    ) -> None:
        super().__init__(num_device)
        self.bucket_age = bucket_age
        self.rows_per_bucket = max(num_device // num_buckets, 1)
        self.used = 0
        self.looked_at = 0
        # By level: the first stamp of its period, and its queue. The cold level has no first stamp.
        self.edges: Stamps = np.zeros(num_buckets, dtype=np.int32)
        self.edges[0] = np.iinfo(np.int32).min
        self.queue = np.arange(num_buckets, dtype=np.int32)
        self.queues = Queues(num_device, num_buckets)
        self._taken: Ints = np.empty(0, dtype=np.int64)
        self._num_taken = 0
        append_all(*self.queues.arrays, 0, num_device)

    @override
    def begin_call(self) -> None:
        match self.bucket_age:
            case BucketAge.CALLS:
                self.used = self.rows_per_bucket
            case BucketAge.TOUCHED:
                self.used += self.current
            case BucketAge.ADMITTED:
                self.used += self.admitted
        super().begin_call()
        if self.used >= self.rows_per_bucket:
            self.used = 0
            # The oldest bucket that was told apart is cold now; its queue is the new period's.
            oldest = self.queue[1]
            merge(*self.queues.arrays, self.queue[0], oldest)
            self.edges[1:-1] = self.edges[2:]
            self.queue[1:-1] = self.queue[2:]
            self.edges[-1], self.queue[-1] = self.clock, oldest

    @override
    def rebase(self, by: int) -> None:
        super().rebase(by)
        self.edges[1:] = np.maximum(self.edges[1:] - by, -1)

    @override
    def _coldest_live(self, incoming: Ints, victims: Ints, found: int) -> None:
        self.looked_at += find_victims(
            *self.queues.arrays,
            self.stamp,
            self.flags,
            self.edges,
            self.queue,
            self.clock,
            victims,
            found,
        )
        self._taken = victims[found:]
        self._num_taken = len(victims) - found

    @override
    def victims(self, incoming: Ints, required: int) -> Ints:
        if self._num_taken:  # chosen before and not admitted
            self._put_back(self._taken)
        return super().victims(incoming, required)

    @override
    def renew(self, slots: Ints, owners: Ints) -> None:
        super().renew(slots, owners)
        if self._num_taken:
            self._put_back(slots)

    def _put_back(self, slots: Ints) -> None:
        self._num_taken -= put_back(
            *self.queues.arrays, self.stamp, self.flags, self.edges, self.queue, slots
        )

    def levels(self) -> Ints:
        """int64 `[D]`: 0 for cold rows to `num_buckets - 1` for rows of the open bucket."""
        return np.searchsorted(self.edges[1:], self.stamp, side="right")

    @override
    def check_integrity(self) -> None:
        super().check_integrity()
        self.queues.check_integrity()
        levels = self.levels()
        seen = []
        for level, queue in enumerate(self.queue.tolist()):
            rows = self.queues.rows_of(queue)
            if (levels[rows] < level).any():
                raise IntegrityError(f"a row lies in a bucket after its own, level {level}")
            seen.append(rows)
        seen.append((self.flags & TAKEN).nonzero()[0].astype(np.int32))
        if not np.array_equal(np.sort(np.concatenate(seen)), np.arange(self.num_device)):
            raise IntegrityError("the buckets do not hold every device row once")
