"""Logical blocks: what vLLM is told it has, and which of them died.

vLLM's block manager keeps its code; what changes is what a block id means. It counts
`N / block_size` logical blocks, of which the device holds only some rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MLAAttentionSpec, SparseCacheRole

from vllm_ula import capacity
from vllm_ula.capacity import Capacity, TokenBytes
from vllm_ula.compat import map_device, min_device_slots, ula_config
from vllm_ula.map_bytes import map_bytes
from vllm_ula.planning.make import plans_with_kernels

logger = init_logger("vllm.vllm_ula")


@dataclass
class UlaKVCacheConfig(KVCacheConfig):
    """A KV cache config whose blocks are logical.

    Attributes:
        capacity: logical, device and host slots of this rank.
    """

    capacity: Capacity | None = None

    @property
    def device_slots(self) -> int:
        """Device rows D of each attention layer."""
        assert self.capacity is not None
        return self.capacity.device_slots

    @property
    def host_slots(self) -> int:
        """Host rows H of each attention layer."""
        assert self.capacity is not None
        return self.capacity.host_slots

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        """Never: vLLM would zero by logical block id, which are other requests' device rows."""
        return False


def is_index_keys(spec: KVCacheSpec) -> bool:
    """Whether a layer's cache holds index keys rather than rows."""
    return isinstance(spec, MLAAttentionSpec) and spec.cache_role == SparseCacheRole.INDEXER


def token_bytes(vllm_config: VllmConfig, specs: dict[str, KVCacheSpec]) -> TokenBytes:
    """Bytes one token costs on a rank with these layers; a layer with an indexer opens a domain."""
    rows = index_keys = domains = 0
    for spec in specs.values():
        per_token = spec.page_size_bytes // spec.block_size
        if is_index_keys(spec):
            index_keys += per_token
        else:
            rows += per_token
            domains += isinstance(spec, MLAAttentionSpec) and spec.is_index_group_leader
    maps = map_bytes(ula_config(vllm_config).planner, plans_with_kernels(map_device(vllm_config)))
    return TokenBytes.charged(rows, index_keys, domains, maps)


def logical_kv_cache_configs(
    original: Callable[..., list[KVCacheConfig]],
    vllm_config: VllmConfig,
    kv_cache_specs: list[dict[str, KVCacheSpec]],
    available_memory: list[int],
    *rest: Any,
) -> list[KVCacheConfig]:
    """`get_kv_cache_configs` over logical blocks.

    vLLM's own planning (admission check, auto-fit of `max_model_len`, block override, smallest
    rank) runs on the bytes the logical blocks would take, so that it needs no change.

    Args:
        original: vLLM's function.
        vllm_config: of the engine.
        kv_cache_specs: layers of each rank.
        available_memory: device bytes vLLM offers on each rank.
        *rest: passed through.

    Raises:
        ConfigError: the budgets cannot hold a decode step or the blocks asked for.
    """
    config = ula_config(vllm_config)
    block_size = vllm_config.cache_config.block_size
    min_device = min_device_slots(vllm_config)
    ranks = vllm_config.parallel_config.tensor_parallel_size
    host_bytes = capacity.host_share(config.host_bytes, ranks)
    device_bytes = [
        memory if config.device_gib is None else min(memory, int(config.device_gib * capacity.GIB))
        for memory in available_memory
    ]
    budgets = [
        (token_bytes(vllm_config, specs), device, host_bytes, block_size, min_device)
        for specs, device in zip(kv_cache_specs, device_bytes, strict=True)
    ]
    memory = []
    for specs, budget in zip(kv_cache_specs, budgets, strict=True):
        fitted = capacity.fit(*budget, device_slots=config.device_slots)
        memory.append(fitted.num_blocks * sum(spec.page_size_bytes for spec in specs.values()))
    configs = original(vllm_config, kv_cache_specs, memory, *rest)
    logical: list[KVCacheConfig] = []
    for budget, kv_cache_config in zip(budgets, configs, strict=True):
        num_blocks = kv_cache_config.num_blocks
        split = capacity.split(*budget, num_blocks, device_slots=config.device_slots)
        logger.info("%s", start_line(split, vllm_config.model_config.max_model_len, min_device))
        base = {field.name: getattr(kv_cache_config, field.name) for field in fields(KVCacheConfig)}
        logical.append(UlaKVCacheConfig(**base, capacity=split))
    return logical


def start_line(split: Capacity, max_model_len: int, min_device: int) -> str:
    """What UlaCache has, in one line of the start-up log."""
    line = (
        f"UlaCache: {split.logical_slots} logical slots = {split.device_slots} device rows + "
        f"{split.host_slots} host rows (unique = physical rows, replicas 0), "
        f"{split.token.rows} bytes a row over all layers, "
        f"index keys {split.index_key_bytes} bytes, "
        f"maps {split.map_bytes} bytes, host pool {split.used_host_bytes} bytes, "
        f"{split.requests(max_model_len)} requests of {max_model_len} tokens; "
        f"limited by {split.limit.value}"
    )
    if split.limit is capacity.Limit.INDEX_KEYS:
        line += (
            f" ({split.used_host_bytes} of {split.host_bytes} host bytes used; all of it would "
            f"take {split.device_bytes_for_all_host(min_device)} device bytes)"
        )
    return line


class DeadBlocks:
    """Blocks nobody will read again before writing them, collected from vLLM's block pool.

    A block returned by `get_new_blocks` is dead, and so is a freed one that no prefix can hit;
    all are when the prefix cache was reset, which vLLM does only while no request has a block.
    Nothing else is: a death that is missed costs a copy, a false one loses data.
    """

    def __init__(self) -> None:
        self._blocks: list[int] = []

    def watch(self, pool: BlockPool) -> None:
        """Wrap the methods of this pool instance by which blocks change hands."""
        get_new_blocks, free_blocks = pool.get_new_blocks, pool.free_blocks
        reset_prefix_cache = pool.reset_prefix_cache

        def get_new_blocks_and_tell(num_blocks: int) -> list[KVCacheBlock]:
            blocks = get_new_blocks(num_blocks)
            self._blocks.extend(block.block_id for block in blocks)
            return blocks

        def free_blocks_and_tell(ordered_blocks: Iterable[KVCacheBlock]) -> None:
            blocks: Sequence[KVCacheBlock] = list(ordered_blocks)
            free_blocks(blocks)
            self._blocks.extend(
                block.block_id
                for block in blocks
                if block.ref_cnt == 0
                and not block.is_null
                and (block.block_hash is None or not pool.enable_caching)
            )

        def reset_prefix_cache_and_tell() -> bool:
            done = reset_prefix_cache()
            if done:
                self._blocks.extend(block.block_id for block in pool.blocks if not block.is_null)
            return done

        pool.get_new_blocks = get_new_blocks_and_tell  # type: ignore[method-assign]
        pool.free_blocks = free_blocks_and_tell  # type: ignore[method-assign]
        pool.reset_prefix_cache = reset_prefix_cache_and_tell  # type: ignore[method-assign]

    def drain(self) -> tuple[int, ...]:
        """Blocks that died since the last call, each once."""
        blocks = tuple(dict.fromkeys(self._blocks))
        self._blocks.clear()
        return blocks
