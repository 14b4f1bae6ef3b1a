import pytest
import torch

from vllm_ula.errors import IntegrityError
from vllm_ula.map_bytes import MAP_BYTES_PER_DEVICE_SLOT, MAP_BYTES_PER_LOGICAL_SLOT
from vllm_ula.records import DeviceSlots, Exchange, HostSlots
from vllm_ula.residency import Residency


def slots(*index):
    return torch.tensor(index, dtype=torch.int64)


def swap(residency, incoming, victims):
    """Exchange whose incoming rows live on the host of `residency`."""
    yes = torch.ones(len(victims), dtype=torch.bool)
    vacated = residency.home[incoming].long() - residency.num_device
    return Exchange(slots(*incoming), DeviceSlots(slots(*victims)), HostSlots(vacated), yes, yes)


def test_a_new_map_is_the_identity_and_all_dead():
    residency = Residency(4, 2)
    assert residency.home.tolist() == [0, 1, 2, 3, 4, 5]
    assert residency.owner.tolist() == [0, 1, 2, 3]
    states = residency.states()
    assert (states.device_live, states.device_dead) == (0, 4)
    assert (states.host_live, states.host_dead) == (0, 2)
    residency.check_integrity()


def test_remap_swaps_homes():
    residency = Residency(4, 4)
    residency.remap(swap(residency, [6, 4], [0, 3]))
    assert residency.home.tolist() == [6, 1, 2, 4, 3, 5, 0, 7]
    assert residency.owner.tolist() == [6, 1, 2, 4]
    residency.check_integrity()
    residency.remap(swap(residency, [0, 5], [0, 1]))
    assert residency.home.tolist() == [0, 5, 2, 4, 3, 1, 6, 7]
    assert residency.owner.tolist() == [0, 5, 2, 4]
    residency.check_integrity()


def test_an_empty_exchange_changes_nothing():
    residency = Residency(4, 4)
    residency.remap(swap(residency, [], []))
    assert residency.home.tolist() == list(range(8))


def test_translate_keeps_shape_and_padding():
    residency = Residency(4, 4)
    residency.remap(swap(residency, [7], [2]))
    homes = residency.translate(torch.tensor([[7, 2, -1], [-1, -1, 0]]))
    assert homes.dtype == torch.int64
    assert homes.tolist() == [[2, 7, -1], [-1, -1, 0]]
    assert residency.translate(slots()).tolist() == []


def test_a_translation_is_no_view_of_the_map():
    residency = Residency(4, 4)
    residency.translate(slots(0, 1)).fill_(9)
    assert residency.home.tolist() == list(range(8))


def test_owners_and_host_slots_follow_the_map():
    residency = Residency(4, 4)
    residency.remap(swap(residency, [6], [1]))
    assert residency.owners(DeviceSlots(slots(1, 0))).tolist() == [6, 0]
    assert residency.host_slots(residency.translate(slots(1, 7))).index.tolist() == [2, 3]


def test_liveness_belongs_to_the_logical_slot_not_to_the_row():
    residency = Residency(4, 4)
    residency.mark_live(slots(0, 6))
    assert residency.dead_device_rows().tolist() == [False, True, True, True]
    residency.remap(swap(residency, [6], [2]))
    assert residency.dead_device_rows().tolist() == [False, True, False, True]
    states = residency.states()
    assert (states.device_live, states.device_dead) == (2, 2)
    assert (states.host_live, states.host_dead) == (0, 4)


def test_death_comes_in_whole_blocks():
    residency = Residency(8, 4)
    residency.mark_live(torch.arange(12))
    residency.mark_dead(slots(0, 2), block_size=4)
    assert residency.live.tolist() == [False] * 4 + [True] * 4 + [False] * 4
    residency.mark_dead(slots(), block_size=4)
    assert residency.states().device_live == 4


def test_without_host_rows_every_home_is_on_the_device():
    residency = Residency(4, 0)
    residency.mark_live(slots(3))
    assert residency.translate(slots(3, 0)).tolist() == [3, 0]
    assert residency.states().host_dead == 0
    residency.check_integrity()


@pytest.mark.parametrize("array", ["home", "owner", "live"])
@pytest.mark.parametrize("length", [2, 8])
def test_integrity_sees_every_array_of_a_wrong_length(array, length):
    """D10: growing updated two of three parallel arrays."""
    residency = Residency(4, 2)
    setattr(residency, array, torch.zeros(length, dtype=torch.int32))
    with pytest.raises(IntegrityError, match=array):
        residency.check_integrity()


@pytest.mark.parametrize(
    ("home", "owner", "message"),
    [
        ([0, 1, 2, 3, 4, 4], [0, 1, 2, 3], "no permutation"),
        ([0, 1, 2, 3, 4, 6], [0, 1, 2, 3], "no permutation"),
        ([0, 1, 2, 3, 4, -1], [0, 1, 2, 3], "no permutation"),
        ([1, 0, 2, 3, 4, 5], [0, 1, 2, 3], "not the inverse"),
        ([0, 1, 2, 3, 4, 5], [0, 1, 2, 4], "not the inverse"),
    ],
)
def test_integrity_sees_a_broken_map(home, owner, message):
    residency = Residency(4, 2)
    residency.home[:] = torch.tensor(home)
    residency.owner[:] = torch.tensor(owner)
    with pytest.raises(IntegrityError, match=message):
        residency.check_integrity()


def test_the_bytes_charged_are_the_bytes_of_the_arrays():
    residency = Residency(4, 2)
    per_logical = residency.home.element_size() + residency.live.element_size()
    assert per_logical == MAP_BYTES_PER_LOGICAL_SLOT
    assert residency.owner.element_size() == MAP_BYTES_PER_DEVICE_SLOT
