"""Synthetic selections: what they promise, their speed, and the fit to published figures."""

import time
from dataclasses import replace

import numpy as np
import pytest
from replay.shared_lru import SharedLru

from vllm_ula.replay import fit
from vllm_ula.replay.policy import replay
from vllm_ula.replay.synthetic import Selector, Statistics, favourite_chances, recent_chances
from vllm_ula.replay.workload import Workload, generate, header
from vllm_ula.traces.events import Admission, Deaths, End, TracedCall

SMALL = Statistics(topk=64, sinks=4, recent_window=16, recent_reach=200, favourites=300, spread=0.2)
SHORT = Workload(
    requests=5, concurrent=2, min_prompt=300, max_prompt=600, outputs=40, block_size=16
)


def test_a_selection_is_distinct_complete_and_below_the_length():
    selector = Selector(Statistics(), 70_000, seed=3)
    for step in range(5):
        selected = selector.select(70_001 + step)
        assert selected.shape == (2048,)
        assert len(np.unique(selected)) == 2048
        assert selected.min() == 0
        assert selected.max() < 70_001 + step
        assert not selector._marks.any()


def test_short_histories_are_selected_whole_and_padded():
    selected = Selector(SMALL, 10, seed=0).select(10)
    assert selected[:10].tolist() == list(range(10))
    assert (selected[10:] == -1).all()


def test_the_same_seed_selects_the_same_and_another_does_not():
    def run(seed):
        selector = Selector(SMALL, 500, seed)
        return np.stack([selector.select(501 + step) for step in range(20)])

    np.testing.assert_array_equal(run(1), run(1))
    assert (run(1) != run(2)).any()


def test_statistics_are_what_they_say():
    statistics = replace(Statistics(), spread=0.0)
    selector = Selector(statistics, 100_000, seed=5)
    sinks = window = 0
    counts = np.zeros(101_000)
    for step in range(200):
        length = 100_001 + step
        selected = selector.select(length)
        sinks += (selected < statistics.sinks).sum()
        window += (length - selected <= statistics.recent_window).sum()
        counts[selected] += 1
    assert sinks == 200 * statistics.sinks
    assert window / (200 * 2048) == pytest.approx(statistics.recent_share, abs=0.01)
    # The best-ranked favourites of 100,000 positions are selected in nearly every step.
    assert (counts[statistics.sinks : 80_000] > 150).sum() > 200


def test_drift_replaces_favourites_at_its_rate():
    statistics = replace(Statistics(), spread=0.0, drift=0.01)
    selector = Selector(statistics, 100_000, seed=5)
    before = selector.favourites.copy()
    for step in range(50):
        selector.select(100_001 + step)
    kept = (selector.favourites == before).mean()
    assert kept == pytest.approx(0.99**50, abs=0.02)


def test_requests_differ_by_the_spread():
    selectors = [Selector(Statistics(), 70_000, seed) for seed in range(20)]
    assert len({int(selector._drift) for selector in selectors}) == 20


def test_chances_add_up():
    statistics = Statistics()
    recent = recent_chances(statistics, statistics.recent_share)
    num = statistics.topk - statistics.sinks - recent.sum()
    assert favourite_chances(statistics, num).sum() == pytest.approx(num)
    assert recent[0] == recent[statistics.recent_window - 1] <= 1
    assert (np.diff(recent) <= 0).all()


def test_a_selection_of_2048_out_of_128k_takes_less_than_a_millisecond():
    selector = Selector(Statistics(), 131_072, seed=0)
    selector.select(131_073)
    seconds = []
    for step in range(60):
        start = time.perf_counter()
        selector.select(131_074 + step)
        seconds.append(time.perf_counter() - start)
    assert np.median(seconds) < 1e-3


def test_a_workload_is_a_trace():
    events = list(generate(SHORT, SMALL))
    calls = [event for event in events if isinstance(event, TracedCall)]
    assert [call.call for call in calls] == list(range(len(calls)))
    assert [event.seq for event in events if isinstance(event, Admission)] == list(range(5))
    assert sorted(event.seq for event in events if isinstance(event, End)) == list(range(5))
    top = header(SHORT, SMALL, 256)
    assert (top.logical_slots, top.device_slots, top.host_slots) == (1296, 256, 1040)
    live, lengths = set(), {}
    for event in events:
        match event:
            case TracedCall():
                written = event.written.tolist()
                assert not live & set(written)
                live |= set(written)
                selected = event.selection[event.selection >= 0]
                assert set(selected.tolist()) <= live
                assert (event.written >= SHORT.block_size).all()
                for seq, position in zip(
                    event.seqs.tolist(), event.positions.tolist(), strict=True
                ):
                    assert position == lengths.get(seq, 0)
                    lengths[seq] = position + 1
            case Deaths():
                slots = event.blocks[:, None] * SHORT.block_size + np.arange(SHORT.block_size)
                live -= set(slots.reshape(-1).tolist())
    assert not live
    assert replay([SharedLru(SHORT.logical_slots, 256, 16)], events).selected > 0


def test_the_defaults_give_the_published_miss_rates():
    effort = fit.Effort(requests=2, outputs=320, warm_up=160)
    percents = fit.measure(Statistics(), fit.PUBLISHED[:3], effort)
    for target, percent in zip(fit.PUBLISHED, percents, strict=False):
        assert percent == pytest.approx(target.percent, abs=2), target


def test_the_fit_finds_its_way_back():
    effort = fit.Effort(requests=1, outputs=200, warm_up=100)
    wanted = np.array([target.percent for target in fit.FITTED])

    def distance(statistics):
        return np.abs(np.array(fit.measure(statistics, fit.FITTED, effort)) - wanted).sum()

    start = replace(Statistics(), recent_tail=1.95)
    assert distance(fit.fit(start, effort, rounds=1)) < distance(start)
