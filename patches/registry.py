"""All patches, and where they apply."""

from __future__ import annotations

from vllm_ula.patches import (
    cpu_indexer,
    cpu_kernel_overrides,
    cpu_platform,
    cpu_rotary,
    cpu_seeded_sampling,
    cpu_spec_decode,
    kv_cache_config,
    kv_connector_flag,
    kv_transfer_config,
)
from vllm_ula.patches.record import Patch

ALWAYS: tuple[Patch, ...] = (
    *kv_connector_flag.PATCHES,
    *kv_transfer_config.PATCHES,
    *kv_cache_config.PATCHES,
)
ON_CPU: tuple[Patch, ...] = (
    *cpu_platform.PATCHES,
    *cpu_rotary.PATCHES,
    *cpu_indexer.PATCHES,
    *cpu_seeded_sampling.PATCHES,
    *cpu_spec_decode.PATCHES,
    *cpu_kernel_overrides.PATCHES,
)
