"""The entry point: vLLM calls `register` in every process, perhaps twice."""

from __future__ import annotations

import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.platforms import current_platform

from vllm_ula.compat import CONNECTOR, check_version
from vllm_ula.config import chosen_kernels
from vllm_ula.kernels import dispatch


def register() -> None:
    """Make UlaCache known to vLLM; idempotent.

    Raises:
        VersionError: vLLM is outside the supported range.
        ConfigError: `VLLM_ULA_KERNELS` is malformed or asks for what cannot run here.
        PatchError: a seam is not what its patch record says.
    """
    check_version(vllm.__version__)
    dispatch.use(dispatch.Kernels(chosen_kernels(current_platform.is_cpu())))
    from vllm_ula.patches.registry import ALWAYS, ON_CPU

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "vllm_ula.connectors.ula", "UlaConnector")
    for patch in ALWAYS:
        patch.apply()
    if current_platform.is_cpu():
        import vllm_ula.attention.indexer  # noqa: F401  (registers the CPU indexer)

        for patch in ON_CPU:
            patch.apply()
