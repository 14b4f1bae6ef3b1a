"""Counters, histograms and gauges of a rank, through vLLM's connector hooks.

Rows are rows of a domain: a row of a layer that shares its map with others counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from typing_extensions import override
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from vllm_ula.records import Counts
from vllm_ula.step import Domain

COUNTERS = {
    "selected": ("vllm:ula_selected_rows", "Rows selected, distinct per domain and call."),
    "hits": ("vllm:ula_device_hits", "Selected rows of decode tokens that were on the device."),
    "fetched": ("vllm:ula_fetched_rows", "Selected rows fetched from the host."),
    "written_back": ("vllm:ula_written_back_rows", "Live rows moved to the host."),
    "fetched_bytes": ("vllm:ula_fetched_bytes", "Bytes moved to the device."),
    "written_back_bytes": ("vllm:ula_written_back_bytes", "Bytes moved to the host."),
    "exchanges": ("vllm:ula_exchanges", "Forward calls of a domain that moved rows."),
}
IN_PLACE = ("vllm:ula_read_in_place_rows", "Selected rows read where they live.")
HISTOGRAMS = {
    "plan_seconds": ("vllm:ula_plan_seconds", "Time to plan a forward call of a domain."),
    "transfer_seconds": ("vllm:ula_transfer_seconds", "Time to move the rows of an exchange."),
}
ROWS = ("vllm:ula_rows", "Rows per tier and state, the mean over domains.")
LOGICAL_SLOTS = ("vllm:ula_logical_slots", "Logical slots, the null block included.")
LEASES = ("vllm:ula_leases", "Draft tokens being verified; 0 at rest.")
SECONDS_BUCKETS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)

_TIERS_AND_STATES = [(tier, state) for tier in ("device", "host") for state in ("live", "dead")]


@dataclass
class UlaStats(KVConnectorStats):
    """One interval of a rank as plain numbers: counts add up, gauges keep the latest value."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    @classmethod
    def collect(cls, domains: Sequence[Domain], num_leases: int, with_rows: bool) -> UlaStats:
        """Take what the domains counted since the last call.

        Args:
            domains: of the rank.
            num_leases: draft tokens of the last step.
            with_rows: count live and dead rows too, which looks at every slot.
        """
        stats = cls()
        data = stats.data
        data["leases"] = num_leases
        for domain in domains:
            domain.count()
            for field in fields(Counts):
                data[field.name] += getattr(domain.counts, field.name)
            domain.counts = Counts()
            for name in HISTOGRAMS:
                data[name].extend(getattr(domain, name))
                getattr(domain, name).clear()
        if not with_rows:
            return stats
        states = [domain.residency.states() for domain in domains]
        data["rows"] = {
            f"{tier}_{state}": sum(getattr(s, f"{tier}_{state}") for s in states) / len(states)
            for tier, state in _TIERS_AND_STATES
        }
        data["logical_slots"] = domains[0].residency.num_logical
        return stats

    @override
    def reset(self) -> None:
        """Forget everything."""
        self.data = {field.name: 0 for field in fields(Counts)}
        self.data.update({name: [] for name in HISTOGRAMS})
        self.data.update(rows={}, logical_slots=0, leases=0)

    @override
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add a later interval of the same rank."""
        for name in [field.name for field in fields(Counts)] + list(HISTOGRAMS):
            self.data[name] += other.data[name]
        self.data["leases"] = other.data["leases"]
        if other.data["rows"]:
            self.data["rows"] = other.data["rows"]
            self.data["logical_slots"] = other.data["logical_slots"]
        return self

    @override
    def reduce(self) -> dict[str, int | float]:
        """What vLLM's periodic log line shows."""
        data = self.data
        decided = data["hits"] + data["fetched"]
        line: dict[str, int | float] = {
            "ula selected rows": data["selected"],
            "ula device hit rate %": round(100 * data["hits"] / decided, 1) if decided else 0.0,
            "ula fetched rows": data["fetched"],
            "ula written back rows": data["written_back"],
            "ula read in place rows": data["in_place_device"] + data["in_place_host"],
        }
        for tier, state in _TIERS_AND_STATES[::2]:
            line[f"ula {state} {tier} rows"] = round(data["rows"].get(f"{tier}_{state}", 0))
        return line

    @override
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data["rows"] and not self.data["selected"]


class UlaPromMetrics(KVConnectorPromMetrics):
    """The Prometheus side of UlaStats."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        # vLLM types all three as any metric, of which not all take buckets.
        counter: Any = self._counter_cls
        gauge: Any = self._gauge_cls
        histogram: Any = self._histogram_cls
        self._counters = {
            name: self._per_engine(counter(*described, labelnames=labelnames))
            for name, described in COUNTERS.items()
        }
        in_place = counter(*IN_PLACE, labelnames=[*labelnames, "tier"])
        for tier in ("device", "host"):
            self._counters[f"in_place_{tier}"] = self._per_engine(in_place, tier)
        self._histograms = {
            name: self._per_engine(
                histogram(*described, buckets=SECONDS_BUCKETS, labelnames=labelnames)
            )
            for name, described in HISTOGRAMS.items()
        }
        rows = gauge(
            *ROWS, labelnames=[*labelnames, "tier", "state"], multiprocess_mode="mostrecent"
        )
        self._rows = {
            f"{tier}_{state}": self._per_engine(rows, tier, state)
            for tier, state in _TIERS_AND_STATES
        }
        self._logical_slots, self._leases = (
            self._per_engine(
                gauge(*described, labelnames=labelnames, multiprocess_mode="mostrecent")
            )
            for described in (LOGICAL_SLOTS, LEASES)
        )

    def _per_engine(self, metric: Any, *labels: str) -> Callable[[int], Any]:
        children = {
            engine: metric.labels(*values, *labels)
            for engine, values in self.per_engine_labelvalues.items()
        }
        return children.__getitem__

    @override
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval of one engine."""
        data = transfer_stats_data
        for name, counter in self._counters.items():
            counter(engine_idx).inc(data[name])
        for name, histogram in self._histograms.items():
            for seconds in data[name]:
                histogram(engine_idx).observe(seconds)
        self._leases(engine_idx).set(data["leases"])
        for name, rows in data["rows"].items():
            self._rows[name](engine_idx).set(rows)
        if data["rows"]:
            self._logical_slots(engine_idx).set(data["logical_slots"])
