"""Whether each patch fits this vLLM, and whether it is still needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_ula.doctor.check import Area, Check, Verdict

if TYPE_CHECKING:
    from vllm_ula.patches.record import Patch


def check_seams() -> Iterator[Check]:
    """Apply each patch alone to vLLM as it is, and leave vLLM as it was."""
    from vllm.platforms import current_platform

    from vllm_ula.patches.registry import ALWAYS, ON_CPU

    patches = (*ALWAYS, *(ON_CPU if current_platform.is_cpu() else ()))
    # All of them: whether one is needed may show where another has changed vLLM.
    applied = [patch for patch in patches if _is_applied(patch)]
    for patch in reversed(applied):
        patch.revert()
    try:
        for patch in patches:
            yield _check(patch)
    finally:
        for patch in applied:
            patch.apply()


def _is_applied(patch: Patch) -> bool:
    try:
        return patch.applied()
    except Exception:  # its target is gone, which `_check` reports
        return False


def _check(patch: Patch) -> Check:
    verdict, text = Verdict.FINE, "applies, needed"
    try:
        if not patch.needed():
            verdict = Verdict.NOTE
            text = f"applies, expired: {patch.remove_when}; the patch may go"
        patch.apply()
        patch.revert()
    except Exception as error:  # PatchError, or whatever a changed vLLM raises
        verdict, text = Verdict.PROBLEM, f"broken: {error or type(error).__name__}"
        text = f"{text}; without it {patch.why}"
    return Check(Area.SEAMS, patch.name, verdict, " ".join(text.split()))
