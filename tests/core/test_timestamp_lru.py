"""What is the exact LRU's own."""

import pytest
import torch

from vllm_ula.errors import IntegrityError
from vllm_ula.planner import TimestampLru
from vllm_ula.records import DeviceSlots


def test_order_is_exact_however_long_ago():
    lru = TimestampLru(4)
    for row in [3, 2, 1, *[0] * 1000]:
        lru.begin_call()
        lru.touch(DeviceSlots(torch.tensor([row])))
    none = torch.zeros(4, dtype=torch.bool)
    assert lru.choose(4, none, none).index.tolist() == [3, 2, 1, 0]


def test_rows_of_one_call_go_by_slot():
    lru = TimestampLru(6)
    lru.begin_call()
    lru.touch(DeviceSlots(torch.tensor([5, 0, 3])))
    none = torch.zeros(6, dtype=torch.bool)
    assert lru.choose(6, none, none).index.tolist() == [1, 2, 4, 0, 3, 5]


def test_integrity_sees_a_row_from_the_future():
    lru = TimestampLru(4)
    lru.stamp[2] = 1
    with pytest.raises(IntegrityError, match="after the clock"):
        lru.check_integrity()


def test_the_bytes_charged_are_the_bytes_of_the_array():
    assert TimestampLru(4).stamp.element_size() == TimestampLru.bytes_per_device_slot
