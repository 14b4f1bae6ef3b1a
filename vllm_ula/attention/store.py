"""One layer's way into its domain: from vLLM's call to a step and back to homes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_ula.attention.impl import Pending
from vllm_ula.attention.metadata import UlaMetadata
from vllm_ula.records import Call, LayerRows
from vllm_ula.step import Domain, run, write


@dataclass(frozen=True, slots=True)
class RowStore:
    """The rows of one layer behind UlaCache.

    Attributes:
        domain: the layer's domain.
        layer: index of the layer in `domain.layers`; layer 0 plans, the others follow.
        serving: whether the current forward call serves requests; dummy runs plan and count
            nothing.
        record: told of each call the first layer plans, with the slots being written and the
            positions selected; None if nothing is recorded.
    """

    domain: Domain
    layer: int
    serving: Callable[[], bool]
    record: Callable[[UlaMetadata, Tensor, Tensor], None] | None = None

    @property
    def rows(self) -> LayerRows:
        """The rows of this layer."""
        return self.domain.layers[self.layer]

    def step(self, metadata: UlaMetadata, pending: Pending | None, topk: Tensor) -> Tensor:
        """Write the layer's rows where they live, once the domain's first layer has planned.

        Args:
            metadata: of the call.
            pending: rows to write; None if vLLM wrote none.
            topk: int32 `[max tokens, k]` positions, the first T rows of this call.

        Returns:
            int64 `[T, k]` homes of the selection, valid until the domain's next step.
        """
        if not self.serving():
            return self.domain.residency.translate(metadata.selection(topk))
        if pending is None:
            nothing = self.rows.device[:0]
            pending = Pending(nothing, torch.empty(0, dtype=torch.int64, device=nothing.device))
        num = metadata.num_actual_tokens  # a piecewise graph pads rows, and metadata not
        rows, slots = pending.rows[:num], pending.slots[:num]
        if self.layer == 0:
            self._plan(metadata, slots, topk)
        self.domain.wait(self.layer)
        homes = self.domain.homes
        write(self.rows, homes.written, rows)
        return homes.selected

    def _plan(self, metadata: UlaMetadata, slots: Tensor, topk: Tensor) -> None:
        """Run the domain's step for all its layers."""
        if self.record is not None:
            self.record(metadata, slots, topk)
        call = Call(
            written=slots,
            written_by_decode=metadata.decode[: slots.numel()],
            selection=metadata.selection(topk),
            decode=metadata.decode,
        )
        run(self.domain, call)
