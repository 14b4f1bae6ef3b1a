"""Times of a captured graph, and what the machine can do at most."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch

MIB = 2**20
# Larger than any L2 cache: what a call reads is not left there by the call before.
FLUSHED_BYTES = 512 * MIB
COPIED_BYTES = 1024 * MIB
PCIE_BYTES = 256 * MIB
MEASURED_S = 0.25


class Timer:
    """Median times on the current GPU; a dry one runs everything once and measures nothing.

    Attributes:
        copy_bandwidth: bytes a device copy reads and writes in a second.
        pcie_bandwidth: bytes a second to the device, to the host, and each way with both at once
            (the slower of the two).
    """

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.copy_bandwidth = math.nan
        self.pcie_bandwidth = (math.nan, math.nan, math.nan)
        if not dry:
            self._flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
            # One for all: torch has 32 and hands them out in turn, to what is measured as well.
            self._side = torch.cuda.Stream()
            self.copy_bandwidth = self._copy_bandwidth()
            self.pcie_bandwidth = self._pcie_bandwidth()

    def median_us(
        self, run: Callable[[], object], restore: Callable[[], object] | None = None
    ) -> float:
        """Median microseconds of a replay, with a cold L2 cache.

        Args:
            run: captured as one graph, after it ran twice.
            restore: undoes what `run` changes, before every run; not measured.
        """
        restore = restore or (lambda: None)
        if self.dry:
            restore()
            run()
            return math.nan
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):  # graphs are captured beside the default stream
            for _ in range(2):
                restore()
                run()
            restore()
        torch.cuda.current_stream().wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        few = statistics.median(self._replay(graph, restore) for _ in range(3))
        num = min(max(int(MEASURED_S * 1e6 / few), 10), 100)
        return statistics.median(self._replay(graph, restore) for _ in range(num))

    def _replay(self, graph: torch.cuda.CUDAGraph, restore: Callable[[], object]) -> float:
        restore()
        # Takes long enough for the launch of the graph to be in time.
        self._flushed.zero_()
        return _elapsed_us(graph.replay)

    def _copy_bandwidth(self) -> float:
        source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        us = self.median_us(lambda: target.copy_(source))
        return 2 * COPIED_BYTES / us * 1e6

    def _pcie_bandwidth(self) -> tuple[float, float, float]:
        up, down = (torch.empty(PCIE_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
        host_up, host_down = (
            torch.empty(PCIE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        )

        def both() -> None:
            self._side.wait_stream(torch.cuda.current_stream())
            up.copy_(host_up, non_blocking=True)
            with torch.cuda.stream(self._side):
                host_down.copy_(down, non_blocking=True)
            torch.cuda.current_stream().wait_stream(self._side)

        ways = (
            lambda: up.copy_(host_up, non_blocking=True),
            lambda: host_down.copy_(down, non_blocking=True),
            both,
        )
        for run in ways:
            run()
        times = [statistics.median(_elapsed_us(run) for _ in range(5)) for run in ways]
        to_device, to_host, each_way = (PCIE_BYTES / us * 1e6 for us in times)
        return to_device, to_host, each_way


def _elapsed_us(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000
