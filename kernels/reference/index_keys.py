"""Index keys: fp8 vectors with a power-of-two scale, the indexer's own small cache.

One row is `[head_dim fp8 (e4m3)][fp32 scale]`: 132 bytes for the head_dim of 128.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX = 448.0
SCALE_BYTES = 4
_MANTISSA_BITS, _MANTISSA_MASK = 23, (1 << 23) - 1


def power_of_two_scale(x: Tensor) -> Tensor:
    """Smallest power of two s with `max|x| / s <= 448` over the last dimension.

    Exact: it rounds the exponent in the bits of the float, where a logarithm could miss a power
    of two by one rounding.

    Args:
        x: float32 `[..., n]`.

    Returns:
        float32 `[..., 1]`.
    """
    bits = (x.abs().amax(-1, keepdim=True).clamp_min(1e-10) * (1.0 / FP8_MAX)).view(torch.int32)
    exponent = (bits >> _MANTISSA_BITS) + ((bits & _MANTISSA_MASK) != 0).to(torch.int32)
    return (exponent << _MANTISSA_BITS).view(torch.float32)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 values and their scale, over the last dimension.

    Args:
        x: `[..., n]`, any float dtype.

    Returns:
        float8_e4m3fn `[..., n]` and float32 `[..., 1]`.
    """
    x = x.float()
    scale = power_of_two_scale(x)
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def store(cache: Tensor, slots: Tensor, keys: Tensor) -> None:
    """Quantise index keys and write them at their logical slots.

    Args:
        cache: uint8 `[N, head_dim + 4]`, changed in place.
        slots: int64 `[n]`; rows with a slot < 0 are skipped.
        keys: `[n, head_dim]`, any float dtype.
    """
    kept = slots >= 0
    values, scale = quantize(keys[kept])
    scale_bytes = scale.flatten().view(torch.uint8).view(-1, SCALE_BYTES)
    cache.index_copy_(0, slots[kept], torch.cat((values.view(torch.uint8), scale_bytes), dim=-1))


def load(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Index keys of logical slots.

    Args:
        cache: uint8 `[N, head_dim + 4]`.
        slots: int64 `[n]`.

    Returns:
        float32 `[n, head_dim]` of unscaled fp8 values and float32 `[n]` scales.
    """
    rows = cache.index_select(0, slots)
    values = rows[:, :-SCALE_BYTES].view(torch.float8_e4m3fn).float()
    return values, rows[:, -SCALE_BYTES:].contiguous().view(torch.float32).squeeze(1)
