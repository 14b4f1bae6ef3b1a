"""Compiled planning does call by call what the reference does from the same state."""

import copy
from random import Random

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from vllm_ula.planner.hash_lru import HashLru
from vllm_ula.planner.pb_lru import PbLru
from vllm_ula.planner.timestamp_lru import TimestampLru
from vllm_ula.planning import Scratch
from vllm_ula.planning.compiled import CompiledPlanning
from vllm_ula.planning.reference import ReferencePlanning
from vllm_ula.records import Call, Counts
from vllm_ula.residency import Residency

BLOCK = 2


def plan_of(planning, call):
    """What a plan says, whatever the order of its rows."""
    plan = planning.plan(call)
    exchange = plan.exchange
    said = {
        "incoming": set(exchange.incoming.tolist()),
        "fetched": set(exchange.incoming[exchange.fetch].tolist()),
        "vacated": dict(
            zip(exchange.incoming.tolist(), exchange.vacated.index.tolist(), strict=True)
        ),
        "victims": set(exchange.victims.index.tolist()),
        "written back": set(exchange.victims.index[exchange.write_back].tolist()),
        "promoted": plan.promoted,
        "in place": set(plan.in_place.tolist()),
        "homes before": [plan.homes.written.tolist(), plan.homes.selected.tolist()],
    }
    assert len(said["incoming"]) == len(exchange) == len(said["victims"])
    assert len(said["in place"]) == len(plan.in_place)
    homes = planning.complete(call, plan)
    residency = planning.residency
    assert torch.equal(homes.written, residency.translate(call.written))
    assert torch.equal(homes.selected, residency.translate(call.selection))
    said["live"] = residency.live.tolist()
    planning.check_integrity()
    return said


def random_call(random, truth, num_logical):
    written = random.sample(range(num_logical), random.randrange(min(num_logical, 4) + 1))
    readable = sorted({*truth, *written}) or [-1]
    if random.random() < 0.2:  # a dead row, which nobody should read, must not disturb the others
        readable = range(num_logical)
    topk = random.choice([0, 1, 4])
    tokens = random.randrange(4)
    selection = [[random.choice([-1, *readable]) for _ in range(topk)] for _ in range(tokens)]
    flags = random.choice([lambda: True, lambda: False, lambda: random.random() < 0.5])
    if random.random() < 0.3:  # tokens that write nothing, wherever they stand
        written[random.randrange(len(written) + 1) : 0] = [-1, -1]
    return Call(
        torch.tensor(written, dtype=torch.int64),
        torch.tensor([flags() for _ in written], dtype=torch.bool),
        torch.tensor(selection, dtype=torch.int64).view(tokens, topk),
        torch.tensor([flags() for _ in range(tokens)], dtype=torch.bool),
    )


@settings(max_examples=60, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    # Not HashLru, which orders the rows of one call, too, as they come.
    planner=st.sampled_from([PbLru, TimestampLru]),
    num_device=st.sampled_from([2, 4, 6, 12]),
    num_host=st.sampled_from([0, 2, 8, 20]),
    seed=st.integers(0, 2**32),
)
def test_same_plans_from_the_same_state(planner, num_device, num_host, seed):
    random, truth = Random(seed), set()
    residency = Residency(num_device, num_host)
    compiled = CompiledPlanning(residency, planner(num_device), Scratch.of(residency))
    for _ in range(60):
        call = random_call(random, truth, residency.num_logical)
        copied, lru = copy.deepcopy((residency, compiled.planner))
        reference = ReferencePlanning.__new__(ReferencePlanning)
        reference.residency, reference.planner = copied, lru
        reference.scratch, reference._counts = Scratch.of(copied), Counts()
        expected = plan_of(reference, call)
        assert plan_of(compiled, call) == expected
        truth |= {*call.written.tolist()} - {-1}
        if random.random() < 0.3:
            blocks = random.sample(range(residency.num_logical // BLOCK), 1)
            compiled.bury(torch.tensor(blocks), BLOCK)
            truth -= {slot for block in blocks for slot in (2 * block, 2 * block + 1)}


@pytest.mark.parametrize("planner", [PbLru, TimestampLru, HashLru])
def test_the_last_of_two_billion_slots(planner):
    """The widest map int32 homes allow, in memory of which only the ends are touched."""
    num_logical, num_device = 2**31 - 64, 64
    residency = Residency.__new__(Residency)
    residency.num_device, residency.num_host = num_device, num_logical - num_device
    residency.home = torch.empty(num_logical, dtype=torch.int32)
    residency.live = torch.empty(num_logical, dtype=torch.bool)
    residency.owner = torch.arange(num_device, dtype=torch.int32)
    last = torch.tensor([num_logical - 1, num_logical - 2])
    residency.home[last] = last.int()
    residency.home[:num_device] = residency.owner
    residency.live[:num_device] = True
    residency.live[last] = True
    scratch = Scratch(torch.empty(num_logical, dtype=torch.uint8))
    scratch.marks[last] = 0
    planning = CompiledPlanning(residency, planner(num_device), scratch)
    nothing = torch.empty(0, dtype=torch.int64)
    call = Call(nothing, nothing.bool(), last.view(1, 2), torch.ones(1, dtype=torch.bool))
    homes = planning.complete(call, planning.plan(call))
    assert sorted(residency.owner[homes.selected[0]].tolist()) == last.flip(0).tolist()
