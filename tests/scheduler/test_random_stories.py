"""Random stories through vLLM's real scheduler: nothing is lost, nothing leaks, nothing hangs."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from scheduler.rig import Rig
from scheduler.settings import Settings
from vllm.v1.request import RequestStatus

from vllm_ula.planner import PbLru, TimestampLru


def draw(rng: random.Random, lag: int) -> Settings:
    blocks = rng.choice((9, 13, 20))
    return Settings(
        blocks=blocks,
        block_size=rng.choice((2, 4, 8)),
        device_blocks=rng.choice((2, 3, 5, blocks)),
        lag=lag,
        drafts=rng.choice((0, 0, 1, 2, 4)),
        method=rng.choice(("ngram", "mtp")),
        requests=rng.choice((2, 4, 8)),
        tokens=rng.choice((9, 16, 40)),
        policy=rng.choice(("fcfs", "priority")),
        chunked=rng.random() < 0.7,
        caching=rng.random() < 0.8,
        deferred=rng.random() < 0.7,
        new_runner=rng.random() < 0.3,
        topk=rng.choice((1, 3, 8)),
        planner=rng.choice((PbLru, TimestampLru)),
    )


def stage(rig: Rig, request_id: str) -> str:
    """Where an abort finds a request."""
    request = rig.requests[request_id]
    if request.is_finished():
        return "over"
    if request.status == RequestStatus.WAITING:
        return "queued"
    if request.status == RequestStatus.PREEMPTED:
        return "preempted"
    prefill = "prefill" if request.num_output_tokens == 0 else "decode"
    return f"{prefill} in flight" if request.num_in_flight_tokens else prefill


def tell(lag: int, seed: int) -> Counter[str]:
    """One story; what happened in it."""
    rng = random.Random(seed)
    settings = draw(rng, lag)
    accept = [rng.randrange(settings.drafts + 1) for _ in range(7)]
    rig = Rig(settings, seed, accept)
    most = settings.max_len
    prefixes = [[rng.randrange(50) for _ in range(most)] for _ in range(2)]
    seen: Counter[str] = Counter()

    def abort() -> None:
        if rig.requests and rng.random() < 0.12:
            request_id = str(rng.randrange(len(rig.requests)))
            seen[f"abort {stage(rig, request_id)}"] += 1
            rig.abort(request_id)

    for _ in range(40):
        if rng.random() < 0.5:
            length = rng.randrange(1, most * 2 // 3)
            shared = rng.randrange(length + 1)
            own = [rng.randrange(50) for _ in range(length - shared)]
            rig.submit(
                rng.choice(prefixes)[:shared] + own,
                max_tokens=rng.randrange(1, most // 3 + 2),
                priority=rng.randrange(3),
                salt=rng.choice((None, None, "x")),
                stop=rng.choice((None, rng.randrange(50))),
            )
        abort()
        if rig.num_free == settings.blocks - 1 and rng.random() < 0.3:
            seen["resets"] += rig.scheduler.reset_prefix_cache()
        if rig.scheduler.has_requests():
            rig.schedule()
            abort()
        while len(rig.in_flight) > lag:
            rig.settle()
    rig.drain()
    return seen + rig.seen + rig.worker.seen


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_random_stories(lag: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        seen += tell(lag, seed)
    print(seen)
