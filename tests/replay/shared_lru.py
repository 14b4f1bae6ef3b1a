"""UlaCache with exact LRU: one device pool shared by all requests, rows of either tier distinct.

The rules are those of one forward call in `vllm_ula/step.py`, counted instead of carried out: rows
being written keep their device rows; rows that decode tokens write get one; then the selections of
decode tokens, in order, while they fit together; prefill rows take what is dead or stay on the
host. Victims are dead rows, then the row used longest ago, never a row of the call.

    device rows   dead .. | used longest ago  ...  used last
                  victims come from here
"""

from __future__ import annotations

import numpy as np
from typing_extensions import override

from vllm_ula.planner.jit import compiled
from vllm_ula.replay.policy import Policy, Served
from vllm_ula.traces.events import Admission, Deaths, End, TracedCall


class SharedLru(Policy):
    """Exact LRU over D device rows.

    Args:
        logical_slots: N.
        device_slots: D, at most N.
        block_size: logical slots of a block.
    """

    def __init__(self, logical_slots: int, device_slots: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_device = device_slots
        # Nothing is live at first, so the first D logical slots may be at home on the device.
        self.home = np.full(logical_slots, -1, dtype=np.int32)
        self.home[:device_slots] = np.arange(device_slots)
        self.owner = np.arange(device_slots, dtype=np.int32)
        self.live = np.zeros(logical_slots, dtype=np.bool_)
        # A ring of device slots; D itself stands between the last used and the next victim.
        self.after = np.roll(np.arange(device_slots + 1, dtype=np.int32), -1)
        self.before = np.roll(np.arange(device_slots + 1, dtype=np.int32), 1)
        # The call that last protected, served and wrote a logical slot; the token that counted it.
        self._seated = np.zeros(logical_slots, dtype=np.int32)
        self._served = np.zeros(logical_slots, dtype=np.int32)
        self._written = np.zeros(logical_slots, dtype=np.int32)
        self._counted = np.zeros(logical_slots, dtype=np.int64)
        self._calls = self._tokens = 0

    @override
    def call(self, call: TracedCall) -> Served:
        self._calls += 1
        served = Served(
            *_call(
                call.written,
                call.decode,
                call.selection,
                self._calls,
                self._tokens,
                self.home,
                self.owner,
                self.live,
                self.after,
                self.before,
                self._seated,
                self._served,
                self._written,
                self._counted,
            )
        )
        self._tokens += len(call.decode)
        return served

    @override
    def deaths(self, deaths: Deaths) -> None:
        slots = deaths.blocks[:, None] * self.block_size + np.arange(self.block_size)
        _die(slots.reshape(-1), self.home, self.live, self.after, self.before)

    @override
    def admit(self, admission: Admission) -> None:
        """Rows are known by the calls that write them."""

    @override
    def end(self, end: End) -> None:
        """Rows are known dead by `deaths`."""

    def residents(self) -> list[int]:
        """Logical slots at home on the device, from the next victim to the row used last."""
        slots, at = [], int(self.after[self.num_device])
        while at != self.num_device:
            slots.append(int(self.owner[at]))
            at = int(self.after[at])
        return slots


@compiled
def _move(slot, behind, after, before):  # type: ignore[no-untyped-def]
    if behind == slot:
        return
    after[before[slot]] = after[slot]
    before[after[slot]] = before[slot]
    after[slot] = after[behind]
    before[slot] = behind
    before[after[behind]] = slot
    after[behind] = slot


@compiled
def _die(slots, home, live, after, before):  # type: ignore[no-untyped-def]
    ring = len(after) - 1
    for row in slots:
        live[row] = False
        if home[row] >= 0:
            _move(home[row], ring, after, before)


@compiled
def _seat(row, home, owner, live, after, before):  # type: ignore[no-untyped-def]
    """Give a row the oldest device row; returns 1 if the row that leaves is live."""
    ring = len(after) - 1
    slot = after[ring]
    leaves = owner[slot]
    home[leaves] = -1
    owner[slot] = row
    home[row] = slot
    _move(slot, before[ring], after, before)
    return np.int64(live[leaves])


@compiled
def _call(  # type: ignore[no-untyped-def]
    writes,
    decode,
    selection,
    number,
    first_token,
    home,
    owner,
    live,
    after,
    before,
    seated,
    served,
    written,
    counted,
):
    ring = len(after) - 1
    room = ring
    selected = fetched = on_device = on_host = written_back = 0

    # Rows being written where they are; `before[ring]` is the row used last.
    for t in range(len(writes)):
        row = writes[t]
        if row < 0 or written[row] == number:
            continue
        written[row] = number
        if home[row] >= 0:
            seated[row] = number
            _move(home[row], before[ring], after, before)
            room -= 1
    incoming = np.empty(room, dtype=np.int64)
    num_incoming = 0
    for t in range(len(writes)):
        row = writes[t]
        if row >= 0 and decode[t] and seated[row] != number and num_incoming < room:
            seated[row] = number
            incoming[num_incoming] = row
            num_incoming += 1
    room -= num_incoming

    # Selections in order while they fit together; hits are protected before any victim is chosen.
    fits = True
    for t in range(len(decode)):
        if not decode[t]:
            continue
        wanted = 0
        for row in selection[t]:
            if row >= 0 and seated[row] != number and counted[row] != first_token + t + 1:
                counted[row] = first_token + t + 1
                wanted += 1
        fits = wanted <= room
        if not fits:
            break
        room -= wanted
        for row in selection[t]:
            if row < 0 or served[row] == number:
                continue
            served[row] = number
            selected += 1
            if seated[row] == number:
                continue
            seated[row] = number
            if home[row] >= 0:
                _move(home[row], before[ring], after, before)
            else:
                incoming[num_incoming] = row
                num_incoming += 1
                fetched += written[row] != number
    hits = selected - fetched

    for i in range(num_incoming):
        written_back += _seat(incoming[i], home, owner, live, after, before)
    for t in range(len(writes)):
        row = writes[t]
        if row < 0:
            continue
        # Dead rows stand first; one that the call uses stands last, whatever it was.
        leaves = owner[after[ring]]
        if home[row] < 0 and not live[leaves] and seated[leaves] != number:
            _seat(row, home, owner, live, after, before)
            seated[row] = number
        live[row] = True

    if not fits:
        for t in range(len(decode)):
            if not decode[t]:
                continue
            for row in selection[t]:
                if row < 0 or served[row] == number:
                    continue
                served[row] = number
                selected += 1
                if home[row] >= 0:
                    on_device += 1
                else:
                    on_host += 1
    return selected, hits, fetched, on_device, on_host, written_back
