"""The full matrix: `make matrix` runs every cell in both arms and writes a table.

A cell vLLM itself refuses is listed with vLLM's message, from the arm without UlaCache.
"""

from __future__ import annotations

import csv
import os
import sys
import tempfile
from collections import Counter
from dataclasses import astuple
from pathlib import Path

from engine.harness import ENVIRONMENT
from matrix.cells import ALL, AXES, Cell, Ran, assert_equal, off_cell, run_arms, write_models
from tqdm import tqdm


def main(table: Path) -> int:
    """Run all cells and write `table`; 1 if a cell is not equal."""
    os.environ.update(ENVIRONMENT, VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1")
    num_arms = len(ALL) + len({off_cell(cell) for cell in ALL})
    with tempfile.TemporaryDirectory() as models:
        write_models(Path(models))
        arms = tqdm(run_arms(Path(models), ALL), total=num_arms, unit="arm", disable=None)
        ran = {(cell, ula): result for cell, ula, result in arms}
    rows = [[*astuple(cell), *judge(cell, ran)] for cell in ALL]
    with table.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*AXES, "accepted", "rejected", "rows_fetched", "result"])
        writer.writerows(rows)
    verdicts = Counter(row[-1] for row in rows)
    for verdict, cells in verdicts.most_common():
        print(f"{cells:4d} cells: {verdict}")
    print(f"written to {table}")
    return int(any(verdict.startswith("DIFFERENT") for verdict in verdicts))


def judge(cell: Cell, ran: dict[tuple[Cell, bool], Ran | str]) -> tuple[object, ...]:
    """Accepted and rejected drafts, rows fetched, and the verdict on a cell."""
    found, expected = ran[cell, True], ran[off_cell(cell), False]
    if isinstance(expected, str):
        return "", "", "", f"refused by vLLM: {expected}"
    if isinstance(found, str):
        return "", "", "", f"DIFFERENT: {found}"
    verdict = "equal"
    try:
        assert_equal(found, expected)
    except AssertionError as error:
        verdict = f"DIFFERENT: {error}"
    return *found.drafts, found.fetched, verdict


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
