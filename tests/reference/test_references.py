"""The two references agree, and a wrong row makes them disagree."""

from pathlib import Path

import pytest
import torch
from reference import brute_force, hf_reference

TOPK = 128
SAME_LOGPROB = 1e-4


@pytest.fixture(scope="module")
def brute(checkpoint: Path) -> brute_force.Model:
    return brute_force.Model(checkpoint)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> hf_reference.Model:
    return hf_reference.Model(checkpoint)


@pytest.fixture(scope="module")
def fp8(checkpoint: Path) -> hf_reference.Model:
    return hf_reference.Model(checkpoint, fp8_indexer=True)


@pytest.fixture(scope="module")
def long_output(brute: brute_force.Model, tokens: list[int]) -> brute_force.Output:
    return brute.forward(tokens)


def overlap(first: torch.Tensor, second: torch.Tensor) -> float:
    """Share of positions two selections [T, topk] have in common, tokens that choose only."""
    num_tokens = len(first)
    hits = torch.zeros(2, num_tokens, num_tokens + 1, dtype=torch.bool)
    hits[0].scatter_(1, first.clamp(min=-1) % (num_tokens + 1), True)
    hits[1].scatter_(1, second.clamp(min=-1) % (num_tokens + 1), True)
    common = (hits[0] & hits[1])[TOPK:, :num_tokens].sum(1)
    return (common / TOPK).mean().item()


def test_short_prompt_has_the_logprobs_of_transformers(
    brute: brute_force.Model, plain: hf_reference.Model, tokens: list[int]
) -> None:
    found, expected = (model.prompt_logprobs(tokens[:TOPK]) for model in (brute, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=SAME_LOGPROB)


def test_selections_are_those_of_the_fp8_indexer(
    fp8: hf_reference.Model, long_output: brute_force.Output
) -> None:
    for layer, seen in long_output.indexer_inputs.items():
        assert overlap(long_output.selections[layer], fp8.select(layer, seen)) >= 0.99


def test_the_float_indexer_selects_something_else(
    plain: hf_reference.Model, long_output: brute_force.Output
) -> None:
    for layer, seen in long_output.indexer_inputs.items():
        assert overlap(long_output.selections[layer], plain.select(layer, seen)) < 0.99


def test_long_prompt_has_the_logprobs_of_transformers_given_the_selections(
    fp8: hf_reference.Model, long_output: brute_force.Output, tokens: list[int]
) -> None:
    found = brute_force.next_token_logprobs(long_output.logits, tokens)
    expected = fp8.prompt_logprobs(tokens, long_output.selections)
    torch.testing.assert_close(found, expected, rtol=0, atol=SAME_LOGPROB)


def test_given_selections_are_used(
    brute: brute_force.Model, long_output: brute_force.Output, tokens: list[int]
) -> None:
    again = brute.forward(tokens, long_output.selections)
    assert torch.equal(again.logits, long_output.logits)
    fewer = [s[:, : TOPK // 2] for s in long_output.selections]
    assert not torch.allclose(brute.forward(tokens, fewer).logits, long_output.logits, atol=0.1)


def test_a_selection_is_causal_distinct_and_full(long_output: brute_force.Output) -> None:
    for selection in long_output.selections:
        for token, row in enumerate(selection.tolist()):
            positions = [position for position in row if position >= 0]
            assert len(set(positions)) == len(positions) == min(token + 1, TOPK)
            assert max(positions) <= token


def swap_two_rows(layer: int, rows: torch.Tensor) -> torch.Tensor:
    """Layer 1 finds the rows of positions 20 and 90 in each other's place."""
    if layer == 1:
        rows[[20, 90]] = rows[[90, 20]]
    return rows


def shift_one_row_by_a_block(layer: int, rows: torch.Tensor) -> torch.Tensor:
    """Layer 1 reads, for position 20, the row 16 positions later."""
    if layer == 1:
        rows[20] = rows[36]
    return rows


@pytest.mark.parametrize("damage", [swap_two_rows, shift_one_row_by_a_block])
def test_one_wrong_row_is_seen(
    brute: brute_force.Model,
    plain: hf_reference.Model,
    tokens: list[int],
    damage: brute_force.EditRows,
) -> None:
    prompt = tokens[:TOPK]
    damaged = brute.forward(prompt, edit_rows=damage).logits
    found = brute_force.next_token_logprobs(damaged, prompt)
    difference = (found - plain.prompt_logprobs(prompt)).abs()
    assert difference[:20].max() <= SAME_LOGPROB
    assert difference.max() > 1000 * SAME_LOGPROB


def test_an_edit_that_changes_nothing_changes_nothing(
    brute: brute_force.Model, tokens: list[int]
) -> None:
    prompt = tokens[:40]
    edited = brute.forward(prompt, edit_rows=lambda layer, rows: rows)
    assert torch.equal(edited.logits, brute.forward(prompt).logits)


@pytest.mark.parametrize("largest", [1e-12, 0.37, 448.0, 448.1, 3e4])
def test_fp8_scale_is_the_smallest_power_of_two_that_fits(largest: float) -> None:
    x = torch.linspace(-1, 1, 128)[None] * largest
    values, scale = brute_force.quantise_fp8(x)
    assert values.abs().max() <= 448
    assert torch.frexp(scale).mantissa.item() == 0.5
    if largest > 1e-9:
        assert values.abs().max() >= 224  # a smaller scale would exceed 448
        torch.testing.assert_close(values * scale, x, rtol=2**-4, atol=2**-9 * scale.item())
        assert torch.equal(values * scale, hf_reference.round_to_e4m3(x))


def test_selection_pads_and_breaks_off_at_the_prefix() -> None:
    scores = torch.tensor([[5.0, -torch.inf, -torch.inf], [1.0, 2.0, -torch.inf], [3.0, 1.0, 2.0]])
    assert brute_force.top_positions(scores, 2).tolist() == [[0, -1], [1, 0], [0, 2]]
    assert brute_force.top_positions(scores, 4)[1].tolist() == [1, 0, -1, -1]
