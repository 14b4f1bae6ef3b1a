"""`vllm-ula plan` predicts what an engine reports at start: to the last slot."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from engine.harness import drafting, engine, scheduler

from vllm_ula import block_manager
from vllm_ula.block_manager import logical_kv_cache_configs, start_line
from vllm_ula.capacity import Capacity, Limit
from vllm_ula.cli import main
from vllm_ula.compat import min_device_slots
from vllm_ula.patches import kv_cache_config

pytestmark = pytest.mark.engine

MIB = 2**20
# Device bytes, host bytes, device_slots, and what must bind.
BUDGETS = [
    (8 * MIB, 0, None, Limit.MEMORY),
    (8 * MIB + 12_345, 21 * MIB + 6_789, None, Limit.MEMORY),
    (64 * MIB - 1, 3, None, Limit.MEMORY),
    (3 * MIB, 500 * MIB, None, Limit.INDEX_KEYS),
    (3 * MIB + 4_321, 500 * MIB, None, Limit.INDEX_KEYS),
    (40 * MIB, 21 * MIB + 1, 176, Limit.DEVICE_SLOTS),
    (40 * MIB, 0, 320, Limit.DEVICE_SLOTS),
]


def predicted(capsys: Any, model: str, found: Capacity, *arguments: object) -> dict[str, Any]:
    """What `plan` says of the engine that got these budgets."""
    budgets = ("--kv-bytes-per-gpu", found.device_bytes, "--host-bytes-per-gpu", found.host_bytes)
    context = ("--context", 1024, "--output", 1024)
    words = ["plan", model, "--gpu", "cpu", "--gpus", 1, *budgets, *context, "--json", *arguments]
    capsys.readouterr()
    assert main([str(word) for word in words]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def assert_predicted(printed: dict[str, Any], found: Capacity) -> None:
    told = printed["engine"]
    assert told["logical_slots"] == found.logical_slots
    assert told["device_slots"] == found.device_slots
    assert told["host_slots"] == found.host_slots
    assert told["usable_slots"] == found.usable_slots
    assert told["index_key_bytes"] == found.index_key_bytes
    assert told["map_bytes"] == found.map_bytes
    assert told["host_pool_bytes"] == found.used_host_bytes
    assert told["limit"] == found.limit.value
    tokens = printed["bytes_per_token"]
    assert (tokens["rows"], tokens["index_keys"]) == (found.token.rows, found.token.index_keys)
    ours = printed["systems"]["ulacache"]["dp"]
    assert ours["logical_slots"] == found.logical_slots
    assert ours["admitted"] == {"2048": found.requests(2048)}


def start(
    model: str, arguments: dict[str, Any]
) -> tuple[Capacity, str, tuple[Any, Any, Any, list[Any]]]:
    """Start an engine.

    Returns:
        Its capacity, its start-up line, and what its capacity was asked with: vLLM's own function,
        config, layers and further arguments.
    """
    asked: list[tuple[Any, Any, Any, list[Any]]] = []
    lines: list[str] = []

    def noting(original: Any, config: Any, specs: Any, memory: Any, *rest: Any) -> Any:
        asked.append((original, config, specs, [*rest]))
        return logical_kv_cache_configs(original, config, specs, memory, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache_config, "logical_kv_cache_configs", noting)
        patch.setattr(block_manager.logger, "info", lambda form, *rest: lines.append(form % rest))
        patch.delenv("VLLM_CPU_KVCACHE_SPACE")
        with engine(model, {"host_gib": 0.031}, **arguments) as llm:
            found = scheduler(llm).kv_cache_config.capacity
    (line,) = (line for line in lines if "logical slots" in line)
    return found, line, asked[0]


@pytest.mark.parametrize("kind", ["bfloat16", "fp8 rows, three groups, MTP"])
def test_plan_predicts_the_engine(kind: str, tiny: str, tmp_path: Path, capsys: Any) -> None:
    from vllm_ula.tiny_model import IndexShare, TinyModelOptions, write_tiny_model

    engine_arguments: dict[str, Any] = {"kv_cache_memory_bytes": 8 * MIB + 54_321}
    if kind == "bfloat16":
        model, seqs = tiny, 8
        engine_arguments["dtype"] = "bfloat16"
        plan_arguments = ["--kv-dtype", "bf16"]
    else:
        model, seqs = str(tmp_path), 6
        write_tiny_model(tmp_path, TinyModelOptions(index_share=IndexShare(4, 3), mtp=1))
        drafts = drafting("mtp", 2)
        engine_arguments |= {"kv_cache_dtype": "fp8_ds_mla", "speculative_config": drafts}
        plan_arguments = ["--kv-dtype", "fp8_ds_mla", "--spec-tokens", 2]
    plan_arguments += ["--max-num-seqs", seqs]
    found, line, (original, config, specs, rest) = start(
        model, {"max_num_seqs": seqs, **engine_arguments}
    )

    assert found.device_bytes == 8 * MIB + 54_321
    assert_predicted(predicted(capsys, model, found, *plan_arguments), found)
    figures = re.match(r"UlaCache: (\d+) logical slots = (\d+) device rows \+ (\d+) host", line)
    assert figures is not None
    told = predicted(capsys, model, found, *plan_arguments)["engine"]
    assert [int(figure) for figure in figures.groups()] == [
        told[name] for name in ("logical_slots", "device_slots", "host_slots")
    ]

    # Other budgets, through the function that has just started an engine.
    for device_bytes, host_bytes, device_slots, binding in BUDGETS:
        settings: dict[str, Any] = {"host_gib": host_bytes / 2**30}
        if device_slots is not None:
            settings["device_slots"] = device_slots
        config.kv_transfer_config.kv_connector_extra_config = settings
        config.model_config.max_model_len = 256
        (logical,) = logical_kv_cache_configs(original, config, specs, [device_bytes], *rest)
        split = logical.capacity
        assert split.limit is binding
        assert (split.device_bytes, split.host_bytes) == (device_bytes, host_bytes)
        assert logical.num_blocks == split.num_blocks
        fixed = [] if device_slots is None else ["--device-slots", device_slots]
        printed = predicted(capsys, model, split, *plan_arguments, *fixed)
        assert_predicted(printed, split)
        least = min_device_slots(config)
        assert printed["engine"]["min_device_slots"] == least
        assert f"{split.device_slots} device rows" in start_line(split, 2048, least)


def test_control_another_budget_is_told_apart(tiny: str, capsys: Any) -> None:
    from vllm_ula.capacity import TokenBytes, fit

    token = TokenBytes(4 * 656, 4 * 132, 4 * 5 + 1, 4 * 25)
    arguments = ("--kv-dtype", "fp8_ds_mla", "--max-num-seqs", 8)
    right = fit(token, 8 * MIB, 21 * MIB, 16, 144)
    assert_predicted(predicted(capsys, tiny, right, *arguments), right)
    uncharged = fit(TokenBytes(4 * 656, 4 * 132), 8 * MIB, 21 * MIB, 16, 144)
    with pytest.raises(AssertionError):
        assert_predicted(predicted(capsys, tiny, uncharged, *arguments), uncharged)
