"""Who is compared, with which model, on which machine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vllm_ula.capacity.units import ceil_to

PAGE = 64
TAIL_PAGES = 2


class System(Enum):
    """Who holds the rows."""

    DEVICE_ONLY = "device_only"
    SGLANG_HISPARSE = "sglang_hisparse"
    VLLM_HISPARSE = "vllm_hisparse"
    ULACACHE = "ulacache"


class Parallel(Enum):
    """How attention is spread over the ranks."""

    DP = "dp"
    TP = "tp"


@dataclass(frozen=True)
class Model:
    """Bytes of a model's rows and index keys.

    Attributes:
        name: of the model.
        domain_layers: attention layers of each domain.
        row_bytes: one token's row of one layer.
        index_keys: one token's index keys over all indexer layers, i; 0 selects nothing.
        kv_heads: ways in which TP can divide a row: 1 for a latent, which all heads read.
    """

    name: str
    domain_layers: tuple[int, ...]
    row_bytes: int
    index_keys: int
    kv_heads: int = 1

    @property
    def rows(self) -> int:
        """Bytes of one token's rows over all layers, k."""
        return sum(self.domain_layers) * self.row_bytes

    @property
    def block_bytes(self) -> int:
        """A block of vLLM HiSparse's pool: a page of index keys, in whole pages of rows."""
        return ceil_to(self.index_keys, self.row_bytes) * PAGE

    @property
    def block_groups(self) -> int:
        """Blocks a page of rows takes over all layers.

        vLLM puts whole domains into one block while their pages take no more than a page of index
        keys (`v1/hisparse/layout.py` of vLLM 0.32).
        """
        groups, filled = 0, 0
        for layers in self.domain_layers:
            if filled and (filled + layers) * self.row_bytes > self.index_keys:
                groups, filled = groups + 1, 0
            filled += layers
        return groups + 1


# 78 layers of fp8_ds_mla rows; 21 indexer layers (0, 1, 2, 6, 10 ... 74) of 132 bytes.
GLM_5_3 = Model("GLM-5.3", domain_layers=(1, 1, *[4] * 19), row_bytes=656, index_keys=2772)


@dataclass(frozen=True)
class Machine:
    """Ranks and their budgets in bytes.

    Attributes:
        name: of the machine.
        ranks: P.
        dp_device_bytes: M of a rank under DP.
        tp_device_bytes: M of a rank under TP.
        host_bytes: C of a rank.
    """

    name: str
    ranks: int
    dp_device_bytes: int
    tp_device_bytes: int
    host_bytes: int

    def device_bytes(self, parallel: Parallel) -> int:
        """M of a rank."""
        return self.dp_device_bytes if parallel is Parallel.DP else self.tp_device_bytes


H200 = Machine("8xH200", 8, 28_500_000_000, int(25.94 * 2**30), 128_000_000_000)
B300 = Machine("8xB300", 8, 159_400_000_000, 172_000_000_000, 192_000_000_000)
