"""The plan as a picture. Needs the extra: `pip install 'vllm-ula[plots]'`."""

from __future__ import annotations

import textwrap
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ula.capacity import GIB, System
from vllm_ula.errors import UlaError
from vllm_ula.plan.cells import Status, limit
from vllm_ula.plan.context import Lengths
from vllm_ula.plan.planned import Plan
from vllm_ula.plan.report import NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, told apart by the colour-blind; styles tell lines apart in grey too.
_COLOURS = dict(zip(System, ("#000000", "#E69F00", "#009E73", "#0072B2"), strict=True))
_STYLES = dict(zip(System, ("-", "--", ":", "-"), strict=True))
_KINDS = {
    "unique rows": "#0072B2",
    "replicas": "#D55E00",
    "index keys": "#999999",
    "copies of host rows, maps": "#F0C98A",
    "not used": "#EFEFEF",
}
_SHORTEST, _POINTS_PER_OCTAVE = 8192, 8
_BAR = 0.56  # of the distance of two
_LABELLED_SHARE = 0.055  # of the widest bar: narrower parts have no room for their figure


def draw(path: Path, plan: Plan) -> None:
    """Write a PNG: requests at once against their length, and where the bytes go.

    Args:
        path: where to; folders are made.
        plan: what to draw.

    Raises:
        UlaError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UlaError("--plot needs matplotlib: pip install 'vllm-ula[plots]'") from None
    machine = plan.question.machine
    device = machine.device_bytes(plan.parallel) / GIB
    figure = Figure(figsize=(14, 8.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.12, 1])
    figure.suptitle(
        f"{plan.config.name} on {machine.name}, {plan.parallel.value.upper()} attention: "
        f"{device:,.1f} GiB of device and {machine.host_bytes / GIB:,.1f} GiB of host memory "
        "for KV on each GPU",
        fontsize=13,
    )
    _requests(left, plan)
    _bytes(right, plan)
    taken = "; ".join(f"{a.name} {a.value}" for a in plan.assumptions)
    text = f"Arithmetic, nothing measured: capacity, not speed. Assumed: {taken}."
    figure.supxlabel("\n".join(textwrap.wrap(text, 200)), fontsize=8, color="#444444")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})  # no version, no address


def _requests(axes: Axes, plan: Plan) -> None:
    lengths = _lengths(plan)
    highest = 1
    for found in plan.of(plan.parallel):
        if found.status is Status.NO_SELECTION:
            axes.plot([], [], linestyle="", label=f"{NAMES[found.system]}: does not apply")
            continue
        counts = [plan.question.admits(found.system, plan.parallel, n) for n in lengths]
        shown = [(n, count) for n, count in zip(lengths, counts, strict=True) if count]
        highest = max(highest, *counts)
        note = f", {found.status.value}" if found.status is Status.NOT_SERVED else ""
        axes.plot(
            [n for n, _ in shown],
            [count for _, count in shown],
            color=_COLOURS[found.system],
            linestyle="-." if note else _STYLES[found.system],
            linewidth=2.6 if found.system is System.ULACACHE else 1.8,
            label=f"{NAMES[found.system]}{note}\n{_limits(plan, found.system, lengths)}",
        )
    _counts_at_mean(axes, plan)
    asked = plan.question.lengths
    axes.axvspan(asked.shortest, asked.longest, color="#0072B2", alpha=0.08, linewidth=0)
    axes.axvline(asked.mean, color="#0072B2", alpha=0.5, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.8, top=highest * 2)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    ticks = [2**e for e in range(13, lengths[-1].bit_length())]
    axes.set_xticks(ticks, [f"{n // 1024}k" if n < 2**20 else "1M" for n in ticks])
    axes.set_xlabel("tokens of a request, prompt and output (shaded: asked for; line: the mean)")
    axes.set_ylabel("requests at once, all GPUs")
    axes.set_title("Requests at once, and what limits them", loc="left")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.1), ncols=2, fontsize=9, frameon=False)


def _counts_at_mean(axes: Axes, plan: Plan) -> None:
    """Write how many requests of the mean length each line admits, right and left of it in turn."""
    mean = plan.question.lengths.mean
    counts = {f.admitted[mean]: f.system for f in plan.of(plan.parallel) if f.admitted}
    for place, count in enumerate(sorted(filter(None, counts), reverse=True)):
        below, system = place % 2 == 1, counts[count]
        axes.plot([mean], [count], marker="o", markersize=5, color=_COLOURS[system])
        axes.annotate(
            f"{count:,}",
            (mean, count),
            xytext=(-6, -5) if below else (6, 5),
            textcoords="offset points",
            ha="right" if below else "left",
            va="top" if below else "bottom",
            color=_COLOURS[system],
            fontweight="bold",
        )


def _lengths(plan: Plan) -> list[int]:
    """From 8k to what the model takes, and beyond what was asked for."""
    most = int(plan.config.fields.get("max_position_embeddings") or 0)
    most = max(most, plan.question.lengths.longest, 2 * _SHORTEST)
    steps = range((most // _SHORTEST).bit_length() * _POINTS_PER_OCTAVE)
    found = [round(_SHORTEST * 2 ** (step / _POINTS_PER_OCTAVE)) for step in steps]
    return [*(n for n in found if n < most), most]


def _limits(plan: Plan, system: System, lengths: list[int]) -> str:
    """What limits a system at which lengths."""
    changes: list[tuple[int, str]] = []
    for n in lengths:
        question = replace(plan.question, lengths=Lengths(n, n, n))
        binding = limit(question, system, plan.parallel)
        if not changes or changes[-1][1] != binding:
            changes.append((n, binding))
    first, *others = (binding for _, binding in changes)
    texts = [first]
    texts += [
        f"from {n:,} tokens: {text}" for (n, _), text in zip(changes[1:], others, strict=True)
    ]
    return "\n".join(f"   {line}" for text in texts for line in textwrap.wrap(text, 44))


def _bytes(axes: Axes, plan: Plan) -> None:
    machine = plan.question.machine
    budget = machine.ranks * (machine.device_bytes(plan.parallel) + machine.host_bytes)
    cells = [found for found in plan.of(plan.parallel) if found.held]
    names = [
        NAMES[found.system] + ("\nnot served" if found.status is Status.NOT_SERVED else "")
        for found in cells
    ]
    starts = [0.0] * len(cells)
    parts = []
    for found in cells:
        assert found.held is not None
        kept = astuple(found.held.kept_bytes(plan.question.model))
        parts.append([*kept, max(budget - sum(kept), 0)])
    for kind, (name, colour) in enumerate(_KINDS.items()):
        widths = [part[kind] / 1e9 for part in parts]
        bars = axes.barh(names, widths, left=starts, color=colour, label=name, height=_BAR)
        text = "white" if kind < 2 else "black"
        fitting = [
            f"{width:,.0f}" if width > _LABELLED_SHARE * budget / 1e9 else "" for width in widths
        ]
        axes.bar_label(bars, fitting, label_type="center", color=text, fontsize=9)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for row, found in enumerate(cells):
        assert found.held is not None
        tokens, share = found.held.logical_slots, found.held.unique_share
        axes.annotate(
            f"{tokens / 1e6:,.1f} M tokens; unique share of rows {100 * share:.1f} %",
            (0, row - _BAR / 2),
            xytext=(2, 4),
            textcoords="offset points",
            fontsize=9,
        )
    axes.set_ylim(max(len(cells), len(System)) - 0.5, -0.5)
    axes.set_xlabel("GB of device and host memory, all GPUs")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title("Where the bytes go", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.1), ncols=3, fontsize=9, frameon=False)
