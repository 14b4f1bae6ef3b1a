"""Whether each patch fits this vLLM, and whether it is still needed."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_ula.doctor.check import Area, Check, Verdict


def check_seams() -> Iterator[Check]:
    """Apply each patch to vLLM as it is, and leave vLLM as it was."""
    from vllm.platforms import current_platform

    from vllm_ula.patches.registry import ALWAYS, ON_CPU

    patches = (*ALWAYS, *(ON_CPU if current_platform.is_cpu() else ()))
    for patch in patches:
        verdict, text = Verdict.FINE, "applies, needed"
        was_applied = False
        try:
            was_applied = patch.applied()
            patch.revert()
            if not patch.needed():
                verdict = Verdict.NOTE
                text = f"applies, expired: {patch.remove_when}; the patch may go"
            patch.apply()
            if not was_applied:
                patch.revert()
        except Exception as error:  # PatchError, or whatever a changed vLLM raises
            verdict, text = Verdict.PROBLEM, f"broken: {error or type(error).__name__}"
            text = f"{text}; without it {patch.why}"
        yield Check(Area.SEAMS, patch.name, verdict, " ".join(text.split()))
