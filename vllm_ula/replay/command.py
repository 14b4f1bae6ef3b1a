"""`vllm-ula replay`: policies compared on a trace, as a table, a CSV file and two pictures."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from vllm_ula.capacity import Machine, Model, Parallel, System, admitted
from vllm_ula.config import UlaConfig
from vllm_ula.errors import ConfigError
from vllm_ula.replay.compare import Result, Source, compare
from vllm_ula.replay.plots import HitRate, PlanTime, hit_rates, plan_times
from vllm_ula.traces.events import Header

SYNTHETIC = "synthetic"
COLUMNS = (
    "policy",
    "device rows",
    "% of rows",
    "hit %",
    "fetched rows",
    "written back",
    "fetched MB",
    "back MB",
    "plan us p20",
    "p50",
    "p80",
    "ns / reference",
    "no victim",
)


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        trace: directory of a trace, or "synthetic".
        policies: names.
        device_slots: sizes of the device pool; none takes a quarter, a half and all of the
            trace's own.
        device_gib: of a byte budget, for admission; None asks nothing.
        host_gib: of that budget.
        out: directory for the table and the pictures.
        planner: buckets and how they age.
        requests: of a synthetic trace.
        outputs: tokens of each of them.
    """

    trace: str
    policies: tuple[str, ...]
    device_slots: tuple[int, ...]
    device_gib: float | None
    host_gib: float
    out: Path
    planner: UlaConfig
    requests: int = 4
    outputs: int = 512


def run(options: Options) -> None:
    """Replay, print, save, draw.

    Raises:
        TraceError: the trace cannot be read.
        ConfigError: an option breaks a rule.
    """
    source = _source(options)
    sizes = options.device_slots or _sizes(source.header)
    results, longest = compare(source, options.policies, sizes, options.planner)
    top = source.header
    print(
        f"{top.model}: {top.logical_slots:,} logical slots, {len(top.domains)} domains, top-k "
        f"{top.topk}, at most {source.peak} requests of up to {longest:,} tokens at once"
    )
    rows = [_row(result, top) for result in results]
    for row in (COLUMNS, *(_printed(row) for row in rows)):
        print("".join(f"{cell:>15}" if i else f"{cell:<16}" for i, cell in enumerate(row)))
    missing = [p for p in options.policies if p not in {result.policy for result in results}]
    if missing:
        print(f"no row for {', '.join(missing)}: a request's share of the pool is below top-k")
    if options.device_gib is not None:
        _print_admitted(options, top, longest)
    _save(options.out, rows, results, top)


def _source(options: Options) -> Source:
    if options.trace != SYNTHETIC:
        return Source.of_trace(options.trace)
    for key in ("requests", "outputs"):
        if getattr(options, key) < 1:
            raise ConfigError(key, getattr(options, key), "must be a whole number > 0", 4)
    return Source.synthetic(options.requests, options.outputs)


def _sizes(top: Header) -> tuple[int, ...]:
    wanted = (top.device_slots // 4, top.device_slots // 2, top.device_slots)
    return tuple(size for size in wanted if size >= top.topk)


def _row(result: Result, top: Header) -> tuple[str | float | None, ...]:
    total = result.total
    fetched, written_back = result.moved_bytes(top)
    return (
        result.policy,
        result.device_slots,
        100 * result.device_slots / top.logical_slots,
        100 * total.hit_rate,
        total.fetched,
        total.written_back,
        fetched / 1e6,
        written_back / 1e6,
        *(result.plan_us() or (None, None, None)),
        result.ns_per_reference(),
        result.no_victim if result.policy == "hash_lru" else None,
    )


def _printed(row: tuple[str | float | None, ...]) -> list[str]:
    return [_cell(value) for value in row]


def _cell(value: str | float | None) -> str:
    match value:
        case None:
            return "-"
        case str():
            return value
        case int():
            return f"{value:,}"
        case _:
            return f"{value:,.2f}"


def _print_admitted(options: Options, top: Header, length: int) -> None:
    assert options.device_gib is not None
    device, host = int(options.device_gib * 2**30), int(options.host_gib * 2**30)
    machine = Machine("budget", 1, device, device, host)
    layers = tuple(map(len, top.domains))
    model = Model(top.model, layers, sum(top.row_bytes) // sum(layers), top.index_key_bytes)
    print(
        f"requests of {length:,} tokens admitted with {options.device_gib:g} GiB of device and "
        f"{options.host_gib:g} GiB of host memory (arithmetic, no replay):"
    )
    for system in System:
        fits = admitted(system, Parallel.DP, machine, model, length, 2 * top.topk)
        print(f"  {system.value:<16}{fits:>8}")


def _save(
    out: Path, rows: Sequence[tuple[object, ...]], results: list[Result], top: Header
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with (out / "replay.csv").open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    print(f"saved {out / 'replay.csv'}")
    if find_spec("matplotlib") is None:
        print("no pictures without matplotlib: pip install 'vllm-ula[plots]'")
        return
    share = 100 / top.logical_slots
    points = [HitRate(r.policy, r.device_slots * share, 100 * r.total.hit_rate) for r in results]
    times = [
        PlanTime(r.policy, r.device_slots, ns) for r in results if (ns := r.ns_per_reference())
    ]
    hit_rates(out / "hit_rate.png", points, f"Replay of {top.model}")
    print(f"saved {out / 'hit_rate.png'}")
    if times:
        plan_times(out / "plan_time.png", times, f"Replay of {top.model}")
        print(f"saved {out / 'plan_time.png'}")
