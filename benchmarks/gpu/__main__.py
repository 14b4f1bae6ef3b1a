"""Check every kernel on a GPU at real sizes, and measure those that are right.

Needs torch, Triton with the C compiler it asks for, and this checkout; 40 GB of the GPU's memory,
and 9 GB of the host's, which the engine's own host pool pins. Every case is checked against its
reference at the sizes that are measured, and if it is right measured: the median of a replayed
graph, beside what torch alone does instead. "of limit" is the part of the bandwidth of a device
copy, or of the bus, both measured here too. Exit code 1 if a result is wrong or a case did not end;
goals are reported only. An access to memory that is not there fails all cases after it: name the
others in a run of their own.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.bench import Bench
    from benchmarks.gpu.case import Case, Figure

RESULTS = Path(__file__).parents[1] / "results" / "gpu.csv"
COLUMNS = ("case", "size", "ours us", "baseline", "baseline us", "ratio", "of limit", "goal", "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, measure, print, save."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/run.sh", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument("--dry", action="store_true", help="interpreted, tiny, nothing is measured")
    parser.add_argument("--csv", type=Path, metavar="FILE", help=f"default: {RESULTS.name}")
    parser.add_argument("--seconds", type=float, default=330, help="nothing starts later")
    chosen = parser.parse_args(arguments)
    if chosen.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
    started = time.monotonic()
    import torch

    from benchmarks.gpu.bench import DRY, REAL, Bench
    from benchmarks.gpu.cases import CASES
    from benchmarks.gpu.timing import Timer

    names = [case.name for case in CASES]
    for name in chosen.cases:
        if name not in names:
            parser.error(f"CASE={name}: must be one of {', '.join(names)}")
    if not chosen.dry and not torch.cuda.is_available():
        parser.error("no GPU here; --dry runs on a CPU")
    # Some images allow TF32, in which references and rounding bounds would not hold.
    torch.set_float32_matmul_precision("highest")
    device = torch.device("cpu" if chosen.dry else "cuda")
    bench = Bench(device, DRY if chosen.dry else REAL, Timer(chosen.dry))
    path = chosen.csv or (None if chosen.dry else RESULTS)
    _print_machine(bench)
    cases = [case for case in CASES if case.name in (chosen.cases or names)]
    right: list[Case] = []
    figures: list[Figure] = []
    failed = []

    def attempt(what: str, done: str, run: Callable[[], object]) -> None:
        # Whatever a case raises, the others are worth their turn on a machine that is lent.
        try:
            if time.monotonic() - started > chosen.seconds:
                raise TimeoutError(f"not started within {chosen.seconds:.0f} s")
            run()
            print(f"{done:<9} {what}", flush=True)
        except Exception as error:
            failed.append(what)
            reason = (str(error).strip() or "no message").splitlines()[0]
            print(f"FAILED    {what}: {type(error).__name__}: {reason}", flush=True)

    def check(case: Case) -> None:
        case.check(bench)
        right.append(case)

    def measure(case: Case) -> None:
        figures.extend(case.measure(bench))
        if path is not None:  # after every case: the machine may be taken away
            _save(figures, bench, path)

    for case in cases:
        attempt(case.name, "right", partial(check, case))
        if case in right:  # at once: a case that breaks the CUDA context takes no figure along
            attempt(case.name, "measured", partial(measure, case))
    _print_table(figures)
    if path is not None:
        print(f"saved {path}")
    print(f"{time.monotonic() - started:.0f} s, {len(failed)} failed", flush=True)
    bench.close()
    return 1 if failed else 0


def _print_machine(bench: Bench) -> None:
    if bench.timer.dry:
        print("dry: Triton's interpreter, tiny sizes, nothing is measured")
        return
    gb = [bandwidth / 1e9 for bandwidth in bench.timer.pcie_bandwidth]
    print(f"{_machine(bench)}; device copy {bench.timer.copy_bandwidth / 1e9:.0f} GB/s")
    print(f"PCIe {gb[0]:.1f} GB/s to the device, {gb[1]:.1f} to the host, {gb[2]:.1f} each way")


def _machine(bench: Bench) -> str:
    import torch

    if bench.timer.dry:
        return f"{platform.machine()}, dry"
    return torch.cuda.get_device_name(bench.device)


def _cells(figure: Figure) -> list[str]:
    def number(value: float | None, form: str) -> str:
        if value is None:
            return ""
        return "dry" if math.isnan(value) else format(value, form)

    ours, baseline = figure.ours_us, figure.baseline_us
    return [
        figure.case,
        figure.size,
        number(ours, ".1f"),
        figure.baseline,
        number(baseline, ".1f"),
        number(None if ours is None or baseline is None else ours / baseline, ".2f"),
        number(figure.share, ".0%"),
        figure.goal,
        "" if figure.met is None or math.isnan(ours or 0) else "met" if figure.met else "MISSED",
    ]


def _print_table(figures: list[Figure]) -> None:
    rows = [list(COLUMNS), *map(_cells, figures)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    print()
    for row in rows:
        line = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(line).rstrip())
    print()


def _save(figures: list[Figure], bench: Bench, path: Path) -> None:
    import torch
    import triton

    where = {
        "date": date.today().isoformat(),
        "machine": _machine(bench),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_gb_s": f"{bench.timer.copy_bandwidth / 1e9:.0f}",
    }
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*COLUMNS[:-1], "met", *where])
        for figure in figures:
            writer.writerow([*_cells(figure), *where.values()])


if __name__ == "__main__":
    sys.exit(main())
