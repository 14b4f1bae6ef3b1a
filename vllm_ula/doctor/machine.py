"""Device memory, host memory and what limits pinning it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from vllm_ula.capacity import GIB
from vllm_ula.doctor.check import Area, Check, Verdict
from vllm_ula.errors import ConfigError
from vllm_ula.host_memory import available_host_bytes, check_host_memory, limits_below

NODES = Path("/sys/devices/system/node")
SHARED_MEMORY = Path("/dev/shm")
# Ranks of an engine talk through it; containers have 64 MiB by default. A round figure.
LEAST_SHARED_BYTES = GIB


def check_machine(host_gib: float, for_gpu: bool) -> Iterator[Check]:
    """What the machine has, against the host pool that is asked for.

    Args:
        host_gib: of the pool; 0 takes 1 GiB, the chunk in which a GPU's driver pins.
        for_gpu: judge it as a machine with a GPU, whatever is here.
    """
    devices = list(_devices())
    yield from devices or [
        Check(Area.MACHINE, "device memory", Verdict.NOTE, "no GPU: rows live in host memory")
    ]
    available = available_host_bytes()
    text, verdict = f"{available / GIB:.1f} GiB available", Verdict.FINE
    try:
        check_host_memory(host_gib, available)
    except ConfigError as error:
        text, verdict = str(error), Verdict.PROBLEM
    yield Check(Area.MACHINE, "host memory", verdict, text)
    yield _address_space(int(host_gib * GIB))
    yield _pinning(int((host_gib or 1) * GIB), bool(devices) or for_gpu)
    yield _nodes()
    yield _shared_memory()


def _devices() -> Iterator[Check]:
    import torch

    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        text = f"{name}: {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        yield Check(Area.MACHINE, f"device memory {index}", Verdict.FINE, text)


def _address_space(pool: int) -> Check:
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    name = "address space"
    if allowed == resource.RLIM_INFINITY:
        return Check(Area.MACHINE, name, Verdict.FINE, "not limited")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    left = f"RLIMIT_AS is {allowed / GIB:.2f} GiB, {used / GIB:.2f} in use"
    if allowed - used < pool:
        text = f"{left}: no room for a host pool of {pool / GIB:.2f} GiB; ulimit -v unlimited"
        return Check(Area.MACHINE, name, Verdict.PROBLEM, text)
    return Check(Area.MACHINE, name, Verdict.FINE, left)


def _pinning(pool: int, pins: bool) -> Check:
    limits = limits_below(pool)
    if not limits:
        return Check(Area.MACHINE, "pinning", Verdict.FINE, f"{pool / GIB:.2f} GiB may be pinned")
    text = f"{'; '.join(limits)}, less than {pool / GIB:.2f} GiB"
    if not pins:
        return Check(Area.MACHINE, "pinning", Verdict.NOTE, f"{text}; a CPU pins nothing")
    text += "; ulimit -l unlimited (a container: --ulimit memlock=-1, or a larger --memory)"
    return Check(Area.MACHINE, "pinning", Verdict.PROBLEM, text)


def _nodes() -> Check:
    nodes = len(list(NODES.glob("node[0-9]*")))
    if nodes <= 1:
        return Check(Area.MACHINE, "NUMA", Verdict.FINE, "one node")
    text = f"{nodes} nodes: the host pool is placed on the GPU's own, if the machine names it"
    return Check(Area.MACHINE, "NUMA", Verdict.FINE, text)


def _shared_memory() -> Check:
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        text = f"{SHARED_MEMORY}: {error.strerror}"
        return Check(Area.MACHINE, "shared memory", Verdict.NOTE, text)
    free = found.f_bavail * found.f_frsize
    text = f"{free / GIB:.1f} GiB free in {SHARED_MEMORY}"
    if free < LEAST_SHARED_BYTES:
        text += "; ranks of an engine may want more (a container: --shm-size 1g, --ipc=host)"
        return Check(Area.MACHINE, "shared memory", Verdict.NOTE, text)
    return Check(Area.MACHINE, "shared memory", Verdict.FINE, text)
