"""Translate: logical slots to homes."""

from __future__ import annotations

from torch import Tensor


def translate(home: Tensor, slots: Tensor) -> Tensor:
    """Where logical slots live.

    Args:
        home: int32 `[N]`, the map.
        slots: int64, any shape; -1 is no slot.

    Returns:
        int64 homes of the same shape, -1 where there is no slot.
    """
    flat = slots.reshape(-1)
    homes = home.index_select(0, flat.clamp_min(0)).long()
    return homes.masked_fill_(flat < 0, -1).view(slots.shape)
