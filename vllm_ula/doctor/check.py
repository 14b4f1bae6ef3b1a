"""What was looked at, and what was found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """How bad it is."""

    FINE = "ok"
    NOTE = "note"
    PROBLEM = "problem"


class Area(Enum):
    """What a check is about; its exit code when it is the first with a problem."""

    VERSIONS = 3
    SEAMS = 4
    MACHINE = 5
    MODEL = 6


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        area: what it is about.
        name: of what was looked at.
        verdict: how bad it is.
        text: what was found, and for a problem what to do.
    """

    area: Area
    name: str
    verdict: Verdict
    text: str


def exit_code(checks: list[Check]) -> int:
    """0, or the number of the first area with a problem."""
    problems = [check.area.value for check in checks if check.verdict is Verdict.PROBLEM]
    return min(problems, default=0)
