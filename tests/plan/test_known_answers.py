"""Known right answers of the capacity arithmetic."""

from dataclasses import replace

import pytest

from vllm_ula.capacity import (
    B300,
    GLM_5_3,
    H200,
    Model,
    Parallel,
    System,
    admitted,
    device_rows,
    held,
)

L = 90_145


@pytest.mark.parametrize(
    ("machine", "system", "dp", "tp"),
    [
        (H200, System.DEVICE_ONLY, 40, 5),
        (H200, System.SGLANG_HISPARSE, 216, 27),
        (H200, System.VLLM_HISPARSE, 216, 48),
        (H200, System.ULACACHE, 256, 256),
        (B300, System.DEVICE_ONLY, 256, 35),
        (B300, System.SGLANG_HISPARSE, 328, 41),
        (B300, System.VLLM_HISPARSE, 328, 300),
        (B300, System.ULACACHE, 576, 598),
    ],
)
def test_admitted_requests(machine, system, dp, tp):
    assert admitted(system, Parallel.DP, machine, GLM_5_3, L) == dp
    assert admitted(system, Parallel.TP, machine, GLM_5_3, L) == tp


def test_bytes_of_glm_5_3():
    assert (GLM_5_3.rows, GLM_5_3.index_keys) == (51_168, 2_772)
    assert GLM_5_3.rows + GLM_5_3.index_keys == 53_940
    assert len(GLM_5_3.domain_layers) == 21
    assert (GLM_5_3.block_bytes, GLM_5_3.block_groups) == (209_920, 20)
    wide = replace(GLM_5_3, row_bytes=1152)
    assert wide.block_bytes == 3 * 1152 * 64
    assert wide.block_groups == 20


def test_unique_rows_and_their_aggregates():
    ours = held(System.ULACACHE, Parallel.DP, B300, GLM_5_3).logical_slots
    rivals = held(System.SGLANG_HISPARSE, Parallel.DP, B300, GLM_5_3).logical_slots
    assert round(rivals / 1e6, 2) == 30.02
    assert round(ours / 1e6, 1) == 52.1
    assert round(ours / rivals, 3) == 1.736
    assert ours // L == 578
    h200 = held(System.SGLANG_HISPARSE, Parallel.DP, H200, GLM_5_3).logical_slots
    assert round(h200 / 1e6, 2) == 20.01
    assert h200 // L == 222
    assert round(256 / 222, 3) == 1.153


def test_256_requests_on_h200_need_27_6_gb_of_device_memory():
    enough = replace(H200, dp_device_bytes=27_620_000_000)
    short = replace(H200, dp_device_bytes=27_580_000_000)
    assert admitted(System.ULACACHE, Parallel.DP, enough, GLM_5_3, L) == 256
    assert admitted(System.ULACACHE, Parallel.DP, short, GLM_5_3, L) == 248


def test_head_sharded_tensor_parallelism_holds_an_eighth_once():
    alone = held(System.DEVICE_ONLY, Parallel.TP, B300, GLM_5_3)
    assert alone.unique_share == 0.125
    assert alone.kept_bytes(GLM_5_3).replicas == 7 * alone.kept_bytes(GLM_5_3).unique
    tp = held(System.SGLANG_HISPARSE, Parallel.TP, B300, GLM_5_3)
    assert (tp.host_slots, tp.device_slots) == (8 * tp.logical_slots, tp.buffer_slots)
    shared = held(System.VLLM_HISPARSE, Parallel.TP, B300, GLM_5_3)
    assert shared.logical_slots == pytest.approx(8 * tp.logical_slots, abs=8)


def test_hisparse_needs_159_3_gb_for_its_53_3_million_physical_slots():
    machine = replace(B300, dp_device_bytes=159_300_000_000)
    found = held(System.SGLANG_HISPARSE, Parallel.DP, machine, GLM_5_3)
    assert round(found.physical_slots / 1e6, 1) == 53.3
    assert round(found.device_slots / 8 / 1e6, 3) == 2.910
    kept = found.kept_bytes(GLM_5_3)
    assert round(kept.buffers / 8e9, 1) == 148.9
    assert round(kept.index_keys / 8e9, 1) == 10.4
    assert round(found.unique_share, 3) == 0.563


def test_a_prompt_of_a_gqa_model_takes_85_90_gb():
    dense = Model("80 layers, 8 KV heads", (1,) * 80, 2 * 8 * 128 * 2, index_keys=0, kv_heads=8)
    assert dense.rows * 262_144 == 85_899_345_920
    # TP divides its heads: eight ranks hold what one with eight times the memory would.
    assert admitted(System.DEVICE_ONLY, Parallel.TP, B300, dense, 262_144) == 172 * 8 * 10**9 // (
        85_899_345_920
    )
    assert held(System.DEVICE_ONLY, Parallel.TP, B300, dense).unique_share == 1.0
    few = replace(dense, kv_heads=2)
    assert held(System.DEVICE_ONLY, Parallel.TP, B300, few).unique_share == 0.25


@pytest.mark.parametrize("system", System)
@pytest.mark.parametrize("parallel", Parallel)
def test_what_is_kept_fits_the_budgets(system, parallel):
    found = held(system, parallel, B300, GLM_5_3)
    kept = found.kept_bytes(GLM_5_3)
    everything = kept.unique + kept.replicas + kept.index_keys + kept.buffers
    assert everything <= 8 * (B300.device_bytes(parallel) + B300.host_bytes)
    assert found.host_slots * GLM_5_3.rows <= 8 * B300.host_bytes
    assert min(kept.unique, kept.index_keys) > 0
    assert kept.replicas >= 0
    assert 0 < found.unique_share <= 1
    length = 90_145
    fitting = admitted(system, parallel, B300, GLM_5_3, length)
    assert fitting * length <= found.logical_slots * 1.001


@pytest.mark.parametrize("system", System)
def test_device_rows_stay_within_the_budget(system):
    requests = admitted(system, Parallel.DP, B300, GLM_5_3, L) // 8
    rows = device_rows(system, B300, GLM_5_3, L, requests)
    index_keys = GLM_5_3.index_keys * L * requests
    assert 0 < rows * GLM_5_3.rows + index_keys <= B300.dp_device_bytes
