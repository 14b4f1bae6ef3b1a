"""UlaCache: one logical address space for the KV rows of sparse-attention models in vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_ula._version import __version__

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

__all__ = ["__version__", "kv_transfer_config"]


def kv_transfer_config(**settings: Any) -> KVTransferConfig:
    """The `kv_transfer_config` of an offline engine with UlaCache.

        LLM(model, kv_transfer_config=vllm_ula.kv_transfer_config(host_gib=64))

    Args:
        **settings: see `vllm_ula.config.UlaConfig`.

    Raises:
        vllm_ula.errors.ConfigError: a setting is unknown or breaks a rule.
    """
    from vllm.config import KVTransferConfig

    from vllm_ula.config import UlaConfig

    UlaConfig.from_extra_config(settings)
    return KVTransferConfig(
        kv_connector="ula", kv_role="kv_both", kv_connector_extra_config=settings
    )
