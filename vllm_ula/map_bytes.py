"""Bytes of maps and recency that are charged to the device, readable without torch."""

from __future__ import annotations

from vllm_ula.capacity import MapBytes
from vllm_ula.kernels import sizes

MAP_BYTES_PER_LOGICAL_SLOT = 4 + 1  # home, live
MAP_BYTES_PER_DEVICE_SLOT = 4  # owner
# Stamp, flags and stack of every planner; then queues, nothing, or the links of a ring.
PLANNER_BYTES_PER_DEVICE_SLOT = {"pb_lru": 9 + 12, "timestamp_lru": 9, "hash_lru": 9 + 12}
SCRATCH_BYTES_PER_LOGICAL_SLOT = 1  # marks, shared by all domains


def map_bytes(planner: str, with_kernels: bool) -> MapBytes:
    """Bytes of a domain.

    Args:
        planner: its name.
        with_kernels: whether map operations plan on the device, or what is compiled for the CPU.
    """
    recency, scratch = PLANNER_BYTES_PER_DEVICE_SLOT[planner], SCRATCH_BYTES_PER_LOGICAL_SLOT
    if with_kernels:
        recency, scratch = sizes.BYTES_PER_DEVICE_SLOT, sizes.SCRATCH_BYTES_PER_LOGICAL_SLOT
    return MapBytes(
        logical=MAP_BYTES_PER_LOGICAL_SLOT,
        device=MAP_BYTES_PER_DEVICE_SLOT + recency,
        scratch=scratch,
    )
