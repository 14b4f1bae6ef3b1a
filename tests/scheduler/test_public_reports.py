"""Failures reported about neighbouring systems, tried here: each report's right value.

L03 and S04 are in test_async_lag.py, L04 is Rig.check_blocks at every step of every story.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from scheduler.rig import Rig
from scheduler.settings import Settings
from scheduler.worker import Worker
from vllm.v1.request import RequestStatus

from vllm_ula import step
from vllm_ula.attention import store
from vllm_ula.attention.impl import Pending
from vllm_ula.attention.metadata import UlaMetadata
from vllm_ula.errors import NotEnoughVictims
from vllm_ula.planner import Planner
from vllm_ula.planner.hash_lru import HashLru
from vllm_ula.planner.pb_lru import PbLru
from vllm_ula.planner.timestamp_lru import TimestampLru
from vllm_ula.records import Call, DeviceSlots

NOTHING = torch.empty(0, dtype=torch.int64)


def full_worker(device_blocks: int, blocks: int) -> Worker:
    """Every row is live: blocks of 4, written one after the other."""
    worker = Worker(Settings(blocks=blocks, device_blocks=device_blocks), iter(()), 0)
    for block in range(blocks):
        write(worker, worker.slots([block]).flatten())
    return worker


def write(worker: Worker, slots: torch.Tensor) -> None:
    prefill = torch.zeros(len(slots), dtype=torch.bool)
    selection = torch.full((len(slots), 1), -1)
    homes = step.run(worker.domain, Call(slots, prefill, selection, prefill))
    worker.truth[slots] = tags = slots * 1000 + len(worker.domain.plan_seconds)
    for number, layer in enumerate(worker.layers):
        rows = torch.stack((tags, torch.full_like(tags, number)), 1)
        step.write(layer, homes.written, rows)


def select(worker: Worker, slots: torch.Tensor) -> None:
    """One decode token reads these slots."""
    decode = torch.ones(1, dtype=torch.bool)
    homes = step.run(worker.domain, Call(NOTHING, NOTHING.bool(), slots.unsqueeze(0), decode))
    worker.check_reads(homes.selected, slots.unsqueeze(0), worker.truth[slots].unsqueeze(0))


def on(worker: Worker, device: bool) -> torch.Tensor:
    """Logical slots that live on the device, or on the host."""
    home = worker.residency.home
    return ((home < worker.residency.num_device) == device).nonzero().flatten()


def test_d02_rows_written_behind_our_back_are_copied_out() -> None:
    """vllm#56158: no hook says which rows were written, so every eviction moves bytes."""
    worker = full_worker(device_blocks=16, blocks=32)
    device, host = on(worker, device=True), on(worker, device=False)
    assert len(device) == len(host) == 64
    written = device[10:20]
    worker.truth[written] += 500
    for number, layer in enumerate(worker.layers):
        rows = torch.stack((worker.truth[written], torch.full_like(written, number)), 1)
        layer.device[worker.residency.homes(written)] = rows

    select(worker, host)

    assert torch.equal(on(worker, device=False), device)
    counts = worker.domain.counts
    assert counts.written_back == counts.fetched == 64
    assert counts.written_back_bytes == 64 * sum(layer.row_bytes for layer in worker.layers)
    worker.check_rows()


def test_d03_a_follower_waits_for_its_rows_before_it_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vllm#45704: whatever orders the copies, each layer asks it; tests/core has the orders."""
    domain, calls = full_worker(device_blocks=2, blocks=3).domain, mock.MagicMock()
    domain.lane = calls.lane
    monkeypatch.setattr(store, "write", calls.write)
    slots = torch.tensor([3, 9])
    metadata = UlaMetadata(
        num_actual_tokens=2,
        slot_mapping=slots,
        block_table=torch.tensor([[0, 1, 2]], dtype=torch.int32),
        request_of_token=torch.zeros(2, dtype=torch.int64),
        position_of_token=slots,
        decode=torch.ones(2, dtype=torch.bool),
        has_prefill=False,
        max_length=10,
        block_size=4,
        num_decodes=1,
        num_decode_tokens=2,
    )
    topk = torch.tensor([[8, 3], [9, 10]], dtype=torch.int32)
    pending = Pending(torch.zeros(2, 2), slots)
    for layer in range(2):
        store.RowStore(domain, layer, lambda: True).step(metadata, pending, topk)
    called = [name for name, *_ in calls.mock_calls]
    assert called == ["lane.join", "lane.start", "lane.wait", "write", "lane.wait", "write"]
    assert calls.lane.wait.call_args_list == [mock.call(0), mock.call(1)]


@pytest.mark.parametrize("wanted", [4, 3])
def test_d08_vacated_host_rows_hold_the_victims_of_the_same_exchange(wanted: int) -> None:
    """sglang#26728: no host row is recycled before its bytes were read, then free exactly once."""
    worker = full_worker(device_blocks=2, blocks=3)
    host, device = on(worker, device=False), on(worker, device=True)
    rows = worker.residency.homes(host)
    select(worker, host[:wanted])
    victims = torch.tensor(sorted(set(on(worker, device=False).tolist()) & set(device.tolist())))
    assert len(victims) == wanted
    assert set(worker.residency.homes(victims).tolist()) == set(rows[:wanted].tolist())
    worker.check_rows()
    assert worker.residency.states().host_dead == 0

    dead_blocks = sorted(set((victims // 4).tolist()))
    for _ in range(2):  # a death that is told twice frees nothing twice
        worker.begin_step(dead_blocks)
        states = worker.residency.states()
        assert states.host_dead == wanted
        assert states.device_dead == 4 * len(dead_blocks) - wanted
    worker.check_rows()


@pytest.mark.parametrize("method", ["ngram", "mtp"])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(
    ("settings", "lengths", "hits"),
    [
        (Settings(blocks=17, block_size=32, device_blocks=4, tokens=512, drafts=3), (256, 255), 11),
        (Settings(blocks=8, block_size=4, device_blocks=2, drafts=3), (16, 12), 2),
    ],
)
def test_k01_two_cached_prompts_that_do_not_fit_together_both_finish(
    settings: Settings, lengths: tuple[int, int], hits: int, lag: int, method: str
) -> None:
    """vllm#57104: each fits, both with their drafts do not; one waits, nobody for ever."""
    settings = replace(settings, lag=lag, method=method)
    rig = Rig(settings, accept=(3, 0, 1))
    prompts = [range(1000 * i, 1000 * i + length) for i, length in enumerate(lengths)]
    for prompt in prompts:
        rig.run(prompt)
    cached = sum(length // settings.block_size for length in lengths)
    # A drafter with rows of its own reserved slots for them, which cost the first prompt a block.
    assert len(rig.cached_blocks()) == cached - (method == "mtp")
    for prompt in prompts:
        rig.submit(prompt, settings.block_size + 2)
    waited = False
    for _ in range(300):
        rig.step()
        waited |= len(rig.scheduler.running) == len(rig.scheduler.waiting) == 1
    rig.drain(0)
    assert waited
    seen = rig.worker.seen
    assert seen["hit blocks"] >= hits
    assert seen["hit on host"] >= seen["hit blocks"] - settings.device_blocks


@pytest.mark.parametrize("planner", [PbLru, TimestampLru, HashLru])
def test_k03_too_many_victims_are_refused_at_once(planner: type[Planner]) -> None:
    """LMCache#2942: nothing waits for a victim that cannot come, and nothing has changed."""
    chooser = planner(8)
    chooser.begin_call()
    rows = torch.arange(5)
    chooser.admit(DeviceSlots(rows), rows)
    assert len(chooser.choose(rows[:3])) == 3
    before = repr(vars(chooser))
    with pytest.raises(NotEnoughVictims, match="4 victims asked, 3 device rows"):
        chooser.choose(rows[:4])
    assert repr(vars(chooser)) == before


def test_k03_an_allocation_that_does_not_fit_takes_nothing() -> None:
    """LMCache#3855: no part of it stays held, no block is told dead."""
    rig = Rig(Settings(blocks=5, device_blocks=2, caching=False))
    rig.submit(range(6), 4)
    rig.step()
    free = rig.num_free
    with pytest.raises(ValueError, match="Cannot get"):
        rig.pool.get_new_blocks(free + 1)
    assert rig.num_free == free
    waiting = rig.submit(range(14))
    rig.schedule()
    assert rig.table(waiting) == []
    assert rig.in_flight[-1][0].kv_connector_metadata.dead_blocks == ()
    rig.drain()


@pytest.mark.parametrize("lag", [0, 1])
def test_k03_without_a_host_tier_the_same_calls_work(lag: int) -> None:
    rig = Rig(Settings(blocks=9, device_blocks=9, lag=lag, drafts=2), accept=(1, 0, 2))
    for first in range(0, 400, 100):
        rig.submit(range(first, first + 11), 12)
    rig.drain()
    counts = rig.worker.domain.counts
    assert rig.seen["preemptions"] > 0
    assert counts.hits > 0
    assert counts.fetched == counts.written_back == counts.in_place_host == 0


@pytest.mark.parametrize(("lag", "method"), [(0, "ngram"), (1, "ngram"), (0, "mtp")])
def test_p01_only_confirmed_tokens_are_cached(lag: int, method: str) -> None:
    """vllm#52735: the count of cached blocks never runs past confirmed tokens, nor stays behind."""
    size = 16
    rig = Rig(
        Settings(
            blocks=100,
            block_size=size,
            device_blocks=8,
            lag=lag,
            drafts=5,
            method=method,
            tokens=256,
        ),
        accept=(0, 5, 1, 3, 0),
    )
    request_id = rig.submit(range(202), 500)
    request = rig.requests[request_id]
    while not request.is_finished():
        if lag:
            rig.step()
            confirmed = request.num_computed_tokens - request.num_output_placeholders
            assert len(rig.cached_blocks()) == confirmed // size
        else:
            rig.schedule()
            assert len(rig.cached_blocks()) == request.num_tokens // size
            rig.settle()
    rig.drain()
    assert rig.worker.seen["accepted"] > 200
    assert rig.worker.seen["rejected"] > 200

    rig.run(range(1000, 1600), 20)  # takes the device
    everything = [*range(202), *rig.completions[request_id].tokens]
    num = len(everything)
    hits = rig.worker.seen["hit blocks"]
    rig.run(everything)
    # A drafter that reads the rows before its own gives up the last block of a hit.
    assert rig.worker.seen["hit blocks"] - hits == (num - 1) // size - (method == "mtp")
    assert rig.worker.seen["hit on host"] >= num // size - 8


class TestX01:
    """vllm#39702: between look-up and use other requests allocate."""

    PROMPT = range(16)
    LONGER = range(20)
    OTHER = range(100, 122)

    def cached(self, lag: int) -> Rig:
        """Four blocks of eight are cached, half of their rows are on the host."""
        rig = Rig(Settings(blocks=9, device_blocks=2, lag=lag, tokens=64))
        rig.run(self.PROMPT)
        assert len(rig.cached_blocks()) == 4
        return rig

    def looked_up(self, rig: Rig, request_id: str) -> int:
        """Tokens the prefix cache holds of a request."""
        return rig.manager.get_computed_blocks(rig.requests[request_id])[1]

    @pytest.mark.parametrize("lag", [0, 1])
    def test_hit_blocks_are_held_at_once(self, lag: int) -> None:
        rig = self.cached(lag)
        first = rig.submit(self.LONGER, 4)
        second = rig.submit(self.OTHER, 2)
        rig.schedule()
        assert [rig.pool.blocks[i].ref_cnt for i in rig.table(first)] == [1] * 5
        assert rig.requests[second].status == RequestStatus.WAITING
        assert rig.worker.seen["hit blocks"] == 4
        rig.drain()

    @pytest.mark.parametrize("lag", [0, 1])
    def test_what_was_evicted_meanwhile_is_no_hit(self, lag: int) -> None:
        rig = self.cached(lag)
        first = rig.submit(self.OTHER, 2)
        second = rig.submit(self.LONGER, 4)
        assert self.looked_up(rig, second) == 16
        rig.schedule()
        assert len(rig.table(first)) == 6
        assert rig.requests[second].status == RequestStatus.WAITING
        assert self.looked_up(rig, second) == 8
        rig.drain()
        assert rig.worker.seen["hit blocks"] == 2

    @pytest.mark.parametrize("lag", [0, 1])
    def test_an_abort_lets_go_of_them(self, lag: int) -> None:
        rig = self.cached(lag)
        request_id = rig.submit(self.LONGER, 4)
        rig.schedule()
        rig.abort(request_id)
        rig.drain()
        assert len(rig.cached_blocks()) == 5
        assert rig.run(self.LONGER, 4)
        assert rig.worker.seen["hit blocks"] == 8
