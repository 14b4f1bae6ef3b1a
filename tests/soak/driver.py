"""Plays a story in an engine of this process, step by step, and counts what happened.

The pool holds a quarter of the demand, so requests wait, are preempted and resume, and cached
blocks are evicted to the host and hit again. Everything is decided by step numbers and by the
scheduler's state, which is the same with UlaCache and without.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.harness import (
    block_pool,
    completion_of,
    drafting,
    engine,
    scheduler,
    spec_decode,
    worker,
)
from soak.story import CHOICES, Ask, Request, Stage, Story

NGRAM, MTP = drafting("ngram", 3), drafting("mtp", 3)
TOPK, BLOCK, MAX_SEQS, MAX_LEN = 32, 16, 16, 256
# 16 requests of up to 212 tokens ask for 3,392 rows; 52 usable blocks hold 832.
BLOCKS = 53
POOL = {"device_slots": 112, "host_gib": 0.02}  # D_min: 32 selected rows, 16 x (1 + 3) tokens


@dataclass
class Played:
    """What one arm did: per request what the user got, and counts per kind."""

    outputs: list[Any] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def write_model(directory: str | Path) -> None:
    """Two layers and an MTP layer; short requests already read a part of their history."""
    from vllm_ula.tiny_model import TinyModelOptions, write_tiny_model

    write_tiny_model(directory, TinyModelOptions(layers=2, topk=TOPK, mtp=1))


@contextmanager
def soak_engine(model: str, drafts: dict[str, Any] | None, ula: bool) -> Iterator[Any]:
    """The engine all stories with these drafts run in."""
    with engine(
        model,
        POOL if ula else None,
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=96,
        num_gpu_blocks_override=BLOCKS,
        speculative_config=drafts,
        scheduling_policy="priority",
        structured_outputs_config={"backend": "xgrammar"},
    ) as llm:
        yield llm


def play(llm: Any, story: Story) -> Played:
    """Play a story to its end in a `soak_engine`."""
    return _Player(llm, story).play()


def play_all(model: str, drafts: dict[str, Any] | None, story: Story, ula: bool) -> Played:
    """Start an engine and play a story in it; `engine` holds what must hold at rest."""
    with soak_engine(model, drafts, ula) as llm:
        return play(llm, story)


class _Player:
    def __init__(self, llm: Any, story: Story) -> None:
        self.llm, self.core, self.story = llm, llm.llm_engine, story
        self.ula = self.core.vllm_config.kv_transfer_config is not None
        self.engine_core = self.core.engine_core.engine_core
        self.played = Played(outputs=[None] * len(story.requests))
        self.ids: dict[int, str] = {}  # of running requests, by number

    def play(self) -> Played:
        free = block_pool(self.llm).get_num_free_blocks()
        before = self._totals()
        step, arriving = 0, 0
        requests = self.story.requests
        with self._watched():
            while arriving < len(requests) or self.core.has_unfinished_requests():
                while arriving < len(requests) and requests[arriving].arrives <= step:
                    self._send(arriving, requests[arriving])
                    arriving += 1
                self._abort_by_stage()
                self._step()
                step += 1
                assert step < 200 * len(requests), "the engine makes no progress"
            self.core.step()
        assert block_pool(self.llm).get_num_free_blocks() == free
        counts = self.played.counts
        for name, total in self._totals().items():
            counts[name] += int(total - before[name])
        counts["requests"] += len(requests)
        counts["steps"] += step
        return self.played

    def _send(self, number: int, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        sampling = dict(request.sampling)
        if request.ask is Ask.STRUCTURED:
            sampling["structured_outputs"] = StructuredOutputsParams(choice=CHOICES)
        self.ids[number] = self.core.add_request(
            str(number),
            {"prompt_token_ids": request.prompt},
            SamplingParams(**sampling),
            arrival_time=float(number),
            priority=request.priority,
        )
        self.played.counts[request.ask.value] += 1
        for sent in scheduler(self.llm).requests.values():
            grammar = sent.structured_output_request
            while grammar is not None and not grammar.is_grammar_ready:
                time.sleep(0.001)  # compiled by a thread; the schedule must not hang on its speed

    def _step(self) -> None:
        for output in self.core.step():
            number = int(output.request_id)
            self.played.outputs[number] = [
                (completion_of(sample), sample.stop_reason) for sample in output.outputs
            ]
            if output.finished:
                internal = self.ids.pop(number, None)
                if internal and self.story.requests[number].abort is Stage.FINISHED:
                    self.engine_core.abort_requests([internal])  # crosses the last token's way
                    self.played.counts[_aborted(Stage.FINISHED)] += 1

    def _abort_by_stage(self) -> None:
        requests = scheduler(self.llm).requests
        for number, internal in list(self.ids.items()):
            stage, request = self.story.requests[number].abort, requests.get(internal)
            if request is None or stage is None:
                continue
            now = {
                Stage.QUEUED: request.num_computed_tokens == 0 and not request.num_preemptions,
                Stage.MID_PREFILL: 0 < request.num_computed_tokens < request.num_prompt_tokens,
                Stage.MID_DECODE: request.num_output_tokens >= 3,
                Stage.DISCONNECT: request.num_output_tokens >= 1,
            }.get(stage, False)
            if now:
                self._count_abort(number, stage)
                if stage is Stage.DISCONNECT:
                    self.core.abort_request([internal], internal=True)
                else:
                    self.core.abort_request([str(number)])

    def _abort_verifying(self, scheduler_output: Any) -> None:
        """Abort while the step that verifies a request's drafts is being executed."""
        for number, internal in list(self.ids.items()):
            if (
                self.story.requests[number].abort is Stage.VERIFYING
                and internal in scheduler_output.scheduled_spec_decode_tokens
            ):
                self._count_abort(number, Stage.VERIFYING)
                self.core.output_processor.abort_requests([internal], internal=True)
                self.engine_core.aborts_queue.put_nowait([internal])

    def _count_abort(self, number: int, stage: Stage) -> None:
        del self.ids[number]
        self.played.counts[_aborted(stage)] += 1

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """See every scheduled step before it is executed."""
        schedule = scheduler(self.llm).schedule

        def watching(*args: Any, **kwargs: Any) -> Any:
            scheduled = schedule(*args, **kwargs)
            self._abort_verifying(scheduled)
            if self.ula:
                self._count_hits(scheduled)
            return scheduled

        scheduler(self.llm).schedule = watching
        try:
            yield
        finally:
            scheduler(self.llm).schedule = schedule

    def _count_hits(self, scheduled: Any) -> None:
        """Requests that start with cached blocks some of whose rows are on the host."""
        residency = worker().domains[0].residency
        for new in scheduled.scheduled_new_reqs:
            for block in new.block_ids[0][: new.num_computed_tokens // BLOCK]:
                homes = residency.home[block * BLOCK : (block + 1) * BLOCK]
                on_host = bool((homes >= residency.num_device).any())
                self.played.counts["prefix hits on evicted blocks"] += on_host

    def _totals(self) -> dict[str, float]:
        values = {m.name: getattr(m, "value", 0) for m in self.llm.get_metrics()}
        accepted, rejected = spec_decode(self.llm)
        totals = {
            "tokens": values["vllm:generation_tokens"],
            "preemptions": values["vllm:num_preemptions"],
            "accepted drafts": accepted,
            "rejected drafts": rejected,
        }
        if self.ula:
            totals |= {
                "rows fetched": values["vllm:ula_fetched_rows"],
                "rows evicted to the host": values["vllm:ula_written_back_rows"],
            }
        return totals


def _aborted(stage: Stage) -> str:
    return f"aborted {stage.value}"
