"""How much host memory a process may still take."""

from __future__ import annotations

from pathlib import Path

from vllm_ula.capacity import GIB
from vllm_ula.errors import ConfigError


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
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        allowed, used = _read_int(limit), _read_int(usage)
        if allowed is not None:
            available = min(available, allowed - (used or 0))
    return max(available, 0)


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
