"""A domain whose rows carry tags, and the truth about it: what each logical slot must hold."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from unittest import mock

import torch
from torch import Tensor

from vllm_ula import step
from vllm_ula.kernels.reference.gather import gather
from vllm_ula.planner import Planner
from vllm_ula.planner.stamps import StampPlanner
from vllm_ula.planning import Planning, Scratch
from vllm_ula.planning.compiled import CompiledPlanning
from vllm_ula.planning.kernels import KernelPlanning, Marks
from vllm_ula.planning.reference import ReferencePlanning
from vllm_ula.records import Call, Counts, DeviceSlots, Exchange, HostSlots, LayerRows
from vllm_ula.residency import Residency
from vllm_ula.transfer import transfer

WIDTH = 2  # a row is [tag of its last write, number of its layer]
ROW_BYTES = WIDTH * 4
POISON = torch.nan  # rows nobody has written


@dataclass(frozen=True)
class Stepped:
    """One call: where its rows were written, what was exchanged and what it counted."""

    homes: list[int]
    exchange: Exchange
    counts: Counts

    @property
    def incoming(self) -> list[int]:
        return sorted(self.exchange.incoming.tolist())

    @property
    def victims(self) -> list[int]:
        return sorted(self.exchange.victims.index.tolist())

    @property
    def fetched(self) -> list[int]:
        return sorted(self.exchange.incoming[self.exchange.fetch].tolist())

    @property
    def written_back(self) -> list[int]:
        return sorted(self.exchange.victims.index[self.exchange.write_back].tolist())


@dataclass(frozen=True)
class InKernels:
    """In the place of a planner: map operations keep the recency of that many device rows."""

    num_device: int
    num_buckets: int = 64


def make_domain(
    residency: Residency,
    planner: Planner | InKernels,
    layers: list[LayerRows],
    planning: type[Planning] | None = None,
) -> step.Domain:
    """A domain planned as its planner suggests: compiled, by the reference, or in kernels."""
    if isinstance(planner, InKernels):
        marks = Marks.of(residency)
        return step.Domain(KernelPlanning(residency, marks, planner.num_buckets), layers)
    if planning is None:
        planning = CompiledPlanning if isinstance(planner, StampPlanner) else ReferencePlanning
    return step.Domain(planning(residency, planner, Scratch.of(residency)), layers)


class Rig:
    """Runs calls on one domain; `truth` is the model: the tag of every live logical slot."""

    def __init__(
        self,
        planner: Callable[[int], Planner | InKernels],
        num_device: int,
        num_host: int,
        num_layers: int = 1,
        block_size: int = 1,
        planning: type[Planning] | None = None,
    ) -> None:
        self.layers = [
            LayerRows(
                f"layers.{i}",
                torch.full((num_device, WIDTH), POISON),
                torch.full((num_host, WIDTH), POISON),
            )
            for i in range(num_layers)
        ]
        self.residency = Residency(num_device, num_host)
        self.domain = make_domain(self.residency, planner(num_device), self.layers, planning)
        self.block_size = block_size
        self.truth: dict[int, int] = {}
        self.tags = 0

    @property
    def homes(self) -> list[int]:
        return self.residency.home.tolist()

    def step(
        self,
        write: Sequence[int] = (),
        select: Sequence[Sequence[int]] = (),
        decode: bool | Sequence[bool] = True,
        write_by_decode: bool | Sequence[bool] | None = None,
    ) -> Stepped:
        """One call of all layers in order; what it selected must read back."""
        if write_by_decode is None:
            assert isinstance(decode, bool)
            write_by_decode = decode
        call = Call(
            torch.tensor(write, dtype=torch.int64),
            _flags(write_by_decode, len(write)),
            _padded(select),
            _flags(decode, len(select)),
        )
        before = [(layer.device.clone(), layer.host.clone()) for layer in self.layers]
        counts = _snapshot(self.domain.counts)
        with mock.patch.object(step, "transfer", wraps=transfer) as spy:
            homes = step.run(self.domain, call)
        spy.assert_called_once()
        exchange = _trimmed(copy.deepcopy(spy.call_args.args[1]))
        self._check_moves(before, exchange)

        for slot in write:
            self.tags += 1
            self.truth[slot] = self.tags
        for i, layer in enumerate(self.layers):
            rows = torch.tensor([[self.truth[slot], i] for slot in write], dtype=torch.float32)
            step.write(layer, homes.written, rows.view(-1, WIDTH))
            assert self.wrong_rows(call.selection, i) == []
        self.check()
        return Stepped(homes.written.tolist(), exchange, _difference(self.domain.counts, counts))

    def fill(self, slots: Collection[int]) -> None:
        """Write slots, one prefill call each: device rows in order of recency, then host rows."""
        for slot in slots:
            self.step([slot], decode=False)

    def die(self, blocks: Sequence[int]) -> None:
        self.domain.planning.bury(torch.tensor(blocks, dtype=torch.int64), self.block_size)
        for block in blocks:
            for slot in range(block * self.block_size, (block + 1) * self.block_size):
                self.truth.pop(slot, None)

    def wrong_rows(self, selection: Tensor, layer: int = 0) -> list[int]:
        """The comparison: selected logical slots that do not hold what was last written to them.

        A -1 must read as zeros.
        """
        rows = self.layers[layer]
        read = gather(rows.device, rows.host, self.residency.translate(selection))
        slots = selection.flatten().tolist()
        expected = [[self.truth[slot], layer] if slot >= 0 else [0, 0] for slot in slots]
        same = (read == torch.tensor(expected).view_as(read)).all(-1)
        return sorted(set(selection[~same].tolist()))

    def check(self) -> None:
        """The invariants that hold between calls."""
        self.domain.check_integrity()
        counts = self.domain.counts
        in_place = counts.in_place_device + counts.in_place_host
        assert counts.selected == counts.hits + counts.fetched + in_place
        assert counts.fetched_bytes == counts.fetched * ROW_BYTES * len(self.layers)
        assert counts.written_back_bytes == counts.written_back * ROW_BYTES * len(self.layers)
        live = self.residency.live.nonzero().squeeze(1).tolist()
        assert live == sorted(self.truth)
        states = self.residency.states()
        assert states.device_live + states.device_dead == self.residency.num_device
        assert states.device_live + states.host_live == len(live)

    def _check_moves(self, before: list[tuple[Tensor, Tensor]], exchange: Exchange) -> None:
        """Only rows the exchange fetched or wrote back have changed, in every layer."""
        fetched = exchange.victims.index[exchange.fetch].tolist()
        written_back = exchange.vacated.index[exchange.write_back].tolist()
        for layer, (device, host) in zip(self.layers, before, strict=True):
            assert set(_changed(device, layer.device)) <= set(fetched)
            assert set(_changed(host, layer.host)) <= set(written_back)


def _trimmed(exchange: Exchange) -> Exchange:
    """The entries that count."""
    num = len(exchange) if exchange.num is None else int(exchange.num)
    return Exchange(
        exchange.incoming[:num],
        DeviceSlots(exchange.victims.index[:num]),
        HostSlots(exchange.vacated.index[:num]),
        exchange.fetch[:num],
        exchange.write_back[:num],
    )


def expected_promotion(
    rig: Rig,
    write: Sequence[int],
    write_by_decode: Sequence[bool],
    select: Sequence[Sequence[int]],
    decode: Sequence[bool],
) -> set[int]:
    """What a call must promote, token by token, as architecture.md section 5 says it."""
    homes, num_device = rig.homes, rig.residency.num_device
    seated = {slot for slot in write if homes[slot] < num_device}
    for slot, by_decode in zip(write, write_by_decode, strict=True):
        if by_decode and len(seated) < num_device:
            seated.add(slot)
    promoted: set[int] = set()
    for token, is_decode in zip(select, decode, strict=True):
        joint = promoted | set(token) - {-1}
        if is_decode and len(joint | seated) > num_device:
            break
        if is_decode:
            promoted = joint
    return promoted


def _flags(value: bool | Sequence[bool], num: int) -> Tensor:
    flags = [value] * num if isinstance(value, bool) else value
    return torch.tensor(flags, dtype=torch.bool)


def _padded(select: Sequence[Sequence[int]]) -> Tensor:
    width = max(map(len, select), default=0)
    rows = [[*token, *[-1] * (width - len(token))] for token in select]
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), width)


def _changed(before: Tensor, after: Tensor) -> list[int]:
    same = (before == after) | (before.isnan() & after.isnan())
    return (~same).any(-1).nonzero().squeeze(1).tolist()


def _snapshot(counts: Counts) -> Counts:
    return Counts(**{field.name: getattr(counts, field.name) for field in fields(Counts)})


def _difference(after: Counts, before: Counts) -> Counts:
    names = [field.name for field in fields(Counts)]
    return Counts(**{name: getattr(after, name) - getattr(before, name) for name in names})
