"""Sparse MLA over fp8 rows: decode steps, and a prefill chunk that reads both tiers.

What bf16 may change: queries are bf16, and fp8 rows are exact in it, so logits differ by the order
of float32 sums alone. Softmax weights are rounded to 8 significant bits, by 2^-9 of each at most,
and no value is larger than LARGEST, so a sum of values with weights that add up to 1 is within
2^-9 LARGEST. The log-sum-exp takes the weights before they are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks.gpu import equivalents
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.case import Case, Figure, expect_close, expect_equal, references, share
from benchmarks.gpu.rows import LARGEST, some_homes
from vllm_ula.kernels.reference.fp8_rows import LATENT, ROW_BYTES, WIDTH
from vllm_ula.kernels.reference.sparse_mla import sparse_mla as sparse_mla_reference
from vllm_ula.kernels.sparse_mla import sparse_mla

# Of float32 sums of 576 products of either sign, which tensor cores cut off and do not round.
SUMS = 1e-4
OUT_BOUND, LSE_BOUND = 2**-9 * LARGEST + SUMS, SUMS
# Logits have a standard deviation of 2, so that tens of the rows of a head have nearly all of its
# weight: a wrong row is seen.
SCALE = 2 * (WIDTH / 3) ** -0.5

Arguments = tuple[Tensor, Tensor, Tensor, Tensor, float, int]


def _arguments(bench: Bench, tokens: int, heads: int, on_host: bool) -> Arguments:
    generator = bench.generator(tokens * heads)
    shape = (tokens, heads, WIDTH)
    queries = torch.randn(shape, generator=generator, device=bench.device).bfloat16()
    device = bench.device_rows[0]
    host = bench.layers[0].host if on_host else device[:0]
    missing = bench.sizes.missing if on_host else 0
    homes = some_homes((tokens, bench.sizes.topk), device, host, missing, generator)
    return queries, device, host, homes, SCALE, LATENT


def _check(arguments: Arguments, staged: bool) -> None:
    homes = arguments[3]
    homes[:, homes.shape[1] // 3 :: 7] = -1
    homes[0], homes[1, homes.shape[1] // 2 :] = -1, -1
    out, lse = sparse_mla(*arguments, staged=staged)
    expected_out, expected_lse = sparse_mla_reference(*arguments)
    expect_close("attention", out, expected_out, OUT_BOUND)
    expect_close("log-sum-exp", lse, expected_lse, LSE_BOUND)
    other_out, other_lse = sparse_mla(*arguments, staged=not staged)
    expect_equal("attention, staged and not", out, other_out)
    expect_equal("log-sum-exp, staged and not", lse, other_lse)


def check_decode(bench: Bench) -> None:
    """Within what bf16 changes; short and empty selections included."""
    for requests, heads in product(bench.sizes.requests, bench.sizes.heads):
        _check(_arguments(bench, requests, heads, on_host=False), staged=False)


def measure_decode(bench: Bench) -> Iterator[Figure]:
    """Each row is read once, by whichever heads."""
    sizes, timer = bench.sizes, bench.timer
    for requests, heads in product(sizes.requests, sizes.heads):
        arguments = _arguments(bench, requests, heads, on_host=False)
        ours = timer.median_us(partial(sparse_mla, *arguments))
        torchs = _torch_us(bench, arguments)
        num_bytes = requests * sizes.topk * ROW_BYTES
        reached = share(num_bytes, ours, timer.copy_bandwidth)
        is_goal = (requests, heads) == (sizes.requests[0], sizes.heads[0])
        yield Figure(
            "sparse_mla decode",
            f"{references(bench, requests)}, {heads} heads",
            ours,
            "torch",
            torchs,
            reached,
            goal=">= 70% of copy" if is_goal else "",
            met=reached >= 0.7 if is_goal else None,
        )


def _torch_us(bench: Bench, arguments: Arguments) -> float:
    """The faster of torch's two ways."""
    _, device, _, homes, _, _ = arguments
    told = (homes.flatten() >= len(device)).nonzero().squeeze(1)
    return min(
        bench.timer.median_us(partial(attention, *arguments[:5], told))
        for attention in (equivalents.attention, equivalents.fused_attention)
    )


def check_prefill(bench: Bench) -> None:
    """As in decode, with rows of both tiers."""
    _check(_arguments(bench, bench.sizes.staged, bench.sizes.heads[0], on_host=True), staged=True)


def measure_prefill(bench: Bench) -> Iterator[Figure]:
    """Rows on the host cross the bus once: their share of PCIe."""
    sizes = bench.sizes
    arguments = _arguments(bench, sizes.staged, sizes.heads[0], on_host=True)
    ours = bench.timer.median_us(partial(sparse_mla, *arguments, staged=True))
    torchs = _torch_us(bench, arguments)
    num_bytes = sizes.staged * sizes.missing * ROW_BYTES
    yield Figure(
        "sparse_mla prefill",
        f"{references(bench, sizes.staged)}, {sizes.heads[0]} heads",
        ours,
        "torch, told which",
        torchs,
        share(num_bytes, ours, bench.timer.pcie_bandwidth[0]),
    )


CASES = (
    Case("sparse_mla decode", check_decode, measure_decode),
    Case("sparse_mla prefill", check_prefill, measure_prefill),
)
