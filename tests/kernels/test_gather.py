"""Rows of both tiers into a workspace."""

import pytest
import torch

from tests.kernels import pools
from vllm_ula.kernels.gather import gather
from vllm_ula.kernels.reference import fp8_rows
from vllm_ula.kernels.reference.gather import gather as reference


def assert_equals_the_reference(device, host, homes):
    found, expected = gather(device, host, homes), reference(device, host, homes)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", pools.DTYPES)
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 0), (7, 5), (2, 3, 11), (65,)])
def test_equals_the_reference(kind, shape):
    device, host = pools.make(kind, 13, 9)
    assert_equals_the_reference(device, host, pools.homes(*shape, num=22))


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("width", [1, 2, 3, 8, 9, 96, 132])
def test_equals_the_reference_at_any_width(kind, width):
    device, host = pools.make(kind, 5, 4, width)
    assert_equals_the_reference(device, host, pools.homes(20, num=9))


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("first", [0, 8])
def test_rows_of_one_tier(kind, first):
    device, host = pools.make(kind, 8, 8)
    assert_equals_the_reference(device, host, first + torch.arange(8).flip(0))
    assert_equals_the_reference(device, host[:0], torch.tensor([7, -1, 0]))


@pytest.mark.parametrize("kind", ["fp8", "bf16", "fp32"])
def test_stale_bytes_reach_nothing(kind):
    device, host = pools.make(kind, 8, 8)
    homes = torch.tensor([[3, -1, 12], [12, 0, -1], [-1, -1, -1]])
    clean = gather(device, host, homes)
    pools.poison(device, host, homes)
    assert device.view(torch.uint8).eq(255).all(1).sum() == 6
    again = gather(device, host, homes)
    assert torch.equal(again, clean)
    assert (again[homes < 0] == 0).all()


def test_brute_force():
    device, host = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0]])
    found = gather(device, host, torch.tensor([[2, -1], [1, 1]]))
    assert found.tolist() == [[[5, 6], [0, 0]], [[3, 4], [3, 4]]]


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_control_two_rows_swapped_are_seen(kind):
    device, host = pools.make(kind, 4, 4)
    found = gather(device, host, torch.tensor([1, 5]))
    device[1], host[1] = host[1].clone(), device[1].clone()
    assert not torch.equal(found, reference(device, host, torch.tensor([1, 5])))


def test_every_fp8_value_under_every_scale_is_exact_in_bf16():
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0  # NaN
    scales = 2.0 ** torch.arange(-14, 119)  # more than which float32 has no room for 448
    packed = torch.zeros(len(scales), fp8_rows.ROW_BYTES, dtype=torch.uint8)
    packed[:, :512] = codes.repeat(2)
    packed[:, 512:528] = scales.unsqueeze(1).repeat(1, 4).view(torch.uint8)
    packed[:, 528:] = torch.arange(64).bfloat16().view(torch.uint8)
    unpacked = fp8_rows.unpack(packed)
    assert torch.equal(unpacked.bfloat16().float(), unpacked)
    found = gather(packed, packed[:0], torch.arange(len(scales)))
    assert torch.equal(found.float(), unpacked)


@pytest.mark.parametrize(("kind", "width"), [("fp8", 656), ("bf16", 576)])
def test_rows_beyond_two_to_the_31_elements(kind, width):
    step = 1 if kind == "fp8" else 2  # bf16 rows are moved as words of two
    num = step * 2**31 // width + 3
    device, host = pools.huge(kind, num, width), pools.huge(kind, num, width)
    (few, _) = pools.make(kind, 2, 0)
    device[-1], host[-1] = few[0], few[1]
    found = gather(device, host, torch.tensor([num - 1, 2 * num - 1]))
    assert torch.equal(found, reference(few, few[:0], torch.tensor([0, 1])))


def test_what_a_kernel_would_misread_is_refused():
    device, host = pools.make("bf16", 4, 4)
    with pytest.raises(TypeError, match=r"host is torch\.float32, expected torch\.bfloat16"):
        gather(device, host.float(), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"homes is torch\.int32, expected torch\.int64"):
        gather(device, host, torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"device has shape \(4, 576\), expected \(4, 656\)"):
        gather(device.view(torch.uint8)[:, :576].contiguous(), host, torch.zeros(1).long())
    with pytest.raises(ValueError, match="not at a multiple of 16 bytes"):
        gather(device.view(-1)[1:577].view(1, 576), host, torch.zeros(1).long())
