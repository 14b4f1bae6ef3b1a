"""Rows die."""

import pytest
import torch
from kernels.agreement import copy_map
from kernels.stories import story_map

from vllm_ula.kernels.bury import bury
from vllm_ula.kernels.reference.bury import bury as reference


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_equals_the_reference(block_size, share):
    generator = torch.Generator().manual_seed(block_size)
    num = 480
    mine = story_map(torch.randperm(num, generator=generator)[:200].tolist(), num - 200)
    blocks = torch.randperm(num // block_size, generator=generator)
    blocks = blocks[: int(share * len(blocks))]
    found, expected = copy_map(mine), copy_map(mine)
    bury(blocks, block_size, found)
    reference(blocks, block_size, expected)
    assert torch.equal(found.live, expected.live)
    assert torch.equal(found.stamp, expected.stamp)
    assert int((~found.live).sum()) == len(blocks) * block_size


def test_only_device_rows_have_a_stamp():
    mine = story_map([3, 0], 2, calls=[4, 5])
    bury(torch.tensor([1]), 2, mine)
    assert mine.live.tolist() == [True, True, False, False]
    assert mine.stamp.tolist() == [9, 10]
