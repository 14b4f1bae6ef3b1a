"""What a recording worker is told of sequences, compared with the scheduler's own block tables."""

from __future__ import annotations

from collections.abc import Callable

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_ula.connectors.records import UlaConnectorMetadata


class Sequences:
    """Follows `StepSequences` as a worker does, without request ids."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tables: dict[int, list[int]] = {}
        self.writers: dict[int, tuple[int, int]] = {}
        self.numbers: dict[str, int] = {}

    def check(self, step: SchedulerOutput, table: Callable[[str], list[int]]) -> None:
        """Blocks are those of the scheduler, and every token finds its sequence and position."""
        metadata = step.kv_connector_metadata
        assert isinstance(metadata, UlaConnectorMetadata)
        told = metadata.sequences
        assert told is not None
        ended = [self.numbers.pop(r) for r in step.finished_req_ids if r in self.numbers]
        assert sorted(told.ended) == sorted(ended)
        for seq in ended:
            del self.tables[seq]
        admitted = [r for r in step.scheduled_new_reqs if r.req_id not in self.numbers]
        assert [tokens for _, tokens in told.admitted] == [r.prompt_len for r in admitted]
        for request, (seq, _) in zip(admitted, told.admitted, strict=True):
            assert seq not in self.tables
            self.numbers[request.req_id], self.tables[seq] = seq, []
        for given in told.given:
            self.tables[given.seq][given.first :] = given.blocks
            for index in range(given.first_written, len(self.tables[given.seq])):
                self.writers[self.tables[given.seq][index]] = given.seq, index

        cached = step.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {r.req_id: r.num_computed_tokens for r in step.scheduled_new_reqs}
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            seq = self.numbers[request_id]
            assert self.tables[seq] == table(request_id)
            for position in range(computed[request_id], computed[request_id] + num_tokens):
                index = position // self.block_size
                assert self.writers[self.tables[seq][index]] == (seq, index)
