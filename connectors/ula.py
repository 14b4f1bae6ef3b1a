"""vLLM's KV connector `ula`: one adapter that forwards to the half of its process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_ula.block_manager import UlaKVCacheConfig
from vllm_ula.compat import CONNECTOR
from vllm_ula.config import UlaConfig
from vllm_ula.connectors.records import UlaConnectorMetadata
from vllm_ula.connectors.scheduler import UlaScheduler
from vllm_ula.connectors.sequences import SequenceLog
from vllm_ula.connectors.worker import UlaWorker
from vllm_ula.errors import ConfigError
from vllm_ula.metrics import UlaPromMetrics, UlaStats

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class UlaConnector(KVConnectorBase_V1, SupportsHMA):
    """UlaCache as a KV connector.

    It hands no KV to anybody: rows never leave the engine, so most of vLLM's hooks have nothing
    to do. No exchange depends on the layer hooks, which full graphs do not run.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if not isinstance(kv_cache_config, UlaKVCacheConfig):
            raise ConfigError(
                "kv_connector",
                CONNECTOR,
                f"the engine planned its KV cache without vllm-ula "
                f"({type(kv_cache_config).__name__})",
                "the vllm_ula plugin in every process (check VLLM_PLUGINS)",
            )
        self.scheduler = _scheduler(vllm_config) if role is KVConnectorRole.SCHEDULER else None
        self.worker = (
            UlaWorker(vllm_config, kv_cache_config) if role is KVConnectorRole.WORKER else None
        )

    @property
    @override
    def requires_kv_delivery(self) -> bool:
        """Nothing is handed off, so a preempted request owes nobody its blocks."""
        return False

    # Scheduler half

    @override
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        assert self.scheduler is not None
        self.scheduler.bind(gpu_block_pool)

    @override
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    @override
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        return

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> UlaConnectorMetadata:
        assert self.scheduler is not None
        return self.scheduler.build_metadata(scheduler_output)

    @override
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    # Worker half

    @override
    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        assert self.worker is not None
        self.worker.register(kv_caches)

    @override
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert self.worker is not None
        assert isinstance(connector_metadata, UlaConnectorMetadata)
        self.worker.begin_step(connector_metadata)

    @override
    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        assert self.worker is not None
        self.worker.end_step()

    @override
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        return

    @override
    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    @override
    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        return

    @override
    def wait_for_save(self) -> None:
        return

    @override
    def get_kv_connector_stats(self) -> UlaStats | None:
        return self.worker.stats() if self.worker is not None else None

    @override
    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.close()

    # Metrics

    @classmethod
    @override
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return UlaStats(data=data) if data else UlaStats()

    @classmethod
    @override
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return UlaPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _scheduler(vllm_config: VllmConfig) -> UlaScheduler:
    """The scheduler half, which follows requests only for a recording."""
    assert vllm_config.kv_transfer_config is not None
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    if UlaConfig.from_extra_config(extra).record is None:
        return UlaScheduler()
    return UlaScheduler(SequenceLog(vllm_config.cache_config.block_size))


# MultiConnector looks up whose stats it has by class name among the registered names.
UlaConnector.__name__ = CONNECTOR
