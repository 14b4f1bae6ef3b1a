"""Engines in this process, driven step by step: requests and aborts happen at step numbers.

One schedule for both arms: without UlaCache the same `max_num_seqs`, the same number of blocks.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import vllm_ula

T = TypeVar("T")

PRELOADED = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.deepseek_mtp",
)
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ULA_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Request:
    """A request that arrives at a step, and perhaps is aborted at a later one."""

    prompt: list[int]
    max_tokens: int
    arrives: int = 0
    aborted: int | None = None
    seed: int | None = None


@dataclass
class Completion:
    """Sampled tokens and their logprobs, to the last bit."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


def environment() -> Iterator[None]:
    """Engines in this process, checked after every step: the body of a fixture."""
    with mock.patch.dict(os.environ, ENVIRONMENT):
        yield


def preload() -> None:
    """Import what every engine needs, once for all children."""
    for module in PRELOADED:
        importlib.import_module(module)


def in_children(function: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> Iterator[T]:
    """Call a function in child processes, two at a time; results in order of the arguments.

    Each call has a process of its own: an engine with n-gram drafts spoils those that start after
    it in its process (vLLM's start inspects every object of every module, numba's break it).
    """
    # Forks of a server of its own: this process may have run an engine, whose threads a fork lacks.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    with context.Pool(2, maxtasksperchild=1) as pool:
        yield from pool.imap(functools.partial(_apply, function), arguments, chunksize=1)


def _apply(function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    no_compiler()
    return function(*arguments)


def no_compiler() -> None:
    """vLLM compiles its counting of logprobs at the first request, for seconds in every process."""
    import torch._dynamo

    torch._dynamo.config.disable = True


def drafting(method: str, num: int) -> dict[str, Any]:
    """`speculative_config` of `num` drafts by "ngram" or "mtp"."""
    lookup = {"prompt_lookup_max": 3, "prompt_lookup_min": 1} if method == "ngram" else {}
    return {"method": method, "num_speculative_tokens": num, **lookup}


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random byte prompts."""
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


@contextlib.contextmanager
def engine(model: str, ula: dict[str, Any] | None = None, **overrides: Any) -> Iterator[Any]:
    """An `LLM` in this process; `ula` holds UlaCache's settings, None leaves it out."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    drafts = overrides.get("speculative_config") or {}
    alone = multiprocessing.parent_process() is not None
    assert alone or drafts.get("method") != "ngram", "see in_children"
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "enforce_eager": True,
        "disable_log_stats": False,
        "enable_prefix_caching": True,
    }
    arguments.update(overrides)
    if ula is not None:
        arguments["kv_transfer_config"] = vllm_ula.kv_transfer_config(**ula)
    llm = LLM(**arguments)
    try:
        yield llm
        if ula is not None and not llm.llm_engine.has_unfinished_requests():
            at_rest(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def run(
    llm: Any, requests: Sequence[Request], at_step: Callable[[int], None] | None = None
) -> list[Completion]:
    """Drive the engine until every request is done.

    Args:
        llm: from `engine`.
        requests: in order of submission.
        at_step: called before each step with its number.
    """
    from vllm import SamplingParams

    core = llm.llm_engine
    completions = {str(i): Completion() for i in range(len(requests))}
    step = 0
    while step <= max(r.arrives for r in requests) or core.has_unfinished_requests():
        for i, request in enumerate(requests):
            if request.arrives == step:
                sampling = SamplingParams(
                    temperature=0.0 if request.seed is None else 1.0,
                    seed=request.seed,
                    max_tokens=request.max_tokens,
                    ignore_eos=True,
                    logprobs=0,
                )
                core.add_request(str(i), {"prompt_token_ids": request.prompt}, sampling)
            if request.aborted == step:
                core.abort_request([str(i)])
        if at_step is not None:
            at_step(step)
        for output in core.step():
            completions[output.request_id] = completion_of(output.outputs[0])
        step += 1
        assert step < 5000, "the engine makes no progress"
    core.step()  # tells the worker what the last requests left behind
    return list(completions.values())


def completion_of(sample: Any) -> Completion:
    """What one of a request's samples has so far."""
    pairs = zip(sample.token_ids, sample.logprobs, strict=True)
    logprobs = [entry[token].logprob for token, entry in pairs]
    return Completion(list(sample.token_ids), logprobs, sample.finish_reason)


def assert_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Tokens and logprobs are identical, request by request."""
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.tokens == b.tokens, f"request {i}: tokens differ"
        assert a.logprobs == b.logprobs, f"request {i}: logprobs differ"
        assert a.finish_reason == b.finish_reason, f"request {i}: {a.finish_reason}"


def worker() -> Any:
    """UlaCache's worker half of the engine in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from vllm_ula.connectors.ula import UlaConnector

    group: Any = get_kv_transfer_group()
    connectors = getattr(group, "sub_connectors", [group])  # of a MultiConnector
    return next(c.worker for c in connectors if isinstance(c, UlaConnector))


def at_rest(llm: Any) -> dict[str, float]:
    """Hold what must hold when no request is left, whatever happened before; return the metrics.

    Every selected row was a hit, fetched or read in place; live rows are those of cached blocks,
    in every domain; no lease is left; the maps are whole.
    """
    llm.llm_engine.step()
    values = metrics(llm)
    in_place = values["read_in_place_rows.device"] + values["read_in_place_rows.host"]
    assert values["selected_rows"] == values["device_hits"] + values["fetched_rows"] + in_place
    assert values["leases"] == 0
    pool = block_pool(llm)
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "a block is still referenced"
    cached = [block.block_hash is not None for block in pool.blocks]
    for domain in worker().domains:
        domain.check_integrity()
        live = domain.residency.live.view(pool.num_gpu_blocks, -1)
        assert live.all(1).tolist() == live.any(1).tolist() == cached
    return values


def spec_decode(llm: Any) -> tuple[int, int]:
    """Accepted and rejected drafts so far."""
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    accepted = int(values.get("vllm:spec_decode_num_accepted_tokens", 0))
    return accepted, int(values.get("vllm:spec_decode_num_draft_tokens", 0)) - accepted


def prefix_hits(llm: Any) -> int:
    """Tokens the prefix cache has saved so far."""
    (counter,) = [m for m in llm.get_metrics() if m.name == "vllm:prefix_cache_hits"]
    return int(counter.value)


def metrics(llm: Any) -> dict[str, float]:
    """Current values of UlaCache's counters and gauges, `name{tier}{state}` -> value."""
    values = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:ula_") and hasattr(metric, "value"):
            labels = [metric.labels[k] for k in ("tier", "state") if k in metric.labels]
            values[".".join([metric.name.removeprefix("vllm:ula_"), *labels])] = metric.value
    return values


def scheduler(llm: Any) -> Any:
    """vLLM's scheduler of the engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def block_pool(llm: Any) -> Any:
    """Its block pool."""
    return scheduler(llm).kv_cache_manager.block_pool


def num_free_blocks(llm: Any) -> int:
    """Free logical blocks of the scheduler in this process."""
    return block_pool(llm).get_num_free_blocks()
