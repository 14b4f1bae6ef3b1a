"""What is PB-LRU's own: buckets of recency, their ageing, and how close it stays to exact LRU."""

import functools
from random import Random

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.core.rig import make_domain
from vllm_ula import step
from vllm_ula.errors import IntegrityError
from vllm_ula.planner import BucketAge
from vllm_ula.planner.hash_lru import HashLru
from vllm_ula.planner.pb_lru import PbLru
from vllm_ula.planner.queues import merge
from vllm_ula.planner.reference import ReferencePbLru
from vllm_ula.planner.stamps import MAX_CLOCK
from vllm_ula.planner.timestamp_lru import TimestampLru
from vllm_ula.records import Call, DeviceSlots, LayerRows
from vllm_ula.residency import Residency


def slots(*rows):
    return DeviceSlots(torch.tensor(rows, dtype=torch.int64))


def call(lru, *rows):
    """A call that fills these rows."""
    lru.begin_call()
    lru.admit(slots(*rows), slots(*rows).index)
    lru.check_integrity()


def read(lru, *rows):
    """A call that reads these rows where they are."""
    lru.begin_call()
    lru.touch(slots(*rows))
    lru.check_integrity()


def levels(lru):
    return lru.levels().tolist() if isinstance(lru, PbLru) else lru.ranks().tolist()


@pytest.fixture(params=[PbLru, ReferencePbLru], ids=["compiled", "reference"])
def pb_lru(request):
    return request.param


def test_a_period_ends_once_its_share_of_rows_was_admitted(pb_lru):
    lru = pb_lru(8, num_buckets=4)  # two rows a bucket
    call(lru, 0)
    call(lru, 1)
    assert levels(lru) == [3, 3, 0, 0, 0, 0, 0, 0]
    call(lru, 2)
    assert levels(lru) == [2, 2, 3, 0, 0, 0, 0, 0]
    call(lru, 3, 4, 5)
    assert levels(lru) == [2, 2, 3, 3, 3, 3, 0, 0]


def test_hits_age_nothing(pb_lru):
    """However many hits lie between two evictions, the buckets reach as far back."""
    lru = pb_lru(8, num_buckets=4)
    call(lru, 0, 1)
    for _ in range(100):
        read(lru, *range(2, 8))
    assert levels(lru) == [2, 2, 3, 3, 3, 3, 3, 3]


def test_hits_fill_buckets_that_age_by_touched_rows(pb_lru):
    lru = pb_lru(8, 4, BucketAge.TOUCHED)
    for row in range(6):
        read(lru, row)
    assert levels(lru) == [1, 1, 2, 2, 3, 3, 0, 0]


def test_every_call_is_a_period_of_buckets_that_age_by_calls(pb_lru):
    lru = pb_lru(8, 4, BucketAge.CALLS)
    for rows in ([0, 1], [2], [], [3]):
        read(lru, *rows)
    assert levels(lru) == [0, 0, 1, 3, 0, 0, 0, 0]


def test_a_call_is_never_split_over_two_periods(pb_lru):
    lru = pb_lru(8, num_buckets=4)
    call(lru, *range(8))
    assert levels(lru) == [3] * 8


def test_a_row_used_again_moves_to_the_open_bucket(pb_lru):
    lru = pb_lru(4, num_buckets=4)
    for rows in ([0], [1], [0]):
        call(lru, *rows)
    assert levels(lru) == [3, 2, 0, 0]


def test_rows_grow_cold_after_all_buckets_and_are_not_told_apart(pb_lru):
    lru = pb_lru(4, num_buckets=4)
    for row in (3, 2, 1, 0, 0, 0):
        call(lru, row)
    assert levels(lru) == [3, 0, 0, 0]


def test_more_buckets_than_rows_is_exact_as_far_as_the_buckets_reach(pb_lru):
    lru = pb_lru(3, num_buckets=64)
    for row in (1, 2, 0, 1):
        call(lru, row)
    lru.begin_call()
    assert lru.choose(torch.arange(1)).index.tolist() == [2]
    assert sorted(lru.choose(torch.arange(2)).index.tolist()) == [0, 2]


def test_integrity_sees_a_row_from_the_future():
    lru = PbLru(4)
    lru.stamp[2] = lru.clock + 2
    with pytest.raises(IntegrityError, match="after the clock"):
        lru.check_integrity()


def test_integrity_sees_a_row_in_two_queues():
    lru = PbLru(8)
    lru.queues.arrays[0][0, 1] = 0
    with pytest.raises(IntegrityError, match="every device row once"):
        lru.check_integrity()


def test_integrity_sees_a_row_in_a_bucket_it_has_not_reached():
    lru = PbLru(4, num_buckets=4)
    call(lru, 0)
    call(lru, 1)
    merge(*lru.queues.arrays, lru.queue[3], lru.queue[0])
    with pytest.raises(IntegrityError, match="a bucket after its own"):
        lru.check_integrity()


@settings(
    max_examples=125, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate]
)
@given(
    num_device=st.integers(1, 48),
    num_buckets=st.sampled_from([2, 3, 8, 64]),
    age=st.sampled_from(BucketAge),
    seed=st.integers(0, 2**32),
)
def test_the_compiled_one_equals_its_reference(num_device, num_buckets, age, seed):
    """10^5 calls: the same number of victims from each bucket, and now and then all buckets."""
    compiled = PbLru(num_device, num_buckets, age)
    reference = ReferencePbLru(num_device, num_buckets, age)
    random, rows = Random(seed), range(num_device)
    few = max(num_device // random.choice([1, 2, 8]), 1)
    for number in range(800):
        read = random.sample(rows, random.randrange(few + 1))
        admitted = random.sample(rows, random.randrange(min(few, 4) + 1))
        dying = random.sample(rows, random.choice([0, 0, 0, 1, few]))
        for lru in (compiled, reference):
            lru.bury(slots(*dying))
            lru.begin_call()
            lru.admit(slots(*admitted), slots(*admitted).index)
            lru.touch(slots(*read))
        assert compiled.num_current() == reference.num_current()
        wanted = random.randrange(num_device - reference.num_current() + 1)
        if wanted:
            incoming = torch.arange(wanted)
            victims = compiled.choose(incoming)
            assert len(set(victims.index.tolist())) == wanted
            ranks = reference.ranks().masked_fill(reference.dead(), -1)
            expected = ranks[reference.choose(incoming).index].sort().values
            assert torch.equal(ranks[victims.index].sort().values, expected)
            assert not {*victims.index.tolist()} & {*read, *admitted}
            for lru in (reference, compiled):
                lru.admit(victims, incoming)
        if number % 16 == 0:
            assert levels(compiled) == levels(reference)
            assert torch.equal(compiled.dead(), reference.dead())
            compiled.check_integrity()


@pytest.mark.parametrize("num_device", [1 << 10, 1 << 14])
def test_looking_for_victims_does_not_grow_with_the_pool(num_device):
    """Rows that are looked at: m, the buckets, and each row used since; counted, not timed."""
    lru = PbLru(num_device, num_buckets=64)
    call(lru, *range(num_device))
    looked_at = []
    for number in range(200):
        used = random_rows(num_device, 16, number)
        lru.begin_call()
        lru.touch(used)
        before = lru.looked_at
        victims = lru.choose(torch.arange(8))
        lru.admit(victims, torch.arange(8))
        looked_at.append(lru.looked_at - before)
    # The first search finds that the one call of all rows has emptied the cold queue. Then it is
    # 8 victims a call, and the 16 rows an earlier one has read, once each.
    assert looked_at[0] <= num_device + 8
    assert sum(looked_at[1:]) <= 200 * (8 + 16)


@pytest.mark.parametrize("age", BucketAge)
@pytest.mark.parametrize("share", [1, 2, 3])
def test_buckets_of_half_a_chunk_never_run_out_of_chunks(age, share):
    """Many buckets with few rows each, all of them used again before victims are looked for."""
    lru = PbLru(8192, 4, age)
    random, rows = Random(share), range(8192)
    num = 257 * share // 2  # of chunks of 256 rows, half, one and one and a half
    for number in range(300):
        lru.begin_call()
        written = slots(*random.sample(rows, 2048 if number % 3 else num))
        lru.bury(written)
        lru.admit(written, written.index)
        lru.admit(lru.choose(torch.arange(num)), torch.arange(num))
        if number % 40 == 39:
            for _ in range(2):
                read(lru, *rows)
            lru.begin_call()
            victims = lru.choose(torch.arange(4000))
            assert len(victims.index.unique()) == 4000
            lru.admit(victims, victims.index)
            lru.check_integrity()


def random_rows(num_device, num, seed):
    generator = torch.Generator().manual_seed(seed)
    return DeviceSlots(torch.randperm(num_device, generator=generator)[:num])


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
    domain = make_domain(residency, planner, [rows])
    nothing, decode = torch.empty(0, dtype=torch.int64), torch.ones(1, dtype=torch.bool)
    every = torch.arange(history)
    step.run(domain, Call(every, decode.expand(history) & False, nothing.view(0, 0), decode[:0]))
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


@pytest.mark.parametrize(
    "planner", [PbLru, TimestampLru, functools.partial(HashLru, num_buckets=1)]
)
def test_the_clock_never_overflows(planner):
    """Stamps are moved back before 32 bits run out: the order stays what it was."""
    lru, fresh = planner(8), planner(8)
    for one in (lru, fresh):
        for row in (7, 6, 5):
            call(one, row)
        if one is lru:
            one.rebase(-(MAX_CLOCK - 14))  # as if a billion calls had gone by
        for row in (3, 1, 4, 0, 5, 2, 6, 7, 1):
            call(one, row)
        one.check_integrity()
    assert lru.clock < MAX_CLOCK
    for num in range(1, 9):
        expected = sorted(fresh.choose(torch.arange(num - 1)).index.tolist())
        assert sorted(lru.choose(torch.arange(num - 1)).index.tolist()) == expected
