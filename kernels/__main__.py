"""`python -m vllm_ula.kernels`: compile every kernel for GPUs that need not be there.

Exit code 1 if a kernel does not compile, one of every decode step spills registers, one that moves
rows has no 16-byte accesses, or something that belongs to an operation is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass

import triton

from vllm_ula.kernels import inventory
from vllm_ula.kernels.resources import TARGETS, Resources, resources
from vllm_ula.kernels.variant import Variant


@dataclass(frozen=True)
class Compiled:
    """One variant on one target: what it uses, or in one line why it does not compile."""

    file: str
    variant: Variant
    target: str
    used: Resources | None
    error: str

    @property
    def complaint(self) -> str:
        """What is wrong with it, or nothing."""
        if self.used is None:
            return self.error
        if self.variant.hot and self.used.spilled_bytes:
            return f"spills {self.used.spilled_bytes} bytes"
        if self.variant.wide_loads and not (self.used.wide_loads and self.used.wide_stores):
            return "no 16-byte loads or no 16-byte stores"
        return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print; exit code 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m vllm_ula.kernels", description=__doc__)
    parser.add_argument("--targets", default=",".join(TARGETS), help="default: %(default)s")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--markdown", action="store_true", help="print the tables of the README")
    chosen = parser.parse_args(arguments)
    targets = chosen.targets.split(",")
    if unknown := sorted({*targets} - {*TARGETS}):
        parser.error(f"--targets {unknown[0]}: must be of {', '.join(TARGETS)}")
    if triton.knobs.runtime.interpret:
        parser.exit(2, "TRITON_INTERPRET is set: kernels compile in a process without it\n")
    compiled = [
        _compile(file, variant, target)
        for file in inventory.files()
        for variant in inventory.variants(file)
        for target in targets
        if TARGETS[target].backend in variant.backends
    ]
    complaints = inventory.complaints()
    if chosen.json:
        print(json.dumps(_as_dict(compiled, complaints), indent=1))
    elif chosen.markdown:
        _print_markdown(compiled, targets)
    else:
        _print_text(compiled, targets)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints or any(c.complaint for c in compiled) else 0


def _compile(file: str, variant: Variant, target: str) -> Compiled:
    if sys.stderr.isatty():
        print(f"compiling {variant.name} for {target}", file=sys.stderr)
    try:
        return Compiled(file, variant, target, resources(variant, target), "")
    except Exception as error:  # the compiler's own, of many kinds
        # The last line has the reason, those before it the source.
        reason = (str(error).strip() or "no message").splitlines()[-1]
        return Compiled(file, variant, target, None, f"{type(error).__name__}: {reason}")


def _status(compiled: list[Compiled], file: str, target: str) -> str:
    wrong = [c for c in compiled if c.file == file and c.target == target and c.complaint]
    return "; ".join(f"{c.variant.name}: {c.complaint}" for c in wrong) or "ok"


def _as_dict(compiled: list[Compiled], complaints: list[str]) -> dict[str, object]:
    return {
        "triton": triton.__version__,
        "complaints": complaints,
        "operations": [
            {
                "name": operation.name,
                "file": f"kernels/{operation.file}.py",
                "reference": f"kernels/reference/{operation.file}.py",
                "tests": _tests(operation),
                "variants": [variant.name for variant in operation.variants],
            }
            for operation in inventory.operations()
        ],
        "variants": [
            {
                "name": c.variant.name,
                "file": f"kernels/{c.file}.py",
                "target": c.target,
                "hot": c.variant.hot,
                "moves_rows": c.variant.wide_loads,
                "used": c.used and asdict(c.used),
                "complaint": c.complaint,
            }
            for c in compiled
        ],
    }


def _tests(operation: inventory.Operation) -> str:
    if operation.tests is None:
        return "not in this installation"
    return f"tests/kernels/{operation.tests.name}"


def _print_text(compiled: list[Compiled], targets: list[str]) -> None:
    for operation in inventory.operations():
        print(f"{operation.name}")
        print(f"  kernel     kernels/{operation.file}.py")
        print(f"  reference  kernels/reference/{operation.file}.py")
        print(f"  tests      {_tests(operation)}")
        for target in targets:
            print(f"  {target:<10} {_status(compiled, operation.file, target)}")
    print(f"\n{'variant':<40} {'target':<7} registers   shared  spilled  16-byte loads, stores")
    for c in compiled:
        name = f"{c.variant.name:<40} {c.target:<7}"
        if c.used is None:
            print(f"{name} {c.error}")
            continue
        u = c.used
        print(
            f"{name} {u.registers:>9} {u.shared_bytes:>8} {u.spilled_bytes:>8}"
            f" {u.wide_loads:>13}, {u.wide_stores:>6}"
        )


def _print_markdown(compiled: list[Compiled], targets: list[str]) -> None:
    columns = " | ".join(targets)
    print(f"| operation | in the interpreter | {columns} | on a GPU |")
    print(f"|---|---|{'---|' * len(targets)}---|")
    for operation in inventory.operations():
        states = (_status(compiled, operation.file, target) for target in targets)
        cells = ["compiles" if state == "ok" else state for state in states]
        print(f"| `{operation.name}` | tested | {' | '.join(cells)} | not run |")
    print(f"\n| variant | {columns} |")
    print(f"|---|{'---|' * len(targets)}")
    rows: dict[str, dict[str, str]] = {}
    for c in compiled:
        used = c.error if c.used is None else " / ".join(map(str, astuple(c.used)))
        rows.setdefault(c.variant.name, {})[c.target] = used
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(row.get(target, '') for target in targets)} |")


if __name__ == "__main__":
    sys.exit(main())
