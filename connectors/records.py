"""What the two halves of the connector tell each other."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass(frozen=True)
class UlaConnectorMetadata(KVConnectorMetadata):
    """Scheduler to worker, once per step.

    Attributes:
        dead_blocks: logical blocks nobody reads again before writing them, as of this step.
        num_leases: draft tokens the step writes and verifies.
    """

    dead_blocks: tuple[int, ...] = ()
    num_leases: int = 0
