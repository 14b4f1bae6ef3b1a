"""Planners: who gives up a device row when a host row is wanted.

    pb_lru           recency buckets, the default
    timestamp_lru    exact LRU
    hash_lru         LRU inside hash buckets

They are compiled for the CPU; importing one loads numba, importing this package does not.
`reference.py` has them in plain torch.
"""

from vllm_ula.planner.base import BucketAge, Planner

__all__ = ["BucketAge", "Planner"]
