"""The worker's side of recording: calls, deaths and blocks into a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index

from vllm_ula.attention.metadata import UlaMetadata
from vllm_ula.capacity import GIB, Capacity
from vllm_ula.config import UlaConfig
from vllm_ula.connectors.records import StepSequences
from vllm_ula.errors import TraceError
from vllm_ula.step import Domain
from vllm_ula.traces import (
    Admission,
    BlocksGiven,
    CallTokens,
    Deaths,
    End,
    Header,
    TraceWriter,
)
from vllm_ula.traces.events import Written

logger = init_logger("vllm.vllm_ula")


class Recorder:
    """Writes what one rank's domains are asked for.

    The worker knows no requests. But a block that is written belongs to one running sequence, so
    the slot a token writes says whose token it is and its position.

    Args:
        writer: of the trace; closed here.
        num_blocks: logical blocks of the rank.
        block_size: tokens per block.
    """

    def __init__(self, writer: TraceWriter, num_blocks: int, block_size: int) -> None:
        self._writer: TraceWriter | None = writer
        self._block_size = block_size
        # Of each block: who writes it, and which of the sequence's blocks it is.
        self._seq = np.full(num_blocks, -1, np.int64)
        self._index = np.zeros(num_blocks, np.int64)
        self._live: set[int] = set()
        self._num_calls = 0

    def begin_step(self, sequences: StepSequences, dead_blocks: Sequence[int]) -> None:
        """Record what changed since the last step, before anything of this one is written."""
        if self._writer is None:
            return
        if dead_blocks:
            self._write(Deaths(np.array(dead_blocks, np.int64)))
        for seq in sequences.ended:
            self._live.discard(seq)
            self._write(End(seq))
        for seq, prompt_tokens in sequences.admitted:
            self._live.add(seq)
            self._write(Admission(seq, prompt_tokens))
        for given in sequences.given:
            blocks = np.array(given.blocks, np.int64)
            own = blocks[given.first_written - given.first :]
            self._seq[own] = given.seq
            self._index[own] = np.arange(len(own)) + given.first_written
            self._write(BlocksGiven(given.seq, given.first, blocks))
        if sequences.ended and not self._live:
            self._settle()

    def call(self, domain: int, metadata: UlaMetadata, slots: Tensor, topk: Tensor) -> None:
        """Record one forward call of a domain.

        Args:
            domain: index of the domain.
            metadata: of the call.
            slots: int64 `[W]` logical slots the first W tokens write, < 0 where nothing is.
            topk: int32 `[max tokens, k]` positions, the first rows of this call.
        """
        if self._writer is None:
            return
        written = slots.cpu().numpy()
        block, offset = np.divmod(written, self._block_size)
        kept = (written >= 0) & (metadata.request_of_token[: len(written)].cpu().numpy() >= 0)
        block, offset = block[kept], offset[kept]
        if not len(block):
            return
        self._write(
            CallTokens(
                call=self._num_calls,
                domain=domain,
                seqs=self._seq[block],
                positions=self._index[block] * self._block_size + offset,
                decode=metadata.decode[: len(written)].cpu().numpy()[kept],
                selected_positions=topk[: len(written)].cpu().numpy()[kept],
            )
        )
        self._num_calls += 1

    def close(self) -> None:
        """Finish the trace."""
        self._settle()
        self._writer = None

    def _write(self, event: Written) -> None:
        self._attempt(lambda writer: writer.write(event))

    def _settle(self) -> None:
        """Nothing runs any more: what was recorded survives even a kill."""
        self._attempt(TraceWriter.finish_part)

    def _attempt(self, action: Callable[[TraceWriter], None]) -> None:
        """Write, if the recording goes on; what goes wrong ends it and nothing else."""
        writer = self._writer
        if writer is None:
            return
        try:
            action(writer)
        except TraceError as error:
            logger.warning("UlaCache: recording has ended, serving goes on: %s", error)
            self._writer = None
            return
        if writer.full:
            logger.info("UlaCache: record_gib is reached, the trace %s is complete", writer.path)
            self._writer = None


def make_recorder(
    vllm_config: VllmConfig, config: UlaConfig, capacity: Capacity, domains: Sequence[Domain]
) -> Recorder | None:
    """The recorder of a rank that `record` asks for, or None.

    Raises:
        TraceError: the directory cannot take a trace.
    """
    if config.record is None:
        return None
    header = Header(
        model=vllm_config.model_config.model,
        block_size=capacity.block_size,
        topk=vllm_config.model_config.hf_text_config.index_topk,
        logical_slots=capacity.logical_slots,
        device_slots=capacity.device_slots,
        host_slots=capacity.host_slots,
        domains=tuple(
            tuple(extract_layer_index(layer.name) for layer in domain.layers) for domain in domains
        ),
        row_bytes=tuple(sum(layer.row_bytes for layer in domain.layers) for domain in domains),
        index_key_bytes=capacity.token.index_keys,
    )
    writer = TraceWriter(config.record, header, int(config.record_gib * GIB))
    logger.info("UlaCache: recording into %s, at most %s GiB", writer.path, config.record_gib)
    return Recorder(writer, capacity.num_blocks, capacity.block_size)
