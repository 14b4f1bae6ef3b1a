"""Kernels in Triton's interpreter, against their torch references."""

import pytest
import torch
import triton


@pytest.fixture(scope="session", autouse=True)
def _interpreted() -> None:
    assert triton.knobs.runtime.interpret, "tests/conftest.py asks for it before Triton is imported"


@pytest.fixture
def random():
    """Reproducible normal numbers of a shape."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


@pytest.fixture
def poisoned():
    """What `torch.empty` gives holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
