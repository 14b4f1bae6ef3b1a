"""Engines in a process of their own, with rows of each type: an arm of `test_v2_runner.py`.

    python -m v2_runner.runner_arm v1|v2 MODEL RESULT.json

`v2` runs vLLM's V2 model runner and its Triton kernels in Triton's interpreter, which must be
arranged before Triton and vLLM are imported. `v1` runs what a CPU runs otherwise, and a control.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from engine import harness
from engine.harness import Completion, Request, engine, metrics, prefix_hits, run

ROWS = ("auto", "fp8_ds_mla")
# topk 64: a decode token selects most of what the device holds, so the third does not fit.
POOLS = {"device_slots": 144, "host_gib": 0.05}
SIZES = {"max_num_seqs": 4, "max_model_len": 256, "max_num_batched_tokens": 64}
FIRST, SECOND, THIRD = harness.prompts((150, 96, 130))
REQUESTS = [
    Request(FIRST, 6),
    Request(SECOND, 6, arrives=1),
    Request(THIRD, 6, arrives=2),
    Request(FIRST[:128] + SECOND[:10], 4, arrives=9),  # 8 blocks of the first are cached
]


def use_v2_runner() -> None:
    """Have vLLM believe that this CPU has a Triton backend; its kernels are interpreted."""
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))


def pad_as_graphs_do() -> None:
    """Pad batches, which vLLM does on GPUs only.

    Batches of decode tokens get further requests and tokens and metadata for them, as in a full
    graph; others get further tokens that the metadata does not know, as in a piecewise one.
    """
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    dispatch, prepare = model_runner.dispatch_cg_and_sync_dp, DefaultModelState.prepare_attn

    def padded(manager: Any, requests: int, tokens: int, uniform: Any, *rest: Any, **more: Any):
        batch, state = dispatch(manager, requests, tokens, uniform, *rest, **more)
        if uniform == 1:
            return dataclasses.replace(batch, num_tokens=4, num_reqs=4), state
        return dataclasses.replace(batch, num_tokens=-(-tokens // 8) * 8), state

    def prepare_attn(self: Any, batch: Any, mode: Any, *rest: Any, **more: Any) -> Any:
        if batch.num_reqs_after_padding > batch.num_reqs:
            mode = CUDAGraphMode.FULL
        return prepare(self, batch, mode, *rest, **more)

    model_runner.dispatch_cg_and_sync_dp = padded
    DefaultModelState.prepare_attn = prepare_attn


def nothing_moves() -> Any:
    """The fault of the control: maps change, bytes stay."""
    from vllm_ula import step

    return mock.patch.object(step, "transfer")


def results(completions: list[Completion]) -> list[dict[str, Any]]:
    """What is compared of each request."""
    return [{"tokens": c.tokens, "logprobs": c.logprobs} for c in completions]


def arm(model: str, control: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the workload with rows of each type."""
    from vllm_ula.kernels import dispatch

    for rows in ROWS:
        with engine(model, POOLS, kv_cache_dtype=rows, **SIZES) as llm:
            dispatch.calls.clear()
            found: dict[str, Any] = {"requests": results(run(llm, REQUESTS))}
            # What a data-parallel rank without work runs, and warming up: nobody is served.
            llm.llm_engine.engine_core.engine_core.execute_dummy_batch()
            found["calls"] = [[name, kernels.value] for name, kernels in dispatch.calls]
            found |= {"metrics": metrics(llm), "prefix_hits": prefix_hits(llm)}
            if control:
                assert llm.reset_prefix_cache()
                with nothing_moves():
                    found["control"] = results(run(llm, REQUESTS))
        yield rows, found


def main(runner: str, model: str, result: str) -> None:
    """Run one arm and write what it found."""
    os.environ |= harness.ENVIRONMENT
    if runner == "v2":
        use_v2_runner()
        pad_as_graphs_do()
    harness.no_compiler()
    Path(result).write_text(json.dumps(dict(arm(model, control=runner == "v1"))))


if __name__ == "__main__":
    main(*sys.argv[1:])
