"""Scores of the sparse indexer."""

import pytest
import torch

from vllm_ula.kernels.index_scores import index_scores
from vllm_ula.kernels.reference.index_keys import store_index_keys
from vllm_ula.kernels.reference.index_scores import index_scores as reference

BLOCKS = 60


class Batch:
    """Requests of some lengths with their last tokens, and a cache with keys for all of them.

    Keys, queries and weights are small integers, so that every sum is exact in any order; `noise`
    instead makes them normal numbers. Unused rows of the cache and of the table are poisoned.
    """

    def __init__(self, lengths, tokens, heads=4, block_size=16, padding=0, noise=False, dim=128):
        generator = torch.Generator().manual_seed(sum(lengths) + heads)

        def draw(*shape):
            if noise:
                return torch.randn(shape, generator=generator)
            return torch.randint(-4, 5, shape, generator=generator).float()

        request = [r for r, num in enumerate(tokens) for _ in range(num)]
        position = [p for n, num in zip(lengths, tokens, strict=True) for p in range(n - num, n)]
        self.request = torch.tensor(request + [-1] * padding, dtype=torch.int64)
        self.position = torch.tensor(position + [-1] * padding, dtype=torch.int64)
        self.block_size, self.width = block_size, max(lengths) + 3
        num = len(self.request)
        self.queries = (draw(num, heads, dim) * 8).to(torch.float8_e4m3fn)
        self.weights = draw(num, heads)
        blocks = [-(-length // block_size) for length in lengths]
        table = torch.full((len(lengths), 2 * max(blocks)), 10**6, dtype=torch.int32)
        free = torch.randperm(sum(blocks) + 2, generator=generator).int()
        self.cache = torch.full((len(free) * block_size, dim + 4), 0x7F, dtype=torch.uint8)
        for row, length in enumerate(lengths):
            own, free = free[: blocks[row]], free[blocks[row] :]
            table[row, : len(own)] = own
            slots = (own.long().unsqueeze(1) * block_size + torch.arange(block_size)).flatten()
            scales = 2.0 ** torch.randint(-3, 4, (length, 1), generator=generator)
            store_index_keys(self.cache, slots[:length], draw(length, dim) * scales)
        self.table = table[:, : max(blocks)]

    def scores(self, run):
        return run(
            self.queries,
            self.weights,
            self.cache,
            self.table,
            self.request,
            self.position,
            self.block_size,
            self.width,
        )


BATCHES = [
    Batch([1], [1]),
    Batch([700], [3], block_size=16),
    Batch([513, 40, 512], [2, 5, 1], block_size=64, padding=2),
    Batch([600, 129], [1, 4], block_size=128, heads=32),
    Batch([90], [2], heads=64, dim=16),
    Batch([30, 20], [0, 2], padding=1),
]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_reference(poisoned, batch, dtype):
    batch.weights = batch.weights.to(dtype)
    found = batch.scores(index_scores)
    assert found.dtype == torch.float32
    assert torch.equal(found, batch.scores(reference))


@pytest.mark.parametrize("heads", [4, 32, 64])
def test_differs_from_the_reference_by_the_order_of_sums_only(heads):
    batch = Batch([700, 300], [4, 2], heads=heads, noise=True)
    found, expected = batch.scores(index_scores), batch.scores(reference)
    # Sums of terms of either sign lose digits: the bound is one of their magnitudes.
    batch.weights = batch.weights.abs()
    largest = batch.scores(reference).amax(1, keepdim=True)
    read = expected > -torch.inf
    assert torch.equal(found > -torch.inf, read)
    assert ((found - expected).abs() <= 1e-6 * largest)[read].all()


def test_control_two_keys_swapped_are_seen():
    batch = Batch([700], [3])
    expected = batch.scores(reference)
    rows = batch.table[0, :2].long() * batch.block_size
    batch.cache[rows] = batch.cache[rows.flip(0)]
    assert not torch.equal(batch.scores(index_scores), expected)


def test_nothing_is_read_behind_a_token_nor_for_padding():
    batch = Batch([600, 50], [2, 2], padding=3)
    found = batch.scores(index_scores)
    positions = batch.position.unsqueeze(1)
    assert torch.equal(found == -torch.inf, torch.arange(batch.width) > positions)
    assert not found.isnan().any()


def test_a_key_that_is_nan_has_a_score_that_is_nan():
    batch = Batch([40], [1])
    batch.cache[int(batch.table[0, 0]) * 16 + 2, 5] = 0xFF
    for run in (index_scores, reference):
        assert batch.scores(run).isnan().nonzero().tolist() == [[0, 2]]


@pytest.mark.parametrize("tokens", [0, 2])
def test_empty_results(tokens):
    batch = Batch([9], [tokens])
    batch.width = 0 if tokens else 9
    batch.position.fill_(-1)
    assert batch.scores(index_scores).shape == (tokens, batch.width)


def test_keys_beyond_two_gib():
    batch = Batch([20], [1], block_size=16)
    expected = batch.scores(reference)
    far = 2**31 // (132 * 16) + 1  # the first block whose bytes begin beyond 2^31
    cache = torch.empty((far + 2) * 16, 132, dtype=torch.uint8)
    for index, block in enumerate(batch.table[0].tolist()):
        cache[(far + index) * 16 :][:16] = batch.cache[block * 16 :][:16]
        batch.table[0, index] = far + index
    batch.cache = cache
    assert torch.equal(batch.scores(index_scores), expected)


def test_queries_of_another_type_are_refused():
    batch = Batch([9], [1])
    batch.queries = batch.queries.float()
    with pytest.raises(
        TypeError, match=r"queries is torch\.float32, expected torch\.float8_e4m3fn"
    ):
        batch.scores(index_scores)


def test_a_head_size_that_fills_no_tile_is_refused():
    batch = Batch([9], [1], dim=24)
    with pytest.raises(ValueError, match="queries have 24 values a head, expected a power of two"):
        batch.scores(index_scores)
