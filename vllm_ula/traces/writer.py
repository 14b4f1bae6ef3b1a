"""Writes a trace, part by part."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vllm_ula.errors import TraceError
from vllm_ula.traces.events import Header, Written
from vllm_ula.traces.format import UNFINISHED, import_pyarrow, part_path, schema
from vllm_ula.traces.rows import Rows, rows_of, to_arrow

PART_ROWS, PART_SECONDS = 1 << 20, 30.0
# What is not in a part yet; written in one piece, and read in one.
ROW_GROUP_BYTES = 16 << 20
# Never too little for what a part holds besides its columns, each taken as it is in memory.
PART_OVERHEAD_BYTES, ROW_GROUP_OVERHEAD_BYTES = 8 << 10, 2 << 10


class TraceWriter:
    """A trace being written.

    Args:
        path: of a directory that does not exist or is empty.
        header: of the trace.
        max_bytes: the files never hold more; what does not fit any more is left out.
        part_rows: rows after which a part is finished.
        part_seconds: seconds after which it is, when the next event comes.

    Raises:
        TraceError: there are files in the directory, or it cannot be made.
    """

    def __init__(
        self,
        path: str | Path,
        header: Header,
        max_bytes: int,
        part_rows: int = PART_ROWS,
        part_seconds: float = PART_SECONDS,
    ) -> None:
        self.path = Path(path)
        self.full = False
        """Whether `max_bytes` are reached: the trace has ended, `write` does nothing."""
        self._schema = schema(header)
        self._max_bytes, self._part_rows, self._part_seconds = max_bytes, part_rows, part_seconds
        # The last piece before the bound is left out: a small one, whatever the bound.
        self._row_group_bytes = min(ROW_GROUP_BYTES, max_bytes // 32)
        self._buffer: list[Rows] = []
        self._buffered_bytes = 0
        self._part: _Part | None = None
        self._part_started = 0.0
        self._num_rows = self._num_parts = self._finished_bytes = 0
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            empty = not any(self.path.iterdir())
        except OSError as error:
            raise TraceError(f"{path}: no directory for a trace: {error.strerror}") from error
        if not empty:
            raise TraceError(f"{path}: holds files; a trace needs a new or an empty directory")

    def write(self, event: Written) -> None:
        """Append an event; what it holds is copied.

        Raises:
            TraceError: the file system refused it. The unfinished part is lost, and the writer
                must not be used again.
        """
        if self.full:
            return
        rows = rows_of(event)
        if self._num_rows == 0:
            self._part_started = time.monotonic()
        self._buffer.append(rows)
        self._buffered_bytes += rows.num_bytes
        self._num_rows += len(rows)
        age = time.monotonic() - self._part_started
        if self._num_rows >= self._part_rows or age >= self._part_seconds:
            self.finish_part()
        elif self._buffered_bytes >= self._row_group_bytes:
            self._flush()

    def finish_part(self) -> None:
        """Make everything written so far survive a crash.

        Raises:
            TraceError: as `write`.
        """
        self._flush()
        self._num_rows = 0
        if self._part is not None:
            with self._writing():
                self._finished_bytes += self._part.finish()
            self._part = None

    def close(self) -> None:
        """Finish the trace; closing twice does nothing.

        Raises:
            TraceError: as `write`.
        """
        self.finish_part()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _flush(self) -> None:
        """Write the buffer as one row group, or end the trace if it might not fit."""
        if not self._buffer:
            return
        rows = Rows.join(self._buffer)
        self._buffer.clear()
        self._buffered_bytes = 0
        part_bytes = PART_OVERHEAD_BYTES if self._part is None else self._part.num_bytes
        needed = self._finished_bytes + part_bytes + rows.num_bytes + ROW_GROUP_OVERHEAD_BYTES
        if needed > self._max_bytes:
            self.full = True
            self.finish_part()
            return
        with self._writing():
            if self._part is None:
                self._part = _Part(part_path(self.path, self._num_parts), self._schema)
                self._num_parts += 1
            self._part.write(rows)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn the errors of pyarrow into ours."""
        pa = import_pyarrow()
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            if self._part is not None:
                self._part.abandon()
                self._part = None
            reason = str(error).partition("\n")[0]
            raise TraceError(f"{self.path}: cannot write the trace: {reason}") from error


class _Part:
    """One file of a trace, under its unfinished name."""

    def __init__(self, path: Path, schema: Any) -> None:
        pa = import_pyarrow()
        self._path, self._unfinished = path, path.with_name(path.name + UNFINISHED)
        self._sink = pa.OSFile(str(self._unfinished), "wb")
        self._writer = pa.parquet.ParquetWriter(
            self._sink,
            schema,
            compression="zstd",
            use_dictionary=False,
            write_statistics=False,
            # Sorted positions and counters: small differences.
            column_encoding={
                "call": "DELTA_BINARY_PACKED",
                "position": "DELTA_BINARY_PACKED",
                "values.list.element": "DELTA_BINARY_PACKED",
            },
        )
        self._schema = schema
        self._num_row_groups = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the file if it were finished now, at most."""
        overhead = PART_OVERHEAD_BYTES + ROW_GROUP_OVERHEAD_BYTES * self._num_row_groups
        return int(self._sink.tell()) + overhead

    def write(self, rows: Rows) -> None:
        """Append a row group."""
        self._writer.write_table(to_arrow(rows, self._schema), row_group_size=len(rows))
        self._num_row_groups += 1

    def finish(self) -> int:
        """Give the file its name; its bytes."""
        self._writer.close()
        self._sink.close()
        self._unfinished.rename(self._path)
        return self._path.stat().st_size

    def abandon(self) -> None:
        """Remove the file, as far as the file system lets us."""
        with contextlib.suppress(Exception):
            self._writer.close()
        self._writer.is_open = False  # or it tries again when it is collected
        with contextlib.suppress(Exception):
            self._sink.close()
        with contextlib.suppress(OSError):
            self._unfinished.unlink()
