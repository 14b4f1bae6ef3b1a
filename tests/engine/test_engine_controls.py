"""What an operator does to a running engine, and what it publishes: as without UlaCache.

Both arms run one story: the workload, a cache reset, weights forgotten and reloaded, a pause. The
arm with UlaCache has its device memory from --kv-cache-memory-bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
    scheduler,
)
from engine.workload import AGAIN, BLOCKS, LENGTHS, REQUESTS
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored

from vllm_ula.map_bytes import map_bytes

pytestmark = pytest.mark.engine

# Rows and maps of 160 device slots, index keys and maps of 2,816 logical slots: 2 layers, float32.
ROW_BYTES, DEVICE_SLOTS, LOGICAL_SLOTS = 2 * 576 * 4, 160, BLOCKS * 16
MAP_BYTES = map_bytes("pb_lru", with_kernels=False).device
DEVICE_BYTES = DEVICE_SLOTS * (ROW_BYTES + 2 * MAP_BYTES) + LOGICAL_SLOTS * (2 * 132 + 2 * 5 + 1)
HOST_GIB = (LOGICAL_SLOTS - DEVICE_SLOTS) * ROW_BYTES / 2**30
CHAPTERS = ("cold", "warm", "reset", "warm again", "reloaded", "woken", "disturbed")
EVENTS = KVEventsConfig(enable_kv_cache_events=True, publisher="null")


@dataclass
class Story:
    """What one arm did.

    Attributes:
        events: published, in order, times left out.
        completions: by chapter.
        hits: tokens the prefix cache saved, by chapter.
        resets: what `reset_prefix_cache` returned while requests ran, and at rest.
        free: blocks before the story and after it.
        capacity: of UlaCache.
    """

    events: list[Any] = field(default_factory=list)
    completions: dict[str, list[Completion]] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    resets: list[bool] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    capacity: Any = None


def tell(llm: Any) -> Story:
    """Run the story on an engine at rest."""
    story = Story(free=[num_free_blocks(llm)])
    scheduler(llm).kv_event_publisher.publish = lambda batch: story.events.extend(batch.events)

    def chapter(name: str, requests: Any, at_step: Any = None) -> None:
        before = prefix_hits(llm)
        story.completions[name] = run(llm, requests, at_step)
        story.hits[name] = prefix_hits(llm) - before

    def disturb(step: int) -> None:
        if step == 5:
            story.resets.append(llm.reset_prefix_cache())  # refused: requests hold blocks
        if step == 8:  # every running request starts again
            story.resets.append(llm.reset_prefix_cache(reset_running_requests=True))

    chapter("cold", REQUESTS)
    chapter("warm", AGAIN)
    story.resets.append(llm.reset_prefix_cache(reset_connector=True))
    chapter("reset", AGAIN)
    chapter("warm again", AGAIN)
    llm.apply_model(forget_weights)
    llm.collective_rpc("reload_weights")
    chapter("reloaded", AGAIN)
    llm.sleep(level=1)  # without --enable-sleep-mode, on a CPU: a pause that clears the caches
    llm.wake_up()
    chapter("woken", AGAIN)
    chapter("disturbed", REQUESTS, disturb)
    story.free.append(num_free_blocks(llm))
    return story


def forget_weights(model: Any) -> None:
    """Leave nothing that a reload could rely on."""
    for parameter in model.parameters():
        parameter.data.zero_()


@pytest.fixture(scope="module")
def without(dense: str) -> Story:
    """The story without UlaCache."""
    with engine(dense, num_gpu_blocks_override=BLOCKS, kv_events_config=EVENTS) as llm:
        return tell(llm)


@pytest.fixture(scope="module")
def with_ula(dense: str, without: Story) -> Story:
    """The story with as many blocks, because device and host bytes hold just that many."""
    arguments: dict[str, Any] = {"kv_cache_memory_bytes": DEVICE_BYTES, "kv_events_config": EVENTS}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_CPU_KVCACHE_SPACE")  # would win
        with engine(dense, {"host_gib": HOST_GIB}, **arguments) as llm:
            story = tell(llm)
            story.capacity = scheduler(llm).kv_cache_config.capacity
            assert metrics(llm)["fetched_rows"] > 0
    return story


def test_kv_cache_memory_bytes_is_the_device_memory(with_ula: Story) -> None:
    found = with_ula.capacity
    assert (found.logical_slots, found.device_slots) == (LOGICAL_SLOTS, DEVICE_SLOTS)
    assert found.device_bytes == DEVICE_BYTES


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_same_tokens(chapter: str, with_ula: Story, without: Story) -> None:
    assert_same(with_ula.completions[chapter], without.completions[chapter])


def test_same_hits(with_ula: Story, without: Story) -> None:
    """None after a reset; the same weights keep the cache, as without UlaCache."""
    assert with_ula.hits == without.hits
    assert with_ula.hits["cold"] == with_ula.hits["reset"] == with_ula.hits["woken"] == 0
    assert with_ula.hits["warm"] == with_ula.hits["reloaded"] > 0


def test_reset_prefix_cache(with_ula: Story, without: Story) -> None:
    """Done at rest and with preemption, refused while requests run; no block is lost."""
    assert with_ula.resets == without.resets == [True, False, True]
    assert with_ula.free == without.free == [BLOCKS - 1] * 2


def test_weights_reloaded_change_nothing(with_ula: Story) -> None:
    """Neither weights nor rows are lost: prefix hits read rows of before the reload."""
    assert_same(with_ula.completions["reloaded"], with_ula.completions["warm again"])


def test_same_kv_events(with_ula: Story, without: Story) -> None:
    """Nothing of UlaCache's takes events from the publisher, or adds any."""
    assert with_ula.events == without.events
    stored = [event for event in with_ula.events if isinstance(event, BlockStored)]
    assert sum(len(event.block_hashes) for event in stored) >= sum(n // 16 for n in LENGTHS)
    assert sum(isinstance(event, AllBlocksCleared) for event in with_ula.events) == 3
