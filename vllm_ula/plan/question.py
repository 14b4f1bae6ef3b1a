"""What every system is asked: how many requests fit into the same bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_ula.capacity import (
    GIB,
    Capacity,
    Held,
    Machine,
    Model,
    Parallel,
    System,
    TokenBytes,
    admitted,
    fit,
    held,
    of_ranks,
)
from vllm_ula.errors import ConfigError
from vllm_ula.plan.context import Lengths


@dataclass(frozen=True)
class Rank:
    """UlaCache on one rank under DP: the arguments of `capacity.fit`.

    Attributes:
        token: bytes of a token with its maps.
        block_size: tokens of a block.
        min_device: D_min.
        device_slots: fixes D.
    """

    token: TokenBytes
    block_size: int
    min_device: int
    device_slots: int | None = None

    def capacity(self, machine: Machine) -> Capacity:
        """As the engine has it at start.

        Raises:
            ConfigError: the device cannot hold a decode step.
        """
        return fit(
            self.token,
            machine.dp_device_bytes,
            machine.host_bytes,
            self.block_size,
            self.min_device,
            self.device_slots,
        )


@dataclass(frozen=True)
class Question:
    """What is asked of every system.

    Attributes:
        machine: ranks and budgets.
        model: bytes of a token.
        lengths: of requests.
        hot_rows: B of the HiSparse systems.
        rank: of UlaCache; None for a model that selects nothing.
    """

    machine: Machine
    model: Model
    lengths: Lengths
    hot_rows: int
    rank: Rank | None

    def applies(self, system: System) -> bool:
        """Whether the system serves such a model at all."""
        return system is System.DEVICE_ONLY or self.rank is not None

    def admits(self, system: System, parallel: Parallel, length: int) -> int:
        """Requests of `length` tokens at once, floored per rank under DP; 0 if none fits."""
        if not self.applies(system):
            return 0
        if system is not System.ULACACHE:
            found = admitted(system, parallel, self.machine, self.model, length, self.hot_rows)
            return max(found, 0)
        try:
            if parallel is Parallel.DP:
                assert self.rank is not None
                return self.machine.ranks * self.rank.capacity(self.machine).requests(length)
            return self.holds(system, parallel).logical_slots // length
        except ConfigError:
            return 0

    def holds(self, system: System, parallel: Parallel) -> Held:
        """Rows of all ranks.

        Raises:
            ConfigError: the device cannot hold a decode step of UlaCache.
        """
        if system is System.ULACACHE and parallel is Parallel.DP:
            assert self.rank is not None
            return of_ranks(self.rank.capacity(self.machine), self.machine.ranks)
        least = self.rank.min_device if self.rank else 1
        return held(system, parallel, self.machine, self.model, self.hot_rows, least)

    def with_more(self, device_gib: int = 0, host_gib: int = 0) -> Question:
        """The same with more memory on every GPU."""
        more, now = device_gib * GIB, self.machine
        machine = replace(
            now,
            dp_device_bytes=now.dp_device_bytes + more,
            tp_device_bytes=now.tp_device_bytes + more,
            host_bytes=now.host_bytes + host_gib * GIB,
        )
        return replace(self, machine=machine)
