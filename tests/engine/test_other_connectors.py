"""UlaCache in a MultiConnector, beside a connector that moves no KV: the same tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from engine import step_log
from engine.harness import Completion, assert_same, at_rest, engine, run, worker
from engine.workload import BLOCKS, LENGTHS, POOLS, REQUESTS
from vllm.config import KVTransferConfig

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Case:
    """Connectors of the engine by name, in order, and hooks of `step_log` by how it is asked."""

    order: tuple[str, str]
    finished: str
    settings: dict[str, float]
    arguments: dict[str, float]


SETTINGS = POOLS["minimum"]
DEVICE, HOST = {"device_slots": SETTINGS["device_slots"]}, SETTINGS["host_gib"]
CASES = {
    "ula first": Case(("ula", "HybridStepLog"), "request_finished_all_groups", SETTINGS, {}),
    "ula last": Case(("StepLog", "ula"), "request_finished", DEVICE, {"kv_offloading_size": HOST}),
}


def connectors(case: Case) -> KVTransferConfig:
    """`--kv-transfer-config` of both."""
    of = {"ula": {"kv_connector_extra_config": dict(case.settings)}}
    log = {"kv_connector_module_path": step_log.__name__}
    children = [{"kv_connector": n, "kv_role": "kv_both", **of.get(n, log)} for n in case.order]
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": children},
    )


@pytest.mark.parametrize("name", CASES)
def test_beside_a_connector_that_moves_no_kv(
    name: str, tiny: str, expected: list[Completion]
) -> None:
    """Both are asked everything, each gets its own metadata, and the metrics are UlaCache's."""
    case = CASES[name]
    step_log.CALLS.clear()
    step_log.TOKENS.clear()
    arguments: dict[str, Any] = {"num_gpu_blocks_override": BLOCKS, **case.arguments}
    with engine(tiny, kv_transfer_config=connectors(case), **arguments) as llm:
        assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == BLOCKS
        assert_same(run(llm, REQUESTS), expected)
        values, half = at_rest(llm), worker()
        assert half.pool is not None
    assert values["logical_slots"] == BLOCKS * 16
    assert min(values["device_hits"], values["fetched_rows"], values["written_back_rows"]) > 0

    # The last token of a request is sampled, not fed.
    assert sum(step_log.TOKENS) == sum(LENGTHS) + 15 * len(LENGTHS)
    calls, steps, requests = step_log.CALLS, len(step_log.TOKENS), len(REQUESTS)
    for hook in ("build_connector_meta", "clear_connector_metadata", "wait_for_save"):
        assert calls[hook] == steps
    for hook in ("start_load_kv", "get_finished"):
        assert calls[hook] == steps
    for hook in ("on_new_request", "update_state_after_alloc", case.finished):
        assert calls[hook] == requests
    assert calls["register_kv_caches"] == calls["bind_gpu_block_pool"] == 1
    assert calls["shutdown"] == 2  # both halves
    assert half.pool is None  # given back
