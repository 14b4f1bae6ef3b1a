"""The comparison every step test relies on goes red when a row is not where it should be."""

from unittest import mock

import pytest
import torch

from tests.core.rig import Rig
from vllm_ula import step

BLOCK = 4


@pytest.fixture
def rig(recency):
    rig = Rig(recency, 8, 8, num_layers=3, block_size=BLOCK)
    rig.fill(range(16))
    return rig


def swap(rows, a, b):
    rows[[a, b]] = rows[[b, a]]


def test_green_without_corruption(rig):
    rig.step(write=[2], select=[[2, 9], [13]])
    assert rig.wrong_rows(torch.arange(16)) == []


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("decode", [True, False])
def test_two_swapped_host_rows_are_seen(rig, layer, decode):
    swap(rig.layers[layer].host, 1, 5)
    with pytest.raises(AssertionError):
        rig.step(select=[[9]], decode=decode)
    assert rig.wrong_rows(torch.tensor([9, 10]), layer) == [9]


def test_a_row_whose_home_is_shifted_by_a_block_is_seen(rig):
    swap(rig.residency.home, 2, 2 + BLOCK)
    swap(rig.residency.owner, 2, 2 + BLOCK)
    rig.check()  # a permutation all the same: only what the rows hold tells
    with pytest.raises(AssertionError):
        rig.step(select=[[2]])
    assert rig.wrong_rows(torch.tensor([[2, 3]])) == [2]


def test_a_row_written_a_block_too_far_is_seen(rig):
    def write(layer, homes, rows):
        step_write(layer, rig.residency.translate(torch.tensor([2 + BLOCK])), rows)

    step_write = step.write
    with mock.patch.object(step, "write", write), pytest.raises(AssertionError):
        rig.step(write=[2], select=[[2]])


def test_a_follower_whose_rows_did_not_move_is_seen(rig):
    def transfer(layers, exchange):
        return move(layers[:1], exchange)

    move = step.transfer
    with mock.patch("tests.core.rig.transfer", transfer), pytest.raises(AssertionError):
        rig.step(select=[[9]])
    assert rig.wrong_rows(torch.tensor([9]), 0) == []
    assert rig.wrong_rows(torch.tensor([9]), 1) == [9]
