"""The tables that map operations share: a domain's map and recency, and what a call asks of them.

Everything lives where the map lives, so that a call is planned without the host knowing how many
rows hit, miss or move: numbers are entries of `state`, and lists have the length of the worst case.

    home[l] in [0, D)       device slot home[l], whose owner is l
    home[l] in [D, D + H)   host slot home[l] - D

    stamp[d] = 2 * c + 1    dead; last used in call c
    stamp[d] = 2 * c        last used in call c, the current one if c == state[CLOCK]

    edges[p % B]            first call of period p, for the last B periods (paper section 5.1)
    level(c)                0 for calls before edge(1), cold, to B - 1 for the open period

    marks[l]                claims of the call's entries, see `claim`; 0 between calls
    roles[l]                WRITTEN, PLACED: rows on the host that the call writes; 0 between calls

Stamps are a word a row and not a bitmap a bucket: a hit is one store, no bit has to leave an older
bucket, the end of a period moves nothing, and the two passes of `victims` read 8 D bytes, as many
as the bitmaps of 64 buckets take.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_ula.kernels.checks import check

WRITTEN, PLACED = 1, 2

# Entries of `state`, and of `totals`.
(
    CLOCK,  # number of the current call
    PERIOD,  # of recency, B at first
    USED,  # rows of the open period that age it
    CURRENT,  # device rows the call has used so far
    ADMITTED,  # device rows it has given new bytes so far
    ROOM,  # device rows left for selections
    CUT,  # tokens before it that decode read device rows
    NUM_MISSING,  # entries of `incoming` that are selected; those a decode token writes follow
    NUM_REQUIRED,  # entries that must get a device row; those that take a dead one or none follow
    NUM_INCOMING,  # entries
    NUM_EXCHANGED,  # entries that change homes
    BELOW,  # victims taken from levels that give up every row
    AT,  # victims taken from the last level
    MOVED,  # 1 once a byte has moved
    NUM_STATE,
) = range(15)
PROMOTED, FETCHED, WRITTEN_BACK, IN_PLACE_DEVICE, IN_PLACE_HOST, EXCHANGES, NUM_TOTALS = range(7)

MAX_ENTRIES = (1 << 30) - 1  # whose claims an int32 mark holds
MAX_BUCKETS = 256  # what the histogram of a block of rows holds
REBASE_ABOVE = 1 << 28  # calls; an int32 stamp holds four times as many


@dataclass(frozen=True)
class MapTables:
    """One domain; operations trust what `of` has checked.

    Attributes:
        home: int32 `[D + H]`.
        owner: int32 `[D]`.
        live: bool `[D + H]`.
        stamp: int32 `[D]`.
        edges: int32 `[B]`, B >= 2 recency buckets, the cold one included.
        levels: int32 `[B + 1]`, rows of each level that are not current, the dead ones first;
            scratch of `victims`.
        state: int32 `[NUM_STATE]`.
        totals: int64 `[NUM_TOTALS]`, never reset.
        marks: int32 `[D + H]`, shared by the domains of a rank.
        roles: uint8 `[D + H]`, shared too.
    """

    home: Tensor
    owner: Tensor
    live: Tensor
    stamp: Tensor
    edges: Tensor
    levels: Tensor
    state: Tensor
    totals: Tensor
    marks: Tensor
    roles: Tensor

    @classmethod
    def of(
        cls,
        home: Tensor,
        owner: Tensor,
        live: Tensor,
        num_buckets: int,
        marks: Tensor,
        roles: Tensor,
    ) -> MapTables:
        """Tables of a map all of whose device rows are dead and cold.

        Raises:
            TypeError, ValueError: an argument is not what operations read it as.
        """
        device, num = home.device, home.numel()
        check("home", home, torch.int32, ndim=1)
        check("owner", owner, torch.int32, ndim=1)
        check("live", live, torch.bool, shape=(num,))
        check("marks", marks, torch.int32, shape=(num,))
        check("roles", roles, torch.uint8, shape=(num,))
        if not 2 <= num_buckets <= MAX_BUCKETS:
            raise ValueError(f"{num_buckets} recency buckets, expected 2 to {MAX_BUCKETS}")
        state = torch.zeros(NUM_STATE, dtype=torch.int32, device=device)
        state[PERIOD] = num_buckets
        return cls(
            home,
            owner,
            live,
            torch.full_like(owner, -1),
            torch.zeros(num_buckets, dtype=torch.int32, device=device),
            torch.zeros(num_buckets + 1, dtype=torch.int32, device=device),
            state,
            torch.zeros(NUM_TOTALS, dtype=torch.int64, device=device),
            marks,
            roles,
        )

    @property
    def num_device(self) -> int:
        """Device rows D."""
        return self.owner.numel()

    @property
    def num_exchanged(self) -> Tensor:
        """int32 `[1]`: how many entries of the call's lists change homes."""
        return self.state[NUM_EXCHANGED : NUM_EXCHANGED + 1]

    def rebase(self) -> None:
        """Move all calls back by half, once in a great while; the oldest become equally old."""
        clock = self.state[CLOCK].clone()
        by = torch.where(clock > REBASE_ABOVE, clock // 2, 0)
        self.state[CLOCK] -= by
        self.edges.sub_(by).clamp_min_(0)
        dead = self.stamp & 1
        call = ((self.stamp >> 1) - by).clamp_min_(-1)
        torch.add(call * 2, dead, out=self.stamp)


class Buffers:
    """Memory for the outputs of calls, one after the other: it grows to the largest of them.

    Args:
        device: where it lies.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[str, Tensor] = {}

    def empty(self, name: str, num: int, dtype: torch.dtype) -> Tensor:
        """`num` elements, `[num]`, until the same name is asked for again."""
        found = self._buffers.get(name)
        if found is None or found.numel() < num:
            found = self._buffers[name] = torch.empty(num, dtype=dtype, device=self.device)
        return found[:num]


@dataclass(frozen=True)
class CallTables:
    """One forward call: what it asks, and what becomes of it; operations trust what `of` checked.

    Attributes:
        written: int64 `[W]` distinct logical slots, -1 where a token writes nothing.
        written_by_decode: bool `[W]`.
        selection: int64 `[T, k]` logical slots, -1 padded.
        decode: bool `[T]`.
        written_homes: int64 `[W]`, of `written`.
        selected_homes: int64 `[T, k]`, of `selection`.
        wanted: int32 `[T]`, device rows a decode token wants beyond those it shares with earlier
            tokens.
        missing: int32 `[T]`, how many of its rows it is the first to want from the host.
        incoming: int64 `[m]` logical slots on the host that get device rows, m the worst case.
        fetch: bool `[m]`, false where the incoming row is about to be written.
        victims: int64 `[m]` device slots they get.
        vacated: int64 `[m]` host slots they leave.
        write_back: bool `[m]`, false where the victim's row is dead.
    """

    written: Tensor
    written_by_decode: Tensor
    selection: Tensor
    decode: Tensor
    written_homes: Tensor
    selected_homes: Tensor
    wanted: Tensor
    missing: Tensor
    incoming: Tensor
    fetch: Tensor
    victims: Tensor
    vacated: Tensor
    write_back: Tensor

    @classmethod
    def of(
        cls,
        written: Tensor,
        written_by_decode: Tensor,
        selection: Tensor,
        decode: Tensor,
        num_device: int,
        buffers: Buffers | None = None,
    ) -> CallTables:
        """Tables of a call, with room for its worst case.

        Args:
            written: see above, as the next three.
            written_by_decode: of the call.
            selection: of the call.
            decode: of the call.
            num_device: device rows D.
            buffers: where the outputs lie; None for memory of their own.

        Raises:
            TypeError, ValueError: an argument is not what operations read it as.
        """
        device, num_tokens = selection.device, selection.shape[0]
        check("written", written, torch.int64, ndim=1)
        check("written_by_decode", written_by_decode, torch.bool, shape=(written.numel(),))
        check("selection", selection, torch.int64, ndim=2)
        check("decode", decode, torch.bool, shape=(num_tokens,))
        if selection.numel() > MAX_ENTRIES:
            raise ValueError(f"{selection.numel()} entries, expected at most {MAX_ENTRIES}")
        most = min(selection.numel() + written.numel(), num_device)

        empty = (buffers or Buffers(device)).empty
        return cls(
            written,
            written_by_decode,
            selection,
            decode,
            empty("written_homes", written.numel(), torch.int64),
            empty("selected_homes", selection.numel(), torch.int64).view(selection.shape),
            empty("wanted", num_tokens, torch.int32),
            empty("missing", num_tokens, torch.int32),
            empty("incoming", most, torch.int64),
            empty("fetch", most, torch.bool),
            empty("victims", most, torch.int64),
            empty("vacated", most, torch.int64),
            empty("write_back", most, torch.bool),
        )


def block_of(width: int) -> int:
    """Entries a program takes at once, of a selection of that width.

    No fewer than a program has threads: those to spare would repeat entries of others, and read
    what these have changed already.
    """
    return max(1 << (width - 1).bit_length() if width else 1, 256)
