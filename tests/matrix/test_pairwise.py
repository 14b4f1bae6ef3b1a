"""A pairwise cover of the matrix: tokens, logprobs and drafts equal those without UlaCache."""

from __future__ import annotations

from dataclasses import astuple
from itertools import combinations

import pytest
from matrix.cells import ALL, Cell, Ran, assert_equal, off_cell, pairwise, run_arms, write_models

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
CELLS = pairwise()


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Cell, bool], Ran | str]:
    """Both arms of all cells."""
    models = tmp_path_factory.mktemp("matrix")
    write_models(models)
    return {(cell, ula): result for cell, ula, result in run_arms(models, CELLS)}


def test_every_pair_of_values_is_covered() -> None:
    def pairs(cells: list[Cell]) -> set[object]:
        return {pair for cell in cells for pair in combinations(enumerate(astuple(cell)), 2)}

    assert pairs(CELLS) == pairs(ALL)
    assert len(CELLS) <= 20


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_same_tokens(cell: Cell, ran: dict[tuple[Cell, bool], Ran | str]) -> None:
    found, expected = ran[cell, True], ran[off_cell(cell), False]
    assert isinstance(expected, Ran), expected
    assert isinstance(found, Ran), found
    assert_equal(found, expected)
    assert found.fetched > 0
    if cell.drafts != "none":
        assert min(found.drafts) > 0, "no draft was accepted, or none rejected"
