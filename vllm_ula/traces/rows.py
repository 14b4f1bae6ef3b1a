"""Events to rows of a part and back; see `format` for the columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vllm_ula.traces.events import Admission, BlocksGiven, CallTokens, Deaths, End, Written
from vllm_ula.traces.format import Kind, import_pyarrow


@dataclass(frozen=True, slots=True)
class Rows:
    """R consecutive rows.

    Attributes:
        kind: int8 `[R]`.
        call: int64 `[R]`.
        domain: int16 `[R]`.
        seq: int32 `[R]`.
        position: int32 `[R]`.
        decode: bool `[R]`.
        lengths: int32 `[R]` values of each row.
        values: int32 `[sum of lengths]`.
    """

    kind: NDArray[np.int8]
    call: NDArray[np.int64]
    domain: NDArray[np.int16]
    seq: NDArray[np.int32]
    position: NDArray[np.int32]
    decode: NDArray[np.bool_]
    lengths: NDArray[np.int32]
    values: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns, more than they take in a part."""
        columns = (self.kind, self.call, self.domain, self.seq, self.position, self.decode)
        return sum(column.nbytes for column in (*columns, self.lengths, self.values))

    @classmethod
    def join(cls, many: Sequence[Rows]) -> Rows:
        """All of them, in order."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(rows, name) for rows in many]) for name in names))


def rows_of(event: Written) -> Rows:
    """The rows of one event, which are copies of what it holds."""
    match event:
        case CallTokens():
            ascending = np.sort(event.selected_positions, axis=1)
            selected = ascending >= 0
            return Rows(
                kind=np.full(len(ascending), Kind.TOKEN, np.int8),
                call=np.full(len(ascending), event.call, np.int64),
                domain=np.full(len(ascending), event.domain, np.int16),
                seq=event.seqs.astype(np.int32),
                position=event.positions.astype(np.int32),
                decode=event.decode.astype(np.bool_),
                lengths=selected.sum(1, dtype=np.int32),
                values=ascending[selected].astype(np.int32),
            )
        case BlocksGiven():
            return _row(Kind.BLOCKS, event.seq, event.first, event.blocks)
        case Deaths():
            return _row(Kind.DEATHS, values=event.blocks)
        case Admission():
            return _row(Kind.ADMISSION, event.seq, event.prompt_tokens)
        case End():
            return _row(Kind.END, event.seq)


def _row(kind: Kind, seq: int = 0, position: int = 0, values: ArrayLike = ()) -> Rows:
    array = np.array(values, np.int32)
    return Rows(
        kind=np.array([kind], np.int8),
        call=np.zeros(1, np.int64),
        domain=np.zeros(1, np.int16),
        seq=np.array([seq], np.int32),
        position=np.array([position], np.int32),
        decode=np.zeros(1, np.bool_),
        lengths=np.array([len(array)], np.int32),
        values=array,
    )


def to_arrow(rows: Rows, schema: Any) -> Any:
    """The rows as an Arrow table."""
    pa = import_pyarrow()
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(rows.lengths, out=offsets[1:])
    columns = (rows.kind, rows.call, rows.domain, rows.seq, rows.position, rows.decode)
    lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(rows.values))
    return pa.Table.from_arrays([*map(pa.array, columns), lists], schema=schema)


def from_arrow(table: Any) -> Rows:
    """The rows of an Arrow table with our columns."""
    lists = table.column("values").combine_chunks()
    return Rows(
        kind=table.column("kind").to_numpy(),
        call=table.column("call").to_numpy(),
        domain=table.column("domain").to_numpy(),
        seq=table.column("seq").to_numpy(),
        position=table.column("position").to_numpy(),
        decode=table.column("decode").to_numpy(),
        lengths=lists.value_lengths().to_numpy(),
        values=lists.flatten().to_numpy(),
    )
