"""Cases of the map: where rows live, and who has to move."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.case import Case, Figure, expect, expect_equal, references, share
from benchmarks.gpu.history import CLOCK, History, history, us_a_call
from benchmarks.gpu.map_work import MapWork, check_map_work
from benchmarks.gpu.request_lru import RequestLru
from benchmarks.gpu.timestamp_lru import Plan, TimestampLru
from vllm_ula.kernels.reference.translate import translate as translate_reference
from vllm_ula.kernels.translate import translate

# Rows of a request in references: 4,096, for which 13 % of 2,048 missing were published.
HOT_ROWS = 2


def _translate_input(bench: Bench, requests: int) -> tuple[Tensor, Tensor]:
    sizes, generator = bench.sizes, bench.generator(0)
    home = torch.randperm(sizes.slots, generator=generator, device=bench.device).int()
    shape = (requests, sizes.topk)
    return home, torch.randint(-1, sizes.slots, shape, generator=generator, device=bench.device)


def check_translate(bench: Bench) -> None:
    """Equal to the reference, padding included."""
    for requests in bench.sizes.requests:
        arguments = _translate_input(bench, requests)
        expect_equal("translate", translate(*arguments), translate_reference(*arguments))


def measure_translate(bench: Bench) -> Iterator[Figure]:
    """A slot is read, a home is read and a home is written: 20 bytes a reference."""
    for requests in bench.sizes.requests:
        home, slots = _translate_input(bench, requests)
        ours = bench.timer.median_us(partial(translate, home, slots))
        torchs = bench.timer.median_us(partial(translate_reference, home, slots))
        yield Figure(
            "translate",
            references(bench, requests),
            ours,
            "torch",
            torchs,
            share(20 * slots.numel(), ours, bench.timer.copy_bandwidth),
        )


def check_map(bench: Bench) -> None:
    """Every operation of the map against its reference."""
    for requests in bench.sizes.requests:
        check_map_work(bench, history(bench, requests))


def measure_map(bench: Bench) -> Iterator[Figure]:
    """Against an exact LRU on the same calls, the faster of its two forms."""
    for requests in bench.sizes.requests:
        past = history(bench, requests)
        work = MapWork(past)
        ours = us_a_call(bench, work.state, work.plan, past.slots)
        planners = [
            TimestampLru(past.home, past.stamp, CLOCK, known) for known in (None, past.missing)
        ]
        exact = min(us_a_call(bench, lru.state, lru.plan, past.slots) for lru in planners)
        is_goal = requests == bench.sizes.requests[-1]
        yield Figure(
            "map work",
            references(bench, requests),
            ours,
            "timestamp LRU",
            exact,
            goal="<= 60 us, <= 0.43 of it" if is_goal else "",
            met=ours <= 60 and ours <= exact / 2.3 if is_goal else None,
        )


def check_timestamp_lru(bench: Bench) -> None:
    """Fetches what is missing, for rows older than all that stay."""
    for requests in bench.sizes.requests:
        past = history(bench, requests)
        for known_count in (None, past.missing):
            lru = TimestampLru(past.home, past.stamp, CLOCK, known_count)
            for slots in past.slots:
                stamp = lru.stamp.clone()
                _check_timestamp_call(lru, lru.plan(slots), slots, stamp, past)


def _check_timestamp_call(
    lru: TimestampLru, plan: Plan, slots: Tensor, stamp: Tensor, past: History
) -> None:
    count = int(plan.count)
    expect(count == past.missing, f"{count} rows missing, not {past.missing}")
    expect_equal("rows of the call", plan.rows, lru.home[slots].long())
    expect((plan.rows < len(stamp)).all(), "a selected row is not on the device")
    everyone = torch.arange(len(lru.home), device=slots.device)
    expect_equal("all homes", lru.home.long().sort().values, everyone)
    owners = lru.owner.long()
    expect_equal("home of the owners", lru.home[owners].long(), everyone[: len(owners)])
    stays = lru.stamp < lru.clock
    newest_victim = stamp[plan.victims[:count].long()].max()
    expect(newest_victim <= stamp[stays].min(), "a row stays that is older than a victim")


def measure_timestamp_lru(bench: Bench) -> Iterator[Figure]:
    """Victims by histograms, and by torch.topk, which must know how many."""
    for requests in bench.sizes.requests:
        past = history(bench, requests)
        for name, known_count in (("histograms", None), ("torch.topk", past.missing)):
            lru = TimestampLru(past.home, past.stamp, CLOCK, known_count)
            us = us_a_call(bench, lru.state, lru.plan, past.slots)
            size = references(bench, requests)
            yield Figure("timestamp LRU", size, None, f"timestamp LRU, {name}", us)


def check_request_lru(bench: Bench) -> None:
    """Fetches what is missing, for the rows at the head of the request's order."""
    for requests in bench.sizes.requests:
        past = history(bench, requests, requests * HOT_ROWS * bench.sizes.topk)
        lru = RequestLru(past.held, past.order, past.positions)
        for call in range(len(past.slots)):
            positions, order = past.positions_of(call), lru.order.clone()
            plan = lru.plan(positions)
            expect_equal(
                "rows missing", plan.counts, torch.full_like(plan.counts, bench.sizes.missing)
            )
            # The history selects no old row, and those are the least recent.
            missing = bench.sizes.missing
            expect_equal("victims", plan.victims[:, :missing], order[:, :missing])
            expect_equal("rows of the call", lru.held.flatten()[plan.rows], positions)


def measure_request_lru(bench: Bench) -> Iterator[Figure]:
    """One launch for all requests."""
    for requests in bench.sizes.requests:
        past = history(bench, requests, requests * HOT_ROWS * bench.sizes.topk)
        lru = RequestLru(past.held, past.order, past.positions)
        positions = [past.positions_of(call) for call in range(len(past.slots))]
        us = us_a_call(bench, lru.state, lru.plan, positions)
        yield Figure("request LRU", references(bench, requests), None, "LRU a request", us)


CASES = (
    Case("translate", check_translate, measure_translate),
    Case("map work", check_map, measure_map),
    Case("timestamp LRU", check_timestamp_lru, measure_timestamp_lru),
    Case("request LRU", check_request_lru, measure_request_lru),
)
