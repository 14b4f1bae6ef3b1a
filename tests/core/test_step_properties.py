"""Random histories against a model: what each logical slot holds, and what a call may do."""

import functools

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.core.rig import InKernels, Rig, expected_promotion
from vllm_ula.capacity import min_device_slots
from vllm_ula.planner.hash_lru import HashLru
from vllm_ula.planner.pb_lru import PbLru
from vllm_ula.planner.reference import ReferencePbLru, ReferenceTimestampLru
from vllm_ula.planner.timestamp_lru import TimestampLru

BLOCK = 2
PLANNERS = [
    PbLru,
    functools.partial(PbLru, num_buckets=2),
    TimestampLru,
    functools.partial(HashLru, num_buckets=4),
    ReferencePbLru,
    ReferenceTimestampLru,
    InKernels,
    functools.partial(InKernels, num_buckets=2),
]

anything = st.integers(0, 255)
flags = st.lists(st.booleans(), min_size=6, max_size=6)


class History(RuleBasedStateMachine):
    """Calls and deaths in any order; Rig compares every selected row with the model."""

    num_layers = 1

    @initialize(
        planner=st.sampled_from(PLANNERS),
        num_device=st.sampled_from([2, 4, 6, 12]),
        num_host=st.sampled_from([0, 2, 8, 20]),
    )
    def start(self, planner, num_device, num_host):
        self.rig = Rig(planner, num_device, num_host, self.num_layers, BLOCK)

    @rule(
        write=st.lists(anything, max_size=6),
        select=st.lists(st.lists(st.integers(-1, 255), max_size=5), max_size=4),
        by_decode=flags,
        decode=flags,
    )
    def call(self, write, select, by_decode, decode):
        rig, residency = self.rig, self.rig.residency
        num_device = residency.num_device
        write = list(dict.fromkeys(slot % residency.num_logical for slot in write))
        readable = sorted({*rig.truth, *write}) or [-1]
        select = [
            [readable[any_ % len(readable)] if any_ >= 0 else -1 for any_ in token]
            for token in select
        ]
        by_decode, decode = by_decode[: len(write)], decode[: len(select)]
        promoted = expected_promotion(rig, write, by_decode, select, decode)
        selected = {slot for token in select for slot in token} - {-1}
        homes, owner, live = rig.homes, residency.owner.tolist(), set(rig.truth)

        called = rig.step(write, select, decode, by_decode)

        protected = {homes[slot] for slot in {*promoted, *write} if homes[slot] < num_device}
        fetched = {slot for slot in promoted - set(write) if homes[slot] >= num_device}
        victims = set(called.victims)
        dead = {row for row in range(num_device) if owner[row] not in live}
        assert all(rig.homes[slot] < num_device for slot in promoted)
        assert not victims & protected
        all_dead_rows_are_used = dead <= victims | protected
        assert victims <= dead or all_dead_rows_are_used
        on_device = all(rig.homes[slot] < num_device for slot in write)
        assert on_device or all_dead_rows_are_used
        assert called.counts.selected == len(selected)
        assert called.counts.hits == len(promoted) - len(fetched)
        assert called.counts.fetched == len(fetched)
        assert called.counts.written_back == len(victims - dead)
        assert called.counts.in_place_device == sum(
            rig.homes[slot] < num_device for slot in selected - promoted
        )
        assert called.counts.exchanges == int(bool(fetched or victims - dead))

    @rule(blocks=st.lists(anything, min_size=1, max_size=2))
    def die(self, blocks):
        num_blocks = self.rig.residency.num_logical // BLOCK
        self.rig.die(sorted({block % num_blocks for block in blocks}))

    @invariant()
    def every_live_row_reads_back(self):
        self.rig.check()
        live = torch.tensor(sorted(self.rig.truth), dtype=torch.int64)
        for layer in range(self.num_layers):
            assert self.rig.wrong_rows(live, layer) == []


class HistoryOfThreeLayers(History):
    num_layers = 3


budget = settings(
    max_examples=60,
    stateful_step_count=16,
    deadline=None,
    derandomize=True,
    # Not `explain`, which takes minutes here once something fails.
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
TestOneLayer = History.TestCase
TestOneLayer.settings = budget
TestThreeLayers = HistoryOfThreeLayers.TestCase
TestThreeLayers.settings = budget


@settings(budget, max_examples=40)
@given(
    planner=st.sampled_from(PLANNERS),
    topk=st.integers(1, 5),
    num_tokens=st.integers(1, 3),
    seeds=st.lists(st.randoms(use_true_random=False), min_size=1, max_size=6),
)
def test_room_for_d_min_always_promotes_the_first_decode_token(planner, topk, num_tokens, seeds):
    num_device = min_device_slots(topk, num_tokens, BLOCK)
    rig = Rig(planner, num_device, 12, block_size=BLOCK)
    rig.fill(range(rig.residency.num_logical))
    for random in seeds:
        slots = range(rig.residency.num_logical)
        write = random.sample(slots, num_tokens)
        select = [random.sample(slots, topk) for _ in range(num_tokens)]
        called = rig.step(write, select)
        assert all(rig.homes[slot] < num_device for slot in [*write, *select[0]])
        assert called.counts.hits + called.counts.fetched >= topk
