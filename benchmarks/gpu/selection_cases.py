"""Selection: the positions with the highest scores, and their logical slots."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.bench import BLOCK_SIZE, Bench, block_table
from benchmarks.gpu.case import Case, Figure, expect_equal, references, share
from vllm_ula.kernels.logical_slots import logical_slots
from vllm_ula.kernels.reference.logical_slots import logical_slots as slots_reference
from vllm_ula.kernels.reference.topk import topk as topk_reference
from vllm_ula.kernels.topk import topk


def _scores(bench: Bench, tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """Scores, and positions of tokens that read all of them."""
    generator = bench.generator(tokens)
    scores = torch.randn(tokens, width, generator=generator, device=bench.device)
    return scores, torch.full((tokens,), width - 1, device=bench.device)


def check_topk(bench: Bench) -> None:
    """Equal to the reference: ties in every other row, NaN and infinities, shorter tokens."""
    for tokens, width in bench.sizes.scored:
        scores, positions = _scores(bench, tokens, width)
        scores[::2] = (scores[::2] * 8).round()
        scores[:, ::1001], scores[:, 1::1003] = torch.nan, -torch.inf
        shares = torch.arange(tokens, device=bench.device)
        for last in (positions, positions * shares // tokens):
            arguments = scores, last, bench.sizes.topk
            expect_equal("selection", topk(*arguments), topk_reference(*arguments))


def measure_topk(bench: Bench) -> Iterator[Figure]:
    """Scores are read once at least; torch sorts by score, ours by position."""
    k = bench.sizes.topk
    for tokens, width in bench.sizes.scored:
        scores, positions = _scores(bench, tokens, width)
        ours = bench.timer.median_us(partial(topk, scores, positions, k))
        torchs = bench.timer.median_us(partial(torch.topk, scores, k, dim=1, sorted=True))
        reached = share(4 * scores.numel(), ours, bench.timer.copy_bandwidth)
        yield Figure("topk", f"{tokens} x {width:,}", ours, "torch.topk", torchs, reached)


def _positions(bench: Bench, requests: int, table: Tensor) -> Tensor:
    shape, most = (requests, bench.sizes.topk), table.shape[1] * BLOCK_SIZE
    found = torch.randint(most, shape, generator=bench.generator(0), device=bench.device)
    return found.int()


def check_logical_slots(bench: Bench) -> None:
    """Equal to the reference, padding included."""
    for requests in bench.sizes.requests:
        table = block_table(bench, requests)
        positions = _positions(bench, requests, table)
        positions[:, ::9] = -1
        request = torch.arange(requests, device=bench.device)
        request[-1] = -1
        arguments = positions, request, table, BLOCK_SIZE
        expect_equal("slots", logical_slots(*arguments), slots_reference(*arguments))


def measure_logical_slots(bench: Bench) -> Iterator[Figure]:
    """A position and a block are read and a slot is written: 16 bytes a reference."""
    for requests in bench.sizes.requests:
        table = block_table(bench, requests)
        positions = _positions(bench, requests, table)
        request = torch.arange(requests, device=bench.device)
        arguments = positions, request, table, BLOCK_SIZE
        ours = bench.timer.median_us(partial(logical_slots, *arguments))
        torchs = bench.timer.median_us(partial(slots_reference, *arguments))
        reached = share(16 * positions.numel(), ours, bench.timer.copy_bandwidth)
        yield Figure("logical_slots", references(bench, requests), ours, "torch", torchs, reached)


CASES = (
    Case("topk", check_topk, measure_topk),
    Case("logical_slots", check_logical_slots, measure_logical_slots),
)
