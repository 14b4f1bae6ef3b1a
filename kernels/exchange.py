"""Exchange, in Triton: see `reference/exchange.py`."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_ula.kernels.checks import check
from vllm_ula.kernels.variant import Variant
from vllm_ula.records import LayerRows

# Not measured: of each tier 16 words a thread of 4 warps, so four 16-byte loads are under way
# at a time, and 32 registers hold both rows of an entry.
TILE_WORDS = 2048
# Programs a layer. Not measured: 64 tiles keep about 300 KB of a tier under way, twice what a
# PCIe 5 x16 link moves in its latency of 1 to 2 us, and leave room for what runs beside them.
MAX_PROGRAMS = 64
WORDS = {1: tl.int8, 2: tl.int16}  # by alignment in bytes; int32 from 4 on


@triton.jit(do_not_specialize=["cap"])
def _exchange_kernel(
    p_rows,
    p_victims,
    p_vacated,
    p_fetch,
    p_write_back,
    p_num,
    cap,
    WORD: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    i_layer = tl.program_id(0).to(tl.int64)
    p_device = tl.load(p_rows + 2 * i_layer).to(tl.pointer_type(WORD))
    p_host = tl.load(p_rows + 2 * i_layer + 1).to(tl.pointer_type(WORD))
    p_device = tl.multiple_of(p_device, ALIGNMENT)
    p_host = tl.multiple_of(p_host, ALIGNMENT)
    num = cap
    if p_num is not None:
        num = tl.minimum(tl.load(p_num), cap)
    o_word = tl.arange(0, BLOCK_WORDS)[None, :]
    for i_first in range(tl.program_id(1) * BLOCK_ROWS, num, tl.num_programs(1) * BLOCK_ROWS):
        o_entry = i_first + tl.arange(0, BLOCK_ROWS)
        m_entry = o_entry < num
        # [BLOCK_ROWS]
        b_victim = tl.load(p_victims + o_entry, mask=m_entry, other=0)
        b_vacated = tl.load(p_vacated + o_entry, mask=m_entry, other=0)
        b_fetch = tl.load(p_fetch + o_entry, mask=m_entry, other=0) != 0
        b_write_back = tl.load(p_write_back + o_entry, mask=m_entry, other=0) != 0
        p_up = p_host + b_vacated[:, None] * ROW_WORDS + o_word
        p_down = p_device + b_victim[:, None] * ROW_WORDS + o_word
        m_up = b_fetch[:, None] & (o_word < ROW_WORDS)
        m_down = b_write_back[:, None] & (o_word < ROW_WORDS)
        # [BLOCK_ROWS, BLOCK_WORDS]. Nobody else touches these two rows, and a thread has loaded a
        # word of both before it stores that word of either: no barrier is needed.
        b_up = tl.load(p_up, mask=m_up)
        b_down = tl.load(p_down, mask=m_down)
        tl.store(p_down, b_up, mask=m_up)
        tl.store(p_up, b_down, mask=m_down)


def exchange(
    victims: Tensor,
    vacated: Tensor,
    fetch: Tensor,
    write_back: Tensor,
    num: Tensor | None,
    layers: Sequence[LayerRows],
) -> None:
    """See `reference/exchange.py`.

    The addresses of the rows are copied to the device once for each set of layers, so the first
    exchange of a set must not be captured in a graph.
    """
    cap = victims.numel()
    check("victims", victims, torch.int64, ndim=1)
    check("vacated", vacated, torch.int64, shape=(cap,))
    check("fetch", fetch, torch.bool, shape=(cap,))
    check("write_back", write_back, torch.bool, shape=(cap,))
    if num is not None:
        check("num", num, torch.int32, shape=(1,))
    same_size: defaultdict[int, list[int]] = defaultdict(list)
    for layer in layers:
        check(f"{layer.name}: device", layer.device, layer.device.dtype, ndim=2)
        host_shape = (layer.host.shape[0], layer.device.shape[1])
        check(f"{layer.name}: host", layer.host, layer.device.dtype, shape=host_shape)
        if not layer.device.device == layer.host.device == victims.device:
            raise ValueError(
                f"{layer.name}: rows on {layer.device.device} and {layer.host.device} are not "
                f"addressable from {victims.device}"
            )
        same_size[layer.row_bytes] += layer.device.data_ptr(), layer.host.data_ptr()
    if not cap:
        return
    for row_bytes, addresses in same_size.items():
        alignment = math.gcd(16, row_bytes, *addresses)
        constants = _constants(row_bytes, alignment)
        programs = min(triton.cdiv(cap, constants["BLOCK_ROWS"]), MAX_PROGRAMS)
        _exchange_kernel[(len(addresses) // 2, programs)](
            _table(victims.device, tuple(addresses)),
            victims,
            vacated,
            fetch,
            write_back,
            num,
            cap,
            **constants,
            num_stages=1,
        )


# Unbounded, since a captured graph keeps reading its table; one holds 16 bytes a layer.
@functools.cache
def _table(device: torch.device, addresses: tuple[int, ...]) -> Tensor:
    """Int64 `[layers, 2]` on the device: where the device rows and the host rows of a layer are."""
    return torch.tensor(addresses, dtype=torch.int64).view(-1, 2).to(device)


def _constants(row_bytes: int, alignment: int) -> dict[str, object]:
    word = WORDS.get(alignment, tl.int32)
    row_words = row_bytes // (word.primitive_bitwidth // 8)
    block_words = triton.next_power_of_2(row_words)
    return {
        "WORD": word,
        "ROW_WORDS": row_words,
        "ALIGNMENT": alignment,
        "BLOCK_WORDS": block_words,
        "BLOCK_ROWS": max(TILE_WORDS // block_words, 1),
    }


VARIANTS = tuple(
    Variant(
        f"exchange, rows of {row_bytes} bytes",
        _exchange_kernel,
        {
            "p_rows": "*i64:16",
            "p_victims": "*i64:16",
            "p_vacated": "*i64:16",
            "p_fetch": "*i1:16",
            "p_write_back": "*i1:16",
            "p_num": "*i32",
            "cap": "i32",
        },
        _constants(row_bytes, 16),
        num_stages=1,
        hot=True,
        wide_loads=True,
    )
    for row_bytes in (656, 1152, 2304)
)
