"""A header, random traces, and a slow and obvious reading of them."""

from __future__ import annotations

import random

import numpy as np

from vllm_ula.traces import (
    Admission,
    BlocksGiven,
    CallTokens,
    Deaths,
    End,
    Header,
    TracedCall,
)

BLOCK, TOPK = 4, 6
HEADER = Header(
    model="tiny",
    block_size=BLOCK,
    topk=TOPK,
    logical_slots=4096,
    device_slots=64,
    host_slots=4032,
    domains=((0, 1, 2), (3,)),
    row_bytes=(6912, 2304),
    index_key_bytes=528,
)


def blocks(*ids):
    return np.array(ids, np.int64)


def tokens(call, domain, *rows):
    """A call of rows (seq, position, decode, selected positions)."""
    selected = np.full((len(rows), TOPK), -1, np.int64)
    for row, (*_, positions) in zip(selected, rows, strict=True):
        row[: len(positions)] = positions
    return CallTokens(
        call=call,
        domain=domain,
        seqs=np.array([row[0] for row in rows], np.int64),
        positions=np.array([row[1] for row in rows], np.int64),
        decode=np.array([row[2] for row in rows], np.bool_),
        selected_positions=selected,
    )


def random_events(seed, num_steps=60):
    """Sequences come, get blocks, read and write, are preempted and end; as a recorder has it."""
    rng = random.Random(seed)
    tables, lengths, written = {}, {}, []
    number = call = 0
    for _ in range(num_steps):
        if rng.random() < 0.3:
            written.append(Deaths(blocks(*rng.sample(range(1, 1024), rng.randint(1, 9)))))
        if tables and rng.random() < 0.1:
            seq = rng.choice([*tables])
            del tables[seq], lengths[seq]
            written.append(End(seq))
        if len(tables) < 5 and rng.random() < 0.4:
            prompt = rng.randint(1, 40)
            tables[number], lengths[number] = [], 0
            written.append(Admission(number, prompt))
            number += 1
        rows = []
        for seq, table in tables.items():
            if table and rng.random() < 0.1:  # preempted, resumes elsewhere
                table.clear()
                lengths[seq] = 0
            num_new = rng.choice((1, 1, 2, 7))
            need = -(-(lengths[seq] + num_new) // BLOCK) - len(table)
            if need > 0:
                new = [rng.randrange(1, 1024) for _ in range(need)]
                written.append(BlocksGiven(seq, len(table), blocks(*new)))
                table += new
            for position in range(lengths[seq], lengths[seq] + num_new):
                selected = rng.sample(range(position + 1), min(position + 1, TOPK))
                rows.append((seq, position, num_new == 1, selected))
            lengths[seq] += num_new
        for domain in range(2 if rows else 0):
            written.append(tokens(call, domain, *rows))
            call += 1
    return written


def expected(written):
    """What a reader must give for these events: one slot at a time."""
    tables: dict[int, list[int]] = {}

    def slot(seq, position):
        if position < 0:
            return -1
        return tables[seq][position // BLOCK] * BLOCK + position % BLOCK

    read = []
    for event in written:
        match event:
            case BlocksGiven():
                table = tables.setdefault(event.seq, [])
                table[event.first :] = event.blocks.tolist()
            case CallTokens():
                selected = [
                    sorted(p for p in row if p >= 0) + [p for p in row if p < 0]
                    for row in event.selected_positions.tolist()
                ]
                seqs = event.seqs.tolist()
                read.append(
                    TracedCall(
                        call=event.call,
                        domain=event.domain,
                        seqs=event.seqs,
                        positions=event.positions,
                        decode=event.decode,
                        written=np.array(
                            [slot(s, p) for s, p in zip(seqs, event.positions, strict=True)],
                            np.int64,
                        ),
                        selected_positions=np.array(selected, np.int64),
                        selection=np.array(
                            [
                                [slot(s, p) for p in row]
                                for s, row in zip(seqs, selected, strict=True)
                            ],
                            np.int64,
                        ),
                    )
                )
            case End():
                tables.pop(event.seq, None)
                read.append(event)
            case _:
                read.append(event)
    return read


def assert_same_events(found, wanted):
    assert [type(event) for event in found] == [type(event) for event in wanted]
    for a, b in zip(found, wanted, strict=True):
        for name in fields_of(a):
            x, y = getattr(a, name), getattr(b, name)
            if isinstance(y, np.ndarray):
                assert x.dtype == y.dtype, name
                assert x.tolist() == y.tolist(), name
            else:
                assert x == y, name


def fields_of(event):
    return type(event).__dataclass_fields__


def num_rows(written):
    return sum(len(e.seqs) if isinstance(e, CallTokens) else 1 for e in written)
