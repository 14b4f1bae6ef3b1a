"""The host pool: exactly the bytes asked for, touched before the first request, released.

Device rows are allocated by vLLM (their bytes come out of its budget); the host pool is ours. An
anonymous private mapping is exact to the page, where pinned allocators round up to a power of two.
For a GPU it is pinned, and rows are tensors on the GPU that read host memory in place.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from vllm_ula.errors import HostMemoryError
from vllm_ula.pinned import CudaRuntime, Pinned, place

_TOUCH_BYTES = 64 << 20  # one task of a pre-touch thread


class HostPool:
    """Host rows of every layer of a rank, in one mapping.

    Args:
        num_host: host rows H of each layer, >= 0.
        row_bytes: bytes of one row, layer by layer.
        device: what reads the rows; a GPU reads them over its bus.

    Attributes:
        numa_node: of the GPU, where the memory is placed if the system allows it; None for a CPU
            or if unknown.

    Raises:
        HostMemoryError: the operating system refused the mapping, or the driver to pin it.
    """

    def __init__(
        self, num_host: int, row_bytes: Sequence[int], device: torch.device | str = "cpu"
    ) -> None:
        device = torch.device(device)
        self.num_host = num_host
        self.row_bytes = tuple(row_bytes)
        self.nbytes = num_host * sum(row_bytes)
        self.numa_node: int | None = None
        self._pinned: Pinned | None = None
        if device.type == "cpu":
            self._buffer = self._map(in_forks=True)
            self._touch(self._buffer)
            return
        runtime = CudaRuntime(device)
        memory = self._map(in_forks=False)  # a fork would copy every pinned page
        self.numa_node = runtime.numa_node()
        place(memory, self.numa_node)
        self._touch(memory)
        self._pinned = Pinned(memory, runtime)
        self._buffer = self._pinned.view

    def _map(self, in_forks: bool) -> Tensor:
        """The whole pool, uint8 `[nbytes]`, page-aligned and untouched; it keeps the mapping."""
        if not self.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            mapping = mmap.mmap(-1, self.nbytes, flags=flags)
        except (OSError, ValueError, OverflowError) as error:
            raise HostMemoryError(
                f"host pool of {self.nbytes} bytes ({self.nbytes / 2**30:.2f} GiB) could not "
                f"be mapped: {error}; lower host_gib"
            ) from error
        if not in_forks:
            mapping.madvise(mmap.MADV_DONTFORK)
        return torch.frombuffer(mapping, dtype=torch.uint8)

    def _touch(self, memory: Tensor) -> None:
        """Write every page once, so that no request pays for page faults."""

        def zero(start: int) -> None:
            memory[start : start + _TOUCH_BYTES].zero_()

        threads = min(len(os.sched_getaffinity(0)), 16)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(zero, range(0, self.nbytes, _TOUCH_BYTES)))

    def rows(self, layer: int, dtype: torch.dtype) -> Tensor:
        """Rows of one layer: `[H, row_bytes / itemsize]` of `dtype`, a view of the pool."""
        row_bytes = self.row_bytes[layer]
        start = self.num_host * sum(self.row_bytes[:layer])
        rows = self._buffer[start : start + self.num_host * row_bytes]
        return rows.view(dtype).view(self.num_host, row_bytes // dtype.itemsize)

    def close(self) -> None:
        """Give the memory back, at once unless rows are still referenced; idempotent."""
        # Dropped, not unmapped: a tensor does not keep `mmap.close` from pulling its memory away.
        self._buffer = torch.empty(0, dtype=torch.uint8)
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            pinned.close()
