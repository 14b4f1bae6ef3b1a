"""What is no trace is refused in one line that names the file."""

import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from traces.samples import HEADER, random_events

from vllm_ula.errors import TraceError, UlaError
from vllm_ula.traces import Admission, TraceWriter, open_trace


@pytest.fixture
def trace(tmp_path):
    """A trace of three parts."""
    path = tmp_path / "trace"
    with TraceWriter(path, HEADER, 1 << 30) as writer:
        for event in random_events(0):
            writer.write(event)
        for _ in range(2):
            writer.finish_part()
            writer.write(Admission(99, 5))
    assert len([*path.iterdir()]) == 3
    return path


def refusal(path):
    with pytest.raises(TraceError) as refused:
        [*open_trace(path).events()]
    assert isinstance(refused.value, UlaError)
    line = str(refused.value)
    assert "\n" not in line
    return line


def with_metadata(part, **changes):
    """Rewrite a part with other key-value metadata."""
    table = pq.read_table(part)
    metadata = {**table.schema.metadata, **{k.encode(): v.encode() for k, v in changes.items()}}
    pq.write_table(table.replace_schema_metadata(metadata), part)


def test_nothing_there(tmp_path):
    assert refusal(tmp_path / "none") == f"{tmp_path / 'none'}: no such directory"


def test_a_file(trace):
    part = trace / "part-00000.parquet"
    assert refusal(part) == f"{part}: a file; a trace is a directory of part-NNNNN.parquet"


def test_an_empty_directory(tmp_path):
    assert refusal(tmp_path) == f"{tmp_path}: empty, so no trace"


def test_a_directory_of_other_files(tmp_path):
    (tmp_path / "notes.txt").touch()
    assert refusal(tmp_path) == f"{tmp_path}: no trace: it holds no part-NNNNN.parquet"


def test_other_files_beside_a_trace_are_left_alone(trace):
    (trace / "figure.png").touch()
    (trace / "part-00003.parquet.unfinished").touch()
    assert sum(1 for _ in open_trace(trace).events()) > 2


def test_a_foreign_parquet_file(tmp_path):
    part = tmp_path / "part-00000.parquet"
    pq.write_table(pa.table({"kind": [1, 2]}), part)
    assert refusal(tmp_path) == f"{part}: a Parquet file, but no part of a vllm-ula-trace"


@pytest.mark.parametrize("keep", [0, 3, 0.5, -1])
def test_a_truncated_part(trace, keep):
    part = trace / "part-00001.parquet"
    content = part.read_bytes()
    part.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    assert refusal(trace).startswith(f"{part}: truncated or no Parquet file: ")


def test_text_under_the_name_of_a_part(trace):
    part = trace / "part-00002.parquet"
    part.write_text("seq,position\n" * 1000)
    assert refusal(trace).startswith(f"{part}: truncated or no Parquet file: ")


def test_damage_inside_a_part(trace):
    """Its footer is whole, so only reading finds it."""
    part = trace / "part-00000.parquet"
    content = bytearray(part.read_bytes())
    content[4:1500] = bytes(1496)
    part.write_bytes(content)
    assert refusal(trace).startswith(f"{part}: ")


def test_a_part_is_missing(trace):
    (trace / "part-00001.parquet").unlink()
    assert refusal(trace) == f"{trace / 'part-00001.parquet'}: missing, and later parts are there"


def test_a_part_of_another_trace(trace):
    part = trace / "part-00001.parquet"
    header = pq.read_schema(part).metadata[b"header"].decode()
    with_metadata(part, header=header.replace('"tiny"', '"other"'))
    assert refusal(trace) == f"{part}: of another trace than part-00000.parquet"


def test_a_newer_version(trace):
    part = trace / "part-00000.parquet"
    with_metadata(part, version="2", header="{}")
    assert refusal(trace) == (f"{part}: version 2 of the format, this vllm-ula reads 1; update it")


@pytest.mark.parametrize(
    "changes",
    [
        {"version": ""},
        {"version": "0"},
        {"version": "x"},
        {"header": "{"},
        {"header": "{}"},
        {"header": "[]"},
        {"header": '{"domains": [1], "row_bytes": []}'},
    ],
)
def test_a_version_or_header_nobody_wrote(trace, changes):
    part = trace / "part-00000.parquet"
    with_metadata(part, **changes)
    assert refusal(trace) == (
        f"{part}: damaged: version, header or columns are not those of a trace"
    )


def test_other_columns(trace):
    part = trace / "part-00000.parquet"
    table = pq.read_table(part)
    metadata = table.schema.metadata
    more = table.append_column("token_id", table.column("seq"))
    pq.write_table(more.replace_schema_metadata(metadata), part)
    assert "columns are not those of a trace" in refusal(trace)


def test_without_pyarrow_the_line_says_how_to_install_it(trace, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    line = "traces need pyarrow, which is not installed: pip install 'vllm-ula[trace]'"
    assert refusal(trace) == line
    with pytest.raises(TraceError) as refused:
        TraceWriter(trace / "new", HEADER, 1 << 20)
    assert str(refused.value) == line


def test_importing_traces_loads_no_pyarrow_and_no_torch():
    program = "import sys, vllm_ula.traces; print(*{'pyarrow', 'torch', 'vllm'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == []
