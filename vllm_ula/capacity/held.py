"""What a machine filled to the last row holds: which rows are unique, which are copies."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ula.capacity.admission import head_shards, hot_blocks, num_pages
from vllm_ula.capacity.rank import fit
from vllm_ula.capacity.slots import Capacity
from vllm_ula.capacity.systems import PAGE, Machine, Model, Parallel, System
from vllm_ula.capacity.token import TokenBytes


@dataclass(frozen=True)
class KeptBytes:
    """Where the bytes of all ranks go.

    Attributes:
        unique: one row of every token.
        replicas: further copies of them, on other ranks.
        index_keys: of all ranks.
        buffers: copies of rows that are also on the host, maps and recency.
    """

    unique: int
    replicas: int
    index_keys: int
    buffers: int


@dataclass(frozen=True)
class Held:
    """Rows of all ranks.

    Attributes:
        logical_slots: tokens, each counted once.
        device_slots: device rows.
        host_slots: host rows.
        buffer_slots: device rows whose bytes the host has too.
        keyed_slots: tokens with index keys, counted on every rank that keeps them.
        map_bytes: maps and recency.
    """

    logical_slots: int
    device_slots: int
    host_slots: int
    buffer_slots: int
    keyed_slots: int
    map_bytes: int = 0

    @property
    def physical_slots(self) -> int:
        """Rows of both tiers."""
        return self.device_slots + self.host_slots

    @property
    def unique_share(self) -> float:
        """Unique rows per row kept, 0..1."""
        return self.logical_slots / self.physical_slots if self.physical_slots else 0.0

    def kept_bytes(self, model: Model) -> KeptBytes:
        """These rows and their index keys in bytes."""
        k = model.rows
        lasting = self.physical_slots - self.buffer_slots
        return KeptBytes(
            unique=k * self.logical_slots,
            replicas=k * (lasting - self.logical_slots),
            index_keys=model.index_keys * self.keyed_slots,
            buffers=k * self.buffer_slots + self.map_bytes,
        )


def held(
    system: System,
    parallel: Parallel,
    machine: Machine,
    model: Model,
    hot_rows: int = 4096,
    min_device: int = 1,
) -> Held:
    """Rows of all ranks when the machine is full.

    HiSparse keeps every row on the host; what index keys leave of the device holds copies, at
    least the hot rows of one request. UlaCache's are without maps and whole blocks.

    Args:
        system: whose rules.
        parallel: DP or TP attention.
        machine: ranks and budgets.
        model: bytes of a token.
        hot_rows: B of the HiSparse systems.
        min_device: D_min of UlaCache.

    Raises:
        ConfigError: the device cannot hold D_min of UlaCache.
    """
    device, host, ranks = machine.device_bytes(parallel), machine.host_bytes, machine.ranks
    data_parallel = parallel is Parallel.DP
    k, i = model.rows, model.index_keys
    match system:
        case System.DEVICE_ONLY:
            shards = head_shards(parallel, machine, model)
            tokens = shards * device // (k + i) * (ranks if data_parallel else 1)
            copies = 1 if data_parallel else ranks // shards
            return Held(tokens, copies * tokens, 0, 0, copies * tokens)
        case System.SGLANG_HISPARSE:
            tokens = max(min(host // k, (device - k * (hot_rows + PAGE)) // i), 0)
            rows = ranks * ((device - i * tokens) // k)
            unique = ranks * tokens if data_parallel else tokens
            return Held(unique, rows, ranks * tokens, rows, ranks * tokens)
        case System.VLLM_HISPARSE:
            pool = host if data_parallel else ranks * host
            blocks = device // model.block_bytes
            tokens = max(min(pool // k, (blocks - hot_blocks(model, hot_rows)) * PAGE), 0)
            rows = ranks * ((blocks - num_pages(tokens)) // model.block_groups * PAGE)
            unique = ranks * tokens if data_parallel else tokens
            return Held(unique, rows, unique, rows, ranks * tokens)
        case System.ULACACHE:
            return of_ranks(fit(TokenBytes(k, i), device, host, 1, min_device), ranks)


def of_ranks(capacity: Capacity, ranks: int) -> Held:
    """Rows of that many ranks of UlaCache: none is kept twice."""
    logical = ranks * capacity.logical_slots
    device, host = ranks * capacity.device_slots, ranks * capacity.host_slots
    return Held(logical, device, host, 0, logical, ranks * capacity.map_bytes)


def device_rows(
    system: System,
    machine: Machine,
    model: Model,
    length: int,
    requests: int,
    hot_rows: int = 4096,
) -> int:
    """Device rows of one rank under DP for `requests` requests of `length` tokens on it."""
    device, host = machine.dp_device_bytes, machine.host_bytes
    match system:
        case System.DEVICE_ONLY:
            return requests * length
        case System.SGLANG_HISPARSE:
            return requests * (hot_rows + PAGE)
        case System.VLLM_HISPARSE:
            blocks = device // model.block_bytes - requests * num_pages(length)
            return blocks // model.block_groups * PAGE
        case System.ULACACHE:
            logical = (device + host) // (model.rows + model.index_keys)
            return (device - model.index_keys * logical) // model.rows
