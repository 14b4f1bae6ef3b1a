"""What every planner keeps; each planner's own file adds only what is its own."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.conftest import PLANNERS
from vllm_ula.config import UlaConfig
from vllm_ula.errors import NotEnoughVictims
from vllm_ula.map_bytes import PLANNER_BYTES_PER_DEVICE_SLOT
from vllm_ula.planner.make import make_planner
from vllm_ula.records import DeviceSlots


def slots(rows):
    return DeviceSlots(torch.tensor(rows, dtype=torch.int64))


def use(planner, *calls):
    """Each argument lists the device rows one call fills."""
    for rows in calls:
        planner.begin_call()
        planner.admit(slots(rows), slots(rows).index)
        planner.check_integrity()


def read(planner, *calls):
    """Each argument lists the device rows one call reads where they are."""
    for rows in calls:
        planner.begin_call()
        planner.touch(slots(rows))
        planner.check_integrity()


def victims(planner, num, dead=(), current=()):
    """What the next call would choose; the planner itself stays as it is."""
    planner = copy.deepcopy(planner)
    planner.bury(slots(dead))
    planner.begin_call()
    planner.touch(slots(current))
    chosen = planner.choose(torch.arange(num)).index.tolist()
    planner.check_integrity()
    return sorted(chosen)


def order(planner, dead=()):
    """Rows in the order in which they would be given up, one call asking for one more each."""
    found = []
    for num in range(1, planner.num_device + 1):
        (row,) = set(victims(planner, num, dead)) - set(found)
        found.append(row)
    return found


class TestPlannerContract:
    def test_the_row_used_longest_ago_goes_first(self, planner):
        lru = planner(4)
        use(lru, [2], [0], [3], [1])
        assert order(lru) == [2, 0, 3, 1]
        use(lru, [2])
        assert order(lru) == [0, 3, 1, 2]

    def test_a_row_read_again_outlives_one_that_was_not(self, planner):
        lru = planner(4)
        use(lru, [0], [1], [2], [3])
        read(lru, [0, 2])
        assert order(lru)[:2] == [1, 3]

    def test_rows_never_used_go_before_used_ones(self, planner):
        lru = planner(4)
        use(lru, [0], [2])
        assert victims(lru, 2) == [1, 3]
        assert order(lru)[2:] == [0, 2]

    def test_dead_rows_go_before_the_coldest(self, planner):
        lru = planner(4)
        use(lru, [0], [1], [2], [3])
        assert victims(lru, 2, dead=[3, 2]) == [2, 3]
        assert victims(lru, 3, dead=[3, 2]) == [0, 2, 3]

    def test_a_row_that_dies_again_is_a_victim_again(self, planner):
        lru = planner(4)
        use(lru, [0], [1], [2], [3])
        for _ in range(3):
            lru.bury(slots([3]))
            assert lru.dead().tolist() == [False, False, False, True]
            assert victims(lru, 1) == [3]
            use(lru, [3])
            assert not lru.dead().any()
            assert 3 not in victims(lru, 3)

    def test_burying_twice_is_burying_once(self, planner):
        lru = planner(4)
        use(lru, [0], [1], [2], [3])
        lru.bury(slots([3]))
        lru.bury(slots([3, 1]))
        lru.check_integrity()
        assert victims(lru, 2) == [1, 3]

    def test_current_rows_never_go(self, planner):
        lru = planner(4)
        use(lru, [0], [1], [2], [3])
        assert victims(lru, 2, current=[0, 2]) == [1, 3]
        assert victims(lru, 2, dead=[0, 3], current=[0, 2]) == [1, 3]
        assert victims(lru, 1, dead=[0, 3], current=[0, 2]) == [3]

    def test_optional_rows_get_what_is_dead_and_not_current(self, planner):
        lru = planner(6)
        use(lru, [0], [1], [2], [3], [4], [5])
        lru.bury(slots([2, 3, 4]))
        lru.begin_call()
        lru.touch(slots([3]))
        for required, optional, expected in [
            (1, 0, 1),
            (1, 3, 2),
            (0, 4, 2),
            (2, 2, 2),
            (3, 2, 3),
            (0, 0, 0),
        ]:
            chosen = lru.choose(torch.arange(required + optional), optional).index.tolist()
            assert len(chosen) == expected
            dead = {2, 4}
            assert {*chosen} <= dead or {*chosen} >= dead
            lru.check_integrity()
        with pytest.raises(NotEnoughVictims):
            lru.choose(torch.arange(8), 2)

    def test_a_row_the_call_admitted_is_current(self, planner):
        lru = planner(2)
        use(lru, [0], [1])
        assert lru.num_current() == 1
        assert lru.choose(torch.arange(1)).index.tolist() == [0]
        lru.admit(slots([0]), slots([0]).index)
        assert lru.num_current() == 2

    @pytest.mark.parametrize("num", range(6))
    def test_it_gives_exactly_what_is_asked(self, planner, num):
        lru = planner(6)
        use(lru, [5, 1], [3])
        chosen = victims(lru, num, dead=[2], current=[4])
        assert len(set(chosen)) == len(chosen) == num

    @pytest.mark.parametrize(("num", "current"), [(5, []), (3, [0, 1]), (1, [0, 1, 2, 3])])
    def test_more_than_there_is_is_refused(self, planner, num, current):
        lru = planner(4)
        use(lru, [2], [0])
        with pytest.raises(NotEnoughVictims) as refused:
            victims(lru, num, dead=[1], current=current)
        assert (refused.value.asked, refused.value.available) == (num, 4 - len(current))
        assert str(refused.value).startswith(f"{num} victims asked, {4 - len(current)} device")

    def test_nothing_can_be_asked_when_all_is_current(self, planner):
        assert victims(planner(2), 0, current=[0, 1]) == []

    def test_choosing_changes_nothing(self, planner):
        lru = planner(4)
        use(lru, [1], [0], [3], [2])
        lru.begin_call()
        for num in (4, 2, 4, 1, 3):
            chosen = lru.choose(torch.arange(num)).index.tolist()
            lru.check_integrity()
            assert sorted(chosen) == sorted([1, 0, 3, 2][:num])

    def test_a_call_that_uses_nothing_ages_nothing_past_another(self, planner):
        lru = planner(4)
        use(lru, [3], [], [2], [], [], [1], [0])
        assert order(lru) == [3, 2, 1, 0]

    def test_one_device_row(self, planner):
        lru = planner(1)
        use(lru, [0])
        assert victims(lru, 1) == [0]

    def test_a_new_row_is_not_the_next_victim(self, planner):
        """F04: 4 rows; write 1, 2, 3, 4; read 1, 2, 3; write 5; write 6."""
        lru = planner(4)
        lives_in = {1: 0, 2: 1, 3: 2, 4: 3}
        use(lru, [0], [1], [2], [3])
        read(lru, [0], [1], [2])
        evicted = []
        for row in (5, 6):
            victims(lru, 4)  # an eviction scan is no use
            (slot,) = victims(lru, 1)
            (old,) = (name for name, at in lives_in.items() if at == slot)
            evicted.append(old)
            del lives_in[old]
            lives_in[row] = slot
            use(lru, [slot])
        assert evicted == [4, 1]

    def test_no_refusal_while_a_row_that_is_not_current_exists(self, planner):
        """F05: 256 rows, 128 random rows of each call current, all others asked for."""
        lru = planner(256)
        generator = torch.Generator().manual_seed(0)
        for _ in range(500):
            lru.begin_call()
            used = torch.randperm(256, generator=generator)
            lru.touch(DeviceSlots(used[:128]))
            chosen = lru.choose(torch.arange(128)).index.sort().values
            assert torch.equal(chosen, used[128:].sort().values)
            lru.check_integrity()


rows = st.lists(st.integers(0, 11), unique=True)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    planner=st.sampled_from(list(PLANNERS.values())),
    calls=st.lists(rows, max_size=20),
    dead=rows,
    current=rows,
    num=st.integers(0, 12),
)
def test_contract_on_random_histories(planner, calls, dead, current, num):
    lru = planner(12)
    use(lru, *calls)
    last = {row: i for i, used in enumerate(calls) for row in used}
    key = {row: -2 if row in dead else last.get(row, -1) for row in range(12)}
    offered = [row for row in range(12) if row not in current]
    if num > len(offered):
        with pytest.raises(NotEnoughVictims):
            victims(lru, num, dead, current)
        return
    chosen = victims(lru, num, dead, current)
    assert len(set(chosen)) == num
    assert set(chosen) <= set(offered)
    assert sorted(key[row] for row in chosen) == sorted(key[row] for row in offered)[:num]


@pytest.mark.parametrize("name", ["pb_lru", "timestamp_lru", "hash_lru"])
def test_the_bytes_charged_are_the_bytes_of_the_arrays(name):
    lru = make_planner(UlaConfig(planner=name), 1 << 16)
    arrays = [value for value in vars(lru).values() if isinstance(value, np.ndarray)]
    arrays += lru.queues.arrays if name == "pb_lru" else []
    held = sum(a.nbytes for a in arrays) - lru._victims.nbytes
    assert 0.95 < held / (1 << 16) / PLANNER_BYTES_PER_DEVICE_SLOT[name] < 1.01
