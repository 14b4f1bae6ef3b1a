import pytest
import torch

from vllm_ula.records import DeviceSlots, Exchange, HostSlots, LayerRows
from vllm_ula.transfer import transfer

WIDTH = 3


def slots(index):
    return torch.as_tensor(index, dtype=torch.int64)


def layer(num_device, num_host, tag=0, dtype=torch.float32):
    """Device row d holds tag + d, host row h holds tag + 100 + h."""
    device = (tag + torch.arange(num_device)).to(dtype)
    host = (tag + 100 + torch.arange(num_host)).to(dtype)
    return LayerRows(
        "layer",
        device.repeat_interleave(WIDTH).view(-1, WIDTH),
        host.repeat_interleave(WIDTH).view(-1, WIDTH),
    )


def exchange(victims, vacated, fetch=None, write_back=None):
    yes = torch.ones(len(victims), dtype=torch.bool)
    return Exchange(
        incoming=slots(range(len(victims))),
        victims=DeviceSlots(slots(victims)),
        vacated=HostSlots(slots(vacated)),
        fetch=yes if fetch is None else torch.tensor(fetch, dtype=torch.bool),
        write_back=yes if write_back is None else torch.tensor(write_back, dtype=torch.bool),
    )


def tags(rows):
    assert (rows == rows[:, :1]).all(), "a row was torn"
    return rows[:, 0].tolist()


def test_the_two_tiers_are_numbered_independently():
    """D04: host rows in reverse, device rows rotated by 7; the tags tell who went where."""
    rows = layer(20, 20)
    victims, vacated = [(j + 7) % 20 for j in range(20)], list(reversed(range(20)))
    transfer([rows], exchange(victims, vacated))
    device, host = [0] * 20, [0] * 20
    for victim, left in zip(victims, vacated, strict=True):
        device[victim], host[left] = 100 + left, victim
    assert tags(rows.device) == device
    assert tags(rows.host) == host


@pytest.mark.parametrize(
    ("victims", "vacated"),
    [
        (HostSlots(slots([0])), HostSlots(slots([1]))),
        (DeviceSlots(slots([0])), DeviceSlots(slots([1]))),
        (HostSlots(slots([0])), DeviceSlots(slots([1]))),
    ],
)
def test_slots_of_the_wrong_tier_are_refused_before_anything_moves(victims, vacated):
    rows, yes = layer(2, 2), torch.ones(1, dtype=torch.bool)
    with pytest.raises(TypeError, match="DeviceSlots and HostSlots, not"):
        transfer([rows], Exchange(slots([0]), victims, vacated, yes, yes))
    assert (tags(rows.device), tags(rows.host)) == ([0, 1], [100, 101])


def test_a_victim_goes_down_into_the_row_just_vacated():
    rows = layer(3, 3)
    transfer([rows], exchange([2, 0], [1, 2]))
    assert tags(rows.device) == [102, 1, 101]
    assert tags(rows.host) == [100, 2, 0]


def test_a_row_not_fetched_and_a_row_not_written_back_move_no_bytes():
    rows = layer(4, 4)
    transfer([rows], exchange([0, 1, 2], [3, 2, 1], [True, False, False], [False, True, False]))
    assert tags(rows.device) == [103, 1, 2, 3]
    assert tags(rows.host) == [100, 101, 1, 103]


def test_poison_of_unwritten_rows_stays_where_it_is():
    rows = layer(4, 4)
    rows.device[[1, 3]] = torch.nan
    rows.host[[0, 3]] = torch.nan
    transfer([rows], exchange([0, 1], [2, 1], [True, True], [True, False]))
    assert tags(rows.device[[0, 1, 2]]) == [102, 101, 2]
    assert tags(rows.host[[1, 2]]) == [101, 0]
    assert rows.device[3].isnan().all()
    assert rows.host[[0, 3]].isnan().all()


def test_all_layers_move():
    layers = [layer(2, 2), layer(2, 2, tag=10, dtype=torch.bfloat16)]
    transfer(layers, exchange([1, 0], [0, 1], write_back=[True, False]))
    assert tags(layers[0].device) == [101, 100]
    assert tags(layers[1].device) == [111, 110]
    assert tags(layers[1].host) == [11, 111]


@pytest.mark.parametrize("num", [0, 2])
def test_an_exchange_that_moves_nothing(num):
    rows = layer(2, 2)
    none = [False] * num
    transfer([rows], exchange(range(num), range(num), none, none))
    assert (tags(rows.device), tags(rows.host)) == ([0, 1], [100, 101])
