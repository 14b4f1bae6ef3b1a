"""Scatter: write rows to their homes."""

from __future__ import annotations

from torch import Tensor


def scatter(device: Tensor, host: Tensor, homes: Tensor, rows: Tensor) -> None:
    """Write each row to the tier it lives in.

    Args:
        device: `[D, width]` device rows, changed in place.
        host: `[H, width]` host rows of the same dtype, changed in place; H may be 0.
        homes: int64 `[n]` distinct homes, all >= 0.
        rows: `[n, width]`.
    """
    num_device = device.shape[0]
    on_host = homes >= num_device
    if not bool(on_host.any()):
        device.index_copy_(0, homes, rows)
        return
    on_device = ~on_host
    device.index_copy_(0, homes[on_device], rows[on_device])
    host.index_copy_(0, homes[on_host] - num_device, rows[on_host])
