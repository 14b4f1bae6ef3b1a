"""Map work: everything a call of a domain does but move rows."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.bench import BLOCK_SIZE, Bench
from benchmarks.gpu.case import expect, expect_equal
from benchmarks.gpu.history import CLOCK, History
from tests.kernels.agreement import copy_map, differences
from vllm_ula.kernels import tables
from vllm_ula.kernels.bury import bury
from vllm_ula.kernels.claim import claim
from vllm_ula.kernels.dispatch import references
from vllm_ula.kernels.remap import remap
from vllm_ula.kernels.seat import seat
from vllm_ula.kernels.tables import CallTables, MapTables
from vllm_ula.kernels.touch import touch
from vllm_ula.kernels.victims import victims

NUM_BUCKETS = 64
AGE = "admitted"


class MapWork:
    """The operations of `planning/kernels.py`, of calls that decode.

    Args:
        past: home and stamps are copied.
    """

    def __init__(self, past: History) -> None:
        num, num_device = len(past.home), len(past.stamp)
        home, device = past.home.clone(), past.home.device
        owner = torch.empty(num, dtype=torch.int32, device=device)
        owner[home.long()] = torch.arange(num, dtype=torch.int32, device=device)
        self.tables = mine = MapTables.of(
            home,
            owner[:num_device].clone(),
            torch.ones(num, dtype=torch.bool, device=device),
            NUM_BUCKETS,
            torch.zeros(num, dtype=torch.int32, device=device),
            torch.zeros(num, dtype=torch.uint8, device=device),
        )
        mine.stamp.copy_(2 * past.stamp)
        # A period was a call; edges stand in the order of their levels.
        mine.edges.copy_(CLOCK + 1 - NUM_BUCKETS + torch.arange(NUM_BUCKETS, device=device))
        mine.state[tables.CLOCK] = CLOCK
        mine.state[tables.PERIOD] = 2 * NUM_BUCKETS - 1
        self._nothing = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def state(self) -> list[Tensor]:
        """What a call changes."""
        mine = self.tables
        return [mine.home, mine.owner, mine.live, mine.stamp, mine.edges, mine.state, mine.totals]

    def call(self, slots: Tensor, written: Tensor | None = None) -> CallTables:
        """A call of decode tokens that select `slots`, int64 `[T, k]`, and write `written`."""
        decode = torch.ones(len(slots), dtype=torch.bool, device=slots.device)
        if written is None:
            written = self._nothing
        by_decode = torch.ones_like(written, dtype=torch.bool)
        return CallTables.of(written, by_decode, slots, decode, self.tables.num_device)

    def begin(self, slots: Tensor, written: Tensor | None = None) -> CallTables:
        """Plan a call: it says what has to move."""
        call = self.call(slots, written)
        seat(self.tables, call, AGE)
        claim(self.tables, call)
        touch(self.tables, call)
        victims(self.tables, call)
        return call

    def plan(self, slots: Tensor) -> CallTables:
        """Plan and complete a call that writes nothing."""
        call = self.begin(slots)
        remap(self.tables, call)
        return call


def check_map_work(bench: Bench, past: History) -> None:
    """Each operation against its reference, call after call; all hits are hits. Then deaths."""
    work = MapWork(past)
    for slots in past.slots:
        call = work.call(slots)
        for name in ("seat", "claim", "touch", "victims", "remap"):
            arguments = [AGE] if name == "seat" else []
            differ = differences(name, work.tables, call, *arguments)
            expect(not differ, f"{name}: {', '.join(differ)} differ from the reference")
            references[name](work.tables, call, *arguments)
        fetched = int(work.tables.num_exchanged)
        expect(fetched == past.missing, f"{fetched} rows fetched, not {past.missing}")
    blocks = torch.arange(0, bench.sizes.slots // BLOCK_SIZE, 3, device=bench.device)
    expected = copy_map(work.tables)
    references["bury"](blocks, BLOCK_SIZE, expected)
    bury(blocks, BLOCK_SIZE, work.tables)
    expect_equal("bury: live", work.tables.live, expected.live)
    expect_equal("bury: stamp", work.tables.stamp, expected.stamp)
