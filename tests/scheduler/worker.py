"""A worker without a model: real rows, real maps, and tags that say what a row must hold.

The row of a token carries a hash of all tokens up to it, so two rows are equal exactly where one
may stand for the other, and a prefix-cache hit that reads anything else is seen. The "model"
samples from the same hash: whatever happens to a request, its completion is known beforehand.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from scheduler.settings import Settings
from torch import Tensor
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from vllm_ula import step
from vllm_ula.kernels.reference.gather import gather
from vllm_ula.records import Call, LayerRows
from vllm_ula.residency import Residency

VOCABULARY = 50
ROOT = 1  # tag before the first token
POISON = -1  # rows nobody has written


def tag_after(tag: int, token: int) -> int:
    """Tag of a token's row, from the tag of the row before it."""
    return (tag * 1_000_003 + token + 7) % (2**61 - 1)


def tags_of(tokens: Sequence[int], root: int = ROOT) -> list[int]:
    """Tags of the rows of a sequence."""
    return list(accumulate(tokens, tag_after, initial=root))[1:]


def next_token(tag: int) -> int:
    """What the model samples after the row with this tag."""
    return (tag >> 11) % VOCABULARY


@dataclass
class Known:
    """What the worker knows of a request."""

    root: int
    tokens: list[int]
    blocks: list[int]
    tags: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)

    def extend(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.tags += tags_of(tokens, self.tags[-1])


@dataclass
class Forward:
    """One forward call, token by token; `expected` are the tags of the selected rows."""

    written: list[int] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)
    selected: list[list[int]] = field(default_factory=list)
    expected: list[list[int]] = field(default_factory=list)
    decode: list[bool] = field(default_factory=list)


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
        marks = torch.zeros(num_device + num_host, dtype=torch.bool)
        planner = settings.planner(num_device)
        self.domain = step.Domain(self.residency, planner, self.layers, marks)
        self.truth = torch.full((num_device + num_host,), POISON)
        self.roots: dict[str, int] = {}
        self.known: dict[str, Known] = {}
        self.seen = Counter[str]()

    def begin_step(self, dead_blocks: Sequence[int]) -> None:
        """Apply deaths, in step order, before anything of the step is written."""
        blocks = torch.tensor(dead_blocks, dtype=torch.int64)
        self.residency.mark_dead(blocks, self.settings.block_size)

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
                tokens = self._sample(lineage, drafts)
                known.extend(tokens)
                known.drafts = self._propose(known, output.num_spec_tokens_to_schedule)
            sampled.append(tokens)
            proposed.append(known.drafts if tokens else [])
        if forward.written:
            self._attend(forward)
        self.check()
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

    def check(self) -> None:
        """The invariants, and that every live row holds what was last written to it."""
        self.domain.check_integrity()
        assert not self.domain.marks.any()
        counts = self.domain.counts
        in_place = counts.in_place_device + counts.in_place_host
        assert counts.selected == counts.hits + counts.fetched + in_place
        live = self.residency.live.nonzero().squeeze(1)
        assert self.wrong_rows(self.residency.homes(live), self.truth[live]) == 0, "a row is lost"

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
        self.known[request_id] = Known(root, list(tokens), list(blocks), tags_of(tokens, root))
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
        size, end = self.settings.block_size, start + num
        slots = [known.blocks[p // size] * size + p % size for p in range(end)]
        assert min(slots) >= size, "the null block is in use"
        forward.written += slots[start:]
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
        residency, counts = self.residency, self.domain.counts
        before, live = residency.home.clone(), residency.live.clone()
        live[written] = False
        fetched, written_back = counts.fetched, counts.written_back
        homes = step.run(self.domain, Call(written, decode, selection, decode))

        was_down, is_down = before >= residency.num_device, residency.home >= residency.num_device
        assert counts.fetched - fetched == int((live & was_down & ~is_down).sum())
        assert counts.written_back - written_back == int((live & ~was_down & is_down).sum())
        self.truth[written] = torch.tensor(forward.tags)
        for number, layer in enumerate(self.layers):
            rows = torch.stack((self.truth[written], torch.full_like(written, number)), 1)
            step.write(layer, homes.written, rows)
        assert residency.live[selection[selection >= 0]].all(), "a dead row is read"
        wrong = self.wrong_rows(homes.selected, _padded(forward.expected, 0))
        assert wrong == 0, "a wrong row is read"

    def _sample(self, lineage: list[int], drafts: list[int]) -> list[int]:
        """Accepted drafts and the token after them."""
        sampled = [next_token(lineage[-len(drafts) - 1])]
        for i, draft in enumerate(drafts):
            if draft != sampled[-1]:
                break
            sampled.append(next_token(lineage[len(lineage) - len(drafts) + i]))
        self.seen["accepted"] += len(sampled) - 1
        self.seen["rejected"] += len(drafts) - len(sampled) + 1
        return sampled

    def _propose(self, known: Known, num: int) -> list[int]:
        """Drafts of which the model accepts as many as it is told."""
        right, tag, drafts = next(self.accept) if num else 0, known.tags[-1], []
        for i in range(num):
            token = next_token(tag)
            drafts.append(token if i < right else (token + 1) % VOCABULARY)
            tag = tag_after(tag, drafts[-1])
        return drafts


def _padded(rows: list[list[int]], padding: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [padding] * (width - len(row)) for row in rows])
