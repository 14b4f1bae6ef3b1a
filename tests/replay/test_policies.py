"""Stories with their outcome written out, and random ones against the brute force."""

import numpy as np
import pytest
from replay.brute_force import FurthestFirst, SglangOracle, SharedOracle, VllmOracle, fewest_fetches
from replay.rig import BLOCK, LOGICAL, decode, ending, prefill, random_story, slot
from replay.shared_lru import SharedLru

from vllm_ula.errors import ConfigError
from vllm_ula.replay.belady import Belady
from vllm_ula.replay.policy import Served, feed, replay
from vllm_ula.replay.sglang_hisparse import SglangHiSparse
from vllm_ula.replay.vllm_hisparse import VllmHisparse
from vllm_ula.traces.events import Admission, End


def outcomes(policy, events):
    return [feed([policy], event) for event in events]


def assert_adds_up(served):
    parts = served.hits + served.fetched + served.in_place_device + served.in_place_host
    assert served.selected == parts


class TestSglangHisparse:
    def test_story_of_a_long_request(self):
        policy = SglangHiSparse(hot_rows=3)
        policy.admit(Admission(0, 10))
        policy.call(prefill(0, 0, 10))
        served = outcomes(
            policy,
            [
                decode(1, (0, 10, [1, 2, 10])),  # 10 is being written
                decode(2, (0, 11, [1, 10, 11])),  # 10 is on the host only by now
                decode(3, (0, 12, [2, 1, 10])),
                decode(4, (0, 13, [5, 6, 7])),
                decode(5, (0, 14, [1])),
            ],
        )
        assert [(s.hits, s.fetched, s.written_back) for s in served] == [
            (1, 2, 1),
            (2, 1, 1),
            (3, 0, 1),
            (0, 3, 1),
            (0, 1, 1),
        ]

    def test_a_request_that_fits_never_misses_and_starts_full_when_it_outgrows_the_region(self):
        policy = SglangHiSparse(hot_rows=4)
        policy.admit(Admission(0, 3))
        served = outcomes(
            policy,
            [decode(0, (0, 3, [0, 1, 2])), decode(1, (0, 4, [0, 3])), decode(2, (0, 5, [4]))],
        )
        assert [s.fetched for s in served] == [0, 0, 1]

    def test_one_request_never_uses_the_rows_of_another(self):
        policy = SglangHiSparse(hot_rows=1)
        calls = [decode(n, (0, 9, [1]), (1, 9, [2])) for n in range(2)]
        assert [s.fetched for s in outcomes(policy, calls)] == [2, 0]

    def test_drafts_of_a_request_are_one_set(self):
        policy = SglangHiSparse(hot_rows=4)
        served = policy.call(decode(0, (0, 9, [1, 2]), (0, 10, [2, 3, 9])))
        assert served == Served(selected=4, hits=1, fetched=3, written_back=2)

    def test_an_ended_request_starts_cold(self):
        policy = SglangHiSparse(hot_rows=2)
        call = decode(0, (0, 9, [1]))
        assert [s.fetched for s in outcomes(policy, [call, call, End(0), call])] == [1, 0, 0, 1]

    @pytest.mark.parametrize("seed", range(12))
    def test_random_stories_equal_the_brute_force(self, seed):
        events = random_story(seed)
        hot_rows = 3 + seed % 9
        mine = outcomes(SglangHiSparse(hot_rows), events)
        assert mine == outcomes(SglangOracle(hot_rows), events)
        assert sum(s.fetched for s in mine) > 0


class TestVllmHisparse:
    def test_everything_is_resident_while_blocks_last(self):
        policy = VllmHisparse(device_rows=40 * BLOCK, hot_rows=BLOCK, page_size=BLOCK)
        policy.admit(Admission(0, 100))
        served = policy.call(decode(0, (0, 100, list(range(0, 100, 7)))))
        assert served == Served(selected=15, hits=15, written_back=1)

    def test_story_of_a_second_request_that_takes_the_first_ones_pages(self):
        policy = VllmHisparse(device_rows=10 * BLOCK, hot_rows=BLOCK, page_size=BLOCK)
        policy.admit(Admission(0, 8 * BLOCK))
        # Two blocks are free, more than a region or a tenth: no region is asked for yet.
        assert policy.requests[0].hot is None
        policy.admit(Admission(1, 3 * BLOCK))
        # The second request took them and found none for its third page; it asks for a region.
        assert policy.requests[1].resident[:3].tolist() == [True, True, False]
        policy.call(decode(0, (0, 8 * BLOCK - 1, [0]), (1, 3 * BLOCK - 1, [0])))
        # So does the first in its step now, and gets it for pages of its own in the next.
        policy.call(decode(1, (0, 8 * BLOCK - 1, [0])))
        first = policy.requests[0]
        assert first.hot is not None
        # The pages before the last two are queued from the tail; the region took page 5.
        assert first.resident[:8].tolist() == [True] * 5 + [False] + [True] * 2
        served = outcomes(policy, [decode(n, (0, 8 * BLOCK - 1, [0, 20, 21])) for n in (2, 3)])
        assert [(s.hits, s.fetched) for s in served] == [(1, 2), (3, 0)]

    def test_blocks_of_an_ended_request_come_back(self):
        policy = VllmHisparse(device_rows=12 * BLOCK, hot_rows=2 * BLOCK, page_size=BLOCK)
        for seq in range(3):
            policy.admit(Admission(seq, 30))
            policy.call(decode(seq, (seq, 30, [0])))
        for seq in range(3):
            policy.end(End(seq))
        assert len(policy.free) == 12

    @pytest.mark.parametrize("seed", range(12))
    def test_random_stories_equal_the_brute_force(self, seed):
        events = random_story(seed)
        blocks = 12 + 4 * seed
        mine = outcomes(VllmHisparse(blocks * BLOCK, 2 * BLOCK, BLOCK), events)
        assert mine == outcomes(VllmOracle(blocks, 2, BLOCK), events)
        assert blocks > 40 or sum(s.fetched for s in mine) > 0

    @pytest.mark.parametrize("seed", range(8))
    def test_random_stories_lose_no_block(self, seed):
        policy = VllmHisparse(device_rows=30 * BLOCK, hot_rows=2 * BLOCK, page_size=BLOCK)
        for event in random_story(seed):
            assert_adds_up(feed([policy], event))
            pinned = sum(r.pinned_blocks for r in policy.requests.values())
            regions = sum(2 for r in policy.requests.values() if r.hot is not None)
            assert len(policy.free) + pinned + regions == 30
            readable = sum(
                entry is not None and bool(entry[0].resident[entry[1]]) for entry in policy.free
            )
            resident = sum(int(r.resident.sum()) for r in policy.requests.values())
            assert resident == pinned + readable


class TestSharedLru:
    def test_story_over_two_requests(self):
        policy = SharedLru(LOGICAL, device_slots=6, block_size=BLOCK)
        policy.call(prefill(0, 0, 8))  # the first six find dead device rows
        assert sorted(policy.residents()) == [slot(0, p) for p in range(6)]
        served = policy.call(decode(1, (0, 8, [0, 1, 7])))
        # 8 and 7 come in; 2 and 3, written first of those not selected, go out.
        assert served == Served(selected=3, hits=2, fetched=1, written_back=2)
        assert sorted(policy.residents()) == [slot(0, p) for p in (0, 1, 4, 5, 7, 8)]
        for event in ending(0, 9):
            feed([policy], event)
        policy.call(prefill(2, 1, 4))
        served = policy.call(decode(3, (1, 4, [0, 1, 2, 3])))
        assert served == Served(selected=4, hits=4)

    def test_what_does_not_fit_is_read_in_place(self):
        policy = SharedLru(LOGICAL, device_slots=4, block_size=BLOCK)
        policy.call(prefill(0, 0, 8))
        served = policy.call(decode(1, (0, 8, [0, 1]), (0, 9, [0, 5, 6])))
        assert served == Served(selected=4, hits=2, in_place_host=2, written_back=2)

    @pytest.mark.parametrize("seed", range(12))
    def test_random_stories_equal_the_brute_force(self, seed):
        events = random_story(seed)
        device = 12 + 6 * seed
        mine, oracle = SharedLru(LOGICAL, device, BLOCK), SharedOracle(device, BLOCK)
        for event in events:
            served = feed([mine], event)
            assert served == feed([oracle], event)
            assert_adds_up(served)
            live = [row for row in mine.residents() if mine.live[row]]
            assert live == [row for row in oracle.rows if row in oracle.live]


class TestBelady:
    def test_story(self):
        events = [
            prefill(0, 0, 4),
            decode(1, (0, 4, [0, 1])),
            decode(2, (0, 5, [2])),
            decode(3, (0, 6, [0, 1])),
        ]
        # Room for 4: of the prompt 0 and 1 stay, beside them 2, which is read before 3 would be.
        served = outcomes(Belady(events, 0, 4), events)
        assert [(s.hits, s.fetched) for s in served] == [(0, 0), (2, 0), (1, 0), (2, 0)]
        # Room for 3: 2 waits on the host; reading it costs one of the others its place.
        served = outcomes(Belady(events, 0, 3), events)
        assert [(s.hits, s.fetched) for s in served] == [(0, 0), (2, 0), (0, 1), (1, 1)]

    @pytest.mark.parametrize("seed", range(6))
    def test_nothing_fetches_less(self, seed):
        events = small_story(seed)
        for device in (3, 4, 5):
            served = replay([Belady(events, 0, device)], events)
            assert served.fetched == fewest_fetches(events, device)

    @pytest.mark.parametrize("seed", range(6))
    def test_random_stories_equal_looking_ahead_anew(self, seed):
        events = random_story(seed, steps=30)
        device = 50 + 10 * seed
        mine = outcomes(Belady(events, 0, device), events)
        theirs = outcomes(FurthestFirst(events, device), events)
        assert [s.fetched for s in mine] == [s.fetched for s in theirs]
        assert (
            sum(s.fetched for s in mine)
            <= replay([SharedLru(LOGICAL, device, BLOCK)], events).fetched
        )

    @pytest.mark.parametrize("seed", range(4))
    def test_the_quota_of_one_request_is_a_shared_pool_of_its_own(self, seed):
        rng = np.random.default_rng(seed)
        events = [decode(n, (0, 40 + n, rng.permutation(30)[:4].tolist())) for n in range(40)]
        for device in (6, 10, 15):
            mine = outcomes(Belady(events, 0, device, per_request=True), events)
            theirs = outcomes(FurthestFirst(events, device), events)
            assert [s.fetched for s in mine] == [s.fetched for s in theirs]
            assert {s.written_back for s in mine} == {1}

    def test_a_quota_is_of_each_request(self):
        story = random_story(3)
        alone = [decode(n, (0, 300 + n, [n % 5, n % 3])) for n in range(20)]
        apart = [decode(n, (1, 300 + n, [n % 4, n % 3])) for n in range(20)]
        both = [
            decode(n, (0, 300 + n, [n % 5, n % 3]), (1, 300 + n, [n % 4, n % 3])) for n in range(20)
        ]
        one, other, joint = (
            replay([Belady(events, 0, 4, per_request=True)], events)
            for events in (alone, apart, both)
        )
        assert joint == one + other
        for hot_rows in (6, 9):
            best = replay([Belady(story, 0, hot_rows + 2, per_request=True)], story)
            assert best.fetched <= replay([SglangHiSparse(hot_rows)], story).fetched

    def test_too_long_a_trace_is_refused_in_one_line(self):
        with pytest.raises(ConfigError, match=r"at most 20 uses .* shorter trace") as refused:
            Belady(random_story(0), 0, 8, max_uses=20)
        assert "\n" not in str(refused.value)


def small_story(seed):
    """Few rows and calls, so that every choice can be tried."""
    rng = np.random.default_rng(seed)
    events = [prefill(0, 0, 5)]
    for n in range(6):
        events.append(decode(n + 1, (0, 5 + n, rng.permutation(5 + n)[:2].tolist())))
    return events
