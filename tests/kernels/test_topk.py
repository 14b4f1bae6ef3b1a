"""Exact top-k."""

import pytest
import torch

from vllm_ula.kernels import topk as file
from vllm_ula.kernels.reference.topk import topk as reference
from vllm_ula.kernels.topk import topk

INF, NAN = torch.inf, torch.nan


@pytest.fixture
def small_parts(monkeypatch):
    """Several programs a row, blocks and tokens a program, without long rows."""
    monkeypatch.setattr(file, "TOKENS", 8)
    monkeypatch.setattr(file, "BLOCK", 16)
    monkeypatch.setattr(file, "PART", 64)


def sample(tokens, width):
    """Scores with ties, infinities, NaN, zeros of both signs, and poison behind the positions."""
    generator = torch.Generator().manual_seed(width)
    levels = torch.tensor([1, 3, 10_000])[torch.arange(tokens) % 3].unsqueeze(1)
    scores = torch.randint(-10_000, 10_000, (tokens, width), generator=generator) % levels / 7
    scores -= levels / 14
    kind = torch.rand(scores.shape, generator=generator)
    scores[kind < 0.1], scores[(kind > 0.1) & (kind < 0.13)] = -INF, NAN
    scores[(kind > 0.13) & (kind < 0.16)] = 0.0
    scores[(kind > 0.16) & (kind < 0.19)] = -0.0
    scores[(kind > 0.19) & (kind < 0.21)] = INF
    positions = torch.randint(-1, width, (tokens,), generator=generator)
    positions[::2] = width - 1
    behind = torch.arange(width) > positions.unsqueeze(1)
    return scores.masked_fill(behind, INF), positions


@pytest.mark.parametrize(
    ("k", "width"), [(1, 33), (7, 150), (64, 150), (100, 150), (64, 64), (100, 33), (3, 1)]
)
def test_equals_the_reference(small_parts, poisoned, k, width):
    scores, positions = sample(9, width)
    assert torch.equal(topk(scores, positions, k), reference(scores, positions, k))


def test_long_rows_in_blocks_and_parts_of_the_real_size(random):
    scores, positions = random(2, 20_001), torch.tensor([20_000, 15_000])
    scores[1] = scores[1].round(decimals=1)
    assert torch.equal(topk(scores, positions, 2048), reference(scores, positions, 2048))


def test_control_two_rows_swapped_are_seen(random):
    scores, positions = random(3, 100), torch.tensor([99, 99, 99])
    expected = reference(scores[[1, 0, 2]], positions, 10)
    assert not torch.equal(topk(scores, positions, 10), expected)


def test_scores_that_differ_in_their_last_bit_only():
    bits = torch.randperm(300, generator=torch.Generator().manual_seed(0)).int()
    first = torch.tensor([0, -150, 0x3F800000, 0x00FFFF80, -0x40800000], dtype=torch.int32)
    scores = (bits + first.unsqueeze(1)).view(torch.float32)
    positions = torch.full((5,), 299)
    assert torch.equal(topk(scores, positions, 100), reference(scores, positions, 100))


@pytest.mark.parametrize("run", [topk, reference])
class TestStories:
    def test_of_equal_scores_the_lowest_positions_in_ascending_order(self, run):
        scores = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0], [0.0, -0.0, 0.0, -1.0, 0.0]])
        assert run(scores, torch.tensor([4, 4]), 3).tolist() == [[0, 1, 3], [0, 1, 2]]

    def test_only_positions_up_to_the_own_count(self, run):
        scores = torch.tensor([[1.0, 2.0, 9.0, 9.0]] * 4)
        found = run(scores, torch.tensor([-1, 0, 1, 2]), 2)
        assert found.tolist() == [[-1, -1], [0, -1], [0, 1], [1, 2]]

    def test_infinity_is_selected_minus_infinity_and_nan_are_not(self, run):
        scores = torch.tensor([[NAN, INF, -INF, -5.0, -NAN], [NAN, -INF, NAN, -INF, NAN]])
        found = run(scores, torch.tensor([4, 4]), 3)
        assert found.tolist() == [[1, 3, -1], [-1, -1, -1]]

    def test_nan_takes_no_place(self, run):
        scores = torch.tensor([[NAN, 1.0, 2.0, 3.0, NAN]])
        assert run(scores, torch.tensor([4]), 2).tolist() == [[2, 3]]

    @pytest.mark.parametrize("k", [4, 5, 6])
    def test_rows_about_as_wide_as_the_result(self, run, k):
        found = run(torch.arange(5.0).unsqueeze(0), torch.tensor([4]), k)
        assert found.tolist() == [([0, 1, 2, 3, 4] if k > 4 else [1, 2, 3, 4]) + [-1] * (k - 5)]

    @pytest.mark.parametrize("shape", [(0, 9), (2, 0)])
    def test_empty_rows(self, run, shape):
        found = run(torch.empty(shape), torch.full(shape[:1], -1), 4)
        assert found.dtype == torch.int32
        assert found.tolist() == [[-1] * 4] * shape[0]


def test_rows_beyond_two_giga_elements(monkeypatch):
    monkeypatch.setattr(file, "PART", 2**30)
    scores = torch.empty(3, 2**30)
    scores[2, :5000] = torch.arange(5000.0)
    found = topk(scores, torch.tensor([-1, -1, 4999]), 4)
    assert found.tolist() == [[-1] * 4, [-1] * 4, [4996, 4997, 4998, 4999]]


def test_scores_of_another_type_are_refused():
    with pytest.raises(TypeError, match=r"scores is torch\.bfloat16, expected torch\.float32"):
        topk(torch.zeros(1, 4, dtype=torch.bfloat16), torch.zeros(1).long(), 2)
