"""What each system admits within the same bytes: pure arithmetic, no engine.

Per rank M device bytes for KV and C host bytes; P ranks, L tokens a request, k and i bytes of a
token's rows and index keys, B hot rows a request, pages of 64 tokens.

| system | DP | TP |
|---|---|---|
| device only | P floor(M / ((k+i) L)) | floor(M / ((k+i) L)) |
| SGLang HiSparse | P min(floor(C/(kL)), floor(M / (iL + k(B+64)))) | the same without P |
| vLLM HiSparse | P min(floor(C/(kL)), floor(blocks / of_request)) | P C instead of C, no P |
| UlaCache | P floor(N/L), N = (M+C) / (k+i) | floor(P N / L) |

A request of vLLM HiSparse takes `ceil(L/64) + groups (ceil(B/64) + 2)` of the `M / block` blocks:
index keys of all its tokens, a hot region and two tail pages of each group of layers.
UlaCache's N is without whole blocks and without the bound that index keys set; `capacity.py` has
both. A ratio of two of these figures says how many more requests fit, not how much faster they run.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

PAGE = 64
_TAIL_PAGES = 2


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
        index_keys: one token's index keys over all indexer layers, i.
    """

    name: str
    domain_layers: tuple[int, ...]
    row_bytes: int
    index_keys: int

    @property
    def rows(self) -> int:
        """Bytes of one token's rows over all layers, k."""
        return sum(self.domain_layers) * self.row_bytes

    @property
    def block_bytes(self) -> int:
        """A block of vLLM HiSparse's pool: a page of index keys, in whole pages of rows."""
        return -(-self.index_keys // self.row_bytes) * self.row_bytes * PAGE

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


def admitted(
    system: System,
    parallel: Parallel,
    machine: Machine,
    model: Model,
    length: int,
    hot_rows: int = 4096,
) -> int:
    """Requests that fit at once, floored per rank.

    Args:
        system: whose rules.
        parallel: DP or TP attention.
        machine: ranks and budgets.
        model: bytes of a token.
        length: L, prompt and output tokens of a request.
        hot_rows: B of the HiSparse systems.
    """
    device, host = machine.device_bytes(parallel), machine.host_bytes
    data_parallel = parallel is Parallel.DP
    k, i = model.rows, model.index_keys
    match system:
        case System.DEVICE_ONLY:
            of_rank = device // ((k + i) * length)
        case System.SGLANG_HISPARSE:
            of_rank = min(host // (k * length), device // (i * length + k * (hot_rows + PAGE)))
        case System.VLLM_HISPARSE:
            # Ranks of a TP group share one host pool.
            pool = host if data_parallel else machine.ranks * host
            blocks = device // model.block_bytes
            groups = model.block_groups * (_pages(hot_rows) + _TAIL_PAGES)
            of_rank = min(pool // (k * length), blocks // (_pages(length) + groups))
        case System.ULACACHE:
            of_rank = (device + host) // (k + i) // length
            if not data_parallel:
                return machine.ranks * (device + host) // ((k + i) * length)
    return machine.ranks * of_rank if data_parallel else of_rank


def unique_rows(system: System, parallel: Parallel, machine: Machine, model: Model) -> int:
    """Tokens whose rows the machine can hold, each counted once; HiSparse: on its host."""
    device, host = machine.device_bytes(parallel), machine.host_bytes
    everywhere = parallel is Parallel.DP or system in (System.ULACACHE, System.VLLM_HISPARSE)
    ranks = machine.ranks if everywhere else 1
    match system:
        case System.DEVICE_ONLY:
            return ranks * device // (model.rows + model.index_keys)
        case System.SGLANG_HISPARSE | System.VLLM_HISPARSE:
            return ranks * host // model.rows
        case System.ULACACHE:
            return ranks * (device + host) // (model.rows + model.index_keys)


def device_rows(
    system: System,
    machine: Machine,
    model: Model,
    length: int,
    requests: int,
    hot_rows: int = 4096,
) -> int:
    """Device rows of one rank under DP for `requests` requests of `length` tokens on it."""
    device, host = machine.dp_device_bytes, machine.host_bytes
    match system:
        case System.DEVICE_ONLY:
            return requests * length
        case System.SGLANG_HISPARSE:
            return requests * (hot_rows + PAGE)
        case System.VLLM_HISPARSE:
            blocks = device // model.block_bytes - requests * _pages(length)
            return blocks // model.block_groups * PAGE
        case System.ULACACHE:
            logical = (device + host) // (model.rows + model.index_keys)
            return (device - model.index_keys * logical) // model.rows


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE)
