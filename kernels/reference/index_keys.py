"""Index keys: fp8 vectors with a power-of-two scale, the indexer's own small cache.

One row is `[head_dim fp8 (e4m3)][fp32 scale]`: 132 bytes for the head_dim of 128.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_ula.kernels.reference.fp8 import quantize

SCALE_BYTES = 4


def store_index_keys(cache: Tensor, slots: Tensor, keys: Tensor) -> None:
    """Quantise index keys and write them at their logical slots.

    Args:
        cache: uint8 `[N, head_dim + 4]`, changed in place.
        slots: int64 `[n]`; rows with a slot < 0 are skipped.
        keys: `[n, head_dim]`, any float dtype. A key that is not finite has NaN among its values,
            which bytes otherwise is not defined.
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
