"""D03, D02, D08: no order that streams and events allow reads bytes that are not there yet.

Calls of two domains are launched on a fake device, which is then played hundreds of times from the
start, each time in another order that keeps its streams and events.
"""

from __future__ import annotations

import gc
import random
import weakref
from unittest import mock

import pytest
import torch

from tests.core.fake_device import COPY, DevicePlanning, FakeDevice
from vllm_ula import step, streams
from vllm_ula.kernels import dispatch
from vllm_ula.kernels.reference.exchange import exchange as exchange_rows
from vllm_ula.kernels.reference.gather import gather
from vllm_ula.planner.pb_lru import PbLru
from vllm_ula.planning import Scratch
from vllm_ula.planning.compiled import CompiledPlanning
from vllm_ula.records import Call, DeviceSlots, Exchange, HostSlots, LayerRows
from vllm_ula.residency import Residency
from vllm_ula.streams import CopyLane

NUM_DEVICE, NUM_HOST, CAP = 6, 10, 12
SELECTED = 2  # rows a token selects
ORDERS = 100


class Rank:
    """Domains of a rank on a fake device, and what each of their rows must hold."""

    def __init__(self, num_layers=(3, 2)):
        self.device = FakeDevice()
        slots, flags = torch.zeros(CAP, dtype=torch.int64), torch.zeros(CAP, dtype=torch.bool)
        self.buffers = Exchange(
            slots,
            DeviceSlots(slots.clone()),
            HostSlots(slots.clone()),
            flags,
            flags.clone(),
            torch.zeros(1, dtype=torch.int32),
        )
        lane, scratch, self.domains, self.truth = CopyLane(self.device), None, [], []
        for num in num_layers:
            residency = Residency(NUM_DEVICE, NUM_HOST)
            scratch = scratch or Scratch.of(residency)
            planning = CompiledPlanning(residency, PbLru(NUM_DEVICE), scratch)
            layers = [
                LayerRows(f"{i}", torch.empty(NUM_DEVICE, 2), torch.empty(NUM_HOST, 2))
                for i in range(num)
            ]
            planning = DevicePlanning(planning, self.device, self.buffers)
            self.domains.append(step.Domain(planning, layers, lane))
            self.truth.append({})
        self.wrong, self.tags = [], 0

    def call(self, number, written, selected, decode=True, followers=True):
        """A forward call of a domain, launched; layers that follow may not run if none writes."""
        domain, truth = self.domains[number], self.truth[number]
        selection = torch.tensor(selected, dtype=torch.int64).view(len(selected), SELECTED)
        written = torch.tensor(written, dtype=torch.int64)
        of_decode = torch.full((len(written),), decode), torch.full((len(selected),), decode)
        self.device.joining = True
        with mock.patch.object(dispatch, "exchange", self._exchange):
            step.run(domain, Call(written, of_decode[0], selection, of_decode[1]))
        self.device.joining = False
        for slot in written.tolist():
            self.tags += 1
            truth[slot] = self.tags
        for i in range(len(domain.layers) if followers else 1):
            domain.wait(i)
            self._write_and_read(domain, i, domain.homes, written, selection, truth)

    def _write_and_read(self, domain, i, homes, written, selection, truth):
        layer = domain.layers[i]
        tags = torch.tensor([[truth[slot], i] for slot in written.tolist()]).view(-1, 2).float()
        expected = torch.tensor([[truth[slot], i] for slot in selection.flatten().tolist()])

        def read():
            found = gather(layer.device, layer.host, homes.selected)
            self.wrong += selection[(found != expected.view_as(found)).any(-1)].tolist()

        self.device.launch(f"write {i}", lambda: step.write(layer, homes.written, tags))
        self.device.launch(f"read {i}", read)

    def _exchange(self, victims, vacated, fetch, write_back, num, layers):
        """Two launches, of every other row each, so that what must not come between can."""
        for part in (0, 1):
            mask = torch.arange(CAP) % 2 == part

            def move(mask=mask):
                exchange_rows(victims, vacated, fetch & mask, write_back & mask, num, layers)

            self.device.launch("move " + layers[0].name, move)

    def wrong_orders(self, seed, without=None, orders=ORDERS):
        """The orders in which some read saw something else than was last written."""
        order = random.Random(seed)
        for number in range(orders):
            self.reset()
            self.device.play(order, without)
            if self.wrong:
                yield number

    def reset(self):
        self.wrong.clear()
        for layer in (layer for domain in self.domains for layer in domain.layers):
            layer.device.fill_(torch.nan)
            layer.host.fill_(torch.nan)
        self.buffers.num.zero_()


def serve(seed, num_calls=10):
    """Calls of both domains that promote, evict, write, and of which some stop after layer 0."""
    rank, choose = Rank(), random.Random(seed)
    slots = range(NUM_DEVICE + NUM_HOST)
    for number in (0, 1):
        rank.call(number, list(slots), [], decode=False)
    for i in range(num_calls):
        number, followers = i % 2, choose.random() < 0.7
        written = choose.sample(slots, 2) if followers else []
        selected = [choose.sample(slots, SELECTED) for _ in range(2)]
        rank.call(number, written, selected, followers=followers)
    return rank


@pytest.fixture(scope="module")
def served():
    return [serve(seed) for seed in range(3)]


def any_order(orders):
    return next(orders, None) is not None


def test_no_order_reads_bytes_that_are_not_there_yet(served):
    assert [list(rank.wrong_orders(seed)) for seed, rank in enumerate(served)] == [[], [], []]
    assert all(len(rank.device.queues[COPY]) > 40 for rank in served)


@pytest.mark.parametrize("kind", ["record", "wait"])
@pytest.mark.parametrize("name", ["fork", "layer 1", "layer 2"])
def test_control_without_one_of_its_events_or_waits_some_order_does(served, kind, name):
    assert any(any_order(rank.wrong_orders(0, (kind, name))) for rank in served)


def test_control_without_the_join_some_order_does(served):
    assert any(any_order(rank.wrong_orders(0, ("wait", "join"))) for rank in served)


def test_control_two_rows_swapped_are_seen():
    rank = serve(0)
    rank.call(0, [], [[3, 3]])
    domain = rank.domains[0]

    def swap():
        for layer in domain.layers:
            home = int(domain.residency.home[3])
            tier, row = (
                (layer.device, home) if home < NUM_DEVICE else (layer.host, home - NUM_DEVICE)
            )
            tier[[row, row - 1]] = tier[[row - 1, row]]

    rank.device.launch("swap", swap)
    rank.call(0, [], [[3, 3]])
    assert list(rank.wrong_orders(0, orders=20)) == list(range(20))


def test_followers_rows_move_beside_the_layers_before():
    """What the order leaves free: it would hold as well if everything ran one after another."""
    rank, order, seen = Rank([3]), random.Random(0), set()
    rank.call(0, list(range(16)), [], decode=False)
    rank.call(0, [1], [[8, 9]])
    for _ in range(50):
        rank.reset()
        played = rank.device.play(order)
        launched = played[len(played) - played[::-1].index("plan") :]
        first_at = {name: launched.index(name) for name in launched}
        seen |= {(a, b) for a in first_at for b in first_at if first_at[a] < first_at[b]}
    assert {("move 1", "read 0"), ("read 0", "move 1")} <= seen
    assert {("read 1", "move 2"), ("move 2", "read 0")} <= seen
    assert not {("write 1", "move 1"), ("read 2", "move 2"), ("move 1", "move 0")} & seen


def test_a_copy_keeps_its_tensors_until_the_compute_stream_has_waited_for_it():
    lane, tensors = CopyLane(FakeDevice()), [torch.zeros(1), torch.zeros(1)]
    held = [weakref.ref(tensor) for tensor in tensors]
    lane.start([tensor.sum for tensor in tensors])
    del tensors
    for layer in (1, 2):
        gc.collect()
        assert held[layer - 1]() is not None
        lane.wait(layer)
        gc.collect()
        assert held[layer - 1]() is None
    lane.wait(2)
    lane.join()


def test_a_domain_of_one_layer_starts_nothing():
    device = FakeDevice()
    CopyLane(device).start([])
    assert device.queues == [[], []]


def test_on_a_cpu_there_is_no_lane():
    assert streams.make_lane(torch.device("cpu")) is None


def test_on_a_gpu_the_lane_asks_torch_for_streams(monkeypatch):
    asked = []
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda arg, name=name: asked.append((name, arg)))
    of_torch = streams.CudaStreams(torch.device("cuda:1"))
    of_torch.new(), of_torch.current(), of_torch.on("copy")
    device = torch.device("cuda:1")
    assert asked == [("Stream", device), ("current_stream", device), ("stream", "copy")]
    assert isinstance(streams.make_lane(device), CopyLane)
