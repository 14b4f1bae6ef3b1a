"""What is LRU inside hash buckets' own."""

import numpy as np
import pytest
import torch

from tests.core.test_planner_contract import slots, use
from vllm_ula.errors import IntegrityError
from vllm_ula.planner.hash_lru import HashLru, bucket_of


def bucket(owner, num_buckets):
    """The technical breakdown's formula, in Python's integers."""
    product = owner * 11400714819323198485 % 2**64
    return product >> (64 - (num_buckets.bit_length() - 1))


@pytest.mark.parametrize("num_buckets", [1, 2, 64, 1024])
def test_buckets_are_those_of_the_formula(num_buckets):
    shift = np.uint64(64 - num_buckets.bit_length() + 1)
    for owner in [0, 1, 2, 3, 1000, 2**31 - 1, 2**62 + 12345]:
        assert bucket_of(owner, shift) == bucket(owner, num_buckets)


def owners_by_bucket(num_buckets, num):
    """`num` logical slots of each bucket."""
    found = {b: [] for b in range(num_buckets)}
    owner = 0
    while min(map(len, found.values())) < num:
        found[bucket(owner, num_buckets)].append(owner)
        owner += 1
    return found


def filled():
    """Two buckets with two rows each: rows 0 and 2 in the first, the older one 0; 1 and 3."""
    owners = owners_by_bucket(2, 4)
    lru = HashLru(4, num_buckets=2)
    for row in range(4):
        lru.begin_call()
        lru.admit(slots([row]), slots([owners[row % 2][row]]).index)
    lru.check_integrity()
    lru.begin_call()
    return lru, owners


def test_a_victim_comes_from_the_bucket_of_the_incoming_row():
    lru, owners = filled()
    assert lru.choose(torch.tensor([owners[1][0]])).index.tolist() == [1]
    assert lru.choose(torch.tensor([owners[0][0], owners[1][1]])).index.tolist() == [0, 1]
    assert lru.no_victim == 0


def test_a_bucket_without_a_victim_takes_the_next_and_counts_it():
    lru, owners = filled()
    incoming = torch.tensor([*owners[1][:2], owners[1][2]])
    assert lru.choose(incoming).index.tolist() == [1, 3, 0]
    assert lru.no_victim == 1


def test_current_rows_of_the_bucket_are_no_victims():
    lru, owners = filled()
    lru.touch(slots([1]))
    lru.check_integrity()
    assert lru.choose(torch.tensor(owners[1][:2])).index.tolist() == [3, 0]


def test_a_row_moves_to_the_bucket_of_its_new_owner():
    lru, owners = filled()
    lru.admit(slots([0]), torch.tensor([owners[1][3]]))
    lru.check_integrity()
    lru.begin_call()
    assert lru.choose(torch.tensor([owners[0][0]])).index.tolist() == [2]
    assert lru.choose(torch.tensor(owners[1][:3])).index.tolist() == [1, 3, 0]


def test_dead_rows_go_first_whatever_their_bucket():
    lru, owners = filled()
    lru.bury(slots([2]))
    assert lru.choose(torch.tensor(owners[1][:1])).index.tolist() == [2]


def test_integrity_sees_a_broken_ring():
    lru = HashLru(4, num_buckets=1)
    use(lru, [0], [1])
    lru.next[0] = 2
    with pytest.raises(IntegrityError, match="hash bucket"):
        lru.check_integrity()
