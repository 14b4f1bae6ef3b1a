"""Exchange: swap the bytes of host rows and device rows of one layer (paper section 5.2)."""

from __future__ import annotations

from torch import Tensor


def exchange(
    device: Tensor,
    host: Tensor,
    fetch_from: Tensor,
    fetch_to: Tensor,
    write_back_from: Tensor,
    write_back_to: Tensor,
) -> None:
    """Copy host rows up and device rows down as if both happened at once.

    The two lists overlap in both pools: a victim goes down into the host row its successor has
    just left. So every row is read before any is written.

    Args:
        device: `[D, width]` device rows, changed in place.
        host: `[H, width]` host rows of the same dtype, changed in place.
        fetch_from: int64 `[f]` distinct host slots.
        fetch_to: int64 `[f]` distinct device slots.
        write_back_from: int64 `[w]` distinct device slots.
        write_back_to: int64 `[w]` distinct host slots.
    """
    up = host.index_select(0, fetch_from)
    down = device.index_select(0, write_back_from)
    host.index_copy_(0, write_back_to, down)
    device.index_copy_(0, fetch_to, up)
