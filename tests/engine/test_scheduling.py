"""What the scheduler does to blocks: reuse, waiting, aborts. No row is lost, no block leaks."""

from __future__ import annotations

from typing import Any

import pytest
from engine.harness import (
    Request,
    assert_same,
    engine,
    metrics,
    num_free_blocks,
    prompts,
    run,
    worker,
)

pytestmark = pytest.mark.engine

LENGTHS = (220, 150, 300, 180, 260, 140, 310, 200, 240, 160, 280, 190)
BLOCKS = 33  # 32 usable: about two requests at a time, every block is reused many times
TIGHT: dict[str, Any] = {
    "num_gpu_blocks_override": BLOCKS,
    "enable_prefix_caching": False,
    "max_model_len": 512,
}
REQUESTS = [Request(prompt, 20, arrives=i) for i, prompt in enumerate(prompts(LENGTHS, seed=1))]


def with_aborts() -> list[Request]:
    """The same requests, some aborted while queued, in prefill, in decode and after the end."""
    at = {1: 4, 4: 5, 6: 40, 9: 9, 11: 200}
    return [Request(r.prompt, r.max_tokens, r.arrives, at.get(i)) for i, r in enumerate(REQUESTS)]


@pytest.fixture(scope="module")
def without(tiny: str) -> tuple[Any, Any]:
    """Completions without UlaCache: all requests, then with aborts."""
    with engine(tiny, **TIGHT) as llm:
        return run(llm, REQUESTS), run(llm, with_aborts())


def test_blocks_are_reused_and_aborts_leak_nothing(
    tiny: str, without: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Public reports L01, K06 and S02 as kinds: waiting instead of failing, aborts at any stage."""
    allocated: dict[int, int] = {}
    with engine(tiny, {"device_slots": 160, "host_gib": 0.05}, **TIGHT) as llm:
        pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        get_new_blocks = pool.get_new_blocks

        def counting(num_blocks: int) -> Any:
            blocks = get_new_blocks(num_blocks)
            for block in blocks:
                allocated[block.block_id] = allocated.get(block.block_id, 0) + 1
            return blocks

        monkeypatch.setattr(pool, "get_new_blocks", counting)
        free = num_free_blocks(llm)
        assert free == BLOCKS - 1
        assert_same(run(llm, REQUESTS), without[0])
        assert_same(run(llm, with_aborts()), without[1])
        assert len(allocated) == num_free_blocks(llm) == free
        assert min(allocated.values()) >= 1 + 3  # handed out, and reused at least 3 times

        values = metrics(llm)
        assert values["fetched_rows"] > 0
        assert values["written_back_rows"] > 0
        for domain in worker().domains:
            assert domain.residency.states().device_live + domain.residency.states().host_live == 0


def test_capacity_is_device_and_host_together(tiny: str) -> None:
    """Public report L01: neither pool alone decides, and a long request ends by itself.

    160 device rows + 160 host rows = 19 usable blocks of 16: one request of 300 tokens, or three
    of 96. The fourth waits, nobody fails.
    """
    row_bytes = 4 * 576 * 4
    host_gib = 160 * row_bytes / 2**30
    with engine(tiny, {"device_slots": 160, "host_gib": host_gib}, max_model_len=300) as llm:
        assert num_free_blocks(llm) == 19
        (long,) = run(llm, [Request(prompts([290])[0], 10)])
        assert (len(long.tokens), long.finish_reason) == (10, "length")

        running = []
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        four = [Request(prompt, 6) for prompt in prompts([90] * 4, seed=2)]
        done = run(llm, four, at_step=lambda step: running.append(len(scheduler.running)))
        assert max(running) == 3
        assert [len(completion.tokens) for completion in done] == [6] * 4
