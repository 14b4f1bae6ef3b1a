"""Kernels whose resources are known, compiled in a process of their own: prints them as JSON."""

import json
from dataclasses import asdict

import triton
import triton.language as tl

from vllm_ula.kernels.resources import TARGETS, resources
from vllm_ula.kernels.variant import Variant


@triton.jit
def _copy_kernel(p_from, p_to, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_to + o, tl.load(p_from + o))


@triton.jit
def _normalise_kernel(p_from, p_to, BLOCK: tl.constexpr):
    # All of the block is alive when its sum is known.
    o = tl.arange(0, BLOCK)
    b = tl.load(p_from + o)
    tl.store(p_to + o, b / tl.sum(b))


@triton.jit
def _broken_kernel(p_from, p_to):
    tl.store(p_to, tl.load(p_from) + undefined)  # noqa: F821


ALIGNED = {"p_from": "*fp32:16", "p_to": "*fp32:16"}
UNALIGNED = {"p_from": "*fp32", "p_to": "*fp32"}
VARIANTS = (
    Variant("aligned", _copy_kernel, ALIGNED, {"BLOCK": 1024}),
    Variant("unaligned", _copy_kernel, UNALIGNED, {"BLOCK": 1024}),
    # 1,024 threads on AMD, 512 on NVIDIA: 128 registers each, for 128 and 256 numbers.
    Variant("spills", _normalise_kernel, ALIGNED, {"BLOCK": 131072}, num_warps=16),
    Variant("incomplete", _copy_kernel, ALIGNED),
    Variant("broken", _broken_kernel, UNALIGNED),
)


def outcome(variant: Variant, target: str) -> dict[str, object]:
    try:
        return asdict(resources(variant, target))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    print(json.dumps({v.name: {t: outcome(v, t) for t in TARGETS} for v in VARIANTS}))
