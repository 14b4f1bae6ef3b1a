"""With UlaCache and without, under one schedule: the same tokens and logprobs to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine.harness import (
    Completion,
    assert_same,
    engine,
    metrics,
    num_free_blocks,
    prefix_hits,
    run,
)
from engine.workload import AGAIN, BLOCKS, HISTORY, POOLS, REQUESTS

from vllm_ula import step as step_module

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=POOLS)
def arm(
    request: pytest.FixtureRequest, tiny: str, expected: list[Completion]
) -> Iterator[tuple[str, Any]]:
    """An engine with UlaCache for each size of the device pool; one engine a process at a time."""
    with engine(tiny, POOLS[request.param], num_gpu_blocks_override=BLOCKS) as llm:
        yield request.param, llm


def test_history_is_what_the_pools_are_measured_against() -> None:
    assert HISTORY // 2 == 1138
    assert HISTORY // 8 == 284


def test_same_tokens_and_logprobs(arm: tuple[str, Any], expected: list[Completion]) -> None:
    pool, llm = arm
    free = num_free_blocks(llm)
    moved: list[int] = [0, 0]

    def counted(layers: Any, exchange: Any) -> None:
        transfer(layers, exchange)
        row_bytes = sum(layer.row_bytes for layer in layers)
        moved[0] += int(exchange.fetch.sum()) * row_bytes
        moved[1] += int(exchange.write_back.sum()) * row_bytes

    transfer = step_module.transfer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_module, "transfer", counted)
        assert_same(run(llm, REQUESTS), expected)

    values = metrics(llm)
    in_place = values["read_in_place_rows.device"] + values["read_in_place_rows.host"]
    assert values["selected_rows"] == values["device_hits"] + values["fetched_rows"] + in_place
    assert [values["fetched_bytes"], values["written_back_bytes"]] == moved
    assert values["fetched_bytes"] == values["fetched_rows"] * 576 * 4
    assert num_free_blocks(llm) == free
    if pool == "no host":
        assert moved == [0, 0]
        assert values["rows.host.live"] == values["rows.host.dead"] == 0
    else:
        assert min(moved) > 0
    assert sum(v for k, v in values.items() if k.startswith("rows.")) == BLOCKS * 16


def test_a_warm_engine_gives_the_same_tokens(
    arm: tuple[str, Any], expected_warm: list[Completion]
) -> None:
    """Prefix hits on blocks whose rows have gone to the host meanwhile read the right rows."""
    _, llm = arm
    hits = prefix_hits(llm)
    assert_same(run(llm, AGAIN), expected_warm)
    assert prefix_hits(llm) > hits
