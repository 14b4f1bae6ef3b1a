"""Gather: read rows where they live, from both tiers, into a workspace."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_ula.kernels.reference import fp8_rows


def gather(device: Tensor, host: Tensor, homes: Tensor) -> Tensor:
    """Rows by home, ready to compute with.

    Args:
        device: `[D, width]` device rows of a float dtype, or uint8 `[D, 656]` fp8 rows.
        host: `[H, width]` host rows of the same dtype; H may be 0.
        homes: int64, any shape; `[0, D)` device slots, `[D, D + H)` host slots + D, -1 no row.

    Returns:
        `[*homes.shape, width]` of the pools' dtype; of fp8 rows bfloat16 `[*homes.shape, 576]`,
        which is exact: an fp8 value has four significant bits and bfloat16 eight, and the scale is
        a power of two within the exponents of both. Zeros where there is no row, so that what
        stale bytes look like (NaN, infinity) never reaches a sum.
    """
    rows = read(device, host, homes)
    return fp8_rows.unpack(rows).bfloat16() if device.dtype == torch.uint8 else rows


def read(device: Tensor, host: Tensor, homes: Tensor) -> Tensor:
    """Rows by home as the pools keep them, `[*homes.shape, width]`; otherwise as `gather`."""
    flat = homes.reshape(-1)
    num_device = device.shape[0]
    on_host = flat >= num_device
    if 2 * int(on_host.sum()) > flat.numel():  # most rows are copied once, whichever tier has them
        rows = host.index_select(0, (flat - num_device).clamp_min_(0))
        others = (~on_host).nonzero().squeeze(1)
        rows.index_copy_(0, others, device.index_select(0, flat[others].clamp_min_(0)))
    else:
        rows = device.index_select(0, flat.clamp(0, num_device - 1))
        others = on_host.nonzero().squeeze(1)
        rows.index_copy_(0, others, host.index_select(0, flat[others] - num_device))
    rows.index_fill_(0, (flat < 0).nonzero().squeeze(1), 0)
    return rows.view(*homes.shape, device.shape[1])
