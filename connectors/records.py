"""What the two halves of the connector tell each other."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass(frozen=True, slots=True)
class GivenBlocks:
    """A sequence's block table is cut to `first` blocks and goes on with these.

    Attributes:
        seq: number of the sequence.
        first: index of the first of the blocks.
        blocks: logical block ids.
        first_written: index from which on the sequence writes its blocks; those below are prefix
            hits, which other sequences may have and write in this very step.
    """

    seq: int
    first: int
    blocks: tuple[int, ...]
    first_written: int


@dataclass(frozen=True, slots=True)
class StepSequences:
    """What a recording worker is told of the requests of a step; apply in this order.

    Attributes:
        ended: numbers of sequences that ended since the last step.
        admitted: numbers and prompt tokens of those scheduled for the first time.
        given: the blocks sequences got.
    """

    ended: tuple[int, ...]
    admitted: tuple[tuple[int, int], ...]
    given: tuple[GivenBlocks, ...]


@dataclass(frozen=True)
class UlaConnectorMetadata(KVConnectorMetadata):
    """Scheduler to worker, once per step.

    Attributes:
        dead_blocks: logical blocks nobody reads again before writing them, as of this step.
        num_leases: draft tokens the step writes and verifies.
        sequences: for a recording; None without.
    """

    dead_blocks: tuple[int, ...] = ()
    num_leases: int = 0
    sequences: StepSequences | None = None
