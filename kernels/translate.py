"""Translate, in Triton: see `reference/translate.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_ula.kernels.checks import check
from vllm_ula.kernels.variant import Variant

BLOCK = 1024


@triton.jit(do_not_specialize=["num_slots"])
def _translate_kernel(p_home, p_slots, p_homes, num_slots, BLOCK: tl.constexpr):
    o_slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_slot = o_slot < num_slots
    # [BLOCK]
    b_slot = tl.load(p_slots + o_slot, mask=m_slot, other=-1)
    b_home = tl.load(p_home + b_slot, mask=b_slot >= 0, other=-1)
    tl.store(p_homes + o_slot, b_home.to(tl.int64), mask=m_slot)


def translate(home: Tensor, slots: Tensor) -> Tensor:
    """See `reference/translate.py`."""
    check("home", home, torch.int32, ndim=1)
    check("slots", slots, torch.int64)
    homes = torch.empty_like(slots)
    num = slots.numel()
    if num:
        _translate_kernel[(triton.cdiv(num, BLOCK),)](home, slots, homes, num, BLOCK=BLOCK)
    return homes


VARIANTS = (
    Variant(
        "translate",
        _translate_kernel,
        {"p_home": "*i32:16", "p_slots": "*i64:16", "p_homes": "*i64:16", "num_slots": "i32"},
        {"BLOCK": BLOCK},
        hot=True,
    ),
)
