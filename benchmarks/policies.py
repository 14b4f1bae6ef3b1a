"""Hit rates on one trace: PB-LRU against exact LRU, hash buckets, how buckets age, and rivals."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.arm import Arm
from benchmarks.figure import Figure, Progress
from vllm_ula.capacity import B300, H200, System
from vllm_ula.config import BUCKET_AGES, UlaConfig
from vllm_ula.replay.compare import Source, compare
from vllm_ula.replay.cost_model import B300_COST, H200_COST
from vllm_ula.replay.simulate import simulate

HASH_BUCKETS = (64, 128, 512, 1024)
WITHIN = 0.10  # points of hit rate, the paper's claim for PB-LRU
HASH_WITHIN = 1.2  # the technical breakdown's for hash buckets


def policies(directory: str, progress: Progress) -> list[Figure]:
    """A recorded and a synthetic trace; an eighth and a sixteenth of the rows on the device."""
    figures = []
    with tempfile.TemporaryDirectory() as scratch:
        recorded = _recorded(directory, Path(scratch))
        progress("policies, recording")
        for name, source in (("recorded", recorded), ("synthetic", Source.synthetic(4, 256))):
            for share in (8, 16):
                slots = max(source.header.logical_slots // share, source.header.topk)
                figures += _compared(f"{name}, 1/{share} on the device", source, slots)
                progress(f"policies, {name}")
    return figures


def simulated(directory: str, progress: Progress) -> list[Figure]:
    """Each system at matched budgets, DP; see vllm_ula/replay/simulate.py."""
    figures = []
    for machine, cost in ((H200, H200_COST), (B300, B300_COST)):
        for system in System:
            found = simulate(system, machine, cost)
            where = f"{machine.name}, {system.value}"
            figures += [
                Figure(
                    "simulated",
                    f"{where}: requests admitted (arithmetic), % served from the device (replay)",
                    f"{found.admitted}, {100 * found.device_share:.2f}",
                ),
                Figure(
                    "simulated",
                    f"{where}: ms of copies a step (cost model, not measured)",
                    f"{found.modelled.transfer_ms:.2f}",
                ),
            ]
            progress(f"simulated, {machine.name}")
    return figures


def _compared(name: str, source: Source, slots: int) -> list[Figure]:
    exact = _hit_rates(source, slots, "timestamp_lru")[0]
    figures = []
    for age in BUCKET_AGES:
        ours = _hit_rates(source, slots, "pb_lru", UlaConfig(bucket_age=age))[0]
        default = age == UlaConfig().bucket_age
        figures.append(
            Figure(
                "policies",
                f"{name}: hit %, pb_lru ageing by {age} | timestamp_lru",
                f"{ours:.2f}",
                f"{exact:.2f}",
                goal=f"within {WITHIN} below" if default else "",
                ok=not default or exact - ours <= WITHIN,
            )
        )
    for buckets in HASH_BUCKETS:
        if buckets * 4 > slots:
            continue
        ours, no_victim = _hit_rates(source, slots, "hash_lru", UlaConfig(hash_buckets=buckets))
        figures.append(
            Figure(
                "policies",
                f"{name}: hit %, hash_lru of {buckets} (no victim {no_victim:.0f}x) | exact",
                f"{ours:.2f}",
                f"{exact:.2f}",
                goal=f"claim of {HASH_WITHIN}: "
                + ("confirmed" if exact - ours <= HASH_WITHIN else "refuted"),
            )
        )
    for rival in ("sglang_hisparse", "vllm_hisparse", "belady"):
        rates = _hit_rates(source, slots, rival)
        if rates:
            figures.append(
                Figure(
                    "policies",
                    f"{name}: hit %, {rival} as many rows | exact shared LRU",
                    f"{rates[0]:.2f}",
                    f"{exact:.2f}",
                )
            )
    return figures


def _hit_rates(
    source: Source, slots: int, policy: str, settings: UlaConfig | None = None
) -> tuple[float, ...]:
    """Percent of the selected rows served from the device; how often a bucket had no victim."""
    results, _ = compare(source, (policy,), (slots,), settings)
    return tuple(value for r in results for value in (100 * r.total.hit_rate, float(r.no_victim)))


def _recorded(directory: str, scratch: Path) -> Source:
    """A trace of 12 requests of 1,200 tokens, 48 sampled for each, on the tiny model."""
    trace = scratch / "trace"
    arm = Arm(
        {
            "model": directory,
            "dtype": "float32",
            "ula": {"host_gib": 0.5, "device_slots": 2048, "record": str(trace)},
            "max_model_len": 2048,
            "max_num_seqs": 12,
            "max_num_batched_tokens": 2048,
        }
    )
    try:
        arm.run([[(i * j + j) % 256 for j in range(1200)] for i in range(12)], 48)
    finally:
        arm.close()
    return Source.of_trace(trace)
