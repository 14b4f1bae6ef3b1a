"""The hot region of one request."""

import numpy as np
import pytest
from replay.brute_force import Lru

from vllm_ula.replay.hot_rows import Eviction, HotRows


def serve(region, *positions):
    return region.serve(np.array(positions, dtype=np.int64))


def test_story_lru():
    region = HotRows(4)
    assert serve(region, 10, 11, 12) == 3
    assert serve(region, 10, 13) == 1
    # 11 and 12 came before 13, and 10 was selected since.
    assert serve(region, 20) == 1
    assert 12 not in region.positions()
    assert set(region.positions()) == {11, 13, 10, 20}
    assert serve(region, 11, 10, 13) == 0
    assert region.positions()[0] == 20


def test_story_fifo_forgets_the_row_that_came_first_however_often_it_is_read():
    region = HotRows(3, Eviction.FIFO)
    for position in (1, 2, 3):
        serve(region, position)
    assert serve(region, 1) == 0
    serve(region, 4)
    assert region.positions() == [2, 3, 4]


def test_random_never_evicts_what_is_selected_and_every_other_row_sometimes():
    left = set()
    for seed in range(40):
        region = HotRows(4, Eviction.RANDOM, seed)
        serve(region, 1, 2, 3, 4)
        serve(region, 2, 9)
        left |= {1, 2, 3, 4} - set(region.positions())
    assert left == {1, 3, 4}


@pytest.mark.parametrize("eviction", Eviction)
def test_more_rows_than_the_region_has_are_fetched_and_the_first_are_kept(eviction):
    region = HotRows(3, eviction)
    assert serve(region, 5, 6, 7, 8, 9) == 5
    assert sorted(region.positions()) == [5, 6, 7]
    assert serve(region, 5, 6, 7, 8) == 1
    assert sorted(region.positions()) == [5, 6, 7]


def test_nothing_selected():
    assert serve(HotRows(3)) == 0


@pytest.mark.parametrize("seed", range(6))
def test_lru_equals_the_list_of_positions(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 12))
    region, oracle = HotRows(size), Lru(size)
    for _ in range(200):
        wanted = rng.permutation(24)[: rng.integers(0, 9)].astype(np.int64)
        assert region.serve(wanted) == oracle.serve(wanted.tolist())
        assert region.positions() == oracle.rows
        held = region.slot[region.slot >= 0]
        assert sorted(held.tolist()) == sorted(np.flatnonzero(region.position >= 0).tolist())
