"""Sparse MLA, in Triton: see `reference/sparse_mla.py`.

A program attends a group of heads of one token to one split of its selection, in tiles of rows
read where they live, with a running softmax; a second kernel merges the splits. How a selection
is split depends on its width alone, so a token rounds the same whatever else is in the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_ula.kernels import dispatch
from vllm_ula.kernels.checks import check
from vllm_ula.kernels.fp8 import converts_fp8
from vllm_ula.kernels.fp8_rows import load_fp8_rows
from vllm_ula.kernels.merge_splits import MERGES, block, merge_splits
from vllm_ula.kernels.reference import fp8_rows
from vllm_ula.kernels.rows import FLOATS, at_home, check_pools
from vllm_ula.kernels.variant import Variant

HEADS = 16  # of a program: the least a tensor core multiplies
# Rows of a program. Not measured: 512 make 4 splits of a top-k of 2,048, so 8 tokens of 64 heads
# are 128 programs, about one for each multiprocessor of an H100; splits half as long would move
# more bytes of partial results than of fp8 rows.
SPLIT = 512


@dataclass(frozen=True)
class Shape:
    """How a program works through its rows.

    Attributes:
        tile: rows at a time.
        num_warps: of the program.
        num_stages: tiles under way.
    """

    tile: int
    num_warps: int
    num_stages: int


# Not measured, but compiled: the largest tiles that spill no registers with some to spare, on
# sm_90 and sm_100. On gfx942 32 fp8 rows at a time or several tiles under way spill hundreds.
SHAPES = {"cuda": Shape(32, 8, 3), "hip": Shape(16, 4, 1)}
# Workspace of partial results and staged rows, 3 MiB a token: prefill attends in chunks of tokens.
# Not measured: one chunk of 80 tokens and 64 heads is 1,280 programs, many for each multiprocessor.
WORKSPACE_BYTES = 256 << 20

DOT_TYPES = {
    torch.uint8: tl.bfloat16,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}

LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["num_device"])
def _attend_kernel(
    p_queries,
    p_device,
    p_host,
    p_homes,
    p_out,
    p_lse,
    scale,
    num_device,
    NUM_HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    LATENT: tl.constexpr,
    ROW: tl.constexpr,
    STAGED: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    HEADS: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
):
    # Groups of heads are neighbours: they read the same rows, from the cache after the first.
    GROUPS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    PACKED: tl.constexpr = p_device.dtype.element_ty == tl.uint8
    i_program = tl.program_id(0)
    i_split = (i_program // GROUPS) % SPLITS
    i_token = (i_program // (GROUPS * SPLITS)).to(tl.int64)
    o_head = (i_program % GROUPS) * HEADS + tl.arange(0, HEADS)
    m_head = o_head < NUM_HEADS
    o_latent = tl.arange(0, LATENT_BLOCK)
    o_rope = LATENT + tl.arange(0, ROPE_BLOCK)
    m_latent, m_rope = o_latent < LATENT, o_rope < WIDTH

    p_query = p_queries + (i_token * NUM_HEADS + o_head)[:, None] * WIDTH
    # [HEADS, LATENT_BLOCK] and [HEADS, ROPE_BLOCK]
    b_query = tl.load(
        p_query + o_latent[None, :], mask=m_head[:, None] & m_latent[None, :], other=0.0
    ).to(DOT_TYPE)
    b_query_rope = tl.load(
        p_query + o_rope[None, :], mask=m_head[:, None] & m_rope[None, :], other=0.0
    ).to(DOT_TYPE)

    p_home = p_homes + i_token * TOPK
    o_first = i_split * SPLIT
    o_split = o_first + tl.arange(0, SPLIT)
    # [SPLIT]: short selections are padded at the end, where there is nothing to do.
    b_split = tl.load(p_home + o_split, mask=o_split < TOPK, other=-1)
    o_last = tl.max(tl.where(b_split >= 0, o_split + 1, 0))

    b_most = tl.full((HEADS,), -float("inf"), tl.float32)
    b_sum = tl.zeros((HEADS,), tl.float32)
    b_out = tl.zeros((HEADS, LATENT_BLOCK), tl.float32)
    for o_start in range(o_first, o_last, TILE):
        o_row = o_start + tl.arange(0, TILE)
        # [TILE]
        b_home = tl.load(p_home + o_row, mask=o_row < TOPK, other=-1)
        m_row = b_home >= 0
        if STAGED:
            b_home = i_token * TOPK + o_row
        p_row = at_home(p_device, p_host, b_home, num_device, ROW)
        # [TILE, LATENT_BLOCK] and [TILE, ROPE_BLOCK]: zeros where nothing is selected
        if PACKED:
            b_row, b_rope = load_fp8_rows(p_row, m_row, NATIVE_FP8)
        else:
            m_row_latent = m_row[:, None] & m_latent[None, :]
            b_row = tl.load(p_row[:, None] + o_latent[None, :], mask=m_row_latent, other=0.0)
            m_row_rope = m_row[:, None] & m_rope[None, :]
            b_rope = tl.load(p_row[:, None] + o_rope[None, :], mask=m_row_rope, other=0.0)
        b_row, b_rope = b_row.to(DOT_TYPE), b_rope.to(DOT_TYPE)

        b_logit = tl.dot(b_query, tl.trans(b_row), input_precision="ieee")
        b_logit = tl.dot(b_query_rope, tl.trans(b_rope), b_logit, input_precision="ieee")
        b_logit = tl.where(m_row[None, :], b_logit * (scale * LOG2_E), -float("inf"))
        b_new = tl.maximum(b_most, tl.max(b_logit, axis=1))
        # Nothing selected so far: 0 instead of -inf, whose difference from itself is NaN.
        b_base = tl.where(b_new == -float("inf"), 0.0, b_new)
        b_weight = tl.exp2(b_logit - b_base[:, None])
        b_shrink = tl.exp2(b_most - b_base)
        b_sum = b_sum * b_shrink + tl.sum(b_weight, axis=1)
        b_out = b_out * b_shrink[:, None]
        b_out = tl.dot(b_weight.to(DOT_TYPE), b_row, b_out, input_precision="ieee")
        b_most = b_new

    o_result = (i_token * SPLITS + i_split) * NUM_HEADS + o_head
    b_sum = tl.where(b_sum > 0.0, b_sum, 1.0)  # of nothing: 0 / 1 and -inf + log 1
    b_out = b_out / b_sum[:, None]
    p_result = p_out + o_result[:, None] * LATENT + o_latent[None, :]
    tl.store(p_result, b_out, mask=m_head[:, None] & m_latent[None, :])
    tl.store(p_lse + o_result, (b_most + tl.log2(b_sum)) * LN_2, mask=m_head)


def sparse_mla(
    queries: Tensor,
    device: Tensor,
    host: Tensor,
    homes: Tensor,
    scale: float,
    latent: int,
    staged: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `reference/sparse_mla.py`."""
    check_pools(device, host)
    check("queries", queries, FLOATS, ndim=3)
    tokens, heads, width = queries.shape
    check("homes", homes, torch.int64, ndim=2)
    check("homes", homes, torch.int64, shape=(tokens, homes.shape[1]))
    packed = device.dtype == torch.uint8
    row_width = fp8_rows.WIDTH if packed else device.shape[1]
    check("queries", queries, FLOATS, shape=(tokens, heads, row_width))
    if latent > width or (packed and latent != fp8_rows.LATENT):
        raise ValueError(f"latent is {latent} of rows of {width}, in fp8 rows {fp8_rows.LATENT}")
    out = torch.empty(tokens, heads, latent, dtype=torch.float32, device=queries.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=queries.device)
    row_bytes = width * (2 if packed else device.element_size())
    of_token = num_splits(homes.shape[1]) * heads * (latent + 1) * 4
    of_token += staged * homes.shape[1] * row_bytes
    chunk = max(WORKSPACE_BYTES // max(of_token, 1), 1)
    for start in range(0, tokens, chunk):
        part = slice(start, start + chunk)
        _attend(queries[part], device, host, homes[part], scale, staged, out[part], lse[part])
    return out, lse


def num_splits(topk: int) -> int:
    """Into how many parts a selection is split."""
    return max(-(-topk // SPLIT), 1)


def _attend(
    queries: Tensor,
    device: Tensor,
    host: Tensor,
    homes: Tensor,
    scale: float,
    staged: bool,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attend a chunk of tokens; out and lse are written."""
    tokens, heads, width = queries.shape
    topk, latent = homes.shape[1], out.shape[2]
    if not heads:
        return
    if staged:
        device = host = dispatch.gather(device, host, homes).view(-1, width)
    shape = SHAPES["hip" if torch.version.hip else "cuda"]
    splits, groups = num_splits(topk), triton.cdiv(heads, HEADS)
    parts = out.new_empty(tokens, splits, heads, latent) if splits > 1 else out
    lses = lse.new_empty(tokens, splits, heads) if splits > 1 else lse
    _attend_kernel[(tokens * splits * groups,)](
        queries,
        device,
        host,
        homes,
        parts,
        lses,
        scale,
        device.shape[0],
        NUM_HEADS=heads,
        TOPK=topk,
        SPLITS=splits,
        WIDTH=width,
        LATENT=latent,
        ROW=device.shape[1],
        STAGED=staged,
        DOT_TYPE=tl.float32 if triton.knobs.runtime.interpret else DOT_TYPES[device.dtype],
        NATIVE_FP8=converts_fp8(device),
        SPLIT=SPLIT,
        TILE=shape.tile,
        HEADS=HEADS,
        LATENT_BLOCK=block(latent),
        ROPE_BLOCK=block(width - latent),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    if splits > 1:
        merge_splits(parts, lses, out, lse)


def _variants() -> Iterator[Variant]:
    """Kernels of 64 and 128 heads, top-k 2,048, latent 512 and rope 64."""
    floats, splits = "*fp32:16", num_splits(2048)
    pointers = {"p_queries": "*bf16:16", "p_homes": "*i64:16", "p_out": floats, "p_lse": floats}
    numbers = {"scale": "fp32", "num_device": "i32"}
    kinds = (
        ("bf16", "*bf16:16", 576, False),
        ("fp8", "*u8:16", 656, False),
        ("staged", "*bf16:16", 576, True),
    )
    for heads in (64, 128):
        common = {"NUM_HEADS": heads, "SPLITS": splits, "LATENT": 512, "LATENT_BLOCK": 512}
        for backend, shape in SHAPES.items():
            for name, pool, row, staged in kinds:
                constants = {"TOPK": 2048, "WIDTH": 576, "ROW": row, "STAGED": staged}
                constants |= {"DOT_TYPE": tl.bfloat16, "SPLIT": SPLIT, "TILE": shape.tile}
                constants["NATIVE_FP8"] = backend == "cuda"
                yield Variant(
                    f"sparse_mla {name} {heads}",
                    _attend_kernel,
                    {**pointers, "p_device": pool, "p_host": pool, **numbers},
                    {**constants, **common, "HEADS": HEADS, "ROPE_BLOCK": 64},
                    num_warps=shape.num_warps,
                    num_stages=shape.num_stages,
                    hot=True,
                    wide_loads=True,
                    backends=(backend,),
                )


VARIANTS = (*_variants(), *MERGES)
