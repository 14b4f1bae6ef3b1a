"""Rows to their homes, packed on the way if the pools keep fp8 rows."""

import pytest
import torch

from tests.kernels import pools
from vllm_ula.kernels.reference import fp8_rows
from vllm_ula.kernels.reference.gather import read
from vllm_ula.kernels.reference.scatter import scatter as reference
from vllm_ula.kernels.scatter import scatter

FLOATS = [torch.bfloat16, torch.float16, torch.float32]


def poisoned(kind, num_device, num_host, width=pools.WIDTH):
    device, host = pools.make(kind, num_device, num_host, width)
    pools.poison(device, host, torch.empty(0, dtype=torch.int64))
    return device, host


def same_bytes(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_equals_the_reference(kind, num_device, num_host, homes, rows):
    device, host = poisoned(kind, num_device, num_host, rows.shape[1])
    expected, expected_host = device.clone(), host.clone()
    scatter(device, host, homes, rows)
    reference(expected, expected_host, homes, rows)
    assert same_bytes(device, expected)
    assert same_bytes(host, expected_host)
    return device, host


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", pools.DTYPES)
@pytest.mark.parametrize("num", [1, 7, 21])
def test_equals_the_reference(random, kind, dtype, num):
    homes = torch.randperm(21, generator=torch.Generator().manual_seed(num))[:num]
    homes[::3] = -1
    assert_equals_the_reference(kind, 12, 9, homes, random(num, 576).to(dtype))


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("width", [1, 3, 8, 9, 132])
def test_equals_the_reference_at_any_width(random, kind, width):
    homes = torch.tensor([3, -1, 7, 0, 8])
    assert_equals_the_reference(kind, 5, 4, homes, random(5, width))


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("first", [0, 6])
def test_every_row_of_one_tier(random, kind, first):
    homes = first + torch.randperm(6)
    device, host = assert_equals_the_reference(kind, 6, 6, homes, random(6, 576))
    other = host if first == 0 else device
    assert (other.view(torch.uint8) == 255).all()
    assert_equals_the_reference(kind, 6, 0, homes - first, random(6, 576))


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("write", [scatter, reference])
@pytest.mark.parametrize("homes", [[], [-1], [-1, -1, -1, -1, -1]])
def test_skipped_rows_write_nothing_whatever_they_hold(write, kind, homes):
    device, host = poisoned(kind, 4, 3)
    rows = torch.full((len(homes), 576), torch.inf, dtype=torch.bfloat16)
    write(device, host, torch.tensor(homes, dtype=torch.int64), rows)
    assert (device.view(torch.uint8) == 255).all()
    assert (host.view(torch.uint8) == 255).all()


@pytest.mark.parametrize("write", [scatter, reference])
def test_no_rows_may_have_any_width(write):
    device, host = poisoned("fp8", 4, 0)
    write(device, host, torch.empty(0, dtype=torch.int64), device[:0])
    assert (device == 255).all()


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_what_is_scattered_is_what_is_read(random, kind):
    homes, rows = torch.tensor([6, 1, -1, 8, 3]), random(5, 576).bfloat16()
    device, host = poisoned(kind, 5, 4)
    scatter(device, host, homes, rows)
    expected = (fp8_rows.pack(rows) if kind == "fp8" else rows).clone()
    expected[2] = 0
    assert same_bytes(read(device, host, homes), expected)


def test_control_two_rows_swapped_are_seen(random):
    device, host = poisoned("bf16", 4, 3)
    other, other_host = device.clone(), host.clone()
    rows = random(2, 576).bfloat16()
    scatter(device, host, torch.tensor([2, 5]), rows)
    reference(other, other_host, torch.tensor([5, 2]), rows)
    assert not same_bytes(device, other)
    assert not same_bytes(host, other_host)


class TestPacking:
    @staticmethod
    def assert_packs_like_the_reference(rows):
        device = torch.full((len(rows), fp8_rows.ROW_BYTES), 255, dtype=torch.uint8)
        scatter(device, device[:0], torch.arange(len(rows)), rows)
        assert torch.equal(device, fp8_rows.pack(rows))

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_rows_of_all_magnitudes(self, random, dtype):
        largest = 4 if dtype == torch.float16 else 30
        rows = random(60, 576) * torch.logspace(-30, largest, 60).unsqueeze(1)
        self.assert_packs_like_the_reference(rows.to(dtype))

    def test_values_of_all_magnitudes_in_one_tile(self, random):
        self.assert_packs_like_the_reference(random(40, 576) * 10 ** (3 * random(40, 576)))

    @pytest.mark.parametrize("ulps", [-1, 0, 1])
    def test_values_halfway_between_two_fp8_values_and_their_neighbours(self, ulps):
        codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        halfway = (codes[:-1] + codes[1:]) / 2
        halfway = (halfway.view(torch.int32) + ulps).view(torch.float32)
        rows = torch.zeros(2, 576)
        rows[0, : len(halfway)], rows[1, : len(halfway)] = halfway, -halfway
        rows[:, 127] = 448.0  # of the first tile, so its scale is 1
        self.assert_packs_like_the_reference(rows)

    @pytest.mark.parametrize("ulps", range(-3, 4))
    def test_scales_around_powers_of_two_and_around_the_largest_value(self, ulps):
        largest = torch.tensor([base * 2.0**n for n in range(-30, 60, 4) for base in (1.0, 448.0)])
        rows = torch.zeros(len(largest), 576)
        rows[:, 5] = (largest.view(torch.int32) + ulps).view(torch.float32)
        rows[:, 300] = -rows[:, 5]
        self.assert_packs_like_the_reference(rows)

    def test_zeros_of_both_signs(self):
        rows = torch.zeros(2, 576)
        rows[1] = -0.0
        self.assert_packs_like_the_reference(rows)


@pytest.mark.parametrize(("kind", "width"), [("fp8", 656), ("bf16", 576)])
def test_rows_beyond_two_to_the_31_elements(random, kind, width):
    num = (1 if kind == "fp8" else 2) * 2**31 // width + 3
    device, host = pools.huge(kind, num, width), pools.huge(kind, num, width)
    rows = random(3, 576).bfloat16()
    scatter(device, host, torch.tensor([num - 1, -1, 2 * num - 1]), rows)
    kept = fp8_rows.pack(rows) if kind == "fp8" else rows
    assert torch.equal(torch.stack((device[-1], host[-1])), kept[[0, 2]])


def test_what_a_kernel_would_misread_is_refused(random):
    device, host = poisoned("bf16", 4, 4)
    with pytest.raises(TypeError, match=r"rows is torch\.float64"):
        scatter(device, host, torch.zeros(1).long(), random(1, 576).double())
    with pytest.raises(ValueError, match=r"rows has shape \(2, 576\), expected \(1, 576\)"):
        scatter(device, host, torch.zeros(1).long(), random(2, 576))
    with pytest.raises(ValueError, match="rows is not contiguous"):
        scatter(device, host, torch.zeros(1).long(), random(1, 1152)[:, ::2])
