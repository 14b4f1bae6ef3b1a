"""What a case is, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from benchmarks.gpu.bench import Bench


@dataclass(frozen=True)
class Figure:
    """One row of the table; NaN where nothing was measured.

    Attributes:
        case: its name.
        size: what was measured.
        ours_us: microseconds; None for a case that is a baseline itself.
        baseline: what `baseline_us` is of.
        baseline_us: microseconds; None without a baseline.
        share: of the physical limit, between 0 and 1; None where there is none.
        goal: in words.
        met: whether it was; None without a goal.
    """

    case: str
    size: str
    ours_us: float | None
    baseline: str = ""
    baseline_us: float | None = None
    share: float | None = None
    goal: str = ""
    met: bool | None = None


@dataclass(frozen=True)
class Case:
    """Something to check and then to measure.

    Attributes:
        name: unique.
        check: raises Mismatch where results are wrong, at the sizes that are measured.
        measure: runs only if the check passed.
    """

    name: str
    check: Callable[[Bench], None]
    measure: Callable[[Bench], Iterable[Figure]]


class Mismatch(Exception):
    """A result differs from its reference."""


def expect_equal(what: str, ours: Tensor, reference: Tensor) -> None:
    """Raise Mismatch unless both are the same, bit by bit."""
    if ours.shape != reference.shape or ours.dtype != reference.dtype:
        raise Mismatch(
            f"{what}: {tuple(ours.shape)} {ours.dtype}, its reference is"
            f" {tuple(reference.shape)} {reference.dtype}"
        )
    differ = ours != reference
    if differ.any():
        first = tuple(differ.nonzero()[0].tolist())
        raise Mismatch(
            f"{what}: {int(differ.sum())} of {ours.numel()} values differ, first at {first}:"
            f" {ours[first].item()}, its reference says {reference[first].item()}"
        )


def expect_close(what: str, ours: Tensor, reference: Tensor, bound: float) -> None:
    """Raise Mismatch unless both differ by at most `bound`; NaN is close to nothing."""
    # An infinity is close to itself, though their difference is NaN.
    far = (ours != reference) & ~((ours - reference).abs() <= bound)
    if far.any():
        first = tuple(far.nonzero()[0].tolist())
        raise Mismatch(
            f"{what}: {int(far.sum())} of {ours.numel()} values differ by more than {bound:.2g},"
            f" first at {first}: {ours[first].item()}, its reference says"
            f" {reference[first].item()}"
        )


def expect(condition: bool | Tensor, what: str) -> None:
    """Raise Mismatch unless it holds."""
    if not bool(condition):
        raise Mismatch(what)


def share(num_bytes: float, us: float, bandwidth: float) -> float:
    """Which part of a bandwidth in bytes a second it is to move so many in so many microseconds."""
    return num_bytes / us * 1e6 / bandwidth


def references(bench: Bench, requests: int) -> str:
    """The size of a call of so many requests."""
    return f"{requests} x {bench.sizes.topk:,}"
