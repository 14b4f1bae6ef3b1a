"""Known right answers of the capacity arithmetic."""

from dataclasses import replace

import pytest

from vllm_ula.systems import (
    B300,
    GLM_5_3,
    H200,
    Parallel,
    System,
    admitted,
    device_rows,
    unique_rows,
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
    assert len(GLM_5_3.domain_layers) == 21
    assert (GLM_5_3.block_bytes, GLM_5_3.block_groups) == (209_920, 20)
    wide = replace(GLM_5_3, row_bytes=1152)
    assert wide.block_bytes == 3 * 1152 * 64
    assert wide.block_groups == 20


def test_unique_rows_and_their_aggregates():
    ours = unique_rows(System.ULACACHE, Parallel.DP, B300, GLM_5_3)
    rivals = unique_rows(System.SGLANG_HISPARSE, Parallel.DP, B300, GLM_5_3)
    assert round(rivals / 1e6, 2) == 30.02
    assert round(ours / 1e6, 1) == 52.1
    assert round(ours / rivals, 3) == 1.736
    assert ours // L == 578
    h200 = unique_rows(System.SGLANG_HISPARSE, Parallel.DP, H200, GLM_5_3)
    assert round(h200 / 1e6, 2) == 20.01
    assert h200 // L == 222
    assert round(256 / 222, 3) == 1.153


def test_256_requests_on_h200_need_27_6_gb_of_device_memory():
    enough = replace(H200, dp_device_bytes=27_620_000_000)
    short = replace(H200, dp_device_bytes=27_580_000_000)
    assert admitted(System.ULACACHE, Parallel.DP, enough, GLM_5_3, L) == 256
    assert admitted(System.ULACACHE, Parallel.DP, short, GLM_5_3, L) == 248


def test_head_sharded_tensor_parallelism_holds_an_eighth_once():
    tp = unique_rows(System.SGLANG_HISPARSE, Parallel.TP, H200, GLM_5_3)
    assert tp * 8 / unique_rows(System.SGLANG_HISPARSE, Parallel.DP, H200, GLM_5_3) == (
        pytest.approx(1, abs=1e-6)
    )
    assert unique_rows(System.VLLM_HISPARSE, Parallel.TP, H200, GLM_5_3) == pytest.approx(8 * tp, 8)


@pytest.mark.parametrize("system", System)
def test_device_rows_stay_within_the_budget(system):
    requests = admitted(system, Parallel.DP, B300, GLM_5_3, L) // 8
    rows = device_rows(system, B300, GLM_5_3, L, requests)
    index_keys = GLM_5_3.index_keys * L * requests
    assert 0 < rows * GLM_5_3.rows + index_keys <= B300.dp_device_bytes
