"""How many blocks vLLM is told it has, and what is allocated for them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_ula.block_manager import UlaKVCacheConfig, is_index_keys, logical_kv_cache_configs
from vllm_ula.compat import VERSIONS, uses_ula
from vllm_ula.patches.record import Patch


def _logical_blocks(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_kv_cache_configs(
        vllm_config: Any, kv_cache_specs: Any, available_memory: Any, *rest: Any
    ) -> Any:
        if not uses_ula(vllm_config):
            return original(vllm_config, kv_cache_specs, available_memory, *rest)
        return logical_kv_cache_configs(
            original, vllm_config, kv_cache_specs, available_memory, *rest
        )

    return get_kv_cache_configs


def _rows_and_index_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def allocate_kv_cache(
        kv_cache_config: Any, device: Any, layout: Any, kernel_block_sizes: Any = None
    ) -> Any:
        if not isinstance(kv_cache_config, UlaKVCacheConfig):
            return original(kv_cache_config, device, layout, kernel_block_sizes)
        return allocate(kv_cache_config, device)

    return allocate_kv_cache


def allocate(kv_cache_config: UlaKVCacheConfig, device: torch.device) -> dict[str, Tensor]:
    """Device caches by layer name: D rows for attention, N index keys for indexers.

    Returns:
        `[blocks, 1, block_size, width]` zeros of the layer's dtype.
    """
    assert kv_cache_config.capacity is not None
    caches = {}
    for group in kv_cache_config.kv_cache_groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            spec: Any = specs[name] if specs else group.kv_cache_spec
            slots = (
                kv_cache_config.capacity.logical_slots
                if is_index_keys(spec)
                else kv_cache_config.device_slots
            )
            width = spec.page_size_bytes // spec.block_size // spec.dtype.itemsize
            shape = (slots // spec.block_size, 1, spec.block_size, width)
            caches[name] = torch.zeros(shape, dtype=spec.dtype, device=device)
    return caches


def _blocks_needed() -> bool:
    from vllm.v1.engine import core

    return "kv_connector" not in inspect.getsource(core.get_kv_cache_configs)


def _allocation_needed() -> bool:
    from vllm.v1.worker import utils

    return "kv_connector" not in inspect.getsource(utils.allocate_kv_cache)


def _allocation(target: str) -> Patch:
    return Patch(
        target=target,
        attribute="allocate_kv_cache",
        defined_in="vllm.v1.worker.utils",
        parameters=("kv_cache_config", "device", "layout", "kernel_block_sizes"),
        replace=_rows_and_index_keys,
        versions=VERSIONS,
        why="vLLM allocates every layer for every block; rows have D places, index keys N, and a "
        "connector may choose a memory pool but not shapes",
        remove_when="a connector may allocate the KV cache",
        needed=_allocation_needed,
    )


PATCHES = (
    Patch(
        target="vllm.v1.engine.core",
        attribute="get_kv_cache_configs",
        defined_in="vllm.v1.core.kv_cache_utils",
        parameters=("vllm_config", "kv_cache_specs", "available_memory"),
        replace=_logical_blocks,
        versions=VERSIONS,
        why="blocks are counted from device memory alone; a connector cannot add capacity",
        remove_when="a connector may say how many blocks there are",
        needed=_blocks_needed,
    ),
    _allocation("vllm.v1.worker.gpu_model_runner"),
    _allocation("vllm.v1.worker.gpu.attn_utils"),
)
