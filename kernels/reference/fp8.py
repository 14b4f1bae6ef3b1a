"""fp8 (e4m3) values with power-of-two scales, as index keys and fp8 rows keep them."""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX = 448.0
_MANTISSA_BITS, _MANTISSA_MASK = 23, (1 << 23) - 1


def power_of_two_scale(x: Tensor, least: float = 1e-10) -> Tensor:
    """Smallest power of two s with `max(max|x|, least) / s <= 448` over the last dimension.

    Exact: it rounds the exponent in the bits of the float, where a logarithm could miss a power
    of two by one rounding.

    Args:
        x: float32 `[..., n]`.
        least: what the largest magnitude counts as at least, so that zeros have a scale too.

    Returns:
        float32 `[..., 1]`.
    """
    bits = (x.abs().amax(-1, keepdim=True).clamp_min(least) * (1.0 / FP8_MAX)).view(torch.int32)
    exponent = (bits >> _MANTISSA_BITS) + ((bits & _MANTISSA_MASK) != 0).to(torch.int32)
    return (exponent << _MANTISSA_BITS).view(torch.float32)


def quantize(x: Tensor, least: float = 1e-10) -> tuple[Tensor, Tensor]:
    """fp8 values and their scale, over the last dimension.

    Args:
        x: `[..., n]`, any float dtype.
        least: see `power_of_two_scale`.

    Returns:
        float8_e4m3fn `[..., n]` and float32 `[..., 1]`.
    """
    x = x.float()
    scale = power_of_two_scale(x, least)
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale
