"""The conversions kernels make of e4m3 bytes, bit for bit those of torch."""

import pytest
import torch
import triton
import triton.language as tl

from vllm_ula.kernels import fp8
from vllm_ula.kernels.reference import fp8 as reference

BLOCK = 4096


@triton.jit
def _decode_kernel(p_bytes, p_values, NATIVE: tl.constexpr):
    o_byte = tl.arange(0, 256)
    tl.store(p_values + o_byte, fp8.fp8_to_fp16(tl.load(p_bytes + o_byte), NATIVE))


@triton.jit
def _encode_kernel(p_values, p_bytes, num, BLOCK: tl.constexpr):
    o_value = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_value = o_value < num
    b_byte = fp8.fp32_to_fp8(tl.load(p_values + o_value, mask=m_value))
    tl.store(p_bytes + o_value, b_byte, mask=m_value)


@triton.jit
def _scale_kernel(p_largest, p_scales, p_inverses, num, BLOCK: tl.constexpr):
    o_row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_row = o_row < num
    b_scale, b_inverse = fp8.power_of_two_scale(tl.load(p_largest + o_row, mask=m_row, other=1.0))
    tl.store(p_scales + o_row, b_scale, mask=m_row)
    tl.store(p_inverses + o_row, b_inverse, mask=m_row)


def around(values, ulps=3):
    """Floats at and around positive values."""
    steps = torch.arange(-ulps, ulps + 1, dtype=torch.int32)
    return (values.view(torch.int32).unsqueeze(1) + steps).view(torch.float32).flatten()


@pytest.mark.parametrize("native", [False, True])
def test_every_byte_is_read_as_torch_reads_it(native):
    every = torch.arange(256).to(torch.uint8)
    values = torch.empty(256, dtype=torch.float16)
    _decode_kernel[(1,)](every, values, native)
    expected = every.view(torch.float8_e4m3fn).to(torch.float16)
    numbers = ~expected.isnan()
    if not native:  # the interpreter takes NaN for 480
        assert torch.equal(values.isnan(), ~numbers)
    assert torch.equal(values.view(torch.int16)[numbers], expected.view(torch.int16)[numbers])


def encoded(values):
    found = torch.empty(len(values), dtype=torch.uint8)
    _encode_kernel[(triton.cdiv(len(values), BLOCK),)](values, found, len(values), BLOCK)
    return found


def test_values_are_rounded_as_torch_rounds_them(random):
    every = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (every[1:] + every[:-1]) / 2
    bf16 = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()
    some = random(20_000) * 10 ** (2 * random(20_000))
    values = torch.cat((around(every[1:]), around(middles), bf16, some, torch.zeros(1)))
    values = torch.cat((values, -values))
    expected = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(encoded(values), expected)


def test_a_middle_between_two_values_goes_to_the_even_one():
    assert encoded(torch.tensor([17.0, 19.0, 1.5 * 2**-9, 2**-10])).tolist() == [88, 90, 2, 0]


def test_scales_are_those_of_the_reference(random):
    powers = torch.tensor([2.0**n for n in range(-30, 120)])
    largest = torch.cat((around(powers), around(powers * 1.75), random(1000).abs() + 1e-10))
    num = len(largest)
    scales, inverses = torch.empty(2, num)
    _scale_kernel[(triton.cdiv(num, BLOCK),)](largest, scales, inverses, num, BLOCK)
    assert torch.equal(scales, reference.power_of_two_scale(largest.unsqueeze(1)).squeeze(1))
    assert torch.equal(scales * inverses, torch.ones(num))
