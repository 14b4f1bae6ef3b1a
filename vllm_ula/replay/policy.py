"""The contract of a policy in replay: it is told what happened and says what it would have cost.

Serving planners move rows; a policy here only counts them. One instance serves one domain, because
the rows of a domain's layers move together and those of two domains never meet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np

from vllm_ula.planner.jit import compiled
from vllm_ula.traces.events import Admission, Deaths, End, Event, Int64s, TracedCall


@dataclass(frozen=True, slots=True)
class Served:
    """What one call cost; rows are distinct per sequence or, in a shared pool, per call.

    Only rows selected by decode tokens count: prefill tokens read their rows where they are in
    every system. `selected == hits + fetched + in_place_device + in_place_host`.

    Attributes:
        selected: distinct rows the decode tokens selected.
        hits: of those, rows that had a device row, or got one by being written in this call.
        fetched: copied from host to device.
        in_place_device: read from a device row that the call does not protect.
        in_place_host: read from the host without getting a device row.
        written_back: rows copied from device to host, evicted or written through.
    """

    selected: int = 0
    hits: int = 0
    fetched: int = 0
    in_place_device: int = 0
    in_place_host: int = 0
    written_back: int = 0

    def __add__(self, other: Served) -> Served:
        names = [field.name for field in fields(self)]
        return Served(*(getattr(self, name) + getattr(other, name) for name in names))

    @property
    def hit_rate(self) -> float:
        """Share of the selected rows that were served from the device without a copy."""
        return (self.hits + self.in_place_device) / self.selected if self.selected else 1.0


class Policy(ABC):
    """One domain's rows under one system's rules. Events come in the order of the trace."""

    @abstractmethod
    def call(self, call: TracedCall) -> Served:
        """Serve one forward call; changes what the policy remembers."""

    @abstractmethod
    def admit(self, admission: Admission) -> None:
        """A sequence starts; what the policy knew of it before is forgotten."""

    @abstractmethod
    def end(self, end: End) -> None:
        """A sequence is finished: its rows are given up. Unknown ones are ignored.

        One that is preempted runs on, for all a trace says.
        """

    @abstractmethod
    def deaths(self, deaths: Deaths) -> None:
        """Logical blocks nobody reads again before writing them."""


def feed(policies: Sequence[Policy], event: Event) -> Served:
    """Give one event to the policies it concerns.

    Args:
        policies: one a domain; calls of further domains are ignored.
        event: the next one of the trace.
    """
    match event:
        case TracedCall():
            return policies[event.domain].call(event) if event.domain < len(policies) else Served()
        case Admission():
            for policy in policies:
                policy.admit(event)
        case End():
            for policy in policies:
                policy.end(event)
        case Deaths():
            for policy in policies:
                policy.deaths(event)
    return Served()


def replay(policies: Sequence[Policy], events: Iterable[Event], skip_calls: int = 0) -> Served:
    """Totals over a trace.

    Args:
        policies: one a domain.
        events: without the header.
        skip_calls: forward calls whose number is below are served but not counted (warm-up).
    """
    total = Served()
    for event in events:
        served = feed(policies, event)
        if isinstance(event, TracedCall) and event.call >= skip_calls:
            total = total + served
    return total


def sequences(call: TracedCall) -> Iterator[tuple[int, slice]]:
    """The sequences of a call with the tokens of each, which stand together."""
    bounds = np.flatnonzero(np.diff(call.seqs)) + 1
    starts = [0, *bounds.tolist(), len(call.seqs)]
    for start, stop in pairwise(starts):
        if stop > start:
            yield int(call.seqs[start]), slice(start, stop)


class Distinct:
    """Distinct entries of -1 padded arrays, in order of first appearance, without sorting."""

    def __init__(self) -> None:
        self._stamp = np.zeros(1024, dtype=np.int32)
        self._round = 0

    def __call__(self, entries: Int64s) -> Int64s:
        """Int64 `[d]` of int64 `[...]`."""
        flat = entries.reshape(-1)
        if len(flat) == 0:
            return flat
        length = int(flat.max()) + 1
        if length > len(self._stamp):
            self._stamp = np.zeros(max(length, 2 * len(self._stamp)), dtype=np.int32)
            self._round = 0
        self._round += 1
        found: Int64s = _distinct(flat, self._stamp, self._round)
        return found


@compiled
def _distinct(flat, stamp, number):  # type: ignore[no-untyped-def]
    found = np.empty(len(flat), dtype=np.int64)
    num = 0
    for entry in flat:
        if entry >= 0 and stamp[entry] != number:
            stamp[entry] = number
            found[num] = entry
            num += 1
    return found[:num].copy()
