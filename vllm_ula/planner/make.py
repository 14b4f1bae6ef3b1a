"""Planners by their setting; importing this loads numba."""

from __future__ import annotations

from vllm_ula.config import UlaConfig
from vllm_ula.planner.base import BucketAge
from vllm_ula.planner.hash_lru import HashLru
from vllm_ula.planner.pb_lru import PbLru
from vllm_ula.planner.stamps import StampPlanner
from vllm_ula.planner.timestamp_lru import TimestampLru


def make_planner(config: UlaConfig, num_device: int) -> StampPlanner:
    """The planner of one domain with `num_device` device rows."""
    match config.planner:
        case "pb_lru":
            return PbLru(num_device, config.recency_buckets, BucketAge(config.bucket_age))
        case "hash_lru":
            return HashLru(num_device, config.hash_buckets)
        case _:
            return TimestampLru(num_device)
