"""Host memory that a GPU reads and writes in place: near it, pinned, registered in chunks.

    map -> place -> touch -> register chunk by chunk -> view
    views dropped -> unregister, last chunk first -> unmap

Chunks are neighbours in the GPU's address space too, so kernels see one range. A cudaMemcpy does
not: it refuses to cross from one chunk into the next.
"""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from vllm_ula.capacity import GIB
from vllm_ula.errors import HostMemoryError
from vllm_ula.host_memory import limits_below

# A refusal comes before all of a large pool is pinned, and says how much was. A multiple of every
# page size. Not measured.
CHUNK_BYTES = 1 << 30

PCI_DEVICES = Path("/sys/bus/pci/devices")

_MBIND = {"x86_64": 237, "aarch64": 235}  # the system call's number
_MPOL_PREFERRED = 1
_PORTABLE, _MAPPED = 1, 2  # cudaHostRegisterPortable, cudaHostRegisterMapped


class Runtime(Protocol):
    """What pinning asks of a GPU's runtime."""

    def numa_node(self) -> int | None:
        """The NUMA node the GPU is attached to; None if the machine does not say."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory and map it for the GPU; RuntimeError with the driver's words."""

    def unregister(self, address: int) -> None:
        """Undo `register`; RuntimeError with the driver's words."""

    def view(self, memory: Tensor) -> Tensor:
        """Registered memory, uint8 `[n]`, as a tensor on the GPU that keeps it mapped.

        RuntimeError if that takes a copy.
        """

    def synchronize(self) -> None:
        """Wait until no kernel uses the memory any more."""


class Pinned:
    """Memory registered with a GPU, until it is closed.

    Args:
        memory: uint8 `[n]` on the host, touched.
        runtime: of the GPU.

    Attributes:
        view: the same bytes as a tensor on the GPU.

    Raises:
        HostMemoryError: a chunk could not be registered; none is.
    """

    view: Tensor

    def __init__(self, memory: Tensor, runtime: Runtime) -> None:
        self._runtime = runtime
        self._memory = memory  # mapped until its last chunk is unregistered
        self._chunks: list[int] = []
        total, end = memory.numel(), 0
        try:
            for start in range(0, total, CHUNK_BYTES):
                end = min(start + CHUNK_BYTES, total)
                runtime.register(memory.data_ptr() + start, end - start)
                self._chunks.append(memory.data_ptr() + start)
            self.view = runtime.view(memory)
        except RuntimeError as error:
            pinned = min(len(self._chunks) * CHUNK_BYTES, total)
            self.close()
            limits = "; ".join(limits_below(end)) or "RLIMIT_MEMLOCK and cgroup allow more"
            raise HostMemoryError(
                f"host pool: {pinned} of {total} bytes ({pinned / GIB:.2f} of {total / GIB:.2f} "
                f"GiB) were pinned, then the driver refused: {error}; {limits}; lower host_gib"
            ) from error

    def close(self) -> None:
        """Unregister every chunk, last first, once no kernel uses them; idempotent.

        Other views stay mapped, but a kernel that uses one fails.
        """
        self.view = torch.empty(0, dtype=torch.uint8)
        if not self._chunks:
            return
        errors = []
        try:
            self._runtime.synchronize()
        except RuntimeError as error:  # of a kernel that failed before
            errors.append(error)
        while self._chunks:
            try:
                self._runtime.unregister(self._chunks.pop())
            except RuntimeError as error:
                errors.append(error)
        self._memory = self.view
        if errors:
            raise errors[0]


def place(memory: Tensor, node: int | None) -> bool:
    """Ask that untouched, page-aligned memory lie on a NUMA node; whether the system agreed.

    Preferred, not strictly bound: pages beyond what the node has left come from other nodes, where
    a strict binding ends the process. A container may forbid the call: then nothing changes.
    """
    number = _MBIND.get(platform.machine())
    if node is None or number is None or not memory.numel():
        return False
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    address, nbytes = ctypes.c_void_p(memory.data_ptr()), ctypes.c_ulong(memory.numel())
    num_bits = ctypes.c_ulong(len(mask) * bits + 1)  # the kernel reads one bit less
    mbind = ctypes.CDLL(None).syscall
    return bool(mbind(number, address, nbytes, _MPOL_PREFERRED, mask, num_bits, 0) == 0)


class CudaRuntime:
    """`Runtime` of torch, on NVIDIA and AMD GPUs."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)

    def numa_node(self) -> int | None:
        """See `Runtime`."""
        gpu: Any = torch.cuda.get_device_properties(self.device)
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        try:
            node = int((PCI_DEVICES / address / "numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    def register(self, address: int, nbytes: int) -> None:
        """See `Runtime`."""
        with torch.cuda.device(self.device):
            self._check(self._cudart.cudaHostRegister(address, nbytes, _PORTABLE | _MAPPED))

    def unregister(self, address: int) -> None:
        """See `Runtime`."""
        with torch.cuda.device(self.device):
            self._check(self._cudart.cudaHostUnregister(address))

    def view(self, memory: Tensor) -> Tensor:
        """See `Runtime`."""
        if not memory.numel():
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        with torch.cuda.device(self.device):
            view = torch.as_tensor(_Bytes(memory), device=self.device)
        if view.data_ptr() != memory.data_ptr():
            raise RuntimeError(f"{self.device} sees the memory at another address")
        return view

    def synchronize(self) -> None:
        """See `Runtime`."""
        torch.cuda.synchronize(self.device)

    @property
    def _cudart(self) -> Any:
        return torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def _check(self, status: Any) -> None:
        if int(status):
            raise RuntimeError(f"{self._cudart.cudaGetErrorString(status)} ({int(status)})")


class _Bytes:
    """Host memory as torch takes it for device memory; the view it makes keeps this object."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "data": (memory.data_ptr(), False),
            "shape": (memory.numel(),),
            "typestr": "|u1",
            "version": 3,
        }
