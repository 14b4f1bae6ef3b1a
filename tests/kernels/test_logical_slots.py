"""Token positions to logical slots."""

import pytest
import torch

from vllm_ula.kernels.logical_slots import logical_slots
from vllm_ula.kernels.reference.logical_slots import logical_slots as reference

REQUESTS, BLOCKS = 6, 11


def sample(tokens, topk, block_size, dtype=torch.int32):
    """Positions, requests and a table that is part of a wider one; padding among all of them."""
    generator = torch.Generator().manual_seed(tokens + topk)

    def draw(*shape, high):
        return torch.randint(-1, high, shape, generator=generator)

    wide = torch.randperm(1000, generator=generator)[: REQUESTS * 20].view(REQUESTS, 20).int()
    positions = draw(tokens, topk, high=BLOCKS * block_size).to(dtype)
    return positions, draw(tokens, high=REQUESTS), wide[:, :BLOCKS], block_size


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize(
    ("tokens", "topk"), [(0, 5), (3, 0), (1, 1), (7, 5), (40, 128), (2, 2048), (3, 2500)]
)
def test_equals_the_reference(poisoned, tokens, topk, block_size, dtype):
    arguments = sample(tokens, topk, block_size, dtype)
    found = logical_slots(*arguments)
    assert found.dtype == torch.int64
    assert torch.equal(found, reference(*arguments))


def test_control_two_tokens_swapped_are_seen():
    positions, requests, table, block_size = sample(7, 5, 16)
    swapped = positions[[1, 0, 2, 3, 4, 5, 6]]
    expected = reference(swapped, requests, table, block_size)
    assert not torch.equal(logical_slots(positions, requests, table, block_size), expected)


def test_a_padding_token_selects_nothing_whatever_its_positions():
    positions = torch.tensor([[1, 10_000, 2**31 - 1], [1, -1, -1]], dtype=torch.int32)
    table = torch.tensor([[3, 5], [7, 1]], dtype=torch.int32)
    found = logical_slots(positions, torch.tensor([-1, 1]), table, 4)
    assert found.tolist() == [[-1, -1, -1], [29, -1, -1]]


def test_large_block_ids_do_not_overflow():
    table = torch.tensor([[2**30]], dtype=torch.int32)
    positions = torch.tensor([[5]], dtype=torch.int32)
    assert logical_slots(positions, torch.tensor([0]), table, 64).item() == 2**36 + 5


def test_rows_of_the_table_more_than_two_gib_apart():
    apart = 2**31 // 3 + 1  # elements, so the last of four rows lies beyond 2^31
    table = torch.empty(3 * apart + 2, dtype=torch.int32).as_strided((4, 2), (apart, 1))
    table[0], table[3] = torch.tensor([7, 8]), torch.tensor([1, 2])
    positions = torch.tensor([[0, 17], [16, 15]], dtype=torch.int32)
    assert logical_slots(positions, torch.tensor([3, 0]), table, 16).tolist() == [
        [16, 33],
        [128, 127],
    ]


def test_a_table_whose_rows_are_not_contiguous_is_refused():
    positions, requests, table, block_size = sample(2, 3, 16)
    with pytest.raises(ValueError, match="rows of block_table is not contiguous"):
        logical_slots(positions, requests, table[:, ::2], block_size)
