"""A worker without a model: real rows and maps, and checks of what every call does to them."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from scheduler.model import propose, tags_of, verify
from scheduler.settings import Settings
from torch import Tensor
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from vllm_ula import step
from vllm_ula.kernels.reference.gather import gather
from vllm_ula.planning import Scratch
from vllm_ula.planning.compiled import CompiledPlanning
from vllm_ula.records import Call, Counts, LayerRows
from vllm_ula.residency import Residency

POISON = -1  # rows nobody has written


@dataclass
class Known:
    """What the worker knows of a request."""

    root: int
    tokens: list[int]
    blocks: list[int]
    tags: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    end: int = 0  # rows from here on were never written

    def extend(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.tags += tags_of(tokens, self.tags[-1])


@dataclass
class Forward:
    """One forward call, token by token; `expected` are the tags of the selected rows.

    `unwritten` are rows its requests have, and have not come to.
    """

    written: list[int] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)
    selected: list[list[int]] = field(default_factory=list)
    expected: list[list[int]] = field(default_factory=list)
    decode: list[bool] = field(default_factory=list)
    unwritten: list[int] = field(default_factory=list)


class Worker:
    """One rank: a domain of two layers, and block tables kept from the scheduler's output."""

    def __init__(self, settings: Settings, accept: Iterator[int], seed: int) -> None:
        self.settings, self.accept = settings, accept
        self.random = random.Random(seed)
        num_device, num_host = settings.num_device, settings.num_host
        self.residency = Residency(num_device, num_host)
        self.layers = [
            LayerRows(
                f"layers.{i}",
                torch.full((num_device, 2), POISON),
                torch.full((num_host, 2), POISON),
            )
            for i in range(2)
        ]
        planner = settings.planner(num_device)
        planning = CompiledPlanning(self.residency, planner, Scratch.of(self.residency))
        self.domain = step.Domain(planning, self.layers)
        self.truth = torch.full((num_device + num_host,), POISON)
        self.roots: dict[str, int] = {}
        self.known: dict[str, Known] = {}
        self.seen = Counter[str]()

    def begin_step(self, dead_blocks: Sequence[int]) -> None:
        """Apply deaths, in step order, before anything of the step is written."""
        blocks = torch.tensor(dead_blocks, dtype=torch.int64)
        self.domain.planning.bury(blocks, self.settings.block_size)

    def execute(self, output: SchedulerOutput) -> tuple[ModelRunnerOutput, DraftTokenIds]:
        """Run a step: write, exchange, read, sample, draft."""
        computed = self._update_tables(output)
        forward, sampled, proposed = Forward(), [], []
        for request_id, num in output.num_scheduled_tokens.items():
            known = self.known[request_id]
            scheduled = output.scheduled_spec_decode_tokens.get(request_id, [])
            drafts = self._drafts_to_verify(known, scheduled)
            lineage = self._append(forward, known, computed[request_id], num, drafts)
            tokens = []
            if len(lineage) - len(drafts) == len(known.tokens):
                tokens = verify(lineage, drafts)
                self.seen["accepted"] += len(tokens) - 1
                self.seen["rejected"] += len(drafts) - len(tokens) + 1
                known.extend(tokens)
                if num_drafts := output.num_spec_tokens_to_schedule:
                    known.drafts = propose(known.tags[-1], num_drafts, next(self.accept))
            sampled.append(tokens)
            proposed.append(known.drafts if tokens else [])
        if forward.written:
            self._attend(forward)
        self.check_rows()
        ids = list(output.num_scheduled_tokens)
        index = {request_id: i for i, request_id in enumerate(ids)}
        return ModelRunnerOutput(ids, index, sampled), DraftTokenIds(ids, proposed)

    def wrong_rows(self, homes: Tensor, expected: Tensor) -> int:
        """Rows, over all layers, that do not hold their tag; -1 must read as zeros."""
        wrong = 0
        for number, layer in enumerate(self.layers):
            of_layer = torch.full_like(expected, number).masked_fill_(homes < 0, 0)
            read = gather(layer.device, layer.host, homes)
            wrong += int((read != torch.stack((expected, of_layer), -1)).any(-1).sum())
        return wrong

    def check_rows(self) -> None:
        """The invariants, and that every live row holds what was last written to it."""
        self.domain.check_integrity()
        live = self.residency.live.nonzero().squeeze(1)
        assert self.wrong_rows(self.residency.homes(live), self.truth[live]) == 0, "a row is lost"

    def check_reads(self, homes: Tensor, selection: Tensor, expected: Tensor) -> None:
        """Selected rows are alive and hold the tags of their tokens."""
        assert self.residency.live[selection[selection >= 0]].all(), "a dead row is read"
        assert self.wrong_rows(homes, expected) == 0, "a wrong row is read"

    def check_unwritten(self, slots: list[int]) -> None:
        """What a block held for whoever had it before is dead."""
        assert not self.residency.live[slots].any(), "a row is alive that nobody has written"

    def check_counts(self, selection: Tensor, before: Counts, home: Tensor, live: Tensor) -> None:
        """What a call counted is what it did: live rows that it did not write have moved."""
        counts, num_device = self.domain.counts, self.residency.num_device
        in_place = counts.in_place_device + counts.in_place_host
        assert counts.selected == counts.hits + counts.fetched + in_place
        distinct = selection[selection >= 0].unique().numel()
        assert counts.selected - before.selected == distinct
        was_down, is_down = home >= num_device, self.residency.home >= num_device
        fetched, written_back = live & was_down & ~is_down, live & ~was_down & is_down
        assert counts.fetched - before.fetched == int(fetched.sum())
        assert counts.written_back - before.written_back == int(written_back.sum())
        row_bytes = sum(layer.row_bytes for layer in self.layers)
        assert counts.fetched_bytes == counts.fetched * row_bytes
        assert counts.written_back_bytes == counts.written_back * row_bytes

    def slots(self, blocks: Sequence[int]) -> Tensor:
        """Logical slots int64 `[blocks, block_size]`."""
        size = self.settings.block_size
        return torch.tensor(blocks, dtype=torch.int64).unsqueeze(1) * size + torch.arange(size)

    def num_on_host(self, blocks: Sequence[int]) -> int:
        """How many of the blocks have a row on the host."""
        homes = self.residency.translate(self.slots(blocks))
        return int((homes >= self.residency.num_device).any(1).sum())

    def _update_tables(self, output: SchedulerOutput) -> dict[str, int]:
        """Keep block tables as a model runner does; computed tokens by request."""
        for request_id in output.finished_req_ids:
            self.known.pop(request_id, None)
        computed = {}
        for new in output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self._admit(new.req_id, tokens, new.block_ids[0], new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            computed[request_id] = cached.num_computed_tokens[i]
            blocks = (cached.new_block_ids[i] or ([],))[0]
            if request_id in cached.resumed_req_ids:
                tokens = cached.all_token_ids[request_id]
                self._admit(request_id, tokens, blocks, computed[request_id])
            else:
                self.known[request_id].blocks += blocks
        return computed

    def _admit(
        self, request_id: str, tokens: Sequence[int], blocks: list[int], computed: int
    ) -> None:
        root = self.roots[request_id]
        tags = tags_of(tokens, root)
        self.known[request_id] = Known(root, list(tokens), list(blocks), tags, end=computed)
        hit = blocks[: computed // self.settings.block_size]
        self.seen["hit blocks"] += len(hit)
        self.seen["hit on host"] += self.num_on_host(hit)
        self.seen["hit unwritten"] += int((~self.residency.live[self.slots(hit)]).any(1).sum())

    def _drafts_to_verify(self, known: Known, scheduled: list[int]) -> list[int]:
        """With outputs in flight the scheduler has placeholders, the worker the drafts."""
        if self.settings.lag:
            return [*known.drafts, *scheduled][: len(scheduled)]
        return list(scheduled)

    def _append(
        self, forward: Forward, known: Known, computed: int, num: int, drafts: list[int]
    ) -> list[int]:
        """Add the scheduled tokens of a request; tags of its rows up to the last of them."""
        # Drafts rejected in flight make the scheduler's figure too large.
        start = min(computed, len(known.tokens) - 1)
        assert computed - start <= self.settings.lag * self.settings.drafts
        inputs = known.tokens[start : start + num - len(drafts)] + drafts
        assert len(inputs) == num
        last = known.tags[start - 1] if start else known.root
        lineage = known.tags[:start] + tags_of(inputs, last)
        end = start + num
        known.end = max(known.end, end)
        slots = self.slots(known.blocks).flatten().tolist()
        assert min(slots) >= self.settings.block_size, "the null block is in use"
        forward.written += slots[start:end]
        forward.unwritten += slots[known.end :]
        forward.tags += lineage[start:]
        forward.decode += [num <= 1 + self.settings.drafts] * num
        for position in range(start, end):
            chosen = self._select(position)
            forward.selected.append([slots[p] for p in chosen])
            forward.expected.append([lineage[p] for p in chosen])
        return lineage

    def _select(self, position: int) -> list[int]:
        """Some causal positions; often with the first and the newest, as sparse models do."""
        topk = min(self.settings.topk, position + 1)
        chosen = set(self.random.sample(range(position + 1), topk))
        if self.random.random() < 0.5:
            chosen = {0, position, *list(chosen)[: max(topk - 2, 0)]}
        return list(chosen)[: self.settings.topk]

    def _attend(self, forward: Forward) -> None:
        """The real step, and what it must have done."""
        written = torch.tensor(forward.written)
        decode = torch.tensor(forward.decode)
        selection = _padded(forward.selected, -1)
        assert written.unique().numel() == written.numel(), "two tokens write one row"
        before = copy.copy(self.domain.counts)
        home, live = self.residency.home.clone(), self.residency.live.clone()
        live[written] = False
        homes = step.run(self.domain, Call(written, decode, selection, decode))
        self.check_counts(selection, before, home, live)

        self.truth[written] = torch.tensor(forward.tags)
        for number, layer in enumerate(self.layers):
            rows = torch.stack((self.truth[written], torch.full_like(written, number)), 1)
            step.write(layer, homes.written, rows)
        self.check_reads(homes.selected, selection, _padded(forward.expected, 0))
        self.check_unwritten(forward.unwritten)


def _padded(rows: list[list[int]], padding: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [padding] * (width - len(row)) for row in rows])
