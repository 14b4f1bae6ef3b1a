"""A KV connector that moves no KV: it writes down what vLLM asks of it, in this process."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

CALLS: Counter[str] = Counter()
TOKENS: list[int] = []  # scheduled in each step, as the worker half was told


@dataclass
class Step(KVConnectorMetadata):
    """Scheduler to worker: tokens of the step."""

    tokens: int


def noted(method: Callable[..., Any]) -> Callable[..., Any]:
    """Count the calls of a hook."""

    @functools.wraps(method)
    def hook(*args: Any, **kwargs: Any) -> Any:
        CALLS[method.__name__] += 1
        return method(*args, **kwargs)

    return hook


class StepLog(KVConnectorBase_V1):
    """Without SupportsHMA, as small connectors are: vLLM then asks all for one KV cache group."""

    moves_kv = False

    bind_gpu_block_pool = noted(KVConnectorBase_V1.bind_gpu_block_pool)
    on_new_request = noted(KVConnectorBase_V1.on_new_request)
    request_finished = noted(KVConnectorBase_V1.request_finished)
    update_connector_output = noted(KVConnectorBase_V1.update_connector_output)
    register_kv_caches = noted(KVConnectorBase_V1.register_kv_caches)
    clear_connector_metadata = noted(KVConnectorBase_V1.clear_connector_metadata)
    get_finished = noted(KVConnectorBase_V1.get_finished)
    shutdown = noted(KVConnectorBase_V1.shutdown)

    @noted
    def get_num_new_matched_tokens(self, *args: Any) -> tuple[int, bool]:
        return 0, False

    @noted
    def update_state_after_alloc(self, *args: Any) -> None:
        return

    @noted
    def build_connector_meta(self, scheduler_output: Any) -> Step:
        return Step(scheduler_output.total_num_scheduled_tokens)

    @noted
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Step)
        TOKENS.append(connector_metadata.tokens)

    @noted
    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        return

    @noted
    def wait_for_layer_load(self, *args: Any) -> None:
        return

    @noted
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        return

    @noted
    def wait_for_save(self) -> None:
        return


class HybridStepLog(StepLog, SupportsHMA):
    """The same with SupportsHMA; it says for itself that it moves no KV."""

    moves_kv = False

    @noted
    def request_finished_all_groups(self, *args: Any) -> tuple[bool, None]:
        return False, None


class Undeclared(StepLog, SupportsHMA):
    """Says nothing itself: it may move KV for all anybody knows."""

    request_finished_all_groups = HybridStepLog.request_finished_all_groups
