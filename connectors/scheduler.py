"""The scheduler half: which logical blocks died."""

from __future__ import annotations

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_ula.block_manager import DeadBlocks
from vllm_ula.connectors.records import UlaConnectorMetadata
from vllm_ula.connectors.sequences import SequenceLog


class UlaScheduler:
    """Collects deaths between two steps.

    Args:
        sequences: follows requests for a recording; None without.
    """

    def __init__(self, sequences: SequenceLog | None = None) -> None:
        self._dead = DeadBlocks()
        self._sequences = sequences

    def bind(self, pool: BlockPool) -> None:
        """Watch the block pool of the scheduler's cache manager."""
        self._dead.watch(pool)

    def build_metadata(self, step: SchedulerOutput) -> UlaConnectorMetadata:
        """Deaths since the last step, for the worker to apply before this one, and its drafts.

        A lease ends with its step: an accepted draft's row stays, a rejected one's is rewritten by
        the next step or dies with its block.
        """
        drafts = step.scheduled_spec_decode_tokens.values()
        return UlaConnectorMetadata(
            dead_blocks=self._dead.drain(),
            num_leases=sum(map(len, drafts)),
            sequences=None if self._sequences is None else self._sequences.note(step),
        )
