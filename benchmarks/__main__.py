"""`make bench`: run the cases, print one table, save it with what it ran on.

python -m benchmarks [CASE ...] [--save NAME]
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import vllm_ula
from benchmarks import planner
from benchmarks.cases import CASES
from benchmarks.figure import Figure
from vllm_ula.tiny_model import write_tiny_model

RESULTS = Path(__file__).parent / "results"
# Progress ticks of a case.
STEPS = {"resident": 24, "capacity": 4, "memory": 2, "planner": 9, "policies": 5, "simulated": 8}


def main() -> int:
    """Run, print, save; exit code 1 if a goal was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.csv")
    arguments = parser.parse_args()
    for case in arguments.cases:
        if case not in CASES:
            parser.error(f"CASE={case}: must be one of {', '.join(CASES)}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    chosen = arguments.cases or list(CASES)
    figures: list[Figure] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        tqdm(total=sum(STEPS[case] for case in chosen), disable=not sys.stderr.isatty()) as bar,
    ):
        write_tiny_model(directory)

        def progress(what: str) -> None:
            bar.set_description(what)
            bar.update()

        for case in chosen:
            figures += CASES[case](directory, progress)
    show(figures)
    if arguments.save:
        save(figures, RESULTS / f"{arguments.save}.csv")
    return 0 if all(figure.ok for figure in figures) else 1


def show(figures: list[Figure]) -> None:
    """Print the figures as a table."""
    table = Table("case", "what", "value", "baseline", "goal", "")
    for f in figures:
        verdict = ("ok" if f.ok else "MISSED") if f.goal else ""
        table.add_row(f.case, f.what, f.value, f.baseline, f.goal, verdict)
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def save(figures: list[Figure], path: Path) -> None:
    """Write the figures with date, machine, versions and commit."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    where = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, no GPU",
        "torch": torch.__version__,
        "vllm_ula": vllm_ula.__version__,
        "commit": commit,
    }
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*Figure.__dataclass_fields__, *where])
        for figure in figures:
            writer.writerow([*vars(figure).values(), *where.values()])
    print(f"saved {path}")
    planner.draw(path.with_name("plan_time.png"))


if __name__ == "__main__":
    sys.exit(main())
