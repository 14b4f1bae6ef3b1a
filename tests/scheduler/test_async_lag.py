"""Aborts, stops and preemptions while steps are in flight: what is freed when, and what lives."""

from __future__ import annotations

import pytest
from scheduler.rig import Rig
from scheduler.settings import Settings

START = 16  # free blocks of an empty pool


def ahead(lag: int, **settings: object) -> Rig:
    return Rig(Settings(blocks=START + 1, lag=lag, **settings))


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_l03_aborted_requests_hold_their_blocks_until_their_last_step_is_through(lag: int) -> None:
    """Public report L03, vllm-ascend#16662: 50 aborts, blocks back exactly, each time."""
    rig = ahead(lag)
    for number in range(50):
        request_id = rig.submit(range(number, number + 18), 12)
        for _ in range(lag):
            rig.schedule()
        held = rig.num_free
        assert held < START
        rig.abort(request_id)
        while rig.in_flight:
            assert rig.num_free == held
            rig.settle()
        assert rig.num_free == START
    rig.drain()


@pytest.mark.parametrize("lag", [1, 2])
def test_blocks_handed_on_under_a_step_in_flight_keep_their_new_rows(lag: int) -> None:
    """Without deferral the next request gets them at once; steps run in order all the same."""
    rig = ahead(lag, deferred=False, caching=False)
    first = rig.submit(range(40), 12)
    for _ in range(lag):
        rig.schedule()
    blocks = set(rig.table(first))
    rig.abort(first)
    assert rig.num_free == START
    second = rig.submit(range(100, 130), 12)
    rig.schedule()
    assert blocks & set(rig.table(second))
    rig.drain()


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_what_a_stopped_request_wrote_ahead_dies_with_it(lag: int, deferred: bool) -> None:
    """A stop token is known late: the steps in flight have written on, into blocks freed by then.

    `drain` finds a row of theirs that stays alive.
    """
    rig = ahead(lag, deferred=deferred, drafts=3, caching=False)
    stop = rig.completions[rig.run(range(30), 20)].tokens[5]
    request_id = rig.submit(range(30), 20, stop=stop)
    rig.drain()
    tokens = rig.completions[request_id].tokens
    assert tokens.index(stop) == len(tokens) - 1 <= 5
    assert not rig.worker.residency.live.any()


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_s04_preempted_requests_get_their_rows_back(lag: int) -> None:
    """Public report S04, vllm#46014: preempted, resumed on cached blocks with rows on the host."""
    settings = {"blocks": 9, "block_size": 32, "device_blocks": 2, "tokens": 256}
    rig = Rig(Settings(lag=lag, **settings))
    for first in range(0, 400, 100):
        rig.submit(range(first, first + 66), 67)
    rig.drain()
    assert rig.seen["preemptions"] >= 1
    assert rig.worker.seen["hit on host"] >= 1
    assert rig.worker.domain.counts.fetched > 0


@pytest.mark.parametrize("lag", [1, 2])
def test_tokens_in_flight_at_a_preemption_are_delivered(lag: int) -> None:
    """Without deferral a request may be preempted under a step of its own."""
    rig = Rig(Settings(blocks=9, device_blocks=3, lag=lag, drafts=2, deferred=False), accept=(2, 0))
    stale = 0
    for first in (0, 100, 200):
        rig.submit(range(first, first + 9), 16)
    while rig.scheduler.running or rig.scheduler.waiting:
        rig.schedule()
        stale += sum(request.num_stale_output_tokens for request in rig.requests.values())
        while len(rig.in_flight) > lag:
            rig.settle()
    assert stale > 0
    rig.drain()
