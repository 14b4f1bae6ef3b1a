"""Exchange: rows of a domain trade places over the bus, both ways at once."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu import equivalents
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.case import Case, Figure, expect_equal, references, share
from benchmarks.gpu.rows import copied
from vllm_ula.kernels.exchange import exchange
from vllm_ula.kernels.reference.exchange import exchange as exchange_reference
from vllm_ula.records import LayerRows

# Victims, vacated host rows, fetch, write back, and how many count: arguments of `exchange`.
Entries = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _entries(bench: Bench, requests: int, some: bool) -> Entries:
    """What requests miss moves up and as many victims down, or `some` of it each way."""
    sizes, generator = bench.sizes, bench.generator(requests)
    num, cap = requests * sizes.missing, requests * sizes.topk

    def slots(below: int) -> Tensor:
        found = torch.full((cap,), -1, device=bench.device)  # what does not count is garbage
        found[:num] = torch.randperm(below, generator=generator, device=bench.device)[:num]
        return found

    def flags() -> Tensor:
        if not some:
            return torch.ones(cap, dtype=torch.bool, device=bench.device)
        return torch.rand(cap, generator=generator, device=bench.device) < 0.7

    count = torch.full((1,), num, dtype=torch.int32, device=bench.device)
    return slots(sizes.rows), slots(sizes.slots - sizes.rows), flags(), flags(), count


def check_exchange(bench: Bench) -> None:
    """All rows of both tiers as the reference leaves them, and the host finds them so."""
    for requests in bench.sizes.requests:
        for some in (True, False):
            entries = _entries(bench, requests, some)
            expected = _copied(bench.layers)
            exchange_reference(*entries, expected)
            exchange(*entries, bench.layers)
            _expect_same("exchange", bench.layers, expected)
        # What has traded places is back where it was after a second time.
        before = _copied(bench.layers)
        exchange(*entries, bench.layers)
        num, side = requests * bench.sizes.missing, _side(bench)
        equivalents.exchange(bench.layers, entries[0][:num], entries[1][:num], side)
        _expect_same("torch's exchange", bench.layers, before)
    for layer in bench.layers:
        _expect_host_sees(layer.host, int(entries[1][0]))


def _copied(layers: list[LayerRows]) -> list[LayerRows]:
    """All rows in device memory."""
    return [LayerRows(layer.name, copied(layer.device), copied(layer.host)) for layer in layers]


def _expect_same(what: str, ours: list[LayerRows], reference: list[LayerRows]) -> None:
    for one, other in zip(ours, reference, strict=True):
        expect_equal(f"{what}: device rows of {one.name}", one.device, other.device)
        expect_equal(f"{what}: host rows of {one.name}", one.host, other.host)


def _expect_host_sees(host: Tensor, slot: int) -> None:
    """The CPU reads a host row where the GPU has it, and finds the same."""
    row = host[slot]
    on_gpu = copied(row).cpu()
    memory = (ctypes.c_uint8 * len(row)).from_address(row.data_ptr())
    on_cpu = torch.frombuffer(memory, dtype=torch.uint8)
    expect_equal("a host row as the CPU sees it", on_cpu, on_gpu)


def _side(bench: Bench) -> torch.cuda.Stream | None:
    return torch.cuda.Stream() if bench.device.type == "cuda" else None


def measure_exchange(bench: Bench) -> Iterator[Figure]:
    """All that is missing goes up, live rows come down for it: every entry moves both ways."""
    for requests in bench.sizes.requests:
        entries, layers = _entries(bench, requests, some=False), bench.layers
        num = requests * bench.sizes.missing
        ours = bench.timer.median_us(partial(exchange, *entries, layers))
        slots = entries[0][:num], entries[1][:num]
        torchs = bench.timer.median_us(partial(equivalents.exchange, layers, *slots, _side(bench)))
        num_bytes = num * sum(layer.row_bytes for layer in layers)
        reached = share(num_bytes, ours, bench.timer.pcie_bandwidth[2])
        yield Figure(
            "exchange",
            f"{references(bench, requests)}, {len(layers)} layers",
            ours,
            "torch, told how many",
            torchs,
            reached,
            goal=">= 85% of PCIe each way",
            met=reached >= 0.85,
        )


CASES = (Case("exchange", check_exchange, measure_exchange),)
