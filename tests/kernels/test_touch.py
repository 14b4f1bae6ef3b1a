"""Hits are touched, misses listed."""

import pytest
from kernels.agreement import differences
from kernels.histories import SIZES, before
from kernels.stories import CLOCK, story_call, story_map

from vllm_ula.kernels import tables
from vllm_ula.kernels.claim import claim
from vllm_ula.kernels.touch import touch


@pytest.mark.parametrize("size", SIZES)
def test_equals_the_reference(size):
    for mine, call in before("touch", size):
        assert differences("touch", mine, call) == []


def play(mine, call, room):
    mine.state[tables.ROOM] = room
    claim(mine, call)
    assert differences("touch", mine, call) == []
    touch(mine, call)
    state = mine.state.tolist()
    num, required = state[tables.NUM_INCOMING], state[tables.NUM_REQUIRED]
    return call.incoming[:required].tolist(), call.incoming[required:num].tolist()


def test_all_hit():
    mine = story_map([5, 3, 1], 3, dead=[2])
    assert play(mine, story_call(mine, [[5, 3], [3, 5]]), 3) == ([], [])
    assert mine.stamp.tolist() == [2 * CLOCK, 2 * CLOCK, 3]
    assert int(mine.state[tables.CURRENT]) == 2


def test_a_dead_row_that_is_read_stays_dead():
    mine = story_map([0, 1], 0, dead=[1])
    play(mine, story_call(mine, [[1, -1]]), 2)
    assert mine.stamp.tolist() == [2, 2 * CLOCK + 1]


def test_all_miss_at_exact_capacity():
    mine = story_map([0, 1, 2], 3)
    assert play(mine, story_call(mine, [[3, 4], [4, 5]]), 3) == ([3, 4, 5], [])
    assert call_fetches(mine) == 3


def call_fetches(mine):
    return int(mine.state[tables.NUM_MISSING])


def test_the_first_tokens_that_fit_together_are_promoted():
    mine = story_map([0, 1, 2], 3)
    call = story_call(mine, [[3, 4], [4, 0], [5, -1], [3, 0]])
    assert play(mine, call, 3) == ([3, 4], [])  # the third wants a fourth row; nobody after it
    assert int(mine.state[tables.CUT]) == 2
    assert mine.stamp.tolist() == [2 * CLOCK, 2, 2]
    assert int(mine.totals[tables.PROMOTED]) == 3


def test_prefill_tokens_promote_nothing():
    mine = story_map([0, 1], 2)
    call = story_call(mine, [[0, 2], [3, 1]], decode=[False, True])
    assert play(mine, call, 2) == ([3], [])
    assert mine.stamp.tolist() == [2, 2 * CLOCK]


def test_written_rows_follow_unless_they_are_selected():
    mine = story_map([0, 1, 2, 6], 5)  # 3, 4, 5, 7, 8 lie on the host
    mine.roles[[3, 4]] = tables.WRITTEN | tables.PLACED
    mine.roles[[7, 8]] = tables.WRITTEN
    call = story_call(mine, [[3, 5]], write=[8, 4, -1, 0, 3, 7])
    call.written_homes.copy_(_homes(mine, call.written))
    assert play(mine, call, 4) == ([3, 5, 4], [8])  # as many as there are device rows
    assert call.fetch[:4].tolist() == [False, True, False, False]


def _homes(mine, slots):
    homes = mine.home[slots.clamp_min(0)].long()
    return homes.masked_fill(slots < 0, -1)
