"""Controls: what the rig asserts goes red, each check on its own, as soon as something is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from scheduler.rig import Rig
from scheduler.settings import Settings
from scheduler.worker import Worker

from vllm_ula import step
from vllm_ula.block_manager import DeadBlocks

MOST_STEPS = 60
CHECKS = {
    "check_counts": Worker,
    "check_reads": Worker,
    "check_rows": Worker,
    "check_unwritten": Worker,
    "check_blocks": Rig,
    "check_cached_blocks": Rig,
    "check_live_rows": Rig,
}


@pytest.fixture(params=[0, 1])
def rig(request: pytest.FixtureRequest) -> Rig:
    """Two requests in decode, with cached blocks, more rows than the device has."""
    rig = Rig(Settings(device_blocks=3, lag=request.param))
    for first in (0, 100):
        rig.submit(range(first, first + 16), 12)
    for _ in range(4):
        rig.step()
    return rig


def goes_red(rig: Rig, check: str, message: str = "") -> None:
    """This check alone, the others switched off, fails at some step."""
    with contextlib.ExitStack() as off:
        for name, owner in CHECKS.items():
            if name != check:
                off.enter_context(mock.patch.object(owner, name))
        with pytest.raises(AssertionError, match=message):
            rig.drain(MOST_STEPS)


def live_host_slots(rig: Rig) -> torch.Tensor:
    residency = rig.worker.residency
    return (residency.live & (residency.home >= residency.num_device)).nonzero().flatten()


def swap_host_rows(rig: Rig) -> None:
    """Swap valid rows of two requests, in one layer."""
    residency = rig.worker.residency
    blocks = [rig.table(request_id)[:3] for request_id in ("0", "1")]
    live = live_host_slots(rig)
    a, b = (live[torch.isin(live // rig.settings.block_size, torch.tensor(ids))] for ids in blocks)
    num = min(len(a), len(b))
    assert num
    rows = residency.homes(torch.cat((a[:num], b[:num]))) - residency.num_device
    host = rig.worker.layers[1].host
    host[rows] = host[rows.roll(num)]


def kill_live_blocks(rig: Rig) -> None:
    """A false death, of the blocks of a request that runs."""
    rig.worker.begin_step(rig.table("0")[:3])


@pytest.mark.parametrize(
    ("damage", "check", "message"),
    [
        (swap_host_rows, "check_rows", "a row is lost"),
        (swap_host_rows, "check_reads", "a wrong row is read"),
        (swap_host_rows, "check_cached_blocks", "a cached block has a wrong row"),
        (kill_live_blocks, "check_reads", "a dead row is read"),
        (kill_live_blocks, "check_cached_blocks", "a cached block has a dead row"),
        (kill_live_blocks, "check_counts", ""),
    ],
)
def test_damage_is_seen(rig: Rig, damage: Callable[[Rig], None], check: str, message: str) -> None:
    damage(rig)
    goes_red(rig, check, message)


def test_undamaged_it_is_green(rig: Rig) -> None:
    assert len(live_host_slots(rig)) > 0
    rig.drain(MOST_STEPS)


def test_the_bytes_a_false_death_loses_are_seen(rig: Rig) -> None:
    """The dead rows are revived before they are read: what tells is what they hold."""
    live = rig.worker.residency.live.clone()
    kill_live_blocks(rig)
    slots = rig.worker.slots(rig.table("0")[:3]).flatten()
    others = torch.tensor([slot for slot in live_host_slots(rig).tolist() if slot not in slots])
    nobody = torch.empty(0, dtype=torch.int64)
    for slot in others.tolist():
        selection = torch.tensor([[slot]])
        step.run(
            rig.worker.domain,
            step.Call(nobody, nobody.bool(), selection, torch.ones(1, dtype=torch.bool)),
        )
    rig.worker.residency.live.copy_(live)
    goes_red(rig, "check_reads", "a wrong row is read")


def test_a_layer_whose_rows_do_not_move_is_seen(rig: Rig) -> None:
    move = step.transfer
    with mock.patch.object(step, "transfer", lambda layers, exchange: move(layers[:1], exchange)):
        goes_red(rig, "check_reads", "a wrong row is read")


def test_deaths_applied_after_the_writes_of_their_step_are_seen(rig: Rig) -> None:
    begin_step, execute = rig.worker.begin_step, rig.worker.execute
    late: list[int] = []
    rig.worker.begin_step = late.extend

    def execute_then_kill(output):
        result = execute(output)
        begin_step(late)
        late.clear()
        return result

    rig.worker.execute = execute_then_kill
    rig.submit(range(200, 208), 8)
    goes_red(rig, "check_reads", "a dead row is read")


def test_blocks_said_to_be_dead_though_a_prefix_can_hit_them_are_seen() -> None:
    def watch(self: DeadBlocks, pool) -> None:
        watch_deaths(self, pool)
        free_blocks = pool.free_blocks

        def free_and_tell_all(blocks):
            blocks = list(blocks)
            free_blocks(blocks)
            self._blocks.extend(block.block_id for block in blocks)

        pool.free_blocks = free_and_tell_all

    watch_deaths = DeadBlocks.watch
    with mock.patch.object(DeadBlocks, "watch", watch):
        rig = Rig(Settings())
    rig.submit(range(16), 2)
    goes_red(rig, "check_cached_blocks", "a cached block has a dead row")


@pytest.mark.parametrize("check", ["check_live_rows", "check_unwritten"])
def test_missed_deaths_are_seen(check: str) -> None:
    """Of blocks that are freed, and of blocks that are handed out."""
    rig = Rig(Settings(caching=False, requests=1))
    rig.submit(range(16), 2)
    rig.submit(range(16), 2)
    with mock.patch.object(DeadBlocks, "drain", return_value=()):
        goes_red(rig, check, "a death was missed|a row is alive")


def test_a_block_that_is_held_by_nobody_is_seen(rig: Rig) -> None:
    rig.pool.get_new_blocks(1)
    with pytest.raises(AssertionError):
        rig.check_blocks()


def test_a_block_that_is_freed_twice_is_seen(rig: Rig) -> None:
    """Public report L04: a negative count is an error, nothing clamps it."""
    rig.pool.free_blocks([rig.pool.blocks[rig.table("0")[0]]])
    with pytest.raises(AssertionError):
        rig.check_blocks()


def test_blocks_vllm_caches_without_computing_them_are_seen() -> None:
    """vllm#43569, open: the rig takes such blocks out of the prefix cache.

    Fails once vLLM does so itself: then `Rig._forget_uncomputed` can go.
    """

    def rig() -> Rig:
        rig = Rig(Settings(blocks=8, policy="priority", drafts=1))
        rig.submit(range(7), 8, priority=1)
        rig.step()
        rig.submit(range(100, 108), 8)
        return rig

    with mock.patch.object(Rig, "_forget_uncomputed"):
        goes_red(rig(), "check_cached_blocks", "a cached block has a")
    taken_out = rig()
    taken_out.drain()
    assert taken_out.seen["uncomputed"] == 1
