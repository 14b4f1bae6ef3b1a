"""Gather and scatter: rows out of both tiers, and into them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu import equivalents
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.case import Case, Figure, expect_equal, references, share
from benchmarks.gpu.rows import as_bf16, copied, some_homes, values
from vllm_ula.kernels.gather import gather
from vllm_ula.kernels.reference.fp8_rows import WIDTH
from vllm_ula.kernels.reference.gather import gather as gather_reference
from vllm_ula.kernels.reference.scatter import scatter as scatter_reference
from vllm_ula.kernels.scatter import scatter

KINDS = ("fp8", "bf16")


def _pools(bench: Bench, kind: str, on_host: bool) -> tuple[Tensor, Tensor]:
    device = bench.device_rows[0]
    host = bench.layers[0].host if on_host else device[:0]
    return (device, host) if kind == "fp8" else (as_bf16(device), as_bf16(host))


def _homes(bench: Bench, requests: int, pools: tuple[Tensor, Tensor]) -> Tensor:
    missing = bench.sizes.missing if len(pools[1]) else 0
    return some_homes((requests, bench.sizes.topk), *pools, missing, bench.generator(requests))


def check_gather(bench: Bench, on_host: bool) -> None:
    """Bit by bit, padding included."""
    for requests in bench.sizes.requests:
        for kind in KINDS:
            pools = _pools(bench, kind, on_host)
            homes = _homes(bench, requests, pools)
            homes[:, -1], homes[-1] = -1, -1
            ours, reference = gather(*pools, homes), gather_reference(*pools, homes)
            # As integers: NaN is not equal to itself.
            expect_equal(f"{kind} rows", ours.view(torch.int16), reference.view(torch.int16))


def measure_gather(bench: Bench, name: str, on_host: bool) -> Iterator[Figure]:
    """A home is read, a row is read and a row is written; or only what crosses the bus counts."""
    timer = bench.timer
    for requests in bench.sizes.requests:
        for kind in KINDS:
            device, host = _pools(bench, kind, on_host)
            homes = _homes(bench, requests, (device, host))
            told = (homes.flatten() >= len(device)).nonzero().squeeze(1)
            ours = timer.median_us(partial(gather, device, host, homes))
            torchs = timer.median_us(partial(equivalents.gather, device, host, homes, told))
            row_bytes = device.shape[1] * device.element_size()
            if on_host:
                reached = share(len(told) * row_bytes, ours, timer.pcie_bandwidth[0])
            else:
                num_bytes = homes.numel() * (8 + row_bytes + 2 * WIDTH)
                reached = share(num_bytes, ours, timer.copy_bandwidth)
            yield Figure(
                name,
                f"{references(bench, requests)}, {kind}",
                ours,
                "torch, told which" if on_host else "torch",
                torchs,
                reached,
                goal="" if on_host else ">= 80% of copy",
                met=None if on_host else reached >= 0.8,
            )


def _written(bench: Bench, num: int) -> tuple[Tensor, Tensor]:
    """Distinct homes on the device, and rows for them."""
    generator = bench.generator(num)
    homes = torch.randperm(bench.sizes.rows, generator=generator, device=bench.device)[:num]
    return homes, values(num, generator)


def _num_written(bench: Bench) -> tuple[int, int]:
    """Rows of a decode step and of a prefill chunk."""
    return bench.sizes.requests[0], bench.sizes.written


def check_scatter(bench: Bench) -> None:
    """All rows as the reference leaves them: of both tiers, of -1 none, large, small and 0."""
    for num in _num_written(bench):
        homes, written = _written(bench, num)
        homes[::5] += bench.sizes.rows
        homes[::7] = -1
        size = torch.logspace(-40, 4, num, base=2, device=bench.device).unsqueeze(1)
        written = (written * size).bfloat16()
        written[1] = 0
        device, host, expected, expected_host = (copied(bench.device_rows[0]) for _ in range(4))
        scatter(device, host, homes, written)
        scatter_reference(expected, expected_host, homes, written)
        expect_equal("device rows", device, expected)
        expect_equal("host rows", host, expected_host)


def measure_scatter(bench: Bench) -> Iterator[Figure]:
    """A bf16 row is read and an fp8 row is written."""
    for num in _num_written(bench):
        homes, written = _written(bench, num)
        device = bench.device_rows[0]
        ours = bench.timer.median_us(partial(scatter, device, device[:0], homes, written))
        torchs = bench.timer.median_us(partial(equivalents.scatter, device, homes, written))
        num_bytes = num * (8 + 2 * WIDTH + device.shape[1])
        reached = share(num_bytes, ours, bench.timer.copy_bandwidth)
        yield Figure("scatter", f"{num:,} rows", ours, "torch", torchs, reached)


def _gather_case(name: str, on_host: bool) -> Case:
    return Case(
        name,
        partial(check_gather, on_host=on_host),
        partial(measure_gather, name=name, on_host=on_host),
    )


CASES = (
    _gather_case("gather", on_host=False),
    _gather_case("gather from host", on_host=True),
    Case("scatter", check_scatter, measure_scatter),
)
