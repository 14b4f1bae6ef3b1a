"""What every planner keeps; each planner's own file adds only what is its own."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ula.errors import NotEnoughVictims
from vllm_ula.planner import PbLru, TimestampLru
from vllm_ula.records import DeviceSlots


def mask(num, *index):
    flags = torch.zeros(num, dtype=torch.bool)
    flags[list(index)] = True
    return flags


def use(planner, *calls):
    """Each argument lists the device rows one call fills."""
    for rows in calls:
        planner.begin_call()
        planner.admit(DeviceSlots(torch.tensor(rows, dtype=torch.int64)))


def read(planner, *calls):
    """Each argument lists the device rows one call reads where they are."""
    for rows in calls:
        planner.begin_call()
        planner.touch(DeviceSlots(torch.tensor(rows, dtype=torch.int64)))


def victims(planner, num, dead=(), protected=()):
    size = planner.num_device
    return planner.choose(num, mask(size, *dead), mask(size, *protected)).index.tolist()


def state(planner):
    values = copy.deepcopy(vars(planner))
    return {key: v.tolist() if torch.is_tensor(v) else v for key, v in values.items()}


class TestPlannerContract:
    def test_the_row_used_longest_ago_goes_first(self, planner):
        lru = planner(4)
        use(lru, [2], [0], [3], [1])
        assert victims(lru, 4) == [2, 0, 3, 1]
        use(lru, [2])
        assert victims(lru, 4) == [0, 3, 1, 2]

    def test_a_row_read_again_outlives_one_that_was_not(self, planner):
        lru = planner(4)
        use(lru, [0], [1], [2], [3])
        read(lru, [0, 2])
        assert victims(lru, 2) == [1, 3]

    def test_rows_never_used_go_before_used_ones(self, planner):
        lru = planner(4)
        use(lru, [0], [2])
        assert sorted(victims(lru, 2)) == [1, 3]
        assert victims(lru, 4)[2:] == [0, 2]

    def test_dead_rows_go_before_the_coldest(self, planner):
        lru = planner(4)
        use(lru, [0], [1], [2], [3])
        assert victims(lru, 3, dead=[3, 2]) == [2, 3, 0]

    def test_protected_rows_never_go(self, planner):
        lru = planner(4)
        use(lru, [0], [1], [2], [3])
        assert victims(lru, 2, protected=[0, 2]) == [1, 3]
        assert victims(lru, 2, dead=[0, 3], protected=[0, 2]) == [3, 1]

    @pytest.mark.parametrize("num", range(6))
    def test_it_gives_exactly_what_is_asked(self, planner, num):
        lru = planner(6)
        use(lru, [5, 1], [3])
        chosen = victims(lru, num, dead=[2], protected=[4])
        assert len(set(chosen)) == len(chosen) == num

    @pytest.mark.parametrize(("num", "protected"), [(5, []), (3, [0, 1]), (1, [0, 1, 2, 3])])
    def test_more_than_there_is_changes_nothing(self, planner, num, protected):
        lru = planner(4)
        use(lru, [2], [0])
        before = state(lru)
        with pytest.raises(NotEnoughVictims) as refused:
            victims(lru, num, dead=[1], protected=protected)
        assert (refused.value.asked, refused.value.available) == (num, 4 - len(protected))
        assert str(refused.value).startswith(f"{num} victims asked, {4 - len(protected)} device")
        assert state(lru) == before

    def test_nothing_can_be_asked_when_all_is_protected(self, planner):
        assert victims(planner(2), 0, protected=[0, 1]) == []

    def test_choosing_and_reading_change_no_recency(self, planner):
        lru = planner(4)
        use(lru, [1], [0], [3], [2])
        before = state(lru)
        assert victims(lru, 4) == victims(lru, 4) == [1, 0, 3, 2]
        lru.check_integrity()
        assert state(lru) == before

    def test_a_call_that_uses_nothing_ages_nothing_past_another(self, planner):
        lru = planner(4)
        use(lru, [3], [], [2], [], [], [1], [0])
        assert victims(lru, 4) == [3, 2, 1, 0]

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

    def test_no_refusal_while_an_unprotected_row_exists(self, planner):
        """F05: 256 rows, 128 random rows of each call protected, all others asked for."""
        lru = planner(256)
        generator = torch.Generator().manual_seed(0)
        for _ in range(500):
            lru.begin_call()
            protected = mask(256, *torch.randperm(256, generator=generator)[:128].tolist())
            chosen = lru.choose(128, mask(256), protected)
            assert torch.equal(chosen.index.sort().values, (~protected).nonzero().squeeze(1))
            lru.touch(DeviceSlots(protected.nonzero().squeeze(1)))
            lru.check_integrity()


rows = st.lists(st.integers(0, 11), unique=True)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    planner=st.sampled_from([PbLru, TimestampLru]),
    calls=st.lists(rows, max_size=20),
    dead=rows,
    protected=rows,
    num=st.integers(0, 12),
)
def test_contract_on_random_histories(planner, calls, dead, protected, num):
    lru = planner(12)
    use(lru, *calls)
    last = {row: i for i, used in enumerate(calls) for row in used}
    key = {row: -2 if row in dead else last.get(row, -1) for row in range(12)}
    offered = [row for row in range(12) if row not in protected]
    if num > len(offered):
        with pytest.raises(NotEnoughVictims):
            victims(lru, num, dead, protected)
        return
    chosen = victims(lru, num, dead, protected)
    assert len(set(chosen)) == num
    assert set(chosen) <= set(offered)
    assert [key[row] for row in chosen] == sorted(key[row] for row in offered)[:num]
