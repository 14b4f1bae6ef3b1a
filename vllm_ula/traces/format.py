"""The files of a trace.

A trace is a directory of `part-00000.parquet`, `part-00001.parquet`, ... Each is complete in
itself and has its name only since then; until then it is `part-NNNNN.parquet.unfinished`, which
is all that a crash loses. Rows are in the order of what happened. The key-value metadata of a part
has `format` = "vllm-ula-trace", `version` = "1" and `header`, the fields of `Header` as JSON.

One row is one token of a call, or one other event:

    kind           call    domain   seq   position          decode   values
    0 token        number  index    its   it writes         of it    positions it selects, ascending
    1 blocks                        its   index of first             block ids
    2 deaths                                                         block ids
    3 admission                     its   tokens of prompt
    4 end                           its

with 0, false or an empty list where nothing stands. Rows of one call follow each other and share
a row group. There is no other column: prompts and completions never enter a trace.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from vllm_ula.errors import TraceError
from vllm_ula.traces.events import Header

FORMAT: Final = "vllm-ula-trace"
VERSION: Final = 1
UNFINISHED: Final = ".unfinished"
COLUMNS: Final = ("kind", "call", "domain", "seq", "position", "decode", "values")


class Kind(IntEnum):
    """What a row is."""

    TOKEN = 0
    BLOCKS = 1
    DEATHS = 2
    ADMISSION = 3
    END = 4


def import_pyarrow() -> Any:
    """The package `pyarrow` with `pyarrow.parquet`, needed for traces alone.

    Raises:
        TraceError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise TraceError(
            "traces need pyarrow, which is not installed: pip install 'vllm-ula[trace]'"
        ) from None
    return pyarrow


def part_path(directory: Path, number: int) -> Path:
    """Path of a part."""
    return directory / f"part-{number:05}.parquet"


def schema(header: Header) -> Any:
    """The Arrow schema of a part, with its metadata."""
    pa = import_pyarrow()
    types = (pa.int8(), pa.int64(), pa.int16(), pa.int32(), pa.int32(), pa.bool_())
    columns = dict(zip(COLUMNS, (*types, pa.list_(pa.int32())), strict=True))
    fields = [pa.field(name, kind, nullable=False) for name, kind in columns.items()]
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "header": json.dumps(asdict(header)),
    }
    return pa.schema(fields, metadata=metadata)


def header_of(path: Path, found: Any) -> Header:
    """The header in the Arrow schema of a file.

    Raises:
        TraceError: the file is no part of a trace, or one this version cannot read.
    """
    metadata = found.metadata or {}
    if metadata.get(b"format") != FORMAT.encode():
        raise TraceError(f"{path}: a Parquet file, but no part of a {FORMAT}")
    version = metadata.get(b"version", b"").decode(errors="replace")
    if version.isdecimal() and int(version) > VERSION:
        raise TraceError(
            f"{path}: version {version} of the format, this vllm-ula reads {VERSION}; update it"
        )
    try:
        header = json.loads(metadata[b"header"])
        header["domains"] = tuple(map(tuple, header["domains"]))
        header["row_bytes"] = tuple(header["row_bytes"])
        read = Header(**header)
    except (KeyError, TypeError, ValueError):
        read = None
    if read is None or version != str(VERSION) or tuple(found.names) != COLUMNS:
        raise TraceError(f"{path}: damaged: version, header or columns are not those of a trace")
    return read
