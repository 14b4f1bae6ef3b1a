"""Simulated serving: each system at matched budgets, with synthetic selections. DP attention.

    budgets -> admitted requests, device rows of a rank     arithmetic, `vllm_ula/capacity`
            -> hit rate, rows copied a step                 replay, a sample of one rank
            -> milliseconds                                 a cost model, nothing measured

All requests have L tokens at the end. A rank is replayed at a smaller scale: `Effort.requests` of
its R requests in that share of its device rows, and one domain for all, since selections of
different domains do not differ in this model. Hit rates of vLLM HiSparse and of UlaCache still
rise while a request generates, so requests are replayed whole: 2,048 outputs, of which the first
256 fill the pools and are not counted. On 8xH200, 16 requests in the sample instead of 8 change
hit rates by less than 0.1 points; 4 instead of 8 those of vLLM HiSparse by 1 point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_ula.capacity import (
    B300,
    GLM_5_3,
    H200,
    PAGE,
    Machine,
    Model,
    Parallel,
    System,
    admitted,
    device_rows,
)
from vllm_ula.errors import ConfigError
from vllm_ula.planner.pb_lru import PbLru
from vllm_ula.replay.cost_model import B300_COST, H200_COST, CostModel, ModelledStep, step
from vllm_ula.replay.policy import Policy, Served, replay
from vllm_ula.replay.serving import ServingPolicy
from vllm_ula.replay.sglang_hisparse import SglangHiSparse
from vllm_ula.replay.synthetic import Statistics
from vllm_ula.replay.vllm_hisparse import VllmHisparse
from vllm_ula.replay.workload import Workload, generate

TOKENS = 90_145

# Makes the policy of a shared pool from logical slots, device slots and block size.
SharedPool = Callable[[int, int, int], Policy]


def pb_lru(logical_slots: int, device_slots: int, block_size: int) -> Policy:
    """The planner UlaCache serves with."""
    return ServingPolicy(PbLru(device_slots), logical_slots, block_size)


@dataclass(frozen=True)
class Effort:
    """How much is replayed.

    Attributes:
        requests: of one rank, at most.
        outputs: tokens of each request.
        warm_up: of those, steps served before counting starts.
    """

    requests: int = 8
    outputs: int = 2048
    warm_up: int = 256


@dataclass(frozen=True)
class Simulated:
    """One system on one machine.

    Attributes:
        system: whose rules.
        machine: its name.
        admitted: requests of all ranks at once that fit, by arithmetic.
        requests: of one rank that the rest is about.
        device_rows: of one rank and layer.
        served: counts of the replayed sample after the warm-up.
        steps: request-steps counted in `served`.
        modelled: one decode step of one rank with all `requests`, by the cost model.
    """

    system: System
    machine: str
    admitted: int
    requests: int
    device_rows: int
    served: Served
    steps: int
    modelled: ModelledStep

    @property
    def device_share(self) -> float:
        """Share of the selected rows served from the device without a copy."""
        return self.served.hit_rate


def simulate(
    system: System,
    machine: Machine,
    cost: CostModel,
    requests: int | None = None,
    model: Model = GLM_5_3,
    hot_rows: int = 4096,
    statistics: Statistics | None = None,
    effort: Effort | None = None,
    shared_pool: SharedPool = pb_lru,
) -> Simulated:
    """Replay a sample of one rank.

    Args:
        system: whose rules.
        machine: budgets.
        cost: rates for the modelled milliseconds.
        requests: of one rank; None takes as many as it admits.
        model: bytes of a token.
        hot_rows: B of the HiSparse systems.
        statistics: of the selections; None takes the fitted ones.
        effort: how much is replayed; None takes the defaults.
        shared_pool: UlaCache's policy.

    Raises:
        ConfigError: the rank does not admit that many requests.
    """
    effort, statistics = effort or Effort(), statistics or Statistics()
    fitting = admitted(system, Parallel.DP, machine, model, TOKENS, hot_rows)
    of_rank = fitting // machine.ranks
    requests = of_rank if requests is None else requests
    if not 1 <= requests <= of_rank:
        rule = f"{system.value} admits {of_rank} requests of {TOKENS} tokens a rank"
        raise ConfigError("requests", requests, rule, f"1..{of_rank}")
    rows = device_rows(system, machine, model, TOKENS, requests, hot_rows)
    sample = min(effort.requests, requests)
    workload = Workload(
        requests=sample,
        concurrent=sample,
        min_prompt=TOKENS - effort.outputs,
        max_prompt=TOKENS - effort.outputs,
        outputs=effort.outputs,
        block_size=PAGE,
    )
    policy = _policy(system, workload, rows * sample // requests, hot_rows, shared_pool)
    # The prompts of the sample are the first calls.
    served = replay([policy], generate(workload, statistics), skip_calls=sample + effort.warm_up)
    steps = sample * (effort.outputs - effort.warm_up)
    scale = requests / steps * model.rows
    modelled = step(
        cost,
        fetched_bytes=served.fetched * scale,
        written_back_bytes=served.written_back * scale,
        row_bytes=served.selected * scale,
        index_key_bytes=requests * TOKENS * model.index_keys,
    )
    return Simulated(system, machine.name, fitting, requests, rows, served, steps, modelled)


def table(results: list[Simulated]) -> str:
    """Rows of text: arithmetic, replay and model under headings of their own."""
    lines = [
        "                          arithmetic                   replay                 model, ms",
        "machine system            admitted   a rank   rows     hits %  fetched/step   "
        "copies   rows   keys",
    ]
    for r in results:
        lines.append(
            f"{r.machine:<7} {r.system.value:<16} {r.admitted:>9} {r.requests:>8} "
            f"{r.device_rows:>8,} {100 * r.device_share:>8.2f} {r.served.fetched / r.steps:>12.1f} "
            f"{r.modelled.transfer_ms:>10.2f} {r.modelled.rows_ms:>6.2f} "
            f"{r.modelled.index_keys_ms:>6.2f}"
        )
    return "\n".join(lines)


def _policy(
    system: System, workload: Workload, rows: int, hot_rows: int, shared_pool: SharedPool
) -> Policy:
    match system:
        case System.SGLANG_HISPARSE:
            return SglangHiSparse(hot_rows)
        case System.VLLM_HISPARSE:
            return VllmHisparse(rows, hot_rows, PAGE)
        case System.ULACACHE | System.DEVICE_ONLY:
            slots = workload.logical_slots
            # Without a host pool every row has a device row, the null block's too.
            device = slots if system is System.DEVICE_ONLY else min(rows, slots)
            return shared_pool(slots, device, PAGE)


def main() -> None:
    """Print every system on 8xH200 and 8xB300, full, and UlaCache as loaded as HiSparse."""
    results = []
    for machine, cost in ((H200, H200_COST), (B300, B300_COST)):
        results += [simulate(system, machine, cost) for system in System]
        rival = admitted(System.SGLANG_HISPARSE, Parallel.DP, machine, GLM_5_3, TOKENS)
        requests = rival // machine.ranks
        results.append(simulate(System.ULACACHE, machine, cost, requests))
    print(table(results))


if __name__ == "__main__":
    main()
