"""What torch alone does instead of a kernel, as well as it can without asking the device.

Where it would have to ask how many or which, it is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.rows import words
from vllm_ula.kernels.reference.fp8 import quantize
from vllm_ula.kernels.reference.fp8_rows import LATENT, ROPE, ROW_BYTES, TILE, WIDTH, pack
from vllm_ula.records import LayerRows

PARTS = 4  # of an exchange, so that the ways of the bus overlap


def unpack(packed: Tensor) -> Tensor:
    """fp8 rows uint8 `[n, 656]` as bfloat16 `[n, 576]`, which is exact."""
    rows = torch.empty(len(packed), WIDTH, dtype=torch.bfloat16, device=packed.device)
    latent = packed[:, :LATENT].view(torch.float8_e4m3fn).bfloat16().view(-1, LATENT // TILE, TILE)
    scales = packed[:, LATENT : ROW_BYTES - 2 * ROPE].view(torch.float32).bfloat16()
    torch.mul(latent, scales.unsqueeze(-1), out=rows[:, :LATENT].view(-1, LATENT // TILE, TILE))
    rows[:, LATENT:] = packed[:, ROW_BYTES - 2 * ROPE :].view(torch.bfloat16)
    return rows


def gather(device: Tensor, host: Tensor, homes: Tensor, on_host: Tensor) -> Tensor:
    """`gather` of homes that are all there, told which (flat, int64 `[h]`) are on the host."""
    flat = homes.view(-1)
    if len(on_host):
        rows = words(device).index_select(0, flat.clamp_max(len(device) - 1))
        fetched = words(host).index_select(0, flat[on_host] - len(device))
        rows.index_copy_(0, on_host, fetched)
    else:
        rows = words(device).index_select(0, flat)
    found = rows.view(device.dtype)
    found = unpack(found) if device.dtype == torch.uint8 else found
    return found.view(*homes.shape, WIDTH)


def scatter(device: Tensor, homes: Tensor, rows: Tensor) -> None:
    """`scatter` of rows that all live on the device, in fp8 rows."""
    words(device).index_copy_(0, homes, words(pack(rows)))


def exchange(
    layers: Sequence[LayerRows], victims: Tensor, vacated: Tensor, side: torch.cuda.Stream | None
) -> None:
    """`exchange` of all entries, told how many there are.

    Host rows are read and written where they are: pinned memory between would be one copy more.
    What goes down goes on the other stream, beside what comes up next.
    """
    kept = []  # what the other stream reads must not be handed out again before it has
    for layer in layers:
        device, host = words(layer.device), words(layer.host)
        for up_to, down_to in zip(victims.chunk(PARTS), vacated.chunk(PARTS), strict=True):
            up, down = host.index_select(0, down_to), device.index_select(0, up_to)
            device.index_copy_(0, up_to, up)
            kept.append(down)
            if side is not None:
                side.wait_stream(torch.cuda.current_stream())
            with nullcontext() if side is None else torch.cuda.stream(side):
                host.index_copy_(0, down_to, down)
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)


def attention(
    queries: Tensor, device: Tensor, host: Tensor, homes: Tensor, scale: float, on_host: Tensor
) -> Tensor:
    """Sparse MLA over fp8 rows, told as `gather` is; two products in bfloat16."""
    rows = gather(device, host, homes, on_host)
    weights = torch.bmm(queries * scale, rows.transpose(1, 2)).softmax(-1)
    return torch.bmm(weights, rows[..., :LATENT])


def fused_attention(
    queries: Tensor, device: Tensor, host: Tensor, homes: Tensor, scale: float, on_host: Tensor
) -> Tensor:
    """The same with torch's own attention: heads are the queries of one key-value head."""
    rows = gather(device, host, homes, on_host).unsqueeze(1)
    values = rows[..., :LATENT]
    return scaled_dot_product_attention(queries.unsqueeze(1), rows, values, scale=scale).squeeze(1)


def store_index_keys(cache: Tensor, slots: Tensor, keys: Tensor) -> None:
    """`store_index_keys` at slots that are all there."""
    values, scales = quantize(keys)
    rows = torch.cat([part.view(torch.uint8) for part in (values, scales)], dim=1)
    cache.view(torch.int32).index_copy_(0, slots, rows.view(torch.int32))


def index_scores(
    queries: Tensor, weights: Tensor, cache: Tensor, table: Tensor, block_size: int
) -> Tensor:
    """`index_scores` of requests of one token and one length, in bfloat16."""
    requests, _, dim = queries.shape
    blocks = words(cache.view(-1, block_size * cache.shape[1]))
    rows = blocks.index_select(0, table.flatten()).view(torch.uint8)
    rows = rows.view(requests, -1, cache.shape[1])
    keys = rows[..., :dim].view(torch.float8_e4m3fn).bfloat16()
    scales = rows[..., dim:].view(torch.float32).squeeze(-1)
    dots = torch.bmm(queries.bfloat16(), keys.transpose(1, 2)).relu_()
    return torch.bmm(weights.bfloat16().unsqueeze(1), dots).squeeze(1) * scales
