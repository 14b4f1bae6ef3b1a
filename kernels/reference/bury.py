"""Bury: what nobody reads again before writing it."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_ula.kernels.tables import MapTables


def bury(blocks: Tensor, block_size: int, tables: MapTables) -> None:
    """Mark all rows of these blocks dead, in the map and in the recency of the device rows.

    Args:
        blocks: int64 `[n]` distinct logical blocks.
        block_size: tokens per block.
        tables: `live` and `stamp` change.
    """
    offsets = torch.arange(block_size, device=blocks.device)
    slots = (blocks.unsqueeze(1) * block_size + offsets).view(-1)
    tables.live[slots] = False
    homes = tables.home[slots]
    tables.stamp[homes[homes < tables.num_device]] |= 1
