"""The command line: flags in either order, the long form, and what the user chose is kept."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from server.flags import engine_config

from vllm_ula.patches.registry import ON_CPU

pytestmark = pytest.mark.server

BASE = ["--max-model-len", "512", "--dtype", "float32", "--enforce-eager"]
ULA = ["--kv-connector", "ula"]
SIZE = ["--kv-offloading-size", "0.25"]
EXTRA: dict[str, Any] = {"device_slots": 512, "planner": "timestamp_lru"}
CONFIG = ["--kv-transfer-config", json.dumps({"kv_connector_extra_config": EXTRA})]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def in_order(flags: tuple[list[str], ...]) -> str:
    """A test's name: the flags without their values."""
    return " ".join(flag[0] for flag in flags)


def connector(model: str, *flags: list[str]) -> tuple[str, str, dict[str, Any]]:
    """Connector, role and settings of an engine with these flags."""
    transfer = engine_config(model, *BASE, *itertools.chain(*flags)).kv_transfer_config
    return transfer.kv_connector, transfer.kv_role, transfer.kv_connector_extra_config


@pytest.mark.parametrize("flags", [(ULA, SIZE), (SIZE, ULA)], ids=in_order)
def test_offloading_size_is_the_host_pool(models: dict[str, str], flags: Any) -> None:
    """vLLM alone would replace the connector by OffloadingConnector."""
    assert connector(models["tiny"], *flags) == ("ula", "kv_both", {"host_gib": 0.25})


@pytest.mark.parametrize("flags", [(ULA, CONFIG), (CONFIG, ULA)], ids=in_order)
def test_settings_in_the_transfer_config(models: dict[str, str], flags: Any) -> None:
    assert connector(models["tiny"], *flags) == ("ula", "kv_both", EXTRA)


@pytest.mark.parametrize("flags", list(itertools.permutations([ULA, SIZE, CONFIG])), ids=in_order)
def test_all_three_flags(models: dict[str, str], flags: Any) -> None:
    expected = ("ula", "kv_both", {**EXTRA, "host_gib": 0.25})
    assert connector(models["tiny"], *flags) == expected


@pytest.mark.parametrize("beside", [[], ULA], ids=["alone", "beside --kv-connector"])
def test_long_form(models: dict[str, str], beside: list[str]) -> None:
    whole = {"kv_connector": "ula", "kv_role": "kv_both", "kv_connector_extra_config": EXTRA}
    flag = ["--kv-transfer-config", json.dumps(whole)]
    assert connector(models["tiny"], flag, beside) == ("ula", "kv_both", EXTRA)


def test_dotted_form(models: dict[str, str]) -> None:
    flag = ["--kv-transfer-config.kv_connector_extra_config.device_slots", "512"]
    assert connector(models["tiny"], flag, ULA) == ("ula", "kv_both", {"device_slots": 512})


def test_offloading_size_goes_to_ula_in_a_multi_connector(models: dict[str, str]) -> None:
    """vLLM alone would replace both connectors by OffloadingConnector."""
    log = {"kv_connector_module_path": "engine.step_log"}
    ula = {"kv_connector_extra_config": EXTRA}
    children = [
        {"kv_connector": name, "kv_role": "kv_both", **more}
        for name, more in (("HybridStepLog", log), ("ula", ula))
    ]
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }
    name, role, extra = connector(models["tiny"], ["--kv-transfer-config", json.dumps(both)], SIZE)
    children[1]["kv_connector_extra_config"] = {**EXTRA, "host_gib": 0.25}
    assert (name, role, extra) == ("MultiConnector", "kv_both", {"connectors": children})


def test_flag_names_other_connectors_too(models: dict[str, str]) -> None:
    found = connector(models["llama"], ["--kv-connector", "ExampleConnector"])
    assert found == ("ExampleConnector", "kv_both", {})


def test_offloading_size_without_ula_is_vllms(models: dict[str, str]) -> None:
    expected = {"cpu_bytes_to_use": 0.25 * 2**30}
    assert connector(models["llama"], SIZE) == ("OffloadingConnector", "kv_both", expected)


@pytest.mark.parametrize("flags", [[], ULA], ids=["without ula", "with ula"])
@pytest.mark.parametrize("chosen", [True, False])
def test_dsa_keeps_the_users_choices(
    models: dict[str, str], chosen: bool, flags: list[str]
) -> None:
    """vLLM switches both off for every MLA model on a CPU and raises the token budget."""
    no, budget = ("", 256) if chosen else ("no-", 1024)
    config = engine_config(
        models["tiny"],
        *BASE,
        *flags,
        f"--{no}enable-chunked-prefill",
        f"--{no}enable-prefix-caching",
        "--max-num-batched-tokens",
        str(budget),
    )
    assert config.scheduler_config.enable_chunked_prefill is chosen
    assert config.cache_config.enable_prefix_caching is chosen
    assert config.scheduler_config.max_num_batched_tokens == budget


def test_dsa_has_both_by_default(models: dict[str, str]) -> None:
    config = engine_config(models["tiny"], *BASE)
    assert config.scheduler_config.enable_chunked_prefill
    assert config.cache_config.enable_prefix_caching


def test_dense_mla_is_left_alone(models: dict[str, str]) -> None:
    """What becomes of it is vLLM's decision: without AMX its CPU kernels can do neither."""
    flags = ["--enable-chunked-prefill", "--enable-prefix-caching"]

    def choices() -> tuple[bool, bool, int]:
        config = engine_config(models["deepseek_v3"], *BASE, *flags)
        return (
            config.scheduler_config.enable_chunked_prefill,
            config.cache_config.enable_prefix_caching,
            config.scheduler_config.max_num_batched_tokens,
        )

    patched = choices()
    for patch in ON_CPU:
        patch.revert()
    try:
        unpatched = choices()
    finally:
        for patch in ON_CPU:
            patch.apply()
    assert patched == unpatched
