"""The plugin as vLLM loads it: version gate, connector registration, entry point."""

from __future__ import annotations

from importlib.metadata import entry_points, requires
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

import vllm_ula
from vllm_ula import plugin
from vllm_ula.block_manager import UlaKVCacheConfig
from vllm_ula.capacity import TokenBytes, fit
from vllm_ula.compat import check_version
from vllm_ula.errors import ConfigError, VersionError
from vllm_ula.kernels import dispatch
from vllm_ula.patches.kv_cache_config import allocate
from vllm_ula.patches.registry import ALWAYS, ON_CPU


def test_entry_point() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="vllm_ula")
    assert entry.load() is plugin.register


def test_register_twice() -> None:
    plugin.register()
    plugin.register()
    assert all(patch.applied() for patch in (*ALWAYS, *ON_CPU))


def test_register_uses_the_kernels_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        environment.setenv("VLLM_ULA_KERNELS", "triton")
        plugin.register()
        assert dispatch.uses_triton(torch.device("cpu"))
        environment.setenv("VLLM_ULA_KERNELS", "cuda")
        with pytest.raises(ConfigError, match="VLLM_ULA_KERNELS=cuda: must be one of auto"):
            plugin.register()
    plugin.register()
    assert not dispatch.uses_triton(torch.device("cpu"))


def test_vllm_is_no_hard_requirement() -> None:
    """Public report V01: a requirement on vllm would pull the CUDA wheel over a CPU one."""
    hard = [r for r in requires("vllm-ula") or [] if "extra ==" not in r]
    assert not [r for r in hard if r.startswith("vllm")]


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.3", "0.33.0", "0.33.1rc1"])
def test_supported_versions(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0.0", "dev"])
def test_other_versions_are_named_with_the_range(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin.vllm, "__version__", version)
    with pytest.raises(VersionError, match=r">=0\.32,<0\.34, found " + version.replace("+", r"\+")):
        plugin.register()


def specs(layers: int = 2) -> dict[str, Any]:
    """KV cache specs of a DSA model: rows and index keys of each layer."""
    common: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1}
    found: dict[str, Any] = {}
    for layer in range(layers):
        found[f"layers.{layer}.attn"] = MLAAttentionSpec(
            **common, head_size=576, dtype=torch.bfloat16
        )
        found[f"layers.{layer}.indexer"] = MLAAttentionSpec(
            **common, head_size=132, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER
        )
    return found


@pytest.fixture
def kv_cache_config() -> UlaKVCacheConfig:
    layers = specs()
    capacity = fit(TokenBytes(2 * 1152, 2 * 132), 4 << 20, 8 << 20, 16, 160)
    group = KVCacheGroupSpec(list(layers), UniformTypeKVCacheSpecs(16, layers))
    return UlaKVCacheConfig(capacity.num_blocks, [], [group], capacity=capacity)


def test_no_zeroing_by_logical_block(kv_cache_config: UlaKVCacheConfig) -> None:
    """uint8 index keys beside bf16 rows make vLLM want to zero blocks: other requests' rows."""
    plain = UlaKVCacheConfig.__mro__[1](1, [], kv_cache_config.kv_cache_groups)
    assert plain.needs_kv_cache_zeroing
    assert not kv_cache_config.needs_kv_cache_zeroing


def test_rows_have_device_slots_and_index_keys_all_slots(
    kv_cache_config: UlaKVCacheConfig,
) -> None:
    caches = allocate(kv_cache_config, torch.device("cpu"))
    capacity = kv_cache_config.capacity
    assert capacity is not None
    assert capacity.host_slots > capacity.device_slots > 0
    assert caches["layers.0.attn"].shape == (capacity.device_slots // 16, 1, 16, 576)
    assert caches["layers.0.indexer"].shape == (capacity.num_blocks, 1, 16, 132)


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_the_factory_creates_both_halves(
    role: KVConnectorRole, kv_cache_config: UlaKVCacheConfig
) -> None:
    """Public report V01: made through vLLM's factory, by keyword, for both roles."""
    plugin.register()
    config: Any = SimpleNamespace(
        kv_transfer_config=vllm_ula.kv_transfer_config(host_gib=1),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    connector = KVConnectorFactory.create_connector(
        config=config, role=role, kv_cache_config=kv_cache_config
    )
    assert (connector.scheduler is None) == (role is KVConnectorRole.WORKER)
    assert (connector.worker is None) == (role is KVConnectorRole.SCHEDULER)


def test_a_config_planned_without_the_plugin_is_refused() -> None:
    plugin.register()
    config: Any = SimpleNamespace(
        kv_transfer_config=vllm_ula.kv_transfer_config(),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    )
    planned_elsewhere = UlaKVCacheConfig.__mro__[1](1, [], [])
    with pytest.raises(ConfigError, match="the vllm_ula plugin in every process"):
        KVConnectorFactory.create_connector(
            config=config, role=KVConnectorRole.WORKER, kv_cache_config=planned_elsewhere
        )


def test_offline_settings_are_checked_at_once() -> None:
    with pytest.raises(ConfigError, match="host_gb=1: is no setting of ula; use one of host_gib"):
        vllm_ula.kv_transfer_config(host_gb=1)
