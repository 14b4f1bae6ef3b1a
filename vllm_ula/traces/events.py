"""What happens in a trace, as frozen records of numpy arrays.

A producer writes `Admission`, `BlocksGiven`, `CallTokens`, `Deaths` and `End`. A reader gets the
same in the same order, but `TracedCall` for `CallTokens`: it has followed the blocks given and
says logical slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class Header:
    """Of which engine a trace is.

    Attributes:
        model: its name.
        block_size: tokens per block.
        topk: positions a token selects at most, k.
        logical_slots: N of the engine.
        device_slots: D of the engine.
        host_slots: H of the engine.
        domains: layers of each domain.
        row_bytes: bytes of a row over the layers of each domain.
        index_key_bytes: bytes of one token's index keys over all layers.
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
class Admission:
    """A sequence is scheduled for the first time."""

    seq: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class BlocksGiven:
    """A sequence's block table is cut to `first` blocks and goes on with these, int64 `[n]`.

    `first` is 0 for a new sequence, prefix hits included, and for one that resumes after it lost
    its blocks.
    """

    seq: int
    first: int
    blocks: Int64s


@dataclass(frozen=True, slots=True)
class Deaths:
    """Blocks int64 `[m]` nobody reads again before writing them."""

    blocks: Int64s


@dataclass(frozen=True, slots=True)
class End:
    """A sequence ended; its number may be given again."""

    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTokens:
    """The T >= 1 query tokens of one forward call of a domain.

    Tokens that write no row are not there: padding, and drafts past the longest length.

    Attributes:
        call: number of the call, counted over all domains.
        domain: index in `Header.domains`.
        seqs: int64 `[T]` sequence of each token.
        positions: int64 `[T]` position of the token, the one it writes.
        decode: bool `[T]`, true for decode tokens.
        selected_positions: int64 `[T, k]` positions of its own sequence the token reads, -1
            padded; ascending when they were read from a trace.
    """

    call: int
    domain: int
    seqs: Int64s
    positions: Int64s
    decode: NDArray[np.bool_]
    selected_positions: Int64s


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall(CallTokens):
    """The same with logical slots.

    Attributes:
        written: int64 `[T]` logical slot each token writes.
        selection: int64 `[T, k]` logical slots of `selected_positions`, -1 padded.
    """

    written: Int64s
    selection: Int64s


Written = Admission | BlocksGiven | Deaths | End | CallTokens
Event = Admission | Deaths | End | TracedCall
