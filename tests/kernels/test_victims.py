"""Dead rows first, then cold ones, then older before newer; current rows never."""

import pytest
import torch
from kernels.agreement import copy_call, copy_map, differences
from kernels.histories import SIZES, before
from kernels.stories import CLOCK, story_call, story_map

from kernels import agreement
from vllm_ula.kernels import tables
from vllm_ula.kernels.reference.victims import levels
from vllm_ula.kernels.victims import victims

# Dead, cold, cold, level 1, level 1, level 2, open, current; and a dead one that is current.
CALLS = [4, 1, 2, 3, 5, 8, 9, CLOCK, CLOCK]


@pytest.mark.parametrize("size", SIZES)
def test_equals_the_reference(size):
    for mine, call in before("victims", size):
        assert differences("victims", mine, call) == []


def play(required, incoming):
    mine = story_map(range(9), 9, calls=CALLS, dead=[0, 8])
    call = story_call(mine, [list(range(9))])
    call.incoming[:incoming] = torch.arange(9, 9 + incoming)
    mine.state[tables.NUM_REQUIRED] = required
    mine.state[tables.NUM_INCOMING] = incoming
    assert differences("victims", mine, call) == []
    victims(mine, call)
    num = int(mine.num_exchanged)
    return call.victims[:num].tolist(), call.write_back[:num].tolist()


def test_levels_of_the_story():
    mine = story_map(range(9), 9, calls=CALLS, dead=[0, 8])
    assert levels(mine).tolist() == [-1, 0, 0, 1, 1, 2, 3, 3, -1]


@pytest.mark.parametrize("required", range(8))
def test_exactly_as_many_as_must_get_a_row(required):
    taken, write_back = play(required, max(required, 0))
    expected = [[0], [1, 2], [3, 4], [5], [6]]
    for level in expected:
        now, taken = taken[: len(level)], taken[len(level) :]
        assert set(now) <= set(level)
    assert not taken
    assert write_back == [False, True, True, True, True, True, True][:required]


def test_what_is_optional_takes_dead_rows_or_nothing():
    assert play(0, 5) == ([0], [False])
    assert play(3, 5)[0] == [0, 1, 2]


def test_every_row_that_is_not_current():
    taken, _ = play(7, 7)
    assert sorted(taken) == [0, 1, 2, 3, 4, 5, 6]


def test_control_two_swapped_victims_are_found():
    mine = story_map(range(9), 9, calls=CALLS, dead=[0, 8])
    call = story_call(mine, [list(range(9))])
    call.incoming[:3] = torch.arange(9, 12)
    mine.state[tables.NUM_REQUIRED] = mine.state[tables.NUM_INCOMING] = 3
    found, expected = copy_call(call), copy_call(call)
    after = copy_map(mine)
    victims(after, found)
    victims(copy_map(mine), expected)
    assert agreement._same_victims(mine, after, found, expected)
    found.victims[[0, 1]] = found.victims[[1, 0]]  # both valid, but not the rows written back
    assert not agreement._same_victims(mine, after, found, expected)
