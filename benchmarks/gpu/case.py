"""What a case is, and what it has at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.timing import Timer


@dataclass(frozen=True)
class Sizes:
    """How large a case is.

    Attributes:
        requests: that decode at once, one measurement each; divisors of `rows` and `slots`.
        topk: references of a request.
        missing: of them not on the device, in cases of the map.
        rows: device rows D.
        slots: logical slots N.
        width: bytes of a row.
        layers: of a domain.
    """

    requests: tuple[int, ...]
    topk: int
    missing: int
    rows: int
    slots: int
    width: int
    layers: int


# 13 % missing: what B = 4,096 hot rows a request miss (arXiv 2608.07009).
REAL = Sizes((64, 256), 2048, 266, 2**20, 2**22, 656, 4)
DRY = Sizes((2, 4), 32, 4, 512, 2048, 656, 4)


@dataclass(frozen=True)
class Bench:
    """The machine and the sizes: a GPU and the real ones, or a CPU and tiny ones."""

    device: torch.device
    sizes: Sizes
    timer: Timer

    def generator(self, seed: int) -> torch.Generator:
        """Reproducible numbers on the device."""
        return torch.Generator(self.device).manual_seed(seed)


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


def expect(condition: bool | Tensor, what: str) -> None:
    """Raise Mismatch unless it holds."""
    if not bool(condition):
        raise Mismatch(what)
