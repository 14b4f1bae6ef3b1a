"""A decode step of one domain up to the attention of its first layer, as the engine runs it.

compute   plan | rows of layer 0 | remap | write | attention of layer 0 | join
copy                             | rows of layers 1, 2, 3
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.attention_cases import SCALE
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.case import Case, Figure, expect, expect_equal, references, share
from benchmarks.gpu.history import History, history, us_a_call
from benchmarks.gpu.map_work import MapWork
from benchmarks.gpu.rows import values, words
from vllm_ula.kernels.exchange import exchange
from vllm_ula.kernels.reference.fp8_rows import LATENT, WIDTH, pack
from vllm_ula.kernels.reference.gather import read
from vllm_ula.kernels.remap import remap
from vllm_ula.kernels.scatter import scatter
from vllm_ula.kernels.sparse_mla import sparse_mla
from vllm_ula.kernels.tables import CallTables
from vllm_ula.streams import make_lane


class DecodeStep:
    """Calls of one token a request, each of which writes its row.

    Attributes:
        work: the map.
        queries: bfloat16 `[requests, heads, 576]` of every call.
        rows: bfloat16 `[requests, 576]` that every call writes.
    """

    def __init__(self, bench: Bench, past: History) -> None:
        requests, heads = len(past.slots[0]), bench.sizes.heads[0]
        generator = bench.generator(requests)
        shape = (requests, heads, WIDTH)
        self.work = MapWork(past)
        self.queries = torch.randn(shape, generator=generator, device=bench.device).bfloat16()
        self.rows = values(requests, generator)
        self._layers = bench.layers
        self._lane = make_lane(bench.device)

    def run(self, slots: Tensor, written: Tensor) -> tuple[CallTables, Tensor]:
        """One step; the call, and the attention of layer 0 over what it selects."""
        tables, first, others = self.work.tables, self._layers[0], self._layers[1:]
        call = self.work.begin(slots, written)
        lists = call.victims, call.vacated, call.fetch, call.write_back, tables.num_exchanged
        exchange(*lists, [first])
        copies = [partial(exchange, *lists, [layer]) for layer in others]
        if self._lane is not None:
            self._lane.start(copies)
        else:
            for copy in copies:
                copy()
        remap(tables, call)
        scatter(first.device, first.host, call.written_homes, self.rows)
        homes = call.selected_homes
        out, _ = sparse_mla(self.queries, first.device, first.host, homes, SCALE, LATENT)
        if self._lane is not None:
            self._lane.join()
        return call, out

    def contents(self, layer: int) -> Tensor:
        """The rows of a layer by logical slot, wherever they are: int64 words `[N, 82]`."""
        rows = self._layers[layer]
        return read(words(rows.device), words(rows.host), self.work.tables.home.long())


def check_step(bench: Bench) -> None:
    """Every logical slot keeps its row in every layer, and attention reads the selected ones."""
    for requests in bench.sizes.requests:
        past = history(bench, requests)
        step = DecodeStep(bench, past)
        expected = [step.contents(layer) for layer in range(bench.sizes.layers)]
        written = torch.cat(past.written)
        for slots, own in zip(past.slots, past.written, strict=True):
            call, out = step.run(slots, own)
            expected[0][own] = words(pack(step.rows))
            expect((call.selected_homes < bench.sizes.rows).all(), "a row is read on the host")
            expect((call.written_homes < bench.sizes.rows).all(), "a row is written on the host")
            kept = expected[0].view(torch.uint8)
            where = (kept, kept[:0], slots)  # a pool in which every row is at home
            by_slot, _ = sparse_mla(step.queries, *where, SCALE, LATENT)
            expect_equal("attention of the rows by logical slot", out, by_slot)
        for layer, rows in enumerate(expected):
            found = step.contents(layer)
            if layer:  # layers that follow write theirs later
                found[written] = rows[written]
            expect_equal(f"rows of layer {layer} by logical slot", found, rows)


def measure_step(bench: Bench) -> Iterator[Figure]:
    """What is fetched for all layers, of what the bus moves each way at once."""
    for requests in bench.sizes.requests:
        past = history(bench, requests)
        step = DecodeStep(bench, past)
        us = us_a_call(bench, step.work.state, step.run, past.slots, past.written)
        num_bytes = past.missing * sum(layer.row_bytes for layer in bench.layers)
        yield Figure(
            "decode step",
            f"{references(bench, requests)}, {len(bench.layers)} layers",
            us,
            share=share(num_bytes, us, bench.timer.pcie_bandwidth[2]),
        )


CASES = (Case("decode step", check_step, measure_step),)
