"""Each patch applies, reverts, refuses what it was not written for, and is still needed."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from vllm_ula.errors import PatchError
from vllm_ula.patches.record import Patch
from vllm_ula.patches.registry import ALWAYS, ON_CPU

PATCHES = (*ALWAYS, *ON_CPU)
NAMES = [patch.name for patch in PATCHES]


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    """vLLM as it is, and afterwards as it was."""
    applied = [patch for patch in PATCHES if patch.applied()]
    for patch in applied:
        patch.revert()
    yield
    for patch in PATCHES:
        patch.revert()
    for patch in applied:
        patch.apply()


@pytest.mark.parametrize("patch", PATCHES, ids=NAMES)
def test_applies_and_reverts(patch: Patch) -> None:
    owner = patch._owner()
    before = vars(owner).get(patch.attribute)
    assert not patch.applied()
    patch.apply()
    patch.apply()
    assert patch.applied()
    assert vars(owner)[patch.attribute] is not before
    patch.revert()
    patch.revert()
    assert not patch.applied()
    assert vars(owner).get(patch.attribute) is before


@pytest.mark.parametrize("patch", PATCHES, ids=NAMES)
def test_is_still_needed(patch: Patch) -> None:
    """When this fails, upstream has what the patch was for: see its `remove_when`."""
    assert patch.needed(), patch.remove_when


@pytest.mark.parametrize("patch", PATCHES, ids=NAMES)
def test_says_why(patch: Patch) -> None:
    assert patch.why
    assert patch.remove_when
    assert patch.versions.startswith(">=")


class TestRefusals:
    """A patch of a module made for the purpose."""

    @pytest.fixture
    def patch(self, monkeypatch: pytest.MonkeyPatch) -> Patch:
        module = types.ModuleType("upstream")
        exec("def function(a, b): return a + b", vars(module))
        monkeypatch.setitem(sys.modules, "upstream", module)

        def doubled(original: Callable[..., Any]) -> Callable[..., Any]:
            return lambda a, b: 2 * original(a, b)

        return Patch(
            target="upstream",
            attribute="function",
            defined_in="upstream",
            parameters=("a", "b"),
            replace=doubled,
            versions=">=0",
            why="-",
            remove_when="-",
            needed=lambda: True,
        )

    def test_replaces(self, patch: Patch) -> None:
        patch.apply()
        assert sys.modules["upstream"].function(1, 2) == 6
        patch.revert()
        assert sys.modules["upstream"].function(1, 2) == 3

    def test_a_missing_target(self, patch: Patch) -> None:
        for missing in (replace(patch, target="nowhere"), replace(patch, attribute="nothing")):
            with pytest.raises(PatchError, match="does not exist in this vLLM"):
                missing.apply()

    def test_a_changed_signature(self, patch: Patch) -> None:
        with pytest.raises(PatchError, match=r"takes \('a', 'b'\), expected \('a',\)"):
            replace(patch, parameters=("a",)).apply()

    def test_a_second_patcher(self, patch: Patch) -> None:
        sys.modules["upstream"].function = lambda a, b: 0
        with pytest.raises(PatchError, match="was replaced by"):
            patch.apply()
