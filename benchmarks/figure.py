"""One line of the benchmarks' table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        case: the case's name.
        what: what was measured, with its unit.
        value: with UlaCache, of the first named, or a ratio.
        baseline: without it, or of the second named, in the same run; empty for a ratio.
        goal: what it should be; empty where it is only reported.
        ok: whether the goal was met.
    """

    case: str
    what: str
    value: str
    baseline: str = ""
    goal: str = ""
    ok: bool = True
