"""Every system under DP and TP attention: what it holds, admits, and what keeps it from more."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from vllm_ula.capacity import GIB, Held, Limit, Parallel, System, TokenBytes, bounds, fit
from vllm_ula.errors import ConfigError
from vllm_ula.plan.question import Question

MORE_HOST_GIB, MORE_DEVICE_GIB = 32, 8


class Status(Enum):
    """What a figure is about."""

    RULES = "by the published rules of that system"
    SERVED = "served by this version; see its README for the limits"
    NOT_SERVED = "not served by this version"
    NO_SELECTION = "does not apply: the model selects nothing, every token reads every row"


@dataclass(frozen=True)
class Cell:
    """One system under one layout.

    Attributes:
        system: whose rules.
        parallel: DP or TP attention.
        status: what the figure is about.
        held: rows of all ranks; None where nothing can be held.
        limit: what keeps it from admitting more.
        admitted: requests at once by tokens of a request.
        raised_by: what would admit more.
    """

    system: System
    parallel: Parallel
    status: Status
    held: Held | None
    limit: str
    admitted: dict[int, int]
    raised_by: tuple[str, ...]


def cell(question: Question, system: System, parallel: Parallel) -> Cell:
    """Ask one system."""
    if not question.applies(system):
        return Cell(system, parallel, Status.NO_SELECTION, None, "does not apply", {}, ())
    status = Status.RULES
    if system is System.ULACACHE:
        status = Status.SERVED if parallel is Parallel.DP else Status.NOT_SERVED
    fitting = {n: question.admits(system, parallel, n) for n in question.lengths.all}
    rows: Held | None = None
    with suppress(ConfigError):
        if question.machine.device_bytes(parallel):
            rows = question.holds(system, parallel)
    binding = limit(question, system, parallel)
    raised_by = _raised_by(question, system, parallel)
    return Cell(system, parallel, status, rows, binding, fitting, raised_by)


def limit(question: Question, system: System, parallel: Parallel) -> str:
    """What keeps a system from admitting more requests of the mean length."""
    machine, model, rank = question.machine, question.model, question.rank
    if not machine.device_bytes(parallel):
        return "device memory: there is none for KV"
    if system is System.ULACACHE:
        assert rank is not None
        device, host = machine.device_bytes(parallel), machine.host_bytes
        try:
            if parallel is Parallel.DP:
                return rank.capacity(machine).limit.value
            token = TokenBytes(model.rows, model.index_keys)
            return fit(token, device, host, 1, rank.min_device).limit.value
        except ConfigError as error:
            return f"device memory: {error}"
    found = bounds(system, parallel, machine, model, question.lengths.mean, question.hot_rows)
    return min(found, key=lambda bound: found[bound]).value


def _raised_by(question: Question, system: System, parallel: Parallel) -> tuple[str, ...]:
    if not question.machine.device_bytes(parallel):
        return ("GPUs whose memory the weights do not fill",)
    length = question.lengths.mean
    now = question.admits(system, parallel, length)
    lines = []
    if system is not System.DEVICE_ONLY:
        more = question.with_more(host_gib=MORE_HOST_GIB).admits(system, parallel, length)
        lines.append(f"+{MORE_HOST_GIB} GiB host a GPU: {_gain(more - now)}")
    more = question.with_more(device_gib=MORE_DEVICE_GIB).admits(system, parallel, length)
    lines.append(f"+{MORE_DEVICE_GIB} GiB device a GPU: {_gain(more - now)}")
    if system is System.ULACACHE and parallel is Parallel.DP and now:
        assert question.rank is not None
        found = question.rank.capacity(question.machine)
        if found.limit is Limit.INDEX_KEYS:
            needed = found.device_bytes_for_all_host(question.rank.min_device) / GIB
            lines.append(f"all host memory is of use from {needed:,.1f} GiB device a GPU")
    return tuple(lines)


def _gain(requests: int) -> str:
    if requests <= 0:
        return "no request more"
    return f"+{requests:,} request{'s' if requests > 1 else ''}"
