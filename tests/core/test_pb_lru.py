"""What is PB-LRU's own: buckets of recency, their ageing, and how close it stays to exact LRU."""

import functools

import pytest
import torch

from vllm_ula import step
from vllm_ula.errors import IntegrityError
from vllm_ula.planner import PbLru, TimestampLru
from vllm_ula.records import Call, DeviceSlots, LayerRows
from vllm_ula.residency import Residency


def call(lru, *rows):
    """A call that fills these rows."""
    lru.begin_call()
    lru.admit(DeviceSlots(torch.tensor(rows, dtype=torch.int64)))


def coldest(lru, num):
    none = torch.zeros(lru.num_device, dtype=torch.bool)
    return lru.choose(num, none, none).index.tolist()


def test_a_period_ends_once_its_share_of_rows_was_admitted():
    lru = PbLru(8, num_buckets=4)  # two rows a bucket
    call(lru, 0)
    call(lru, 1)
    assert lru.levels().tolist() == [3, 3, 0, 0, 0, 0, 0, 0]
    call(lru, 2)
    assert lru.levels().tolist() == [2, 2, 3, 0, 0, 0, 0, 0]
    call(lru, 3, 4, 5)
    assert lru.levels().tolist() == [2, 2, 3, 3, 3, 3, 0, 0]


def test_hits_age_nothing():
    """However many hits lie between two evictions, the buckets reach as far back."""
    lru = PbLru(8, num_buckets=4)
    call(lru, 0, 1)
    for _ in range(100):
        lru.begin_call()
        lru.touch(DeviceSlots(torch.arange(2, 8)))
    assert lru.levels().tolist() == [2, 2, 3, 3, 3, 3, 3, 3]


def test_a_call_is_never_split_over_two_periods():
    lru = PbLru(8, num_buckets=4)
    call(lru, *range(8))
    assert lru.levels().tolist() == [3] * 8


def test_a_row_used_again_moves_to_the_open_bucket():
    lru = PbLru(4, num_buckets=4)
    for rows in ([0], [1], [0]):
        call(lru, *rows)
    assert lru.levels().tolist() == [3, 2, 0, 0]


def test_rows_grow_cold_after_all_buckets_and_are_not_told_apart():
    lru = PbLru(4, num_buckets=4)
    for row in (3, 2, 1, 0, 0, 0):
        call(lru, row)
    assert lru.levels().tolist() == [3, 0, 0, 0]
    assert coldest(lru, 4) == [1, 2, 3, 0]  # exact LRU: 3, 2, 1, 0


def test_rows_of_one_bucket_go_by_slot():
    lru = PbLru(6, num_buckets=2)
    call(lru, 5, 0, 3)
    assert coldest(lru, 6) == [1, 2, 4, 0, 3, 5]


def test_more_buckets_than_rows_is_exact_as_far_as_the_buckets_reach():
    lru = PbLru(3, num_buckets=64)
    for row in (1, 2, 0, 1):
        call(lru, row)
    assert coldest(lru, 3) == [2, 0, 1]


def test_integrity_sees_a_row_from_the_future():
    lru = PbLru(4)
    lru.bucket[2] = lru.period + 1
    with pytest.raises(IntegrityError, match="after the open one"):
        lru.check_integrity()


def test_the_bytes_charged_are_the_bytes_of_the_array():
    assert PbLru(4).bucket.element_size() == PbLru.bytes_per_device_slot


def skewed_trace(history, topk, calls):
    """Selections of one query a call: some positions are favourites, which drift slowly."""
    generator = torch.Generator().manual_seed(2976)
    weight = 1.0 / torch.arange(1, history + 1)
    favourite = torch.randperm(history, generator=generator)
    for _ in range(calls):
        moved = torch.randperm(history, generator=generator)[: history // 64]
        favourite[moved] = favourite[moved.roll(1)]
        yield favourite[torch.multinomial(weight, topk, generator=generator)]


def hit_rate(planner, selections, num_device, history):
    residency = Residency(num_device, history - num_device)
    rows = LayerRows("l", torch.zeros(num_device, 1), torch.zeros(history - num_device, 1))
    domain = step.Domain(residency, planner, [rows], torch.zeros(history, dtype=torch.bool))
    residency.mark_live(torch.arange(history))
    nothing, decode = torch.empty(0, dtype=torch.int64), torch.ones(1, dtype=torch.bool)
    for selection in selections:
        step.run(domain, Call(nothing, nothing.bool(), selection.unsqueeze(0), decode))
        domain.check_integrity()
    return domain.counts.hits / domain.counts.selected


@functools.cache
def exact_hit_rate(topk, calls):
    return hit_rate(TimestampLru(256), skewed_trace(1024, topk, calls), 256, 1024)


@pytest.mark.parametrize(("buckets", "topk"), [(64, 128), (16, 128), (64, 16), (16, 16)])
def test_hit_rate_is_within_half_a_point_of_exact_lru(buckets, topk):
    """F05: 256 device rows, 500 calls of 128 (and 16) selected rows each."""
    ours = hit_rate(PbLru(256, buckets), skewed_trace(1024, topk, 500), 256, 1024)
    exact = exact_hit_rate(topk, 500)
    assert 0.3 < exact < 0.9
    assert abs(ours - exact) < 0.005
