"""Random histories of one domain, stopped before an operation."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import torch
from kernels.agreement import copy_call, copy_map, poisoned

from vllm_ula.kernels import dispatch, tables
from vllm_ula.kernels.tables import CallTables, MapTables

ORDER = ("seat", "claim", "touch", "victims", "remap")
AGE = "admitted"

# Device rows, host rows, tokens, top-k, buckets: one of each kind of size.
SIZES = {
    "tiny": (2, 2, 2, 3, 2),
    "odd": (37, 59, 5, 7, 3),
    "no host": (64, 0, 6, 8, 4),
    "one entry": (9, 20, 1, 1, 8),
    "one block": (1024, 512, 8, 128, 64),
    "several programs": (4100, 3000, 20, 64, 256),
}


def make_map(random: Random, num_device: int, num_host: int, num_buckets: int) -> MapTables:
    """After 200 calls: most rows live, of every level, some of the dead ones not known to be."""
    num, clock = num_device + num_host, 200
    generator = torch.Generator().manual_seed(random.randrange(2**32))
    home = torch.randperm(num, generator=generator)
    owner = torch.argsort(home)[:num_device]
    live = torch.rand(num, generator=generator) < 0.9
    mine = MapTables.of(
        home.int(),
        owner.int(),
        live,
        num_buckets,
        torch.zeros(num, dtype=torch.int32),
        torch.zeros(num, dtype=torch.uint8),
    )
    dead = ~live[owner] & (torch.rand(num_device, generator=generator) < 0.7)
    calls = torch.randint(-1, clock + 1, (num_device,), generator=generator)
    mine.stamp.copy_(2 * calls + dead)
    mine.edges.copy_(torch.randint(clock, (num_buckets,), generator=generator).sort().values)
    mine.state[tables.CLOCK] = clock
    mine.state[tables.PERIOD] = 5 * num_buckets - 1  # edges in order
    return mine


def make_call(random: Random, mine: MapTables, tokens: int, topk: int) -> CallTables:
    """Some writes, padded with tokens that write nothing; selections with duplicates and holes."""
    num = mine.home.numel()
    written = random.sample(range(num), random.randrange(min(num, 2 * tokens) + 1))
    written += [-1] * random.randrange(3)
    random.shuffle(written)
    flag = random.choice([lambda: True, lambda: False, lambda: random.random() < 0.7])
    readable = random.sample(range(num), max(num // random.choice([1, 2, 8]), 1))
    hole = random.choice([0.0, 0.1, 1.0])
    selection = [
        [-1 if random.random() < hole else random.choice(readable) for _ in range(topk)]
        for _ in range(tokens)
    ]
    return poisoned(
        CallTables.of(
            torch.tensor(written, dtype=torch.int64),
            torch.tensor([flag() for _ in written], dtype=torch.bool),
            torch.tensor(selection, dtype=torch.int64),
            torch.tensor([flag() for _ in range(tokens)], dtype=torch.bool),
            mine.num_device,
        )
    )


def before(
    operation: str, size: str, num_calls: int = 12
) -> Iterator[tuple[MapTables, CallTables]]:
    """The state before each call's `operation`; later operations run by their references."""
    num_device, num_host, tokens, topk, num_buckets = SIZES[size]
    random = Random(size)
    mine = make_map(random, num_device, num_host, num_buckets)
    for _ in range(num_calls):
        call = make_call(random, mine, tokens, topk)
        for name in ORDER:
            if name == operation:
                yield copy_map(mine), copy_call(call)
            dispatch.references[name](mine, call, *([AGE] if name == "seat" else []))
        if random.random() < 0.4:
            blocks = torch.tensor(random.sample(range(mine.home.numel() // 2), 1))
            dispatch.references["bury"](blocks, 2, mine)
