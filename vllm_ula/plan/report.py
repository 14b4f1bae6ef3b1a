"""The plan as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from vllm_ula.capacity import GIB, Parallel, System
from vllm_ula.plan.cells import Cell, Status
from vllm_ula.plan.planned import Plan

NAMES = {
    System.DEVICE_ONLY: "device only",
    System.SGLANG_HISPARSE: "SGLang HiSparse",
    System.VLLM_HISPARSE: "vLLM HiSparse",
    System.ULACACHE: "UlaCache",
}
_WIDTH = 110


def report(plan: Plan) -> str:
    """Everything, for a terminal 110 columns wide."""
    parts = (_head, _engine, _admitted, _rows, _limits, _roofline, _assumptions)
    lines = [line for part in parts for line in (*part(plan), "")]
    return "\n".join(lines).rstrip()


def _head(plan: Plan) -> Iterator[str]:
    machine, model, lengths = plan.question.machine, plan.question.model, plan.question.lengths
    rows, keys = model.rows, model.index_keys
    yield f"{plan.config.name} on {machine.name}, {plan.parallel.value.upper()} attention"
    yield (
        f"  a token      {rows + keys:,} bytes = {rows:,} of rows ({sum(model.domain_layers)} "
        f"layers, {plan.tokens.row_type}) + {keys:,} of index keys ({plan.tokens.indexer_layers})"
    )
    device = machine.device_bytes(plan.parallel)
    yield (
        f"  each GPU     {device:,} bytes ({device / GIB:,.1f} GiB) of device memory for KV, "
        f"{machine.host_bytes:,} ({machine.host_bytes / GIB:,.1f} GiB) of host memory"
    )
    if lengths.shortest < lengths.longest:
        yield (
            f"  a request    {lengths.shortest:,} to {lengths.longest:,} tokens, {lengths.mean:,} "
            "on average, prompt and output"
        )
    else:
        yield f"  a request    {lengths.mean:,} tokens, prompt and output"


def _engine(plan: Plan) -> Iterator[str]:
    rank, found = plan.question.rank, plan.capacity
    if rank is None:
        yield (
            f"UlaCache and HiSparse do not apply: {plan.config.name} selects nothing. Sparse "
            "attention over GQA rows"
        )
        yield f"is {Status.NOT_SERVED.value}."
        return
    yield "UlaCache on each GPU under DP, as its start-up line will say"
    if found is None:
        yield f"  refuses to start: {plan.refused}"
        return
    yield (
        f"  {found.logical_slots:,} logical slots = {found.device_slots:,} device rows + "
        f"{found.host_slots:,} host rows (unique = physical rows, replicas 0)"
    )
    yield (
        f"  index keys {_gb(found.index_key_bytes)}, maps {_gb(found.map_bytes)}, host pool "
        f"{_gb(found.used_host_bytes)} of {_gb(found.host_bytes)}"
    )
    yield f"  limited by {found.limit.value}"
    step = plan.step
    if step is not None:
        verdict = "all promoted" if step.fits else "what does not fit is read in place"
        yield (
            f"  decode steps of {step.requests:,} requests want at most {step.wanted_rows:,} "
            f"device rows of {step.device_rows:,} ({rank.min_device:,} is the least): {verdict}"
        )


def _admitted(plan: Plan) -> Iterator[str]:
    lengths = plan.question.lengths.all
    columns = "".join(f"{f'{length:,}':>10}" for length in lengths)
    yield "Requests at once, by tokens of a request"
    yield f"  {'':<18}{'DP':>{10 * len(lengths)}}    {'TP':>{10 * len(lengths)}}"
    yield f"  {'':<18}{columns}    {columns}"
    for system in System:
        layouts = [_of(plan, system, parallel) for parallel in Parallel]
        if layouts[0].status is Status.NO_SELECTION:
            yield f"  {NAMES[system]:<18}does not apply"
            continue
        figures = [
            "".join(f"{found.admitted[length]:>10,}" for length in lengths) for found in layouts
        ]
        mark = " *" if layouts[1].status is Status.NOT_SERVED else ""
        yield f"  {NAMES[system]:<18}{figures[0]}    {figures[1]}{mark}"
    if plan.question.rank is not None:
        yield f"  * {Status.NOT_SERVED.value}: formulas alone, without maps and whole blocks"
    yield "  More requests at once are capacity. Nothing here says how fast they run."


def _rows(plan: Plan) -> Iterator[str]:
    yield f"Rows of all GPUs under {plan.parallel.value.upper()}, in millions, and where bytes go"
    yield (
        f"  {'':<18}{'logical':>9}{'device':>9}{'host':>9}{'unique':>9}"
        f"{'| unique':>12}{'replicas':>11}{'index keys':>12}{'buffers, maps':>15}"
    )
    for found in plan.of(plan.parallel):
        held = found.held
        if held is None:
            yield f"  {NAMES[found.system]:<18}{found.limit}"
            continue
        kept = held.kept_bytes(plan.question.model)
        slots = (held.logical_slots, held.device_slots, held.host_slots)
        yield (
            f"  {NAMES[found.system]:<18}"
            + "".join(f"{count / 1e6:>9,.2f}" for count in slots)
            + f"{100 * held.unique_share:>8.1f}%"
            + f"{_gb(kept.unique):>12}{_gb(kept.replicas):>11}"
            + f"{_gb(kept.index_keys):>12}{_gb(kept.buffers):>15}"
        )


def _limits(plan: Plan) -> Iterator[str]:
    yield (
        f"What keeps them from more under {plan.parallel.value.upper()}, and what raises it at "
        f"{plan.question.lengths.mean:,} tokens"
    )
    for found in plan.of(plan.parallel):
        text = "; ".join((found.limit, *found.raised_by))
        yield from textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=f"  {NAMES[found.system]:<18}",
            subsequent_indent=" " * 20,
        )


def _roofline(plan: Plan) -> Iterator[str]:
    layout = plan.parallel.value.upper()
    length = plan.question.lengths.mean
    yield (
        f"Roofline of KV: one token of a request of {length:,} under {layout}, "
        + (
            f"{100 * plan.hit_rate:.1f} % of selected rows on the device"
            if plan.tokens.is_sparse
            else "which reads every row"
        )
    )
    yield f"  {'':<8}{'HBM':>22}{'NVLink, each way':>22}{'PCIe, each way':>22}   bound by"
    for roof in plan.roofs:
        micros = roof.micros
        moved = (roof.hbm_bytes, roof.nvlink_bytes, roof.host_bytes_moved)
        cells = [
            f"{count / 1e6:,.1f} MB, {micro:,.1f} us" if count else "-"
            for count, micro in zip(moved, micros.values(), strict=True)
        ]
        bound = roof.bound if any(micros.values()) else "nothing"
        yield f"  {roof.card.name:<8}" + "".join(f"{c:>22}" for c in cells) + f"   {bound}"
    yield "  KV alone: weights, activations and other requests are left out. Nothing is measured."
    if plan.parallel is Parallel.TP and plan.tokens.is_sparse:
        yield f"  TP of UlaCache, with no hit in a local buffer: {Status.NOT_SERVED.value}"


def _assumptions(plan: Plan) -> Iterator[str]:
    if plan.assumptions:
        yield "Assumed, because it was not given"
    width = max(len(taken.name) for taken in plan.assumptions) if plan.assumptions else 0
    for taken in plan.assumptions:
        yield from textwrap.wrap(
            f"{taken.value}: {taken.why}",
            _WIDTH,
            initial_indent=f"  {taken.name:<{width}}  ",
            subsequent_indent=" " * (width + 4),
        )
    if width:
        yield ""
    yield from textwrap.wrap(f"The model: {plan.config.source}", _WIDTH, subsequent_indent="  ")


def _of(plan: Plan, system: System, parallel: Parallel) -> Cell:
    return next(
        found for found in plan.cells if found.system is system and found.parallel is parallel
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"
