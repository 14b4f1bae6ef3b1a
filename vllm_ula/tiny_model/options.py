"""What may differ between tiny models, and what is refused."""

from dataclasses import dataclass
from typing import NamedTuple

from vllm_ula.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


class IndexShare(NamedTuple):
    """Which layers run an indexer: layer i does if max(i - offset + 1, 0) is a multiple of freq.

    The others reuse the selection of the layer before them.
    """

    freq: int
    offset: int


@dataclass(frozen=True)
class TinyModelOptions:
    """What may differ between tiny models; everything else is fixed.

    Attributes:
        layers: Layers of the main model; the first is dense, the others are mixtures of experts.
        topk: Positions a token selects (`index_topk`).
        index_share: Layers that reuse a selection; None: every layer has its own indexer.
        mtp: Multi-token-prediction layers after the main model (`num_nextn_predict_layers`).
        seed: Decides every weight.
        max_positions: `max_position_embeddings`, tokens.
        dtype: "float32", "bfloat16" or "float16"; the same weights, rounded.

    Raises:
        ConfigError: An option breaks its rule.
    """

    layers: int = 4
    topk: int = 128
    index_share: IndexShare | None = None
    mtp: int = 0
    seed: int = 0
    max_positions: int = 16384
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _require(self.layers >= 1, "layers", self.layers, "at least 1", 4)
        _require(self.topk >= 1, "topk", self.topk, "at least 1", 128)
        _require(self.mtp >= 0, "mtp", self.mtp, "0 or more", 1)
        _require(0 <= self.seed < 2**63, "seed", self.seed, "from 0 to 2**63 - 1", 0)
        _require(
            self.max_positions >= self.topk,
            "max_positions",
            self.max_positions,
            f"at least topk, which is {self.topk}",
            max(self.topk, 16384),
        )
        _require(
            self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}", "float32"
        )
        if self.index_share is not None:
            self._check_index_share(self.index_share)

    def _check_index_share(self, share: IndexShare) -> None:
        written = f"{share.freq}:{share.offset}"
        works = f"{max(self.layers, 2)}:1" + (" with 2 layers or more" if self.layers < 2 else "")
        _require(share.freq >= 1, "index_share", written, "FREQ is at least 1", works)
        _require(
            share.offset >= 1,
            "index_share",
            written,
            "OFFSET is at least 1, because the first layer has no selection to reuse",
            works,
        )
        _require(
            not all(self.has_indexer(layer) for layer in range(self.layers)),
            "index_share",
            written,
            f"at least one of {self.layers} layers reuses a selection",
            works,
        )

    def has_indexer(self, layer: int) -> bool:
        """Whether a layer selects for itself; MTP layers always do."""
        if self.index_share is None or layer >= self.layers:
            return True
        return max(layer - self.index_share.offset + 1, 0) % self.index_share.freq == 0


def _require(condition: bool, key: str, value: object, rule: str, works: object) -> None:
    if not condition:
        raise ConfigError(key, value, rule, works)
