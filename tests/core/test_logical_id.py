import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ula.errors import LogicalIdError, NoSequenceNumber, UlaError
from vllm_ula.logical_id import NUM_SEQUENCES, SequenceNumbers, pack, unpack

HIGHEST = {"seq": 2**20 - 1, "layer": 255, "head_group": 15, "token": 2**32 - 1}
FIELDS = st.tuples(*(st.integers(0, highest) for highest in HIGHEST.values()))


def test_the_fields_stand_where_the_module_draws_them():
    assert pack(1, 0, 0, 0) == 1 << 44
    assert pack(0, 1, 0, 0) == 1 << 36
    assert pack(0, 0, 1, 0) == 1 << 32
    assert pack(0, 0, 0, 1) == 1
    assert pack(**HIGHEST) == 2**64 - 1


@given(FIELDS)
def test_unpack_is_the_inverse_of_pack(values):
    found = unpack(pack(*values))
    assert (found.seq, found.layer, found.head_group, found.token) == values


@given(st.lists(FIELDS, min_size=1, max_size=20))
def test_arrays_are_packed_like_their_elements(rows):
    seq, layer, head_group, token = np.array(rows, np.int64).T
    ids = pack(seq, layer, head_group, token)
    assert isinstance(ids, np.ndarray)
    assert ids.dtype == np.uint64
    assert ids.tolist() == [int(pack(*row)) for row in rows]
    back = unpack(ids)
    for found, expected in zip(
        (back.seq, back.layer, back.head_group, back.token),
        (seq, layer, head_group, token),
        strict=True,
    ):
        assert found.dtype == np.uint64
        assert (found == expected).all()


@given(FIELDS, FIELDS)
def test_different_rows_have_different_ids(a, b):
    assert (pack(*a) == pack(*b)) == (a == b)


def test_scalars_go_with_arrays_of_any_shape():
    ids = pack(3, 2, 0, np.arange(6, dtype=np.uint32).reshape(2, 3))
    assert ids.shape == (2, 3)
    assert unpack(ids).token.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert pack(3, 2, 0, np.empty(0, np.int64)).shape == (0,)
    assert type(pack(1, 2, 3, 4)) is np.uint64


@pytest.mark.parametrize("field", HIGHEST)
@pytest.mark.parametrize("value", ["-1", "above", "far", 0.5, True, "text"])
def test_a_value_out_of_range_is_named(field, value):
    highest = HIGHEST[field]
    value = {"-1": -1, "above": highest + 1, "far": 2**70}.get(value, value)
    with pytest.raises(LogicalIdError) as refused:
        pack(**{**dict.fromkeys(HIGHEST, 0), field: value})
    assert str(refused.value) == f"{field}={value}: must be a whole number 0..{highest}"
    assert isinstance(refused.value, UlaError)


def test_one_wrong_element_of_an_array_is_named():
    with pytest.raises(LogicalIdError, match=r"^layer=256: must be a whole number 0\.\.255$"):
        pack(0, np.array([3, 255, 256, 300]), 0, 0)


def test_numbers_count_up_and_a_released_one_comes_back_last():
    numbers = SequenceNumbers()
    assert [numbers.take() for _ in range(3)] == [0, 1, 2]
    numbers.release(1)
    assert [numbers.take() for _ in range(2)] == [3, 4]
    assert numbers.num_live == 4


def test_numbers_wrap_around_past_a_live_one():
    numbers = SequenceNumbers(first=NUM_SEQUENCES - 1)
    assert numbers.take() == NUM_SEQUENCES - 1
    assert [numbers.take() for _ in range(3)] == [0, 1, 2]
    numbers.release(NUM_SEQUENCES - 1)
    numbers.release(1)
    wrapped = []
    for _ in range(NUM_SEQUENCES - 3):
        wrapped.append(numbers.take())
        numbers.release(wrapped[-1])
    assert wrapped == [
        *range(3, NUM_SEQUENCES),
    ]
    assert [numbers.take() for _ in range(2)] == [1, 3]


def test_all_live_is_an_error_and_changes_nothing():
    numbers = SequenceNumbers()
    assert {numbers.take() for _ in range(NUM_SEQUENCES)} == set(range(NUM_SEQUENCES))
    with pytest.raises(NoSequenceNumber, match=r"^all 1048576 sequence numbers are live$"):
        numbers.take()
    numbers.release(77)
    assert numbers.take() == 77


def test_a_number_that_is_not_live_cannot_be_released():
    numbers = SequenceNumbers()
    with pytest.raises(KeyError):
        numbers.release(0)


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(0, NUM_SEQUENCES - 1))
def test_a_number_is_never_given_twice_at_a_time(steps, first):
    """Each step releases one of the live numbers, or takes another."""
    numbers, live = SequenceNumbers(first), []
    for step in steps:
        if step < len(live):
            numbers.release(live.pop(step))
        else:
            number = numbers.take()
            assert 0 <= number < NUM_SEQUENCES
            assert number not in live
            live.append(number)
