"""fp8 (e4m3) bytes to and from floats, bit for bit as `reference/fp8.py`, for kernels to call.

In integer arithmetic, because not every GPU converts e4m3: gfx942 has another fp8, with another
bias and another NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def converts_fp8(tensor: Tensor) -> bool:
    """Whether the tensor's GPU converts two e4m3 bytes to fp16 in one instruction."""
    if triton.knobs.runtime.interpret or torch.version.hip is not None or not tensor.is_cuda:
        return False
    return torch.cuda.get_device_capability(tensor.device) >= (8, 9)


@triton.jit
def fp8_to_fp16(b_byte, NATIVE: tl.constexpr):
    """What e4m3 bytes (uint8) stand for: exact in fp16. NATIVE: see `converts_fp8`."""
    if NATIVE:
        b_value = b_byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        # Exponent and mantissa move to their places in fp16, whose bias is larger by 8.
        b_bits = b_byte.to(tl.uint16)
        b_magnitude = b_bits & 0x7F
        b_nan = (b_magnitude == 0x7F).to(tl.uint16) * 0x7C00
        b_half = ((b_bits & 0x80) << 8) | (b_magnitude << 7) | b_nan
        b_value = b_half.to(tl.float16, bitcast=True) * 256.0
    return b_value


@triton.jit
def fp32_to_fp8(b_value):
    """e4m3 bytes (uint8) of fp32 values, to nearest even; what is larger than 448 becomes 448."""
    b_bits = b_value.to(tl.int32, bitcast=True)
    b_magnitude = b_bits & 0x7FFFFFFF
    b_capped = tl.minimum(b_magnitude, 0x43E00000)  # 448
    # 20 of 23 mantissa bits go, and the bias shrinks by 120.
    b_normal = ((b_capped + 0x7FFFF + ((b_capped >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the step is 2^-9, which is that of fp32 from 2^14 on: the addition rounds.
    b_shifted = b_capped.to(tl.float32, bitcast=True) + 16384.0
    b_small = b_shifted.to(tl.int32, bitcast=True) - 0x46800000
    b_byte = tl.where(b_capped < 0x3C800000, b_small, b_normal)
    b_byte = tl.where(b_magnitude > 0x7F800000, 0x7F, b_byte)
    return (b_byte | ((b_bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def power_of_two_scale(b_largest):
    """Scale and its inverse of rows whose largest magnitudes are given; none may be 0."""
    b_bits = (b_largest * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    b_exponent = (b_bits >> 23) + ((b_bits & 0x7FFFFF) != 0).to(tl.int32)
    b_scale = (b_exponent << 23).to(tl.float32, bitcast=True)
    b_inverse = (tl.maximum(254 - b_exponent, 0) << 23).to(tl.float32, bitcast=True)
    return b_scale, b_inverse
