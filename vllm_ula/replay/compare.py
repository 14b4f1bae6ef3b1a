"""Every policy on one trace: what `vllm-ula replay` prints, saves and draws.

The trace is read once. All policies, each with every size of the device pool, are told its events
in turn; Belady's optimum alone has to read the trace before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from vllm_ula.config import PLANNERS, UlaConfig
from vllm_ula.errors import ConfigError
from vllm_ula.planner.make import make_planner
from vllm_ula.planning.compiled import warm_up
from vllm_ula.replay.belady import Belady
from vllm_ula.replay.policy import Policy, Served, feed
from vllm_ula.replay.serving import ServingPolicy
from vllm_ula.replay.sglang_hisparse import SglangHiSparse
from vllm_ula.replay.synthetic import Statistics
from vllm_ula.replay.vllm_hisparse import VllmHisparse
from vllm_ula.replay.workload import Workload, generate, header
from vllm_ula.traces.events import Event, Header, TracedCall
from vllm_ula.traces.reader import open_trace

RIVALS = ("sglang_hisparse", "vllm_hisparse", "belady")
POLICIES = (*PLANNERS, *RIVALS)


@dataclass(frozen=True)
class Source:
    """A trace, from a file or generated.

    Attributes:
        header: of which engine.
        events: starts a new iteration over its events.
        peak: sequences that run at once, at most.
        num_rows: rows of the file, for the progress bar; 0 where nobody knows.
    """

    header: Header
    events: Callable[[], Iterable[Event]]
    peak: int
    num_rows: int = 0

    @classmethod
    def of_trace(cls, path: str | Path) -> Source:
        """A trace on disk.

        Raises:
            TraceError: it cannot be read.
        """
        trace = open_trace(path)
        return cls(trace.header, trace.events, trace.peak_sequences(), trace.num_rows)

    @classmethod
    def synthetic(cls, requests: int, outputs: int) -> Source:
        """Requests that run at once, an eighth of their rows on the device; tokens of each."""
        workload, statistics = Workload(requests, requests, outputs=outputs), Statistics()
        top = header(workload, statistics, workload.logical_slots // 8)
        return cls(top, lambda: generate(workload, statistics), requests)


@dataclass
class Result:
    """One policy with one size of the device pool.

    Attributes:
        policy: its name.
        device_slots: device rows of a domain.
        served: by domain.
        plan_seconds: of every call, of the policies that serve.
        references: selected rows of each of these calls, repetitions included.
        no_victim: hash buckets that had no victim.
    """

    policy: str
    device_slots: int
    served: list[Served]
    plan_seconds: list[float] = field(default_factory=list)
    references: list[int] = field(default_factory=list)
    no_victim: int = 0

    @property
    def total(self) -> Served:
        """Of all domains."""
        return sum(self.served, Served())

    def moved_bytes(self, header: Header) -> tuple[int, int]:
        """Bytes fetched and written back."""
        pairs = list(zip(self.served, header.row_bytes, strict=True))
        return (
            sum(served.fetched * row for served, row in pairs),
            sum(served.written_back * row for served, row in pairs),
        )

    def plan_us(self) -> tuple[float, float, float] | None:
        """Microseconds of a call that plans, p20, p50 and p80; None if nothing was timed."""
        if not self.plan_seconds:
            return None
        p20, p50, p80 = np.percentile(self.plan_seconds, [20, 50, 80]) * 1e6
        return float(p20), float(p50), float(p80)

    def ns_per_reference(self) -> float | None:
        """Nanoseconds of planning for each selected row, repetitions included: the median call."""
        if not self.references:
            return None
        return float(np.median(np.divide(self.plan_seconds, self.references))) * 1e9


def compare(
    source: Source,
    policies: Sequence[str],
    device_slots: Sequence[int],
    planner_settings: UlaConfig | None = None,
    skip_calls: int = 0,
) -> tuple[list[Result], int]:
    """Replay a trace.

    Args:
        source: the trace.
        policies: names, of POLICIES.
        device_slots: sizes of the device pool, of each domain.
        planner_settings: buckets and how they age.
        skip_calls: forward calls served before counting starts.

    Returns:
        A result for each policy and size that can serve at all, and the longest request.

    Raises:
        ConfigError: a policy is unknown, or a size is none of the trace.
    """
    top = source.header
    for name in policies:
        if name not in POLICIES:
            raise ConfigError("policy", name, f"must be one of {', '.join(POLICIES)}", PLANNERS[0])
    for slots in device_slots:
        if not top.topk <= slots <= top.logical_slots:
            rule = f"must be whole numbers {top.topk} (top-k)..{top.logical_slots} (logical)"
            raise ConfigError("device_slots", slots, rule, top.device_slots)
    settings = planner_settings or UlaConfig()
    results, played = [], []
    for name in policies:
        for slots in device_slots:
            of_domains = _make(name, slots, source, settings)
            if of_domains is not None:
                results.append(Result(name, slots, [Served()] * len(top.domains)))
                played.append(of_domains)
    if not results:
        rule = f"serves none of these sizes: a request's share of the pool is below {top.topk}"
        raise ConfigError("policy", ",".join(policies), rule, "more device slots, or pb_lru")
    longest = 0
    with tqdm(total=source.num_rows or None, unit=" rows", disable=None) as bar:
        for event in source.events():
            counted = isinstance(event, TracedCall) and event.call >= skip_calls
            for result, of_domains in zip(results, played, strict=True):
                served = feed(of_domains, event)
                if counted and isinstance(event, TracedCall):
                    result.served[event.domain] += served
            if isinstance(event, TracedCall):
                longest = max(longest, int(event.positions.max()) + 1)
                bar.update(len(event.seqs))
            else:
                bar.update()
    for result, of_domains in zip(results, played, strict=True):
        _collect(result, of_domains)
    return results, longest


def _make(name: str, slots: int, source: Source, settings: UlaConfig) -> list[Policy] | None:
    """A policy for every domain; None if the pool is too small for its rules."""
    top, quota = source.header, slots // max(source.peak, 1)
    domains = range(len(top.domains))
    if name in PLANNERS:
        config = replace(settings, planner=name)
        warm_up(make_planner(config, 64))
        return [
            ServingPolicy(make_planner(config, slots), top.logical_slots, top.block_size)
            for _ in domains
        ]
    if name == "belady":
        return [Belady(source.events(), domain, slots) for domain in domains]
    # HiSparse gives every request its own rows: at most the pool's share of each.
    if quota < top.topk:
        return None
    if name == "sglang_hisparse":
        return [SglangHiSparse(quota) for _ in domains]
    hot_rows = min(2 * top.topk, quota)
    return [VllmHisparse(slots, hot_rows, top.block_size) for _ in domains]


def _collect(result: Result, policies: Sequence[Policy]) -> None:
    for policy in policies:
        if isinstance(policy, ServingPolicy):
            timed = [
                (s, r) for s, r in zip(policy.plan_seconds, policy.references, strict=True) if r
            ]
            result.plan_seconds += [seconds for seconds, _ in timed]
            result.references += [references for _, references in timed]
            result.no_victim += getattr(policy.planning.planner, "no_victim", 0)
