"""What is the exact LRU's own."""

import pytest
import torch

from tests.core.test_planner_contract import order, read, slots, use
from vllm_ula.errors import IntegrityError
from vllm_ula.planner.timestamp_lru import TimestampLru


def test_order_is_exact_however_long_ago():
    lru = TimestampLru(4)
    read(lru, *[[row] for row in [3, 2, 1, *[0] * 10_000]])
    assert order(lru) == [3, 2, 1, 0]


def test_rows_of_one_call_go_by_slot():
    lru = TimestampLru(6)
    use(lru, [5, 0, 3])
    assert order(lru) == [1, 2, 4, 0, 3, 5]


def test_victims_are_exact_over_more_calls_than_the_histogram_has_bins():
    lru = TimestampLru(20_000)
    rows = torch.randperm(20_000, generator=torch.Generator().manual_seed(0))
    for row in rows:
        lru.begin_call()
        lru.touch(slots([int(row)]))
    lru.begin_call()
    for num in (1, 4096, 19_999):
        chosen = lru.choose(torch.arange(num)).index
        assert torch.equal(chosen.sort().values, rows[:num].sort().values)


def test_integrity_sees_a_row_from_the_future():
    lru = TimestampLru(4)
    lru.stamp[2] = lru.clock + 2
    with pytest.raises(IntegrityError, match="after the clock"):
        lru.check_integrity()
