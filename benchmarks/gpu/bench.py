"""What every case has at hand: the machine, the sizes, and rows in both tiers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.gpu import rows
from benchmarks.gpu.timing import Timer
from vllm_ula.kernels.reference.fp8_rows import ROW_BYTES
from vllm_ula.pools import HostPool
from vllm_ula.records import LayerRows


@dataclass(frozen=True)
class Sizes:
    """How large a case is.

    Attributes:
        requests: that decode at once, one measurement each; divisors of `rows` and `slots`.
        topk: references of a request.
        missing: of them not on the device.
        rows: device rows D.
        slots: logical slots N.
        layers: of a domain.
        heads: of attention, one measurement each.
        index_heads: of the indexer.
        staged: tokens of a prefill chunk that attend.
        written: tokens of a prefill chunk that are written.
        scored: tokens and positions that scores are of, one measurement each.
    """

    requests: tuple[int, ...]
    topk: int
    missing: int
    rows: int
    slots: int
    layers: int
    heads: tuple[int, ...]
    index_heads: int
    staged: int
    written: int
    scored: tuple[tuple[int, int], ...]


# 13 % missing: what B = 4,096 hot rows a request miss (arXiv 2608.07009). On a GPU the rows are
# 2.8 GB there and 8.3 GB on the host, far more than its caches and its reach of addresses hold.
REAL = Sizes(
    requests=(64, 256),
    topk=2048,
    missing=266,
    rows=2**20,
    slots=2**22,
    layers=4,
    heads=(64, 128),
    index_heads=32,
    staged=1024,
    written=8192,
    scored=((64, 2**17), (4, 2**20)),
)
DRY = Sizes(
    requests=(2, 4),
    topk=32,
    missing=4,
    rows=512,
    slots=2048,
    layers=4,
    heads=(4, 8),
    index_heads=4,
    staged=5,
    written=40,
    scored=((3, 300), (1, 9000)),
)
BLOCK_SIZE = 64  # tokens of a logical block


@dataclass(frozen=True)
class Bench:
    """The machine and the sizes: a GPU and the real ones, or a CPU and tiny ones."""

    device: torch.device
    sizes: Sizes
    timer: Timer

    def generator(self, seed: int) -> torch.Generator:
        """Reproducible numbers on the device."""
        return torch.Generator(self.device).manual_seed(seed)

    @cached_property
    def device_rows(self) -> list[Tensor]:
        """fp8 rows uint8 `[D, 656]` of each layer; cases may move and rewrite them."""
        sizes = self.sizes
        found = []
        for layer in range(sizes.layers):
            found.append(torch.empty(sizes.rows, ROW_BYTES, dtype=torch.uint8, device=self.device))
            rows.fill(found[-1], self.generator(layer))
        return found

    @cached_property
    def layers(self) -> list[LayerRows]:
        """The same rows with those of the host, which lie in the pool that an engine has."""
        found = []
        for layer, device in enumerate(self.device_rows):
            host = self._host_pool.rows(layer, torch.uint8)
            rows.fill(host, self.generator(self.sizes.layers + layer))
            found.append(LayerRows(f"layers.{layer}", device, host))
        return found

    @cached_property
    def _host_pool(self) -> HostPool:
        sizes = self.sizes
        return HostPool(sizes.slots - sizes.rows, [ROW_BYTES] * sizes.layers, self.device)

    def close(self) -> None:
        """Give the host rows back; nothing may use them any more."""
        vars(self).pop("layers", None)
        pool = vars(self).pop("_host_pool", None)
        if pool is not None:
            pool.close()


def block_table(bench: Bench, requests: int) -> Tensor:
    """Block table int32 `[requests, blocks]` of requests that share all logical blocks."""
    num, generator = bench.sizes.slots // BLOCK_SIZE, bench.generator(requests)
    blocks = torch.randperm(num, generator=generator, device=bench.device)
    return blocks.int().view(requests, -1)
