"""Slots of one rank, in whole blocks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vllm_ula.capacity.token import TokenBytes
from vllm_ula.capacity.units import floor_to


class Limit(Enum):
    """What keeps the number of logical slots from growing."""

    MEMORY = "device and host memory"
    INDEX_KEYS = "index keys, which fill the device: more host memory does not help"
    DEVICE_SLOTS = "device_slots"
    BLOCK_OVERRIDE = "num_gpu_blocks_override"


@dataclass(frozen=True)
class Capacity:
    """Slots of one rank, in whole blocks.

    Attributes:
        logical_slots: N, the null block included.
        device_slots: D.
        host_slots: H = N - D.
        block_size: tokens per block.
        limit: what binds.
        token: the bytes it was computed from.
        device_bytes: M.
        host_bytes: C.
    """

    logical_slots: int
    device_slots: int
    host_slots: int
    block_size: int
    limit: Limit
    token: TokenBytes
    device_bytes: int
    host_bytes: int

    @property
    def num_blocks(self) -> int:
        """Logical blocks, the null block included."""
        return self.logical_slots // self.block_size

    @property
    def usable_slots(self) -> int:
        """Logical slots requests can use: the null block's rows are always dead."""
        return self.logical_slots - self.block_size

    @property
    def index_key_bytes(self) -> int:
        """Device bytes of all index keys."""
        return self.token.index_keys * self.logical_slots

    @property
    def map_bytes(self) -> int:
        """Bytes of maps and recency metadata."""
        return (
            self.token.map_logical * self.logical_slots + self.token.map_device * self.device_slots
        )

    @property
    def used_host_bytes(self) -> int:
        """Bytes of the host pool; less than C when something else binds."""
        return self.token.rows * self.host_slots

    def requests(self, length: int) -> int:
        """Requests of `length` tokens (prompt + output) that fit at once, in whole blocks."""
        return (self.num_blocks - 1) // -(-length // self.block_size)

    def device_bytes_for_all_host(self, min_device_slots: int) -> int:
        """Device bytes with which all of C could be used."""
        host = floor_to(self.host_bytes // self.token.rows, self.block_size)
        return self.token.per_device_row * min_device_slots + self.token.per_logical * (
            host + min_device_slots
        )
