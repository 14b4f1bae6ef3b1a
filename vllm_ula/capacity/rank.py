"""How many logical slots, device rows and host rows a rank has: pure arithmetic.

Index keys of all logical slots stay on the device, rows live in either tier. Per rank

    k * D + i * N <= M        device bytes: rows of D tokens, index keys of all N
    k * H         <= C        host bytes
    N = D + H                 unique = physical

so `N = min((M + C) / (k + i), (M - k * D_min) / i)`, where the second term binds when index keys
would fill the device. Maps and recency metadata are charged to the device per logical slot and
per device slot, which is why `i` and the device's `k` below are a little larger.
"""

from __future__ import annotations

from vllm_ula.capacity.slots import Capacity, Limit
from vllm_ula.capacity.token import TokenBytes
from vllm_ula.capacity.units import GIB, ceil_to, floor_to
from vllm_ula.errors import ConfigError


def min_device_slots(topk: int, decode_tokens: int, block_size: int) -> int:
    """D_min: one token's selection and one row per token of a decode step, in whole blocks."""
    return ceil_to(topk + decode_tokens, block_size)


def host_share(host_bytes: int, ranks: int) -> int:
    """C of each of the ranks that divide a host budget."""
    return host_bytes // ranks


def fit(
    token: TokenBytes,
    device_bytes: int,
    host_bytes: int,
    block_size: int,
    min_device: int,
    device_slots: int | None = None,
) -> Capacity:
    """The largest capacity within the budgets.

    Args:
        token: bytes per token, see TokenBytes.
        device_bytes: M.
        host_bytes: C; 0 is a device-only cache.
        block_size: tokens per block.
        min_device: D_min, from `min_device_slots`.
        device_slots: fix D instead of using all device bytes for rows.

    Raises:
        ConfigError: the device cannot hold D_min, or not `device_slots` and the index keys, or
            `device_slots` are less than D_min or no whole blocks.
    """
    if device_slots is not None:
        return _fit_fixed(token, device_bytes, host_bytes, block_size, min_device, device_slots)
    if token.per_device_row * min_device + token.per_logical * min_device > device_bytes:
        raise _too_small(token, device_bytes, min_device)
    k, per_row, per_logical = token.rows, token.per_device_row, token.per_logical
    by_memory = (device_bytes * k + host_bytes * per_row) // (k * (per_row + per_logical))
    by_index_keys = (device_bytes - per_row * min_device) // per_logical
    limit = Limit.MEMORY if by_memory <= by_index_keys else Limit.INDEX_KEYS
    logical = floor_to(min(by_memory, by_index_keys), block_size)
    # Rounding D down to whole blocks can push a block to the host that C does not hold.
    while logical - _device_rows(token, device_bytes, block_size, logical) > host_bytes // k:
        logical -= block_size
    device = _device_rows(token, device_bytes, block_size, logical)
    return Capacity(
        logical, device, logical - device, block_size, limit, token, device_bytes, host_bytes
    )


def split(
    token: TokenBytes,
    device_bytes: int,
    host_bytes: int,
    block_size: int,
    min_device: int,
    num_blocks: int,
    device_slots: int | None = None,
) -> Capacity:
    """The capacity of a given number of logical blocks: an override, or the smallest rank's.

    Arguments and errors are those of `fit`.
    """
    largest = fit(token, device_bytes, host_bytes, block_size, min_device, device_slots)
    if num_blocks == largest.num_blocks:
        return largest
    if num_blocks > largest.num_blocks:
        raise ConfigError(
            "num_gpu_blocks_override",
            num_blocks,
            f"device and host memory hold {largest.num_blocks} logical blocks of {block_size} "
            "tokens",
            f"at most {largest.num_blocks}, or more host_gib",
        )
    logical = num_blocks * block_size
    device = min(device_slots or _device_rows(token, device_bytes, block_size, logical), logical)
    return Capacity(
        logical,
        device,
        logical - device,
        block_size,
        Limit.BLOCK_OVERRIDE,
        token,
        device_bytes,
        host_bytes,
    )


def _device_rows(token: TokenBytes, device_bytes: int, block_size: int, logical: int) -> int:
    """D for N: what index keys and maps leave of the device, in whole blocks."""
    rows = (device_bytes - token.per_logical * logical) // token.per_device_row
    return min(floor_to(rows, block_size), logical)


def _fit_fixed(
    token: TokenBytes,
    device_bytes: int,
    host_bytes: int,
    block_size: int,
    min_device: int,
    device_slots: int,
) -> Capacity:
    if device_slots < min_device or device_slots % block_size:
        raise ConfigError(
            "device_slots",
            device_slots,
            f"must be whole blocks of {block_size}, and a decode step needs {min_device} device "
            "rows",
            ceil_to(max(device_slots, min_device), block_size),
        )
    host = floor_to(host_bytes // token.rows, block_size)
    logical = device_slots + host
    needed = token.per_device_row * device_slots + token.per_logical * logical
    if needed > device_bytes:
        left = device_bytes - token.per_logical * host
        most = floor_to(left // (token.per_device_row + token.per_logical), block_size)
        raise ConfigError(
            "device_slots",
            device_slots,
            f"its rows and the index keys of {logical} logical slots need {needed} device bytes, "
            f"there are {device_bytes}",
            f"at most {most}" if most >= min_device else "a smaller host_gib or more device memory",
        )
    return Capacity(
        logical,
        device_slots,
        host,
        block_size,
        Limit.DEVICE_SLOTS,
        token,
        device_bytes,
        host_bytes,
    )


def _too_small(token: TokenBytes, device_bytes: int, min_device: int) -> ConfigError:
    needed = (token.per_device_row + token.per_logical) * min_device
    return ConfigError(
        "device_gib",
        f"{device_bytes / GIB:.4g}",
        f"a decode step needs {min_device} device rows, {needed} bytes",
        f"at least {_gib_up(needed)}",
    )


def _gib_up(nbytes: int) -> float:
    """GiB rounded up to a readable figure that is still enough."""
    return -(-nbytes * 1000 // GIB) / 1000
