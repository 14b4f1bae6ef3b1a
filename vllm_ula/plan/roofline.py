"""What a decode step of one request moves, against what a card can move. KV alone.

    HBM      index keys of its whole history, its selected rows, and each row that changes places
             once more
    PCIe     the selected rows that miss the device, and as many that go back, each way
    NVLink   under TP the selected rows that other ranks own, with no hit in a local buffer

Weights, activations and what other requests do are left out, and each bus is alone: these times
are bounds from below, not step times.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ula.capacity import Parallel
from vllm_ula.plan.hardware import CARDS, Card
from vllm_ula.plan.rows import Tokens


@dataclass(frozen=True)
class Roof:
    """One card.

    Attributes:
        card: whose bandwidths.
        hbm_bytes: of a token.
        nvlink_bytes: of a token, each way.
        host_bytes_moved: of a token, each way.
    """

    card: Card
    hbm_bytes: float
    nvlink_bytes: float
    host_bytes_moved: float

    @property
    def micros(self) -> dict[str, float]:
        """Microseconds of a token on each bus."""
        card = self.card
        return {
            "hbm": self.hbm_bytes / card.hbm_gb_s / 1e3,
            "nvlink": self.nvlink_bytes / card.nvlink_gb_s / 1e3,
            "pcie": self.host_bytes_moved / card.host_gb_s / 1e3,
        }

    @property
    def bound(self) -> str:
        """The bus that takes longest."""
        return max(self.micros, key=lambda bus: self.micros[bus])


def roofs(
    tokens: Tokens, length: int, parallel: Parallel, ranks: int, hit_rate: float
) -> list[Roof]:
    """Every card that has bandwidths.

    Args:
        tokens: bytes of a token.
        length: tokens of the history.
        parallel: TP reads the rows of other ranks over NVLink.
        ranks: P.
        hit_rate: selected rows that are on a device already.
    """
    k, i = tokens.model.rows, tokens.model.index_keys
    read = min(tokens.topk, length) if tokens.is_sparse else length
    selected = float(read * k)
    missed = (1 - hit_rate) * selected if tokens.is_sparse else 0.0
    scanned = float(i * length)
    peers = 0.0
    if parallel is Parallel.TP and tokens.is_sparse:
        peers = (ranks - 1) / ranks * selected
        scanned /= ranks
        missed /= ranks
    elif parallel is Parallel.TP:
        selected /= min(ranks, tokens.model.kv_heads)
    hbm = scanned + selected + 2 * missed
    return [Roof(card, hbm, peers, missed) for card in CARDS.values() if card.hbm_gb_s]
