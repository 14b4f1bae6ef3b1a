"""The planners UlaCache is measured against on a GPU: they are what they say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import timestamp_lru
from benchmarks.gpu.request_lru import RequestLru
from benchmarks.gpu.timestamp_lru import TimestampLru

ROOT = Path(__file__).parents[2]


def ints(*shape, below, generator, start=0):
    return torch.randint(start, below, shape, generator=generator, dtype=torch.int64)


class TestTimestampLru:
    @pytest.fixture
    def generator(self):
        return torch.Generator().manual_seed(1)

    def make(self, generator, rows=100, slots=400, clock=5000, **settings):
        home = torch.randperm(slots, generator=generator).int()
        stamp = ints(rows, below=clock + 1, generator=generator).int()
        return TimestampLru(home, stamp, clock, **settings)

    def call(self, lru, slots):
        """Plan a call, held to a sort of the stamps and to the map before it."""
        home, stamp, num_rows = lru.home.clone(), lru.stamp.clone(), len(lru.stamp)
        wanted = slots[slots >= 0].unique()
        homes = home[wanted].long()
        missing = wanted[homes >= num_rows]
        plan = lru.plan(slots)
        count = int(plan.count)
        victims = plan.victims[:count].long()
        assert plan.missing[:count].sort().values.tolist() == missing.tolist()
        others = torch.ones(num_rows, dtype=torch.bool)
        others[homes[homes < num_rows]] = False
        assert others[victims].all()
        oldest = stamp[others].sort().values[:count]
        assert stamp[victims].sort().values.tolist() == oldest.tolist()
        # The rows changed places, and only they.
        expected = home.clone()
        owner = home.argsort()[victims]
        expected[plan.missing[:count]] = victims.int()
        expected[owner] = home[plan.missing[:count]]
        assert lru.home.tolist() == expected.tolist()
        assert plan.sources[:count].tolist() == home[plan.missing[:count]].tolist()
        assert lru.owner.tolist() == expected.argsort()[:num_rows].tolist()
        # What the call used is the newest.
        used = expected[wanted].long()
        assert (lru.stamp[used] == lru.clock).all()
        kept = torch.ones(num_rows, dtype=torch.bool)
        kept[used] = False
        assert lru.stamp[kept].tolist() == stamp[kept].tolist()
        assert plan.rows.tolist() == torch.where(slots < 0, -1, expected[slots].long()).tolist()
        return count

    @pytest.mark.parametrize("clock", [1, 5000, 3_000_000])
    def test_gives_up_the_oldest_rows(self, generator, clock):
        lru = self.make(generator, clock=clock)
        counts = [
            self.call(lru, ints(5, 12, below=400, generator=generator, start=-1)) for _ in range(4)
        ]
        assert min(counts) > 10

    def test_only_hits_move_nothing(self, generator):
        lru = self.make(generator)
        assert self.call(lru, lru.owner[:7].long()) == 0

    def test_only_misses_and_all_rows(self, generator):
        lru = self.make(generator)
        on_host = (lru.home >= 100).nonzero().squeeze(1)
        assert self.call(lru, on_host[:100]) == 100

    def test_a_missing_row_named_often_is_fetched_once(self, generator):
        lru = self.make(generator)
        slot = int(lru.home.argmax())
        assert self.call(lru, torch.full((3, 5), slot)) == 1

    def test_rows_of_one_age_give_way_only_as_many_as_are_needed(self):
        lru = TimestampLru(torch.arange(40).int(), torch.ones(10).int(), 3)
        assert self.call(lru, torch.tensor([20, 21, 5])) == 2

    def test_more_programs_than_one(self, generator, monkeypatch):
        monkeypatch.setattr(timestamp_lru, "BLOCK_ROWS", 32)
        monkeypatch.setattr(timestamp_lru, "BLOCK_SLOTS", 16)
        lru = self.make(generator)
        for _ in range(3):
            self.call(lru, ints(61, below=400, generator=generator, start=-1))

    def test_topk_finds_as_old_rows(self, generator):
        lru = self.make(generator, known_count=30)
        on_host = (lru.home >= 100).nonzero().squeeze(1)
        assert self.call(lru, torch.cat([on_host[:30], lru.owner[:20].long()])) == 30

    def test_control_a_row_that_is_not_the_oldest_is_found(self, generator, monkeypatch):
        lru = self.make(generator, known_count=30)
        on_host = (lru.home >= 100).nonzero().squeeze(1)
        topk = torch.Tensor.topk
        newest = lambda self, k, largest, sorted: topk(self, k, largest=True, sorted=sorted)  # noqa: E731
        monkeypatch.setattr(torch.Tensor, "topk", newest)
        with pytest.raises(AssertionError):
            self.call(lru, on_host[:30])


class TestRequestLru:
    REQUESTS, ROWS, TOPK, POSITIONS = 3, 12, 7, 40

    @pytest.fixture
    def generator(self):
        return torch.Generator().manual_seed(2)

    def make(self, generator, held=None):
        if held is None:
            held = torch.stack(
                [
                    torch.randperm(self.POSITIONS, generator=generator)[: self.ROWS]
                    for _ in range(self.REQUESTS)
                ]
            ).int()
        order = torch.stack([torch.randperm(self.ROWS, generator=generator) for _ in held]).int()
        return RequestLru(held, order, self.POSITIONS)

    def select(self, generator, padding=0):
        selection = torch.stack(
            [
                torch.randperm(self.POSITIONS, generator=generator)[: self.TOPK]
                for _ in range(self.REQUESTS)
            ]
        ).int()
        return selection.masked_fill_(torch.arange(self.TOPK) >= self.TOPK - padding, -1)

    def call(self, lru, positions):
        """Plan a call, held to lists: least recent first."""
        held, order = lru.held.tolist(), lru.order.tolist()
        plan = lru.plan(positions)
        for i, wanted in enumerate(positions.tolist()):
            wanted = [p for p in wanted if p >= 0]
            missing = [p for p in wanted if p not in held[i]]
            hits = [row for row in order[i] if held[i][row] in wanted]
            unused = [row for row in order[i] if held[i][row] not in wanted]
            victims = unused[: len(missing)]
            order[i] = unused[len(missing) :] + hits + victims
            for row, position in zip(victims, missing, strict=True):
                held[i][row] = position
            count = int(plan.counts[i])
            assert plan.missing[i, :count].tolist() == missing
            assert plan.victims[i, :count].tolist() == victims
            rows = [-1 if p < 0 else i * self.ROWS + held[i].index(p) for p in positions[i]]
            assert plan.rows[i].tolist() == rows
            for position in range(self.POSITIONS):
                row = held[i].index(position) if position in held[i] else -1
                assert lru.row_of[i, position] == row
        assert lru.held.tolist() == held
        assert lru.order.tolist() == order
        return plan.counts.tolist()

    def test_the_least_recent_rows_of_the_request_give_way(self, generator):
        lru = self.make(generator)
        for padding in (0, 0, 3, 7, 0):
            self.call(lru, self.select(generator, padding))

    def test_only_hits_move_nothing(self, generator):
        lru = self.make(generator)
        assert self.call(lru, lru.held[:, : self.TOPK].contiguous()) == [0] * self.REQUESTS

    def test_only_misses_into_free_rows(self, generator):
        lru = self.make(generator, torch.full((self.REQUESTS, self.ROWS), -1).int())
        assert self.call(lru, self.select(generator)) == [self.TOPK] * self.REQUESTS

    def test_more_positions_than_rows_are_refused(self, generator):
        with pytest.raises(ValueError, match=r"\(3, 13\) positions for 3 requests of 12 rows"):
            self.make(generator).plan(torch.zeros(3, 13, dtype=torch.int32))

    def test_control_swapped_rows_are_found(self, generator):
        lru = self.make(generator)
        lru.row_of[0, lru.held[0, 0]], lru.row_of[0, lru.held[0, 1]] = 1, 0
        with pytest.raises(AssertionError):
            self.call(lru, lru.held[:, : self.TOPK].contiguous())


COMPILE = """
import json
from dataclasses import asdict
from benchmarks.gpu import request_lru, timestamp_lru
from vllm_ula.kernels.resources import resources

variants = (*request_lru.VARIANTS, *timestamp_lru.VARIANTS)
print(json.dumps({v.name: asdict(resources(v, "sm_90")) for v in variants}))
"""


def test_baselines_compile_and_do_not_spill():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET")
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    used = json.loads(done.stdout)
    assert {name: u for name, u in used.items() if u["spilled_bytes"]} == {}
    assert len(used) == 7
