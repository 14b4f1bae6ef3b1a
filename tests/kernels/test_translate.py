"""Logical slots to homes."""

import pytest
import torch

from vllm_ula.kernels.reference.translate import translate as reference
from vllm_ula.kernels.translate import translate


@pytest.mark.parametrize("shape", [(0,), (1,), (7, 5), (3, 0), (1025,), (2, 1024)])
def test_equals_the_reference(shape):
    generator = torch.Generator().manual_seed(len(shape))
    home = torch.randperm(5000, generator=generator).int()
    slots = torch.randint(-1, 5000, shape, generator=generator)
    assert torch.equal(translate(home, slots), reference(home, slots))


def test_brute_force():
    home = torch.tensor([2, 0, 1, 3], dtype=torch.int32)
    slots = torch.tensor([[3, -1, 0], [0, 2, -1]])
    assert translate(home, slots).tolist() == [[3, -1, 2], [2, 1, -1]]


def test_a_map_of_another_type_is_refused():
    with pytest.raises(TypeError, match=r"home is torch\.int64, expected torch\.int32"):
        translate(torch.zeros(4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
