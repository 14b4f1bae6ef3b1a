"""The map changes, marks go."""

import pytest
import torch
from kernels.agreement import differences
from kernels.histories import SIZES, before
from kernels.stories import CLOCK, story_call, story_map

from vllm_ula.kernels import tables
from vllm_ula.kernels.claim import claim
from vllm_ula.kernels.remap import remap


@pytest.mark.parametrize("size", SIZES)
def test_equals_the_reference(size):
    for mine, call in before("remap", size):
        assert differences("remap", mine, call) == []


def test_homes_are_swapped_and_everything_is_translated_afterwards():
    mine = story_map([0, 1, 2], 3)
    call = story_call(mine, [[4, 0, -1], [1, 4, 5]], decode=[True, False], write=[5, -1])
    claim(mine, call)
    mine.roles[5] = tables.WRITTEN
    mine.state[tables.CUT] = mine.state[tables.NUM_EXCHANGED] = 1
    call.incoming[0], call.victims[0], call.vacated[0] = 4, 2, 1
    call.fetch[0] = call.write_back[0] = True
    mine.live[5] = False
    assert differences("remap", mine, call) == []
    remap(mine, call)
    assert mine.home.tolist() == [0, 1, 4, 3, 2, 5]
    assert mine.owner.tolist() == [0, 1, 4]
    assert mine.stamp.tolist() == [2, 2, 2 * CLOCK]
    assert call.selected_homes.tolist() == [[2, 0, -1], [1, 2, 5]]
    assert call.written_homes.tolist() == [5, -1]
    assert mine.live.all()
    assert not mine.marks.any()
    assert not mine.roles.any()
    totals = {tables.FETCHED: 1, tables.WRITTEN_BACK: 1, tables.EXCHANGES: 1}
    totals |= {tables.IN_PLACE_DEVICE: 1, tables.IN_PLACE_HOST: 1}
    assert mine.totals.tolist() == [totals.get(i, 0) for i in range(tables.NUM_TOTALS)]


def test_an_exchange_that_moves_no_bytes_is_none():
    mine = story_map([0], 1, dead=[0])
    call = story_call(mine, write=[1])
    mine.state[tables.NUM_EXCHANGED] = 1
    call.incoming[0], call.victims[0], call.vacated[0] = 1, 0, 0
    call.fetch[0] = call.write_back[0] = False
    remap(mine, call)
    assert mine.home.tolist() == [1, 0]
    assert not mine.totals.any()


def test_nothing_at_all():
    mine = story_map([0, 1], 2)
    before_it = mine.home.clone()
    remap(mine, story_call(mine))
    assert torch.equal(mine.home, before_it)
