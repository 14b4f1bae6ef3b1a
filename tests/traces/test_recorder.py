"""The two sides of a recording without an engine: sequences in, a trace out."""

from types import SimpleNamespace

import pytest
import torch
from traces.samples import HEADER, assert_same_events, blocks
from vllm.v1.core.sched.output import CachedRequestData

from vllm_ula.connectors import recorder
from vllm_ula.connectors.recorder import Recorder
from vllm_ula.connectors.records import GivenBlocks, StepSequences
from vllm_ula.connectors.sequences import SequenceLog
from vllm_ula.traces import Admission, Deaths, End, TracedCall, TraceWriter, open_trace

NOTHING = StepSequences((), (), ())


def step(new=(), running=(), resumed=(), finished=()):
    """What a scheduler says of requests: (id, blocks, computed tokens[, prompt tokens])."""
    cached = CachedRequestData.make_empty()
    for request, ids, num_computed in [*running, *resumed]:
        cached.req_ids.append(request)
        cached.new_block_ids.append(None if ids is None else (ids,))
        cached.num_computed_tokens.append(num_computed)
    cached.resumed_req_ids |= {request for request, *_ in resumed}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=request,
                block_ids=(ids,),
                num_computed_tokens=num_computed,
                prompt_len=prompt_len,
            )
            for request, ids, num_computed, prompt_len in new
        ],
        scheduled_cached_reqs=cached,
        finished_req_ids=set(finished),
    )


def test_sequences_through_the_steps_of_a_scheduler():
    log = SequenceLog(block_size=4)
    assert log.note(step()) == NOTHING
    first = step(new=[("a", [1, 2], 0, 7), ("b", [1, 3], 4, 7)])  # block 1 is a hit of b
    assert log.note(first) == StepSequences(
        ended=(),
        admitted=((0, 7), (1, 7)),
        given=(GivenBlocks(0, 0, (1, 2), 0), GivenBlocks(1, 0, (1, 3), 1)),
    )
    more = step(running=[("a", None, 7), ("b", [5], 7)])
    assert log.note(more) == StepSequences((), (), (GivenBlocks(1, 2, (5,), 2),))
    # a lost its blocks and is back with others; b got a further one
    back = step(running=[("b", [2], 12)], resumed=[("a", [1, 6, 7], 4)])
    assert log.note(back) == StepSequences(
        (), (), (GivenBlocks(1, 3, (2,), 3), GivenBlocks(0, 0, (1, 6, 7), 1))
    )
    assert log.note(step(running=[("a", [9], 12)])).given == (GivenBlocks(0, 3, (9,), 3),)


def test_a_resumed_request_that_is_told_as_a_new_one_keeps_its_number():
    """As vLLM's new model runner has it."""
    log = SequenceLog(block_size=4)
    log.note(step(new=[("a", [1, 2], 0, 7)]))
    assert log.note(step(new=[("a", [4], 0, 7)])) == StepSequences(
        (), (), (GivenBlocks(0, 0, (4,), 0),)
    )
    assert log.note(step(running=[("a", [5], 4)])).given == (GivenBlocks(0, 1, (5,), 1),)


def test_a_request_that_ends_and_its_id_used_again_in_one_step():
    log = SequenceLog(block_size=4)
    log.note(step(new=[("a", [1], 0, 3)]))
    again = log.note(step(new=[("a", [2], 0, 3)], finished=["a", "never ran"]))
    assert again == StepSequences((0,), ((1, 3),), (GivenBlocks(1, 0, (2,), 0),))


def record(path, max_bytes=1 << 30):
    return Recorder(TraceWriter(path, HEADER, max_bytes), num_blocks=64, block_size=4)


def metadata(requests, decode):
    return SimpleNamespace(
        request_of_token=torch.tensor(requests), decode=torch.tensor(decode, dtype=torch.bool)
    )


def test_a_shared_block_is_written_by_its_owner(tmp_path):
    """Sequence 1 hits block 7 in the step in which sequence 0 writes it."""
    made = record(tmp_path)
    given = (GivenBlocks(0, 0, (7,), 0), GivenBlocks(1, 0, (7, 8), 1))
    made.begin_step(StepSequences((), ((0, 4), (1, 6)), given), dead_blocks=[7, 8])
    topk = torch.tensor([[0, -1, -1], [3, 1, 0], [4, 2, -1], [9, 9, 9]], dtype=torch.int32)
    slots = torch.tensor([7 * 4, 7 * 4 + 3, 8 * 4])
    made.call(1, metadata([0, 0, 1], [0, 0, 1]), slots, topk)
    made.close()
    *before, call = open_trace(tmp_path).events()
    assert_same_events(before, [Deaths(blocks(7, 8)), Admission(0, 4), Admission(1, 6)])
    assert isinstance(call, TracedCall)
    assert (call.call, call.domain) == (0, 1)
    assert call.seqs.tolist() == [0, 0, 1]
    assert call.positions.tolist() == [0, 3, 4]
    assert call.written.tolist() == slots.tolist()
    assert call.decode.tolist() == [False, False, True]
    assert call.selection[:, :3].tolist() == [[28, -1, -1], [28, 29, 31], [30, 32, -1]]


def test_tokens_that_write_nothing_are_not_there(tmp_path):
    """Padding, and drafts past the longest length; a call of nothing else is none."""
    made = record(tmp_path)
    made.begin_step(StepSequences((), ((0, 4),), (GivenBlocks(0, 0, (7,), 0),)), [])
    topk = torch.zeros(8, 3, dtype=torch.int32)
    made.call(0, metadata([0, -1], [1, 1]), torch.tensor([-1, -1]), topk)
    made.call(0, metadata([0, 0, -1, -1], [1, 1, 1, 1]), torch.tensor([28, -1, 29, -1]), topk)
    made.close()
    (call,) = (e for e in open_trace(tmp_path).events() if isinstance(e, TracedCall))
    assert (call.call, call.written.tolist()) == (0, [28])


def test_all_is_on_disk_when_the_last_sequence_has_ended(tmp_path):
    made = record(tmp_path)
    made.begin_step(StepSequences((), ((0, 4), (1, 4)), ()), [])
    made.begin_step(StepSequences((0,), (), ()), [])
    assert [*tmp_path.iterdir()] == []
    made.begin_step(StepSequences((1,), (), ()), [5])
    wanted = [Admission(0, 4), Admission(1, 4), End(0), Deaths(blocks(5)), End(1)]
    assert_same_events([*open_trace(tmp_path).events()], wanted)


@pytest.fixture
def lines(monkeypatch):
    """What the recorder logs."""
    found = []
    for level in ("info", "warning"):
        monkeypatch.setattr(recorder.logger, level, lambda text, *args: found.append(text % args))
    return found


def test_a_failing_disk_ends_the_recording_with_one_line(tmp_path, lines, monkeypatch):
    made = record(tmp_path / "trace")
    made.begin_step(StepSequences((), ((0, 4),), ()), [])
    (tmp_path / "trace").rmdir()
    for _ in range(3):
        made.begin_step(StepSequences((0,), ((1, 4),), ()), [])
        made.begin_step(StepSequences((1,), ((0, 4),), ()), [])
        made.call(0, metadata([0], [1]), torch.tensor([28]), torch.zeros(1, 3, dtype=torch.int32))
    made.close()
    (line,) = lines
    assert line.startswith("UlaCache: recording has ended, serving goes on: ")
    assert "No such file or directory" in line


def test_the_bound_ends_the_recording_with_one_line(tmp_path, lines):
    made = record(tmp_path, max_bytes=1 << 16)
    for seq in range(4000):
        made.begin_step(StepSequences((), ((seq, 4),), (GivenBlocks(seq, 0, (7,), 0),)), [1, 2])
    made.close()
    assert lines == [f"UlaCache: record_gib is reached, the trace {tmp_path} is complete"]
    assert sum(part.stat().st_size for part in tmp_path.iterdir()) <= 1 << 16
    assert open_trace(tmp_path).num_rows > 100
