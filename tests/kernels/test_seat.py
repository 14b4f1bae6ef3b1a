"""A call begins."""

import pytest
import torch
from kernels.agreement import differences
from kernels.histories import AGE, SIZES, before
from kernels.stories import CLOCK, story_call, story_map

from vllm_ula.kernels import tables
from vllm_ula.kernels.seat import seat


@pytest.mark.parametrize("size", SIZES)
def test_equals_the_reference(size):
    for mine, call in before("seat", size):
        assert differences("seat", mine, call, AGE) == []


@pytest.mark.parametrize("age", ["calls", "touched", "admitted"])
@pytest.mark.parametrize(("used", "current", "admitted"), [(0, 1, 0), (1, 0, 1), (0, 4, 4)])
def test_a_period_ends_between_two_calls(age, used, current, admitted):
    mine = story_map(range(8), 0)  # 4 buckets of 2 rows
    mine.state[[tables.USED, tables.CURRENT, tables.ADMITTED]] = _ints(used, current, admitted)
    call = story_call(mine)
    assert differences("seat", mine, call, age) == []
    seat(mine, call, age)
    aged = used + {"calls": 2, "touched": current, "admitted": admitted}[age]
    assert int(mine.state[tables.PERIOD]) == (8 if aged >= 2 else 7)
    assert mine.edges.tolist() == ([CLOCK + 1, 3, 6, 9] if aged >= 2 else [0, 3, 6, 9])
    assert int(mine.state[tables.USED]) == (0 if aged >= 2 else aged)


def test_rows_on_the_device_are_revived_and_rows_on_the_host_get_room_in_order():
    mine = story_map([0, 1, 2], 4, dead=[1])  # 3 to 6 lie on the host
    mine.state[tables.USED] = -99  # no period ends
    call = story_call(
        mine, write=[3, -1, 1, 4, 5, 6], by_decode=[True, True, False, False, True, True]
    )
    seat(mine, call, AGE)
    assert call.written_homes.tolist() == [3, -1, 1, 4, 5, 6]
    assert mine.stamp.tolist() == [2, 2 * (CLOCK + 1), 2]
    both = tables.WRITTEN | tables.PLACED
    assert mine.roles.tolist() == [0, 0, 0, both, tables.WRITTEN, both, tables.WRITTEN]
    assert int(mine.state[tables.ROOM]) == 0
    assert int(mine.state[tables.ADMITTED]) == int(mine.state[tables.CURRENT]) == 1


def _ints(*values):
    return torch.tensor(values, dtype=torch.int32)
