"""Every operation with what belongs to it, found by looking: nothing here names an operation."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_ula.kernels import dispatch
from vllm_ula.kernels.variant import Variant

FOLDER = Path(__file__).parent
REFERENCES = "vllm_ula.kernels.reference"
# A checkout has tests beside the folder that vllm_ula mounts; an installation has none.
TESTS = FOLDER.resolve().parent / "tests" / "kernels"


@dataclass(frozen=True)
class Operation:
    """An operation of `dispatch`.

    Attributes:
        name: as it is called.
        file: name of its file, of its reference's and, after `test_`, of its tests'.
        tests: its tests; None in an installation, which has none.
        variants: of its file, which other operations may share.
    """

    name: str
    file: str
    tests: Path | None
    variants: tuple[Variant, ...]


def operations() -> list[Operation]:
    """Every operation, by name.

    Raises:
        ImportError: the file of an operation cannot be imported.
    """
    return [
        Operation(
            name,
            file=(file := reference.__module__.rpartition(".")[2]),
            tests=TESTS / f"test_{file}.py" if TESTS.is_dir() else None,
            variants=variants(file),
        )
        for name, reference in sorted(dispatch.references.items())
    ]


def files() -> list[str]:
    """Every module of the folder that brings variants, operation or not."""
    names = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__main__")
    return [name for name in names if variants(name)]


def variants(file: str) -> tuple[Variant, ...]:
    """What a GPU compiles of a file; nothing if the file does not say."""
    found: tuple[Variant, ...] = getattr(_module(file), "VARIANTS", ())
    return found


def complaints() -> list[str]:
    """What is missing or does not fit together, a line each."""
    found = []
    for operation in operations():
        reference = dispatch.references[operation.name]
        where = f"{operation.name} ({operation.file}.py)"
        if reference.__module__ != f"{REFERENCES}.{operation.file}":
            found.append(f"{where}: its reference is not in kernels/reference")
        launcher = getattr(_module(operation.file), reference.__name__, None)
        if launcher is None:
            found.append(f"{where}: has no launcher")
        elif difference := _difference(reference, launcher):
            found.append(f"{where}: {difference}")
        if operation.tests is not None and not operation.tests.is_file():
            found.append(f"{where}: has no tests/kernels/{operation.tests.name}")
        if not operation.variants:
            found.append(f"{where}: has no VARIANTS")
    owned = {operation.file for operation in operations()}
    found += [f"{file}.py: VARIANTS of no operation" for file in files() if file not in owned]
    return found


def _difference(reference: Callable[..., object], launcher: Callable[..., object]) -> str:
    wanted, given = inspect.signature(reference), inspect.signature(launcher)
    return "" if wanted == given else f"takes {given}, its reference {wanted}"


def _module(file: str) -> object:
    return importlib.import_module(f"vllm_ula.kernels.{file}")
