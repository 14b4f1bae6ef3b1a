"""Bury, in Triton: see `reference/bury.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_ula.kernels.checks import check
from vllm_ula.kernels.signatures import MAP, signature
from vllm_ula.kernels.tables import MapTables
from vllm_ula.kernels.variant import Variant

SLOTS = 1024


@triton.jit(do_not_specialize=["num_slots"])
def _bury_kernel(
    p_blocks, p_home, p_live, p_stamp, num_slots, num_device, block_size, SLOTS: tl.constexpr
):
    o_slot = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    m_slot = o_slot < num_slots
    # [SLOTS]
    b_block = tl.load(p_blocks + o_slot // block_size, mask=m_slot, other=0)
    b_slot = b_block * block_size + o_slot % block_size
    b_home = tl.load(p_home + b_slot, mask=m_slot, other=num_device)
    m_device = m_slot & (b_home < num_device)
    b_stamp = tl.load(p_stamp + b_home, mask=m_device, other=0)
    tl.store(p_stamp + b_home, b_stamp | 1, mask=m_device)
    tl.store(p_live + b_slot, tl.zeros([SLOTS], tl.int1), mask=m_slot)


def bury(blocks: Tensor, block_size: int, tables: MapTables) -> None:
    """See `reference/bury.py`."""
    check("blocks", blocks, torch.int64, ndim=1)
    num = blocks.numel() * block_size
    if num:
        _bury_kernel[(triton.cdiv(num, SLOTS),)](
            blocks,
            tables.home,
            tables.live,
            tables.stamp,
            num,
            tables.num_device,
            block_size,
            SLOTS=SLOTS,
        )


VARIANTS = (
    Variant(
        "bury",
        _bury_kernel,
        signature(_bury_kernel, MAP),
        {"SLOTS": SLOTS},
    ),
)
