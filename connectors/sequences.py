"""The scheduler's side of recording: numbers of the sequences, and the blocks they get."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_ula.connectors.records import GivenBlocks, StepSequences
from vllm_ula.logical_id import SequenceNumbers


@dataclass(slots=True)
class _Sequence:
    number: int
    num_blocks: int = 0


class SequenceLog:
    """Follows requests through the steps of a scheduler.

    A request keeps its number while it is preempted; the blocks it resumes with replace those it
    had.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._numbers = SequenceNumbers()
        self._sequences: dict[str, _Sequence] = {}

    def note(self, step: SchedulerOutput) -> StepSequences:
        """What the step's requests are to the worker. Must see every step, in order."""
        ended = []
        for request in step.finished_req_ids:
            # One that was aborted while it waited never had a number.
            if (sequence := self._sequences.pop(request, None)) is not None:
                self._numbers.release(sequence.number)
                ended.append(sequence.number)

        admitted, given = [], []
        for new in step.scheduled_new_reqs:
            # vLLM's new model runner is told of a resumed request as of a new one.
            if new.req_id not in self._sequences:
                sequence = self._sequences[new.req_id] = _Sequence(self._numbers.take())
                admitted.append((sequence.number, new.prompt_len))
            given.append(self._all(new.req_id, new.block_ids, new.num_computed_tokens))

        cached = step.scheduled_cached_reqs
        for request, blocks, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if blocks is None:
                continue
            if request in cached.resumed_req_ids:
                given.append(self._all(request, blocks, num_computed))
            else:
                given.append(self._more(request, blocks))
        return StepSequences(tuple(ended), tuple(admitted), tuple(given))

    def _all(self, request: str, groups: tuple[list[int], ...], num_computed: int) -> GivenBlocks:
        """All blocks of a request; those of tokens computed already are not written again."""
        sequence = self._sequences[request]
        (blocks,) = groups
        sequence.num_blocks = len(blocks)
        return GivenBlocks(sequence.number, 0, tuple(blocks), num_computed // self._block_size)

    def _more(self, request: str, groups: tuple[list[int], ...]) -> GivenBlocks:
        """Further blocks of a running request."""
        sequence = self._sequences[request]
        (blocks,) = groups
        first = sequence.num_blocks
        sequence.num_blocks += len(blocks)
        return GivenBlocks(sequence.number, first, tuple(blocks), first)
