"""A trace says what the engine did: every call, every death, of a run with everything in it."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.harness import (
    Request,
    at_rest,
    drafting,
    engine,
    prefix_hits,
    prompts,
    run,
    scheduler,
    worker,
)

from vllm_ula import step
from vllm_ula.attention import store
from vllm_ula.config import UlaConfig
from vllm_ula.connectors.worker import UlaWorker
from vllm_ula.planner.make import make_planner
from vllm_ula.planning import Scratch
from vllm_ula.planning.compiled import CompiledPlanning
from vllm_ula.records import Call
from vllm_ula.residency import Residency
from vllm_ula.tiny_model import TinyModelOptions, write_tiny_model
from vllm_ula.traces import Admission, Deaths, End, Trace, TracedCall, open_trace

pytestmark = pytest.mark.engine

BLOCK, TOPK, MAX_SEQS, DRAFTS = 16, 32, 8, 3
POOL = {"device_slots": 80, "host_gib": 0.02}  # D_min: 32 selected rows, 8 x (1 + 3) tokens
LENGTHS = (50, 131, 90, 150, 64, 117, 140, 33)


def requests() -> list[Request]:
    """27 usable blocks: they wait and are preempted. Same prompts hit the prefix cache.

    The first two come in one step, so the second reads blocks that step writes.
    """
    first, *others = prompts(LENGTHS, seed=7)
    together = [Request(first, 12), Request(first, 12)]
    mixed = [
        Request(
            prompt, 24, arrives=2 + i, seed=i if i % 2 else None, aborted=30 if i == 3 else None
        )
        for i, prompt in enumerate(others)
    ]
    again = [Request(first, 8, arrives=4), Request(others[-1], 8, arrives=60)]
    never_runs = Request(others[0], 8, arrives=61, aborted=61)
    return [*together, *mixed, *again, never_runs]


class Seen:
    """What passed the seams of the worker, in order: deaths, and calls with their domain."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[Any] = []
        begin_step, run_step = UlaWorker.begin_step, step.run

        def begin(worker: UlaWorker, metadata: Any) -> None:
            if metadata.dead_blocks:
                self.events.append(list(metadata.dead_blocks))
            begin_step(worker, metadata)

        def run_and_see(domain: step.Domain, call: Call) -> Any:
            index = [other is domain for other in worker().domains].index(True)
            self.events.append((index, copy.deepcopy(call)))  # of buffers that vLLM writes again
            return run_step(domain, call)

        patch.setattr(UlaWorker, "begin_step", begin)
        patch.setattr(store, "run", run_and_see)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Seen, Any]:
    """The trace, what a spy saw meanwhile, and the maps and metrics the run left."""
    directory = tmp_path_factory.mktemp("recorded")
    write_tiny_model(directory / "model", TinyModelOptions(layers=2, topk=TOPK, mtp=1))
    with (
        pytest.MonkeyPatch.context() as patch,
        engine(
            str(directory / "model"),
            {**POOL, "record": str(directory / "trace")},
            max_model_len=256,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=64,
            num_gpu_blocks_override=28,
            speculative_config=drafting("mtp", DRAFTS),
        ) as llm,
    ):
        seen = Seen(patch)
        preempted = 0
        preempt = scheduler(llm)._preempt_request

        def counting(*args: Any, **kwargs: Any) -> None:
            nonlocal preempted
            preempted += 1
            preempt(*args, **kwargs)

        patch.setattr(scheduler(llm), "_preempt_request", counting)
        run(llm, requests())
        counts = at_rest(llm)
        assert preempted > 0
        assert prefix_hits(llm) > 32  # of more than one request
        # Nothing runs, so all of it is readable while the engine lives.
        trace = open_trace(directory / "trace")
        events = [*trace.events()]
        maps = [
            (domain.residency.home.clone(), domain.residency.live.clone())
            for domain in worker().domains
        ]
    assert len([*open_trace(directory / "trace").events()]) == len(events)
    return trace, seen, (maps, counts)


def test_the_header_is_of_the_engine(recorded: tuple[Trace, Seen, Any]) -> None:
    header = recorded[0].header
    assert header.domains == ((0,), (1,), (2,))
    assert header.row_bytes == (576 * 4,) * 3
    assert (header.block_size, header.topk, header.device_slots) == (BLOCK, TOPK, 80)
    assert header.logical_slots == header.device_slots + header.host_slots == 28 * BLOCK
    assert header.index_key_bytes == 3 * 132


def test_calls_and_deaths_are_those_the_worker_saw(recorded: tuple[Trace, Seen, Any]) -> None:
    trace, seen, _ = recorded
    found = [e for e in trace.events() if isinstance(e, TracedCall | Deaths)]
    assert len(found) == len(seen.events)
    kinds = set()
    for event, saw in zip(found, seen.events, strict=True):
        if isinstance(event, Deaths):
            assert event.blocks.tolist() == saw
            continue
        domain, call = saw
        assert event.domain == domain
        assert event.written.tolist() == call.written.tolist()
        assert event.decode.tolist() == call.decode.tolist()
        assert event.selection.shape == call.selection.shape
        for row, expected in zip(event.selection.tolist(), call.selection.tolist(), strict=True):
            assert sorted(row) == sorted(expected)
        assert (event.selected_positions <= event.positions[:, None]).all()
        kinds |= {(domain, bool(decode)) for decode in event.decode}
    assert kinds == set(itertools.product(range(3), (False, True)))
    assert [e.call for e in found if isinstance(e, TracedCall)] == [
        *range(sum(isinstance(event, tuple) for event in seen.events))
    ]


def test_sequences_are_admitted_once_and_end(recorded: tuple[Trace, Seen, Any]) -> None:
    trace = recorded[0]
    events = [*trace.events()]
    admitted = [event for event in events if isinstance(event, Admission)]
    ran = [request for request in requests() if request.aborted != request.arrives]
    assert [event.seq for event in admitted] == [*range(len(ran))]
    lengths = [len(request.prompt) for request in ran]
    assert sorted(event.prompt_tokens for event in admitted) == sorted(lengths)
    assert sorted(event.seq for event in events if isinstance(event, End)) == [*range(len(ran))]

    # Chunked prefill: no step takes more than 64 tokens, yet every position is written.
    calls = [event for event in events if isinstance(event, TracedCall) and event.domain == 0]
    assert max(len(call.seqs) for call in calls) <= 64
    assert calls[0].positions.tolist() == [*range(50), *range(32, 46)]
    assert calls[0].seqs.tolist() == [0] * 50 + [1] * 14
    written: dict[int, set[int]] = {}
    for call in calls:
        for seq, position in zip(call.seqs.tolist(), call.positions.tolist(), strict=True):
            written.setdefault(seq, set()).add(position)
    for event in admitted:
        positions = written[event.seq]
        assert positions == set(range(min(positions), max(positions) + 1))
        assert min(positions) % BLOCK == 0  # below are prefix hits
        assert max(positions) >= event.prompt_tokens - 1
    assert sum(min(positions) > 0 for positions in written.values()) >= 2


def test_maps_replayed_from_the_trace_are_those_of_the_engine(
    recorded: tuple[Trace, Seen, Any],
) -> None:
    """Same homes, same live rows, same counts; and no row is read that is dead."""
    trace, _, (maps, counts) = recorded
    header = trace.header
    domains = []
    for _ in header.domains:
        residency = Residency(header.device_slots, header.host_slots)
        planner = make_planner(UlaConfig(), header.device_slots)
        planning = CompiledPlanning(residency, planner, Scratch.of(residency))
        domains.append(step.Domain(planning, layers=[]))
    for event in trace.events():
        if isinstance(event, Deaths):
            for domain in domains:
                domain.planning.bury(torch.from_numpy(event.blocks), header.block_size)
        elif isinstance(event, TracedCall):
            domain = domains[event.domain]
            selection = torch.from_numpy(event.selection)
            decode = torch.from_numpy(event.decode)
            step.run(domain, Call(torch.from_numpy(event.written), decode, selection, decode))
            assert domain.residency.live[selection[selection >= 0]].all()
            domain.check_integrity()
    for domain, (home, live) in zip(domains, maps, strict=True):
        assert torch.equal(domain.residency.home, home)
        assert torch.equal(domain.residency.live, live)
    assert sum(domain.counts.selected for domain in domains) == counts["selected_rows"]
    assert sum(domain.counts.hits for domain in domains) == counts["device_hits"]
    assert sum(domain.counts.fetched for domain in domains) == counts["fetched_rows"] > 0


def test_nothing_of_a_prompt_is_in_the_files(recorded: tuple[Trace, Seen, Any]) -> None:
    trace = recorded[0]
    content = b"".join(Path(part).read_bytes() for part in trace.parts)
    for request in requests():
        assert bytes(request.prompt[:8]) not in content
