"""Reads a trace, one row group at a time."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_ula.errors import TraceError
from vllm_ula.traces.block_tables import BlockTables
from vllm_ula.traces.events import Admission, Deaths, End, Event, Header, TracedCall
from vllm_ula.traces.format import UNFINISHED, Kind, header_of, import_pyarrow, part_path
from vllm_ula.traces.rows import Rows, from_arrow


@dataclass(frozen=True)
class Trace:
    """A trace on disk.

    Attributes:
        path: its directory.
        header: of which engine it is.
        num_rows: rows of all parts: one per query token of a call, one per other event.
        parts: its files, in order.
    """

    path: Path
    header: Header
    num_rows: int
    parts: tuple[Path, ...]

    def events(self) -> Iterator[Event]:
        """What happened, in order; every iterator starts anew.

        Memory is bounded by one row group and the block tables of the live sequences.

        Raises:
            TraceError: a part is damaged.
        """
        tables = BlockTables(self.header.block_size)
        for part in self.parts:
            with _opened(part) as file:
                for group in range(file.num_row_groups):
                    rows = from_arrow(file.read_row_group(group))
                    try:
                        yield from _events(rows, self.header, tables)
                    except (IndexError, ValueError) as error:
                        raise TraceError(f"{part}: damaged: {error}") from error

    def peak_sequences(self) -> int:
        """Sequences that run at once, at most, preempted ones included; reads one column.

        Raises:
            TraceError: a part is damaged.
        """
        live = peak = 0
        for part in self.parts:
            with _opened(part) as file:
                kind = file.read(columns=["kind"]).column(0).to_numpy()
            change = (kind == Kind.ADMISSION).astype(np.int64) - (kind == Kind.END)
            running = live + np.cumsum(change)
            live, peak = int(running[-1]), max(peak, int(running.max()))
        return peak


def open_trace(path: str | Path) -> Trace:
    """The trace in a directory; its events are not read yet.

    Raises:
        TraceError: there is none, a part is truncated or missing, or it is of a newer version.
    """
    directory = Path(path)
    headers, num_rows = [], 0
    parts = _parts(directory)
    for part in parts:
        with _opened(part) as file:
            headers.append(header_of(part, file.schema_arrow))
            num_rows += file.metadata.num_rows
        if headers[-1] != headers[0]:
            raise TraceError(f"{part}: of another trace than {parts[0].name}")
    return Trace(directory, headers[0], num_rows, parts)


def _parts(directory: Path) -> tuple[Path, ...]:
    """Finished parts, in order; at least one."""
    if not directory.exists():
        raise TraceError(f"{directory}: no such directory")
    if not directory.is_dir():
        raise TraceError(f"{directory}: a file; a trace is a directory of part-NNNNN.parquet")
    names = {entry.name for entry in directory.iterdir()}
    found = [match for name in names if (match := re.fullmatch(r"part-(\d{5,})\.parquet", name))]
    parts = tuple(part_path(directory, number) for number in range(len(found)))
    for part in parts:
        if part.name not in names:
            raise TraceError(f"{part}: missing, and later parts are there")
    if parts:
        return parts
    if not names:
        raise TraceError(f"{directory}: empty, so no trace")
    if any(name.endswith(UNFINISHED) for name in names):
        raise TraceError(f"{directory}: no part of the trace was finished")
    raise TraceError(f"{directory}: no trace: it holds no part-NNNNN.parquet")


@contextlib.contextmanager
def _opened(part: Path) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`, whose errors become ours."""
    pa = import_pyarrow()
    try:
        with pa.parquet.ParquetFile(part) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise TraceError(f"{part}: truncated or no Parquet file: {reason}") from error


def _events(rows: Rows, header: Header, tables: BlockTables) -> Iterator[Event]:
    """The events of one row group; `tables` follow them."""
    values_before = np.concatenate(([0], np.cumsum(rows.lengths, dtype=np.int64)))
    # A token that continues the call of the row before it opens no event.
    continues = (rows.kind[1:] == Kind.TOKEN) & (rows.kind[:-1] == Kind.TOKEN)
    continues &= rows.call[1:] == rows.call[:-1]
    bounds = np.concatenate(([0], np.flatnonzero(~continues) + 1, [len(rows)])).tolist()
    for start, stop in pairwise(bounds):
        values = rows.values[values_before[start] : values_before[stop]].astype(np.int64)
        seq, position = int(rows.seq[start]), int(rows.position[start])
        match Kind(int(rows.kind[start])):
            case Kind.TOKEN:
                yield _call(rows, slice(start, stop), values, header, tables)
            case Kind.BLOCKS:
                tables.give(seq, position, values)
            case Kind.DEATHS:
                yield Deaths(values)
            case Kind.ADMISSION:
                yield Admission(seq, position)
            case Kind.END:
                tables.drop(seq)
                yield End(seq)


def _call(
    rows: Rows, part: slice, values: NDArray[np.int64], header: Header, tables: BlockTables
) -> TracedCall:
    lengths = rows.lengths[part, None]
    selected = np.full((len(lengths), header.topk), -1, np.int64)
    selected[np.arange(header.topk) < lengths] = values
    seqs = rows.seq[part].astype(np.int64)
    positions = rows.position[part].astype(np.int64)
    slots = tables.slots(seqs, np.column_stack((positions, selected)))
    return TracedCall(
        call=int(rows.call[part.start]),
        domain=int(rows.domain[part.start]),
        seqs=seqs,
        positions=positions,
        decode=rows.decode[part],
        written=slots[:, 0],
        selected_positions=selected,
        selection=slots[:, 1:],
    )
