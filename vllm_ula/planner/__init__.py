"""Planners: who gives up a device row when a host row is wanted."""

from vllm_ula.planner.base import Planner
from vllm_ula.planner.pb_lru import PbLru
from vllm_ula.planner.timestamp_lru import TimestampLru

__all__ = ["PbLru", "Planner", "TimestampLru"]
