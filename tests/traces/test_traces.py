"""What is written into a trace comes out again, in order, and nothing else is in there."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces.samples import (
    HEADER,
    assert_same_events,
    blocks,
    expected,
    num_rows,
    random_events,
    tokens,
)

from vllm_ula.errors import TraceError
from vllm_ula.traces import (
    Admission,
    BlocksGiven,
    Deaths,
    End,
    TracedCall,
    TraceWriter,
    open_trace,
    writer,
)

AMPLE = 1 << 30


def write(path, events, max_bytes=AMPLE, **limits):
    with TraceWriter(path, HEADER, max_bytes, **limits) as trace:
        for event in events:
            trace.write(event)
    return trace


def test_a_story_with_a_prefix_hit_and_a_resumed_sequence(tmp_path):
    """Blocks of 4: slots of block 7 are 28 to 31, of block 3 are 12 to 15, of block 9 36 to 39."""
    write(
        tmp_path,
        [
            Deaths(blocks(7, 3)),
            Admission(5, 6),
            BlocksGiven(5, 0, blocks(7, 3)),
            tokens(0, 0, (5, 4, False, [3, 0, 4]), (5, 5, False, [5, 1])),
            Admission(6, 5),
            BlocksGiven(6, 0, blocks(7, 9)),  # 7 is a hit
            tokens(1, 1, (6, 4, True, [0, 4]), (5, 6, True, [])),
            BlocksGiven(5, 0, blocks(9)),  # 5 lost its blocks and starts again
            tokens(2, 1, (5, 0, False, [0])),
            End(5),
            Deaths(blocks(9)),
        ],
    )
    events = [*open_trace(tmp_path).events()]
    first, second, third = (event for event in events if isinstance(event, TracedCall))
    assert first.written.tolist() == [12, 13]
    assert first.selected_positions.tolist() == [[0, 3, 4, -1, -1, -1], [1, 5, -1, -1, -1, -1]]
    assert first.selection.tolist() == [[28, 31, 12, -1, -1, -1], [29, 13, -1, -1, -1, -1]]
    assert second.written.tolist() == [36, 14]
    assert second.selection.tolist() == [[28, 36, -1, -1, -1, -1], [-1] * 6]
    assert (second.call, second.domain, second.decode.tolist()) == (1, 1, [True, True])
    assert third.written.tolist() == [36]
    assert [type(event) for event in events[-2:]] == [End, Deaths]


@given(st.integers(0, 2**32), st.sampled_from([1 << 30, 1 << 14]), st.sampled_from([30, 1000]))
@settings(max_examples=25, deadline=None)
def test_random_traces_come_back(tmp_path_factory, seed, group_bytes, part_rows):
    written, path = random_events(seed), tmp_path_factory.mktemp("trace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "ROW_GROUP_BYTES", group_bytes)
        write(path, written, part_rows=part_rows)
    trace = open_trace(path)
    assert trace.header == HEADER
    assert trace.num_rows == num_rows(written)
    assert_same_events([*trace.events()], expected(written))
    assert_same_events([*trace.events()], expected(written))  # a second time


def test_two_readings_at_once_do_not_meet(tmp_path):
    written = random_events(1)
    write(tmp_path, written)
    trace = open_trace(tmp_path)
    one, other = zip(*zip(trace.events(), trace.events(), strict=True), strict=True)
    assert_same_events(one, expected(written))
    assert_same_events(other, expected(written))


def test_what_is_written_may_be_changed_afterwards(tmp_path):
    """The engine edits its top-k buffer in place."""
    with TraceWriter(tmp_path, HEADER, AMPLE) as trace:
        trace.write(BlocksGiven(0, 0, blocks(1)))
        event = tokens(0, 0, (0, 2, True, [0, 2]))
        trace.write(event)
        event.selected_positions[:] = 1
        event.positions[:] = 1
    (found,) = open_trace(tmp_path).events()
    assert found.selected_positions.tolist() == [[0, 2, -1, -1, -1, -1]]
    assert found.positions.tolist() == [2]


def test_only_the_documented_columns_are_in_a_part(tmp_path):
    """No prompt, no completion, no request id has a place to be."""
    write(tmp_path, random_events(2))
    (part,) = tmp_path.iterdir()
    found = pq.ParquetFile(part).schema_arrow
    assert {field.name: str(field.type) for field in found} == {
        "kind": "int8",
        "call": "int64",
        "domain": "int16",
        "seq": "int32",
        "position": "int32",
        "decode": "bool",
        "values": "list<element: int32>",
    }
    assert set(found.metadata) - {b"ARROW:schema"} == {b"format", b"version", b"header"}
    assert found.metadata[b"format"] == b"vllm-ula-trace"
    assert found.metadata[b"version"] == b"1"
    assert set(json.loads(found.metadata[b"header"])) == set(HEADER.__dataclass_fields__)


def test_a_selection_that_drifts_takes_few_bytes(tmp_path):
    """64 tokens of each of 32 calls read 6 of the last positions: far below 4 bytes each."""
    events = [BlocksGiven(0, 0, blocks(*range(1, 600)))]
    for call in range(32):
        rows = [(0, p, False, range(p - 5, p + 1)) for p in range(64 * call + 5, 64 * call + 69)]
        events.append(tokens(call, 0, *rows))
    write(tmp_path, events)
    assert sum(part.stat().st_size for part in tmp_path.iterdir()) < 32 * 64 * 6


# Sizes and crashes


def test_parts_are_finished_by_rows(tmp_path):
    written = random_events(3, num_steps=200)
    write(tmp_path, written, part_rows=100)
    parts = sorted(path.name for path in tmp_path.iterdir())
    assert parts == [f"part-{i:05}.parquet" for i in range(len(parts))]
    assert len(parts) >= num_rows(written) // 200


def test_parts_are_finished_by_age(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(writer.time, "monotonic", lambda: now[0])
    with TraceWriter(tmp_path, HEADER, AMPLE, part_seconds=30) as trace:
        trace.write(Admission(0, 1))
        now[0] = 129.0
        trace.write(Admission(1, 1))
        assert [*tmp_path.iterdir()] == []
        now[0] = 130.0
        trace.write(Admission(2, 1))
        assert open_trace(tmp_path).num_rows == 3
        now[0] = 1000.0  # the next part is young however long nothing happened
        trace.write(Admission(3, 1))
        assert open_trace(tmp_path).num_rows == 3
    assert open_trace(tmp_path).num_rows == 4


@pytest.mark.parametrize("max_bytes", [1 << 17, 300_000])
@pytest.mark.parametrize("part_rows", [200, 10**9])
def test_a_trace_stays_within_its_bound_and_is_valid(tmp_path, max_bytes, part_rows):
    written = random_events(4, num_steps=1500)
    wanted = expected(written)
    trace = write(tmp_path, written, max_bytes, part_rows=part_rows)
    assert trace.full
    assert max_bytes / 4 < sum(part.stat().st_size for part in tmp_path.iterdir()) <= max_bytes
    assert {path.suffix for path in tmp_path.iterdir()} == {".parquet"}
    found = [*open_trace(tmp_path).events()]
    assert 0 < len(found) < len(wanted)
    assert_same_events(found, wanted[: len(found)])


def test_a_bound_that_holds_nothing_leaves_nothing(tmp_path):
    assert write(tmp_path, random_events(5), max_bytes=1).full
    assert [*tmp_path.iterdir()] == []


def test_a_crash_loses_the_unfinished_part_only(tmp_path):
    written = random_events(6)
    trace = TraceWriter(tmp_path, HEADER, AMPLE)
    for event in written:
        trace.write(event)
    trace.finish_part()
    for event in written:
        trace.write(event)
    trace._flush()  # the process ends here
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["part-00000.parquet", "part-00001.parquet.unfinished"]
    assert_same_events([*open_trace(tmp_path).events()], expected(written))


def test_a_trace_of_which_nothing_was_finished_is_refused(tmp_path):
    trace = TraceWriter(tmp_path, HEADER, AMPLE)
    trace.write(Admission(0, 1))
    trace._flush()
    with pytest.raises(TraceError, match=r"no part of the trace was finished$"):
        open_trace(tmp_path)


def test_closing_twice_does_nothing(tmp_path):
    trace = write(tmp_path, [Admission(0, 1)])
    trace.close()
    assert open_trace(tmp_path).num_rows == 1


def test_a_failing_disk_is_an_error_of_ours_and_leaves_the_finished_parts(tmp_path, monkeypatch):
    trace = TraceWriter(tmp_path, HEADER, AMPLE)
    trace.write(Admission(0, 1))
    trace.finish_part()
    trace.write(Admission(1, 1))

    def no_space(self, rows):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer._Part, "write", no_space)
    with pytest.raises(TraceError, match=r"cannot write the trace: .*No space left on device$"):
        trace.finish_part()
    assert [path.name for path in tmp_path.iterdir()] == ["part-00000.parquet"]
    assert open_trace(tmp_path).num_rows == 1


def test_a_writer_wants_a_directory_of_its_own(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(TraceError, match="holds files; a trace needs a new or an empty directory"):
        TraceWriter(tmp_path, HEADER, AMPLE)
    with pytest.raises(TraceError, match=r"no directory for a trace: File exists$"):
        TraceWriter(file, HEADER, AMPLE)
    TraceWriter(tmp_path / "new" / "trace", HEADER, AMPLE)
    assert (tmp_path / "new" / "trace").is_dir()


def test_a_token_before_its_blocks_is_damage(tmp_path):
    write(tmp_path, [Admission(0, 3), tokens(0, 0, (0, 2, False, [0]))])
    with pytest.raises(TraceError, match=r"damaged: sequence 0 uses position 2 and has 0 blocks$"):
        [*open_trace(tmp_path).events()]


def test_reading_takes_memory_of_a_row_group_only(tmp_path, monkeypatch):
    """A row group holds about 4 KiB here; the trace is 100 times that."""
    monkeypatch.setattr(writer, "ROW_GROUP_BYTES", 1 << 12)
    write(tmp_path, random_events(7, num_steps=1500))
    (part,) = tmp_path.iterdir()
    file = pq.ParquetFile(part)
    assert file.num_row_groups > 50
    sizes = [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]
    assert np.max(sizes) < 1 << 13
