"""The order of an exchange and the layers it moves rows for, on a GPU.

The first layer of a domain needs its rows at once, so they move on the compute stream. The rows of
its followers move beside the first layer's attention and what comes after it:

    compute   plan, rows of layer 0, fork | remap, layer 0 ... | wait 1, layer 1 ... | wait 2, ...
    copy                       wait fork | rows of layer 1, done 1 | rows of layer 2, done 2

What holds the order, by what would go wrong without it:

    fork     a row leaves before the last call has written or read it, or before it is planned
    done i   layer i writes or reads a row that is still on its way
    join     the next plan overwrites the slots a copy still reads; a graph is captured half

On a CPU program order is enough, and there is no lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class Stream(Protocol):
    """A queue of launches of a device; events order it with other streams."""

    def record_event(self) -> Any:
        """An event that happens once what was launched on this stream is done."""

    def wait_event(self, event: Any) -> None:
        """What is launched on this stream from now on starts after the event."""


class Streams(Protocol):
    """The streams of a device."""

    def new(self) -> Stream:
        """Another stream."""

    def current(self) -> Stream:
        """The stream that launches go to."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Launches inside go to this stream."""


class CopyLane:
    """Moves the followers' rows beside the compute stream; all domains of a rank share one.

    Launches and waits alone: nothing here waits on the host, so a graph captures all of it.

    Args:
        streams: of the device of the rows.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._copy = streams.new()
        # By layer, what its event is. The copy stays beside it: it holds the tensors it was given,
        # which the allocator would hand out again while the copy still reads them.
        self._pending: dict[int, tuple[Any, Callable[[], object]]] = {}

    def start(self, copies: Sequence[Callable[[], object]]) -> None:
        """Launch the copies of layers 1, 2, ... after all that was launched before.

        The rows of layer 0 are among that: they have the bus for themselves.
        """
        if not copies:
            return
        self._copy.wait_event(self._streams.current().record_event())
        with self._streams.on(self._copy):
            for layer, copy in enumerate(copies, 1):
                copy()
                self._pending[layer] = self._copy.record_event(), copy

    def wait(self, layer: int) -> None:
        """What is launched from now on finds the rows of this layer where the map says."""
        if layer in self._pending:
            event, _ = self._pending[layer]
            self._streams.current().wait_event(event)
            del self._pending[layer]

    def join(self) -> None:
        """What is launched from now on comes after all copies, also of layers nobody ran."""
        for layer in list(self._pending):
            self.wait(layer)


class CudaStreams:
    """`Streams` of torch, on NVIDIA and AMD GPUs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def new(self) -> Stream:
        """See `Streams`."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def current(self) -> Stream:
        """See `Streams`."""
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """See `Streams`."""
        return torch.cuda.stream(stream)


def make_lane(device: torch.device) -> CopyLane | None:
    """The lane of a rank whose rows are on `device`; None where program order is enough."""
    return CopyLane(CudaStreams(device)) if device.type == "cuda" else None


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Host memory on the device; nothing waits, as it would for memory that is not pinned."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
