"""Planning by map operations does call by call what the reference does from the same state."""

import copy
from random import Random

import pytest
import torch
from core.test_compiled_planning import BLOCK, plan_of, random_call
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from vllm_ula.errors import IntegrityError
from vllm_ula.kernels import tables
from vllm_ula.kernels.reference.victims import levels
from vllm_ula.planner import BucketAge
from vllm_ula.planner.reference import ReferencePbLru
from vllm_ula.planning import Scratch
from vllm_ula.planning.kernels import KernelPlanning, Marks
from vllm_ula.planning.reference import ReferencePlanning
from vllm_ula.records import Call, Counts
from vllm_ula.residency import Residency


def make(num_device, num_host, num_buckets=4, age=BucketAge.ADMITTED):
    residency = Residency(num_device, num_host)
    return KernelPlanning(residency, Marks.of(residency), num_buckets, age)


def reference_of(planning):
    """The reference, in the same state."""
    residency, mine = copy.deepcopy(planning.residency), planning.tables
    num_buckets = mine.edges.numel()
    lru = ReferencePbLru(residency.num_device, num_buckets, planning.bucket_age)
    reference = ReferencePlanning(residency, lru, Scratch.of(residency))
    lru.period, lru.used = int(mine.state[tables.PERIOD]), int(mine.state[tables.USED])
    lru._admitted = int(mine.state[tables.ADMITTED])
    lru._dead = mine.stamp & 1 == 1
    lru._current = mine.stamp >> 1 == mine.state[tables.CLOCK]
    if int(mine.state[tables.CLOCK]) == 0:
        lru._current[:] = False
    level = levels(mine).long()
    lru.bucket = level.clamp_min(0) + lru.period - num_buckets + 1
    return reference


def said_by(planning, call):
    """What a plan says and counts, whatever the order of its rows, as `plan_of` does."""
    plan = planning.plan(call)
    num = int(plan.exchange.num)
    assert num <= len(plan.exchange)
    incoming, victims = plan.exchange.incoming[:num], plan.exchange.victims.index[:num]
    fetch, write_back = plan.exchange.fetch[:num], plan.exchange.write_back[:num]
    vacated = plan.exchange.vacated.index[:num]
    said = {
        "incoming": set(incoming.tolist()),
        "fetched": set(incoming[fetch].tolist()),
        "vacated": dict(zip(incoming.tolist(), vacated.tolist(), strict=True)),
        "victims": set(victims.tolist()),
        "written back": set(victims[write_back].tolist()),
    }
    assert len(said["incoming"]) == num == len(said["victims"])
    homes = planning.complete(call, plan)
    residency = planning.residency
    assert torch.equal(homes.written, residency.translate(call.written))
    assert torch.equal(homes.selected, residency.translate(call.selection))
    said["live"] = residency.live.tolist()
    said["counted"] = planning.counted()
    planning.check_integrity()
    return said


def expected_of(planning, call):
    said = plan_of(planning, call)
    said["counted"] = planning.counted()
    return {key: said[key] for key in said if key not in ("promoted", "in place", "homes before")}


@settings(max_examples=30, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    num_device=st.sampled_from([2, 4, 6, 12]),
    num_host=st.sampled_from([0, 2, 8, 20]),
    num_buckets=st.sampled_from([2, 3, 8]),
    age=st.sampled_from(BucketAge),
    seed=st.integers(0, 2**32),
)
def test_same_plans_from_the_same_state(num_device, num_host, num_buckets, age, seed):
    random, truth = Random(seed), set()
    planning = make(num_device, num_host, num_buckets, age)
    for number in range(60):
        call = random_call(random, truth, planning.residency.num_logical)
        expected = expected_of(reference_of(planning), call)
        assert said_by(planning, call) == expected, number
        truth |= {*call.written.tolist()} - {-1}
        if random.random() < 0.3:
            blocks = random.sample(range(planning.residency.num_logical // BLOCK), 1)
            planning.bury(torch.tensor(blocks), BLOCK)
            truth -= {slot for block in blocks for slot in (2 * block, 2 * block + 1)}
        if random.random() < 0.1:
            planning.tables.rebase()


def test_stamps_move_back_before_they_overflow():
    planning = make(4, 4)
    mine = planning.tables
    far = tables.REBASE_ABOVE + 10
    mine.state[tables.CLOCK] = far
    mine.edges[:] = torch.tensor([far - 3, far - 2, far - 1, far])
    mine.state[tables.PERIOD] = 7
    mine.stamp[:] = torch.tensor([2 * far, 2 * (far - 2) + 1, 2 * 5, 2 * (far - 3)])
    before = levels(mine).tolist()
    mine.rebase()
    assert int(mine.state[tables.CLOCK]) == far // 2
    assert levels(mine).tolist() == before == [3, -1, 0, 0]
    assert mine.stamp.tolist()[2] == -2
    planning.residency.live[:] = False
    planning.check_integrity()


def test_nothing_is_counted_twice():
    planning = make(4, 4)
    every = torch.arange(8)
    yes = torch.ones(8, dtype=torch.bool)
    call = Call(every, ~yes, every[:0].view(0, 1), yes[:0])
    planning.complete(call, planning.plan(call))
    call = Call(every[:0], yes[:0], torch.tensor([[6, 7]]), yes[:1])
    planning.complete(call, planning.plan(call))
    assert planning.counted() == Counts(selected=2, fetched=2, written_back=2, exchanges=1)
    assert planning.counted() == Counts()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda mine: mine.stamp.__setitem__(0, 99), "used after call 0"),
        (lambda mine: mine.marks.__setitem__(3, 1), "left marks behind"),
        (lambda mine: mine.roles.__setitem__(3, 1), "left marks behind"),
        (lambda mine: mine.live.__setitem__(1, True), "a live row for dead"),
    ],
)
def test_control_broken_tables_are_found(spoil, message):
    planning = make(4, 4)
    planning.check_integrity()
    spoil(planning.tables)
    with pytest.raises(IntegrityError, match=message):
        planning.check_integrity()
