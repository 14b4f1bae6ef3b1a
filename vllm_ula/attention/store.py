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
        layer: index of the layer in `domain.layers`; layer 0 plans for all.
        serving: whether the current forward call serves requests; dummy runs plan and count
            nothing.
    """

    domain: Domain
    layer: int
    serving: Callable[[], bool]

    @property
    def rows(self) -> LayerRows:
        """The rows of this layer."""
        return self.domain.layers[self.layer]

    def step(self, metadata: UlaMetadata, pending: Pending | None, selection: Tensor) -> Tensor:
        """Run the domain's step and write the layer's rows.

        Args:
            metadata: of the call.
            pending: rows to write; None if vLLM wrote none.
            selection: int64 `[T, topk]` logical slots, -1 padded.

        Returns:
            int64 `[T, topk]` homes of the selection, valid until the domain's next step.
        """
        residency = self.domain.residency
        if not self.serving():
            return residency.translate(selection)
        if pending is None:
            pending = Pending(self.rows.device[:0], torch.empty(0, dtype=torch.int64))
        kept = pending.slots >= 0
        call = Call(
            written=pending.slots[kept],
            written_by_decode=metadata.decode[: kept.numel()][kept],
            selection=selection,
            decode=metadata.decode[: selection.shape[0]],
        )
        write(self.rows, run(self.domain, call), pending.rows[kept])
        return residency.translate(selection)
