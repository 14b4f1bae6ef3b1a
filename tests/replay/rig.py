"""Small traces: sequences live in blocks of 4, sequence s from logical slot 400 s + 4 on."""

from __future__ import annotations

import numpy as np

from vllm_ula.traces.events import Admission, Deaths, End, TracedCall

BLOCK = 4
SPAN = 400
LOGICAL = 5 * SPAN


def slot(seq: int, position: int) -> int:
    return seq * SPAN + BLOCK + position


def decode(call: int, *tokens: tuple[int, int, list[int]]) -> TracedCall:
    """Each token is (sequence, position, selected positions)."""
    width = max(len(selected) for _, _, selected in tokens)
    rows = [selected + [-1] * (width - len(selected)) for _, _, selected in tokens]
    seqs = np.array([seq for seq, _, _ in tokens])
    positions = np.array([position for _, position, _ in tokens])
    selected = np.array(rows, dtype=np.int64).reshape(len(tokens), width)
    return TracedCall(
        call=call,
        domain=0,
        seqs=seqs,
        positions=positions,
        decode=np.ones(len(tokens), dtype=np.bool_),
        written=seqs * SPAN + BLOCK + positions,
        selected_positions=selected,
        selection=np.where(selected >= 0, selected + (seqs * SPAN + BLOCK)[:, None], -1),
    )


def prefill(call: int, seq: int, num: int) -> TracedCall:
    positions = np.arange(num)
    nothing = np.empty((num, 0), dtype=np.int64)
    return TracedCall(
        call=call,
        domain=0,
        seqs=np.full(num, seq),
        positions=positions,
        decode=np.zeros(num, dtype=np.bool_),
        written=positions + slot(seq, 0),
        selected_positions=nothing,
        selection=nothing,
    )


def ending(seq: int, length: int) -> list[End | Deaths]:
    first = slot(seq, 0) // BLOCK
    return [End(seq), Deaths(first + np.arange(-(-length // BLOCK)))]


def random_story(seed: int, steps: int = 60, topk: int = 5):
    """Up to four sequences with favourites, drafts, ends and restarts."""
    rng = np.random.default_rng(seed)
    lengths: dict[int, int] = {}
    favourites: dict[int, list[int]] = {}
    events: list[object] = []
    call = 0
    for _ in range(steps):
        for seq in range(4):
            if seq not in lengths and rng.random() < 0.3:
                lengths[seq] = int(rng.integers(1, 40))
                favourites[seq] = rng.integers(0, lengths[seq], 8).tolist()
                events += [Admission(seq, lengths[seq]), prefill(call, seq, lengths[seq])]
                call += 1
        tokens = []
        for seq, length in lengths.items():
            for draft in range(int(rng.integers(1, 3))):
                position = length + draft
                some = rng.choice(favourites[seq], 3).tolist()
                anywhere = rng.integers(0, position + 1, topk - 3).tolist()
                # Top-k names a position once.
                tokens.append((seq, position, list(dict.fromkeys(some + anywhere))))
        if tokens:
            events.append(decode(call, *tokens))
            call += 1
        for seq in list(lengths):
            lengths[seq] += 1
            if rng.random() < 0.05 or lengths[seq] > 300:
                events += ending(seq, lengths.pop(seq) + 1)
    return events
