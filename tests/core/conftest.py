"""Fixtures of the core suite."""

import functools

import pytest

from tests.core.rig import InKernels
from vllm_ula.planner.hash_lru import HashLru
from vllm_ula.planner.pb_lru import PbLru
from vllm_ula.planner.reference import ReferencePbLru, ReferenceTimestampLru
from vllm_ula.planner.timestamp_lru import TimestampLru

# One hash bucket is exact LRU; what more buckets change is in test_hash_lru.py.
PLANNERS = {
    "pb_lru": PbLru,
    "timestamp_lru": TimestampLru,
    "hash_lru": functools.partial(HashLru, num_buckets=1),
    "pb_lru reference": ReferencePbLru,
    "timestamp_lru reference": ReferenceTimestampLru,
}


# What plans without a planner keeps no contract but that of a whole step.
RECENCIES = {**PLANNERS, "pb_lru in kernels": InKernels}


@pytest.fixture(params=PLANNERS.values(), ids=PLANNERS)
def planner(request):
    return request.param


@pytest.fixture(params=RECENCIES.values(), ids=RECENCIES)
def recency(request):
    return request.param
