"""Pictures of replays. Needs the extra: `pip install 'vllm-ula[plots]'`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ula.errors import UlaError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by the colour-blind; markers tell them apart in grey too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LABEL_GAP = 0.055  # of the height of the axes; text of 10 points needs 0.05


@dataclass(frozen=True)
class HitRate:
    """One point of `hit_rates`.

    Attributes:
        policy: name of its line.
        device_share: device rows in percent of the rows all requests have, > 0.
        hit_percent: selected rows served from the device without a copy, in percent.
    """

    policy: str
    device_share: float
    hit_percent: float


@dataclass(frozen=True)
class PlanTime:
    """One point of `plan_times`.

    Attributes:
        policy: name of its line.
        pool_rows: device rows, > 0.
        nanoseconds: of planning, per selected row, > 0.
    """

    policy: str
    pool_rows: int
    nanoseconds: float


def hit_rates(path: Path, points: Sequence[HitRate], title: str) -> None:
    """Write a PNG of hit rate against device share, one line per policy.

    Args:
        path: where to; folders are made.
        points: in any order.
        title: what was replayed.

    Raises:
        UlaError: matplotlib is missing, or there are no points.
    """
    figure, axes = _axes(points, title)
    for name in _names(points):
        mine = sorted((p.device_share, p.hit_percent) for p in points if p.policy == name)
        _line(axes, name, mine)
    axes.set_xscale("log")
    shares = sorted({p.device_share for p in points})
    axes.set_xticks(shares, [f"{share:.3g}" for share in shares])
    axes.minorticks_off()
    axes.set_xlabel("device rows, % of all rows of the running requests")
    axes.set_ylabel("selected rows served from the device, %")
    axes.set_ylim(top=100.5)
    _label(axes)
    _save(figure, path)


def plan_times(path: Path, points: Sequence[PlanTime], title: str) -> None:
    """Write a PNG of plan time against pool size, both logarithmic, one line per policy.

    Args:
        path: where to; folders are made.
        points: in any order.
        title: on what, with which selections.

    Raises:
        UlaError: matplotlib is missing, or there are no points.
    """
    figure, axes = _axes(points, title)
    for name in _names(points):
        mine = sorted((p.pool_rows, p.nanoseconds) for p in points if p.policy == name)
        _line(axes, name, mine)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("device rows of the pool")
    axes.set_ylabel("plan time per selected row, ns")
    _label(axes)
    _save(figure, path)


def _axes(points: Sequence[object], title: str) -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UlaError("plots need matplotlib: pip install 'vllm-ula[plots]'") from None
    if not points:
        raise UlaError(f"nothing to draw for {title!r}: there are no points")
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _names(points: Iterable[HitRate] | Iterable[PlanTime]) -> list[str]:
    """Policies in order of first appearance."""
    return list(dict.fromkeys(point.policy for point in points))


def _line(axes: Axes, name: str, points: Sequence[tuple[float, float]]) -> None:
    number = len(axes.lines)
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        color=_COLOURS[number % len(_COLOURS)],
        marker=_MARKERS[number % len(_MARKERS)],
        markersize=5,
        label=name,
    )


def _label(axes: Axes) -> None:
    """Write each name at the right of its line, apart from each other."""
    lines: list[Any] = list(axes.lines)
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [to_axes.transform((line.get_xdata()[-1], line.get_ydata()[-1])) for line in lines]
    heights = [min(max(float(end[1]), 0.0), 1.0) for end in ends]
    order = sorted(range(len(lines)), key=lambda i: heights[i])
    # Neighbours that overlap give way by the same amount, until none does.
    for _ in range(200):
        for below, above in pairwise(order):
            overlap = heights[below] + _LABEL_GAP - heights[above]
            if overlap > 0:
                heights[below] -= overlap / 2
                heights[above] += overlap / 2
    for i, line in enumerate(lines):
        axes.annotate(
            line.get_label(),
            (line.get_xdata()[-1], line.get_ydata()[-1]),
            xytext=(1.03, heights[i]),
            textcoords="axes fraction",
            color=line.get_color(),
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": line.get_color(),
                "linewidth": 0.6,
                "relpos": (0, 0.5),
            },
        )


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})  # no version, no address
