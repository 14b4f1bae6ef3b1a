"""What planning a call costs: PB-LRU against an exact LRU as a list and as a scan of timestamps.

A call is `requests` x 2,048 references, all of decode tokens; 13 % are on the host. Of the others
three quarters were used by the call before, as in sparse decoding, and the rest are any rows of
the device. All three translate, touch, de-duplicate, choose victims and change the map; bytes do
not move. Every planner sees its own device rows in the same stream of random numbers.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.figure import Figure, Progress
from benchmarks.list_lru import ListLru
from vllm_ula.planner.pb_lru import PbLru
from vllm_ula.planner.stamps import StampPlanner
from vllm_ula.planner.timestamp_lru import TimestampLru
from vllm_ula.planning import Scratch
from vllm_ula.planning.compiled import CompiledPlanning
from vllm_ula.records import Call
from vllm_ula.replay.plots import PlanTime, plan_times
from vllm_ula.residency import Residency

Ints = NDArray[np.int64]

TOPK, MISSING, REUSED, HOST_SHARE = 2048, 0.13, 0.75, 3
SIZES = (16, 18, 20, 22)  # powers of two of device rows
REQUESTS = (16, 64, 256, 512)
WARM_UP, CALLS = 4, 12
_NONE = torch.empty(0, dtype=torch.int64)


class Contender:
    """One way to plan; times its calls."""

    def __init__(self, rows: int, requests: int, missing: float) -> None:
        self.rows, self.requests, self.missing = rows, requests, missing
        self.rng = np.random.default_rng(0)
        self.before: Ints = self.rng.integers(0, rows, requests * TOPK)
        self.misses = 0
        self.seconds: list[float] = []

    def owners(self) -> NDArray[np.int32]:
        """The logical slot in each device row."""
        raise NotImplementedError

    def serve(self, selection: Ints) -> int:
        """Plan one call; rows that were missing."""
        raise NotImplementedError

    def step(self) -> None:
        """Make a selection and time the call."""
        rng, num = self.rng, self.requests * TOPK
        num_missing = int(num * self.missing)
        owners = self.owners()
        num_again = int((num - num_missing) * REUSED)
        # Rows of the call before that are still there, by where they lived then.
        again = owners[rng.choice(self.before, num_again)]
        others = owners[rng.integers(0, self.rows, num - num_missing - num_again)]
        on_device = np.zeros(self.rows * (1 + HOST_SHARE), dtype=np.bool_)
        on_device[owners] = True
        host = rng.integers(0, len(on_device), 2 * num_missing + 64)
        host = host[~on_device[host]][:num_missing]
        selection = np.concatenate((again, others, host)).astype(np.int64)
        rng.shuffle(selection)
        selection = np.resize(selection, num)
        start = time.perf_counter()
        self.misses = self.serve(selection)
        self.seconds.append(time.perf_counter() - start)
        self.before = self.homes_of(selection)

    def homes_of(self, selection: Ints) -> Ints:
        """Where the rows of the last call live now."""
        raise NotImplementedError


class Planned(Contender):
    """A serving planner."""

    def __init__(self, planner: StampPlanner, requests: int, missing: float) -> None:
        rows = planner.num_device
        super().__init__(rows, requests, missing)
        residency = Residency(rows, rows * HOST_SHARE)
        self.planning = CompiledPlanning(residency, planner, Scratch.of(residency))
        every = torch.arange(residency.num_logical)
        for part in torch.split(every, 1 << 16):  # all live, the oldest rows first
            nobody = torch.zeros(len(part), dtype=torch.bool)
            call = Call(part, nobody, _NONE.view(0, TOPK), nobody[:0])
            self.planning.complete(call, self.planning.plan(call))
        self.decode = torch.ones(requests, dtype=torch.bool)

    def owners(self) -> NDArray[np.int32]:
        """See Contender."""
        return self.planning.residency.owner.numpy()

    def serve(self, selection: Ints) -> int:
        """See Contender."""
        call = Call(
            _NONE, _NONE.bool(), torch.from_numpy(selection).view(self.requests, TOPK), self.decode
        )
        plan = self.planning.plan(call)
        self.planning.complete(call, plan)
        return len(plan.exchange)

    def homes_of(self, selection: Ints) -> Ints:
        """See Contender."""
        return self.planning.residency.home.numpy()[selection].astype(np.int64)


class Listed(Contender):
    """The list."""

    def __init__(self, rows: int, requests: int, missing: float) -> None:
        super().__init__(rows, requests, missing)
        self.lru = ListLru(rows, rows * (1 + HOST_SHARE))
        num = requests * TOPK
        self.homes, self.incoming, self.victims, self.missed = np.empty((4, num), dtype=np.int64)

    def owners(self) -> NDArray[np.int32]:
        """See Contender."""
        return self.lru.owner

    def serve(self, selection: Ints) -> int:
        """See Contender."""
        lru, homes, incoming, victims = self.lru, self.homes, self.incoming, self.victims
        num, num_missed = lru.plan(selection, homes, incoming, victims, self.missed)
        missed = self.missed[:num_missed]
        lru.complete(selection, homes, incoming[:num], victims[:num], missed)
        return num

    def homes_of(self, selection: Ints) -> Ints:
        """See Contender."""
        return self.homes.copy()


@dataclass(frozen=True)
class Measured:
    """Medians of one size.

    Attributes:
        rows: device rows.
        requests: of a call.
        ns: nanoseconds a reference, by contender.
        worst: milliseconds of PB-LRU's longest call.
        to_list: PB-LRU's time over the list's, median of interleaved pairs.
        to_scan: over the scan's.
    """

    rows: int
    requests: int
    ns: dict[str, float]
    worst: float
    to_list: float
    to_scan: float


MEASURED: list[Measured] = []

MAKE: dict[str, Callable[[int, int, float], Contender]] = {
    "pb_lru": lambda rows, requests, missing: Planned(PbLru(rows), requests, missing),
    "list": Listed,
    "scan": lambda rows, requests, missing: Planned(TimestampLru(rows), requests, missing),
}


def measure(rows: int, requests: int, missing: float = MISSING, calls: int = CALLS) -> Measured:
    """Time all contenders in turns."""
    contenders = {name: make(rows, requests, missing) for name, make in MAKE.items()}
    check()
    for number in range(WARM_UP + calls):
        for contender in contenders.values():
            contender.step()
        if number == WARM_UP - 1:
            for contender in contenders.values():
                contender.seconds.clear()
    pb = contenders["pb_lru"].seconds
    references = requests * TOPK

    def to(name: str) -> float:
        other = contenders[name].seconds
        return statistics.median(a / b for a, b in zip(pb, other, strict=True))

    return Measured(
        rows,
        requests,
        {n: statistics.median(c.seconds) / references * 1e9 for n, c in contenders.items()},
        max(pb) * 1e3,
        to("list"),
        to("scan"),
    )


@functools.cache
def check() -> None:
    """The list and the scan miss the same rows, or no figure is taken; one row a call, no ties."""
    rows = 256
    scan, listed = MAKE["scan"](rows, 1, MISSING), MAKE["list"](rows, 1, MISSING)
    slots = np.random.default_rng(1).zipf(1.2, 3000) % (rows * (1 + HOST_SHARE))
    misses = 0
    for slot in [*range(rows), *slots.tolist()]:
        selection = np.full(TOPK, slot, dtype=np.int64)
        missed = scan.serve(selection)
        misses += missed
        if listed.serve(selection) != missed:
            raise RuntimeError("the two exact LRUs miss different rows")
    if not rows < misses < 3000:
        raise RuntimeError(f"{misses} misses tell nothing about the two exact LRUs")


def sizes() -> list[tuple[int, int]]:
    """Rows and requests of the sweep: references are at most a quarter of the rows."""
    pairs = [(1 << power, requests) for power in SIZES for requests in REQUESTS]
    fitting = [(rows, requests) for rows, requests in pairs if requests * TOPK <= rows // 4]
    return [(1 << SIZES[0], 8), *fitting]  # the smallest pool has room for 8 requests only


def draw(path: Path) -> None:
    """Draw what `planner` has measured with 16 requests (8 in the smallest pool)."""
    names = {"pb_lru": "PB-LRU", "list": "exact LRU, list", "scan": "exact LRU, scan"}
    points = [
        PlanTime(names[name], m.rows, ns)
        for m in MEASURED
        if m.requests <= REQUESTS[0]
        for name, ns in m.ns.items()
    ]
    if points:
        plan_times(
            path,
            points,
            "Planning a call: 16 requests (8 at 2^16) x 2,048 references, 13 % missing",
        )


def planner(directory: str, progress: Progress) -> list[Figure]:
    """The sweep, its growth, and one request without a miss."""
    figures, by_size = [], {}
    for rows, requests in sizes():
        m = by_size[rows, requests] = measure(rows, requests)
        MEASURED.append(m)
        main = (rows, requests) == (1 << 20, 64)
        progress(f"planner, 2^{rows.bit_length() - 1} rows")
        name = f"2^{rows.bit_length() - 1} rows, {requests} requests"
        ns = ", ".join(f"{m.ns[other]:.0f} {other}" for other in ("list", "scan"))
        figures += [
            Figure(
                "planner",
                f"{name}: ns per reference (longest call {m.worst:.1f} ms)",
                f"{m.ns['pb_lru']:.0f}",
                ns,
            ),
            _ratio(f"{name}: time over the list's", m.to_list, 0.5 if main else None),
            _ratio(f"{name}: time over the scan's", m.to_scan, 0.2 if main else None),
        ]
    smallest = min(m.ns["pb_lru"] for (rows, _), m in by_size.items() if rows == 1 << SIZES[0])
    largest = max(m.ns["pb_lru"] for (rows, _), m in by_size.items() if rows == 1 << SIZES[-1])
    figures.append(_ratio("ns per reference, largest over smallest pool", largest / smallest, 3.0))
    one = measure(1 << 20, 1, missing=0.0, calls=60)
    figures.append(_ratio("one request, no miss: time over the list's", one.to_list, 1.5))
    progress("planner, one request")
    return figures


def _ratio(what: str, ratio: float, goal: float | None) -> Figure:
    text = "" if goal is None else f"<= {goal:g}"
    return Figure("planner", what, f"{ratio:.2f}", goal=text, ok=goal is None or ratio <= goal)
