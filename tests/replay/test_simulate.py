"""Simulated serving: arithmetic, replay and model are kept apart and agree with each other."""

import pytest

from vllm_ula.capacity import B300, H200, System
from vllm_ula.errors import ConfigError
from vllm_ula.replay.cost_model import H200_COST, CostModel, step
from vllm_ula.replay.simulate import Effort, simulate, table

SMALL = Effort(requests=1, outputs=96, warm_up=64)


@pytest.fixture(scope="module")
def results():
    return {system: simulate(system, H200, H200_COST, effort=SMALL) for system in System}


def test_admitted_requests_are_those_of_the_arithmetic(results):
    admitted = {system.value: result.admitted for system, result in results.items()}
    assert admitted == {
        "device_only": 40,
        "sglang_hisparse": 216,
        "vllm_hisparse": 216,
        "ulacache": 256,
    }


def test_everything_is_served_from_the_device_without_a_host(results):
    result = results[System.DEVICE_ONLY]
    assert result.device_share == 1
    assert result.served.fetched == result.served.written_back == 0
    assert result.modelled.transfer_ms == 0


def test_a_shared_pool_misses_less_than_fixed_rows_on_this_machine(results):
    assert results[System.ULACACHE].device_rows / 32 > 3 * 4160
    assert 0.8 < results[System.SGLANG_HISPARSE].device_share < 0.92
    assert results[System.ULACACHE].device_share > 0.92


def test_counts_are_those_of_the_steps_after_the_warm_up(results):
    for result in results.values():
        assert result.steps == 32
        assert result.served.selected == 32 * 2048


def test_another_shared_pool_can_be_plugged_in():
    asked = []

    def shared_pool(*sizes):
        from replay.shared_lru import SharedLru

        asked.append(sizes)
        return SharedLru(*sizes)

    effort = Effort(requests=1, outputs=8, warm_up=4)
    simulate(System.ULACACHE, B300, H200_COST, 40, effort=effort, shared_pool=shared_pool)
    ((logical, device, block),) = asked
    assert (logical, block) == (90_240, 64)
    assert device == 2_762_300 // 40


def test_more_requests_than_admitted_are_refused():
    with pytest.raises(ConfigError, match=r"requests=28: .* admits 27 .*; use 1\.\.27"):
        simulate(System.SGLANG_HISPARSE, H200, H200_COST, requests=28)


def test_the_model_is_bytes_over_rates():
    cost = CostModel("test", host_gb_s=10, device_gb_s=1000)
    modelled = step(cost, 20e6, 30e6, row_bytes=4e9, index_key_bytes=1e9)
    assert (modelled.transfer_ms, modelled.rows_ms, modelled.index_keys_ms) == (3, 4, 1)


def test_the_table_names_the_origin_of_its_figures(results):
    text = table(list(results.values()))
    assert "arithmetic" in text
    assert "replay" in text
    assert "model, ms" in text
    assert "speed" not in text
    assert len(text.splitlines()) == 6
