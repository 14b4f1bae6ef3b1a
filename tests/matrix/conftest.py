"""The environment of engines in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine.harness import environment


@pytest.fixture(scope="session", autouse=True)
def _environment() -> Iterator[None]:
    yield from environment()
