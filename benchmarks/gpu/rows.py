"""Rows to move, read and attend to.

Host rows are a tensor of the GPU, but a copy between tensors is a cudaMemcpy, which refuses memory
that was pinned in several pieces (see `vllm_ula/pinned.py`): here kernels fill and copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_ula.kernels.reference import fp8_rows

LARGEST = 1.0  # magnitude of a value
NUM_DISTINCT = 2**16  # rows that take another's place are equal to it once in so many times


def values(num: int, generator: torch.Generator) -> Tensor:
    """Rows of a model: bfloat16 `[num, 576]`, even between -1 and 1."""
    shape = (num, fp8_rows.WIDTH)
    return (2 * torch.rand(shape, generator=generator, device=generator.device) - 1).bfloat16()


def fill(rows: Tensor, generator: torch.Generator) -> None:
    """Make fp8 rows uint8 `[n, 656]` hold values."""
    some = fp8_rows.pack(values(min(len(rows), NUM_DISTINCT), generator))
    index = torch.randint(len(some), (len(rows),), generator=generator, device=rows.device)
    torch.index_select(words(some), 0, index, out=words(rows))


def copied(rows: Tensor) -> Tensor:
    """The same bytes in device memory."""
    return (words(rows) | 0).view(rows.dtype)


def words(rows: Tensor) -> Tensor:
    """The same rows as int64, of which torch's kernels move eight bytes at a time."""
    return rows.view(torch.int64)


def as_bf16(rows: Tensor) -> Tensor:
    """The bytes of fp8 rows as `[n, 576]` bfloat16, with every kind of NaN."""
    row_bytes = 2 * fp8_rows.WIDTH
    num = rows.numel() // row_bytes
    flat = rows.view(-1)[: num * row_bytes]
    return flat.view(torch.bfloat16).view(num, fp8_rows.WIDTH)


def some_homes(
    shape: tuple[int, int], device: Tensor, host: Tensor, missing: int, generator: torch.Generator
) -> Tensor:
    """Homes int64 `[tokens, topk]` at random, so many of each token's on the host."""

    def below(most: int) -> Tensor:
        return torch.randint(most, shape, generator=generator, device=device.device)

    homes = below(len(device))
    if not missing:
        return homes
    order = torch.rand(shape, generator=generator, device=device.device).argsort(1)
    return torch.where(order < missing, len(device) + below(len(host)), homes)
