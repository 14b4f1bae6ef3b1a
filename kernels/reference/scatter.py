"""Scatter: write rows to their homes."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_ula.kernels.reference import fp8_rows


def scatter(device: Tensor, host: Tensor, homes: Tensor, rows: Tensor) -> None:
    """Write each row to the tier it lives in, as the pools keep rows.

    Args:
        device: `[D, width]` device rows of a float dtype, or uint8 `[D, 656]` fp8 rows; changed
            in place.
        host: `[H, width]` host rows of the same dtype, changed in place; H may be 0.
        homes: int64 `[n]` homes; rows of -1 are skipped, the others are distinct.
        rows: `[n, width]` of any float dtype; `[n, 576]` if the pools are fp8 rows, which are
            packed on the way. If n is 0, of any width.
    """
    if not homes.numel():
        return
    rows = fp8_rows.pack(rows) if device.dtype == torch.uint8 else rows.to(device.dtype)
    num_device = device.shape[0]
    lowest, highest = homes.aminmax()
    if lowest >= 0 and highest < num_device:  # the common case is one copy
        device.index_copy_(0, homes, rows)
        return
    on_host = homes >= num_device
    on_device = (homes >= 0) & ~on_host
    device.index_copy_(0, homes[on_device], rows[on_device])
    host.index_copy_(0, homes[on_host] - num_device, rows[on_host])
