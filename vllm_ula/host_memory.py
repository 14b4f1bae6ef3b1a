"""How much host memory a process may still take."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from vllm_ula.capacity import GIB
from vllm_ula.errors import ConfigError

CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def check_host_memory(host_gib: float, available: int) -> None:
    """Raise ConfigError if the host pool is larger than the memory there is."""
    if host_gib * GIB > available:
        raise ConfigError(
            "host_gib",
            host_gib,
            f"the machine and its cgroup leave {available / GIB:.2f} GiB",
            f"at most {int(available / GIB * 100) / 100}",
        )


def available_host_bytes() -> int:
    """Bytes this process may still allocate: MemAvailable, or less under a cgroup limit."""
    available = _meminfo_available()
    for allowed, used in _cgroup_limits():
        available = min(available, allowed - used)
    return max(available, 0)


def limits_below(nbytes: int) -> list[str]:
    """What may keep this process from pinning `nbytes` of host memory, in words."""
    found = []
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and locked < nbytes:
        found.append(f"RLIMIT_MEMLOCK is {locked} bytes ({locked / GIB:.2f} GiB)")
    for allowed, _ in _cgroup_limits():
        if allowed < nbytes:
            found.append(f"the cgroup's memory limit is {allowed} bytes ({allowed / GIB:.2f} GiB)")
    return found


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Bytes allowed and used, of each version of cgroups that limits this process."""
    for limit, usage in CGROUPS:
        allowed = _read_int(limit)
        if allowed is not None:
            yield allowed, _read_int(usage) or 0


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _read_int(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no cgroup limit reads "max"
        return None
