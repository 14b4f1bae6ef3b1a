"""fp8 rows: the 656-byte `fp8_ds_mla` layout of DeepSeek-V3.2 and GLM-5.x.

bytes   0 .. 511    latent: 512 fp8 (e4m3)
bytes 512 .. 527    4 float32 scales, powers of two, one for each 128 of the latent
bytes 528 .. 655    rope: 64 bf16
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_ula.kernels.reference.fp8 import quantize

LATENT, TILE, ROPE = 512, 128, 64
WIDTH = LATENT + ROPE
ROW_BYTES = LATENT + LATENT // TILE * 4 + ROPE * 2
LEAST = 448e-4  # vLLM's writers keep scales at 1e-4 or more


def pack(rows: Tensor) -> Tensor:
    """Rows as fp8 rows.

    Args:
        rows: `[n, 576]`, latent first, any float dtype.

    Returns:
        uint8 `[n, 656]`.
    """
    latent = rows[:, :LATENT].reshape(-1, LATENT // TILE, TILE)
    values, scales = quantize(latent, LEAST)
    rope = rows[:, LATENT:].to(torch.bfloat16).contiguous()
    parts = (values.view(-1, LATENT), scales.view(-1, LATENT // TILE), rope)
    return torch.cat([part.view(torch.uint8) for part in parts], dim=1)


def unpack(packed: Tensor) -> Tensor:
    """What fp8 rows stand for.

    Args:
        packed: uint8 `[..., 656]`; a row of zero bytes is a row of zeros.

    Returns:
        float32 `[..., 576]`.
    """
    rows = packed.reshape(-1, ROW_BYTES)
    scales_end = ROW_BYTES - ROPE * 2
    values = rows[:, :LATENT].view(torch.float8_e4m3fn).float()
    scales = rows[:, LATENT:scales_end].contiguous().view(torch.float32)
    rope = rows[:, scales_end:].contiguous().view(torch.bfloat16).float()
    latent = values.view(-1, LATENT // TILE, TILE) * scales.unsqueeze(-1)
    return torch.cat((latent.view(-1, LATENT), rope), dim=1).view(*packed.shape[:-1], WIDTH)
