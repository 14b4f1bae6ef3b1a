"""Logical ids: the name of one row in traces and tools, 64 bits.

    bit  63        44 43      36 35         32 31                 0
        | seq (20)   | layer (8) | head group (4) | token (32)      |

Inside an engine a row is named by its logical slot, which the next sequence in the same block
uses again. A logical id names the row by whose it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vllm_ula.errors import LogicalIdError, NoSequenceNumber

SEQ_BITS, LAYER_BITS, HEAD_GROUP_BITS, TOKEN_BITS = 20, 8, 4, 32
NUM_SEQUENCES = 1 << SEQ_BITS
_WIDTHS = {
    "seq": SEQ_BITS,
    "layer": LAYER_BITS,
    "head_group": HEAD_GROUP_BITS,
    "token": TOKEN_BITS,
}

Ids: TypeAlias = np.uint64 | NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Fields:
    """What logical ids say, each uint64 and of the shape of the ids."""

    seq: Ids
    layer: Ids
    head_group: Ids
    token: Ids


def pack(seq: ArrayLike, layer: ArrayLike, head_group: ArrayLike, token: ArrayLike) -> Ids:
    """Logical ids of the fields, uint64 of the shape they broadcast to; of scalars a scalar.

    Raises:
        LogicalIdError: a value does not fit the bits of its field.
    """
    values = {"seq": seq, "layer": layer, "head_group": head_group, "token": token}
    ids: Ids = np.uint64(0)
    for field, width in _WIDTHS.items():
        ids = (ids << np.uint64(width)) | _checked(field, values[field])
    return ids


def unpack(ids: Ids) -> Fields:
    """The fields of logical ids uint64, of any shape; the inverse of `pack`."""
    rest: Ids = ids
    fields: dict[str, Ids] = {}
    for field, width in reversed(_WIDTHS.items()):
        fields[field] = rest & np.uint64((1 << width) - 1)
        rest = rest >> np.uint64(width)
    return Fields(**fields)


def _checked(field: str, value: ArrayLike) -> Ids:
    """The value of one field as uint64."""
    highest = (1 << _WIDTHS[field]) - 1
    values = np.asarray(value)
    if values.dtype.kind in "iu":
        wrong = values[(values < 0) | (values > highest)]
    else:
        wrong = values.ravel()
    if wrong.size:
        raise LogicalIdError(field, wrong.flat[0], highest)
    return values.astype(np.uint64)[()]


class SequenceNumbers:
    """The 20-bit numbers of the sequences that are live.

    Numbers count up and start again after the last, so that a number comes back as late as
    possible; one that is live is passed over.

    Args:
        first: the number given first.
    """

    def __init__(self, first: int = 0) -> None:
        self._next = first % NUM_SEQUENCES
        self._live: set[int] = set()

    @property
    def num_live(self) -> int:
        """Numbers given and not released."""
        return len(self._live)

    def take(self) -> int:
        """A number no live sequence has.

        Raises:
            NoSequenceNumber: all of them are live; nothing has changed.
        """
        if len(self._live) == NUM_SEQUENCES:
            raise NoSequenceNumber(NUM_SEQUENCES)
        while self._next in self._live:
            self._next = (self._next + 1) % NUM_SEQUENCES
        number = self._next
        self._live.add(number)
        self._next = (number + 1) % NUM_SEQUENCES
        return number

    def release(self, number: int) -> None:
        """The sequence with this number has ended."""
        self._live.remove(number)
