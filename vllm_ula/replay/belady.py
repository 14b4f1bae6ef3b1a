"""The optimum: rows whose next use lies furthest ahead leave first.

    pass 1   events -> for every use of a row the number of its next use   (kept in memory)
    pass 2   the same events, served; a group of rows has a list per future use

A call needs all its rows at once, so those it selects or decode tokens write never leave in it;
rows that prefill tokens write stay only where they displace a row used later. Content that is
overwritten before it is read has no next use.

Shared by all requests, rows are logical slots and history exists once: a row that leaves and is
read again is copied out. With a quota per request, rows are positions and history is also on the
host: each decode row is written through.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from vllm_ula.errors import ConfigError
from vllm_ula.planner.jit import compiled
from vllm_ula.replay.next_use import FILL, READ, WRITE, Uses
from vllm_ula.replay.policy import Distinct, Policy, Served, sequences
from vllm_ula.traces.events import Admission, Deaths, End, Event, Int64s, TracedCall

# About 20 bytes a use while the first pass runs: 2 GB.
MAX_USES = 100_000_000


class Belady(Policy):
    """Fetches as few rows over the whole trace as any policy could with these device rows.

    Over a part of the trace, say after a warm-up, another policy may fetch fewer.
    Streaming is not offered: next uses are held in memory, and longer traces are refused.

    Args:
        events: the events that will be served, all of them.
        domain: the domain this instance serves.
        device_rows: rows of the shared pool, or of each request with `per_request`.
        per_request: a quota for every request instead of one shared pool.
        max_uses: refuse more uses of rows than this.

    Raises:
        ConfigError: the trace has more uses than `max_uses`.
    """

    def __init__(
        self,
        events: Iterable[Event],
        domain: int,
        device_rows: int,
        per_request: bool = False,
        max_uses: int = MAX_USES,
    ) -> None:
        self.device_rows = device_rows
        self.per_request = per_request
        self._distinct, self._also = Distinct(), Distinct()
        self._groups: dict[int, int] = {}
        self._seen = np.zeros(0, dtype=np.int64)
        self._cursor = 0
        uses = Uses()
        for event in events:
            if isinstance(event, TracedCall) and event.domain == domain:
                for group, keys, kinds in self._use(event):
                    uses.append(group, keys, kinds)
                    if uses.num > max_uses:
                        rule = f"the optimum holds at most {max_uses} uses of rows in memory"
                        raise ConfigError(
                            "policy", "belady", rule, "a shorter trace or another policy"
                        )
        self._base, self._next, rounds, num_keys = uses.next_uses()
        self._first = np.concatenate(([0], np.cumsum(rounds + 1)))
        self._rows = _Rows(num_keys, int(self._first[-1]), len(rounds))
        self._round = np.zeros(len(rounds), dtype=np.int64)

    @override
    def call(self, call: TracedCall) -> Served:
        total = Served()
        for group, keys, kinds in self._use(call):
            start, first = self._cursor, int(self._first[group])
            self._cursor += len(keys)
            selected, fetched, copied_out, written = _serve(
                keys + self._base[group],
                kinds,
                self._next[start : self._cursor],
                first,
                int(self._first[group + 1]) - first - 1,
                group,
                self.device_rows,
                *self._rows.arrays,
            )
            total += Served(
                selected=selected,
                hits=selected - fetched,
                fetched=fetched,
                written_back=written if self.per_request else copied_out,
            )
        return total

    @override
    def admit(self, admission: Admission) -> None:
        """The events are known already."""

    @override
    def end(self, end: End) -> None:
        """The events are known already."""

    @override
    def deaths(self, deaths: Deaths) -> None:
        """The events are known already."""

    def num_kept(self, group: int = 0) -> int:
        """Rows the group has on the device."""
        return int(self._rows.size[group])

    def _use(self, call: TracedCall) -> Iterable[tuple[int, Int64s, NDArray[np.int8]]]:
        """Groups of a call with their distinct rows and what happens to each."""
        if not self.per_request:
            yield 0, *self._kinds(call.selection, call.written, call.decode)
            return
        for seq, tokens in sequences(call):
            group = self._groups.setdefault(seq, len(self._groups))
            decode = call.decode[tokens]
            if decode.any():
                positions = call.positions[tokens]
                yield group, *self._kinds(call.selected_positions[tokens], positions, decode)

    def _kinds(
        self, selection: Int64s, written: Int64s, decode: NDArray[np.bool_]
    ) -> tuple[Int64s, NDArray[np.int8]]:
        read = self._distinct(selection[decode])
        keys = self._also(np.concatenate((read, written[written >= 0])))
        if len(keys) == 0:
            return keys, np.empty(0, dtype=np.int8)
        if int(keys.max()) >= len(self._seen):
            self._seen = np.zeros(2 * int(keys.max()) + 1, dtype=np.int64)
        kind = self._seen
        kind[read] += READ
        kind[written[(written >= 0) & decode]] |= WRITE
        kind[written[(written >= 0) & ~decode]] |= FILL
        kinds: NDArray[np.int8] = kind[keys].astype(np.int8)
        kind[keys] = 0
        return keys, kinds


class _Rows:
    """Rows on the device: of each group a list per future use, the last one for `never`."""

    def __init__(self, num_keys: int, num_lists: int, num_groups: int) -> None:
        self.head = np.full(num_lists, -1, dtype=np.int32)
        self.at = np.full(num_keys, -1, dtype=np.int32)  # the list of a row, -1 if on the host
        self.after = np.full(num_keys, -1, dtype=np.int32)
        self.before = np.full(num_keys, -1, dtype=np.int32)
        self.size = np.zeros(num_groups, dtype=np.int64)
        self.furthest = np.zeros(num_groups, dtype=np.int64)

    @property
    def arrays(self) -> tuple[NDArray[np.integer], ...]:
        return self.head, self.at, self.after, self.before, self.size, self.furthest


@compiled
def _remove(key, head, at, after, before):  # type: ignore[no-untyped-def]
    if before[key] >= 0:
        after[before[key]] = after[key]
    else:
        head[at[key]] = after[key]
    if after[key] >= 0:
        before[after[key]] = before[key]
    at[key] = -1


@compiled
def _insert(key, place, head, at, after, before):  # type: ignore[no-untyped-def]
    at[key] = place
    before[key] = -1
    after[key] = head[place]
    if head[place] >= 0:
        before[head[place]] = key
    head[place] = key


@compiled
def _serve(  # type: ignore[no-untyped-def]
    keys, kinds, next_use, first, never, group, room, head, at, after, before, size, furthest
):
    selected = fetched = copied_out = written = 0
    held = 0
    for i in range(len(keys)):
        key, kind = keys[i], kinds[i]
        if at[key] >= 0:
            _remove(key, head, at, after, before)
            size[group] -= 1
        elif kind == 1:
            fetched += 1
        selected += kind & 1
        written += (kind & 2) >> 1
        # What the call needs is held until it is over.
        if kind & 3:
            held += 1

    far = furthest[group]
    while size[group] > 0 and size[group] + held > room:
        while head[first + far] < 0:
            far -= 1
        copied_out += far < never
        _remove(head[first + far], head, at, after, before)
        size[group] -= 1

    for i in range(len(keys)):
        # Rows beyond the room are fetched and not kept.
        if kinds[i] & 3 and size[group] < room:
            _insert(keys[i], first + next_use[i], head, at, after, before)
            size[group] += 1
            far = max(far, next_use[i])
    for i in range(len(keys)):
        if kinds[i] & 3 or next_use[i] == never:
            continue
        _insert(keys[i], first + next_use[i], head, at, after, before)
        size[group] += 1
        far = max(far, next_use[i])
        if size[group] > room:
            while head[first + far] < 0:
                far -= 1
            victim = head[first + far]
            # A prefill row that does not stay was written to the host in the first place.
            copied_out += far < never and victim != keys[i]
            _remove(victim, head, at, after, before)
            size[group] -= 1
    furthest[group] = far
    return selected, fetched, copied_out, written
