"""An operation has a reference, a launcher like it, tests, and variants to compile."""

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from vllm_ula.kernels import dispatch, inventory
from vllm_ula.kernels.translate import VARIANTS


def test_nothing_is_missing():
    assert inventory.complaints() == []
    assert [operation.name for operation in inventory.operations()] == sorted(dispatch.references)


def double(rows: Tensor, by: int = 2) -> Tensor:
    return rows * by


def double_by_another_name(rows: Tensor, factor: int = 2) -> Tensor:
    return rows * factor


@pytest.fixture
def invented(monkeypatch, tmp_path):
    """An operation in whose kernel file stands what is asked for."""

    def invent(reference=double, tests=True, **kernel_file):
        module = ModuleType("vllm_ula.kernels.double")
        vars(module).update(kernel_file)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        if reference is not None:
            monkeypatch.setattr(reference, "__module__", "vllm_ula.kernels.reference.double")
            monkeypatch.setitem(dispatch.references, "double", reference)
        for operation in inventory.operations():
            (tmp_path / f"test_{operation.file}.py").touch()
        if not tests:
            (tmp_path / "test_double.py").unlink()
        monkeypatch.setattr(inventory, "TESTS", tmp_path)
        return inventory.complaints()

    return invent


def test_control_a_whole_operation_is_accepted(invented):
    assert invented(double=double, VARIANTS=VARIANTS) == []


def test_control_an_operation_without_launcher(invented):
    assert invented(VARIANTS=VARIANTS) == ["double (double.py): has no launcher"]


def test_control_a_launcher_with_another_signature(invented):
    (complaint,) = invented(double=double_by_another_name, VARIANTS=VARIANTS)
    assert complaint.startswith("double (double.py): takes (rows: ")
    assert "factor" in complaint


def test_control_an_operation_without_variants(invented):
    assert invented(double=double) == ["double (double.py): has no VARIANTS"]


def test_control_an_operation_without_tests(invented):
    (complaint,) = invented(tests=False, double=double, VARIANTS=VARIANTS)
    assert complaint == "double (double.py): has no tests/kernels/test_double.py"


def test_control_an_operation_whose_reference_lives_elsewhere(invented, monkeypatch):
    monkeypatch.setitem(dispatch.references, "arange", torch.arange)
    monkeypatch.setitem(sys.modules, "vllm_ula.kernels.torch", ModuleType("torch"))
    assert any("its reference is not in kernels/reference" in line for line in invented(None))


def test_control_variants_of_no_operation(invented, monkeypatch, tmp_path):
    folder = tmp_path / "kernels"
    folder.mkdir()
    for name in ("double", "translate"):
        (folder / f"{name}.py").touch()
    monkeypatch.setattr(inventory, "FOLDER", folder)
    assert invented(None, VARIANTS=VARIANTS) == ["double.py: VARIANTS of no operation"]
