"""Random stories through vLLM's real scheduler: nothing is lost, nothing leaks, nothing hangs.

What must hold is in Rig and Worker, after every step; a story only has to be eventful.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from scheduler.rig import Rig
from scheduler.settings import Settings
from vllm.v1.request import RequestStatus

from vllm_ula.planner.hash_lru import HashLru
from vllm_ula.planner.pb_lru import PbLru
from vllm_ula.planner.timestamp_lru import TimestampLru

STORIES = 24

# What the stories of each lag must have contained at least, about half of what they do.
SEEN = {
    "steps": 800,
    "preemptions": 45,
    "hit blocks": 120,
    "hit on host": 80,
    "hit unwritten": 3,
    "accepted": 450,
    "rejected": 450,
    "resets": 20,
    "abort queued": 25,
    "abort preempted": 2,
    "abort prefill in flight": 8,
    "abort decode in flight": 18,
    "abort over": 30,
}
# With outputs in flight hardly any running request is at rest.
SEEN_WITHOUT_LAG = {"abort prefill": 2, "abort decode": 15}


def draw(rng: random.Random, lag: int) -> Settings:
    """Sizes at which requests compete for blocks, and rows for the device."""
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
        planner=rng.choice((PbLru, TimestampLru, HashLru)),
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
    doing = "decode" if request.num_output_tokens else "prefill"
    return f"{doing} in flight" if request.num_in_flight_tokens else doing


def tell(lag: int, seed: int) -> Counter[str]:
    """One story; what happened in it."""
    rng = random.Random(seed)
    settings = draw(rng, lag)
    accept = [rng.randrange(settings.drafts + 1) for _ in range(7)]
    rig = Rig(settings, seed, accept)
    prefixes = [[rng.randrange(50) for _ in range(settings.max_len)] for _ in range(2)]
    seen: Counter[str] = Counter()

    def submit() -> None:
        length = rng.randrange(1, settings.max_len * 2 // 3)
        shared = rng.randrange(length + 1)
        own = [rng.randrange(50) for _ in range(length - shared)]
        rig.submit(
            rng.choice(prefixes)[:shared] + own,
            max_tokens=rng.randrange(1, settings.max_len // 3 + 2),
            priority=rng.randrange(3),
            salt=rng.choice((None, None, "x")),
            stop=rng.choice((None, rng.randrange(50))),
        )

    def abort() -> None:
        if rig.requests and rng.random() < 0.12:
            found = {stage(rig, request_id): request_id for request_id in rig.requests}
            where, request_id = rng.choice(sorted(found.items()))
            seen[f"abort {where}"] += 1
            rig.abort(request_id)

    for _ in range(40):
        if rig.num_free == settings.blocks - 1 and rng.random() < 0.3:
            seen["resets"] += rig.scheduler.reset_prefix_cache()
        if rng.random() < 0.5:
            submit()
        abort()
        if rig.scheduler.has_requests():
            rig.schedule()
            abort()
        while len(rig.in_flight) > lag:
            rig.settle()
    rig.drain()
    return seen + rig.seen + rig.worker.seen


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_every_step_of_random_stories_holds(lag: int) -> None:
    seen = sum((tell(lag, seed) for seed in range(STORIES)), Counter())
    least = SEEN | (SEEN_WITHOUT_LAG if lag == 0 else {})
    assert {event: seen[event] for event in least if seen[event] < least[event]} == {}, seen
