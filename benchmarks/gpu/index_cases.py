"""Index keys: they are stored, and positions are scored by them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu import equivalents
from benchmarks.gpu.bench import BLOCK_SIZE, Bench, block_table
from benchmarks.gpu.case import Case, Figure, expect_equal, share
from vllm_ula.kernels.index_keys import store_index_keys
from vllm_ula.kernels.index_scores import index_scores
from vllm_ula.kernels.reference.index_keys import SCALE_BYTES
from vllm_ula.kernels.reference.index_keys import store_index_keys as store_reference
from vllm_ula.kernels.reference.index_scores import index_scores as scores_reference

DIM = 128
KEYS_AT_ONCE = 2**18  # that are drawn and stored


def _keys(bench: Bench, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """An index cache of all logical slots, some of them, and keys bfloat16 for those."""
    sizes, generator, device = bench.sizes, bench.generator(num), bench.device
    cache = torch.zeros(sizes.slots, DIM + SCALE_BYTES, dtype=torch.uint8, device=device)
    slots = torch.randperm(sizes.slots, generator=generator, device=device)[:num]
    keys = torch.randn(num, DIM, generator=generator, device=device).bfloat16()
    return cache, slots, keys


def _num_keys(bench: Bench) -> tuple[int, int]:
    """Keys of a decode step and of a prefill chunk."""
    return bench.sizes.requests[0], bench.sizes.written


def check_store(bench: Bench) -> None:
    """The whole cache as the reference leaves it: keys of -1 are not stored, some are 0."""
    for num in _num_keys(bench):
        cache, slots, keys = _keys(bench, num)
        slots[::7], keys[1] = -1, 0
        expected = cache.clone()
        store_index_keys(cache, slots, keys)
        store_reference(expected, slots, keys)
        expect_equal("index keys", cache, expected)


def measure_store(bench: Bench) -> Iterator[Figure]:
    """A slot and a key are read and a packed key is written."""
    for num in _num_keys(bench):
        cache, slots, keys = _keys(bench, num)
        ours = bench.timer.median_us(partial(store_index_keys, cache, slots, keys))
        torchs = bench.timer.median_us(partial(equivalents.store_index_keys, cache, slots, keys))
        num_bytes = num * (8 + 2 * DIM + DIM + SCALE_BYTES)
        reached = share(num_bytes, ours, bench.timer.copy_bandwidth)
        yield Figure("store_index_keys", f"{num:,} keys", ours, "torch", torchs, reached)


def _scored(bench: Bench) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, weights, an index cache and a block table of decode tokens.

    Of small whole numbers, so that every sum is exact in whatever order.
    """
    sizes, generator = bench.sizes, bench.generator(1)
    requests, heads = sizes.requests[0], sizes.index_heads

    def draw(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, generator=generator, device=bench.device).float()

    cache = torch.empty(sizes.slots, DIM + SCALE_BYTES, dtype=torch.uint8, device=bench.device)
    for slots in torch.arange(sizes.slots, device=bench.device).split(KEYS_AT_ONCE):
        scales = 2.0 ** draw(len(slots), 1)
        store_reference(cache, slots, draw(len(slots), DIM) * scales)
    queries = draw(requests, heads, DIM).to(torch.float8_e4m3fn)
    return queries, draw(requests, heads), cache, block_table(bench, requests)


def check_scores(bench: Bench) -> None:
    """Bit by bit, for requests of several lengths and a padding token."""
    tensors = _scored(bench)
    requests, width = bench.sizes.requests[0], bench.sizes.slots // bench.sizes.requests[0]
    request = torch.arange(requests, device=bench.device)
    position = width - 1 - request * (width // requests)
    request[-1] = position[-1] = -1
    arguments = *tensors, request, position, BLOCK_SIZE, width
    expect_equal("scores", index_scores(*arguments), scores_reference(*arguments))


def measure_scores(bench: Bench) -> Iterator[Figure]:
    """Every key is read once; torch computes in bfloat16."""
    queries, weights, cache, table = _scored(bench)
    requests, width = len(queries), table.shape[1] * BLOCK_SIZE
    request = torch.arange(requests, device=bench.device)
    position = torch.full_like(request, width - 1)
    tensors = queries, weights, cache, table
    ours = bench.timer.median_us(
        partial(index_scores, *tensors, request, position, BLOCK_SIZE, width)
    )
    torchs = bench.timer.median_us(partial(equivalents.index_scores, *tensors, BLOCK_SIZE))
    yield Figure(
        "index_scores",
        f"{requests} x {width:,}, {bench.sizes.index_heads} heads",
        ours,
        "torch",
        torchs,
        share(cache.numel(), ours, bench.timer.copy_bandwidth),
    )


CASES = (
    Case("store_index_keys", check_store, measure_store),
    Case("index_scores", check_scores, measure_scores),
)
