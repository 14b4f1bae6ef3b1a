"""vLLM's real scheduler over our connector, driven as its engine core does, and checked."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from scheduler.model import completion, root_of, tags_of
from scheduler.sequences import Sequences
from scheduler.settings import Settings, kv_cache_config, vllm_config
from scheduler.worker import Worker
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_ula.connectors.records import UlaConnectorMetadata

kv_cache_utils.init_none_hash(sha256)


@dataclass
class Completion:
    """What must come and what came out of a request."""

    expected: list[int]
    tokens: list[int] = field(default_factory=list)


class Rig:
    """An engine without a model.

    Args:
        settings: sizes and ways to schedule.
        seed: of the positions that are selected.
        accept: how many drafts are right, proposal by proposal, over and over.
    """

    def __init__(self, settings: Settings, seed: int = 0, accept: Iterable[int] = (0,)) -> None:
        self.settings = settings
        config = vllm_config(settings)
        self.scheduler = (AsyncScheduler if settings.lag else Scheduler)(
            config,
            kv_cache_config(settings),
            StructuredOutputManager(config),
            block_size=settings.block_size,
        )
        self.scheduler.use_v2_model_runner = settings.new_runner
        self.manager = self.scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.worker = Worker(settings, itertools.cycle(accept), seed)
        self.sequences = Sequences(settings.block_size)
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput, DraftTokenIds]] = deque()
        self.requests: dict[str, Request] = {}
        self.completions: dict[str, Completion] = {}
        self.hasher = kv_cache_utils.get_request_block_hasher(settings.block_size, sha256)
        self.lineage: dict[bytes, list[int]] = {}
        self.learned: dict[str, int] = {}
        self.uncomputed: set[int] = set()
        self.seen = Counter[str]()

    @property
    def num_free(self) -> int:
        """Free logical blocks."""
        return self.pool.get_num_free_blocks()

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 1,
        priority: int = 0,
        salt: str | None = None,
        stop: int | None = None,
    ) -> str:
        """Queue a request; its completion is known from here on."""
        request_id = str(len(self.requests))
        self.requests[request_id] = request = Request(
            request_id,
            list(prompt),
            SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                stop_token_ids=None if stop is None else [stop],
            ),
            pooling_params=None,
            arrival_time=float(len(self.requests)),
            priority=priority,
            cache_salt=salt,
            block_hasher=self.hasher,
        )
        self.worker.roots[request_id] = root = root_of(salt)
        self.learned[request_id] = 0
        most = min(max_tokens, self.settings.max_len - len(prompt))
        self.completions[request_id] = Completion(completion(prompt, root, most, stop))
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.check_blocks()

    def step(self) -> None:
        """One turn of the engine core: outputs wait until `lag` younger steps are scheduled."""
        if self.scheduler.has_requests():
            executed = self.schedule()
            if len(self.in_flight) <= self.settings.lag and (
                executed or self.scheduler.has_requests()
            ):
                return
        if self.in_flight:
            self.settle()

    def schedule(self) -> bool:
        """Schedule a step and run it on the worker; whether it had tokens."""
        preempted = sum(request.num_preemptions for request in self.requests.values())
        cached = self.cached_blocks()
        output = self.scheduler.schedule()
        self.seen["steps"] += 1
        self.seen["preemptions"] -= preempted
        self.seen["preemptions"] += sum(r.num_preemptions for r in self.requests.values())
        self._forget_uncomputed(cached, output)
        self.check_blocks()
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, UlaConnectorMetadata)
        drafts = output.scheduled_spec_decode_tokens.values()
        assert metadata.num_leases == sum(map(len, drafts))
        self.sequences.check(output, self.table)
        self.worker.begin_step(metadata.dead_blocks)
        self.check_live_rows()
        self.in_flight.append((output, *self.worker.execute(output)))
        self.check_cached_blocks()
        return output.total_num_scheduled_tokens > 0

    def settle(self) -> None:
        """Give the oldest output to the scheduler."""
        output, result, drafts = self.in_flight.popleft()
        for outputs in self.scheduler.update_from_output(output, result).values():
            for out in outputs.outputs:
                self.completions[out.request_id].tokens += out.new_token_ids
        if not self.settings.lag and self.settings.drafts:
            self.scheduler.update_draft_token_ids(drafts)
        self.check_blocks()

    def drain(self, most: int = 3000) -> None:
        """Run until nothing is left: blocks are back, rows of cached blocks are all that lives."""
        last = self.seen["steps"] + most
        while self.scheduler.has_requests() or self.in_flight:
            self.step()
            assert self.seen["steps"] < last, "the engine makes no progress"
        # Blocks freed after the last step died too: the next step says so, here an empty one.
        self.schedule()
        self.settle()
        assert self.num_free == self.settings.blocks - 1
        assert not self.worker.known
        assert not self.sequences.tables
        for request_id, came in self.completions.items():
            aborted = self.requests[request_id].status == RequestStatus.FINISHED_ABORTED
            expected = came.expected[: len(came.tokens)] if aborted else came.expected
            assert came.tokens == expected, f"request {request_id}"

    def run(self, prompt: Sequence[int], max_tokens: int = 1) -> str:
        """A request to its end."""
        request_id = self.submit(prompt, max_tokens)
        self.drain()
        return request_id

    def cached_blocks(self) -> dict[int, bytes]:
        """Blocks a prefix can hit, with the hash of their tokens and of all before."""
        return {
            block.block_id: kv_cache_utils.get_block_hash(block.block_hash)
            for block in self.pool.blocks
            if block.block_hash is not None
        }

    def table(self, request_id: str) -> list[int]:
        """Blocks of a request."""
        return self.manager.get_block_ids(request_id)[0]

    def check_blocks(self) -> None:
        """Every block is free, or held by exactly those who say so."""
        tables = self.manager.coordinator.single_type_managers[0].req_to_blocks.values()
        deferred = (blocks for _, blocks in self.scheduler.deferred_frees)
        held = Counter(b.block_id for blocks in (*tables, *deferred) for b in blocks)
        assert 0 not in held
        for block in self.pool.blocks[1:]:
            assert block.ref_cnt == held[block.block_id]
        free = {block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()}
        assert not held.keys() & free
        assert len(free) + len(held) == self.num_free + len(held) == self.settings.blocks - 1

    def check_live_rows(self) -> None:
        """A row is live only if its block is held or cached: right after the deaths of a step."""
        live = self.worker.residency.live.view(-1, self.settings.block_size).any(1)
        for block_id in live.nonzero().flatten().tolist():
            block = self.pool.blocks[block_id]
            kept = block.ref_cnt or block.block_hash is not None or block_id in self.uncomputed
            assert kept, "a death was missed"

    def check_cached_blocks(self) -> None:
        """Whatever a prefix can hit holds the rows of its tokens: after the step has run."""
        self._learn_hashes()
        cached = self.cached_blocks()
        slots = self.worker.slots(list(cached))
        assert self.worker.residency.live[slots].all(), "a cached block has a dead row"
        expected = [self.lineage[block_hash] for block_hash in cached.values()]
        homes = self.worker.residency.translate(slots)
        wrong = self.worker.wrong_rows(homes, torch.tensor(expected).view_as(homes))
        assert wrong == 0, "a cached block has a wrong row"

    def _learn_hashes(self) -> None:
        """Note what a block with the hash of any block of any request must hold."""
        size = self.settings.block_size
        for request_id, known in self.learned.items():
            request = self.requests[request_id]
            hashes = request.block_hashes
            if len(hashes) > known:
                tags = tags_of(request.all_token_ids, self.worker.roots[request_id])
                for i in range(known, len(hashes)):
                    self.lineage[hashes[i]] = tags[i * size : (i + 1) * size]
                self.learned[request_id] = len(hashes)

    def _forget_uncomputed(self, cached: dict[int, bytes], output: SchedulerOutput) -> None:
        """Take blocks out of the prefix cache that this step was to compute and will not.

        vLLM caches blocks when it schedules their tokens; a priority preemption later in the same
        step takes the tokens back and leaves the blocks cached (vllm#43569, open).
        """
        computed = {b for i in output.num_scheduled_tokens for b in self.table(i)}
        new = self.cached_blocks().items() - cached.items()
        uncomputed = {block_id for block_id, _ in new} - computed
        self.pool.evict_blocks(uncomputed)
        self.seen["uncomputed"] += len(uncomputed)
        # Evicting is no death, so their older rows stay live until the block is handed out.
        self.uncomputed = {
            b for b in self.uncomputed | uncomputed if not self.pool.blocks[b].ref_cnt
        }
