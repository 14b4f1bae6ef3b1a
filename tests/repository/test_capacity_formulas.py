"""Bytes become slots in `capacity/` alone: whoever divides a budget elsewhere may disagree."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "vllm_ula"
HOME = "capacity"
# What is divided, and what it is divided by: names of variables and attributes.
BUDGETS = {
    "available_memory",
    "device_bytes",
    "device_gib",
    "dp_device_bytes",
    "host_bytes",
    "host_gib",
    "kv_bytes",
    "memory_bytes",
    "tp_device_bytes",
}
PRICES = {
    "block_bytes",
    "index_key_bytes",
    "index_keys",
    "per_device_row",
    "per_logical",
    "row_bytes",
    "token_bytes",
}


def names(node: ast.AST) -> set[str]:
    """Variables, attributes and functions an expression names."""
    found = set()
    for part in ast.walk(node):
        match part:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                found.add(name)
    return found


def formulas(source: str) -> Iterator[int]:
    """Lines that divide a budget, divide by the bytes of a token, or take from a budget."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.BinOp(left, ast.FloorDiv() | ast.Div() | ast.Mod(), right):
                if (names(left) & BUDGETS and not is_unit(right)) or names(right) & PRICES:
                    yield node.lineno
            case ast.BinOp(ast.Name() | ast.Attribute() as left, ast.Sub(), _):
                if names(left) & BUDGETS:
                    yield node.lineno
            case ast.Call(func=ast.Name(id="divmod"), args=[left, right]):
                if names(left) & BUDGETS or names(right) & PRICES:
                    yield node.lineno


def is_unit(node: ast.AST) -> bool:
    """Whether dividing by it only changes the unit."""
    return isinstance(node, ast.Constant) or names(node) <= {"GIB", "GB", "MIB"}


def strangers(package: Path) -> list[str]:
    found = []
    for folder, _, files in os.walk(package, followlinks=True):
        for file in files:
            path = (Path(folder) / file).relative_to(package)
            if path.suffix == ".py" and path.parts[0] != HOME:
                source = (package / path).read_text()
                found += [f"{path}:{line}" for line in formulas(source)]
    return sorted(found)


def test_no_capacity_formula_stands_outside_capacity():
    assert strangers(PACKAGE) == []


def test_control_those_inside_are_found():
    found = [path.name for path in (PACKAGE / HOME).glob("*.py") if [*formulas(path.read_text())]]
    assert set(found) >= {"rank.py", "admission.py", "held.py"}


@pytest.mark.parametrize(
    "source",
    [
        "slots = (device_bytes + host_bytes) // (k + i)",
        "slots = machine.host_bytes // model.rows",
        "left = self.device_bytes - k * rows",
        "rows = free // token.per_device_row",
        "requests = memory / (spec.row_bytes * length)",
        "rows, rest = divmod(host_gib * 2**30, k)",
    ],
)
def test_control_a_formula_elsewhere_is_found(tmp_path, source):
    (tmp_path / "capacity").mkdir()
    (tmp_path / "capacity" / "rank.py").write_text(source)
    assert strangers(tmp_path) == []
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "budget.py").write_text(f"def f():\n    {source}")
    assert strangers(tmp_path) == ["plan/budget.py:2"]


@pytest.mark.parametrize(
    "source", ["gib = host_bytes / GIB", "gb = device_bytes / 1e9", "total = ranks * host_bytes"]
)
def test_control_a_change_of_unit_is_none(source):
    assert [*formulas(source)] == []
