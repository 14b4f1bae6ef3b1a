"""Requests with synthetic selections, as the events of a trace of one domain.

    seat 0   | prompt | one decode token a step ..... | End, Deaths | prompt | ...
    seat 1   | prompt | ...

Each seat has blocks of its own for its longest request; block 0 is the null block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vllm_ula.models import FP8_ROW_BYTES
from vllm_ula.replay.synthetic import Selector, Statistics
from vllm_ula.traces.events import Admission, Deaths, End, Event, Header, TracedCall

# 128 fp8 values and an fp32 scale.
_INDEX_KEY_BYTES = 132


@dataclass(frozen=True)
class Workload:
    """How many requests, how long.

    Attributes:
        requests: in all.
        concurrent: seats; a seat takes the next request when its own has ended.
        min_prompt: tokens of the shortest prompt; the logarithm of the length is uniform.
        max_prompt: tokens of the longest prompt.
        outputs: tokens each request generates. Where seats are reused, the first requests are cut
            short by different amounts, so that not all end at once.
        block_size: tokens of a logical block.
        seed: decides lengths and selections.
    """

    requests: int = 1
    concurrent: int = 1
    min_prompt: int = 65536
    max_prompt: int = 131072
    outputs: int = 2048
    block_size: int = 64
    seed: int = 0

    @property
    def seat_blocks(self) -> int:
        """Blocks of the longest request."""
        return -(-(self.max_prompt + self.outputs) // self.block_size)

    @property
    def logical_slots(self) -> int:
        """Slots of all seats and the null block."""
        return (1 + self.concurrent * self.seat_blocks) * self.block_size


@dataclass(slots=True)
class _Running:
    seq: int
    seat: int
    first_block: int
    first_slot: int
    length: int
    last_length: int
    selector: Selector


def header(workload: Workload, statistics: Statistics, device_slots: int) -> Header:
    """The header of `generate`'s trace: one domain of one layer with rows of type fp8_ds_mla."""
    slots = workload.logical_slots
    return Header(
        model="synthetic",
        block_size=workload.block_size,
        topk=statistics.topk,
        logical_slots=slots,
        device_slots=device_slots,
        host_slots=slots - device_slots,
        domains=((0,),),
        row_bytes=(FP8_ROW_BYTES,),
        index_key_bytes=_INDEX_KEY_BYTES,
    )


def generate(workload: Workload, statistics: Statistics) -> Iterator[Event]:
    """The events of a run, without header; a prompt is one call that selects nothing."""
    seats: list[_Running | None] = [None] * workload.concurrent
    next_seq = number = 0
    while True:
        for seat in range(workload.concurrent):
            if seats[seat] is None and next_seq < workload.requests:
                seats[seat] = running = _start(workload, statistics, next_seq, seat)
                next_seq += 1
                yield Admission(running.seq, running.length)
                yield _prompt(running, number)
                number += 1
        active = [running for running in seats if running is not None]
        if not active:
            return
        yield _step(active, number)
        number += 1
        for running in active:
            running.length += 1
            if running.length >= running.last_length:
                seats[running.seat] = None
                yield End(running.seq)
                blocks = -(-running.length // workload.block_size)
                yield Deaths(running.first_block + np.arange(blocks))


def _start(workload: Workload, statistics: Statistics, seq: int, seat: int) -> _Running:
    rng = np.random.default_rng([workload.seed, seq])
    low, high = np.log2([workload.min_prompt, workload.max_prompt])
    prompt = int(2 ** rng.uniform(low, high))
    outputs = workload.outputs
    if seq < workload.concurrent < workload.requests:
        outputs = max(outputs * (seat + 1) // workload.concurrent, 1)
    block = 1 + seat * workload.seat_blocks
    return _Running(
        seq=seq,
        seat=seat,
        first_block=block,
        first_slot=block * workload.block_size,
        length=prompt,
        last_length=prompt + outputs,
        selector=Selector(statistics, prompt, int(rng.integers(2**62))),
    )


def _prompt(running: _Running, number: int) -> TracedCall:
    positions = np.arange(running.length)
    nothing = np.empty((running.length, 0), dtype=np.int64)
    return TracedCall(
        call=number,
        domain=0,
        seqs=np.full(running.length, running.seq),
        positions=positions,
        decode=np.zeros(running.length, dtype=np.bool_),
        written=positions + running.first_slot,
        selected_positions=nothing,
        selection=nothing,
    )


def _step(active: list[_Running], number: int) -> TracedCall:
    positions = np.array([running.length for running in active])
    first = np.array([running.first_slot for running in active])
    selected = np.stack([running.selector.select(running.length + 1) for running in active])
    return TracedCall(
        call=number,
        domain=0,
        seqs=np.array([running.seq for running in active]),
        positions=positions,
        decode=np.ones(len(active), dtype=np.bool_),
        written=positions + first,
        selected_positions=selected,
        selection=np.where(selected >= 0, selected + first[:, None], -1),
    )
