"""Gather, in Triton: see `reference/gather.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_ula.kernels.checks import check
from vllm_ula.kernels.fp8 import converts_fp8
from vllm_ula.kernels.fp8_rows import LATENT, ROPE, ROW_BYTES, WIDTH, load_fp8_rows
from vllm_ula.kernels.rows import as_words, at_home, check_pools, copy_rows, head_of
from vllm_ula.kernels.signatures import AS_BYTES, AS_WORDS
from vllm_ula.kernels.variant import Variant

# Rows of a program, all under way at once: 4 and 2 loads of 16 bytes for each of its 128 threads.
# Not measured: few programs a multiprocessor cover the latency of PCIe with that, and a decode
# step of one token still makes 256 of them.
ROWS = 8
INTERPRETED_ROWS = 512  # the interpreter takes as long for a small tile as for a large one


@triton.jit(do_not_specialize=["num_rows"])
def _gather_kernel(
    p_device,
    p_host,
    p_homes,
    p_rows,
    num_device,
    num_rows,
    WORDS: tl.constexpr,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < num_rows
    # [ROWS]
    b_home = tl.load(p_homes + o_row, mask=m_row, other=-1)
    p_from = at_home(p_device, p_host, b_home, num_device, WORDS)
    copy_rows(p_from, p_rows + o_row * WORDS, b_home >= 0, m_row, WORDS, HEAD)


@triton.jit(do_not_specialize=["num_rows"])
def _gather_unpacked_kernel(
    p_device,
    p_host,
    p_homes,
    p_rows,
    num_device,
    num_rows,
    ROWS: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < num_rows
    # [ROWS]
    b_home = tl.load(p_homes + o_row, mask=m_row, other=-1)
    p_from = at_home(p_device, p_host, b_home, num_device, ROW_BYTES)
    b_latent, b_rope = load_fp8_rows(p_from, b_home >= 0, NATIVE_FP8)
    p_to = p_rows + o_row[:, None] * WIDTH
    tl.store(p_to + tl.arange(0, LATENT)[None, :], b_latent, mask=m_row[:, None])
    tl.store(p_to + LATENT + tl.arange(0, ROPE)[None, :], b_rope, mask=m_row[:, None])


def gather(device: Tensor, host: Tensor, homes: Tensor) -> Tensor:
    """See `reference/gather.py`."""
    check_pools(device, host)
    check("homes", homes, torch.int64)
    num = homes.numel()
    at_once = INTERPRETED_ROWS if triton.knobs.runtime.interpret else ROWS
    if device.dtype == torch.uint8:
        rows = torch.empty(*homes.shape, WIDTH.value, dtype=torch.bfloat16, device=device.device)
        if num:
            _gather_unpacked_kernel[(triton.cdiv(num, at_once),)](
                device,
                host,
                homes,
                rows,
                device.shape[0],
                num,
                ROWS=at_once,
                NATIVE_FP8=converts_fp8(device),
            )
        return rows
    rows = torch.empty(*homes.shape, device.shape[1], dtype=device.dtype, device=device.device)
    words = as_words(device)
    if num:
        _gather_kernel[(triton.cdiv(num, at_once),)](
            words,
            as_words(host),
            homes,
            as_words(rows.view(num, -1)),
            device.shape[0],
            num,
            WORDS=words.shape[1],
            HEAD=head_of(words.shape[1]),
            ROWS=at_once,
        )
    return rows


VARIANTS = (
    Variant(
        "gather bf16",
        _gather_kernel,
        AS_WORDS,
        {"WORDS": 288, "HEAD": 256, "ROWS": ROWS},
        hot=True,
        wide_loads=True,
    ),
    *(
        Variant(
            "gather fp8",
            _gather_unpacked_kernel,
            AS_BYTES,
            {"ROWS": ROWS, "NATIVE_FP8": backend == "cuda"},
            hot=True,
            wide_loads=True,
            backends=(backend,),
        )
        for backend in ("cuda", "hip")
    ),
)
