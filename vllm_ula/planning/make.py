"""How calls are planned, by where the maps live and by the settings."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_ula.config import UlaConfig
from vllm_ula.errors import ConfigError
from vllm_ula.kernels import dispatch, tables
from vllm_ula.planner import BucketAge
from vllm_ula.planning.base import Planning, Scratch
from vllm_ula.planning.kernels import KernelPlanning, Marks
from vllm_ula.residency import Residency


def plans_with_kernels(device: torch.device) -> bool:
    """Whether map operations plan, on the device, or what is compiled for the CPU."""
    return device.type != "cpu" or dispatch.uses_triton(device)


def check_planner(config: UlaConfig, device: torch.device) -> None:
    """Raise ConfigError for a planner that does not run where the maps live."""
    if not plans_with_kernels(device):
        return
    if config.planner != "pb_lru":
        rule = "runs on a CPU alone; kernels plan with recency buckets"
        raise ConfigError("planner", config.planner, rule, "pb_lru")
    if config.recency_buckets > tables.MAX_BUCKETS:
        rule = f"kernels tell at most {tables.MAX_BUCKETS} buckets apart"
        raise ConfigError("recency_buckets", config.recency_buckets, rule, tables.MAX_BUCKETS)


def planning_maker(
    config: UlaConfig, num_device: int, num_host: int, device: torch.device
) -> Callable[[], Planning]:
    """Make the planning of one domain of a rank after the other.

    They share the memory that a call needs while it is planned. What is compiled for the CPU is
    compiled now, so that the first request does not pay.

    Args:
        config: settings of the engine.
        num_device: device rows D of each domain.
        num_host: host rows H.
        device: where the maps live.
    """
    if plans_with_kernels(device):
        return _with_kernels(config, num_device, num_host, device)
    return _compiled(config, num_device, num_host)


def _with_kernels(
    config: UlaConfig, num_device: int, num_host: int, device: torch.device
) -> Callable[[], Planning]:
    shared: list[Marks] = []

    def make() -> Planning:
        residency = Residency(num_device, num_host, device)
        if not shared:
            shared.append(Marks.of(residency))
        age = BucketAge(config.bucket_age)
        return KernelPlanning(residency, shared[0], config.recency_buckets, age)

    return make


def _compiled(config: UlaConfig, num_device: int, num_host: int) -> Callable[[], Planning]:
    from vllm_ula.planner.make import make_planner
    from vllm_ula.planning.compiled import CompiledPlanning, warm_up

    warm_up(make_planner(config, 64))
    shared: list[Scratch] = []

    def make() -> Planning:
        residency = Residency(num_device, num_host)
        if not shared:
            shared.append(Scratch.of(residency))
        return CompiledPlanning(residency, make_planner(config, num_device), shared[0])

    return make
