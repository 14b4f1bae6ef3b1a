import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vllm_ula.capacity import (
    GIB,
    Capacity,
    Limit,
    TokenBytes,
    ceil_to,
    fit,
    floor_to,
    min_device_slots,
    split,
)
from vllm_ula.errors import ConfigError

GLM = TokenBytes(rows=78 * 656, index_keys=21 * 132)  # GLM-5.3
PROMPT = 90_145
GB = 10**9
SMALL = TokenBytes(rows=10, index_keys=1)


def sizes(capacity):
    return capacity.logical_slots, capacity.device_slots, capacity.host_slots


class TestKnownAnswers:
    """Section 3 of the project's numbers: figures of GLM-5.3, without whole-block rounding."""

    @staticmethod
    def glm(device_bytes, host_bytes):
        return fit(GLM, int(device_bytes), int(host_bytes), 1, min_device_slots(2048, 64, 1))

    @pytest.mark.parametrize(
        ("device_bytes", "host_bytes", "requests"),
        [
            (28.5 * GB, 0, 40),
            (159.4 * GB, 0, 256),
            (28.5 * GB, 128 * GB, 256),
            (159.4 * GB, 192 * GB, 576),
        ],
    )
    def test_admitted_by_eight_data_parallel_ranks(self, device_bytes, host_bytes, requests):
        assert 8 * self.glm(device_bytes, host_bytes).requests(PROMPT) == requests

    @pytest.mark.parametrize(
        ("device_bytes", "host_bytes", "ranks", "requests"),
        [
            (25.94 * GIB, 0, 1, 5),
            (172 * GB, 0, 1, 35),
            (25.94 * GIB, 128 * GB, 8, 256),
            (172 * GB, 192 * GB, 8, 598),
        ],
    )
    def test_admitted_under_tensor_parallelism(self, device_bytes, host_bytes, ranks, requests):
        assert ranks * self.glm(device_bytes, host_bytes).usable_slots // PROMPT == requests

    def test_unique_rows_and_aggregate_requests_on_b300(self):
        capacity = self.glm(159.4 * GB, 192 * GB)
        assert 8 * capacity.host_slots == pytest.approx(30.02e6, abs=0.005e6)
        assert 8 * capacity.logical_slots == pytest.approx(52.1e6, abs=0.05e6)
        assert capacity.logical_slots / capacity.host_slots == pytest.approx(1.736, abs=0.0005)
        assert 8 * capacity.logical_slots // PROMPT == 578

    def test_device_bytes_for_256_requests_on_h200(self):
        capacity = self.glm(27.6 * GB, 128 * GB)
        assert 8 * capacity.host_slots == pytest.approx(20.01e6, abs=0.005e6)
        assert 8 * capacity.requests(PROMPT) == 256
        assert 8 * self.glm(27.5 * GB, 128 * GB).requests(PROMPT) == 248

    @pytest.mark.parametrize(
        ("layers", "index_layers", "total"), [(78, 21, 53_940), (61, 61, 48_068)]
    )
    def test_bytes_of_a_token(self, layers, index_layers, total):
        token = TokenBytes(rows=layers * 656, index_keys=index_layers * 132)
        assert token.per_device_row + token.per_logical == total


class TestFit:
    def test_host_memory_adds_to_device_memory(self):
        # N = (220 + 200) / 11 = 38, down to blocks of 4; D = (220 - 36) / 10, down to 16.
        assert sizes(fit(SMALL, 220, 200, 4, 8)) == (36, 16, 20)
        assert fit(SMALL, 220, 200, 4, 8).limit is Limit.MEMORY

    def test_without_host_memory_all_is_on_the_device(self):
        capacity = fit(SMALL, 235, 0, 4, 8)
        assert sizes(capacity) == (20, 20, 0)
        assert capacity.used_host_bytes == 0

    def test_a_block_that_rounding_pushes_to_the_host_is_dropped(self):
        # (229 + 40) / 11 = 24, but D = (229 - 24) / 10 = 20 with 4 host rows, and C holds 3.
        assert sizes(fit(SMALL, 229, 39, 4, 8)) == (20, 20, 0)
        assert sizes(fit(SMALL, 229, 40, 4, 8)) == (24, 20, 4)

    def test_index_keys_can_fill_the_device(self):
        # (200 + 10000) / 11 = 927, but beside D_min = 8 rows there is room for 120 index keys.
        capacity = fit(SMALL, 200, 10_000, 4, 8)
        assert sizes(capacity) == (120, 8, 112)
        assert capacity.limit is Limit.INDEX_KEYS
        assert capacity.used_host_bytes == 1_120

    def test_the_device_bytes_it_names_make_all_host_memory_usable(self):
        needed = fit(SMALL, 200, 10_000, 4, 8).device_bytes_for_all_host(8)
        assert needed == 1_088
        assert sizes(fit(SMALL, needed, 10_000, 4, 8)) == (1_008, 8, 1_000)
        assert fit(SMALL, needed - 4, 10_000, 4, 8).host_slots == 996

    def test_maps_are_charged_to_the_device(self):
        token = TokenBytes(rows=10, index_keys=1, map_logical=2, map_device=3)
        capacity = fit(token, 320, 0, 4, 8)
        assert sizes(capacity) == (20, 20, 0)
        assert capacity.index_key_bytes == 20
        assert capacity.map_bytes == 20 * 2 + 20 * 3
        assert sizes(fit(token, 319, 0, 4, 8)) == (16, 16, 0)

    def test_the_null_block_is_not_usable(self):
        capacity = fit(SMALL, 220, 200, 4, 8)
        assert capacity.num_blocks == 9
        assert capacity.usable_slots == 32

    def test_requests_take_whole_blocks(self):
        capacity = fit(SMALL, 220, 200, 4, 8)  # 8 usable blocks
        assert [capacity.requests(n) for n in (1, 4, 5, 16, 17, 32, 33)] == [8, 8, 4, 2, 1, 1, 0]

    @pytest.mark.parametrize(
        ("device", "host", "requests"),
        [
            (64, 32, [(30, 3), (31, 3), (32, 2)]),
            (100, 100, [(160, 1), (199, 1), (200, 0)]),
        ],
    )
    def test_admission_counts_both_pools(self, device, host, requests):
        """L01: 64 + 32 rows hold 3 requests of 30; a prompt may be longer than either pool."""
        capacity = fit(SMALL, 10 * device + device + host, 10 * host, 1, 8)
        assert sizes(capacity) == (device + host, device, host)
        assert (
            capacity.usable_slots == device + host - 1
        )  # blocks of one row; one is the null block
        assert [(n, capacity.requests(n)) for n, _ in requests] == requests

    def test_a_device_below_d_min_is_refused(self):
        with pytest.raises(ConfigError) as refused:
            fit(SMALL, 87, 10_000, 4, 8)
        assert str(refused.value) == (
            "device_gib=8.103e-08: a decode step needs 8 device rows, 88 bytes; use at least 0.001"
        )

    @pytest.mark.parametrize("requests", [1, 16, 1000])
    def test_the_device_size_it_names_works(self, requests):
        minimum = min_device_slots(2048, requests, 64)
        with pytest.raises(ConfigError) as refused:
            fit(GLM, GIB // 10, 0, 64, minimum)
        works = float(str(refused.value).split()[-1])
        assert fit(GLM, int(works * GIB), 0, 64, minimum).device_slots >= minimum

    @pytest.mark.parametrize("host_bytes", [0, 9])
    def test_every_block_size_and_topk_fits_or_says_what_would(self, host_bytes):
        """C01; a host pool of one byte less than a row is none."""
        sizes_and_topk = itertools.product((1, 8, 16, 32, 64, 100, 256), (0, 1, 2048))
        for block_size, topk in sizes_and_topk:
            minimum = min_device_slots(topk, 1, block_size)
            capacity = fit(SMALL, 11 * minimum, host_bytes, block_size, minimum)
            assert sizes(capacity) == (minimum, minimum, 0)
            with pytest.raises(ConfigError) as refused:
                fit(SMALL, 11 * minimum - 1, host_bytes, block_size, minimum)
            assert str(refused.value).startswith("device_gib=")
            assert "\n" not in str(refused.value)


class TestDeviceSlots:
    def test_they_fix_the_device_rows_and_all_host_memory_is_used(self):
        capacity = fit(SMALL, 1_000, 239, 4, 8, device_slots=12)
        assert sizes(capacity) == (32, 12, 20)
        assert capacity.limit is Limit.DEVICE_SLOTS

    def test_they_may_fill_the_device_exactly(self):
        assert sizes(fit(SMALL, 12 * 10 + 32, 200, 4, 8, device_slots=12)) == (32, 12, 20)

    @pytest.mark.parametrize(
        ("device_slots", "device_bytes", "host_bytes", "message"),
        [
            (
                12,
                12 * 10 + 31,
                200,
                "device_slots=12: its rows and the index keys of 32 logical slots need 152 device "
                "bytes, there are 151; use at most 8",
            ),
            (
                12,
                100,
                200,
                "device_slots=12: its rows and the index keys of 32 logical slots need 152 device "
                "bytes, there are 100; use a smaller host_gib or more device memory",
            ),
            (
                4,
                1_000,
                0,
                "device_slots=4: must be whole blocks of 4, and a decode step needs 8 device rows; "
                "use 8",
            ),
            (
                13,
                1_000,
                0,
                "device_slots=13: must be whole blocks of 4, and a decode step needs 8 device "
                "rows; use 16",
            ),
        ],
    )
    def test_what_cannot_be_is_refused(self, device_slots, device_bytes, host_bytes, message):
        with pytest.raises(ConfigError) as refused:
            fit(SMALL, device_bytes, host_bytes, 4, 8, device_slots)
        assert str(refused.value) == message


class TestSplit:
    largest = fit(SMALL, 220, 200, 4, 8)  # 36 = 16 + 20

    @pytest.mark.parametrize(
        ("num_blocks", "expected"),
        [(9, (36, 16, 20)), (8, (32, 16, 16)), (6, (24, 16, 8)), (5, (20, 20, 0)), (1, (4, 4, 0))],
    )
    def test_fewer_blocks_take_host_rows_away_first(self, num_blocks, expected):
        assert sizes(split(SMALL, 220, 200, 4, 8, num_blocks)) == expected

    def test_it_says_what_binds(self):
        assert split(SMALL, 220, 200, 4, 8, 9) == self.largest
        assert split(SMALL, 220, 200, 4, 8, 8).limit is Limit.BLOCK_OVERRIDE

    def test_fixed_device_slots_stay_fixed(self):
        assert sizes(split(SMALL, 1_000, 200, 4, 8, 7, device_slots=12)) == (28, 12, 16)
        assert sizes(split(SMALL, 1_000, 200, 4, 8, 2, device_slots=12)) == (8, 8, 0)

    def test_more_blocks_than_there_are_is_refused(self):
        with pytest.raises(ConfigError) as refused:
            split(SMALL, 220, 200, 4, 8, 10)
        assert str(refused.value) == (
            "num_gpu_blocks_override=10: device and host memory hold 9 logical blocks of 4 tokens; "
            "use at most 9, or more host_gib"
        )


@pytest.mark.parametrize(
    ("topk", "decode_tokens", "block_size", "expected"),
    [(2048, 1, 64, 2112), (2048, 64, 64, 2112), (2048, 65, 64, 2176), (0, 1, 16, 16), (3, 1, 1, 4)],
)
def test_d_min_is_a_selection_and_one_row_a_decode_token(topk, decode_tokens, block_size, expected):
    assert min_device_slots(topk, decode_tokens, block_size) == expected


def test_rounding():
    assert [floor_to(n, 4) for n in (0, 3, 4, 7)] == [0, 0, 4, 4]
    assert [ceil_to(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]


tokens = st.builds(
    TokenBytes,
    rows=st.integers(1, 60),
    index_keys=st.integers(1, 20),
    map_logical=st.integers(0, 5),
    map_device=st.integers(0, 8),
)


def is_within(token, device_bytes, host_bytes, device, host):
    on_device = token.per_device_row * device + token.per_logical * (device + host)
    return on_device <= device_bytes and token.rows * host <= host_bytes


@st.composite
def budgets(draw):
    """A token, M, C, block size and D_min that M can hold."""
    token, block_size = draw(tokens), draw(st.integers(1, 8))
    minimum = block_size * draw(st.integers(1, 4))
    least = (token.per_device_row + token.per_logical) * minimum
    device_bytes = least + draw(st.integers(0, 3_000))
    host_bytes = draw(st.one_of(st.just(0), st.integers(0, 5_000)))
    return token, device_bytes, host_bytes, block_size, minimum


def is_valid(capacity: Capacity, minimum):
    assert capacity.logical_slots == capacity.device_slots + capacity.host_slots
    assert capacity.logical_slots == capacity.num_blocks * capacity.block_size
    assert capacity.device_slots % capacity.block_size == 0
    assert capacity.host_slots >= 0
    return is_within(
        capacity.token,
        capacity.device_bytes,
        capacity.host_bytes,
        capacity.device_slots,
        capacity.host_slots,
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(budgets())
def test_fit_is_within_both_budgets_and_no_block_more_would_be(budget):
    token, device_bytes, host_bytes, block_size, minimum = budget
    capacity = fit(*budget)
    assert is_valid(capacity, minimum)
    assert capacity.device_slots >= minimum
    more = capacity.logical_slots + block_size
    assert not any(
        is_within(token, device_bytes, host_bytes, device, more - device)
        for device in range(minimum, more + 1, block_size)
    )
    if host_bytes == 0:
        assert capacity.host_slots == 0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(budgets(), st.integers(1, 50))
def test_split_is_within_both_budgets(budget, num_blocks):
    assume(num_blocks <= fit(*budget).num_blocks)
    capacity = split(*budget, num_blocks)
    assert capacity.num_blocks == num_blocks
    assert is_valid(capacity, budget[-1])
    assert capacity.device_slots >= min(budget[-1], capacity.logical_slots)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(budgets(), st.integers(1, 8))
def test_fixed_device_slots_are_within_both_budgets_or_refused(budget, device_blocks):
    token, device_bytes, host_bytes, block_size, minimum = budget
    device = block_size * device_blocks
    host = floor_to(host_bytes // token.rows, block_size)
    if device >= minimum and is_within(token, device_bytes, host_bytes, device, host):
        capacity = fit(*budget, device_slots=device)
        assert is_valid(capacity, minimum)
        assert sizes(capacity) == (device + host, device, host)
    else:
        with pytest.raises(ConfigError, match=f"^device_slots={device}: "):
            fit(*budget, device_slots=device)
