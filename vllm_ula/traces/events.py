"""What a trace is made of; every array is numpy.

Header, then Admission | TracedCall | Deaths | End in the order in which they happened
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Int64s: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Header:
    """What the run was.

    Attributes:
        model: its name.
        block_size: tokens per logical block.
        topk: positions a token selects at most.
        logical_slots: N of the rank, the null block included.
        device_slots: D.
        host_slots: H.
        domains: the attention layers of each domain.
        row_bytes: of each domain, bytes of one token's rows over its layers.
        index_key_bytes: one token's index keys over all indexer layers.
    """

    model: str
    block_size: int
    topk: int
    logical_slots: int
    device_slots: int
    host_slots: int
    domains: tuple[tuple[int, ...], ...]
    row_bytes: tuple[int, ...]
    index_key_bytes: int


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One forward call of one domain; the tokens of a sequence stand together.

    Attributes:
        call: number of the forward call.
        domain: index into `Header.domains`.
        seqs: int64 `[T]`, the sequence of each token.
        positions: int64 `[T]`, its position in the sequence.
        decode: bool `[T]`, true for the decode tokens.
        written: int64 `[T]`, the logical slot each token's row is written to.
        selected_positions: int64 `[T, k]`, -1 padded.
        selection: int64 `[T, k]`, their logical slots, -1 padded.
    """

    call: int
    domain: int
    seqs: Int64s
    positions: Int64s
    decode: Bools
    written: Int64s
    selected_positions: Int64s
    selection: Int64s


@dataclass(frozen=True, slots=True)
class Deaths:
    """Logical blocks nobody reads again before writing them: int64 `[m]`."""

    blocks: Int64s


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence starts (or starts again after preemption) with this many prompt tokens."""

    seq: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class End:
    """A sequence is finished, or preempted."""

    seq: int


Event: TypeAlias = TracedCall | Deaths | Admission | End
