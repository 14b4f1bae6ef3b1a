"""The benchmark cases: each measures its baseline in the same run and checks results first."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from benchmarks.arm import Arm, Sample
from benchmarks.figure import Figure, Progress
from benchmarks.planner import planner
from benchmarks.policies import policies, simulated
from vllm_ula.capacity import GIB, Capacity, TokenBytes, fit, min_device_slots
from vllm_ula.map_bytes import map_bytes

LAYERS, BLOCK = 4, 16
TOKEN = TokenBytes.charged(  # the tiny model in float32, every layer a domain
    LAYERS * 576 * 4, LAYERS * 132, LAYERS, map_bytes("pb_lru", with_kernels=False)
)
MIB = 2**20


def decode_resident(directory: str, progress: Progress) -> list[Figure]:
    """Decode with every row on the device: what the map and the planner cost."""
    common = {"max_model_len": 1024, "max_num_batched_tokens": 2048}
    figures = []
    with _arms(directory, {}, {}, **common) as (on, off):
        for batch in (8, 4, 2, 1):
            prompts = _prompts([256] * batch)
            pairs = _pairs(on, off, prompts, 64, 5, progress, f"decode, batch {batch}")
            rates = [(_decode_rate(a), _decode_rate(b)) for a, b in pairs]
            ratio = statistics.median(a / b for a, b in rates)
            with_ula, without = (statistics.median(r[i] for r in rates) for i in (0, 1))
            gated = batch == 8
            figures.append(
                Figure(
                    "resident",
                    f"ms per output token, batch {batch}, all rows on the device",
                    f"{1000 * batch / with_ula:.2f}",
                    f"{1000 * batch / without:.2f}",
                )
            )
            share = statistics.median(a.plan_seconds / a.decode_seconds for a, _ in pairs)
            figures.append(
                Figure("resident", f"planning, % of the step, batch {batch}", f"{share:.1%}")
            )
            figures.append(
                Figure(
                    "resident",
                    f"tokens/s on / off, batch {batch} (median of {len(rates)} pairs)",
                    f"{ratio:.3f}",
                    goal=">= 0.95" if gated else "",
                    ok=not gated or ratio >= 0.95,
                )
            )
    return figures


def capacity(directory: str, progress: Progress) -> list[Figure]:
    """16 requests of 2,048 tokens in device bytes for 4, with three times as much on the host."""
    length, count = 2048, 16
    max_num_seqs = count
    blocks_off = 4 * length // BLOCK + 1
    device_bytes = blocks_off * BLOCK * (TOKEN.rows + TOKEN.index_keys)
    min_device = min_device_slots(128, max_num_seqs, BLOCK)
    expected = fit(TOKEN, device_bytes, 3 * device_bytes, BLOCK, min_device)
    settings = {"device_gib": device_bytes / GIB, "host_gib": 3 * device_bytes / GIB}
    common = {
        "max_model_len": length,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": 2048,
    }
    # The last token is sampled, not stored: no request outgrows the blocks of its prompt.
    prompts = _prompts([length - 15] * count)
    with _arms(directory, settings, {"num_gpu_blocks_override": blocks_off}, **common) as arms:
        pairs = _pairs(*arms, prompts, 15, 3, progress, "capacity")
    with_ula, without = pairs[0]
    fits = min(expected.usable_slots // length, count)
    rates = [(_rate(a), _rate(b)) for a, b in pairs]
    ratio = statistics.median(a / b for a, b in rates)
    rate_on, rate_off = (statistics.median(r[i] for r in rates) for i in (0, 1))
    preempted = with_ula.preempted
    return [
        Figure(
            "capacity",
            "requests of 2,048 tokens running at once, same device bytes",
            f"{with_ula.max_running}",
            f"{without.max_running}",
            goal=f"= floor(usable / L) = {fits}",
            ok=with_ula.max_running == fits,
        ),
        Figure("capacity", "preempted", f"{preempted}", f"{without.preempted}", "0", not preempted),
        Figure("capacity", "tokens/s, prompt and output", f"{rate_on:.0f}", f"{rate_off:.0f}"),
        Figure("capacity", f"ratio on / off (median of {len(rates)} pairs)", f"{ratio:.3f}"),
    ]


def memory(directory: str, progress: Progress) -> list[Figure]:
    """Resident memory against what was asked for, and the bytes of the map."""
    host_gib = 1.0
    common = {"max_model_len": 2048}
    rss = []
    plans: list[Capacity] = []
    for gib in (0.0, host_gib):
        arm = Arm(_arguments(directory, {"host_gib": gib, "device_gib": 0.25}, **common))
        rss.append(psutil.Process(arm.pid).memory_info().rss)
        arm.close()
        minimum = min_device_slots(128, 256, BLOCK)
        plans.append(fit(TOKEN, int(0.25 * GIB), int(gib * GIB), BLOCK, minimum))
        progress("memory")
    grown = rss[1] - rss[0]
    asked = plans[1].used_host_bytes + plans[1].map_bytes - plans[0].map_bytes
    allowed = 0.02 * asked + 32 * MIB
    per_slot = plans[1].map_bytes / plans[1].logical_slots
    row_share = per_slot / (TOKEN.rows + TOKEN.index_keys)
    return [
        Figure(
            "memory",
            "resident set grows by, MiB (asked: host pool and maps)",
            f"{grown / MIB:.0f}",
            f"{asked / MIB:.0f}",
            goal="within 2 % + 32 MiB",
            ok=abs(grown - asked) <= allowed,
        ),
        Figure(
            "memory",
            "bytes of map per logical slot, all 4 domains (share of the rows it describes)",
            f"{per_slot:.1f} ({row_share:.2%})",
        ),
    ]


CASES: dict[str, Callable[[str, Progress], list[Figure]]] = {
    "resident": decode_resident,
    "capacity": capacity,
    "memory": memory,
    "planner": planner,
    "policies": policies,
    "simulated": simulated,
}


def _arguments(directory: str, ula: dict[str, Any] | None, **common: Any) -> dict[str, Any]:
    return {
        "model": directory,
        "dtype": "float32",
        "enable_prefix_caching": False,
        "ula": ula,
        **common,
    }


@contextmanager
def _arms(
    directory: str, ula: dict[str, Any], off: dict[str, Any], **common: Any
) -> Iterator[tuple[Arm, Arm]]:
    """An engine with UlaCache and one without, both started."""
    engine_on = Arm(_arguments(directory, ula, **common))
    try:
        engine_off = Arm(_arguments(directory, None, **common, **off))
        try:
            yield engine_on, engine_off
        finally:
            engine_off.close()
    finally:
        engine_on.close()


def _pairs(
    on: Arm,
    off: Arm,
    prompts: list[list[int]],
    max_tokens: int,
    num: int,
    progress: Progress,
    what: str,
) -> list[tuple[Sample, Sample]]:
    """Interleaved pairs; first a warm-up whose tokens must agree, or no figure is taken."""
    few = prompts[:3]
    if on.run(few, max_tokens).tokens != off.run(few, max_tokens).tokens:
        raise RuntimeError(f"{what}: tokens with UlaCache differ from those without")
    progress(what)
    pairs = []
    for i in range(num):
        first, second = (on, off) if i % 2 == 0 else (off, on)
        a, b = first.run(prompts, max_tokens), second.run(prompts, max_tokens)
        pairs.append((a, b) if i % 2 == 0 else (b, a))
        progress(what)
    return pairs


def _prompts(lengths: list[int]) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


def _decode_rate(sample: Sample) -> float:
    return sample.decode_tokens / sample.decode_seconds


def _rate(sample: Sample) -> float:
    """Prompt and output tokens per second; every prompt here has the same length."""
    return sum(2033 + len(tokens) for tokens in sample.tokens) / sample.seconds
