"""One entry speaks for each selected row."""

import pytest
from kernels.agreement import differences
from kernels.histories import SIZES, before
from kernels.stories import CLOCK, story_call, story_map

from vllm_ula.kernels import tables
from vllm_ula.kernels.claim import claim
from vllm_ula.kernels.reference.claim import winners


@pytest.mark.parametrize("size", SIZES)
def test_equals_the_reference(size):
    for mine, call in before("claim", size):
        assert differences("claim", mine, call) == []


@pytest.mark.parametrize("select", [[], [[]], [[-1, -1]], [[], []]])
def test_nothing_selected(select):
    mine = story_map([0, 1], 2)
    call = story_call(mine, select)
    claim(mine, call)
    assert not mine.marks.any()
    assert call.wanted.tolist() == call.missing.tolist() == [0] * len(select)


def test_the_first_entry_wins_and_decode_tokens_go_first():
    mine = story_map([0, 1, 2], 3)
    select = [[3, 0, 3], [3, 4, 0], [-1, 4, 1]]
    call = story_call(mine, select, decode=[False, True, True])
    claim(mine, call)
    assert winners(mine, call).view(3, 3).tolist() == [
        [False, False, False],
        [True, True, True],
        [False, False, True],
    ]
    assert call.wanted.tolist() == [0, 3, 1]
    assert call.missing.tolist() == [0, 2, 0]


def test_rows_that_the_call_writes_take_no_room():
    mine = story_map([0, 1], 3, calls=[CLOCK, 1])
    mine.roles[3] = tables.WRITTEN | tables.PLACED
    mine.roles[4] = tables.WRITTEN
    call = story_call(mine, [[0, 1, 3, 4]])
    claim(mine, call)
    assert call.wanted.tolist() == [2]  # 1 and 4
    assert call.missing.tolist() == [2]
