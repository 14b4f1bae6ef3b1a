"""The picture: where the rows were while all requests ran."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.demo_client import Sample
from examples.demo_sizes import NUM_REQUESTS, Sizes

DEVICE, HOST, RUNNING = "#1f77b4", "#f2a65a", "#333333"


def save(path: Path, sizes: Sizes, samples: Sequence[Sample]) -> None:
    """Write a PNG of live rows per tier and of running requests over time."""
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    figure.suptitle(
        f"UlaCache: live KV rows while {NUM_REQUESTS} requests of {sizes.request_tokens:,} tokens "
        f"run over a device pool of {sizes.device_slots:,} rows"
    )
    _draw_rows(upper, sizes, samples)
    _draw_running(lower, samples)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})  # no version, no address


def _draw_rows(axes: Axes, sizes: Sizes, samples: Sequence[Sample]) -> None:
    axes.stackplot(
        [s.seconds for s in samples],
        [s.device_live for s in samples],
        [s.host_live for s in samples],
        colors=[DEVICE, HOST],
        labels=["live device rows", "live host rows"],
    )
    _draw_line(axes, sizes.history, f"history: {sizes.history:,} tokens", above=True)
    _draw_line(axes, sizes.device_slots, f"device pool: {sizes.device_slots:,} rows", above=False)
    axes.set_ylabel("live rows per layer (a row is a token)")
    axes.set_ylim(0, sizes.history * 1.12)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0.86))


def _draw_line(axes: Axes, value: int, text: str, above: bool) -> None:
    """A dashed line; its text stands above it, or in the filled area below it."""
    axes.axhline(value, color="black", linestyle="--", linewidth=1)
    axes.annotate(
        text,
        (0.01 if above else 0.99, value),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4 if above else -5),
        textcoords="offset points",
        ha="left" if above else "right",
        va="bottom" if above else "top",
        color="black" if above else "white",
    )


def _draw_running(axes: Axes, samples: Sequence[Sample]) -> None:
    axes.step(
        [s.seconds for s in samples], [s.running for s in samples], where="post", color=RUNNING
    )
    axes.set_ylabel("requests running")
    axes.set_xlabel("seconds since the first request was sent")
    axes.set_ylim(0, NUM_REQUESTS * 1.15)
    first = next((s.seconds for s in samples if s.running), 0.0)
    axes.set_xlim(max(first - 1, 0), samples[-1].seconds)
    axes.grid(alpha=0.3)
