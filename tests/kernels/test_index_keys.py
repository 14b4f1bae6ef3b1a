"""Storing index keys."""

import pytest
import torch

from vllm_ula.kernels.index_keys import store_index_keys
from vllm_ula.kernels.reference.index_keys import load
from vllm_ula.kernels.reference.index_keys import store_index_keys as reference


def stored(store, slots, keys, num_rows=40):
    """The cache after a store, 0xAB where nothing was written."""
    cache = torch.full((num_rows, keys.shape[1] + 4), 0xAB, dtype=torch.uint8)
    store(cache, slots, keys)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num", "dim"), [(1, 128), (8, 128), (29, 128), (0, 128), (9, 20)])
def test_equals_the_reference(random, dtype, num, dim):
    keys = (random(num, dim) * 10 ** (2 * random(num, 1))).to(dtype)
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(num))[:num]
    slots[::3] = -1
    assert torch.equal(stored(store_index_keys, slots, keys), stored(reference, slots, keys))


def test_control_two_keys_swapped_are_seen(random):
    keys, slots = random(5, 128), torch.arange(5)
    swapped = keys[[1, 0, 2, 3, 4]]
    assert not torch.equal(stored(store_index_keys, slots, keys), stored(reference, slots, swapped))


def test_extreme_keys_equal_the_reference():
    keys = torch.zeros(8, 128)
    keys[1], keys[2, 5], keys[3, 7] = -0.0, 3e38, -3e38
    keys[4, 0], keys[4, 1] = 1e-10, -1e-20  # below the smallest scale
    keys[5], keys[6, :2] = 448.0, torch.tensor([448.0, 2.0**-10])
    keys[7, :2] = torch.tensor([1.0, -(2.0**-140)])
    slots = torch.arange(8)
    assert torch.equal(stored(store_index_keys, slots, keys), stored(reference, slots, keys))


@pytest.mark.parametrize("store", [store_index_keys, reference])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_key_that_is_not_finite_holds_nan(random, store, value):
    keys = random(3, 128)
    keys[1, 5] = value
    values, _ = load(stored(store, torch.arange(3), keys), torch.arange(3))
    assert values.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("slots", [[-1, -1, -1], [-1, 39, -7], [0, 39, 20]])
def test_skipped_slots_write_nothing_not_even_the_last_row(random, slots):
    cache = stored(store_index_keys, torch.tensor(slots), random(3, 128))
    untouched = [row for row in range(40) if row not in slots]
    assert (cache[untouched] == 0xAB).all()
    assert not (cache[[row for row in slots if row >= 0]] == 0xAB).all(1).any()


def test_rows_beyond_two_gib(random):
    num_rows = 2**31 // 132 + 10
    cache, keys = torch.empty(num_rows, 132, dtype=torch.uint8), random(2, 128)
    slots = torch.tensor([num_rows - 1, 3])
    store_index_keys(cache, slots, keys)
    assert torch.equal(cache[slots], stored(reference, torch.tensor([0, 1]), keys)[:2])


def test_a_cache_of_another_width_is_refused(random):
    with pytest.raises(ValueError, match=r"cache has shape \(4, 128\), expected \(4, 132\)"):
        store_index_keys(
            torch.zeros(4, 128, dtype=torch.uint8), torch.zeros(1).long(), random(1, 128)
        )


def test_keys_without_room_for_an_aligned_scale_are_refused(random):
    with pytest.raises(ValueError, match="keys have 6 values, expected a multiple of 4"):
        store_index_keys(torch.zeros(4, 10, dtype=torch.uint8), torch.zeros(1).long(), random(1, 6))
