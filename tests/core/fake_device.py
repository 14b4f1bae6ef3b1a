"""A device that writes launches down and plays them later, in any order its streams allow."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass

from vllm_ula.records import CallPlan

COMPUTE, COPY = 0, 1


@dataclass(frozen=True)
class Op:
    """`launch` does something, `record` makes an event happen, `wait` holds its queue up."""

    kind: str
    name: str
    event: int = -1
    run: Callable[[], None] = lambda: None


class FakeDevice:
    """The `Streams` of a device on which nothing happens until it is played."""

    def __init__(self):
        self.queues = [[], []]
        self.events = []  # what each is for
        self.now = COMPUTE
        self.joining = True

    def new(self):
        return FakeStream(self, COPY)

    def current(self):
        return FakeStream(self, self.now)

    @contextlib.contextmanager
    def on(self, stream):
        self.now = stream.number
        yield
        self.now = COMPUTE

    def launch(self, name, run):
        self.queues[self.now].append(Op("launch", name, run=run))

    def play(self, order, without=None):
        """Run all queues in a random order, without the events or waits of one kind and name."""
        happened = {e for e, name in enumerate(self.events) if without == ("record", name)}
        at, done = [0, 0], []
        compute_first = order.choice((0.03, 0.3, 0.5, 0.7, 0.97))

        def can_go(stream):
            if at[stream] == len(self.queues[stream]):
                return False
            op = self.queues[stream][at[stream]]
            return op.kind != "wait" or op.event in happened or without == ("wait", op.name)

        while ready := [stream for stream in (COMPUTE, COPY) if can_go(stream)]:
            stream = COMPUTE if order.random() < compute_first else COPY
            stream = stream if stream in ready else ready[0]
            op = self.queues[stream][at[stream]]
            at[stream] += 1
            op.run()
            done.append(op)
            if op.kind == "record":
                happened.add(op.event)
        assert at == [len(queue) for queue in self.queues], "the streams wait for each other"
        return [op.name for op in done if op.kind == "launch"]


@dataclass(frozen=True)
class FakeStream:
    device: FakeDevice
    number: int

    def record_event(self):
        queue, events = self.device.queues[self.number], self.device.events
        name = "fork"
        if self.number == COPY:
            last_fork = max(i for i, op in enumerate(queue) if op.kind == "wait")
            name = f"layer {1 + sum(op.kind == 'record' for op in queue[last_fork:])}"
        events.append(name)
        queue.append(Op("record", name, len(events) - 1))
        return len(events) - 1

    def wait_event(self, event):
        joins = self.number == COMPUTE and self.device.joining
        name = "join" if joins else self.device.events[event]
        self.device.queues[self.number].append(Op("wait", name, event))


class DevicePlanning:
    """Planning whose exchange lies in buffers of the rank.

    It decides on the host, so what it decided reaches the buffers as one more launch, as it would
    on a GPU: a copy that still reads them when the next plan arrives moves the wrong rows.
    """

    counts_lag = False

    def __init__(self, planning, device, exchange):
        self.planning, self.device, self.exchange = planning, device, exchange
        self.residency = planning.residency

    def plan(self, call):
        self.decided = decided = copy.deepcopy(self.planning.plan(call))

        def fill():
            num, buffers = len(decided.exchange), self.exchange
            buffers.victims.index[:num] = decided.exchange.victims.index
            buffers.vacated.index[:num] = decided.exchange.vacated.index
            buffers.fetch[:num] = decided.exchange.fetch
            buffers.write_back[:num] = decided.exchange.write_back
            buffers.num.fill_(num)

        self.device.launch("plan", fill)
        return CallPlan(self.exchange, decided.homes)

    def complete(self, call, plan):
        return copy.deepcopy(self.planning.complete(call, self.decided))

    def counted(self):
        return self.planning.counted()
